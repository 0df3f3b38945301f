"""The mask arguments of torch.nn.MultiheadAttention, as a mask and a bias.

There True hides, a float mask is added to the scores, and both arguments and `is_causal` can come together. Nothing is
expanded over heads or rows of the batch: what is the same for all stays one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.errors import bad_input, bad_type, bad_value, describe
from multihead.kernels.autograd import readable
from multihead.masks import Mask, causal, dense, padding
from multihead.plane import Plane
from multihead.positions import without_lowest

_CAUSAL = causal()


class TorchMasks(NamedTuple):
    """The mask arguments of one call, checked and as they came."""

    attn_mask: Tensor | None
    key_padding_mask: Tensor | None
    is_causal: bool


def check_masks(attn_mask: object, key_padding_mask: object, is_causal: object, plane: Plane) -> TorchMasks:
    """Whether the arguments fit.

    Args:
        attn_mask: (L, S), (N, L, S), (N*H, L, S), or (N, H, L, S) with 1 for any axis; without a batch (L, S) or
            (H, L, S).
        key_padding_mask: (N, S), without a batch (S,).
        is_causal: adds the causal mask to whatever the other two say.
        plane: L, S and H, with the batch axis (N,) or none.

    Raises:
        ValueError, TypeError: something does not fit; in the caller's names.
    """
    if is_causal is not True and is_causal is not False:
        raise bad_type("is_causal", "True or False", is_causal)
    padding = None if key_padding_mask is None else _checked_padding("key_padding_mask", key_padding_mask, plane)
    table = None if attn_mask is None else _checked_table("attn_mask", attn_mask, plane)
    return TorchMasks(table, padding, is_causal)


def mask_and_bias(
    given: TorchMasks, plane: Plane, dtype: torch.dtype, has_positions: bool
) -> tuple[Mask | None, Tensor | None]:
    """Who may see whom, and what is added to the scores.

    Args:
        dtype: of the scores; where two float masks come together they are added in it.
        has_positions: whether the call says where tokens stand.
    """
    table, padded, is_causal = given
    if table is not None and not has_positions and _is_causal_table(table):
        table, is_causal = None, True  # it is computed with less work when it is known
    mask: Mask | None = _CAUSAL if is_causal else None
    biases: list[Tensor] = []
    if padded is not None and padded.dtype == torch.bool:
        mask = padding(~padded) if mask is None else padding(~padded) & mask
    elif padded is not None:
        biases.append(padded[None] if padded.ndim == 1 else padded[:, None, None])  # (1, S), (N, 1, 1, S)
    if table is not None:
        table = _by_head(table, plane)
        if table.dtype == torch.bool:
            mask = dense(~table) if mask is None else dense(~table) & mask
        else:
            biases.append(table)
    return mask, biases[0] if len(biases) == 1 else sum_of(biases, dtype) if biases else None


def sum_of(biases: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Biases as one, added in `dtype`. Each hides by the lowest number of its own dtype (`without_lowest`), which is
    nothing special in another."""
    total = without_lowest(biases[0]).to(torch.promote_types(biases[0].dtype, dtype))
    for bias in biases[1:]:
        total = total + without_lowest(bias).to(torch.promote_types(bias.dtype, dtype))
    return total


def _check_kind(name: str, table: object, form: str, device: torch.device) -> Tensor:
    if not isinstance(table, Tensor):
        raise bad_type(name, f"a bool or floating point tensor {form}", table)
    if table.dtype != torch.bool and not table.is_floating_point():
        otherwise = "A whole number says neither what to hide nor what to add."
        instead = "With 1 = hide, write mask.bool(); with 1 = keep, write mask == 0."
        raise bad_type(
            name,
            f"a bool tensor (True hides) or a floating point one (added to the scores) {form}",
            table,
            otherwise,
            instead,
        )
    if table.device != device:
        raise bad_value(name, f"the device of query, {device}", table.device, "", "Move it with .to(device).")
    return table


def _checked_padding(name: str, given: object, plane: Plane) -> Tensor:
    assert plane.batch is not None
    form, want = ("(N, S)" if plane.batch else "(S,)"), (*plane.batch, plane.S)
    table = _check_kind(name, given, form, plane.device)
    if tuple(table.shape) != want:
        is_turned = tuple(table.shape) == want[::-1] != want
        hint = " Is it transposed? It is batch first in either layout." if is_turned else ""
        raise bad_input(
            name,
            f"the shape {form} = {want}",
            describe(table),
            f"It says of each key whether to ignore it.{hint}",
            f"expected `{name}` to be `None` or {len(want)}-D but found {table.ndim}-D tensor instead"
            if table.ndim != len(want)
            else "",
        )
    return table


def _checked_table(name: str, given: object, plane: Plane) -> Tensor:
    N, H, L, S = _sizes(plane)
    form = (
        "(L, S) or (H, L, S)" if N is None else "(L, S), (N, L, S), (N*H, L, S) or (N, H, L, S), 1 for any of the last,"
    )
    table = _check_kind(name, given, form, plane.device)
    shape, rows = tuple(table.shape), 1 if N is None else N
    allowed = shape == (L, S) or (len(shape) == 3 and shape[1:] == (L, S) and shape[0] in (1, rows, rows * H))
    if allowed or (len(shape) == 4 and all(h in (1, n) for h, n in zip(shape, (rows, H, L, S), strict=True))):
        return table
    sizes = f"L={L}, S={S}, H={H}" + ("" if N is None else f", N={N}")
    in_torch = f"expected `{name}` to be `None`, 2-D or 3-D but found {table.ndim}-D tensor instead"
    if table.ndim == 4:
        in_torch = ""
    elif table.ndim in (2, 3):
        in_torch = f"Expected `{name}` shape to be {(L, S) if table.ndim == 2 else (rows * H, L, S)} but got {shape}"
    raise bad_input(name, f"the shape {form} with {sizes}", describe(table), "", in_torch)


def _by_head(table: Tensor, plane: Plane) -> Tensor:
    """A checked table so that it broadcasts to (N, H, L, S), or (H, L, S) without a batch."""
    N, H, _, _ = _sizes(plane)
    if N is None:
        return table[0] if table.ndim == 4 else table
    if table.ndim != 3:
        return table
    return table.unflatten(0, (N, H)) if table.shape[0] == N * H else table[:, None]


def _sizes(plane: Plane) -> tuple[int | None, int, int, int]:
    """N (None without a batch), H, L, S."""
    assert plane.heads is not None
    return plane.batch[0] if plane.batch else None, plane.heads, plane.L, plane.S


def _is_causal_table(table: Tensor) -> bool:
    """Whether a table is the causal one, (L, S) with L <= S, as most code makes it by hand. A few rows are looked at at
    a time, up to the first that differs."""
    if table.ndim != 2 or table.requires_grad or not readable(table):
        return False
    L, S = table.shape
    if not 1 < L <= S:
        return False
    step = L if L * S <= _SMALL else max(1, _SMALL // S)
    for start in range(0, L, step):
        rows = table[start : start + step]
        hidden = rows if table.dtype == torch.bool else rows == -math.inf
        later = _later_keys(L, S) if step == L else _made_later_keys(L, S, start, len(rows))
        if not torch.equal(hidden, later):
            return False
        if table.dtype != torch.bool and bool(rows.masked_fill(hidden, 0.0).any()):
            return False
    return True


_SMALL = 2**16  # pairs that are looked at at a time


@lru_cache(maxsize=32)
def _later_keys(L: int, S: int) -> Tensor:
    """What the causal mask hides. Kept for small sizes, where making it takes longer than attention itself."""
    with torch.inference_mode(False):
        return _made_later_keys(L, S, 0, L)


def _made_later_keys(L: int, S: int, start: int, count: int) -> Tensor:
    """The same for some rows: (count, S)."""
    queries = torch.arange(start + S - L, start + S - L + count, device="cpu")
    return torch.arange(S, device="cpu") > queries[:, None]
