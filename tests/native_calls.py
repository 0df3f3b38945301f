"""What the tests of the native kernel inside of PyTorch share: calls with a gradient, and a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
B, H, K, L, S, D, V = 2, 4, 2, 5, 11, 8, 6
compiled_function = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
forward_mode = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def leaves(*more: str, dtype: torch.dtype = f32, length: int = L, keys: int = S, seed: int = 1) -> dict[str, Tensor]:
    """q, k, v and, of bias and sinks, what is named, all with a gradient."""
    torch.manual_seed(seed)
    shapes = {
        "q": (B, H, length, D),
        "k": (B, K, keys, D),
        "v": (B, K, keys, V),
        "bias": (H, length, keys),
        "sinks": (H,),
    }
    made = {name: torch.randn(shapes[name]) for name in ("q", "k", "v", *more)}
    return {name: t.to(dtype).requires_grad_() for name, t in made.items()}


def native(tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    return mh.attention(**tensors, **options, kernel="native", return_lse=True)


def loss(out: Tensor, lse: Tensor) -> Tensor:
    """A number that depends on both in a curved way, and not on lse where there is none."""
    return out.float().sin().square().sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * 0.3).cos().sum()


def close(found: Any, exact: Any, off: float = 2e-5) -> None:
    for number, (have, want) in enumerate(zip(found, exact, strict=True)):
        size = max(1.0, float(want.detach().abs().max()))
        error = float((have.detach().double() - want.detach().double()).abs().max())
        assert error <= off * size, f"number {number} is off by {error:.3g} of {size:.3g}"


OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "causal": ((), {"mask": mh.causal()}),
    "blind rows": ((), {"mask": mh.dense((torch.arange(L)[:, None] != 2) & (torch.arange(S) % 3 > 0))}),
    "learned bias": (("bias",), {"mask": mh.window(left=3)}),
    "fixed bias": ((), {"bias": torch.arange(S).float().expand(L, S) / 9}),
    "alibi": ((), {"bias": mh.ALiBi(H), "mask": mh.causal()}),
    "alibi, positions": ((), {"bias": mh.ALiBi(H), "q_positions": torch.arange(L) * 2, "k_positions": torch.arange(S)}),
    "softcap": ((), {"softcap": 1.5, "scale": -0.7}),
    "sinks": (("sinks",), {"mask": mh.lengths([9, 0])}),
    "documents": ((), {"mask": mh.causal() | ~mh.documents(torch.arange(S) // 4)}),
    "prefix, positions": ((), {"mask": mh.causal() | mh.prefix(2), "q_positions": torch.tensor([3, 1, 9, 0, 5])}),
    "bias of float64": ((), {"bias": torch.arange(S).double().expand(L, S) / 9}),
}
