"""Attention over the blocks that can be seen, and no others.

The queries are taken in blocks of a few dozen. For each the mask says which blocks of keys hold a visible one; those
keys are gathered, and the tile is computed (`tiles.py`). Work and time are O(visible pairs): O(L * window) for a
window, the sum of squares for packed documents. The backward pass computes each tile again instead of keeping its
weights, so memory stays O(L + S) beyond inputs and outputs.

Dropout draws the mask of each tile from a seed of its own, so that the backward pass can draw it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multihead.kernels import flash_cpu
from multihead.kernels.autograd import differentiable_gradients, needs_definition, recording, transform_refusals
from multihead.kernels.table import Table
from multihead.kernels.tiles import FusedTiles, PlainTiles, Step, Tiles
from multihead.request import Request

NAME = "blocks"

_QUERIES, _KEYS = 64, 16  # to a block: measured best for windows and documents
_BLOCKS_AT_ONCE = 64
_SPAN = 2**16  # pairs that the mask of neighbouring tiles is asked about at a time
_TILE_BYTES = 2**19  # of scores that plain tiles work on at a time: about one core's second-level cache


def refusals(request: Request) -> list[str]:
    """Why this kernel can't run the request; empty: it can."""
    reasons = transform_refusals(request)
    B, H, _, L, S, _, V = request.sizes
    if recording():
        reasons.append(
            "torch.compile, torch.export and tracing: which blocks are visible is read from data while running"
        )
    if request.q.is_meta:
        reasons.append("meta: which blocks are visible is read from data, and there is none")
    if 0 in (B, H, L, S, V):
        reasons.append("nothing to compute: an axis is empty")
    return reasons


def drawbacks(request: Request) -> list[str]:  # noqa: ARG001  (every kernel is asked in the same way)
    """Why another kernel should be preferred although this one can."""
    return []


def tables(request: Request) -> list[Table]:  # noqa: ARG001  (every kernel is asked in the same way)
    """Which L x S tensors it makes besides those given, and why."""
    return []


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    """(out (B,H,L,V), lse (B,H,L))."""
    # One number from torch's own generator: dropout repeats under torch.manual_seed and under checkpointing.
    seed = int(torch.randint(2**62, (), device="cpu")) if request.dropout else None
    fused = request.q.device.type == "cpu" and not flash_cpu.refusals(request)
    bias = request.bias if isinstance(request.bias, Tensor) else None
    nothing = request.q.new_empty(0)  # autograd keeps the tensors, so that it can watch over them
    shell = request.with_tensors(nothing, nothing, nothing, request.bias if bias is None else nothing)
    job = _Job(shell, _plan(request, None if fused else _TILE_BYTES), seed, fused)
    watched = [] if request.mask is None else list(request.mask.tensors().values())
    out_BLHV, lse = _Blocks.apply(request.q, request.k, request.v, bias, job, *watched, *request.positions())
    return out_BLHV.transpose(1, 2), lse


class _Job(NamedTuple):
    """What forward and backward share."""

    request: Request  # without its tensors
    steps: list[Step]
    seed: int | None  # of the dropout
    fused: bool

    def tiles(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, careful: bool) -> Tiles:
        request = self.request.with_tensors(q, k, v, self.request.bias if bias is None else bias)
        return (FusedTiles if self.fused else PlainTiles)(request, self.seed, careful)


def _plan(request: Request, tile_bytes: int | None) -> list[Step]:
    """The tiles that hold something visible; None for the bytes: all heads at once."""
    _, H, K, _, S, _, _ = request.sizes
    steps: list[Step] = []
    for rows, seen, whole, batch in _seen(request):
        columns = _slices(seen, S)
        if not columns:
            continue
        masked = _places(columns, _slices([s and not w for s, w in zip(seen, whole, strict=True)], S))
        at_once = (batch.stop - batch.start) * K
        if tile_bytes is not None:
            width = sum(c.stop - c.start for c in columns)
            at_once = max(1, tile_bytes // (H // K * (rows.stop - rows.start) * width * 4))
        span = rows, slice(columns[0].start, columns[-1].stop)
        for part, heads in parts(batch, K, at_once):
            steps.append(Step(len(steps), part, heads, rows, columns, masked, span))
    return steps if tile_bytes is not None else _with_spans(steps)


def _with_spans(steps: list[Step]) -> list[Step]:
    """Give neighbouring tiles one span, as long as a table of it stays small."""
    done: list[Step] = []
    group: list[Step] = []
    for step in steps:
        if group and group[-1].batch == step.batch:
            span = _around(group[-1].span, step.span)
            if (span[0].stop - span[0].start) * (span[1].stop - span[1].start) <= _SPAN:
                group = [one._replace(span=span) for one in (*group, step)]
                continue
        done += group
        group = [step]
    return done + group


def _around(a: tuple[slice, slice], b: tuple[slice, slice]) -> tuple[slice, slice]:
    """The rectangle around two."""
    rows, columns = (slice(min(x.start, y.start), max(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return rows, columns


def _seen(request: Request) -> Iterator[tuple[slice, list[bool], list[bool], slice]]:
    """For each block of queries: its rows, which key blocks it sees at all, which as a whole, and for which rows of the
    batch this is so. The mask is asked about many blocks at a time, but never about the whole of a long sequence."""
    B, _, _, L, S, _, _ = request.sizes
    for start in range(0, L, _QUERIES * _BLOCKS_AT_ONCE):
        stop = min(L, start + _QUERIES * _BLOCKS_AT_ONCE)
        bounds = request.bounds(_QUERIES, _KEYS, slice(start, stop))
        if bounds is None:
            some = every = [[[True] * -(-S // _KEYS)] * -(-(stop - start) // _QUERIES)]
        else:
            some, every = bounds.some.tolist(), bounds.every.tolist()
        alike = [slice(0, B)] if len(some) == 1 else [slice(b, b + 1) for b in range(B)]
        for batch, some_of, every_of in zip(alike, some, every, strict=True):
            for block, (seen, whole) in enumerate(zip(some_of, every_of, strict=True)):
                first = start + block * _QUERIES
                yield slice(first, min(stop, first + _QUERIES)), seen, whole, batch


def _slices(flags: list[bool], length: int) -> list[slice]:
    """The runs of blocks whose flag is True, as slices of the keys."""
    edges = [i for i, (a, b) in enumerate(zip([False, *flags], [*flags, False], strict=True)) if a != b]
    return [slice(a * _KEYS, min(length, b * _KEYS)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _places(columns: list[slice], asked: list[slice]) -> list[tuple[slice, slice]]:
    """Where parts of S come to lie when `columns` are gathered side by side. Each part lies inside one of them."""
    places: list[tuple[slice, slice]] = []
    start = 0
    for column in columns:
        for part in asked:
            if column.start <= part.start < column.stop:
                at = start + part.start - column.start
                places.append((slice(at, at + part.stop - part.start), part))
        start += column.stop - column.start
    return places


def parts(batch: slice, K: int, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Cut rows of the batch x key/value heads into parts of at most `at_once`: whole rows if they fit, else heads."""
    rows, heads = max(1, at_once // K), min(K, at_once)
    for b in range(batch.start, batch.stop, rows):
        for h in range(0, K, heads):
            yield slice(b, min(batch.stop, b + rows)), slice(h, min(K, h + heads))


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, job: _Job, *watched: Tensor
    ) -> tuple[Tensor, Tensor]:
        """out (B, L, H, V) and lse (B, H, L).

        `watched` are the tensors of the mask and the positions, which the backward pass reads again: they are saved, so
        that autograd notices if they were changed in between.
        """
        out, lse = _forward(job.tiles(q, k, v, bias, careful=False), job.steps)
        if not out.sum().isfinite():  # perhaps NaN or inf in keys that are hidden: they must not count
            out, lse = _forward(job.tiles(q, k, v, bias, careful=True), job.steps)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, out, lse, *watched)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        q, k, v, bias, out, lse, *watched = ctx.saved_tensors
        job: _Job = ctx.job
        rest = (None,) * (1 + len(watched))
        out = out.transpose(1, 2)
        grad_out = None if grad_out is None else grad_out.transpose(1, 2)
        if needs_definition(grad_out, grad_lse):
            return *_second_order(job, (q, k, v, bias), grad_out, grad_lse), *rest
        if grad_out is None:
            if grad_lse is None:
                return None, None, None, None, *rest
            grad_out = torch.zeros_like(out)
        with torch.autocast(q.device.type, enabled=False):
            wanted = bias if ctx.needs_input_grad[3] else None
            known = out.to(lse.dtype), lse, grad_out.to(lse.dtype), grad_lse, wanted
            grads = _backward(job.tiles(q, k, v, bias, careful=False), job.steps, *known)
            if not all(grad.sum().isfinite() for grad in grads[:3]):
                grads = _backward(job.tiles(q, k, v, bias, careful=True), job.steps, *known)
        return *(None if g is None else g.to(t.dtype) for g, t in zip(grads, (q, k, v, bias), strict=True)), *rest


def _forward(tiles: Tiles, steps: list[Step]) -> tuple[Tensor, Tensor]:
    B, H, _, L, _, _, V = tiles.request.sizes
    out = tiles.v.new_zeros(B, L, H, V)  # the layout in which heads are joined without a copy
    lse = tiles.v.new_full((B, H, L), -math.inf)
    grouped_out, grouped_lse = tiles.by_group(out.transpose(1, 2)), tiles.by_group(lse)
    for step in steps:
        place = (step.batch, step.heads, slice(None), step.rows)
        grouped_out[place], grouped_lse[place] = tiles.attend(step)
    return out, lse


def _backward(
    tiles: Tiles,
    steps: list[Step],
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # of rows that see nothing: their scores are -inf, their weights 0
    out, lse, grad_out = tiles.by_group(out), tiles.by_group(lse), tiles.by_group(grad_out)
    grad_lse = None if grad_lse is None else tiles.by_group(grad_lse)
    grad_q, grad_k, grad_v = torch.zeros_like(tiles.q), torch.zeros_like(tiles.k), torch.zeros_like(tiles.v)
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=tiles.wide)
    for step in steps:
        place = (step.batch, step.heads, slice(None), step.rows)
        d_lse = None if grad_lse is None else grad_lse[place]
        found = tiles.gradients(step, out[place], lse[place], grad_out[place], d_lse)
        grad_q[place] = found.q
        start = 0
        for columns in step.columns:
            part = slice(start, start + columns.stop - columns.start)
            grad_k[step.batch, step.heads, columns] += found.k[:, :, part]
            grad_v[step.batch, step.heads, columns] += found.v[:, :, part]
            if grad_bias is not None and found.scores is not None:
                tile = tiles.of_heads(tiles.request.tile_of(grad_bias, step.rows, columns), step)
                tile += found.scores[..., part].sum_to_size(tile.shape)
            start = part.stop
    return grad_q.flatten(1, 2), grad_k, grad_v, grad_bias


def _second_order(
    job: _Job, inputs: tuple[Tensor | None, ...], grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    request = job.request

    def define(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Any:
        return request.defined(q, k, v, request.bias if bias is None else bias, _whole_dropout_mask(job, q, k, v))

    return differentiable_gradients(define, inputs, (grad_out, None, grad_lse))


def _whole_dropout_mask(job: _Job, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The dropout of all tiles as one (B, H, L, S) tensor, for the definition."""
    if job.seed is None:
        return None
    tiles = job.tiles(q.detach(), k.detach(), v.detach(), None, careful=False)
    B, H, K, L, S, _, _ = job.request.sizes
    whole = tiles.q.new_zeros(B, K, H // K, L, S)
    for step in job.steps:
        kept = tiles.dropout_mask(step)
        assert kept is not None
        start = 0
        for columns in step.columns:
            part = slice(start, start + columns.stop - columns.start)
            whole[step.batch, step.heads, :, step.rows, columns] = kept[..., part]
            start = part.stop
    return whole.flatten(1, 2)
