"""`explain` against what really happens: the kernel that the profiler saw run, and the shapes on the way."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import multihead as mh
from multihead.explaining.costs import binary
from test_dispatch import what_ran

E, H, K = 30, 6, 3  # D = 5
LONG = 389  # squared, it is worth a look at how much of the plane is visible


def frozen(position: nn.Module) -> Any:
    return position.requires_grad_(False)


LAYERS = {
    "plain": dict,
    "causal": lambda: {"mask": mh.causal(), "num_kv_heads": K},
    "rotary": lambda: {"mask": mh.causal(), "position": mh.Rotary(4), "qk_norm": True},
    "window": lambda: {"mask": mh.window(left=31, right=0)},
    "narrow window": lambda: {"mask": mh.causal() & mh.window(left=2), "packed": False},
    "dropout": lambda: {"dropout": 0.1},
    "out_dropout": lambda: {"out_dropout": 0.1, "gate": True},
    "softcap": lambda: {"softcap": 5.0, "mask": mh.causal()},
    "value_dim": lambda: {"value_dim": 7},
    "sinks": lambda: {"sinks": True, "mask": mh.causal(), "num_kv_heads": 1},
    "scale": lambda: {"scale": -0.5, "mask": mh.causal()},
    "alibi": lambda: {"position": mh.ALiBi(H), "mask": mh.causal()},
    "t5": lambda: {"position": mh.T5Bias(H), "mask": mh.causal()},
    "frozen t5": lambda: {"position": frozen(mh.T5Bias(H))},
    "relative": lambda: {"position": mh.RelativeBias(H, 3), "gate": True},
    "bf16": lambda: {"dtype": torch.bfloat16, "mask": mh.causal()},
    "f64": lambda: {"dtype": torch.float64},
}
SIZES = [(2, 7, None), (2, 5, 11), (1, 1, LONG), (1, LONG, None), (0, 5, None), (2, 0, None), (2, 3, 0)]


def called(layer: mh.Attention, B: int, L: int, S: int | None, **options: Any) -> Any:
    """The call that `explain` speaks of."""
    dtype = layer.out_proj.weight.dtype
    inputs = [torch.randn(B, L, layer.embed_dim, dtype=dtype)]
    if S is not None:
        inputs.append(torch.randn(B, S, layer.kdim, dtype=dtype))

    def call():
        with torch.set_grad_enabled(layer.training):
            return layer(*inputs, **options)

    return call


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_kernel_is_the_one_that_the_profiler_sees(name, training, native):
    torch.manual_seed(1)
    layer = mh.Attention(E, H, **LAYERS[name]()).train(training)
    told, seen = [], []
    for B, L, S in SIZES:
        told.append(mh.explain(layer, batch=B, length=L, source_length=S).kernel)
        seen.append(what_ran(called(layer, B, L, S))[0])
    assert told == seen, SIZES
    assert ("native" in told) == (native and name != "f64")


def bias(*shape: int, learned: bool = False) -> Tensor:
    return torch.zeros(shape, requires_grad=learned)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("own", [{"mask": mh.causal()}, {"position": mh.ALiBi(H)}], ids=["causal", "alibi"])
@pytest.mark.parametrize(
    "given",
    [
        {"mask": mh.window(left=15)},
        {"mask": mh.documents(torch.arange(LONG) // 100)},
        {"mask": mh.lengths(31)},
        {"mask": torch.ones(LONG, LONG, dtype=torch.bool)},
        {"bias": bias(H, LONG, LONG)},
        {"bias": bias(1, LONG, learned=True)},
        {"bias": mh.ALiBi(H)},
        {"bias": bias(H, 1, LONG), "mask": mh.window(left=3, right=3)},
    ],
    ids=["window", "documents", "lengths", "table", "bias", "learned bias", "alibi", "bias and window"],
)
def test_masks_and_biases_of_the_call(own, given, training, native):
    layer = mh.Attention(E, H, num_kv_heads=K, **own).train(training)
    told = mh.explain(layer, length=LONG, **given)
    assert told.kernel == what_ran(called(layer, 1, LONG, None, **given))[0]
    assert (told.kernel == "native") == native


def test_training_says_what_the_call_would_do(native):
    layer = mh.Attention(E, H, dropout=0.1).eval()
    assert mh.explain(layer).kernel == mh.explain(layer, training=False).kernel == "whole"
    assert mh.explain(layer, length=129).kernel == ("native" if native else "sdpa")
    assert mh.explain(layer, training=True).kernel == ("native" if native else "small")
    assert mh.explain(layer, training=True, length=389).kernel == ("native" if native else "blocks")
    assert "not training" in str(mh.explain(layer))
    assert "not training" not in str(mh.explain(layer.train()))
    assert mh.explain(layer).kernel == ("native" if native else "small")


@pytest.mark.parametrize("training", [True, False])
def test_it_does_not_matter_where_it_is_asked(training, native):
    """It says whether gradients are recorded, so what is recorded around it does not count."""
    for position, given in ((mh.T5Bias(H), {}), (None, {"bias": bias(7, 7, learned=True)})):
        layer = mh.Attention(E, H, position=position)
        asked = {"training": training, "length": 7, **given}
        answers = [mh.explain(layer, **asked)]
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                answers.append(mh.explain(layer, **asked))
        assert len({str(answer) for answer in answers}) == 1
        assert answers[0].kernel == ("native" if native else "small" if training else "sdpa")


@pytest.mark.parametrize("name", LAYERS)
def test_arguments_are_as_good_as_a_layer(name):
    options = LAYERS[name]()
    dtype = {"dtype": options.get("dtype", torch.float32)}
    layer = mh.Attention(E, H, **options).eval()
    arguments = {"embed_dim": E, "num_heads": H, **LAYERS[name]()}
    for training in (None, True):
        asked = {"batch": 3, "length": 7, "source_length": 11, "training": training, **dtype}
        by_layer, by_arguments = mh.explain(layer, **asked), mh.explain(arguments, **asked)
        assert str(by_layer) == str(by_arguments)
        assert by_layer == by_arguments


# Steps ----------------------------------------------------------------------------------------------------------------


class Products(TorchFunctionMode):
    """The shapes that nn.functional.linear turns into others, one pair for each call."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            self.shapes.append((tuple(args[0].shape), tuple(out.shape)))
        return out


def shapes_in(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in re.findall(r"\d+", found)) for found in re.findall(r"\([\d, ]+\)", text)]


STEPPED = {
    "self": ({}, None),
    "context": ({"kdim": 22, "vdim": 22, "num_kv_heads": 2}, 11),
    "same width": ({"num_kv_heads": 2, "out_dim": 14}, 11),
    "split": ({"packed": False, "value_dim": 7, "head_dim": 8}, None),
    "all": (
        {"gate": True, "qk_norm": True, "sinks": True, "position": mh.Rotary(4), "num_kv_heads": 1, "value_dim": 4},
        None,
    ),
    "all, context": ({"gate": True, "qk_norm": True, "sinks": True, "value_dim": 4, "kdim": 14, "vdim": 14}, 11),
    "biased": ({"position": mh.ALiBi(H), "softcap": 3.0}, 11),
    "learned": ({"position": mh.T5Bias(H), "gate": True}, 11),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", STEPPED)
def test_shapes_of_the_steps(name, monkeypatch):
    options, S = STEPPED[name]
    B, L = 3, 7
    layer = mh.Attention(E, H, **options).train()  # in eval some layers run as one operation, without steps to watch
    steps = dict(explained := mh.explain(layer, batch=B, length=L, source_length=S).steps)
    own = sys.modules["multihead.layer"]
    attended, compute = [], own.attention

    def watched(q, k, v, *args, **keywords):
        out = compute(q, k, v, *args, **keywords)
        attended.append([tuple(t.shape) for t in (q, k, v, out)])
        return out

    monkeypatch.setattr(own, "attention", watched)
    call = called(layer, B, L, S)
    with Products() as products:
        call()
    told = [tuple(shapes_in(text)) for name, text in explained if name.endswith("_proj")]
    assert told == products.shapes  # as many, and in this order
    assert shapes_in(steps["heads"]) == attended[0][:3]
    assert shapes_in(steps["attention"]) == attended[0][3:]
    assert steps["attention"].endswith("by " + mh.explain(layer, batch=B, length=L, source_length=S).kernel)

    hooked = {}
    for child, module in layer.named_children():
        module.register_forward_hook(
            lambda _, args, out, child=child: hooked.update(
                {child: (*(tuple(a.shape) for a in args), tuple(out.shape))}
            )
        )
    call()
    if layer.q_norm is not None:
        assert shapes_in(steps["norms"]) == [hooked["q_norm"][0], hooked["k_norm"][0]]
    assert ("norms" in steps) == (layer.q_norm is not None)
    if isinstance(layer.position, nn.Module):
        assert shapes_in(steps[type(layer.position).__name__]) == [hooked["position"][-1]]
    elif layer.position is not None:
        shapes = shapes_in(steps[type(layer.position).__name__])
        assert shapes == (attended[0][:2] if layer.position.rotates else [(H, L, S)])
    if layer.gate_proj is not None:
        assert shapes_in(steps["gate_proj"]) == list(hooked["gate_proj"])
    assert shapes_in(steps["out_proj"]) == list(hooked["out_proj"])
    if layer.sinks is not None:
        assert shapes_in(steps["sinks"]) == [tuple(layer.sinks.shape), attended[0][0][:3]]
    assert ("sinks" in steps) == (layer.sinks is not None)


# Text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("length", [7, LONG])
def test_the_text_holds_all_that_was_found(name, length):
    found = mh.explain(mh.Attention(E, H, **LAYERS[name]()), length=length)
    text = str(found)
    lines = [line.strip() for line in text.splitlines()]
    assert f"kernel: {found.kernel}" in lines
    assert list(found.refusals) == ["whole", *mh.KERNELS]
    assert not found.refusals[found.kernel]
    assert found.subject in text
    assert found.inputs in text
    for kernel, reasons in found.refusals.items():
        if kernel == found.kernel:
            continue
        assert any(line.startswith(kernel + " ") for line in lines)
        for reason in reasons:
            assert any(line.startswith(kernel) and line.endswith(f"can't: {reason}") for line in lines)
        for reason in found.drawbacks.get(kernel, []):
            assert any(line.startswith(kernel) and line.endswith(f"not taken: {reason}") for line in lines)
    for table in found.tables:
        assert f"makes {table.what}, {binary(table.bytes)}: {table.why}" in lines
    assert ("makes no L x S tensor" in text) == (not found.tables)
    for step, shapes in found.steps:
        assert any(line.startswith(step) and line.endswith(shapes) for line in lines)


def test_tables_are_told(native):
    """The L x S tensors of the answer's way, or that there are none."""
    for options, given, has_table in (
        ({}, {}, True),  # one dense operation, for so few tokens
        ({}, {"length": 129}, False),
        ({"mask": mh.causal()}, {}, False),
        ({"mask": mh.causal(), "dropout": 0.1}, {"training": True, "length": LONG}, False),
        ({"mask": mh.causal(), "dropout": 0.1}, {"training": True}, not native),  # of so few scores
        ({"mask": mh.causal()}, {"length": 7, "source_length": 11}, not native),
        ({"position": mh.ALiBi(H)}, {}, not native),
        ({"position": mh.T5Bias(H)}, {"training": True}, True),
    ):
        arguments = {"embed_dim": E, "num_heads": H, **options}
        assert bool(mh.explain(arguments, **given).tables) == has_table, (options, given)


# What it costs --------------------------------------------------------------------------------------------------------


class Limited(TorchDispatchMode):
    """No storage that an operation makes may be larger than this, in bytes."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.largest = most, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for y in out if isinstance(out, tuple | list) else [out]:
            if isinstance(y, Tensor) and y.device.type == "cpu":
                self.largest = max(self.largest, y.untyped_storage().nbytes())
                assert self.largest <= self.most, f"{func} makes {self.largest} bytes"
        return out


HUGE = {
    "plain": (1_000_000, {}, {}),
    "causal": (1_000_000, {"mask": mh.causal(), "position": mh.Rotary(4)}, {}),
    "t5": (1_000_000, {"position": mh.T5Bias(H)}, {"training": True}),
    "dropout": (1_000_000, {"dropout": 0.5}, {"training": True}),
    # Not as long, as this test is not to take the memory itself where it fails.
    "window": (300_000, {"mask": mh.window(left=255, right=0)}, {}),
    "alibi": (300_000, {"mask": mh.causal(), "position": mh.ALiBi(H)}, {}),
    "prefix": (300_000, {"mask": mh.causal() | mh.prefix(1000)}, {}),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", HUGE)
def test_nothing_is_computed(name):
    length, options, given = HUGE[name]
    with Limited(64 * length):  # some numbers for each token, and none for each pair
        found = mh.explain({"embed_dim": E, "num_heads": H, **options}, length=length, **given)
    assert str(length) in str(found)


def test_a_large_batch_of_padded_rows():
    lengths = torch.randint(1, 8192, (32,), generator=torch.Generator().manual_seed(0))
    found = mh.explain({"embed_dim": E, "num_heads": H}, batch=32, length=8192, mask=mh.causal() & mh.lengths(lengths))
    n = lengths.double()
    assert found.pairs[0] == H * int((n * (n + 1) / 2 + (8192 - n) * n).sum())


def test_a_layer_on_meta_is_asked_about_on_the_cpu():
    found = mh.explain(mh.Attention(E, H, device="meta", mask=mh.causal()), length=50)
    assert found == mh.explain({"embed_dim": E, "num_heads": H, "mask": mh.causal()}, length=50, training=True)
    assert "on cpu" in found.inputs


def test_what_a_layer_does_in_its_own_way_is_not_known():
    class Own(mh.Attention):
        def attend(self, *given):
            return super().attend(*given)

    assert "Own.attend is its own: what it runs is not known here" in mh.explain(Own(E, H)).hints
    assert (
        "the keys of add_bias_kv and add_zero_attn are not counted"
        in mh.explain(mh.MultiheadAttention(E, H, add_zero_attn=True)).hints
    )


def test_a_layer_too_large_for_the_machine():
    with Limited(2**20):
        found = mh.explain({"embed_dim": 2**20, "num_heads": 64})
    assert f"(1, 128, {3 * 2**20})" in str(found)


def test_nothing_is_changed():
    for name, options in LAYERS.items():
        layer = mh.Attention(E, H, **options())
        layer.qkv = None
        hook = layer.out_proj.register_forward_hook(lambda *_: pytest.fail("it was called"))
        before = {key: value.clone() for key, value in layer.state_dict().items()}
        attributes = {key: value for key, value in vars(layer).items() if not key.startswith("_")}
        wanted = [parameter.requires_grad for parameter in layer.parameters()]
        state = torch.get_rng_state()
        for training in (None, True, False):
            mh.explain(layer, training=training, mask=mh.causal())
        assert layer.training, name
        after = layer.state_dict()
        assert list(before) == list(after)
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert {key: value for key, value in vars(layer).items() if not key.startswith("_")} == attributes
        assert [parameter.requires_grad for parameter in layer.parameters()] == wanted
        assert all(parameter.grad is None for parameter in layer.parameters())
        assert torch.equal(torch.get_rng_state(), state)
        assert len(layer.out_proj._forward_hooks) == 1
        hook.remove()


def test_arguments_stay_as_they_were():
    mask = mh.padding(torch.ones(7, dtype=torch.bool))
    arguments = {"embed_dim": E, "num_heads": H, "mask": mask}
    before = dict(arguments)
    assert "sdpa" in str(mh.explain(arguments, length=7))
    assert arguments == before


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "options", "error", "pattern"),
    [
        (
            nn.Linear(2, 3),
            {},
            TypeError,
            r"^subject: expected an Attention, or a mapping of its arguments, got an object of "
            r"type Linear\..* explain one of its layers",
        ),
        ({"embed_dim": E}, {}, ValueError, r"^subject: expected at least embed_dim and num_heads, got no num_heads\."),
        ({}, {}, ValueError, "no embed_dim and no num_heads"),
        ({"embed_dim": 31, "num_heads": 6}, {}, ValueError, "^embed_dim: expected a multiple of num_heads=6, got 31"),
        (None, {"length": -1}, ValueError, "^length: expected at least 0, got -1"),
        (None, {"length": 2.0}, TypeError, "^length: expected an int, got 2.0"),
        (None, {"batch": True}, TypeError, "^batch: expected an int, got True"),
        (None, {"source_length": -3}, ValueError, "^source_length: expected at least 0, got -3"),
        (
            None,
            {"mask": mh.padding(torch.ones(11, dtype=torch.bool)), "length": 7},
            ValueError,
            r"^padding\(keep\): expected the shape .* with S=7",
        ),
        (None, {"mask": torch.zeros(7, 7), "length": 7}, TypeError, "^mask: expected a Mask or a bool tensor"),
        (None, {"bias": torch.zeros(H, 5, 7), "length": 7}, ValueError, "^bias: expected a shape that broadcasts"),
        (nn.MultiheadAttention(E, H), {}, TypeError, r"multihead\.swap\(model\)"),
        (None, {"device": "banana"}, ValueError, "^device: expected one that is here, got 'banana'"),
        (None, {"dtype": "bfloat16"}, TypeError, "^dtype: expected a torch.dtype of floating point"),
        (None, {"dtype": torch.int64}, TypeError, "^dtype: expected a torch.dtype of floating point"),
        (None, {"training": "yes"}, TypeError, "^training: expected True or False"),
        (None, {"measure": 1}, TypeError, "^measure: expected True or False"),
        (None, {"bias": mh.ALiBi(4)}, ValueError, "^bias: expected a bias for H=6 query heads, got one for 4"),
    ],
)
def test_mistakes(subject, options, error, pattern):
    with pytest.raises(error, match=pattern):
        mh.explain(mh.Attention(E, H) if subject is None else subject, **options)
