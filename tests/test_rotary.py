"""Rotary against formulas written out anew: complex numbers, loops over pairs, and each scaling's publication."""

import cmath
import copy
import math
import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from multihead.positions import Position
from multihead.rotary import LinearScaling, Llama3Scaling, NTKScaling, Rotary, Scaling, YarnScaling

B, H, K, L, S, D = 2, 3, 1, 5, 7, 22
SCALINGS = [
    None,
    LinearScaling(4.0),
    NTKScaling(3.0),
    Llama3Scaling(8.0, 1.0, 4.0, 128),
    YarnScaling(4.0, 128, beta_fast=8.0),
]


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(dtype=torch.float64):
    q, k = draw(B, H, L, D, dtype=dtype), draw(B, K, S, D, dtype=dtype, seed=1)
    return q, k, torch.arange(S - L, S), torch.arange(S)


def turned_by_hand(x, positions, frequencies, interleaved, factor=1.0):
    """x (length, D) as lists, with each pair as one complex number times factor * exp(i position frequency)."""
    rows = []
    for row, position in zip(x.tolist(), positions.tolist(), strict=True):
        half = len(frequencies)
        for pair, frequency in enumerate(frequencies):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            z = complex(row[a], row[b]) * factor * cmath.exp(1j * position * frequency)
            row[a], row[b] = z.real, z.imag
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 14])
def test_each_pair_is_multiplied_by_a_complex_number(rotary_dim, interleaved, scaling):
    rotary = Rotary(rotary_dim, 500.0, interleaved=interleaved, scaling=scaling)
    q, k, q_positions, k_positions = inputs()
    q_positions = q_positions + 1000
    frequencies = rotary.inverse_frequencies(rotary_dim or D).tolist()
    q_turned, k_turned = rotary.rotate(q, k, q_positions, k_positions)
    for x, turned, positions in ((q, q_turned, q_positions), (k, k_turned, k_positions)):
        assert turned.shape == x.shape
        for b in range(B):
            for h in range(x.shape[1]):
                hand = turned_by_hand(x[b, h], positions, frequencies, interleaved, rotary.attention_factor)
                torch.testing.assert_close(turned[b, h], hand, rtol=0, atol=1e-12)


def test_frequencies_are_the_powers_of_the_base_in_float64():
    frequencies = Rotary(base=500000.0).inverse_frequencies(26)
    assert frequencies.dtype == torch.float64
    expected = [500000.0 ** (-2 * i / 26) for i in range(13)]
    torch.testing.assert_close(frequencies, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_only(interleaved):
    q, k, q_positions, k_positions = inputs()
    rotary = Rotary(interleaved=interleaved)

    def scores(shift):
        turned = rotary.rotate(q, k, q_positions + shift, k_positions + shift)
        return turned[0] @ turned[1].mT

    torch.testing.assert_close(scores(0), scores(12345), rtol=0, atol=1e-9)
    assert (scores(0) - q @ k.mT).abs().max() > 0.1
    standing = rotary.rotate(q, k, torch.zeros(L), torch.zeros(S))
    assert torch.equal(standing[0], q)


def test_layouts_are_permutations_of_each_other():
    q, k, q_positions, k_positions = inputs()
    dim = 14
    order = [*range(0, dim, 2), *range(1, dim, 2), *range(dim, D)]  # from interleaved channels to halves
    pairs, _ = Rotary(dim, interleaved=True).rotate(q, k, q_positions, k_positions)
    halves, _ = Rotary(dim).rotate(q[..., order], k[..., order], q_positions, k_positions)
    torch.testing.assert_close(halves, pairs[..., order], rtol=0, atol=0)
    assert not torch.equal(halves, pairs)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_turns_the_first_channels_and_passes_the_rest(interleaved):
    q, k, q_positions, k_positions = inputs(torch.float32)
    dim = 10
    part, _ = Rotary(dim, interleaved=interleaved).rotate(q, k, q_positions, k_positions)
    alone, _ = Rotary(interleaved=interleaved).rotate(q[..., :dim], k[..., :dim], q_positions, k_positions)
    assert torch.equal(part[..., :dim], alone)
    assert torch.equal(part[..., dim:], q[..., dim:])


def test_attention_factor_leaves_unturned_channels():
    rotary = Rotary(10, scaling=YarnScaling(4.0, 128, attention_factor=3.0))
    q, k, _, k_positions = inputs()
    standing, _ = rotary.rotate(q, k, torch.zeros(L), k_positions)
    torch.testing.assert_close(standing[..., :10], 3 * q[..., :10])
    assert torch.equal(standing[..., 10:], q[..., 10:])


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,)])
@pytest.mark.parametrize("length", [0, 1, L])
def test_any_number_of_leading_axes_and_any_length(batch, length):
    q, k = draw(*batch, H, length, D), draw(*batch, K, S, D)
    for interleaved in (False, True):
        rotary = Rotary(14, interleaved=interleaved)
        common = rotary.rotate(q, k, torch.arange(length), torch.arange(S))
        own = rotary.rotate(
            q, k, torch.arange(length).expand(*batch, length), torch.arange(S).expand(*(1 for _ in batch), S)
        )
        assert common[0].shape == q.shape
        assert common[1].shape == k.shape
        assert torch.equal(common[0], own[0])
        assert torch.equal(common[1], own[1])


def test_each_sequence_follows_its_own_positions():
    q, k, _, _ = inputs()
    q_positions, k_positions = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]), torch.arange(2 * S).view(2, S)
    together = Rotary().rotate(q, k, q_positions, k_positions)
    for b in range(B):
        alone = Rotary().rotate(q[b], k[b], q_positions[b], k_positions[b])
        assert torch.equal(together[0][b], alone[0])
        assert torch.equal(together[1][b], alone[1])
    assert not torch.equal(together[0][0], Rotary().rotate(q[0], k[0], q_positions[1], k_positions[1])[0])


def test_positions_may_be_narrow_or_fractional():
    q, k, q_positions, k_positions = inputs()
    wide, _ = Rotary().rotate(q, k, q_positions, k_positions)
    assert torch.equal(Rotary().rotate(q, k, q_positions.to(torch.uint8), k_positions)[0], wide)
    halved, _ = Rotary().rotate(q, k, q_positions / 2, k_positions)
    torch.testing.assert_close(halved, Rotary(scaling=LinearScaling(2.0)).rotate(q, k, q_positions, k_positions)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_turned_in_float32(dtype):
    q, k, q_positions, k_positions = inputs(dtype)
    # Angles in the narrow dtype would be off by whole turns here.
    q_positions, k_positions = q_positions + 30000, k_positions + 30000
    low = Rotary(14).rotate(q, k, q_positions, k_positions)
    full = Rotary(14).rotate(q.float(), k.float(), q_positions, k_positions)
    for x, y in zip(low, full, strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, y.to(dtype))


def test_float64_is_turned_in_float64():
    q, k, _, k_positions = inputs()
    positions = torch.arange(L) + 10**7
    turned, _ = Rotary().rotate(q, k, positions, k_positions)
    hand = turned_by_hand(q[0, 0], positions, Rotary().inverse_frequencies(D).tolist(), False)
    torch.testing.assert_close(turned[0, 0], hand, rtol=0, atol=1e-8)
    single, _ = Rotary().rotate(q.float(), k.float(), positions, k_positions)
    assert single.dtype == torch.float32
    assert (single[0, 0] - hand).abs().max() > 1e-3


class Count(TorchDispatchMode):
    def __init__(self, op):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


def test_angles_are_shared_where_positions_are_the_same_tensor():
    k, positions = draw(B, K, L, D), torch.arange(L)
    for k_positions, times in ((positions, 1), (positions.clone(), 2)):
        with Count(torch.ops.aten.cos.default) as cosines:
            turned = Rotary().rotate(draw(B, H, L, D), k, positions, k_positions)
        assert cosines.count == times
        assert torch.equal(turned[1], Rotary().rotate(k, k, k_positions, k_positions)[0])


def test_inputs_stay_as_they_were():
    given = inputs()
    copies = [x.clone() for x in given]
    for interleaved in (False, True):
        Rotary(14, interleaved=interleaved, scaling=SCALINGS[-1]).rotate(*given)
    assert all(torch.equal(x, y) for x, y in zip(given, copies, strict=True))
    assert [x._version for x in given] == [0] * 4


def test_output_is_where_the_inputs_are():
    q, k, q_positions, k_positions = (x.to("meta") for x in inputs())
    turned = Rotary(scaling=SCALINGS[-1]).rotate(q, k, q_positions, k_positions)
    assert [x.device.type for x in turned] == ["meta", "meta"]


# Scalings, each against its publication's formula for frequency i of R channels


def by_publication(scaling, base, R):
    frequencies = []
    for i in range(R // 2):
        f = base ** (-2 * i / R)
        if isinstance(scaling, LinearScaling):
            f /= scaling.factor
        elif isinstance(scaling, NTKScaling):
            f = (base * scaling.factor ** (R / (R - 2))) ** (-2 * i / R)
        elif isinstance(scaling, Llama3Scaling):
            wavelength = 2 * math.pi / f
            longest = scaling.original_length / scaling.low_freq_factor
            shortest = scaling.original_length / scaling.high_freq_factor
            if wavelength > longest:
                f /= scaling.factor
            elif wavelength >= shortest:
                smooth = scaling.original_length / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                f = (1 - smooth) * f / scaling.factor + smooth * f
        else:

            def correction(rotations):
                return R * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

            low, high = correction(scaling.beta_fast), correction(scaling.beta_slow)
            if scaling.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, R - 1)
            ramp = min(max((i - low) / (high - low), 0.0), 1.0)
            f = f / scaling.factor * ramp + f * (1 - ramp)
        frequencies.append(f)
    return frequencies


@pytest.mark.parametrize("R", [6, 22, 64, 128])
@pytest.mark.parametrize("base", [10000.0, 500000, 150000.0])
@pytest.mark.parametrize(
    "scaling",
    [
        LinearScaling(8),
        NTKScaling(4.0),
        Llama3Scaling(),
        Llama3Scaling(32.0, 1.0, 4.0, 4096),
        YarnScaling(40.0, 4096),
        YarnScaling(32.0, 4096, truncate=False),
        YarnScaling(4.0, 32768, beta_fast=20.0, beta_slow=2.0),
    ],
)
def test_scaling_is_as_published(scaling, base, R):
    got = Rotary(base=base, scaling=scaling).inverse_frequencies(R)
    expected = torch.tensor(by_publication(scaling, base, R), dtype=torch.float64)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert not torch.allclose(got, Rotary(base=base).inverse_frequencies(R), rtol=1e-3, atol=0)


def test_linear_by_hand():
    got = Rotary(scaling=LinearScaling(4)).inverse_frequencies(8).tolist()
    assert got == pytest.approx([0.25, 0.025, 0.0025, 0.00025], rel=1e-12)


def test_ntk_by_hand():
    # 10000 * 16 ** (6 / 4) = 640000, whose cube root is 86.1774
    got = Rotary(scaling=NTKScaling(16)).inverse_frequencies(6).tolist()
    assert got == pytest.approx([1.0, 1 / 86.1773876, 1 / 7426.542], rel=1e-6)
    assert Rotary(scaling=NTKScaling(16)).inverse_frequencies(2).tolist() == [1.0]


def test_llama3_by_hand():
    turns = torch.tensor([8, 4, 2.5, 1, 0.5], dtype=torch.float64)  # within 8192 tokens
    frequencies = turns * 2 * math.pi / 8192
    ratio = Llama3Scaling().scale(frequencies, 500000.0) / frequencies
    assert ratio.tolist() == pytest.approx([1, 1, 0.5 + 0.5 / 8, 1 / 8, 1 / 8], rel=1e-12)


def test_yarn_by_hand():
    # 64 ln(2048 / (32 * 2 pi)) / (2 ln 10000) = 8.06 and 64 ln(2048 / (2 pi)) / (2 ln 10000) = 20.1: from 8 to 21
    scaling = YarnScaling(4.0, 2048)
    got = Rotary(scaling=scaling).inverse_frequencies(64) / Rotary().inverse_frequencies(64)
    assert got[[0, 8, 15, 21, 31]].tolist() == pytest.approx([1, 1, 6 / 13 + 7 / 13 / 4, 1 / 4, 1 / 4], rel=1e-12)
    exact = replace(scaling, truncate=False)
    got = Rotary(scaling=exact).inverse_frequencies(64) / Rotary().inverse_frequencies(64)
    assert got[[8, 9, 20, 21]].tolist() == pytest.approx([1, 0.94172, 0.25650, 0.25], abs=1e-4)


def test_yarn_ramp_outside_the_indices_does_not_turn_round():
    unscaled = Rotary().inverse_frequencies(4)
    never_turning = Rotary(scaling=YarnScaling(4.0, 1)).inverse_frequencies(4)
    torch.testing.assert_close(never_turning, unscaled / torch.tensor([1, 4], dtype=torch.float64))
    ever_turning = Rotary(scaling=YarnScaling(4.0, 10**15)).inverse_frequencies(4)
    torch.testing.assert_close(ever_turning, unscaled)


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        (None, 1.0),
        (LinearScaling(4.0), 1.0),
        (Llama3Scaling(), 1.0),
        (YarnScaling(1.0, 4096), 1.0),
        (YarnScaling(4.0, 4096), 1.1386294),
        (YarnScaling(40.0, 4096), 1.3688879),
        (YarnScaling(40.0, 4096, attention_factor=0.7), 0.7),
        (YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707), 1.0),
        (YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=0.707), 1.3688879 / 1.2608038),
    ],
)
def test_attention_factor(scaling, factor):
    assert Rotary(scaling=scaling).attention_factor == pytest.approx(factor, rel=1e-7)


def test_a_new_scaling_is_a_new_class():
    @dataclass(frozen=True)
    class Doubled(Scaling):
        def scale(self, frequencies, base):
            assert base == 100.0
            return 2 * frequencies

    q, k, q_positions, k_positions = inputs()
    got = Rotary(base=100.0, scaling=Doubled()).rotate(q, k, q_positions, k_positions)
    expected = Rotary(base=100.0).rotate(q, k, 2 * q_positions, 2 * k_positions)
    torch.testing.assert_close(got, expected)


# Transforms


@pytest.mark.parametrize("rotary", [Rotary(6), Rotary(interleaved=True, scaling=SCALINGS[-1])])
def test_gradients_to_the_second_order(rotary):
    q, k = draw(2, 3, 8).requires_grad_(), draw(1, 2, 8).requires_grad_()

    def squares(q, k):
        q, k = rotary.rotate(q, k, torch.arange(3), torch.arange(2))
        return q**2 * torch.arange(8), k**3

    assert torch.autograd.gradcheck(squares, (q, k))
    assert torch.autograd.gradgradcheck(squares, (q, k))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, on its first forward gradient
@pytest.mark.parametrize("interleaved", [False, True])
def test_vmap_and_jvp(interleaved):
    rotary = Rotary(14, interleaved=interleaved)
    q, k, q_positions, k_positions = inputs()
    direct = rotary.rotate(q, k, q_positions, k_positions)
    over_batch = torch.func.vmap(rotary.rotate, (0, 0, None, None))(q, k, q_positions, k_positions)
    torch.testing.assert_close(over_batch, direct, rtol=0, atol=0)
    own = torch.stack((q_positions, q_positions + 9))
    over_positions = torch.func.vmap(rotary.rotate, (0, 0, 0, None))(q, k, own, k_positions)
    torch.testing.assert_close(over_positions, rotary.rotate(q, k, own, k_positions), rtol=0, atol=0)
    _, tangents = torch.func.jvp(
        lambda q, k: rotary.rotate(q, k, q_positions, k_positions), (q, k), (torch.ones_like(q), torch.ones_like(k))
    )
    expected = rotary.rotate(torch.ones_like(q), torch.ones_like(k), q_positions, k_positions)
    torch.testing.assert_close(tangents, expected)


@pytest.mark.parametrize("rotary", [Rotary(14, interleaved=True), Rotary(scaling=SCALINGS[-1])])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_as_one_graph_for_any_length(rotary, dynamic):
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(rotary.rotate, fullgraph=True, backend=backend, dynamic=dynamic)
    for length in (5, 11, 17, 13):
        q, k = draw(B, H, length, D), draw(B, K, length, D)
        positions = torch.arange(length)
        turned = compiled(q, k, positions, positions)
        torch.testing.assert_close(turned, rotary.rotate(q, k, positions, positions), rtol=0, atol=1e-14)
    assert len(graphs) <= (2 if dynamic is None else 1)


def test_compiles_with_gradients():
    torch.compiler.reset()
    rotary = Rotary(14, scaling=SCALINGS[-1])
    compiled = torch.compile(rotary.rotate, fullgraph=True, backend="aot_eager")
    _, k, q_positions, k_positions = inputs()
    grads = []
    for rotate in (compiled, rotary.rotate):
        q = draw(B, H, L, D).requires_grad_()
        q_turned, k_turned = rotate(q, k, q_positions, k_positions)
        (q_turned @ k_turned.mT).square().sum().backward()
        grads.append(q.grad)
    torch.testing.assert_close(*grads)


# A value


def test_is_a_value():
    rotary = Rotary(14, 500.0, interleaved=True, scaling=Llama3Scaling())
    same = Rotary(14, 500, interleaved=True, scaling=Llama3Scaling(8, 1, 4, 8192))
    assert rotary == same
    assert hash(rotary) == hash(same)
    assert rotary != Rotary(14, 500.0, interleaved=True)
    assert pickle.loads(pickle.dumps(rotary)) == rotary
    assert copy.deepcopy(rotary) == rotary
    assert eval(repr(rotary)) == rotary
    assert repr(Rotary()) == "Rotary(rotary_dim=None, base=10000.0, interleaved=False, scaling=None)"
    with pytest.raises(AttributeError):
        rotary.base = 3.0
    assert isinstance(rotary, Position)
    assert rotary.rotates
    assert not rotary.biases
    assert rotary.bias(torch.arange(L), torch.arange(S)) is None


def test_check_accepts_what_fits():
    Rotary().check(8, 64)
    Rotary(64).check(8, 64)
    Rotary(32).check(1, 33)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Rotary(7), ValueError, "rotary_dim: expected an even number, got 7. Channels turn in pairs. Choose 6"),
        (lambda: Rotary(0), ValueError, "rotary_dim: expected at least 2, got 0."),
        (lambda: Rotary(-2), ValueError, "rotary_dim: expected at least 2, got -2."),
        (lambda: Rotary(8.0), TypeError, "rotary_dim: expected an int, got 8.0."),
        (lambda: Rotary(base=0), ValueError, "base: expected a finite number above 1, got 0."),
        (lambda: Rotary(base=-5.0), ValueError, "base: expected a finite number above 1, got -5.0."),
        (lambda: Rotary(base=math.inf), ValueError, "base: expected a finite number above 1, got inf."),
        (lambda: Rotary(base="10000"), TypeError, "base: expected a number, got 10000."),
        (lambda: Rotary(scaling={"factor": 2}), TypeError, "scaling: expected None or a scaling such as Linear"),
        (lambda: Rotary(scaling=LinearScaling), TypeError, "got an object of type ABCMeta."),
        (lambda: Rotary().inverse_frequencies(5), ValueError, "dim: expected an even number, got 5."),
        (lambda: LinearScaling(0.25), ValueError, "factor: expected a finite number of at least 1, got 0.25. It is by"),
        (lambda: LinearScaling(0.25), ValueError, "Try 4."),
        (lambda: NTKScaling(-3), ValueError, "factor: expected a finite number of at least 1, got -3."),
        (lambda: NTKScaling(math.nan), ValueError, "factor: expected a finite number of at least 1, got nan."),
        (lambda: LinearScaling(True), TypeError, "factor: expected a number, got True."),
        (lambda: Llama3Scaling(0.5), ValueError, "factor: expected a finite number of at least 1"),
        (lambda: Llama3Scaling(low_freq_factor=0), ValueError, "low_freq_factor: expected a finite number above 0"),
        (
            lambda: Llama3Scaling(high_freq_factor=1.0),
            ValueError,
            "expected a number above low_freq_factor=1.0, got 1.0",
        ),
        (lambda: Llama3Scaling(original_length=0), ValueError, "original_length: expected at least 1, got 0."),
        (lambda: YarnScaling(0, 4096), ValueError, "factor: expected a finite number of at least 1, got 0."),
        (lambda: YarnScaling(2, 4096.0), TypeError, "original_length: expected an int, got 4096.0."),
        (
            lambda: YarnScaling(2, 4096, beta_slow=-1),
            ValueError,
            "beta_slow: expected a finite number above 0, got -1.",
        ),
        (lambda: YarnScaling(2, 4096, 1, 32), ValueError, "beta_fast: expected a number above beta_slow=32, got 1."),
        (
            lambda: YarnScaling(2, 4096, attention_factor=0),
            ValueError,
            "attention_factor: expected a finite number abo",
        ),
        (
            lambda: YarnScaling(2, 4096, mscale=1.0),
            ValueError,
            "mscale_all_dim: expected a number together with mscale",
        ),
        (lambda: YarnScaling(2, 4096, mscale_all_dim=1.0), ValueError, "mscale: expected a number together with mscal"),
        (
            lambda: YarnScaling(2, 4096, attention_factor=1.0, mscale=1.0, mscale_all_dim=1.0),
            ValueError,
            "attention_factor: expected None where mscale is given, got 1.0.",
        ),
        (lambda: Rotary(16).check(4, 12), ValueError, "rotary_dim: expected at most D=12, got 16."),
        (lambda: Rotary().check(4, 13), ValueError, "rotary_dim: expected an even number, got D=13. Channels turn in"),
        (lambda: Rotary().check(4, 13), ValueError, "Leave one channel unturned with rotary_dim=12."),
        (lambda: Rotary().check(0, 12), ValueError, "num_heads: expected at least 1, got 0."),
    ],
)
def test_messages_of_making(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"q": torch.ones(B, H, L, D, dtype=torch.long)},
            TypeError,
            "q: expected a floating tensor of shape (*batch, H",
        ),
        ({"q": torch.ones(L, D)}, ValueError, "q: expected shape (*batch, H, L, D), got (5, 22)."),
        (
            {"k": torch.ones(B, K, S, 20)},
            ValueError,
            "k: expected head dim D=22 as q has, got a float32 tensor of shape",
        ),
        (
            {"q_positions": [0, 1, 2, 3, 4]},
            TypeError,
            "q_positions: expected a tensor of shape (L,) or (*batch, L), got",
        ),
        ({"q_positions": torch.ones(L, dtype=torch.bool)}, TypeError, "q_positions: expected integers or real numbers"),
        (
            {"k_positions": torch.ones(S, dtype=torch.cfloat)},
            TypeError,
            "k_positions: expected integers or real numbers",
        ),
        ({"q_positions": torch.tensor(3)}, ValueError, "q_positions: expected shape (L,) or (*batch, L), got a int64"),
        ({"q_positions": torch.arange(S)}, ValueError, "q_positions: expected shape (L,) or (*batch, L) with L=5 and"),
        (
            {"k_positions": torch.arange(L)},
            ValueError,
            "with S=7 and *batch=(2,), got a int64 tensor of shape (5,). Tok",
        ),
        ({"q_positions": torch.ones(3, L)}, ValueError, "*batch=(2,), got a float32 tensor of shape (3, 5)."),
        ({"q_positions": torch.ones(1, B, L)}, ValueError, "*batch=(2,), got a float32 tensor of shape (1, 2, 5)."),
        (
            {"q_positions": torch.ones(L, device="meta")},
            ValueError,
            "q_positions: expected a tensor on cpu, got one on me",
        ),
    ],
)
def test_messages_of_rotating(change, error, text):
    given = dict(zip(("q", "k", "q_positions", "k_positions"), inputs(), strict=True))
    with pytest.raises(error) as caught:
        Rotary().rotate(**(given | change))
    assert text in str(caught.value)
