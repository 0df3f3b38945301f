"""`Record`: exact weights and statistics, each against the dense definition in float64."""

from __future__ import annotations

import math

import pytest
import torch

import multihead as mh
from cases import draw
from multihead import Record, reference
from multihead.inspection import walk
from multihead.kernels import native

f64 = torch.float64
NAMES = ("bias", "scale", "softcap", "sinks", "q_positions", "k_positions")


def dense(q, k, mask=None, **options):
    """The weights, by the definition in double precision."""
    wide = torch.complex128 if q.is_complex() else f64
    options = {
        name: value.to(f64) if name in ("bias", "sinks") and isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    return reference.attention(q.to(wide), k.to(wide), k[..., :1].to(wide), mask, **options).weights


def record_of(number):
    """A random record with its weights."""
    case = draw(number)
    options = {name: case.options[name] for name in NAMES if name in case.options}
    options = {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    q, k = case.q.detach(), case.k.detach()
    return Record(q, k, mask=case.mask, **options), dense(q, k, case.mask, **options), case.told


def close(found, want, told=""):
    atol = 1e-9 if found.dtype == f64 else 2e-4
    torch.testing.assert_close(
        found.to(f64), want.to(f64), rtol=1e-4, atol=atol, equal_nan=True, msg=lambda m: f"{told}: {m}"
    )


def small(L=7, S=9, H=4, K=2, B=2, D=5, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, n, length, D, generator=generator) for n, length in ((H, L), (K, S)))
    return Record(q, k, **options), dense(q, k, **options)


def by_blocks(monkeypatch):
    """As where the native kernel is not there."""
    monkeypatch.setattr(native, "refusals", lambda _: ["off"])


# Against the definition -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["native", "blocks"])
@pytest.mark.parametrize("chunk", range(5))
def test_weights_and_statistics_are_those_of_the_definition(chunk, way, monkeypatch):
    if way == "blocks":
        by_blocks(monkeypatch)
    for number in range(70_000 + chunk * 40, 70_000 + (chunk + 1) * 40):
        monkeypatch.setattr(walk, "_BLOCK_BYTES", (1, 4096, 2**23)[number % 3])
        record, want, told = record_of(number)
        blind = want.sum(-1) == 0
        nan = {"value": math.nan}
        visible = record.compute("visible_keys")["visible_keys"]
        close(torch.cat([w for _, w in record.blocks((1, 3, 64)[number % 3])], -2), want, told)
        if record.shape[-2]:  # one row has a way of its own
            i = number % record.shape[-2]
            close(record.row(i), want[..., i, :], told)
        close(record.entropy(), torch.special.entr(want).sum(-1).masked_fill(blind, **nan), told)
        close(record.max_weight(), want.amax(-1).masked_fill(blind, **nan), told)
        close(record.received(), want.sum(-2), told)
        assert bool(((visible > 0) == ~blind).all() or record.shape[-1] == 0), told
        counts = record.compute("seen_by")["seen_by"]
        close(record.received(mean=True), (want.sum(-2) / counts), told)
        assert torch.equal(counts.sum(-1), visible.nan_to_num().sum(-1)), told


def test_one_row_of_a_mask_that_is_the_same_for_all_keys():
    table = torch.tensor([True, False, True])[:, None]
    record, want = small(L=3, mask=table)
    for i in range(3):
        close(record.row(i), want[..., i, :])


def test_max_logit():
    for options in ({}, {"scale": 3.0}, {"softcap": 0.3}, {"bias": torch.linspace(-3, 3, 9)[None]}):
        record, _ = small(mask=mh.causal(), **options)
        q, k = record.q.double(), record.k.double().repeat_interleave(2, 1)
        scores = q @ k.mT * options.get("scale", 5**-0.5)
        if "softcap" in options:
            scores = 0.3 * torch.tanh(scores / 0.3)
        scores = scores + options.get("bias", torch.zeros(9))
        hidden = torch.ones(7, 9, dtype=torch.bool).triu(3)
        close(record.max_logit(), scores.masked_fill(hidden, -math.inf).amax(-1))


def test_entropy_normalized():
    record, want = small(L=9, mask=mh.causal())
    most = torch.arange(1, 10, dtype=f64).log()
    expected = torch.special.entr(want).sum(-1) / most
    expected[..., 0] = math.nan  # one key: nothing to be even over
    close(record.entropy(normalized=True), expected)
    even = Record(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 8, 2))
    close(even.entropy(), torch.full((1, 1, 3), math.log(8)))
    close(even.entropy(normalized=True), torch.ones(1, 1, 3))


def test_mass_of_every_kind_of_keys():
    record, want = small()
    close(record.mass(0), want[..., 0])
    close(record.mass(-1), want[..., -1])
    close(record.mass(slice(2, 5)), want[..., 2:5].sum(-1))
    close(record.mass([1, 1, 3]), want[..., [1, 3]].sum(-1))  # each key once
    close(record.mass(torch.tensor([4])), want[..., 4])
    close(record.mass(torch.arange(9) > 6), want[..., 7:].sum(-1))


def test_mass_of_few_among_many_keys():
    for options in ({"mask": mh.causal()}, {"mask": mh.lengths(torch.tensor([300, 0]))}, {"sinks": torch.ones(4)}):
        record, want = small(L=300, S=300, **options)
        blind = want.sum(-1) == 0
        for keys in (0, -1, [5, 6, 200], slice(290, 300)):
            columns = [keys] if isinstance(keys, int) else keys
            close(record.mass(keys), want[..., columns].sum(-1).masked_fill(blind, math.nan))


@pytest.mark.parametrize("way", ["known", "unknown", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mass_where_scores_are_large(way, dtype, monkeypatch):
    if way == "blocks":
        by_blocks(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    q, k = ((torch.randn(1, 2, 128, 16, generator=generator) * 90).to(dtype) for _ in range(2))
    lse = mh.attention(q, k, k, mh.causal(), return_lse=True)[1] if way == "known" else None
    record = Record(q, k, mask=mh.causal(), lse=lse)
    assert record.max_logit().max() > 2e4
    want = record.weights()
    close(record.mass(0), want[..., 0])
    close(sum(record.mass(slice(i, i + 8)) for i in range(0, 128, 8)), want.sum(-1))
    even = Record(torch.ones(1, 1, 1, 4), torch.full((1, 1, 64, 4), 2e4))
    close(even.mass(0) * 64, torch.ones(1, 1, 1))


def test_numbers_of_any_kind_are_indices():
    np = pytest.importorskip("numpy")
    record, want = small()
    close(record.row(np.int64(2)), want[..., 2, :])
    close(record.row(torch.tensor(2)), want[..., 2, :])
    close(
        record.weights(queries=torch.arange(2), keys=np.array([0, 3]), heads=torch.tensor(1)), want[:, 1:2, :2, [0, 3]]
    )
    for bad in (True, torch.tensor([True, False]), 1.0, np.array([1.5])):
        with pytest.raises(TypeError, match="queries: expected an int"):
            record.weights(queries=bad)


def test_no_keys_and_no_queries():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    assert Record(q, k[:, :, :0]).weights().shape == (1, 2, 3, 0)
    assert Record(q, k).weights(heads=[]).shape == (1, 0, 3, 5)
    for record in (Record(q[:, :, :0], k), Record(q, k[:, :, :0]), Record(q[:0], k[:0])):
        assert record._repr_html_() is None


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"sinks": torch.zeros(1)}, ValueError, "sinks: expected the shape"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks: expected the shape"),
        ({"sinks": 1.0}, TypeError, "sinks: expected"),
        ({"lse": torch.zeros(3)}, ValueError, r"lse: expected the shape \(\*batch, H, L\) = \(2, 4, 7\)"),
        ({"lse": 3}, TypeError, "lse: expected a floating point tensor"),
        (
            {"out": torch.zeros(2, 7, 4, 5)},
            ValueError,
            r"out: expected the shape \(\*batch, H, L, V\) = \(2, 4, 7, 5\)",
        ),
        ({"out": torch.zeros(2, 7, 20)}, ValueError, "out: expected the shape"),
    ],
)
def test_what_a_record_is_made_of_has_to_fit(options, error, said):
    q, k = torch.randn(2, 4, 7, 5), torch.randn(2, 2, 9, 5)
    with pytest.raises(error, match=said):
        Record(q, k, k, **options)


def test_distances_that_do_not_fit():
    record, _ = small()
    places = torch.zeros(7, 2), torch.zeros(9, 3), torch.zeros(9, 2)
    with pytest.raises(ValueError, match="as many coordinates of queries as of keys, got 2 and 3"):
        record.distance(places[:2])
    for wrong in (places, places[:1]):
        with pytest.raises(ValueError, match="coords: expected a tensor, or a pair"):
            record.distance(wrong)


def test_distance():
    record, want = small(L=7, S=9)
    far = (torch.arange(2, 9)[:, None] - torch.arange(9)).abs()
    close(record.distance(), (want * far).sum(-1))
    places = torch.rand(9, 2)
    record, want = small(L=9, S=9)
    close(record.distance(places), (want * torch.cdist(places, places)).sum(-1))
    record, want = small(L=7, S=9)
    close(record.distance((places[:7], places)), (want * torch.cdist(places[:7], places)).sum(-1))
    at = torch.tensor([0, 5, 6, 20, 21, 22, 30, 31, 40])
    record, want = small(q_positions=at[:7], k_positions=at)
    close(record.distance(), (want * (at[:7, None] - at).abs()).sum(-1))


def test_coverage_and_topk():
    record, want = small(mask=mh.causal())
    sums = want.sort(-1, descending=True).values.cumsum(-1)
    for mass in (0.3, 0.95, 1.0):
        close(
            record.coverage(mass),
            ((sums < mass * (1 - 1e-6)).sum(-1) + 1).double() if mass < 1 else record.coverage(1.0),
        )
    values, keys = record.topk(3)
    close(values, want.topk(3).values)
    close(want.gather(-1, keys), values)
    assert all(len(set(row.tolist())) == 3 for row in keys.flatten(0, 2))  # three keys, also where fewer are visible


def test_similarity():
    record, want = small()
    js = torch.zeros(2, 4, 4, dtype=f64)
    entropy = lambda p: torch.special.entr(p).sum(-1)  # noqa: E731
    for a in range(4):
        for b in range(4):
            p, q = want[:, a], want[:, b]
            js[:, a, b] = (entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2).mean(-1)
    close(record.similarity(), js)
    apart = Record(torch.tensor([[[[90.0, 0]], [[0, 90.0]]]]), torch.eye(2)[None, None])
    close(apart.similarity()[0, 0, 1], torch.tensor(math.log(2)))


def test_patterns():
    tokens = torch.tensor([5, 6, 7, 5, 6, 7, 5, 8, 5])
    record, want = small(L=9, mask=mh.causal())
    T = 9
    before = (torch.arange(T)[:, None] - torch.arange(T)) > 0
    same = (tokens[:, None] == tokens) & before
    after = torch.zeros(T, T, dtype=torch.bool)
    after[:, 1:] = tokens[:, None] == tokens[:-1]
    after &= before
    for kind, keys in (("previous", torch.ones(T, T).tril(-1).triu(-1) > 0), ("duplicate", same), ("induction", after)):
        has = keys.any(-1)
        expected = (want * keys).sum(-1)[..., has].mean(-1)
        close(record.pattern(kind, None if kind == "previous" else tokens), expected)
    assert record.pattern("duplicate", torch.arange(9)).isnan().all()


def test_an_induction_head_is_found():
    """A head that looks at what came after the last occurrence has nearly all of its weight there."""
    tokens = torch.randint(50, (20,), generator=torch.Generator().manual_seed(0)).repeat(2)
    codes = torch.nn.functional.one_hot(tokens, 50).float()
    k = torch.cat([torch.zeros(1, 50), codes[:-1]])
    record = Record(20 * codes[None, None], k[None, None], mask=mh.causal(), scale=1.0)
    assert record.pattern("induction", tokens).item() > 0.9
    assert record.pattern("previous").item() < 0.2


@pytest.mark.parametrize("size", [1, 2, 4, 7, 100])
def test_pooled(size):
    record, want = small(L=7, S=9, mask=mh.causal())
    n, m = -(-7 // size), -(-9 // size)
    mean, largest = torch.zeros(2, 2, 4, n, m, dtype=f64)
    for i in range(n):
        for j in range(m):
            part = want[..., i * size : (i + 1) * size, j * size : (j + 1) * size]
            mean[..., i, j], largest[..., i, j] = part.sum(-1).mean(-1), part.amax((-1, -2))
    close(record.pooled(size), mean)
    close(record.pooled(size, "max"), largest)


# A part of them -------------------------------------------------------------------------------------------------------


def test_rows_pairs_and_parts():
    record, want = small(mask=mh.causal())
    close(record.row(3), want[..., 3, :])
    close(record.row(-1), want[..., -1, :])
    close(record.weights(), want)
    close(record.weights(2, slice(None, None, 2), [3, 0]), want[:, [3, 0], 2:3, ::2])
    close(record.weights([6, 0, 6], -1), want[..., [6, 0, 6], 8:])
    close(record.weights(slice(5, 1, -2)), want[..., [5, 3], :])
    i, j = [0, 6, 6, 2], [0, 8, 0, 8]
    close(record.pairs(i, j), want[..., i, j])
    close(record.pairs(torch.tensor(i), torch.tensor(j)), want[..., i, j])


def test_no_batch_axes_and_several():
    for batch in ((), (2, 3)):
        q, k = torch.randn(*batch, 4, 5, 8), torch.randn(*batch, 2, 6, 8)
        record, want = Record(q, k), dense(q, k)
        assert record.shape == (*batch, 4, 5, 6)
        close(record.weights(), want)
        close(record.row(2), want[..., 2, :])
        close(record.entropy(), torch.special.entr(want).sum(-1))
        assert record.similarity().shape == (*batch, 4, 4)
        assert record.topk(2)[0].shape == (*batch, 4, 5, 2)


def test_check_proves_that_they_are_the_weights():
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 3)
    out = mh.attention(q, k, v, mh.causal())
    assert Record(q, k, v, mask=mh.causal(), out=out).check() < 1e-6
    assert Record(q, k, v, out=out).check() > 0.01  # without the mask they are others
    v[:, :, 5] = math.nan  # hidden from all but the last query
    out = mh.attention(q[:, :, :5], k, v, mh.lengths(5))
    assert Record(q[:, :, :5], k, v, mask=mh.lengths(5), out=out).check() < 1e-6
    with pytest.raises(ValueError, match="a record with v and out"):
        Record(q, k).check()
    with pytest.raises(ValueError, match="a call without dropout"):
        Record(q[:, :, :5], k, v, out=out, dropout=0.1).check()


def test_several_are_one_pass(monkeypatch):
    walked = []
    monkeypatch.setattr(walk, "_columns", lambda *given, of=walk._columns: walked.append(1) or of(*given))
    by_blocks(monkeypatch)
    record, _ = small()
    record.compute("entropy", "max_logit", "received")
    assert len(walked) == 1
    record.entropy()
    record.received()
    assert len(walked) == 1


def test_nothing_is_of_the_size_of_all_weights():
    q = k = torch.randn(1, 4, 3000, 8)
    with torch.profiler.profile(profile_memory=True) as profile:
        Record(q, k, mask=mh.causal()).compute("entropy", "max_logit", "received")
    most = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < most < 40 * 2**20 < 4 * 4 * 3000**2


def test_it_has_no_gradient_and_minds_no_autocast():
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = Record(q, q).entropy()
    assert not found.requires_grad
    close(found, torch.special.entr(dense(q.detach(), q.detach())).sum(-1))


@pytest.mark.parametrize(
    ("ask", "error", "told"),
    [
        (lambda r: r.row(7), ValueError, "i: expected an index from -7 to 6, got 7"),
        (lambda r: r.row("a"), TypeError, "i: expected an int"),
        (lambda r: r.weights(heads=4), ValueError, "heads: expected an index from -4 to 3"),
        (lambda r: r.weights(max_bytes=100), ValueError, "at most max_bytes=100, got 2,016 bytes.*blocks()"),
        (lambda r: r.pairs([1], [1, 2]), ValueError, "j: expected as many as i, 1"),
        (lambda r: r.topk(10), ValueError, "at most S=9 keys"),
        (lambda r: r.topk(0), ValueError, "at least 1"),
        (lambda r: r.compute("entropie"), ValueError, "one of entropy, max_weight"),
        (lambda r: r.compute(), None, ""),
        (lambda r: r.mass(torch.ones(3) > 0), ValueError, r"bools \(S,\) with S=9"),
        (lambda r: r.distance(torch.ones(3, 2)), ValueError, r"numbers \(L, c\) with L=7"),
        (lambda r: r.coverage(0), ValueError, "above 0, at most 1"),
        (lambda r: r.similarity("cosine"), ValueError, 'kind: expected "js"'),
        (lambda r: r.pattern("next"), ValueError, "one of previous, duplicate, induction"),
        (lambda r: r.pattern("duplicate"), TypeError, "tokens: expected ids"),
        (lambda r: r.pattern("duplicate", torch.arange(7)), ValueError, "Where L and S differ pass a pair"),
        (lambda r: r.pooled(0), ValueError, "size: expected at least 1"),
        (lambda r: r.pooled(3, "sum"), ValueError, '"mean" or "max"'),
        (lambda r: Record(r.q, r.k[..., :2]), ValueError, "k: expected"),
    ],
)
def test_what_is_refused(ask, error, told):
    record, _ = small()
    if error is None:
        assert ask(record) == {}
        return
    with pytest.raises(error, match=told):
        ask(record)
