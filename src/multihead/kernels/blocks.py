"""Attention over the blocks that can be seen, and no others, in plain PyTorch.

The queries are taken in blocks of a few dozen. For each the mask says which blocks of keys hold a visible one; those
keys are gathered (a slice, most often), and the block is computed as the reference computes everything: scores, softmax,
product. Work and time are O(visible pairs): O(L * window) for a window, the sum of squares for packed documents.

The backward pass computes the scores of a block again from q, k and lse instead of keeping them, so that memory stays
O(L + S) beyond inputs and outputs. With delta = rowsum(grad_out * out), the gradients are

    dV = P^T dO      dS = P * (dO V^T - delta + grad_lse)      dQ = scale dS K      dK = scale dS^T Q

(Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135, section B.2; the term grad_lse is d lse / d S = P).
Dropout draws the mask of each block again from a seed of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multihead.kernels.autograd import differentiable_gradients, transform_refusals
from multihead.request import Request

NAME = "blocks"

_BLOCK = 64  # queries and keys to a block; measured best from 32 to 256 for windows and documents
_TILE_BYTES = 2**19  # scores worked on at a time, about one core's second-level cache


def refusals(request: Request) -> list[str]:
    """Why this kernel can't run the request; empty: it can."""
    reasons = transform_refusals(request)
    B, H, _, L, S, _, V = request.sizes
    if torch.compiler.is_compiling():
        reasons.append("torch.compile and torch.export: which blocks are visible is read from data while running")
    if 0 in (B, H, L, S, V):
        reasons.append("nothing to compute: an axis is empty")
    return reasons


def drawbacks(request: Request) -> list[str]:  # noqa: ARG001  (every kernel is asked in the same way)
    """Why another kernel should be preferred although this one can."""
    return []


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    """(out (B,H,L,V), lse (B,H,L))."""
    seed = None
    if request.dropout:
        # One number from torch's own generator: dropout repeats under torch.manual_seed and under checkpointing.
        seed = int(torch.randint(2**62, ()))
    bias = request.bias if isinstance(request.bias, Tensor) else None
    nothing = request.q.new_empty(0)  # autograd keeps the tensors, so that it can watch over them
    job = _Job(request.with_tensors(nothing, nothing, nothing, None if bias is not None else request.bias), tuple(_plan(request)), seed)
    return _Blocks.apply(request.q, request.k, request.v, bias, job)


class _Step(NamedTuple):
    """One tile: some heads of some rows of the batch, one block of queries, the keys it can see."""

    number: int
    batch: slice
    heads: slice  # key/value heads
    rows: slice
    columns: list[slice]  # of the keys, in order and apart
    masked: list[tuple[slice, slice]]  # where the mask must be asked: (place among the gathered keys, place in S)


class _Job(NamedTuple):
    """What forward and backward share: the request without its tensors, the steps, the seed of the dropout."""

    request: Request
    steps: tuple[_Step, ...]
    seed: int | None


def _plan(request: Request) -> Iterator[_Step]:
    B, H, K, L, S, _, _ = request.sizes
    bounds = request.bounds(_BLOCK, _BLOCK)
    key_blocks = -(-S // _BLOCK)
    if bounds is None:
        some = every = [[[True] * key_blocks] * -(-L // _BLOCK)]
    else:
        some, every = bounds.some.tolist(), bounds.every.tolist()
    groups = [slice(0, B)] if len(some) == 1 else [slice(b, b + 1) for b in range(B)]  # rows that see alike
    number = 0
    for batch, some_of, every_of in zip(groups, some, every, strict=True):
        for block, (seen, whole) in enumerate(zip(some_of, every_of, strict=True)):
            rows = slice(block * _BLOCK, min(L, (block + 1) * _BLOCK))
            columns = [slice(a * _BLOCK, min(S, b * _BLOCK)) for a, b in _runs(seen)]
            width = sum(c.stop - c.start for c in columns)
            if not width:
                continue
            asked = _runs([s and not w for s, w in zip(seen, whole, strict=True)])
            masked = _places(columns, [slice(a * _BLOCK, min(S, b * _BLOCK)) for a, b in asked])
            at_once = max(1, _TILE_BYTES // (H // K * (rows.stop - rows.start) * width * 4))
            for part, heads in _parts(batch, K, at_once):
                yield _Step(number, part, heads, rows, columns, masked)
                number += 1


def _runs(flags: list[bool]) -> list[tuple[int, int]]:
    """First and past-the-last index of each run of True."""
    edges = [i for i, (a, b) in enumerate(zip([False, *flags], [*flags, False], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _places(columns: list[slice], asked: list[slice]) -> list[tuple[slice, slice]]:
    """Where parts of S come to lie when `columns` are gathered side by side. Each part lies inside one of them."""
    places, start = [], 0
    for column in columns:
        for part in asked:
            if column.start <= part.start < column.stop:
                at = start + part.start - column.start
                places.append((slice(at, at + part.stop - part.start), part))
        start += column.stop - column.start
    return places


def _parts(batch: slice, K: int, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Cut (rows of the batch) x (key/value heads) into parts of at most `at_once`: whole rows if they fit, else heads."""
    rows = max(1, at_once // K)
    heads = min(K, at_once)
    for b in range(batch.start, batch.stop, rows):
        for h in range(0, K, heads):
            yield slice(b, min(batch.stop, b + rows)), slice(h, min(K, h + heads))


class _Tiles:
    """The tensors of a job in float32 or better, and the parts of them that a step needs."""

    def __init__(self, job: _Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, careful: bool) -> None:
        self.request, self.seed, self.careful = job.request.with_tensors(q, k, v, job.request.bias if bias is None else bias), job.seed, careful
        B, H, K, L, _, _, _ = self.sizes = job.request.sizes
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.q = self.by_group(q.to(self.wide))  # (B, K, G, L, D)
        self.k, self.v = k.to(self.wide).contiguous(), v.to(self.wide).contiguous()
        self.generator = torch.Generator(q.device)

    def by_group(self, tensor: Tensor) -> Tensor:  # (B, H, L, ...) -> (B, K, G, L, ...)
        return tensor.unflatten(1, (self.sizes.K, -1))

    def rows(self, grouped: Tensor, step: _Step) -> Tensor:  # (B, K, G, L, X) -> (b, k, G*l, X)
        return grouped[step.batch, step.heads, :, step.rows].flatten(2, 3)

    def columns(self, tensor: Tensor, step: _Step) -> Tensor:  # (B, K, S, X) -> (b, k, n, X)
        part = tensor[step.batch, step.heads]
        gathered = [part[:, :, columns] for columns in step.columns]
        return gathered[0] if len(gathered) == 1 else torch.cat(gathered, 2)

    def of_heads(self, table: Tensor, step: _Step) -> Tensor:  # (B or 1, H or 1, l, n) -> (b or 1, k or 1, G or 1, l, n)
        B, H, K, *_ = self.sizes
        table = table[step.batch] if table.shape[0] == B else table
        return table.unflatten(1, (K, -1))[:, step.heads] if table.shape[1] == H else table[:, :, None]

    def tile(self, step: _Step) -> _Tile:
        """The scores of a step, masked."""
        q, k, v = self.rows(self.q, step) * self.request.scale, self.columns(self.k, step), self.columns(self.v, step)
        scores = q @ k.transpose(-1, -2)  # (b, k, G*l, n)
        slope = None
        if self.request.softcap is not None:
            bounded = scores.div_(self.request.softcap).tanh_()
            slope = 1 - bounded.square()
            scores = bounded * self.request.softcap
        by_query = scores.unflatten(2, (self.q.shape[2], -1))  # (b, k, G, l, n), the same memory
        if self.request.bias is not None:
            at = 0
            for columns in step.columns:
                added = self.request.added(step.rows, columns)
                if added is not None:
                    by_query[..., at : at + columns.stop - columns.start] += self.of_heads(added, step)
                at += columns.stop - columns.start
        for place, columns in step.masked:
            visible = self.request.visible(step.rows, columns)
            assert visible is not None
            visible = self.of_heads(visible, step)
            by_query[..., place].masked_fill_(~visible, -math.inf)
            if self.careful:
                seen = visible.expand(*visible.shape[:3], *by_query.shape[3:4], visible.shape[4]).any(3).any(2)
                k, v = (_with_zeros(t, place, ~seen[..., None]) for t in (k, v))
        return _Tile(q, k, v, scores, slope)

    def dropout_mask(self, step: _Step, shape: torch.Size) -> Tensor | None:
        """What the weights of a step are multiplied by (0, or 1 / (1 - rate)), the same at each call."""
        if self.seed is None:
            return None
        rate = self.request.dropout
        self.generator.manual_seed(self.seed + step.number)
        drawn = torch.rand(shape, generator=self.generator, dtype=self.wide, device=self.q.device)
        return (drawn >= rate).to(self.wide).mul_(1.0 / (1.0 - rate) if rate < 1.0 else 0.0)


class _Tile(NamedTuple):
    q: Tensor  # (b, k, R, D), scaled; R = G * l
    k: Tensor  # (b, k, n, D)
    v: Tensor  # (b, k, n, V)
    scores: Tensor  # (b, k, R, n)
    slope: Tensor | None  # of the softcap at each score


def _with_zeros(tensor: Tensor, place: slice, where: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[:, :, place].masked_fill_(where, 0.0)
    return tensor


def _forward(tiles: _Tiles, job: _Job) -> tuple[Tensor, Tensor]:
    B, H, _, L, _, _, V = tiles.sizes
    out = tiles.v.new_zeros(B, L, H, V).transpose(1, 2)  # the layout in which heads are joined without a copy
    lse = tiles.v.new_full((B, H, L), -math.inf)
    grouped_out, grouped_lse = tiles.by_group(out), tiles.by_group(lse)
    for step in job.steps:
        _, _, v, scores, _ = tiles.tile(step)
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill_(top == -math.inf, 0.0)  # a row that sees nothing
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        kept = tiles.dropout_mask(step, weights.shape)
        part = (weights if kept is None else weights.mul_(kept)) @ v
        part /= total.masked_fill(total == 0, 1.0)
        place = (step.batch, step.heads, slice(None), step.rows)
        grouped_out[place] = part.unflatten(2, (grouped_out.shape[2], -1))
        grouped_lse[place] = (top + total.log()).unflatten(2, (grouped_lse.shape[2], -1)).squeeze(-1)
    return out, lse


def _backward(
    tiles: _Tiles, job: _Job, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    delta = (grad_out * out).sum(-1)
    if grad_lse is not None:
        delta -= grad_lse
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # of rows that see nothing: their scores are -inf, their weights 0
    grad_out, delta, lse = tiles.by_group(grad_out), tiles.by_group(delta[..., None]), tiles.by_group(lse[..., None])
    grad_q, grad_k, grad_v = torch.zeros_like(tiles.q), torch.zeros_like(tiles.k), torch.zeros_like(tiles.v)
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=tiles.wide)
    for step in job.steps:
        q, k, v, scores, slope = tiles.tile(step)
        d_out = tiles.rows(grad_out, step)
        weights = scores.sub_(tiles.rows(lse, step)).exp_()
        d_scores = d_out @ v.transpose(-1, -2)
        kept = tiles.dropout_mask(step, weights.shape)
        if kept is not None:
            d_scores *= kept
        d_scores.sub_(tiles.rows(delta, step)).mul_(weights)
        if kept is not None:
            weights *= kept
        d_bias = d_scores.unflatten(2, (tiles.q.shape[2], -1))
        if slope is not None:
            d_scores = d_scores * slope
        d_q = (d_scores @ k).mul_(tiles.request.scale)
        grad_q[step.batch, step.heads, :, step.rows] = d_q.unflatten(2, (tiles.q.shape[2], -1))
        d_k, d_v = d_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ d_out
        at = 0
        for columns in step.columns:
            width = columns.stop - columns.start
            grad_k[step.batch, step.heads, columns] += d_k[:, :, at : at + width]
            grad_v[step.batch, step.heads, columns] += d_v[:, :, at : at + width]
            if grad_bias is not None:
                part = tiles.of_heads(tiles.request.tile_of(grad_bias, step.rows, columns), step)
                part += d_bias[..., at : at + width].sum_to_size(part.shape)
            at += width
    return grad_q.flatten(1, 2), grad_k, grad_v, grad_bias


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, job: _Job) -> tuple[Tensor, Tensor]:
        out, lse = _forward(_Tiles(job, q, k, v, bias, careful=False), job)
        if not out.sum().isfinite():  # perhaps NaN or inf in keys that are hidden: look closer, they must not count
            out, lse = _forward(_Tiles(job, q, k, v, bias, careful=True), job)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:  # type: ignore[override]
        q, k, v, bias, out, lse = ctx.saved_tensors
        job: _Job = ctx.job
        if torch.is_grad_enabled():
            return *_second_order(job, (q, k, v, bias), grad_out, grad_lse), None
        if grad_out is None:
            if grad_lse is None:
                return None, None, None, None, None
            grad_out = torch.zeros_like(out)
        wide_out, wide_grad = out.to(lse.dtype), grad_out.to(lse.dtype)
        with torch.autocast(q.device.type, enabled=False):
            wanted = bias if ctx.needs_input_grad[3] else None
            grads = _backward(
                _Tiles(job, q, k, v, bias, careful=False), job, wide_out, lse, wide_grad, grad_lse, wanted
            )
            if not grads[0].sum().isfinite():
                grads = _backward(
                    _Tiles(job, q, k, v, bias, careful=True), job, wide_out, lse, wide_grad, grad_lse, wanted
                )
        return *(None if g is None else g.to(q.dtype) for g in grads), None


def _second_order(
    job: _Job, inputs: tuple[Tensor | None, ...], grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    request = job.request
    q_positions, k_positions = request.positions()

    def define(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Any:
        return request.definition(
            q,
            k,
            v,
            request.mask,
            bias=request.bias if bias is None else bias,
            scale=request.scale,
            softcap=request.softcap,
            dropout_mask=_whole_dropout_mask(job, q, k, v),
            q_positions=q_positions,
            k_positions=k_positions,
        )

    return differentiable_gradients(define, inputs, grad_out, grad_lse)


def _whole_dropout_mask(job: _Job, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The dropout of all steps as one (B, H, L, S) tensor, for the definition."""
    if job.seed is None:
        return None
    tiles = _Tiles(job, q.detach(), k.detach(), v.detach(), None, careful=False)
    B, H, K, L, S, _, _ = tiles.sizes
    whole = tiles.q.new_zeros(B, K, H // K, L, S)
    for step in job.steps:
        lines = whole[step.batch, step.heads, :, step.rows]
        width = sum(c.stop - c.start for c in step.columns)
        kept = tiles.dropout_mask(step, torch.Size((*lines.shape[:2], lines.shape[2] * lines.shape[3], width)))
        assert kept is not None
        at = 0
        for columns in step.columns:
            part = kept[..., at : at + columns.stop - columns.start]
            lines[..., columns] = part.unflatten(2, lines.shape[2:4])
            at += columns.stop - columns.start
    return whole.flatten(1, 2)
