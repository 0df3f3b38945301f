"""PyTorch's own scaled_dot_product_attention, called in the way that is fastest for each request.

With few queries the G = H / K query heads that share a key/value head are given to it as rows of one head, because its
enable_gqa copies the keys G times. Half precision on the CPU is converted to float32 (see `flash_cpu`).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multihead.kernels import flash_cpu
from multihead.kernels.autograd import (
    differentiable_gradients,
    needs_definition,
    readable,
    recording,
    transform_refusals,
)
from multihead.kernels.table import Table
from multihead.mask_kinds import Window
from multihead.masks import causal
from multihead.positions import Position
from multihead.request import Definition, Request

NAME = "sdpa"

_CAUSAL = causal()

# From this many pairs on it pays to ask the mask how much of the plane is visible (docs/performance.md).
_WORTH_A_PLAN = 2**18
_WORTH_IT = (
    0.6  # the share of visible blocks below which their tiles are faster than a dense mask (benchmarks/choice.py)
)
_MOST_BLOCKS = 256  # to a side
_SMALL_TABLE = 2**16  # pairs of a causal mask that is kept


def refusals(request: Request) -> list[str]:
    """Why this kernel can't run the request; empty: it can."""
    reasons = transform_refusals(request)
    B, H, _, L, S, _, V = request.sizes
    on_cpu = request.q.device.type == "cpu"
    if on_cpu:
        reasons += flash_cpu.refusals(request)
    elif request.softcap is not None:
        reasons.append("softcap: the fused operation has no place for it between scores and softmax")
    if not on_cpu and request.needs_lse:
        reasons.append(f"lse: on {request.q.device.type} the fused operation does not return it")
    if 0 in (B, H, L, S, V):
        reasons.append("nothing to compute: an axis is empty")
    return reasons


def drawbacks(request: Request) -> list[str]:
    """Why another kernel should be preferred although this one can."""
    if request.mask is None or recording() or request.q.is_meta or is_square_causal(request):
        return []
    if request.sizes.L * request.sizes.S < _WORTH_A_PLAN:
        return []
    # Blocks of 64 tokens, and larger ones in long sequences: a rough share is enough, and there must not be too many.
    block = 64 * -(-max(request.sizes.L, request.sizes.S) // (64 * _MOST_BLOCKS))
    bounds = request.bounds(block, block)
    assert bounds is not None
    share = float(bounds.some.float().mean())
    if share < _WORTH_IT:
        return [f"it computes all L x S pairs, and {share:.1%} of the blocks of {block} x {block} hold a visible one"]
    return []


def tables(request: Request) -> list[Table]:
    """Which L x S tensors it makes besides those given, and why."""
    has_table = request.mask is not None and not is_square_causal(request) and not _is_last_token(request)
    if not has_table and not isinstance(request.bias, Position):
        return []
    _, _, _, L, S, _, _ = request.sizes
    what = f"a mask of up to {L} x {S}, for each row of the batch and head that differs"
    why = "it takes masks as tensors"
    wide = torch.promote_types(request.q.dtype, torch.float32)
    return [Table(what, why, _table_size(request) * wide.itemsize)]


def _table_size(request: Request) -> int:
    """How many numbers the mask and the bias have as one tensor, from their first corner."""
    sizes = request.sizes
    corner = slice(0, min(1, sizes.L)), slice(0, min(1, sizes.S))
    parts = [part for part in (request.visible(*corner), request.added(*corner)) if part is not None]
    shape = torch.broadcast_shapes(*(part.shape for part in parts))
    return math.prod(shape[:2]) * sizes.L * sizes.S


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    """(out (B,H,L,V), lse (B,H,L) or None)."""
    q, k, v = request.q, request.k, request.v
    if q.device.type == "cpu" and q.dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()

    is_causal = is_square_causal(request)
    if is_causal or (request.mask is None and request.bias is None):
        return _attend(request, q, k, v, None, is_causal)
    added = additive_mask(request, q.dtype)
    if readable(q) and readable(k):
        out, lse = _attend(request, q, k, v, added, False)
        if is_clean(out):
            return out, lse
    # Zeros in place of keys nobody sees and of queries that see nothing: NaN there must not come back as 0 * NaN.
    q, k, v, _ = without_unseen(request, q, k, v, added)
    return _attend(request, q, k, v, added, False)


def _attend(
    request: Request, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor | None]:
    """`run`, over these tensors and the mask as one tensor to add."""
    B, H, K, L, _, D, _ = request.sizes
    on_cpu = q.device.type == "cpu"
    blind = (added == -math.inf).all(-1) if added is not None and request.needs_lse else None
    # Few rows: up to 64 for a head. A compiled graph must not depend on the length, and knows 1 apart from the rest.
    as_rows = H != K and not is_causal and (L == 1 if torch.compiler.is_compiling() else H // K * L <= 64)
    if as_rows:
        q = q.reshape(B, K, H // K * L, D)
        added = None if added is None else mask_by_rows(added, H, K, L)

    if on_cpu and request.needs_grad and (request.needs_lse or not recording()):
        out, lse = _Fused.apply(q, k, v, added, is_causal, request.scale, request.definition)
    elif on_cpu and request.needs_lse:
        out, lse = flash_cpu.forward(q, k, v, added, is_causal, request.scale)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, added, request.dropout, is_causal, scale=request.scale, enable_gqa=bool(q.shape[1] != K)
        )
        lse = None

    if as_rows:
        out = out.reshape(B, H, L, -1)
        lse = None if lse is None else lse.reshape(B, H, L)
    if lse is not None and blind is not None:
        lse = lse.masked_fill(blind, -math.inf)
    return (out if out.dtype == request.q.dtype else out.to(request.q.dtype)), lse


def is_square_causal(request: Request) -> bool:
    """Whether the operation's own causal flag says the same as the mask. It is top-left aligned, hence L = S, and hides
    before it scales, hence no negative scale."""
    if request.bias is not None or not _is_causal(request):
        return False
    if request.sizes.L == request.sizes.S:  # a branch: while compiling, the comparison itself is a symbol and no flag
        return request.scale > 0
    return False


def _is_last_token(request: Request) -> bool:
    """Whether the one query is the last token under a causal mask: it sees everything."""
    return request.sizes.L == 1 and _is_causal(request)


def _is_causal(request: Request) -> bool:
    return isinstance(request.mask, Window) and request.has_default_positions and request.mask.is_causal()


def additive_mask(request: Request, dtype: torch.dtype) -> Tensor | None:
    """Bias and mask as one tensor to add (B or 1, H or 1, L or 1, S or 1)."""
    if request.bias is None and _is_causal(request) and readable(request.q):
        L, S = request.sizes.L, request.sizes.S
        if L * S <= _SMALL_TABLE:
            return _causal_table(L, S, dtype)
    visible = None if _is_last_token(request) else request.visible()
    added = request.added()
    added = None if added is None else added.to(dtype)
    if visible is None:
        return added
    nothing = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, nothing if added is None else added, -math.inf)


@lru_cache(maxsize=32)
def _causal_table(L: int, S: int, dtype: torch.dtype) -> Tensor:
    """(1, 1, L, S). Kept, because for small sizes making it takes longer than attention itself."""
    with torch.inference_mode(False):
        return torch.full((1, 1, L, S), -math.inf, dtype=dtype, device="cpu").triu(S - L + 1)


def is_clean(out: Tensor) -> bool:
    """Whether nothing that is not finite has come through the mask. The sum may overflow by itself; then care is taken
    for nothing."""
    return math.isfinite(out.detach().sum().item())


def without_unseen(
    request: Request, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k and v with zeros in place of keys that nobody may see and of queries that see nothing, and which queries
    these are (B, H, L, 1). `added` is mask and bias as one tensor to add."""
    if added is None:
        return q, k, v, None
    B, H, K, L, S, _, _ = request.sizes
    visible = (added != -math.inf).expand(*added.shape[:2], L, S)
    seen = visible.any(-2)
    if seen.shape[1] == H != K:
        seen = seen.unflatten(1, (K, -1)).any(2)
    k, v = k.masked_fill(~seen[..., None], 0.0), v.masked_fill(~seen[..., None], 0.0)
    blind = ~visible.any(-1).expand(B, H, L)[..., None]
    return q.masked_fill(blind, 0.0), k, v, blind


def mask_by_rows(added: Tensor, H: int, K: int, L: int) -> Tensor:
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
        definition: Definition,
    ) -> tuple[Tensor, Tensor]:
        out, lse = flash_cpu.forward(q, k, v, added, is_causal, scale)
        ctx.save_for_backward(q, k, v, added, out, lse)
        ctx.is_causal, ctx.scale, ctx.definition = is_causal, scale, definition
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        q, k, v, added, out, lse = ctx.saved_tensors

        def define(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return ctx.definition(q, k, v, _CAUSAL if ctx.is_causal else None, bias=added, scale=ctx.scale)

        if not torch.compiler.is_compiling() and needs_definition(grad_out, grad_lse):
            return *differentiable_gradients(define, (q, k, v), (grad_out, None, grad_lse)), None, None, None, None
        if grad_out is None:
            if grad_lse is None:
                return (None,) * 7
            grad_out = torch.zeros_like(out)
        grads = flash_cpu.backward(grad_out, grad_lse, q, k, v, out, lse, added, ctx.is_causal, ctx.scale)
        if added is not None and readable(q) and not all(math.isfinite(grad.sum().item()) for grad in grads):
            # Perhaps what hidden keys hold, times a weight of 0: the definition has zeros in their place.
            exact = differentiable_gradients(define, (q, k, v), (grad_out, None, grad_lse))
            return *exact, None, None, None, None
        return *grads, None, None, None, None
