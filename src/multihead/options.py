"""The checks of what a layer of attention is made and called with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from multihead.errors import bad_type, bad_value, check_size, describe, is_number
from multihead.positions import Position

Positions = Tensor | tuple[Tensor, Tensor]


def check_kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    """K, if it divides H."""
    if num_kv_heads is None:
        return num_heads
    if num_heads % check_size("num_kv_heads", num_kv_heads):
        choices = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        otherwise = "Query heads could not be shared evenly among the key/value heads."
        raise bad_value(
            "num_kv_heads", f"a divisor of num_heads={num_heads}", num_kv_heads, otherwise, f"Choose of {choices}."
        )
    return num_kv_heads


def check_head_dim(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    """D, by default E / H."""
    if head_dim is not None:
        return check_size("head_dim", head_dim)
    if embed_dim % num_heads:
        otherwise = "Each head's width is embed_dim / num_heads unless told."
        instead = f"Pass head_dim=, such as {max(1, embed_dim // num_heads)}, or another num_heads."
        raise bad_value("embed_dim", f"a multiple of num_heads={num_heads}", embed_dim, otherwise, instead)
    return embed_dim // num_heads


def check_flags(**flags: object) -> None:
    """Whether flags, by name, are True or False."""
    may_be_none = ("out_bias", "packed")
    for name, flag in flags.items():
        if not isinstance(flag, bool) and not (flag is None and name in may_be_none):
            raise bad_type(name, "True or False" + (" or None" if name in may_be_none else ""), flag)


def check_position(position: object) -> Position:
    """A position, if it is one."""
    if not isinstance(position, Position):
        instead = "Make one: Rotary(), ALiBi(num_heads), T5Bias(num_heads), RelativeBias(num_heads, max_distance)."
        raise bad_type("position", "a Position or None", position, "", instead)
    return position


def check_number(name: str, value: object, *, above_zero: bool = False) -> float | None:
    """A finite number or None."""
    if value is None:
        return None
    if not is_number(value):
        raise bad_type(name, "a number or None", value)
    if not -float("inf") < value < float("inf") or (above_zero and value <= 0):
        raise bad_value(name, "a number above 0, or None" if above_zero else "a finite number, or None", value)
    return float(value)


def split_positions(positions: object, is_self: bool) -> tuple[Tensor | None, Tensor | None]:
    """Where queries and keys stand, of what a call was given: one tensor in self-attention, else a pair."""
    if positions is None:
        return None, None
    if isinstance(positions, Tensor):
        if not is_self:
            otherwise = "Queries and keys have places of their own."
            raise bad_value(
                "positions", "a pair (q_positions, k_positions) for two sources", describe(positions), otherwise
            )
        return positions, positions
    pair: Any = positions
    if isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(item, Tensor) for item in pair):
        return pair
    raise bad_type("positions", "a tensor (L,) or (*batch, L), or a pair of them", positions)
