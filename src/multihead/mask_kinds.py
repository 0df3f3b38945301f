"""The kinds of masks: what each says of a pair of tokens, and of blocks of them.

A mask answers three questions, and a new kind is one class here (and one function in `masks.py` that makes it):

- `visible(tile)`: may query i see key j, over a rectangle of the L x S plane;
- `bounds(blocks)`: can a block of queries see a block of keys at all, and does it see all of it. This is what lets
  a kernel skip work. Bounds may be loose (say "perhaps" where the answer is no), never wrong;
- `dense(L, S)`: the whole plane as a tensor, made from the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value, check_size, describe
from multihead.plane import Blocks, Plane, Tile, default_positions


class Bounds(NamedTuple):
    """What blocks of queries see of blocks of keys; both bool and broadcastable to (*batch, nQ, nK)."""

    some: Tensor  # False: certainly no pair of the two blocks is visible
    every: Tensor  # True: certainly all pairs of the two blocks are visible


class Mask(ABC):
    """Who may see whom. Make one with the functions of `masks.py`, not with the classes."""

    @abstractmethod
    def visible(self, tile: Tile) -> Tensor:
        """May query i see key j: bool, broadcastable to (*batch, H, rows, columns) of the tile."""

    @abstractmethod
    def bounds(self, blocks: Blocks) -> Bounds:
        """Can a block of queries see a block of keys, over all heads."""

    @abstractmethod
    def check(self, plane: Plane) -> None:
        """Raise in the house style if this mask does not fit the sizes, before any tensor work."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors this mask holds, by the name of the field."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def _map(self, function: Any) -> Mask:
        """The same mask with `function(name, tensor)` in place of every tensor it holds."""
        held = self.tensors()
        return replace(self, **{name: function(name, value) for name, value in held.items()}) if held else self  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on `device`."""
        return self._map(lambda _name, tensor: tensor.to(device))

    @property
    def differs_by_row(self) -> bool:
        """Whether it is not the same for all rows of the one batch axis."""
        return any(t.ndim > self._own_axes(name) and t.shape[0] > 1 for name, t in self.tensors().items())

    def of_row(self, b: int) -> Mask:
        """The mask of one row of the one batch axis."""

        def pick(name: str, tensor: Tensor) -> Tensor:
            return tensor[b : b + 1] if tensor.ndim > self._own_axes(name) and tensor.shape[0] > 1 else tensor

        return self._map(pick)

    def _own_axes(self, name: str) -> int:
        """Of a tensor, those that are not of the batch."""
        return 3 if isinstance(self, Dense) else {"n": 0, "keep": 1, "q_ids": 1, "k_ids": 1}[name]

    def flattened(self, batch: tuple[int, ...]) -> Mask:
        """The same mask with the batch axes of its tensors joined into one, for kernels that know one batch axis."""

        def flatten(name: str, tensor: Tensor) -> Tensor:
            own = self._own_axes(name)
            if tensor.ndim <= own:
                return tensor
            own_shape = tensor.shape[tensor.ndim - own :]
            if all(size == 1 for size in tensor.shape[: tensor.ndim - own]):
                return tensor.reshape(1, *own_shape)
            return tensor.expand(*batch, *own_shape).reshape(torch.Size(batch).numel(), *own_shape)

        return self._map(flatten)

    def dense(
        self,
        L: int,
        S: int,
        *,
        q_positions: Tensor | None = None,
        k_positions: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The whole plane, bool, True = may attend.

        Args:
            L, S: query and key length.
            q_positions, k_positions: (L,) and (S,), or with the batch axes in front. By default the queries are the
                last L of the S keys.
            device: of the answer; by default that of the mask's tensors, else the CPU.

        Returns:
            (L, S), with batch and head axes in front where the mask or the positions have them: (*batch, H or 1, L, S).

        Raises:
            ValueError, TypeError: the mask or the positions do not fit L or S.
        """
        held = [t.device for t in (*self.tensors().values(), q_positions, k_positions) if t is not None]
        where = torch.device(device) if device is not None else (held[0] if held else torch.device("cpu"))
        plane = Plane(None, None, check_size("L", L, least=0), check_size("S", S, least=0), where)
        plane.check_positions(q_positions, k_positions)
        self.check(plane)
        q_default, k_default = default_positions(L, S, q_positions, k_positions, where)
        seen = self.visible(Tile(L, S, q_default, k_default))
        return seen.expand(torch.broadcast_shapes(seen.shape, (L, S)))

    def __and__(self, other: Mask | Tensor) -> Mask:
        return And(self, as_mask(other, "the other side of &"))

    def __or__(self, other: Mask | Tensor) -> Mask:
        return Or(self, as_mask(other, "the other side of |"))

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Mask:
        return Not(self)


def as_mask(mask: object, argument: str = "mask") -> Mask:
    """A mask as a value: masks as they are, bool tensors as `dense`.

    Raises:
        TypeError: it is neither. Float tensors are biases, and a bias is another argument.
    """
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return table(argument, mask)
    if isinstance(mask, Tensor) and mask.is_floating_point():
        instead = "Pass it as bias=, which is added to the scores."
        raise bad_type(argument, "a Mask or a bool tensor", mask, "Its numbers would be lost.", instead)
    if isinstance(mask, Tensor):
        otherwise = "Whether 1 means visible or hidden differs from library to library."
        raise bad_type(
            argument, "a Mask or a bool tensor", mask, otherwise, "Say it with a comparison, as in ids == 1."
        )
    if callable(mask):
        instead = "Call the function that makes it: causal(), not causal."
        raise bad_type(argument, "a Mask or a bool tensor", mask, "", instead)
    raise bad_type(argument, "a Mask or a bool tensor", mask, "", "Masks are made by causal(), window(), lengths() ...")


@dataclass(frozen=True)
class Window(Mask):
    """Keys at most `left` positions before and `right` after the query; None = no bound."""

    left: int | None
    right: int | None

    def visible(self, tile: Tile) -> Tensor:
        distance = tile.q_position - tile.k_position  # (..., rows, columns), positive towards the past
        if self.left is None:
            return distance >= -self.right if self.right is not None else torch.ones_like(distance, dtype=torch.bool)
        return distance <= self.left if self.right is None else (distance <= self.left) & (distance >= -self.right)

    def bounds(self, blocks: Blocks) -> Bounds:
        q_low, q_high = blocks.q_range(blocks.q_positions)
        k_low, k_high = blocks.k_range(blocks.k_positions)
        nearest, farthest = q_low - k_high, q_high - k_low  # the least and the greatest distance in the pair of blocks
        some = every = torch.ones_like(nearest, dtype=torch.bool)
        if self.left is not None:
            some, every = some & (nearest <= self.left), every & (farthest <= self.left)
        if self.right is not None:
            some, every = some & (farthest >= -self.right), every & (nearest >= -self.right)
        return Bounds(some, every)

    def check(self, plane: Plane) -> None:
        pass

    def is_causal(self) -> bool:
        """Whether it is `causal()`. No comparison of dataclasses: compiled code may hold `right` as a symbol."""
        return self.left is None and self.right is not None and self.right == 0

    def __repr__(self) -> str:
        return "causal()" if self.is_causal() else f"window(left={self.left}, right={self.right})"


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """Key slots below n; n is a number or (*batch)."""

    n: int | Tensor

    def visible(self, tile: Tile) -> Tensor:
        return tile.k_index < tile.per_row(self.n)

    def bounds(self, blocks: Blocks) -> Bounds:
        first, last = blocks.k_range(blocks.k_index)
        n = blocks.per_row(self.n)
        return Bounds(first < n, last < n)

    def check(self, plane: Plane) -> None:
        plane.check_rows("lengths(n)", self.n)

    def __repr__(self) -> str:
        return f"lengths({_short(self.n)})"


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Keys at positions below n; n is a number or (*batch)."""

    n: int | Tensor

    def visible(self, tile: Tile) -> Tensor:
        return tile.k_position < tile.per_row(self.n)

    def bounds(self, blocks: Blocks) -> Bounds:
        low, high = blocks.k_range(blocks.k_positions)
        n = blocks.per_row(self.n)
        return Bounds(low < n, high < n)

    def check(self, plane: Plane) -> None:
        plane.check_rows("prefix(n)", self.n)

    def __repr__(self) -> str:
        return f"prefix({_short(self.n)})"


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Key slots that hold a real token; keep is (S,) or (*batch, S)."""

    keep: Tensor

    def visible(self, tile: Tile) -> Tensor:
        return tile.per_key(self.keep)

    def bounds(self, blocks: Blocks) -> Bounds:
        low, high = blocks.k_range(self.keep.to(torch.int8))
        return Bounds(high > 0, low > 0)

    def check(self, plane: Plane) -> None:
        plane.check_tokens("padding(keep)", self.keep, "S")

    def __repr__(self) -> str:
        return f"padding({_short(self.keep)})"


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Tokens of one document see each other. k_ids (S,) or (*batch, S); q_ids likewise with L, None = the last L."""

    k_ids: Tensor
    q_ids: Tensor | None

    def _q_ids(self, L: int) -> Tensor:
        return self.k_ids[..., self.k_ids.shape[-1] - L :] if self.q_ids is None else self.q_ids

    def visible(self, tile: Tile) -> Tensor:
        return tile.per_query(self._q_ids(tile.L)) == tile.per_key(self.k_ids)

    def bounds(self, blocks: Blocks) -> Bounds:
        q_low, q_high = blocks.q_range(self._q_ids(blocks.L))
        k_low, k_high = blocks.k_range(self.k_ids)
        alike = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        return Bounds((q_low <= k_high) & (k_low <= q_high), alike)

    def check(self, plane: Plane) -> None:
        plane.check_tokens("documents(ids)", self.k_ids, "S")
        if self.q_ids is not None:
            plane.check_tokens("documents(q_ids=)", self.q_ids, "L")
        elif plane.L > plane.S:
            otherwise = "The queries are taken to be the last L of the S keys."
            raise bad_value("documents(ids)", f"L <= S={plane.S}", f"L={plane.L}", otherwise, "Pass q_ids= as well.")

    def __repr__(self) -> str:
        return f"documents({_short(self.k_ids)})"


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A table: keep is broadcastable to (*batch, H, L, S), from the right."""

    keep: Tensor

    def visible(self, tile: Tile) -> Tensor:
        return tile.per_pair(self.keep)

    def bounds(self, blocks: Blocks) -> Bounds:
        some, every = blocks.pair_range(self.keep)
        if self.keep.ndim >= 3:  # heads are joined: a block is skipped only if no head sees it
            some, every = some.amax(-3), every.amin(-3)
        return Bounds(some > 0, every > 0)

    def check(self, plane: Plane) -> None:
        plane.check_pairs("mask", self.keep)

    def __repr__(self) -> str:
        return f"dense({_short(self.keep)})"


class Joined(Mask):
    """Two masks under one operation; everything but the operation itself is passed on to both."""

    a: Mask
    b: Mask

    def check(self, plane: Plane) -> None:
        self.a.check(plane)
        self.b.check(plane)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{side}.{n}": t for side, m in (("a", self.a), ("b", self.b)) for n, t in m.tensors().items()}

    def to(self, device: torch.device | str) -> Mask:
        return type(self)(self.a.to(device), self.b.to(device))  # type: ignore[call-arg]

    def flattened(self, batch: tuple[int, ...]) -> Mask:
        return type(self)(self.a.flattened(batch), self.b.flattened(batch))  # type: ignore[call-arg]

    @property
    def differs_by_row(self) -> bool:
        return self.a.differs_by_row or self.b.differs_by_row

    def of_row(self, b: int) -> Mask:
        return type(self)(self.a.of_row(b), self.b.of_row(b))  # type: ignore[call-arg]


@dataclass(frozen=True, eq=False)
class And(Joined):
    a: Mask
    b: Mask

    def visible(self, tile: Tile) -> Tensor:
        return self.a.visible(tile) & self.b.visible(tile)

    def bounds(self, blocks: Blocks) -> Bounds:
        a, b = self.a.bounds(blocks), self.b.bounds(blocks)
        return Bounds(a.some & b.some, a.every & b.every)

    def __repr__(self) -> str:
        return f"{_bracketed(self.a, Or)} & {_bracketed(self.b, Or)}"


@dataclass(frozen=True, eq=False)
class Or(Joined):
    a: Mask
    b: Mask

    def visible(self, tile: Tile) -> Tensor:
        return self.a.visible(tile) | self.b.visible(tile)

    def bounds(self, blocks: Blocks) -> Bounds:
        a, b = self.a.bounds(blocks), self.b.bounds(blocks)
        return Bounds(a.some | b.some, a.every | b.every)

    def __repr__(self) -> str:
        return f"{self.a!r} | {self.b!r}"


@dataclass(frozen=True, eq=False)
class Not(Mask):
    a: Mask

    def visible(self, tile: Tile) -> Tensor:
        return ~self.a.visible(tile)

    def bounds(self, blocks: Blocks) -> Bounds:
        a = self.a.bounds(blocks)
        return Bounds(~a.every, ~a.some)

    def check(self, plane: Plane) -> None:
        self.a.check(plane)

    def tensors(self) -> dict[str, Tensor]:
        return self.a.tensors()

    def to(self, device: torch.device | str) -> Mask:
        return Not(self.a.to(device))

    def flattened(self, batch: tuple[int, ...]) -> Mask:
        return Not(self.a.flattened(batch))

    @property
    def differs_by_row(self) -> bool:
        return self.a.differs_by_row

    def of_row(self, b: int) -> Mask:
        return Not(self.a.of_row(b))

    def __repr__(self) -> str:
        return f"~{_bracketed(self.a, And, Or)}"


def _bracketed(mask: Mask, *kinds: type[Mask]) -> str:
    return f"({mask!r})" if isinstance(mask, kinds) else repr(mask)


def _short(tensor: int | Tensor) -> str:
    """What a mask's repr says of its content: the number itself, or dtype and shape (not a million ids)."""
    if not isinstance(tensor, Tensor):
        return str(tensor)
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def table(argument: str, keep: Tensor) -> Mask:
    if keep.ndim < 2:
        otherwise = "With fewer axes it is not clear whether it speaks of queries or of keys."
        raise bad_value(argument, "at least the axes (L, S)", describe(keep), otherwise, "For keys use padding().")
    return Dense(keep)


def packed_documents(mask: Mask | None) -> tuple[Tensor, bool] | None:
    """(ids (S,), causal or not) if the mask is documents(ids) or causal() & documents(ids) of one row; else None."""
    is_causal = False
    if isinstance(mask, And) and Window(None, 0) in (mask.a, mask.b):
        is_causal, mask = True, mask.b if mask.a == Window(None, 0) else mask.a
    if isinstance(mask, Documents) and mask.q_ids is None and mask.k_ids.ndim == 1:
        return mask.k_ids, is_causal
    return None
