"""The kernels for CUDA: against the reference where there is a GPU, and their functions of single scores everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import multihead as mh
from cases import Case, assert_within_budget, draw, names, own_error
from multihead import reference
from multihead.kernels.flex import make_mask_mod, make_score_mod
from test_dispatch import choose, request_of

H, K, D = 6, 3, 32
f64 = torch.float64


# On the CPU: what FlexAttention is told, one score at a time ----------------------------------------------------------


def over_all(function: Callable[..., Tensor], scores: Tensor) -> Tensor:
    """function(score, b, h, i, j) of every score of (B, H, L, S), as FlexAttention calls it."""
    for axis in (4, 3, 2, 1):
        function = torch.vmap(function, (0, *(0 if n == axis else None for n in range(1, 5))))
    return function(scores, *(torch.arange(n) for n in scores.shape))


def small_cases(first: int, wanted: Callable[[Case], object], number: int) -> list[Case]:
    """The first drawn cases of few pairs that are `wanted`."""
    found, at = [], first
    while len(found) < number:
        case = draw(at)
        at += 1
        if case.q[..., 0].numel() * case.k.shape[-2] < 20_000 and wanted(case):
            found.append(case)
    return found


def table_of(case: Case, table: Tensor) -> Tensor:
    """What broadcasts to (*batch, H, L, S), as (B, H, L, S)."""
    shape = (*case.q.shape[:-1], case.k.shape[-2])
    return table.expand(shape).reshape(-1, *shape[-3:])


def places(case: Case) -> dict[str, Tensor | None]:
    return {name: case.options.get(name) for name in ("q_positions", "k_positions")}


def test_mask_mod_is_the_mask():
    kinds: set[str] = set()
    for case in small_cases(60_000, lambda case: case.mask is not None, 60):
        request = request_of(case.q, case.k, case.v, case.mask, **case.options)
        B, heads, _, L, S, _, _ = request.sizes
        found = create_mask(make_mask_mod(request), B, heads, L, S, device="cpu")
        exact = table_of(case, case.mask.dense(L, S, **places(case)))
        assert torch.equal(found, exact), case.told
        kinds |= {
            kind
            for kind in ("causal", "window", "lengths", "padding", "documents", "prefix", "dense", "~", "|", "&")
            if kind in repr(case.mask)
        }
    assert len(kinds) == 10


def test_score_mod_is_softcap_and_bias():
    tried = dict.fromkeys(("softcap", "bias", "position", "both"), 0)
    for case in small_cases(61_000, lambda case: "softcap" in case.options or "bias" in case.options, 40):
        request = request_of(case.q, case.k, case.v, case.mask, **case.options)
        B, heads, _, L, S, _, _ = request.sizes
        scores = torch.randn(B, heads, L, S, dtype=f64) * 3
        exact, softcap, bias = scores, case.options.get("softcap"), case.options.get("bias")
        if softcap is not None:
            exact = softcap * torch.tanh(exact / softcap)
        if isinstance(bias, mh.ALiBi):
            q_at, k_at = places(case).values()
            k_default = torch.arange(S) if k_at is None else k_at
            q_default = torch.arange(S - L, S) if k_at is None else k_default[..., S - L :]
            distance = ((q_default if q_at is None else q_at)[..., :, None] - k_default[..., None, :]).abs()
            slopes = torch.tensor(bias.slopes, dtype=torch.float32)[:, None, None]
            exact = exact + table_of(case, -slopes * distance[..., None, :, :])
        elif bias is not None:
            exact = exact + table_of(case, bias.detach())
        found = over_all(make_score_mod(request), scores).detach()
        assert_within_budget([found], [exact], None, case.told, ["scores"])
        tried["softcap"] += bias is None
        tried["bias"] += isinstance(bias, Tensor)
        tried["position"] += isinstance(bias, mh.ALiBi)
        tried["both"] += softcap is not None and bias is not None
    assert min(tried.values()) >= 2, tried


def test_nothing_to_say_is_no_function():
    q = torch.zeros(2, 3, 5, 7)
    assert make_mask_mod(request_of(q, q, q)) is None
    assert make_score_mod(request_of(q, q, q, mh.causal())) is None


# On CUDA --------------------------------------------------------------------------------------------------------------

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MASKS = {
    "none": lambda *_: None,
    "causal": lambda *_: mh.causal(),
    "window": lambda *_: mh.window(left=31, right=2),
    "causal documents": lambda _, S: mh.causal() & mh.documents(torch.arange(S) // 50),
    "padding": lambda _, S: mh.padding(torch.arange(S) % 7 > 1),
    "lengths": lambda _, S: mh.lengths(torch.tensor([S, 11])),
    "prefix": lambda *_: mh.causal() | mh.prefix(torch.tensor([3, 40])),
    "blind rows": lambda L, S: mh.dense((torch.arange(L) % 3 > 0)[:, None].expand(L, S)),
}


def made(L: int, S: int, mask: Any, B: int = 2, heads: tuple[int, int] = (H, K), V: int = D, **options: Any) -> Case:
    torch.manual_seed(7)
    shapes = [(B, heads[0], L, D), (B, heads[1], S, D), (B, heads[1], S, V)]
    q, k, v = (torch.randn(shape, dtype=f64, requires_grad=True) for shape in shapes)
    return Case(0, q, k, v, mask, options, f"L={L} S={S} mask={mask!r} {sorted(options)}", ["q", "k", "v"])


def on_cuda(case: Case) -> Case:
    """The same leaves, on the GPU."""
    q, k, v = (t.detach().cuda().requires_grad_() for t in (case.q, case.k, case.v))
    mask = None if case.mask is None else case.mask.to("cuda")
    options = {n: value.detach().cuda() if isinstance(value, Tensor) else value for n, value in case.options.items()}
    return replace(case, q=q, k=k, v=v, mask=mask, options=options)


def compare(kernel: str | None, case: Case, dtype: torch.dtype, *, lse: bool = True) -> None:
    """Output and gradients on the GPU against the reference in float64 on the CPU."""
    narrow = case.to(dtype)
    wide = narrow.to(f64)
    exact = reference.attention(wide.q, wide.k, wide.v, wide.mask, **wide.options)
    there = on_cuda(narrow)
    found = mh.attention(there.q, there.k, there.v, there.mask, **there.options, kernel=kernel, return_lse=lse)
    outputs = found if isinstance(found, tuple) else (found,)
    labels = [label for label in names(case) if lse or label != "lse"]
    have = with_gradients(there, *outputs)
    want = with_gradients(wide, *((exact.out, exact.lse) if lse else (exact.out,)))
    own = None if dtype == f64 else own_error(narrow, wide)
    assert have[0].dtype == dtype
    assert_within_budget([t.cpu() for t in have], want, own, f"{kernel} {dtype}: {case.told}", labels)


def with_gradients(case: Case, *outputs: Tensor) -> list[Tensor]:
    """The outputs, and the gradients for the same random ones from above on either device."""
    above = [torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=f64).to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, case.inputs(), above)]


def on_gpu(*marks: Any) -> Callable[[Any], Any]:
    """The marks of a test that needs a GPU."""

    def marked(test: Any) -> Any:
        for mark in (*gpu, *marks):
            test = mark(test)
        return test

    return marked


HALF = [torch.bfloat16, torch.float16]


@on_gpu(pytest.mark.parametrize("name", MASKS), pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str))
def test_flex(name, dtype):
    L, S = 131, 131
    case = made(L, S, MASKS[name](L, S))
    assert not mh.KERNELS["flex"].refusals(request_of(*(t.cuda().to(dtype) for t in (case.q, case.k, case.v))))
    compare("flex", case, dtype)


@on_gpu(pytest.mark.parametrize("name", ["none", "causal", "prefix"]))
def test_flex_with_all_it_has(name):
    L, S = 67, 139
    mask = MASKS[name](L, S)
    for options in ({"softcap": 3.0}, {"scale": 0.1}, {"bias": torch.randn(H, L, S, dtype=f64)}, {"bias": mh.ALiBi(H)}):
        compare("flex", made(L, S, mask, V=48, **options), torch.float32)
    positions = {"q_positions": torch.randint(0, S, (2, L)), "k_positions": torch.arange(S) * 2}
    compare("flex", made(L, S, mask, **positions), torch.float32)


@on_gpu(pytest.mark.parametrize("causal", [False, True]), pytest.mark.parametrize("dtype", HALF, ids=str))
def test_varlen(causal, dtype):
    ids = torch.tensor([4] * 67 + [1] * 1 + [9] * 131 + [2] * 13)
    apart = mh.documents(ids)
    case = made(len(ids), len(ids), mh.causal() & apart if causal else apart, B=1)
    compare("varlen", case, dtype, lse=False)
    compare("varlen", made(len(ids), len(ids), case.mask, B=1, heads=(4, 4), scale=0.3), dtype, lse=False)


@on_gpu()
def test_varlen_refuses_pieces():
    ids = torch.tensor([0] * 31 + [1] * 37 + [0] * 31)
    case = on_cuda(made(len(ids), len(ids), mh.documents(ids), B=1).to(torch.bfloat16))
    with pytest.raises(mh.KernelRefusal):
        mh.attention(case.q, case.k, case.v, case.mask, kernel="varlen")


@on_gpu(pytest.mark.parametrize("name", MASKS), pytest.mark.parametrize("dtype", [*HALF, torch.float32, f64], ids=str))
@pytest.mark.parametrize("kernel", ["sdpa", "blocks", "reference", None])
def test_kernels_of_every_device(kernel, name, dtype):
    for L, S in ((131, 131), (7, 139)):
        compare(kernel, made(L, S, MASKS[name](L, S)), dtype, lse=kernel != "sdpa")


@on_gpu(pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str))
def test_the_automatic_choice(dtype):
    for L, S, options in (
        (131, 131, {"softcap": 2.0}),
        (131, 131, {"bias": torch.randn(H, 1, 131, dtype=f64)}),
        (1, 139, {"bias": mh.ALiBi(H)}),
        (67, 67, {"scale": -0.4}),
        (67, 71, {"V": 13}),
    ):
        case = made(L, S, mh.causal(), **options)
        there = on_cuda(case.to(dtype))
        request = request_of(there.q, there.k, there.v, there.mask, **there.options, return_lse=True)
        assert choose(request).kernel.NAME in ("sdpa", "blocks")  # those that have been held against the reference
        compare(None, case, dtype)


@on_gpu()
def test_dropout_repeats():
    case = on_cuda(made(131, 131, mh.causal()).to(torch.float32))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = mh.attention(case.q, case.k, case.v, case.mask, dropout=0.3)
        runs.append([out, *torch.autograd.grad(out.square().sum(), case.inputs())])
    torch.testing.assert_close(runs[0], runs[1])
    assert not torch.allclose(runs[0][0], runs[2][0])


@on_gpu()
def test_the_layer_on_cuda():
    torch.manual_seed(1)
    layer = mh.Attention(48, 6, num_kv_heads=3, position=mh.Rotary(), mask=mh.causal(), sinks=True, qk_norm=True)
    x = torch.randn(2, 131, 48)
    exact, found = layer(x), layer.cuda()(x.cuda())
    torch.testing.assert_close(found.cpu(), exact, rtol=1e-4, atol=1e-5)
    assert mh.doctor().healthy, str(mh.doctor())
