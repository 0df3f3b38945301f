"""The weights of a request, some queries at a time: what all statistics are made of.

For each block of queries the scores are made in float32 (float64 for float64), over the keys that any of them may see,
and from them the weights, exactly as the definition has them. Nothing of size L x S exists: memory is that of one
block, O(B H size S).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.request import Request

_BLOCK_BYTES = 8 * 2**20  # of weights at a time
_CELL = 64  # keys, for which one answer tells whether any of them is visible
_FAR = -1e4  # below the top of a row, in place of -inf: its exp is 0 in float64 too, and 0 times it is 0


@dataclass(frozen=True)
class Block:
    """Some queries' weights. Letters: r of the L queries, c of the S keys: those that any of the queries may see.

    Attributes:
        rows, columns: which.
        weights: (B, H, r, c), before dropout; 0 where hidden.
        below: (B, H, r, c), the scores less the row's largest; `_FAR` where hidden.
        top: (B, H, r), the row's largest score; -inf for a query that sees nothing.
        log_total: (B, H, r), log of the sum of exp(scores - top), sinks included; 0 for a query that sees nothing.
        visible: bool, broadcastable to (B, H, r, c); None = all.
    """

    rows: slice
    columns: slice
    weights: Tensor
    below: Tensor
    top: Tensor
    log_total: Tensor
    visible: Tensor | None

    @property
    def blind(self) -> Tensor:
        """(B, H, r), which queries see nothing."""
        return self.top == -math.inf

    def visible_keys(self) -> Tensor:
        """(B, H, r), how many keys each query may see."""
        if self.visible is None:
            return torch.full_like(self.top, self.weights.shape[-1])
        return self.visible.expand(self.weights.shape).sum(-1).to(self.top.dtype)


def rows_at_once(request: Request) -> int:
    """How many queries a block has unless told."""
    B, H, _, L, S, _, _ = request.sizes
    wide = torch.promote_types(request.q.dtype, torch.float32).itemsize
    return max(1, min(L, _BLOCK_BYTES // max(1, B * H * S * wide)))


@torch.no_grad()
def walk(request: Request, sinks: Tensor | None, size: int, rows: slice = slice(None)) -> Iterator[Block]:
    """Blocks of `size` queries, in order.

    Args:
        request: whose; its values are not looked at.
        sinks: (H,), logits that take a share of the denominator.
        size: queries of a block.
        rows: only those, a slice with step 1.
    """
    wide = torch.promote_types(request.q.dtype, torch.float32)
    with torch.autocast(request.q.device.type, enabled=False):
        keys = request.k.to(wide).transpose(-1, -2)  # (B, K, D, S)
        first, stop, _ = rows.indices(request.sizes.L)
        for start in range(first, stop, size):
            yield _block(request, sinks, slice(start, min(start + size, stop)), keys)


@torch.no_grad()
def row_of(request: Request, sinks: Tensor | None, i: int) -> tuple[Tensor, slice]:
    """One query's weights (B, H, 1, c), and which keys these are: the c from the first to the last that it may see. As
    `walk` gives them, in fewer operations."""
    rows, wide = slice(i, i + 1), torch.promote_types(request.q.dtype, torch.float32)
    with torch.autocast(request.q.device.type, enabled=False):
        columns, seen = _columns(request, rows)
        keys = request.k[:, :, columns].to(wide).transpose(-1, -2)
        scores, visible = _scores(request, rows, columns, keys, seen)
        weights = scores.softmax(-1)
        if visible is not None and columns.stop > columns.start:
            weights = weights.masked_fill_(scores.amax(-1, keepdim=True) == -math.inf, 0.0)
        if sinks is not None:
            lse = scores.logsumexp(-1, keepdim=True)
            weights = weights * (lse - torch.logaddexp(lse, sinks.to(wide)[:, None, None])).exp()
        return weights, columns


def _block(request: Request, sinks: Tensor | None, rows: slice, keys: Tensor) -> Block:
    columns, seen = _columns(request, rows)
    scores, visible = _scores(request, rows, columns, keys[..., columns], seen)
    top = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    below = scores.sub_(top.masked_fill(top == -math.inf, 0.0)[..., None]).clamp_(min=_FAR)
    weights = below.exp()
    blind = top == -math.inf
    log_total = weights.sum(-1).masked_fill_(blind, 1.0).log_()
    if sinks is not None:
        log_total = torch.logaddexp(log_total, (sinks.to(top.dtype)[:, None] - top).masked_fill_(blind, -math.inf))
    weights = weights.mul_((-log_total).exp_().masked_fill_(blind, 0.0)[..., None])
    return Block(rows, columns, weights, below, top, log_total, visible)


def _scores(
    request: Request, rows: slice, columns: slice, keys: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The scores of a rectangle (B, H, r, c), -inf where hidden, and what is visible, by the mask (`visible`) and the
    bias. keys are (B, K, D, c)."""
    B, H, K, _, _, D, _ = request.sizes
    r = rows.stop - rows.start
    q = request.q[:, :, rows].to(keys.dtype)
    if keys.numel() < q.numel():  # the fewer are scaled: for one key that is most of the time
        keys = keys * request.scale
    else:
        q = q * request.scale
    # Query heads that share a key head are rows of one product.
    scores = (q.reshape(B, K, H // K * r, D) @ keys).view(B, H, r, keys.shape[-1])
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    added = request.added(rows, columns)
    if added is not None:
        scores = scores + added.to(scores.dtype)
        shown = added != -math.inf
        visible = shown if visible is None else visible & shown
    if visible is not None:
        scores = scores.masked_fill_(~visible, -math.inf)
    return scores, visible


@torch.no_grad()
def keys_of(request: Request, columns: slice, lse: Tensor) -> Tensor:
    """The weights of all queries on some neighbouring keys, (B, H, L, c), from the log of the denominators (B, H, L).
    NaN for queries that see nothing."""
    with torch.autocast(request.q.device.type, enabled=False):
        keys = request.k[:, :, columns].to(lse.dtype).transpose(-1, -2)
        rows = slice(0, request.sizes.L)
        scores, _ = _scores(request, rows, columns, keys, request.visible(rows, columns))
        return (scores - lse[..., None]).exp()  # -inf less -inf is NaN


def _columns(request: Request, rows: slice) -> tuple[slice, Tensor | None]:
    """The keys from the first to the last that some query of a block may see, and what the mask leaves visible of them:
    None = all."""
    every = slice(0, request.sizes.S)
    if rows.stop - rows.start == 1:  # of one query the mask itself is quicker than its bounds
        visible = request.visible(rows, every)
        if visible is None:
            return every, None
        visible = visible.expand(*visible.shape[:-1], every.stop)  # a table may be the same for all keys
        columns = _span(visible.flatten(0, 2), 1, every)
        return columns, visible[..., columns]
    bounds = request.bounds(rows.stop - rows.start, _CELL, rows)
    if bounds is None:
        return every, None
    columns = _span(bounds.some.flatten(0, 1), _CELL, every)
    cells = slice(columns.start // _CELL, -(-columns.stop // _CELL))
    return columns, None if bounds.every[..., cells].all() else request.visible(rows, columns)


def _span(seen: Tensor, size: int, every: slice) -> slice:
    """From the first to the last that anybody sees of (n, cells), where a cell is `size` keys."""
    found = seen.any(0).nonzero()[:, 0]
    if not len(found):
        return slice(0, 0)
    return slice(int(found[0]) * size, min(every.stop, (int(found[-1]) + 1) * size))
