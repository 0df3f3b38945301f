"""What a `KVCache` knows of its tokens besides their numbers: how many each row has, and where they stand.

Slot s of row b holds its token number gone[b] + s, counted from the first that the row ever got. Where nobody gave
positions, that number is the token's position, and nothing is kept for it. A `Step` is what a call comes to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from multihead.cache_storage import Place, last_of
from multihead.errors import bad_type, bad_value, describe, is_int
from multihead.masks import Mask, lengths


@dataclass(frozen=True)
class Ledger:
    """The tokens of all rows. Changing it gives another one.

    Attributes:
        batch: the batch axes; B rows in all.
        lengths: tokens that are stored, of each row.
        gone: tokens that a ring has let go before them, of each row.
        positions: (B, slots) of the stored tokens; None while they are just counted.
    """

    batch: tuple[int, ...]
    lengths: list[int]
    gone: list[int]
    positions: Tensor | None = None

    @property
    def totals(self) -> list[int]:
        """All tokens of each row, also those that are gone."""
        return [n + gone for n, gone in zip(self.lengths, self.gone, strict=True)]

    @property
    def stop(self) -> int:
        """The slot after the last one that any row has."""
        return max(self.lengths, default=0)

    def mask(self, device: torch.device) -> Mask | None:
        """Which slots a row has; None where all rows have all."""
        if len(set(self.lengths)) <= 1:
            return None
        return lengths(torch.tensor(self.lengths, device=device).view(self.batch))

    def next_positions(self, L: int, keep: Tensor | None, device: torch.device | None) -> Tensor:
        """Where L more tokens stand by default, (L,) or (*batch, L): after the last of the row. keep (B, L): only real
        tokens count."""
        steps = torch.arange(L, device=device) if keep is None else (keep.long().cumsum(-1) - 1).clamp(min=0)
        last = torch.tensor(self.totals, dtype=torch.int64, device=device)
        if self.positions is not None and self.stop:
            lengths = torch.tensor(self.lengths, device=device)[:, None]
            ends = self.positions.gather(1, (lengths - 1).clamp(min=0)) + 1
            last = torch.where(lengths > 0, ends, last[:, None])[:, 0]
        elif keep is None and len(set(self.totals)) <= 1:
            return steps + max(self.totals, default=0)
        if keep is None and bool((last == last[:1]).all()):
            return (last[:1] + steps).view(L)
        return (last[:, None] + steps).view(*self.batch, L)

    def slot_positions(self, start: int, device: torch.device) -> Tensor:
        """Where the tokens of the slots from `start` on stand: (S,), or (*batch, S) where rows differ."""
        S = self.stop - start
        if self.positions is not None:
            return self.positions[:, start:].reshape(*self.batch, S)
        slots = torch.arange(start, self.stop, device=device)
        if len(set(self.gone)) <= 1:
            return slots + max(self.gone, default=0)
        return (torch.tensor(self.gone, device=device)[:, None] + slots).view(*self.batch, S)

    def with_last(self, count: int) -> Ledger:
        """Once only the last `count` tokens of each row are stored, from the first slot on."""
        kept = [min(n, count) for n in self.lengths]
        gone = [g + n - m for g, n, m in zip(self.gone, self.lengths, kept, strict=True)]
        positions = None if self.positions is None else last_of(self.positions, self.lengths, count)
        return replace(self, lengths=kept, gone=gone, positions=positions)

    def with_new(self, place: Place, positions: Tensor | None, device: torch.device) -> Ledger:
        """Once the tokens of `place` are there; positions (L,) or (*batch, L), None where they are just counted."""
        after = Ledger(self.batch, place.ends, self.gone)
        if positions is None:
            return after
        rows, tokens, slots = place.rows_and_slots(device)
        before = self.slot_positions(0, device).expand(*self.batch, self.stop).reshape(len(self.lengths), self.stop)
        new = positions.expand(*self.batch, place.L).reshape(len(self.lengths), place.L)
        dtype = torch.promote_types(before.dtype, new.dtype)
        joined = torch.zeros(len(self.lengths), after.stop, dtype=dtype, device=device)
        joined[:, : self.stop] = before
        joined[rows, slots] = new.to(dtype)[rows, tokens]
        return replace(after, positions=joined)

    def check_rises(self) -> None:
        """Whether each row's positions rise by 1 or more: only then are a window's tokens the last ones."""
        if self.positions is None or self.stop < 2:
            return
        lengths = torch.tensor(self.lengths, device=self.positions.device)[:, None]
        there = torch.arange(1, self.stop, device=self.positions.device) < lengths
        if bool(((self.positions.diff() < 1) & there).any()):
            otherwise = "It keeps the last tokens, and a window looks back by positions."
            raise bad_value("positions", "in a ring each 1 or more after the one before", "others", otherwise)

    def with_lengths(self, left: list[int]) -> Ledger:
        """Once each row's stored tokens are only its first so many."""
        positions = None if self.positions is None else self.positions[:, : max(left, default=0)]
        return replace(self, lengths=left, positions=positions)

    def with_rows(self, rows: list[int]) -> Ledger:
        """Once row i is what row rows[i] is, in one batch axis."""
        positions = self.positions
        if positions is not None:
            index = torch.tensor(rows, dtype=torch.int64, device=positions.device)
            positions = positions[index, : max((self.lengths[row] for row in rows), default=0)]
        lengths, gone = [self.lengths[row] for row in rows], [self.gone[row] for row in rows]
        return Ledger((len(rows),), lengths, gone, positions)


@dataclass(frozen=True)
class Step:
    """What a call with a cache attends to: worked out, and checked, before anything is computed or written.

    Attributes:
        S: how many slots.
        mask: which of them a row has, and in a ring, how far back it sees; None where all is visible.
        places: where the call's tokens stand, (L,) or (*batch, L).
        q_positions, k_positions: of the queries (L,) or (*batch, L), and of the slots (S,) or (*batch, S); both None
            where the queries are the last L of S tokens at 0 .. S - 1.
    """

    S: int
    mask: Mask | None
    q_positions: Tensor | None
    k_positions: Tensor | None
    _find_places: Callable[[], Tensor]
    _place: Place | None = None  # where the tokens go; None if the cache is frozen
    _after: Ledger | None = None  # what the cache knows of its tokens then
    _before: Ledger | None = None  # and before
    _moves: bool = False  # whether a ring lets old tokens go first

    @cached_property
    def places(self) -> Tensor:
        """Made when it is asked for: most calls pass no positions on."""
        return self._find_places()


def check_keep(keep: object, batch: tuple[int, ...], L: int) -> Tensor:
    """`keep`, if it says of L tokens which are real, as (B, L)."""
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise bad_type("keep", "a bool tensor (*batch, L), True = real token", keep)
    if tuple(keep.shape) != (*batch, L):
        raise bad_value("keep", f"the shape (*batch, L) = {(*batch, L)}", describe(keep))
    return keep.reshape(math.prod(batch), L)


def check_places(positions: object, batch: tuple[int, ...], L: int, device: torch.device) -> Tensor:
    """`positions`, if they say where L tokens stand."""
    if not isinstance(positions, Tensor) or positions.dtype == torch.bool or positions.is_complex():
        raise bad_type("positions", "a tensor of numbers (L,) or (*batch, L)", positions)
    if tuple(positions.shape) not in ((L,), (*batch, L)):
        raise bad_value("positions", f"the shape (L,) or (*batch, L) with L={L}", describe(positions))
    if positions.device != device:
        raise bad_value("positions", f"the device of the tokens, {device}", positions.device)
    return positions


def check_rows(rows: object, B: int) -> list[int]:
    """`rows`, if they are rows of B."""
    index: Any = rows.tolist() if isinstance(rows, Tensor) and rows.ndim == 1 else rows
    if not isinstance(index, Sequence) or not all(is_int(row) for row in index):
        raise bad_type("reorder(rows)", "ints (B',), the old row of each new one", rows)
    strange = [row for row in index if not 0 <= row < B]
    if strange:
        raise bad_value("reorder(rows)", f"rows from 0 to {B - 1}", strange[0])
    return list(index)


def check_counts(length: object, totals: list[int]) -> list[int]:
    """How many tokens each row is to have: `length`, if rows that have `totals` can be cropped to it."""
    if is_int(length):
        most = max(totals, default=0)
        if not 0 <= length <= most:
            raise bad_value("crop(length)", f"0 to {most}, which it holds", length)
        return [min(n, length) for n in totals]
    wanted: Any = length.flatten().tolist() if isinstance(length, Tensor) else length
    if not isinstance(wanted, Sequence) or len(wanted) != len(totals) or not all(is_int(n) for n in wanted):
        raise bad_value("crop(length)", f"an int, or {len(totals)} ints, one for each row", f"{wanted}")
    for n, has in zip(wanted, totals, strict=True):
        if not 0 <= n <= has:
            raise bad_value("crop(length)", f"0 to {has} for a row that has so many", n)
    return list(wanted)
