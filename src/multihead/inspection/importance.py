"""Which heads a model's loss depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import bad_value
from multihead.inspection.watched import Chosen, layers_of, watched
from multihead.layer import AttentionLayer
from multihead.watching import Seen


def head_importance(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    layers: Chosen | None = None,
    normalize: bool = True,
) -> dict[str, Tensor]:
    """How much the loss would change if a head fell silent, to first order: E_x |<z_h, dL/dz_h>|, (H,) for each layer.

    z_h is what head h gives before out_proj, and the product sums over the tokens of an example. From Michel et al.,
    "Are Sixteen Heads Really Better than One?" (2019). Gradients are not added to those of the parameters.

    Args:
        model: with `Attention` or `MultiheadAttention`; for torch's own layer `swap` it first.
        loss_fn: (model, batch) -> the loss (), whose first batch axis is that of the examples.
        batches: what it is called with, one after the other.
        layers: as of `capture`.
        normalize: each layer's importances to a norm of 1, as in the paper.

    Raises:
        ValueError, TypeError: no such layer, no batch, or a loss that does not depend on a layer.
    """
    chosen = layers_of(model, layers)
    for name, layer in chosen.items():
        if not isinstance(layer, AttentionLayer):
            raise bad_value("model", "multihead's layers", f"torch's at {name!r}", "", "Call multihead.swap(model).")
    totals: dict[str, Tensor] = {}
    examples = 0
    for batch in batches:
        outs: dict[str, list[Tensor]] = {name: [] for name in chosen}
        with ExitStack() as stack, torch.enable_grad():
            for name, layer in chosen.items():
                stack.enter_context(watched(layer, partial(_keep, outs[name])))
            loss = loss_fn(model, batch)
        every = [(name, out) for name, kept in outs.items() for out in kept]
        if not every or not loss.requires_grad or not all(out.requires_grad for _, out in every):
            raise bad_value("loss_fn", "a loss with a gradient that depends on the layers", "one without")
        grads = torch.autograd.grad(loss, [out for _, out in every], allow_unused=True)
        count = 0
        for (name, out), grad in zip(every, grads, strict=True):
            product = out.detach() * (torch.zeros_like(out) if grad is None else grad)
            product = product.float().sum((-1, -2))  # (*batch, H)
            product = product.reshape(-1, product.shape[-1])
            count = max(count, len(product))
            totals[name] = totals.get(name, torch.zeros_like(product[0])) + product.abs().sum(0)
        examples += count
    if not examples:
        raise bad_value("batches", "at least one batch", "none")
    found = {name: total / examples for name, total in totals.items()}
    return {name: x / x.norm().clamp(min=1e-30) for name, x in found.items()} if normalize else found


def _keep(outs: list[Tensor], seen: Seen) -> None:
    outs.append(seen.out)
