"""The inputs of torch.nn.MultiheadAttention: tokens first or batch first, with or without a batch, nested, or beside a
cache; checked, and read as the layer computes with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multihead.cache import KVCache
from multihead.cache_ledger import Step
from multihead.errors import bad_input, bad_type, bad_value, describe
from multihead.layer import AttentionLayer
from multihead.layouts import TOKENS_FIRST, Layout, read_nested
from multihead.options import Positions


class TorchInputs(AttentionLayer):
    """A layer whose inputs lie as torch's have them: `batch_first` says which way."""

    batch_first: bool

    def context_cache(
        self,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """The keys and values of a context, projected once, for many calls `attn(x, None, None, cache=...)`.

        Args:
            key, value: as of a call.
            key_padding_mask: (N, S), without a batch (S,), bool. True hides the key: it is not kept.
            positions: where the tokens stand, (S,) or (N, S); by default 0 .. S - 1.
            dtype: the stored form, as of `KVCache`.

        Returns:
            A frozen cache.

        Raises:
            ValueError, TypeError: an input does not fit.
        """
        layout = None if self.batch_first or key.ndim == 2 else TOKENS_FIRST
        for name, tensor, letter, width in (("key", key, "kdim", self.kdim), ("value", value, "vdim", self.vdim)):
            if not isinstance(tensor, Tensor) or tensor.ndim not in (2, 3) or tensor.shape[-1] != width:
                raise bad_input(name, self._form("S", letter, width), describe(tensor))
            self.check_kind(name, tensor)
        if key.shape[:-1] != value.shape[:-1]:
            raise bad_input("value", f"the batch and length of key, {tuple(key.shape[:-1])}", describe(value))
        shape = tuple(key.shape[:-1] if layout is None else key.shape[1::-1])
        keep = None if key_padding_mask is None else _kept(key_padding_mask, shape)
        return self.filled_cache(key, value, layout, positions, keep, dtype)

    def read_with_cache(
        self,
        cache: KVCache,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None,
        positions: Positions | None,
    ) -> tuple[
        tuple[Tensor, Tensor, Tensor],
        tuple[Layout | None, Layout | None],
        tuple[int | None, int, int],
        Step,
        tuple[Tensor | None, Tensor | None],
    ]:
        """As `_read`, S counting what the cache will hold; what the cache will come to; and positions of both sides."""
        alone = key is None and value is None and isinstance(cache, KVCache) and cache.frozen
        if alone:
            self._check_query(query)
            layout: Layout | None = None if self.batch_first or query.ndim == 2 else TOKENS_FIRST
            N, L = (
                (None, query.shape[0]) if query.ndim == 2 else query.shape[:2] if layout is None else query.shape[1::-1]
            )
            sources, layouts, S = (query, query, query), (layout, layout), None
        else:
            if any(isinstance(t, Tensor) and t.is_nested for t in (query, key, value)):
                raise bad_value("query, key, value", "padded tensors beside a cache", "a nested one")
            sources, layouts, (N, L, S) = self.read(query, key, value)
        batch = () if N is None else (N,)
        keep = None if key_padding_mask is None else _kept(key_padding_mask, (*batch, L if S is None else S))
        step = self.cache_step(cache, batch, (L, S), query.device, positions, keep)
        return sources, layouts, (N, L, step.S), step, (step.q_positions, step.k_positions)

    def _check_query(self, query: object) -> None:
        if (
            not isinstance(query, Tensor)
            or query.is_nested
            or query.ndim not in (2, 3)
            or query.shape[-1] != self.embed_dim
        ):
            raise bad_input("query", self._form("L", "E", self.embed_dim), describe(query))
        self.check_kind("query", query)

    def read(
        self, query: Tensor, key: Any, value: Any
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Layout | None, Layout | None], tuple[int | None, int, int]]:
        """The inputs as projections take them, how their tokens lie (of queries, of keys), and N, L, S; all checked."""
        layout = None if self.batch_first else TOKENS_FIRST
        is_plain = isinstance(query, Tensor) and not query.is_nested and query.ndim == 3
        if query is key and key is value and is_plain and query.shape[-1] == self.embed_dim == self.kdim == self.vdim:
            self.check_kind("query", query)  # most calls are this one
            N, L = query.shape[:2] if layout is None else query.shape[1::-1]
            return (query, key, value), (layout, layout), (N, L, L)
        for name, tensor, axis, letter, width in (
            ("query", query, "L", "E", self.embed_dim),
            ("key", key, "S", "kdim", self.kdim),
            ("value", value, "S", "vdim", self.vdim),
        ):
            if not isinstance(tensor, Tensor):
                raise bad_type(name, f"a tensor {self._form(axis, letter, width)}", tensor)
            if tensor.is_nested:
                self._check_nested(name, tensor, letter, width)
            elif tensor.ndim not in (2, 3) or tensor.shape[-1] != width or tensor.ndim != query.ndim:
                raise self._misfit(name, (query, key, value), axis, letter, width)
            self.check_kind(name, tensor)
        if query.is_nested or key.is_nested or value.is_nested:
            return read_nested(query, key, value)
        if key.shape[:-1] != value.shape[:-1]:
            expected = f"the batch and length of key, {tuple(key.shape[:-1])}"
            raise bad_input("value", expected, describe(value), "Each key has one value.")
        if query.ndim == 2:
            return (query, key, value), (None, None), (None, query.shape[0], key.shape[0])
        batch, tokens = (0, 1) if self.batch_first else (1, 0)
        N = query.shape[batch]
        if key.shape[batch] != N:
            got = f"query {tuple(query.shape)} and key {tuple(key.shape)}"
            said = f"This layer has batch_first={self.batch_first}: the batch is axis {batch}."
            raise bad_input("key", f"the batch size of query, {N}", got, said)
        return (query, key, value), (layout, layout), (N, query.shape[tokens], key.shape[tokens])

    def _form(self, axis: str, letter: str, width: int) -> str:
        return f"(N, {axis}, {letter}={width})" if self.batch_first else f"({axis}, N, {letter}={width})"

    def _misfit(
        self, name: str, tensors: tuple[Tensor, Tensor, Tensor], axis: str, letter: str, width: int
    ) -> ValueError:
        query, key, value = tensors
        tensor = {"query": query, "key": key, "value": value}[name]
        if name != "query" and tensor.ndim != query.ndim:
            dims = [f"{t.ndim}-D" if isinstance(t, Tensor) else type(t).__name__ for t in tensors]
            in_torch = (
                f"expected `key` and `value` to be {dims[0]} but found {dims[1]} and {dims[2]} tensors respectively"
            )
            return bad_input(name, f"as many axes as query, {tuple(query.shape)}", describe(tensor), "", in_torch)
        form = f"{self._form(axis, letter, width)}, or ({axis}, {letter}={width}) without a batch"
        in_torch = f"query should be unbatched 2D or batched 3D tensor but received {tensor.ndim}-D query tensor"
        is_odd = name == "query" and tensor.ndim not in (2, 3)
        return bad_input(name, f"the shape {form}", describe(tensor), "", in_torch if is_odd else "")

    def _check_nested(self, name: str, tensor: Any, letter: str, width: int) -> None:
        if not self.batch_first:
            raise bad_value("batch_first", "True for nested tensors", False, "Their rows are the batch.")
        form = f"a nested tensor (N, *, {letter}={width})"
        if tensor.dim() != 3 or (tensor.layout == torch.jagged and tensor._ragged_idx != 1):
            in_torch = f"query should be unbatched 2D or batched 3D tensor but received {tensor.dim()}-D query tensor"
            otherwise = "Only the axis of the tokens may be ragged."
            raise bad_input(name, form, f"one of {tensor.dim()} axes", otherwise, in_torch if name == "query" else "")
        try:
            wide = tensor.size(-1)
        except RuntimeError:  # torch's answer for an axis on which rows differ
            wide = "that differs from row to row"
        if wide != width:
            raise bad_input(name, form, f"one of width {wide}")


def _kept(key_padding_mask: object, shape: tuple[int, ...]) -> Tensor:
    """Which tokens go into a cache."""
    form = "(N, S)" if len(shape) == 2 else "(S,)"
    if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
        instead = "Write numbers of which the lowest hide as mask != 0."
        expected = f"with a cache a bool tensor {form}, True hides"
        raise bad_type("key_padding_mask", expected, key_padding_mask, "A key is kept or not.", instead)
    if tuple(key_padding_mask.shape) != shape:
        raise bad_input(
            "key_padding_mask", f"with a cache the new tokens' shape {form} = {shape}", describe(key_padding_mask)
        )
    return ~key_padding_mask
