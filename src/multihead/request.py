"""One call of attention, checked and brought to one form: what every kernel is asked about and runs on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value, check_probability, describe, is_number
from multihead.mask_kinds import Bounds, Mask, as_mask
from multihead.plane import Blocks, Plane, Tile, default_positions
from multihead.positions import Position, without_lowest

Attended = tuple[Tensor, Tensor, Tensor]  # what the reference returns: (out, weights, lse)
Definition = Callable[..., Attended]
_ALL = slice(None)


class Request:
    """Attention over one batch axis: q (B,H,L,D), k (B,K,S,D), v (B,K,S,V), all of one dtype on one device.

    The dtype is a real one: complex tensors are read as real ones of twice the width, which says the same.

    Attributes:
        mask, bias, scale, softcap, dropout: as `attention` takes them, checked; tensors in them have one batch axis.
        needs_lse: whether the answer must contain lse.
        needs_grad: whether the call is being recorded by autograd.
        sizes: (B, H, K, L, S, D, V).
        has_default_positions: whether the queries are simply the last L of the S keys.
        definition: the reference, as a function. Kernels may not import it (the tests hold them against it), and turn
            to it for second derivatives.
    """

    __slots__ = (
        "_positions",
        "bias",
        "definition",
        "dropout",
        "has_default_positions",
        "k",
        "mask",
        "needs_grad",
        "needs_lse",
        "q",
        "scale",
        "sizes",
        "softcap",
        "v",
    )

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        bias: Tensor | Position | None,
        scale: float,
        softcap: float | None,
        dropout: float,
        q_positions: Tensor | None,
        k_positions: Tensor | None,
        needs_lse: bool,
        definition: Definition,
        sizes: Sizes,
    ) -> None:
        self.q, self.k, self.v = q, k, v
        self.mask, self.bias, self.scale, self.softcap, self.dropout = mask, bias, scale, softcap, dropout
        self._positions = q_positions, k_positions
        self.has_default_positions = q_positions is None and k_positions is None
        self.needs_lse, self.definition, self.sizes = needs_lse, definition, sizes
        self.needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)

    @property
    def is_plain(self) -> bool:
        """Whether nothing acts on scores and weights but the scale."""
        return self.mask is None and self.bias is None and self.softcap is None and not self.dropout

    def positions(self) -> tuple[Tensor, Tensor]:
        """q_positions (L,) or (B, L), k_positions (S,) or (B, S)."""
        given_q, given_k = self._positions
        if given_q is None or given_k is None:
            self._positions = default_positions(self.sizes.L, self.sizes.S, given_q, given_k, self.q.device)
        q_positions, k_positions = self._positions
        assert q_positions is not None
        assert k_positions is not None
        return q_positions, k_positions

    def place(self, q_positions: Tensor, k_positions: Tensor) -> None:
        """Put other positions, of the same shapes, in their place."""
        self._positions = q_positions, k_positions

    def visible(self, rows: slice = _ALL, columns: slice = _ALL) -> Tensor | None:
        """The mask over a rectangle: bool (B or 1, H or 1, rows or 1, columns or 1); None = all visible."""
        if self.mask is None:
            return None
        return _four_axes(self.mask.visible(Tile(self.sizes.L, self.sizes.S, *self.positions(), rows, columns)))

    def added(self, rows: slice = _ALL, columns: slice = _ALL) -> Tensor | None:
        """The bias over a rectangle: (B or 1, H or 1, rows or 1, columns or 1); None = no bias."""
        if self.bias is None:
            return None
        if isinstance(self.bias, Tensor):
            return without_lowest(self.tile_of(self.bias, rows, columns))
        q_positions, k_positions = self.positions()
        bias = self.bias.bias(q_positions[..., rows], k_positions[..., columns])
        return None if bias is None else _four_axes(bias)

    def tile_of(self, table: Tensor, rows: slice, columns: slice) -> Tensor:
        """A rectangle of a table (..., L or 1, S or 1), as a view with four axes."""
        return _four_axes(Tile(self.sizes.L, self.sizes.S, *self.positions(), rows, columns).per_pair(table))

    @property
    def differs_by_row(self) -> bool:
        """Whether the mask, or where tokens stand, is not the same for all rows of the batch."""
        at = () if self.has_default_positions else self.positions()
        return any(t.ndim == 2 and t.shape[0] > 1 for t in at) or (self.mask is not None and self.mask.differs_by_row)

    def of_row(self, b: int) -> Request:
        """The request of one row of the batch."""
        bias = self.bias[b : b + 1] if isinstance(self.bias, Tensor) and self.bias.ndim == 4 else self.bias
        other = self.with_tensors(self.q[b : b + 1], self.k[b : b + 1], self.v[b : b + 1], bias)
        other.sizes = self.sizes._replace(B=1)
        other.mask = None if self.mask is None else self.mask.of_row(b)
        if not self.has_default_positions:
            other.place(*(t[b] if t.ndim == 2 and t.shape[0] > 1 else t for t in self.positions()))
        return other

    def with_tensors(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | Position | None) -> Request:
        """The same request over other tensors, for a backward pass that gets them from autograd."""
        other = object.__new__(Request)  # each step of training comes by here, and copy.copy takes ten times as long
        for name in Request.__slots__:
            setattr(other, name, getattr(self, name))
        other.q, other.k, other.v, other.bias = q, k, v, bias
        return other

    def defined(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | Position | None, dropout_mask: Tensor | None = None
    ) -> Attended:
        """What the definition says of these tensors in place of the request's own."""
        q_positions, k_positions = self.positions()
        return self.definition(
            q,
            k,
            v,
            self.mask,
            bias=bias,
            scale=self.scale,
            softcap=self.softcap,
            dropout_mask=dropout_mask,
            q_positions=q_positions,
            k_positions=k_positions,
        )

    def bounds(self, q_size: int, k_size: int, rows: slice = _ALL) -> Bounds | None:
        """What blocks of queries see of blocks of keys: bool (B or 1, nQ, nK) twice; None = everything.

        `rows` are the queries asked about, as in `Blocks`.
        """
        if self.mask is None:
            return None
        L, S = self.sizes.L, self.sizes.S
        some, every = self.mask.bounds(Blocks(L, S, *self.positions(), q_size, k_size, rows))
        shape = torch.broadcast_shapes(some.shape, (1, -(-len(range(L)[rows]) // q_size), -(-S // k_size)))
        return Bounds(some.expand(shape), every.expand(shape))


class Sizes(NamedTuple):
    """The sizes of a request, by the letters of the alphabet."""

    B: int
    H: int
    K: int
    L: int
    S: int
    D: int
    V: int


def make_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None,
    bias: Tensor | Position | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    needs_lse: bool,
    definition: Definition,
) -> Request:
    """Check everything, then join the batch axes into one.

    Raises:
        ValueError, TypeError: what `attention` documents.
    """
    batch, sizes = _check_inputs(q, k, v)
    B, H, _, L, S, D, _ = sizes
    if scale is None:
        scale = 1.0 / math.sqrt(D)
    elif not is_number(scale):
        raise bad_type("scale", "a number", scale)
    elif scale != scale or scale in (math.inf, -math.inf):
        raise bad_value("scale", "a finite number", scale)
    if q.is_complex():
        q, k, v, sizes = *(_as_real(t) for t in (q, k, v)), sizes._replace(D=2 * D, V=2 * sizes.V)
    if softcap is not None:
        if not is_number(softcap):
            raise bad_type("softcap", "a number above 0, or None", softcap)
        if not 0 < softcap < math.inf:
            raise bad_value("softcap", "a number above 0, or None", softcap, "It bounds the scores.")
    if type(dropout) is not float or dropout:
        dropout = check_probability("dropout", dropout)
    value = None
    if mask is not None or bias is not None or q_positions is not None or k_positions is not None:
        value = check_scores(Plane(tuple(batch), H, L, S, q.device), D, mask, bias, q_positions, k_positions)
    if len(batch) != 1:
        axes = torch.Size(batch)
        q, k, v = (t.reshape(B, *t.shape[-3:]) for t in (q, k, v))
        value = value.flattened(axes) if value is not None else None
        bias = _one_batch_axis(bias, axes, 3) if isinstance(bias, Tensor) else bias
        q_positions = _one_batch_axis(q_positions, axes, 1) if q_positions is not None else None
        k_positions = _one_batch_axis(k_positions, axes, 1) if k_positions is not None else None
    if bias is not None and not isinstance(bias, Tensor) and _learns(bias):  # its gradient needs the bias as a tensor
        q_at, k_at = default_positions(L, S, q_positions, k_positions, q.device)
        bias = bias.bias(q_at, k_at)
    return Request(
        q, k, v, value, bias, scale, softcap, dropout, q_positions, k_positions, needs_lse, definition, sizes
    )


def _as_real(tensor: Tensor) -> Tensor:
    """(..., X) complex to (..., 2 X) real. The real part of <q, k> is the product of the two so read."""
    return torch.view_as_real(tensor.resolve_conj()).flatten(-2)


def _learns(position: Position) -> bool:
    """Whether a position has numbers that may get a gradient."""
    held = vars(position).values()
    return isinstance(position, torch.nn.Module) or any(isinstance(t, Tensor) and t.requires_grad for t in held)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[int], Sizes]:
    """The batch axes and the sizes of a call, checked."""
    _check_kinds(q, k, v)
    (*q_batch, H, L, D), (*k_batch, K, S, k_width), (*v_batch, v_heads, v_length, V) = q.shape, k.shape, v.shape
    if q_batch != k_batch or q_batch != v_batch:
        got = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        instead = "To share keys over a batch expand them first: k.expand(B, -1, -1, -1) makes no copy."
        raise bad_value("q, k, v", "the same batch axes, (*batch, H, L, D), (*batch, K, S, D)", got, "", instead)
    if v_heads != K or v_length != S:
        raise bad_value("v", f"(*batch, K, S, V) with K={K}, S={S}", describe(v), "Each key has one value.")
    if k_width != D:
        otherwise = "Scores are dot products of a query with a key."
        raise bad_value("k", f"(*batch, K, S, D) with D={D} as in q", describe(k), otherwise)
    if D == 0 or H == 0:
        raise bad_value("q", "(*batch, H, L, D) with H and D of at least 1", describe(q))
    if K == 0 or H % K:
        otherwise = "Query heads could not be shared evenly among the key/value heads."
        instead = "Layout is (*batch, heads, length, width): is an axis transposed?"
        raise bad_value("k", f"(*batch, K, S, D) with K a divisor of H={H}", describe(k), otherwise, instead)
    return q_batch, Sizes(math.prod(q_batch), H, K, L, S, D, V)


def _check_kinds(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Three floating point tensors of one dtype on one device, with three axes at least."""
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
        alike = alike and (q.is_floating_point() or q.is_complex())
        if alike and q.ndim >= 3 and k.ndim >= 3 and v.ndim >= 3:
            return
    for name, form, tensor in (
        ("q", "(*batch, H, L, D)", q),
        ("k", "(*batch, K, S, D)", k),
        ("v", "(*batch, K, S, V)", v),
    ):
        if not isinstance(tensor, Tensor):
            raise bad_type(name, f"a tensor {form}", tensor)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise bad_type(name, f"a floating point or complex tensor {form}", tensor, "", "Embed tokens first.")
        if tensor.ndim < 3:
            instead = "For one head insert the axis with [..., None, :, :]."
            raise bad_value(name, f"at least three axes, {form}", describe(tensor), "", instead)
    if k.dtype != q.dtype or v.dtype != q.dtype:
        got = f"q {q.dtype}, k {k.dtype}, v {v.dtype}"
        raise bad_type("q, k, v", "one dtype", got, "", "Convert them with .to(q.dtype).")
    got = f"q on {q.device}, k on {k.device}, v on {v.device}"
    raise bad_value("q, k, v", "one device", got, "", "Move them with .to(q.device).")


def check_scores(
    plane: Plane,
    D: int,
    mask: Mask | Tensor | None,
    bias: Tensor | Position | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    names: tuple[str, str] = ("q_positions", "k_positions"),
) -> Mask | None:
    """Whether what acts on the scores fits their plane. `names` are the caller's for the positions.

    Returns:
        The mask as a value.

    Raises:
        ValueError, TypeError: something does not fit.
    """
    plane.check_positions(q_positions, k_positions, names)
    if bias is not None:
        _check_bias(bias, plane, D)
    if mask is None:
        return None
    mask = as_mask(mask)
    mask.check(plane)
    return mask


def _check_bias(bias: object, plane: Plane, D: int) -> None:
    if isinstance(bias, Position):
        if not bias.biases:
            instead = "Rotate q and k with it before the call, or give it to Attention(position=)."
            raise bad_type("bias", "a tensor, or a position that biases scores", bias, "It acts on q and k.", instead)
        assert plane.heads is not None
        bias.check(plane.heads, D, argument="bias")
        return
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        is_bool = isinstance(bias, Tensor) and bias.dtype == torch.bool
        instead = "Pass a bool tensor as mask=, True = may attend." if is_bool else ""
        raise bad_type("bias", "a floating point tensor (*batch, H, L, S), or a Position", bias, "", instead)
    if bias.ndim < 2:
        raise bad_value("bias", "at least the axes (L, S), with 1 where one does not matter", describe(bias))
    plane.check_pairs("bias", bias)


def _one_batch_axis(tensor: Tensor, batch: torch.Size, own: int) -> Tensor:
    """Join the batch axes of a tensor that has `own` axes besides them; without batch axes it stays as it is."""
    if tensor.ndim <= own:
        return tensor
    lead = tensor.ndim - own
    whole = (*([1] * (len(batch) - lead)), *tensor.shape[:lead])
    if all(size == 1 for size in whole):
        return tensor.reshape(1, *tensor.shape[lead:])
    return tensor.expand(*batch, *tensor.shape[lead:]).reshape(batch.numel(), *tensor.shape[lead:])


def _four_axes(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 4 else tensor[(None,) * (4 - tensor.ndim)]
