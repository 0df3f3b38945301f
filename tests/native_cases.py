"""Cases for the native kernel where `cases.draw` does not go, and a budget for them that costs one reference pass.

The kernel takes 192 keys, 64 rows and a vector of D or V at a time, does a few rows in another way, and shares out long
rows of keys in parts. So here are sizes around those, and every layout in memory that a tensor may have, with NaN in
the gaps.

The budget of cases.py compares with what the reference itself loses, which takes ten more passes. Thousands of cases
are held to a bound from the numbers of the case instead (`check`), some of them to both.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cases
import multihead as mh
from cases import Case
from multihead import reference
from multihead.kernels.philox import dropout_mask as philox_mask

f64 = torch.float64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("plain", "tokens first", "rows of tokens", "packed", "strided", "width first", "offset", "apart")
KINDS = ("blocks", "decoding", "few rows", "widths", "small", "product")
LIMIT = 5.0  # roundings that may add up: more than twice the most that was found in thousands of cases


class Drawn(NamedTuple):
    """A case, float64 and contiguous, of numbers that every dtype holds exactly, and how it is to lie in memory."""

    case: Case
    above: tuple[Tensor, Tensor]  # the gradients by out and by lse
    layouts: dict[str, str]
    bias_dtype: torch.dtype

    def to(self, dtype: torch.dtype) -> tuple[Case, list[Tensor]]:
        """The same case and gradients in a dtype, in its layouts."""
        given = {"q": self.case.q, "k": self.case.k, "v": self.case.v, "above": self.above[0]}
        laid = {name: lay_out(tensor, self.layouts[name], dtype) for name, tensor in given.items()}
        leaves = [laid[name].requires_grad_() for name in ("q", "k", "v")]
        options = dict(self.case.options)
        if isinstance(options.get("sinks"), Tensor):
            options["sinks"] = options["sinks"].detach().float().requires_grad_()
        if isinstance(options.get("bias"), Tensor):
            bias = lay_out(options["bias"], self.layouts["bias"], self.bias_dtype)
            options["bias"] = bias.requires_grad_("bias" in self.case.grads)
        told = f"{dtype} {self.case.told} {self.layouts} bias {self.bias_dtype}"
        narrow = Case(self.case.number, *leaves, self.case.mask, options, told, self.case.grads)
        return narrow, [laid["above"], self.above[1].float()]


def on_grid(tensor: Tensor) -> Tensor:
    """Rounded to steps of 1/64 up to 4, which takes 8 bits: as many as a bfloat16 has, and fewer than a float16."""
    return (tensor.detach() * 64).round().clamp(-256, 256) / 64


def lay_out(values: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    """A new tensor of these values, in a dtype and a layout; what lies between them is NaN. The values of an axis along
    which they are one (stride 0) stay one."""
    shape, values = values.shape, values.detach()
    for axis, step in enumerate(values.stride()):
        if step == 0 and shape[axis] > 1:
            values = values.narrow(axis, 0, 1)
    made = _laid(values.to(dtype).contiguous(), layout) if values.ndim >= 3 or layout in ("plain", "offset") else None
    return (values.to(dtype) if made is None else made).expand(shape)


def _laid(values: Tensor, layout: str) -> Tensor:
    *batch, H, N, W = values.shape if values.ndim >= 3 else (1, *values.shape)
    if layout == "tokens first":  # (*batch, N, H, W), as a projection leaves it
        return values.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "rows of tokens":  # (N, *batch, H, W)
        return values.movedim(-2, 0).contiguous().movedim(0, -2)
    if layout == "width first":  # (*batch, H, W, N)
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "packed":  # one of three in a product with q, k and v
        place = values.new_full((*batch, N, 3, H, W), math.nan)[..., 1, :, :].transpose(-2, -3)
    elif layout == "strided":
        place = values.new_full((*batch, H, N, 2 * W + 1), math.nan)[..., 1::2]
    elif layout == "apart":  # rows further apart than they are wide
        place = values.new_full((*batch, H, N + 2, W + 3), math.nan)[..., 1:-1, 2:-1]
    elif layout == "offset":
        place = values.new_full((values.numel() + 5,), math.nan)[5:].view(values.shape)
    else:
        return values.clone(memory_format=torch.contiguous_format)
    return place.copy_(values)


def draw(number: int, kind: str | None = None) -> Drawn:
    """Case `number`, the same on every run."""
    rng = random.Random(number)
    kind = kind or KINDS[number % len(KINDS)]
    if kind == "product":
        case = cases.draw(number)
        _round(case)
    else:
        case = _drawn(rng, number, kind)
    shape = (*case.q.shape[:-1], case.v.shape[-1])
    generator = torch.Generator().manual_seed(number)
    above = on_grid(torch.randn(shape, generator=generator, dtype=f64))
    if rng.random() < 0.2:  # as sum() and mean() give it
        above = above[(slice(0, 1),) * above.ndim].expand(shape) if above.numel() else above
    above_lse = on_grid(torch.randn(shape[:-1], generator=generator, dtype=f64))
    layouts = {name: rng.choice(LAYOUTS) for name in ("q", "k", "v", "bias", "above")}
    bias_dtype = rng.choice((torch.float32, torch.float32, f64, *DTYPES))
    return Drawn(case, (above, above_lse), layouts, bias_dtype)


def _round(case: Case) -> None:
    if "v" not in case.grads:  # it is k, whose gradient would be the sum of two that are rounded
        case.grads.insert(2, "v")
    with torch.no_grad():
        case.q, case.k, case.v = (on_grid(t).contiguous().requires_grad_() for t in (case.q, case.k, case.v))
        for name in ("bias", "sinks"):
            if isinstance(case.options.get(name), Tensor):
                held = case.options[name]
                rounded = torch.where(held.isinf(), held.detach(), on_grid(held))
                case.options[name] = rounded.requires_grad_(name in case.grads)


def _sizes(rng: random.Random, kind: str) -> tuple[int, int, int, int, int, int, int]:
    """B, H, K, L, S, D, V."""
    B, K = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
    D = rng.choice((1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32))
    V = rng.choice((D, 1, 3, 8, 13, 16, 33))
    if kind == "blocks":
        G, L = rng.choice((1, 1, 2, 3)), rng.choice((9, 63, 64, 65, 100, 129, 150))
        S = rng.choice((191, 192, 193, 200, 383, 384, 385, 400, 577, rng.randint(190, 600)))
        return 1, G * rng.choice((1, K)), K if G * K == G else 1, L, S, D, V
    if kind == "decoding":  # 8 rows at most
        G = rng.choice((1, 1, 2, 3, 4, 5, 8))
        L = rng.randint(1, 8 // G)
        S = rng.choice((1, 7, 193, 767, 768, 1535, 1536, 1537, 1544, 2000, rng.randint(1, 2000)))
        B = B if S < 700 else 1
        return B, G * K, K, L, S, rng.choice((D, 64)), rng.choice((V, 64))
    if kind == "few rows":  # more than 8, up to where keys are shared out
        G = rng.choice((1, 1, 3, 9))
        L = rng.choice((64 // G, 64 // G + 1, rng.randint(-(-9 // G), 64 // G)))
        return 1, G * K, K, L, rng.choice((1535, 1536, 1600, 1729, 2000)), rng.choice((2, 5, 8)), rng.choice((3, 8, 9))
    if kind == "widths":
        D, V = rng.randint(1, 300), rng.randint(1, 300)
        return B, 2 * K, K, rng.choice((1, 5, 17)), rng.randint(1, 40), D, rng.choice((D, V))
    G = rng.choice((1, 1, 2, 3, 5))
    return rng.choice((1, 2, 5)), G * K, K, rng.randint(1, 24), rng.randint(1, 24), D, V


def _drawn(rng: random.Random, number: int, kind: str) -> Case:
    torch.manual_seed(number)
    B, H, K, L, S, D, V = _sizes(rng, kind)
    shapes = {"q": (B, H, L, D), "k": (B, K, S, D), "v": (B, K, S, V)}
    made = {name: _values(rng, shape) for name, shape in shapes.items()}
    options: dict[str, Any] = {}
    grads = ["q", "k", "v"]
    if rng.random() < 0.3:
        options["scale"] = rng.choice((0.25, 1.0, -0.5))
    if rng.random() < 0.2:
        options["softcap"] = rng.choice((0.7, 3.0, 30.0))
    if rng.random() < 0.1:
        options["sinks"] = torch.randn(H, dtype=f64, requires_grad=True)
        grads.append("sinks")
    if rng.random() < 0.4:
        options["bias"] = cases._bias(rng, (B,), H, L, S)
        if isinstance(options["bias"], Tensor) and rng.random() < 0.7:
            grads.append("bias")
    if rng.random() < 0.3:
        options["q_positions"], options["k_positions"] = cases._positions(rng, (B,), L, S)
        if options["k_positions"] is not None and options["q_positions"] is not None and rng.random() < 0.3:
            options["q_positions"] = options["q_positions"].to(rng.choice((torch.float32, f64, torch.int32)))
    mask = cases._mask(rng, (B,), H, L, S, 3) if rng.random() < 0.8 else None
    told = f"case {number} ({kind}): {B=} {H=} {K=} {L=} {S=} {D=} {V=} mask={mask!r} {sorted(options)} {grads=}"
    case = Case(number, *made.values(), mask, options, told, grads)
    _round(case)
    for name in ("q", "k", "v"):  # after rounding, which makes tensors contiguous
        axis = rng.randrange(3)
        if rng.random() < 0.1:
            tensor = getattr(case, name).detach()
            setattr(case, name, tensor.narrow(axis, 0, 1).expand(tensor.shape).requires_grad_())
    return case


def _values(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=f64) * rng.choice((1.0, 1.0, 0.5))


class Exact(NamedTuple):
    """What the reference gives in float64, and what the numbers on the way allow for rounding to float."""

    found: list[Tensor]
    narrow: list[float]  # of each tensor of `found`: an error of one float's rounding on the way
    delta: list[float]  # the same of an error of rowsum(dO out) that is 1 of |dO| |v|


def exact(drawn: Drawn, dropout_mask: Tensor | None = None) -> Exact:
    """The case by the reference. What is allowed follows the backward pass as csrc/backward.h says it."""
    case = drawn.case
    by = reference.attention(case.q, case.k, case.v, case.mask, dropout_mask=dropout_mask, **case.options)
    grads = torch.autograd.grad([by.out, by.lse], case.inputs(), drawn.above)
    H, K = case.q.shape[-3], case.k.shape[-3]
    scale = abs(case.options.get("scale", case.q.shape[-1] ** -0.5))
    kept = 1.0 if dropout_mask is None else _most(dropout_mask)
    weights = by.weights.detach()
    added = case.options.get("bias")
    # ALiBi adds no more to keys that count than lse tells.
    most_added = 0.0 if added is None else 50.0 + _most(by.lse.detach().masked_fill(by.lse == -math.inf, 0.0))
    if isinstance(added, Tensor):
        most_added = _most(added.detach().masked_fill(added.isinf(), 0.0))
    # A float's rounding in each score, each weight and each sum.
    one = 1.0 + math.sqrt(case.k.shape[-2]) / 8 + scale * _longest(case.q) * _longest(case.k) + most_added
    one *= torch.finfo(torch.float32).eps / 2
    through = 2 * kept * _longest(drawn.above[0]) * _longest(case.v) + _most(drawn.above[1])  # dO V^T - delta
    columns = _most(weights.sum(-2).unflatten(-2, (K, H // K)).sum(-2))  # of a key's weights over all that see it
    rows = {
        "q": scale * _most(case.k),
        "k": scale * _most(case.q) * columns,
        "v": kept * _most(drawn.above[0]) * columns,
        "sinks": float(weights[..., 0, :, 0].numel()),
    }
    if isinstance(added, Tensor):
        rows["bias"] = _most(weights.sum_to_size(added.shape))
    narrow, delta = [one * kept * _most(case.v), one], [0.0, 0.0]
    for name in case.grads:
        narrow.append(one * rows[name] * (1.0 if name == "v" else through))
        delta.append(0.0 if name == "v" else rows[name] * through)
    return Exact([by.out.detach(), by.lse.detach(), *grads], narrow, delta)


def _most(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _longest(tensor: Tensor) -> float:
    return float(tensor.detach().norm(dim=-1).max()) if tensor.numel() else 0.0


def given(
    mask: Any = None,
    B: int = 2,
    H: int = 6,
    K: int = 3,
    L: int = 5,
    S: int = 11,
    D: int = 7,
    V: int = 7,
    **options: Any,
) -> Drawn:
    """A case of these sizes, mask and options. A bias and sinks get a gradient if they require one."""
    torch.manual_seed(B * H + L * S)
    q, k, v = (torch.randn(shape, dtype=f64) for shape in ((B, H, L, D), (B, K, S, D), (B, K, S, V)))
    grads = ["q", "k", "v"]
    for name in ("sinks", "bias"):
        held = options.get(name)
        if isinstance(held, Tensor):
            options[name] = held.detach().double().requires_grad_(held.requires_grad)
            grads += [name] * held.requires_grad
    case = Case(0, q, k, v, mask, options, f"{B=} {H=} {K=} {L=} {S=} {D=} {V=} {mask=} {options}", grads)
    _round(case)
    above = on_grid(torch.randn(B, H, L, V, dtype=f64)), on_grid(torch.randn(B, H, L, dtype=f64))
    return Drawn(case, above, dict.fromkeys(("q", "k", "v", "bias", "above"), "plain"), torch.float32)


def hold(drawn: Drawn, dtypes: Iterable[torch.dtype] = DTYPES, dropout: float = 0.0) -> None:
    """Hold one case to the bound, forward and backward."""
    kept = None
    if dropout:
        *batch, H, L, _ = drawn.case.q.shape
        S = drawn.case.k.shape[-2]
        kept = philox_mask(drawn_seed(7), dropout, math.prod(batch), H, L, S, dtype=f64).reshape(*batch, H, L, S)
    want = exact(drawn, kept)
    for dtype in dtypes:
        torch.manual_seed(7)
        case, found = by_native(drawn, dtype, dropout=dropout)
        assert found[0].dtype == dtype, case.told
        assert found[1].dtype == torch.float32, case.told
        share = worst(found, want, case.told, cases.names(case))
        assert share <= 1.0, f"{case.told}: an error of {share:.3g} of what is allowed"


def weights(q: Tensor, k: Tensor, mask: Any = None, seed: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """The weights (B, H, L, S) of the forward pass, which are its output for one-hot values, and those of the backward
    pass, which are the gradient of the values for one-hot gradients: exactly as the kernel has them."""
    (B, H, L, _), (K, S) = q.shape, k.shape[1:3]
    one = torch.eye(S, dtype=q.dtype).expand(B, K, S, S)
    torch.manual_seed(seed)
    forward = mh.attention(q, k, one, mask, kernel="native", **options)
    v = torch.zeros(B, K, S, H // K * L, dtype=q.dtype, requires_grad=True)
    torch.manual_seed(seed)
    out = mh.attention(q, k, v, mask, kernel="native", **options)
    above = torch.eye(H // K * L, dtype=q.dtype).view(1, 1, H // K, L, -1).expand(B, K, H // K, L, -1)
    (backward,) = torch.autograd.grad(out, v, above.reshape(out.shape))
    return forward.detach(), backward.transpose(-1, -2).reshape(B, H, L, S)


def by_native(drawn: Drawn, dtype: torch.dtype, **more: Any) -> tuple[Case, list[Tensor]]:
    """The case in a dtype, and out, lse and gradients by the kernel."""
    case, above = drawn.to(dtype)
    answer = mh.attention(case.q, case.k, case.v, case.mask, **case.options, kernel="native", return_lse=True, **more)
    return case, [*answer, *torch.autograd.grad(answer, case.inputs(), above)]


def worst(found: list[Tensor], want: Exact, told: str, names: list[str]) -> float:
    """The largest error, as a share of what is allowed: `LIMIT` roundings of a float on the way, and for each number
    one rounding to the dtype of its tensor. Of a narrow dtype the backward pass knows out to twice its digits."""
    share = 0.0
    for have, exact_, one, delta, label in zip(found, want.found, want.narrow, want.delta, names, strict=True):
        assert have.shape == exact_.shape, f"{told}: {label} has shape {tuple(have.shape)}"
        finite = exact_.isfinite()
        assert torch.equal(have.isfinite(), finite), f"{told}: {label} is finite in other places"
        assert torch.equal(have[~finite].double(), exact_[~finite]), f"{told}: {label} has other infinities"
        own, out = torch.finfo(have.dtype), torch.finfo(found[0].dtype)
        rounding = own.eps / 2 * exact_.abs() + own.smallest_normal * own.eps
        delta_error = delta * (out.eps / 2) ** 2 if out.bits < 32 else 0.0
        error = (have.detach().double() - exact_).abs()
        over = torch.where(finite, (error - rounding).clamp(min=0.0), 0.0)
        share = max(share, _most(over) / (LIMIT * one + 2 * delta_error + 1e-30))
    return share


def check(numbers: Iterable[int], kind: str | None = None) -> None:
    for number in numbers:
        hold(draw(number, kind))


def drawn_seed(seed: int) -> Tensor:
    """What the kernel asks torch's generator for, once, after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    return torch.randint(2**62, ())


DROPPED = {  # blocks of rows and keys, groups, few rows, keys in parts, a length that is no multiple of four
    "small": (2, 4, 2, 5, 11),
    "blocks": (1, 2, 1, 70, 389),
    "many heads": (3, 6, 2, 33, 31),
    "one query": (2, 4, 2, 1, 1601),
    "parts of strips": (1, 3, 1, 9, 1537),
}


def check_dropout() -> None:
    """Forward and backward drop exactly the weights that kernels/philox.py says, on whatever runs this."""
    for number, (B, H, K, L, S) in enumerate(DROPPED.values()):
        torch.manual_seed(number)
        q, k = torch.randn(B, H, L, 4), torch.randn(B, K, S, 4)
        for p in (0.1, 0.5, 0.93):
            mask = philox_mask(drawn_seed(number), p, B, H, L, S)
            whole = weights(q, k)[0]
            for found in weights(q, k, seed=number, dropout=p):
                assert torch.equal(found != 0, mask != 0)
                torch.testing.assert_close(found, whole * mask, rtol=3e-6, atol=0)


def run_with(isa: str, code: str) -> None:
    """Run code that ends by printing `library.isa()`, which is chosen once for a process, in one of its own."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "MULTIHEAD_ISA": isa, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.stdout.strip() == isa, run.stderr[-3000:]
