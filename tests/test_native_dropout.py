"""Dropout of the native kernel: exactly the weights that kernels/philox.py says, in every pass and however the work is
cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import multihead as mh
from multihead import reference
from multihead.kernels import library
from multihead.kernels.philox import dropout_mask
from native_cases import DROPPED, DTYPES, check_dropout, draw, drawn_seed, given, hold, weights

pytestmark = pytest.mark.skipif(not library.available(), reason=f"there is no native library: {library.why_not()}")

f32, f64 = torch.float32, torch.float64


def test_what_is_dropped_is_what_the_definition_says():
    check_dropout()


@pytest.mark.parametrize("threads", [2, 4])
def test_any_number_of_threads_drops_the_same(threads):
    torch.set_num_threads(threads)
    check_dropout()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_narrow_dtypes_drop_the_same(dtype):
    B, H, K, L, S = DROPPED["small"]
    torch.manual_seed(2)
    q, k = torch.randn(B, H, L, 4).to(dtype), torch.randn(B, K, S, 4).to(dtype)
    kept = dropout_mask(drawn_seed(3), 0.4, B, H, L, S) != 0
    for found in weights(q, k, seed=3, dropout=0.4):
        assert torch.equal(found != 0, kept)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": mh.causal()},
        {"mask": mh.window(left=9, right=3)},
        {"mask": ~mh.window(left=20)},
        {"mask": mh.padding(torch.arange(389) % 16 > 8)},
        {"mask": mh.causal() & mh.documents(torch.arange(389) // 50)},
        {"bias": torch.randn(389, generator=torch.Generator().manual_seed(0)).expand(2, 1, 389), "softcap": 2.0},
    ],
    ids=lambda options: repr(options.get("mask", "bias, softcap")),
)
def test_the_place_of_a_weight_decides_and_not_who_else_is_seen(options):
    B, H, K, L, S = DROPPED["blocks"]
    torch.manual_seed(1)
    q, k = torch.randn(B, H, L, 4), torch.randn(B, K, S, 4)
    mask = dropout_mask(drawn_seed(5), 0.5, B, H, L, S)
    whole = weights(q, k, **options)[0]
    for found in weights(q, k, seed=5, dropout=0.5, **options):
        torch.testing.assert_close(found, whole * mask, rtol=3e-6, atol=0)
        assert torch.equal(found != 0, (whole * mask) != 0)


def test_seeds_of_more_than_32_bits_and_the_largest():
    q, k, v = (torch.zeros(1, 2, n, 4) for n in (5, 7, 7))
    v = torch.eye(7).expand(1, 2, 7, 7)
    rest = (None, None, None, None, [], [], 1.0, 0.0, 0.5)
    for seed in (0, 1, 2**31, 2**32 - 1, 2**32, 2**62 - 1, 2**63 - 1):
        out, *_ = torch.ops.multihead.forward(q, k, v, *rest, torch.tensor(seed))
        assert torch.equal(out != 0, dropout_mask(seed, 0.5, 1, 2, 5, 7) != 0)


# Values and gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["blocks", "decoding", "few rows", "widths", "small", "product"])
def test_forward_and_backward_are_those_of_the_definition_with_the_same_mask(kind, p):
    count = {"small": 12, "widths": 8, "product": 8}.get(kind, 4)
    for number in range(4_000_000, 4_000_000 + count):
        hold(draw(number, kind), dropout=p)


def test_lse_is_before_dropout():
    q, k, v = (torch.randn(2, 3, n, 5, generator=torch.Generator().manual_seed(0)) for n in (7, 11, 11))
    plain = mh.attention(q, k, v, mh.causal(), kernel="native", return_lse=True)[1]
    for p in (0.3, 1.0):
        lse = mh.attention(q, k, v, mh.causal(), kernel="native", return_lse=True, dropout=p)[1]
        torch.testing.assert_close(lse, plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(5, 11), (70, 200), (1, 1600)], ids=str)
def test_all_is_dropped(dtype, sizes):
    """out is 0, and only lse has a gradient."""
    q, k, v = (torch.randn(1, 2, n, 5, generator=torch.Generator().manual_seed(0)) for n in (*sizes, sizes[1]))
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    bias = torch.zeros(sizes, requires_grad=True)
    out, lse = mh.attention(*leaves, mh.causal(), bias=bias, kernel="native", dropout=1.0, return_lse=True)
    assert not out.any()
    assert lse.isfinite().all()
    assert not any(g.any() for g in torch.autograd.grad(out.float().sum(), (*leaves, bias)))
    grads = torch.autograd.grad(mh.attention(*leaves, kernel="native", dropout=1.0, return_lse=True)[1].sum(), leaves)
    assert grads[0].any()
    assert not grads[2].any()


def test_next_to_nothing_is_dropped():
    """Rates below 2^-33 drop nothing; and the largest rates below 1 keep what the rarest numbers say."""
    q, k, v = (torch.randn(1, 2, n, 5, generator=torch.Generator().manual_seed(0)) for n in (70, 200, 200))
    plain = mh.attention(q, k, v, kernel="native")
    for p in (1e-12, 1e-300):
        torch.testing.assert_close(mh.attention(q, k, v, kernel="native", dropout=p), plain, rtol=1e-6, atol=1e-6)
    for p in (1e-4, 1 - 1e-4, 1 - 2**-32, 1 - 2**-40):
        hold(given(mh.causal(), 1, 2, 1, 70, 200), (f32,), dropout=p)


def test_another_seed_drops_others_and_the_generator_moves_on():
    q = torch.zeros(1, 2, 70, 4)
    one = torch.eye(70).expand(1, 2, 70, 70)

    def kept():
        return mh.attention(q, q, one, kernel="native", dropout=0.5) != 0

    torch.manual_seed(1)
    first, second = kept(), kept()
    torch.manual_seed(1)
    assert torch.equal(kept(), first)
    assert torch.equal(kept(), second)
    alike = float((first == second).double().mean())
    assert abs(alike - 0.5) < 5 * 0.5 / math.sqrt(first.numel())


def test_dropout_draws_one_number_and_without_it_none_is_drawn():
    q = torch.zeros(1, 1, 3, 4)
    torch.manual_seed(1)
    mh.attention(q, q, q, kernel="native")
    assert torch.equal(torch.rand(()), torch.rand((), generator=torch.Generator().manual_seed(1)))
    drawn_seed(1)
    after = torch.rand(())
    torch.manual_seed(1)
    mh.attention(q, q, q, kernel="native", dropout=0.5)
    assert torch.equal(torch.rand(()), after)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_it(reentrant):
    leaves = [
        torch.randn(1, h, n, 8, generator=torch.Generator().manual_seed(h)) for h, n in ((4, 70), (2, 200), (2, 200))
    ]

    def attend(*t):
        return mh.attention(*t, mh.causal(), kernel="native", dropout=0.4)

    answers = []
    for run in (attend, lambda *t: checkpoint(attend, *t, use_reentrant=reentrant)):
        own = [t.clone().requires_grad_() for t in leaves]
        torch.manual_seed(8)
        out = run(*own)
        torch.manual_seed(99)  # what happens in between does not matter
        out.square().sum().backward()
        answers.append([out, *(t.grad for t in own)])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"bias": True}, {"alibi": True}], ids=str)
def test_second_derivatives_are_those_of_the_definition_with_the_same_mask(options):
    B, H, K, L, S = 2, 4, 2, 5, 11
    torch.manual_seed(4)
    shapes = [(B, H, L, 3), (B, K, S, 3), (B, K, S, 4), *([(H, L, S)] if "bias" in options else [])]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    more = {"softcap": options.get("softcap")}
    kept = dropout_mask(drawn_seed(6), 0.4, B, H, L, S, dtype=f64)
    answers = []
    for is_native in (True, False):
        own = [t.detach().to(f32 if is_native else f64).requires_grad_() for t in leaves]
        bias = own[3] if "bias" in options else mh.ALiBi(H) if "alibi" in options else None
        if is_native:
            torch.manual_seed(6)
            out, lse = mh.attention(
                *own[:3], mh.causal(), bias=bias, kernel="native", dropout=0.4, return_lse=True, **more
            )
        else:
            out, _, lse = reference.attention(*own[:3], mh.causal(), bias=bias, dropout_mask=kept, **more)
        total = out.square().sum() + lse.sin().sum()
        slopes = torch.autograd.grad(total, own, create_graph=True)
        answers.append([out, *slopes, *torch.autograd.grad(sum(g.square().sum() for g in slopes), own)])
    for number, (have, want) in enumerate(zip(*answers, strict=True)):
        size = max(1.0, float(want.detach().abs().max()))
        assert float((have.double() - want).detach().abs().max()) < 2e-5 * size, f"number {number}"
