"""One form for every error a caller can cause.

A message names the argument, what was expected in the alphabet's letters, what came, what would have
gone wrong, and the next step, in this order:

    num_kv_heads: expected a divisor of num_heads=8, got 3. Query heads could not be shared evenly among
    key/value heads. Choose one of 1, 2, 4, 8.

The letters are those of `docs/design.md`: B batch, H query heads, K key/value heads, L query length,
S key length, D head dim of q and k, V head dim of v, E model width.
"""

from __future__ import annotations

from typing import TypeGuard

import torch


def _message(argument: str, expected: str, got: object, otherwise: str, instead: str) -> str:
    return " ".join(part for part in (f"{argument}: expected {expected}, got {got}.", otherwise, instead) if part)


def bad_value(argument: str, expected: str, got: object, otherwise: str = "", instead: str = "") -> ValueError:
    """The error for a value, shape or combination that cannot be right.

    Args:
        argument: the caller's name of it.
        expected: what would have been right, in the alphabet's letters.
        got: what came.
        otherwise: what would have gone wrong, a sentence.
        instead: the next step, a sentence.
    """
    return ValueError(_message(argument, expected, got, otherwise, instead))


class InputError(ValueError, AssertionError):
    """An input that does not fit, where torch.nn.MultiheadAttention raises AssertionError: code that catches that still
    works."""


def bad_input(argument: str, expected: str, got: object, otherwise: str = "", in_torch: str = "") -> InputError:
    """The error for an input of the drop-in. Arguments as in `bad_value`; `in_torch` is what torch says of it, for who
    looks for that."""
    words = f"(torch: {in_torch}.)" if in_torch else ""
    return InputError(_message(argument, expected, got, otherwise, words))


def bad_type(argument: str, expected: str, got: object, otherwise: str = "", instead: str = "") -> TypeError:
    """The error for something of a wrong type or dtype. Arguments as in `bad_value`; `got` may be the object itself."""
    return TypeError(_message(argument, expected, describe(got), otherwise, instead))


def describe(thing: object) -> str:
    """A thing as messages show it: a tensor by dtype and shape, text as it is, anything else by its type."""
    if isinstance(thing, str):
        return thing
    if isinstance(thing, torch.Tensor):
        return f"a {str(thing.dtype).removeprefix('torch.')} tensor of shape {tuple(thing.shape)}"
    if isinstance(thing, bool | int | float | type(None)):
        return repr(thing)
    return f"an object of type {type(thing).__name__}"


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is a whole number and not a bool (True as a size is a slip, never a wish)."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number and not a bool."""
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat) and not isinstance(value, bool)


def check_size(argument: str, value: object, *, least: int = 1) -> int:
    """`value` back, if it is an int of at least `least`."""
    if not is_int(value):
        raise bad_type(argument, "an int", value)
    if value < least:
        raise bad_value(argument, f"at least {least}", value)
    return value


def check_probability(argument: str, value: object) -> float:
    """`value` back, if it is a number from 0 to 1 (a dropout rate)."""
    if not is_number(value):
        instead = "Pass the rate itself, such as 0.1." if isinstance(value, torch.nn.Dropout) else ""
        raise bad_type(argument, "a number from 0 to 1", value, "", instead)
    if not 0.0 <= value <= 1.0:
        raise bad_value(argument, "a number from 0 to 1", value, "It is the share of weights that are dropped.")
    return float(value)
