"""The formula in a handful of operations, for a few pairs with nothing to hide.

Where there are only some thousand scores, the time goes into calling operations and not into numbers. Here PyTorch's
own autograd keeps the few steps, which costs less than a backward pass written in Python, and the weights are there for
who wants them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.kernels.autograd import recording, transform_refusals
from multihead.request import Request

NAME = "small"

_MOST_SCORES = 2**16  # benchmarks/small.py
MOST_WITH_WEIGHTS = 2**19  # where the weights are asked for, and have to be written out in any case


def refusals(request: Request) -> list[str]:
    """Why this kernel can't run the request; empty: it can."""
    reasons = transform_refusals(request)
    B, _, _, L, S, _, V = request.sizes
    if 0 in (B, L, S, V):
        reasons.append("nothing to compute: an axis is empty")
    if request.mask is None and request.bias is None and request.softcap is None:
        return reasons
    asked = {"mask": request.mask, "bias": request.bias, "softcap": request.softcap}
    return reasons + [
        f"{name}: it has only the steps of plain attention" for name, value in asked.items() if value is not None
    ]


def drawbacks(request: Request) -> list[str]:
    """Why another kernel should be preferred although this one can."""
    if not request.needs_grad:
        return ["no gradient is recorded: one fused operation has less to call than these"]
    if is_small(request):
        return []
    if recording():
        return ["torch.compile, torch.export and tracing: which kernel is best would depend on the sizes"]
    if request.q.device.type != "cpu":
        return [f"{request.q.device.type}: one fused operation has less to call than these"]
    B, H, _, L, S, _, _ = request.sizes
    return [f"it makes {B} x {H} x {L} x {S} scores, and up to {_MOST_SCORES} it is the faster one"]


def is_small(request: Request, most: int = _MOST_SCORES) -> bool:
    """Whether there are so few scores that calling operations takes longer than what they compute."""
    B, H, _, L, S, _, _ = request.sizes
    scores = B * H * L * S
    return not recording() and request.q.device.type == "cpu" and scores <= most


def tables(request: Request) -> list[str]:
    """Which L x S tensors it makes besides those given, and why."""
    B, H, _, L, S, _, _ = request.sizes
    return [f"scores and weights of {B} x {H} x {L} x {S}: it is the formula, written out"]


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    """(out (B,H,L,V), lse (B,H,L) or None)."""
    out, lse, _ = attend(request)
    return out, lse


def attend(request: Request) -> tuple[Tensor, Tensor | None, Tensor]:
    """What `run` gives, and the weights (B, H, L, S)."""
    H, K = request.sizes.H, request.sizes.K
    wide = torch.promote_types(request.q.dtype, torch.float32)
    q, k, v = request.q, request.k, request.v
    if q.dtype != wide:
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if H != K:  # the query heads of a group are rows of one
        q = q.unflatten(1, (K, H // K)).flatten(2, 3)
    heads = [tensor.flatten(0, 1) for tensor in (q, k, v)]  # (B*K, ...): bmm has less to look at than matmul
    nothing = q.new_empty(1)  # beta=0: it is not read
    scores = torch.baddbmm(nothing, heads[0], heads[1].transpose(1, 2), beta=0, alpha=request.scale)
    weights = torch.softmax(scores, -1)
    kept = torch.dropout(weights, request.dropout, True) if request.dropout else weights
    out, lse = torch.bmm(kept, heads[2]), torch.logsumexp(scores, -1) if request.needs_lse else None
    B, L = request.sizes.B, request.sizes.L
    out, weights = out.view(B, H, L, -1), weights.view(B, H, L, -1)
    out = out if out.dtype == request.q.dtype else out.to(request.q.dtype)
    return out, lse if lse is None else lse.view(B, H, L), weights
