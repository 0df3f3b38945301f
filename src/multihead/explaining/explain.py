"""`explain`: which kernel a layer will take, why not the others, and its steps with their shapes and costs."""

from __future__ import annotations

from collections.abc import Mapping
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
    B, L = check_size("batch", batch, least=0), check_size("length", length, least=0)
    S = L if source_length is None else check_size("source_length", source_length, least=0)
    held = next(layer.parameters(), torch.empty(0))
    where = torch.device(device) if device is not None else held.device if is_layer else torch.device("cpu")
    kind = dtype if dtype is not None else held.dtype
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
    E = layer.embed_dim
    kernel = choice.kernel.NAME if why_not_whole else whole.NAME
    inputs = f"x {(B, L, E)}" + ("" if source_length is None else f", context {(B, S, layer.kdim)}")
    if why_not_whole:
        tables = [*_learned_tables(layer, bias, L, S), *choice.kernel.tables(request)]
    else:
        tables = whole.tables(layer, B, L, kind.itemsize)
    machine, measured = None, None
    if measure:
        if min(B, L, S) < 1:
            raise bad_value("measure", "sizes of at least 1 to run", f"batch={B}, length={L}, source_length={S}")
        call = _call(subject, layer, (B, L, source_length), mask, bias, training, where, kind)
        machine, measured = calibrate(where, kind), run_measured(call, kernel)
    return Explanation(
        subject=f"{type(layer).__name__}({layer.extra_repr()})",
        inputs=f"{inputs}, {str(kind).removeprefix('torch.')} on {where}, {'training' if training else 'not training'}",
        kernel=kernel,
        refusals={whole.NAME: [why_not_whole] if why_not_whole else [], **choice.refusals},
        drawbacks=choice.drawbacks,
        tables=tables,
        steps=_steps(layer, B, L, S, source_length is None, kernel),
        costs=_costs(layer, request, seen, source_length is None, training, kind.itemsize),
        pairs=(seen, B * layer.num_heads * L * S),
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        peak=peak_bytes(layer, request, tables, training, kind.itemsize),
        cache_bytes=layer.num_kv_heads * (layer.head_dim + layer.value_dim) * kind.itemsize,
        hints=hints(layer, request, bias, tables, choice.refusals, source_length is None, training, kind.itemsize),
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
    raise bad_type("subject", "an Attention, or a mapping of its arguments", subject, "", instead)


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
    weight = layer.out_proj.weight
    if (weight.device, weight.dtype) != (torch.empty(0, device=device).device, dtype):
        instead = "Leave device and dtype out, or convert the layer."
        got = f"{dtype} on {device}"
        raise bad_value("measure", f"the layer's own kind, {weight.dtype} on {weight.device}", got, "", instead)
    B, L, S = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int, width: int) -> Tensor:
        return torch.randn(B, tokens, width, generator=generator).to(device, dtype)

    context = None if S is None else draw(S, layer.kdim)
    return Call(layer, draw(L, layer.embed_dim), context, mask, bias, training)


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
    own = layer.position if layer.position is not None and layer.position.biases else None
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


def _learned_tables(layer: AttentionLayer, bias: Tensor | Position | None, L: int, S: int) -> list[Table]:
    learned = [part for part in (layer.position, bias) if isinstance(part, nn.Module) and part.biases]
    if not learned:
        return []
    what = f"a bias of {layer.num_heads} x {L} x {S} and its indices"
    why = f"{' and '.join(type(part).__name__ for part in learned)} is read from a table that is learned"
    return [Table(what, why, L * S * (layer.num_heads * BIAS_BYTES + torch.int64.itemsize))]


def _steps(layer: AttentionLayer, B: int, L: int, S: int, is_self: bool, kernel: str) -> list[tuple[str, str]]:
    H, K, D, V = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim
    query, source = "x", "x" if is_self else "context"
    sources = {"q": (query, L, layer.embed_dim), "k": (source, S, layer.kdim), "v": (source, S, layer.vdim)}
    steps: list[tuple[str, str]] = []
    for name, parts, rows, _ in layer.products(query, source, source):
        text, tokens, width = sources[parts[0]]
        steps.append((name, f"{text} {(B, tokens, width)} -> {', '.join(parts)} {(B, tokens, rows.stop - rows.start)}"))
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
    B, H, K, L, S, D, V = request.sizes
    query, source = "x", "x" if is_self else "context"
    sources = {"q": (L, layer.embed_dim), "k": (S, layer.kdim), "v": (S, layer.vdim)}
    costs: dict[str, Cost] = {}
    for name, parts, rows, _ in layer.products(query, source, source):
        tokens, width = sources[parts[0]]
        cost = of_projection(B * tokens, width, rows.stop - rows.start, itemsize, training)
        costs[name] = costs.get(name, Cost(0, 0)) + cost
    turned = B * (H * L + K * S) * D
    if layer.q_norm is not None:
        costs["norms"] = of_rows(turned, itemsize, training)
    if layer.position is not None and layer.position.rotates:
        costs[type(layer.position).__name__] = of_rows(turned, itemsize, training)
    costs["attention"] = of_attention(request, pairs, itemsize, training)
    if layer.gate_proj is not None:
        costs["gate_proj"] = of_projection(B * L, layer.embed_dim, H * V, itemsize, training)
    costs["out_proj"] = of_projection(B * L, H * V, layer.out_dim, itemsize, training)
    return costs
