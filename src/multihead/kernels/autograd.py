"""What the kernels share about differentiation: when they must stand aside, and second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from multihead.request import Attended, Request


def transform_refusals(request: Request) -> list[str]:
    """Refusals of a kernel whose gradient is written by hand, for one backward pass at a time."""
    if torch._C._are_functorch_transforms_active():
        return ["inside a torch.func transform (vmap, jvp, grad ...), which needs plain PyTorch operations"]
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in (request.q, request.k, request.v, request.bias)
        if isinstance(tensor, Tensor)
    ):
        return ["forward-mode AD: the kernel has no tangent rule"]
    return []


def recording() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace records a program, which must not depend on data."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor may be looked at on the way, and at no cost: it holds some, on the CPU, and
    nothing records or transforms what is done with it."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    if not is_plain or recording() or torch._C._are_functorch_transforms_active():
        return False
    # Modes of torch_dispatch: make_fx, fake tensors and the like, of both kinds.
    return not torch._C._len_torch_dispatch_stack() and not torch._ops._len_torch_dispatch_stack_pre_dispatch()


def needs_definition(*grads: Tensor | None) -> bool:
    """Whether a backward pass must be made of plain differentiable operations: autograd runs it in grad mode for
    `create_graph=True`, and under a vmap of either kind for many gradients at once (`is_grads_batched=True`)."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    return any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads if grad is not None)


def differentiable_gradients(
    define: Callable[..., Attended], inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients to `inputs` that can be differentiated again, by way of the definition over them.

    For the backward of a kernel when `needs_definition()`. `grads` are those of out, weights and lse.
    """
    with torch.enable_grad():
        # Aliases: were q, k and v one tensor, each would otherwise get the sum of all three gradients.
        aliases = [None if t is None else t.view_as(t) for t in inputs]
        pairs = [(y, g.to(y.dtype)) for y, g in zip(define(*aliases), grads, strict=True) if g is not None]
        wanted = [t for t in aliases if t is not None and t.requires_grad]
        if not pairs or not wanted:
            return (None,) * len(aliases)
        outputs, incoming = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, incoming, create_graph=True, allow_unused=True))
        return tuple(next(found) if t is not None and t.requires_grad else None for t in aliases)
