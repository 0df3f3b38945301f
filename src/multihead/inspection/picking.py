"""Which queries, keys and heads are asked for."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from multihead.errors import bad_type, bad_value, is_int


def index(name: str, i: object, size: int) -> int:
    """An index from 0 to size - 1, of one that may count from the end."""
    if not is_int(i):
        if isinstance(i, bool):
            raise bad_type(name, "an int", i)
        try:
            i = operator.index(i)  # type: ignore[arg-type]  # numpy's and torch's
        except TypeError:
            raise bad_type(name, "an int", i) from None
    if not -size <= i < size:
        raise bad_value(name, f"an index from {-size} to {size - 1}", i)
    return i % size


def listed(given: Any) -> Any:
    """A tensor or array of indices as a list."""
    return given.tolist() if hasattr(given, "tolist") else given


def chosen(name: str, given: object, size: int) -> list[int]:
    """Indices, as a list."""
    given = listed(given)
    if given is None:
        return list(range(size))
    if isinstance(given, slice):
        return list(range(size))[given]
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [index(name, i, size) for i in given]
    return [index(name, given, size)]


def spans(rows: Sequence[int], most: int) -> Iterator[slice]:
    """Rising rows as runs of neighbours, of at most so many."""
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1 or i - start == most:
            yield slice(rows[start], rows[i - 1] + 1)
            start = i
