"""What a layer shows of a call to those who watch it: see `inspection.capture`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from multihead.masks import Mask


class Join:
    """What a layer makes of its heads' outputs (*batch, H, L, V).

    Args:
        make: does it.
        module: whose parameters it reads.
    """

    def __init__(self, make: Callable[[Tensor], Tensor], module: nn.Module) -> None:
        self._make = make
        self._parameters = [p for p in module.parameters() if not p.is_inference()]
        self._versions = [p._version for p in self._parameters]

    @property
    def has_changed(self) -> bool:
        """Whether an optimizer, or somebody else, has changed the parameters meanwhile."""
        return [p._version for p in self._parameters] != self._versions

    def __call__(self, heads: Tensor) -> Tensor:
        return self._make(heads)


class Seen(NamedTuple):
    """One call of a layer, as it attends. Tensors are the call's own: keep them, and change nothing.

    Attributes:
        q, k, v: (*batch, H, L, D), (*batch, K, S, D), (*batch, K, S, V), positions applied.
        mask, scores: what acts on the scores, as `attention` takes it.
        dropout: of the weights.
        out: (*batch, H, L, V), or what `join` makes of it.
        lse: (*batch, H, L), if it was found on the way.
        join: None if `out` is what the heads gave.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    scores: dict[str, Any]
    dropout: float
    out: Tensor
    lse: Tensor | None = None
    join: Join | None = None


Watcher = Callable[[Seen], None]
