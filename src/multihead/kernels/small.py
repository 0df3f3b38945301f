"""The formula in a handful of operations, for a few pairs.

Where there are only some thousand scores, the time goes into calling operations and not into numbers. This is for what
the fused operation has no place for: dropout, V != D, a bias that learns. The tiles of `blocks` would be many calls.
The weights are there for who wants them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.kernels import flash_cpu, sdpa
from multihead.kernels.autograd import readable, recording, transform_refusals
from multihead.kernels.table import Table
from multihead.request import Request

NAME = "small"

_MOST_SCORES = 2**18  # benchmarks/choice.py
MOST_WITH_WEIGHTS = 2**19  # where the weights are asked for, and have to be written out in any case


def refusals(request: Request) -> list[str]:
    """Why this kernel can't run the request; empty: it can."""
    reasons = transform_refusals(request)
    B, _, _, L, S, _, V = request.sizes
    if 0 in (B, L, S, V):
        reasons.append("nothing to compute: an axis is empty")
    if request.needs_lse:
        reasons.append("lse: the fused operation has it at hand, here it would be one more pass")
    if request.softcap is not None:
        reasons.append("softcap: scores and mask are one operation, and nothing fits between them")
    return reasons


def drawbacks(request: Request) -> list[str]:
    """Why another kernel should be preferred although this one can."""
    if not flash_cpu.refusals(request):
        return ["the fused operation has a place for all of it, and is as fast"]
    if is_small(request):
        return []
    if recording():
        return ["torch.compile, torch.export and tracing: which kernel is best would depend on the sizes"]
    if request.q.device.type != "cpu":
        return [f"{request.q.device.type}: it is used on the CPU"]
    if request.q.dtype not in (torch.float32, torch.float64):
        return [f"{request.q.dtype}: scores would be made in float32"]
    B, H, _, L, S, _, _ = request.sizes
    return [f"it makes {B} x {H} x {L} x {S} scores, and up to {_MOST_SCORES} it is the faster one"]


def is_small(request: Request, most: int = _MOST_SCORES) -> bool:
    """Whether there are so few scores that calling operations takes longer than what they compute."""
    B, H, _, L, S, _, _ = request.sizes
    is_plain = request.q.device.type == "cpu" and request.q.dtype in (torch.float32, torch.float64)
    return is_plain and not recording() and most >= B * H * L * S


def tables(request: Request) -> list[Table]:
    """Which L x S tensors it makes besides those given, and why."""
    B, H, _, L, S, _, _ = request.sizes
    wide = torch.promote_types(request.q.dtype, torch.float32)
    what = f"scores and weights of {B} x {H} x {L} x {S}"
    why = "it is the formula, written out"
    return [Table(what, why, 2 * B * H * L * S * wide.itemsize), *sdpa.tables(request)]


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    """(out (B,H,L,V), None)."""
    return attend(request)[0], None


def attend(request: Request) -> tuple[Tensor, Tensor]:
    """out (B, H, L, V), and the weights before dropout (B, H, L, S)."""
    wide = torch.promote_types(request.q.dtype, torch.float32)
    q, k, v = (t if t.dtype == wide else t.to(wide) for t in (request.q, request.k, request.v))
    if request.mask is None and request.bias is None:
        return _attend(request, q, k, v, None, None)
    added = sdpa.additive_mask(request, wide)
    if readable(q) and readable(k):
        found = _attend(request, q, k, v, added, None)
        # Neither NaN from keys nobody sees, nor a row that sees nothing, nor numbers that overflow on the way back.
        if sdpa.is_clean(found[0]) and all(_is_moderate(t) for t in (q, k, v)):
            return found
    q, k, v, blind = sdpa.without_unseen(request, q, k, v, added)
    return _attend(request, q, k, v, added, blind)


def _is_moderate(tensor: Tensor) -> bool:
    """Whether products of its numbers stay finite. NaN is not moderate."""
    least, most = (bound.item() for bound in tensor.detach().aminmax())
    limit = torch.finfo(tensor.dtype).max ** 0.5
    return least > -limit and most < limit


def _attend(
    request: Request, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, blind: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same over these tensors. `blind` (B, H, L, 1) are the rows that see nothing, if there are known to be any."""
    B, H, K, L, S, _, _ = request.sizes
    if added is not None:
        added = added.expand(*added.shape[:2], L, S)
        added = added if blind is None else added.masked_fill(blind, 0.0)  # the softmax of zeros, not of nothing
        added = sdpa.mask_by_rows(added, H, K, L) if H != K else added
        added = added[0, 0] if added.shape[:2] == (1, 1) else added.expand(B, K, -1, -1).flatten(0, 1)
    if H != K:  # the query heads of a group are rows of one
        q = q.unflatten(1, (K, H // K)).flatten(2, 3)
    heads = [tensor.flatten(0, 1) for tensor in (q, k, v)]  # (B*K, ...): bmm has less to look at than matmul
    start, beta = (q.new_empty(1), 0) if added is None else (added, 1)  # with beta=0 it is not read
    scores = torch.baddbmm(start, heads[0], heads[1].transpose(1, 2), beta=beta, alpha=request.scale)
    weights = torch.softmax(scores, -1)
    if blind is not None:
        weights = weights.view(B, H, L, S).masked_fill(blind, 0.0).view_as(weights)
    kept = torch.dropout(weights, request.dropout, True) if request.dropout else weights
    out = torch.bmm(kept, heads[2]).view(B, H, L, -1)
    return out if out.dtype == request.q.dtype else out.to(request.q.dtype), weights.view(B, H, L, S)
