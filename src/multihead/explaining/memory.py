"""How much memory a call takes besides its inputs and the parameters, while it takes most."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from multihead.kernels.table import Table
from multihead.layer import AttentionLayer
from multihead.request import Request


def peak_bytes(layer: AttentionLayer, request: Request, made: Sequence[Table], training: bool, width: int) -> int:
    """By adding up what is there at once, of numbers `width` bytes wide; in training with the backward pass.

    Without gradients most is there at the end of attention, or while the output is made. In training it is at the end
    of the backward pass of attention, when its gradients lie beside all that was kept for it.
    """
    B, H, K, L, S, D, V = request.sizes
    both, values, heads, out = B * (H * L + K * S) * D, B * K * S * V, B * H * L * V, B * L * layer.out_dim
    placed = both if layer.q_norm is not None or (layer.position is not None and layer.position.rotates) else 0
    gate = heads if layer.gate_proj is not None else 0
    with_sinks = heads if layer.sinks is not None else 0  # the heads' outputs, shrunk
    held = both + values + placed + heads + with_sinks
    lse = 4 * B * H * L if request.needs_lse else 0
    tables = sum(table.bytes for table in made)
    if not training:
        return width * held + lse + max(tables, width * max(2 * gate, out))
    kept = held + gate + out
    back = out + heads + both + values  # gradients of the output, of the heads, of q, k and v
    weights = sum(p.numel() for p in layer.out_proj.parameters())
    if isinstance(request.bias, Tensor) and request.bias.requires_grad:
        tables += request.bias.numel() * request.bias.element_size()  # its gradient
    state = 2 * 4 * B * H * L  # of each row, in float32: what the backward pass makes the weights of
    return width * (kept + back + weights) + state + lse + tables
