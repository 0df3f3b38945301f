"""The drop-in as a layer: its constructor, its projections and hooks, and its copies."""

import copy
import inspect
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import multihead as mh
from multihead import Attention, MultiheadAttention
from test_drop_in import MODES, build, close, draw, f64

X = draw(2, 5, 12)
BIG = draw(3, 200, 12)  # more tokens than a whole layer is run for as one operation
OPTIONS = (
    {},
    {"kdim": 12, "vdim": 12, "bias": False},
    {"kdim": 7, "vdim": 5},
    {"add_bias_kv": True, "add_zero_attn": True},
)
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def make(**options):
    return build(12, 3, **{"batch_first": True, **options})


def sources(layer, x=X):
    if layer.kdim == layer.vdim == 12:
        return x, x, x
    return x, draw(*x.shape[:2], layer.kdim, seed=1), draw(*x.shape[:2], layer.vdim, seed=2)


# The constructor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_the_signature_is_torch_s_and_more(method):
    ours, theirs = (
        list(inspect.signature(getattr(c, method)).parameters.values())
        for c in (MultiheadAttention, nn.MultiheadAttention)
    )
    for have, want in zip(ours, theirs, strict=False):
        assert (have.name, have.default, have.kind) == (want.name, want.default, want.kind)
    assert all(extra.kind is extra.KEYWORD_ONLY for extra in ours[len(theirs) :])


def test_every_option_of_attention_is_an_option():
    names = set(inspect.signature(Attention).parameters) - {"packed"}
    assert names <= set(inspect.signature(MultiheadAttention).parameters)


MORE = {
    "num_kv_heads": {"num_kv_heads": 1}, "head_dim": {"head_dim": 6}, "value_dim": {"value_dim": 5},
    "out_dim": {"out_dim": 7}, "out_bias": {"out_bias": False}, "position": {"position": mh.Rotary()},
    "biases": {"position": mh.ALiBi(3)}, "qk_norm": {"qk_norm": True}, "gate": {"gate": True}, "sinks": {"sinks": True},
    "softcap": {"softcap": 1.5}, "scale": {"scale": 0.7}, "mask": {"mask": mh.causal()},
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_options_mean_what_they_mean_in_attention(name):
    ours, plain = make(**MORE[name]), Attention(12, 3, dtype=f64, **MORE[name])
    state = {key.replace("in_proj_", "qkv_proj."): value for key, value in ours.state_dict().items()}
    plain.load_state_dict(state)
    want, by_head = plain(X, mask=mh.window(left=2), weights=True)
    for mode, look in itertools.product(MODES, (None, True, False)):
        ours.train(MODES[mode][0])
        with torch.set_grad_enabled(MODES[mode][1]):
            out, seen = ours(
                X, X, X, mask=mh.window(left=2), need_weights=look is not None, average_attn_weights=bool(look)
            )
        close(out, want, f"{name}, {mode}")
        if look is not None:
            close(seen, by_head.mean(1) if look else by_head, f"weights of {name}, {mode}")
    assert want.shape != X.shape or not torch.allclose(want, make()(X, X, X)[0])


def test_short_names():
    close(make(sliding_window=3)(X, X, X)[0], make()(X, X, X, mask=mh.window(left=2, right=0))[0])
    close(make(rope_theta=50.0)(X, X, X)[0], make(position=mh.Rotary(base=50.0))(X, X, X)[0])
    close(
        make(sliding_window=3, mask=mh.lengths(4))(X, X, X)[0], make()(X, X, X, mask=mh.window(2, 0) & mh.lengths(4))[0]
    )


@pytest.mark.parametrize(
    ("arguments", "options", "error", "name"),
    [
        ((13, 3), {}, ValueError, "embed_dim"), ((12, 0), {}, ValueError, "num_heads"),
        ((12.0, 3), {}, TypeError, "embed_dim"), ((12, 3, 1.5), {}, ValueError, "dropout"),
        ((12, 3, True), {}, TypeError, "dropout"), ((12, 3, 0.0, 1), {}, TypeError, "bias"),
        ((12, 3), {"add_bias_kv": 1}, TypeError, "add_bias_kv"),
        ((12, 3), {"add_zero_attn": None}, TypeError, "add_zero_attn"),
        ((12, 3), {"batch_first": "yes"}, TypeError, "batch_first"), ((12, 3), {"kdim": 0}, ValueError, "kdim"),
        ((12, 3), {"vdim": 2.5}, TypeError, "vdim"), ((12, 3), {"dtype": torch.int64}, TypeError, "dtype"),
        ((12, 3), {"num_kv_heads": 2}, ValueError, "num_kv_heads"),
        ((12, 3), {"sliding_window": 0}, ValueError, "sliding_window"),
        ((12, 3), {"sliding_window": 2.0}, TypeError, "sliding_window"),
        ((12, 3), {"rope_theta": "x"}, TypeError, "rope_theta"),
        ((12, 3), {"rope_theta": 10.0, "position": mh.ALiBi(3)}, ValueError, "rope_theta"),
        ((9, 3), {"rope_theta": 10.0}, ValueError, ""), ((12, 3), {"position": mh.ALiBi(4)}, ValueError, ""),
        ((12, 3), {"dtype": torch.complex64, "qk_norm": True}, ValueError, "qk_norm"),
    ],
)  # fmt: skip
def test_bad_options(arguments, options, error, name):
    with pytest.raises(error, match=rf"^{name}"):
        MultiheadAttention(*arguments, **options)


@every_option
def test_state_goes_both_ways_and_torch_agrees(options):
    theirs = nn.MultiheadAttention
    ours, other = make(**options), theirs(12, 3, batch_first=True, dtype=f64, **options)
    assert isinstance(ours, theirs)
    assert list(ours.state_dict()) == list(other.state_dict()) == [name for name, _ in ours.named_parameters()]
    other.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(copy.deepcopy(other.state_dict()), strict=True)
    for name in (
        "embed_dim",
        "kdim",
        "vdim",
        "num_heads",
        "head_dim",
        "dropout",
        "batch_first",
        "add_zero_attn",
        "_qkv_same_embed_dim",
    ):
        assert getattr(ours, name) == getattr(other, name)
    for name in (
        "in_proj_weight",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "in_proj_bias",
        "bias_k",
        "bias_v",
    ):
        assert (getattr(ours, name) is None) == (getattr(other, name) is None), name
    mask, padding = torch.rand(5, 5) < 0.3, torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    mask.fill_diagonal_(False)[:, 0] = False
    for call in (
        {},
        {"attn_mask": mask},
        {"key_padding_mask": padding},
        {"attn_mask": mask, "key_padding_mask": padding},
    ):
        for look in ({"need_weights": False}, {"average_attn_weights": False}):
            for a, b in zip(ours(*sources(ours), **call, **look), other(*sources(ours), **call, **look), strict=True):
                close(a, b) if a is not None else None
                assert (a is None) == (b is None)


def test_both_layouts_start_alike():
    """https://github.com/pytorch/pytorch/issues/33721"""
    torch.manual_seed(0)
    joined = MultiheadAttention(256, 4)
    torch.manual_seed(0)
    apart = MultiheadAttention(256, 4, kdim=256, vdim=256)
    apart_2 = MultiheadAttention(256, 4, kdim=255, vdim=256)
    assert torch.equal(joined.in_proj_weight, apart.in_proj_weight)
    for part, rows in zip("qv", (slice(0, 256), slice(512, 768)), strict=True):
        spread = getattr(apart_2, f"{part}_proj_weight").std()
        torch.testing.assert_close(spread, joined.in_proj_weight[rows].std(), rtol=0.02, atol=0)
    assert not joined.in_proj_bias.any()
    before = joined.in_proj_weight.detach().clone()
    joined._reset_parameters()
    assert not torch.equal(before, joined.in_proj_weight)


# Projections are modules ----------------------------------------------------------------------------------------------


def old_weight_norm(module, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(module, name)
    getattr(module, f"{name}_g").data.mul_(2)


def new_weight_norm(module, name):
    parametrizations.weight_norm(module, name)
    module.parametrizations[name].original0.data.mul_(2)


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, base.out_features, dtype=f64)

    def forward(self, x):
        return self.base(x) + self.down(x)


def forward_replaced(layer, name):
    module = layer.get_submodule(name)
    old = module.forward
    module.forward = lambda x: 2 * old(x)


def on_weight(change):
    return lambda m, name: change(*((m, f"{name}_weight") if name != "out_proj" else (m.out_proj, "weight")))


CHANGES = {
    "forward hook": lambda m, name: m.get_submodule(name).register_forward_hook(lambda *a: 2 * a[2]),
    "pre-hook": lambda m, name: m.get_submodule(name).register_forward_pre_hook(lambda *a: (2 * a[1][0],)),
    "adapter": lambda m, name: setattr(m, name, Adapted(m.get_submodule(name))),
    "forward": forward_replaced,
    "another": lambda m, name: setattr(m, name, nn.Linear(12, m.get_submodule(name).out_features, dtype=f64)),
    "parametrised": on_weight(lambda m, name: parametrize.register_parametrization(m, name, nn.Tanh())),
    "pruned": on_weight(lambda m, name: prune.l1_unstructured(m, name, 0.5)),
    "weight norm": on_weight(new_weight_norm),
    "old weight norm": on_weight(old_weight_norm),
    "set": lambda m, name: setattr(
        m.get_submodule(name), "weight", nn.Parameter(m.get_submodule(name).weight.detach() * 2)
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["in_proj", "out_proj", "v_proj"])
def test_a_changed_projection_has_effect(name, change, mode):
    """out_proj was never called: https://github.com/pytorch/pytorch/issues/78109, 34583"""
    for x, look in itertools.product((X, BIG), (True, False)):
        layer = make(**({"vdim": 12, "kdim": 11} if name == "v_proj" else {}))
        inputs = sources(layer, x)
        layer.train(MODES[mode][0])
        with torch.set_grad_enabled(MODES[mode][1]):
            before = layer(*inputs, need_weights=look)[0]
            CHANGES[change](layer, name)
            after = layer(*inputs, need_weights=look)[0]
        assert not torch.allclose(before, after), f"{len(x)} rows, weights {look}"
        with torch.enable_grad():
            want = layer.train()(*inputs)[0]
        close(after, want)


def test_global_hooks_see_the_projections():
    layer, seen = make().eval(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        with torch.no_grad():
            layer(X, X, X)
    finally:
        handle.remove()
    assert seen == [layer.in_proj, layer.out_proj, layer]


@every_option
def test_a_view_shows_the_layer_s_numbers(options):
    layer = make(**options)
    names = ["in_proj"] if layer.in_proj_weight is not None else ["q_proj", "k_proj", "v_proj"]
    whole = [layer.get_submodule(name) for name in names]
    own = [p.flatten() for name, p in layer.named_parameters() if name.endswith("proj_weight")]
    assert torch.equal(torch.cat([view.weight.flatten() for view in whole]), torch.cat(own))
    if layer.in_proj_bias is not None:
        assert torch.equal(torch.cat([view.bias for view in whole]), layer.in_proj_bias)
    for view in whole:
        assert not list(view.parameters())
        assert isinstance(view, nn.Linear)
        new = nn.Parameter(view.weight.detach() + 1)
        view.weight = new
        assert (
            dict(layer.named_parameters())[f"{'in_proj' if len(names) == 1 else names[whole.index(view)]}_weight"]
            is new
        )
    if len(names) == 3 and layer.in_proj_bias is not None:
        with pytest.raises(AttributeError, match="in_proj_bias"):
            layer.k_proj.bias = nn.Parameter(torch.zeros(12))


# Copies and conversions -----------------------------------------------------------------------------------------------


@every_option
def test_copies_have_their_own_numbers(options):
    layer = make(**options).eval()
    for copied in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        twin = copied(layer)
        want = layer(*sources(layer))[0]
        close(twin(*sources(layer))[0], want)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert not twin(*sources(layer))[0].any()
        close(layer(*sources(layer))[0], want)
    close(copy.copy(layer)(*sources(layer))[0], layer(*sources(layer))[0])


def test_a_replica_reads_its_own_parameters():
    """What DataParallel does: https://github.com/pytorch/pytorch/blob/main/torch/nn/parallel/replicate.py"""
    layer = make()
    modules = list(layer.modules())
    replicas = {m: m._replicate_for_data_parallel() for m in modules}
    for m, replica in replicas.items():
        for name, child in m._modules.items():
            setattr(replica, name, replicas[child])
        for name, p in m._parameters.items():
            setattr(replica, name, None if p is None else 2 * p.detach())
    assert not torch.allclose(replicas[layer](X, X, X)[1], layer(X, X, X)[1])


@pytest.mark.usefixtures("native")
def test_meta_and_back():
    layer = make(add_bias_kv=True)
    away = copy.deepcopy(layer).to("meta")
    assert away(X.to("meta"), X.to("meta"), X.to("meta"), is_causal=True)[1].shape == (2, 5, 6)
    back = away.to_empty(device="cpu")
    back.load_state_dict(layer.state_dict())
    close(back(X, X, X)[0], layer(X, X, X)[0])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        half = copy.deepcopy(layer).to(dtype)
        out, weights = half(*[X.to(dtype)] * 3)
        assert out.dtype == weights.dtype == dtype
        exact = copy.deepcopy(half).double()(*[X.to(dtype).double()] * 3)
        close(out, exact[0], str(dtype), atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("L", [5, 430])
def test_a_learned_mask_of_a_frozen_layer_gets_its_gradient(options, L):
    layer, x = make(**options).requires_grad_(False), draw(1, L, 12)
    for look in (True, False):
        mask, padding = draw(L, L).requires_grad_(), draw(1, L).requires_grad_()
        out = layer(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=look)[0]
        found = torch.autograd.grad(out.square().sum(), (mask, padding), allow_unused=True)
        assert all(g is not None and g.any() for g in found), f"weights {look}"
