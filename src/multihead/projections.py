"""How q, k and v are projected: in one product, two or three, by plain `nn.Linear` submodules in two layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from multihead.errors import bad_value, describe
from multihead.layouts import Layout

if TYPE_CHECKING:
    from typing_extensions import Self


class Projections(nn.Module):
    """The projections of an attention layer: submodules that are really called, each for one or several of q, k, v.

    Rows of a joined projection are in the order q, k, v, each by head.

    Attributes (of the layer that derives from it): embed_dim, kdim, vdim, num_heads, num_kv_heads, head_dim, value_dim.
    """

    embed_dim: int
    kdim: int
    vdim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int

    JOINED = "qkv_proj"  # the name of the projection that makes q, k and v in one product

    def make_projections(self, packed: bool, bias: bool, **make: Any) -> None:
        """Add the projections; `make` are the device and dtype of nn.Linear."""
        raise NotImplementedError

    @property
    def _inputs(self) -> dict[str, int]:
        return {"q": self.embed_dim, "k": self.kdim, "v": self.vdim}

    def _width(self, parts: str) -> int:
        one = {"q": self.num_heads * self.head_dim, "k": self.num_kv_heads * self.head_dim}
        one["v"] = self.num_kv_heads * self.value_dim
        return sum(one[part] for part in parts)

    def layers(self) -> Iterator[tuple[str, str]]:
        """The projections that are there, by name, with the parts they make: ("qkv_proj", "qkv")."""
        for name, parts in ((self.JOINED, "qkv"), ("q_proj", "q"), ("kv_proj", "kv"), ("k_proj", "k"), ("v_proj", "v")):
            if name in self._modules:
                yield name, parts

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

    def project(
        self, query: Tensor, key: Tensor, value: Tensor, layouts: tuple[Layout | None, Layout | None]
    ) -> Sequence[Tensor]:
        """q, k, v by head: (*batch, heads, tokens, width). `layouts`: of query, and of key and value; None = that."""
        if query is key and key is value and self.JOINED in self._modules and self.head_dim == self.value_dim:
            joined: Any = self._modules[self.JOINED]
            product = joined(query)
            product = product if layouts[0] is None else layouts[0].rows(product)
            K, D = self.num_kv_heads, self.head_dim
            heads = product.view(*product.shape[:-1], product.shape[-1] // D, D).transpose(
                -2, -3
            )  # (*batch, H + 2 K, tokens, D)
            return torch.split_with_sizes(heads, (heads.shape[-3] - 2 * K, K, K), -3)
        return self.project_some({"q": query, "k": key, "v": value}, layouts)

    def project_some(self, sources: dict[str, Tensor], layouts: tuple[Layout | None, Layout | None]) -> list[Tensor]:
        """Those of q, k, v whose source is given, in this order; else as `project`."""
        found: dict[str, Tensor] = {}
        for name, parts, rows, whole in self.products(*map(sources.get, "qkv")):
            if parts[0] not in sources:
                continue
            product = _some_rows(self._modules[name], sources[parts[0]], rows, whole)
            layout = layouts[0 if parts[0] == "q" else 1]
            product = product if layout is None else layout.rows(product)
            if len(parts) == 1:
                found[parts] = product
            else:
                found |= zip(parts, product.split([self._width(part) for part in parts], -1), strict=True)
        widths = {"q": self.head_dim, "k": self.head_dim, "v": self.value_dim}
        # The heads are counted from the product: under tensor parallelism it holds a process's share of them.
        by_head = {part: (tensor.shape[-1] // widths[part], widths[part]) for part, tensor in found.items()}
        return [found[part].unflatten(-1, by_head[part]).transpose(-2, -3) for part in "qkv" if part in found]


class LinearProjections(Projections):
    """Projections by plain nn.Linear submodules, in two layouts.

    Packed: `qkv_proj` when all three inputs have one width, `q_proj` and `kv_proj` when those of k and v have. Split:
    `q_proj`, `k_proj`, `v_proj`.
    """

    def make_projections(self, packed: bool, bias: bool, **make: Any) -> None:
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

    def _rebuild(self, packed: bool) -> Self:
        own = self.rows_by_part()
        if [name for name, _ in self.layers()] == [name for name, _ in _layout(self._inputs, packed)]:
            return self
        for name, _ in self.layers():
            projection = self._modules[name]
            if not is_plain(projection):
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


class ProjectionView(nn.Linear):
    """A projection whose numbers are parameters of the layer that it belongs to.

    So a layer can keep the parameters' names of torch.nn.MultiheadAttention and still have projections that can be
    hooked, wrapped and replaced. It has no parameters of its own: state_dict and named_parameters do not show it.

    Args:
        owner: the layer.
        weight: the name of the owner's parameter that is the weight, (rows, width).
        bias: the name of the one that holds the bias.
        bias_rows: which part of it, None for the whole.
    """

    _NAMES = ("weight", "bias")

    def __init__(
        self, owner: nn.Module, in_features: int, out_features: int, weight: str, bias: str, bias_rows: slice | None
    ) -> None:
        nn.Module.__init__(self)  # not that of nn.Linear, which makes parameters
        self.in_features, self.out_features = in_features, out_features
        self.__dict__["owner"] = owner  # past nn.Module, which would make it a submodule of its own submodule
        self._weight, self._bias, self._bias_rows = weight, bias, bias_rows

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(out_features, in_features), the owner's."""
        return getattr(self.owner, self._weight)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """(out_features,), the owner's, or None."""
        bias: Tensor | None = getattr(self.owner, self._bias)
        return bias if bias is None or self._bias_rows is None else bias[self._bias_rows]

    def reset_parameters(self) -> None:
        """Nothing: the layer resets its parameters itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._NAMES:
            super().__setattr__(name, value)
        elif name == "bias" and self._bias_rows is not None:
            instead = f"Set {self._bias} of the layer as a whole, or write into the values with bias.copy_()."
            raise AttributeError(f"this bias is a part of the layer's {self._bias} and can't be replaced. {instead}")
        else:
            setattr(self.owner, self._weight if name == "weight" else self._bias, value)


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
    if is_plain(projection):
        return F.linear(x, projection.weight[rows], None if projection.bias is None else projection.bias[rows])
    return projection(x)[..., rows]


def is_plain(projection: Any) -> bool:
    """Whether it is a linear map and nothing else: no other subclass, parametrisation, hook, or forward of its own."""
    return (
        type(projection) in (nn.Linear, NonDynamicallyQuantizableLinear, ProjectionView)
        and "forward" not in projection.__dict__
        and not (
            projection._forward_hooks
            or projection._forward_pre_hooks
            or projection._backward_hooks
            or projection._backward_pre_hooks
            or nn_module._global_forward_hooks
            or nn_module._global_forward_pre_hooks
            or nn_module._global_backward_hooks
            or nn_module._global_backward_pre_hooks
        )
    )
