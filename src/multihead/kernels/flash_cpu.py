"""PyTorch's fused CPU attention, forward and backward, with an lse that has a gradient.

What is known about the operation (measured in docs/performance.md, and held by the tests):

- it takes 4-D tensors of float32 or float64 with V = D, key/value heads unexpanded, and an additive mask that
  broadcasts; float16 is slower than converting to float32, bfloat16 no faster;
- it reads the last axis as if its stride were 1, and gives wrong numbers otherwise;
- its causal flag is top-left aligned;
- a row that sees nothing gets output 0, and lse 0 where -inf would be right;
- its backward uses the output only through delta = rowsum(grad_out * out).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from multihead.request import Request

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def refusals(request: Request) -> list[str]:
    """Why the operation has no place for something the request asks for; empty: it has."""
    reasons: list[str] = []
    if request.softcap is not None:
        reasons.append("softcap: the fused operation has no place for it between scores and softmax")
    if request.dropout:
        reasons.append("dropout: on the CPU the fused operation has none, and would make an L x S tensor")
    if request.sizes.V != request.sizes.D:
        reasons.append(
            f"V={request.sizes.V} is not D={request.sizes.D}: on the CPU the fused operation needs them equal"
        )
    if isinstance(request.bias, Tensor) and request.bias.requires_grad and torch.is_grad_enabled():
        reasons.append("the bias needs a gradient: the fused operation gives none")
    return reasons


def forward(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out (B,H,L,V) and lse (B,H,L), with lse 0 in rows where `added` hides everything."""
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    return _forward_op(q, k, v, 0.0, is_causal, attn_mask=None if added is None else _dense_rows(added), scale=scale)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    added: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to q, k, v of a loss that uses both out and lse (as `forward` gave them)."""
    grad_out, q, k, v = _dense_rows(grad_out), _dense_rows(q), _dense_rows(k), _dense_rows(v)
    added = None if added is None else _dense_rows(added)
    if grad_lse is None:
        return _backward_op(grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=added, scale=scale)
    # d lse / d scores is the weights themselves, and the operation computes weights * (grad_out v^T - delta). One more
    # column, 0 in q, k and v, 1 in grad_out and -grad_lse in out, makes delta - grad_lse of delta and nothing else.
    q, k, v = (F.pad(t, (0, 1)) for t in (q, k, v))
    grad_out = F.pad(grad_out, (0, 1), value=1.0)
    out = torch.cat([out, -grad_lse.to(out.dtype)[..., None]], -1)
    grads = _backward_op(grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=added, scale=scale)
    return grads[0][..., :-1], grads[1][..., :-1], grads[2][..., :-1]


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
