"""What acts on scores in the native kernel: biases of every shape and dtype, ALiBi, softcap, sinks, scale; lse and
weights; and which inputs have a gradient."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from cases import Own, assert_within_budget
from multihead import reference
from multihead.kernels import library
from native_cases import DTYPES, KINDS, Drawn, draw, exact, given, hold, lay_out, on_grid, weights

pytestmark = pytest.mark.skipif(not library.available(), reason=f"there is no native library: {library.why_not()}")

f32, f64 = torch.float32, torch.float64
inf = math.inf
LENGTHS = ((5, 11), (70, 201), (1, 201), (2, 1600), (11, 1601))


def learned(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=f64).requires_grad_()


# Biases ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("L", "S"), LENGTHS)
def test_a_bias_of_every_shape_and_its_gradient(L, S):
    B, H = (2, 4) if S < 1000 else (1, 2)
    torch.manual_seed(1)
    every = [(b, h, l, s) for b, h, l, s in itertools.product({1, B}, {1, H}, {1, L}, {1, S})]
    for shape in [*every, (L, S), (1, S), (L, 1), (1, 1), (H, L, S), (H, 1, 1), (1, L, S)]:
        hold(given(mh.causal(), B, H, 2, L, S, bias=learned(*shape)), (f32,))


@pytest.mark.parametrize("bias_dtype", [*DTYPES, f64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_of_another_dtype(dtype, bias_dtype):
    for (L, S), shape in zip(
        LENGTHS, ((4, 5, 11), (2, 4, 70, 201), (2, 1, 1, 201), (2, 1600), (4, 11, 1)), strict=True
    ):
        drawn = given(mh.window(left=150), 2, 4, 2, L, S, bias=learned(*shape))._replace(bias_dtype=bias_dtype)
        hold(drawn, (dtype,))
        case, above = drawn.to(dtype)
        out = mh.attention(case.q, case.k, case.v, bias=case.options["bias"], kernel="native")
        assert torch.autograd.grad(out, case.options["bias"], above[0])[0].dtype == bias_dtype


@pytest.mark.parametrize("layout", ["width first", "strided", "apart", "packed", "tokens first", "offset"])
def test_a_bias_in_every_layout(layout):
    for dtype in (f32, torch.bfloat16):
        drawn = given(None, 2, 4, 2, 37, 203, bias=learned(2, 4, 37, 203))._replace(bias_dtype=dtype)
        drawn.layouts["bias"] = layout
        hold(drawn, (f32,))
        spread = given(None, 2, 4, 2, 37, 203, bias=on_grid(torch.randn(1, 4, 1, 203)).expand(2, 4, 37, 203))
        spread.layouts["bias"] = layout
        hold(spread._replace(bias_dtype=dtype), (f32,))


@pytest.mark.parametrize("dtype", [*DTYPES, f64], ids=str)
def test_the_lowest_numbers_hide_and_those_above_do_not(dtype):
    least = torch.finfo(dtype).min
    numbers = [-inf, least, least * 0.75, least / 2, least * 0.49, least / 3, -1e4, -1.0, 0.0]
    bias = torch.tensor([numbers, numbers[::-1], [least] * 9, [-inf] * 9, [least / 2] * 9], dtype=dtype)
    bias = torch.cat([bias, bias.roll(1, 1), torch.nn.functional.pad(bias[:, :1], (8, 0), value=least)])
    hidden = reference.without_lowest(bias) == -inf
    assert hidden[0].tolist() == [True] * 4 + [False] * 5
    q, k = torch.zeros(1, 2, 15, 4), torch.zeros(1, 2, 9, 4)
    top = bias.masked_fill(hidden, -inf).amax(-1, keepdim=True)
    seen = (bias == top) & ~hidden  # the others' weights are too small for a float
    one = torch.eye(9).expand(1, 2, 9, 9)
    if dtype in DTYPES:
        for found in weights(q, k, bias=bias):
            torch.testing.assert_close(found > 1e-6, (seen | (bias - top >= -1.0) & ~hidden).expand(1, 2, 15, 9))
    out, lse = mh.attention(q, k, one, bias=bias, kernel="native", return_lse=True)
    want = reference.attention(q, k, one, bias=bias)
    assert torch.equal(lse == -inf, want.lse == -inf)
    torch.testing.assert_close(out, want.out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("low", [-2e38, -1e39, -1e300])  # below -2.36e38 none is left in units of log2
def test_low_numbers_of_a_float64_bias_are_no_lowest_numbers(low):
    q, k, v = (torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(n)) for n in (3, 5, 5))
    bias = torch.full((3, 5), low, dtype=f64)
    bias[0, 2:] = 0
    out, lse = mh.attention(q, k, v, bias=bias, kernel="native", return_lse=True)
    want = reference.attention(q, k, v, bias=bias)
    torch.testing.assert_close(out, want.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("low", "lost"), [(-1e4, 2e-3), (-1e6, 0.1), (-1e9, 0.3), (-1e30, 0.3), (1e9, 0.3)])
def test_large_biases_keep_rows_a_softmax(low, lost):
    """Many a model hides by -1e9. A row in which all is hidden so is the mean of all values, and in the backward pass
    its weights add up to 1 too, or nearly where a score has no digits left."""
    torch.manual_seed(2)
    for L, S in LENGTHS:
        q, k, one = torch.randn(1, 2, L, 4), torch.randn(1, 1, S, 4), torch.ones(1, 2, L)
        bias = torch.zeros(L, S)
        bias[:, S // 2 :] = low
        for found, off in zip(weights(q, k, bias=bias), (1e-5, 1e-5 if low < 0 else lost), strict=True):
            torch.testing.assert_close(found.sum(-1), one, rtol=0, atol=off)
        for found, off in zip(weights(q, k, bias=torch.full((L, S), low)), (1e-5, lost), strict=True):
            torch.testing.assert_close(found.sum(-1), one, rtol=0, atol=off)


class Slopes(mh.Position):
    """Adds a number by distance, in a dtype of its own."""

    biases = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        far = (q_positions[..., :, None] - k_positions[..., None, :]).to(f64)
        return (far / 64).to(self.dtype)[..., None, :, :]


@pytest.mark.parametrize("dtype", [*DTYPES, f64], ids=str)
def test_a_position_of_one_s_own(dtype):
    for mask in (None, mh.causal()):
        hold(given(mask, 2, 4, 2, 5, 11, bias=Slopes(dtype)), (f32,))


class Causal(mh.Position):
    """Hides what comes after the query by a low number."""

    biases = True

    def __init__(self, dtype: torch.dtype, low: float) -> None:
        self.dtype, self.low = dtype, low

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        far = q_positions[..., :, None] - k_positions[..., None, :]
        return torch.zeros(far.shape, dtype=self.dtype).masked_fill(far < 0, self.low)[..., None, :, :]


@pytest.mark.parametrize("dtype", [*DTYPES, f64], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_the_lowest_numbers_of_a_position_hide(dtype, share):
    places = {"q_positions": torch.arange(5) - 2, "k_positions": torch.arange(11)}  # the first two see nothing
    low = torch.finfo(dtype).min * share
    hold(given(None, 2, 4, 2, 5, 11, bias=Causal(dtype, low), **places), (f32, torch.bfloat16))


POSITIONS: dict[str, Any] = {
    "default": lambda *_: (None, None),
    "shifted": lambda L, S: (torch.arange(L) + 500, torch.arange(S) + 490),
    "per row": lambda L, S: (torch.randint(0, S, (2, L)), torch.randint(0, S, (2, S))),
    "float": lambda L, S: (torch.randn(L) * 5, torch.randn(S) * 5),
    "double": lambda L, S: (torch.randn(L, dtype=f64) * 5, torch.randn(2, S, dtype=f64) * 5),
    "far": lambda L, S: (torch.arange(L) + 2**40, torch.arange(S) + 2**40),
}


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize(("L", "S"), LENGTHS)
def test_alibi(name, L, S):
    torch.manual_seed(3)
    q_at, k_at = POSITIONS[name](L, S)
    for H, K, mask in ((4, 2, None), (6, 2, mh.causal()), (1, 1, mh.lengths([S, S // 2])), (5, 1, None)):
        hold(given(mask, 2, H, K, L, S, bias=mh.ALiBi(H), q_positions=q_at, k_positions=k_at), (f32, torch.bfloat16))
    slopes = given(
        None, 2, 4, 2, L, S, bias=mh.ALiBi(4, slopes=(0.0, 0.25, 0.5, 1.0)), q_positions=q_at, k_positions=k_at
    )
    hold(slopes, (f32,))


@pytest.mark.parametrize("make", [mh.T5Bias, lambda heads: mh.RelativeBias(heads, 9)], ids=["t5", "relative"])
@pytest.mark.parametrize(("L", "S"), LENGTHS[:3])
def test_a_learned_position_gets_its_gradient(make, L, S):
    torch.manual_seed(4)
    position = make(4)
    q, k, v = (torch.randn(2, h, n, 5) for h, n in ((4, L), (2, S), (2, S)))
    above = torch.randn(2, 4, L, 5)
    places = {"q_positions": torch.randint(0, S, (2, L)), "k_positions": torch.randint(0, S, (2, S))}
    for more in ({}, places):
        found = mh.attention(q, k, v, mh.causal(), bias=position, kernel="native", **more)
        want = reference.attention(q.double(), k.double(), v.double(), mh.causal(), bias=position, **more).out
        torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-5)
        grads = [torch.autograd.grad(out, position.weight, above.to(out.dtype))[0] for out in (found, want)]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-4 * float(grads[1].abs().max()))
        with torch.no_grad():
            assert torch.equal(mh.attention(q, k, v, mh.causal(), bias=position, kernel="native", **more), found)


# Softcap, sinks, scale ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [1e-3, 0.1, 1.0, 50.0, 1e4, 1e20])
@pytest.mark.parametrize("scale", [-0.5, 1.0, 30.0])
def test_softcap(softcap, scale):
    for L, S in LENGTHS:
        drawn = given(mh.causal(), 1, 2, 1, L, S, bias=learned(2, 1, S), softcap=softcap, scale=scale)
        hold(drawn, (f32, torch.bfloat16))


@pytest.mark.parametrize("scale", [0, 0.0, -1.0, 1e-30, 3.0, 20.0])
def test_scale(scale):
    for L, S in LENGTHS:
        hold(given(mh.window(left=100), 1, 2, 1, L, S, scale=scale))
        hold(given(None, 1, 2, 1, L, S, scale=scale, softcap=2.0), (f32,))


def test_sinks():
    torch.manual_seed(5)
    for (L, S), sink in itertools.product(LENGTHS, (0.0, -20.0, 20.0)):
        sinks = (torch.randn(4, dtype=f64) + sink).requires_grad_()
        hold(given(mh.window(left=3) & mh.lengths([S, 0]), 2, 4, 2, L, S, sinks=sinks))


@pytest.mark.parametrize("power", [5, 10, 14, 20])
def test_large_scores_are_those_of_the_definition(power):
    """Up to millions. Rows are then of one key, or of a few whose scores have few digits left: in either kernel."""
    for L, S in LENGTHS:
        drawn = given(mh.window(left=150), 1, 2, 1, L, S, D=4)
        with torch.no_grad():
            drawn.case.q.mul_(2.0**power)
        hold(drawn, (f32, torch.bfloat16))


@pytest.mark.parametrize(("L", "S"), LENGTHS)
def test_rows_of_very_different_scores(L, S):
    """Each block brings a larger score than all before, or a smaller one: what was summed shrinks, or stays."""
    for direction in (1.0, -1.0):
        steps = torch.linspace(-300, 300, S, dtype=f64).mul(direction).expand(1, 1, 1, S)
        q, k, v = (torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(n), dtype=f64) for n in (L, S, S))
        out, lse = mh.attention(*(t.float() for t in (q, k, v)), bias=steps.float(), kernel="native", return_lse=True)
        want = reference.attention(*(t.float().double() for t in (q, k, v)), bias=steps.float())
        assert_within_budget([out, lse], [want.out, want.lse], Own(2e-5, 1.0), "steps", ["out", "lse"])


# lse and the choice of gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("used", ["out", "lse", "both"])
def test_the_gradient_of_out_of_lse_and_of_both(used, dtype):
    for L, S in LENGTHS:
        drawn = given(mh.window(left=2) & mh.lengths([S, 0]), 2, 4, 2, L, S, V=9, bias=learned(4, 1, S))
        zero = tuple(
            t if used in ("both", name) else torch.zeros_like(t)
            for t, name in zip(drawn.above, ("out", "lse"), strict=True)
        )
        want = exact(drawn._replace(above=zero))
        case, above = drawn.to(dtype)
        answer = mh.attention(case.q, case.k, case.v, case.mask, **case.options, kernel="native", return_lse=True)
        assert answer[1].dtype == f32
        chosen = [i for i, name in enumerate(("out", "lse")) if used in ("both", name)]
        found = torch.autograd.grad(
            [answer[i] for i in chosen],
            case.inputs(),
            [above[i] for i in chosen],
            allow_unused=True,
            materialize_grads=True,
        )
        for have, grad, name in zip(found, want.found[2:], case.grads, strict=True):
            size = max(1.0, float(grad.abs().max()))
            error = float((have.double() - grad).abs().max()) / size
            assert error < (2e-5 if dtype == f32 else torch.finfo(dtype).eps), f"{name} of {case.told}"
        if used == "lse":
            assert not found[2].any()


@pytest.mark.parametrize(
    "wanted", [n for r in range(1, 5) for n in itertools.combinations(("q", "k", "v", "bias"), r)], ids="+".join
)
@pytest.mark.parametrize("dtype", [f32, torch.bfloat16], ids=str)
def test_gradients_of_some_are_those_of_all(wanted, dtype):
    torch.manual_seed(6)
    made = {
        "q": torch.randn(1, 4, 70, 8).to(dtype),
        "k": torch.randn(1, 2, 201, 8).to(dtype),
        "v": torch.randn(1, 2, 201, 9).to(dtype),
        "bias": torch.randn(70, 201),
    }
    found = []
    for names in (tuple(made), wanted):
        leaves = {name: t.clone().requires_grad_(name in names) for name, t in made.items()}
        out, lse = mh.attention(**leaves, mask=mh.causal(), kernel="native", return_lse=True)
        grads = torch.autograd.grad([out.float().sin().sum() + lse.sum()], [leaves[name] for name in names])
        found.append({"out": out, "lse": lse} | dict(zip(names, grads, strict=True)))
    assert all(torch.equal(grad, found[0][name]) for name, grad in found[1].items())


def test_one_tensor_as_q_k_and_v():
    torch.manual_seed(7)
    x = torch.randn(2, 3, 70, 8, requires_grad=True)
    out = mh.attention(x, x, x, mh.causal(), kernel="native")
    (grad,) = torch.autograd.grad(out.sin().sum(), x)
    wide = x.detach().double().requires_grad_()
    want = reference.attention(wide, wide, wide, mh.causal()).out
    torch.testing.assert_close(grad.double(), torch.autograd.grad(want.sin().sum(), wide)[0], rtol=0, atol=2e-5)


def test_gradients_above_in_every_layout():
    """As a product behind it leaves them, as sum() does (one number, spread), and what no layer leaves."""
    for layout in ("plain", "tokens first", "width first", "strided", "apart", "packed", "offset"):
        for number in range(3):
            drawn = draw(5_000_000 + number, KINDS[number])
            drawn.layouts["above"] = layout
            hold(drawn)
    for spread in ((0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0)):
        drawn = given(mh.causal(), 2, 4, 2, 37, 203)
        part = drawn.above[0][tuple(slice(None) if whole else slice(0, 1) for whole in spread)]
        hold(Drawn(drawn.case, (part.expand(2, 4, 37, 7), drawn.above[1]), drawn.layouts, f32))


def test_conjugated_and_negated_views():
    """PyTorch does these when a tensor is read, and the operation reads memory."""
    torch.manual_seed(8)
    z = torch.randn(2, 2, 5, 4, dtype=torch.complex64)
    assert z.conj().imag.is_neg()
    for view in (z.conj().imag, torch._neg_view(z.real)):
        found = mh.attention(view, view, view, kernel="native")
        plain = view.resolve_neg().contiguous()
        assert torch.equal(found, mh.attention(plain, plain, plain, kernel="native"))
    found = mh.attention(z.conj(), z, z, kernel="native")
    torch.testing.assert_close(found, reference.attention(z.conj(), z, z).out, rtol=1e-5, atol=1e-5)


def test_layouts_are_what_they_say():
    """The helper that makes them: the same numbers, NaN in the gaps, and the strides of each."""
    values = on_grid(torch.randn(2, 3, 5, 4, dtype=f64))
    strides = {"plain": (60, 20, 4, 1), "tokens first": (60, 4, 12, 1), "width first": (60, 20, 1, 5)}
    strides |= {
        "strided": (135, 45, 9, 2),
        "apart": (147, 49, 7, 1),
        "packed": (180, 4, 36, 1),
        "rows of tokens": (12, 4, 24, 1),
    }
    for layout, want in strides.items():
        made = lay_out(values, layout, f32)
        assert torch.equal(made.double(), values)
        assert made.stride() == want
    assert lay_out(values, "offset", f32).storage_offset() == 5
    assert lay_out(values[:1].expand(2, 3, 5, 4), "packed", f32).stride()[0] == 0


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("average", [False, True], ids=["each head", "mean"])
def test_the_weights_that_are_asked_for(average, dtype):
    """Those that the output is made with, and their mean."""
    for (L, S), (H, K) in itertools.product(
        ((1, 1), (5, 11), (70, 200), (65, 193), (1, 700), (7, 1700)), ((4, 2), (3, 1), (2, 2))
    ):
        torch.manual_seed(L)
        q, k = torch.randn(2, H, L, 5).to(dtype), torch.randn(2, K, S, 5).to(dtype)
        bias = torch.randn(H, 1, S)
        for options in (
            {},
            {"mask": mh.causal() & mh.lengths([S, 0])},
            {"bias": bias, "softcap": 3.0},
            {"bias": mh.ALiBi(H)},
        ):
            slopes = torch.tensor(options["bias"].slopes) if isinstance(options.get("bias"), mh.ALiBi) else None
            added = None if slopes is not None or "bias" not in options else bias[None]
            mask, tables = ([0, 2**63 - 1, 0, 1, 0, 0, 6], [torch.tensor([S, 0])]) if "mask" in options else ([], [])
            call = (q, k, k, added, slopes, None, None, mask, tables, 5**-0.5, options.get("softcap", 0.0))
            state = torch.ops.multihead.forward(*call, wants_state=True)[2]
            found = torch.ops.multihead.weights(state, *call, average=average)
            want = reference.attention(q.double(), k.double(), k.double(), **options).weights
            torch.testing.assert_close(found.double(), want.mean(1) if average else want, rtol=2e-5, atol=1e-6)
            assert found.dtype == f32
            if not average and dtype == f32:
                torch.testing.assert_close(found, weights(q, k, **options)[0], rtol=2e-5, atol=1e-30)


def test_weights_of_rows_whose_scores_are_all_low_add_up_to_one():
    """A row in which all is hidden by -1e9."""
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 201, 4)
    for low, lost in ((-1e4, 2e-3), (-1e6, 0.1), (-1e9, 0.3), (-1e30, 0.3)):
        found = mh.attention_weights(q, k, bias=torch.full((5, 201), low))
        torch.testing.assert_close(found.sum(-1), torch.ones(1, 2, 5), rtol=0, atol=lost)
