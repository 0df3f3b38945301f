"""`explain`: which kernel a layer will take, why not the others, and its steps with their shapes and costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multihead import reference, whole
from multihead.attention import choose
from multihead.errors import bad_type, bad_value, check_size
from multihead.explaining.costs import Cost, of_attention, of_projection, of_rows, visible_pairs
from multihead.explaining.explanation import Explanation
from multihead.explaining.hints import hints
from multihead.explaining.machine import calibrate
from multihead.explaining.measured import Call
from multihead.explaining.measured import measure as run_measured
from multihead.explaining.memory import peak_bytes
from multihead.kernels.table import BIAS_BYTES, Table
from multihead.layer import AttentionLayer
from multihead.masks import Mask
from multihead.module import Attention
from multihead.options import check_flags
from multihead.plane import Plane
from multihead.positions import Position
from multihead.request import Request, make_request


def explain(
    subject: AttentionLayer | Mapping[str, Any],
    *,
    batch: int = 1,
    length: int = 128,
    source_length: int | None = None,
    training: bool | None = None,
    mask: Mask | Tensor | None = None,
    bias: Tensor | Position | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    measure: bool = False,
) -> Explanation:
    """Which kernel a call of a layer will take, which others were refused and why, and the steps with their shapes and
    what they cost.

    It asks the same kernels in the same way as a call without weights, and computes nothing, however large the sizes:
    unless it is to measure.

    Args:
        subject: a layer, or the arguments of one: `{"embed_dim": 512, "num_heads": 8, "num_kv_heads": 2}`.
        batch, length: B and L of the call.
        source_length: S, for a call with a context; None for self-attention.
        training: whether dropout acts and gradients are recorded; by default what the layer is set to (False for
            arguments).
        mask, bias: as in the call, besides the layer's own.
        device, dtype: of the call; by default those of the layer's parameters (for arguments the CPU).
        measure: run it too, on random numbers, for some seconds: how fast the machine is, what each step takes beside
            what it should, which operation the profiler saw. The layer stays as it is, but its hooks are called.

    Returns:
        An `Explanation`; `print` it.

    Raises:
        ValueError, TypeError: sizes or options do not fit.
    """
    layer = _layer(subject)
    is_layer = isinstance(subject, AttentionLayer)
    training = (is_layer and layer.training) if training is None else training
    check_flags(training=training, measure=measure)
    B, L = check_size("batch", batch, least=0), check_size("length", length, least=0)
    S = L if source_length is None else check_size("source_length", source_length, least=0)
    if max(B, 1) * max(L, S) * layer.embed_dim >= 2**62:
        raise bad_value("length", "sizes that a tensor can have", f"{B} x {max(L, S)} x {layer.embed_dim}")
    if source_length is None and not layer.kdim == layer.vdim == layer.embed_dim:
        expected = f"given, for a layer with kdim={layer.kdim} and vdim={layer.vdim} beside embed_dim={layer.embed_dim}"
        raise bad_value("source_length", expected, None)
    where, kind = _where(subject, layer, device), _kind(layer, dtype)
    itemsize = kind.itemsize // (2 if kind.is_complex else 1)  # attention reads complex numbers as two real ones
    with torch.inference_mode(False), torch.set_grad_enabled(training):  # whatever is recorded around this call
        request = _request(layer, B, L, S, training, mask, bias, where, kind)
        choice = choose(request)
        why_not_whole: str | None = "it takes self-attention without mask and bias"
        batch_first = getattr(layer, "batch_first", True)
        if not batch_first:
            why_not_whole = "it takes inputs that are batch first"
        elif source_length is None and request.mask is None and request.bias is None:
            why_not_whole = whole.why_not(
                layer, torch.empty((), device=where, dtype=kind).expand(B, L, layer.embed_dim)
            )
        seen = visible_pairs(request)
    kernel = choice.kernel.NAME if why_not_whole else whole.NAME
    if why_not_whole:
        tables = [*_bias_tables(layer, bias, L, S), *choice.kernel.tables(request)]
    else:
        tables = whole.tables(layer, B, L, kind.itemsize)
    mode = "training" if training else "not training"
    machine, measured = None, None
    if measure:
        if min(B, L, S) < 1:
            raise bad_value("measure", "sizes of at least 1 to run", f"batch={B}, length={L}, source_length={S}")
        with torch.inference_mode(False):
            call = _call(subject, layer, (B, L, source_length), mask, bias, training, where, kind)
            machine, measured = calibrate(where, kind), run_measured(call, kernel)
    return Explanation(
        subject=f"{type(layer).__name__}({layer.extra_repr()})",
        inputs=f"{_inputs(layer, B, L, source_length)}, {str(kind).removeprefix('torch.')} on {where}, {mode}",
        kernel=kernel,
        refusals={whole.NAME: [why_not_whole] if why_not_whole else [], **choice.refusals},
        drawbacks=choice.drawbacks,
        tables=tables,
        steps=_steps(layer, B, L, S, source_length is None, kernel),
        costs=_costs(layer, request, seen, source_length is None, training, itemsize),
        pairs=(seen, B * layer.num_heads * L * S),
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        peak=peak_bytes(layer, request, tables, training, itemsize),
        cache_bytes=layer.num_kv_heads * (layer.head_dim + layer.value_dim) * kind.itemsize,
        hints=hints(layer, request, bias, tables, choice.refusals, source_length is None, training, itemsize),
        machine=machine,
        measured=measured,
    )


def _layer(subject: object) -> AttentionLayer:
    if isinstance(subject, AttentionLayer):
        return subject
    if isinstance(subject, Mapping):
        given: dict[str, Any] = {str(name): value for name, value in subject.items()}
        missing = [name for name in ("embed_dim", "num_heads") if name not in given]
        if missing:
            raise bad_value("subject", "at least embed_dim and num_heads", f"no {' and no '.join(missing)}")
        try:
            return Attention(**given | {"device": "meta"})
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            name = str(error).rpartition("argument ")[2]
            instead = "For a layer of another kind make it and pass the layer."
            raise bad_value("subject", "arguments of Attention", name, "", instead) from None
    instead = "For a model explain one of its layers; for a configuration pass a dict of Attention's arguments."
    if isinstance(subject, nn.MultiheadAttention):
        instead = "multihead.swap(model) makes one of torch's layer."
    raise bad_type("subject", "an Attention, or a mapping of its arguments", subject, "", instead)


def _where(subject: object, layer: AttentionLayer, device: torch.device | str | None) -> torch.device:
    """Where the call would run; a layer on meta is asked about on the CPU."""
    if device is None and isinstance(subject, Mapping):
        device = subject.get("device")
    if device is None:
        where = next(layer.parameters(), torch.empty(0, device="cpu")).device
    else:
        try:
            where = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:  # what torch raises for one that it does not have
            said = str(error).splitlines()[0].partition(". ")[0]
            raise bad_value("device", "one that is here", repr(device), said) from None
    return torch.device("cpu") if where.type == "meta" else where


def _kind(layer: AttentionLayer, dtype: torch.dtype | None) -> torch.dtype:
    kind = next((p.dtype for p in layer.parameters()), torch.float32) if dtype is None else dtype
    if not isinstance(kind, torch.dtype) or not (kind.is_floating_point or kind.is_complex):
        raise bad_type("dtype", "a torch.dtype of floating point or complex numbers", kind)
    return kind


def _sources(layer: AttentionLayer, is_self: bool) -> tuple[str, str, str]:
    """What query, key and value are called."""
    if is_self:
        return "x", "x", "x"
    return ("x", "context", "context") if layer.kdim == layer.vdim else ("x", "key", "value")


def _products(layer: AttentionLayer, L: int, S: int, is_self: bool) -> Iterator[tuple[str, str, str, int, int, int]]:
    """The products of the projections: (name, which of "qkv", of what, tokens, width, width of what is made)."""
    names = _sources(layer, is_self)
    sources = {"q": (names[0], L, layer.embed_dim), "k": (names[1], S, layer.kdim), "v": (names[2], S, layer.vdim)}
    for name, parts, rows, _ in layer.products(*names):
        yield name, parts, *sources[parts[0]], rows.stop - rows.start


def _own_bias(layer: AttentionLayer) -> Position | None:
    """The layer's position, if it acts on the scores."""
    return layer.position if layer.position is not None and layer.position.biases else None


def _inputs(layer: AttentionLayer, B: int, L: int, S: int | None) -> str:
    """Their shapes, as the layer takes them."""

    def shape(tokens: int, width: int) -> tuple[int, int, int]:
        return (B, tokens, width) if getattr(layer, "batch_first", True) else (tokens, B, width)

    told = {"x": shape(L, layer.embed_dim)}
    if S is not None:
        _, key, value = _sources(layer, False)
        told |= {key: shape(S, layer.kdim), value: shape(S, layer.vdim)}
    return ", ".join(f"{name} {size}" for name, size in told.items())


def _call(
    subject: AttentionLayer | Mapping[str, Any],
    layer: AttentionLayer,
    sizes: tuple[int, int, int | None],
    mask: Mask | Tensor | None,
    bias: Tensor | Position | None,
    training: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Call:
    """A call that can be run: of the layer itself, or of one of the same arguments; its inputs are drawn apart."""
    if not isinstance(subject, AttentionLayer):
        with torch.random.fork_rng([]):
            layer = Attention(**dict(subject) | {"device": device, "dtype": dtype})
    for held in layer.parameters():
        if (held.device, held.dtype) != (device, dtype):
            instead = "Leave device and dtype out, or convert the layer."
            got = f"{dtype} on {device}"
            raise bad_value("measure", f"the layer's own kind, {held.dtype} on {held.device}", got, "", instead)
    B, L, S = sizes
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(tokens: int, width: int) -> Tensor:
        kind = torch.promote_types(dtype, torch.float32)
        return torch.randn(B, tokens, width, generator=generator, device="cpu", dtype=kind).to(device, dtype)

    x = draw(L, layer.embed_dim)
    key = x if S is None else draw(S, layer.kdim)
    value = key if layer.kdim == layer.vdim else draw(key.shape[1], layer.vdim)
    return Call(layer, x, key, value, mask, bias, training)


def _request(
    layer: AttentionLayer,
    B: int,
    L: int,
    S: int,
    training: bool,
    mask: Mask | Tensor | None,
    bias: Tensor | Position | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Request:
    """The request that the layer's forward makes, over tensors that take no memory."""
    H, K, D, V = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
    hollow = torch.empty((), device=device, dtype=dtype, requires_grad=training)
    q, k, v = hollow.expand(B, H, L, D), hollow.expand(B, K, S, D), hollow.expand(B, K, S, V)
    plane = Plane((B,), H, L, S, device)
    own = _own_bias(layer)
    joined: Tensor | Position | None
    if isinstance(own, nn.Module) or isinstance(bias, nn.Module) or (own is not None and bias is not None):
        learns = any(_learns(part) for part in (own, bias))
        table = torch.empty((), device=device, dtype=dtype, requires_grad=training and learns)
        whole, joined = layer.joined(mask, None, plane, None, None, True)[0], table.expand(H, L, S)
    else:
        whole, joined = layer.joined(mask, bias, plane, None, None, True)
    dropout = layer.dropout if training else 0.0
    return make_request(
        q, k, v, None if whole is None else whole.to(device), joined, layer.scale, layer.softcap, dropout,
        None, None, layer.needs_lse, reference.attention,
    )  # fmt: skip


def _learns(bias: Tensor | Position | None) -> bool:
    """Whether a bias gets a gradient."""
    if isinstance(bias, nn.Module):
        return any(parameter.requires_grad for parameter in bias.parameters())
    return isinstance(bias, Tensor) and bias.requires_grad


def _bias_tables(layer: AttentionLayer, bias: Tensor | Position | None, L: int, S: int) -> list[Table]:
    """Those that are made before a kernel is asked: of what is learned, and of two biases."""
    own = _own_bias(layer)
    each = f"{layer.num_heads} x {L} x {S}"
    size = layer.num_heads * L * S * BIAS_BYTES
    found = []
    for part in (own, bias):
        name = type(part).__name__
        if isinstance(part, nn.Module):
            indices = L * S * torch.int64.itemsize
            found.append(
                Table(f"a bias of {each} and its indices", f"{name} reads a table that is learned", size + indices)
            )
        elif isinstance(part, Position) and own is not None and bias is not None:
            found.append(Table(f"a bias of {each}", f"{name} is added to another bias", size))
    if own is not None and bias is not None:
        found.append(Table(f"the sum of two biases of {each}", "kernels take one", size))
    return found


def _steps(layer: AttentionLayer, B: int, L: int, S: int, is_self: bool, kernel: str) -> list[tuple[str, str]]:
    H, K, D, V = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
    steps: list[tuple[str, str]] = []
    for name, parts, source, tokens, width, out in _products(layer, L, S, is_self):
        steps.append((name, f"{source} {(B, tokens, width)} -> {', '.join(parts)} {(B, tokens, out)}"))
    steps.append(("heads", f"q {(B, H, L, D)}, k {(B, K, S, D)}, v {(B, K, S, V)}"))
    if layer.q_norm is not None:
        steps.append(("norms", f"q {(B, H, L, D)}, k {(B, K, S, D)}"))
    if layer.position is not None:
        acts_on = f"q {(B, H, L, D)}, k {(B, K, S, D)}" if layer.position.rotates else f"scores {(H, L, S)}"
        steps.append((type(layer.position).__name__, acts_on))
    steps.append(("attention", f"q, k, v -> {(B, H, L, V)} by {kernel}"))
    if layer.sinks is not None:
        steps.append(("sinks", f"{(H,)} joins the softmax, by lse {(B, H, L)}"))
    if layer.gate_proj is not None:
        steps.append(("gate_proj", f"x {(B, L, layer.embed_dim)} -> {(B, L, H * V)}"))
    return [*steps, ("out_proj", f"{(B, L, H * V)} -> {(B, L, layer.out_dim)}")]


def _costs(
    layer: AttentionLayer, request: Request, pairs: int, is_self: bool, training: bool, itemsize: int
) -> dict[str, Cost]:
    """By step, those that cost next to nothing left out."""
    B, H, K, L, S, D, _ = request.sizes
    joined, is_complex = H * layer.value_dim, layer.head_dim != D  # a request has complex numbers as two real ones
    costs: dict[str, Cost] = {}

    def projection(name: str, tokens: int, width: int, out: int) -> Cost:
        module = layer._modules[name]
        assert module is not None
        learns = any(p.requires_grad for p in module.parameters())
        return of_projection(B * tokens, width, out, itemsize, training, learns, is_complex)

    for name, _, _, tokens, width, out in _products(layer, L, S, is_self):
        costs[name] = costs.get(name, Cost(0, 0)) + projection(name, tokens, width, out)
    turned = B * (H * L + K * S) * D
    if layer.q_norm is not None:
        costs["norms"] = of_rows(turned, itemsize, training)
    if layer.position is not None and layer.position.rotates:
        costs[type(layer.position).__name__] = of_rows(turned, itemsize, training)
    costs["attention"] = of_attention(request, pairs, itemsize, training)
    if layer.gate_proj is not None:
        costs["gate_proj"] = projection("gate_proj", L, layer.embed_dim, joined)
    costs["out_proj"] = projection("out_proj", L, joined, layer.out_dim)
    return costs
