"""How the tokens of a batch lie in the inputs of a layer, and how its output goes back to that.

Layers compute on (*batch, tokens, width). `TOKENS_FIRST` is (tokens, batch, width), as in torch.nn without batch_first.
`Ragged` is a nested tensor: rows of different length one after the other, (all tokens, width), without padding.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from multihead.errors import bad_value, describe
from multihead.masks import Mask, lengths


class Layout(Protocol):
    """What a layer asks of a layout."""

    def rows(self, tensor: Tensor) -> Tensor:
        """From the layout of the inputs to (*batch, tokens, width)."""

    def back(self, tensor: Tensor) -> Tensor:
        """From (batch, tokens, ...) to the layout of the inputs."""


class _TokensFirst:
    def rows(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1)

    def back(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1)


TOKENS_FIRST = _TokensFirst()


class Ragged:
    """The rows of a nested tensor (N, *, width), of either kind (torch.jagged or torch.strided).

    Attributes:
        values: (all tokens, width), row after row.
        lengths: (N,), int64.
        counts: the same as numbers.
        longest: the largest of them.
    """

    def __init__(self, nested: Any) -> None:  # a Tensor; what only nested ones have is unknown to type checkers
        self._offsets = nested.offsets() if nested.layout == torch.jagged and nested.lengths() is None else None
        if self._offsets is not None:
            self.values, self.lengths = nested.values(), self._offsets.diff()
        else:  # strided, or jagged with holes between the rows
            rows = nested.unbind()
            self.values = torch.cat(rows) if rows else nested.values()
            self.lengths = torch.tensor([len(row) for row in rows], device=nested.device)
        self._is_jagged = nested.layout == torch.jagged
        self.counts: list[int] = self.lengths.tolist()
        self.longest = max(self.counts) if self.counts else 0
        # Where each token lies among the (N * longest) places of the padded form.
        starts = torch.arange(len(self.counts), device=nested.device) * self.longest
        within = torch.arange(len(self.values), device=nested.device) - (
            self.lengths.cumsum(0) - self.lengths
        ).repeat_interleave(self.lengths)
        self._places = starts.repeat_interleave(self.lengths) + within

    def rows(self, tensor: Tensor) -> Tensor:  # (all tokens, W) -> (N, longest, W), zeros where there is no token
        padded = tensor.new_zeros(len(self.counts) * self.longest, tensor.shape[-1])
        return padded.index_copy(0, self._places, tensor).unflatten(0, (len(self.counts), self.longest))

    def back(self, tensor: Tensor) -> Tensor:  # (N, longest, ...) -> (all tokens, ...)
        return tensor.flatten(0, 1)[self._places]

    def nested(self, values: Tensor) -> Tensor:
        """The nested tensor of other values (all tokens, W): with the same ragged size where there is one, so that it
        can be added to the tensor that this was made of."""
        if self._offsets is not None:
            return torch.nested.nested_tensor_from_jagged(values, offsets=self._offsets)
        rows = list(values.split(self.counts))
        layout = torch.jagged if self._is_jagged else torch.strided
        return torch.nested.as_nested_tensor(rows, layout=layout)

    def only_tokens(self, weights: Tensor) -> Tensor:
        """(N, longest, S) or (N, H, longest, S) with zeros in the rows of queries that are not there."""
        there = torch.arange(self.longest, device=weights.device) < self.lengths[:, None]  # (N, longest)
        return torch.where(there[:, :, None] if weights.ndim == 3 else there[:, None, :, None], weights, 0.0)


def read_nested(
    query: Tensor, key: Tensor, value: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Layout | None, Layout | None], tuple[int | None, int, int]]:
    """What a layer needs of inputs of which some are nested: the tensors as projections take them, the layouts of query
    and of key and value, and N, L, S.

    Raises:
        ValueError: they do not fit each other.
    """
    found: dict[int, Ragged] = {}
    for tensor in (query, key, value):
        if tensor.is_nested and id(tensor) not in found:
            found[id(tensor)] = Ragged(tensor)
    q_rows, k_rows, v_rows = (found.get(id(tensor)) for tensor in (query, key, value))
    if (k_rows is None) != (v_rows is None):
        raise bad_value("value", "nested where key is", "one of both", "Each key has one value.")
    if k_rows is not None and v_rows is not None and k_rows.counts != v_rows.counts:
        raise bad_value(
            "value", f"rows as long as those of key, {k_rows.counts}", f"{v_rows.counts}", "Each key has one value."
        )
    if k_rows is None and key.shape[:-1] != value.shape[:-1]:
        raise bad_value("value", f"the batch and length of key, {tuple(key.shape[:-1])}", describe(value))
    (N, L), (rows, S) = (
        (len(r.counts), r.longest) if r is not None else t.shape[:2] for r, t in ((q_rows, query), (k_rows, key))
    )
    if rows != N:
        raise bad_value("key", f"the batch size of query, {N}", rows)
    sources = [t if r is None else r.values for r, t in ((q_rows, query), (k_rows, key), (v_rows, value))]
    return (sources[0], sources[1], sources[2]), (q_rows, k_rows), (N, L, S)


def without_padding(
    layouts: tuple[Layout | None, Layout | None],
    mask: Mask | Tensor | None,
    places: tuple[Tensor | None, Tensor | None],
    key_padding_mask: Tensor | None,
    is_self: bool,
    L: int,
    S: int,
    device: torch.device,
) -> tuple[Mask | Tensor | None, tuple[Tensor | None, Tensor | None]]:
    """Mask and positions of a call with nested inputs: only tokens that are there can be seen, and unless it is told
    otherwise the queries are the last tokens of their own row, however long it is."""
    if isinstance(layouts[1], Ragged):
        if key_padding_mask is not None:
            got = describe(key_padding_mask)
            raise bad_value("key_padding_mask", "None with a nested key", got, "It has no padding.")
        there = lengths(layouts[1].lengths)
        mask = there if mask is None else there & mask
    if is_self or places != (None, None):
        return mask, places
    q_end, k_end = (
        layout.lengths if isinstance(layout, Ragged) else n for layout, n in zip(layouts, (L, S), strict=True)
    )
    first = k_end - q_end  # (N,): at least one of the two is a tensor
    assert isinstance(first, Tensor)
    return mask, (first[:, None] + torch.arange(L, device=device), torch.arange(S, device=device))
