"""How q, k and v are projected: in one product, two or three, by plain `nn.Linear` submodules in two layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from multihead.errors import bad_value, describe

if TYPE_CHECKING:
    from typing_extensions import Self


class Projections(nn.Module):
    """The projections of an attention layer, as its direct submodules.

    Packed: `qkv_proj` when all three inputs have one width, `q_proj` and `kv_proj` when those of k and v have. Split:
    `q_proj`, `k_proj`, `v_proj`. Rows of a joined projection are in the order q, k, v, each by head.

    Attributes (of the layer that derives from it): embed_dim, kdim, vdim, num_heads, num_kv_heads, head_dim, value_dim.
    """

    embed_dim: int
    kdim: int
    vdim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    def make_projections(self, packed: bool, bias: bool, **make: Any) -> None:
        """Add the projections; `make` are the device and dtype of nn.Linear."""
        for name, parts in _layout(self._inputs, packed):
            self.add_module(name, nn.Linear(self._inputs[parts[0]], self._width(parts), bias, **make))

    def split_projections(self) -> Self:
        """Give q, k and v a projection each (`q_proj`, `k_proj`, `v_proj`), in place, with the same numbers.

        The new parameters are other objects: make an optimizer afterwards. Returns the module itself.

        Raises:
            ValueError: a projection has been replaced, wrapped or hooked, which the new ones would lose.
        """
        return self._rebuild(packed=False)

    def pack_projections(self) -> Self:
        """Join the projections of inputs of one width (`qkv_proj`, or `q_proj` and `kv_proj`), in place, with the same
        numbers. The opposite of `split_projections`, with the same conditions.

        Raises:
            ValueError: as there, or kdim is not vdim, or only some of the projections have a bias.
        """
        if self.kdim != self.vdim:
            otherwise = "One projection would need one width for the inputs of k and v."
            raise bad_value("pack_projections()", "kdim = vdim", f"kdim={self.kdim}, vdim={self.vdim}", otherwise)
        return self._rebuild(packed=True)

    @property
    def _inputs(self) -> dict[str, int]:
        return {"q": self.embed_dim, "k": self.kdim, "v": self.vdim}

    def _width(self, parts: str) -> int:
        one = {"q": self.num_heads * self.head_dim, "k": self.num_kv_heads * self.head_dim}
        one["v"] = self.num_kv_heads * self.value_dim
        return sum(one[part] for part in parts)

    def layers(self) -> Iterator[tuple[str, str]]:
        """The projections that are there, by name, with the parts they make: ("qkv_proj", "qkv")."""
        for parts in ("qkv", "q", "kv", "k", "v"):
            if f"{parts}_proj" in self._modules:
                yield f"{parts}_proj", parts

    def rows_by_part(self) -> dict[str, tuple[Any, slice]]:
        """For each of q, k, v: the projection that makes it, and its rows in there."""
        found: dict[str, tuple[Any, slice]] = {}
        for name, parts in self.layers():
            for i, part in enumerate(parts):
                start = self._width(parts[:i])
                found[part] = self._modules[name], slice(start, start + self._width(part))
        return found

    def products(self, query: object, key: object, value: object) -> Iterator[tuple[str, str, slice, int]]:
        """The products that project three sources: (the projection's name, what it makes of "qkv", its rows, all rows).

        Parts that share a projection and a source (the same object) are one product.
        """
        sources = {"q": query, "k": key, "v": value}
        for name, parts in self.layers():
            start, same = 0, ""
            for part, following in zip(parts, (*parts[1:], None), strict=True):
                same += part
                if following is None or sources[following] is not sources[part]:
                    yield name, same, slice(start, start + self._width(same)), self._width(parts)
                    start, same = start + self._width(same), ""

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k, v by head."""
        sources = {"q": query, "k": key, "v": value}
        found: dict[str, Tensor] = {}
        for name, parts, rows, whole in self.products(query, key, value):
            product = _some_rows(self._modules[name], sources[parts[0]], rows, whole)
            if len(parts) == 1:
                found[parts] = product
            else:
                found |= zip(parts, product.split([self._width(part) for part in parts], -1), strict=True)
        widths = {"q": self.head_dim, "k": self.head_dim, "v": self.value_dim}
        # The heads are counted from the product: under tensor parallelism it holds a process's share of them.
        heads = {part: (tensor.shape[-1] // widths[part], widths[part]) for part, tensor in found.items()}
        return [found[part].unflatten(-1, heads[part]).transpose(-2, -3) for part in "qkv"]

    def _rebuild(self, packed: bool) -> Self:
        own = self.rows_by_part()
        if [name for name, _ in self.layers()] == [name for name, _ in _layout(self._inputs, packed)]:
            return self
        for name, _ in self.layers():
            projection = self._modules[name]
            if not _is_plain(projection):
                instead = "Change the layout first, then wrap, replace or hook the projections."
                raise bad_value(name, "a plain nn.Linear", describe(projection), "Its extras would be lost.", instead)
        for what, flags in (
            ("with a bias", {projection.bias is not None for projection, _ in own.values()}),
            ("with requires_grad of the weight", {projection.weight.requires_grad for projection, _ in own.values()}),
            ("with requires_grad of the bias", {p.bias is not None and p.bias.requires_grad for p, _ in own.values()}),
        ):
            if len(flags) > 1:
                raise bad_value("projections", f"all {what}, or none", "some of both", "Joined they would be alike.")
        for name, _ in list(self.layers()):
            del self._modules[name]
        with torch.no_grad():
            for name, parts in _layout(self._inputs, packed):
                weight = torch.cat([own[part][0].weight[own[part][1]] for part in parts])
                has_bias = own[parts[0]][0].bias is not None
                joined = nn.Linear(weight.shape[1], weight.shape[0], has_bias, weight.device, weight.dtype)
                joined.weight.copy_(weight)
                if has_bias:
                    joined.bias.copy_(torch.cat([own[part][0].bias[own[part][1]] for part in parts]))
                    joined.bias.requires_grad_(own[parts[0]][0].bias.requires_grad)
                joined.weight.requires_grad_(own[parts[0]][0].weight.requires_grad)
                joined.train(self.training)
                self.add_module(name, joined)
        return self


def _layout(inputs: dict[str, int], packed: bool) -> list[tuple[str, str]]:
    """The projections' names and parts: parts whose inputs have one width are joined where asked."""
    if packed and inputs["q"] == inputs["k"] == inputs["v"]:
        return [("qkv_proj", "qkv")]
    if packed and inputs["k"] == inputs["v"]:
        return [("q_proj", "q"), ("kv_proj", "kv")]
    return [("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")]


def _some_rows(projection: Any, x: Tensor, rows: slice, whole: int) -> Tensor:
    """Some outputs of a projection. Where a hook or an adapter could notice, it is called as a whole."""
    if rows == slice(0, whole):
        return projection(x)
    if _is_plain(projection):
        return F.linear(x, projection.weight[rows], None if projection.bias is None else projection.bias[rows])
    return projection(x)[..., rows]


def _is_plain(projection: Any) -> bool:
    """Whether it is an nn.Linear and nothing else: no subclass, parametrisation, hook, or forward of its own."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    everywhere = (
        nn_module._global_forward_hooks,
        nn_module._global_forward_pre_hooks,
        nn_module._global_backward_hooks,
        nn_module._global_backward_pre_hooks,
    )
    return (
        type(projection) is nn.Linear
        and "forward" not in projection.__dict__
        and not any(getattr(projection, name) for name in hooks)
        and not any(everywhere)
    )
