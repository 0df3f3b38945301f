"""A head's map in a terminal: a character for each block."""

from __future__ import annotations

import math

from multihead.inspection.pictures import map_of
from multihead.inspection.record import Record

_SHADES = " .:-=+*#%@"  # from 1e-3 and below to 1, in equal steps of the logarithm
_MASKED = " "
_LEAST = 1e-3


def text_map(record: Record, head: int, *, row: int = 0, size: int = 48) -> str:
    """Queries down, keys across; two characters for a block, as they are twice as high as wide.

    Args:
        record: whose.
        head: which of its query heads.
        row: of the batch.
        size: the most rows and columns.

    Raises:
        ValueError, TypeError: there is no such head or row.
    """
    weights, visible, block = map_of(record, head, row, size=size)
    steps = len(_SHADES) - 1
    lines = []
    for values, seen in zip(weights.tolist(), visible.tolist(), strict=True):
        shades = (round(steps * (1 + math.log(max(value, _LEAST)) / -math.log(_LEAST))) for value in values)
        lines.append("".join(2 * (_SHADES[s] if is_seen else _MASKED) for s, is_seen in zip(shades, seen, strict=True)))
    told = f"each character pair is {block} x {block} tokens" if block > 1 else "each character pair is a token"
    scale = f"{_SHADES[1]} about {_LEAST ** (1 - 1 / steps):.0e}, {_SHADES[-1]} 1"
    return "\n".join([*(line.rstrip() for line in lines), f"({told}; {scale})"])
