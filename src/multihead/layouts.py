"""How the tokens of a batch lie in the inputs of a layer, and how its output goes back to that.

Layers compute on (*batch, tokens, width). `TOKENS_FIRST` is (tokens, batch, width), as in torch.nn without batch_first.
`Ragged` is a nested tensor: rows of different length one after the other, (all tokens, width), without padding.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


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
        self.longest = max(self.counts, default=0)
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
