"""The form in which a `KVCache` stores keys and values, and what it holds in that form: for a kernel that reads it
where it lies, or as the tensors that came.

`Format` says which parts a tensor becomes: itself, itself in another dtype, or int8 with a scale for each row of D
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value

_LEAST_SCALE = torch.finfo(torch.float32).tiny  # what is divided by in place of 0, for rows of zeros


class Format:
    """The stored form of keys and values.

    Args:
        dtype: None keeps them as they come; a floating dtype converts; torch.int8 rounds to 255 steps of the largest
            magnitude of each head of each token, whose scale is kept in float32.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype == torch.int8)
        ):
            raise bad_type("dtype", "a floating dtype, torch.int8, or None to keep what comes", str(dtype))
        self.dtype = dtype
        self.names = ("k", "v") if dtype != torch.int8 else ("k", "k_scale", "v", "v_scale")  # of the parts

    def check(self, x: Tensor) -> None:
        """Whether x, which is to be stored, can be."""
        if x.is_complex() and self.dtype is not None:
            expected, otherwise = "stored as it comes where it is complex", "The imaginary parts would be lost."
            raise bad_value("k", expected, f"{x.dtype} for a cache of {self.dtype}", otherwise)

    def stored(self, x: Tensor) -> list[Tensor]:
        """The parts of x (B, K, L, D)."""
        if self.dtype != torch.int8:
            return [x if self.dtype is None else x.to(self.dtype)]
        x = x.float()
        scale = torch.linalg.vector_norm(x, math.inf, -1, keepdim=True).div_(127)
        return [(x / scale.clamp(min=_LEAST_SCALE)).round_().to(torch.int8), scale]

    def restored(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """What the parts stand for; without a copy where they are of that dtype already."""
        if len(parts) == 1:
            return parts[0] if parts[0].dtype == dtype else parts[0].to(dtype)
        return (parts[0].float() * parts[1]).to(dtype)


class Stored(NamedTuple):
    """Keys and values of a cache, as it stores them. Valid until its next change.

    Attributes:
        form: which parts there are, and what they stand for.
        parts: of the keys, then of the values: (B, K, S, width), or where there are pages (pages, K, page size, width).
        pages: (B, n) int64, in which pages the tokens of each row are; None where they lie in rows.
        tokens: S, of the longest row. What shorter ones have at their end means nothing.
        batch: the batch axes, of B rows in all.
        dtype: in which the tokens came.
    """

    form: Format
    parts: list[Tensor]
    pages: Tensor | None
    tokens: int
    batch: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_as_it_came(self) -> bool:
        """Whether `read` has nothing to copy."""
        return self.pages is None and all(part.dtype == self.dtype for part in self.parts)

    def sides(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The parts of the keys, and those of the values: numbers, and of int8 their scales."""
        count = len(self.parts) // 2
        return self.parts[:count], self.parts[count:]

    def in_rows(self) -> Stored:
        """The same with parts (B, K, S, width): a copy where there are pages, which lie anywhere."""
        if self.pages is None:
            return self
        found = []
        for part in self.parts:
            _, K, page_size, width = part.shape
            (B, n), pages = self.pages.shape, self.pages.flatten()
            tokens = part.transpose(0, 1).index_select(1, pages)  # (K, B * n, page size, width)
            found.append(tokens.view(K, B, n * page_size, width).transpose(0, 1)[:, :, : self.tokens])
        return self._replace(parts=found, pages=None)

    def read(self) -> tuple[Tensor, Tensor]:
        """The keys (*batch, K, S, D) and values (*batch, K, S, V) in the dtype in which they came."""
        k, v = (self.form.restored(side, self.dtype) for side in self.in_rows().sides())
        if len(self.batch) == 1:
            return k, v
        return k.reshape(*self.batch, *k.shape[1:]), v.reshape(*self.batch, *v.shape[1:])
