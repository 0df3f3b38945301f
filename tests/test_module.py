"""The layer against its formula written out from its own parameters, and as the nn.Module it is."""

import ast
import copy
import inspect
import io
import math
import pickle
import textwrap
import warnings
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from multihead import ALiBi, Attention, RelativeBias, Rotary, T5Bias, causal, dense, explain, lengths, padding, window

B, H, K, L, S, D, E = 2, 6, 3, 5, 7, 11, 66  # E = H D
OTHERS = {"head_dim": 13, "value_dim": 17, "kdim": 19, "vdim": 23, "out_dim": 29}
CALLS = ("self", "encoder-decoder", "three")
f64 = torch.float64


def draw(*shape, seed=0, dtype=f64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64).to(dtype)


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def make(seed=0, dtype=f64, **options):
    """A layer none of whose parameters is 0 or 1."""
    layer = Attention(E, H, dtype=dtype, **options)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(draw(*p.shape, seed=1000 * seed + i) * (0.2 if p.ndim > 1 else 1.0))
    return layer


def sources(call, layer=None, batch=(B,), dtype=f64, seed=50):
    """The inputs of a call: as many as it takes."""
    kdim, vdim = (layer.kdim, layer.vdim) if layer is not None else (E, E)
    x = draw(*batch, L, E, seed=seed, dtype=dtype)
    context = draw(*batch, S, kdim, seed=seed + 1, dtype=dtype)
    values = draw(*batch, S, vdim, seed=seed + 2, dtype=dtype)
    return {"self": (x,), "encoder-decoder": (x, context), "three": (x, context, values)}[call]


# The formula ----------------------------------------------------------------------------------------------------------


def linear_parts(layer):
    """Of q, k and v: (weight, bias or None), cut out of whatever projections there are."""
    p = dict(layer.named_parameters())
    q, k, v = (
        layer.num_heads * layer.head_dim,
        layer.num_kv_heads * layer.head_dim,
        layer.num_kv_heads * layer.value_dim,
    )
    if "qkv_proj.weight" in p:
        cuts = {"q": ("qkv", 0, q), "k": ("qkv", q, q + k), "v": ("qkv", q + k, q + k + v)}
    elif "kv_proj.weight" in p:
        cuts = {"q": ("q", 0, q), "k": ("kv", 0, k), "v": ("kv", k, k + v)}
    else:
        cuts = {"q": ("q", 0, q), "k": ("k", 0, k), "v": ("v", 0, v)}
    return {
        part: [p[f"{name}_proj.{kind}"][a:b] if f"{name}_proj.{kind}" in p else None for kind in ("weight", "bias")]
        for part, (name, a, b) in cuts.items()
    }


def through(x, weight, bias):
    out = torch.einsum("...i,oi->...o", x, weight)
    return out if bias is None else out + bias


def normed(x, gain):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * gain


def turned(x, positions, channels, base):
    """x (batch, heads, length, D): channel i and i + channels / 2 as one complex number, turned."""
    half = channels // 2
    angles = torch.outer(positions.to(f64), base ** (-torch.arange(half, dtype=f64) * 2 / channels))
    z = torch.complex(x[..., :half], x[..., half:channels]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag, x[..., channels:]], -1)


def formula(layer, query, key=None, value=None, keep=None, bias=0.0, turn=None, positions=None):
    """(out, weights) from the layer's parameters. keep and bias broadcast to (B, H, L, S)."""
    key = query if key is None else key
    value = key if value is None else value
    p = dict(layer.named_parameters())
    q, k, v = (
        through(x, *linear_parts(layer)[part]).unflatten(-1, (heads, -1)).transpose(1, 2)
        for part, x, heads in (
            ("q", query, layer.num_heads),
            ("k", key, layer.num_kv_heads),
            ("v", value, layer.num_kv_heads),
        )
    )
    if "q_norm.weight" in p:
        q, k = normed(q, p["q_norm.weight"]), normed(k, p["k_norm.weight"])
    if turn is not None:
        L, S = q.shape[2], k.shape[2]
        q_at, k_at = (torch.arange(S - L, S), torch.arange(S)) if positions is None else positions
        q, k = turned(q, q_at, *turn), turned(k, k_at, *turn)
    groups = torch.arange(layer.num_heads) // (layer.num_heads // layer.num_kv_heads)
    k, v = k[:, groups], v[:, groups]
    scores = torch.einsum("bhld,bhsd->bhls", q, k) * (layer.head_dim**-0.5 if layer.scale is None else layer.scale)
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    terms = torch.exp(scores + bias)
    if keep is not None:
        terms = terms * keep
    total = terms.sum(-1, keepdim=True)
    if "sinks" in p:
        total = total + torch.exp(p["sinks"])[:, None, None]
    weights = terms / torch.where(total == 0, 1.0, total)
    out = torch.einsum("bhls,bhsv->blhv", weights, v).flatten(2)
    if "gate_proj.weight" in p:
        out = out / (1 + torch.exp(-through(query, p["gate_proj.weight"], p.get("gate_proj.bias"))))
    return through(out, p["out_proj.weight"], p.get("out_proj.bias")), weights


CASES = {
    "plain": {},
    "split": {"packed": False},
    "no bias": {"bias": False},
    "no bias but out_bias": {"bias": False, "out_bias": True, "packed": False},
    "grouped": {"num_kv_heads": K},
    "grouped, split": {"num_kv_heads": K, "packed": False},
    "one key head": {"num_kv_heads": 1},
    "head_dim": {"head_dim": 13},
    "value_dim": {"value_dim": 17, "num_kv_heads": K},
    "kdim = vdim": {"kdim": 19, "vdim": 19, "num_kv_heads": K},
    "kdim = vdim, split": {"kdim": 19, "vdim": 19, "packed": False},
    "all widths": {**OTHERS, "num_kv_heads": K},
    "gate": {"gate": True, "value_dim": 17},
    "qk_norm": {"qk_norm": True, "num_kv_heads": K},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 0.8},
    "scale": {"scale": 0.1},
    "everything": {
        **OTHERS, "num_kv_heads": K, "gate": True, "qk_norm": True, "sinks": True, "softcap": 3.0, "scale": 0.4,
    },
}  # fmt: skip


def calls_of(options):
    """The call forms whose widths fit."""
    kdim, vdim = options.get("kdim", E), options.get("vdim", E)
    return [c for c in CALLS if c == "three" or (c == "encoder-decoder" and kdim == vdim) or kdim == vdim == E]


ALL = [pytest.param(name, call, id=f"{name}-{call}") for name in CASES for call in calls_of(CASES[name])]


def with_gradients(outputs, layer, inputs):
    """The outputs, and the gradients of their weighted sum to the inputs and all parameters, by name."""
    loss = sum((y * draw(*y.shape, seed=90 + i)).sum() for i, y in enumerate(outputs))
    named = {f"input {i}": x for i, x in enumerate(inputs)} | dict(layer.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()))
    return dict(enumerate(outputs)) | dict(zip(named, grads, strict=True))


def agree(layer, inputs, given, expected, atol=1e-11):
    """Gradients are sums over hundreds of terms of size 1 to 10, hence 1e-11."""
    got, want = with_gradients(given, layer, inputs), with_gradients(expected, layer, inputs)
    assert got.keys() == want.keys()
    for name in want:
        # A bias of all keys moves all scores of a row alike, which the softmax does not notice.
        assert want[name].abs().max() > 1e-3 or name == "k_proj.bias", f"{name}: nothing is tested"
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("name", "call"), ALL)
def test_formula(name, call):
    layer = make(**CASES[name])
    inputs = [x.requires_grad_() for x in sources(call, layer)]
    out, weights = layer(*inputs, weights=True)
    assert out.shape == (B, L, layer.out_dim)
    assert weights.shape == (B, H, L, L if call == "self" else S)
    if name == "plain" and call != "self":
        assert [n for n, _ in layer.named_children() if "proj" in n] == ["qkv_proj", "out_proj"]
    agree(layer, inputs, (out, weights), formula(layer, *inputs))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "split"])
def test_formula_with_masks_and_biases(call, packed):
    """The mask of the layer and of the call, with rows that see nothing; the bias of the position and of the call."""
    slopes = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]  # of ALiBi for 6 heads
    layer = make(num_kv_heads=K, mask=window(left=3, right=1), position=ALiBi(H), packed=packed)
    inputs = [x.requires_grad_() for x in sources(call)]
    S_ = inputs[-1].shape[1]
    keep, bias = draw(B, 1, L, S_, seed=60) > -0.5, draw(H, 1, S_, seed=61).requires_grad_()
    keep[0, :, 2] = False
    i, j = torch.arange(S_ - L, S_)[:, None], torch.arange(S_)
    visible = keep & (j >= i - 3) & (j <= i + 1)
    by_hand = bias - torch.tensor(slopes, dtype=f64)[:, None, None] * (i - j).abs()
    given = layer(*inputs, mask=keep, bias=bias, weights=True)
    expected = formula(layer, *inputs, keep=visible, bias=by_hand)
    assert (given[1][0, :, 2] == 0).all()
    agree(layer, [*inputs, bias], given, expected)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("given", [False, True], ids=["", "positions"])
def test_formula_with_rotary(call, given):
    layer = make(num_kv_heads=K, position=Rotary(rotary_dim=10, base=100.0), qk_norm=True, mask=causal())
    inputs = [x.requires_grad_() for x in sources(call)]
    S_ = inputs[-1].shape[1]
    places = (torch.arange(S_ - L, S_), torch.arange(S_))
    if given:
        places = (torch.tensor([3, 9, 4, 6, 11]), torch.tensor([3, 9, 4, 6, 11, 0, 5])[:S_])
    keep = places[1] <= places[0][:, None]
    positions = None if not given else places[0] if call == "self" else places
    outputs = layer(*inputs, positions=positions, weights=True)
    expected = formula(layer, *inputs, keep=keep, turn=(10, 100.0), positions=places)
    agree(layer, inputs, outputs, expected)


def test_a_bias_may_be_a_position_too():
    """It joins that of the layer."""
    both, one, none = make(position=ALiBi(H)), make(), make()
    x = sources("self")[0]
    table = RelativeBias(H, 3, dtype=f64)
    places = torch.arange(L)
    expected = none(x, bias=ALiBi(H).bias(places, places) + table.bias(places, places))
    close(both(x, bias=table), expected)
    close(one(x, bias=table), none(x, bias=table.bias(places, places)))


# One meaning ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("name", "call"), ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_asking_for_weights_changes_nothing(name, call, dtype):
    layer = make(dtype=dtype, **CASES[name])
    inputs = sources(call, layer, dtype=dtype)
    out, weights = layer(*inputs, mask=window(left=3), weights=True)
    assert torch.equal(out, layer(*inputs, mask=window(left=3)))
    assert weights.dtype == torch.float32
    total = weights.sum(-1)
    if layer.sinks is None:
        close(total, torch.ones_like(total), atol=1e-5)
    else:
        assert (total < 1 + 1e-5).all()
        assert (total < 0.9).any()


@pytest.mark.parametrize(("name", "call"), ALL)
def test_training_without_dropout_is_evaluation(name, call):
    layer = make(**CASES[name])
    inputs = sources(call, layer)
    training = layer.train()(*inputs, mask=causal(), weights=True)
    with torch.no_grad():
        evaluation = layer.eval()(*inputs, mask=causal(), weights=True)
    for a, b in zip(training, evaluation, strict=True):
        close(a, b)


@pytest.mark.parametrize(("name", "call"), ALL)
def test_unbatched_is_a_batch_of_one(name, call):
    layer = make(**CASES[name])
    inputs = sources(call, layer, batch=())
    mask = causal() & (draw(H, L, L if call == "self" else S, seed=62) > -1)
    for whole, one in zip(
        layer(*(x[None] for x in inputs), mask=mask, weights=True), layer(*inputs, mask=mask, weights=True), strict=True
    ):
        close(whole[0], one)


@pytest.mark.parametrize("call", CALLS)
def test_more_batch_axes(call):
    batch = (2, 3)
    layer = make(num_kv_heads=K, position=Rotary(10), mask=window(left=4), gate=True)
    inputs = sources(call, batch=batch)
    n = torch.tensor([[0, 1, 2], [3, 4, 5]])
    positions = torch.arange(6).view(2, 3, 1) + torch.arange(L)
    pair = positions if call == "self" else (positions, positions[..., :1] + torch.arange(S))
    outputs = layer(*inputs, mask=lengths(n), positions=pair, weights=True)
    for at in product(range(2), range(3)):
        own = pair[at] if call == "self" else (pair[0][at], pair[1][at])
        row = layer(*(x[at] for x in inputs), mask=lengths(n[at]), positions=own, weights=True)
        for whole, one in zip(outputs, row, strict=True):
            close(whole[at], one)


def test_the_same_input_three_times_is_self_attention():
    layer, x = make(num_kv_heads=K), sources("self")[0]
    assert torch.equal(layer(x, x, x), layer(x))
    close(layer(x, x.clone(), x.clone()), layer(x))
    close(layer(x, x.clone(), x), layer(x))
    close(layer(x, x, x.clone()), layer(x))


@pytest.mark.parametrize("call", CALLS)
def test_noncontiguous_inputs(call):
    layer = make(num_kv_heads=K, gate=True)
    inputs = sources(call)
    for views in (
        [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs],
        [x.mT.contiguous().mT for x in inputs],
        [torch.stack([x, x], -1)[..., 0] for x in inputs],
    ):
        assert not any(view.is_contiguous() for view in views)
        close(layer(*views), layer(*inputs))


def test_expanded_context():
    layer, x = make(num_kv_heads=K), sources("self")[0]
    context = draw(1, S, E, seed=63)
    close(layer(x, context.expand(B, -1, -1)), layer(x, context.repeat(B, 1, 1)))


@pytest.mark.parametrize(
    ("batch", "queries", "keys"),
    [((0,), L, S), ((B,), 0, S), ((B,), L, 0), ((), 0, S), ((), L, 0), ((3, 0), L, S), ((2, 3), L, 0)],
)
@pytest.mark.parametrize("mask", [None, causal()], ids=repr)
def test_empty_sizes(batch, queries, keys, mask):
    layer = make(num_kv_heads=K, sinks=True)
    x, context = draw(*batch, queries, E).requires_grad_(), draw(*batch, keys, E).requires_grad_()
    out, weights = layer(x, context, mask=mask, weights=True)
    assert out.shape == (*batch, queries, E)
    assert weights.shape == (*batch, H, queries, keys)
    if keys == 0:
        close(out, layer.out_proj.bias.expand_as(out))
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert context.grad.shape == context.shape


@pytest.mark.parametrize("mask", [None, lengths([0, 3])], ids=repr)
def test_a_sink_of_minus_infinity_is_no_sink(mask):
    layer, plain = make(sinks=True), make()
    plain.load_state_dict(layer.state_dict(), strict=False)
    torch.nn.init.constant_(layer.sinks, -math.inf)
    x = sources("self")[0].requires_grad_()
    for got, want in zip(layer(x, mask=mask, weights=True), plain(x, mask=mask, weights=True), strict=True):
        close(got, want)
    grads = [torch.autograd.grad(y(x, mask=mask).square().sum(), x)[0] for y in (layer, plain)]
    close(*grads, atol=1e-10)


def test_a_batch_of_unlike_lengths_is_each_row_alone():
    layer = make(num_kv_heads=K, position=Rotary(10), mask=causal())
    x = draw(3, S, E)
    n = [7, 4, 1]
    padded = x.clone()
    for row, length in enumerate(n):
        padded[row, length:] = math.nan
    out = layer(padded, mask=lengths(n))
    for row, length in enumerate(n):
        close(out[row, :length], layer(x[row, :length]))


@pytest.mark.parametrize("position", [None, Rotary(10), ALiBi(H)], ids=repr)
def test_padding_on_the_left_with_positions(position):
    layer = make(num_kv_heads=K, position=position, mask=causal())
    x = draw(2, S, E)
    pad = torch.tensor([3, 0])
    keep = torch.arange(S) >= pad[:, None]
    positions = torch.arange(S) - pad[:, None]
    out = layer(x.masked_fill(~keep[..., None], math.nan), mask=padding(keep), positions=positions)
    for row, start in enumerate(pad.tolist()):
        close(out[row, start:], layer(x[row, start:]))


@pytest.mark.parametrize("position", [Rotary(10), Rotary(6, interleaved=True), ALiBi(H), RelativeBias(H, 3, dtype=f64)])
@pytest.mark.parametrize("call", ["self", "encoder-decoder"])
def test_only_distances_count(position, call):
    layer = make(position=position)
    inputs = sources(call)
    S_ = inputs[-1].shape[1]
    q_at, k_at = torch.arange(S_ - L, S_), torch.arange(S_)

    def at(shift):
        return layer(*inputs, positions=q_at + shift if call == "self" else (q_at + shift, k_at + shift))

    close(at(0), layer(*inputs))
    close(at(1000), layer(*inputs), atol=1e-10)  # angles of 1000 are rounded at 1e-13
    moved = layer(*inputs, positions=(q_at + 1, k_at)) if call != "self" else layer(*inputs, positions=2 * q_at)
    assert (moved - layer(*inputs)).abs().max() > 1e-3


# Projections are modules ----------------------------------------------------------------------------------------------


def projections(layer):
    return [name for name, _ in layer.named_children() if name.endswith("_proj")]


LAYOUTS = {"packed": {}, "split": {"packed": False}, "kv": {"kdim": 19, "vdim": 19}}
LAYOUT_CALLS = (
    [("packed", c) for c in CALLS] + [("split", c) for c in CALLS] + [("kv", "encoder-decoder"), ("kv", "three")]
)


@pytest.mark.parametrize(("layout", "call"), LAYOUT_CALLS)
def test_hooks_of_every_submodule_are_called(layout, call):
    """https://github.com/pytorch/pytorch/issues/78109."""
    layer = make(num_kv_heads=K, gate=True, qk_norm=True, **LAYOUTS[layout])
    inputs = [x.requires_grad_() for x in sources(call, layer)]
    expected = layer(*inputs)
    called, seen = Counter(), Counter()
    children = dict(layer.named_children())
    for name, child in children.items():
        child.register_forward_hook(lambda *_, name=name: called.update([name]))
        child.register_full_backward_hook(lambda *_, name=name: seen.update([name]))
    out = layer(*inputs)
    close(out, expected)
    out.sum().backward()
    assert called.keys() == seen.keys() == children.keys()


EACH_PROJECTION = [
    (layout, call, name)
    for layout, call in LAYOUT_CALLS
    for name in projections(Attention(E, H, gate=True, **LAYOUTS[layout]))
]


class LowRank(nn.Module):
    """base(x) + up(down(x)), and nothing of an nn.Linear's attributes."""

    def __init__(self, base, seed=70):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(draw(2, base.in_features, seed=seed) * 0.3)
        self.up = nn.Parameter(draw(base.out_features, 2, seed=seed + 1) * 0.3)

    def forward(self, x):
        return self.base(x) + x @ self.down.mT @ self.up.mT


@pytest.mark.parametrize(("layout", "call", "name"), EACH_PROJECTION)
def test_any_projection_can_be_replaced(layout, call, name):
    """By an adapter, as PEFT does: with its effect, its gradients, and the frozen weight left alone."""
    layer = make(num_kv_heads=K, gate=True, **LAYOUTS[layout])
    inputs = sources(call, layer)
    merged, plain = copy.deepcopy(layer), layer(*inputs)
    adapter = LowRank(getattr(layer, name))
    setattr(layer, name, adapter)
    getattr(merged, name).weight.data += (adapter.up @ adapter.down).detach()
    out, weights = layer(*inputs, weights=True)
    close(out, merged(*inputs))
    close(weights, merged(*inputs, weights=True)[1])
    assert (out - plain).abs().max() > 1e-3
    out.square().sum().backward()
    assert adapter.base.weight.grad is None
    assert adapter.up.grad.abs().max() > 0
    assert adapter.down.grad.abs().max() > 0


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize(("layout", "call", "name"), EACH_PROJECTION)
@pytest.mark.parametrize("way", ["parametrize", "weight_norm", "prune"])
def test_weights_that_are_computed(layout, call, name, way):
    layer = make(num_kv_heads=K, gate=True, **LAYOUTS[layout])
    inputs, plain = sources(call, layer), copy.deepcopy(layer)
    target, weight = getattr(layer, name), getattr(plain, name).weight.data
    if way == "parametrize":
        parametrize.register_parametrization(target, "weight", Twice())
        weight *= 2
        learned = [target.parametrizations.weight.original]
    elif way == "weight_norm":
        parametrizations.weight_norm(target)
        target.parametrizations.weight.original0.data.mul_(3)  # the length of each row
        weight *= 3
        learned = [target.parametrizations.weight.original0, target.parametrizations.weight.original1]
    else:
        kept = draw(*weight.shape, seed=71) > 0
        prune.custom_from_mask(target, "weight", kept)
        weight *= kept
        learned = [target.weight_orig]
    out = layer(*inputs)
    close(out, plain(*inputs), atol=1e-10)
    out.square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in learned)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "split"])
def test_dynamic_quantisation(call, packed):
    layer = make(num_kv_heads=K, packed=packed, gate=True, mask=lengths([4, 5]), dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao announces its own end
        small = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)
        inputs = sources(call, dtype=torch.float32)
        out, exact = small(*inputs), layer(*inputs)
    assert all(isinstance(getattr(small, name), torch.ao.nn.quantized.dynamic.Linear) for name in projections(layer))
    error = (out - exact).abs().max() / exact.abs().max()
    assert 0 < error < 16 / 127  # a few steps of 1 / 127, through three products


def test_a_quantised_layer_with_a_mask_can_be_moved():
    layer = make(mask=lengths([4, 5]), dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)
    assert small.to("cpu") is small


# Layouts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": K}, {"value_dim": 17}, {"kdim": 19, "vdim": 19}, {"bias": False}], ids=repr
)
@pytest.mark.parametrize("call", CALLS)
def test_split_and_pack_keep_the_numbers(options, call):
    if "kdim" in options and call == "self":
        call = "three"
    layer = make(gate=True, qk_norm=True, **options).eval()
    before, inputs = layer(*sources(call, layer)), sources(call, layer)
    state = copy.deepcopy(layer.state_dict())
    assert layer.split_projections() is layer
    assert {"q_proj", "k_proj", "v_proj"} <= set(projections(layer))
    assert not {"qkv_proj", "kv_proj"} & set(projections(layer))
    close(layer(*inputs), before)
    other = Attention(E, H, gate=True, qk_norm=True, packed=False, dtype=f64, **options).eval()
    other.load_state_dict(layer.state_dict())
    close(other(*inputs), before)
    assert layer.pack_projections() is layer
    close(layer(*inputs), before)
    now = layer.state_dict()
    assert now.keys() == state.keys()
    assert all(torch.equal(now[name], state[name]) for name in state)
    assert not any(module.training for module in layer.modules())


@pytest.mark.parametrize("first", ["split", "pack"])
def test_layouts_keep_what_is_frozen(first):
    """Weights and biases each for itself: training biases alone is a method (BitFit)."""
    layer = make(packed=first == "split")
    for name, p in layer.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    getattr(layer, f"{first}_projections")()
    assert len(list(layer.parameters())) == (8 if first == "split" else 4)
    for name, p in layer.named_parameters():
        assert p.requires_grad == name.endswith("bias"), name


def test_what_is_partly_frozen_can_not_be_packed():
    """One tensor is trained as a whole or not at all."""
    layer = make(packed=False)
    layer.v_proj.requires_grad_(False)
    with pytest.raises(ValueError, match=r"^projections: expected all .*requires_grad.*or none, got some of both"):
        layer.pack_projections()
    assert layer.q_proj.weight.requires_grad
    assert not layer.v_proj.weight.requires_grad


def hook(layer, name):
    getattr(layer, name).register_forward_hook(lambda *_: None)


def pre_hook(layer, name):
    getattr(layer, name).register_forward_pre_hook(lambda *_: None)


def backward_hook(layer, name):
    getattr(layer, name).register_full_backward_hook(lambda *_: None)


def backward_pre_hook(layer, name):
    getattr(layer, name).register_full_backward_pre_hook(lambda *_: None)


def replace(layer, name):
    setattr(layer, name, LowRank(getattr(layer, name)))


def parametrise(layer, name):
    parametrizations.weight_norm(getattr(layer, name))


def pruned(layer, name):
    prune.random_unstructured(getattr(layer, name), "weight", 0.5)


def own_forward(layer, name):
    projection = getattr(layer, name)
    projection.forward = partial(type(projection).forward, projection)


@pytest.mark.parametrize(
    "change", [hook, pre_hook, backward_hook, backward_pre_hook, replace, parametrise, pruned, own_forward]
)
@pytest.mark.parametrize(("name", "action"), [("qkv_proj", "split"), ("k_proj", "pack")])
def test_layouts_do_not_lose_what_was_done_to_a_projection(name, action, change):
    layer = make(packed=action == "split")
    change(layer, name)
    before, children = layer.state_dict(), dict(layer.named_children())
    with pytest.raises(ValueError, match=name):
        getattr(layer, f"{action}_projections")()
    assert dict(layer.named_children()) == children
    assert layer.state_dict().keys() == before.keys()


def test_unlike_widths_can_not_be_packed():
    with pytest.raises(ValueError, match="kdim=19, vdim=23"):
        make(**OTHERS).pack_projections()


# Parameters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": K, "value_dim": 17}, {"kdim": 19, "vdim": 19}], ids=repr)
def test_packed_and_split_start_from_the_same_numbers(options):
    """https://github.com/pytorch/pytorch/issues/166378: there the law depends on the layout."""

    def made(packed):
        torch.manual_seed(3)
        return Attention(E, H, packed=packed, gate=True, **options)

    packed, split = made(None), made(False)
    again = copy.deepcopy(split)
    for layer in (packed, split):
        parts = {part: weight for part, (weight, _) in linear_parts(layer).items()}
        for part, weight in linear_parts(again).items():
            assert torch.equal(parts[part], weight[0]), part
        assert torch.equal(layer.out_proj.weight, again.out_proj.weight)
    torch.manual_seed(4)
    packed.reset_parameters()
    torch.manual_seed(4)
    split.reset_parameters()
    assert not torch.equal(split.q_proj.weight, again.q_proj.weight)
    assert torch.equal(packed.split_projections().v_proj.weight, split.v_proj.weight)


@pytest.mark.parametrize("packed", [None, False], ids=["packed", "split"])
def test_law_of_the_parameters(packed):
    """Xavier-uniform for each of q, k, v for itself: U(-a, a), a = sqrt(6 / (inputs + outputs))."""
    torch.manual_seed(5)
    layer = Attention(256, 8, num_kv_heads=2, packed=packed, gate=True, sinks=True, qk_norm=True)
    weights = {part: weight for part, (weight, _) in linear_parts(layer).items()}
    for weight in (*weights.values(), layer.out_proj.weight, layer.gate_proj.weight):
        bound = math.sqrt(6 / sum(weight.shape))
        assert weight.abs().max() <= bound
        assert weight.abs().max() > 0.99 * bound
        assert abs(weight.std().item() / (bound / math.sqrt(3)) - 1) < 0.02
    assert all((p == 0).all() for name, p in layer.named_parameters() if "bias" in name or name == "sinks")
    assert (layer.q_norm.weight == 1).all()
    assert (layer.k_norm.weight == 1).all()


def test_a_learned_position_is_drawn_anew_too():
    layer = Attention(E, H, position=T5Bias(H))
    before = layer.position.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.position.weight, before)


@pytest.mark.parametrize("name", CASES)
def test_state_dict_round_trip(name):
    layer, other = make(**CASES[name]), make(seed=1, **CASES[name])
    call = calls_of(CASES[name])[0]
    inputs, file = sources(call, layer), io.BytesIO()
    assert not torch.equal(layer(*inputs), other(*inputs))
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(layer(*inputs), other(*inputs))


@pytest.mark.parametrize("position", [None, Rotary(10), ALiBi(H), T5Bias(H, dtype=f64)])
def test_copies(position):
    layer = make(num_kv_heads=K, position=position, mask=causal() & lengths([3, 5]), gate=True, sinks=True)
    x = sources("self")[0]
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(other(x), layer(x))
        with torch.no_grad():
            other.out_proj.weight.zero_()
        assert layer.out_proj.weight.any()


def test_meta_device():
    """As large models are made: without memory, then with it, then filled."""
    options = {"num_kv_heads": K, "gate": True, "qk_norm": True, "sinks": True, "position": T5Bias(H)}
    options["mask"] = lengths([3, 5])
    layer = Attention(E, H, device="meta", **options)
    assert all(p.is_meta for name, p in layer.named_parameters() if "position" not in name)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(math.nan)
    torch.manual_seed(6)
    layer.reset_parameters()
    expected = Attention(E, H, **options | {"position": T5Bias(H)})
    torch.manual_seed(6)
    expected.reset_parameters()
    x = sources("self", dtype=torch.float32)[0]
    assert torch.equal(layer(x, mask=causal()), expected(x, mask=causal()))


@pytest.mark.parametrize("call", CALLS)
def test_shapes_on_the_meta_device(call):
    """Sizes can be tried out without computing."""
    options = {
        "num_kv_heads": K,
        "value_dim": 17,
        "out_dim": 29,
        "position": Rotary(10),
        "mask": causal(),
        "device": "meta",
    }
    layer = Attention(E, H, **options)
    inputs = [x.to("meta") for x in sources(call, dtype=torch.float32)]
    out, weights = layer(*inputs, weights=True)
    assert out.is_meta
    assert out.shape == (B, L, 29)
    assert weights.shape == (B, H, L, L if call == "self" else S)


def test_the_mask_goes_where_the_parameters_go():
    layer = make(mask=lengths([3, 5]) & causal())
    assert all(t.is_meta for t in layer.to("meta").mask.tensors().values())
    assert not layer.state_dict().keys() & {"mask"}


def test_a_layer_with_a_mask_and_another_output_projection_can_be_moved():
    layer = make(mask=lengths([3, 5]))
    layer.out_proj = LowRank(layer.out_proj)
    layer.float().to("cpu")
    assert layer(sources("self", dtype=torch.float32)[0]).dtype == torch.float32


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype(dtype):
    layer = make(dtype=dtype, num_kv_heads=K, gate=True, qk_norm=True, sinks=True, position=Rotary(10))
    exact = copy.deepcopy(layer).double()
    x = sources("self", dtype=dtype)[0]
    out, weights = layer(x, mask=causal(), weights=True)
    assert out.dtype == dtype
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    expected = exact(x.double(), mask=causal())
    # The five products in a row round once each; a head's output is of size 1, that of the layer larger.
    assert (out - expected).abs().max() <= 5 * torch.finfo(dtype).eps * expected.abs().max()


# Cost -----------------------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def linear(self):
        return sum(self.count[name] for name in ("addmm", "mm", "linear"))


@pytest.mark.parametrize(("call", "packed", "expected"), [
    ("self", True, 2), ("encoder-decoder", True, 3), ("three", True, 4), ("self", False, 4), ("three", False, 4),
])  # fmt: skip
def test_number_of_products(call, packed, expected):
    """As few as the inputs allow, the one of the output among them."""
    layer = make(packed=packed, num_kv_heads=K)
    for inputs in (sources(call), [x.requires_grad_() for x in sources(call)]):
        with Products() as products:
            layer(*inputs)
        assert products.linear == expected


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [f64, torch.float32])
def test_weights_that_nobody_asks_for_are_not_made(dtype):
    long = 600
    layer, x = make(dtype=dtype), draw(1, long, E, dtype=dtype)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for y in out if isinstance(out, tuple | list) else [out]:
                largest = max(largest, y.numel()) if isinstance(y, torch.Tensor) else largest
            return out

    with Sizes():
        layer(x)
    assert largest < long * long


def test_the_forward_can_be_read_aloud():
    tree = ast.parse(textwrap.dedent(inspect.getsource(Attention.forward)))
    function = tree.body[0]
    docstring = function.body[0]
    assert ast.get_docstring(function)
    assert function.end_lineno - (docstring.end_lineno - docstring.lineno + 1) < 40


# Dropout --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", ["dropout", "out_dropout"])
@pytest.mark.parametrize("call", CALLS)
def test_dropout_acts_in_training_only_and_repeats(rate, call):
    layer, plain = make(**{rate: 0.5}), make()
    inputs = sources(call)
    close(layer.eval()(*inputs), plain(*inputs))
    layer.train()
    runs = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        runs.append(layer(*inputs, mask=causal()))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert (runs[0] - plain(*inputs, mask=causal())).abs().max() > 1e-3


def test_dropout_of_everything():
    x = sources("self")[0]
    layer = make(dropout=1.0)
    close(layer(x), layer.out_proj.bias.expand(B, L, E))
    assert (make(out_dropout=1.0)(x) == 0).all()


def test_dropout_keeps_the_mean():
    """The kept weights are 1 / (1 - rate) times as large. 4 errors of the mean of `rows` equal rows."""
    rows, rate = 4000, 0.3
    layer = make(dropout=rate)
    x = draw(1, L, E)
    torch.manual_seed(9)
    out = layer(x.expand(rows, -1, -1))
    error = out.std(0) / math.sqrt(rows)
    assert ((out.mean(0) - layer.eval()(x)[0]).abs() < 5 * error).all()


def test_returned_weights_are_those_before_dropout():
    """https://github.com/pytorch/pytorch/issues/42929, https://github.com/pytorch/pytorch/issues/33360."""
    layer, x = make(dropout=0.5), sources("self")[0]
    torch.manual_seed(10)
    out, weights = layer(x, weights=True)
    torch.manual_seed(10)
    assert torch.equal(layer(x), out)
    close(weights, layer.eval()(x, weights=True)[1])
    close(weights.sum(-1), torch.ones(B, H, L, dtype=f64))


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("rate", ["dropout", "out_dropout"])
def test_activation_checkpointing_with_dropout(rate, reentrant):
    layer = make(num_kv_heads=K, mask=causal(), position=Rotary(10), **{rate: 0.4})
    x = sources("self")[0].requires_grad_()
    grads = []
    for function in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        layer.zero_grad()
        x.grad = None
        torch.manual_seed(11)
        function(x).square().sum().backward()
        grads.append([t.grad.clone() for t in (x, *layer.parameters())])
    for plain, again in zip(*grads, strict=True):
        close(plain, again, atol=1e-10)


# As a module of torch -------------------------------------------------------------------------------------------------


def test_repr_shows_the_configuration():
    layer = Attention(
        E, H, num_kv_heads=K, head_dim=13, value_dim=17, kdim=19, vdim=23, out_dim=29, position=ALiBi(H), sinks=True,
        gate=True, qk_norm=True, softcap=30.0, scale=0.5, mask=window(left=3, right=0), dropout=0.1, out_dropout=0.2,
    )  # fmt: skip
    for told in (
        "66, 6", "num_kv_heads=3", "head_dim=13", "value_dim=17", "kdim=19", "vdim=23", "out_dim=29", "softcap=30.0",
        "scale=0.5", "mask=window(left=3, right=0)", "dropout=0.1", "sinks=True", "position=ALiBi(num_heads=6)",
    ):  # fmt: skip
        assert told in layer.extra_repr()
    for told in ("(q_proj): Linear", "(gate_proj): Linear", "(q_norm): RMSNorm", "Dropout(p=0.2"):
        assert told in repr(layer)
    assert "None" not in Attention(E, H).extra_repr()
    assert "(position): T5Bias(num_heads=6" in repr(Attention(E, H, position=T5Bias(H)))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("call", CALLS)
def test_autocast(call):
    layer = make(num_kv_heads=K, gate=True, qk_norm=True, sinks=True, position=Rotary(10), dtype=torch.float32)
    inputs = [x.requires_grad_() for x in sources(call, dtype=torch.float32)]
    expected, weights = layer(*inputs, mask=causal(), weights=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, low_weights = layer(*inputs, mask=causal(), weights=True)
    assert out.dtype == torch.bfloat16
    assert low_weights.dtype == torch.float32
    step = torch.finfo(torch.bfloat16).eps
    assert (out - expected).abs().max() <= 8 * step * expected.abs().max()
    assert (low_weights - weights).abs().max() <= 8 * step
    out.float().square().sum().backward()
    assert all(t.grad.isfinite().all() and t.grad.any() for t in (*inputs, *layer.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_autocast_takes_inputs_of_another_dtype(dtype):
    """As they come out of the layer before, whatever the dtype of the parameters is."""
    layer, x = make(num_kv_heads=K, gate=True, dtype=torch.float32), sources("self", dtype=dtype)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), layer(x.float()))


@pytest.mark.parametrize("call", CALLS)
def test_nothing_of_the_callers_is_changed(call):
    layer = make(num_kv_heads=K, position=ALiBi(H), mask=window(left=4), qk_norm=True, gate=True, softcap=5.0)
    inputs = sources(call)
    S_ = inputs[-1].shape[1]
    keep, bias = draw(B, 1, L, S_, seed=60) > -0.5, draw(H, L, S_, seed=61)
    positions = torch.arange(L) if call == "self" else (torch.arange(L), torch.arange(S_))
    given = [
        *inputs,
        keep,
        bias,
        *(positions if isinstance(positions, tuple) else [positions]),
        *layer.state_dict().values(),
    ]
    before = [t.clone() for t in given]
    layer(*inputs, mask=keep, bias=bias, positions=positions, weights=True)[0].sum().backward()
    assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))


def test_gradients_for_each_sample():
    """vmap of grad of functional_call, as in differential privacy."""
    layer, x = make(num_kv_heads=K, position=Rotary(10), mask=causal()), draw(3, L, E)
    parameters = dict(layer.named_parameters())

    def loss(parameters, row):
        return torch.func.functional_call(layer, parameters, (row,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i in range(3):
        one = torch.func.grad(loss)(parameters, x[i])
        for name in one:
            close(each[name][i], one[name], atol=1e-10)


@pytest.mark.parametrize("call", CALLS)
def test_double_backward(call):
    """A gradient penalty: https://github.com/pytorch/pytorch/issues/116350."""
    layer = Attention(6, 2, num_kv_heads=1, dtype=f64)
    inputs = [draw(2, n, 6, seed=n).requires_grad_() for n in (2, 3, 3)[: CALLS.index(call) + 1]]
    assert torch.autograd.gradgradcheck(lambda *xs: layer(*xs), inputs, fast_mode=True)


COMPILED = {
    "causal": ({"num_kv_heads": K, "position": Rotary(10), "mask": causal()}, "self", {}),
    "masks": (
        {"position": ALiBi(H), "mask": window(left=3)},
        "three",
        {"mask": lengths([2, 4]) | dense(draw(B, 1, L, S, seed=64) > -0.5), "weights": True},
    ),
    "everything": (
        {
            "position": T5Bias(H, dtype=f64),
            "gate": True,
            "qk_norm": True,
            "sinks": True,
            "softcap": 4.0,
            "packed": False,
        },
        "encoder-decoder",
        {"mask": causal(), "positions": (torch.tensor([3, 0, 4, 1, 5]), torch.arange(S))},
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_in_one_graph(name):
    options, call, keywords = COMPILED[name]
    torch.compiler.reset()
    layer = make(**options)
    inputs = [x.requires_grad_() for x in sources(call)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out, expected = (f(*inputs, **keywords) for f in (compiled, layer))
    if not isinstance(out, tuple):
        out, expected = (out,), (expected,)
    agree(layer, inputs, out, expected)


def test_a_position_keeps_its_table():
    """It may be shared by a stack of layers, or loaded before. Only an explicit reset draws it anew."""
    table = T5Bias(3)
    torch.nn.init.constant_(table.weight, 7.0)
    layer = Attention(6, 3, position=table)
    explain({"embed_dim": 6, "num_heads": 3, "position": table}, length=5)
    assert (table.weight == 7.0).all()
    layer.reset_parameters()
    assert not (table.weight == 7.0).any()


def test_the_mask_of_a_layer_stays_on_its_device():
    layer = Attention(6, 3, mask=padding(torch.ones(5).bool())).to("meta")
    assert layer.half().mask.keep.device.type == "meta"
