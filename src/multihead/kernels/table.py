"""What kernels say of L x S tensors that they make."""

from __future__ import annotations

from typing import NamedTuple

BIAS_BYTES = 4  # of a number that a position adds to a score: it is made in float32


class Table(NamedTuple):
    """An L x S tensor that a call makes besides those given.

    Attributes:
        what: it is.
        why: it is made.
        bytes: it takes.
    """

    what: str
    why: str
    bytes: int
