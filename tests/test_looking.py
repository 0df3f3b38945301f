"""What gives weights besides the output: kernels/rows.py, kernels/small.py and whole.py, each against the reference."""

import pytest
import torch
from torch import nn

import multihead as mh
from cases import assert_within_budget, draw, own_error, roundings
from multihead import reference, whole
from multihead.kernels import rows, small
from multihead.request import make_request
from multihead.weights import Look, attention_weights, attention_with_weights

f64 = torch.float64
# bytes of scores at a time: a row of one head, some rows, whole heads, everything
TILES = (1, 16 * 40 * 8, 2**15, 2**20)


def request_of(case, dropout=0.0, needs_lse=False):
    named = {name: case.options.get(name) for name in ("bias", "scale", "softcap", "q_positions", "k_positions")}
    return make_request(
        case.q, case.k, case.v, case.mask, named["bias"], named["scale"], named["softcap"], dropout,
        named["q_positions"], named["k_positions"], needs_lse, reference.attention,
    )  # fmt: skip


def without_sinks(number):
    """A case of `cases.draw` for what knows no sinks."""
    case = draw(number)
    case.options.pop("sinks", None)
    case.grads = [name for name in case.grads if name != "sinks"]
    return case


def defined(case):
    return reference.attention(case.q, case.k, case.v, case.mask, **case.options)


def like(tensor, seed):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=f64).to(tensor.dtype)


def gradients(case, outputs, ups):
    """Of the inputs; zeros where nothing comes."""
    pairs = [(y, up) for y, up in zip(outputs, ups, strict=True) if y is not None and y.requires_grad]
    outs, ups = zip(*pairs, strict=True)
    found = torch.autograd.grad(outs, case.inputs(), ups, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(case.inputs(), found, strict=True)]


@pytest.mark.parametrize("chunk", range(4))
@pytest.mark.parametrize("average", [False, True])
def test_rows_are_the_reference(average, chunk, monkeypatch):
    """Output, weights, and gradients through either and both, in tiles of every size."""
    made = 0
    for number in range(40_000 + chunk * 40, 40_000 + (chunk + 1) * 40):
        monkeypatch.setattr(rows, "_TILE_BYTES", TILES[number % len(TILES)])
        case = without_sinks(number)
        exact = defined(case)
        want = exact.weights.mean(-3) if average else exact.weights
        request = request_of(case)
        assert not rows.refusals(request), case.told
        out, weights = rows.attend(request, average)
        made += out is not None
        weights = weights.reshape(want.shape)
        labels = ["out", "weights", *(f"grad of {name}" for name in case.grads)]
        out = None if out is None else out.reshape(exact.out.shape)
        up, up_w = like(exact.out, 1), like(want, 2)
        assert_within_budget([weights], [want], None, case.told, ["weights"])
        if out is not None:
            assert_within_budget([out], [exact.out], None, case.told, ["out"])
        for through in ("out", "weights", "both"):
            ups = [up * (through != "weights"), up_w * (through != "out")]
            if out is None and through != "weights":
                continue
            outputs = [out if through != "weights" else None, weights if through != "out" else None]
            exactly = [exact.out if through != "weights" else None, want if through != "out" else None]
            have, wanted = gradients(case, outputs, ups), gradients(case, exactly, ups)
            assert_within_budget(have, wanted, None, f"through {through}: {case.told}", labels[2:])
    assert made > 10


@pytest.mark.parametrize("frozen", [("q", "k", "v"), ("k", "v"), ("q",)], ids=str)
@pytest.mark.parametrize("average", [False, True])
def test_whatever_needs_a_gradient_gets_it(average, frozen):
    """A bias that learns in a frozen layer, too."""
    torch.manual_seed(1)
    leaves = {
        n: torch.randn(2, 3, m, 5, dtype=f64, requires_grad=n not in frozen) for n, m in (("q", 4), ("k", 7), ("v", 7))
    }
    leaves["bias"] = torch.randn(3, 4, 7, dtype=f64, requires_grad=True)
    wanted = [t for t in leaves.values() if t.requires_grad]
    q, k, v, bias = leaves.values()
    exact = reference.attention(q, k, v, mh.causal(), bias=bias)
    request = make_request(q, k, v, mh.causal(), bias, None, None, 0.0, None, None, False, reference.attention)
    out, weights = rows.attend(request, average)
    want = exact.weights.mean(-3) if average else exact.weights
    for found, right in ((out, exact.out), (weights, want)):
        if found is not None:
            have = torch.autograd.grad(found.square().sum(), wanted, retain_graph=True, allow_unused=True)
            right = torch.autograd.grad(right.square().sum(), wanted, retain_graph=True, allow_unused=True)
            for a, b in zip(have, right, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert_within_budget([a], [b], None, f"frozen {frozen}", ["gradient"])


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("average", [False, True])
def test_hidden_garbage_changes_nothing(average, junk, monkeypatch):
    """https://github.com/pytorch/pytorch/issues/101967"""
    monkeypatch.setattr(rows, "_TILE_BYTES", 2**12)
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 4, n, 5, dtype=f64) for n in (37, 67, 67))
    keep = torch.rand(2, 67) < 0.6
    clean = reference.attention(q, k, v, mh.padding(keep))
    k, v = (t.where(keep[:, None, :, None], junk).requires_grad_() for t in (k, v))
    q.requires_grad_()
    request = make_request(q, k, v, mh.padding(keep), None, None, None, 0.0, None, None, False, reference.attention)
    out, weights = rows.attend(request, average)
    want = clean.weights.mean(-3) if average else clean.weights
    assert_within_budget([out, weights], [clean.out, want], None, f"{junk}", ["out", "weights"])
    for g in torch.autograd.grad(out.square().sum() + weights.square().sum(), (q, k, v)):
        assert g.isfinite().all()


def test_rows_double_backward():
    torch.manual_seed(3)
    leaves = [torch.randn(1, 2, n, 3, dtype=f64, requires_grad=True) for n in (2, 4, 4)]
    bias = torch.randn(2, 4, dtype=f64, requires_grad=True)

    def looked(q, k, v, bias):
        request = make_request(q, k, v, mh.causal(), bias, None, None, 0.0, None, None, False, reference.attention)
        return [t for t in rows.attend(request, True) if t is not None]

    assert torch.autograd.gradgradcheck(looked, (*leaves, bias.detach()))
    assert torch.autograd.gradgradcheck(lambda *a: looked(*a)[-1], (*leaves, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrower_dtypes_keep_to_the_budget(dtype):
    for number in range(41_000, 41_030):
        narrow = without_sinks(number).to(dtype)
        wide = narrow.to(f64)
        exact, own = defined(wide), own_error(narrow, wide)
        requests = [(rows, request_of(narrow))]
        requests += [(small, request_of(narrow))] if not small.refusals(requests[0][1]) else []
        for kernel, request in requests:
            out, *_, weights = kernel.attend(request, False) if kernel is rows else kernel.attend(request)
            assert weights.dtype == torch.float32
            found = [weights.reshape(exact.weights.shape)]
            if out is not None:
                assert out.dtype == dtype
                found.append(out.reshape(exact.out.shape))
            assert_within_budget(
                found, [exact.weights, exact.out][: len(found)], own, narrow.told, ["weights", "out"][: len(found)]
            )


def test_small_is_the_reference():
    tried = 0
    for number in range(42_000, 42_250):
        case = without_sinks(number)
        request = request_of(case)
        if small.refusals(request):
            assert "softcap" in case.options
            continue
        tried += 1
        exact = defined(case)
        found = small.attend(request)
        want = [exact.out, exact.weights]
        found = [t.reshape(exactly.shape) for t, exactly in zip(found, want, strict=True)]
        assert_within_budget(found, want, None, case.told, ["out", "weights"])
        ups = [like(t, i) for i, t in enumerate(want)]
        labels = [f"grad of {name}" for name in case.grads]
        assert_within_budget(gradients(case, found, ups), gradients(case, want, ups), None, case.told, labels)
    assert tried >= 10


@pytest.mark.usefixtures("native")
def test_together_is_each_by_itself():
    """`attention_with_weights` in every way that it goes: sinks, dropout, few scores and many, every mask."""
    for number in range(43_000, 43_120):
        case = draw(number) if number % 3 else draw(number).to(torch.float32)
        wide = case.to(f64)
        own = own_error(case, wide) if case.q.dtype != f64 else None
        out, mean = attention_with_weights(case.q, case.k, case.v, case.mask, look=Look(average=True), **case.options)
        weights = attention_weights(case.q, case.k, case.mask, **case.options)
        exact = reference.attention(wide.q, wide.k, wide.v, wide.mask, **wide.options)
        assert_within_budget([out, weights], [exact.out, exact.weights], own, case.told, ["out", "weights"])
        assert_within_budget([mean], [exact.weights.mean(-3)], own, case.told, ["mean"])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [f64, torch.float32])
def test_dropout_leaves_the_weights_alone(dtype):
    q, k, v = (torch.randn(2, 3, 5, 7, dtype=dtype) for _ in "qkv")
    for mask in (None, mh.causal()):
        outs = []
        for _ in range(2):
            torch.manual_seed(0)
            out, mean = attention_with_weights(q, k, v, mask, look=Look(average=True), dropout=0.5)
            outs.append(out)
        exact = reference.attention(q, k, v, mask)
        assert_within_budget([mean], [exact.weights.mean(-3)], roundings(dtype), "mean", ["mean"])
        assert not torch.allclose(out, exact.out)
        assert torch.equal(*outs)
        torch.manual_seed(0)
        assert_within_budget([mh.attention(q, k, v, mask, dropout=0.5)], [out], roundings(dtype), "out", ["out"])


# The whole layer as one operation -------------------------------------------------------------------------------------


def layer(E=12, H=3, **options):
    torch.manual_seed(4)
    made = mh.MultiheadAttention(E, H, batch_first=True, dtype=f64, **options).eval()
    for p in made.parameters():
        nn.init.normal_(p, std=0.4)
    return made


def reason(attn, x, looks=False):
    with torch.no_grad():
        return whole.why_not(attn, x, looks)


@pytest.mark.parametrize(("E", "H"), [(12, 3), (15, 3), (7, 7), (33, 3), (8, 1)])
@pytest.mark.parametrize(("B", "L"), [(1, 1), (3, 5), (2, 67)])
def test_the_whole_layer_is_the_ordinary_way(E, H, B, L, monkeypatch):
    attn = layer(E, H)
    x = torch.randn(B, L, E, dtype=f64)
    inputs = [x, x.transpose(0, 1).contiguous().transpose(0, 1), torch.randn(B, E, L, dtype=f64).transpose(1, 2)]
    calls = ({"need_weights": False}, {}, {"average_attn_weights": False})
    with torch.no_grad():
        for x, call in ((x, call) for x in inputs for call in calls):
            assert whole.why_not(attn, x, "need_weights" not in call) is None
            found = attn(x, x, x, **call)
            with monkeypatch.context() as patch:
                patch.setattr(whole, "why_not", lambda *_: "not now")
                want = attn(x, x, x, **call)
            assert (found[1] is None) == (want[1] is None)
            pairs = [(a, b) for a, b in zip(found, want, strict=True) if a is not None]
            for a, b in pairs:
                assert_within_budget([a], [b], None, f"{call}", ["whole"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"add_bias_kv": True}, "more than"), ({"add_zero_attn": True}, "more than"), ({"softcap": 2.0}, "more than"),
        ({"num_kv_heads": 1}, "more than"), ({"rope_theta": 1e4}, "more than"), ({"scale": 1.0}, "more than"),
        ({"sliding_window": 2}, "more than"), ({"gate": True}, "more than"), ({"sinks": True}, "more than"),
        ({"qk_norm": True}, "more than"), ({"out_dim": 5}, "more than"), ({"out_dropout": 0.5}, "more than"),
        ({"head_dim": 2}, "more than"), ({"bias": False}, "bias"),
    ],
    ids=str,
)  # fmt: skip
def test_a_layer_with_more_is_not_run_whole(options, said):
    assert said in reason(layer(**options), torch.randn(2, 5, 12, dtype=f64))


def test_every_other_reason_occurs():
    attn, attn_2, x = layer(), layer(), torch.randn(2, 5, 12, dtype=f64)
    assert reason(attn, x) is None
    assert "gradients" in whole.why_not(attn, x, False)
    training = layer(dropout=0.5).train()
    assert "dropout" in reason(training, x)
    assert reason(training.eval(), x) is None
    assert "(B, L, E)" in reason(attn, x[0])
    assert "tokens" in reason(attn, x[:0])
    assert "tokens" in reason(attn, torch.randn(1, 129, 12, dtype=f64))
    assert reason(attn, torch.randn(1, 129, 12, dtype=f64), looks=True) is None
    assert "tokens" in reason(attn, torch.randn(103, 5, 12, dtype=f64))
    assert "CPU" in reason(attn.to("meta"), x.to("meta"))
    assert "float" in reason(layer().bfloat16(), x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert "float" in reason(layer(), x)
    said = []
    torch.func.vmap(lambda t: (said.append(reason(attn_2, x)), t)[1])(x)
    assert "transform" in said[0]
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        assert "forward-mode" in whole.why_not(layer(), x, False)


@pytest.mark.parametrize("change", ["hook", "wrapped", "forward", "parametrised"])
@pytest.mark.parametrize("name", ["in_proj", "out_proj"])
def test_a_projection_that_is_more_is_called(name, change):
    attn, x = layer(), torch.randn(2, 5, 12, dtype=f64)
    projection = attn.get_submodule(name)
    with torch.no_grad():
        before = attn(x, x, x)[0]
        if change == "hook":
            projection.register_forward_hook(lambda *a: 2 * a[2])
        elif change == "wrapped":
            attn.register_module(name, nn.Sequential(projection, nn.Tanh()))
        elif change == "forward":
            projection.forward = lambda x: 0 * nn.Linear.forward(projection, x)
        else:
            owner, weight = (attn, "in_proj_weight") if name == "in_proj" else (projection, "weight")
            nn.utils.parametrize.register_parametrization(owner, weight, nn.Tanh())
        if change != "parametrised":
            assert "hooked, wrapped" in reason(attn, x)
        assert not torch.allclose(attn(x, x, x)[0], before)


@pytest.mark.parametrize("method", ["attend", "project"])
def test_a_subclass_that_computes_otherwise_does_so_in_every_mode(method):
    """Its own step between projections and scores: https://github.com/pytorch/pytorch/issues/54128"""

    class Own(mh.MultiheadAttention):
        pass

    def doubled(self, *args, **kwargs):
        first, *rest = getattr(mh.MultiheadAttention, method)(self, *args, **kwargs)
        return 2 * first, *rest

    setattr(Own, method, doubled)
    attn, x = Own(12, 3, batch_first=True, dtype=f64).eval(), torch.randn(2, 5, 12, dtype=f64)
    want = attn(x, x, x)[0]
    with torch.no_grad():
        assert_within_budget([attn(x, x, x)[0]], [want.detach()], None, method, ["out"])
