"""Keys and values in pages of a pool that several caches share: pages are taken, shared by reference and given back."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from multihead.cache_format import Format
from multihead.cache_storage import Place
from multihead.errors import bad_value, check_size


class PagePool:
    """Pages of keys and values that caches take and give back: `KVCache("paged", pool=pool)`.

    The pages of all caches of one pool are one allocation (Kwon et al. 2023). A page that several rows or caches hold
    is there once, until one of them writes into it.

    Args:
        pages: how many there are.
        page_size: tokens in each.
        dtype: the stored form, as of `KVCache`.

    Raises:
        ValueError, TypeError: a size is below 1, or the dtype is none to store in.
    """

    def __init__(self, pages: int, *, page_size: int = 64, dtype: torch.dtype | None = None) -> None:
        self.pages = check_size("pages", pages)
        self.page_size = check_size("page_size", page_size)
        self.format = Format(dtype)
        if dtype is not None and dtype.is_floating_point and dtype.itemsize < 2:
            raise bad_value(
                "dtype", "at least 16 bits, or torch.int8, for pages", dtype, "PyTorch can't pick rows of it."
            )
        self.parts: list[Tensor] = []  # (K, pages, page_size, width), made when the sizes are known
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages

    @property
    def free_pages(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all its pages, whoever holds them; 0 before the first use."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def allocate(self, new: list[Tensor]) -> None:
        """Make the pages, for tokens like these (B, K, L, width).

        Raises:
            ValueError: it has pages already, for tokens of another kind.
        """
        kinds = [(part.shape[1], part.shape[3], part.dtype, part.device) for part in new]
        if not self.parts:
            shapes = [(K, self.pages, self.page_size, width) for K, width, _, _ in kinds]
            self.parts = [part.new_zeros(shape) for part, shape in zip(new, shapes, strict=True)]
        for part, kind in zip(self.parts, kinds, strict=True):
            if (part.shape[0], part.shape[3], part.dtype, part.device) != kind:
                expected = f"tokens of K={part.shape[0]} heads of {part.shape[3]} in {part.dtype} on {part.device}"
                got = f"K={kind[0]} heads of {kind[1]} in {kind[2]} on {kind[3]}"
                raise bad_value("pool", expected, got, "All pages of a pool are alike.", "Make another pool for these.")

    def take(self) -> int:
        """A page that nobody holds, for one holder."""
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Count one more holder of a page."""
        self._holders[page] += 1

    def give_back(self, page: int) -> None:
        """Count one holder less; a page without any is free."""
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)

    def others(self, page: int) -> int:
        """How many hold a page besides one."""
        return self._holders[page] - 1


class Pages:
    """A table of pages for each row. Pages are shared by reference and copied when one of the holders writes."""

    differentiable = False

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.tables: list[list[int]] = []
        self._numbers: Tensor | None = None  # the tables as `_table` gives them, made anew once they have changed

    def __del__(self) -> None:
        self.clear()

    def check(self, place: Place) -> None:
        needed, written = 0, Counter[int]()
        tables = self.tables or [[] for _ in place.starts]
        for table, start, stop in zip(tables, place.starts, place.ends, strict=True):
            needed += max(0, self._pages(stop) - len(table))
            if stop > start and start % self.pool.page_size:
                written[table[start // self.pool.page_size]] += 1
        # Of a page that others hold, each writer needs a copy; if all its holders write, the last may keep it.
        needed += sum(min(count, self.pool.others(page)) for page, count in written.items())
        if needed > self.pool.free_pages:
            got = f"{self.pool.free_pages} of {self.pool.pages}"
            instead = "Reset or delete caches that are done, crop, or make a larger pool."
            raise bad_value("pool", f"{needed} free pages for these tokens", got, "The cache is as it was.", instead)

    def write(self, new: list[Tensor], place: Place) -> None:
        size = self.pool.page_size
        if not self.tables:
            self.pool.allocate(new)
            self.tables = [[] for _ in place.starts]
        for table, start, stop in zip(self.tables, place.starts, place.ends, strict=True):
            if stop > start and start % size:
                self._own(table, start // size)
            while len(table) < self._pages(stop):
                table.append(self.pool.take())
                self._numbers = None
        if place.L == 1 and place.keep is None:  # as generating does, token after token
            ends = zip(self.tables, place.starts, strict=True)
            found = [table[slot // size] * size + slot % size for table, slot in ends]
            at = torch.tensor(found, dtype=torch.int64, device=new[0].device)
            for part, tokens in zip(self.pool.parts, new, strict=True):
                part.flatten(1, 2).index_copy_(1, at, tokens[:, :, 0].transpose(0, 1))
            return
        rows, places, slots = place.rows_and_slots(new[0].device)
        at = self._table(new[0].device)[rows, slots // size] * size + slots % size  # (N,) of the pool's tokens
        for part, tokens in zip(self.pool.parts, new, strict=True):
            part.flatten(1, 2).index_copy_(1, at, tokens.transpose(0, 1)[:, rows, places])

    def parts_of(self, start: int, stop: int) -> tuple[list[Tensor], Tensor | None]:
        assert start == 0  # no ring is in pages
        pages = self._table(self.pool.parts[0].device)[:, : self._pages(stop)]
        return [part.transpose(0, 1) for part in self.pool.parts], pages

    def truncate(self, lengths: list[int]) -> None:
        for table, length in zip(self.tables, lengths, strict=True):
            while len(table) > self._pages(length):
                self.pool.give_back(table.pop())
                self._numbers = None

    def reorder(self, rows: list[int], lengths: list[int]) -> None:
        del lengths
        tables = [list(self.tables[row]) for row in rows]
        for table in tables:
            for page in table:
                self.pool.hold(page)
        self.clear()
        self.tables = tables

    def fork(self) -> Pages:
        other = Pages(self.pool)
        other.tables = [list(table) for table in self.tables]
        for table in other.tables:
            for page in table:
                self.pool.hold(page)
        return other

    def clear(self) -> None:
        for table in self.tables:
            for page in table:
                self.pool.give_back(page)
        self.tables, self._numbers = [], None

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that it holds, shared ones too."""
        held = {page for table in self.tables for page in table}
        return self.pool.nbytes // self.pool.pages * len(held)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)

    def _table(self, device: torch.device) -> Tensor:
        """(B, pages): page 0 where a row has fewer."""
        if self._numbers is None:
            longest = max(map(len, self.tables), default=0)
            padded = [table + [0] * (longest - len(table)) for table in self.tables]
            self._numbers = torch.tensor(padded, dtype=torch.int64, device=device).view(len(self.tables), longest)
        return self._numbers

    def _own(self, table: list[int], at: int) -> None:
        """Make sure that nobody else holds a page that is about to be written."""
        page = table[at]
        if self.pool.others(page):
            table[at], self._numbers = self.pool.take(), None
            for part in self.pool.parts:
                part[:, table[at]] = part[:, page]
            self.pool.give_back(page)
