"""Attention together with its weights, a few rows of them at a time.

For who wants to see the weights (B, H, L, S), or their mean over heads (B, L, S). PyTorch's fused operation does not
give them, and written out they pass through memory several times. Here some rows of scores are made, turned into
weights and used while they are in the cache; beyond the answer itself memory is O(L + S).

The backward pass of the output is that of the fused CPU operation, from out and lse. A gradient that comes in through
the weights goes by the definition.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multihead.kernels import flash_cpu, sdpa
from multihead.kernels.autograd import differentiable_gradients, needs_definition, recording, transform_refusals
from multihead.kernels.blocks import parts
from multihead.request import Request

_TILE_BYTES = 2**20  # of scores at a time (benchmarks/choice.py)
_LEAST_ROWS = 256  # of queries times grouped heads: so many share the packing of the keys for a product
_KEYS = 64  # to a block that the mask is asked about


def refusals(request: Request) -> list[str]:
    """Why the weights can't be made in this way; empty: they can."""
    reasons = transform_refusals(request)
    B, H, _, L, S, _, V = request.sizes
    if request.q.device.type != "cpu":
        reasons.append(f"{request.q.device.type}: rows at a time pay on the CPU, where a cache holds them")
    if recording():
        reasons.append("torch.compile, torch.export and tracing: which columns are visible is read from data")
    if 0 in (B, H, L, S, V):
        reasons.append("nothing to compute: an axis is empty")
    return reasons


def attend(request: Request, average: bool, with_out: bool = True) -> tuple[Tensor | None, Tensor]:
    """out (B, H, L, V), and the weights before dropout (B, H, L, S) or their mean (B, L, S).

    out is None where it is not asked for, and where another kernel has to make it: with dropout, and where gradients
    are wanted that the fused operation does not have.
    """
    bias = request.bias if isinstance(request.bias, Tensor) else None
    records = request.needs_grad or (bias is not None and bias.requires_grad and torch.is_grad_enabled())
    with_out = with_out and not request.dropout and not (records and flash_cpu.refusals(request))
    wide = torch.promote_types(request.q.dtype, torch.float32)
    q, k, v = (t.to(wide) for t in (request.q, request.k, request.v))
    if not records:
        out, _, weights, _ = _attend(request.with_tensors(q, k, v, request.bias), average, with_out, False)
    else:
        nothing = q.new_empty(0)
        job = _Job(
            request.with_tensors(nothing, nothing, nothing, request.bias if bias is None else nothing),
            average,
            with_out,
        )
        watched = [] if request.mask is None else list(request.mask.tensors().values())
        out, weights = _Rows.apply(q, k, v, bias, job, *watched, *request.positions())
    return None if out is None else out.transpose(1, 2).to(request.q.dtype), weights


class _Job(NamedTuple):
    request: Request  # without its tensors
    average: bool
    with_out: bool

    def over(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Request:
        return self.request.with_tensors(q, k, v, self.request.bias if bias is None else bias)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, job: _Job, *watched: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        out, lse, weights, ctx.is_plain = _attend(job.over(q, k, v, bias), job.average, job.with_out, job.with_out)
        ctx.save_for_backward(q, k, v, bias, out, lse, *watched)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return out, weights

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_weights: Tensor | None) -> Any:
        q, k, v, bias, out, lse, *watched = ctx.saved_tensors
        job: _Job = ctx.job
        rest = (None,) * (1 + len(watched))
        if grad_out is None and grad_weights is None:
            return None, None, None, None, *rest
        request = job.over(q, k, v, bias)
        grad_out = None if grad_out is None else grad_out.transpose(1, 2)
        if grad_out is None or grad_weights is not None or not ctx.is_plain or needs_definition(grad_out):
            return *_by_definition(request, (q, k, v, bias), grad_out, grad_weights), *rest
        is_causal, added = sdpa.is_square_causal(request), None
        if not is_causal and (request.mask is not None or request.bias is not None):
            added = sdpa.additive_mask(request, q.dtype)
        grads = flash_cpu.backward(grad_out, None, q, k, v, out.transpose(1, 2), lse, added, is_causal, request.scale)
        hides = request.mask is not None or request.bias is not None
        if hides and not all(grad.sum().isfinite() for grad in grads):
            return *_by_definition(request, (q, k, v, bias), grad_out, None), *rest
        return *grads, None, *rest


def _by_definition(
    request: Request, inputs: tuple[Tensor | None, ...], grad_out: Tensor | None, grad_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_weights is not None and grad_weights.ndim == 3:  # of the mean over heads
        H = request.sizes.H
        grad_weights = (grad_weights / H)[:, None].expand(-1, H, -1, -1)

    def define(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Any:
        return request.defined(q, k, v, request.bias if bias is None else bias)

    return differentiable_gradients(define, inputs, (grad_out, grad_weights, None))


def _attend(
    request: Request, average: bool, with_out: bool, with_lse: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, bool]:
    """out (B, L, H, V), lse (B, H, L) with 0 for -inf, the weights, and whether the rows gave them: not where keys that
    are hidden hold NaN or inf, which then come back as 0 * NaN. The definition has an answer to that."""
    B, H, K, L, S, _, V = request.sizes
    q, k, v = request.q, request.k, request.v
    grouped = (q * request.scale).unflatten(1, (K, H // K))  # (B, K, G, L, D)
    make = q.new_empty if request.mask is None else q.new_zeros  # zeros where nothing is visible
    out = make(B, L, K, H // K, V) if with_out else None
    lse = q.new_zeros(B, K, H // K, L) if with_lse else None
    weights = make(B, L, S) if average else make(B, K, H // K, L, S)
    size = min(L, max(1, _LEAST_ROWS // (H // K), _TILE_BYTES // (H // K * S * q.element_size())))
    at_once = max(1, _TILE_BYTES // (H // K * size * S * q.element_size())) if size == L else 1
    # Two tiles, used again and again: memory that is freed and asked for has to be made by the system each time.
    room = q.new_empty(2, min(at_once, B * K) * (H // K) * size * S)
    for start in range(0, L, size):
        rows = slice(start, min(L, start + size))
        columns, table = _table(request, rows)
        if columns is None:
            continue
        blind = None if table is None else (table == -math.inf).all(-1, keepdim=True)
        if blind is not None and not blind.any():
            blind = None
        if table is not None and blind is not None:  # a row of zeros in place of the softmax of an empty set
            table = table.masked_fill(blind, 0.0)
        for batch, heads in parts(slice(0, B), K, at_once):
            tile = grouped[batch, heads, :, rows]  # (b, k, G, l, D)
            lines, keys = tile.flatten(2, 3).flatten(0, 1), k[batch, heads, columns].flatten(0, 1).transpose(1, 2)
            added = None if table is None else _of_heads(table, batch, heads, request)
            shape = (*tile.shape[:4], keys.shape[-1])
            scores, found = (part[: math.prod(shape)].view(shape) for part in room)  # (b, k, G, l, n)
            _fill_with_scores(scores, lines, keys, added, request.softcap)
            torch.softmax(scores, -1, out=found)
            if blind is not None:
                found.masked_fill_(_of_heads(blind, batch, heads, request), 0.0)
            if lse is not None:
                level = _level(scores, found)
                if blind is not None:
                    level.masked_fill_(_of_heads(blind, batch, heads, request)[..., 0], 0.0)
                lse[batch, heads, :, rows] = level
            if out is not None:
                product = torch.bmm(found.flatten(2, 3).flatten(0, 1), v[batch, heads, columns].flatten(0, 1))
                out[batch, rows, heads] = product.view(*tile.shape[:4], V).permute(0, 3, 1, 2, 4)
            if not average:
                weights[batch, heads, :, rows, columns] = found
            else:
                mean = weights[batch, rows, columns]
                for i, of_head in enumerate(found.flatten(1, 2).unbind(1)):  # a sum over them would be one more tile
                    if heads.start == i == 0:
                        torch.mul(of_head, 1 / H, out=mean)
                    else:
                        mean.add_(of_head, alpha=1 / H)
    weights = weights if average else weights.flatten(1, 2)
    out = None if out is None else out.flatten(2, 3)
    lse = None if lse is None else lse.flatten(1, 2)
    hides = request.mask is not None or request.bias is not None
    if not hides or (weights.sum() if out is None else out.sum()).isfinite():
        return out, lse, weights, True
    with torch.no_grad():
        safe, weights, _ = request.defined(q, k, v, request.bias)
    return None if out is None else safe.transpose(1, 2), lse, weights.mean(1) if average else weights, False


def _fill_with_scores(scores: Tensor, q: Tensor, k: Tensor, added: Tensor | None, softcap: float | None) -> None:
    """Write those of a tile (b, k, G, l, n), of q (b*k, G*l, D), scaled, k (b*k, D, n), and mask and bias to add."""
    lines = scores.view(*q.shape[:2], k.shape[-1])
    if added is None or softcap is not None:
        torch.bmm(q, k, out=lines)
        if softcap is not None:
            lines.div_(softcap).tanh_().mul_(softcap)
        if added is not None:
            scores.add_(added)
        return
    scores.copy_(added.expand_as(scores))
    lines.baddbmm_(q, k)


def _level(scores: Tensor, weights: Tensor) -> Tensor:
    """lse of a tile's rows, from any one weight, which is exp(score - lse): of the first key if none of those is too
    small to say, else of the most visible one, for which all keys have to be gone through."""
    first = weights[..., 0]
    if first.amin().item() > 1e-30:
        return scores[..., 0] - first.log()
    return scores.amax(-1) - weights.amax(-1).log()


def _table(request: Request, rows: slice) -> tuple[slice | None, Tensor | None]:
    """The keys that some of the rows can see, as one slice (None: no key), and mask and bias over them as one tensor to
    add (B or 1, H or 1, l or 1, n or 1), None if there is nothing to add."""
    S = request.sizes.S
    columns, visible = slice(0, S), None
    bounds = request.bounds(rows.stop - rows.start, _KEYS, rows)
    if bounds is not None:
        seen = bounds.some.any(0).any(0).nonzero()  # blocks of keys
        if not len(seen):
            return None, None
        first, last = int(seen[0]), int(seen[-1]) + 1
        columns = slice(first * _KEYS, min(S, last * _KEYS))
        visible = None if bool(bounds.every[:, :, first:last].all()) else request.visible(rows, columns)
    added = request.added(rows, columns)
    added = None if added is None else added.to(request.q.dtype)
    if visible is not None:
        added = torch.where(visible, request.q.new_zeros(()) if added is None else added, -math.inf)
    return columns, added


def _of_heads(table: Tensor, batch: slice, heads: slice, request: Request) -> Tensor:
    """(B or 1, H or 1, l, n) to (b or 1, k or 1, G or 1, l, n)."""
    B, H, K, *_ = request.sizes
    table = table[batch] if table.shape[0] == B else table
    return table.unflatten(1, (K, H // K))[:, heads] if table.shape[1] == H else table[:, :, None]
