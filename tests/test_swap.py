"""`swap` and `unswap` themselves: which layers, what stays, what is refused, what is reported.

That whole models compute the same is in test_swap_models.py.
"""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import multihead
from multihead import MultiheadAttention, swap, unswap

f64 = torch.float64
Torch = nn.MultiheadAttention


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


X = draw(2, 5, 12)


def layer(seed=0, **options):
    torch.manual_seed(seed)
    return Torch(12, 3, **{"batch_first": True, "dtype": f64, **options})


class Model(nn.Module):
    """Layers in containers of each kind, one of them in two places."""

    def __init__(self):
        super().__init__()
        self.first = layer(1)
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"attn": layer(i), "mlp": nn.Linear(12, 12, dtype=f64)}) for i in (2, 3)]
        )
        self.shared = self.first

    def forward(self, x):
        for attn in (self.first, *(block["attn"] for block in self.blocks), self.shared):
            x = x + attn(x, x, x, need_weights=False)[0]
        return x


NAMES = ("first", "blocks.0.attn", "blocks.1.attn")


# Which layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (None, NAMES),
        ("first", NAMES[:1]),
        ("blocks.*", NAMES[1:]),
        ("blocks.?.attn", NAMES[1:]),
        (["first", "blocks.1.*"], (NAMES[0], NAMES[2])),
        (("blocks.*", "blocks.0.*"), NAMES[1:]),
        (lambda name, attn: name.endswith("attn") and attn.num_heads == 3, NAMES[1:]),
        (lambda name, attn: False, ()),  # noqa: ARG005
        ([], ()),
    ],
    ids=str,
)
def test_only(only, names):
    model = Model()
    assert swap(model, only).swapped == names
    for name in NAMES:
        assert (type(model.get_submodule(name)) is MultiheadAttention) == (name in names), name
    swap(model)
    assert unswap(model, only).swapped == names
    for name in NAMES:
        assert (type(model.get_submodule(name)) is Torch) == (name in names), name


@pytest.mark.parametrize("undo", [swap, unswap])
def test_a_name_that_fits_nothing_is_an_error_and_changes_nothing(undo):
    model = Model()
    for only in ("none", "blocks", "blocks.0.mlp", ["first", "nowhere.*"]):
        with pytest.raises(ValueError, match=r"^only: .*'(none|blocks|blocks\.0\.mlp|nowhere\.\*)'.*'blocks\.0\.attn'"):
            undo(model, only)
    assert not any(isinstance(m, MultiheadAttention) for m in model.modules())


@pytest.mark.parametrize("only", [3, [1, 2], True], ids=str)
def test_only_of_another_kind(only):
    with pytest.raises(TypeError, match=r"^only: expected"):
        swap(Model(), only)


@pytest.mark.parametrize("model", [None, torch.zeros(3), Torch, [layer()]], ids=lambda m: type(m).__name__)
def test_what_is_no_model(model):
    for do in (swap, unswap):
        with pytest.raises(TypeError, match=r"^model: expected a torch\.nn\.Module"):
            do(model)


def test_models_without_attention():
    for model in (nn.Linear(2, 3), nn.Sequential(), nn.Identity(), multihead.Attention(12, 3), nn.ModuleList()):
        before = list(model.modules())
        assert len(swap(model)) == 0 == len(unswap(model))
        assert list(model.modules()) == before
    with pytest.raises(ValueError, match="The model has: none"):
        swap(nn.Linear(2, 3), "attn")


def test_the_model_itself():
    model = layer()
    want = model(X, X, X)[0]
    report = swap(model)
    assert report.swapped == ("",)
    assert type(model) is MultiheadAttention
    assert "(the model itself)" in str(report)
    torch.testing.assert_close(model(X, X, X)[0], want, rtol=0, atol=1e-12)
    unswap(model)
    assert type(model) is Torch


def test_twice_is_harmless():
    model = Model()
    swap(model)
    attributes = {name: list(vars(m)) for name, m in model.named_modules()}
    hooks = [dict(m._forward_pre_hooks) for m in model.modules()]
    again = swap(model)
    assert not again.swapped
    assert list(again.skipped) == list(NAMES)
    assert {name: list(vars(m)) for name, m in model.named_modules()} == attributes
    assert [dict(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert len(unswap(model)) == 3
    assert len(unswap(model)) == 0
    assert len(swap(model)) == 3


class Sub(Torch):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_subclasses_and_parametrised_layers_are_left_with_a_reason():
    parametrised = layer()
    parametrize.register_parametrization(parametrised, "in_proj_weight", nn.Identity())
    model = nn.ModuleDict({"plain": layer(), "sub": Sub(12, 3), "par": parametrised, "ours": MultiheadAttention(12, 3)})
    kinds = {name: type(m) for name, m in model.items()}
    report = swap(model)
    assert report.swapped == ("plain",)
    assert "a Sub, a subclass" in report.skipped["sub"]
    assert "parametris" in report.skipped["par"]
    assert "already" in report.skipped["ours"]
    for name in ("sub", "par", "ours"):
        assert type(model[name]) is kinds[name]
        assert f"  {name}: {report.skipped[name]}" in str(report).split("left as they are:")[1]
    back = unswap(model)
    assert back.swapped == ("plain",)
    assert list(back.skipped) == ["ours"]


def test_the_report():
    model = Model()
    report = swap(model, "blocks.*")
    assert len(report) == 2
    assert str(report).splitlines() == ["swapped 2 layers of attention:", "  blocks.0.attn", "  blocks.1.attn"]
    assert str(swap(model, "first")).splitlines() == ["swapped 1 layer of attention:", "  first"]
    assert str(swap(nn.Linear(1, 1))) == "swapped 0 layers of attention"
    assert str(unswap(model, "first")).splitlines() == ["unswapped 1 layer of attention:", "  first"]
    assert report.skipped == {}


# What stays -----------------------------------------------------------------------------------------------------------

OPTIONS = (
    {},
    {"kdim": 7, "vdim": 5},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"dropout": 0.25},
)
every_option = pytest.mark.parametrize("options", [*OPTIONS, {"batch_first": False}], ids=str)


def call(attn, **more):
    context = draw(2, 5, attn.kdim, seed=1), draw(2, 5, attn.vdim, seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return attn(X, *context, **more)


@every_option
@pytest.mark.parametrize("training", [True, False])
def test_there_and_back(options, training):
    attn = layer(**options).train(training)
    attn.in_proj_bias is not None and nn.init.normal_(attn.in_proj_bias)
    attn.requires_grad_(False)
    attn.note, attn.out_proj.note = "kept", "too"
    attributes, state = dict(vars(attn)), dict(attn.state_dict(keep_vars=True))
    torch.manual_seed(3)
    want = call(attn.eval())
    attn.train(training)
    swap(attn)
    assert attn.training == training
    assert all(m.training == training for m in attn.modules())
    assert list(attn.state_dict()) == list(state) == [name for name, _ in attn.named_parameters()]
    assert all(p is state[name] and not p.requires_grad for name, p in attn.named_parameters())
    found = call(attn.eval())
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    attn.train(training)
    unswap(attn)
    assert type(attn) is Torch
    assert list(vars(attn)) == list(attributes)
    assert all(vars(attn)[name] is value for name, value in attributes.items() if name[0] != "_" and name != "training")
    assert attn.training == training
    assert list(attn._modules) == ["out_proj"]
    assert not attn._forward_pre_hooks
    assert all(torch.equal(a, b) for a, b in zip(call(attn.eval()), want, strict=True))


@every_option
def test_a_swapped_layer_is_the_one_made_as_ours(options):
    attn = layer(**options).eval()
    ours = MultiheadAttention(12, 3, **{"batch_first": True, "dtype": f64, **options}).eval()
    ours.load_state_dict(attn.state_dict())
    swap(attn)
    same = {name for name in vars(ours) if name not in ("_parameters", "_modules", "_forward_pre_hooks", "training")}
    assert {name: getattr(attn, name) for name in same} == {name: getattr(ours, name) for name in same}
    assert list(attn._modules) in (list(ours._modules), ["out_proj", *(n for n in ours._modules if n != "out_proj")])
    assert len(attn._forward_pre_hooks) == len(ours._forward_pre_hooks) == 1  # that torch's layers can't go round it
    torch.testing.assert_close(call(attn), call(ours), rtol=0, atol=1e-12)
    torch.testing.assert_close(call(attn, is_causal=True), call(ours, is_causal=True), rtol=0, atol=1e-12)


def test_hooks_stay_and_run():
    attn, seen = layer(), []
    attn.register_forward_hook(lambda *_: seen.append("after"))
    attn.register_forward_pre_hook(lambda *_: seen.append("before"))
    attn.in_proj_weight.register_hook(lambda *_: seen.append("gradient"))
    attn.out_proj.register_forward_hook(lambda *_: seen.append("out_proj"))  # which torch's layer never calls
    swap(attn)
    attn(X, X, X)[0].sum().backward()
    assert seen == ["before", "out_proj", "after", "gradient"]
    unswap(attn)
    assert len(attn._forward_hooks) == len(attn._forward_pre_hooks) == 1
    attn(X, X, X)
    assert seen[4:] == ["before", "after"]


def test_an_optimizer_made_before_still_steps():
    model = Model()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    for step in range(4):
        (swap if step % 2 else unswap)(model)
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(X).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)  # AdamW makes much of small differences
    assert not torch.allclose(model.first.in_proj_weight, Model().first.in_proj_weight, atol=0.05)


def test_a_layer_in_two_places_stays_one():
    model = Model()
    swap(model)
    assert model.shared is model.first
    assert len(list(model.parameters())) == len(list(Model().parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_their_own(copied):
    model = Model().eval()
    swap(model)
    twin = copied(model)
    assert twin.first.in_proj.owner is twin.first
    assert twin.shared is twin.first
    with torch.no_grad():
        want = model(X)
        assert torch.equal(twin(X), want)
        twin.first.in_proj_weight.zero_()
        assert not torch.equal(twin(X), want)
        assert torch.equal(model(X), want)
    assert len(unswap(twin)) == 3
    assert all(type(model.get_submodule(name)) is MultiheadAttention for name in NAMES)


# What torch's layer does not have -------------------------------------------------------------------------------------

CHANGES = {
    "scale": lambda m: setattr(m, "scale", 2.0),
    "softcap": lambda m: setattr(m, "softcap", 2.0),
    "mask": lambda m: setattr(m, "mask", multihead.causal()),
    "position": lambda m: setattr(m, "position", multihead.ALiBi(3)),
    "T5Bias": lambda m: setattr(m, "position", multihead.T5Bias(3)),
    "sinks": lambda m: setattr(m, "sinks", nn.Parameter(torch.zeros(3))),
    "gate_proj": lambda m: setattr(m, "gate_proj", nn.Linear(12, 12)),
    "out_dropout": lambda m: setattr(m, "out_dropout", nn.Dropout(0.5)),
    "in_proj replaced": lambda m: setattr(m, "in_proj", nn.Linear(12, 36)),
    "in_proj wrapped": lambda m: setattr(m, "in_proj", nn.Sequential(m.in_proj)),
    "in_proj hooked": lambda m: m.in_proj.register_forward_hook(lambda *_: None),
    "in_proj hooked before": lambda m: m.in_proj.register_forward_pre_hook(lambda *_: None),
    "in_proj's forward": lambda m: setattr(m.in_proj, "forward", lambda x: x),
    "parametrised": lambda m: parametrize.register_parametrization(m, "in_proj_weight", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_unswap_refuses_what_would_be_lost(change):
    attn = layer()
    swap(attn)
    CHANGES[change](attn)
    kind, children = type(attn), list(attn.named_children())
    report = unswap(attn)
    assert not report.swapped, f"{change} got lost"
    assert report.skipped[""]
    assert type(attn) is kind
    assert list(attn.named_children()) == children


def test_what_torch_s_layer_has_may_change():
    attn = layer()
    swap(attn)
    attn.dropout, attn.out_proj = 0.5, nn.Linear(12, 12, dtype=f64)
    attn.in_proj_weight = nn.Parameter(2 * attn.in_proj_weight.detach())
    want = attn.eval()(X, X, X)[0]
    assert unswap(attn).swapped == ("",)
    torch.testing.assert_close(attn(X, X, X)[0], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_distributed_checkpoints_go_both_ways(options):
    state = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    one, other = layer(1, **options), layer(2, **options)
    swap(one)
    for source, target in ((one, other), (other, one)):
        with torch.no_grad():
            source.in_proj_bias is not None and source.in_proj_bias.normal_()
        taken = state.get_model_state_dict(source)
        assert list(taken) == [name for name, _ in source.named_parameters()]
        assert not state.set_model_state_dict(target, taken).missing_keys
        for name, p in target.named_parameters():
            assert torch.equal(p, taken[name])
        torch.testing.assert_close(call(source), call(target), rtol=0, atol=1e-12)
