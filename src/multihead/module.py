"""`Attention`: the layer, batch first. What it computes is in `layer.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.cache import KVCache
from multihead.errors import bad_type, bad_value, describe
from multihead.layer import AttentionLayer
from multihead.masks import Mask, padding
from multihead.options import Positions, split_positions
from multihead.plane import Plane
from multihead.positions import Position
from multihead.projections import LinearProjections
from multihead.weights import Look


class Attention(AttentionLayer, LinearProjections):
    """Multi-head attention, batch first. Gives a tensor; weights only when asked for.

        attn(x)              self-attention
        attn(x, context)     queries from x, keys and values from context (encoder-decoder)
        attn(q, k, v)        three sources

    Letters: E = embed_dim, H = num_heads, K = num_kv_heads, D = head_dim, V = value_dim; L and S tokens, any number of
    batch axes in front.

    Args:
        embed_dim: width E of the queries' input.
        num_heads: H.
        num_kv_heads: K, a divisor of H; by default H. Fewer key/value heads than query heads is grouped-query attention
            (Ainslie et al. 2023), one is multi-query attention (Shazeer 2019).
        head_dim: D of queries and keys; by default E / H.
        value_dim: V of the values; by default D.
        kdim, vdim: width of the keys' and of the values' input; by default E.
        out_dim: width of the output; by default E.
        bias: whether the q, k and v projections have a bias.
        out_bias: whether the output projection has one; by default as `bias`.
        packed: one projection for q, k and v (`qkv_proj`), or `q_proj` and one for k and v (`kv_proj`) when only kdim =
            vdim; False: `q_proj`, `k_proj`, `v_proj`. By default packed where widths allow it.
        position: a `Position`: `Rotary()` acts on q and k; `ALiBi(H)`, `T5Bias(H)`, `RelativeBias(H, 128)` on scores.
        qk_norm: RMS-normalise each head's q and k before the position, with a learned gain (Dehghani et al. 2023).
        gate: multiply the heads' output by sigmoid(gate_proj(x)), element by element (Qiu et al. 2025).
        sinks: a learned logit for each head that takes a share of the softmax, from 0.0 on.
        softcap, scale: of the scores, see `attention`.
        mask: of every call, a mask or a bool tensor, True = may attend; a call's own mask joins it by `&`.
        dropout: of the weights, while training.
        out_dropout: of the output, while training.
        device, dtype: of the parameters.

    Raises:
        ValueError, TypeError: sizes or options that do not fit, before any parameter is made.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | Position | None = None,
        positions: Positions | None = None,
        keep: Tensor | None = None,
        cache: KVCache | None = None,
        weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        Args:
            query: (*batch, L, E).
            key: (*batch, S, kdim); by default `query`.
            value: (*batch, S, vdim); by default `key`.
            mask: joins the layer's own by `&`; a mask or a bool tensor that broadcasts to (*batch, H, L, S), True = may
                attend.
            bias: added to the scores, besides that of the layer's position; see `attention`.
            positions: where the tokens stand. (L,) or (*batch, L) for self-attention, else a pair for queries and keys.
                By default 0 .. S-1 for the keys, and the queries are the last L of them.
            keep: (*batch, S) bool, which tokens of key are real; others are seen by nobody. In self-attention the
                default positions count the real ones only, so padding on either side changes nothing.
            cache: a `KVCache`. The tokens of key and value are added to it, those that `keep` leaves out excepted, and
                the queries attend to all that it holds: S counts the cache's slots, also in masks and weights. By
                default the tokens stand after those that it holds. A frozen one (`context_cache`) stands for key and
                value.
            weights: also give the weights, before dropout.

        Returns:
            (*batch, L, out_dim), and with `weights` also (*batch, H, L, S) in float32 or better.

        Raises:
            ValueError, TypeError: an input does not fit.
        """
        if weights is not True and weights is not False:
            raise bad_type("weights", "True or False", weights)
        alone = key is None and isinstance(cache, KVCache) and cache.frozen  # the cache stands for key and value
        if alone:
            self._check_source("query", query, "L", "E", self.embed_dim)
        key, value = (query, query) if alone else self._sources(query, key, value)
        batch, L, S = tuple(query.shape[:-2]), query.shape[-2], key.shape[-2]
        step = None
        if cache is not None:
            step = self.cache_step(cache, batch, (L, None if alone else S), query.device, positions, keep)
            S, q_positions, k_positions = step.S, step.q_positions, step.k_positions
        else:
            mask, positions = (mask, positions) if keep is None else _with_padding(mask, positions, keep, query, key)
            q_positions, k_positions = split_positions(positions, key is query)
        plane = Plane(batch, self.num_heads, L, S, query.device)
        mask, bias = self.joined(mask, bias, plane, q_positions, k_positions, key is query)

        out, found = self.compute(
            query, key, value, mask, Look(average=False) if weights else None,
            bias=bias, q_positions=q_positions, k_positions=k_positions, cache=cache, step=step,
        )  # fmt: skip
        return (out, found) if found is not None else out

    def context_cache(
        self,
        key: Tensor,
        value: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        keep: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """The keys and values of a context, projected once, for many calls `attn(x, cache=...)`.

        Args:
            key: (*batch, S, kdim), such as the output of an encoder.
            value: (*batch, S, vdim); by default `key`.
            positions: where its tokens stand, (S,) or (*batch, S); by default the real ones are counted from 0.
            keep: (*batch, S) bool, which tokens are real. Others are not kept.
            dtype: the stored form, as of `KVCache`.

        Returns:
            A frozen cache.

        Raises:
            ValueError, TypeError: an input does not fit.
        """
        value = key if value is None else value
        self._check_source("key", key, "S", "kdim", self.kdim)
        self._check_source("value", value, "S", "vdim", self.vdim)
        if key.shape[:-1] != value.shape[:-1]:
            raise bad_value("value", f"the batch axes and S of key, {tuple(key.shape[:-1])}", describe(value))
        return self.filled_cache(key, value, None, positions, keep, dtype)

    def _check_source(self, name: str, tensor: object, axis: str, letter: str, width: int) -> None:
        form = f"(*batch, {axis}, {letter}={width})"
        if not isinstance(tensor, Tensor):
            raise bad_type(name, f"a tensor {form}", tensor)
        if tensor.ndim < 2 or tensor.shape[-1] != width:
            raise bad_value(name, f"the shape {form}", describe(tensor))
        self.check_kind(name, tensor)

    def _sources(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
        if key is None and value is not None:
            raise bad_value("key", "given where value is", None, "Values without keys can't be found.")
        key = query if key is None else key
        value = key if value is None else value
        self._check_source("query", query, "L", "E", self.embed_dim)
        self._check_source("key", key, "S", "kdim", self.kdim)
        self._check_source("value", value, "S", "vdim", self.vdim)
        if key.shape[:-1] != value.shape[:-1]:
            raise bad_value("value", f"the batch axes and S of key, {tuple(key.shape[:-1])}", describe(value))
        if key.shape[:-2] != query.shape[:-2]:
            instead = "This layer is batch first: is the batch in the second place?"
            raise bad_value("key", f"the batch axes of query, {tuple(query.shape[:-2])}", describe(key), "", instead)
        return key, value


def _with_padding(
    mask: Mask | Tensor | None, positions: Positions | None, keep: object, query: Tensor, key: Tensor
) -> tuple[Mask, Positions | None]:
    """The mask with padding hidden, and the positions: of self-attention those that count the real tokens only."""
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise bad_type("keep", "a bool tensor (*batch, S), True = real token", keep)
    if keep.shape != key.shape[:-1]:
        raise bad_value("keep", f"the shape (*batch, S) = {tuple(key.shape[:-1])}", describe(keep))
    if positions is None and key is query:
        positions = (keep.long().cumsum(-1) - 1).clamp(min=0)
    return padding(keep) if mask is None else padding(keep) & mask, positions
