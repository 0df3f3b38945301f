"""What the steps of a layer cost: operations, bytes, and which of the two bounds them. Nothing is computed.

A multiply-add is two operations. Of attention only the pairs that may see each other are counted, exactly. Bytes are
those of each tensor, read or written once: what no way of computing it can do without. A backward pass takes twice the
products of a projection (for its input and its weight), and of attention five for the forward's two, as the scores are
made once more (Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from multihead.kernels.flops import backward_flops, forward_flops
from multihead.request import Request

# Operations for a byte above which a step is bound by arithmetic on most machines: tens of GFLOP/s and some GB/s for a
# core of a CPU.
BALANCE = 10.0

_CELL = 256  # queries and keys of a block
_MOST_BLOCKS = 2**18  # that are looked at at once


class Cost(NamedTuple):
    """Of one step.

    Attributes:
        flops: operations, two for a multiply-add.
        bytes: read and written, each tensor once.
    """

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def bound(self, balance: float = BALANCE) -> str:
        """What limits it on a machine that does `balance` operations while a byte moves: "compute" or "memory"."""
        return "compute" if self.intensity > balance else "memory"

    def __add__(self, other: object) -> Cost:
        """Of both together, where tuples would be joined."""
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def of_projection(
    tokens: int, width: int, out: int, itemsize: int, training: bool, learns: bool = True, is_complex: bool = False
) -> Cost:
    """Of `tokens` rows times a (width, out) matrix. Itemsize is of a real number; a multiply-add of complex ones is
    four of real ones. A matrix that does not learn has no gradient."""
    flops, moved = 2 * tokens * width * out, itemsize * (tokens * width + width * out + tokens * out)
    times = (2 + learns) if training else 1
    return Cost(times * flops * (4 if is_complex else 1), times * moved * (2 if is_complex else 1))


def of_attention(request: Request, pairs: int, itemsize: int, training: bool) -> Cost:
    """Of q k^T, softmax and the product with v, of so many pairs over all heads."""
    B, H, K, L, S, D, V = request.sizes
    flops = forward_flops(pairs, D, V) + (backward_flops(pairs, D, V) if training else 0)
    moved = itemsize * B * (H * L * (D + V) + K * S * (D + V))
    # The backward pass reads what the forward read, its output and the gradient of that, and writes three gradients.
    return Cost(flops, 3 * moved + itemsize * B * H * L * V) if training else Cost(flops, moved)


def of_rows(numbers: int, itemsize: int, training: bool) -> Cost:
    """Of a step that reads and writes so many numbers and does next to nothing with them."""
    return Cost(0, (4 if training else 2) * numbers * itemsize)


def decimal(number: float) -> str:
    """A count in thousands: 3.22 G."""
    for unit in ("", " k", " M", " G", " T"):
        if number < 1000:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} P"


def binary(number: float) -> str:
    """Bytes: 22.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:,.3g} TiB"


def visible_pairs(request: Request) -> int:
    """How many pairs of a query and a key may see each other, over all heads and rows of the batch. Exact."""
    B, H, _, L, S, _, _ = request.sizes
    if request.mask is None or not B or not L or not S:
        return B * H * L * S
    if B > 1:  # a block that is whole in most rows of the batch is looked at for the others alone
        if not request.differs_by_row:
            return B * visible_pairs(request.of_row(0))
        return sum(visible_pairs(request.of_row(b)) for b in range(B))
    size, columns = _CELL, _sizes(S, _CELL, request.q.device)
    chunk = size * max(1, _MOST_BLOCKS // len(columns))  # queries whose blocks are looked at together
    total = 0
    for first in range(0, L, chunk):
        stop = min(L, first + chunk)
        bounds = request.bounds(size, size, slice(first, stop))
        assert bounds is not None
        rows = _sizes(stop - first, size, request.q.device)
        total += int((bounds.every * rows[:, None] * columns).sum()) * H
        for i, j in (bounds.some & ~bounds.every)[0].nonzero().tolist():
            start = first + i * size
            span = slice(start, min(stop, start + size)), slice(j * size, min(S, (j + 1) * size))
            visible = request.visible(*span)
            assert visible is not None
            pairs = visible.expand(*visible.shape[:2], span[0].stop - span[0].start, span[1].stop - span[1].start)
            total += int(pairs.sum((2, 3)).expand(1, H).sum())
    return total


def _sizes(length: int, size: int, device: torch.device) -> Tensor:
    """How many tokens each block has."""
    starts = torch.arange(0, length, size, device=device)
    return (length - starts).clamp(max=size)
