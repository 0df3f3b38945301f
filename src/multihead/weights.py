"""The weights of attention, for those who want to look at them: alone, or together with the output."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from multihead import reference
from multihead.attention import attention, by_definition, check_sinks, first, from_autocast, in_dtype
from multihead.kernels import native, rows, small
from multihead.kernels.autograd import recording
from multihead.kernels.lazy import Plan, weights_of
from multihead.masks import Mask
from multihead.positions import Position
from multihead.request import Request, make_request


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    bias: Tensor | Position | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> Tensor:
    """The weights that `attention` of the same arguments multiplies the values by, before dropout.

    Args: as of `attention`.

    Returns:
        (*batch, H, L, S), float32 (float64 for float64), differentiable. Rows sum to 1, to less where a sink takes its
        share, to 0 where nothing is visible. This is the L x S tensor that `attention` itself does without.

    Raises:
        ValueError, TypeError: as `attention`.
    """
    q, k, _, _, without = from_autocast(q, k, k)
    with without:
        request = _without_values(q, k, mask, bias, scale, softcap, q_positions, k_positions)
        if sinks is not None:
            check_sinks(sinks, q)
        weights = _weights(request, sinks)
    return weights if q.ndim == 4 else weights.reshape(*q.shape[:-1], k.shape[-2])


def _without_values(
    q: Tensor,
    k: Tensor,
    mask: Mask | Tensor | None,
    bias: Tensor | Position | None,
    scale: float | None,
    softcap: float | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
) -> Request:
    """What the weights alone are made of: nothing is dropped from them, and nothing drawn."""
    nothing = k[..., :1] if isinstance(k, Tensor) and k.ndim else k  # something of the right length as values
    return make_request(
        q, k, nothing, mask, bias, scale, softcap, 0.0, q_positions, k_positions, False, reference.attention
    )


class Look(NamedTuple):
    """Which weights to give besides the output.

    Attributes:
        average: their mean over heads, instead of those of each head.
        lazy: computed at their first use, and in the dtype of the output, where nothing records or transforms the call.
    """

    average: bool
    lazy: bool = False


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    look: Look,
    bias: Tensor | Position | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `attention` gives, and what `attention_weights` gives, or its mean over heads: (*batch, L, S).

    Where the native kernel can't run it, the mean is made together with the output if that pays, which may then differ
    from that of `attention` by rounding; if it is not lazy. Args: `look`; else as of `attention`, as are the errors.
    """
    q, k, v, _, without = from_autocast(q, k, v)
    with without:
        request = make_request(
            q, k, v, mask, bias, scale, softcap, dropout, q_positions, k_positions, False, reference.attention
        )
        if sinks is not None:
            check_sinks(sinks, q)
        batch, sizes = q.shape[:-3], request.sizes
        shape = (*batch, sizes.L, sizes.S) if look.average else (*batch, sizes.H, sizes.L, sizes.S)
        lazy = look.lazy and _may_wait(request)
        wide = torch.promote_types(request.q.dtype, torch.float32)
        plan = Plan(look.average, shape, request.q.dtype if lazy else wide, lazy)
        out, weights = (None, None) if sinks is not None else _together(request, plan)
        if out is None:
            out = attention(
                q, k, v, mask, bias=bias, scale=scale, softcap=softcap, dropout=dropout, sinks=sinks,
                q_positions=q_positions, k_positions=k_positions,
            )  # fmt: skip
        else:
            out = in_dtype(q.dtype, out)
            out = out if q.ndim == 4 else out.reshape(*q.shape[:-1], v.shape[-1])
        if weights is None:
            alone = _without_values(q, k, mask, bias, scale, softcap, q_positions, k_positions)
            weights = (_later if lazy else _now)(alone, plan, sinks)
    # What is computed later has its shape, and asking for it takes longer than all of this.
    return out, weights if lazy or weights.shape == shape else weights.reshape(shape)


def _may_wait(request: Request) -> bool:
    """Whether what the weights are made of may be kept for later: it is there, no optimizer changes it meanwhile, and
    nothing follows what is done."""
    q, bias = request.q, request.bias
    if isinstance(bias, Tensor) and bias.is_leaf and bias.requires_grad:
        return False
    if type(q) is not Tensor or q.device.type == "meta" or recording() or torch._C._are_functorch_transforms_active():
        return False
    return forward_ad._current_level < 0 and not torch._C._len_torch_dispatch_stack()


def _own(request: Request) -> Request:
    """The request with a mask and a bias of its own, where torch would not tell that they were changed in place:
    tensors of inference mode count no versions."""
    bias, mask, places = request.bias, request.mask, () if request.has_default_positions else request.positions()
    held = [*(() if mask is None else mask.tensors().values()), *places, *([bias] if isinstance(bias, Tensor) else ())]
    if not any(t.is_inference() for t in held):
        return request
    own = request.with_tensors(
        request.q, request.k, request.v, copy.deepcopy(bias) if isinstance(bias, Tensor) else bias
    )
    own.mask = copy.deepcopy(mask)
    if places:
        own.place(*(t.clone() for t in places))
    return own


def _now(request: Request, plan: Plan, sinks: Tensor | None) -> Tensor:
    """The weights of a request (B, H, L, S), or their mean (B, L, S)."""
    weights = _weights(request, sinks)
    return weights.mean(1) if plan.average else weights


def _later(request: Request, plan: Plan, sinks: Tensor | None) -> Tensor:
    """The weights of a request, at their first use."""
    request = _own(request)
    q, k, bias = request.q, request.k, request.bias if isinstance(request.bias, Tensor) else None
    kept = request.with_tensors(q.detach(), k.detach(), k[..., :1].detach(), request.bias)
    logits = None if sinks is None else sinks.detach().clone()  # an optimizer changes them

    def make() -> Tensor:
        return _now(kept, plan, logits)

    def define(q: Tensor, k: Tensor, bias: Tensor | None, sinks: Tensor | None) -> reference.Attended:
        return by_definition(request.with_tensors(q, k, k[..., :1], request.bias if bias is None else bias), sinks)

    held = [] if request.mask is None else list(request.mask.tensors().values())
    return weights_of(plan, make, define, (q, k, bias, sinks), [*held, *request.positions()])


def _weights(request: Request, sinks: Tensor | None) -> Tensor:
    """(B, H, L, S); the values are not looked at."""
    if sinks is None and not rows.refusals(request):  # without an output the native kernel would have no state
        return rows.attend(request, average=False, with_out=False)[1]
    return by_definition(request, sinks).weights


def _together(request: Request, plan: Plan) -> tuple[Tensor | None, Tensor | None]:
    """out (B, H, L, V) and the weights as planned; None for what has to be made apart."""
    if not recording() and not native.refusals(request):
        return native.attend_with_weights(_own(request) if plan.lazy else request, plan)
    if not plan.average or plan.lazy:
        return None, None
    # With dropout only where `attention` takes it too: asking for weights may not change what is drawn.
    is_small = first(request) is small if request.dropout else small.is_small(request, small.MOST_WITH_WEIGHTS)
    if is_small and not small.refusals(request):
        out, weights = small.attend(request)
        return out, weights.mean(1)
    return (None, None) if rows.refusals(request) else rows.attend(request, average=True)
