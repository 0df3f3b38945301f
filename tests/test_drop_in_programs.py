"""Programs made of the drop-in: functional calls, transforms, derivatives, compiled and exported graphs."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import multihead as mh
from multihead import MultiheadAttention
from test_drop_in import MODES, close, draw
from test_drop_in_layer import OPTIONS, X, every_option, make, sources


@every_option
@pytest.mark.parametrize("look", [True, False])
def test_functional_calls_and_transforms(options, look):
    layer = make(**options)
    inputs, parameters = sources(layer), {n: p.detach() for n, p in layer.named_parameters()}
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    changed = {n: 2 * p for n, p in parameters.items()}
    call = {"need_weights": look}
    close(torch.func.functional_call(layer, changed, inputs, call)[0], twin(*inputs, **call)[0])

    def loss(parameters, *inputs):
        return torch.func.functional_call(layer, parameters, inputs, call)[0].square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0))(parameters, *inputs)
    loss(dict(layer.named_parameters()), *inputs).backward()
    for name, p in layer.named_parameters():
        close(per_sample[name].sum(0), p.grad, name)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own rules of differentiation
@every_option
def test_derivatives_of_every_kind(options):
    """https://github.com/pytorch/pytorch/issues/116350, 117974"""
    layer = make(**options).eval()
    inputs = [t[:1, :2].clone().requires_grad_() for t in sources(layer)]
    for call in (
        {},
        {"need_weights": False},
        {"average_attn_weights": False, "is_causal": True},
        {"attn_mask": draw(2, 2), "need_weights": False},
    ):

        def both(*inputs, call=call):
            return [t for t in layer(*inputs, **call) if t is not None]

        assert torch.autograd.gradgradcheck(both, inputs)
        with torch.no_grad(), forward_ad.dual_level():
            dual = [forward_ad.make_dual(t.detach(), torch.ones_like(t)) for t in inputs]
            tangent = forward_ad.unpack_dual(both(*dual)[0]).tangent
        step = [[t.detach() + sign * 1e-5 for t in inputs] for sign in (1, -1)]
        close(tangent, (both(*step[0])[0] - both(*step[1])[0]) / 2e-5, atol=1e-8)


@pytest.mark.parametrize("look", [True, False])
def test_dropout_repeats_and_acts_in_training_only(look):
    for options in ({}, {"add_bias_kv": True}):
        layer, still = make(dropout=0.4, **options), make(**options)
        x = X.clone().requires_grad_()

        def run(x, layer=layer):
            torch.manual_seed(1)
            return layer(x, x, x, need_weights=look)

        out, weights = run(x)
        assert (weights is not None) == look
        assert not torch.allclose(out, still(x, x, x)[0])
        assert torch.equal(run(x)[0], out)
        if look:
            close(weights, still(x, x, x)[1])
        again = checkpoint(lambda x: run(x)[0], x, use_reentrant=False)
        assert torch.equal(again, out)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, again)))
        close(layer.eval()(x, x, x)[0], still(x, x, x)[0])


@pytest.mark.usefixtures("native")
def test_autocast():
    for options in OPTIONS[:1] + OPTIONS[3:]:
        layer, x = make(**options, dtype=torch.float32), X.float()
        want = copy.deepcopy(layer).double()(X, X, X)
        for mode, look in itertools.product(MODES, (True, False)):
            layer.train(MODES[mode][0])
            with torch.set_grad_enabled(MODES[mode][1]), torch.autocast("cpu", torch.bfloat16):
                out, weights = layer(x, x, x, need_weights=look)
            assert out.dtype == torch.bfloat16
            close(out, want[0], mode, atol=0.03)
            if look:
                close(weights, want[1], mode, atol=0.03)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(dtype):
    layer = MultiheadAttention(12, 3, batch_first=True, dtype=dtype)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(torch.complex(draw(*p.shape, seed=i), draw(*p.shape, seed=50 + i)) * 0.3)
    z = torch.complex(X, draw(2, 5, 12, seed=9)).to(dtype)
    p = {name: t.to(torch.complex128) for name, t in layer.state_dict().items()}
    product = z.to(torch.complex128) @ p["in_proj_weight"].T + p["in_proj_bias"]
    q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in product.chunk(3, -1))
    weights = torch.softmax((q @ k.mH).real / 2, -1)
    want = (weights.to(v.dtype) @ v).transpose(1, 2).flatten(2) @ p["out_proj.weight"].T + p["out_proj.bias"]
    for mode, look in itertools.product(MODES, (None, True, False)):
        layer.train(MODES[mode][0])
        with torch.set_grad_enabled(MODES[mode][1]):
            out, seen = layer(z, z, z, need_weights=look is not None, average_attn_weights=bool(look))
        assert out.dtype == dtype
        torch.testing.assert_close(
            out.detach().to(want.dtype), want, rtol=0, atol=1e-12 if dtype == torch.complex128 else 1e-5
        )
        if look is not None:
            close(seen, weights.mean(1) if look else weights, atol=1e-12 if dtype == torch.complex128 else 1e-6)


compiled_function = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own


@compiled_function
@every_option
def test_compiled(options):
    layer = make(**options).eval()
    calls = ({"need_weights": False, "is_causal": True}, {"key_padding_mask": torch.tensor([[False] * 5, [True] * 5])})
    for call in calls:
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for a, b in zip(compiled(*sources(layer), **call), layer(*sources(layer), **call), strict=True):
            close(a, b) if a is not None else None


@compiled_function
def test_compiled_with_a_mask_and_any_size():
    """Numbers in an argument are symbols where everything may change."""
    layer = make().eval()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    close(compiled(X, X, X, mask=mh.causal(), need_weights=False)[0], layer(X, X, X, is_causal=True)[0])


@pytest.mark.parametrize("call", [{"need_weights": False}, {"is_causal": True}], ids=str)
def test_exported_for_any_size(call):
    layer, y = make().eval(), draw(3, 8, 12, seed=4)
    N, L = torch.export.Dim("N", min=1, max=64), torch.export.Dim("L", min=2, max=999)
    program = torch.export.export(
        layer,
        (X, X, X),
        call,
        dynamic_shapes={"query": {0: N, 1: L}, "key": {0: N, 1: L}, "value": {0: N, 1: L}, **dict.fromkeys(call)},
    )
    close(program.module()(y, y, y, **call)[0], layer(y, y, y, **call)[0])


def test_scripting_is_refused_in_words():
    for model in (make(), nn.Sequential(make())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(NotImplementedError, match=r"can't be scripted.*torch\.export or torch\.compile"):
                torch.jit.script(model)
