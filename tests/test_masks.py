"""Masks against tables written by hand, against their own dense form, and as the values they are."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multihead import Mask, attention, causal, dense, documents, lengths, padding, prefix, window
from multihead.plane import Blocks, Tile, default_positions

BATCH, H, L, S = 2, 3, 5, 7


def table(*rows: str) -> torch.Tensor:
    """A bool table from rows such as "xx..", x = visible."""
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def ints(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def all_kinds() -> list[Mask]:
    """One of each kind, all for a batch of BATCH rows."""
    generator = torch.Generator().manual_seed(0)
    return [
        causal(),
        window(left=2, right=1),
        lengths(ints(3, 6)),
        prefix(ints(2, 4)),
        padding(torch.rand(BATCH, S, generator=generator) < 0.6),
        documents(torch.arange(S) // 3),
        documents(torch.arange(S) // 3, q_ids=ints(0, 2, 1, 1, 0)),
        dense(torch.rand(BATCH, H, L, S, generator=generator) < 0.6),
        (causal() & lengths(ints(3, 6))) | ~prefix(2),
    ]


# Tables by hand -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "rows", "columns", "expected"),
    [
        (causal(), 3, 3, ["x..", "xx.", "xxx"]),
        (causal(), 2, 4, ["xxx.", "xxxx"]),  # the queries are the last L keys
        (causal(), 1, 3, ["xxx"]),
        (causal(), 4, 2, ["..", "..", "x.", "xx"]),  # more queries than keys: the first see nothing
        (window(), 2, 3, ["xxx", "xxx"]),
        (window(left=0, right=0), 3, 3, ["x..", ".x.", "..x"]),
        (window(left=1, right=0), 4, 4, ["x...", "xx..", ".xx.", "..xx"]),
        (window(left=0, right=2), 4, 4, ["xxx.", ".xxx", "..xx", "...x"]),
        (window(left=1), 4, 4, ["xxxx", "xxxx", ".xxx", "..xx"]),
        (window(right=1), 3, 4, ["xxx.", "xxxx", "xxxx"]),
        (window(left=1, right=0), 2, 4, [".xx.", "..xx"]),
        (window(left=0, right=1), 4, 2, ["..", "x.", "xx", ".x"]),
        (window(left=9, right=9), 2, 2, ["xx", "xx"]),
        (lengths(2), 2, 3, ["xx.", "xx."]),
        (lengths(0), 1, 3, ["..."]),
        (lengths(9), 1, 3, ["xxx"]),
        (prefix(1), 2, 3, ["x..", "x.."]),
        (causal() | prefix(2), 3, 3, ["xx.", "xx.", "xxx"]),
        (padding(torch.tensor([True, False, True])), 2, 3, ["x.x", "x.x"]),
        (documents(ints(4, 4, 9)), 3, 3, ["xx.", "xx.", "..x"]),
        (documents(ints(4, 4, 9)), 2, 3, ["xx.", "..x"]),
        (documents(ints(1, 0, 1)), 3, 3, ["x.x", ".x.", "x.x"]),  # a document need not be in one piece
        (documents(cu_seqlens=ints(0, 2, 3)), 3, 3, ["xx.", "xx.", "..x"]),
        (documents(cu_seqlens=ints(0, 1, 1, 3, dtype=torch.int32)), 3, 3, ["x..", ".xx", ".xx"]),  # an empty document
        (documents(ints(0, 1, 1), q_ids=ints(1, 7, 0, 1)), 4, 3, [".xx", "...", "x..", ".xx"]),
        (documents(cu_seqlens=ints(0, 2, 3), q_ids=ints(1, 0)), 2, 3, ["..x", "xx."]),
        (causal() & documents(ints(0, 0, 1, 1)), 4, 4, ["x...", "xx..", "..x.", "..xx"]),
        (~causal(), 2, 3, ["..x", "..."]),
        (~lengths(1), 1, 3, [".xx"]),
    ],
    ids=repr,
)
def test_table(mask, rows, columns, expected):
    assert torch.equal(mask.dense(rows, columns), table(*expected))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (causal(), ["...x", "x.xx", "xxxx"]),
        (window(left=2, right=0), ["...x", "x.xx", "xx.."]),
        (window(left=0, right=2), ["x.xx", "xx..", ".x.."]),
        (prefix(3), ["..xx", "..xx", "..xx"]),
        (lengths(3), ["xxx.", "xxx.", "xxx."]),  # of slots, wherever their tokens stand
        (padding(table("x..x")[0]), ["x..x", "x..x", "x..x"]),
        (documents(ints(5, 5, 6, 6)), ["xx..", "..xx", "..xx"]),  # also of slots: queries are the last ones
    ],
    ids=repr,
)
def test_table_with_positions(mask, expected):
    """Keys stand at 3, 5, 2, 1 and queries at 1, 3, 5 (as in a ring buffer); order in memory does not matter."""
    keep = mask.dense(3, 4, q_positions=ints(1, 3, 5), k_positions=ints(3, 5, 2, 1))
    assert torch.equal(keep, table(*expected))


def test_queries_are_the_last_keys_also_where_only_keys_have_positions():
    assert torch.equal(causal().dense(2, 3, k_positions=ints(9, 4, 6)), table(".x.", ".xx"))


def test_positions_of_queries_alone_count_from_key_0():
    assert torch.equal(causal().dense(2, 3, q_positions=ints(0, 2)), table("x..", "xxx"))


def test_positions_may_be_real_numbers():
    keep = causal().dense(2, 2, q_positions=torch.tensor([0.5, 1.5]), k_positions=torch.tensor([0.75, 0.25]))
    assert torch.equal(keep, table(".x", "xx"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_narrow_positions_do_not_wrap_around(dtype):
    """0 - 1 is 255 in uint8, and 100 - -100 is negative in int8: the future would be the past."""
    places = ints(torch.iinfo(dtype).min, torch.iinfo(dtype).max, dtype=dtype)
    mask = causal()
    assert torch.equal(mask.dense(2, 2, q_positions=places, k_positions=places), table("x.", "xx"))
    bounds = mask.bounds(Blocks(2, 2, *default_positions(2, 2, places, places, places.device), 1, 1))
    assert torch.equal(bounds.some, table("x.", "xx"))
    assert torch.equal(bounds.every, table("x.", "xx"))


def test_positions_with_batch_axes():
    keep = causal().dense(1, 3, q_positions=ints(0, 1)[:, None], k_positions=torch.arange(3).expand(2, 3))
    assert keep.shape == (2, 1, 1, 3)
    assert torch.equal(keep[:, 0, 0], table("x..", "xx."))


def test_rows_of_a_batch():
    """Each mask that can speak of single rows does so in (*batch, 1, L, S)."""
    for mask, expected in [
        (lengths([1, 3]), ["x..", "xxx"]),
        (lengths(ints(1, 3, dtype=torch.uint8)), ["x..", "xxx"]),
        (prefix([0, 2]), ["...", "xx."]),
        (padding(table("x.x", ".xx")), ["x.x", ".xx"]),
        (documents(torch.tensor([[0, 0, 1], [1, 1, 1]])), ["..x", "xxx"]),
        (documents(ints(0, 0, 1), q_ids=torch.tensor([[0], [1]])), ["xx.", "..x"]),
    ]:
        keep = mask.dense(1, 3)
        assert keep.shape == (2, 1, 1, 3), mask
        assert torch.equal(keep[:, 0, 0], table(*expected)), mask


def test_two_batch_axes():
    n = torch.tensor([[0, 1, 2], [3, 2, 1]])
    keep = (lengths(n) & padding(torch.ones(2, 3, 3, dtype=torch.bool))).dense(5, 3)
    assert keep.shape == (2, 3, 1, 5, 3)
    assert torch.equal(keep.sum(-1), n[..., None, None].expand(2, 3, 1, 5))


def test_dense_broadcasts_from_the_right():
    column = table("x", ".")
    assert torch.equal(dense(column).dense(2, 3), table("xxx", "..."))
    assert dense(torch.ones(H, 1, S, dtype=torch.bool)).dense(L, S).shape == (H, L, S)
    assert dense(torch.ones(BATCH, 1, L, S, dtype=torch.bool)).dense(L, S).shape == (BATCH, 1, L, S)


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (0, 0)])
def test_empty_plane(rows, columns):
    for mask in (causal(), window(left=1), lengths(2), prefix(1), causal() & ~lengths(1)):
        assert mask.dense(rows, columns).shape == (rows, columns)
        places = default_positions(rows, columns, None, None, torch.device("cpu"))
        some, every = mask.bounds(Blocks(rows, columns, *places, 2, 2))
        assert torch.broadcast_shapes(some.shape, every.shape) in {
            (-(-rows // 2), -(-columns // 2)),
            (1, -(-columns // 2)),  # of a mask that does not ask the queries
        }


# Algebra --------------------------------------------------------------------------------------------------------------


def keep_of(mask: Mask) -> torch.Tensor:
    return mask.dense(L, S).expand(BATCH, H, L, S)


@pytest.mark.parametrize("a", all_kinds(), ids=repr)
@pytest.mark.parametrize("b", all_kinds(), ids=repr)
def test_and_or_not_are_those_of_tables(a, b):
    assert torch.equal(keep_of(a & b), keep_of(a) & keep_of(b))
    assert torch.equal(keep_of(a | b), keep_of(a) | keep_of(b))
    assert torch.equal(keep_of(~a), ~keep_of(a))
    assert torch.equal(keep_of(~(a & b)), keep_of(~a | ~b))
    assert torch.equal(keep_of(~(a | b)), keep_of(~a & ~b))


def test_a_bool_tensor_joins_on_the_right():
    keep = all_kinds()[-2].tensors()["keep"]
    assert torch.equal(keep_of(causal() & keep), keep_of(causal()) & keep)
    assert torch.equal(keep_of(causal() | keep), keep_of(causal()) | keep)


# Blocks and tiles -----------------------------------------------------------------------------------------------------

sizes = st.integers(1, 11)
few = st.integers(0, 12)


@st.composite
def planes(draw):
    """(mask, batch, heads, rows, columns, q_positions or None, k_positions or None)."""
    batch, heads, rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(sizes), draw(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def chance(*shape):
        return torch.rand(*shape, generator=generator) < draw(st.sampled_from([0.05, 0.5, 0.95]))

    def numbers(*shape):
        return torch.randint(draw(st.integers(1, 5)), shape, generator=generator)

    def leaf():
        kind = draw(st.integers(0, 9))
        lead = (batch,) if draw(st.booleans()) else ()
        if kind < 4:
            return window(left=draw(st.none() | few), right=draw(st.none() | few))
        if kind == 4:
            return lengths(numbers(*lead) * 3)
        if kind == 5:
            return prefix(numbers(*lead) * 3)
        if kind == 6:
            return padding(chance(*lead, columns))
        if kind == 7:
            return documents(numbers(*lead, columns).cumsum(-1), q_ids=numbers(*lead, rows))
        if kind == 8 and rows <= columns:
            return documents(numbers(*lead, columns))
        shape = (batch, heads, rows, columns) if lead else (heads, rows, columns)
        return dense(chance(*(size if draw(st.booleans()) else 1 for size in shape)))

    mask = leaf()
    for _ in range(draw(st.integers(0, 3))):
        mask = [lambda m: ~m, lambda m: m & leaf(), lambda m: m | leaf(), lambda m: leaf() & ~m][
            draw(st.integers(0, 3))
        ](mask)
    lead = (batch,) if draw(st.booleans()) else ()
    k_positions = torch.randint(-3, 15, (*lead, columns), generator=generator) if draw(st.booleans()) else None
    may_be_left_out = k_positions is None or rows <= columns
    q_positions = torch.randint(-3, 15, (*lead, rows), generator=generator)
    if may_be_left_out and draw(st.booleans()):
        q_positions = None
    return mask, batch, heads, rows, columns, q_positions, k_positions


def places_of(rows, columns, q_positions, k_positions):
    return default_positions(rows, columns, q_positions, k_positions, torch.device("cpu"))


def of_blocks(keep: torch.Tensor, q_size: int, k_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By looking: whether some and whether every pair of each block is visible, over all heads: (*batch, nQ, nK)."""
    blocks = [rows.split(k_size, -1) for rows in keep.split(q_size, -2)]
    some = torch.stack([torch.stack([b.any(-1).any(-1).any(-1) for b in line], -1) for line in blocks], -2)
    every = torch.stack([torch.stack([b.all(-1).all(-1).all(-1) for b in line], -1) for line in blocks], -2)
    return some, every


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(planes(), sizes, sizes)
def test_bounds_are_never_wrong(plane, q_size, k_size):
    mask, batch, heads, rows, columns, q_positions, k_positions = plane
    keep = mask.dense(rows, columns, q_positions=q_positions, k_positions=k_positions)
    some, every = of_blocks(keep.expand(batch, heads, rows, columns), q_size, k_size)
    bounds = mask.bounds(Blocks(rows, columns, *places_of(rows, columns, q_positions, k_positions), q_size, k_size))
    assert bounds.some.dtype == bounds.every.dtype == torch.bool
    bound_some, bound_every = bounds.some.expand(some.shape), bounds.every.expand(every.shape)
    assert not (some & ~bound_some).any(), "a block said to be hidden holds a visible pair"
    assert not (bound_every & ~every).any(), "a block said to be visible holds a hidden pair"


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(planes(), st.data())
def test_a_tile_is_a_slice_of_the_dense_form(plane, data):
    mask, batch, heads, rows, columns, q_positions, k_positions = plane
    keep = mask.dense(rows, columns, q_positions=q_positions, k_positions=k_positions).expand(
        batch, heads, rows, columns
    )
    part = [slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in (rows, columns)]
    expected = keep[..., part[0], part[1]]
    tile = mask.visible(Tile(rows, columns, *places_of(rows, columns, q_positions, k_positions), *part))
    assert torch.equal(tile.expand(expected.shape), expected)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 4), st.none() | few, st.none() | few, sizes, sizes, sizes, sizes)
def test_bounds_are_exact_without_positions(kind, left, right, rows, columns, q_size, k_size):
    """Loose bounds would still be right, but cost time where it matters most."""
    ids = torch.arange(columns) * 2 // 5 * 3
    mask = [
        causal(),
        window(left=left, right=right),
        lengths([left or 0, right or 0]),
        prefix(left or 0),
        documents(ids),
    ][kind]
    rows = min(rows, columns) if kind == 4 else rows
    keep = mask.dense(rows, columns)
    some, every = of_blocks(keep if keep.ndim == 4 else keep[None, None], q_size, k_size)
    bounds = mask.bounds(Blocks(rows, columns, *places_of(rows, columns, None, None), q_size, k_size))
    assert torch.equal(bounds.some.expand(some.shape), some)
    assert torch.equal(bounds.every.expand(every.shape), every)


def test_a_block_is_hidden_only_if_no_row_of_documents_sees_it():
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    some, every = documents(ids).bounds(Blocks(4, 4, torch.arange(4), torch.arange(4), 2, 2))
    assert torch.equal(some, torch.stack([table("x.", ".x"), table("xx", "xx")]))
    assert torch.equal(every, torch.stack([table("x.", ".x"), table("..", ".x")]))


# Batch axes -----------------------------------------------------------------------------------------------------------


def test_flattened_joins_the_batch_axes():
    batch = (2, 3)
    generator = torch.Generator().manual_seed(1)

    def chance(*shape):
        return torch.rand(*shape, generator=generator) < 0.6

    n = torch.arange(6).view(batch)
    for mask in [
        causal(),
        lengths(n),
        lengths(n[:1]),
        prefix(n[:, :1]),
        padding(chance(*batch, S)),
        padding(chance(S)),
        documents(torch.arange(S) // 2, q_ids=torch.arange(6 * L).view(*batch, L) % 3),
        dense(chance(*batch, H, L, S)),
        dense(chance(3, 1, L, 1)),  # fewer axes than the batch has
        dense(chance(H, L, S)),
        dense(chance(L, S)),
        (lengths(n) & dense(chance(2, 1, H, 1, S))) | ~padding(chance(1, 3, S)),
    ]:
        keep = mask.dense(L, S).expand(*batch, H, L, S)
        flat = mask.flattened(batch).dense(L, S)
        assert flat.ndim <= 4, mask
        assert torch.equal(flat.expand(6, H, L, S), keep.reshape(6, H, L, S)), mask


@pytest.mark.parametrize("batch", [(0, 3), (3, 0)])
def test_flattened_with_an_empty_batch_axis(batch):
    for mask in (lengths(torch.zeros(batch, dtype=torch.int64)), padding(torch.ones(*batch, S, dtype=torch.bool))):
        assert mask.flattened(batch).dense(L, S).shape == (0, 1, L, S)


# Values ---------------------------------------------------------------------------------------------------------------


def test_equality():
    assert causal() == causal() == window(right=0)
    assert hash(causal()) == hash(window(right=0))
    assert window(left=2, right=1) == window(left=2, right=1)
    assert causal() != window()
    assert causal() != window(left=0, right=0)
    assert causal() != lengths(1)
    assert isinstance(lengths(ints(1, 2)) == lengths(ints(1, 2)), bool)  # not a tensor, which would have no truth value


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (causal(), "causal()"),
        (window(left=3, right=1), "window(left=3, right=1)"),
        (window(left=255, right=0), "window(left=255, right=0)"),
        (lengths(5), "lengths(5)"),
        (lengths([1, 2]), "lengths(int64 (2,))"),
        (prefix(2), "prefix(2)"),
        (padding(torch.ones(2, 3, dtype=torch.bool)), "padding(bool (2, 3))"),
        (documents(ints(0, 1, dtype=torch.int32)), "documents(int32 (2,))"),
        (dense(torch.ones(2, 3, dtype=torch.bool)), "dense(bool (2, 3))"),
        (causal() & lengths(2) & prefix(1), "causal() & lengths(2) & prefix(1)"),
        ((causal() | prefix(2)) & ~lengths(3), "(causal() | prefix(2)) & ~lengths(3)"),
        (~(causal() & lengths(1)), "~(causal() & lengths(1))"),
    ],
)
def test_repr(mask, expected):
    assert repr(mask) == expected


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.recursive(
        st.builds(causal)
        | st.builds(window, left=st.none() | few, right=st.none() | few)
        | st.builds(lengths, few)
        | st.builds(prefix, few),
        lambda inner: (
            st.builds(lambda a: ~a, inner)
            | st.builds(lambda a, b: a & b, inner, inner)
            | st.builds(lambda a, b: a | b, inner, inner)
        ),
        max_leaves=6,
    )
)
def test_repr_is_the_expression_that_makes_it(mask):
    made = eval(repr(mask), {"causal": causal, "window": window, "lengths": lengths, "prefix": prefix})
    assert torch.equal(made.dense(5, 7), mask.dense(5, 7))


def test_repr_does_not_grow_with_the_sequence():
    assert len(repr(documents(torch.arange(100_000)))) < 40


@pytest.mark.parametrize("mask", all_kinds(), ids=repr)
def test_copies(mask):
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert torch.equal(other.dense(L, S), mask.dense(L, S))
        assert repr(other) == repr(mask)


@pytest.mark.parametrize("mask", all_kinds(), ids=repr)
def test_to_moves_all_tensors(mask):
    moved = mask.to("meta")
    assert len(moved.tensors()) == len(mask.tensors())
    assert all(t.device.type == "meta" for t in moved.tensors().values())
    assert all(t.device.type == "cpu" for t in mask.tensors().values())
    assert moved.dense(L, S, device="meta").shape == mask.dense(L, S).shape
    assert torch.equal(mask.to("cpu").dense(L, S), mask.dense(L, S))


@pytest.mark.parametrize("mask", [lengths(3), prefix(3), causal() & ~lengths(3)], ids=repr)
def test_a_plain_number_has_no_device(mask):
    """The same mask serves inputs on any, as causal() does."""
    assert mask.dense(L, S, device="meta").is_meta
    places = default_positions(L, S, None, None, torch.device("meta"))
    assert mask.bounds(Blocks(L, S, *places, 2, 2)).some.is_meta


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("mask", all_kinds(), ids=repr)
def test_masks_do_not_change_when_used(mask):
    before = {name: tensor.clone() for name, tensor in mask.tensors().items()}
    held = mask.tensors()
    keep, text = mask.dense(L, S), repr(mask)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(BATCH, H, n, 11, generator=generator, requires_grad=True) for n in (L, S, S))
    attention(q, k, v, mask).sum().backward()
    _ = mask & ~causal() | mask.flattened((BATCH,))
    assert repr(mask) == text
    assert torch.equal(mask.dense(L, S), keep)
    for name, tensor in mask.tensors().items():
        assert tensor is held[name]
        assert torch.equal(tensor, before[name])


def test_fields_can_not_be_set():
    with pytest.raises(AttributeError):
        causal().left = 3


# torch.compile --------------------------------------------------------------------------------------------------------


MADE_INSIDE = {
    "causal": lambda _n, _keep, _ids, _every: causal(),
    "window": lambda _n, _keep, _ids, _every: window(left=2, right=1),
    "lengths": lambda n, _keep, _ids, _every: lengths(n) & causal(),
    "an int": lambda n, _keep, _ids, _every: lengths(4) | prefix(n),
    "ints": lambda _n, keep, _ids, _every: lengths([3, 5]) & padding(keep),
    "documents": lambda _n, _keep, ids, _every: causal() & documents(ids),
    "q_ids": lambda _n, _keep, ids, _every: documents(ids, q_ids=ids[2:]),
    "dense": lambda _n, _keep, _ids, every: causal() & dense(every),
    "not": lambda _n, keep, _ids, _every: (
        OTHERS & padding(keep)
    ),  # Dynamo traces no ~ of an object, so it is made outside
}
OTHERS = ~window(left=0, right=0)


@pytest.mark.parametrize("which", MADE_INSIDE)
def test_made_inside_a_compiled_function(which):
    """In one graph, and the mask does not become a constant: other numbers give another answer."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(BATCH, H, n, 11, generator=generator, dtype=torch.float64) for n in (L, S, S))

    def attend(*tensors):
        return attention(q, k, v, MADE_INSIDE[which](*tensors))

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for seed in (4, 5):
        generator.manual_seed(seed)
        tensors = (
            torch.randint(1, S, (BATCH,), generator=generator),
            torch.rand(BATCH, S, generator=generator) < 0.5,
            torch.randint(2, (S,), generator=generator),
            torch.rand(L, S, generator=generator) < 0.5,
        )
        torch.testing.assert_close(compiled(*tensors), attend(*tensors), rtol=0, atol=1e-12)
