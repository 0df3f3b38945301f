"""`MultiheadAttention`: the drop-in for torch.nn.MultiheadAttention.

The constructor, the call, the parameters and their names are torch's; what is computed is `AttentionLayer`, so all of
`Attention`'s options are there too. Where it means to differ from torch is listed in docs/drop_in.md.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multihead.attention import attention
from multihead.cache import KVCache
from multihead.errors import bad_type, bad_value, check_size, is_int, is_number
from multihead.kernels.lazy import LazyWeights
from multihead.layouts import Ragged, without_padding
from multihead.masks import Mask, as_mask, window
from multihead.options import Positions, check_flags, split_positions
from multihead.plane import Plane, default_positions
from multihead.positions import Position
from multihead.projections import ProjectionView
from multihead.rotary import Rotary
from multihead.torch_inputs import TorchInputs
from multihead.torch_masks import check_masks, mask_and_bias, sum_of
from multihead.weights import Look, attention_weights

TorchMultiheadAttention = nn.MultiheadAttention  # as it was before anybody put the drop-in in its place


class MultiheadAttention(TorchInputs, TorchMultiheadAttention):  # type: ignore[misc]  # out_proj: any nn.Linear
    """torch.nn.MultiheadAttention with everything that hurt mended: same constructor, call, parameters and state_dict.

        attn = MultiheadAttention(512, 8, batch_first=True)
        out, weights = attn(x, x, x)

    A query that may see nothing gets zeros, never NaN; `is_causal` is obeyed, alone or with other masks; masks of every
    shape and dtype go together; the output is the same in training and eval, with and without weights; `in_proj` and
    `out_proj` are submodules that are really called.

    Letters: N batch, E = embed_dim, H = num_heads, K = num_kv_heads, L and S tokens of query and key.

    Args:
        embed_dim, num_heads, dropout, bias: as in torch; E need not be a multiple of H if head_dim is given.
        add_bias_kv: one more key and value, learned, that every query sees.
        add_zero_attn: one more key and value of zeros, that every query sees.
        kdim, vdim: width of the keys' and of the values' input; by default E.
        batch_first: inputs are (N, L, E) instead of (L, N, E).
        device, dtype: of the parameters. complex64 and complex128 are taken too: scores are the real part of <q, k>.
        sliding_window: W, each query sees its own token and the W - 1 before it, as models' configurations count it:
            mask=window(left=W - 1, right=0).
        rope_theta: rotary positions with this base: position=Rotary(base=rope_theta).
        num_kv_heads, head_dim, value_dim, out_dim, out_bias, position, qk_norm, gate, sinks, softcap, scale, mask,
            out_dropout: as in `Attention`. Of `mask` True = may attend.

    Parameters: `in_proj_weight` ((H + K) * D + K * V, E), or `q_proj_weight`, `k_proj_weight`, `v_proj_weight` where
    kdim or vdim is not E; `in_proj_bias`; `out_proj.weight`, `out_proj.bias`; `bias_k`, `bias_v`. The submodules
    `in_proj`, or `q_proj`, `k_proj` and `v_proj`, show them as projections.

    Attributes:
        lazy_weights: whether the weights that a call returns are computed at their first use, which most callers never
            come to. True; set it to False for one layer, or for all: MultiheadAttention.lazy_weights = False.

    Raises:
        ValueError, TypeError: sizes or options that do not fit, before any parameter is made.
    """

    lazy_weights = True

    JOINED = "in_proj"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_dim: int | None = None,
        out_bias: bool | None = None,
        position: Position | None = None,
        qk_norm: bool = False,
        gate: bool = False,
        sinks: bool = False,
        softcap: float | None = None,
        scale: float | None = None,
        mask: Mask | Tensor | None = None,
        out_dropout: float = 0.0,
        sliding_window: int | None = None,
        rope_theta: float | None = None,
    ) -> None:
        check_flags(add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, batch_first=batch_first)
        if rope_theta is not None:
            position = _rotary(rope_theta, position, embed_dim, num_heads, head_dim)
        if sliding_window is not None:
            reach = window(left=check_size("sliding_window", sliding_window) - 1, right=0)
            mask = reach if mask is None else reach & as_mask(mask)
        super().__init__(
            embed_dim, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim, kdim=kdim,
            vdim=vdim, out_dim=out_dim, bias=bias, out_bias=out_bias, position=position, qk_norm=qk_norm, gate=gate,
            sinks=sinks, softcap=softcap, scale=scale, mask=mask, dropout=dropout, out_dropout=out_dropout,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.batch_first, self.add_zero_attn = batch_first, add_zero_attn
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        for name, width in (("bias_k", self.head_dim), ("bias_v", self.value_dim)):
            shape = (1, 1, self.num_kv_heads * width)
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **make)) if add_bias_kv else None)
        self._reset_extra_keys()
        self.register_forward_pre_hook(never_bypassed)

    def make_projections(self, packed: bool, bias: bool, **make: Any) -> None:  # noqa: ARG002  (the widths decide here)
        self._qkv_same_embed_dim = self.kdim == self.embed_dim == self.vdim
        joined = {"in_proj_weight": ("qkv", self.embed_dim)}
        apart = {f"{part}_proj_weight": (part, width) for part, width in self._inputs.items()}
        for names, there in ((joined, self._qkv_same_embed_dim), (apart, not self._qkv_same_embed_dim)):
            for name, (parts, width) in names.items():
                weight = nn.Parameter(torch.empty(self._width(parts), width, **make)) if there else None
                self.register_parameter(name, weight)
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(self._width("qkv"), **make)) if bias else None)
        self.add_projection_views()

    def add_projection_views(self) -> None:
        """Add the submodules that show the parameters as projections."""
        if self._qkv_same_embed_dim:
            rows = self._width("qkv")
            view = ProjectionView(self, self.embed_dim, rows, "in_proj_weight", "in_proj_bias", None)
            self.in_proj = view.train(self.training)
            return
        start = 0
        for part, width in self._inputs.items():
            rows = self._width(part)
            view = ProjectionView(self, width, rows, f"{part}_proj_weight", "in_proj_bias", slice(start, start + rows))
            self.add_module(f"{part}_proj", view.train(self.training))
            start += rows

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.DataParallel builds replicas by setting copies of the children: a view shows the replica that it is set in.
        if isinstance(value, ProjectionView) and getattr(self, "_is_replica", False):
            value.__dict__["owner"] = self
        super().__setattr__(name, value)

    def _reset_own_parameters(self) -> None:
        super()._reset_own_parameters()
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
        self.out_proj.reset_parameters()  # as torch has it: the law of nn.Linear, but for a bias of 0
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def _reset_extra_keys(self) -> None:
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def reset_parameters(self) -> None:
        """Draw all parameters anew.

        q, k and v are Xavier-uniform, each for itself, so that both layouts have one law; biases 0; `out_proj` as
        nn.Linear draws it; `bias_k` and `bias_v` Xavier-normal; the rest as in `Attention`.
        """
        super().reset_parameters()
        self._reset_extra_keys()

    def _reset_parameters(self) -> None:
        """torch's name for `reset_parameters`."""
        self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | Position | None = None,
        positions: Positions | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: (L, N, E), with batch_first (N, L, E), without a batch (L, E), or with batch_first a nested tensor
                (N, *, E).
            key: the same with S and kdim; value: with S and vdim.
            key_padding_mask: (N, S), without a batch (S,). Bool: True hides the key. Float: added to its scores.
            need_weights: also give the weights.
            attn_mask: (L, S), (N, L, S), (N*H, L, S), or (N, H, L, S) with 1 for any axis; without a batch also
                (H, L, S). Bool: True hides the pair. Float: added to its score.
            average_attn_weights: the mean of the heads' weights instead of each head's.
            is_causal: a query sees no later keys; together with the other masks. With L != S the queries are the last L
                of the S keys, unless `positions` says otherwise.
            mask: `causal()`, `window(left=255, right=0)`, `documents(ids)` ..., or a bool tensor of which, unlike
                attn_mask, True = may attend. Joins the others.
            bias: added to the scores, a tensor that broadcasts to (N, H, L, S) or a position such as `ALiBi(H)`.
            positions: where the tokens stand: (L,) or (N, L) for self-attention, else a pair for queries and keys.
            cache: a `KVCache`. The tokens of key and value are added to it, those that key_padding_mask (N, L) hides
                excepted, and the queries attend to all that it holds, which S counts then. A frozen one
                (`context_cache`) stands for key and value, which are None.

        All masks together hide what any of them hides.

        Returns:
            The output, in the layout of `query` with out_dim for E; and None, or the weights before dropout in the
            dtype of the output: (N, L, S) averaged, (N, H, L, S) for each head, without N for inputs without a batch.
            With add_bias_kv and add_zero_attn their keys come last. Of nested tensors S and L are the greatest lengths.

        Raises:
            ValueError, TypeError: an input does not fit.
        """
        if not (isinstance(need_weights, bool) and isinstance(average_attn_weights, bool)):
            check_flags(need_weights=need_weights, average_attn_weights=average_attn_weights)
        look = Look(average_attn_weights, self.lazy_weights) if need_weights else None
        step = None
        if cache is not None:
            sources, layouts, (N, L, S), step, places = self.read_with_cache(
                cache, query, key, value, key_padding_mask, positions
            )
            key_padding_mask = None
        else:
            places = split_positions(positions, key is query)
            sources, layouts, (N, L, S) = self.read(query, key, value)
        if isinstance(layouts[0], Ragged) or isinstance(layouts[1], Ragged):
            look = None if look is None else look._replace(lazy=False)
            mask, places = without_padding(layouts, mask, places, key_padding_mask, key is query, L, S, query.device)
        plane = Plane(() if N is None else (N,), self.num_heads, L, S, query.device)
        masks = None
        if attn_mask is not None or key_padding_mask is not None or is_causal is not False:
            masks = check_masks(attn_mask, key_padding_mask, is_causal, plane)
        whole: Mask | None = None
        total: Tensor | Position | None = None
        if any(part is not None for part in (mask, bias, positions, self.mask, self.position)):
            whole, total = self.joined(mask, bias, plane, *places, key is query)
        if masks is not None:
            wide = torch.promote_types(query.real.dtype if query.is_complex() else query.dtype, torch.float32)
            hidden, added = mask_and_bias(masks, plane, wide, places != (None, None))
            whole = hidden if whole is None else whole if hidden is None else hidden & whole
            if added is not None:
                if isinstance(total, Position):
                    other = total.bias(*default_positions(L, S, *places, query.device))
                else:
                    other = total
                total = added if other is None else sum_of((added, other), wide)
        out, weights = self.compute(
            *sources, whole, look, layouts=layouts, bias=total, q_positions=places[0], k_positions=places[1],
            cache=cache, step=step,
        )  # fmt: skip
        if isinstance(layouts[0], Ragged):
            out = layouts[0].nested(out)
            weights = None if weights is None else layouts[0].only_tokens(weights)
        if weights is None or isinstance(weights, LazyWeights):  # which come in the dtype of the output
            return out, weights
        dtype = out.real.dtype if out.is_complex() else out.dtype
        return out, weights if weights.dtype == dtype else weights.to(dtype)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        look: Look | None,
        dropout: float,
        scores: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs and the weights asked for, over the keys and those that every query sees besides."""
        if self.bias_k is None and not self.add_zero_attn:
            return super().attend(q, k, v, mask, look, dropout, scores)
        dtype = q.dtype
        if dtype in (torch.float16, torch.bfloat16):  # several steps: they round once, at the end
            q, k, v = q.float(), k.float(), v.float()
        out, lse = attention(q, k, v, mask, dropout=dropout, return_lse=True, **scores)
        logits, values = self._extra_keys(q, v, lse.dtype)  # (*batch, H, L, X), (H, X, V)
        # The softmax over both is theirs by the share that each has of the denominator. Of a query that sees none of
        # the keys, lse is -inf; a finite one in its place gives the same, and no NaN gradient.
        blind = (lse == -math.inf)[..., None]
        lse = lse[..., None].masked_fill(blind, 0.0)
        alone = torch.logsumexp(logits, -1, keepdim=True)
        total = torch.where(blind, alone, torch.logaddexp(lse, alone))
        share, extra = torch.exp(lse - total).masked_fill(blind, 0.0), torch.exp(logits - total)
        out = out * share + F.dropout(extra, dropout).to(values.dtype) @ values
        if look is None:
            return out.to(dtype), None
        weights = torch.cat([attention_weights(q, k, mask, **scores) * share, extra], -1)
        return out.to(dtype), weights.mean(-3) if look.average else weights

    @property
    def attends_plainly(self) -> bool:
        """As of any layer, and no keys besides those given."""
        return super().attends_plainly and self.bias_k is None and not self.add_zero_attn

    @property
    def needs_lse(self) -> bool:
        """As of any layer, and for the keys that every query sees besides."""
        return super().needs_lse or self.bias_k is not None or self.add_zero_attn

    def is_simple(self) -> bool:
        """As of any layer, and no keys besides those given."""
        return super().is_simple() and not self.needs_lse

    def _extra_keys(self, q: Tensor, v: Tensor, lse_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The logits (*batch, H, L, X) and values (H, X, V) of the keys that add_bias_kv and add_zero_attn add."""
        logits, values = [], []
        if self.bias_k is not None and self.bias_v is not None:
            H, K = q.shape[-3], v.shape[-3]
            key, value = (
                t.to(q.dtype).view(K, -1).repeat_interleave(H // K, 0) for t in (self.bias_k, self.bias_v)
            )  # (H, D), (H, V)
            scale = 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale
            logit = (q @ key.conj()[..., None]) * scale
            logit = logit.real if logit.is_complex() else logit
            logits.append(logit if self.softcap is None else self.softcap * torch.tanh(logit / self.softcap))
            values.append(value)
        if self.add_zero_attn:
            logits.append(torch.zeros(*q.shape[:-1], 1, dtype=lse_dtype, device=q.device))
            values.append(v.new_zeros(q.shape[-3], v.shape[-1]))
        return torch.cat(logits, -1), torch.stack(values, 1)

    def extra_repr(self) -> str:
        """The configuration, as the constructor takes it."""
        flags = ("batch_first", "add_zero_attn")
        told = [f"{name}=True" for name in flags if getattr(self, name)]
        told += ["add_bias_kv=True"] if self.bias_k is not None else []
        return ", ".join([super().extra_repr(), *told])

    def __prepare_scriptable__(self) -> None:
        """What torch.jit.script asks for, in vain: masks are values, which TorchScript has no types for."""
        instead = "Use torch.export or torch.compile, or unswap() a model of torch's own layers before."
        raise NotImplementedError(
            f"multihead.MultiheadAttention can't be scripted: TorchScript is deprecated. {instead}"
        )


def never_bypassed(module: nn.Module, args: object) -> None:
    """A hook that does nothing. torch.nn.TransformerEncoderLayer calls the layers inside of it only if there is one:
    in eval without gradients it would otherwise compute with the parameters itself."""


def _rotary(
    rope_theta: object, position: Position | None, embed_dim: object, num_heads: object, head_dim: object
) -> Rotary:
    if position is not None:
        raise bad_value("rope_theta", "None where position is given", rope_theta, "A layer has one position.")
    if not is_number(rope_theta):
        raise bad_type("rope_theta", "a number above 0, such as 10000.0, or None", rope_theta)
    if not 0 < rope_theta < math.inf:
        raise bad_value("rope_theta", "a finite number above 0", rope_theta)
    if head_dim is None and is_int(embed_dim) and is_int(num_heads) and num_heads > 0:
        head_dim = embed_dim // num_heads
    if is_int(head_dim) and head_dim % 2:
        otherwise = "Rotary positions turn the channels of a head in pairs."
        raise bad_value("rope_theta", "None where head_dim is odd", f"{rope_theta} with head_dim={head_dim}", otherwise)
    return Rotary(base=float(rope_theta))
