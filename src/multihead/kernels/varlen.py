"""torch.nn.attention.varlen: packed documents on CUDA without padding.

It has not been run on a GPU by this project yet, so it is never taken by itself: `kernel="varlen"` asks for it, and the
tests marked `gpu` run it.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch
from torch import Tensor

from multihead.kernels.autograd import transform_refusals
from multihead.kernels.table import Table
from multihead.mask_kinds import packed_documents
from multihead.request import Request

NAME = "varlen"


def refusals(request: Request) -> list[str]:
    """Why this kernel can't run the request; empty: it can."""
    reasons = transform_refusals(request)
    B, _, _, L, S, D, V = request.sizes
    if request.q.device.type != "cuda":
        reasons.append(f"{request.q.device.type}: it exists for CUDA only")
    elif not _is_there():
        reasons.append(f"torch {torch.__version__} has no varlen_attn with window_size")
    if request.q.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"{request.q.dtype}: it takes float16 and bfloat16")
    packed = packed_documents(request.mask)
    if packed is None:
        reasons.append("the mask: it takes documents(...) and causal() & documents(...) of one row")
    if B != 1 or L != S or not request.has_default_positions:
        reasons.append("it takes one packed row (B=1, L=S) with default positions")
    if request.bias is not None or request.softcap is not None or request.dropout or request.needs_lse:
        reasons.append("bias, softcap, dropout and lse: it has none")
    if V != D:
        reasons.append(f"V={V} is not D={D}: it needs them equal")
    if 0 in request.sizes:
        reasons.append("nothing to compute: an axis is empty")
    # Last, and only if all else is well: it reads data.
    if packed is not None and not reasons and not torch.compiler.is_compiling() and not _in_one_piece(packed[0]):
        reasons.append("the mask: a document is in several pieces, and it is told only where pieces start")
    return reasons


def drawbacks(request: Request) -> list[str]:  # noqa: ARG001  (every kernel is asked in the same way)
    """Why another kernel should be preferred although this one can."""
    return ['not yet run on a GPU by this project: taken only when asked for, kernel="varlen"']


def tables(request: Request) -> list[Table]:  # noqa: ARG001  (every kernel is asked in the same way)
    """Which L x S tensors it makes besides those given, and why."""
    return []


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    """(out (1,H,L,V), None)."""
    from torch.nn.attention.varlen import varlen_attn  # imported when used: it brings in the compiler

    packed = packed_documents(request.mask)
    assert packed is not None
    ids, is_causal = packed
    _, counts = torch.unique_consecutive(ids, return_counts=True)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(counts.max())
    q, k, v = (t[0].transpose(0, 1) for t in (request.q, request.k, request.v))  # (1, H, T, D) -> (T, H, D)
    out = varlen_attn(
        q,
        k,
        v,
        starts,
        starts,
        longest,
        longest,
        scale=request.scale,
        window_size=(-1, 0) if is_causal else (-1, -1),
        enable_gqa=request.sizes.H != request.sizes.K,
    )
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None], None


@cache
def _is_there() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch built without it
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters


def _in_one_piece(ids: Tensor) -> bool:
    """Whether the tokens of each document stand side by side."""
    return len(torch.unique_consecutive(ids)) == len(torch.unique(ids))
