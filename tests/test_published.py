"""Models as files, and GPT from published weights, held against transformers' own models."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multihead import LinearScaling, Llama3Scaling, YarnScaling
from multihead.models import saving
from multihead.models.gpt import GPT
from multihead.models.saving import load, save
from multihead.models.translator import Translator

safetensors = pytest.importorskip("safetensors.torch")


def small(**options: Any) -> GPT:
    torch.manual_seed(5)
    return GPT(23, 24, 2, 4, **options)


def some_tokens(*shape: int, most: int = 23) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(3))


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position": "learned", "context": 9, "tied": False},
        {"mlp": "swiglu", "norm": "rms", "bias": False, "kv_heads": 2, "rope_scaling": Llama3Scaling()},
    ],
)
def test_what_is_saved_is_loaded(tmp_path: Path, options: dict[str, Any], dtype: torch.dtype):
    model, path = small(**options).to(dtype), tmp_path / "model.safetensors"
    model.save(path)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again = GPT.load(str(path))
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(again, GPT)
    assert again.config == model.config
    assert again.embedding.weight.dtype == dtype
    assert again.embedding.weight.requires_grad
    assert torch.equal(again(some_tokens(2, 7)), model(some_tokens(2, 7)))
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_it_is_a_plain_safetensors_file(tmp_path: Path):
    model, path = small(), tmp_path / "model.safetensors"
    save(model, path)
    header = header_of(path)
    told = header.pop("__metadata__")
    assert (told["format"], told["class"], json.loads(told["config"])) == ("multihead", "GPT", model.config)
    assert set(header) == set(model.state_dict())
    tensors = safetensors.load_file(path)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


def test_it_can_be_read_by_who_may_read_new_files(tmp_path: Path):
    (tmp_path / "new").touch()
    save(small(), tmp_path / "model")
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "new").stat().st_mode


class Sharing(nn.Module):
    """Two names for one matrix, and for one buffer, as models of several tables have it."""

    def __init__(self, width: int, **_: Any) -> None:
        super().__init__()
        self.config = {"width": width}
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("same_count", self.count)


def test_what_is_shared_is_stored_once_and_stays_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(saving._MODULES, "Sharing", __name__)
    model, path = Sharing(5), tmp_path / "model"
    model.count += 3
    save(model, path)
    assert {"first.weight", "first.bias", "second.bias", "count", "__metadata__"} == set(header_of(path))
    again = load(path, kind=Sharing)
    assert again.second.weight is again.first.weight
    assert again.same_count is again.count
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert again.count == 3


def tied_by_hand() -> GPT:
    model = small(tied=False)
    model.head.weight = model.embedding.weight
    return model


def alike_in_memory() -> GPT:
    model = small(tied=False)
    model.head.weight = nn.Parameter(model.embedding.weight.data)
    return model


def one_mlp() -> GPT:
    model = small()
    model.blocks[1].mlp = model.blocks[0].mlp
    return model


def views_of_one() -> GPT:
    model = small()
    flat = torch.cat([parameter.flatten() for parameter in model.parameters()])
    for parameter in model.parameters():
        parameter.data, flat = flat[: parameter.numel()].view(parameter.shape), flat[parameter.numel() :]
    return model


@pytest.mark.parametrize("made", [tied_by_hand, alike_in_memory, one_mlp, views_of_one])
def test_what_is_shared_by_hand_is_stored_for_itself(tmp_path: Path, made: Any):
    model, tokens = made(), some_tokens(2, 7)
    before = torch.get_rng_state()
    model.save(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)
    again = GPT.load(tmp_path / "model")
    assert torch.equal(again(tokens), model(tokens))
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_translator_tied_by_hand(tmp_path: Path):
    model = Translator(9, 9, 8, 1, 2, tied=False).eval()
    model.output.weight = model.source_embedding.weight = model.target_embedding.weight
    save(model, tmp_path / "model")
    again, tokens = load(tmp_path / "model", kind=Translator).eval(), some_tokens(2, 7, most=9)
    assert torch.equal(again(tokens, tokens), model(tokens, tokens))


def test_refuses_to_save_what_its_config_does_not_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(saving._MODULES, "Sharing", __name__)
    wide, more, whole, untied = small(), small(), small(), Sharing(5)
    wide.embedding = nn.Embedding(25, 24)
    more.adapter = nn.Linear(2, 2)
    whole.norm.weight = nn.Parameter(torch.ones(24, dtype=torch.int8), requires_grad=False)
    untied.second.weight = nn.Parameter(torch.ones(5, 5))
    for model, told in (
        (wide, "expected embedding.weight of shape (23, 24), got (25, 24)."),
        (more, "expected the tensors of GPT, got them with adapter.weight, adapter.bias besides."),
        (whole, "expected norm.weight of a dtype like torch.float32, got torch.int8."),
        (untied, "expected the tensors of Sharing, got them with second.weight besides."),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(f'model: {told}')}$"):
            save(model, tmp_path / "model")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("at", ["os.fsync", "os.replace", "safetensors.torch.save_file"])
def test_an_end_in_between_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str):
    path = tmp_path / "model"
    save(small(), path)
    before = path.read_bytes()

    def end(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(at, end)
        with pytest.raises(KeyboardInterrupt):
            save(small(tied=False), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model"]
    save(small(tied=False), path)
    assert path.read_bytes() != before


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.02, 0.5, 0.9, 0.9999])
def test_refuses_a_file_that_is_cut_off(tmp_path: Path, share: float):
    path = tmp_path / "model"
    save(small(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    expected = "a whole safetensors file" if share > 0.0001 else "a safetensors file"
    with pytest.raises(ValueError, match=f"^{path}: expected {expected}, got") as refused:
        load(path)
    assert "\n" not in str(refused.value)


def raw(header: str, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


def test_refuses_a_file_that_goes_on(tmp_path: Path):
    path = tmp_path / "model"
    save(small(), path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"more")
    told = f"model: expected a safetensors file, got {size + 4} bytes, but its tensors end at {size}. Copy it again."
    with pytest.raises(ValueError, match=re.escape(told)):
        load(path)


@pytest.mark.parametrize("told", ["[]", "null", "3", '["format"]', '{"format": 3}', '{"class": ["GPT"]}'])
def test_refuses_a_header_of_another_form(tmp_path: Path, told: str):
    (tmp_path / "model").write_bytes(raw(f'{{"__metadata__": {told}}}'))
    with pytest.raises(ValueError, match=r"model: expected a safetensors file, got one whose header can't be read\."):
        load(tmp_path / "model")


def test_refuses_what_is_nested_without_end(tmp_path: Path):
    deep, path = '{"a": ' * 100_000, tmp_path / "model"
    path.write_bytes(raw(deep))
    with pytest.raises(ValueError, match=r"model: expected a safetensors file, got one whose header can't be read\."):
        load(path)
    saving.write({}, path, {"format": "multihead", "class": "GPT", "config": deep})
    with pytest.raises(ValueError, match=r"model: expected a config in JSON .*, got none that can be read\."):
        load(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"A text of some length, which is none.\n" * 9, b"PK\3\4" * 99, b"\x08" + bytes(7) + b"{nonsens"],
)
def test_refuses_what_is_no_safetensors_file(tmp_path: Path, data: bytes):
    (tmp_path / "other").write_bytes(data)
    with pytest.raises(ValueError, match=r"other: expected a safetensors file, got .*\. Check the path\.$"):
        load(tmp_path / "other")


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="absent"):
        load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        save(small(), tmp_path / "absent" / "model")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (None, "expected a file that multihead has saved, got a safetensors file of something else. Published weights"),
        ({"format": "pt"}, "expected a file that multihead has saved, got"),
        ({"class": "Parrot"}, "expected a file of GPT or Translator, got one of 'Parrot'."),
        ({"config": "{"}, "expected a config in JSON in the file's header, got none that can be read."),
        ({"config": "[1]"}, "expected a config in JSON in the file's header, got none that can be read."),
        (
            {"config": '{"width": 3}'},
            "expected a config that GPT takes, got one that it refuses (GPT.__init__() missing",
        ),
        ({"heads": 5}, "expected a config that GPT takes, got one that it refuses (kv_heads: expected a divisor"),
        ({"layers": 1}, "expected the tensors of GPT, got them with blocks.1.attn.out_proj.bias, "),
        ({"layers": 3}, "expected the tensors of GPT, got them without blocks.2.attn_norm.weight, "),
        ({"tied": False}, "expected the tensors of GPT, got them without head.weight."),
        ({"hidden": 11}, "expected blocks.0.mlp.down_proj.weight of shape (24, 11), got (24, 96)."),
        # Sizes that there is neither memory nor time to build.
        ({"vocabulary": 10**13}, f"expected embedding.weight of shape ({10**13}, 24), got (23, 24)."),
        ({"vocabulary": 10**30}, "expected a config that GPT takes, got one that it refuses ("),
        ({"layers": 10**9}, "expected tensors of layers=1000000000, got 27 in all."),
        ({"rope_theta": 10**400}, "expected a config that GPT takes, got one that it refuses (int too large to"),
    ],
)
def test_refuses_a_file_of_something_else(tmp_path: Path, changes: dict[str, Any] | None, told: str):
    model, path = small(), tmp_path / "model"
    metadata = {"format": "multihead", "class": "GPT", "config": json.dumps(model.config)}
    if changes is not None:
        ours = {name: value for name, value in changes.items() if name in metadata}
        metadata |= ours or {"config": json.dumps(model.config | changes)}
    saving.write(model.state_dict(), path, metadata if changes is not None else {})
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {told}')}") as refused:
        load(path)
    assert "\n" not in str(refused.value)


def test_refuses_more_blocks_of_a_decoder_than_there_can_be(tmp_path: Path):
    model, path = Translator(9, 9, 8, 1, 2), tmp_path / "model"
    model.config["decoder_layers"] = 10**9
    saving.write(
        model.state_dict(), path, {"format": "multihead", "class": "Translator", "config": json.dumps(model.config)}
    )
    with pytest.raises(ValueError, match="model: expected tensors of decoder_layers=1000000000, got"):
        load(path)


def test_refuses_tensors_of_another_kind(tmp_path: Path):
    model, path = small(), tmp_path / "model"
    state = model.state_dict()
    state["norm.weight"] = state["norm.weight"].int()
    saving.write(state, path, {"format": "multihead", "class": "GPT", "config": json.dumps(model.config)})
    with pytest.raises(ValueError, match=r"model: expected norm.weight of a dtype like torch.float32, got torch.int32"):
        load(path)


def test_refuses_a_file_of_another_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(saving._MODULES, "Sharing", __name__)
    save(Sharing(5), tmp_path / "model")
    with pytest.raises(ValueError, match=r"model: expected a file of GPT, got one of Sharing\."):
        GPT.load(tmp_path / "model")


def test_refuses_to_save_what_it_could_not_build(tmp_path: Path):
    with pytest.raises(TypeError, match="model: expected one of GPT, Translator, got an object of type Linear"):
        save(nn.Linear(2, 2), tmp_path / "model")


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)  # how Python marks a module that can't be imported
    for call in (lambda: save(small(), tmp_path / "model"), lambda: load(tmp_path / "model")):
        with pytest.raises(ImportError, match=r"needs safetensors \(.*Next: pip install 'multihead\[models\]'$"):
            call()
    assert not os.listdir(tmp_path)


# Published weights ----------------------------------------------------------------------------------------------------


def drawn(model: Any) -> Any:
    """A model of transformers whose weights all say something: norms and biases too."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 and "bias" not in name else 0.0, std=0.2)
    return model.eval()


def gpt2(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    usual = {"vocab_size": 37, "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 19}
    usual |= {"bos_token_id": None, "eos_token_id": None}
    return drawn(transformers.GPT2LMHeadModel(transformers.GPT2Config(**(usual | changes))))


def llama(kind: str = "Llama", **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    usual = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    usual |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64}
    usual |= {"bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{kind}Config")(**(usual | changes))
    return drawn(getattr(transformers, f"{kind}ForCausalLM")(config))


def check_same(ours: GPT, theirs: Any) -> None:
    tokens = some_tokens(3, 17, most=37)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"n_inner": 31}, {"layer_norm_epsilon": 0.1}])
def test_gpt2_is_transformers_own(changes: dict[str, Any]):
    theirs = gpt2(**changes)
    ours = GPT.from_gpt2(theirs.state_dict(), heads=3, norm_eps=changes.get("layer_norm_epsilon", 1e-5))
    check_same(ours, theirs)
    assert ours.config["tied"] == (changes.get("tie_word_embeddings") is not False)
    assert ours.config["context"] == 19


def test_gpt2_in_the_forms_that_files_have():
    theirs = gpt2()
    expected = GPT.from_gpt2(theirs.state_dict(), heads=3)
    plain = dict(theirs.transformer.state_dict())  # of GPT2Model, as in the released file
    plain |= {"h.0.attn.bias": torch.ones(1, 1, 19, 19), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    ours = GPT.from_gpt2(plain, heads=3)
    assert torch.equal(ours(some_tokens(2, 7)), expected(some_tokens(2, 7)))
    wide = gpt2(n_embd=128, n_head=2)
    check_same(GPT.from_gpt2(wide.state_dict()), wide)  # heads of 64


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"head_dim": 10},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rms_norm_eps": 0.1},
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ],
)
def test_llama_is_transformers_own(changes: dict[str, Any]):
    theirs = llama(**changes)
    ours = GPT.from_llama(theirs.state_dict(), heads=4, norm_eps=changes.get("rms_norm_eps", 1e-5))
    check_same(ours, theirs)
    assert ours.config["kv_heads"] == changes.get("num_key_value_heads", 2)
    assert ours.config["tied"] == changes.get("tie_word_embeddings", False)


@pytest.mark.parametrize(
    ("told", "scaling"),
    [
        ({"rope_type": "linear", "factor": 3.0}, LinearScaling(3.0)),
        (
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
            Llama3Scaling(8.0, original_length=8),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            YarnScaling(4.0, 16),
        ),
    ],
)  # fmt: skip
def test_llama_with_scaled_positions(told: dict[str, Any], scaling: Any):
    theirs = llama(rope_parameters={"rope_theta": 500.0, **told})
    check_same(GPT.from_llama(theirs.state_dict(), heads=4, rope_theta=500.0, rope_scaling=scaling), theirs)
    with torch.no_grad():
        tokens = some_tokens(3, 17, most=37)
        unscaled = GPT.from_llama(theirs.state_dict(), heads=4, rope_theta=500.0)(tokens)
        assert not torch.allclose(unscaled, theirs(tokens).logits, atol=1e-3)


@pytest.mark.parametrize("kind", ["Qwen2", "Mistral"])
def test_models_of_llamas_form(kind: str):
    theirs = llama(kind)
    check_same(GPT.from_llama(theirs.state_dict(), heads=4), theirs)


def test_llama_without_its_head_is_tied():
    theirs = llama(tie_word_embeddings=True)
    state = dict(theirs.model.state_dict())  # of LlamaModel, without "model."
    state["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    check_same(GPT.from_llama(state, heads=4), theirs)


@pytest.mark.parametrize("of", ["gpt2", "llama"])
def test_nothing_of_the_callers_changes(of: str):
    theirs = gpt2() if of == "gpt2" else llama(num_key_value_heads=4)
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    before, random = {name: tensor.clone() for name, tensor in state.items()}, torch.get_rng_state()
    ours = GPT.from_gpt2(state, heads=3) if of == "gpt2" else GPT.from_llama(state, heads=4)
    assert torch.equal(torch.get_rng_state(), random)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert set(state) == set(before)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


def test_published_weights_keep_their_dtype_and_can_be_saved(tmp_path: Path):
    theirs = llama().to(torch.bfloat16)
    ours = GPT.from_llama(theirs.state_dict(), heads=4, rope_scaling=Llama3Scaling(), context=64)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    ours.save(tmp_path / "model")
    again, tokens = GPT.load(tmp_path / "model"), some_tokens(2, 9)
    assert again.context == 64
    assert torch.equal(again(tokens), ours(tokens))


@pytest.mark.parametrize(
    ("name", "new", "told"),
    [
        ("transformer.wte.weight", None, "expected the tensor 'wte.weight' (with 'transformer.' in front or not), got"),
        ("transformer.h.1.ln_2.bias", None, "expected the tensor 'h.1.ln_2.bias'"),
        ("transformer.h.0.mlp.c_fc.weight", None, "expected the tensor 'h.0.mlp.c_fc.weight'"),
        (
            "transformer.h.1.adapter.weight",
            torch.ones(2),
            "expected no other tensors than the model's, got transformer.h",
        ),
        ("score.weight", torch.ones(2), "expected no other tensors than the model's, got score.weight."),
        ("lm_head.weight", torch.ones(5, 24), "['lm_head.weight']: expected the shape (37, 24), got a float32 tensor"),
        ("transformer.ln_f.bias", torch.ones(5), "['transformer.ln_f.bias']: expected the shape (24,), got"),
        (
            "transformer.wpe.weight",
            torch.ones(5),
            "['transformer.wpe.weight']: expected the shape (context, E), got (5,",
        ),
        ("transformer.h.4.ln_1.weight", torch.ones(24), "expected the tensor 'h.2.ln_1.weight'"),
        (
            "ln_f.bias",
            torch.ones(24),
            "expected each tensor once, with 'transformer.' in front or without, got 'transformer.ln_f.bias' and 'ln_f",
        ),
        (
            "transformer.h.1.attn.c_proj.weight",
            torch.ones(24, 24, device="meta"),
            "['transformer.h.1.attn.c_proj.weight']: expected a tensor with data, got one on the meta device.",
        ),
    ],
)
def test_refuses_weights_of_something_else(name: str, new: Tensor | None, told: str):
    state = gpt2().state_dict()
    state.pop(name, None)
    if new is not None:
        state[name] = new
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        GPT.from_gpt2(state, heads=3)
    assert str(refused.value).startswith("state_dict")


@pytest.mark.parametrize("of", ["gpt2", "llama"])
def test_refuses_what_is_no_dict_of_weights(of: str):
    state = dict((gpt2() if of == "gpt2" else llama()).state_dict())
    name = "transformer.wte.weight" if of == "gpt2" else "model.embed_tokens.weight"

    def read(state: Any) -> GPT:
        return GPT.from_gpt2(state, heads=3) if of == "gpt2" else GPT.from_llama(state, heads=4)

    with pytest.raises(TypeError, match=r"^state_dict: expected a dict of tensors by name, got 3\. It is the name"):
        read(state | {3: torch.ones(2)})
    with pytest.raises(TypeError, match=re.escape(f"state_dict['{name}']: expected a floating dtype, got a int8 ten")):
        read(state | {name: state[name].to(torch.int8)})
    with pytest.raises(TypeError, match=re.escape(f"state_dict['{name}']: expected a tensor, got an object of type")):
        read(state | {name: [1.0]})


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_llamas_mlp_has_all_its_biases_or_none(part: str):
    state = dict(llama(mlp_bias=True).state_dict())
    del state[f"model.layers.0.mlp.{part}_proj.bias"]
    with pytest.raises(ValueError, match=rf"^state_dict: expected the tensor 'layers.0.mlp.{part}_proj.bias' \(with"):
        GPT.from_llama(state, heads=4)


def test_refuses_heads_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^heads: expected a divisor of E=24, got 5\."):
        GPT.from_gpt2(gpt2().state_dict(), heads=5)
    with pytest.raises(ValueError, match=r"^heads: expected at least 1, got 0\."):
        GPT.from_gpt2(gpt2().state_dict(), heads=0)
    empty = {f"layers.0.self_attn.{part}_proj.weight": torch.ones(0, 24) for part in "qk"}
    with pytest.raises(ValueError, match=r"^heads: expected the number of query heads, .*, got 4 for 0 rows of q"):
        GPT.from_llama({"embed_tokens.weight": torch.ones(37, 24)} | empty, heads=4)
    with pytest.raises(ValueError, match="heads: expected an int where E is not a multiple of 64, got None, with E=24"):
        GPT.from_gpt2(gpt2().state_dict())
    with pytest.raises(
        ValueError, match=r"heads: expected the number of query heads, .*, got 5 for 24 rows of q, 12 of"
    ):
        GPT.from_llama(llama().state_dict(), heads=5)
    with pytest.raises(
        ValueError, match=r"heads: expected the number of query heads, .*, got 1 for 24 rows of q, 12 of"
    ):
        GPT.from_llama(llama().state_dict(), heads=1)
    with pytest.raises(ValueError, match=r"state_dict: expected the tensor 'embed_tokens.weight' .* another kind of"):
        GPT.from_llama(gpt2().state_dict(), heads=4)
    with pytest.raises(TypeError, match=r"state_dict: expected a dict of tensors by name.* Pass model\.state_dict\(\)"):
        GPT.from_gpt2(gpt2())
