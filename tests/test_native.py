"""The native kernel against the reference over thousands of drawn cases, on every instruction set, and the same bits on
every run and for any number of threads."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
import native_cases
from cases import assert_within_budget, by_kernel, by_reference, draw, names, own_error
from multihead.kernels import library
from multihead.weights import Look, attention_with_weights
from native_cases import DTYPES, KINDS

pytestmark = pytest.mark.skipif(not library.available(), reason=f"there is no native library: {library.why_not()}")

EACH = {"blocks": 120, "decoding": 72, "few rows": 48, "widths": 120, "small": 240, "product": 200}
CHUNKS = 4


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_cases(kind, chunk):
    """In float32, bfloat16 and float16, forward and backward, by a bound from the numbers of each case."""
    count = EACH[kind] // CHUNKS
    native_cases.check(range(1_000_000 + chunk * count, 1_000_000 + (chunk + 1) * count), kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_budget_of_the_contract(dtype):
    """At most twice the reference's own error, plus one rounding: on cases as every kernel is given them, and on some
    of each kind above."""
    drawn = [draw(number).to(dtype) for number in range(60_000, 60_016)]
    for kind in KINDS[:-1]:
        drawn += [native_cases.draw(number, kind).to(dtype)[0] for number in range(2_000_000, 2_000_002)]
    for narrow in drawn:
        wide = narrow.to(torch.float64)
        exact, own = by_reference(wide), own_error(narrow, wide)
        assert_within_budget(by_kernel(narrow, "native"), exact, own, f"{dtype}: {narrow.told}", names(narrow))


OTHERS = [isa for isa in library.isas() if isa != library.isa()]
IN_ANOTHER_PROCESS = """
import torch, native_cases
from multihead.kernels import library
torch.set_num_threads(1)
for kind in native_cases.KINDS:
    native_cases.check(range(3_000_000, 3_000_012), kind)
native_cases.check_dropout()
print(library.isa())
"""


@pytest.mark.skipif(not OTHERS, reason=f"this CPU has no other instruction set than {library.isas()}")
@pytest.mark.parametrize("isa", OTHERS)
def test_every_instruction_set(isa):
    """What is chosen once for a process is told to others."""
    native_cases.run_with(isa, IN_ANOTHER_PROCESS)


# The same bits --------------------------------------------------------------------------------------------------------

# Fewer heads than threads, and more; keys in parts, for few rows and for many; hidden garbage, which is computed twice.
LARGE = {
    "one head": {"B": 1, "H": 1, "K": 1, "L": 200, "S": 600},
    "one group": {"B": 1, "H": 3, "K": 1, "L": 100, "S": 401, "mask": mh.causal()},
    "three heads": {"B": 1, "H": 3, "K": 3, "L": 129, "S": 385, "mask": mh.window(left=50)},
    "many heads": {"B": 2, "H": 8, "K": 4, "L": 67, "S": 193, "softcap": 3.0},
    "one query": {"B": 1, "H": 4, "K": 1, "L": 1, "S": 4000, "D": 32, "V": 33},
    "parts": {"B": 1, "H": 8, "K": 2, "L": 1, "S": 1999, "D": 64, "V": 64},
    "parts of strips": {"B": 1, "H": 2, "K": 2, "L": 50, "S": 1999, "mask": mh.causal()},
    "dropout": {"B": 1, "H": 3, "K": 1, "L": 130, "S": 400, "dropout": 0.3, "mask": mh.causal()},
    "bias": {"B": 1, "H": 2, "K": 2, "L": 100, "S": 400, "bias": (2, 100, 400)},
    "bias of a batch": {"B": 3, "H": 4, "K": 2, "L": 65, "S": 200, "bias": (1, 4, 65, 200)},
    "bias of heads": {"B": 3, "H": 4, "K": 2, "L": 65, "S": 200, "bias": (3, 1, 65, 200)},
    "bias of all": {"B": 2, "H": 4, "K": 2, "L": 65, "S": 200, "bias": (65, 200)},
    "bias of keys": {"B": 2, "H": 4, "K": 2, "L": 65, "S": 400, "bias": (1, 400)},
    "bias of queries": {"B": 1, "H": 2, "K": 1, "L": 130, "S": 400, "bias": (130, 1)},
    "bias of a head": {"B": 2, "H": 4, "K": 4, "L": 65, "S": 200, "bias": (4, 1, 1)},
    "hidden garbage": {"B": 1, "H": 2, "K": 1, "L": 130, "S": 400, "mask": mh.lengths(391), "junk": True},
}


def bits_of(dtype, B, H, K, L, S, D=16, V=17, mask=None, bias=None, junk=False, **options):
    """out, lse and all gradients, of the same numbers each time."""
    torch.manual_seed(5)
    leaves = [torch.randn(s, dtype=dtype) for s in ((B, H, L, D), (B, K, S, D), (B, K, S, V))]
    if junk:
        leaves[1][:, :, 391:], leaves[2][:, :, 391:] = torch.nan, torch.inf
    if bias is not None:
        leaves.append(torch.randn(bias))
        options["bias"] = leaves[3].requires_grad_()
    for leaf in leaves:
        leaf.requires_grad_()
    above = torch.randn(B, H, L, V, dtype=dtype), torch.randn(B, H, L)
    out, lse = mh.attention(*leaves[:3], mask, kernel="native", return_lse=True, **options)
    return [out, lse, *torch.autograd.grad([out, lse], leaves, above)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_the_same_bits_on_every_run_and_for_any_number_of_threads(name, dtype):
    first = bits_of(dtype, **LARGE[name])
    assert all(t.isfinite().all() for t in first)
    for threads in (1, 2, 3, 4, 4):
        torch.set_num_threads(threads)
        again = bits_of(dtype, **LARGE[name])
        for number, (a, b) in enumerate(zip(first, again, strict=True)):
            assert torch.equal(a, b), f"result {number} is another with {threads} threads"


@pytest.mark.parametrize("name", ["one group", "parts", "parts of strips", "bias", "hidden garbage"])
def test_the_same_bits_with_and_without_lse_and_gradients(name):
    sizes = dict(LARGE[name])
    for dtype in DTYPES:
        first = bits_of(dtype, **sizes)[0]
        B, H, K, L, S = (sizes[letter] for letter in "BHKLS")
        D, V, mask = sizes.get("D", 16), sizes.get("V", 17), sizes.get("mask")
        torch.manual_seed(5)
        q, k, v = (torch.randn(s, dtype=dtype) for s in ((B, H, L, D), (B, K, S, D), (B, K, S, V)))
        if "junk" in sizes:
            k[:, :, 391:], v[:, :, 391:] = torch.nan, torch.inf
        bias = torch.randn(sizes["bias"]) if "bias" in sizes else None
        for more in ({}, {"return_lse": True}):
            out = mh.attention(q, k, v, mask, bias=bias, kernel="native", **more)
            assert torch.equal(out[0] if more else out, first)
        out = mh.attention(q.requires_grad_(), k, v, mask, bias=bias, kernel="native")
        assert torch.equal(out, first)


def test_rows_of_a_batch_and_heads_have_the_bits_of_each_alone():
    torch.manual_seed(6)
    q, k, v = torch.randn(3, 4, 65, 16), torch.randn(3, 2, 200, 16), torch.randn(3, 2, 200, 16)
    whole = mh.attention(q, k, v, mh.causal(), kernel="native")
    for b in range(3):
        for head in range(2):
            q_1, k_1, v_1 = q[b, 2 * head : 2 * head + 2], k[b, head : head + 1], v[b, head : head + 1]
            assert torch.equal(
                mh.attention(q_1, k_1, v_1, mh.causal(), kernel="native"), whole[b, 2 * head : 2 * head + 2]
            )


def test_weights_of_a_large_table():
    """One that is asked for in large pages, whole and the part that does not fill one."""
    q, k = torch.randn(2, 1, 1, 2111, 8, generator=torch.Generator().manual_seed(0)).unbind()
    _, weights = attention_with_weights(q, k, k, look=Look(average=False))
    assert weights.numel() * 4 > 16 << 20
    torch.testing.assert_close(weights, (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1), rtol=1e-4, atol=1e-7)
