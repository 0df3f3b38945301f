"""A mask as steps in postfix order, the form in which the native kernel reads it.

Each step is a code and its numbers: a kind that looks at pairs, or an operation on the last one or two answers.
`causal() & padding(keep)` is [WINDOW, ANY, 0, PADDING, 0, BOTH] with [keep] as its tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from multihead.mask_kinds import And, Dense, Documents, Lengths, Mask, Not, Or, Padding, Prefix, Window

# As in csrc/kernel.h, enum MaskKind.
WINDOW, LENGTHS, PREFIX, PADDING, DOCUMENTS, DENSE, BOTH, EITHER, INVERT = range(9)
ANY = 2**63 - 1  # no bound
NO_TABLE = -1
MOST_STEPS, MOST_WAITING = 32, 8  # csrc/kernel.h, MAX_STEPS and MAX_DEPTH


class Postfix(NamedTuple):
    steps: list[int]
    tables: list[Tensor]


def refusals(mask: Mask | None) -> list[str]:
    """Why a mask has no such form; empty: it has."""
    if mask is None:
        return []
    count, waiting = _size(mask)
    if not count:
        return [f"the mask: {mask!r} holds a kind of its own"]
    if count > MOST_STEPS or waiting > MOST_WAITING:
        return [f"the mask: it is of more than {MOST_STEPS} steps, or nested more than {MOST_WAITING} deep"]
    return []


def _size(mask: Mask) -> tuple[int, int]:
    """How many steps a mask takes, and how many answers wait at once; 0 steps: a kind that has no code."""
    if isinstance(mask, Window | Lengths | Prefix | Padding | Documents | Dense):
        return 1, 1
    if isinstance(mask, Not):
        count, waiting = _size(mask.a)
        return (count + 1 if count else 0), waiting
    if isinstance(mask, And | Or):
        (a, first), (b, second) = _size(mask.a), _size(mask.b)
        return (a + b + 1 if a and b else 0), max(first, second + 1)
    return 0, 0


def as_postfix(mask: Mask | None) -> Postfix:
    """The steps of a mask without `refusals`."""
    found = Postfix([], [])
    if mask is not None:
        _write(mask, found)
    return found


def _write(mask: Mask, to: Postfix) -> None:
    steps, tables = to
    if isinstance(mask, Window):
        left, right = (ANY if bound is None else bound for bound in (mask.left, mask.right))
        steps += [WINDOW, left, right]
    elif isinstance(mask, Lengths | Prefix):
        steps.append(LENGTHS if isinstance(mask, Lengths) else PREFIX)
        steps += [NO_TABLE, mask.n] if not isinstance(mask.n, Tensor) else [_keep(_whole(mask.n), tables), 0]
    elif isinstance(mask, Padding | Dense):
        steps += [PADDING if isinstance(mask, Padding) else DENSE, _keep(mask.keep, tables)]
    elif isinstance(mask, Documents):
        k_ids = _keep(_whole(mask.k_ids), tables)
        steps += [DOCUMENTS, k_ids, NO_TABLE if mask.q_ids is None else _keep(_whole(mask.q_ids), tables)]
    elif isinstance(mask, Not):
        _write(mask.a, to)
        steps.append(INVERT)
    elif isinstance(mask, And | Or):
        _write(mask.a, to)
        _write(mask.b, to)
        steps.append(BOTH if isinstance(mask, And) else EITHER)


def _whole(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.int64 else tensor.to(torch.int64)


def _keep(tensor: Tensor, tables: list[Tensor]) -> int:
    tables.append(tensor)
    return len(tables) - 1
