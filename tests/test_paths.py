"""The product test: every kernel that accepts a case gives what the reference gives, output and gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

import multihead as mh
from cases import (
    NATIVE,
    Own,
    assert_within_budget,
    by_kernel,
    by_reference,
    draw,
    dtype_of,
    names,
    own_error,
    roundings,
)
from multihead import reference
from multihead.kernels import library

CHUNKS = 12
PER_CHUNK = 50


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_kernel_agrees_with_the_reference(chunk):
    tried = dict.fromkeys(("sdpa", "blocks", None), 0)
    for number in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        case = draw(number)
        exact = by_reference(case)
        for kernel in tried:
            try:
                found = by_kernel(case, kernel)
            except mh.KernelRefusal:
                continue
            assert_within_budget(found, exact, None, f"{kernel}: {case.told}", names(case))
            tried[kernel] += 1
    assert tried[None] == PER_CHUNK
    assert tried["blocks"] == PER_CHUNK
    assert tried["sdpa"] >= PER_CHUNK // 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk", range(3))
def test_narrower_dtypes_keep_to_twice_the_reference_s_own_error(dtype, chunk):
    tried = dict.fromkeys(("native", "sdpa", "blocks", None), 0)
    for number in range(10_000 + chunk * 30, 10_000 + (chunk + 1) * 30):
        narrow = draw(number).to(dtype)
        wide = narrow.to(torch.float64)
        exact, own = by_reference(wide), own_error(narrow, wide)
        for kernel in tried:
            try:
                found = by_kernel(narrow, kernel)
            except mh.KernelRefusal:
                continue
            assert found[0].dtype == dtype
            assert found[1].dtype == torch.float32
            assert_within_budget(found, exact, own, f"{kernel} {dtype}: {narrow.told}", names(narrow))
            tried[kernel] += 1
    assert tried[None] == tried["blocks"] == 30
    assert tried["native"] == (30 if library.available() else 0)


@pytest.mark.parametrize("chunk", range(3))
def test_a_mask_as_a_value_and_as_a_table_is_the_same(chunk):
    for number in range(20_000 + chunk * 30, 20_000 + (chunk + 1) * 30):
        case = draw(number)
        if case.mask is None:
            continue
        exact = by_reference(case)
        L, S = case.q.shape[-2], case.k.shape[-2]
        places = {name: case.options.get(name) for name in ("q_positions", "k_positions")}
        case.mask = case.mask.dense(L, S, **places)
        assert_within_budget(by_kernel(case, None), exact, None, case.told, names(case))


@pytest.mark.parametrize("chunk", range(3))
def test_batched_and_row_by_row_are_the_same(chunk):
    """Each row of a batch is computed as if it were alone."""
    for number in range(30_000 + chunk * 30, 30_000 + (chunk + 1) * 30):
        case = draw(number)
        batch = case.q.shape[:-3]
        options = {name: option for name, option in case.options.items() if name not in ("q_positions", "k_positions")}
        L, S = case.q.shape[-2], case.k.shape[-2]
        places = {name: case.options.get(name) for name in ("q_positions", "k_positions")}
        visible = torch.ones(L, S, dtype=torch.bool) if case.mask is None else case.mask.dense(L, S, **places)
        whole = mh.attention(case.q, case.k, case.v, case.mask, **case.options)
        if isinstance(options.get("bias"), mh.ALiBi):
            options["bias"] = _alibi_table(options["bias"], L, S, places)
        for at in itertools.product(*(range(n) for n in batch)):
            one = {n: _row_of(t, at, 3) if n == "bias" else t for n, t in options.items()}
            alone = mh.attention(case.q[at], case.k[at], case.v[at], _row_of(visible, at, 3), **one)
            assert_within_budget([whole[at]], [alone], None, f"row {at} of {case.told}", ["out"])


def _alibi_table(alibi, L, S, places):
    q_at = places["q_positions"]
    k_at = places["k_positions"]
    if k_at is None:
        k_at = torch.arange(S)
        q_at = torch.arange(S - L, S) if q_at is None else q_at
    elif q_at is None:
        q_at = k_at[..., S - L :]
    return alibi.bias(q_at, k_at).double()


def _row_of(table, at, own):
    """The part of a table with `own` axes of its own that speaks of one row of the batch."""
    lead = table.ndim - own
    if lead <= 0:
        return table
    return table[tuple(0 if size == 1 else i for i, size in zip(at[len(at) - lead :], table.shape, strict=False))]


@pytest.mark.parametrize("kernel", [NATIVE, "sdpa", "blocks", "reference"])
@pytest.mark.parametrize("joined", ["causal", "full"])
def test_packed_padded_and_alone_are_the_same(kernel, joined):
    """Documents in one row, the same documents as rows with padding, and each by itself."""
    torch.manual_seed(3)
    lengths, H, K, D, dtype = [5, 67, 1, 31], 4, 2, 7, dtype_of(kernel)
    documents = [[torch.randn(heads, n, D, dtype=dtype) for heads in (H, K, K)] for n in lengths]
    mask = mh.causal() if joined == "causal" else None
    alone = [mh.attention(*qkv, mask, kernel=kernel) for qkv in documents]

    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    apart = mh.documents(cu_seqlens=cu_seqlens)
    packed = mh.attention(
        *(torch.cat(t, -2) for t in zip(*documents, strict=True)), apart if mask is None else mask & apart
    )
    for found, want in zip(packed.split(lengths, -2), alone, strict=True):
        assert_within_budget([found], [want], roundings(dtype), "packed", ["out"])

    width = max(lengths)
    rows = [torch.stack([_padded(t, width) for t in kind]) for kind in zip(*documents, strict=True)]
    real = mh.lengths(lengths)
    padded = mh.attention(*rows, real if mask is None else mask & real, kernel=kernel)
    for found, want, n in zip(padded, alone, lengths, strict=True):
        assert_within_budget([found[:, :n]], [want], roundings(dtype), "padded", ["out"])


def _padded(tensor, width):
    """Garbage as padding: it must not be looked at."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, width - tensor.shape[-2]), value=float("nan"))


@pytest.mark.parametrize("kernel", [NATIVE, "sdpa", "blocks", "reference"])
@pytest.mark.parametrize("mask", [mh.causal(), mh.window(left=9, right=0), mh.causal() | mh.prefix(20)], ids=repr)
def test_decoding_in_chunks_is_the_full_pass(kernel, mask):
    """New queries against all keys so far give the rows of one causal pass, because positions decide."""
    torch.manual_seed(5)
    T, H, K, D, dtype = 83, 4, 2, 7, dtype_of(kernel)
    q, k, v = (torch.randn(3, heads, T, D, dtype=dtype) for heads in (H, K, K))
    bias = mh.ALiBi(H)
    # A prefix is visible from the first chunk on, so chunks begin behind it.
    full = mh.attention(q, k, v, mask, bias=bias)
    done = 23
    for size in (1, 1, 7, 40, 11):
        rows = slice(done, done + size)
        done += size
        got = mh.attention(q[:, :, rows], k[:, :, :done], v[:, :, :done], mask, bias=bias, kernel=kernel)
        assert_within_budget([got], [full[:, :, rows]], roundings(dtype), f"rows {rows}", ["out"])
    assert done == T


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hidden_garbage_changes_nothing_on_any_kernel(dtype):
    """NaN and inf in keys and values that nobody sees: https://github.com/pytorch/pytorch/issues/101967"""
    kernels = ("reference", "sdpa", "blocks", *(["native"] if library.available() and dtype != torch.float64 else []))
    torch.manual_seed(7)
    B, H, K, L, S, D = 2, 4, 2, 67, 131, 5
    q, k, v = (torch.randn(B, h, n, D, dtype=dtype) for h, n in ((H, L), (K, S), (K, S)))
    mask = mh.padding(torch.rand(B, S) < 0.6) & mh.window(left=60)
    seen = mask.dense(L, S)[:, 0].any(-2)[:, None, :, None]  # (B, 1, S, 1)
    up = torch.randn(B, H, L, D, dtype=dtype)
    for junk in (float("nan"), float("inf"), -float("inf"), torch.finfo(dtype).max / 2):
        answers = []
        for kernel in kernels:
            leaves = [q.clone(), k.where(seen, junk), v.where(seen, junk)]
            for leaf in leaves:
                leaf.requires_grad_()
            out = mh.attention(*leaves, mask, kernel=kernel)
            answers.append([out, *torch.autograd.grad(out, leaves, up)])
            assert all(t.isfinite().all() for t in answers[-1]), f"{junk} leaks through {kernel}"
            assert not answers[-1][2].masked_select(~seen).any(), "a key nobody sees has a gradient"
            told = f"{kernel}, {junk}"
            assert_within_budget(answers[-1], answers[0], roundings(dtype), told, ["out", "dq", "dk", "dv"])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("sizes", [(0, 2, 3, 5), (2, 2, 0, 5), (2, 2, 3, 0)], ids=["B=0", "L=0", "S=0"])
def test_empty_axes(sizes):
    B, H, L, S = sizes
    q, k, v = (torch.randn(B, H, n, 5, requires_grad=True) for n in (L, S, S))
    for mask in (None, mh.causal(), mh.lengths(0)):
        out, lse = mh.attention(q, k, v, mask, return_lse=True)
        assert out.shape == (B, H, L, 5)
        assert not out.any()
        assert (lse == -float("inf")).all()
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_inputs_and_masks_stay_as_they_were():
    case = draw(8)
    ids, keep = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([True, False, True, True, True])
    mask = mh.causal() & mh.documents(ids) & mh.padding(keep)
    q, k, v, bias = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7), torch.randn(3, 5, 5)
    before = [t.clone() for t in (q, k, v, bias, ids, keep)]
    for kernel in ("reference", "sdpa", "blocks", *(["native"] if library.available() else [])):
        mh.attention(q, k, v, mask, bias=bias, kernel=kernel)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v, bias, ids, keep), strict=True))
    assert case.told  # a case tells what it is, so that a failure can be repeated


KERNELS = ("reference", "sdpa", "blocks")


def _leaves(*shapes, dtype=torch.float64):
    torch.manual_seed(11)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"dropout": 0.0}, {"sinks": torch.zeros(2).double()}], ids=str)
def test_hidden_garbage_leaves_every_option_s_gradients_alone(options, dtype):
    """Also where a softcap has a slope at each score, and in a query that sees nothing."""
    visible = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])
    answers = []
    for junk in (0.0, float("nan"), float("inf")):
        for kernel in (*KERNELS, "native", None):
            q, k, v = _leaves((1, 2, 3, 5), (1, 2, 3, 5), (1, 2, 3, 5), dtype=dtype)
            with torch.no_grad():
                q[:, :, 1], k[:, :, 2], v[:, :, 2] = junk, junk, junk
            try:
                out = mh.attention(q, k, v, visible, kernel=kernel, **options)
            except mh.KernelRefusal:
                continue
            answers.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
            told = f"{junk} {kernel}"
            assert_within_budget(answers[-1], answers[0], roundings(dtype), told, ["out", "dq", "dk", "dv"])
    assert len(answers) >= (12 if library.available() and dtype == torch.float32 else 9)


@pytest.mark.parametrize("kernel", [NATIVE, *KERNELS])
def test_the_lowest_numbers_in_a_bias_hide(kernel):
    """finfo.min where -inf is meant: https://github.com/huggingface/transformers/issues/32390"""
    own = dtype_of(kernel)
    q, k, v = _leaves((1, 2, 3, 5), (1, 2, 3, 5), (1, 2, 3, 5), dtype=own)
    hidden = torch.tensor([[False, True, True], [True, True, True], [False, False, True]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        bias = torch.zeros(3, 3, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
        out = mh.attention(q, k, v, bias=bias, kernel=kernel)
        want = mh.attention(q, k, v, ~hidden, kernel=kernel)
        assert_within_budget([out], [want], roundings(own), f"{dtype} {kernel}", ["out"])
        sums = mh.attention_weights(q, k, bias=bias).sum(-1)
        assert torch.equal(sums.round(), (~hidden).any(-1).to(own).expand(1, 2, 3))


@pytest.mark.usefixtures("native")
def test_large_biases_keep_rows_a_softmax():
    q, k, _ = _leaves((1, 1, 3, 5), (1, 1, 3, 5), (1, 1, 3, 5))
    weights = mh.attention_weights(q.float(), k.float(), bias=torch.full((3, 3), -1e6))
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", [NATIVE, "blocks"])
@pytest.mark.parametrize("change", ["mask", "positions"])
def test_what_is_read_again_must_not_have_changed(change, kernel):
    q, k, v = _leaves((1, 2, 5, 3), (1, 2, 5, 3), (1, 2, 5, 3), dtype=dtype_of(kernel))
    keep, places = torch.tensor([[True, True, True, False, False]]), torch.arange(5)
    mask = mh.padding(keep) & mh.causal()
    out = mh.attention(q, k, v, mask, q_positions=places, k_positions=torch.arange(5), kernel=kernel)
    (keep.logical_not_ if change == "mask" else places.neg_)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("kernel", [NATIVE, "blocks", None])
def test_a_position_that_learns_gets_its_gradient(kernel):
    class Slope(mh.Position):
        biases = True

        def __init__(self):
            self.slope = torch.ones((), dtype=torch.float64, requires_grad=True)

        def bias(self, q_positions, k_positions):
            return self.slope * (q_positions[:, None] - k_positions).double()[None]

    q, k, v = _leaves((1, 2, 5, 3), (1, 2, 5, 3), (1, 2, 5, 3), dtype=dtype_of(kernel))
    found = []
    for by in ("reference", kernel):
        slope = Slope()
        found += torch.autograd.grad(mh.attention(q, k, v, bias=slope, kernel=by).square().sum(), slope.slope)
    assert_within_budget([found[1]], [found[0]], roundings(q.dtype), "slope", ["slope"])
    assert found[0].abs() > 1e-3


@pytest.mark.usefixtures("native")
def test_each_gradient_has_the_dtype_of_its_input():
    q, k, v = (t.detach().bfloat16().requires_grad_() for t in _leaves(*[(1, 2, 5, 3)] * 3))
    bias = torch.randn(5, 5, requires_grad=True)
    gradient = torch.autograd.grad(mh.attention(q, k, v, bias=bias).float().square().sum(), bias)[0]
    assert gradient.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float())


@pytest.mark.parametrize("kernel", [NATIVE, "blocks"])
def test_changing_the_output_in_place_is_torch_s_usual_error(kernel):
    q, k, v = _leaves((1, 2, 5, 3), (1, 2, 5, 3), (1, 2, 5, 3), dtype=dtype_of(kernel))
    out = mh.attention(q, k, v, kernel=kernel).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("kernel", [NATIVE, "sdpa"])
@pytest.mark.parametrize("S", [4096, 4099])
def test_decoding_against_many_keys(S, kernel):
    """Grouped heads, one to three queries: the query heads of a group are rows of one head."""
    torch.manual_seed(13)
    for L, dtype in ((1, dtype_of(kernel)), (3, dtype_of(kernel)), (1, torch.bfloat16)):
        q, k, v = (torch.randn(2, h, n, 67).to(dtype) for h, n in ((6, L), (2, S), (2, S)))
        hidden = mh.lengths([S - 5, 0])
        for mask in (None, mh.causal(), hidden, hidden & mh.causal()):
            found = mh.attention(q, k, v, mask, kernel=kernel, return_lse=True)
            exact = reference.attention(q.double(), k.double(), v.double(), mask)
            own = roundings(dtype)
            if dtype == torch.bfloat16:
                low = reference.attention(q, k, v, mask)
                own = Own(float((low.out.double() - exact.out).abs().max()), 1.0)
            labels = ["out", "lse"]
            assert_within_budget([found[0], found[1]], [exact.out, exact.lse], own, f"L={L} {mask} {dtype}", labels)
