"""The native kernel at its edges: empty and smallest sizes, rows that see nothing, nonsense given to its operations,
tensors that lie gigabytes apart, and the memory it takes."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import reference
from multihead.kernels import library
from native_cases import DTYPES, given, hold

pytestmark = pytest.mark.skipif(not library.available(), reason=f"there is no native library: {library.why_not()}")

f32, f64, i64 = torch.float32, torch.float64, torch.int64
inf = math.inf
ANY = 2**63 - 1
WINDOW, LENGTHS, PREFIX, PADDING, DOCUMENTS, DENSE, BOTH, EITHER, INVERT = range(9)


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [f32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("empty", ["B", "L", "S", "V", "L S", "B L S V"])
def test_empty_axes(empty, dtype, threads):
    torch.set_num_threads(threads)
    for lengths in ((5, 11), (5, 1700)):
        sizes = {"B": 2, "L": lengths[0], "S": lengths[1], "V": 6} | dict.fromkeys(empty.split(), 0)
        B, L, S, V = sizes.values()
        for mask, p in itertools.product((None, mh.causal(), mh.lengths(0), mh.padding(torch.ones(S) > 0)), (0.0, 0.5)):
            q, k, v = (torch.randn(s, dtype=dtype) for s in ((B, 4, L, 8), (B, 2, S, 8), (B, 2, S, V)))
            bias = torch.randn(4, L, S)
            leaves = [t.requires_grad_() for t in (q, k, v, bias)]
            out, lse = mh.attention(q, k, v, mask, bias=bias, dropout=p, kernel="native", return_lse=True)
            assert out.shape == (B, 4, L, V)
            assert lse.shape == (B, 4, L)
            grads = torch.autograd.grad([out.float().sum() + lse.masked_fill(lse == -inf, 0.0).sum()], leaves)
            assert [g.shape for g in grads] == [t.shape for t in leaves]
            assert all(g.isfinite().all() for g in grads)
            if S == 0:
                assert not out.any()
                assert (lse == -inf).all()
            if V == 0 and S and L and mask is None:
                torch.testing.assert_close(lse, reference.attention(q, k, v, bias=bias).lse, rtol=1e-5, atol=1e-5)
            else:
                assert S == 0 or V == 0 or not any(g.any() for g in grads)


@pytest.mark.parametrize("D", [1, 2, 3])
def test_the_smallest_sizes(D):
    for L, S, H, K, V in itertools.product((1, 2), (1, 2), (1, 2), (1,), (1, 2)):
        for mask in (None, mh.causal(), mh.window(left=0, right=0), mh.padding(torch.arange(S) > 0)):
            hold(given(mask, 1, H, K, L, S, D=D, V=V, bias=torch.randn(H, L, S, dtype=f64).requires_grad_()))


@pytest.mark.parametrize(
    "width", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 512]
)
def test_widths_around_those_of_vectors(width):
    for L, S in ((1, 9), (17, 25)):
        hold(given(mh.causal(), 1, 2, 1, L, S, D=width, V=5), (f32, torch.bfloat16))
        hold(given(mh.causal(), 1, 2, 1, L, S, D=5, V=width), (f32, torch.float16))


def test_many_heads_and_large_groups():
    for H, K, L in (
        (32, 1, 1),
        (32, 32, 1),
        (9, 1, 1),
        (8, 1, 1),
        (7, 1, 1),
        (13, 1, 5),
        (64, 2, 2),
        (65, 1, 1),
        (40, 40, 3),
    ):
        hold(given(mh.causal(), 1, H, K, L, 50, D=4, V=4), (f32,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing(dtype):
    for L, S in ((5, 11), (70, 200), (3, 1700), (1, 1700), (13, 1700)):
        keep = torch.rand(2, 4, L, S, generator=torch.Generator().manual_seed(L)) < 0.5
        keep[:, :, L // 2] = False
        keep[1, 2] = False
        hold(given(mh.dense(keep), 2, 4, 2, L, S), (dtype,))
        for mask in (
            mh.lengths(0),
            mh.lengths([0, S]),
            mh.window(left=0, right=0) & ~mh.causal(),
            mh.dense(keep[:1, :1, :1] & False),
        ):
            case, above = given(mask, 2, 4, 2, L, S).to(dtype)
            out, lse = mh.attention(case.q, case.k, case.v, mask, kernel="native", return_lse=True)
            blind = ~mask.dense(L, S).any(-1).expand(2, 4, L)
            assert blind[0].all()
            assert not out[blind].any()
            assert torch.equal(lse == -inf, blind)
            grads = torch.autograd.grad([out, lse], case.inputs(), above)
            assert not grads[0][blind].any()
            assert not any(g[0].any() for g in grads)


# Nonsense -------------------------------------------------------------------------------------------------------------

B, H, K, L, S, D, V = 2, 4, 2, 5, 11, 8, 6


def arguments(**changes: Any) -> list[Any]:
    """Of all operations, in order."""
    torch.manual_seed(1)
    every = {"q": torch.randn(B, H, L, D), "k": torch.randn(B, K, S, D), "v": torch.randn(B, K, S, V)}
    every |= dict.fromkeys(("bias", "slopes", "q_positions", "k_positions")) | {"mask": [], "tables": []}
    every |= {"scale": 0.3, "softcap": 0.0, "dropout": 0.0, "seed": None, "lowest": None}
    assert set(changes) <= set(every)
    return list((every | changes).values())


bools = torch.ones
NONSENSE: dict[str, dict[str, Any]] = {
    "q of three axes": {"q": torch.ones(H, L, D)},
    "k of five axes": {"k": torch.ones(1, B, K, S, D)},
    "v of no axes": {"v": torch.ones(())},
    "k of other rows": {"k": torch.ones(B + 1, K, S, D)},
    "k of other heads": {"k": torch.ones(B, K + 1, S, D)},
    "v of other heads": {"v": torch.ones(B, K + 1, S, V)},
    "v of other keys": {"v": torch.ones(B, K, S + 1, V)},
    "k of other width": {"k": torch.ones(B, K, S, D + 1)},
    "no heads": {"q": torch.ones(B, 0, L, D), "k": torch.ones(B, 0, S, D), "v": torch.ones(B, 0, S, V)},
    "no key heads": {"k": torch.ones(B, 0, S, D), "v": torch.ones(B, 0, S, V)},
    "no width": {"q": torch.ones(B, H, L, 0), "k": torch.ones(B, K, S, 0)},
    "q of float64": {"q": torch.ones(B, H, L, D, dtype=f64)},
    "k of bfloat16": {"k": torch.ones(B, K, S, D, dtype=torch.bfloat16)},
    "all of float64": dict.fromkeys("qkv", torch.ones(B, H, L, D, dtype=f64)),
    "all of int64": dict.fromkeys("qkv", torch.ones(B, H, L, D, dtype=i64)),
    "bias of two axes": {"bias": torch.ones(L, S)},
    "bias of other keys": {"bias": torch.ones(1, 1, L, S - 1)},
    "bias of other rows": {"bias": torch.ones(B + 1, 1, 1, 1)},
    "bias of float64": {"bias": torch.ones(1, 1, 1, 1, dtype=f64)},
    "bias of int64": {"bias": torch.ones(1, 1, 1, 1, dtype=i64)},
    "bias that is empty": {"bias": torch.ones(1, 1, L, 0)},
    "slopes of other heads": {"slopes": torch.ones(H - 1)},
    "slopes of two axes": {"slopes": torch.ones(1, H)},
    "slopes of float64": {"slopes": torch.ones(H, dtype=f64)},
    "slopes apart": {"slopes": torch.ones(2 * H)[::2]},
    "q_positions of other length": {"slopes": torch.ones(H), "q_positions": torch.ones(L + 1, dtype=i64)},
    "q_positions of other rows": {"slopes": torch.ones(H), "q_positions": torch.ones(3, L, dtype=i64)},
    "q_positions of int16": {"slopes": torch.ones(H), "q_positions": torch.ones(L, dtype=torch.int16)},
    "k_positions of no axes": {"slopes": torch.ones(H), "k_positions": torch.ones((), dtype=i64)},
    "k_positions of three axes": {"slopes": torch.ones(H), "k_positions": torch.ones(1, B, S, dtype=i64)},
    "k_positions of bool": {"mask": [WINDOW, 1, 1], "k_positions": torch.ones(S) > 0},
    "k_positions, more queries": {"mask": [WINDOW, 1, 1], "q": torch.ones(B, H, 12, D), "k_positions": torch.arange(S)},
    "unknown kind": {"mask": [9]},
    "kind below 0": {"mask": [-1]},
    "kind past int32": {"mask": [2**32]},
    "kind at the end": {"mask": [ANY]},
    "window without bounds": {"mask": [WINDOW]},
    "window with one bound": {"mask": [WINDOW, 1]},
    "both of nothing": {"mask": [BOTH]},
    "both of one": {"mask": [WINDOW, 1, 1, BOTH]},
    "either of one": {"mask": [WINDOW, 1, 1, EITHER]},
    "inversion of nothing": {"mask": [INVERT]},
    "two answers": {"mask": [WINDOW, 1, 1, WINDOW, 1, 1]},
    "33 steps": {"mask": [WINDOW, 1, 1] + [INVERT] * 32},
    "1000 steps": {"mask": [WINDOW, 1, 1] + [INVERT] * 999},
    "nine at once": {"mask": [WINDOW, 1, 1] * 9 + [BOTH] * 8},
    "padding without a number": {"mask": [PADDING]},
    "padding without a table": {"mask": [PADDING, 0]},
    "table below 0": {"mask": [PADDING, -1], "tables": [bools(S) > 0]},
    "table past the last": {"mask": [PADDING, 1], "tables": [bools(S) > 0]},
    "table past int32": {"mask": [DENSE, 2**32], "tables": [bools(L, S) > 0]},
    "padding of floats": {"mask": [PADDING, 0], "tables": [bools(S)]},
    "padding of bytes": {"mask": [PADDING, 0], "tables": [bools(S, dtype=torch.uint8)]},
    "padding of other keys": {"mask": [PADDING, 0], "tables": [bools(S + 1) > 0]},
    "padding of other rows": {"mask": [PADDING, 0], "tables": [bools(3, S) > 0]},
    "padding of three axes": {"mask": [PADDING, 0], "tables": [bools(1, B, S) > 0]},
    "padding of no axes": {"mask": [PADDING, 0], "tables": [bools(()) > 0]},
    "dense of one axis": {"mask": [DENSE, 0], "tables": [bools(S) > 0]},
    "dense of five axes": {"mask": [DENSE, 0], "tables": [bools(1, B, H, L, S) > 0]},
    "dense of other keys": {"mask": [DENSE, 0], "tables": [bools(L, S - 1) > 0]},
    "dense of other heads": {"mask": [DENSE, 0], "tables": [bools(K, L, S) > 0]},
    "dense of floats": {"mask": [DENSE, 0], "tables": [bools(L, S)]},
    "documents without ids of queries": {"mask": [DOCUMENTS, 0], "tables": [torch.arange(S)]},
    "documents of int32": {"mask": [DOCUMENTS, 0, -1], "tables": [torch.arange(S).int()]},
    "documents of other keys": {"mask": [DOCUMENTS, 0, -1], "tables": [torch.arange(L)]},
    "documents of other queries": {"mask": [DOCUMENTS, 0, 0], "tables": [torch.arange(S)]},
    "documents past the last": {"mask": [DOCUMENTS, 0, 7], "tables": [torch.arange(S)]},
    "documents, more queries": {"mask": [DOCUMENTS, 0, -1], "tables": [torch.arange(S)], "q": torch.ones(B, H, 12, D)},
    "lengths without a number": {"mask": [LENGTHS, -1]},
    "lengths without a table": {"mask": [LENGTHS, 0, 0]},
    "lengths of int32": {"mask": [LENGTHS, 0, 0], "tables": [torch.ones(B, dtype=torch.int32)]},
    "lengths of other rows": {"mask": [LENGTHS, 0, 0], "tables": [torch.ones(3, dtype=i64)]},
    "lengths of two axes": {"mask": [LENGTHS, 0, 0], "tables": [torch.ones(B, 1, dtype=i64)]},
    "lengths of none": {"mask": [LENGTHS, 0, 0], "tables": [torch.ones(0, dtype=i64)]},
    "prefix of floats": {"mask": [PREFIX, 0, 0], "tables": [torch.ones(B)]},
    "dropout below 0": {"dropout": -0.1, "seed": torch.tensor(1)},
    "dropout above 1": {"dropout": 1.5, "seed": torch.tensor(1)},
    "dropout of NaN": {"dropout": math.nan, "seed": torch.tensor(1)},
    "dropout without a seed": {"dropout": 0.5},
    "seed of two": {"dropout": 0.5, "seed": torch.tensor([1, 2])},
    "seed of int32": {"dropout": 0.5, "seed": torch.tensor(1, dtype=torch.int32)},
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_an_error_with_a_message(name):
    """By each operation, and nothing that was given is kept."""
    call = arguments(**NONSENSE[name])
    out, state = torch.zeros(*call[0].shape[:-1], V), torch.zeros(2, *call[0].shape[:-1])
    held = [t for t in (*call, out, state, *call[8]) if isinstance(t, Tensor)]
    uses = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in held]
    for operation, before, after in (
        (torch.ops.multihead.forward, (), (True,)),
        (torch.ops.multihead.backward, (out, None, out, None, state), (3,)),
        (torch.ops.multihead.weights, (state,), (False,)),
    ):
        with pytest.raises(RuntimeError, match=r"multihead: .*(expected| fits)"):
            operation(*before, *call, *after)
    assert [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in held] == uses


def test_what_is_no_nonsense_runs():
    """The arguments that the nonsense above is made of; and bounds that no mask of Python has."""
    tables = [torch.ones(S) > 0, torch.ones(1, 1, L, 1) > 0, torch.arange(S), torch.arange(L), torch.ones(1, dtype=i64)]
    programs = [[], [PADDING, 0], [DENSE, 1], [DOCUMENTS, 2, 3], [DOCUMENTS, 2, -1], [LENGTHS, 4, 0], [PREFIX, -1, 5]]
    programs += [[WINDOW, a, b] for a in (-(2**63), -5, -1, ANY) for b in (-(2**63), -5, -1, ANY)]
    programs += [[LENGTHS, -1, -(2**63)], [PREFIX, -1, -(2**63)], [PREFIX, -1, ANY], [WINDOW, 1, 1] + [INVERT] * 31]
    for mask in programs:
        call = arguments(mask=mask, tables=tables, slopes=torch.ones(H))
        out, lse, state, _ = torch.ops.multihead.forward(*call, True)
        grads = torch.ops.multihead.backward(torch.ones_like(out), lse.clone(), out, None, state, *call, 3)
        assert all(t.isfinite().all() for t in (out, *grads[:3]))


def test_nonsense_in_the_backward_pass():
    call = arguments(bias=torch.ones(1, 1, L, S))
    out, lse, state, _ = torch.ops.multihead.forward(*call, True)
    right = {"grad_out": out, "grad_lse": lse, "out": out, "rest": None, "state": state}
    for changes in (
        {"grad_out": out[:1]},
        {"grad_out": out.double()},
        {"grad_out": out[..., :-1]},
        {"grad_out": out.long()},
        {"out": out[0]},
        {"out": out.transpose(1, 2)},
        {"rest": out[:, :1]},
        {"rest": torch.zeros(0)},
        {"state": state.double()},
        {"state": state[..., :-1]},
        {"state": state[0]},
        {"state": lse},
        {"state": state.transpose(0, 1).contiguous().transpose(0, 1)},
        {"grad_lse": lse[:, :, None]},
        {"grad_lse": lse.half()},
        {"grad_lse": torch.zeros(()).expand(B, H, L)},
    ):
        with pytest.raises(RuntimeError, match="multihead: "):
            torch.ops.multihead.backward(*(right | changes).values(), *call, 7)
    with pytest.raises(RuntimeError, match="no bias"):
        torch.ops.multihead.backward(*right.values(), *arguments(), 7)
    with pytest.raises(RuntimeError, match="state"):
        torch.ops.multihead.weights(state[0], *call, True)


def test_what_is_given_is_not_kept():
    """Nor changed: tensors are given back after each call."""
    call = arguments(bias=torch.ones(1, 1, L, S), mask=[PADDING, 0], tables=[torch.ones(S) > 0], slopes=torch.ones(H))
    out, lse, state, _ = torch.ops.multihead.forward(*call, True)
    held = [t for t in (*call, out, lse, state, *call[8]) if isinstance(t, Tensor)]
    before = [t.clone() for t in held]
    uses = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in held]
    for _ in range(3):
        torch.ops.multihead.forward(*call, True)
        torch.ops.multihead.backward(out, lse, out, None, state, *call, 7)
        torch.ops.multihead.weights(state, *call, True)
    assert [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in held] == uses
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


# Far apart, and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f32, torch.bfloat16], ids=str)
def test_rows_that_lie_gigabytes_apart(dtype, tmp_path):
    """Offsets of more than 2^31 elements, in a file of which no more is there than is written to."""
    apart = 2**31 + 96
    size = 3 * apart
    try:
        memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"no sparse file of {size} numbers here: {error}")

    def far(values: Tensor, axis: int, start: int) -> Tensor:
        """The same, with the items of an axis (two or three) far apart."""
        strides = [3 * s + 1 for s in values.contiguous().stride()]
        strides[axis] = apart
        return torch.as_strided(memory, values.shape, strides, start).copy_(values)

    torch.manual_seed(1)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 11, 8), "v": (2, 2, 11, 6), "bias": (2, 4, 5, 11)}
    values = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    above, keep = torch.randn(2, 4, 5, 6).to(dtype), torch.rand(2, 1, 5, 11) < 0.8
    for axis in (0, 1):  # rows of the batch, and the two heads of the keys
        spread = {n: far(t, axis if n in ("k", "v") else 0, 10_000 * i) for i, (n, t) in enumerate(values.items())}
        answers = []
        for held, grad in ((values, above), (spread, far(above, 0, 70_000))):
            leaves = {name: t.detach().requires_grad_() for name, t in held.items()}
            out, lse = mh.attention(**leaves, mask=keep, kernel="native", return_lse=True)
            answers.append([out, lse, *torch.autograd.grad(out, list(leaves.values()), grad)])
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def peak() -> int:
    """The most memory this process had since it was last asked, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak of memory can't be read here: {error}")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    if found is None:
        pytest.skip("the peak of memory is not told here")
    return 1024 * int(found[1])


@pytest.mark.parametrize(
    "options",
    [{"mask": mh.window(left=500, right=0)}, {"mask": mh.window(left=500), "dropout": 0.1, "softcap": 9.0}],
    ids=["", "dropout, softcap"],
)
def test_memory_is_that_of_rows_and_keys(options):
    """For 2^28 pairs, of which a table of floats is 1 GiB."""
    length = 2**14
    leaves = [torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3)]
    peak()
    start = peak()
    out, lse = mh.attention(*leaves, **options, kernel="native", return_lse=True)
    torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert peak() - start < 64 * 2**20
