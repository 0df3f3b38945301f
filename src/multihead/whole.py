"""A whole layer, projections included, as the one operation that PyTorch has for it.

For a few tokens without gradients, calling the operations of a layer one by one takes longer than what they compute.
`aten::_native_multi_head_attention` is plain dense attention in one call. It reads the projections' numbers and calls
no submodule, so it is only used where nobody could notice: where they are not hooked, wrapped or replaced.

`layer` is an `AttentionLayer`, whose file imports this one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from multihead.kernels.autograd import recording
from multihead.kernels.table import Table
from multihead.projections import is_plain
from multihead.weights import Look

NAME = "whole"
OPERATION = "aten::_native_multi_head_attention"

# B * L and L, without and with weights: beyond, the layer's own way is as fast or faster (benchmarks/choice.py).
_MOST_TOKENS, _LONGEST = {False: 512, True: 1024}, {False: 128, True: 512}


def why_not(layer: Any, x: Tensor, looks: bool = False) -> str | None:
    """Why self-attention of x (B, L, E) without mask, bias and positions does not run as one operation; None: it does.

    `looks`: whether the mean of the weights is asked for.
    """
    if recording():
        return "torch.compile, torch.export or tracing: the operations are recorded one by one"
    if torch.is_grad_enabled() or (layer.training and layer.dropout):
        return "gradients or dropout: it has no training"
    if x.ndim != 3:
        return "it takes inputs (B, L, E)"
    if not 0 < x.shape[0] * x.shape[1] <= _MOST_TOKENS[looks] or x.shape[1] > _LONGEST[looks]:
        return f"it pays for up to {_MOST_TOKENS[looks]} tokens in rows of up to {_LONGEST[looks]}"
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
        return "it is used on the CPU, in float32 and float64"
    if not layer.is_simple():
        return "the layer has more than projections and heads"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "a torch.func transform or forward-mode AD: it has no rule for them"
    joined: Any = layer._modules.get(layer.JOINED)
    out: Any = layer.out_proj
    if joined is None or not is_plain(joined) or not is_plain(out):
        return "the projections are not one plain product each: split, hooked, wrapped or replaced"
    if joined.bias is None or out.bias is None or type(joined.weight) is not type(out.weight):
        return "it takes projections with a bias"
    return None


def tables(layer: Any, B: int, L: int, itemsize: int) -> list[Table]:
    """Which L x S tensors it makes, and why."""
    numbers = B * layer.num_heads * L * L
    return [Table(f"scores of {B} x {layer.num_heads} x {L} x {L}", "it is dense", numbers * itemsize)]


def run(layer: Any, x: Tensor, look: Look | None) -> tuple[Tensor, Tensor | None]:
    """The layer's output (B, L, E), and the weights of each head or their mean if asked."""
    joined: Any = layer._modules[layer.JOINED]
    out, weights = torch._native_multi_head_attention(
        x, x, x, layer.embed_dim, layer.num_heads, joined.weight, joined.bias, layer.out_proj.weight,
        layer.out_proj.bias, None, look is not None, look is not None and look.average,
    )  # fmt: skip
    return out, weights if look is not None else None
