"""Statistics of attention weights, each gathered block by block: what a `Record` gives by name.

p_ij are the weights of query i on key j, before dropout, and n_i how many keys query i may see. A query that sees
nothing has no weights: its statistics are NaN. Numbers are float32 (float64 for float64), of query heads, H.

A statistic is a class with `add(block)` and `result()`. One pass over the blocks feeds all that are asked for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value
from multihead.inspection.walk import Block
from multihead.request import Request


class Statistic(Protocol):
    """Gathered over blocks."""

    def add(self, block: Block) -> None: ...

    def result(self) -> Any: ...


class _OfQueries(ABC):
    """One number for each query, (B, H, L), of `numbers(block)`, (B, H, r)."""

    def __init__(self, request: Request) -> None:
        B, H, _, L, _, _, _ = request.sizes
        wide = torch.promote_types(request.q.dtype, torch.float32)
        self.found = torch.full((B, H, L), math.nan, dtype=wide, device=request.q.device)

    def add(self, block: Block) -> None:
        self.found[..., block.rows] = self.numbers(block).masked_fill(block.blind, math.nan)

    @abstractmethod
    def numbers(self, block: Block) -> Tensor:
        """(B, H, r)."""

    def result(self) -> Tensor:
        return self.found


class Entropy(_OfQueries):
    """-sum_j p_ij ln p_ij in nats: 0 where all is on one key, ln n_i where it is even (Clark et al. 2019)."""

    def numbers(self, block: Block) -> Tensor:
        # ln p = below - log_total, and where a sink takes a share the weights sum to less than 1.
        spread = (block.weights * block.below).sum(-1)
        return block.log_total * block.weights.sum(-1) - spread


class MaxWeight(_OfQueries):
    """max_j p_ij."""

    def numbers(self, block: Block) -> Tensor:
        return (-block.log_total).exp()


class MaxLogit(_OfQueries):
    """max_j of the scores, after scale, softcap and bias."""

    def numbers(self, block: Block) -> Tensor:
        return block.top


class VisibleKeys(_OfQueries):
    """n_i."""

    def numbers(self, block: Block) -> Tensor:
        return block.visible_keys()


class Distance(_OfQueries):
    """sum_j p_ij d(i, j), of positions or of coordinates."""

    def __init__(self, request: Request, coords: tuple[Tensor, Tensor] | None) -> None:
        super().__init__(request)
        self.coords = coords
        self.positions = request.positions()

    def numbers(self, block: Block) -> Tensor:
        dtype = block.weights.dtype
        if self.coords is not None:
            q_at, k_at = self.coords
            far = torch.cdist(q_at[block.rows].to(dtype), k_at[block.columns].to(dtype))  # (r, c)
        else:
            q_at, k_at = self.positions
            far = (q_at[..., block.rows, None] - k_at[..., None, block.columns]).abs().to(dtype)  # (r, c) or (B, r, c)
            far = far[:, None] if far.ndim == 3 else far
        return (block.weights * far).sum(-1)


class Coverage(_OfQueries):
    """The least number of keys that together have at least a share of all the query's weights."""

    def __init__(self, request: Request, mass: float) -> None:
        super().__init__(request)
        self.mass = mass

    def numbers(self, block: Block) -> Tensor:
        sums = block.weights.sort(-1, descending=True).values.cumsum(-1)
        if not sums.shape[-1]:
            return torch.zeros_like(block.top)
        return ((sums < self.mass * sums[..., -1:]).sum(-1) + 1).to(sums.dtype)


class Mass(_OfQueries):
    """sum of p_ij over some keys j: `keys` is (S,), bool."""

    def __init__(self, request: Request, keys: Tensor) -> None:
        super().__init__(request)
        self.keys = keys

    def numbers(self, block: Block) -> Tensor:
        return block.weights @ self.keys[block.columns].to(block.weights.dtype)


class Received:
    """sum_i p_ij, (B, H, S)."""

    def __init__(self, request: Request) -> None:
        B, H, _, _, S, _, _ = request.sizes
        wide = torch.promote_types(request.q.dtype, torch.float32)
        self.found = torch.zeros((B, H, S), dtype=wide, device=request.q.device)

    def add(self, block: Block) -> None:
        self.found[..., block.columns] += block.weights.sum(-2)

    def result(self) -> Tensor:
        return self.found


class SeenBy(Received):
    """How many queries may see each key, (B, H, S)."""

    def add(self, block: Block) -> None:
        shape = block.weights.shape
        if block.visible is None:
            self.found[..., block.columns] += shape[-2]
        else:
            self.found[..., block.columns] += block.visible.expand(shape).sum(-2)


class TopKeys:
    """The k largest weights of each query and their keys, both (B, H, L, k)."""

    def __init__(self, request: Request, k: int) -> None:
        B, H, _, L, _, _, _ = request.sizes
        wide = torch.promote_types(request.q.dtype, torch.float32)
        self.k = k
        self.values = torch.zeros((B, H, L, k), dtype=wide, device=request.q.device)
        self.indices = torch.arange(k, device=request.q.device).expand(B, H, L, k).clone()

    def add(self, block: Block) -> None:
        count = min(self.k, block.weights.shape[-1])
        values, indices = block.weights.topk(count, -1)
        self.values[:, :, block.rows, :count] = values
        self.indices[:, :, block.rows, :count] = indices + block.columns.start
        if count < self.k:  # of keys that no query of the block may see
            rest = [s for s in range(self.k) if not block.columns.start <= s < block.columns.stop]
            others = torch.tensor(rest[: self.k - count], device=indices.device)
            self.indices[:, :, block.rows, count:] = others
            self.values[:, :, block.rows, count:] = 0

    def result(self) -> tuple[Tensor, Tensor]:
        return self.values, self.indices


class Similarity:
    """The mean over queries of the Jensen-Shannon divergence of two heads' weights in nats, (B, H, H)."""

    def __init__(self, request: Request) -> None:
        B, H, _, _, _, _, _ = request.sizes
        wide = torch.promote_types(request.q.dtype, torch.float32)
        self.total = torch.zeros((B, H, H), dtype=wide, device=request.q.device)
        self.count = torch.zeros_like(self.total)

    def add(self, block: Block) -> None:
        own = torch.special.entr(block.weights).sum(-1)  # (B, H, r)
        for h in range(own.shape[1]):
            both = torch.special.entr((block.weights + block.weights[:, h : h + 1]) / 2).sum(-1)
            apart = both - (own + own[:, h : h + 1]) / 2  # (B, H, r)
            counts = ~(block.blind | block.blind[:, h : h + 1])
            self.total[:, h] += (apart * counts).sum(-1)
            self.count[:, h] += counts.sum(-1)

    def result(self) -> Tensor:
        return (self.total / self.count).clamp(min=0)


class Pattern:
    """The mean, over the queries that have such a key, of their weight on the keys of a pattern, (B, H)."""

    def __init__(self, request: Request, kind: str, tokens: tuple[Tensor, Tensor] | None) -> None:
        B, H, _, _, _, _, _ = request.sizes
        wide = torch.promote_types(request.q.dtype, torch.float32)
        self.kind, self.tokens, self.positions = kind, tokens, request.positions()
        self.total = torch.zeros((B, H), dtype=wide, device=request.q.device)
        self.count = torch.zeros_like(self.total)

    def add(self, block: Block) -> None:
        wanted = self._keys(block)  # (B or 1, 1, r, c)
        if block.visible is not None:
            wanted = wanted & block.visible
        has = wanted.any(-1) & ~block.blind
        self.total += (block.weights * wanted).sum((-1, -2))
        self.count += has.sum(-1)

    def _keys(self, block: Block) -> Tensor:
        q_at, k_at = self.positions
        before = q_at[..., block.rows, None] - k_at[..., None, block.columns]  # how far back
        before = before[:, None] if before.ndim == 3 else before[None, None]
        if self.kind == "previous":
            return before == 1
        assert self.tokens is not None
        of_queries, of_keys = self.tokens  # (B, L), (B, S)
        if self.kind == "induction":  # keys whose own predecessor is the query's token; the first has none
            of_keys = torch.cat([of_keys.amin(-1, keepdim=True) - 1, of_keys[:, :-1]], -1)
        same = of_queries[:, None, block.rows, None] == of_keys[:, None, None, block.columns]
        return same & (before > 0)

    def result(self) -> Tensor:
        return self.total / self.count


class Pooled:
    """Weights pooled to blocks of `size` x `size`, (B, H, n, m): the mean over a block's queries of their weight on all
    its keys together, or the largest weight in it."""

    def __init__(self, request: Request, size: int, largest: bool) -> None:
        B, H, _, L, S, _, _ = request.sizes
        wide = torch.promote_types(request.q.dtype, torch.float32)
        self.size, self.largest, self.L = size, largest, L
        self.found = torch.zeros((B, H, -(-L // size), -(-S // size)), dtype=wide, device=request.q.device)

    def add(self, block: Block) -> None:
        device = block.weights.device
        columns = torch.arange(block.columns.start, block.columns.stop, device=device) // self.size
        rows = torch.arange(block.rows.start, block.rows.stop, device=device) // self.size
        for row in range(int(rows[0]), int(rows[-1]) + 1):
            some = block.weights[:, :, rows == row]
            if self.largest:
                into = some.amax(-2)
                self.found[:, :, row].scatter_reduce_(-1, columns.expand_as(into), into, "amax")
            else:
                into = some.sum(-2) / min(self.size, self.L - row * self.size)
                self.found[:, :, row].scatter_add_(-1, columns.expand_as(into), into)

    def result(self) -> Tensor:
        return self.found


BY_NAME: dict[str, Callable[[Request], Statistic]] = {
    "entropy": Entropy,
    "max_weight": MaxWeight,
    "max_logit": MaxLogit,
    "visible_keys": VisibleKeys,
    "received": Received,
    "seen_by": SeenBy,
}


def check_names(names: object) -> None:
    """Whether all are names that `Record.compute` knows."""
    known = ", ".join(BY_NAME)
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise bad_type("stats", f"names among {known}", names)
    for name in names:
        if name not in BY_NAME:
            raise bad_value("statistic", f"one of {known}", repr(name))
