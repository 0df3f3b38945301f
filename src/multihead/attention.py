"""The one door to attention: check everything, ask the kernels in order, run one, then what is over (out, lse).

`attention` computes, and `choose` says which kernel is taken and why the others are not. For weights see `weights.py`.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from multihead import reference
from multihead.cache_format import Stored
from multihead.errors import bad_type, bad_value, describe
from multihead.kernels import FAST, Kernel, native
from multihead.kernels.table import Table
from multihead.masks import Mask
from multihead.positions import Position
from multihead.request import Request, make_request

__all__ = ["KERNELS", "Choice", "KernelRefusal", "attention", "choose"]

_NOTHING = nullcontext()


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None = None, *, bias: Tensor | Position | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None, dropout: float = 0.0,
    q_positions: Tensor | None = None, k_positions: Tensor | None = None, kernel: str | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None = None, *, bias: Tensor | Position | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None, dropout: float = 0.0,
    q_positions: Tensor | None = None, k_positions: Tensor | None = None, kernel: str | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    bias: Tensor | Position | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    kernel: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head attention: softmax(scale * q k^T, masked) v, by the fastest kernel that can.

    Args:
        q: queries (*batch, H, L, D). Any number of batch axes, none included.
        k: keys (*batch, K, S, D). H is a multiple of K; query head h reads key/value head h // (H // K).
        v: values (*batch, K, S, V). All three may be complex: then the scores are the real part of <q, k>.
        mask: who may see whom: `causal()`, `window(left=255, right=0)`, `lengths(n)` ... joined by & | ~, or a bool
            tensor that broadcasts to (*batch, H, L, S). True = may attend. A query that sees nothing gives zeros.
        bias: added to the scores after the softcap: a tensor that broadcasts to (*batch, H, L, S), or a position that
            biases scores, such as `ALiBi(H)`. -inf and the lowest numbers of its dtype (below half of finfo.min) hide.
        scale: of the scores; by default 1 / sqrt(D).
        softcap: bounds the scores to -softcap .. softcap by softcap * tanh(scores / softcap), before bias and mask.
        sinks: (H,), a logit for each head that takes a share of the softmax and adds no value.
        dropout: the share of weights that is dropped, here and now: a function has no train or eval mode.
        q_positions, k_positions: where the tokens stand, (L,) and (S,) or (*batch, L) and (*batch, S). Causal, window,
            prefix and biases follow them. By default the queries are the last L of the S keys.
        kernel: the name of one in `KERNELS`, to have that one or an error; by default the best that can.
        return_lse: also give the log of the softmax's denominator (sinks included).

    Returns:
        (*batch, H, L, V) in the dtype of q; with `return_lse` also lse (*batch, H, L), float32 (float64 for float64),
        differentiable, and -inf for a query that sees nothing.

    Raises:
        ValueError, TypeError: an argument does not fit; the message says which, what was expected and what to do.
        KernelRefusal: the kernel asked for by name can't; a ValueError with its reasons.

    Under autocast q, k and v are converted to its dtype, as torch's own attention does.
    """
    if return_lse is not True and return_lse is not False:
        raise bad_type("return_lse", "True or False", return_lse)
    out, lse = attended(
        q, k, v, mask, bias, scale, softcap, sinks, dropout, q_positions, k_positions, kernel, return_lse
    )
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    bias: Tensor | Position | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    kernel: str | None = None,
    needs_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `attention` gives, and the lse where it was asked for or the kernel found it on the way. Args and errors: as
    of `attention`."""
    q, k, v, device, without = from_autocast(q, k, v)
    dtype = q.dtype if isinstance(q, Tensor) else None
    if sinks is not None and device == "cpu" and dtype in (torch.float16, torch.bfloat16):
        # The kernels compute in float32 there. So does the product with the sinks' share, for one rounding in all.
        q, k, v = _in_float32(q, k, v, dtype)
    with without:
        needs_lse = needs_lse or sinks is not None
        request = make_request(
            q, k, v, mask, bias, scale, softcap, dropout, q_positions, k_positions, needs_lse, reference.attention
        )
        if sinks is not None:
            check_sinks(sinks, q)
        out, lse = (first(request) if kernel is None else _named(request, kernel)).run(request)
        if sinks is not None:
            assert lse is not None
            out, lse = _with_sinks(out, lse, sinks)
    out = in_dtype(dtype, out)
    if q.ndim != 4:
        out = out.reshape(*q.shape[:-1], v.shape[-1])
        lse = lse if lse is None else lse.reshape(q.shape[:-1])
    return out, lse


def attention_over(
    q: Tensor,
    held: Stored,
    mask: Mask | None = None,
    *,
    bias: Tensor | Position | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> Tensor:
    """What `attention` gives over what a cache holds: read where it lies if the native kernel can, else as a copy.

    Args:
        q: (*batch, H, L, D), in the dtype in which the cache's tokens came.
        held: the keys and values.
        mask, bias, scale, softcap, sinks, dropout, q_positions, k_positions: as of `attention`.

    Raises:
        ValueError, TypeError: as `attention`.
    """
    apart = not held.is_as_it_came and not torch.is_grad_enabled() and not torch.is_autocast_enabled(q.device.type)
    if apart and native.can_read(q, held):
        dtype = torch.float32 if sinks is not None else q.dtype  # then there is a product to come: one rounding in all
        k, v = (
            q.new_empty(1, dtype=dtype).expand(*held.batch, numbers.shape[1], held.tokens, numbers.shape[3])
            for numbers, *_ in held.sides()
        )  # of the right shapes, in the place of what is not made
        request = make_request(
            q.to(dtype), k, v, mask, bias, scale, softcap, dropout, q_positions, k_positions, sinks is not None,
            reference.attention,
        )  # fmt: skip
        if not native.refusals(request):
            out, lse = native.run_over(request, held)
            if sinks is not None:
                check_sinks(sinks, q)
                assert lse is not None
                out, _ = _with_sinks(out, lse, sinks)
            return in_dtype(q.dtype, out).reshape(*q.shape[:-1], v.shape[-1])
    k, v = held.read()
    return attention(
        q, k, v, mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout,
        q_positions=q_positions, k_positions=k_positions,
    )  # fmt: skip


def in_dtype(dtype: torch.dtype | None, out: Tensor) -> Tensor:
    """The output in the dtype of q. Of complex numbers the kernels know real and imaginary parts, side by side."""
    if dtype is not None and dtype.is_complex:
        return torch.view_as_complex(out.unflatten(-1, (-1, 2)))
    return out if out.dtype == dtype else out.to(dtype)


def _in_float32(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v converted, unless they are not all of `dtype`: then they stay, for the check to find."""
    alike = all(isinstance(t, Tensor) and t.dtype == dtype for t in (k, v))
    return (q.float(), k.float(), v.float()) if alike else (q, k, v)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Let the sinks' logits join the denominator: all weights shrink by exp(lse) / (exp(lse) + exp(sink))."""
    # Rows that see nothing have lse -inf; a finite one in its place gives the same, and no NaN gradient.
    logits, blind = sinks.to(lse.dtype)[:, None].expand_as(lse), lse == -math.inf
    lse = lse.masked_fill(blind, 0.0)
    out = out * torch.sigmoid(lse - logits)[..., None].to(out.dtype)
    return out, torch.where(blind, logits, torch.logaddexp(lse, logits))


class Choice(NamedTuple):
    """Which kernel a request is given to, and what was said about each."""

    kernel: Kernel
    refusals: dict[str, list[str]]  # by kernel, in the order asked: why it can't
    drawbacks: dict[str, list[str]]  # by kernel that can: why another was preferred


class KernelRefusal(ValueError):
    """A kernel asked for by name can't run the request."""


def choose(request: Request) -> Choice:
    """The kernel that `attention` takes for a request, with every kernel's reasons."""
    refusals = {name: kernel.refusals(request) for name, kernel in KERNELS.items()}
    drawbacks = {name: kernel.drawbacks(request) for name, kernel in KERNELS.items() if not refusals[name]}
    return Choice(first(request), refusals, drawbacks)


def first(request: Request) -> Kernel:
    """The first kernel without refusals and drawbacks; if there is none, the first without refusals."""
    able: Kernel | None = None
    for kernel in _IN_ORDER:
        if not kernel.refusals(request):
            if not kernel.drawbacks(request):
                return kernel
            able = able or kernel
    assert able is not None  # the reference refuses nothing
    return able


def _named(request: Request, name: object) -> Kernel:
    if not isinstance(name, str) or name not in KERNELS:
        got = name if isinstance(name, str) else describe(name)
        raise bad_value("kernel", f"one of {', '.join(KERNELS)}, or None", got)
    reasons = KERNELS[name].refusals(request)
    if reasons:
        instead = f"{first(request).NAME} can: leave kernel out, and explain() tells what is taken."
        raise KernelRefusal(f"kernel={name!r} can't run this call: {'; '.join(reasons)}. {instead}")
    return KERNELS[name]


class _Reference:
    """The definition as a kernel, the last that is asked."""

    NAME = "reference"

    def refusals(self, request: Request) -> list[str]:  # noqa: ARG002  (every kernel is asked in the same way)
        return []

    def drawbacks(self, request: Request) -> list[str]:  # noqa: ARG002  (every kernel is asked in the same way)
        return ["it makes several tensors of B x H x L x S: it is the formula, written out"]

    def tables(self, request: Request) -> list[Table]:
        B, H, _, L, S, _, _ = request.sizes
        wide = torch.promote_types(request.q.dtype, torch.float32)
        what = f"several tensors of {B} x {H} x {L} x {S}"
        why = "the scores, and each step from them to the weights"
        return [Table(what, why, 3 * B * H * L * S * wide.itemsize)]

    def run(self, request: Request) -> tuple[Tensor, Tensor | None]:
        out, _, lse = by_definition(request, None)
        return out, lse


_IN_ORDER: tuple[Kernel, ...] = (*FAST, _Reference())
KERNELS: dict[str, Kernel] = {kernel.NAME: kernel for kernel in _IN_ORDER}


def by_definition(request: Request, sinks: Tensor | None) -> reference.Attended:
    """What the reference says of a request, with the dropout that it asks for."""
    q_positions, k_positions = request.positions()
    dropout_mask = None
    if request.dropout:
        B, H, _, L, S, _, _ = request.sizes
        wide = torch.promote_types(request.q.dtype, torch.float32)
        dropout_mask = torch.nn.functional.dropout(request.q.new_ones(B, H, L, S, dtype=wide), request.dropout)
    return reference.attention(
        request.q,
        request.k,
        request.v,
        request.mask,
        bias=request.bias,
        scale=request.scale,
        softcap=request.softcap,
        sinks=sinks,
        dropout_mask=dropout_mask,
        q_positions=q_positions,
        k_positions=k_positions,
    )


def check_sinks(sinks: object, q: Tensor) -> None:
    """Whether sinks fit the queries (*batch, H, L, D)."""
    H = q.shape[-3]
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        raise bad_type("sinks", f"a floating point tensor (H,) with H={H}", sinks)
    if tuple(sinks.shape) != (H,):
        raise bad_value("sinks", f"the shape (H,) with H={H}", describe(sinks), "It is one logit for each query head.")
    if sinks.device != q.device:
        raise bad_value("sinks", f"the device of q, {q.device}", sinks.device, "", "Move it with .to(q.device).")


def from_autocast(
    q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, str, AbstractContextManager[object]]:
    """q, k, v in the dtype that autocast wants (float64 left alone), their device, and a context without autocast."""
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v, device, _NOTHING
    dtype = torch.get_autocast_dtype(device)

    def convert(tensor: Tensor) -> Tensor:
        low = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if low else tensor

    return convert(q), convert(k), convert(v), device, torch.autocast(device, enabled=False)
