"""The definition against numbers worked out by hand, against loops over single numbers, and under every derivative."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from multihead import ALiBi, Position, RelativeBias, causal, dense, lengths, padding, prefix, window
from multihead.reference import attention

B, H, K, L, S, D, V = 2, 6, 3, 5, 7, 11, 13  # H = 2 K, and no two alike otherwise


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(batch=(B,), dtype=torch.float64, grad=False):
    shapes = ((*batch, H, L, D), (*batch, K, S, D), (*batch, K, S, V))
    return [draw(*shape, seed=seed, dtype=dtype).requires_grad_(grad) for seed, shape in enumerate(shapes)]


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def heads(*rows):
    """One head of one sequence from nested lists: (1, length, width)."""
    return torch.tensor([rows], dtype=torch.float64)


# By hand --------------------------------------------------------------------------------------------------------------
# exp(ln 3) = 3, so that scores of 0 and ln 3 make weights of 1/4 and 3/4.

LN3 = math.log(3.0)
LN5 = math.log(5.0)


def test_one_query_two_keys():
    out, weights, lse = attention(heads([1.0]), heads([0.0], [LN3]), heads([4.0, 0.0], [8.0, 100.0]), scale=1.0)
    close(weights, heads([0.25, 0.75]))
    close(out, heads([1.0 + 6.0, 75.0]))
    close(lse, torch.tensor([[math.log(4.0)]], dtype=torch.float64))


def test_scale_is_one_over_the_root_of_the_width_of_a_key():
    q, k, v = heads([1.0, 1.0, 1.0, 1.0]), heads([0.0, 0.0, 0.0, 0.0], [LN3, LN3, 0.0, 0.0]), heads([0.0], [1.0])
    close(attention(q, k, v).out, heads([0.75]))  # (2 ln 3) / sqrt(4) = ln 3
    close(attention(q, k, v, scale=1.0).out, heads([0.9]))  # exp(2 ln 3) = 9


def test_two_queries_three_keys_causal():
    """The two queries are the second and the third token."""
    q, k, v = heads([1.0], [2.0]), heads([0.0], [LN3], [0.0]), heads([1.0], [5.0], [12.0])
    out, weights, lse = attention(q, k, v, causal(), scale=1.0)
    close(weights, heads([1 / 4, 3 / 4, 0.0], [1 / 11, 9 / 11, 1 / 11]))
    close(out, heads([(1 + 15) / 4], [(1 + 45 + 12) / 11]))
    close(lse, torch.tensor([[math.log(4), math.log(11)]], dtype=torch.float64))


def test_positions_decide_what_is_causal():
    q, k, v = heads([1.0], [1.0]), heads([0.0], [LN3], [LN5]), heads([1.0], [2.0], [3.0])
    places = {"q_positions": torch.tensor([7, 9]), "k_positions": torch.tensor([8, 7, 3])}
    weights = attention(q, k, v, causal(), scale=1.0, **places).weights
    close(weights, heads([0.0, 3 / 8, 5 / 8], [1 / 9, 3 / 9, 5 / 9]))


def test_bias_is_added_to_scaled_scores():
    q, k, v = heads([2.0]), heads([0.0], [LN3]), heads([0.0], [1.0])
    close(attention(q, k, v, scale=0.5, bias=heads([LN5, 0.0])).weights, heads([5 / 8, 3 / 8]))


def test_softcap_bounds_the_score_and_not_the_bias():
    """score 0.5 ln 3 capped at 1 is tanh(0.5 ln 3) = (3 - 1) / (3 + 1) = 0.5."""
    q, k, v = heads([0.5]), heads([0.0], [LN3]), heads([0.0], [1.0])
    out = attention(q, k, v, scale=1.0, softcap=1.0, bias=heads([0.0, 2.5]))
    close(out.weights, heads([1.0, math.exp(3.0)]) / (1 + math.exp(3.0)))


def test_softcap_divides_before_and_multiplies_after():
    """score ln 3 capped at 2 is 2 tanh(ln 3 / 2) = 2 (3 - 1) / (3 + 1) = 1."""
    weights = attention(heads([1.0]), heads([0.0], [LN3]), heads([0.0], [1.0]), scale=1.0, softcap=2.0).weights
    close(weights, heads([1.0, math.e]) / (1 + math.e))


def test_softcap_does_not_bring_back_what_is_hidden():
    q, k, v = heads([1.0]), heads([0.0], [LN3], [9.0]), heads([4.0], [8.0], [1e6])
    out, weights, _ = attention(q, k, v, lengths(2), scale=1.0, softcap=1e9)
    close(weights, heads([0.25, 0.75, 0.0]), atol=1e-8)
    close(out, heads([7.0]), atol=1e-7)


def test_a_sink_takes_a_share_and_adds_no_value():
    q, k, v = heads([1.0]), heads([0.0], [LN3]), heads([4.0], [8.0])
    out, weights, lse = attention(q, k, v, scale=1.0, sinks=torch.tensor([LN5], dtype=torch.float64))
    close(weights, heads([1 / 9, 3 / 9]))
    close(out, heads([(4 + 24) / 9]))
    close(lse, torch.tensor([[math.log(9)]], dtype=torch.float64))  # the sink is part of the denominator


def test_dropout_multiplies_the_weights_in_the_product_only():
    q, k, v = heads([1.0]), heads([0.0], [LN3]), heads([4.0], [8.0])
    out, weights, lse = attention(q, k, v, scale=1.0, dropout_mask=heads([2.0, 0.0]))
    close(weights, heads([0.25, 0.75]))
    close(out, heads([2.0]))
    close(lse, torch.tensor([[math.log(4)]], dtype=torch.float64))


def test_query_heads_of_a_group_are_neighbours():
    """H = 4, K = 2: heads 0 and 1 read key/value head 0, heads 2 and 3 read head 1. Not 0 and 2, 1 and 3."""
    q = torch.ones(4, 1, 1, dtype=torch.float64)
    k = torch.zeros(2, 1, 1, dtype=torch.float64)
    v = torch.tensor([[[10.0]], [[20.0]]], dtype=torch.float64)
    assert attention(q, k, v).out.flatten().tolist() == [10.0, 10.0, 20.0, 20.0]


# By loops over single numbers -----------------------------------------------------------------------------------------


def by_loops(q, k, v, visible=None, bias=None, scale=None, softcap=None, sinks=None):
    """The same from Python numbers: (out, weights, lse), all float64."""
    out, weights = q.new_zeros(B, H, L, V), q.new_zeros(B, H, L, S)
    lse = q.new_full((B, H, L), -math.inf)
    q_list, k_list, v_list = q.tolist(), k.tolist(), v.tolist()
    for b, h, i in product(range(B), range(H), range(L)):
        kv_head = h // (H // K)
        terms = {}
        for j in range(S):
            if visible is not None and not visible[b][h][i][j]:
                continue
            score = sum(x * y for x, y in zip(q_list[b][h][i], k_list[b][kv_head][j], strict=True))
            score *= 1 / math.sqrt(D) if scale is None else scale
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            terms[j] = math.exp(score + (0.0 if bias is None else bias[b][h][i][j]))
        total = sum(terms.values()) + (0.0 if sinks is None else math.exp(sinks[h]))
        for j, term in terms.items():
            weights[b, h, i, j] = term / total
            for c in range(V):
                out[b, h, i, c] += term / total * v_list[b][kv_head][j][c]
        if total:
            lse[b, h, i] = math.log(total)
    return out, weights, lse


def some_mask(seed=5):
    keep = draw(B, H, L, S, seed=seed) > -0.4
    keep[0, :, 2] = False  # rows that see nothing
    keep[1, 3, :] = False
    return keep


def full(table):
    return table.expand(B, H, L, S).tolist()


CASES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 0.7, "scale": 2.0},
    "bias": {"bias": draw(B, H, L, S, seed=3)},
    "bias of a head": {"bias": draw(H, 1, S, seed=3)},
    "bias of pairs": {"bias": draw(L, S, seed=3)},
    "sinks": {"sinks": draw(H, seed=4)},
    "mask": {"mask": some_mask()},
    "mask of a row": {"mask": some_mask()[:, :1]},
    "mask of a head": {"mask": some_mask()[1]},
    "causal": {"mask": causal()},
    "window": {"mask": window(left=2, right=1)},
    "lengths": {"mask": lengths([3, 0])},
    "prefix": {"mask": causal() | prefix([1, 6])},
    "all": {"softcap": 0.9, "bias": draw(B, 1, L, S, seed=3), "mask": causal() & some_mask(), "sinks": draw(H, seed=4)},
}


@pytest.mark.parametrize("case", CASES)
def test_loops(case):
    options = dict(CASES[case])
    q, k, v = inputs()
    mask = options.pop("mask", None)
    answer = attention(q, k, v, mask, **options)
    if mask is not None:
        options["visible"] = full(mask if isinstance(mask, torch.Tensor) else mask.dense(L, S))
    if "bias" in options:
        options["bias"] = full(options["bias"])
    if "sinks" in options:
        options["sinks"] = options["sinks"].tolist()
    expected = by_loops(q, k, v, **options)
    for got, want in zip(answer, expected, strict=True):
        assert got.dtype == torch.float64
        close(got, want)


def test_alibi_by_loops():
    """-slope |i - j|, with query i standing at S - L + i; 6 heads take their slopes from 4 and from 8."""
    slopes = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    bias = [[[[-slope * abs(S - L + i - j) for j in range(S)] for i in range(L)] for slope in slopes]] * B
    q, k, v = inputs()
    for got, want in zip(attention(q, k, v, bias=ALiBi(H)), by_loops(q, k, v, bias=bias), strict=True):
        close(got, want)


def test_a_position_without_a_bias_adds_nothing():
    q, k, v = inputs()
    close(attention(q, k, v, bias=Position()).out, attention(q, k, v).out)


@pytest.mark.parametrize("batch", [(), (2,), (2, 1, 3)])
def test_batch_axes(batch):
    """Each row of the batch by itself."""
    q, k, v = inputs(batch)
    mask, bias, sinks = (
        causal() & padding(draw(*batch, S, seed=6) > -0.5),
        draw(*batch, H, L, S, seed=7),
        draw(H, seed=8),
    )
    answer = attention(q, k, v, mask, bias=bias, sinks=sinks)
    for at in product(*map(range, batch)):
        keep = mask.dense(L, S)
        row = attention(q[at], k[at], v[at], keep[at] if keep.ndim > 2 else keep, bias=bias[at], sinks=sinks)
        for whole, part in zip(answer, row, strict=True):
            close(whole[at], part)


# torch's own ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "mask", "bias", "scale", "causal"])
def test_torch_agrees(case):
    q, k, v = inputs(grad=True)
    keep = some_mask()
    keep[..., 0] = True
    ours, theirs = {
        "plain": ({}, {}),
        "mask": ({"mask": keep}, {"attn_mask": keep}),
        "bias": ({"bias": draw(L, S, seed=3)}, {"attn_mask": draw(L, S, seed=3)}),
        "scale": ({"scale": 0.7}, {"scale": 0.7}),
        "causal": ({"mask": causal()}, {"attn_mask": torch.ones(L, S, dtype=torch.bool).tril(S - L)}),
    }[case]
    out = attention(q, k, v, **ours).out
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **theirs)
    close(out, expected)
    grad = draw(B, H, L, V, seed=9)
    for got, want in zip(*(torch.autograd.grad(y, (q, k, v), grad) for y in (out, expected)), strict=True):
        close(got, want)


# Rows that see nothing ------------------------------------------------------------------------------------------------
# NaN from nn.MultiheadAttention: https://github.com/pytorch/pytorch/issues/41508 and, for a head that sees nothing,
# https://github.com/pytorch/pytorch/issues/160064


@pytest.mark.parametrize("sinks", [None, draw(H, seed=4)], ids=["", "sinks"])
@pytest.mark.parametrize("hidden_by", ["mask", "bias", "no keys"])
def test_a_blind_row_gives_zero_and_no_gradient(hidden_by, sinks):
    q, k, v = leaves = inputs(grad=True)
    mask = bias = None
    blind = torch.zeros(L, 1, dtype=torch.bool)
    blind[[1, 4]] = True
    if hidden_by == "no keys":
        k, v = (t[:, :, :0] for t in (k, v))
        blind[:] = True
    elif hidden_by == "mask":
        mask = dense(~blind)
    else:
        bias = torch.zeros(L, 1, dtype=torch.float64).masked_fill(blind, -math.inf)
    out, weights, lse = attention(q, k, v, mask, bias=bias, sinks=sinks)
    at = blind[:, 0]
    assert (out[:, :, at] == 0).all()
    assert (weights[:, :, at] == 0).all()
    want_lse = torch.full((B, H, int(at.sum())), -math.inf, dtype=torch.float64)
    close(lse[:, :, at], want_lse if sinks is None else sinks[:, None].expand_as(want_lse))
    seeing = lse[:, :, ~at]
    assert seeing.isfinite().all()
    loss = (out * draw(*out.shape, seed=9)).sum() + (weights * draw(*weights.shape, seed=10)).sum() + seeing.sum()
    grads = torch.autograd.grad(loss, leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :, at] == 0).all()
    if hidden_by != "no keys":
        assert (grads[0][:, :, ~at] != 0).any()
        assert (grads[1] != 0).any()


def test_a_sink_of_minus_infinity_is_no_sink():
    """Also for a row that sees nothing, where log(exp(-inf) + exp(-inf)) has no derivative."""
    q, k, v = inputs(grad=True)
    sinks = torch.full((H,), -math.inf, dtype=torch.float64, requires_grad=True)
    mask = lengths([0, 4])
    answer, plain = attention(q, k, v, mask, sinks=sinks), attention(q, k, v, mask)
    for got, want in zip(answer, plain, strict=True):
        close(got, want)
    grads = [torch.autograd.grad(y.out.sum() + y.lse[1].sum(), (q, k, v)) for y in (answer, plain)]
    for got, want in zip(*grads, strict=True):
        close(got, want)


def test_second_derivatives_past_a_blind_row_are_finite():
    q, k, v = inputs(grad=True)
    out = attention(q, k, v, lengths([0, 4])).out
    first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))
    assert all(g.isfinite().all() for g in (*first, *second))
    assert (second[0][0] == 0).all()
    assert (second[0][1] != 0).any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("per_head", [False, True], ids=["all heads", "by head"])
def test_garbage_in_hidden_keys_does_not_count(garbage, per_head):
    """0 * NaN is NaN: weights of 0 alone do not keep padding out."""
    n = torch.tensor([4, 6])
    keep = lengths(n).dense(L, S).expand(B, H, L, S).clone()
    if per_head:  # the two query heads of key/value head 1 agree that key 0 is hidden; other heads see it
        keep[:, 2:4, :, 0] = False
    hidden = ~keep.any(-2).unflatten(1, (K, H // K)).any(2)[..., None]  # (B, K, S, 1)
    results = []
    for filling in (garbage, 0.0):
        q, k, v = inputs()
        k, v = (t.masked_fill(hidden, filling).requires_grad_() for t in (k, v))
        q.requires_grad_()
        answer = attention(q, k, v, keep if per_head else lengths(n))
        results.append((*answer, *torch.autograd.grad(answer.out.sum() + answer.lse.sum(), (q, k, v))))
    for got, want in zip(*results, strict=True):
        assert want.isfinite().all()
        close(got, want)


# Derivatives ----------------------------------------------------------------------------------------------------------

SMALL = {"mask": causal() & torch.tensor([[True, False, True], [False, True, True]]), "softcap": 1.3, "scale": 0.8}


def small(grad=True):
    """H = 2, K = 1, L = 2, S = 3, D = 2, V = 1, with bias and sinks."""
    shapes = ((2, 2, 2), (1, 3, 2), (1, 3, 1), (2, 2, 3), (2,))
    return [draw(*shape, seed=20 + i).requires_grad_(grad) for i, shape in enumerate(shapes)]


def of_small(q, k, v, bias, sinks):
    return attention(q, k, v, bias=bias, sinks=sinks, **SMALL)


def test_gradients():
    assert torch.autograd.gradcheck(of_small, small())


def test_second_gradients():
    """The fused operations have none: https://github.com/pytorch/pytorch/issues/116350."""
    assert torch.autograd.gradgradcheck(lambda *args: of_small(*args).out, small())


def directional(function, primals, tangents, step=1e-6):
    ahead, behind = ([p + sign * step * t for p, t in zip(primals, tangents, strict=True)] for sign in (1, -1))
    return [(a - b) / (2 * step) for a, b in zip(function(*ahead), function(*behind), strict=True)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # from torch's own rules of differentiation
@pytest.mark.parametrize("way", ["torch.func.jvp", "forward_ad"])
def test_forward_mode(way):
    """The fused operations have none: https://github.com/pytorch/pytorch/issues/128971."""
    primals = small(grad=False)
    tangents = [draw(*p.shape, seed=30 + i) for i, p in enumerate(primals)]
    if way == "torch.func.jvp":
        _, found = torch.func.jvp(of_small, tuple(primals), tuple(tangents))
    else:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)]
            found = [forward_ad.unpack_dual(y).tangent for y in of_small(*duals)]
    expected = directional(of_small, primals, tangents)
    assert all((e != 0).any() for e in expected)
    for got, want in zip(found, expected, strict=True):
        close(got, want, atol=1e-8)


def test_gradient_of_a_learned_bias():
    position = RelativeBias(H, 2, dtype=torch.float64)
    q, k, v = inputs()

    def of_table(weight):
        return torch.func.functional_call(_Scored(position, q, k, v), {"position.weight": weight}, ())

    assert torch.autograd.gradcheck(of_table, draw(5, H, seed=3).requires_grad_(), fast_mode=True)


class _Scored(torch.nn.Module):
    def __init__(self, position, q, k, v):
        super().__init__()
        self.position, self.qkv = position, (q, k, v)

    def forward(self):
        return attention(*self.qkv, bias=self.position).out


@pytest.mark.parametrize("mask", [None, causal(), lengths(3)], ids=repr)
def test_vmap_is_a_loop(mask):
    q, k, v = inputs((3, B))
    bias, sinks = draw(3, H, L, S, seed=7), draw(3, H, seed=8)

    def one(q, k, v, bias, sinks):
        return tuple(attention(q, k, v, mask, bias=bias, sinks=sinks))

    together = torch.func.vmap(one)(q, k, v, bias, sinks)
    for i in range(3):
        for whole, part in zip(together, one(q[i], k[i], v[i], bias[i], sinks[i]), strict=True):
            close(whole[i], part)


def test_vmap_over_the_gradient():
    """Gradients for each sample, as in differential privacy."""
    q, k, v = inputs((3,))

    def loss(q, k, v):
        return attention(q, k, v, causal()).out.square().sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(3):
        for whole, part in zip(each, torch.func.grad(loss, argnums=(0, 1, 2))(q[i], k[i], v[i]), strict=True):
            close(whole[i], part)


# Types and sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_arithmetic_is_float32(dtype):
    """Rounded once, at the end: exactly the float32 answer, in the dtype of q."""
    low = inputs(dtype=dtype)
    keep, bias, sinks = some_mask(), draw(H, L, S, seed=3, dtype=dtype), draw(H, seed=4, dtype=dtype)
    out, weights, lse = attention(*low, keep, bias=bias, sinks=sinks)
    wide = attention(*(t.float() for t in low), keep, bias=bias.float(), sinks=sinks.float())
    assert (out.dtype, weights.dtype, lse.dtype) == (dtype, torch.float32, torch.float32)
    assert torch.equal(out, wide.out.to(dtype))
    assert torch.equal(weights, wide.weights)
    assert torch.equal(lse, wide.lse)


def test_large_scores_do_not_overflow():
    q, k, v = inputs(dtype=torch.float16)
    k = k * 1000
    out, weights, lse = attention(q * 50, k, v)
    assert (lse.abs() > torch.finfo(torch.float16).max / 8).any()  # far beyond what exp can take
    assert out.isfinite().all()
    close(weights.sum(-1), torch.ones(B, H, L), atol=1e-4)


@pytest.mark.parametrize("sinks", [None, draw(H, seed=4)], ids=["", "sinks"])
def test_rows_sum_to_one_or_leave_the_sink_its_share(sinks):
    q, k, v = inputs()
    _, weights, lse = attention(q, k, v, causal(), sinks=sinks)
    share = torch.zeros(B, H, L, dtype=torch.float64) if sinks is None else torch.exp(sinks[:, None] - lse)
    close(weights.sum(-1), 1 - share)
    assert (weights >= 0).all()


@pytest.mark.parametrize("empty", ["B", "L", "S", "V"])
def test_empty_axes(empty):
    size = {"B": B, "H": H, "K": K, "L": L, "S": S, "D": D, "V": V} | {empty: 0}
    q = draw(*(size[x] for x in "BHLD")).requires_grad_()
    k, v = draw(*(size[x] for x in "BKSD"), seed=1), draw(*(size[x] for x in "BKSV"), seed=2)
    out, weights, lse = attention(q, k, v, causal())
    assert out.shape == tuple(size[x] for x in "BHLV")
    assert weights.shape == tuple(size[x] for x in "BHLS")
    assert lse.shape == tuple(size[x] for x in "BHL")
    if empty == "S":
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    out.sum().backward()
    assert q.grad.shape == q.shape
    assert (q.grad == 0).all()


def test_inputs_are_not_changed():
    q, k, v = inputs()
    keep, bias, sinks = some_mask(), draw(H, L, S, seed=3), draw(H, seed=4)
    k[0, :, -1] = math.nan
    keep[0, ..., -1] = False
    given = (q, k, v, keep, bias, sinks)
    before = [t.clone() for t in given]
    attention(q, k, v, keep, bias=bias, sinks=sinks, softcap=2.0)
    for now, then in zip(given, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
