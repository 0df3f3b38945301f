"""The L x S plane of queries and keys, and the ways to look at a part of it.

Masks and biases are asked about a `Tile` (a rectangle, pair by pair), or about `Blocks` (the plane cut into equal
rectangles, one answer each). Both carry the positions, so nothing that is asked needs to know where they come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value, describe


def default_positions(
    L: int, S: int, q_positions: Tensor | None, k_positions: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Positions of both sides, filled in where they are None: keys stand at 0 .. S-1, queries are the last L keys."""
    if k_positions is None:
        k_positions = torch.arange(S, device=device)
        if q_positions is None:  # the same tensor where it can be, so that rotary turns by one table
            q_positions = k_positions if L == S else torch.arange(S - L, S, device=device)
    elif q_positions is None:
        q_positions = k_positions[..., S - L :]
    return q_positions, k_positions


def _wide(positions: Tensor) -> Tensor:
    """Whole numbers as int64, others in float32 at least: a distance of two narrow ones could wrap around, or round."""
    wide = torch.promote_types(positions.dtype, torch.float32) if positions.is_floating_point() else torch.int64
    return positions.to(wide)


class Plane:
    """The sizes a mask or a bias has to fit, and the checks they share.

    `batch` and `heads` are None where they are not known yet; only L and S are checked then.
    """

    __slots__ = ("L", "S", "batch", "device", "heads")

    def __init__(self, batch: tuple[int, ...] | None, heads: int | None, L: int, S: int, device: torch.device) -> None:
        self.batch, self.heads, self.L, self.S, self.device = batch, heads, L, S, device

    def check_rows(self, argument: str, tensor: int | Tensor) -> None:
        """One number for each row of the batch: (*batch), or one for all."""
        if not isinstance(tensor, Tensor):
            return
        if tensor.device.type != "cpu":  # a few counts on the CPU go with every device
            self._check_device(argument, tensor)
        self._check_batch(argument, tensor, tuple(tensor.shape), "()", "(*batch)")

    def check_tokens(self, argument: str, tensor: Tensor, axis: str) -> None:
        """One value for each token: (S,) or (*batch, S), or the same with L."""
        self._check_device(argument, tensor)
        length = self.S if axis == "S" else self.L
        if tensor.shape[-1] != length:
            otherwise = "Its last axis holds one value for each " + ("key." if axis == "S" else "query.")
            raise bad_value(argument, f"the shape (*batch, {axis}) with {axis}={length}", describe(tensor), otherwise)
        self._check_batch(argument, tensor, tuple(tensor.shape[:-1]), f"({axis},)", f"(*batch, {axis})")

    def check_pairs(self, argument: str, tensor: Tensor) -> None:
        """One value for each pair: broadcastable to (*batch, H, L, S) from the right."""
        self._check_device(argument, tensor)
        shape = tuple(tensor.shape)
        want = (*(self.batch or ()), self.heads, self.L, self.S)
        fits = len(shape) <= len(want) or self.batch is None
        for have, need in zip(reversed(shape), reversed(want), strict=False):
            fits = fits and (need is None or have in (1, need))
        if not fits:
            sizes = "(*batch, H, L, S)" if self.batch is None else f"(*batch, H, L, S) = {want}"
            instead = "One table for each row of a batch is (batch, 1, L, S): insert the axis with [:, None]."
            raise bad_value(argument, f"a shape that broadcasts to {sizes}", describe(tensor), "", instead)

    def check_positions(
        self, q_positions: object, k_positions: object, names: tuple[str, str] = ("q_positions", "k_positions")
    ) -> None:
        """Where tokens stand: numbers of shape (L,) and (S,), or with the batch axes in front."""
        for name, axis, given in ((names[0], "L", q_positions), (names[1], "S", k_positions)):
            if given is None:
                continue
            if not isinstance(given, Tensor) or given.dtype == torch.bool or given.is_complex():
                raise bad_type(name, f"a tensor of numbers ({axis},) or (*batch, {axis})", given)
            if given.ndim == 0:
                raise bad_value(name, f"the shape ({axis},) or (*batch, {axis})", describe(given))
            self.check_tokens(name, given, axis)
        if k_positions is not None and q_positions is None and self.L > self.S:
            otherwise = "The queries would be the last L of the S keys."
            raise bad_value("q_positions", f"given when L={self.L} > S={self.S} and k_positions is", None, otherwise)

    def _check_batch(self, argument: str, tensor: Tensor, have: tuple[int, ...], bare: str, full: str) -> None:
        if not have or self.batch is None:
            return
        fits = len(have) == len(self.batch) and all(h in (1, b) for h, b in zip(have, self.batch, strict=True))
        if not fits:
            raise bad_value(argument, f"the shape {bare} or {full} with batch={self.batch}", describe(tensor))

    def _check_device(self, argument: str, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise bad_value(argument, f"the device of q, {self.device}", tensor.device, "", "Move it with .to(device).")


class Tile:
    """A rectangle of the plane: `rows` of the queries and `columns` of the keys.

    The `per_*` methods shape what one has for each row of the batch, query, key or pair so that it broadcasts to
    (*batch, H, rows, columns).
    """

    def __init__(
        self,
        L: int,
        S: int,
        q_positions: Tensor,
        k_positions: Tensor,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> None:
        self.L, self.S = L, S
        self.q_positions, self.k_positions = _wide(q_positions), _wide(k_positions)
        self.rows, self.columns = rows, columns

    def per_row(self, number: int | Tensor) -> int | Tensor:  # (*batch) -> (*batch, 1, 1, 1)
        return number.to(self.k_positions.device)[..., None, None, None] if isinstance(number, Tensor) else number

    def per_query(self, tensor: Tensor) -> Tensor:  # (*batch, L) -> (*batch, 1, rows, 1)
        part = tensor[..., self.rows]
        return part[..., None, :, None] if tensor.ndim > 1 else part[:, None]

    def per_key(self, tensor: Tensor) -> Tensor:  # (*batch, S) -> (*batch, 1, 1, columns)
        part = tensor[..., self.columns]
        return part[..., None, None, :] if tensor.ndim > 1 else part[None, :]

    def per_pair(self, tensor: Tensor) -> Tensor:  # (*batch, H, L, S) -> (*batch, H, rows, columns)
        rows = self.rows if tensor.shape[-2] == self.L else slice(None)  # an axis of 1 stays: it broadcasts
        columns = self.columns if tensor.shape[-1] == self.S else slice(None)
        return tensor[..., rows, columns]

    @property
    def q_position(self) -> Tensor:
        return self.per_query(self.q_positions)

    @property
    def k_position(self) -> Tensor:
        return self.per_key(self.k_positions)

    @property
    def k_index(self) -> Tensor:
        return self.per_key(torch.arange(self.S, device=self.k_positions.device))


class Blocks:
    """The plane cut into nQ x nK blocks of `q_size` x `k_size`; the last of each side may be smaller.

    `rows` are the queries asked about: whole blocks, but for the last. nQ counts the blocks of those.
    """

    def __init__(
        self,
        L: int,
        S: int,
        q_positions: Tensor,
        k_positions: Tensor,
        q_size: int,
        k_size: int,
        rows: slice = slice(None),
    ) -> None:
        self.L, self.S, self.rows = L, S, rows
        self.q_positions, self.k_positions = _wide(q_positions), _wide(k_positions)
        self.q_size, self.k_size = q_size, k_size

    def per_row(self, number: int | Tensor) -> int | Tensor:  # (*batch) -> (*batch, 1, 1)
        return number.to(self.k_positions.device)[..., None, None] if isinstance(number, Tensor) else number

    def q_range(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Least and greatest value in each block of queries: (*batch, L) -> two of (*batch, nQ, 1)."""
        low, high = _range(tensor[..., self.rows], self.q_size)
        return low[..., None], high[..., None]

    def k_range(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Least and greatest value in each block of keys: (*batch, S) -> two of (*batch, 1, nK)."""
        low, high = _range(tensor, self.k_size)
        return low[..., None, :], high[..., None, :]

    def pair_range(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Whether some and every pair of each block is True, as uint8: (..., L, S) -> two of (..., nQ, nK)."""
        table = keep.expand(*keep.shape[:-2], self.L, self.S)[..., self.rows, :].view(torch.uint8)
        low, high = _range(table, self.k_size)  # (..., L, nK)
        every = _range(low.transpose(-1, -2), self.q_size)[0].transpose(-1, -2)
        some = _range(high.transpose(-1, -2), self.q_size)[1].transpose(-1, -2)
        return some, every

    @property
    def k_index(self) -> Tensor:
        return torch.arange(self.S, device=self.k_positions.device)


def _range(tensor: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Least and greatest value of each run of `size` along the last axis; the last run may be shorter."""
    length = tensor.shape[-1]
    runs = -(-length // size)
    if runs * size != length:  # repeat the last value: it changes neither the least nor the greatest of its run
        tensor = torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], runs * size - length)], -1)
    blocks = tensor.unflatten(-1, (runs, size))
    return blocks.amin(-1), blocks.amax(-1)
