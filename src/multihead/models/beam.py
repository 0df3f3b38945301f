"""Beam search: the likeliest sequence that can be found by keeping the best few at each step.

`beam_search` knows no model: it asks a function for the next tokens' logits. `translate` is it for a `Translator`,
with the keys and values of what was written kept in a cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value, check_size, describe, is_int, is_number
from multihead.models.translator import Translator, check_tokens
from multihead.options import check_flags

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """A sequence that a search found."""

    tokens: tuple[int, ...]  # without start and end
    log_probability: float  # natural logarithm, of all tokens and the end
    score: float  # what hypotheses are ranked by: the log probability by the length penalty
    is_finished: bool  # whether the end was reached; else it was cut at max_length


def penalty(length: int, strength: float) -> float:
    """The length penalty of Wu et al. 2016: ((5 + length) / 6) ** strength. A log probability is divided by it."""
    return ((5.0 + length) / 6.0) ** strength


@torch.no_grad()
def beam_search(
    step: Step,
    start: Tensor,
    end: int,
    *,
    beams: int = 4,
    length_penalty: float = 0.6,
    max_length: int | Sequence[int] = 256,
    n_best: int = 1,
) -> list[list[Hypothesis]]:
    """Search the best sequences for each sentence of a batch.

    At each step the `beams` likeliest continuations of a sentence's hypotheses are looked at. Those that end are
    finished; the others, filled up to `beams`, live on. A sentence is done when none that lives can still become one of
    the `n_best`, or when `beams` hypotheses are finished and the `n_best` of them are better than what lives is by now
    (Huang et al. 2017; where a model is sure, unlikely ends come first). One beam is greedy search.

    Args:
        step: gives the logits (R, V) of the next token, for R hypotheses with a length in common. It is called with
            their tokens so far (R, L), start included, and with rows (R,): which row of the call before each
            continues. At the first call rows are 0 .. B-1, the sentences. What is -inf never comes next.
        start: (B,) int64, the token that each sentence's hypotheses start with.
        end: the token that finishes a hypothesis.
        beams: how many hypotheses of a sentence live at once.
        length_penalty: from 0 on, the strength of the penalty of Wu et al. 2016. Sums of log probabilities favour
            short sequences; the larger, the less. 0 takes the sums as they are.
        max_length: after so many tokens, the end included, hypotheses are cut; or B of them, one for each sentence.
        n_best: how many hypotheses to give, at most `beams`.

    Returns:
        For each sentence up to `n_best` hypotheses, the best first; cut ones come after all finished ones. A
        sentence's hypotheses do not depend on the others' (but for rounding in `step`).

    Raises:
        ValueError, TypeError: an argument does not fit, or what `step` gives.
    """
    limits = _check_search(start, end, beams, length_penalty, max_length, n_best)
    B, device = start.shape[0], start.device
    found = [_Found(beams, n_best) for _ in range(B)]
    going = list(range(B))  # sentences that are not done, N of them
    tokens, rows = start[:, None], torch.arange(B, device=device)  # (N * W, L): W hypotheses of each sentence
    sums = torch.zeros(B, 1, device=device)  # (N, W) log probabilities
    for length in itertools.count(1):
        if not going:
            break
        logs = _log_probabilities(step(tokens, rows), len(tokens), end)  # (N * W, V)
        N, W, V = len(going), sums.shape[1], logs.shape[1]
        # Twice as many as beams: no more than half of them can end, so enough are left to live on.
        sums, places = (sums[..., None] + logs.view(N, W, V)).flatten(1).topk(min(2 * beams, W * V))  # (N, 2 * beams)
        nexts, rows = places % V, places // V + torch.arange(N, device=device)[:, None] * W
        ends = nexts == end
        for n, rank in ends[:, :beams].nonzero().tolist():
            found[going[n]].add(tokens[rows[n, rank], 1:], sums[n, rank], length, length_penalty, True)

        # Those that do not end, still in order.
        order = ends.to(torch.int8).sort(stable=True).indices[:, : min(beams, W * (V - 1))]
        sums, nexts, rows = (t.gather(1, order) for t in (sums, nexts, rows))
        best = sums[:, 0].tolist() if order.numel() else [-math.inf] * N
        stay = []
        for n, sentence in enumerate(going):
            # How good they can become: at their last token penalties are largest.
            now, later = penalty(length, length_penalty), penalty(limits[sentence], length_penalty)
            if found[sentence].is_done(best[n] / now, best[n] / later):
                continue
            if length < limits[sentence]:
                stay.append(n)
                continue
            for row, token, total in zip(rows[n], nexts[n], sums[n], strict=True):
                written = torch.cat((tokens[row, 1:], token[None]))
                found[sentence].add(written, total, length, length_penalty, False)
        going, sums, nexts, rows = [going[n] for n in stay], sums[stay], nexts[stay].flatten(), rows[stay].flatten()
        tokens = torch.cat((tokens[rows], nexts[:, None]), 1)
    return [hypotheses.best() for hypotheses in found]


def translate(
    model: Translator,
    source: Tensor,
    start: int,
    end: int,
    *,
    keep: Tensor | None = None,
    beams: int = 4,
    length_penalty: float = 0.6,
    max_length: int | Sequence[int] | None = None,
    n_best: int = 1,
    never: Sequence[int] = (),
    cached: bool = True,
) -> list[list[Hypothesis]]:
    """Translate a batch of sentences by `beam_search`, without dropout, whatever mode the model is in.

    Args:
        model: the translator.
        source: (B, S) int64 tokens.
        start, end: the tokens that targets start and end with.
        keep: (B, S) bool, True = real token.
        beams, length_penalty, n_best: as of `beam_search`.
        max_length: as of `beam_search`; by default 2 * S + 16, S of each sentence its real tokens.
        never: tokens that no translation may hold, such as padding.
        cached: whether keys and values are kept from step to step. The translations are the same without, later.

    Returns, raises: as `beam_search`.
    """
    check_flags(cached=cached)
    check_tokens("source", source, keep, model.source_embedding.num_embeddings, "S")
    B, S = source.shape
    if max_length is None:  # not by the padding: what a sentence becomes would depend on its neighbours
        max_length = [2 * n + 16 for n in ([S] * B if keep is None else keep.sum(1).tolist())]
    vocabulary = model.target_embedding.num_embeddings
    hidden = list(never)
    for name, token in (("start", start), ("end", end), *(("never", token) for token in hidden)):
        if not is_int(token):
            raise bad_type(name, "a token, an int", token)
        if not 0 <= token < vocabulary:
            raise bad_value(name, f"a token from 0 to {vocabulary - 1}", token)
    starts = torch.full((B,), start, device=source.device)
    _check_search(starts, end, beams, length_penalty, max_length, n_best)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            memory = model.encode(source, keep)
            step = _cached_step(model, memory, keep) if cached else _plain_step(model, memory, keep)

            def allowed(tokens: Tensor, rows: Tensor) -> Tensor:
                return step(tokens, rows).index_fill(1, torch.tensor(hidden, device=tokens.device), -math.inf)

            return beam_search(
                allowed if hidden else step, starts, end,
                beams=beams, length_penalty=length_penalty, max_length=max_length, n_best=n_best,
            )  # fmt: skip
    finally:
        for module, mode in modes.items():
            module.training = mode


def _cached_step(model: Translator, memory: Tensor, keep: Tensor | None) -> Step:
    cache = model.cache(memory, keep)

    def step(tokens: Tensor, rows: Tensor) -> Tensor:
        cache.reorder(rows)
        return model.decode(tokens[:, -1:], cache=cache)[:, -1]

    return step


def _plain_step(model: Translator, memory: Tensor, keep: Tensor | None) -> Step:
    sentences = torch.arange(memory.shape[0], device=memory.device)  # the memory's row of each hypothesis

    def step(tokens: Tensor, rows: Tensor) -> Tensor:
        nonlocal sentences
        sentences = sentences[rows]
        kept = None if keep is None else keep[sentences]
        return model.decode(tokens, memory[sentences], memory_keep=kept)[:, -1]

    return step


@dataclass
class _Found:
    """The hypotheses of one sentence."""

    beams: int
    n_best: int
    finished: list[Hypothesis] = field(default_factory=list)
    cut: list[Hypothesis] = field(default_factory=list)

    def add(self, tokens: Tensor, total: Tensor, length: int, strength: float, is_finished: bool) -> None:
        log_probability = float(total)
        if log_probability > -math.inf:  # else it may not be, and is here because nothing else was left
            score = log_probability / penalty(length, strength)
            hypothesis = Hypothesis(tuple(tokens.tolist()), log_probability, score, is_finished)
            (self.finished if is_finished else self.cut).append(hypothesis)

    def is_done(self, now: float, later: float) -> bool:
        """Whether to look no further, where what lives has at best the score `now` and can reach `later`."""
        if later == -math.inf or len(self.finished) < self.n_best:
            return later == -math.inf
        return self.best()[-1].score >= (now if len(self.finished) >= self.beams else later)

    def best(self) -> list[Hypothesis]:
        ranked = sorted(self.finished, key=lambda found: -found.score) + sorted(
            self.cut, key=lambda found: -found.score
        )
        return ranked[: self.n_best]


def _log_probabilities(logits: object, R: int, end: int) -> Tensor:
    """log softmax of what a step gave, (R, V), in float32 or better."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise bad_type("step", "a function that gives logits (R, V)", logits)
    if logits.ndim != 2 or logits.shape[0] != R or logits.shape[1] <= end:
        raise bad_value("step", f"a function that gives logits (R={R}, V) with V > end={end}", describe(logits))
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    if logs.isnan().any():
        instead = "Did training diverge, or is every token -inf?"
        raise bad_value("step", "a function that gives logits", "NaN in them", "They can't be ranked.", instead)
    return logs


def _check_search(
    start: object, end: object, beams: object, length_penalty: object, max_length: object, n_best: object
) -> list[int]:
    """The longest length of each sentence, if all arguments fit."""
    if not isinstance(start, Tensor) or start.dtype != torch.int64:
        raise bad_type("start", "an int64 tensor (B,)", start)
    if start.ndim != 1:
        raise bad_value("start", "the shape (B,)", describe(start))
    check_size("end", end, least=0)
    B = start.shape[0]
    if isinstance(max_length, list | tuple):
        if len(max_length) != B:
            raise bad_value("max_length", f"an int, or one for each of B={B} sentences", f"{len(max_length)} of them")
        limits = [check_size(f"max_length[{i}]", limit) for i, limit in enumerate(max_length)]
    else:
        limits = [check_size("max_length", max_length)] * B
    if not is_number(length_penalty):
        raise bad_type("length_penalty", "a number from 0 on", length_penalty)
    if not 0 <= length_penalty < math.inf:
        raise bad_value("length_penalty", "a finite number from 0 on", length_penalty)
    longest = max(limits, default=1)
    try:
        penalty(longest, length_penalty)
    except OverflowError:
        expected = f"a number whose penalty of max_length={longest} tokens is finite"
        otherwise = "Log probabilities are divided by ((5 + length) / 6) ** length_penalty."
        raise bad_value("length_penalty", expected, length_penalty, otherwise, "The usual is 0.6.") from None
    if check_size("n_best", n_best) > check_size("beams", beams):
        raise bad_value("n_best", f"at most beams={beams}", n_best, "No more hypotheses than beams are followed.")
    return limits
