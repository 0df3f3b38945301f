"""Where a `KVCache` keeps its numbers: what a storage is, and the one in rows of a buffer. That of pages is in
`cache_pages.py`.

A storage holds parts: tensors (B, K, slots, width) that are written, read, reordered and let go together. Which parts
keys and values become is in `cache_format.py`. Slot s of row b is the token that row b got as its s-th; a storage knows
nothing of positions, masks or capacities.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value, describe

_FIRST_SLOTS = 64  # what a buffer starts with; from then on it doubles, so that a token is copied about once


class Place(NamedTuple):
    """Where new tokens go: row b's first to slot `starts[b]`, those that `keep` leaves out nowhere."""

    starts: list[int]
    L: int
    keep: Tensor | None  # (B, L) bool; None keeps all
    counts: list[int]  # how many of the L tokens each row keeps

    @property
    def ends(self) -> list[int]:
        """How many tokens each row has afterwards."""
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    @property
    def is_even(self) -> bool:
        """Whether all rows get all tokens at the same slots."""
        return self.keep is None and len(set(self.starts)) <= 1

    def rows_and_slots(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """For each kept token: its row, its place among the L new ones, its slot."""
        starts = torch.tensor(self.starts, dtype=torch.int64, device=device)[:, None]
        if self.keep is None:
            slots = starts + torch.arange(self.L, device=device)
            rows, places = torch.ones_like(slots, dtype=torch.bool).nonzero(as_tuple=True)
        else:
            slots = starts + self.keep.cumsum(-1) - 1
            rows, places = self.keep.nonzero(as_tuple=True)
        return rows, places, slots[rows, places]


class Storage(Protocol):
    """What a cache asks of its storage. `check` comes before `write`, which then does not fail. `parts_of` gives the
    parts and pages of some slots, as `Stored` has them; views, which the next change may write over."""

    differentiable: bool

    def check(self, place: Place) -> None: ...

    def write(self, new: list[Tensor], place: Place) -> None: ...

    def parts_of(self, start: int, stop: int) -> tuple[list[Tensor], Tensor | None]: ...

    def truncate(self, lengths: list[int]) -> None: ...

    def reorder(self, rows: list[int], lengths: list[int]) -> None: ...

    def fork(self) -> Storage: ...

    def clear(self) -> None: ...

    @property
    def nbytes(self) -> int: ...


class Rows:
    """One buffer (B, K, slots, width) for each part, which grows as it fills.

    Args:
        most: slots that it grows to in steps; None for no bound.
    """

    differentiable = True

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.parts: list[Tensor] = []
        self._held = False  # whether autograd may hold what was read, so that nothing may be written over it

    def check(self, place: Place) -> None:
        """Nothing: it grows."""

    def write(self, new: list[Tensor], place: Place) -> None:
        used, stop = max(place.starts, default=0), max(place.ends, default=0)
        if torch.is_grad_enabled() and place.is_even:
            new = [part if place.starts else part[:, :, :0] for part in new]
            self.parts = [
                torch.cat([old[:, :, :used], part], 2) for old, part in zip(self._like(new), new, strict=True)
            ]
            return
        self._make_room(new, used, stop)
        if place.is_even:
            for part, tokens in zip(self.parts, new, strict=True):
                part[:, :, used:stop].copy_(tokens if place.starts else tokens[:, :, :0])
            return
        rows, places, slots = place.rows_and_slots(new[0].device)
        for part, tokens in zip(self.parts, new, strict=True):
            part.transpose(1, 2)[rows, slots] = tokens.transpose(1, 2)[rows, places]

    def parts_of(self, start: int, stop: int) -> tuple[list[Tensor], Tensor | None]:
        self._held = torch.is_grad_enabled()
        return [part[:, :, start:stop] for part in self.parts], None

    def keep_last(self, lengths: list[int], count: int, slots: int) -> None:
        """Move the last `count` tokens of each row to its first slots, in a buffer of that many slots."""
        for i, part in enumerate(self.parts):
            last = last_of(part.transpose(1, 2), lengths, count).transpose(1, 2)
            buffer = part
            if part.shape[2] != slots or torch.is_grad_enabled() or self._held:
                buffer = part.new_zeros(*part.shape[:2], slots, part.shape[3])
            else:
                last = last.clone()  # it overlaps with where it goes
            buffer[:, :, : last.shape[2]] = last
            self.parts[i] = buffer
        self._held = False

    def truncate(self, lengths: list[int]) -> None:
        """Nothing: what is not read is written over."""

    def reorder(self, rows: list[int], lengths: list[int]) -> None:
        used = max(lengths, default=0)
        for i, part in enumerate(self.parts):
            index = torch.tensor(rows, dtype=torch.int64, device=part.device)
            if part.requires_grad:
                self.parts[i] = part[:, :, :used].index_select(0, index)
                continue
            buffer = part.new_empty(len(rows), *part.shape[1:])
            buffer[:, :, :used] = part[:, :, :used].index_select(0, index)
            self.parts[i] = buffer

    def fork(self) -> Rows:
        other = Rows(self.most)
        other.parts = [part.clone() for part in self.parts]
        return other

    def clear(self) -> None:
        self.parts = []

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)

    def _like(self, new: list[Tensor]) -> list[Tensor]:
        return self.parts or [part[:, :, :0] for part in new]

    def _make_room(self, new: list[Tensor], used: int, stop: int) -> None:
        """Buffers of at least `stop` slots that may be written to, with the first `used` as they were."""
        slots = self.parts[0].shape[2] if self.parts else 0
        recorded = torch.is_grad_enabled() or self._held
        # What was made in inference mode may not be changed outside of it.
        strange = bool(self.parts) and self.parts[0].is_inference() and not torch.is_inference_mode_enabled()
        if self.parts and stop <= slots and not recorded and not strange:
            return
        ahead = stop if torch.is_grad_enabled() else max(stop, 2 * slots if stop > slots else slots, _FIRST_SLOTS)
        if self.most is not None and stop <= self.most:
            ahead = min(ahead, self.most)
        grown = []
        for old, part in zip(self._like(new), new, strict=True):
            buffer = part.new_zeros(part.shape[0], part.shape[1], ahead, part.shape[3])
            buffer[:, :, :used] = old[:, :, :used]
            grown.append(buffer)
        self.parts, self._held = grown, False


def last_of(tokens: Tensor, lengths: list[int], count: int) -> Tensor:
    """The last `count` tokens of each row of (B, slots, ...), or all of a shorter row, from the first place on."""
    kept = [min(length, count) for length in lengths]
    if len(set(lengths)) <= 1:
        n = max(lengths, default=0)
        return tokens[:, n - max(kept, default=0) : n]
    starts = torch.tensor([length - n for length, n in zip(lengths, kept, strict=True)], device=tokens.device)
    places = starts[:, None] + torch.arange(max(kept), device=tokens.device)
    places = places.clamp(max=tokens.shape[1] - 1)
    return tokens[torch.arange(len(lengths), device=tokens.device)[:, None], places]


def check_tokens(k: Tensor, v: Tensor) -> None:
    """Whether k (*batch, K, L, D) and v (*batch, K, L, V) are tokens of one kind."""
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            raise bad_type(name, "a floating tensor (*batch, K, L, width)", tensor)
        if tensor.ndim < 3:
            raise bad_value(name, "the shape (*batch, K, L, width)", describe(tensor))
    if k.shape[:-1] != v.shape[:-1]:
        raise bad_value("v", f"the batch axes, K and L of k, {tuple(k.shape[:-1])}", describe(v))
    if (k.dtype, k.device) != (v.dtype, v.device):
        raise bad_value("v", f"the dtype and device of k, {k.dtype} on {k.device}", f"{v.dtype} on {v.device}")
