"""The project's own CPU kernel, in C++ (csrc/): every mask, bias, dropout and lse, forward and backward, in O(L + S).

Here is how PyTorch meets it: the operations `torch.ops.multihead.forward`, `backward`, `weights` and `statistics`, and
the autograd functions around them. How it computes is told in docs/kernel.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from multihead.cache_format import Stored
from multihead.kernels import library
from multihead.kernels.autograd import differentiable_gradients, needs_definition, transform_refusals
from multihead.kernels.lazy import Plan, gradients, unrecorded
from multihead.kernels.native_shapes import GRAD_BIAS, GRAD_KV, GRAD_Q, STATISTICS
from multihead.kernels.philox import dropout_mask
from multihead.kernels.postfix import as_postfix
from multihead.kernels.postfix import refusals as mask_refusals
from multihead.kernels.table import BIAS_BYTES, Table
from multihead.positions import ALiBi, Position, without_lowest
from multihead.request import Attended, Request

NAME = "native"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STORED = (*_DTYPES, torch.int8)  # by a cache
_LEAST_SOFTCAP = 1e-30  # what is divided by it has to fit a float


def refusals(request: Request) -> list[str]:
    """Why this kernel can't run the request; empty: it can."""
    reasons = transform_refusals(request)
    q = request.q
    if q.device.type != "cpu":
        reasons.append(f"{q.device.type}: it runs on the CPU")
    elif not library.available():
        reasons.append(f"the native library is not there: {library.why_not()}")
    if q.dtype not in _DTYPES:
        reasons.append(f"{q.dtype}: it computes in float32")
    if request.softcap is not None and request.softcap < _LEAST_SOFTCAP:
        reasons.append(f"softcap={request.softcap}: it takes {_LEAST_SOFTCAP} and more")
    if torch._C._get_tracing_state() is not None:
        reasons.append("torch.jit.trace and ONNX: the program would need the native library where it runs")
    if not torch.compiler.is_compiling():
        held = [q, request.k, request.v] if request.is_plain else _held(request)
        for one in held:
            if type(one) is not Tensor and is_traceable_wrapper_subclass(one):
                reasons.append(
                    f"{type(one).__name__}: a tensor made of others, whose rules the operation does not know"
                )
                break
    return reasons if request.mask is None else reasons + mask_refusals(request.mask)


def _held(request: Request) -> list[Tensor]:
    """All tensors of a call."""
    held = [request.q, request.k, request.v]
    if isinstance(request.bias, Tensor):
        held.append(request.bias)
    if request.mask is not None:
        held += request.mask.tensors().values()
    return held if request.has_default_positions else [*held, *request.positions()]


def drawbacks(request: Request) -> list[str]:  # noqa: ARG001  (every kernel is asked in the same way)
    """Why another kernel should be preferred although this one can."""
    return []


def tables(request: Request) -> list[Table]:
    """Which L x S tensors it makes besides those given, and why."""
    if not isinstance(request.bias, Position) or isinstance(request.bias, ALiBi):
        return []
    _, H, _, L, S, _, _ = request.sizes
    what = f"the bias of {H} x {L} x {S}"
    why = "it makes that of ALiBi by itself, and takes others as tensors"
    return [Table(what, why, H * L * S * BIAS_BYTES)]


class _Scores(NamedTuple):
    """What the operations are told of the scores, after q, k, v and the bias."""

    slopes: Tensor | None
    q_positions: Tensor | None
    k_positions: Tensor | None
    steps: list[int]
    tables: list[Tensor]
    scale: float
    softcap: float
    dropout: float
    seed: Tensor | None
    lowest: float | None  # of the bias: this and below hides; None: by its dtype


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    """(out (B,H,L,V), lse (B,H,L))."""
    if request.is_plain and not request.needs_grad:  # the fewest arguments, for calls that take some microseconds
        out, lse, _, _ = torch.ops.multihead.forward.default(request.q, request.k, request.v, scale=request.scale)
        return out, lse
    return _attend(request, *_scores(request))


def can_read(q: Tensor, held: Stored) -> bool:
    """Whether `run_over` may read what a cache holds where it lies, for queries that fit it."""
    return q.dtype == held.dtype and q.dtype in _DTYPES and all(part.dtype in _STORED for part in held.parts)


def run_over(request: Request, held: Stored) -> tuple[Tensor, Tensor | None]:
    """As `run`, over what a cache holds in the place of the request's k and v, which only have the shapes."""
    (k, *k_scale), (v, *v_scale) = held.sides()
    factors = (k_scale[0], v_scale[0]) if k_scale and v_scale else (None, None)
    bias, scores = _scores(request)
    out, lse, _, _ = torch.ops.multihead.forward.default(
        request.q, k, v, bias, *scores, False, held.tokens, *factors, held.pages
    )
    return out, lse


def attend_with_weights(request: Request, plan: Plan) -> tuple[Tensor, Tensor]:
    """out (B, H, L, V), the same as of `run`, and the weights before dropout. A gradient that comes in through the
    weights goes by the definition."""
    bias, scores = _scores(request)
    q, k, v = request.q, request.k, request.v
    if _records(request, bias):
        out, _, _, weights = _NativeWithWeights.apply(plan, *_arguments(request, bias, scores))
        return out, weights
    out, _, state, _ = torch.ops.multihead.forward.default(q, k, v, bias, *scores, True)

    def make() -> Tensor:
        return torch.ops.multihead.weights.default(state, q, k, k, bias, *scores, plan.average)

    watched = [t for t in (scores.slopes, scores.q_positions, scores.k_positions, *scores.tables) if t is not None]
    return out, unrecorded(plan, make, (q, k, bias), [*watched, *_originals(request, scores)])


@torch.no_grad()
def statistics(request: Request, sinks: Tensor | None, names: Collection[str]) -> dict[str, Tensor]:
    """Of the weights, as `multihead.inspection.statistics` defines them: "entropy", "visible_keys", "max_weight" and
    "max_logit" of queries, (B, H, L), NaN for those that see nothing; "received" and "seen_by" of keys, (B, H, S)."""
    q, k = request.q, request.k
    bias, scores = _scores(request)
    state = torch.ops.multihead.forward.default(q, k, k[..., :1], bias, *scores, True)[2]
    top, log_sum = state
    blind = top == -math.inf
    if sinks is not None:  # they take part in the sum
        to_sinks = sinks.to(top.dtype)[:, None] / math.log(2) - top.masked_fill(blind, 0.0)
        torch.logaddexp2(log_sum, to_sinks, out=log_sum)
    found = {"max_weight": torch.exp2(-log_sum), "max_logit": top * math.log(2)}
    wanted = {name: bit for name, bit in STATISTICS.items() if name in names}
    if wanted:
        every = torch.ops.multihead.statistics.default(state, q, k, k, bias, *scores, sum(wanted.values()))
        found |= zip(STATISTICS, every, strict=True)
    of_keys = ("received", "seen_by")
    return {name: found[name] if name in of_keys else found[name].masked_fill(blind, math.nan) for name in names}


def _attend(request: Request, bias: Tensor | None, scores: _Scores) -> tuple[Tensor, Tensor]:
    """out (B,H,L,V), lse (B,H,L)."""
    q, k, v = request.q, request.k, request.v
    if not _records(request, bias):
        out, lse, _, _ = torch.ops.multihead.forward.default(q, k, v, bias, *scores)
    else:
        out, lse, _ = _Native.apply(*_arguments(request, bias, scores))
    return out, lse


def _arguments(request: Request, bias: Tensor | None, scores: _Scores) -> list[Any]:
    """Of `_Native`."""
    q, k, v = request.q, request.k, request.v
    numbers = scores.scale, scores.softcap, scores.dropout, scores.lowest
    tensors = [scores.slopes, scores.q_positions, scores.k_positions, scores.seed, *scores.tables]
    if torch.compiler.is_compiling():  # which wants each tensor once
        k, v, tensors = k.view_as(k), v.view_as(v), [None if t is None else t.view_as(t) for t in tensors]
        bias = None if bias is None else bias.view_as(bias)
        return [q, k, v, bias, None, scores.steps, *numbers, *tensors]
    return [q, k, v, bias, _shell(request), scores.steps, *numbers, *tensors, *_originals(request, scores)]


def _originals(request: Request, scores: _Scores) -> list[Tensor]:
    """Tensors of mask and positions that the kernel reads as copies of another dtype. The definition reads them as they
    are, so autograd keeps them too, and notices if they were changed in between."""
    if request.mask is None and request.has_default_positions:
        return []
    held = [] if request.mask is None else list(request.mask.tensors().values())
    if not request.has_default_positions:
        held += request.positions()
    read = (*scores.tables, scores.q_positions, scores.k_positions)
    return [t for t in held if not any(t is one for one in read)]


def _records(request: Request, bias: Tensor | None) -> bool:
    """Whether autograd records the call."""
    return request.needs_grad or (torch.is_grad_enabled() and bias is not None and bias.requires_grad)


def _shell(request: Request) -> Request:
    """The request without its tensors, which autograd keeps, so that it can watch over them."""
    nothing = request.q.new_empty(0)
    return request.with_tensors(nothing, nothing, nothing, None if isinstance(request.bias, Tensor) else request.bias)


def _scores(request: Request) -> tuple[Tensor | None, _Scores]:
    """The bias, and the rest."""
    # One number from torch's own generator: dropout repeats under torch.manual_seed and under checkpointing.
    seed = torch.randint(2**62, (), device=request.q.device) if request.dropout else None
    bias, lowest = _bias(request)
    steps, tables = as_postfix(request.mask)
    slopes: Tensor | None = None
    if isinstance(request.bias, ALiBi):
        slopes = torch.tensor(request.bias.slopes, dtype=torch.float32, device=request.q.device)
    q_at, k_at = (None, None) if request.has_default_positions else map(_countable, request.positions())
    softcap = 0.0 if request.softcap is None else float(request.softcap)
    numbers = float(request.scale), softcap, float(request.dropout)
    return bias, _Scores(slopes, q_at, k_at, steps, tables, *numbers, seed, lowest)


def _bias(request: Request) -> tuple[Tensor | None, float | None]:
    """The bias as the operation reads it, (B or 1, H or 1, L or 1, S or 1) in one of its dtypes, and what hides in it:
    None for the lowest numbers of its dtype. ALiBi needs none."""
    bias = request.bias
    if isinstance(bias, Position):
        bias = None if isinstance(bias, ALiBi) else request.added()
    if bias is None:
        return None, None
    bias = bias[(None,) * (4 - bias.ndim)] if bias.ndim < 4 else bias
    if bias.dtype in _DTYPES:
        return bias, None
    return without_lowest(bias).to(torch.float32), -math.inf  # its lowest numbers are -inf by then


def _countable(positions: Tensor) -> Tensor:
    """Positions in one of the dtypes that the operation reads, as `multihead.plane` widens them."""
    if positions.is_floating_point():
        return positions.to(torch.promote_types(positions.dtype, torch.float32))
    return positions.to(torch.int64)


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        shell: Request | None,
        steps: list[int],
        scale: float,
        softcap: float,
        dropout: float,
        lowest: float | None,
        slopes: Tensor | None,
        q_positions: Tensor | None,
        k_positions: Tensor | None,
        seed: Tensor | None,
        *tables: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`shell` is the request without its tensors, for second derivatives; a compiled program has none. Tables that
        the mask's steps don't number are only kept."""
        scores = (slopes, q_positions, k_positions, steps, list(tables), scale, softcap, dropout, seed, lowest)
        out, lse, state, rest = torch.ops.multihead.forward.default(q, k, v, bias, *scores, True)
        ctx.mark_non_differentiable(state)
        rest = None if q.dtype == torch.float32 else rest
        ctx.save_for_backward(q, k, v, bias, out, rest, state, slopes, q_positions, k_positions, seed, *tables)
        ctx.shell, ctx.steps, ctx.numbers, ctx.lowest = shell, steps, (scale, softcap, dropout), lowest
        ctx.set_materialize_grads(False)
        return out, lse, state

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> Any:
        saved = ctx.saved_tensors
        return *_gradients(ctx, saved, ctx.needs_input_grad[:4], grad_out, grad_lse), *(None,) * (len(saved) - 1)


class _NativeWithWeights(torch.autograd.Function):
    """The same, and the weights as planned. One node for both: of a small call a second one is some per cent."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, lse, state = _Native.forward(ctx, *given)
        q, k, _, bias, _, steps, scale, softcap, dropout, lowest, slopes, q_at, k_at, seed, *tables = given
        scores = (slopes, q_at, k_at, steps, tables, scale, softcap, dropout, seed, lowest)

        def make() -> Tensor:
            return torch.ops.multihead.weights.default(state, q, k, k, bias, *scores, plan.average)

        ctx.plan = plan
        watched = [t for t in (slopes, q_at, k_at, *tables) if t is not None]
        return out, lse, state, unrecorded(plan, make, (q, k, bias), watched)

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None, grad_weights: Tensor | None
    ) -> Any:
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint makes them anew each time
        found = _gradients(ctx, saved, ctx.needs_input_grad[1:5], grad_out, grad_lse)
        if grad_weights is not None:
            q, k, _, bias, *_ = saved

            def define(q: Tensor, k: Tensor, bias: Tensor | None) -> Attended:
                return _define(ctx.shell, None, q, k, k[..., :1], bias)

            to_q, to_k, to_bias = gradients(ctx.plan, define, (q, k, bias), grad_weights)
            found = [_sum(*pair) for pair in zip(found, (to_q, to_k, None, to_bias), strict=True)]
        return None, *found, *(None,) * (len(saved) - 1)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _gradients(
    ctx: Any, saved: Sequence[Any], needed: Sequence[bool], grad_out: Tensor | None, grad_lse: Tensor | None
) -> list[Tensor | None]:
    """Of q, k, v and the bias, those that are needed, by the native kernel; to be differentiated again by the
    definition."""
    q, k, v, bias, out, rest, state, slopes, q_positions, k_positions, seed, *tables = saved
    if ctx.shell is not None and needs_definition(grad_out, grad_lse):
        define = functools.partial(_define, ctx.shell, seed)
        return list(differentiable_gradients(define, (q, k, v, bias), (grad_out, None, grad_lse)))
    if grad_out is None:
        if grad_lse is None:
            return [None] * 4
        grad_out = torch.zeros_like(out)
    wants_q, wants_k, wants_v, wants_bias = needed
    wanted = wants_q * GRAD_Q | (wants_k or wants_v) * GRAD_KV | wants_bias * GRAD_BIAS
    grad_q, grad_k, grad_v, grad_bias = torch.ops.multihead.backward.default(
        grad_out, None if grad_lse is None else grad_lse.contiguous(), out, rest, state, q, k, v, bias,
        slopes, q_positions, k_positions, ctx.steps, tables, *ctx.numbers, seed, ctx.lowest, wanted,
    )  # fmt: skip
    return [
        grad_q if wants_q else None,
        grad_k if wants_k else None,
        grad_v if wants_v else None,
        grad_bias.to(bias.dtype) if wants_bias else None,
    ]


def _define(shell: Request, seed: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Attended:
    """What the definition says, with the dropout that the kernel drew."""
    B, H, _, L, S, _, _ = shell.sizes
    wide = torch.promote_types(q.dtype, torch.float32)
    kept = None if seed is None else dropout_mask(seed, shell.dropout, B, H, L, S, device=q.device, dtype=wide)
    return shell.defined(q, k, v, shell.bias if bias is None else bias, kept)
