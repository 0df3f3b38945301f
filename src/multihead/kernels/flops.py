"""Operations of the native kernel as torch.utils.flop_counter counts them: two for a multiply-add, and only of pairs of
a query and a key that may see each other.

A backward pass has five products for the forward's two, as the scores are made once more (Dao et al.,
"FlashAttention", 2022). Arguments are those of the schemas (csrc/op.cpp).
"""
# ruff: noqa: ARG001  (each formula is told all of the operation's arguments)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from multihead.kernels import library
from multihead.kernels.native_shapes import GRAD_KV, GRAD_Q, STATISTICS


def forward_flops(pairs: int, D: int, V: int) -> int:
    """Of the products with k and with v, for so many pairs over all heads; q and k are D wide, v is V wide."""
    return 2 * pairs * (D + V)


def backward_flops(pairs: int, D: int, V: int, wants_q: bool = True, wants_kv: bool = True) -> int:
    """Of the scores, of their gradient, and of the gradients that are wanted."""
    return 2 * pairs * (D + V + D * wants_q + (D + V) * wants_kv)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: object = None, stored: int = -1, **named: Any
) -> int:
    # Arguments after v, by their place: the bias, ten of the scores, wants_state, stored.
    stored = rest[12] if len(rest) > 12 else stored
    return forward_flops(_pairs(q, k, stored, *rest[:11], **named), q.shape[-1], v.shape[-1])


def _backward(
    grad_out: Tensor, grad_lse: object, out: object, rest: object, state: object, q: Tensor, k: Tensor, v: Tensor,
    *others: Any, out_val: object = None, wanted: int = GRAD_Q | GRAD_KV, **named: Any,
) -> int:  # fmt: skip
    wanted = others[11] if len(others) > 11 else wanted
    wants = bool(wanted & GRAD_Q), bool(wanted & GRAD_KV)
    return backward_flops(_pairs(q, k, -1, *others[:11], **named), q.shape[-1], v.shape[-1], *wants)


def _scores_alone(
    state: object, q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: object = None, **named: Any
) -> int:
    return 2 * _pairs(q, k, -1, *rest[:11], **named) * q.shape[-1]


def _pairs(
    q: Tensor, k: Tensor, stored: int, bias: Tensor | None = None, slopes: object = None,
    q_positions: Tensor | None = None, k_positions: Tensor | None = None, mask: list[int] | None = None,
    tables: list[Tensor] | None = None, *rest: object, lowest: float | None = None, **named: object,
) -> int:  # fmt: skip
    """That see each other, over all heads: told by the kernel itself, from queries and keys that hold nothing."""
    (B, H, L, _), K = q.shape, k.shape[1]
    S = k.shape[2] if stored < 0 else stored
    lowest = rest[-1] if len(rest) == 5 and isinstance(rest[-1], float) else lowest
    held = [t for t in (q, bias, q_positions, k_positions, *(tables or ())) if t is not None]
    if (not mask and bias is None) or any(isinstance(t, FakeTensor) or t.device.type != "cpu" for t in held):
        return B * H * L * S
    nothing = torch.zeros(B, H, L, 1), torch.zeros(B, K, S, 1)
    seen = torch.ops.multihead.statistics.default(
        torch.zeros(2, B, H, L), *nothing, nothing[1], bias, None, q_positions, k_positions, mask or [], tables,
        lowest=lowest, wanted=STATISTICS["visible_keys"],
    )[1]  # fmt: skip
    return int(seen.sum(dtype=torch.float64))


if library.available():
    register_flop_formula(torch.ops.multihead.forward, get_raw=True)(_forward)
    register_flop_formula(torch.ops.multihead.backward, get_raw=True)(_backward)
    register_flop_formula([torch.ops.multihead.weights, torch.ops.multihead.statistics], get_raw=True)(_scores_alone)
