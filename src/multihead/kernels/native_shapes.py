"""The shapes and strides of what the native operations give, for programs that are recorded.

Arguments are named as in the schemas (csrc/op.cpp), and those that have their default may be left out.
"""
# ruff: noqa: ARG001  (each is told all of the operation's arguments)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multihead.kernels import library

GRAD_Q, GRAD_KV, GRAD_BIAS = 1, 2, 4  # what a backward pass is to find: csrc/kernel.h, enum Wanted
STATISTICS = {"entropy": 1, "visible_keys": 2, "received": 4, "seen_by": 8}  # csrc/kernel.h, enum Statistics

_SCORES = 10  # arguments after the bias and before the operation's own last one


def _like(tensor: Tensor) -> Tensor:
    """What csrc/op.cpp makes for the gradient of a tensor: heads and tokens in the same order in memory."""
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2)
    return tensor.new_empty(tensor.shape)


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *scores: object, wants_state: bool = False,
    **named: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, H, L, _ = q.shape
    wants_state = bool(scores[_SCORES]) if len(scores) > _SCORES else wants_state
    out = q.new_empty(B, L, H, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(B, H, L, dtype=torch.float32)
    state = q.new_empty((2, B, H, L) if wants_state else 0, dtype=torch.float32)
    return out, lse, state, torch.empty_like(out) if wants_state and q.dtype != torch.float32 else q.new_empty(0)


def _backward_shapes(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, rest: Tensor | None, state: Tensor,
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *scores: Any, wanted: int = GRAD_Q | GRAD_KV,
    **named: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wanted = scores[_SCORES] if len(scores) > _SCORES else wanted
    grad_q, grad_k, grad_v = (
        _like(t) if wanted & bit else t.new_empty(0) for t, bit in ((q, GRAD_Q), (k, GRAD_KV), (v, GRAD_KV))
    )
    size = bias.shape if bias is not None and wanted & GRAD_BIAS else (0,)
    return grad_q, grad_k, grad_v, q.new_empty(size, dtype=torch.float32)


def _weights_shapes(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *scores: object, average: bool = False,
    **named: object,
) -> Tensor:  # fmt: skip
    B, H, L, _ = q.shape
    average = bool(scores[_SCORES]) if len(scores) > _SCORES else average
    return q.new_empty((B, L, k.shape[2]) if average else (B, H, L, k.shape[2]), dtype=torch.float32)


def _statistics_shapes(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *scores: Any, wanted: int = 15,
    **named: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    B, H, L, _ = q.shape
    wanted = scores[_SCORES] if len(scores) > _SCORES else wanted
    sizes = zip(STATISTICS.values(), (L, L, k.shape[2], k.shape[2]), strict=True)
    return tuple(q.new_empty((B, H, n) if wanted & bit else 0, dtype=torch.float32) for bit, n in sizes)


if library.available():
    torch.library.register_fake("multihead::forward", _forward_shapes)
    torch.library.register_fake("multihead::backward", _backward_shapes)
    torch.library.register_fake("multihead::weights", _weights_shapes)
    torch.library.register_fake("multihead::statistics", _statistics_shapes)
