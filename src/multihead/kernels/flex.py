"""FlexAttention, compiled for CUDA: masks, bias and softcap become functions of one score.

It has not been run on a GPU by this project yet, so it is never taken by itself: `kernel="flex"` asks for it, and the
tests marked `gpu` run it. The functions that carry the meaning (`score_mod`, `mask_mod`) are tested on the CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from multihead.kernels.autograd import transform_refusals
from multihead.kernels.table import BIAS_BYTES, Table
from multihead.plane import Tile
from multihead.request import Request

NAME = "flex"


def refusals(request: Request) -> list[str]:
    """Why this kernel can't run the request; empty: it can."""
    if request.q.device.type != "cuda":
        return [f"{request.q.device.type}: FlexAttention is used on CUDA only (on the CPU it has no backward)"]
    reasons = transform_refusals(request)
    B, H, _, L, S, D, V = request.sizes
    if request.dropout:
        reasons.append("dropout: FlexAttention has none")
    if request.q.dtype == torch.float64:
        reasons.append("float64: FlexAttention computes in float32")
    if D < 16 or V < 16:
        reasons.append(f"D={D}, V={V}: FlexAttention needs at least 16")
    if 0 in (B, H, L, S):
        reasons.append("nothing to compute: an axis is empty")
    return reasons


def drawbacks(request: Request) -> list[str]:  # noqa: ARG001  (every kernel is asked in the same way)
    """Why another kernel should be preferred although this one can."""
    return ['not yet run on a GPU by this project: taken only when asked for, kernel="flex"']


def tables(request: Request) -> list[Table]:
    """Which L x S tensors it makes besides those given, and why."""
    if request.bias is None or isinstance(request.bias, Tensor):
        return []
    _, H, _, L, S, _, _ = request.sizes
    what = f"a bias of {L} x {S} for each head"
    why = "the position is read from a table here"
    return [Table(what, why, H * L * S * BIAS_BYTES)]


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    """(out (B,H,L,V), lse (B,H,L))."""
    # Imported when used: it brings in the compiler, which takes seconds.
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    B, H, K, L, S, _, _ = request.sizes
    mask_mod = make_mask_mod(request)
    block_mask = create_block_mask(mask_mod, B, H, L, S, device=request.q.device) if mask_mod is not None else None
    out, aux = _compiled()(
        request.q,
        request.k,
        request.v,
        score_mod=make_score_mod(request),
        block_mask=block_mask,
        scale=request.scale,
        enable_gqa=H != K,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


def make_mask_mod(request: Request) -> Any:
    """The mask as FlexAttention's function of (b, h, q_idx, kv_idx), or None."""
    mask = request.mask
    if mask is None:
        return None

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask.visible(_Point(request, b, h, i, j))

    return mask_mod


def make_score_mod(request: Request) -> Any:
    """Softcap, then bias, as FlexAttention's function of (score, b, h, q_idx, kv_idx), or None."""
    softcap, added = request.softcap, request.added()
    if softcap is None and added is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if added is None else score + _at(added, b, h, i, j)

    return score_mod


def _at(table: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The entry of a table that broadcasts to (B, H, L, S)."""
    missing = 4 - table.ndim
    indices = [at if size != 1 else 0 for at, size in zip((b, h, i, j)[missing:], table.shape, strict=True)]
    return table[tuple(indices)]


class _Point(Tile):
    """One pair of the plane: what masks are asked about here instead of a rectangle."""

    def __init__(self, request: Request, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> None:
        super().__init__(request.sizes.L, request.sizes.S, *request.positions())
        self.b, self.h, self.i, self.j = b, h, i, j

    def per_row(self, number: int | Tensor) -> int | Tensor:
        return self._of_batch(number, 0) if isinstance(number, Tensor) else number

    def per_query(self, tensor: Tensor) -> Tensor:
        return self._of_batch(tensor, 1)[self.i]

    def per_key(self, tensor: Tensor) -> Tensor:
        return self._of_batch(tensor, 1)[self.j]

    def per_pair(self, tensor: Tensor) -> Tensor:
        return _at(tensor, self.b, self.h, self.i, self.j)

    @property
    def k_index(self) -> Tensor:
        return self.j

    def _of_batch(self, tensor: Tensor, own: int) -> Tensor:
        return tensor if tensor.ndim == own else tensor[0 if tensor.shape[0] == 1 else self.b]


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
