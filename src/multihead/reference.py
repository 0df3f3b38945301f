"""The definition of attention. Read this file first.

    scores  = scale * q k^T                      how well query i matches key j (complex: the real part of <q, k>)
    scores  = softcap * tanh(scores / softcap)   if asked: bounded, before anything is added or hidden
    scores  = scores + bias                      if given
    scores  = scores where visible, else -inf    the mask
    lse     = log(sum_j exp(scores) + exp(sink)) the softmax's denominator, and the sink's share of it
    weights = exp(scores - lse)                  rows sum to 1, or to less where a sink takes its share
    out     = (weights * dropout_mask) v

from "Attention Is All You Need" (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762); grouped heads from Ainslie
et al. (2023, https://arxiv.org/abs/2305.13245), softcap from Gemma 2 (2024, https://arxiv.org/abs/2408.00118), sinks
as extra logits without a value from gpt-oss (2025) and Miller, "Attention is off by one" (2023).

Everything else in this package is a faster way to get the same numbers, and is tested against this function. It is
plain differentiable PyTorch: gradients of any order, forward-mode AD and vmap work, and it is as slow and as large
(B x H x L x S) as it looks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.masks import Mask, as_mask
from multihead.plane import Plane, Tile, default_positions
from multihead.positions import Position, without_lowest


class Attended(NamedTuple):
    """What attention gives. The letters: B batch (any number of axes), H heads, L queries, S keys, V value width."""

    out: Tensor  # (*batch, H, L, V), in the dtype of q
    weights: Tensor  # (*batch, H, L, S), before dropout, float32 or better
    lse: Tensor  # (*batch, H, L), float32 or better; -inf for a row that sees nothing and has no sink


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    bias: Tensor | Position | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> Attended:
    """Attention by its formula.

    Args:
        q: (*batch, H, L, D); k: (*batch, K, S, D); v: (*batch, K, S, V). H is a multiple of K, and query head h reads
            key/value head h // (H // K).
        mask: who may see whom, True = may attend.
        bias: added to the scores, what broadcasts to (*batch, H, L, S), or a Position that makes it. -inf and the
            lowest numbers of its dtype hide.
        scale: of the scores, by default 1 / sqrt(D).
        softcap: scores are bounded to -softcap .. softcap.
        sinks: (H,), a logit for each head that takes a share of the softmax and adds no value.
        dropout_mask: (*batch, H, L, S), what the weights are multiplied by: 0, or 1 / (1 - rate).
        q_positions, k_positions: (L,) and (S,) or with the batch axes; by default the queries are the last L keys.

    Returns:
        `Attended(out, weights, lse)`. Arithmetic is float32, or float64 for float64 inputs.
    """
    H, L, D = q.shape[-3:]
    K, S = k.shape[-3:-1]
    wide = torch.promote_types(q.dtype, torch.float32)
    q_positions, k_positions = default_positions(L, S, q_positions, k_positions, q.device)
    q_HLD, k_KSD, v_KSV = q.to(wide), k.to(wide), v.to(wide)
    added = bias.bias(q_positions, k_positions) if isinstance(bias, Position) else bias
    added = None if added is None else without_lowest(added)
    visible = None
    if mask is not None:
        mask = as_mask(mask)
        mask.check(Plane(None, None, L, S, q.device))
        visible = mask.visible(Tile(L, S, q_positions, k_positions))
    if added is not None:  # -inf hides too
        visible = added != -math.inf if visible is None else visible & (added != -math.inf)
    if visible is not None:
        visible = visible.expand(torch.broadcast_shapes(visible.shape, (L, S)))
        # A key that nobody may see is replaced by zeros, so that NaN or inf in padding cannot come back as 0 * NaN.
        # So is a query that sees nothing.
        seen = _seen_by_kv_head(visible, H, K)  # (..., K or 1, S, 1)
        k_KSD, v_KSV = torch.where(seen, k_KSD, 0.0), torch.where(seen, v_KSV, 0.0)
        q_HLD = torch.where(visible.any(-1, keepdim=True), q_HLD, 0.0)
    k_HSD, v_HSV = (t.repeat_interleave(H // K, dim=-3) for t in (k_KSD, v_KSV))

    q_HLD = q_HLD * (1.0 / math.sqrt(D) if scale is None else scale)
    scores = q_HLD @ k_HSD.transpose(-1, -2).conj()  # (..., H, L, S)
    if scores.is_complex():
        scores = scores.real
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if added is not None:
        scores = scores + added.to(scores.dtype)
    if visible is not None:
        scores = torch.where(visible, scores, -math.inf)

    # A row that sees nothing has the softmax of an empty set. Its scores are replaced before softmax and logsumexp,
    # whose gradients there would be NaN; afterwards it gets weight 0 and lse -inf.
    blind = (scores == -math.inf).all(-1, keepdim=True) if mask is not None or bias is not None else None
    if blind is not None:
        scores = torch.where(blind, 0.0, scores)
    # exp(scores - lse), as softmax says it without losing digits where scores are large.
    weights, lse = torch.softmax(scores, -1), torch.logsumexp(scores, dim=-1, keepdim=True)
    if blind is not None:
        weights = torch.where(blind, 0.0, weights)
    alone = torch.full_like(lse, -math.inf)  # all that the denominator of a blind row has
    if sinks is not None:
        alone = sinks.to(lse.dtype)[:, None, None].expand_as(lse)
        weights = weights * torch.sigmoid(lse - alone)
        lse = torch.logaddexp(lse, alone)
    if blind is not None:
        lse = torch.where(blind, alone, lse)

    kept = weights if dropout_mask is None else weights * dropout_mask
    return Attended((kept.to(v_HSV.dtype) @ v_HSV).to(q.dtype), weights, lse.squeeze(-1))


def _seen_by_kv_head(visible: Tensor, H: int, K: int) -> Tensor:
    """Which keys any query of a group may see: (..., H or 1, L, S) to (..., K or 1, S, 1)."""
    seen = visible.any(-2)  # (..., H or 1, S), or (S,)
    if seen.ndim > 1 and seen.shape[-2] == H != 1:
        seen = seen.unflatten(-2, (K, H // K)).any(-2)
    return seen[..., None]
