"""Attention rollout: how much of each input token reaches an output token, if attention and residuals were all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multihead.errors import bad_value, is_number
from multihead.inspection.picking import chosen
from multihead.inspection.record import Record


@torch.no_grad()
def rollout(records: Sequence[Record], rows: int | slice | Sequence[int] | None, residual: float) -> Tensor:
    """The rows of A_n ... A_1, with A = (1 - residual) * mean over heads of the weights + residual * I, (*batch, R, T).

    Only the rows asked for are carried through the layers, from the last to the first: O(R T) besides a block of
    weights.

    Args:
        records: of self-attention layers in the order in which they ran, of one length T.
        rows: R output tokens; None: all.
        residual: the share of what goes past the attention.

    Raises:
        ValueError, TypeError: the layers are not of one length, or an option does not fit.
    """
    if not is_number(residual) or not 0 <= residual < 1:
        raise bad_value("residual", "a number from 0, below 1", residual)
    first = records[0]
    T = first.shape[-1]
    for record in records:
        if record.shape[-2:] != (T, T) or record.shape[:-3] != first.shape[:-3]:
            got = f"{tuple(record.shape)} of {record.name!r}"
            instead = "Choose such layers by capture(layers=)."
            raise bad_value("rollout", f"self-attention of one batch and {T} tokens in every layer", got, "", instead)
    batch = first.shape[:-3]
    some = chosen("rows", rows, T)
    carried = torch.zeros(*batch, len(some), T, dtype=torch.float32, device=first.device)
    carried[..., torch.arange(len(some)), torch.tensor(some)] = 1
    for record in reversed(records):
        seen = torch.zeros_like(carried)
        for queries, weights in record.blocks():
            seen += carried[..., queries] @ weights.mean(-3).to(carried.dtype)
        carried = (1 - residual) * seen + residual * carried
    return carried
