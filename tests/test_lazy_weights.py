"""Weights that are computed at their first use: all that is done with a tensor works, and until then nothing is."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import multihead as mh
from multihead import MultiheadAttention
from multihead.kernels import lazy, native
from multihead.kernels.lazy import LazyWeights

N, L, E, H = 2, 5, 12, 3


def layer(**options: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(E, H, batch_first=True, **options)


def inputs(**options: Any) -> Tensor:
    return torch.randn(N, L, E, generator=torch.Generator().manual_seed(1), **options)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often weights were computed."""
    counted: list[int] = []
    form = lazy.Plan.formed
    monkeypatch.setattr(lazy.Plan, "formed", lambda plan, weights: counted.append(1) or form(plan, weights))
    return counted


def both(attn: MultiheadAttention, *given: Any, **call: Any) -> tuple[Tensor, Tensor]:
    """The lazy weights of a call, and those that were computed at once. There is a mask: without one, and without
    gradients, few tokens are one operation, which computes them with the output."""
    call = call or {"is_causal": True}
    (_, later), attn.lazy_weights = attn(*given, **call), False
    (_, now), attn.lazy_weights = attn(*given, **call), True
    assert type(later) is LazyWeights
    assert type(now) is Tensor
    return later, now


# What costs nothing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("with_grad", [True, False])
def test_what_is_known_without_computing(made: list[int], average: bool, dtype: torch.dtype, with_grad: bool):
    attn, x = layer(dtype=dtype), inputs(dtype=dtype)
    with torch.set_grad_enabled(with_grad):
        _, w = attn(x, x, x, is_causal=True, average_attn_weights=average)
    shape = (N, L, L) if average else (N, H, L, L)
    assert isinstance(w, Tensor)
    assert torch.is_tensor(w)
    assert (w.shape, tuple(w.size()), w.size(-1), w.dim(), w.ndim, len(w)) == (
        shape,
        shape,
        L,
        len(shape),
        len(shape),
        N,
    )
    assert (w.dtype, w.device, w.layout, w.numel()) == (
        dtype,
        torch.device("cpu"),
        torch.strided,
        shape.numel() if isinstance(shape, torch.Size) else torch.Size(shape).numel(),
    )
    assert (w.is_floating_point(), w.is_cuda, w.requires_grad, w.is_leaf) == (True, False, with_grad, not with_grad)
    assert (w.grad_fn is not None) == with_grad
    assert w is not None
    assert w in [1, w][1:]
    assert {w: 1}[w] == 1
    assert made == []
    assert w.sum().isfinite()
    assert w.sum().isfinite()
    assert made == [1]


def test_most_callers_throw_them_away(made: list[int]):
    attn, x = layer(), inputs().requires_grad_()
    out, _ = attn(x, x, x)
    out.square().sum().backward()
    model = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(E, H, 8, batch_first=True), 1)
    mh.swap(model)
    model(x, x).sum().backward()
    assert made == []


def test_what_they_are_made_of_goes_once_they_are():
    attn, x = layer(), inputs()
    with torch.no_grad():
        _, w = attn(x, x, x, is_causal=True)
    held = weakref.ref(w._make)
    assert held() is not None
    w.sum()
    gc.collect()
    assert held() is None


# What works as ever ---------------------------------------------------------------------------------------------------


def through_file(w: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    return torch.load(file)


def set_in_place(w: Tensor) -> Tensor:
    w[:, 0] = 0.5
    return w


def add_in_place(w: Tensor) -> Tensor:
    w += 1
    return w


def mul_in_place(w: Tensor) -> Tensor:
    w.mul_(2).clamp_(max=0.3)
    return w


def out_of(w: Tensor) -> Tensor:
    kept = torch.empty(w.shape)
    torch.mul(w, 2, out=kept)
    return kept


USES: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda w: w.sum(),
    "mean": lambda w: w.mean(1),
    "torch.mean": lambda w: torch.mean(w, dim=0, keepdim=True),
    "index": lambda w: w[0],
    "slice": lambda w: w[:, 1:3, ..., None],
    "bool index": lambda w: w[w > 0.2],
    "one number": lambda w: w[0, 1, 2].item(),
    "float": lambda w: float(w[0, 1, 2]),
    "for": lambda w: [row.sum() for row in w],
    "unpack": lambda w: (lambda a, b: a + b)(*w),
    "unbind": lambda w: w.unbind(0),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "cpu": lambda w: w.detach().cpu().numpy(),
    "numpy": lambda w: w.numpy(),
    "numpy force": lambda w: w.numpy(force=True),
    "asarray": lambda w: __import__("numpy").asarray(w),
    "numpy sum": lambda w: __import__("numpy").sum(w.numpy(), axis=-1),
    "tolist": lambda w: w.tolist(),
    "repr": repr,
    "str": str,
    "format": lambda w: f"{w} {w[0, 0, 0]:.4f}",
    "save": through_file,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "clone": lambda w: w.clone(),
    "contiguous": lambda w: w.contiguous(),
    "stride": lambda w: (w.stride(), w.is_contiguous(), w.storage_offset()),
    "dtypes": lambda w: (w.half(), w.double(), w.to(torch.bfloat16), w.type()),
    "views": lambda w: (w.view(-1), w.reshape(N, -1), w.flatten(), w.permute(0, 2, 1), w.mT, w.unsqueeze(0)),
    "arithmetic": lambda w: (w + 1, 1 - w, w * w, -w, w / 2, w**2, w @ w, 2 * w - w),
    "compare": lambda w: (w > 0.1, w == w.clone(), torch.equal(w, w.clone()), torch.allclose(w, w)),
    "any": lambda w: bool(w.isnan().any()),
    "topk": lambda w: w.topk(2),
    "argmax": lambda w: w.argmax(-1),
    "sort": lambda w: w.sort(-1),
    "einsum": lambda w: torch.einsum("bij,bjk->bik", w, w),
    "matmul": lambda w: torch.matmul(w, torch.ones(L, 3)),
    "bmm": lambda w: torch.bmm(w, w),
    "stack": lambda w: torch.stack([w, w]),
    "cat": lambda w: torch.cat([w, torch.ones(N, 1, L)], 1),
    "where": lambda w: torch.where(w > 0.2, w, torch.zeros(())),
    "masked fill": lambda w: w.masked_fill(torch.eye(L) > 0, 0),
    "gather": lambda w: w.gather(-1, torch.zeros(N, L, 1, dtype=torch.int64)),
    "softmax": lambda w: F.softmax(w, -1),
    "interpolate": lambda w: F.interpolate(w[:, None], scale_factor=2),
    "like": lambda w: (torch.zeros_like(w), w.new_ones(3)),
    "as tensor": lambda w: torch.as_tensor(w),
    "entropy": lambda w: -(w * w.clamp(min=1e-9).log()).sum(-1),
    "in place": mul_in_place,
    "in place by an operator": add_in_place,
    "in place by an index": set_in_place,
    "out=": out_of,
    "dlpack": lambda w: torch.from_dlpack(w),
    "pointer": lambda w: (w.data_ptr() != 0, w.untyped_storage().nbytes(), w.element_size()),
    "shared": lambda w: w.share_memory_().is_shared(),
    "collate": lambda w: torch.utils.data.default_collate([w, w]),
    "close": lambda w: torch.testing.assert_close(w, w.clone()),
    "vmap": lambda w: torch.vmap(lambda row: row.sum())(w),
    "histogram": lambda w: torch.histc(w, 5),
    "nan": lambda w: w.nan_to_num().sum(),
    "scatter": lambda w: torch.zeros(N, L, L).copy_(w),
    "parameter": lambda w: torch.nn.Parameter(w.detach()),
    "buffer": lambda w: torch.nn.Buffer(w).sum(),
}


@pytest.mark.parametrize("use", USES)
def test_what_people_do_with_weights(use: str):
    attn, x = layer().eval(), inputs()
    with torch.no_grad():
        later, now = both(attn, x, x, x)
        found, want = USES[use](later), USES[use](now)
        same(found, want)
        same(later.clone(), now)  # what was done in place is there, too


def same(found: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert isinstance(found, Tensor)
        assert torch.equal(found, want)
    elif isinstance(want, (list, tuple)):
        assert len(found) == len(want)
        for a, b in zip(found, want, strict=True):
            same(a, b)
    else:
        assert type(found) is type(want)
        assert bool((found == want).all() if hasattr(want, "all") else found == want)


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # of numpy, about every tensor
def test_a_picture_of_them():
    pyplot = pytest.importorskip("matplotlib.figure")
    attn, x = layer().eval(), inputs()
    with torch.no_grad():
        later, now = both(attn, x, x, x)
    shown = [pyplot.Figure().subplots().imshow(w[0]).get_array() for w in (later, now)]
    assert (shown[0] == shown[1]).all()


def test_a_forward_hook_may_keep_and_change_them():
    attn, x, kept = layer().eval(), inputs(), []
    attn.register_forward_hook(lambda *given: kept.append(given[2][1]))
    with torch.no_grad():
        attn(x, x, x)
        want = mh.MultiheadAttention.forward(attn, x, x, x)[1]
    assert torch.equal(kept[0], want)


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_gradients_through_them(average: bool, dtype: torch.dtype):
    attn, x = layer(dtype=dtype), inputs(dtype=dtype).requires_grad_()
    later, now = both(attn, x, x, x, average_attn_weights=average)
    up = torch.randn(now.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float32).to(now.dtype)
    wanted = torch.autograd.grad((now * up).sum(), [x, *attn.parameters()], allow_unused=True)
    found = torch.autograd.grad((later * up).sum(), [x, *attn.parameters()], allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("parts", ["out", "weights", "both"])
def test_the_loss_may_be_of_output_and_weights(parts: str, dtype: torch.dtype, average: bool):
    """The gradients are those of torch's own layer, to the inputs, the parameters and a mask of floats."""
    attn = layer(dtype=dtype)
    theirs = torch.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(attn.state_dict())
    bias = torch.randn(L, L, generator=torch.Generator().manual_seed(3))
    grads = []
    for one, is_lazy in ((attn, True), (attn, False), (theirs, False)):
        attn.lazy_weights = is_lazy
        of = one.in_proj_weight.dtype
        x, mask = inputs().to(of).requires_grad_(), bias.to(of).requires_grad_()
        # Computed from the leaf, so that it may be read later: an optimizer does not change it.
        out, w = one(x, x, x, attn_mask=mask * 1, average_attn_weights=average)
        assert (type(w) is LazyWeights) == (is_lazy and one is attn)
        loss = {"out": out.square().mean(), "weights": -(w * w.log()).sum(-1).mean()}
        total = sum(loss.values()) if parts == "both" else loss[parts]
        grads.append(torch.autograd.grad(total, [x, mask, one.in_proj_weight, one.in_proj_bias]))
    for found in grads[:2]:
        for a, b in zip(found, grads[2], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)


def test_second_derivatives():
    attn = layer(dtype=torch.float64)

    def weights(x: Tensor) -> Tensor:
        w = attn(x, x, x)[1]
        assert type(w) is LazyWeights
        return w.square()

    x = inputs(dtype=torch.float64)[:, :3].requires_grad_()
    assert torch.autograd.gradcheck(weights, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(weights, x, fast_mode=True)


def test_what_is_done_in_place_has_a_gradient():
    attn, x = layer(dtype=torch.float64), inputs(dtype=torch.float64).requires_grad_()
    grads = []
    for w in both(attn, x, x, x):
        w.mul_(3)
        w[:, 0] = 0
        grads.append(torch.autograd.grad(w.square().sum(), x)[0])
    torch.testing.assert_close(*grads)


def test_their_own_gradient_is_kept(made: list[int]):
    attn, x, seen = layer(), inputs(), []
    _, w = attn(x, x, x)
    w.retain_grad()
    w.register_hook(lambda grad: seen.append(grad.clone()))
    assert made == []
    w.square().sum().backward()
    assert torch.equal(w.grad, 2 * w.detach())
    assert torch.equal(seen[0], w.grad)
    _, w = attn(x, x, x)
    (found,) = torch.autograd.grad(w.sum(1).square().sum(), w)
    assert found.shape == w.shape


def test_weights_without_a_graph_may_get_a_gradient():
    attn, x = layer().requires_grad_(False), inputs()
    _, w = attn(x, x, x)
    w.requires_grad_()
    w.square().sum().backward()
    assert torch.equal(w.grad, 2 * w.detach())
    gone = weakref.ref(w)
    del w
    gc.collect()
    assert gone() is None


def test_what_does_not_ask_them_is_right_too():
    """Code that reaches PyTorch's operations below the place where subclasses are asked."""
    attn, x = layer(), inputs().requires_grad_()
    later, now = both(attn, x, x, x)
    with torch._C.DisableTorchFunctionSubclass():
        found, want = later * 2, now * 2
        assert torch.equal(found, want)
        a, b = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, want))
    torch.testing.assert_close(a, b)


# Calls of every kind --------------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {"is_causal": True}),
    "bool mask": ({}, {"attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1)}),
    "float mask": ({}, {"attn_mask": torch.linspace(-1, 1, L * L).view(L, L)}),
    "mask of heads": ({}, {"attn_mask": torch.linspace(-1, 1, N * H * L * L).view(N * H, L, L)}),
    "padding": ({}, {"key_padding_mask": torch.arange(L) >= torch.tensor([[L], [2]])}),
    "blind": ({}, {"attn_mask": torch.ones(L, L, dtype=torch.bool)}),
    "dropout": ({"dropout": 0.5}, {}),
    "rotary, window": ({"rope_theta": 100.0, "sliding_window": 2}, {}),
    "alibi": ({"position": mh.ALiBi(H)}, {"is_causal": True}),
    "t5": ({"position": mh.T5Bias(H)}, {}),
    "sinks": ({"sinks": True}, {}),
    "softcap": ({"softcap": 1.0}, {}),
    "bias keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
}


@pytest.mark.parametrize("library", ["native", "none"])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("case", CALLS)
def test_every_call(case: str, average: bool, library: str, monkeypatch: pytest.MonkeyPatch):
    if library == "none":
        monkeypatch.setattr(native, "refusals", lambda _: ["no library"])
    options, call = CALLS[case]
    attn, x = layer(**options), inputs().requires_grad_()
    found = []
    for attn.lazy_weights in (True, False):
        torch.manual_seed(3)
        out, w = attn(x, x, x, average_attn_weights=average, **call)
        up = torch.linspace(0, 1, w.numel()).view(w.shape)
        grads = torch.autograd.grad((w * up).sum(), [x, *attn.parameters()], allow_unused=True, retain_graph=True)
        found.append((out, w, *grads))
        assert (type(w) is LazyWeights) == (attn.lazy_weights and case != "bias keys")
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.manual_seed(3)
    off = attn(x, x, x, need_weights=False, **call)[0]
    assert torch.equal(found[0][0], off)  # asking for them leaves the output as it is


def test_inputs_without_a_batch_and_two_sources():
    attn, x = layer(), inputs()
    for given, shape in (((x[0], x[0], x[0]), (L, L)), ((x[:, :2], x, x), (N, 2, L))):
        later, now = both(attn, *given)
        assert later.shape == shape
        assert torch.equal(later, now)


def test_autocast_at_the_call_counts_and_not_that_of_the_use():
    attn, x = layer(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        later, now = both(attn, x, x, x)
        assert later.dtype == torch.bfloat16
    assert torch.equal(later, now)
    later, now = both(attn, x, x, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(later, now)


def test_inference_mode_at_the_call_or_the_use():
    attn, x = layer(), inputs()
    with torch.inference_mode():
        later, now = both(attn, x, x, x)
    assert torch.equal(later, now)
    _, w = attn(x, x, x)
    with torch.inference_mode():
        w.sum()
    w.square().sum().backward()
    assert attn.in_proj_weight.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("which", [0, 1])
def test_an_input_that_was_changed_before_they_are_read(which: int, mode: Any):
    """Where a projection gives its input back, q or k is the caller's own tensor."""
    attn = layer().eval()
    setattr(attn, ("q_proj", "k_proj")[which], torch.nn.Identity())
    given = [inputs(), inputs() + 1]
    with mode():
        _, w = attn(given[0], given[1], given[1] * 1)
    given[which][:, 0] = 50.0
    with pytest.raises(RuntimeError, match="was changed in place before its weights were read"):
        w.sum()


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("library", ["native", "none"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_a_mask_that_is_changed_in_inference_mode(
    name: str, kind: torch.dtype, library: str, monkeypatch: pytest.MonkeyPatch
):
    """Its tensors count no versions, so the weights have a mask of their own."""
    if library == "none":
        monkeypatch.setattr(native, "refusals", lambda _: ["no library"])
    attn, x = layer().eval(), inputs()
    with torch.inference_mode():
        mask = torch.zeros((L, L) if name == "attn_mask" else (N, L), dtype=kind)
        _, w = attn(x, x, x, **{name: mask})
        want = attn(x, x, x, **{name: mask.clone()})[1] + 0
        mask[:, 1] = True if kind == torch.bool else -5.0
        torch.testing.assert_close(w + 0, want)


@pytest.mark.parametrize("library", ["native", "none"])
@pytest.mark.parametrize("kind", ["float mask", "mask as a value"])
def test_a_mask_that_was_changed_before_they_are_read(kind: str, library: str, monkeypatch: pytest.MonkeyPatch):
    if library == "none":
        monkeypatch.setattr(native, "refusals", lambda _: ["no library"])
    attn, x = layer(), inputs()
    mask = torch.zeros(L, L) if kind == "float mask" else torch.ones(L, L, dtype=torch.bool)
    call = {"attn_mask": mask} if kind == "float mask" else {"mask": mask}
    with torch.no_grad():
        _, w = attn(x, x, x, **call)
        mask[0, 1] = -torch.inf if kind == "float mask" else False
        with pytest.raises(RuntimeError, match="was changed in place before its weights were read"):
            w.sum()
        _, w = attn(x, x, x, **call)
        w.sum()
        mask.zero_()
        w.sum()


@pytest.mark.parametrize(
    "options", [{}, {"sinks": True}, {"position": mh.T5Bias(H)}, {"position": mh.RelativeBias(H, 4)}]
)
def test_parameters_may_change_before_they_are_read(options: dict[str, Any]):
    attn, x = layer(**options), inputs()
    later, now = both(attn, x, x, x)
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.fill_(0.1)
        x.zero_()
    torch.testing.assert_close(later, now)


def test_a_bias_that_is_learned_may_change_too():
    attn, x, bias = layer(), inputs(), torch.nn.Parameter(torch.zeros(L, L))
    _, w = attn(x, x, x, bias=bias)
    want = w.clone()
    with torch.no_grad():
        bias[:, 0] = 5
    assert torch.equal(w, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing(reentrant: bool):
    attn, x = layer(dropout=0.3), inputs().requires_grad_()
    found = []
    for wrapped in (False, True):
        torch.manual_seed(3)

        def call(x: Tensor) -> tuple[Tensor, Tensor]:
            out, w = attn(x, x, x)
            return out, w * 2

        out, w = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=reentrant) if wrapped else call(x)
        attn.zero_grad()
        (out.square().sum() + w.square().sum()).backward()
        found.append(attn.in_proj_weight.grad.clone())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("library", ["native", "none"])
def test_reading_them_draws_nothing(library: str, monkeypatch: pytest.MonkeyPatch):
    if library == "none":
        monkeypatch.setattr(native, "refusals", lambda _: ["no library"])
    attn, x = layer(dropout=0.5, sinks=True), inputs().requires_grad_()
    _, w = attn(x, x, x)
    before = torch.get_rng_state()
    w.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    _, w = attn.eval()(x, x, x)
    torch.testing.assert_close(attn.train()(x, x, x)[1], w)  # before dropout


@pytest.mark.filterwarnings("ignore")  # of what torch.compile imports, and of its look at .grad
def test_as_the_input_of_a_compiled_program():
    attn = layer()
    program = torch.compile(lambda w: (w * 2).cumsum(-1), backend="aot_eager")
    for seed in range(2):
        x = torch.randn(N, L, E, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        later, now = both(attn, x, x, x)
        found, want = program(later), (now * 2).cumsum(-1)
        assert torch.equal(found, want)
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, want)]
        torch.testing.assert_close(*grads)


# Where they are computed at once --------------------------------------------------------------------------------------


def test_a_cache_may_hold_something_else_by_then():
    attn, x, cache = layer(), inputs(), mh.KVCache("ring", capacity=3)
    with torch.no_grad():
        kept = [attn(t, t, t, cache=cache)[1] for t in x.split(1, 1)]
    assert all(type(w) is Tensor for w in kept)


def test_a_program_that_is_recorded_or_transformed():
    attn, x = layer().eval(), inputs()
    program = torch.export.export(attn, (x, x, x)).module()
    assert type(program(x, x, x)[1]) is Tensor
    grads = torch.func.grad(lambda x: attn(x, x, x)[1].square().sum())(x)
    x.requires_grad_()
    attn(x, x, x)[1].square().sum().backward()
    torch.testing.assert_close(grads, x.grad)
    with torch.device("meta"):
        assert type(MultiheadAttention(E, H)(*[torch.ones(L, N, E)] * 3)[1]) is Tensor


def test_the_switch():
    attn, x = layer(), inputs()
    attn.lazy_weights = False
    assert type(attn(x, x, x)[1]) is Tensor
    assert type(layer()(x, x, x)[1]) is LazyWeights
    assert type(mh.Attention(E, H)(x, weights=True)[1]) is Tensor
