"""Attention weights that are computed when somebody looks at them.

Torch's layer returns weights by default, and most callers throw them away. A `LazyWeights` stands in for them: a tensor
that knows its shape, dtype and device, and holds what the weights are made of until the first use. Then it is exactly
what would have been returned, for any function of torch, numpy, printing and pickling.

To autograd it is the weights from the start: it has their grad_fn. So gradients that arrive by any way, also one that
knows nothing of this class, go where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from multihead.kernels.autograd import differentiable_gradients
from multihead.request import Attended

# What is known, or said of the tensor as a part of the graph, without its numbers.
_FREE = {
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "_version", "output_nr",
        "requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad",
        "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested",
    )),
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.is_inference, Tensor.get_device,
    torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference,
    Tensor.register_hook, Tensor.retain_grad, Tensor.backward, torch.autograd.grad, torch.autograd.backward,
    Tensor.requires_grad_, *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
}  # fmt: skip


def _uncompiled(method: Any) -> Any:
    """A method that torch.compile does not follow: a compiled program is given the numbers, with their gradient. The
    mark is that of torch.compiler.disable, which itself would import the compiler."""
    method._torchdynamo_disable = True
    return method


class LazyWeights(Tensor):
    """The tensor that `make` gives, which is called once, at the first use of its numbers.

    Args:
        make: the numbers, without gradient.
        shape, dtype, device: of what it gives.
    """

    _make: Callable[[], Tensor] | None
    _made: Tensor | None
    _in_graph: Tensor | None  # the same numbers, with what is done to them in place recorded

    @staticmethod
    def __new__(
        cls, make: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> LazyWeights:
        self: LazyWeights = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._make, self._made, self._in_graph = make, None, None
        return self

    @_uncompiled
    def made(self) -> Tensor:
        """The numbers."""
        if self._made is None:
            assert self._make is not None
            # As at the time of the call, whatever is on by now.
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                self._made = self._make()
            self._make = None  # what they were made of may go
        return self._made

    @_uncompiled
    def plain(self) -> Tensor:
        """A tensor of torch's own with the same numbers and gradient."""
        if not torch.is_grad_enabled() or not self.requires_grad:
            return self.made()
        if self.is_leaf:  # which keeps its own gradient: it and a tensor that leads to it would keep each other
            return _Opened.apply(self).clone()
        if self._in_graph is None:
            self._in_graph = _Opened.apply(self)
        return self._in_graph

    @classmethod
    @_uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _FREE:
            args, kwargs = tree_map_only(LazyWeights, LazyWeights.plain, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    @_uncompiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Below autograd: whoever comes here has passed by the way above.
        args, kwargs = tree_map_only(LazyWeights, LazyWeights.made, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Opened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: LazyWeights) -> Tensor:  # noqa: ARG004
        return weights.made().detach() if weights.is_leaf else weights.made()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad


# Making them ----------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What becomes of the weights of a call.

    Attributes:
        average: whether their mean over heads is wanted, (B, L, S), instead of those of each, (B, H, L, S).
        shape, dtype: in which they are given.
        lazy: whether they are computed at the first use.
    """

    average: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    lazy: bool

    def formed(self, weights: Tensor) -> Tensor:
        """(B, H, L, S) or (B, L, S) as they are given."""
        # No view to autograd, which lets nobody change in place a view that a function of ours has made.
        return torch.ops.aten._unsafe_view(weights.contiguous(), self.shape).to(self.dtype)


def weights_of(
    plan: Plan,
    make: Callable[[], Tensor],
    define: Callable[..., Attended],
    inputs: Sequence[Tensor | None],
    watched: Sequence[Tensor] = (),
) -> Tensor:
    """The weights that `make` gives, now or at their first use, with the gradient that the definition has.

    Args:
        plan: what becomes of them.
        make: (B, H, L, S), or (B, L, S) if the mean is wanted; called without gradients.
        define: what the definition says of `inputs`, as `reference.attention` gives it.
        inputs: q, k, the bias and whatever else gets a gradient.
        watched: other tensors that they are made of. If one of these, q, k or the bias is changed before they are, an
            error says so.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        weights: Tensor = _Weights.apply(plan, make, define, len(inputs), *inputs, *watched)
        return weights
    return unrecorded(plan, make, inputs, watched)


def unrecorded(
    plan: Plan, make: Callable[[], Tensor], inputs: Sequence[Tensor | None], watched: Sequence[Tensor]
) -> Tensor:
    """As `weights_of`, without a gradient: for who gives it to them."""
    q = inputs[0]
    assert q is not None
    if not plan.lazy:
        with torch.no_grad():
            return plan.formed(make())
    others = [t for t in (*inputs[:3], *watched) if t is not None and not t.is_inference()]
    versions = [t._version for t in others]

    def make_later() -> Tensor:
        if [t._version for t in others] != versions:
            raise RuntimeError(
                "multihead: a mask, bias or input of this call was changed in place before its weights were read. Read "
                "them first, pass a clone, or set MultiheadAttention.lazy_weights = False."
            )
        return plan.formed(make())

    return LazyWeights(make_later, plan.shape, plan.dtype, q.device)


def gradients(
    plan: Plan, define: Callable[..., Attended], inputs: Sequence[Tensor | None], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """To q, k, the bias and other inputs of `define`, from that of weights as they were given."""
    q, k = inputs[:2]
    assert q is not None
    assert k is not None
    (B, H, L, _), S = q.shape, k.shape[2]
    grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
    if plan.average:
        grad = (grad.reshape(B, 1, L, S) / H).expand(B, H, L, S)
    return differentiable_gradients(define, inputs, (None, grad.reshape(B, H, L, S), None))


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        make: Callable[[], Tensor],
        define: Callable[..., Attended],
        count: int,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.plan, ctx.define, ctx.count = plan, define, count
        return unrecorded(plan, make, tensors[:count], [t for t in tensors[count:] if t is not None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint makes them anew each time
        found = gradients(ctx.plan, ctx.define, saved[: ctx.count], grad)
        return None, None, None, None, *found, *(None,) * (len(saved) - ctx.count)
