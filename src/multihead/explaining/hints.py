"""What is worth knowing besides: what torch's layer would do, what fewer key/value heads would save, and which argument
makes a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from multihead.explaining.costs import binary
from multihead.kernels.table import Table
from multihead.layer import AttentionLayer
from multihead.positions import Position
from multihead.request import Request

_MANY = 2**16  # numbers, from which on an L x S tensor is worth a word


def hints(
    layer: AttentionLayer,
    request: Request,
    bias: Tensor | Position | None,
    tables: Sequence[Table],
    refusals: dict[str, list[str]],
    is_self: bool,
    training: bool,
    itemsize: int,
) -> list[str]:
    """One line each."""
    _, H, K, L, S, D, V = request.sizes
    found = []
    if getattr(layer, "bias_k", None) is not None or getattr(layer, "add_zero_attn", False):
        found.append("the keys of add_bias_kv and add_zero_attn are not counted")
    elif not layer.attends_plainly:
        found.append(f"{type(layer).__name__}.attend is its own: what it runs is not known here")
    found += _of_torch(layer, request, is_self, training, itemsize) if L * S > _MANY else []
    if K == H and H % 4 == 0:
        fewer = H // 4
        one, now = fewer * (D + V) * itemsize, K * (D + V) * itemsize
        found.append(f"num_kv_heads={fewer} would take {one:,} instead of {now:,} bytes of a cache for a token")
    return found + _of_tables(layer, request, bias, tables, refusals)


def _of_torch(layer: AttentionLayer, request: Request, is_self: bool, training: bool, itemsize: int) -> list[str]:
    """What `torch.nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)` would do."""
    B, H, _, L, S, _, _ = request.sizes
    size = f"{B} x {H} x {L} x {S}, {binary(B * H * L * S * itemsize)}"
    found = []
    # Its conditions for the fast path, as of PyTorch 2.13, which it computes at each call and tells nobody.
    conditions = {
        "training": training,
        "key is not query": not is_self,
        "an odd number of heads": H % 2 == 1,
        "a mask of floats": request.bias is not None,
        "batch_first=False": not getattr(layer, "batch_first", True),
        "no bias": getattr(layer.out_proj, "bias", layer) is None,  # a wrapped one may have it inside
        "add_bias_kv": getattr(layer, "bias_k", None) is not None,
        "add_zero_attn": bool(getattr(layer, "add_zero_attn", False)),
        "kdim or vdim": not layer.kdim == layer.vdim == layer.embed_dim,
    }
    why_not = [reason for reason, holds in conditions.items() if holds]
    if not why_not:
        found.append(
            "torch.nn.MultiheadAttention would run aten::_native_multi_head_attention, whose scores take "
            f"{size}, weights asked for or not"
        )
    else:
        kept = ", which training keeps" if training else ""
        table = "" if request.mask is None else f" with a mask of {_mask_of_torch(request, itemsize)}"
        found.append(
            f"torch.nn.MultiheadAttention would not take its fast path ({why_not[0]}): its default call makes weights "
            f"of {size}{kept}; with need_weights=False it runs scaled_dot_product_attention{table}"
        )
    lacks = {
        "num_kv_heads": layer.num_kv_heads != layer.num_heads,
        "head_dim": layer.num_heads * layer.head_dim != layer.embed_dim,
        "value_dim": layer.value_dim != layer.head_dim,
        type(layer.position).__name__: layer.position is not None,
        "qk_norm": layer.q_norm is not None,
        "softcap": layer.softcap is not None,
        "scale": layer.scale is not None,
        "sinks": layer.sinks is not None,
        "gate": layer.gate_proj is not None,
        "complex numbers": layer.head_dim != request.sizes.D,
    }
    missing = [name for name, is_there in lacks.items() if is_there]
    return [*found, f"torch.nn.MultiheadAttention has no {', no '.join(missing)}"] if missing else found


def _mask_of_torch(request: Request, itemsize: int) -> str:
    """The mask of numbers that the request's would be."""
    B, H, _, L, S, _, _ = request.sizes
    corner = request.visible(slice(0, min(2, L)), slice(0, min(2, S)))
    b, h, rows, _ = (1, 1, 1, 1) if corner is None else corner.shape
    sizes = (B, S) if rows == 1 and h == 1 else (L, S) if b == h == 1 else (B * H, L, S)  # one of padding, or of pairs
    return f"{' x '.join(map(str, sizes))}, {binary(math.prod(sizes) * itemsize)}"


def _of_tables(
    layer: AttentionLayer,
    request: Request,
    bias: Tensor | Position | None,
    tables: Sequence[Table],
    refusals: dict[str, list[str]],
) -> list[str]:
    """Which argument is a table, or is made one."""
    found = []
    if request.mask is not None and "dense(" in repr(request.mask):
        held = sum(t.numel() * t.element_size() for t in request.mask.tensors().values())
        found.append(
            f"the mask is a table of {binary(held)}: causal(), window(), documents(ids) or padding(keep) say the same "
            "without one, and let blocks be skipped"
        )
    elif request.mask is not None and tables and refusals.get("native"):
        found.append(
            f"the mask becomes a table here, as the kernel that reads it as it is can't: {refusals['native'][0]}"
        )
    _, _, _, L, S, _, _ = request.sizes
    if isinstance(bias, Tensor) and bias.shape[-2:] == (L, S) and L * S > _MANY:
        found.append(f"the bias is a table, {binary(bias.numel() * bias.element_size())}: ALiBi(num_heads) needs none")
    if any("bias" in table.what for table in tables):
        named = [type(part).__name__ for part in (layer.position, bias) if isinstance(part, Position) and part.biases]
        found.append(f"{' + '.join(named)} becomes a table here: ALiBi(num_heads) alone needs none, nor does Rotary")
    return found
