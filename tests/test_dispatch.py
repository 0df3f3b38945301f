"""Which kernel is taken for which call, and what the kernels say of themselves."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor

import multihead as mh
from cases import NATIVE, assert_within_budget, by_kernel, draw, dtype_of, roundings
from multihead import reference
from multihead.kernels import library
from multihead.request import Request, make_request

choose = sys.modules["multihead.attention"].choose  # the package's attribute of that name is the function
B, H, K, L, S, D, V = 2, 6, 3, 5, 11, 7, 13
LONG = 1031
f32, f64 = torch.float32, torch.float64
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
ORDER = ["native", "small", "sdpa", "blocks", "flex", "varlen", "reference"]


def request_of(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **options: Any) -> Request:
    """The request that `attention` makes of its arguments."""
    every = {"bias": None, "scale": None, "softcap": None, "dropout": 0.0, "q_positions": None, "k_positions": None}
    sinks, lse = options.pop("sinks", None), options.pop("return_lse", False)
    every |= {"needs_lse": lse or sinks is not None, "definition": reference.attention}
    return make_request(q=q, k=k, v=v, mask=mask, **every | options)


def what_ran(call: Callable[[], object]) -> tuple[str, list[list[int]]]:
    """The kernel that really ran, by the operations that the profiler saw, and the q's that the fused one got."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        call()
    events = list(seen.events())
    names = {event.name for event in events}
    shapes = [event.input_shapes[0] for event in events if event.name == FLASH]
    written_out = "aten::logsumexp" in names
    if "aten::_native_multi_head_attention" in names:
        assert not written_out
        return "whole", shapes
    if "multihead::forward" in names:
        assert not written_out
        assert not shapes
        return "native", shapes
    if "aten::baddbmm" in names:  # with or without lse
        return "small", shapes
    if "_Blocks" in names:
        assert not written_out
        return "blocks", shapes
    if shapes:
        assert len(shapes) == 1
        assert not written_out
        return "sdpa", shapes
    assert written_out
    return "reference", shapes


def tensors(
    L: int = L,
    S: int = S,
    V: int = D,
    heads: tuple[int, int] = (H, K),
    batch: int = B,
    dtype: torch.dtype = f32,
) -> list[Tensor]:
    torch.manual_seed(L)
    shapes = [(batch, heads[0], L, D), (batch, heads[1], S, D), (batch, heads[1], S, V)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


long = {"L": LONG, "S": LONG, "batch": 1, "heads": (2, 1)}
table = torch.rand(LONG, LONG, generator=torch.Generator().manual_seed(0))
CALLS = {
    # The kernel where the native library was not built, what is unlike the sizes above, and what is asked for.
    "full": ("sdpa", {}, {}),
    "full, long": ("sdpa", long, {}),
    "dropout, long": ("blocks", long, {"dropout": 0.1}),
    "V != D, long": ("blocks", long | {"V": V}, {}),
    "equal heads": ("sdpa", {"heads": (3, 3)}, {}),
    "causal": ("sdpa", {}, {"mask": mh.causal()}),
    "causal, long": ("sdpa", long, {"mask": mh.causal()}),
    "causal, one query": ("sdpa", long | {"L": 1}, {"mask": mh.causal()}),
    "causal, fewer queries": ("sdpa", long | {"L": 257}, {"mask": mh.causal()}),
    "small window": ("sdpa", {}, {"mask": mh.window(left=2, right=0)}),
    "small documents": ("sdpa", {}, {"mask": mh.documents(torch.arange(S) // 3)}),
    "small padding": ("sdpa", {}, {"mask": mh.padding(torch.arange(S) % 2 > 0)}),
    "small bias": ("sdpa", {}, {"bias": mh.ALiBi(H), "mask": mh.causal()}),
    "lse": ("sdpa", {}, {"return_lse": True}),
    "sinks": ("sdpa", {}, {"sinks": torch.zeros(H)}),
    "scale": ("sdpa", {"S": L}, {"mask": mh.causal(), "scale": -1.0}),
    "bf16": ("sdpa", {"dtype": torch.bfloat16}, {}),
    "f64": ("sdpa", {"dtype": f64}, {"mask": mh.causal()}),
    "bias without a gradient": ("sdpa", {}, {"bias": torch.zeros(L, S)}),
    "nearly all visible": ("sdpa", long, {"mask": mh.lengths(LONG - 17)}),
    "a dense table": ("sdpa", long, {"mask": table < 0.5}),
    "window": ("blocks", long, {"mask": mh.window(left=63, right=0)}),
    "window, one query": ("sdpa", long | {"L": 1}, {"mask": mh.window(left=63, right=0)}),
    "documents": ("blocks", long, {"mask": mh.documents(torch.arange(LONG) // 100)}),
    "causal documents": ("blocks", long, {"mask": mh.causal() & mh.documents(torch.arange(LONG) // 600)}),
    "lengths": ("blocks", long | {"batch": 2}, {"mask": mh.lengths([500, 67])}),
    "padding on the right": ("blocks", long, {"mask": mh.padding(torch.arange(LONG) < 300)}),
    "a sparse table": ("blocks", long, {"mask": (torch.arange(LONG)[:, None] - torch.arange(LONG)).abs() < 40}),
    "causal with a bias": ("blocks", long, {"mask": mh.causal(), "bias": mh.ALiBi(2)}),
    "dropout": ("small", {}, {"dropout": 0.1}),
    "dropout, causal": ("blocks", long, {"dropout": 0.1, "mask": mh.causal()}),
    "softcap": ("blocks", {}, {"softcap": 5.0}),
    "V != D": ("small", {"V": V}, {}),
    "bias with a gradient": ("small", {}, {"bias": torch.zeros(L, S, requires_grad=True)}),
    "learned position": ("small", {}, {"bias": mh.T5Bias(H)}),
    "no rows": ("reference", {"batch": 0}, {}),
    "no queries": ("reference", {"L": 0}, {"mask": mh.causal()}),
    "no keys": ("reference", {"S": 0}, {}),
    "no values": ("reference", {"V": 0}, {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_which_kernel_is_taken(name, native):
    """As it is chosen, and as the profiler saw it run. The native kernel takes all but float64."""
    expected, sizes, options = CALLS[name]
    if native and sizes.get("dtype") != f64:
        expected = "native"
    qkv = tensors(**sizes)
    choice = choose(request_of(*qkv, **options))
    assert expected == choice.kernel.NAME, f"{choice.refusals}, {choice.drawbacks}"
    ran, shapes = what_ran(lambda: mh.attention(*qkv, **options))
    assert ran == expected
    if expected == "sdpa":  # once; with few queries those of a group are rows of one head
        batch, heads, queries, _ = qkv[0].shape
        kv_heads = qkv[1].shape[1]
        assert shapes in ([[batch, heads, queries, D]], [[batch, kv_heads, heads // kv_heads * queries, D]])
    if expected == "blocks" and shapes:  # by tiles
        assert len(shapes) > 1 or queries_of(qkv) <= 64
        assert all(shape[2] <= 64 for shape in shapes)


def queries_of(qkv: list[Tensor]) -> int:
    return qkv[0].shape[-2]


@pytest.mark.parametrize("kernel", [NATIVE, "sdpa", "blocks", "reference"])
def test_a_kernel_by_name_is_the_one_that_runs(kernel):
    for queries, mask in ((L, None), (131, mh.causal()), (131, mh.window(left=3))):
        qkv = tensors(L=queries, S=131)
        ran, shapes = what_ran(lambda qkv=qkv, mask=mask: mh.attention(*qkv, mask, kernel=kernel))
        assert ran == kernel
        assert len(shapes) == {"sdpa": 1, "blocks": -(-queries // 64)}.get(kernel, 0)


@pytest.mark.usefixtures("without_native")
def test_blocks_skips_what_is_hidden():
    """The fused operation gets the keys that a block of queries can see, and no others."""
    qkv = tensors(**long)
    mask = mh.window(left=31, right=0)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        mh.attention(*qkv, mask)
    tiles = [event.input_shapes[:2] for event in seen.events() if event.name == FLASH]
    assert sum(q[2] for q, _ in tiles) == LONG
    assert all(k[2] <= 64 + 31 + 2 * 16 for _, k in tiles)


@pytest.mark.parametrize("dtype", [f32, f64])
def test_transforms_are_left_to_the_definition(dtype):
    qkv = [t.detach() for t in tensors(dtype=dtype)]
    for call in (
        lambda: torch.vmap(mh.attention)(*qkv),
        lambda: torch.func.grad(lambda q: mh.attention(q, *qkv[1:]).sum())(qkv[0]),
    ):
        assert what_ran(call)[0] == "reference"
    for kernel in ("native", "sdpa", "blocks"):
        with pytest.raises(mh.KernelRefusal, match=r"torch\.func transform"):
            torch.vmap(lambda *t, kernel=kernel: mh.attention(*t, kernel=kernel))(*qkv)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("kernel", [NATIVE, "sdpa", "blocks"])
def test_forward_mode_is_left_to_the_definition(kernel):
    q, k, v = (t.detach() for t in tensors(dtype=dtype_of(kernel)))
    with torch.autograd.forward_ad.dual_level():
        # a dual level alone is no reason to stand aside
        assert what_ran(lambda: mh.attention(q, k, v, kernel=kernel))[0] == kernel
        dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(mh.KernelRefusal, match="forward-mode"):
            mh.attention(q, k, dual, kernel=kernel)
        assert what_ran(lambda: mh.attention(q, k, dual))[0] == "reference"


@pytest.mark.usefixtures("native")
def test_dropout_draws_alike_with_and_without_gradients():
    """The first pass of a checkpoint records none, the second does: both have to take the same kernel."""
    for sizes in ({}, long, {"V": V}, {"dtype": f64}):
        qkv, outs = tensors(**sizes), []
        for recorded in (True, False):
            torch.manual_seed(3)
            with torch.set_grad_enabled(recorded):
                outs.append(mh.attention(*qkv, dropout=0.4))
        assert torch.equal(*outs)


def test_a_learned_bias_is_no_obstacle_where_nothing_is_recorded(native):
    qkv, bias = tensors(), torch.zeros(L, S, requires_grad=True)
    assert what_ran(lambda: mh.attention(*qkv, bias=bias))[0] == ("native" if native else "small")
    with torch.no_grad():
        assert what_ran(lambda: mh.attention(*qkv, bias=bias))[0] == ("native" if native else "sdpa")


# What kernels say -----------------------------------------------------------------------------------------------------


def test_the_kernels_and_their_order():
    assert list(mh.KERNELS) == ORDER
    for name, kernel in mh.KERNELS.items():
        assert name == kernel.NAME
        assert all(callable(getattr(kernel, function)) for function in ("refusals", "drawbacks", "tables", "run"))


def test_refusals_are_truthful():
    """Nothing is raised by asking; a kernel that refuses nothing runs; one that refuses says all its reasons."""
    ran, refused = dict.fromkeys(ORDER, 0), dict.fromkeys(ORDER, 0)
    for number in range(50_000, 50_150):
        case = draw(number) if number % 2 else draw(number).to(f32)
        arguments = (case.q, case.k, case.v, case.mask)
        request = request_of(*arguments, **case.options, return_lse=True)
        choice = choose(request)
        assert list(choice.refusals) == ORDER
        assert set(choice.drawbacks) == {name for name, reasons in choice.refusals.items() if not reasons}
        for name, kernel in mh.KERNELS.items():
            reasons = kernel.refusals(request)
            tables = kernel.tables(request)
            assert all(table.bytes >= 0 for table in tables), case.told
            told = [text for table in tables for text in table[:2]]
            said = [*reasons, *told, *([] if reasons else kernel.drawbacks(request))]
            assert all(isinstance(reason, str) and reason for reason in said), case.told
            assert reasons == choice.refusals[name]
            if reasons:
                with pytest.raises(mh.KernelRefusal) as caught:
                    mh.attention(*arguments, **case.options, kernel=name, return_lse=True)
                assert all(reason in str(caught.value) for reason in reasons)
                assert f"kernel={name!r}" in str(caught.value)
                refused[name] += 1
            else:
                out, lse = kernel.run(request)
                sizes = request.sizes
                assert out.shape == (sizes.B, sizes.H, sizes.L, sizes.V), case.told
                assert lse is not None
                assert lse.shape == (sizes.B, sizes.H, sizes.L), case.told
                ran[name] += 1
    assert refused["reference"] == 0
    assert ran["reference"] == ran["blocks"] == 150
    assert refused["flex"] == refused["varlen"] == 150  # here is no CUDA, or it is not asked for
    assert min(ran["sdpa"], refused["sdpa"]) > 20
    assert ran["native"] == (75 if library.available() else 0)


def test_the_choice_is_the_first_without_objections(native):
    taken = set()
    for number in range(51_000, 51_100):
        case = draw(number) if number % 2 else draw(number).to(f32)
        choice = choose(request_of(case.q, case.k, case.v, case.mask, **case.options))
        able = [name for name, reasons in choice.refusals.items() if not reasons]
        free = [name for name in able if not choice.drawbacks[name]]
        assert (free or able)[0] == choice.kernel.NAME
        taken.add(choice.kernel.NAME)
    assert taken == {"small", "sdpa", "blocks"} | ({"native"} if native else set())


def test_a_refusal_is_a_value_error_with_a_next_step(native):
    qkv = tensors(V=V)
    able = "native" if native else "blocks"
    with pytest.raises(ValueError, match=f"{able} can: leave kernel out") as caught:
        mh.attention(*qkv, kernel="sdpa", softcap=2.0, dropout=0.1, bias=torch.zeros(L, S, requires_grad=True))
    assert type(caught.value) is mh.KernelRefusal
    for reason in ("softcap", "dropout", f"V={V} is not D={D}", "bias needs a gradient"):
        assert reason in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")  # of tracing
def test_what_the_native_kernel_is_not_for():
    said, q = [], tensors()[0].detach()

    def ask(q):
        said.append("; ".join(mh.KERNELS["native"].refusals(request_of(q, q, q))))
        return q + 1

    ask(q)
    assert bool(said[0]) != library.available()
    for other in (q.double(), q.to("meta"), TwoTensor(q, q)):
        ask(other)
    torch.jit.trace(ask, q, check_trace=False)
    for reason, word in zip(said[1:], ("float64", "meta", "TwoTensor", "jit.trace"), strict=True):
        assert word in reason


@pytest.mark.usefixtures("without_native")
def test_without_the_native_library_the_refusal_says_so():
    with pytest.raises(mh.KernelRefusal, match=r"native library is not there: this test does without.* sdpa can"):
        mh.attention(*tensors(), kernel="native")


def test_packed_documents_that_come_in_pieces_are_not_for_varlen():
    """It is told where runs of tokens start: two runs of one document would not see each other."""
    q = torch.zeros(1, 2, 6, 16, dtype=torch.bfloat16)
    said = []
    for ids in ([0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0]):
        for mask in (mh.documents(torch.tensor(ids)), mh.causal() & mh.documents(torch.tensor(ids))):
            request = request_of(q, q, q, mask)
            request.q = SimpleNamespace(device=torch.device("cuda"), dtype=q.dtype)  # all that it looks at
            said.append(set(mh.KERNELS["varlen"].refusals(request)))
    for whole, pieces in zip(said[:2], said[2:], strict=True):
        assert whole < pieces, "documents whose tokens do not stand side by side are not refused"


@pytest.mark.parametrize(
    "mask",
    [
        mh.causal(),
        mh.window(left=1) | mh.prefix(torch.zeros(B, dtype=torch.int64)),
        mh.documents(torch.zeros(S, dtype=torch.int64)),
        mh.causal() & mh.documents(torch.zeros(B, S, dtype=torch.int64)),
        mh.lengths(torch.zeros(B, dtype=torch.int64)),
        ~mh.padding(torch.zeros(S, dtype=torch.bool)),
        mh.dense(torch.zeros(LONG, LONG, dtype=torch.bool)),
    ],
    ids=repr,
)
def test_nothing_is_read_on_the_meta_device(mask):
    """Shapes can be had without numbers, so a choice there may not look at any."""
    n = LONG if "dense" in repr(mask) else S
    q, k, v = (t.detach().to("meta") for t in tensors(L=n, S=n, V=V))
    for options in ({}, {"softcap": 2.0, "dropout": 0.1}):
        out, lse = mh.attention(q, k, v, mask.to("meta"), return_lse=True, **options)
        assert out.is_meta
        assert out.shape == (B, H, n, V)
        assert lse.shape == (B, H, n)
    same = mh.attention(q, k, k, mask.to("meta"))
    assert same.shape == q.shape


# lse ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [NATIVE, "sdpa", "blocks"])
def test_the_gradient_of_lse_past_rows_that_see_nothing(kernel):
    """The fused operation says lse 0 of such a row, and nothing may come back through it."""
    dtype = dtype_of(kernel)
    qkv = tensors(dtype=dtype)
    keep = torch.rand(H, L, S, generator=torch.Generator().manual_seed(2)) < 0.6
    keep[:, 1], keep[2] = False, False
    answers = []
    for function in (
        lambda: mh.attention(*qkv, keep, kernel=kernel, return_lse=True),
        lambda: (lambda found: (found.out, found.lse))(reference.attention(*qkv, keep)),
    ):
        out, lse = function()
        above = torch.randn(lse.shape, dtype=dtype, generator=torch.Generator().manual_seed(3)) + 3
        grads = torch.autograd.grad([lse], qkv, [above], allow_unused=True, materialize_grads=True)
        answers.append([out, lse, *grads])
    assert (answers[0][1] == -math.inf).equal(~keep.any(-1).expand(B, H, L))
    assert not answers[0][2][:, :, 1].any()
    assert not answers[0][2][:, 2].any()
    assert_within_budget(answers[0], answers[1], roundings(dtype), kernel, ["out", "lse", "dq", "dk", "dv"])


@pytest.mark.usefixtures("native")
def test_lse_is_made_only_where_it_is_asked_for():
    qkv = tensors()
    assert isinstance(mh.attention(*qkv), Tensor)
    out, lse = mh.attention(*qkv, return_lse=True)
    torch.testing.assert_close(out, mh.attention(*qkv))  # by another kernel
    assert lse.shape == (B, H, L)


@pytest.mark.usefixtures("native")
def test_by_name_and_by_choice_are_bit_equal():
    same = 0
    for number in range(52_000, 52_030):
        case = draw(number) if number % 2 else draw(number).to(f32)
        request = request_of(case.q, case.k, case.v, case.mask, **case.options, return_lse=True)
        name = choose(request).kernel.NAME
        by_name, by_choice = by_kernel(case, name), by_kernel(case, None)
        assert all(torch.equal(a, b) for a, b in zip(by_name, by_choice, strict=True)), case.told
        same += 1
    assert same == 30
