"""`swap`: the drop-in in place of every torch.nn.MultiheadAttention of a model, and `unswap`, the way back."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from multihead.compat import MultiheadAttention, TorchMultiheadAttention, never_bypassed
from multihead.errors import bad_type, bad_value, describe
from multihead.projections import ProjectionView, is_plain

Only = str | Iterable[str] | Callable[[str, nn.Module], bool]

_MARK = "_added_by_swap"  # the names of what swap added to a module, for unswap


@dataclass(frozen=True)
class SwapReport:
    """What `swap` or `unswap` did to a model. Print it, or read its fields; its length is the number of layers done."""

    done: str  # "swapped" or "unswapped"
    swapped: tuple[str, ...]  # names of the layers, as named_modules() has them
    skipped: dict[str, str] = field(default_factory=dict)  # by name: why a layer was left as it is

    def __len__(self) -> int:
        return len(self.swapped)

    def __str__(self) -> str:
        layers = "layer" if len(self.swapped) == 1 else "layers"
        lines = [f"{self.done} {len(self.swapped)} {layers} of attention" + (":" if self.swapped else "")]
        lines += [f"  {name or '(the model itself)'}" for name in self.swapped]
        lines += ["left as they are:"] if self.skipped else []
        return "\n".join(lines + [f"  {name or '(the model itself)'}: {why}" for name, why in self.skipped.items()])


def swap(model: nn.Module, only: Only | None = None) -> SwapReport:
    """Make every torch.nn.MultiheadAttention in a model a `multihead.MultiheadAttention`, in place.

    The layers stay the objects that they are, and so do their parameters, hooks and places in the model: optimizers
    made before go on, state_dict has the same names.

        print(multihead.swap(model))

    Args:
        model: any module; also a layer of attention itself.
        only: which layers: a name as named_modules() has it, with * and ? as in file names ("encoder.*"), several of
            them, or a function of (name, layer) that says whether. By default all.

    Returns:
        A `SwapReport`. Subclasses of torch's layer are left alone, and named there with the reason.

    Raises:
        TypeError: `model` is no module, or `only` none of these.
        ValueError: a name in `only` fits no layer of attention.
    """
    return _each("swapped", _chosen(model, only), _why_not, _convert)


def unswap(model: nn.Module, only: Only | None = None) -> SwapReport:
    """Undo `swap`: its layers are torch.nn.MultiheadAttention again, in place, with the same parameters.

    Args:
        model, only: as for `swap`.

    Returns:
        A `SwapReport`. Layers that were not made by `swap`, or that were given what torch's layer does not have, are
        left alone, and named there with the reason.

    Raises:
        ValueError, TypeError: as `swap`.
    """
    ours = [(name, layer) for name, layer in _chosen(model, only) if isinstance(layer, MultiheadAttention)]
    return _each("unswapped", ours, _why_not_back, _convert_back)


def _each(
    done: str,
    layers: Iterable[tuple[str, Any]],
    why_not: Callable[[Any], str | None],
    convert: Callable[[Any], None],
) -> SwapReport:
    """Convert the layers of which nothing says why not."""
    swapped: list[str] = []
    skipped: dict[str, str] = {}
    for name, layer in layers:
        why = why_not(layer)
        if why is None:
            convert(layer)
            swapped.append(name)
        else:
            skipped[name] = why
    return SwapReport(done, tuple(swapped), skipped)


def _chosen(model: object, only: object) -> Iterator[tuple[str, TorchMultiheadAttention]]:
    if not isinstance(model, nn.Module):
        raise bad_type("model", "a torch.nn.Module", model)
    named = model.named_modules(remove_duplicate=False)
    layers = {name: m for name, m in named if isinstance(m, TorchMultiheadAttention)}
    if only is None:
        wanted = layers
    elif callable(only):
        wanted = {name: m for name, m in layers.items() if only(name, m)}
    else:
        wanted = {name: layers[name] for name in _fitting(only, list(layers))}
    once: dict[int, tuple[str, TorchMultiheadAttention]] = {}
    for name, layer in wanted.items():
        once.setdefault(id(layer), (name, layer))  # of a shared layer the first name
    return iter(once.values())


def _fitting(only: object, names: list[str]) -> list[str]:
    patterns = [only] if isinstance(only, str) else list(only) if isinstance(only, Iterable) else []
    if not isinstance(only, Iterable) or not all(isinstance(pattern, str) for pattern in patterns):
        raise bad_type("only", "a name, several names, or a function of (name, layer)", only)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            there = ", ".join(repr(name) for name in names) or "none"
            raise bad_value("only", "the name of a layer of attention", repr(pattern), "", f"The model has: {there}.")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _why_not(layer: TorchMultiheadAttention) -> str | None:
    if "forward" in vars(layer):
        return "its forward was replaced, and would go on running in place of multihead's"
    if type(layer) is TorchMultiheadAttention:
        return None
    if isinstance(layer, MultiheadAttention):
        return "it is multihead's already"
    kind = type(layer).__name__
    if nn.utils.parametrize.is_parametrized(layer):
        return f"a {kind}: swap before parametrising"
    return (
        f"a {kind}, a subclass whose own code may count on torch's: swap before wrapping, or give it another base class"
    )


def _convert(layer: TorchMultiheadAttention) -> None:
    """Torch's layer becomes the drop-in: its class, and the attributes that the drop-in has besides."""
    has_bias = layer.in_proj_bias is not None
    like = MultiheadAttention(
        layer.embed_dim, layer.num_heads, float(layer.dropout), has_bias, layer.bias_k is not None, layer.add_zero_attn,
        layer.kdim, layer.vdim, layer.batch_first, device="meta",
    )  # fmt: skip
    added = {name: value for name, value in vars(like).items() if name not in vars(layer)}
    layer.__class__ = MultiheadAttention
    layer.__dict__.update(added)
    assert isinstance(layer, MultiheadAttention)
    layer.add_projection_views()
    layer.register_forward_pre_hook(never_bypassed)
    layer.__dict__[_MARK] = tuple(added)


def as_drop_in(layer: TorchMultiheadAttention) -> MultiheadAttention:
    """A drop-in with the parameters of torch's layer, which stays as it is. For a look at a call of it."""
    twin = copy.copy(layer)
    for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
        twin.__dict__[name] = OrderedDict(() if name.endswith("hooks") else twin.__dict__[name])
    twin.__dict__.pop("forward", None)
    _convert(twin)
    assert isinstance(twin, MultiheadAttention)
    return twin


def _why_not_back(layer: MultiheadAttention) -> str | None:
    if type(layer) is not MultiheadAttention:
        kind = type(layer).__name__
        parametrised = nn.utils.parametrize.is_parametrized(layer)
        return f"a {kind}: remove the parametrisation first" if parametrised else f"a {kind}, a subclass of multihead's"
    if _MARK not in vars(layer):
        return "it was made as multihead's, not by swap"
    plain = MultiheadAttention(layer.embed_dim, layer.num_heads, kdim=layer.kdim, vdim=layer.vdim, device="meta")
    for name in getattr(layer, _MARK):
        if getattr(layer, name) != getattr(plain, name):
            return f"torch's layer has no {name}, which was changed to {describe(getattr(layer, name))} since"
    for name, _ in layer.layers():
        projection = layer.get_submodule(name)
        if type(projection) is not ProjectionView or not is_plain(projection):
            return f"{name} was replaced, wrapped or hooked since, and torch's layer has none"
    return None


def _convert_back(layer: MultiheadAttention) -> None:
    for name, _ in list(layer.layers()):
        delattr(layer, name)
    for name in layer.__dict__.pop(_MARK):
        layer.__dict__.pop(name, None)
    for key, hook in list(layer._forward_pre_hooks.items()):
        if hook is never_bypassed:
            del layer._forward_pre_hooks[key]
    layer.__class__ = TorchMultiheadAttention  # type: ignore[assignment]
