"""The GPT: its forms, what a token sees, caches and padding, how it starts, what it refuses."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from multihead import Llama3Scaling, Rotary, YarnScaling
from multihead.models.gpt import GPT, loss_of

V, E, H = 23, 24, 4  # vocabulary, width, heads

FORMS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "gpt2": {"position": "learned", "context": 17, "mlp": "gelu_tanh"},
    "llama": {"mlp": "swiglu", "norm": "rms", "bias": False, "kv_heads": 2, "tied": False},
    "qwen2": {"mlp": "swiglu", "norm": "rms", "bias": False, "attn_bias": True, "out_bias": False, "kv_heads": 1},
    "wide": {"head_dim": 10, "hidden": 31, "rope_theta": 500.0, "rope_scaling": Llama3Scaling(4.0, original_length=7)},
    "learned, grouped": {"position": "learned", "context": 13, "kv_heads": 2, "head_dim": 5},
}
both_positions = pytest.mark.parametrize("form", ["llama", "learned, grouped"])
every_form = pytest.mark.parametrize("form", FORMS)


def made(form: str = "rotary", layers: int = 2, **changes: Any) -> GPT:
    torch.manual_seed(5)
    model = GPT(V, E, layers, H, **(FORMS[form] | changes)).double()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and gains that differ from what they start as
            torch.nn.init.normal_(parameter, mean=0.5)
    return model


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(3))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


# What it computes -----------------------------------------------------------------------------------------------------


def by_hand(model: GPT, tokens: Tensor) -> Tensor:
    """The model in plain operations, from its config and state dict."""
    told, w, L = model.config, model.state_dict(), tokens.shape[1]
    D = told["head_dim"] or E // H

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        if told["norm"] == "rms":
            return x / (x.pow(2).mean(-1, keepdim=True) + told["norm_eps"]).sqrt() * w[f"{name}.weight"]
        return F.layer_norm(x, (E,), w[f"{name}.weight"], w.get(f"{name}.bias"), told["norm_eps"])

    x = w["embedding.weight"][tokens]
    if told["position"] == "learned":
        x = x + w["position_embedding.weight"][:L]
    for i in range(told["layers"]):
        y = linear(f"blocks.{i}.attn.qkv_proj", norm(f"blocks.{i}.attn_norm", x))
        q, k, v = y.unflatten(-1, (-1, D)).transpose(1, 2).split([H, told["kv_heads"], told["kv_heads"]], 1)
        if told["position"] == "rotary":
            scaling = made_scaling(told["rope_scaling"])
            q, k = Rotary(base=told["rope_theta"], scaling=scaling).rotate(q, k, torch.arange(L), torch.arange(L))
        k, v = (part.repeat_interleave(H // told["kv_heads"], 1) for part in (k, v))
        scores = q @ k.mT / math.sqrt(D)
        weights = scores.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
        x = x + linear(f"blocks.{i}.attn.out_proj", (weights @ v).transpose(1, 2).flatten(-2))
        y, name = norm(f"blocks.{i}.mlp_norm", x), f"blocks.{i}.mlp"
        up = linear(f"{name}.up_proj", y)
        if told["mlp"] == "swiglu":
            gate = linear(f"{name}.gate_proj", y)
            y = gate / (1 + (-gate).exp()) * up
        elif told["mlp"] == "gelu_tanh":
            y = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        else:
            y = 0.5 * up * (1 + torch.erf(up / math.sqrt(2)))
        x = x + linear(f"{name}.down_proj", y)
    return norm("norm", x) @ w["embedding.weight" if told["tied"] else "head.weight"].mT


def made_scaling(told: dict[str, Any] | None) -> Llama3Scaling | None:
    return None if told is None else Llama3Scaling(**{name: value for name, value in told.items() if name != "kind"})


@every_form
def test_every_form_is_what_its_config_says(form: str):
    model, tokens = made(form), some_tokens(3, 11)
    close(model(tokens), by_hand(model, tokens))


@every_form
def test_a_token_sees_only_those_before_it(form: str):
    model, tokens = made(form), some_tokens(3, 13)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % V
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert all(not torch.equal(before[:, i], after[:, i]) for i in range(7, 13))


def test_biases_are_where_they_are_asked_for():
    def biased(**options: Any) -> set[str]:
        names = dict(GPT(V, E, 1, H, **options).named_parameters())
        return {name.split(".", 2)[-1].removesuffix(".bias") for name in names if name.endswith("bias")}

    mlp, norms, attn, out = (
        {"mlp.up_proj", "mlp.down_proj"},
        {"attn_norm", "mlp_norm", "bias"},
        "attn.qkv_proj",
        "attn.out_proj",
    )
    assert biased() == {*mlp, *norms, attn, out}
    assert biased(norm="rms") == {*mlp, attn, out}
    assert biased(bias=False) == set()
    assert biased(bias=False, attn_bias=True) == {attn, out}
    assert biased(bias=False, attn_bias=True, out_bias=False) == {attn}
    assert biased(attn_bias=False, norm="rms", mlp="swiglu") == {*mlp, "mlp.gate_proj"}


def test_the_usual_hidden_width():
    assert GPT(V, E, 1, H).config["hidden"] == 96
    model = GPT(V, 28, 1, 2, mlp="swiglu")
    assert model.config["hidden"] == 80  # 8/3 of 28 is 74.7
    assert model.blocks[0].mlp.gate_proj.weight.shape == (80, 28)


def test_a_tied_head_is_the_embedding():
    tied, untied = GPT(V, E, 1, H), GPT(V, E, 1, H, tied=False)
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == V * E
    tied(some_tokens(1, 3)).sum().backward()
    assert (tied.embedding.weight.grad[V - 1] != 0).any()  # a token that is not in the input


def test_the_last_logits_alone():
    model, tokens = made(), some_tokens(3, 11)
    close(model(tokens, last=True), model(tokens)[:, -1:])
    assert model(tokens, last=True).shape == (3, 1, V)


def test_loss_is_the_mean_over_tokens():
    model, tokens, targets = made(), some_tokens(3, 11), some_tokens(3, 11).flip(1)
    logs = model(tokens).log_softmax(-1)
    told = sum(logs[b, i, targets[b, i]].item() for b in range(3) for i in range(11)) / 33
    assert loss_of(model, tokens, targets).item() == pytest.approx(-told, rel=1e-12)


def test_tokens_may_be_of_32_bits():
    model, tokens = made(), some_tokens(3, 11)
    assert torch.equal(model(tokens.int()), model(tokens))


def test_it_can_be_differentiated_as_a_function():
    model, tokens = made(layers=1), some_tokens(3, 5)
    state = dict(model.named_parameters())

    def loss(state: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, state, (row[None],)).logsumexp(-1).sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(state, tokens)["norm.weight"]  # of each row
    expected = torch.autograd.grad(loss(state, tokens[1]), model.norm.weight)[0]
    close(each[1], expected)


def test_it_is_compiled_in_one_graph():
    torch.compiler.reset()
    model, tokens = made("learned, grouped", layers=1), some_tokens(2, 5)
    close(torch.compile(model, fullgraph=True, backend="aot_eager")(tokens), model(tokens))


# Caches and padding ---------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("storage", ["growing", "fixed"])
def test_chunks_with_a_cache_are_the_whole(form: str, storage: str):
    model, tokens = made(form).requires_grad_(False), some_tokens(3, 13)
    cache = model.new_cache(storage, **({"capacity": 13} if storage == "fixed" else {}))
    assert len(cache) == 2
    chunks = [model(chunk, cache=cache) for chunk in tokens.split([5, 1, 1, 4, 2], 1)]
    close(torch.cat(chunks, 1), model(tokens))
    assert [part.length for part in cache] == [13, 13]


@both_positions
@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_padding_changes_nothing(form: str, side: str):
    model, lengths = made(form).requires_grad_(False), [4, 9, 1]
    rows = [some_tokens(9)[:n] for n in lengths]
    order = torch.stack([torch.arange(9)] * 3)
    keep = order < torch.tensor(lengths)[:, None]
    if side == "left":
        keep = keep.flip(1)
    if side == "between":
        keep = keep[:, torch.tensor([0, 4, 1, 5, 6, 2, 7, 3, 8])]
    tokens = torch.full((3, 9), V - 1)
    for i, row in enumerate(rows):
        tokens[i, keep[i]] = row
    cache = model.new_cache()
    cached = torch.cat([model(tokens[:, a:b], cache=cache, keep=keep[:, a:b]) for a, b in ((0, 6), (6, 7), (7, 9))], 1)
    for logits in (model(tokens, keep=keep), cached):
        assert logits.isfinite().all()
        for i, row in enumerate(rows):
            close(logits[i, keep[i]], model(row[None])[0])


@both_positions
def test_rows_of_different_lengths_go_on_from_a_cache(form: str):
    model = made(form).requires_grad_(False)
    keep = torch.tensor([[False, False, True], [True, True, True]])
    tokens, more = some_tokens(2, 3), some_tokens(2, 5)
    cache = model.new_cache()
    model(tokens, cache=cache, keep=keep)
    logits = model(more, cache=cache)
    for i in range(2):
        close(logits[i], model(torch.cat([tokens[i, keep[i]], more[i]])[None])[0, -5:])


def test_padding_may_lie_beyond_the_learned_positions():
    model = made("learned, grouped").requires_grad_(False)  # 13 positions
    tokens, keep = some_tokens(2, 20), torch.ones(2, 20, dtype=torch.bool)
    keep[0, 13:] = False
    keep[1, :9] = False
    close(model(tokens, keep=keep)[0, :13], model(tokens[:1, :13])[0])
    close(model(tokens, keep=keep)[1, 9:], model(tokens[1:, 9:])[0])
    keep[1, 5:] = True
    with pytest.raises(ValueError, match=r"tokens: expected at most 13 positions, the context, got 15\. There is no"):
        model(tokens, keep=keep)


def test_no_rows_have_no_positions():
    model = made("learned, grouped").requires_grad_(False)  # 13 positions
    tokens = torch.zeros(0, 20, dtype=torch.int64)
    assert model(tokens, keep=torch.ones(0, 20, dtype=torch.bool)).shape == (0, 20, V)


def test_a_row_may_be_full_while_another_goes_on():
    model = made("learned, grouped").requires_grad_(False)  # 13 positions
    tokens, keep = some_tokens(2, 15), torch.ones(2, 15, dtype=torch.bool)
    keep[0, 13:] = False
    keep[1, :9] = False
    cache = model.new_cache()
    logits = [model(tokens[:, at], cache=cache, keep=keep[:, at]) for at in (slice(0, 13), slice(13, 15))]
    close(logits[1][1], model(tokens[1:, 9:])[0, 4:])
    keep[0, 13:] = True
    with pytest.raises(ValueError, match="tokens: expected at most 13 positions, the context, got 15"):
        model(tokens[:, 13:], cache=cache, keep=keep[:, 13:])


# How it starts --------------------------------------------------------------------------------------------------------


def test_how_it_starts():
    torch.manual_seed(0)
    model = GPT(300, 64, 8, 4, position="learned", context=200, mlp="swiglu", tied=False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            adds = "out_proj" in name or "down_proj" in name
            assert parameter.std().item() == pytest.approx(1 / math.sqrt(64 * (16 if adds else 1)), rel=0.05), name
            assert abs(parameter.mean().item()) < 0.01


def test_an_untrained_model_guesses_nearly_evenly():
    torch.manual_seed(0)
    model, tokens = GPT(97, 64, 6, 4), torch.randint(97, (4, 33))
    assert loss_of(model, tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(97), abs=0.7)


def test_dropout_acts_on_all_three_and_only_in_training():
    tokens = some_tokens(3, 11)
    plain, dropping = made().eval(), made(dropout=0.3)
    dropping.load_state_dict(plain.state_dict())
    assert torch.equal(dropping.eval()(tokens), plain(tokens))
    dropping.train()
    parts = {"embeddings": [dropping.dropout], "added": [block.dropout for block in dropping.blocks]}
    for name in ("embeddings", "weights", "added", "none"):
        for kind, modules in parts.items():
            for module in modules:
                module.p = 0.3 if name == kind else 0.0
        for block in dropping.blocks:
            assert block.attn.dropout == 0.3 or name != "embeddings"
            block.attn.dropout = 0.3 if name == "weights" else 0.0
        assert torch.equal(dropping(tokens), plain(tokens)) == (name == "none"), name


# The config -----------------------------------------------------------------------------------------------------------


@every_form
def test_the_config_builds_it_again(form: str):
    model = made(form, dropout=0.25)
    again = GPT(**json.loads(json.dumps(model.config))).double()
    assert again.config == model.config
    again.load_state_dict(model.state_dict())
    tokens = some_tokens(2, 7)
    assert torch.equal(again.eval()(tokens), model.eval()(tokens))


def test_the_config_holds_every_scaling():
    told = GPT(V, E, 1, H, rope_scaling=YarnScaling(4.0, 32, beta_fast=16.0)).config["rope_scaling"]
    assert told["kind"] == "YarnScaling"
    assert GPT(V, E, 1, H, rope_scaling=told).blocks[0].attn.position.scaling == YarnScaling(4.0, 32, beta_fast=16.0)


# What it refuses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"vocabulary": 0}, "vocabulary: expected at least 1, got 0."),
        ({"layers": 0}, "layers: expected at least 1, got 0."),
        ({"width": 25}, "width: expected a multiple of heads=4, got 25."),
        ({"width": 12}, "head_dim: expected an even number, got 3. Rotary"),
        ({"head_dim": 5}, "head_dim: expected an even number, got 5. Rotary"),
        ({"kv_heads": 3}, "kv_heads: expected a divisor of heads=4, got 3."),
        ({"position": "learned"}, "context: expected an int where position is 'learned', got None."),
        ({"position": "alibi"}, "position: expected one of 'rotary', 'learned', got 'alibi'."),
        ({"mlp": "relu"}, "mlp: expected one of 'gelu', 'gelu_tanh', 'swiglu', got 'relu'."),
        ({"norm": "batch"}, "norm: expected one of 'layer', 'rms', got 'batch'."),
        ({"norm_eps": 0}, "norm_eps: expected a number between 0 and 1, got 0."),
        ({"dropout": 1.5}, "dropout: expected a number from 0 to 1, got 1.5."),
        ({"rope_theta": 1.0}, "rope_theta: expected a finite number above 1, got 1.0."),
        ({"hidden": -1}, "hidden: expected at least 1, got -1."),
        ({"rope_scaling": {"kind": "new"}}, "rope_scaling['kind']: expected one of 'LinearScaling', "),
        ({"rope_scaling": {"kind": "LinearScaling", "by": 2}}, "rope_scaling: expected the arguments of LinearScaling"),
    ],
)
def test_refuses_bad_sizes(arguments: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        GPT(**({"vocabulary": V, "width": E, "layers": 1, "heads": H} | arguments))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"heads": 2.0}, "heads: expected an int, got 2.0."),
        ({"bias": 1}, "bias: expected True or False, got 1."),
        ({"rope_scaling": 2.0}, "rope_scaling: expected None or one of LinearScaling, "),
    ],
)
def test_refuses_wrong_types(arguments: dict[str, Any], told: str):
    with pytest.raises(TypeError, match=f"^{re.escape(told)}"):
        GPT(**({"vocabulary": V, "width": E, "layers": 1, "heads": H} | arguments))


def test_refuses_tokens_that_do_not_fit():
    model, tokens = made("gpt2"), some_tokens(2, 5)
    for bad in (V, -1):
        tokens[1, 3] = bad
        with pytest.raises(ValueError, match=rf"tokens: expected numbers from 0 to 22, the vocabulary's, got {bad}\."):
            model(tokens)
    with pytest.raises(TypeError, match="tokens: expected an int64 or int32 tensor"):
        model(tokens.double())
    with pytest.raises(ValueError, match=r"tokens: expected the shape \(B, L\).*pass tokens\[None\]"):
        model(some_tokens(5))
    with pytest.raises(ValueError, match="tokens: expected at most 17 positions, the context, got 18"):
        model(some_tokens(2, 18))


def test_refuses_caches_and_padding_that_do_not_fit():
    model, tokens = made("gpt2"), some_tokens(2, 5)
    with pytest.raises(ValueError, match="cache: expected one for each of 2 blocks, got 1 of them"):
        model(tokens, cache=model.new_cache()[:1])
    with pytest.raises(ValueError, match="cache: expected another for each block, got one twice"):
        model(tokens, cache=model.new_cache()[:1] * 2)
    with pytest.raises(ValueError, match=r"keep: expected the shape of tokens, \(2, 5\), got \(2, 4\)"):
        model(tokens, keep=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"keep: expected a bool tensor \(B, L\), True = real token"):
        model(tokens, keep=torch.ones(2, 5))
    cache = model.requires_grad_(False).new_cache()
    model(some_tokens(2, 15), cache=cache)
    with pytest.raises(ValueError, match="tokens: expected at most 17 positions, the context, got 20"):
        model(tokens, cache=cache)
    assert [part.length for part in cache] == [15, 15]  # and goes on
    assert model(tokens[:, :2], cache=cache).shape == (2, 2, V)
