"""The drop-in where it is used: nested tensors, torch's own transformer layers, empty inputs; what it makes on the way
and what callers are told."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import multihead as mh
from multihead import MultiheadAttention
from test_drop_in import MODES, build, close, draw, f64

X = draw(2, 5, 12)
nested_warnings = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:.*nested.*:UserWarning"
)
every_layout = pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)


def make(**options):
    return build(12, 3, **{"batch_first": True, **options})


class Watch(TorchDispatchMode):
    """How many operations run, and the largest tensor that one of them gives."""

    def __init__(self):
        super().__init__()
        self.ops, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        out = func(*args, **(kwargs or {}))
        self.ops.append(str(func))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return out


# Nested tensors -------------------------------------------------------------------------------------------------------

ROWS = [draw(n, 12, seed=n) for n in (3, 5, 1)]
OTHERS = [draw(n, 12, seed=10 + n) for n in (4, 2, 6)]


def nested(rows, layout, **options):
    return torch.nested.nested_tensor(rows, layout=layout, **options)


@nested_warnings
@every_layout
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"rope_theta": 99.0}, {"num_kv_heads": 1}, {"gate": True}],
    ids=str,
)
def test_each_row_is_as_if_alone(options, mode, layout):
    """https://github.com/pytorch/pytorch/issues/153472, 125214; causal between rows of different length too."""
    layer = make(**options).train(MODES[mode][0])
    with torch.set_grad_enabled(MODES[mode][1]):
        for call, others in itertools.product(({}, {"need_weights": False}, {"is_causal": True}), (None, OTHERS)):
            query = nested(ROWS, layout)
            key = query if others is None else nested(others, layout)
            out, weights = layer(query, key, key, **call)
            assert out.is_nested
            assert out.layout == layout
            for row, total in zip(ROWS, (query + out).unbind(), strict=True):
                assert total.shape == row.shape
            S = max(len(row) for row in others or ROWS)
            for i, (a, b) in enumerate(zip(ROWS, others or ROWS, strict=True)):
                want, alone = layer(a, *[a if others is None else b] * 2, **call)
                close(out.unbind()[i], want, f"row {i}")
                if weights is not None:
                    seen = weights[i, : len(a)]
                    close(torch.cat([seen[:, : len(b)], seen[:, S:]], -1), alone, f"weights of row {i}")
                    assert not seen[:, len(b) : S].any()


@nested_warnings
@every_layout
def test_padding_in_the_weights_of_nested_tensors_is_zero(layout):
    query = nested(ROWS, layout)
    weights = make()(query, query, query)[1]
    assert weights.shape == (3, 5, 5)
    for i, row in enumerate(ROWS):
        assert not weights[i, :, len(row) :].any()
        assert not weights[i, len(row) :].any()


@nested_warnings
@every_layout
def test_gradients_of_nested_tensors(layout):
    layer, twin = make(), make()
    leaf = nested(ROWS, layout, requires_grad=True)
    out = layer(leaf, leaf, leaf, need_weights=False)[0]
    sum(row.square().sum() for row in out.unbind()).backward()
    rows = [row.clone().requires_grad_() for row in ROWS]
    sum(twin(row, row, row)[0].square().sum() for row in rows).backward()
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        close(a.grad, b.grad)
    for a, b in zip(leaf.grad.unbind(), rows, strict=True):
        close(a, b.grad)


@nested_warnings
def test_nested_inputs_that_do_not_fit():
    layer, j = make(), torch.jagged
    good, other = nested(ROWS, j), nested(OTHERS, j)
    for call, name in (
        (lambda: layer(good, good, good, key_padding_mask=torch.zeros(3, 5, dtype=torch.bool)), "key_padding_mask"),
        (lambda: layer(good, good, draw(3, 5, 12)), "value"),
        (lambda: layer(good, good, other), "value"),
        (lambda: layer(good, *[nested(OTHERS[:2], j)] * 2), "key"),
        (lambda: make(batch_first=False)(good, good, good), "batch_first"),
        (lambda: layer(*[nested([draw(3, 11), draw(2, 11)], j)] * 3), "query"),
        (lambda: layer(*[nested([draw(2, 12), draw(2, 13)], torch.strided)] * 3), "query"),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"^{name}: expected"):
            call()


# In torch's own layers ------------------------------------------------------------------------------------------------


@nested_warnings
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_torch_s_encoder_calls_us_and_agrees(padded, norm_first, mode, monkeypatch):
    """Its eval path reads the weights and calls nobody. Counted in the class: a hook would make it call.
    https://github.com/pytorch/pytorch/issues/99282"""
    plain = nn.TransformerEncoderLayer(12, 2, 16, 0.0, batch_first=True, norm_first=norm_first, dtype=f64)
    model = nn.TransformerEncoder(plain, 2, enable_nested_tensor=not norm_first).train(MODES[mode][0])
    hidden = torch.arange(5) >= torch.tensor([[5], [3]])
    masks = {"src_key_padding_mask": hidden} if padded else {}
    want = model.train()(X, **masks)
    model.train(MODES[mode][0])
    calls, forward = [], MultiheadAttention.forward
    monkeypatch.setattr(MultiheadAttention, "forward", lambda *a, **k: (calls.append(1), forward(*a, **k))[1])
    for layer in model.layers:
        ours = MultiheadAttention(12, 2, batch_first=True, dtype=f64).train(MODES[mode][0])
        ours.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = ours
    with torch.set_grad_enabled(MODES[mode][1]):
        out = model(X, **masks)
    assert len(calls) == 2
    keep = ~hidden if padded else torch.ones_like(hidden)
    close(out[keep], want[keep])
    with torch.set_grad_enabled(MODES[mode][1]):
        causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=f64)
        moved = [model(x, mask=causal, is_causal=True)[:, 0] for x in (X, torch.cat([X[:, :1], -X[:, 1:]], 1))]
    close(moved[0], moved[1], "the first token saw a later one")


# Nothing to attend to -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, 4, 5), (2, 0, 5), (2, 4, 0), (0, 0, 0), (0, 5, 5), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"batch_first": False}], ids=str)
def test_empty_inputs(options, sizes):
    """https://github.com/pytorch/pytorch/issues/107084"""
    layer, (N, L, S) = make(**options), sizes
    shapes = [(N, n, 12) if layer.batch_first else (n, N, 12) for n in (L, S)]
    x = torch.randn(shapes[0], dtype=f64, requires_grad=True)
    context = x if L == S else torch.randn(shapes[1], dtype=f64)
    more = 1 if "add_bias_kv" in options else 0
    calls = (
        {}, {"need_weights": False}, {"is_causal": True}, {"average_attn_weights": False},
        {"attn_mask": torch.zeros(L, S), "key_padding_mask": torch.zeros(N, S, dtype=torch.bool), "is_causal": True},
    )  # fmt: skip
    for mode, call in itertools.product(MODES, calls):
        layer.train(MODES[mode][0])
        with torch.set_grad_enabled(MODES[mode][1]):
            out, weights = layer(x, context, context, **call)
        assert out.shape == x.shape
        assert out.isfinite().all()
        if weights is not None:
            heads = () if call.get("average_attn_weights", True) else (3,)
            assert weights.shape == (N, *heads, L, S + more)
        if S == 0 and not more:
            close(out, layer.out_proj.bias.expand_as(out))
        if out.requires_grad:
            layer.zero_grad()
            out.sum().backward()
            assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("kind", ["bool", "-inf", "finfo.min"])
def test_rows_that_see_nothing(kind, options):
    """https://github.com/pytorch/pytorch/issues/41508, 24816, 160064"""
    low = {"-inf": -torch.inf, "finfo.min": torch.finfo(torch.float32).min}
    hidden = torch.tensor([[False] * 5, [True] * 5])
    padding = hidden if kind == "bool" else torch.zeros(2, 5).masked_fill(hidden, low[kind])
    layer = make(**options)
    for mode, look in itertools.product(MODES, (None, True, False)):
        layer.train(MODES[mode][0])
        x = X.clone().requires_grad_()
        with torch.set_grad_enabled(MODES[mode][1]):
            call = {"need_weights": look is not None, "average_attn_weights": bool(look)}
            out, weights = layer(x, x, x, key_padding_mask=padding, **call)
        assert out.isfinite().all()
        if look is not None:
            assert weights.isfinite().all()
            assert not weights[1, ..., :5].any()
        if not options:
            close(out[1], layer.out_proj.bias.expand(5, 12))
        if out.requires_grad:
            layer.zero_grad()
            (out.square().sum() + (0 if weights is None else weights.square().sum())).backward()
            assert all(p.grad.isfinite().all() for p in layer.parameters())
            assert x.grad.isfinite().all()


# What is made on the way ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_nothing_of_the_size_of_the_scores_is_made(options, recorded):
    """Two masks were multiplied out over heads: https://github.com/pytorch/pytorch/issues/97128"""
    N, H, L, E = 4, 8, 192, 16
    layer, x = build(E, H, batch_first=True, dtype=torch.float32, **options).eval(), draw(N, L, E, dtype=torch.float32)
    later = torch.ones(L, L, dtype=torch.bool).triu(1)
    padding = torch.arange(L) >= torch.tensor([192, 100, 7, 150])[:, None]
    ours = N * L * 3 * E  # q, k and v
    for call, most in (
        ({}, ours),
        ({"is_causal": True}, ours),
        ({"key_padding_mask": padding}, ours),
        ({"attn_mask": later}, L * L + ours),
        ({"attn_mask": later, "key_padding_mask": padding}, N * L * L),
        ({"attn_mask": later.float(), "key_padding_mask": padding.float(), "is_causal": True}, N * L * L),
    ):
        with torch.set_grad_enabled(recorded), Watch() as watch:
            layer(x, x, x, need_weights=False, **call)
        assert 0 < watch.largest <= most, f"{list(call)}: {watch.largest / (L * L):.3g} x L x S"


# What callers are told ------------------------------------------------------------------------------------------------

F = torch.zeros
BIAS = F(5, 5)
LATE = {"attn_mask": F(4, 5)}
MISTAKES = [
    ("query", (1, X, X), {}), ("key", (X, None, X), {}), ("value", (X, X, "x"), {}), ("query", (X[None],) * 3, {}),
    ("query", (X[0, 0],) * 3, {}), ("query", (X[..., :5], X, X), {}), ("key", (X, X[..., :5], X), {}),
    ("value", (X, X, X[..., :5]), {}), ("key", (X, X[:1], X[:1]), {}), ("value", (X, X, X[:, :3]), {}),
    ("key", (X, X[0], X[0]), {}), ("query", (X.float(),) * 3, {}), ("key", (X, X.float(), X), {}),
    ("query", (X.long(),) * 3, {}), ("query", (X.to("meta"), X, X), {}),
    ("need_weights", (X,) * 3, {"need_weights": 1}),
    ("need_weights", (X,) * 3, {"need_weights": None}),
    ("average_attn_weights", (X,) * 3, {"average_attn_weights": "a"}),
    ("is_causal", (X,) * 3, {"is_causal": 1}), ("is_causal", (X,) * 3, {"is_causal": None}),
    ("attn_mask", (X,) * 3, {"attn_mask": [1]}), ("attn_mask", (X,) * 3, {"attn_mask": F(5, 5).long()}),
    ("attn_mask", (X,) * 3, {"attn_mask": F(5, 5, dtype=torch.complex64)}), ("attn_mask", (X,) * 3, LATE),
    ("attn_mask", (X,) * 3, {"attn_mask": F(4, 5, 5)}), ("attn_mask", (X,) * 3, {"attn_mask": F(2, 2, 5, 5)}),
    ("attn_mask", (X,) * 3, {"attn_mask": F(5)}), ("attn_mask", (X,) * 3, {"attn_mask": mh.causal()}),
    ("attn_mask", (X,) * 3, {"attn_mask": F(5, 5, device="meta")}),
    ("key_padding_mask", (X,) * 3, {"key_padding_mask": F(5, 2).bool()}),
    ("key_padding_mask", (X,) * 3, {"key_padding_mask": F(2, 1, 5)}),
    ("key_padding_mask", (X,) * 3, {"key_padding_mask": F(2, 5).int()}),
    ("key_padding_mask", (X,) * 3, {"key_padding_mask": F(5).bool()}),
    ("key_padding_mask", (X[0],) * 3, {"key_padding_mask": F(1, 5).bool()}),
    ("key_padding_mask", (X,) * 3, {"key_padding_mask": "a", "attn_mask": F(5, 5)}),
    ("mask", (X,) * 3, {"mask": F(5, 5)}), ("mask", (X,) * 3, {"mask": F(4, 5).bool()}),
    ("bias", (X,) * 3, {"bias": F(5, 4)}), ("bias", (X,) * 3, {"bias": F(5, 5).bool()}),
    ("bias", (X,) * 3, {"bias": mh.Rotary()}), ("positions", (X,) * 3, {"positions": torch.arange(4)}),
    ("positions", (X, X.clone(), X), {"positions": torch.arange(5)}), ("positions", (X,) * 3, {"positions": [1]}),
    ("attn_mask", (X,) * 3, {"mask": mh.causal(), "bias": F(5, 5), **LATE}),
    ("attn_mask", (X,) * 3, {"key_padding_mask": F(2, 5).bool(), **LATE}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_mistake_is_named_before_any_work(number):
    """https://github.com/pytorch/pytorch/issues/28884, 29520"""
    name, inputs, call = MISTAKES[number]
    layer = make()
    with Watch() as watch, pytest.raises((ValueError, TypeError), match=rf"^{name}: expected .*, got "):
        layer(*inputs, **call)
    assert not watch.ops, f"{name}: {watch.ops} ran first"


def test_the_check_comes_first_with_two_biases_too():
    layer = make(position=mh.ALiBi(3))
    with Watch() as watch, pytest.raises(ValueError, match=r"^attn_mask: expected"):
        layer(X, X, X, bias=BIAS, **LATE)
    assert not watch.ops


def test_the_words_of_torch_do_not_contradict_the_shape():
    with pytest.raises(ValueError, match="key_padding_mask") as caught:
        make()(X, X, X, key_padding_mask=F(5, 2).bool())
    assert "or 2-D but found 2-D" not in str(caught.value)
