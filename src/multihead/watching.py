"""What a layer shows of a call to those who watch it: see `inspection.capture`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from multihead.masks import Mask


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
    join: Callable[[Tensor], Tensor] | None = None


Watcher = Callable[[Seen], None]
