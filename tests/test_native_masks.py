"""Who sees whom in the native kernel, pair by pair: one-hot values give its weights, and hidden pairs have none."""

from __future__ import annotations

import functools
import operator
import random
from typing import Any

import pytest
import torch

import multihead as mh
from multihead.kernels import library
from multihead.kernels.postfix import MOST_STEPS, MOST_WAITING
from native_cases import given, hold, weights

pytestmark = pytest.mark.skipif(not library.available(), reason=f"there is no native library: {library.why_not()}")

f32, f64, i64 = torch.float32, torch.float64, torch.int64
B, H, K = 2, 4, 2
# A cell is 8 keys, a block 192; a strip is 8 to 32 rows, one row of G = 2 heads for each query, a block 64.
LENGTHS = ((1, 1), (5, 7), (7, 5), (17, 8), (9, 33), (40, 40), (3, 200), (70, 199), (65, 192), (33, 390))


def hold_visible(mask: Any, L: int, S: int, heads: tuple[int, int] = (H, K), told: str = "", **places: Any) -> None:
    """Forward and backward see exactly the pairs that the mask shows, and weigh them alike where scores are 0."""
    q, k = torch.zeros(B, heads[0], L, 3), torch.zeros(B, heads[1], S, 3)
    want = (mask if isinstance(mask, mh.Mask) else mh.dense(mask)).dense(L, S, **places).expand(B, heads[0], L, S)
    uniform = want / want.sum(-1, keepdim=True).clamp(min=1)
    for found, name in zip(weights(q, k, mask, **places), ("forward", "backward"), strict=True):
        wrong = ((found > 0) != want).nonzero()
        assert not len(wrong), f"{name} of {mask!r} {told} differs at {len(wrong)} pairs, first {wrong[0].tolist()}"
        assert torch.allclose(found, uniform, rtol=1e-5, atol=0), f"{name} of {mask!r} {told}: weights are uneven"


# Each kind ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("L", "S"), LENGTHS)
def test_windows_at_every_edge_of_a_cell(L, S):
    edges = [None, *range(10), 15, 16, 17, 191, 192, 193, 2**30, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 2, 2**63 - 1]
    rng = random.Random(S)
    for _ in range(24 if L * S < 2000 else 8):
        hold_visible(mh.window(rng.choice(edges), rng.choice(edges)), L, S)


@pytest.mark.parametrize(("L", "S"), LENGTHS)
def test_lengths_and_prefixes_at_every_edge(L, S):
    edges = [0, 1, 7, 8, 9, 16, S - 1, S, S + 1, S + 100, 191, 192, 193, 2**31, 2**40, 2**63 - 1]
    rng = random.Random(L)
    for make in (mh.lengths, mh.prefix):
        for _ in range(4):
            dtype = rng.choice((i64, torch.int32))
            held = torch.tensor([min(rng.choice(edges), torch.iinfo(dtype).max) for _ in range(B)], dtype=dtype)
            for mask in (make(rng.choice(edges)), make(held), make(held[:1]), make(held[0])):
                hold_visible(mask, L, S)
            hold_visible(~mask, L, S)


IDS = {
    "few": lambda *shape: torch.randint(-2, 3, shape),
    "sorted": lambda *shape: torch.randint(0, 4, shape).sort(-1)[0],
    "int32's edges": lambda *shape: torch.tensor([-(2**31), 2**31 - 1, 0])[torch.randint(0, 3, shape)],
    "beyond int32": lambda *shape: torch.tensor([2**31, -1, 2**32 - 1, 0])[torch.randint(0, 4, shape)],
    "alike in 32 bits": lambda *shape: torch.tensor([7, 7 + 2**32, 7 - 2**40, 2**63 - 1])[torch.randint(0, 4, shape)],
    "alike as doubles": lambda *shape: 2**62 + torch.randint(0, 3, shape),
    "int32": lambda *shape: torch.randint(-3, 3, shape, dtype=torch.int32),
    "int16": lambda *shape: torch.randint(-3, 3, shape, dtype=torch.int16),
    "int8": lambda *shape: torch.randint(-128, -126, shape, dtype=torch.int8),
    "uint8": lambda *shape: torch.randint(253, 256, shape, dtype=torch.uint8),
}


@pytest.mark.parametrize("kind", IDS)
def test_documents(kind):
    torch.manual_seed(3)
    ids = IDS[kind]
    for L, S in ((5, 7), (7, 5), (17, 8), (33, 200)):
        for keys in (ids(S), ids(1, S), ids(B, S), ids(S, B).t(), ids(B, 2 * S)[:, ::2]):
            if L <= S:
                hold_visible(mh.documents(keys), L, S)
            for queries in (ids(L), ids(B, L)):
                hold_visible(mh.documents(keys, q_ids=queries), L, S)
            hold_visible(~mh.documents(keys, q_ids=queries) & mh.causal(), L, S)


def test_documents_of_which_only_one_side_is_beyond_int32():
    keys, queries = torch.tensor([0, 1, 2**31, 2**40, 5]), torch.tensor([1, 2, 5])
    hold_visible(mh.documents(keys, q_ids=queries), 3, 5)
    hold_visible(mh.documents(queries, q_ids=keys), 5, 3)
    hold_visible(mh.documents(keys.to(torch.int64), q_ids=queries.to(torch.int8)), 3, 5)


@pytest.mark.parametrize(("L", "S"), LENGTHS)
def test_tables_of_every_shape_and_layout(L, S):
    torch.manual_seed(4)
    for density in (0.05, 0.95):

        def drawn(*shape, density=density):
            return torch.rand(shape) < density

        shapes = [
            (L, S),
            (1, S),
            (L, 1),
            (1, 1),
            (H, L, S),
            (1, L, S),
            (H, 1, 1),
            (B, 1, L, S),
            (B, H, 1, S),
            (B, H, L, 1),
        ]
        tables = [drawn(*shape) for shape in shapes]
        tables += [
            drawn(S, L).t(),
            drawn(B, L, H, S).transpose(1, 2),
            drawn(L, 3 * S + 1)[:, 1::3],
            drawn(B, H, 2 * L, S + 9)[:, :, ::2, 5:-4],
            drawn(H, L, S, B).movedim(-1, 0),
            drawn(B, 1, 1, S).expand(B, H, L, S),
            drawn(1, 1, L, S).expand(B, H, L, S),
            drawn(L, S).to(torch.uint8).view(torch.bool),
            torch.zeros(L, S, dtype=torch.bool),
            torch.ones(L, S, dtype=torch.bool),
        ]
        for keep in tables:
            hold_visible(keep, L, S)
        for keep in (drawn(S), drawn(1, S), drawn(B, S), drawn(S, B).t(), drawn(B, 2 * S)[:, ::2], drawn(B, S)[:1]):
            hold_visible(mh.padding(keep), L, S)


# Positions ------------------------------------------------------------------------------------------------------------


def places(kind: str, L: int, S: int) -> dict[str, Any]:
    q, k = torch.arange(S - L, S), torch.arange(S)

    def some(at: torch.Tensor, number: float) -> torch.Tensor:
        return torch.where(torch.rand(at.shape) < 0.3, number, at.float())

    return {
        "shifted": lambda: (q + 1000, k + 1000),
        "only queries": lambda: (torch.randint(0, S, (L,)), None),
        "only keys": lambda: (None, k * 2 if L <= S else None),
        "shuffled": lambda: (torch.randint(0, S, (B, L)), torch.stack([torch.randperm(S) for _ in range(B)])),
        "left padding": lambda: (q - torch.randint(0, S, (B, 1)), k - torch.randint(0, S, (B, 1))),
        "one row": lambda: (q[None], torch.randperm(S)[None]),
        "rows of queries": lambda: (torch.randint(-S, S, (B, L)), k),
        "int32": lambda: (q.to(torch.int32), torch.randperm(S).to(torch.int32)),
        "int8": lambda: ((q % 100).to(torch.int8), (k % 100).to(torch.int8)),
        "uint8": lambda: ((q % 256).to(torch.uint8), (k % 256).to(torch.uint8)),
        "float": lambda: (torch.randn(L) * 9, torch.randn(B, S) * 9),
        "double": lambda: (torch.randn(B, L, dtype=f64) * 9, torch.randn(S, dtype=f64) * 9),
        "float and double": lambda: (torch.randn(L) * 9, torch.randn(S, dtype=f64) * 9),
        "float and whole": lambda: (torch.randn(L) * 9, torch.randint(-9, 9, (S,))),
        "bfloat16": lambda: ((torch.randn(L) * 9).bfloat16(), (torch.randn(S) * 9).bfloat16()),
        "float16": lambda: ((torch.randn(L) * 9).half(), (torch.randn(S) * 9).half()),
        "halves": lambda: (q / 2, k / 2),
        "distances that round": lambda: (q.float() + 2**23, k.float() * 0.3),
        "at the edge of int32": lambda: (q + 2**31 - 3, k + 2**31 - 3),
        "far": lambda: (q + 2**40, k + 2**40),
        "spread": lambda: (q * 2**33, k * 2**33),
        "2^30 apart": lambda: (q, torch.cat([k[:-1], torch.tensor([2**30 - 1])])),
        "a little more": lambda: (q, torch.cat([k[:-1], torch.tensor([2**30 + S])])),
        "a sentinel behind": lambda: (q, torch.where(torch.rand(S) < 0.3, -(2**60), k)),
        "a sentinel in front": lambda: (q, torch.where(torch.rand(S) < 0.3, 2**60, k)),
        "int32's sentinels": lambda: (q, torch.where(torch.rand(B, S) < 0.3, 2**31 - 1, k)),
        "infinite": lambda: (q.float(), some(k, torch.inf)),
        "infinite behind": lambda: (q.float(), some(k, -torch.inf)),
        "infinite both": lambda: (some(q, torch.inf), some(k, torch.inf)),
        "NaN": lambda: (some(q, torch.nan), some(k, torch.nan)),
        "strided": lambda: (torch.randint(0, S, (L, B)).t(), torch.randint(0, S, (B, 2 * S))[:, ::2]),
        "the ends of int64": lambda: (q, torch.where(torch.rand(S) < 0.5, -(2**63), 2**63 - 1)),
        "nanoseconds": lambda: (q + 1_700_000_000_000_000_000, k + 1_700_000_000_000_000_000),
        "near int64's end": lambda: (q - S + 2**63 - 1, k - S + 2**63 - 1),
        "near int64's start": lambda: (q + L - 2**63 + S, k + L - 2**63 + S),
        "2^60 and near 0": lambda: (q + 2**60, torch.where(torch.rand(S) < 0.2, k, k + 2**60)),
        "float past its whole numbers": lambda: (q + 2**24, (k + 2**24).float()),
    }[kind]()  # fmt: skip


FOLLOWING = [
    mh.causal(),
    mh.window(left=2, right=1),
    mh.window(left=0, right=0),
    mh.window(left=3),
    mh.window(left=2**23 + 3, right=2**23),
    mh.window(),
    mh.prefix(4),
    mh.prefix(2**31 + 1),
    mh.prefix(torch.tensor([3, 2**40 + 5])),
    mh.prefix(1_700_000_000_000_000_003),
    mh.causal() & ~mh.window(left=3),
    ~mh.causal() | mh.prefix(2),
]
KINDS = [
    "shifted", "only queries", "only keys", "shuffled", "left padding", "one row", "rows of queries", "int32",
    "int8", "uint8", "float", "double", "float and double", "float and whole", "bfloat16", "float16", "halves",
    "distances that round", "at the edge of int32", "far", "spread", "2^30 apart", "a little more",
    "a sentinel behind", "a sentinel in front", "int32's sentinels", "infinite", "infinite behind", "infinite both",
    "NaN", "strided", "the ends of int64", "nanoseconds", "near int64's end", "near int64's start", "2^60 and near 0",
    "float past its whole numbers",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_positions(kind):
    torch.manual_seed(5)
    for L, S in ((5, 7), (7, 5), (33, 40), (3, 200), (70, 199)):
        if kind == "int8" and S > 100:
            continue
        q_at, k_at = places(kind, L, S)
        for mask in FOLLOWING if S < 199 else FOLLOWING[::3] if S > 199 else FOLLOWING[1::4]:
            hold_visible(mask, L, S, told=f"{kind} L={L} S={S}", q_positions=q_at, k_positions=k_at)


def test_bounds_where_doubles_and_floats_have_gaps():
    """Distances and prefixes just beyond 2^53, or 2^24 of float32 positions: as whole numbers, or as PyTorch rounds."""
    L, S = 5, 7
    q, k = torch.arange(S - L, S), torch.arange(S)
    hold_visible(mh.window(left=2**60), L, S, q_positions=q + 2**60, k_positions=k)
    hold_visible(mh.window(right=2**60), L, S, q_positions=q, k_positions=k + 2**60)
    hold_visible(mh.window(left=2**24 + 1), L, S, q_positions=q.float() + 2**24, k_positions=k.float())
    for prefix in (mh.prefix(2**24 + 1), mh.prefix(torch.tensor([2**24 + 1, 3]))):
        hold_visible(prefix, L, S, q_positions=q.float(), k_positions=k.float() + 2**24 - 1)


# Joined ---------------------------------------------------------------------------------------------------------------


def drawn_mask(rng: random.Random, L: int, S: int, depth: int) -> mh.Mask:
    if depth and rng.random() < 0.75:
        kind = rng.choice("&&||~")
        a = drawn_mask(rng, L, S, depth - 1)
        if kind == "~":
            return ~a
        b = drawn_mask(rng, L, S, depth - 1)
        return a & b if kind == "&" else a | b
    rows = rng.choice(((), (B,)))
    near = rng.choice((0, 1, 3, 7, 8, 9, 24, 100, 191, 192, 193))
    return rng.choice(
        (
            lambda: mh.causal(),
            lambda: mh.window(rng.choice((None, near)), rng.choice((None, 0, near))),
            lambda: mh.lengths(torch.randint(0, S + 9, rows)),
            lambda: mh.prefix(torch.randint(0, S + 9, rows)),
            lambda: mh.padding(torch.rand(*rows, S) < rng.choice((0.1, 0.9))),
            lambda: mh.padding((torch.arange(S) // 8) % 3 > 0),
            lambda: mh.documents(torch.randint(0, 4, (*rows, S)).sort(-1)[0], q_ids=torch.randint(0, 4, (*rows, L))),
            lambda: mh.dense(
                torch.rand(rng.choice(((L, S), (1, S), (H, L, S), (B, 1, L, S)))) < rng.choice((0.1, 0.9))
            ),
            lambda: mh.dense((torch.arange(L)[:, None] // 8 + torch.arange(S) // 8) % 3 > 0),
        )
    )()


@pytest.mark.parametrize("number", range(6))
def test_hundreds_of_joined_masks(number):
    rng = random.Random(number)
    torch.manual_seed(number)
    for _ in range(40):
        L, S = rng.choice(LENGTHS)
        heads = rng.choice(((4, 2), (1, 1), (3, 1), (9, 1)))
        mask = drawn_mask(rng, L, S, 4)
        if heads[0] != H and any(t.ndim > 2 and t.shape[-3] == H for t in mask.tensors().values()):
            heads = (H, K)
        q_at, k_at = places(rng.choice(KINDS[:12]), L, S) if rng.random() < 0.4 and S <= 100 else (None, None)
        hold_visible(mask, L, S, heads, q_positions=q_at, k_positions=k_at)


def keeps(number: int) -> list[mh.Mask]:
    torch.manual_seed(7)
    return [mh.dense(torch.rand(5, 9) < 0.7) for _ in range(number)]


def chain(masks: list[mh.Mask], nested: bool) -> mh.Mask:
    """a & (b | (c & ...)), of which all wait for the last, or ((a & b) | c) & ..., of which two wait."""
    join = (operator.and_, operator.or_)
    if nested:
        return functools.reduce(lambda rest, i: join[i % 2](masks[i], rest), reversed(range(len(masks) - 1)), masks[-1])
    return functools.reduce(lambda done, i: join[i % 2](done, masks[i]), range(1, len(masks)), masks[0])


def test_masks_up_to_the_limits_run_and_those_beyond_are_refused():
    assert (MOST_STEPS, MOST_WAITING) == (32, 8)
    masks = keeps(17)
    able = [chain(masks[:8], True), chain(masks[:16], False), ~chain(masks[:16], False)]
    able += [chain([chain(masks[:7], True), chain(masks[7:14], True)], False)]
    for mask in able:
        hold_visible(mask, 5, 9)
    for mask in (chain(masks[:9], True), chain(masks[:17], False), ~~chain(masks[:16], False)):
        q = torch.zeros(B, H, 5, 3)
        k = torch.zeros(B, K, 9, 3)
        with pytest.raises(mh.KernelRefusal, match="32 steps, or nested more than 8 deep"):
            mh.attention(q, k, k, mask, kernel="native")
        one = torch.eye(9).expand(B, K, 9, 9)
        found = mh.attention(q, k, one, mask)
        assert torch.equal(found > 0, mask.dense(5, 9).expand(B, H, 5, 9))


def test_many_inversions_are_steps_too():
    mask = mh.causal()
    for _ in range(31):
        mask = ~mask
    hold_visible(mask, 7, 9)
    with pytest.raises(mh.KernelRefusal, match="32 steps"):
        hold_visible(~mask, 7, 9)


def test_a_mask_of_a_kind_of_its_own_is_refused():
    class Odd(mh.Mask):
        def visible(self, tile):
            return (tile.q_position + tile.k_position) % 2 == 1

        def bounds(self, blocks):
            raise NotImplementedError

        def check(self, plane):
            pass

    q = torch.zeros(1, 1, 3, 4)
    for mask in (Odd(), mh.causal() & ~Odd()):
        with pytest.raises(mh.KernelRefusal, match="a kind of its own"):
            mh.attention(q, q, q, mask, kernel="native")


# With numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("L", "S"), [(70, 199), (1, 800), (3, 1600)])
def test_gradients_where_cells_and_strips_see_different_keys(L, S):
    """Runs of cells that begin and end anywhere, strips that see nothing between others that do."""
    torch.manual_seed(8)
    cells = (torch.rand(-(-L // 8), -(-S // 8)) < 0.3).repeat_interleave(8, 0).repeat_interleave(8, 1)[:L, :S]
    stripes = (torch.arange(L)[:, None] // 16 % 2 == 0) & (torch.rand(L, S) < 0.9)
    one_each = torch.zeros(L, S, dtype=torch.bool).scatter_(1, torch.randint(0, S, (L, 1)), True)
    last = torch.arange(S) == S - 1
    for mask in (
        cells,
        stripes,
        one_each,
        mh.padding(last),
        ~mh.padding(last),
        mh.window(left=0, right=0),
        mh.window(60, 9),
    ):
        hold(given(mask, 1, 2, 1, L, S, D=5, V=6), (f32, torch.bfloat16))
