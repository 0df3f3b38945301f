"""Which layers of a model are watched, and how."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from multihead.compat import MultiheadAttention
from multihead.errors import bad_type, bad_value
from multihead.layer import AttentionLayer
from multihead.swapping import as_drop_in
from multihead.watching import Join, Seen, Watcher

Chosen = str | Iterable[str] | Callable[[str, nn.Module], bool]


def layers_of(model: object, wanted: Chosen | None) -> dict[str, nn.Module]:
    """The layers to watch, by name; of a layer with several names the first."""
    if not isinstance(model, nn.Module):
        raise bad_type("model", "a torch.nn.Module", model)
    for name, module in model.named_modules():
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
            otherwise = "A compiled program has no place to look in at."
            raise bad_value("model", "one that is not compiled", name or "model", otherwise, "Capture the original.")
    kinds = (AttentionLayer, nn.MultiheadAttention)
    there: dict[str, nn.Module] = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    names = ", ".join(map(repr, there))
    if not there:
        instead = "For other attention make a Record(q, k, mask=...) of its q and k."
        raise bad_value("model", "one with Attention or MultiheadAttention in it", type(model).__name__, "", instead)
    found = there
    if callable(wanted):
        found = {name: module for name, module in there.items() if wanted(name, module)}
        if not found:
            raise bad_value("layers", "a function that says True of a layer", "none", "", f"There are {names}.")
    elif wanted is not None:
        if not isinstance(wanted, Iterable):
            raise bad_type("layers", "a name, several names, or a function of (name, layer)", wanted)
        patterns = [wanted] if isinstance(wanted, str) else list(wanted)
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise bad_type("layers", "a name, several names, or a function of (name, layer)", pattern)
            if not any(fnmatchcase(name, pattern) for name in there):
                raise bad_value("layers", "the name of a layer of attention", repr(pattern), "", f"There are {names}.")
        found = {name: m for name, m in there.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    for name, module in found.items():
        if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
            otherwise = "Its weights are not those of q and k alone."
            expected = "layers without add_bias_kv and add_zero_attn"
            raise bad_value("layers", expected, repr(name), otherwise, "Choose others by layers=.")
    return found


@contextmanager
def watched(layer: nn.Module, watch: Watcher) -> Iterator[None]:
    """A layer that tells of its calls within the block, besides whom it tells already. One of torch's is looked at from
    outside."""
    if isinstance(layer, AttentionLayer):
        name, told = "watcher", layer.watcher
        own: Any = _Watching([watch] if told is None else [told, watch])
    else:
        assert isinstance(layer, nn.MultiheadAttention)
        name, own = "forward", _Forward(layer, layer.forward, watch)
    before = {key: held for key, held in vars(layer).items() if key == name}
    layer.__dict__[name] = own
    try:
        yield
    finally:
        del layer.__dict__[name]
        layer.__dict__.update(before)


class _Watching:
    """A watcher, which copies of its layer have no part in: they may outlive the block."""

    def __init__(self, watchers: list[Watcher]) -> None:
        self.watchers = watchers

    def __call__(self, seen: Seen) -> None:
        for watch in self.watchers:
            watch(seen)

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Forward:
    """The forward of a layer of torch's, which then tells of the call. A copy of the layer has its own back."""

    def __init__(self, layer: nn.MultiheadAttention, given: Callable[..., Any], watch: Watcher) -> None:
        self.layer, self.given, self.watch = layer, given, watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.given(*args, **kwargs)
        _look_from_outside(self.layer, answer[0], self.watch, args, kwargs)
        return answer

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_forward(copy.deepcopy(self.layer, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self.layer,)


def _own_forward(layer: nn.MultiheadAttention) -> Any:
    return type(layer).forward.__get__(layer)


@torch.no_grad()
def _look_from_outside(layer: nn.MultiheadAttention, out: Tensor, watcher: Watcher, args: Any, kwargs: Any) -> None:
    """Tell of a call of torch's layer, by a drop-in with the same parameters that stops before it attends."""
    twin = as_drop_in(layer)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, look: Any, dropout: float, scores: Any) -> Any:  # noqa: ARG001
        nothing = v.new_zeros(()).expand(*q.shape[:-1], v.shape[-1])
        watcher(Seen(q, k, v, mask, scores, dropout, out, join=Join(joined, layer.out_proj)))
        return nothing, None

    def joined(heads: Tensor) -> Tensor:
        found = twin.out_proj(heads.transpose(-2, -3).flatten(-2))
        return found if layer.batch_first or found.ndim == 2 else found.transpose(0, 1)

    twin.__dict__["attend"] = attend
    twin.__dict__["is_simple"] = lambda: False  # so that it comes to attend
    MultiheadAttention.forward(twin, *args, **kwargs)
