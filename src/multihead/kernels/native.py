"""The project's own CPU kernel, in C++ (csrc/): every mask, bias, dropout and lse, forward and backward, in O(L + S).

Here is how PyTorch meets it: two operations, `torch.ops.multihead.forward` and `backward`, the shapes of their results
for compiled programs, and the autograd function around them. How it computes is told in docs/kernel.md.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from multihead.kernels import library
from multihead.kernels.autograd import differentiable_gradients, needs_definition, transform_refusals
from multihead.kernels.philox import dropout_mask
from multihead.kernels.postfix import as_postfix
from multihead.kernels.postfix import refusals as mask_refusals
from multihead.positions import ALiBi, Position, without_lowest
from multihead.request import Request

NAME = "native"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    if torch._C._get_tracing_state() is not None:
        reasons.append("torch.jit.trace and ONNX: the program would need the native library where it runs")
    if type(q) is not Tensor and is_traceable_wrapper_subclass(q) and not torch.compiler.is_compiling():
        reasons.append(f"{type(q).__name__}: a tensor made of others, and the operation knows none of its rules")
    return reasons if request.mask is None else reasons + mask_refusals(request.mask)


def drawbacks(request: Request) -> list[str]:  # noqa: ARG001  (every kernel is asked in the same way)
    """Why another kernel should be preferred although this one can."""
    return []


def tables(request: Request) -> list[str]:
    """Which L x S tensors it makes besides those given, and why."""
    if not isinstance(request.bias, Position) or isinstance(request.bias, ALiBi):
        return []
    _, H, _, L, S, _, _ = request.sizes
    return [f"the bias of {H} x {L} x {S}: it makes that of ALiBi by itself, and takes others as tensors"]


class _Scores(NamedTuple):
    """What both operations are told of the scores, after q, k, v and the bias."""

    slopes: Tensor | None
    q_positions: Tensor | None
    k_positions: Tensor | None
    steps: list[int]
    tables: list[Tensor]
    scale: float
    softcap: float
    dropout: float
    seed: Tensor | None


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    """(out (B,H,L,V), lse (B,H,L))."""
    if request.is_plain and not request.needs_grad:  # the fewest arguments, for calls that take some microseconds
        out, lse, _ = torch.ops.multihead.forward.default(request.q, request.k, request.v, scale=request.scale)
        return out, lse
    # One number from torch's own generator: dropout repeats under torch.manual_seed and under checkpointing.
    seed = torch.randint(2**62, (), device=request.q.device) if request.dropout else None
    bias, scores = _bias(request), _scores(request, seed)
    q, k, v = request.q, request.k, request.v
    if not _records(request, bias):
        out, lse, _ = torch.ops.multihead.forward.default(q, k, v, bias, *scores, False)
        return out, lse
    shell = None if torch.compiler.is_compiling() else _shell(request)
    numbers = scores.scale, scores.softcap, scores.dropout
    tensors = scores.slopes, scores.q_positions, scores.k_positions, seed, *scores.tables
    return _Native.apply(q, k, v, bias, shell, scores.steps, *numbers, *tensors)


def weights(request: Request, lse: Tensor, average: bool) -> Tensor:
    """The weights before dropout (B, H, L, S) or their mean over heads (B, L, S), float32, of a request that this
    kernel ran; `lse` (B, H, L) is what it gave. A gradient that comes in through them goes by the definition."""
    bias, scores = _bias(request), _scores(request, None)
    if not _records(request, bias):
        return torch.ops.multihead.weights.default(lse, request.q, request.k, request.k, bias, *scores, average)
    watched = [t for t in (scores.slopes, scores.q_positions, scores.k_positions, *scores.tables) if t is not None]
    return _Weights.apply(request.q, request.k, bias, lse.detach(), _shell(request), scores, average, *watched)


def _records(request: Request, bias: Tensor | None) -> bool:
    """Whether autograd records the call."""
    return request.needs_grad or (torch.is_grad_enabled() and bias is not None and bias.requires_grad)


def _shell(request: Request) -> Request:
    """The request without its tensors, which autograd keeps, so that it can watch over them."""
    nothing = request.q.new_empty(0)
    return request.with_tensors(nothing, nothing, nothing, None if isinstance(request.bias, Tensor) else request.bias)


def _scores(request: Request, seed: Tensor | None) -> _Scores:
    steps, tables = as_postfix(request.mask)
    slopes: Tensor | None = None
    if isinstance(request.bias, ALiBi):
        slopes = torch.tensor(request.bias.slopes, dtype=torch.float32, device=request.q.device)
    q_at, k_at = (None, None) if request.has_default_positions else map(_countable, request.positions())
    softcap = 0.0 if request.softcap is None else float(request.softcap)
    dropout = 0.0 if seed is None else float(request.dropout)
    return _Scores(slopes, q_at, k_at, steps, tables, float(request.scale), softcap, dropout, seed)


def _bias(request: Request) -> Tensor | None:
    """The bias as the operation reads it: (B or 1, H or 1, L or 1, S or 1), in one of its dtypes. ALiBi needs none."""
    bias = request.bias
    if bias is None or isinstance(bias, ALiBi):
        return None
    if isinstance(bias, Position):
        return request.added()
    bias = bias[(None,) * (4 - bias.ndim)] if bias.ndim < 4 else bias
    return bias if bias.dtype in _DTYPES else without_lowest(bias).to(torch.float32)


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
        slopes: Tensor | None,
        q_positions: Tensor | None,
        k_positions: Tensor | None,
        seed: Tensor | None,
        *tables: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`shell` is the request without its tensors, for second derivatives; a compiled program has none."""
        scores = (slopes, q_positions, k_positions, steps, list(tables), scale, softcap, dropout, seed)
        out, lse, rest = torch.ops.multihead.forward.default(q, k, v, bias, *scores, True)
        rest = None if q.dtype == torch.float32 else rest
        ctx.save_for_backward(q, k, v, bias, out, rest, lse, slopes, q_positions, k_positions, seed, *tables)
        ctx.shell, ctx.steps, ctx.numbers = shell, steps, (scale, softcap, dropout)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        q, k, v, bias, out, rest, lse, slopes, q_positions, k_positions, seed, *tables = ctx.saved_tensors
        others = (None,) * (9 + len(tables))
        if ctx.shell is not None and needs_definition(grad_out, grad_lse):
            define = functools.partial(_define, ctx.shell, seed)
            return *differentiable_gradients(define, (q, k, v, bias), (grad_out, None, grad_lse)), *others
        if grad_out is None:
            if grad_lse is None:
                return None, None, None, None, *others
            grad_out = torch.zeros_like(out)
        wants_bias = ctx.needs_input_grad[3]
        grad_q, grad_k, grad_v, grad_bias = torch.ops.multihead.backward.default(
            grad_out, None if grad_lse is None else grad_lse.contiguous(), out, rest, lse, q, k, v, bias,
            slopes, q_positions, k_positions, ctx.steps, tables, *ctx.numbers, seed, wants_bias,
        )  # fmt: skip
        return grad_q, grad_k, grad_v, (grad_bias.to(bias.dtype) if wants_bias else None), *others


def _define(shell: Request, seed: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Any:
    """What the definition says, with the dropout that the kernel drew."""
    B, H, _, L, S, _, _ = shell.sizes
    wide = torch.promote_types(q.dtype, torch.float32)
    kept = None if seed is None else dropout_mask(seed, shell.dropout, B, H, L, S, device=q.device, dtype=wide)
    return shell.defined(q, k, v, shell.bias if bias is None else bias, kept)


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, bias: Tensor | None, lse: Tensor, shell: Request, scores: _Scores,
        average: bool, *watched: Tensor,
    ) -> Tensor:  # fmt: skip
        """`watched` are the tensors in `scores`, which the backward pass reads again."""
        ctx.save_for_backward(q, k, bias, *watched)
        ctx.shell = shell
        return torch.ops.multihead.weights.default(lse, q, k, k, bias, *scores, average)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, bias, *watched = ctx.saved_tensors
        if grad.ndim == 3:  # of the mean over heads
            H = q.shape[1]
            grad = (grad / H)[:, None].expand(-1, H, -1, -1)

        def define(q: Tensor, k: Tensor, bias: Tensor | None) -> Any:
            return _define(ctx.shell, None, q, k, k[..., :1], bias)

        return *differentiable_gradients(define, (q, k, bias), (None, grad, None)), *(None,) * (4 + len(watched))


def _like(tensor: Tensor) -> Tensor:
    """What csrc/op.cpp makes for the gradient of a tensor: heads and tokens in the same order in memory."""
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2)
    return tensor.new_empty(tensor.shape)


def _forward_shapes(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, *_, wants_rest = call
    B, H, L, _ = q.shape
    out = q.new_empty(B, L, H, v.shape[-1]).transpose(1, 2)
    rest = torch.empty_like(out) if wants_rest and q.dtype != torch.float32 else q.new_empty(0)
    return out, q.new_empty(B, H, L, dtype=torch.float32), rest


def _backward_shapes(*call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, _, _, _, q, k, v, bias, *_, wants_bias = call
    return _like(q), _like(k), _like(v), q.new_empty(bias.shape if wants_bias else 0, dtype=torch.float32)


def _weights_shapes(*call: Any) -> Tensor:
    _, q, k, *_, average = call
    B, H, L, _ = q.shape
    return q.new_empty((B, L, k.shape[2]) if average else (B, H, L, k.shape[2]), dtype=torch.float32)


if library.available():  # shapes of the results, for programs that are recorded
    torch.library.register_fake("multihead::forward", _forward_shapes)
    torch.library.register_fake("multihead::backward", _backward_shapes)
    torch.library.register_fake("multihead::weights", _weights_shapes)
