"""Biases by position against published values, tables made by hand, and loops over queries and keys."""

import copy
import math
import pickle

import pytest
import torch

from multihead.positions import ALiBi, Position, RelativeBias, T5Bias, alibi_slopes, t5_bucket

B, H, L, S = 2, 3, 5, 7


def biases(dtype=None):
    torch.manual_seed(0)
    return [
        ALiBi(H),
        T5Bias(H, 8, 11, dtype=dtype),
        T5Bias(H, 8, 11, bidirectional=False, dtype=dtype),
        RelativeBias(H, 2, dtype=dtype),
    ]


def name(bias):
    return type(bias).__name__


def by_hand(bias, q_position, k_position):
    """The bias of one pair, (H,)."""
    distance = k_position - q_position
    if isinstance(bias, ALiBi):
        return torch.tensor(bias.slopes) * -abs(distance)
    if isinstance(bias, T5Bias):
        row = t5_bucket(torch.tensor(distance), bias.num_buckets, bias.max_distance, bias.bidirectional).item()
    else:
        row = max(-bias.max_distance, min(distance, bias.max_distance)) + bias.max_distance
    return bias.weight[row]


# The base


def test_the_base_does_nothing():
    position, q, k = Position(), torch.ones(H, L, 4), torch.ones(1, S, 4)
    assert not position.rotates
    assert not position.biases
    turned = position.rotate(q, k, torch.arange(L), torch.arange(S))
    assert turned[0] is q
    assert turned[1] is k
    assert position.bias(torch.arange(L), torch.arange(S)) is None
    position.check(H, 4)


# What holds for every bias


@pytest.mark.parametrize("bias", biases(), ids=name)
def test_each_pair_by_hand(bias):
    assert bias.biases
    assert not bias.rotates
    q_positions, k_positions = torch.tensor([31, 3, 0, 12, 1]), torch.tensor([0, 1, 2, 3, 13, 25, 60])
    got = bias.bias(q_positions, k_positions)
    assert got.shape == (H, L, S)
    for i, q_position in enumerate(q_positions.tolist()):
        for j, k_position in enumerate(k_positions.tolist()):
            assert torch.equal(got[:, i, j], by_hand(bias, q_position, k_position))


@pytest.mark.parametrize("bias", biases(), ids=name)
def test_batches_of_positions(bias):
    q_positions, k_positions = torch.tensor([[3, 1, 4, 1, 5], [9, 26, 0, 5, 3]]), torch.arange(2 * S).view(B, S)
    both = bias.bias(q_positions, k_positions)
    one = bias.bias(q_positions, k_positions[1])
    spread = bias.bias(q_positions, k_positions[1:])
    deep = bias.bias(q_positions[:, None], k_positions.expand(3, B, S).transpose(0, 1))
    assert both.shape == one.shape == spread.shape == (B, H, L, S)
    assert deep.shape == (B, 3, H, L, S)
    for b in range(B):
        assert torch.equal(both[b], bias.bias(q_positions[b], k_positions[b]))
        assert torch.equal(one[b], bias.bias(q_positions[b], k_positions[1]))
        assert torch.equal(spread[b], one[b])
        assert torch.equal(deep[b, 2], both[b])


@pytest.mark.parametrize("bias", biases(), ids=name)
def test_empty_lengths(bias):
    assert bias.bias(torch.arange(0), torch.arange(S)).shape == (H, 0, S)
    assert bias.bias(torch.arange(L), torch.arange(0)).shape == (H, L, 0)
    nobody = torch.zeros(0, L, dtype=torch.long)
    assert bias.bias(nobody, nobody).shape == (0, H, L, L)


@pytest.mark.parametrize("bias", biases(), ids=name)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_narrow_positions_do_not_wrap(bias, dtype):
    q_positions, k_positions = torch.tensor([120, 0, 3, 5, 100]), torch.tensor([0, 1, 2, 3, 90, 100, 127])
    wide = bias.bias(q_positions, k_positions)
    assert torch.equal(bias.bias(q_positions.to(dtype), k_positions.to(dtype)), wide)


@pytest.mark.parametrize("bias", biases(), ids=name)
def test_positions_stay_as_they_were(bias):
    q_positions, k_positions = torch.arange(L), torch.arange(S)
    bias.bias(q_positions, k_positions)
    assert q_positions.tolist() == list(range(L))
    assert q_positions._version == k_positions._version == 0


@pytest.mark.parametrize("bias", biases(), ids=name)
def test_vmap_over_positions(bias):
    q_positions, k_positions = torch.tensor([[3, 1, 4, 1, 5], [9, 26, 0, 5, 3]]), torch.arange(2 * S).view(B, S)
    got = torch.func.vmap(bias.bias)(q_positions, k_positions)
    assert torch.equal(got, bias.bias(q_positions, k_positions))


@pytest.mark.parametrize("bias", biases(), ids=name)
def test_compiles_as_one_graph_for_any_length(bias):
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(bias.bias, fullgraph=True, backend=backend)
    for length in (5, 11, 17, 13):
        q_positions, k_positions = torch.arange(3, 3 + length), torch.arange(3 + length)
        assert torch.equal(compiled(q_positions, k_positions), bias.bias(q_positions, k_positions))
    assert len(graphs) == 2  # one for the first length, one for all others


@pytest.mark.parametrize("bias", biases(), ids=name)
def test_copies_and_pickles(bias):
    q_positions, k_positions = torch.arange(L), torch.arange(S)
    for other in (copy.deepcopy(bias), pickle.loads(pickle.dumps(bias))):
        assert torch.equal(other.bias(q_positions, k_positions), bias.bias(q_positions, k_positions))


@pytest.mark.parametrize("bias", biases(), ids=name)
def test_check_compares_heads(bias):
    bias.check(H, 8)
    with pytest.raises(ValueError, match=r"position: expected a bias for H=4 query heads, got one for 3\. Heads would"):
        bias.check(4, 8)
    with pytest.raises(ValueError, match=r"Make the bias with num_heads=4\."):
        bias.check(4, 8)
    with pytest.raises(ValueError, match=r"head_dim: expected at least 1, got 0\."):
        bias.check(3, 0)


@pytest.mark.parametrize("bias", biases(), ids=name)
@pytest.mark.parametrize(
    ("q_positions", "k_positions", "error", "text"),
    [
        ([0, 1], torch.arange(S), TypeError, "q_positions: expected a"),
        (torch.arange(L), torch.ones(S, dtype=torch.bool), TypeError, "k_positions: expected"),
        (torch.ones(L, dtype=torch.cfloat), torch.arange(S), TypeError, "q_positions: expected"),
        (torch.tensor(3), torch.arange(S), ValueError, "q_positions: expected shape (L,) or (*batch, L), got a int64"),
        (
            torch.ones(B, L, dtype=torch.long),
            torch.ones(3, S, dtype=torch.long),
            ValueError,
            "k_positions: expected shape (S,) or (*batch, S) with *batch=(2,) as in q_positions, got a int64 tensor of "
            "shape (3, 7). Sequences would be paired with others.",
        ),
        (torch.ones(B, L, dtype=torch.long), torch.ones(1, B, S, dtype=torch.long), ValueError, "with *batch=(2,) as"),
        (torch.arange(L), torch.arange(S, device="meta"), ValueError, "k_positions: expected a tensor on cpu"),
    ],
)
def test_messages_of_bias(bias, q_positions, k_positions, error, text):
    with pytest.raises(error) as caught:
        bias.bias(q_positions, k_positions)
    assert text in str(caught.value)


# ALiBi


def test_alibi_slopes_of_the_paper():
    assert alibi_slopes(8) == tuple(1 / 2**n for n in range(1, 9))
    assert alibi_slopes(16) == pytest.approx([2 ** -(n / 2) for n in range(1, 17)], rel=1e-15)
    assert alibi_slopes(1) == (1 / 256,)
    assert alibi_slopes(2) == (1 / 16, 1 / 256)


@pytest.mark.parametrize(
    ("num_heads", "power", "between"),
    [
        (3, 2, [2**-2]),
        (6, 4, [2**-1, 2**-3]),
        (12, 8, [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (20, 16, [2**-0.25, 2**-0.75, 2**-1.25, 2**-1.75]),
    ],
)
def test_alibi_slopes_between_powers_of_two(num_heads, power, between):
    slopes = alibi_slopes(num_heads)
    assert slopes[:power] == alibi_slopes(power)
    assert slopes[power:] == pytest.approx(between, rel=1e-15)
    assert slopes[power:] == pytest.approx(alibi_slopes(2 * power)[0::2][: num_heads - power], rel=1e-15)


def test_alibi_is_float32_and_never_positive():
    bias = ALiBi(H).bias(torch.arange(L), torch.arange(S))
    assert bias.dtype == torch.float32
    assert (bias <= 0).all()
    assert (bias[:, 0, 1:] < bias[:, 0, :-1]).all()  # also after the query


def test_alibi_takes_fractional_positions():
    got = ALiBi(1, [0.5]).bias(torch.tensor([0.5]), torch.tensor([0, 2]))
    assert got.tolist() == [[[-0.25, -0.75]]]
    coarse = torch.tensor([258.0, 1.0], dtype=torch.bfloat16)  # which holds 258 but not 257
    assert ALiBi(1, [1.0]).bias(coarse[:1], coarse[1:]).item() == -257.0
    far = ALiBi(1, [1.0]).bias(torch.tensor([4097.0], dtype=torch.float64), torch.tensor([4096], dtype=torch.bfloat16))
    assert far.item() == -1.0


def test_alibi_is_a_value():
    assert ALiBi(4) == ALiBi(4, alibi_slopes(4))
    assert hash(ALiBi(4)) == hash(ALiBi(4, list(alibi_slopes(4))))
    assert ALiBi(4) != ALiBi(4, [1, 2, 3, 4])
    assert ALiBi(4) != ALiBi(8)
    assert repr(ALiBi(4)) == "ALiBi(num_heads=4)"
    assert repr(ALiBi(2, [1, 0])) == "ALiBi(num_heads=2, slopes=(1.0, 0.0))"
    assert eval(repr(ALiBi(2, [1, 0]))) == ALiBi(2, [1, 0])
    with pytest.raises(AttributeError):
        ALiBi(4).num_heads = 3


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ALiBi(0), ValueError, "num_heads: expected at least 1, got 0."),
        (lambda: ALiBi(2.0), TypeError, "num_heads: expected an int, got 2.0."),
        (lambda: alibi_slopes(-1), ValueError, "num_heads: expected at least 1, got -1."),
        (lambda: ALiBi(2, [1.0]), ValueError, "slopes: expected H=2 numbers, got 1. Each query head has one slope."),
        (lambda: ALiBi(1, [-1.0]), ValueError, "slopes: expected finite numbers of at least 0, got -1.0. A negative"),
        (lambda: ALiBi(1, [math.inf]), ValueError, "slopes: expected finite numbers of at least 0, got inf."),
        (lambda: ALiBi(1, ["1"]), TypeError, "slopes: expected a sequence of H numbers, got 1."),
        (lambda: ALiBi(1, 1.0), TypeError, "slopes: expected a sequence of H numbers, got 1.0."),
        (lambda: ALiBi(1, torch.ones(1)), TypeError, "They are constants: from a tensor pass slopes.tolist()."),
    ],
)
def test_messages_of_alibi(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


# T5

# Where each bucket starts, in tokens, of the published 32 buckets up to 128
BOTH_WAYS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
ONE_WAY = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def bucket_by_hand(distance, starts):
    return max(bucket for bucket, start in enumerate(starts) if distance >= start)


def test_t5_buckets_both_ways():
    relative = torch.arange(-200, 201)
    expected = [bucket_by_hand(abs(r), BOTH_WAYS) + (16 if r > 0 else 0) for r in relative.tolist()]
    assert t5_bucket(relative).tolist() == expected
    assert t5_bucket(torch.tensor([-(10**9), 10**9])).tolist() == [15, 31]


def test_t5_buckets_one_way():
    relative = torch.arange(-200, 201)
    expected = [bucket_by_hand(max(-r, 0), ONE_WAY) for r in relative.tolist()]
    assert t5_bucket(relative, bidirectional=False).tolist() == expected


@pytest.mark.parametrize("num_buckets", [2, 4, 6, 9, 10, 32, 64, 256])
@pytest.mark.parametrize("max_distance", [37, 128, 160, 243, 1000, 1024])
def test_t5_bucket_edges_are_exact(num_buckets, max_distance):
    exact, wide = num_buckets // 2, num_buckets - num_buckets // 2
    if max_distance <= exact:
        with pytest.raises(ValueError, match=f"max_distance: expected more than {exact}, got {max_distance}."):
            t5_bucket(torch.arange(3), num_buckets, max_distance, False)
        return
    got = t5_bucket(-torch.arange(1100), num_buckets, max_distance, False).tolist()
    assert got[:exact] == list(range(exact))
    for distance in range(exact, 1100):
        # log(distance / exact) / log(max_distance / exact) * wide between step and step + 1, in whole numbers
        step = got[distance] - exact
        assert 0 <= step < wide
        assert distance**wide >= max_distance**step * exact ** (wide - step)
        if step < wide - 1:
            assert distance**wide < max_distance ** (step + 1) * exact ** (wide - step - 1)


def test_t5_bucket_keeps_shape_and_compiles():
    relative = torch.arange(-30, 30, dtype=torch.int8).view(3, 4, 5)
    got = t5_bucket(relative)
    assert got.dtype == torch.int64
    assert got.shape == relative.shape
    torch.compiler.reset()
    assert torch.equal(torch.compile(t5_bucket, fullgraph=True, backend="eager")(relative), got)
    assert t5_bucket(torch.tensor([-128], dtype=torch.int8)).tolist() == [15]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: T5Bias(0), ValueError, "num_heads: expected at least 1, got 0."),
        (
            lambda: T5Bias(H, 31),
            ValueError,
            "num_buckets: expected an even number where bidirectional=True, got 31. Keys",
        ),
        (lambda: T5Bias(H, 2), ValueError, "num_buckets: expected at least 4, got 2."),
        (lambda: T5Bias(H, 1, bidirectional=False), ValueError, "num_buckets: expected at least 2, got 1."),
        (lambda: T5Bias(H, 32, 8), ValueError, "max_distance: expected more than 8, got 8. The first 8 distances have"),
        (lambda: T5Bias(H, 32, 16, False), ValueError, "max_distance: expected more than 16, got 16."),
        (lambda: T5Bias(H, 32, -1), ValueError, "max_distance: expected at least 1, got -1."),
        (lambda: T5Bias(H, dtype=torch.int8), TypeError, "dtype: expected a floating dtype, got torch.int8."),
        (lambda: t5_bucket(torch.zeros(3)), TypeError, "relative: expected an integer tensor, got a float32 tensor of"),
        (lambda: t5_bucket(3), TypeError, "relative: expected an integer tensor, got 3."),
        (lambda: RelativeBias(0, 3), ValueError, "num_heads: expected at least 1, got 0."),
        (lambda: RelativeBias(H, 0), ValueError, "max_distance: expected at least 1, got 0."),
        (lambda: RelativeBias(H, 2.5), TypeError, "max_distance: expected an int, got 2.5."),
    ],
)
def test_messages_of_tables(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


# Tables


def tables(dtype=None):
    return [bias for bias in biases(dtype) if isinstance(bias, torch.nn.Module)]


@pytest.mark.parametrize("bias", tables(torch.float64), ids=name)
def test_gradients_reach_each_row_as_often_as_it_is_read(bias):
    q_positions, k_positions = torch.arange(L), torch.arange(S) * 3
    pairs = [by_hand(bias, i, j) for i in q_positions.tolist() for j in k_positions.tolist()]
    (by_pairs,) = torch.autograd.grad(torch.stack(pairs).sum(), bias.weight)
    (direct,) = torch.autograd.grad(bias.bias(q_positions, k_positions).sum(), bias.weight)
    torch.testing.assert_close(direct, by_pairs)
    assert direct.sum() == H * L * S


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, on its first forward gradient
@pytest.mark.parametrize("bias", tables(torch.float64), ids=name)
def test_second_order_and_forward_gradients(bias):
    q_positions, k_positions = torch.arange(L), torch.arange(S)

    def squares(weight):
        return torch.func.functional_call(bias, {"weight": weight}, (q_positions, k_positions)) ** 2

    weight = bias.weight.detach().requires_grad_()
    assert torch.autograd.gradcheck(squares, weight, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(squares, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tables_give_their_own_dtype(dtype):
    for bias in tables(dtype):
        assert bias.bias(torch.arange(L), torch.arange(S)).dtype == dtype


def test_table_shapes_and_state():
    t5, relative = T5Bias(H, 12, 50), RelativeBias(H, 11)
    assert {k: v.shape for k, v in t5.state_dict().items()} == {"weight": (12, H)}
    assert {k: v.shape for k, v in relative.state_dict().items()} == {"weight": (23, H)}
    assert repr(t5) == "T5Bias(num_heads=3, num_buckets=12, max_distance=50, bidirectional=True)"
    assert repr(relative) == "RelativeBias(num_heads=3, max_distance=11)"


@pytest.mark.parametrize("make", [lambda **k: T5Bias(31, 64, **k), lambda **k: RelativeBias(31, 64, **k)])
def test_reset_parameters(make):
    torch.manual_seed(0)
    bias = make()
    first = bias.weight.detach().clone()
    assert first.std().item() == pytest.approx(0.02, rel=0.1)
    assert first.mean().abs() < 0.002
    bias.reset_parameters()
    assert not torch.equal(bias.weight, first)
    torch.manual_seed(0)
    late = make(device="meta").to_empty(device="cpu")  # nothing but the table is to be filled in
    late.reset_parameters()
    assert torch.equal(late.weight, first)
    positions = torch.arange(S)
    bias.load_state_dict({"weight": first})
    assert torch.equal(late.bias(positions, positions), bias.bias(positions, positions))


@pytest.mark.parametrize("bias", tables(), ids=name)
def test_hooks_on_a_table_see_it(bias):
    seen = []
    handle = bias.register_forward_hook(lambda *args: seen.append(args[-1].shape))
    bias.bias(torch.arange(L), torch.arange(S))
    handle.remove()
    assert seen == [(H, L, S)]


@pytest.mark.parametrize("bias", tables(), ids=name)
def test_tables_want_whole_positions_where_they_are(bias):
    with pytest.raises(TypeError, match=r"k_positions: expected an integer tensor, got a float32 .*\.round\(\)\.long"):
        bias.bias(torch.arange(L), torch.ones(S))
    away = torch.arange(S, device="meta")
    with pytest.raises(ValueError, match="q_positions: expected a tensor on cpu, where the table is, got one on meta"):
        bias.bias(away, away)
