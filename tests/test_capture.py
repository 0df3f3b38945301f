"""`capture`: what it sees, that it changes nothing, what it keeps; rollout, summary and the importance of heads."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import pickle

import pytest
import torch
from torch import nn

import multihead as mh
from multihead import Record, capture, head_importance
from multihead.models.gpt import GPT
from multihead.models.translator import Translator

N, L, E, H = 2, 9, 24, 4
# Bytes of q, k, v and the heads' output, and of lse, which not every kernel gives.
WITH_OR_WITHOUT_LSE = (4 * N * L * E * 4, 4 * N * L * E * 4 + N * H * L * 4)


def encoder(layers=2, swapped=False, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, **({"batch_first": True, "dropout": 0.0} | options))
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    if swapped:
        mh.swap(model)
    return model


def inputs(*shape, seed=1):
    return torch.randn(*shape or (N, L, E), generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """Attention of ours with everything on it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attn = mh.Attention(
            E, H, num_kv_heads=1, head_dim=6, position=mh.Rotary(), mask=mh.window(left=4, right=0), qk_norm=True,
            sinks=True, softcap=5.0, gate=True,
        )  # fmt: skip

    def forward(self, x):
        return self.attn(x)


# Nothing changes ------------------------------------------------------------------------------------------------------

MODELS = {
    "torch": lambda: (encoder(), (inputs(),)),
    "torch, tokens first": lambda: (encoder(batch_first=False), (inputs(L, N, E),)),
    "swapped": lambda: (encoder(swapped=True), (inputs(),)),
    "everything": lambda: (Block(), (inputs(),)),
    "gpt": lambda: (GPT(20, E, 2, H), (torch.arange(2 * L).view(2, L) % 20,)),
    "translator": lambda: (Translator(20, 20, E, 1, H), (torch.ones(2, 4).long(), torch.ones(2, 5).long())),
    "dropout": lambda: (encoder(swapped=True, dropout=0.3), (inputs(),)),
    "torch with dropout": lambda: (encoder(dropout=0.3), (inputs(),)),
}


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_are_the_same_bits(kind, mode):
    model, given = MODELS[kind]()
    model.train(mode == "train")
    found = []
    for watching in (False, True, False):
        torch.manual_seed(3)
        model.zero_grad()
        with torch.set_grad_enabled(mode != "no_grad"):
            if watching and not (mode == "no_grad" and kind.startswith("torch")):  # whose fast path calls no attention
                with capture(model) as rec:
                    out = model(*given)
                assert len(rec) >= 1
            else:
                out = model(*given)
        if mode == "train":
            out.square().sum().backward()
        found.append([out, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


@pytest.mark.parametrize("kind", [kind for kind in MODELS if "dropout" not in kind])
@pytest.mark.parametrize("grad", [True, False])
def test_the_weights_are_those_that_were_used(kind, grad):
    model, given = MODELS[kind]()
    model.eval()
    if kind.startswith("torch") and not grad:
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.set_grad_enabled(grad), capture(model) as rec:
            model(*given)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    for record in rec.values():
        assert record.check() < 1e-5, record
        assert record.shape[-3] == H
        assert not record.entropy().requires_grad


def test_the_model_is_as_it_was():
    model = encoder()
    before = [dict(vars(m)) for m in model.modules()]
    for error in (None, RuntimeError):
        try:
            with capture(model):
                model(inputs())
                if error:
                    raise error
        except RuntimeError:
            pass
    for old, module in zip(before, model.modules(), strict=True):
        assert old.keys() == vars(module).keys()
        assert all(vars(module)[key] is value or vars(module)[key] == value for key, value in old.items())


# What is seen ---------------------------------------------------------------------------------------------------------


def test_masks_of_a_call_are_in_its_record():
    model, x = encoder(1), inputs()
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    padding = torch.arange(L) >= torch.tensor([[L], [4]])
    for swapped in (False, True):
        if swapped:
            mh.swap(model)
        with capture(model) as rec:
            model(x, causal, padding, is_causal=True)
        weights = rec[0].weights()
        assert (weights.triu(1) == 0).all()
        assert (weights[1, :, :, 4:] == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(N, H, L))


def test_cross_attention_and_names():
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 16, batch_first=True), 2)
    with capture(model) as rec:
        model(inputs(N, 4, E), inputs())
    assert list(rec) == [f"layers.{i}.{name}" for i in (0, 1) for name in ("self_attn", "multihead_attn")]
    assert rec["layers.1.multihead_attn"].shape == (N, H, 4, L)
    assert rec[1] is rec["layers.0.multihead_attn"]
    assert rec[-1] is rec["layers.1.multihead_attn"]
    with capture(model, "layers.0.*") as rec:
        model(inputs(N, 4, E), inputs())
    assert list(rec) == ["layers.0.self_attn", "layers.0.multihead_attn"]
    with capture(model, lambda name, _: name.endswith("1.self_attn")) as rec:
        model(inputs(N, 4, E), inputs())
    assert list(rec) == ["layers.1.self_attn"]


def test_steps_of_decoding_and_a_shared_layer():
    model, tokens = GPT(20, E, 2, H), torch.arange(7)[None]
    cache = model.new_cache("fixed", capacity=9)
    with torch.no_grad():
        with capture(model) as rec:
            for piece in tokens.split([4, 1, 2], 1):
                model(piece, cache=cache)
        for part in cache:  # what comes next is written over what was there
            part.crop(2)
        model(tokens.flip(1)[:, :5], cache=cache)
        with capture(model) as whole:
            model(tokens)
    steps = rec.calls(0)
    assert [step.shape for step in steps] == [(1, H, 4, 4), (1, H, 1, 5), (1, H, 2, 7)]
    want = whole[0].weights()
    for step, start in zip(steps, (0, 4, 5), strict=True):  # also after the cache has gone on
        rows, S = step.shape[-2:]
        torch.testing.assert_close(step.weights(), want[..., start : start + rows, :S])
        assert step.check() < 1e-6

    attn = mh.Attention(E, H)
    with capture(nn.Sequential(attn, attn)) as rec:
        nn.Sequential(attn, attn)(inputs())
    assert len(rec.calls("0")) == 2
    assert "1" not in rec


def test_a_known_lse_answers_for_few_keys(monkeypatch):
    model, tokens = GPT(20, E, 1, H), torch.arange(2 * L).view(2, L).repeat(1, 8) % 20
    with torch.no_grad(), capture(model) as rec:
        model(tokens)
    want = rec[0].weights()
    assert rec[0]._lse is not None

    def refuse(*_, **__):
        raise AssertionError("all weights were gone through")

    monkeypatch.setattr("multihead.inspection.record.walk", refuse)
    monkeypatch.setattr("multihead.inspection.record.attention", refuse)
    torch.testing.assert_close(rec[0].mass(0), want[..., 0])
    torch.testing.assert_close(rec[0].mass([3, 7, -1]), want[..., [3, 7, -1]].sum(-1))


def test_arguments_by_position():
    torch.manual_seed(0)
    attn, x = nn.MultiheadAttention(E, H, batch_first=True), inputs()
    padding = torch.arange(L) >= torch.tensor([[L], [4]])
    with capture(attn) as rec:
        attn(x, x, x, padding, False)
    assert rec[0].check() < 1e-6
    assert (rec[0].weights()[1, :, :, 4:] == 0).all()


def test_a_bare_layer_and_captures_in_one_another():
    attn, x = mh.Attention(E, H), inputs()
    with capture(attn) as outer:
        with capture(attn) as inner:
            attn(x)
        attn(x)
    assert (len(inner.calls("")), len(outer.calls(""))) == (1, 2)
    assert attn.watcher is None


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, mh.MultiheadAttention])
def test_two_captures_of_one_model(kind):
    attn, x = kind(E, H, batch_first=True), inputs()
    with capture(attn) as outer, capture(attn, stats=["entropy"]) as inner:
        attn(x, x, x)
    assert (len(inner.calls("")), len(outer.calls(""))) == (1, 1)
    torch.testing.assert_close(outer[0].entropy(), inner[0].entropy())


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, mh.MultiheadAttention])
def test_a_copy_that_is_made_within_is_a_layer_of_its_own(kind):
    attn, x = kind(E, H, batch_first=True), inputs()
    with capture(attn) as rec:
        want = attn(x, x, x)[0]
        file = io.BytesIO()
        torch.save(attn, file)
        file.seek(0)
        copies = [copy.deepcopy(attn), pickle.loads(pickle.dumps(attn)), torch.load(file, weights_only=False)]
        for one in copies:
            torch.testing.assert_close(one(x, x, x)[0], want)
            nn.init.zeros_(one.out_proj.weight)
            nn.init.zeros_(one.out_proj.bias)
            assert not one(x, x, x)[0].any()
    assert len(rec.calls("")) == 1
    torch.testing.assert_close(attn(x, x, x)[0], want)


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, mh.MultiheadAttention])
def test_the_proof_says_when_it_can_not_be_made_any_more(kind):
    attn, x = kind(E, H, batch_first=True).eval(), inputs()
    with torch.no_grad(), capture(attn) as rec:
        attn(x, x, x)  # as a whole, of which only the output is seen
    assert rec[0].check() < 1e-6
    with torch.no_grad():
        attn.out_proj.weight.mul_(2)
    with pytest.raises(ValueError, match=r"check\(\): expected the layer's parameters as they were"):
        rec[0].check()


def test_a_capture_is_a_mapping():
    attn, x = mh.Attention(E, H), inputs()
    with capture(attn) as rec:
        attn(x)
    assert rec.get(5) is None
    assert 5 not in rec
    assert 0 in rec
    for lookup in (KeyError, IndexError):
        with pytest.raises(lookup, match="1 layers of attention ran"):
            rec[5]
    with pytest.raises(TypeError, match="key: expected a layer's name, or its place"):
        rec[0:1]


def test_mistakes_of_a_capture():
    attn = mh.Attention(E, H)
    for options, error, said in (
        ({"layers": 0}, TypeError, "layers: expected a name, several names, or a function"),
        ({"max_bytes": "1"}, TypeError, "max_bytes: expected an int"),
        ({"stats": ()}, ValueError, "stats: expected at least one name, got none"),
    ):
        with pytest.raises(error, match=said), capture(attn, **options):
            pass


def test_what_was_not_captured_is_named():
    attn, x = mh.Attention(E, H), inputs()
    with capture(attn, stats=["entropy"]) as rec:
        attn(x)
    for ask, missing in (
        (lambda: rec[0].entropy(normalized=True), "got visible_keys"),
        (lambda: rec[0].received(mean=True), "got received and seen_by"),
        (lambda: rec.rollout(), "got anything else"),
        (lambda: rec[0].row(0), "got anything else"),
    ):
        with pytest.raises(ValueError, match=f"expected what was captured, entropy, {missing}.*Name it in stats="):
            ask()


def test_a_table_counts_and_once_for_all_layers():
    model, x = nn.ModuleList([mh.Attention(E, H) for _ in range(3)]).eval(), inputs()
    table = torch.ones(L, L, dtype=torch.bool).tril()

    def run(given):
        for layer in model:
            layer(x, **given)

    with capture(model) as rec:
        run({"mask": mh.causal()})
    own = rec[0].nbytes
    assert own in WITH_OR_WITHOUT_LSE
    for given, size in (
        ({}, 0),
        ({"mask": table}, L * L),
        ({"mask": mh.causal()}, 0),
        ({"bias": table * 1.0}, 4 * L * L),
    ):
        with capture(model, max_bytes=3 * own + size) as rec:
            run(given)
        assert rec[0].nbytes == own + size
        with pytest.raises(RuntimeError, match="max_bytes"), capture(model, max_bytes=3 * own + size - 1):
            run(given)


def test_what_is_kept_is_what_is_asked_for():
    model, x = encoder(swapped=True), inputs()
    with capture(model) as rec:
        model(x)
    with capture(model, stats=("entropy", "max_logit")) as small:
        model(x)
    assert small[0].nbytes == 2 * N * H * L * 4
    assert rec[0].nbytes in WITH_OR_WITHOUT_LSE
    for name in ("entropy", "max_logit"):
        torch.testing.assert_close(getattr(small[1], name)(), getattr(rec[1], name)())
    for ask in (
        lambda r: r.received(),
        lambda r: r.mass(0),
        lambda r: r.row(0),
        lambda r: r.check(),
        lambda r: r.weights(),
    ):
        with pytest.raises(ValueError, match=r"what was captured, entropy, max_logit"):
            ask(small[0])
    assert "entropy" in repr(small[0])


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
def test_nothing_to_watch():
    with (
        pytest.raises(ValueError, match=r"got Linear. For other attention make a Record\(q, k"),
        capture(nn.Linear(2, 2)),
    ):
        pass
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module"), capture(3):
        pass
    told = r"layers: expected the name of a layer of attention, got 'decoder.*There are"
    with pytest.raises(ValueError, match=told), capture(encoder(), "decoder.*"):
        pass
    with pytest.raises(TypeError, match=r"layers: expected a name"), capture(encoder(), [3]):
        pass
    with pytest.raises(ValueError, match=r"a function that says True"), capture(encoder(), lambda *_: False):
        pass
    with pytest.raises(ValueError, match=r"statistic: expected one of entropy"), capture(encoder(), stats=["entropi"]):
        pass
    with pytest.raises(TypeError, match=r"stats: expected names"), capture(encoder(), stats="entropy"):
        pass
    for kind in (nn.MultiheadAttention, mh.MultiheadAttention):
        for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
            told = r"layers without add_bias_kv and add_zero_attn, got ''"
            with pytest.raises(ValueError, match=told), capture(kind(E, H, **options)):
                pass
    with pytest.raises(ValueError, match=r"one that is not compiled"), capture(torch.compile(encoder())):
        pass


def test_nothing_was_called():
    model = encoder().eval()
    told = r"none of 'layers.0.self_attn', .* was called.*swap"
    with pytest.raises(RuntimeError, match=told), torch.no_grad(), capture(model):
        model(inputs())
    with pytest.raises(RuntimeError, match=r"was called"), capture(encoder()):
        pass
    with pytest.raises(ZeroDivisionError), capture(encoder()):  # what went wrong is what is told
        1 / 0  # noqa: B018


def test_too_much_to_keep():
    model = encoder(swapped=True)
    told = r"more than max_bytes=10,000 to keep, at layer 'layers.1.self_attn'"
    with pytest.raises(RuntimeError, match=told), capture(model, max_bytes=10_000):
        model(inputs())
    assert all(m.watcher is None for m in model.modules() if isinstance(m, mh.MultiheadAttention))


def test_keys_that_are_not_there():
    model = encoder(swapped=True)
    with capture(model) as rec:
        model.layers[0].self_attn(*[inputs()] * 3)
        with pytest.raises(KeyError, match=r"'layers.1.self_attn' was not called"):
            rec["layers.1.self_attn"]
        with pytest.raises(KeyError, match=r"'layers.7' was not watched; there are 'layers.0.self_attn'"):
            rec["layers.7"]
        with pytest.raises(IndexError, match=r"1 layers of attention ran"):
            rec[1]


# Over layers ----------------------------------------------------------------------------------------------------------


def test_rollout():
    model, x = encoder(3, swapped=True), inputs()
    with capture(model) as rec:
        model(x)
    want = torch.eye(L).expand(N, L, L)
    for record in rec.values():
        want = (0.5 * record.weights().mean(1) + 0.5 * torch.eye(L)) @ want
    torch.testing.assert_close(rec.rollout(), want)
    torch.testing.assert_close(rec.rollout(0), want[:, :1])
    torch.testing.assert_close(rec.rollout([3, -1]), want[:, [3, -1]])
    torch.testing.assert_close(rec.rollout().sum(-1), torch.ones(N, L))
    first = rec[2].weights().mean(1) @ rec[1].weights().mean(1) @ rec[0].weights().mean(1)
    torch.testing.assert_close(rec.rollout(residual=0), first)
    with pytest.raises(ValueError, match=r"residual: expected a number from 0, below 1"):
        rec.rollout(residual=1)
    decoder = Translator(20, 20, E, 1, H)
    with capture(decoder) as rec:
        decoder(torch.ones(2, 4).long(), torch.ones(2, 5).long())
    with pytest.raises(ValueError, match=r"self-attention of one batch and"):
        rec.rollout()


def test_summary():
    model, tokens = GPT(20, E, 2, H), torch.arange(2 * L).view(2, L) % 20
    with capture(model) as rec:
        model(tokens)
    summary = rec.summary()
    assert [(row["layer"], row["head"]) for row in summary.rows] == [
        (f"blocks.{i}.attn", h) for i in (0, 1) for h in range(H)
    ]
    for row in summary.rows:
        record = rec[row["layer"]]
        of_head = {
            "entropy": record.entropy(), "evenness": record.entropy(True), "max weight": record.max_weight(),
            "first token": record.mass(0), "distance": record.distance(),
        }  # fmt: skip
        for name, found in of_head.items():
            assert row[name] == pytest.approx(found[:, row["head"]].nanmean().item(), rel=1e-4, abs=1e-6)
        assert row["max logit"] == pytest.approx(record.max_logit()[:, row["head"]].max().item(), rel=1e-5)
        assert row["previous"] == pytest.approx(record.pattern("previous")[:, row["head"]].mean().item(), rel=1e-4)
    assert json.loads(json.dumps(summary.to_dict())) == summary.rows
    lines = list(csv.DictReader(io.StringIO(summary.to_csv())))
    assert [line["layer"] for line in lines] == [row["layer"] for row in summary.rows]
    assert str(summary).splitlines()[0].split()[:3] == ["layer", "head", "entropy"]
    assert len({len(line) for line in str(summary).splitlines()}) == 1


def test_importance_of_heads():
    """Against what the loss does when a head is turned down a little."""
    torch.manual_seed(0)
    model, batches = GPT(20, E, 2, H).double(), [torch.arange(2 * L).view(2, L) % 20, torch.arange(L)[None] * 3 % 20]

    def loss_fn(model, tokens):
        return nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )

    found = head_importance(model, loss_fn, batches, normalize=False)
    assert list(found) == ["blocks.0.attn", "blocks.1.attn"]
    D = E // H
    for name, importance in found.items():
        out_proj, wants = model.get_submodule(name).out_proj, []
        for head in range(H):
            total = 0.0
            for row in (row[None] for batch in batches for row in batch):
                losses = []
                for factor in (1 + 1e-5, 1 - 1e-5):
                    scale = torch.ones(E, dtype=torch.float64)
                    scale[head * D : (head + 1) * D] = factor
                    hook = out_proj.register_forward_pre_hook(lambda _, given, scale=scale: (given[0] * scale,))
                    losses.append(loss_fn(model, row).item())
                    hook.remove()
                total += abs(losses[0] - losses[1]) / 2e-5
            wants.append(total / 3)
        torch.testing.assert_close(importance.double(), torch.tensor(wants, dtype=torch.float64), rtol=1e-4, atol=1e-6)
    for importance in head_importance(model, loss_fn, batches).values():
        assert importance.norm().item() == pytest.approx(1)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_importance_refuses():
    loss_fn = lambda model, x: model(x).sum()  # noqa: E731
    with pytest.raises(ValueError, match=r"Call multihead.swap"):
        head_importance(encoder(), loss_fn, [inputs()])
    with pytest.raises(ValueError, match=r"at least one batch"):
        head_importance(encoder(swapped=True), loss_fn, [])
    with pytest.raises(ValueError, match=r"a loss with a gradient"):
        head_importance(encoder(swapped=True), lambda model, x: model(x).detach().sum(), [inputs()])


def test_a_model_of_another_library():
    """Its q and k are enough."""
    q, k, v = torch.randn(3, 1, 4, 10, 8).unbind()
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    record = Record(q, k, v, mask=mh.causal(), out=out)
    assert record.check() < 1e-5
    assert record.entropy()[0, :, 0].abs().max() < 1e-6
    assert not math.isnan(record.similarity().sum())
