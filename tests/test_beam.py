"""Beam search: against every sequence there is, greedy search, and itself in other batches and without a cache."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from multihead.models.beam import Hypothesis, beam_search, penalty, translate
from multihead.models.translator import Translator

START, END = 1, 2


class Odds:
    """A step whose logits depend on the sentence and on all that was written, and are kept, so that they repeat."""

    def __init__(self, sentences, vocabulary, seed=0, spread=2.0):
        self.names, self.vocabulary, self.seed, self.spread = list(sentences), vocabulary, seed, spread
        self.sentences = None
        self.calls = []  # how many rows each had

    def of(self, name, tokens):
        draw = random.Random(f"{self.seed} {name} {list(tokens)}")
        return torch.tensor([draw.gauss(0, self.spread) for _ in range(self.vocabulary)], dtype=torch.float64)

    def __call__(self, tokens, rows):
        before = self.names if self.sentences is None else self.sentences
        self.sentences = [before[row] for row in rows.tolist()]
        self.calls.append(len(tokens))
        assert len(tokens) == len(rows)
        written = tokens.tolist()
        return torch.stack([self.of(name, row) for name, row in zip(self.sentences, written, strict=True)])


def search(odds, **options):
    return beam_search(odds, torch.full((len(odds.names),), START), END, **options)


def everything(odds, name, max_length, strength):
    """All finished sequences and all that are cut, the best first, as `beam_search` should rank them."""
    others = [token for token in range(odds.vocabulary) if token != END]
    found = []
    for length in range(1, max_length + 1):
        for written in itertools.product(others, repeat=length - 1):
            for last in [END, *others] if length == max_length else [END]:
                tokens, total = [START], 0.0
                for token in (*written, last):
                    total += float(odds.of(name, tokens).log_softmax(-1)[token])
                    tokens.append(token)
                is_finished = last == END
                kept = tuple(tokens[1:-1] if is_finished else tokens[1:])
                found.append(Hypothesis(kept, total, total / penalty(length, strength), is_finished))
    return sorted(found, key=lambda hypothesis: (not hypothesis.is_finished, -hypothesis.score))


def same(found, wanted):
    assert [h.tokens for h in found] == [h.tokens for h in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.is_finished == other.is_finished
        assert one.log_probability == pytest.approx(other.log_probability, abs=1e-6)
        assert one.score == pytest.approx(other.score, abs=1e-6)


@pytest.mark.parametrize("strength", [0.0, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_with_enough_beams_it_is_exact(seed, strength):
    odds = Odds("ab", vocabulary=4, seed=seed)
    found = search(odds, beams=500, n_best=7, length_penalty=strength, max_length=4)
    assert len(found) == 2
    for name, hypotheses in zip("ab", found, strict=True):
        wanted = everything(odds, name, 4, strength)
        assert sum(h.is_finished for h in wanted) == 1 + 3 + 9 + 27
        same(hypotheses, wanted[:7])


def test_cut_hypotheses_come_after_all_finished_ones():
    odds = Odds("a", vocabulary=3, seed=3)
    (found,) = search(odds, beams=100, n_best=11, length_penalty=1.0, max_length=3)
    wanted = everything(odds, "a", 3, 1.0)
    assert [h.is_finished for h in wanted] == [True] * 7 + [False] * 8
    same(found, wanted[:11])


def test_the_length_penalty_is_that_of_wu():
    assert penalty(1, 0.6) == 1.0  # (5 + 1) / 6
    assert penalty(7, 1.0) == 2.0
    assert penalty(7, 0.5) == pytest.approx(math.sqrt(2))
    assert penalty(100, 0.0) == 1.0
    short, long = (everything(Odds("a", 3, seed=5), "a", 5, strength)[0] for strength in (0.0, 4.0))
    assert len(short.tokens) < len(long.tokens), "this seed is one where it matters"
    for strength, wanted in ((0.0, short), (4.0, long)):
        (found,) = search(Odds("a", 3, seed=5), beams=200, length_penalty=strength, max_length=5)
        assert found[0].tokens == wanted.tokens


@pytest.mark.parametrize("seed", range(8))
def test_one_beam_is_greedy(seed):
    odds = Odds("a", vocabulary=7, seed=seed)
    (found,) = search(odds, beams=1, max_length=9)
    tokens, total = [START], 0.0
    while len(tokens) <= 9 and tokens[-1] != END:
        logs = odds.of("a", tokens).log_softmax(-1)
        total += float(logs.max())
        tokens.append(int(logs.argmax()))
    assert found[0].is_finished == (tokens[-1] == END)
    assert found[0].tokens == tuple(token for token in tokens[1:] if token != END)
    assert found[0].log_probability == pytest.approx(total, abs=1e-6)


def by_hand(odds, name, beams, strength, max_length):
    """The definition, a list at a time: the `beams` best that do not end live on."""
    live, finished = [((START,), 0.0)], []
    for length in range(1, max_length + 1):
        expanded = [
            ((*tokens, token), total + float(log))
            for tokens, total in live
            for token, log in enumerate(odds.of(name, tokens).log_softmax(-1))
        ]
        expanded.sort(key=lambda item: -item[1])
        for tokens, total in expanded[:beams]:
            if tokens[-1] == END:
                finished.append((total / penalty(length, strength), tokens[1:-1]))
        live = [item for item in expanded if item[0][-1] != END][:beams]
        best_live = max(total for _, total in live) / penalty(length, strength)
        if len(finished) >= beams and max(finished)[0] >= best_live:
            break
    return max(finished, default=(0, None))[1]


@pytest.mark.parametrize("beams", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_with_few_beams_it_is_the_definition(seed, beams):
    names = "abcde"
    found = search(Odds(names, 5, seed), beams=beams, max_length=12)
    wanted = [by_hand(Odds(names, 5, seed), name, beams, 0.6, 12) for name in names]
    assert [hypotheses[0].tokens for hypotheses in found] == wanted


def test_unlikely_ends_do_not_end_a_sure_search():
    """A model that is sure: all but one token are noise, the end among the best of the noise at each step."""

    class Sure(Odds):
        def of(self, _, tokens):
            logits = torch.arange(9, dtype=torch.float64) / 10
            logits[END] = 1.0
            logits[3 if len(tokens) < 8 else END] = 12.0
            return logits

    (found,) = search(Sure("a", 9), beams=4, length_penalty=0.6, max_length=30)
    assert found[0].tokens == (3,) * 7
    (found,) = search(Sure("a", 9), beams=4, length_penalty=0.6, max_length=30, n_best=4)
    assert found[0].tokens == (3,) * 7


def test_more_beams_find_what_greedy_search_misses():
    seeds = range(12)
    scores = {
        beams: [search(Odds("a", 5, s), beams=beams, length_penalty=0.0, max_length=6)[0][0] for s in seeds]
        for beams in (1, 8)
    }
    pairs = [(a, b) for a, b in zip(scores[1], scores[8], strict=True) if a.is_finished and b.is_finished]
    assert any(b.score > a.score + 0.1 for a, b in pairs)


def test_a_sentence_does_not_depend_on_its_neighbours():
    names = "abcdefg"
    alone = [search(Odds(name, 6), beams=3, n_best=2, max_length=10)[0] for name in names]
    assert search(Odds(names, 6), beams=3, n_best=2, max_length=10) == alone
    assert search(Odds(names[::-1], 6), beams=3, n_best=2, max_length=10) == alone[::-1]


def test_each_sentence_may_have_a_length_of_its_own():
    names, limits = "abcdefg", [1, 2, 3, 5, 8, 13, 4]
    for strength in (0.0, 3.0):  # the stopping rule looks at the longest length, the more the stronger
        options = {"beams": 3, "n_best": 3, "length_penalty": strength}
        alone = [
            search(Odds(name, 6), max_length=limit, **options)[0] for name, limit in zip(names, limits, strict=True)
        ]
        assert search(Odds(names, 6), max_length=limits, **options) == alone
        assert search(Odds(names, 6), max_length=tuple(limits), **options) == alone
        assert all(len(h.tokens) == limits[i] for i in range(7) for h in alone[i] if not h.is_finished)
        assert any(not h.is_finished for hypotheses in alone for h in hypotheses)


def test_a_strong_penalty_is_refused_where_it_is_no_number():
    odds = Odds("a", 4)
    (found,) = search(odds, length_penalty=185.0, max_length=250)  # 1e301 at the longest
    assert math.isfinite(found[0].score)
    for options in ({"length_penalty": 200.0}, {"length_penalty": 10**400}, {"max_length": 10**400}):
        with pytest.raises(ValueError, match=r"^length_penalty: expected a number whose penalty of max_length="):
            search(odds, **options)


def test_sentences_that_are_done_are_not_computed_any_more():
    odds = Odds("abcdefg", 6, seed=1, spread=1.0)
    search(odds, beams=3, max_length=10)
    assert odds.calls[:2] == [7, 21]
    assert 0 < odds.calls[-1] < 21
    assert all(count % 3 == 0 for count in odds.calls[1:])


def test_what_may_not_be_never_comes():
    class Narrow(Odds):
        def of(self, _, tokens):
            logits = torch.full((5,), -math.inf, dtype=torch.float64)
            logits[3 if len(tokens) < 4 else END] = 0.0
            return logits

    (found,) = search(Narrow("a", 5), beams=4, n_best=4, max_length=10)
    assert [h.tokens for h in found] == [(3, 3, 3)], "there is one sequence only"
    assert found[0].log_probability == 0.0
    (cut,) = search(Narrow("a", 5), beams=4, n_best=4, max_length=2)
    assert [(h.tokens, h.is_finished) for h in cut] == [((3, 3), False)]


def test_nothing_to_search():
    assert beam_search(lambda _, rows: torch.zeros(len(rows), 5), torch.zeros(0, dtype=torch.int64), END) == []


def test_refusals():
    start = torch.tensor([START])

    def step(tokens, rows):
        return torch.zeros(len(rows), 5) + len(tokens) * 0

    for wrong, error, words in (
        ({"beams": 0}, ValueError, "beams: expected at least 1, got 0"),
        ({"beams": 2.0}, TypeError, "beams: expected an int"),
        ({"n_best": 5}, ValueError, "n_best: expected at most beams=4, got 5"),
        ({"max_length": 0}, ValueError, "max_length: expected at least 1"),
        ({"max_length": [3, 3]}, ValueError, "max_length: expected an int, or one for each of B=1 sentences, got 2"),
        ({"max_length": [0]}, ValueError, r"max_length\[0\]: expected at least 1, got 0"),
        ({"max_length": [2.0]}, TypeError, r"max_length\[0\]: expected an int, got 2.0"),
        ({"length_penalty": -1.0}, ValueError, "length_penalty: expected a finite number from 0 on"),
        ({"length_penalty": math.nan}, ValueError, "length_penalty"),
        ({"length_penalty": "1"}, TypeError, "length_penalty"),
        ({"end": -1}, ValueError, "end: expected at least 0"),
        ({"start": torch.zeros(1)}, TypeError, r"start: expected an int64 tensor \(B,\)"),
        ({"start": torch.zeros(1, 1, dtype=torch.int64)}, ValueError, r"start: expected the shape \(B,\)"),
        ({"step": lambda *_: None}, TypeError, r"step: expected a function that gives logits \(R, V\)"),
        ({"step": lambda *_: torch.zeros(2, 5)}, ValueError, r"logits \(R=1, V\) with V > end=2, got a float32 tensor"),
        ({"step": lambda *_: torch.zeros(1, 2)}, ValueError, "V > end=2"),
        ({"step": lambda *_: torch.full((1, 5), math.nan)}, ValueError, "got NaN in them"),
        ({"step": lambda *_: torch.full((1, 5), -math.inf)}, ValueError, "got NaN in them"),
    ):
        options = {"step": step, "start": start, "end": END, "max_length": 3} | wrong
        with pytest.raises(error, match=words):
            beam_search(options.pop("step"), options.pop("start"), options.pop("end"), **options)


# With a translator ----------------------------------------------------------------------------------------------------


def make(**options):
    torch.manual_seed(5)
    model = Translator(11, 7, 12, 2, 3, dropout=0.3, **options).eval()
    for parameter in model.parameters():  # sharper than at the start, so that the hypotheses differ in more than noise
        parameter.data *= 1.7
    return model


def sources(seed=0, lengths=(5, 1, 7, 3)):
    torch.manual_seed(seed)
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return torch.randint(11, keep.shape), keep


def alike(found, wanted):
    """The same hypotheses, but for rounding."""
    for one, other in zip(found, wanted, strict=True):
        assert [h.tokens for h in one] == [h.tokens for h in other]
        for a, b in zip(one, other, strict=True):
            assert a.score == pytest.approx(b.score, abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"position": "rotary"}, {"pre_norm": False, "decoder_layers": 3}], ids=str)
@pytest.mark.parametrize("beams", [1, 4])
def test_a_cache_changes_nothing(options, beams):
    model, (source, keep) = make(**options), sources()
    found = {
        cached: translate(
            model, source, 0, 1, keep=keep, beams=beams, n_best=beams, max_length=12, cached=cached, length_penalty=1.0
        )
        for cached in (True, False)
    }
    alike(found[True], found[False])
    assert len({h.tokens for hypotheses in found[True] for h in hypotheses}) > beams


def test_padding_and_neighbours_change_nothing():
    model, (source, keep) = make(), sources()
    together = translate(model, source, 0, 1, keep=keep, n_best=2, max_length=12)
    alone = [
        translate(model, row[kept][None], 0, 1, n_best=2, max_length=12)[0]
        for row, kept in zip(source, keep, strict=True)
    ]
    alike(together, alone)


def test_translating_is_exact_with_enough_beams():
    torch.manual_seed(1)
    model = Translator(5, 4, 8, 1, 2).eval()
    source = torch.tensor([[3, 1, 4]])

    class Model(Odds):
        def of(self, _, tokens):
            return model(source, torch.tensor([list(tokens)]))[0, -1].detach().double()

    wanted = everything(Model("a", 4), "a", 4, 0.6)
    (found,) = translate(model, source, START, END, beams=300, n_best=5, max_length=4)
    alike([found], [wanted[:5]])


def test_some_tokens_never_come():
    model, (source, keep) = make(), sources()
    free = translate(model, source, 0, 1, keep=keep, max_length=12)
    unwanted = {token for hypotheses in free for token in hypotheses[0].tokens} - {2}
    assert unwanted
    for never in (sorted(unwanted), iter(unwanted)):
        found = translate(model, source, 0, 1, keep=keep, max_length=12, never=never)
        assert not {token for hypotheses in found for token in hypotheses[0].tokens} & unwanted


def test_the_model_stays_as_it_was():
    model, (source, keep) = make(), sources()
    wanted = translate(model, source, 0, 1, keep=keep, max_length=6)
    model.train()
    model.encoder[1].eval()
    alike(translate(model, source, 0, 1, keep=keep, max_length=6), wanted)
    assert model.training
    assert model.decoder[0].cross.training
    assert not model.encoder[1].attn.training


def test_its_length_is_bounded_by_the_sources():
    model = make()
    (found,) = translate(model, torch.tensor([[3, 4]]), 0, 1, beams=1, never=[1])
    assert not found[0].is_finished
    assert len(found[0].tokens) == 2 * 2 + 16


def test_its_length_does_not_depend_on_its_neighbours():
    model, (source, keep) = make(), sources(lengths=(2, 9, 1))
    together = translate(model, source, 0, 1, keep=keep, beams=2, n_best=2, never=[1])
    for row, kept, found in zip(source, keep, together, strict=True):
        assert {len(h.tokens) for h in found} == {2 * int(kept.sum()) + 16}
        alike([found], translate(model, row[kept][None], 0, 1, beams=2, n_best=2, never=[1]))


def test_translate_refuses():
    model, (source, keep) = make(), sources()
    for wrong, error, words in (
        ({"start": 7}, ValueError, "start: expected a token from 0 to 6, got 7"),
        ({"end": 7}, ValueError, "end: expected a token from 0 to 6"),
        ({"never": [-1]}, ValueError, "never: expected a token from 0 to 6"),
        ({"never": ["x"]}, TypeError, "never: expected a token, an int"),
        ({"cached": 1}, TypeError, "cached: expected True or False"),
        ({"beams": 0}, ValueError, "beams"),
        ({"source": source[0]}, ValueError, r"source: expected the shape \(B, S\)"),
        ({"keep": keep[:2]}, ValueError, "keep of source: expected the shape of source"),
    ):
        options = {"source": source, "start": 0, "end": 1, "keep": keep} | wrong
        with pytest.raises(error, match=words):
            translate(model, options.pop("source"), options.pop("start"), options.pop("end"), **options)
