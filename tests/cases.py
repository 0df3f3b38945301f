"""Cases drawn from the product of all that attention can be asked for, and the error budget they are held to.

Sizes are different primes, so that no axis can be taken for another by accident.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import reference
from multihead.kernels import library

# A kernel among the parameters of a test.
NATIVE = pytest.param(
    "native",
    marks=pytest.mark.skipif(not library.available(), reason=f"there is no native library: {library.why_not()}"),
)
HEADS = ((3, 3), (2, 1), (5, 1), (6, 3), (4, 2), (1, 1))
BATCHES = ((), (1,), (2,), (3,), (2, 3), (1, 2, 1))
# L, S: square, shorter, longer; on both sides of the 64 queries and 16 keys that the blocks kernel takes at a time
LENGTHS = ((7, 7), (1, 11), (5, 13), (13, 5), (1, 1), (67, 67), (71, 131), (3, 139), (131, 37), (129, 129))


@dataclass
class Case:
    number: int
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    options: dict[str, Any]
    told: str
    grads: list[str] = field(default_factory=list)

    def inputs(self) -> list[Tensor]:
        """The tensors that get a gradient."""
        named = {"q": self.q, "k": self.k, "v": self.v, **self.options}
        return [named[name] for name in self.grads]

    def to(self, dtype: torch.dtype) -> Case:
        """The same numbers, in another dtype (rounded, where it is a narrower one)."""
        options = dict(self.options)
        for name in ("bias", "sinks"):
            if isinstance(options.get(name), Tensor):
                options[name] = _leaf(options[name], dtype, name in self.grads)
        q, k, v = (_leaf(t, dtype, True) for t in (self.q, self.k, self.v))
        return Case(self.number, q, k, v, self.mask, options, self.told, self.grads)


def _leaf(tensor: Tensor, dtype: torch.dtype, needs_grad: bool) -> Tensor:
    return tensor.detach().to(dtype).requires_grad_(needs_grad)


def draw(number: int) -> Case:
    """Case `number`, float64, the same on every run."""
    rng = random.Random(number)
    torch.manual_seed(number)
    batch, (H, K), (L, S) = rng.choice(BATCHES), rng.choice(HEADS), rng.choice(LENGTHS)
    D = rng.choice((2, 5, 17))
    V = rng.choice((D, D, 3, 19))
    q = _tensor(rng, (*batch, H, L, D))
    k = _tensor(rng, (*batch, K, S, D))
    v = k if V == D and rng.random() < 0.1 else _tensor(rng, (*batch, K, S, V))
    options: dict[str, Any] = {}
    grads = ["q", "k", "v"] if v is not k else ["q", "k"]
    if rng.random() < 0.3:
        options["scale"] = rng.choice((0.25, 1.0, -0.5))
    if rng.random() < 0.25:
        options["softcap"] = rng.choice((0.7, 3.0))
    if rng.random() < 0.3:
        options["sinks"] = torch.randn(H, dtype=torch.float64, requires_grad=True)
        grads.append("sinks")
    if rng.random() < 0.35:
        options["bias"] = _bias(rng, batch, H, L, S)
        if isinstance(options["bias"], Tensor) and rng.random() < 0.5:
            options["bias"].requires_grad_()
            grads.append("bias")
    if rng.random() < 0.3:
        options["q_positions"], options["k_positions"] = _positions(rng, batch, L, S)
    mask = _mask(rng, batch, H, L, S) if rng.random() < 0.85 else None
    sizes = f"batch={batch} H={H} K={K} L={L} S={S} D={D} V={V}"
    told = f"case {number}: {sizes} mask={mask!r} {sorted(options)} grads={grads}"
    return Case(number, q, k, v, mask, options, told, grads)


def _tensor(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    """Random numbers, in one of the layouts in which attention is called."""
    layout = rng.choice(("plain", "tokens first", "strided"))
    if layout == "tokens first":  # (*batch, L, H, D), as a projection leaves it
        made = torch.randn(*shape[:-3], shape[-2], shape[-3], shape[-1], dtype=torch.float64).transpose(-2, -3)
    elif layout == "strided":
        made = torch.randn(*shape[:-1], 2 * shape[-1] + 1, dtype=torch.float64)[..., 1::2]
    else:
        made = torch.randn(shape, dtype=torch.float64)
    return made.detach().requires_grad_()


def _bias(rng: random.Random, batch: tuple[int, ...], H: int, L: int, S: int) -> Any:
    if rng.random() < 0.25:
        return mh.ALiBi(H)
    shape = rng.choice(((L, S), (H, 1, S), (H, L, 1), (*batch, H, L, S), (*(1 for _ in batch), H, L, S), (1, 1)))
    bias = torch.randn(shape, dtype=torch.float64)
    if rng.random() < 0.2:
        bias = torch.where(torch.rand(shape) < 0.2, -torch.inf, bias)
    return bias


def _positions(rng: random.Random, batch: tuple[int, ...], L: int, S: int) -> tuple[Tensor | None, Tensor | None]:
    kind = rng.choice(("shifted", "left padding", "shuffled", "only queries", "only keys"))
    if kind == "shifted":
        return torch.arange(L) + 1000 - L, torch.arange(S) + 1000 - S
    if kind == "left padding":
        start = torch.randint(0, S + 1, (*batch, 1))
        return (torch.arange(S - L, S) - start), (torch.arange(S) - start)
    if kind == "shuffled":
        return torch.randint(0, S, (*batch, L)), torch.stack(
            [torch.randperm(S) for _ in range(max(1, torch.Size(batch).numel()))]
        ).reshape(*batch, S)
    if kind == "only queries" or L > S:
        return torch.randint(0, S, (L,)), None
    return None, torch.arange(S) * 2


def _mask(rng: random.Random, batch: tuple[int, ...], H: int, L: int, S: int, depth: int = 2) -> Any:
    if depth and rng.random() < 0.45:
        kind = rng.choice("&&||~")
        a = _mask(rng, batch, H, L, S, depth - 1)
        if kind == "~":
            return ~a
        b = _mask(rng, batch, H, L, S, depth - 1)
        return a & b if kind == "&" else a | b
    kind = rng.choice(("causal", "causal", "window", "lengths", "padding", "documents", "prefix", "dense"))
    rows = rng.choice(((), batch))
    if kind == "window":
        return mh.window(rng.choice((None, 0, 2, 40)), rng.choice((None, 0, 3, 50)))
    if kind == "lengths":
        return mh.lengths(torch.randint(0, S + 1, rows))
    if kind == "padding":
        return mh.padding(torch.rand(*rows, S) < 0.7)
    if kind == "prefix":
        return mh.prefix(torch.randint(0, S + 1, rows))
    if kind == "documents":
        ids = torch.sort(torch.randint(0, 4, (*rows, S)))[0]
        return mh.documents(ids, q_ids=torch.randint(0, 4, (*rows, L)) if L > S or rng.random() < 0.2 else None)
    if kind == "dense":
        shape = rng.choice(((L, S), (1, S), (H, L, S), (*batch, 1, L, S), (*batch, H, L, S)))
        return mh.dense(torch.rand(shape) < rng.choice((0.2, 0.8)))
    return mh.causal()


def by_reference(case: Case, upstream: int = 0) -> list[Tensor]:
    """out, lse and the gradients of a case, by the definition. `upstream` seeds the gradients of out and lse."""
    found = reference.attention(case.q, case.k, case.v, case.mask, **case.options)
    return _with_gradients(case, found.out, found.lse, upstream)


def by_kernel(case: Case, kernel: str | None) -> list[Tensor]:
    """The same by `attention`."""
    answer = mh.attention(case.q, case.k, case.v, case.mask, **case.options, kernel=kernel, return_lse=True)
    return _with_gradients(case, *answer, 0)


def _with_gradients(case: Case, out: Tensor, lse: Tensor, upstream: int) -> list[Tensor]:
    up = [_upstream(t.shape, upstream).to(t.dtype) for t in (out, lse)]
    return [out, lse, *torch.autograd.grad([out, lse], case.inputs(), up)]


def _upstream(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Own(NamedTuple):
    """What the reference itself does to a case in its dtype."""

    error: float  # relative to the largest number of a tensor (or 1)
    met: float  # the largest number on the way: the products of dO V^T


def own_error(narrow: Case, wide: Case) -> Own:
    """The largest error over the tensors of the case and five gradients from above. Of one small tensor and one
    gradient it would be a matter of luck."""
    pairs = [(by_reference(narrow, up), by_reference(wide, up)) for up in range(5)]
    error = max(_error(have, want)[0] for found, exact in pairs for have, want in zip(found, exact, strict=True))
    d_out = max(float(_upstream(pairs[0][1][0].shape, up).norm(dim=-1).max()) for up in range(5))
    return Own(error, max(1.0, d_out * float(wide.v.detach().norm(dim=-1).max())))


def dtype_of(kernel: str | None) -> torch.dtype:
    """The widest dtype that a kernel takes."""
    return torch.float32 if kernel == "native" else torch.float64


def roundings(dtype: torch.dtype) -> Own | None:
    """In place of the error that the reference makes in a dtype, for cases of few and small numbers: some roundings."""
    return None if dtype == torch.float64 else Own(8 * torch.finfo(dtype).eps, 1.0)


def names(case: Case) -> list[str]:
    return ["out", "lse", *(f"grad of {name}" for name in case.grads)]


def assert_within_budget(
    found: list[Tensor], exact: list[Tensor], own: Own | None, told: str, labels: list[str]
) -> None:
    """The error budget: 1e-12 in float64 (`own` None), else twice the error that the reference itself makes in that
    dtype plus one rounding; all relative to the largest number of a tensor (or 1). In float32, where kernels keep their
    intermediate results too, the rounding is that of the largest number on the way: weights * (dO V^T - delta) may be
    small because large numbers cancel, and the reference has other large numbers to cancel."""
    for have, want, label in zip(found, exact, labels, strict=True):
        assert have.shape == want.shape, f"{told}: {label} has shape {tuple(have.shape)}, wanted {tuple(want.shape)}"
        finite = want.isfinite()
        assert torch.equal(have.isfinite(), finite), f"{told}: {label} is finite in other places"
        assert torch.equal(have[~finite].double(), want[~finite].double()), f"{told}: {label} has other infinities"
        error, size = _error(have, want)
        rounding = torch.finfo(have.dtype).eps * (
            own.met / size if own is not None and have.dtype == torch.float32 else 1.0
        )
        budget = 1e-12 if own is None else 2 * own.error + rounding
        assert error <= budget, f"{told}: {label} is off by {error:.3g} of {size:.3g}, allowed are {budget:.3g}"


def _error(have: Tensor, want: Tensor) -> tuple[float, float]:
    """Largest error where finite, relative to the largest number or 1, and that number."""
    finite = want.isfinite()
    have_64, want_64 = have.detach().double()[finite], want.detach().double()[finite]
    if not want_64.numel():
        return 0.0, 1.0
    size = max(1.0, float(want_64.abs().max()))
    return float((have_64 - want_64).abs().max()) / size, size
