"""What a call takes when it is run: time by step, the operation that the profiler saw, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from multihead import whole
from multihead.explaining.machine import fastest
from multihead.layer import AttentionLayer
from multihead.masks import Mask
from multihead.plane import Plane, default_positions
from multihead.positions import Position


@dataclass(frozen=True)
class Measured:
    """Times are the shortest of several runs, with the backward pass in training."""

    seconds: float  # of the whole call
    runs: int  # that it is the shortest of
    steps: dict[str, float]  # seconds of each step run by itself; none where the layer is one operation
    operation: str  # in which attention's forward pass spent most of its time, as the profiler names it
    share: float  # of that pass, from 0 to 1
    peak: int  # bytes, the most that was there at once besides inputs and parameters


@dataclass(frozen=True)
class Call:
    """Inputs of a layer, and how it is called with them."""

    layer: AttentionLayer
    x: Tensor  # (B, L, E)
    key: Tensor  # (B, S, kdim); in self-attention x
    value: Tensor  # (B, S, vdim); key where that has its width
    mask: Mask | Tensor | None
    bias: Tensor | Position | None
    training: bool

    def run(self) -> Tensor:
        """The layer's output, by its public call."""
        options = {"mask": self.mask, "bias": self.bias}
        sources = [self.x, self.key, self.value]
        if not hasattr(self.layer, "batch_first"):
            return self.layer(*sources, **options)
        if not self.layer.batch_first:
            turned = {id(t): t.transpose(0, 1) for t in sources}  # what is one tensor has to stay one
            sources = [turned[id(t)] for t in sources]
        out: Tensor = self.layer(*sources, need_weights=False, **options)[0]
        return out

    def steps(self) -> Iterator[tuple[str, Callable[..., Any], list[Tensor]]]:
        """Each step: its name, what computes it, and what of."""
        layer = self.layer
        sources = {"q": self.x, "k": self.key, "v": self.value}
        by_projection: dict[str, str] = {}
        for name, parts, _, _ in layer.products(self.x, self.key, self.value):
            by_projection[name] = by_projection.get(name, "") + parts
        for name, parts in by_projection.items():
            yield name, *self._projection({part: sources[part] for part in parts})
        with torch.no_grad():
            q, k, v = self.heads()
        if layer.q_norm is not None:
            yield "norms", layer.normalised, [q, k]
            with torch.no_grad():
                q, k = layer.normalised(q, k)
        position = layer.position
        if position is not None and position.rotates:
            places = default_positions(q.shape[-2], k.shape[-2], None, None, q.device)
            yield type(position).__name__, lambda q, k: position.rotate(q, k, *places), [q, k]
            with torch.no_grad():
                q, k = position.rotate(q, k, *places)
        yield "attention", self.attend, [q, k, v]
        with torch.no_grad():
            heads = self.attend(q, k, v).transpose(1, 2).flatten(2)
        if layer.gate_proj is not None:
            yield "gate_proj", layer.gate_proj, [self.x]
        yield "out_proj", layer.out_proj, [heads]

    def _projection(self, sources: dict[str, Tensor]) -> tuple[Callable[..., Any], list[Tensor]]:
        different = list(dict.fromkeys(sources.values()))  # one tensor for several parts is one product

        def project(*given: Tensor) -> Sequence[Tensor]:
            instead = dict(zip(different, given, strict=True))
            return self.layer.project_some({part: instead[source] for part, source in sources.items()}, (None, None))

        return project, different

    def heads(self) -> Sequence[Tensor]:
        """q, k and v."""
        return self.layer.project(self.x, self.key, self.value, (None, None))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The heads' outputs (B, H, L, V)."""
        layer = self.layer
        plane = Plane(tuple(q.shape[:1]), layer.num_heads, q.shape[-2], k.shape[-2], q.device)
        mask, bias = layer.joined(self.mask, self.bias, plane, None, None, self.key is self.x)
        options = {"bias": bias, "scale": layer.scale, "softcap": layer.softcap, "sinks": layer.sinks}
        scores = {name: option for name, option in options.items() if option is not None}
        return layer.attend(q, k, v, mask, None, layer.dropout if self.training else 0.0, scores)[0]


def measure(call: Call, kernel: str) -> Measured:
    """Run a call, as often as takes some seconds in all. The layer's numbers, modes and gradients and torch's
    generator are as before when it is done; its hooks are called."""
    device = call.x.device
    devices = [device] if device.type not in ("cpu", "meta") else []
    with torch.random.fork_rng(devices), _mode(call.layer, call.training), torch.set_grad_enabled(call.training):
        if call.training:
            leaves = {id(t): _leaf(t) for t in (call.x, call.key, call.value)}
            call = replace(call, x=leaves[id(call.x)], key=leaves[id(call.key)], value=leaves[id(call.value)])
        inputs = list({id(t): t for t in (call.x, call.key, call.value)}.values())
        wanted = [t for t in (*inputs, *call.layer.parameters()) if t.requires_grad]
        there_and_back = _with_backward(call.run, wanted)
        seconds, runs = fastest(there_and_back, device, 0.5)
        steps = {}
        if kernel != whole.NAME:
            for name, run, given in call.steps():
                of = [_leaf(t) for t in given] if call.training else given
                learned = [p for p in call.layer.parameters() if p.requires_grad]
                steps[name], _ = fastest(_with_backward(partial(run, *of), [*of, *learned]), device, 0.2)
        heads = call.heads()
        attention = call.run if kernel == whole.NAME else lambda: call.attend(*heads)
        operation, share = _seen(attention, device, whole.OPERATION if kernel == whole.NAME else None)
        return Measured(seconds, runs, steps, operation, share, _peak(there_and_back, device))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _with_backward(run: Callable[[], Any], wanted: Sequence[Tensor]) -> Callable[[], object]:
    """A run, and where gradients are recorded its backward pass, which leaves no `.grad`."""

    def there_and_back() -> object:
        made = run()
        if not torch.is_grad_enabled():
            return made
        outs = [t for t in (made if isinstance(made, list | tuple) else [made]) if t.requires_grad]
        return torch.autograd.grad(outs, wanted, [torch.ones_like(t) for t in outs], allow_unused=True)

    return there_and_back


@contextmanager
def _mode(layer: AttentionLayer, training: bool) -> Iterator[None]:
    before = {module: module.training for module in layer.modules()}
    layer.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def _seen(run: Callable[[], object], device: torch.device, named: str | None) -> tuple[str, float]:
    """The operation with the most time of its own, or `named` if it ran, and its share."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as seen:
        run()
    events = [event for event in seen.key_averages() if "::" in event.key]
    times = {event.key: _own_time(event, device) for event in events}
    if named in times:
        return str(named), 1.0
    most = max(times, key=times.__getitem__)
    return most, times[most] / max(sum(times.values()), 1e-9)


def _own_time(event: Any, device: torch.device) -> float:
    return float(event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total)


def _peak(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a run had at once of what it asked torch for."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    now = most = 0
    assert seen.profiler is not None
    changes = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    for change in sorted(changes, key=lambda e: e.start_ns()):
        now += change.nbytes()
        most = max(most, now)
    return most
