"""The native pass for statistics: it gives what the walk over blocks gives, which is held to the definition."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
import native_cases
from multihead import Record
from multihead.inspection import statistics
from multihead.kernels import library, native
from test_inspection import by_blocks, dense, small

pytestmark = pytest.mark.skipif(not library.available(), reason=str(library.why_not()))

NAMES = list(statistics.BY_NAME)
S = 700
CALLS = {
    "plain": {},
    "causal": {"mask": mh.causal()},
    "window": {"mask": mh.window(100) | mh.prefix(3)},
    "documents": {"mask": mh.documents(torch.arange(S) // 90), "sinks": torch.linspace(-2, 30, 4)},
    "bias": {"softcap": 5.0, "bias": torch.linspace(-3, 3, S).repeat(4, S, 1)},
    "alibi": {"bias": mh.ALiBi(4), "scale": 3.0},
    "blind": {"mask": mh.lengths([0, S]), "sinks": torch.zeros(4)},
}


def both(monkeypatch, name, L):
    """The statistics of a call, by the native pass and by blocks."""
    options = dict(CALLS[name])
    if isinstance(options.get("bias"), torch.Tensor):
        options["bias"] = options["bias"][:, -L:]
    generator = torch.Generator().manual_seed(L)
    q, k = (torch.randn(2, n, length, 24, generator=generator) for n, length in ((4, L), (2, S)))
    found = Record(q, k, **options).compute(*NAMES)
    with monkeypatch.context() as patch:
        by_blocks(patch)
        return found, Record(q, k, **options).compute(*NAMES)


@pytest.mark.parametrize("L", [S, 100, 3])
@pytest.mark.parametrize("name", CALLS)
def test_it_gives_what_the_blocks_give(name, L, monkeypatch):
    found, want = both(monkeypatch, name, L)
    for of in NAMES:
        torch.testing.assert_close(
            found[of], want[of], rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m, of=of: f"{of}: {m}"
        )


IN_ANOTHER_PROCESS = """
import torch, pytest, test_native_statistics as t
from multihead.kernels import library
torch.set_num_threads(1)
for name in t.CALLS:
    t.test_it_gives_what_the_blocks_give(name, 100, pytest.MonkeyPatch())
print(library.isa())
"""


@pytest.mark.parametrize("isa", [isa for isa in library.isas() if isa != library.isa()])
def test_every_instruction_set(isa):
    """What is chosen once for a process is told to others."""
    native_cases.run_with(isa, IN_ANOTHER_PROCESS)


def test_what_is_not_asked_for_is_not_made(monkeypatch):
    wanted = []
    op = torch.ops.multihead.statistics.default
    monkeypatch.setattr(
        torch.ops.multihead.statistics, "default", lambda *given: wanted.append(given[-1]) or op(*given)
    )
    small()[0].compute("max_logit", "max_weight")
    assert not wanted
    small()[0].compute("entropy", "seen_by")
    assert wanted == [1 | 8]


def test_a_bias_that_would_be_a_table_goes_by_blocks(monkeypatch):
    monkeypatch.setattr(native, "statistics", lambda *_: pytest.fail("it makes an L x S table"))

    class Slopes(mh.Position):
        biases = True

        def bias(self, q_positions, k_positions):
            return -(q_positions[:, None] - k_positions).abs().expand(4, -1, -1).float()

    small(bias=Slopes())[0].compute("entropy")
    with pytest.raises(pytest.fail.Exception):
        small(bias=mh.ALiBi(4))[0].compute("entropy")


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 300.0), (torch.bfloat16, 1.0), (torch.float16, 1.0)], ids=str
)
def test_large_scores_and_half_precision(dtype, factor):
    q, k = (torch.randn(1, 2, 90, 16) * factor).to(dtype), torch.randn(1, 2, 90, 16).to(dtype)
    record, want = Record(q, k, mask=mh.causal()), dense(q, k, mh.causal())
    # A score of some thousands has an error of some 1e-4 in float32.
    torch.testing.assert_close(record.entropy().double(), torch.special.entr(want).sum(-1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(record.received().double(), want.sum(-2), rtol=1e-3, atol=1e-3)


def test_what_hidden_keys_hold_stays_out():
    q, k = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    keep = torch.arange(40) < 30
    names = ("entropy", "received", "seen_by", "max_logit")
    want = Record(q, k, mask=mh.padding(keep[None])).compute(*names)
    for value in (torch.nan, torch.inf):
        k[:, :, 30:] = value
        found = Record(q, k, mask=mh.padding(keep[None])).compute(*names)
        for name in want:
            assert torch.equal(found[name], want[name]), (value, name)


def test_nan_that_is_seen_is_told():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    k[0, 1, 3] = torch.nan
    found = Record(q, k, mask=mh.causal()).compute("entropy", "received")
    assert found["entropy"].isnan().tolist() == [[[False] * 5, [False] * 3 + [True] * 2]]
    assert found["received"].isnan().any(-1).tolist() == [[False, True]]


def test_the_same_bits_for_any_number_of_threads():
    q, k = torch.randn(2, 1, 3, 900, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(Record(q, k, mask=mh.window(300)).compute(*NAMES))
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in NAMES)


def test_no_heads_and_no_tokens():
    for shapes in (((0, 2, 3, 4), (0, 2, 5, 4)), ((1, 2, 0, 4), (1, 2, 5, 4)), ((1, 2, 3, 4), (1, 2, 0, 4))):
        q, k = map(torch.zeros, shapes)
        found = Record(q, k).compute(*NAMES)
        assert found["entropy"].shape == (*shapes[0][:3],)
        assert found["received"].shape == (*shapes[1][:3],)
        assert bool((found["received"] == 0).all())
        assert bool(found["entropy"].isnan().all())
