"""The mask arguments of torch.nn.MultiheadAttention, as a mask and a bias.

There True hides, a float mask is added to the scores, and both arguments and `is_causal` can come together. Nothing is
expanded over heads or rows of the batch: what is the same for all stays one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.errors import bad_input, bad_type, bad_value, describe
from multihead.masks import Mask, causal, dense, padding
from multihead.plane import Plane
from multihead.positions import without_lowest

_CAUSAL = causal()


def from_torch(
    attn_mask: object, key_padding_mask: object, is_causal: object, plane: Plane, has_positions: bool
) -> tuple[Mask | None, Tensor | None]:
    """Who may see whom, and what is added to the scores.

    Args:
        attn_mask: (L, S), (N, L, S), (N*H, L, S), or (N, H, L, S) with 1 for any axis; without a batch (L, S) or
            (H, L, S).
        key_padding_mask: (N, S), without a batch (S,).
        is_causal: adds the causal mask to whatever the other two say.
        plane: L, S and H, with the batch axis (N,) or none.
        has_positions: whether the call says where tokens stand.

    Raises:
        ValueError, TypeError: something does not fit; in the caller's names.
    """
    if is_causal is not True and is_causal is not False:
        raise bad_type("is_causal", "True or False", is_causal)
    parts: list[tuple[Tensor, bool]] = []  # (a table that broadcasts to (N, H, L, S), whether it is the padding mask)
    if key_padding_mask is not None:
        parts.append((_padding("key_padding_mask", key_padding_mask, plane), True))
    if attn_mask is not None:
        table = _table("attn_mask", attn_mask, plane)
        if not (is_causal and not has_positions and plane.L <= plane.S and _says_no_more_than_causal(table)):
            parts.append((table, False))

    mask: Mask | None = _CAUSAL if is_causal else None
    bias: Tensor | None = None
    for table, is_padding in parts:
        if table.dtype == torch.bool:
            part = padding(~table) if is_padding else dense(~table)
            mask = part if mask is None else part & mask
        else:
            added = _over_keys(table) if is_padding else table
            # Each by itself: the lowest number of one dtype is nothing special in another, nor in a sum.
            bias = added if bias is None else without_lowest(bias) + without_lowest(added)
    return mask, bias


def _over_keys(table: Tensor) -> Tensor:  # (S,) or (N, S) -> (1, S) or (N, 1, 1, S)
    return table[None] if table.ndim == 1 else table[:, None, None]


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


def _padding(name: str, given: object, plane: Plane) -> Tensor:
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
            f"expected `{name}` to be `None` or {len(want)}-D but found {table.ndim}-D tensor instead",
        )
    return table


def _table(name: str, given: object, plane: Plane) -> Tensor:
    """A mask of any allowed shape, brought to one that broadcasts to (N, H, L, S), or (H, L, S) without a batch."""
    assert plane.batch is not None
    assert plane.heads is not None
    N, H, L, S = (plane.batch[0] if plane.batch else None), plane.heads, plane.L, plane.S
    form = "(L, S) or (H, L, S)" if N is None else "(L, S), (N, L, S), (N*H, L, S) or (N, H, L, S)"
    table = _check_kind(name, given, form, plane.device)
    shape = tuple(table.shape)
    rows = 1 if N is None else N
    if shape == (L, S):
        return table
    if len(shape) == 3 and shape[1:] == (L, S):
        if shape[0] == rows * H:
            return table if N is None else table.unflatten(0, (N, H))
        if shape[0] in (1, rows):
            return table if N is None else table[:, None]
    if len(shape) == 4 and all(have in (1, need) for have, need in zip(shape, (rows, H, L, S), strict=True)):
        return table[0] if N is None else table
    sizes = f"L={L}, S={S}, H={H}" + ("" if N is None else f", N={N}")
    in_torch = f"expected `{name}` to be `None`, 2-D or 3-D but found {table.ndim}-D tensor instead"
    if table.ndim in (2, 3):
        in_torch = f"Expected `{name}` shape to be {(L, S) if table.ndim == 2 else (rows * H, L, S)} but got {shape}"
    raise bad_input(name, f"the shape {form} with {sizes}", describe(table), "", in_torch)


def _says_no_more_than_causal(table: Tensor) -> bool:
    """Whether a table changes nothing where the causal mask lets see: then it need not be looked at again.

    torch.nn.Transformer and its layers pass the causal mask both ways. Looking costs one pass over the table, and is
    left out where values can't be read or are costly to wait for.
    """
    is_plain = type(table) is Tensor and table.device.type == "cpu" and not table.requires_grad
    if not is_plain or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return False
    L, S = table.shape[-2:]
    return L > 1 and not bool(table.tril(S - L).any())
