"""What hidden keys and blind rows hold changes nothing in the native kernel, and what is seen is not hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import reference
from multihead.kernels import library
from native_cases import DTYPES

pytestmark = pytest.mark.skipif(not library.available(), reason=f"there is no native library: {library.why_not()}")

nan, inf = float("nan"), float("inf")
JUNK = (nan, inf, -inf, 3e38, -3e38)
# B, H, K, L, S: small, several blocks, one query, keys in parts for one query and for strips of rows
SIZES = {
    "small": (2, 4, 2, 5, 11),
    "blocks": (1, 4, 2, 37, 389),
    "one query": (2, 4, 2, 1, 203),
    "parts": (1, 4, 2, 1, 1601),
    "parts of strips": (1, 2, 1, 11, 1601),
}


def hidden_pairs(B: int, H: int, K: int, L: int, S: int, by_head: bool) -> Tensor:
    """(B, H or 1, L, S): some pairs, some keys from everybody (of a group, if by head), and from some rows all."""
    generator = torch.Generator().manual_seed(S)
    hidden = torch.rand(B, H if by_head else 1, L, S, generator=generator) < 0.2
    if by_head:
        keys = torch.rand(B, K, 1, S, generator=generator) < 0.4
        hidden |= keys.repeat_interleave(H // K, 1)
    else:
        hidden |= torch.rand(B, 1, 1, S, generator=generator) < 0.4
    hidden[..., -3:] = True
    if L > 1:
        hidden[:, :, [0, -1]] = True
    elif B > 1 or by_head:  # else the one row would be blind
        hidden[-1, 0] = True
    return hidden


def hiding(way: str, hidden: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Options that hide: by the mask, by a bias of -inf, by one of the lowest number, by half of each."""
    if way == "mask":
        return {"mask": ~hidden}
    if way == "alone":  # a mask that tells ranges of keys, not pairs
        return {"mask": mh.dense(~hidden) & mh.lengths(hidden.shape[-1] - 3) & ~mh.window(left=-0, right=0)}
    low = -inf if way != "lowest" else torch.finfo(dtype).min
    bias = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    if way == "both":
        even = torch.arange(hidden.shape[-1]) % 2 == 0
        return {"mask": ~(hidden & even), "bias": bias.masked_fill(hidden & ~even, low).requires_grad_()}
    return {"bias": bias.masked_fill(hidden, low).requires_grad_()}


def answers(leaves: list[Tensor], above: tuple[Tensor, Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    """out, lse, and the gradients of what has one, by name."""
    named = dict(zip(("q", "k", "v"), [t.detach().clone().requires_grad_() for t in leaves], strict=True))
    torch.manual_seed(2)
    out, lse = mh.attention(*named.values(), **options, kernel="native", return_lse=True)
    named |= {
        n: options[n] for n in ("bias", "sinks") if isinstance(options.get(n), Tensor) and options[n].requires_grad
    }
    return {"out": out, "lse": lse} | dict(
        zip(named, torch.autograd.grad([out, lse], list(named.values()), above), strict=True)
    )


def hold_clean(sizes: tuple[int, ...], dtype: torch.dtype, hidden: Tensor, options: dict[str, Any], junks=JUNK) -> None:
    """The very bits that zeros in the hidden places give, and no gradient to these."""
    B, H, K, L, S = sizes
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, H, L, 5), (B, K, S, 5), (B, K, S, 8))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    above = torch.randn(B, H, L, 8, generator=generator).to(dtype), torch.randn(B, H, L, generator=generator)
    hidden = hidden.expand(B, H, L, S)
    blind = hidden.all(-1)
    unseen = hidden.all(-2).unflatten(1, (K, H // K)).all(2)  # (B, K, S)
    assert unseen.any()

    def filled(junk: float) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        leaves = [q.masked_fill(blind[..., None], junk), *(t.masked_fill(unseen[..., None], junk) for t in (k, v))]
        return leaves, (above[0].masked_fill(blind[..., None], junk), above[1].masked_fill(blind, junk))

    clean = answers(*filled(0.0), options)
    assert all(t.isfinite().all() for name, t in clean.items() if name != "lse")
    if "sinks" not in options:
        assert torch.equal(clean["lse"] == -inf, blind)
    assert not clean["out"][blind].any()
    assert not clean["q"][blind].any()
    assert not clean["k"][unseen].any()
    assert not clean["v"][unseen].any()
    if "bias" in clean and clean["bias"].shape == hidden.shape:
        assert not clean["bias"][hidden].any()
    for junk in junks:
        junk = max(min(junk, torch.finfo(dtype).max), -torch.finfo(dtype).max) if abs(junk) < inf else junk
        found = answers(*filled(junk), options)
        for name, want in clean.items():
            assert torch.equal(found[name], want), f"{junk} leaks into {name}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by_head", [False, True], ids=["all heads", "by head"])
@pytest.mark.parametrize("way", ["mask", "alone", "-inf", "lowest", "both"])
@pytest.mark.parametrize("size", SIZES)
def test_hidden_garbage_changes_no_bit(size, way, by_head, dtype):
    hidden = hidden_pairs(*SIZES[size], by_head)
    if way == "alone":
        hidden = hidden | mh.window(left=-0, right=0).dense(*SIZES[size][3:])
    hold_clean(SIZES[size], dtype, hidden, hiding(way, hidden, dtype))


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "alibi": {"bias": mh.ALiBi},  # of the heads
    "dropout": {"dropout": 0.5},
    "all is dropped": {"dropout": 1.0},
    "negative scale": {"scale": -1.0},
    "bias of float64": {"bias": torch.full((1, 1), 0.3, dtype=torch.float64)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_hidden_garbage_beside_every_option(size, name):
    sizes = SIZES[size]
    hidden = hidden_pairs(*sizes, by_head=True)
    options = {n: value(sizes[1]) if value is mh.ALiBi else value for n, value in OPTIONS[name].items()}
    hold_clean(sizes, torch.float32, hidden, {"mask": ~hidden, **options}, (nan, inf, 3e38))


@pytest.mark.parametrize("size", SIZES)
def test_hidden_garbage_beside_sinks(size):
    """A blind row has the sink's lse, whose gradient goes to the sink: it has to be a number."""
    B, H, K, L, S = SIZES[size]
    hidden = hidden_pairs(B, H, K, L, S, by_head=True)
    sinks = torch.randn(H, requires_grad=True)
    q, k, v = (torch.randn(B, h, n, 5) for h, n in ((H, L), (K, S), (K, S)))
    above = torch.randn(B, H, L, 5), torch.randn(B, H, L)
    unseen = hidden.all(-2).unflatten(1, (K, H // K)).all(2)[..., None]
    blind = hidden.all(-1)[..., None].expand(B, H, L, 1)
    clean = None
    for junk in (0.0, nan, inf):
        leaves = [q.masked_fill(blind, junk), k.masked_fill(unseen, junk), v.masked_fill(unseen, junk)]
        found = answers(leaves, above, {"mask": ~hidden, "sinks": sinks})
        clean = clean or found
        assert all(torch.equal(found[name], want) for name, want in clean.items()), junk
    assert all(t.isfinite().all() for t in clean.values())


@pytest.mark.parametrize("mask", [mh.lengths(180), mh.lengths([0, 300]), mh.padding(torch.arange(389) < 200)], ids=repr)
def test_padding_at_the_end_of_whole_blocks(mask):
    hidden = ~mask.dense(37, 389).expand(2, 1, 37, 389)
    for dtype in DTYPES:
        hold_clean((2, 4, 2, 37, 389), dtype, hidden, {"mask": mask}, (nan, -inf))


def test_keys_before_a_window_and_behind_it():
    mask = mh.window(left=20, right=5)
    hidden = ~mask.dense(37, 389)
    hold_clean((2, 4, 2, 37, 389), torch.float32, hidden.expand(2, 1, 37, 389), {"mask": mask})


# What is seen ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_nan_that_is_seen_comes_out(size, where, dtype):
    """Also where hidden garbage is left out in a second go."""
    B, H, K, L, S = SIZES[size]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(s, generator=generator).to(dtype) for s in ((B, H, L, 5), (B, K, S, 5), (B, K, S, 8)))
    for at in (0, 7, S // 2, S - 1):
        keep = torch.ones(B, H, L, S, dtype=torch.bool)
        keep[..., (at + 1) % S] = False
        for mask in (None, mh.dense(keep)):
            leaves = [q.clone(), k.clone(), v.clone()]
            if mask is not None:
                leaves[1][:, :, (at + 1) % S] = nan
            leaves["qkv".index(where)][:, 0, at, 2] = nan
            for leaf in leaves:
                leaf.requires_grad_()
            out, lse = mh.attention(*leaves, mask, kernel="native", return_lse=True)
            own, others = out[:, : H // K], out[:, H // K :]
            assert own.isnan().all() if where == "k" else own[..., 2].isnan().all(), f"key {at}"
            assert lse[:, : H // K].isnan().all() == (where == "k")
            assert others.isfinite().all()
            grads = torch.autograd.grad(out.float().square().sum(), leaves)
            assert grads[0][:, : H // K].isnan().all()
            assert all(grad[:, 1:].isfinite().all() for grad in grads[1:])


@pytest.mark.parametrize("size", SIZES)
def test_a_nan_in_one_row_stays_in_its_row(size):
    """A query or a gradient that is NaN spoils its own row, and what all rows add up to."""
    B, H, K, L, S = SIZES[size]
    q, k, v = (
        torch.randn(s, generator=torch.Generator().manual_seed(3)) for s in ((B, H, L, 5), (B, K, S, 5), (B, K, S, 8))
    )
    row = (0, H - 1, L // 2)
    others = torch.ones(B, H, L, dtype=torch.bool)
    others[row] = False
    for what in ("q", "above"):
        leaves = [q.clone(), k.clone(), v.clone()]
        above = torch.ones(B, H, L, 8)
        (leaves[0] if what == "q" else above)[row] = nan
        for leaf in leaves:
            leaf.requires_grad_()
        out = mh.attention(*leaves, mh.lengths(S), kernel="native")
        assert out[row].isnan().all() == (what == "q")
        assert out[others].isfinite().all()
        grads = torch.autograd.grad(out, leaves, above)
        assert grads[0][row].isnan().all()
        assert grads[0][others].isfinite().all()
        for grad in grads[1:]:
            assert grad[0, K - 1].isnan().all()
            spoilt = torch.zeros(B, K, dtype=torch.bool)
            spoilt[0, K - 1] = True
            assert grad[~spoilt].isfinite().all()


@pytest.mark.parametrize("junk", [nan, inf])
@pytest.mark.parametrize("size", ["small", "blocks", "parts of strips"])
def test_a_blind_row_is_zero_beside_garbage_that_others_see(size, junk):
    B, H, K, L, S = SIZES[size]
    keep = torch.ones(L, S, dtype=torch.bool)
    keep[[0, L // 2]] = False
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(s, generator=generator) for s in ((B, H, L, 5), (B, K, S, 5), (B, K, S, 8))]
    leaves[1][:, :, S // 3] = leaves[2][:, :, S // 2] = junk
    for leaf in leaves:
        leaf.requires_grad_()
    out, lse = mh.attention(*leaves, keep, kernel="native", return_lse=True)
    grad = torch.autograd.grad(out.sum() + lse.masked_fill(lse == -inf, 0.0).sum(), leaves[0])[0]
    for row in (0, L // 2):
        assert not out[:, :, row].any()
        assert (lse[:, :, row] == -inf).all()
        assert not grad[:, :, row].any()
    assert not out[:, :, 1].isfinite().any() or junk == inf


@pytest.mark.parametrize("size", SIZES)
def test_infinities_that_are_seen_are_those_of_the_definition(size):
    B, H, K, L, S = SIZES[size]
    q, k, v = (
        torch.randn(s, generator=torch.Generator().manual_seed(3)) for s in ((B, H, L, 5), (B, K, S, 5), (B, K, S, 8))
    )
    for where, number in (
        ("k", inf),
        ("k", -inf),
        ("v", inf),
        ("v", -inf),
        ("q", inf),
        ("k", 1e36),
        ("q", 1e36),
        ("v", 3e38),
    ):
        leaves = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        leaves[where][:, 0, -1, 2] = number
        out, lse = mh.attention(**leaves, kernel="native", return_lse=True)
        want = reference.attention(**leaves)
        told = f"{number} in {where}"
        torch.testing.assert_close(
            out, want.out, equal_nan=True, rtol=1e-4, atol=1e-5, msg=lambda m, t=told: f"{t}: {m}"
        )
        finite = want.lse.isfinite()  # what is not may be inf or NaN
        assert torch.equal(lse.isfinite(), finite), told
        torch.testing.assert_close(lse[finite], want.lse[finite], rtol=1e-4, atol=1e-5)


def test_a_nan_in_the_bias_comes_out():
    q, k, v = (torch.randn(1, 2, n, 5, generator=torch.Generator().manual_seed(3)) for n in (37, 389, 389))
    for dtype in (*DTYPES, torch.float64):
        bias = torch.zeros(37, 389, dtype=dtype)
        bias[5, 200] = nan
        out = mh.attention(q, k, v, bias=bias, kernel="native")
        assert out[:, :, 5].isnan().all()
        bias[5, 200] = 0
        assert torch.equal(out[:, :, :5], mh.attention(q, k, v, bias=bias, kernel="native")[:, :, :5])
        assert out[:, :, 6:].isfinite().all()
        hidden = torch.ones(37, 389, dtype=torch.bool)
        hidden[5, 200] = False
        bias[5, 200] = nan  # hidden by the mask, it is nothing
        assert mh.attention(q, k, v, hidden, bias=bias, kernel="native").isfinite().all()
