"""`swap` in whole models: they compute the same as before, through the drop-in, and `unswap` gives back what was there.

The models are small and random, in float64, and built without a download. Those of other packages are skipped where the
package is not installed: `pip install --no-deps torchvision open_clip_torch timm`, and `transformers`.
"""

import copy
import functools
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import multihead

# Other packages warn about themselves, and torch about its nested tensors. What we say ourselves stays an error.
pytestmark = pytest.mark.filterwarnings("ignore", "error:::multihead")

MODES = {"train": (True, True), "eval": (False, True), "eval, no_grad": (False, False)}
f64 = torch.float64
B, L, S = 3, 5, 7

Call = Callable[[nn.Module], Any]  # runs a model on inputs of its own; gives tensors in any container


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 20, shape, generator=torch.Generator().manual_seed(1))


def causal_bool(n: int) -> Tensor:
    """As torch's layers read it: True = may not attend."""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def padded(n: int, *hidden: int) -> Tensor:
    """(batch, n), the last `hidden[i]` tokens of sample i are padding: True = may not attend."""
    return torch.arange(n) >= n - torch.tensor(hidden)[:, None]


# The models: each function gives (model, how it is called, its number of torch.nn.MultiheadAttention) -----------------


def transformer(**options: Any) -> nn.Transformer:
    sizes = {"d_model": 12, "nhead": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 16}
    return nn.Transformer(**{**sizes, "dropout": 0.0, "dtype": f64, **options})


def encoder(layers: int = 2, nested: bool = False, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        12, **{"nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "dtype": f64, **options}
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=nested)


def transformer_sequence_first() -> tuple[nn.Module, Call, int]:
    masks = {
        "src_mask": draw(S, S, seed=5),
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(L, dtype=f64),
        "memory_mask": draw(L, S, seed=6),
        "src_key_padding_mask": torch.zeros(B, S, dtype=f64).masked_fill(padded(S, 0, 2, 1), -torch.inf),
        "memory_key_padding_mask": torch.zeros(B, S, dtype=f64).masked_fill(padded(S, 0, 2, 1), -torch.inf),
    }
    source, target = draw(S, B, 12, seed=1), draw(L, B, 12, seed=2)
    return transformer(), lambda model: model(source, target, tgt_is_causal=True, **masks), 6


def transformer_batch_first() -> tuple[nn.Module, Call, int]:
    masks = {
        "tgt_mask": causal_bool(L),
        "src_key_padding_mask": padded(S, 0, 2, 1),
        "tgt_key_padding_mask": padded(L, 1, 0, 2),
        "memory_key_padding_mask": padded(S, 0, 2, 1),
    }
    source, target = draw(B, S, 12, seed=1), draw(B, L, 12, seed=2)
    model = transformer(batch_first=True, norm_first=True, nhead=3, activation="gelu")
    return model, lambda model: model(source, target, **masks), 6


def transformer_unbatched() -> tuple[nn.Module, Call, int]:
    source, target = draw(S, 12, seed=1), draw(L, 12, seed=2)
    return transformer(bias=False), lambda model: model(source, target, tgt_mask=causal_bool(L)), 6


def encoder_plain() -> tuple[nn.Module, Call, int]:
    """In eval without gradients torch's own layer reads the weights and calls no attention module at all."""
    x = draw(B, L, 12, seed=1)
    return encoder(), lambda model: model(x), 2


def encoder_causal() -> tuple[nn.Module, Call, int]:
    x, mask = draw(B, L, 12, seed=1), nn.Transformer.generate_square_subsequent_mask(L, dtype=f64)
    return encoder(), lambda model: model(x, mask=mask, is_causal=True), 2


def encoder_two_masks() -> tuple[nn.Module, Call, int]:
    x, mask, padding = draw(B, L, 12, seed=1), causal_bool(L), padded(L, 0, 2, 1)
    return encoder(), lambda model: model(x, mask=mask, src_key_padding_mask=padding), 2


def encoder_nested() -> tuple[nn.Module, Call, int]:
    """In eval without gradients torch's encoder packs the real tokens into a nested tensor, whatever its layers are."""
    x, padding = draw(B, L, 12, seed=1), padded(L, 0, 2, 1)
    return encoder(nested=True), lambda model: model(x, src_key_padding_mask=padding)[~padding], 2


def encoder_padded_left() -> tuple[nn.Module, Call, int]:
    x, padding = draw(B, L, 12, seed=1), padded(L, 0, 2, 1).flip(-1)
    return encoder(nested=True), lambda model: model(x, src_key_padding_mask=padding)[~padding], 2


def decoder_causal() -> tuple[nn.Module, Call, int]:
    layer = nn.TransformerDecoderLayer(12, 3, 16, 0.0, batch_first=True, dtype=f64)
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=f64)
    x, memory = draw(B, L, 12, seed=1), draw(B, S, 12, seed=2)
    return nn.TransformerDecoder(layer, 2), lambda model: model(x, memory, tgt_mask=mask, tgt_is_causal=True), 4


def torchvision_vit() -> tuple[nn.Module, Call, int]:
    third_party("torchvision")
    from torchvision.models import VisionTransformer

    sizes = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 12, "mlp_dim": 20}
    image = draw(B, 3, 16, 16)
    return VisionTransformer(**sizes, num_classes=5), lambda model: model(image), 2


def open_clip_clip() -> tuple[nn.Module, Call, int]:
    third_party("open_clip")
    from open_clip.model import CLIP

    vision = {"layers": 2, "width": 12, "head_width": 4, "patch_size": 8, "image_size": 16}
    text = {"context_length": S, "vocab_size": 23, "width": 12, "heads": 3, "layers": 2}
    image, words = draw(B, 3, 16, 16), tokens(B, S)
    return CLIP(10, vision, text), lambda model: model(image, words), 4


def open_clip_coca() -> tuple[nn.Module, Call, int]:
    """Float masks of shape (L, S) and (batch * heads, L, S), and a pooler with kdim = vdim other than embed_dim."""
    third_party("open_clip")
    from open_clip.coca_model import CoCa

    pool = {"attentional_pool": True, "attn_pooler_queries": 5, "attn_pooler_heads": 2, "output_tokens": True}
    vision = {"layers": 2, "width": 12, "head_width": 4, "patch_size": 8, "image_size": 16, **pool}
    text = {"context_length": S, "vocab_size": 23, "width": 8, "heads": 2, "layers": 2}
    image, words = draw(B, 3, 16, 16), tokens(B, S)
    words[1, -3:] = 0  # padding
    model = CoCa(8, text, {**text, "embed_cls": True, "output_tokens": True}, vision)
    nn.init.zeros_(model.text_decoder.text_projection)  # the package leaves it as the memory was
    return model, lambda model: model(image, words), 9


def siglip_head() -> tuple[nn.Module, Call, int]:
    transformers = third_party("transformers")
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 3}
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=8))
    image = draw(B, 3, 16, 16)
    return model, lambda model: model(pixel_values=image).pooler_output, 1


def mask2former() -> tuple[nn.Module, Call, int]:
    """Each layer's bool mask (batch * heads, L, S) is made from the mask that the layers before have predicted."""
    transformers = third_party("transformers")
    backbone = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, window_size=2, drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        encoder_layers=1, decoder_layers=4, num_attention_heads=2, dim_feedforward=16, num_queries=5,
    )  # fmt: skip
    image = draw(2, 3, 64, 64)

    def call(model: nn.Module) -> Any:
        out = model(pixel_values=image)
        return out.transformer_decoder_last_hidden_state, out.masks_queries_logits

    return transformers.Mask2FormerModel(config), call, 3


def bridgetower() -> tuple[nn.Module, Call, int]:
    transformers = third_party("transformers")
    text = {
        "vocab_size": 23, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "max_position_embeddings": 12, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    vision = {"hidden_size": 128, "num_hidden_layers": 1, "patch_size": 8, "image_size": 16}
    config = transformers.BridgeTowerConfig(
        hidden_size=128, num_attention_heads=2, num_hidden_layers=1, text_config=text, vision_config=vision
    )
    inputs = {
        "input_ids": tokens(B, S),
        "attention_mask": (~padded(S, 0, 2, 1)).long(),
        "pixel_values": draw(B, 3, 16, 16),
        "pixel_mask": torch.ones(B, 16, 16, dtype=torch.long),
    }

    def call(model: nn.Module) -> Any:
        out = model(**inputs)
        return out.text_features, out.image_features, out.pooler_output

    return transformers.BridgeTowerModel(config), call, 1


TORCH = [
    transformer_sequence_first, transformer_batch_first, transformer_unbatched, encoder_plain, encoder_causal,
    encoder_two_masks, encoder_nested, encoder_padded_left, decoder_causal,
]  # fmt: skip
OTHERS = [torchvision_vit, open_clip_clip, open_clip_coca, siglip_head, mask2former, bridgetower]
every_model = pytest.mark.parametrize("make", TORCH + OTHERS, ids=lambda make: make.__name__)
every_mode = pytest.mark.parametrize("mode", MODES)

_stubs = []  # an operator library is undone with its last reference


def third_party(name: str) -> Any:
    """The package, or a skip. Nothing but these tests needs it."""
    give_torchvision_its_operators()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"the models of {name} are tried only where it is installed ({error})")


@functools.cache
def give_torchvision_its_operators() -> None:
    """Beside a torch that it was not built for, torchvision imports once the operators it looks for have a form."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _stubs.append(library)


# What is compared -----------------------------------------------------------------------------------------------------


def made(make: Callable[[], tuple[nn.Module, Call, int]]) -> tuple[nn.Module, Call, list[str]]:
    """The model with every parameter drawn, biases too, its call, and the names of its attention modules."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, call, count = make()
    model = model.double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * draw(*parameter.shape, seed=100 + i))
    names = attentions(model)
    assert len(names) == count, f"this model was to have {count} torch.nn.MultiheadAttention, it has {names}"
    return model, call, names


def attentions(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is nn.MultiheadAttention]


def anatomy(model: nn.Module) -> dict[str, tuple[nn.Module, type, dict[str, list[Any] | None]]]:
    """Of each module the object, its type, its attributes' names, and the keys of those that are dicts: hooks too."""
    return {
        name: (module, type(module), {key: [*at] if isinstance(at, dict) else None for key, at in vars(module).items()})
        for name, module in model.named_modules()
    }


def run(model: nn.Module, call: Call, mode: str) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The outputs, and the gradient of every parameter where the mode has gradients."""
    training, with_gradients = MODES[mode]
    model.train(training)
    model.zero_grad()
    with torch.set_grad_enabled(with_gradients):
        outs = [out for out in pytree.tree_leaves(call(model)) if isinstance(out, Tensor) and out.is_floating_point()]
    if not with_gradients:
        return outs, {}
    losses = [(out * draw(*out.shape, seed=i)).sum() for i, out in enumerate(outs) if out.requires_grad]
    torch.stack(losses).sum().backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return [out.detach() for out in outs], grads


def same(before: Tensor, after: Tensor, what: str, least_scale: float = 0.0, budget: float = 1e-12) -> None:
    """Within the budget, relative to the largest number of the tensor."""
    assert before.shape == after.shape, f"{what}: shape {tuple(after.shape)} after, {tuple(before.shape)} before"
    assert before.dtype == after.dtype, f"{what}: {after.dtype} after, {before.dtype} before"
    assert before.isfinite().all(), f"{what}: not finite before; the test is to compare numbers"
    assert after.isfinite().all(), f"{what}: {int((~after.isfinite()).sum())} of {after.numel()} not finite after"
    if before.numel():
        scale = max(float(before.abs().max()), least_scale)
        error = float((after - before).abs().max())
        assert error <= budget * scale, f"{what}: off by {error:.2g} where the largest number is {scale:.2g}"


def same_results(before: Any, after: Any, what: str) -> None:
    (outs, grads), (new_outs, new_grads) = before, after
    assert len(outs) == len(new_outs) > 0, f"{what}: {len(new_outs)} outputs after, {len(outs)} before"
    for i, (out, new_out) in enumerate(zip(outs, new_outs, strict=True)):
        same(out, new_out, f"{what}: output {i}")
    assert list(grads) == list(new_grads), f"{what}: the names of the parameters changed"
    largest = max((float(grad.abs().max()) for grad in grads.values() if grad is not None), default=0.0)
    for name, grad in grads.items():
        new_grad = new_grads[name]
        assert (grad is None) == (new_grad is None), f"{what}: only one of before and after has a gradient of {name}"
        if grad is not None:  # that of a key's bias is 0 but for rounding: so measured by those of the model
            same(grad, new_grad, f"{what}: gradient of {name}", least_scale=0.01 * largest)


def identical_results(before: Any, after: Any, what: str) -> None:
    for old, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True):
        assert (old is None and new is None) or torch.equal(old, new), f"{what}: not the same bits"


# The tests ------------------------------------------------------------------------------------------------------------


@every_mode
@every_model
def test_the_model_computes_the_same(make: Any, mode: str) -> None:
    model, call, names = made(make)
    before = run(model, call, mode)
    report = multihead.swap(model)
    assert list(report.swapped) == names
    assert not report.skipped
    assert not attentions(model), "these were left as they were"
    for name in names:
        assert isinstance(model.get_submodule(name), multihead.MultiheadAttention)
    same_results(before, run(model, call, mode), mode)


@every_mode
@every_model
def test_every_attention_of_the_model_is_ours(make: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the class, not by hooks: with a hook, torch's own layers take another way."""
    model, call, names = made(make)
    multihead.swap(model)
    seen: set[nn.Module] = set()

    def recorded(forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.add(self)
            return forward(self, *args, **kwargs)

        return wrapper

    for kind in {type(model.get_submodule(name)) for name in names}:
        monkeypatch.setattr(kind, "forward", recorded(kind.forward))
    run(model, call, mode)
    gone_round = [name for name in names if model.get_submodule(name) not in seen]
    assert not gone_round, f"the model computed without calling {gone_round}"


@every_mode
@every_model
def test_unswap_gives_back_what_was_there(make: Any, mode: str) -> None:
    model, call, names = made(make)
    there = anatomy(model)
    before = run(model, call, mode)
    multihead.swap(model)
    run(model, call, mode)
    multihead.unswap(model)
    assert attentions(model) == names
    after = anatomy(model)
    assert list(after) == list(there)
    for name, (module, kind, attributes) in there.items():
        assert after[name][0] is module, f"{name} is another object"
        assert after[name][1] is kind, f"{name} was a {kind}, and is a {after[name][1]}"
        assert after[name][2] == attributes, f"{name} has other attributes"
    identical_results(before, run(model, call, mode), mode)


@every_model
def test_parameters_stay_the_same_objects(make: Any) -> None:
    model, _, names = made(make)
    modules = {name: model.get_submodule(name) for name in names}
    parameters, buffers, state = dict(model.named_parameters()), dict(model.named_buffers()), model.state_dict()

    def check(when: str) -> None:
        assert [*dict(model.named_parameters())] == [*parameters], when
        for name, parameter in model.named_parameters():
            assert parameter is parameters[name], f"{when}: {name} is another object"
        for name, buffer in model.named_buffers():
            assert buffer is buffers[name], f"{when}: {name} is another object"
        for name, module in modules.items():
            assert model.get_submodule(name) is module, f"{when}: {name} is another object"
        assert [*model.state_dict()] == [*state], when
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, state[name]), f"{when}: {name} has other numbers"

    multihead.swap(model)
    check("after swap")
    model.load_state_dict(state)
    multihead.unswap(model)
    check("after unswap")


@every_model
def test_an_optimizer_made_before_still_steps(make: Any) -> None:
    model, call, _ = made(make)
    twin = copy.deepcopy(model)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (model, twin)]
    for step in range(3):
        if step == 1:
            multihead.swap(model)
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            run(m, call, "train")
            optimizer.step()
    with_gradient = {name for name, parameter in twin.named_parameters() if parameter.grad is not None}
    largest = max(float((p - start[name]).detach().abs().max()) for name, p in twin.named_parameters())
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        moved, should = (ours - start[name]).detach(), (theirs - start[name]).detach()
        assert (name in with_gradient) == (ours.grad is not None), name
        same(should, moved, f"three steps of {name}", least_scale=0.01 * largest, budget=1e-9)


@every_mode
@pytest.mark.parametrize("make", TORCH, ids=lambda make: make.__name__)
def test_a_swapped_model_can_be_copied_and_pickled(make: Any, mode: str) -> None:
    model, call, names = made(make)
    before = run(model, call, mode)
    multihead.swap(model)
    ours = run(model, call, mode)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        identical_results(ours, run(twin, call, mode), mode)
        multihead.unswap(twin)
        assert attentions(twin) == names
        identical_results(before, run(twin, call, mode), mode)
    assert not attentions(model), "unswap reached the original"
