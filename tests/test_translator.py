"""The translator: padding, caches, both forms of blocks, and its parts against formulas and PyTorch's own layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from multihead.models.translator import Translator, sinusoids
from native_calls import compiled_function

FORMS = [
    {},
    {"pre_norm": False},
    {"position": "rotary", "tied": False, "decoder_layers": 3},
    {"shared_embeddings": True, "hidden": 17, "pre_norm": False, "position": "rotary"},
]


def make(form=None, **options):
    torch.manual_seed(2)
    form = {"dropout": 0.3} | (form or {}) | options
    return Translator(13, 13, 12, 2, 3, **form).eval()


def batch(S=7, L=5):
    torch.manual_seed(3)
    source, target = torch.randint(13, (4, S)), torch.randint(13, (4, L))
    return source, target, torch.tensor([S, 1, 4, 6]), torch.tensor([2, L, 1, 4])


def kept(lengths, size, *, left=False):
    places = torch.arange(size)
    return places >= size - lengths[:, None] if left else places < lengths[:, None]


def shifted(tokens, lengths):
    """Rows with their padding moved to the left."""
    return torch.stack([row.roll(len(row) - n) for row, n in zip(tokens, lengths.tolist(), strict=True)])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padding_never_changes_a_row(form, left):
    model = make(form)
    source, target, sources, targets = batch()
    source_keep, target_keep = kept(sources, 7, left=left), kept(targets, 5, left=left)
    padded = (shifted(source, sources), shifted(target, targets)) if left else (source, target)
    logits = model(*padded, source_keep=source_keep, target_keep=target_keep)
    assert logits.shape == (4, 5, 13)
    for b, (S, L) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        alone = model(source[b : b + 1, :S], target[b : b + 1, :L])
        torch.testing.assert_close(logits[b, target_keep[b]], alone[0], atol=1e-5, rtol=1e-5)
    other = (padded[0].where(source_keep, 0), padded[1].where(target_keep, 0))
    again = model(*other, source_keep=source_keep, target_keep=target_keep)
    assert torch.equal(again[target_keep], logits[target_keep]), "what stands in the padding has no effect"


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_padding_gets_no_gradient(form):
    model = make(form)
    source, target, sources, targets = batch()
    source, target = source.clamp(max=11).where(kept(sources, 7), 12), target.clamp(max=11).where(kept(targets, 5), 12)
    logits = model(source, target, source_keep=kept(sources, 7), target_keep=kept(targets, 5))
    logits[kept(targets, 5)][:, :12].logsumexp(-1).sum().backward()
    for table in {model.source_embedding, model.target_embedding}:
        assert torch.equal(table.weight.grad[12], torch.zeros(12))
        assert table.weight.grad[:12].abs().sum() > 0


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_target_token_sees_those_before_it_alone(form):
    model = make(form)
    source, target, _, _ = batch()
    logits = model(source, target)
    changed = target.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 13
    after = model(source, changed)
    torch.testing.assert_close(after[:, :3], logits[:, :3], atol=1e-6, rtol=1e-6)
    assert (after[:, 3:] - logits[:, 3:]).abs().amax(-1).min() > 1e-4
    assert (model((source + 1) % 13, target) - logits).abs().amax(-1).min() > 1e-4, "the source matters everywhere"


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("chunks", [[1, 1, 1, 1, 1], [2, 3], [5]], ids=str)
def test_decoding_in_steps_is_decoding_at_once(form, chunks):
    model = make(form)
    source, target, sources, _ = batch()
    keep = kept(sources, 7)
    with torch.no_grad():
        wanted = model(source, target, source_keep=keep)
        cache = model.cache(model.encode(source, keep), keep)
        found = torch.cat([model.decode(part, cache=cache) for part in target.split(chunks, dim=1)], 1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rows", [[2, 2, 0, 3, 0], [1, 0, 3, 2]], ids=str)
def test_reordered_rows_go_on_as_what_they_became(form, rows):
    model = make(form)
    source, target, sources, _ = batch()
    keep, rows = kept(sources, 7), torch.tensor(rows)
    with torch.no_grad():
        cache = model.cache(model.encode(source, keep), keep)
        model.decode(target[:, :3], cache=cache)
        cache.reorder(torch.arange(4))
        cache.reorder(rows)
        found = model.decode(target[rows][:, 3:], cache=cache)
        wanted = model(source[rows], target[rows], source_keep=keep[rows])[:, 3:]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_reordering_an_empty_cache_chooses_sentences():
    model = make()
    source, target, sources, _ = batch()
    keep, rows = kept(sources, 7), torch.tensor([3, 1])
    with torch.no_grad():
        cache = model.cache(model.encode(source, keep), keep)
        cache.reorder(rows)
        found = model.decode(target[rows], cache=cache)
        wanted = model(source[rows], target[rows], source_keep=keep[rows])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_padded_targets_in_steps():
    model = make(position="rotary")
    source, target, _, targets = batch()
    keep = kept(targets, 5)
    with torch.no_grad():
        memory = model.encode(source)
        wanted = model.decode(target, memory, keep=keep)
        cache = model.cache(memory)
        parts = zip(target.split([2, 3], 1), keep.split([2, 3], 1), strict=True)
        found = torch.cat([model.decode(part, cache=cache, keep=real) for part, real in parts], 1)
    torch.testing.assert_close(found[keep], wanted[keep], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pre_norm", [True, False])
def test_blocks_are_those_of_torch(pre_norm):
    """torch.nn's own encoder and decoder layers, with the same numbers."""
    model = make(pre_norm=pre_norm)
    x, memory = torch.randn(2, 6, 12), torch.randn(2, 7, 12)

    def copied(into, attention):
        state = attention.state_dict()
        packed = [name for name in ("qkv_proj", "q_proj", "kv_proj") if f"{name}.weight" in state]
        into.in_proj_weight.copy_(torch.cat([state[f"{name}.weight"] for name in packed]))
        into.in_proj_bias.copy_(torch.cat([state[f"{name}.bias"] for name in packed]))
        into.out_proj.weight.copy_(state["out_proj.weight"])
        into.out_proj.bias.copy_(state["out_proj.bias"])

    with torch.no_grad():
        options = {"dim_feedforward": 48, "dropout": 0.0, "batch_first": True, "norm_first": pre_norm}
        for block, theirs, norms in (
            (model.encoder[0], nn.TransformerEncoderLayer(12, 3, **options), ("attn_norm", "mlp_norm")),
            (model.decoder[0], nn.TransformerDecoderLayer(12, 3, **options), ("attn_norm", "cross_norm", "mlp_norm")),
        ):
            for parameter in block.parameters():
                parameter.normal_(std=0.5)
            copied(theirs.self_attn, block.attn)
            theirs.linear1.load_state_dict(block.mlp[0].state_dict())
            theirs.linear2.load_state_dict(block.mlp[2].state_dict())
            for i, norm in enumerate(norms, 1):
                getattr(theirs, f"norm{i}").load_state_dict(getattr(block, norm).state_dict())
            theirs.train()  # its fast path for evaluation is another computation
            if len(norms) == 2:
                found, wanted = block(x, None), theirs(x)
            else:
                copied(theirs.multihead_attn, block.cross)
                found = block(x, None, memory, None)
                wanted = theirs(
                    x, memory, tgt_mask=nn.Transformer.generate_square_subsequent_mask(6), tgt_is_causal=True
                )
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_sinusoids_are_those_of_the_paper():
    table = sinusoids(torch.tensor([[0, 1, 50]]), 6)
    assert table.shape == (1, 3, 6)
    for row, position in zip(table[0], (0, 1, 50), strict=True):
        for i in range(3):
            angle = position / 10_000 ** (2 * i / 6)
            assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_of_the_cross_attention(form):
    model = make(form)
    source, target, sources, targets = batch()
    source_keep, target_keep = kept(sources, 7), kept(targets, 5)
    weights = model.cross_weights(source, target, source_keep=source_keep, target_keep=target_keep)
    assert len(weights) == len(model.decoder)
    for each in weights:
        assert each.shape == (4, 3, 5, 7)
        torch.testing.assert_close(each.sum(-1), torch.ones(4, 3, 5), atol=1e-5, rtol=0)
        assert not each[~source_keep[:, None, None].expand_as(each)].any()


def test_sharing_tables():
    def count(**options):
        return sum(parameter.numel() for parameter in make(**options).parameters())

    table = 13 * 12
    assert count(shared_embeddings=True) == count() - table
    assert count(tied=False) == count() + table
    model = make(shared_embeddings=True)
    assert model.source_embedding is model.target_embedding


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_config_makes_it_again(form):
    model = make(form)
    again = Translator(**model.config).eval()
    again.load_state_dict(model.state_dict())
    source, target, _, _ = batch()
    assert torch.equal(again(source, target), model(source, target))
    assert again.config == model.config


def test_a_seed_decides_about_the_first_weights():
    first = make().state_dict()
    for _ in range(5):
        again = make().state_dict()
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_dropout_acts_in_training_alone():
    model = make()
    source, target, _, _ = batch()
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.allclose(model(source, target), model(source, target))
    plain = make(dropout=0.0)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.train()(source, target), plain.eval()(source, target))


def test_it_learns_to_reverse():
    """A task that needs the encoder, cross-attention and the order of both."""
    torch.manual_seed(0)
    model = Translator(8, 8, 32, 1, 4, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        source = torch.randint(1, 8, (32, 4))
        target = torch.cat((torch.zeros(32, 1, dtype=torch.int64), source.flip(1)), 1)
        loss = nn.functional.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


@compiled_function
def test_it_is_compiled_in_one_graph():
    torch.compiler.reset()
    model = Translator(13, 13, 12, 1, 3, dropout=0.0)
    source, target, sources, targets = batch()
    keep = {"source_keep": kept(sources, 7), "target_keep": kept(targets, 5)}
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(source, target, **keep)
    real = keep["target_keep"]
    torch.testing.assert_close(found[real], model(source, target, **keep)[real], atol=1e-5, rtol=1e-5)


def test_refusals_when_made():
    sizes = {"source_vocabulary": 5, "target_vocabulary": 5, "width": 8, "layers": 1, "heads": 2}
    for wrong, error, words in (
        ({"source_vocabulary": 0}, ValueError, "source_vocabulary: expected at least 1, got 0"),
        ({"target_vocabulary": 5.0}, TypeError, "target_vocabulary: expected an int"),
        ({"width": 10}, ValueError, r"width: expected a multiple of 2 \* heads=4, got 10"),
        ({"width": None}, TypeError, "width: expected an int"),
        ({"layers": 0}, ValueError, "layers"),
        ({"decoder_layers": 0}, ValueError, "decoder_layers"),
        ({"hidden": 0}, ValueError, "hidden"),
        ({"pre_norm": 1}, TypeError, "pre_norm: expected True or False"),
        ({"position": "learned"}, ValueError, "position: expected one of sinusoidal, rotary, got learned"),
        ({"position": None}, ValueError, "position"),
        ({"dropout": 1.5}, ValueError, "dropout: expected a number from 0 to 1"),
        ({"shared_embeddings": True, "target_vocabulary": 6}, ValueError, "target_vocabulary: expected source_vocab"),
    ):
        with pytest.raises(error, match=words):
            Translator(**(sizes | wrong))


def test_refusals_when_called():
    model = make()
    source, target, sources, _ = batch()
    keep = kept(sources, 7)
    for call, error, words in (
        (lambda: model(source.float(), target), TypeError, r"source: expected int64 tokens \(B, S\)"),
        (lambda: model(source, target[0]), ValueError, r"target: expected the shape \(B, L\)"),
        (lambda: model(source + 13, target), ValueError, "source: expected tokens from 0 to 12, got 2"),
        (lambda: model(source, target - 13), ValueError, "target: expected tokens from 0 to 12, got -1"),
        (lambda: model(source[:3], target), ValueError, "target: expected the B of the source, 3"),
        (lambda: model(source, target, source_keep=keep[:, 1:]), ValueError, "keep of source: expected the shape of"),
        (lambda: model(source, target, target_keep=target), TypeError, "keep of target: expected a bool tensor"),
        (
            lambda: model.decode(target),
            ValueError,
            r"decode\(memory, cache=\): expected exactly one of the two, got none",
        ),
    ):
        with pytest.raises(error, match=words):
            call()
    memory = model.encode(source)
    with pytest.raises(ValueError, match="exactly one of the two, got both"):
        model.decode(target, memory, cache=model.cache(memory))
