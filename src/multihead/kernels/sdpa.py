"""PyTorch's own scaled_dot_product_attention, used where it is at its best.

What this file knows about it (CPU, measured in docs/performance.md):

- it is fused for 4-D calls without dropout, with V = D, and with a mask that needs no gradient;
- it returns lse, but as 0 for a row that sees nothing, and without a gradient;
- its backward uses the output only through rowsum(grad_out * out), so one more column carries the gradient of lse
  (see `_Fused.backward`);
- its enable_gqa expands keys when L is small: the G query heads that share a key head are given as rows instead;
- float16 and bfloat16 are slower than converting to float32, most of all with one query.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multihead.kernels.autograd import differentiable_gradients, transform_refusals
from multihead.masks import causal
from multihead.request import Definition, Request

NAME = "sdpa"

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_CAUSAL = causal()

# From this many pairs on it pays to ask the mask how much of the plane is visible (docs/performance.md).
_WORTH_A_PLAN = 2**17
_BLOCK = 64


def refusals(request: Request) -> list[str]:
    """Why this kernel can't run the request; empty: it can."""
    reasons = transform_refusals(request)
    B, H, _, L, S, D, V = request.sizes
    on_cpu = request.q.device.type == "cpu"
    if request.softcap is not None:
        reasons.append("softcap: the fused operation has no place for it between scores and softmax")
    if on_cpu and request.dropout:
        reasons.append("dropout: on the CPU the fused operation has none, and would make an L x S tensor")
    if on_cpu and V != D:
        reasons.append(f"V={V} is not D={D}: on the CPU the fused operation needs them equal")
    if on_cpu and isinstance(request.bias, Tensor) and request.bias.requires_grad and torch.is_grad_enabled():
        reasons.append("the bias needs a gradient: the fused operation gives none")
    if not on_cpu and request.needs_lse:
        reasons.append(f"lse: on {request.q.device.type} the fused operation does not return it")
    if 0 in (B, H, L, S, V):
        reasons.append("nothing to compute: an axis is empty")
    return reasons


def drawbacks(request: Request) -> list[str]:
    """Why another kernel should be preferred although this one can."""
    if request.mask is None or _is_square_causal(request):
        return []
    L, S = request.sizes.L, request.sizes.S
    if L * S < _WORTH_A_PLAN or torch.compiler.is_compiling():
        return []
    bounds = request.bounds(_BLOCK, _BLOCK)
    assert bounds is not None
    share = float(bounds.some.float().mean())
    if share < 0.7:
        return [f"it computes all L x S pairs, and {share:.0%} of the blocks of {_BLOCK} x {_BLOCK} hold a visible one"]
    return []


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    """(out (B,H,L,V), lse (B,H,L) or None)."""
    q, k, v = request.q, request.k, request.v
    B, H, K, L, S, D, _ = request.sizes
    on_cpu = q.device.type == "cpu"
    dtype = q.dtype
    if on_cpu and dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()

    is_causal, added, blind = _is_square_causal(request), None, None
    if not is_causal:
        added, seen, blind = _additive_mask(request, q.dtype)
        if seen is not None:  # zeros in place of keys nobody sees: NaN in padding must not come back as 0 * NaN
            k, v = k.masked_fill(~seen, 0.0), v.masked_fill(~seen, 0.0)

    as_rows = H != K and (H // K) * L <= 64 and not is_causal
    if as_rows:
        q = q.reshape(B, K, H // K * L, D)
        added = None if added is None else _mask_by_rows(added, H, K, L)

    if on_cpu and (request.needs_lse or (request.needs_grad and not torch.compiler.is_compiling())):
        out, lse = _Fused.apply(q, k, v, added, is_causal, request.scale, request.definition)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, added, request.dropout, is_causal, scale=request.scale, enable_gqa=q.shape[1] != K
        )
        lse = None

    if as_rows:
        out = out.reshape(B, H, L, -1)
        lse = None if lse is None else lse.reshape(B, H, L)
    if lse is not None and blind is not None:
        lse = lse.masked_fill(blind, -math.inf)
    return (out if out.dtype == dtype else out.to(dtype)), lse


def _is_square_causal(request: Request) -> bool:
    """Whether the operation's own causal flag says the same as the mask; its alignment is top-left, hence L = S."""
    return request.mask == _CAUSAL and request.sizes.L == request.sizes.S and request.has_default_positions and (
        request.bias is None
    )


def _additive_mask(request: Request, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Bias and mask as one tensor to add (B or 1, H or 1, L or 1, S or 1), which keys anybody sees
    (B or 1, K or 1, S, 1), and which rows see nothing (B or 1, H or 1, L or 1)."""
    if request.mask is not None and request.sizes.L == 1 and request.mask == _CAUSAL and request.has_default_positions:
        visible = None  # the one query is the last token and sees everything
    else:
        visible = request.visible()
    added = request.added()
    added = None if added is None else added.to(dtype)
    if visible is None:
        blind = (added == -math.inf).all(-1) if added is not None and request.needs_lse else None
        return added, None, blind
    seen = visible.any(-2)
    if seen.shape[1] == request.sizes.H != request.sizes.K:
        seen = seen.unflatten(1, (request.sizes.K, -1)).any(2)
    nothing = torch.zeros((), dtype=dtype, device=visible.device)
    added = torch.where(visible, nothing if added is None else added, -math.inf)
    blind = (added == -math.inf).all(-1) if request.needs_lse else None
    return added, seen[..., None], blind


def _mask_by_rows(added: Tensor, H: int, K: int, L: int) -> Tensor:
    """(B or 1, H or 1, L or 1, S or 1) to (B or 1, K or 1, G*L, S or 1), as the queries of a group become rows."""
    B, heads, _, S = added.shape
    groups = (K, H // K) if heads == H else (1, 1)
    return added.view(B, *groups, -1, S).expand(B, groups[0], H // K, L, S).reshape(B, groups[0], H // K * L, S)


class _Fused(torch.autograd.Function):
    """The fused CPU operation with a differentiable lse and with second derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        added: Tensor | None,
        is_causal: bool,
        scale: float,
        definition: Definition | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _flash_cpu(q, k, v, 0.0, is_causal, attn_mask=added, scale=scale)
        ctx.save_for_backward(q, k, v, added, out, lse)
        ctx.is_causal, ctx.scale, ctx.definition = is_causal, scale, definition
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:  # type: ignore[override]
        q, k, v, added, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():

            def define(q: Tensor, k: Tensor, v: Tensor) -> Any:
                return ctx.definition(q, k, v, _CAUSAL if ctx.is_causal else None, bias=added, scale=ctx.scale)

            return *differentiable_gradients(define, (q, k, v), grad_out, grad_lse), None, None, None, None
        if grad_out is None:
            if grad_lse is None:
                return (None,) * 7
            grad_out = torch.zeros_like(out)
        if grad_lse is None:
            grads = _flash_cpu_backward(
                grad_out, q, k, v, out, lse, 0.0, ctx.is_causal, attn_mask=added, scale=ctx.scale
            )
            return *grads, None, None, None, None
        # d lse / d scores is the weights themselves, and the operation computes weights * (grad_out v^T - delta) with
        # delta = rowsum(grad_out * out). One more column, 0 in q, k and v, 1 in grad_out and -grad_lse in out, makes
        # delta - grad_lse of delta and changes nothing else.
        q, k, v = (F.pad(t, (0, 1)) for t in (q, k, v))
        grad_out = F.pad(grad_out, (0, 1), value=1.0)
        out = torch.cat([out, -grad_lse.to(out.dtype)[..., None]], -1)
        grads = _flash_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, ctx.is_causal, attn_mask=added, scale=ctx.scale
        )
        return *(g[..., :-1] for g in grads), None, None, None, None
