"""Masks: values that say which query may see which key.

A mask is made without knowing any sizes, joined with others by `&`, `|` and `~`, and asked later. True means
*may attend*:

    causal() & documents(cu_seqlens=starts)         packed documents of a language model
    window(left=255, right=0) | prefix(4)           a sliding window of 256 tokens with four anchors
    causal() & padding(tokens != pad_id)            a padded batch

`causal`, `window` and `prefix` look at positions, the rest at the slots 0 .. S-1 of the keys. Without positions
the L queries are the last L of the S keys. What each kind answers is in `mask_kinds.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value, check_size, describe, is_int
from multihead.mask_kinds import Documents, Lengths, Mask, Padding, Prefix, Window, as_mask, table

__all__ = ["Mask", "as_mask", "causal", "dense", "documents", "lengths", "padding", "prefix", "window"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def causal() -> Mask:
    """Each query sees the keys at its own and at earlier positions.

    With L != S and no positions given the queries are the last L tokens (bottom-right), as decoding needs it.
    """
    return Window(None, 0)


def window(left: int | None = None, right: int | None = None) -> Mask:
    """Each query sees itself, `left` tokens before it and `right` tokens after it.

    Args:
        left, right: how many tokens are visible *besides* the own one; None = no bound on that side. A causal window
            that shows 256 tokens in all is `window(left=255, right=0)`.

    Raises:
        TypeError, ValueError: a bound is not an int, or below zero.
    """
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and not is_int(bound):
            raise bad_type(f"window({name}=)", "an int or None", bound)
        if bound is not None and bound < 0:
            otherwise = "The own token is always visible; bounds count those besides it."
            raise bad_value(f"window({name}=)", "at least 0", bound, otherwise, "For no bound pass None.")
    return Window(left, right)


def lengths(n: int | Sequence[int] | Tensor) -> Mask:
    """Row b of the batch has n[b] keys: slots 0 .. n[b]-1 are visible, the rest is padding.

    Args:
        n: an int, or ints of shape (*batch).

    Raises:
        TypeError, ValueError: n holds no ints, or one below zero.
    """
    return Lengths(_counts("lengths(n)", n))


def prefix(n: int | Sequence[int] | Tensor) -> Mask:
    """Keys at positions below n are visible to everybody. A prefix language model is `causal() | prefix(n)`.

    Args:
        n: an int, or ints of shape (*batch).

    Raises:
        TypeError, ValueError: n holds no ints, or one below zero.
    """
    return Prefix(_counts("prefix(n)", n))


def padding(keep: Tensor) -> Mask:
    """Keys that hold a real token are visible.

    Args:
        keep: bool (S,) or (*batch, S), True = real token (the opposite of torch's key_padding_mask).

    Raises:
        TypeError: keep is not a bool tensor.
    """
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        instead = "Say it with a comparison, as in tokens != pad_id."
        raise bad_type("padding(keep)", "a bool tensor (*batch, S), True = real token", keep, "", instead)
    if keep.ndim == 0:
        raise bad_value("padding(keep)", "the shape (S,) or (*batch, S)", describe(keep))
    return Padding(keep)


def documents(ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None, q_ids: Tensor | None = None) -> Mask:
    """Several documents in one row: tokens see those of their own document only.

    Args:
        ids: ints (S,) or (*batch, S), the document of each key.
        cu_seqlens: instead of ids: ints (N+1,), where each of N documents starts, and the end: 0, ..., S.
        q_ids: ints (L,) or (*batch, L), the document of each query. By default the queries are the last L keys.

    Raises:
        TypeError, ValueError: not exactly one of ids and cu_seqlens, no ints, or cu_seqlens does not rise from 0.
    """
    if (ids is None) == (cu_seqlens is None):
        raise bad_value("documents(ids, cu_seqlens=)", "exactly one of the two", "both" if ids is not None else "none")
    if ids is None:
        ids = _ids_from_starts(cu_seqlens)
    for name, axis, value in (("ids", "S", ids), ("q_ids", "L", q_ids)):
        if value is not None and (not isinstance(value, Tensor) or value.dtype not in _INTEGERS):
            raise bad_type(f"documents({name})", f"an integer tensor (*batch, {axis})", value)
        if value is not None and value.ndim == 0:
            raise bad_value(f"documents({name})", f"the shape ({axis},) or (*batch, {axis})", describe(value))
    return Documents(ids, q_ids)


def dense(keep: Tensor) -> Mask:
    """Any mask as a table.

    Args:
        keep: bool, True = may attend, broadcastable to (*batch, H, L, S) from the right: (L, S), (H, L, S),
            (*batch, H, L, S), with 1 where an axis does not matter. One table for each row of a batch is
            `keep[:, None]`.

    Raises:
        TypeError: keep is not a bool tensor.
    """
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        instead = "True = may attend; for numbers that are added to the scores use bias=."
        raise bad_type("dense(keep)", "a bool tensor (*batch, H, L, S)", keep, "", instead)
    return table("dense(keep)", keep)


def _counts(argument: str, n: object) -> int | Tensor:
    """Counts, checked: a number as it is, several as a tensor. The values of a tensor are read only on the CPU, where
    that costs no synchronisation."""
    if is_int(n):
        return check_size(argument, n, least=0)
    if isinstance(n, Tensor):
        counts = n
    elif isinstance(n, Sequence) and not isinstance(n, str) and all(is_int(item) for item in n):
        counts = torch.tensor(n, dtype=torch.int64)
    else:
        raise bad_type(argument, "an int, or ints of shape (*batch)", n)
    if counts.dtype not in _INTEGERS:
        raise bad_type(argument, "an int, or ints of shape (*batch)", counts)
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    readable = counts.device.type == "cpu" and not traced
    if readable and counts.numel() and int(counts.min()) < 0:
        raise bad_value(argument, "counts of at least 0", int(counts.min()))
    return counts


def _ids_from_starts(cu_seqlens: object) -> Tensor:
    """Document ids (S,) from the starts (N+1,): 0, 0, 0, 1, 1 from 0, 3, 5."""
    argument = "documents(cu_seqlens=)"
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in _INTEGERS:
        raise bad_type(argument, "an integer tensor (N+1,)", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise bad_value(argument, "the shape (N+1,) with N >= 1", describe(cu_seqlens))
    starts = cu_seqlens.long()
    if int(starts[0]) != 0 or bool((starts.diff() < 0).any()):
        raise bad_value(argument, "numbers that rise from 0", starts.tolist(), "They say where each document starts.")
    tokens = torch.arange(int(starts[-1]), device=starts.device)
    return torch.searchsorted(starts[1:], tokens, right=True)
