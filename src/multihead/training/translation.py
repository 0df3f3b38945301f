"""Translation of sentences: the task of `multihead train-translator`, and how its result is judged."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from multihead.models.beam import translate
from multihead.models.translator import Translator
from multihead.packages import need
from multihead.training.loop import Diverged
from multihead.training.pairs import Pair, Pairs
from multihead.training.tokenizers import Characters, Tokenizer, spell

PAD, START, END, UNKNOWN = range(4)
_OWN = 4  # tokens before the tokenizer's
_POOL = 16  # batches that are drawn, to take one whose sentences are of similar length
_AT_ONCE = 64  # sentences that are judged or translated at once


class Codec:
    """Sentences to a translator's tokens and back: those of a tokenizer, after four of our own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.size + _OWN
        characters = tokenizer.vocabulary if isinstance(tokenizer, Characters) else ""
        self._place = {character: i + _OWN for i, character in enumerate(characters)}

    def encode(self, text: str, argument: str | None = None) -> list[int]:
        """A sentence's tokens, END last.

        Args:
            text: the sentence.
            argument: whose ValueError says so where a character has no token; None to have UNKNOWN in its place.
        """
        if argument is not None or not isinstance(self.tokenizer, Characters):
            tokens = self.tokenizer.encode(text, argument or "text")
            return [*(token + _OWN for token in tokens), END]
        return [*(self._place.get(character, UNKNOWN) for character in text), END]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, our own left out."""
        return spell(self.tokenizer, [token - _OWN for token in tokens if token >= _OWN])

    def name(self, token: int) -> str:
        """What a token is called in a picture."""
        return "end" if token == END else spell(self.tokenizer, [token - _OWN])


@dataclass(frozen=True)
class Batch:
    """Pairs as the model takes them, padded to the longest."""

    source: Tensor  # (B, S)
    target: Tensor  # (B, L + 1), START first and END last

    @classmethod
    def of(cls, pairs: Sequence[tuple[list[int], list[int]]]) -> Batch:
        """A batch of encoded pairs."""
        sources = [torch.tensor(source) for source, _ in pairs]
        targets = [torch.tensor([START, *target]) for _, target in pairs]
        return cls(*(pad_sequence(side, batch_first=True, padding_value=PAD) for side in (sources, targets)))

    def logits(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """What the model predicts for each target token from those before, (B, L, V), and what is there, (B, L)."""
        device = next(model.parameters()).device
        source, target = self.source.to(device, non_blocking=True), self.target.to(device, non_blocking=True)
        shown, wanted = target[:, :-1], target[:, 1:]
        return model(source, shown, source_keep=source != PAD, target_keep=shown != PAD), wanted


class Translation:
    """To predict each token of a sentence's translation from those before it. A `Task`.

    Args:
        model: predicts.
        pairs: what is learned from, and what is kept back; of this `test` is not looked at.
        codec: makes tokens of them.
        batch: how many pairs a step learns from, by all processes together.
        smoothing: of the labels (Szegedy et al. 2016): the share of a prediction that is spread over all tokens.
    """

    def __init__(self, model: Translator, pairs: Pairs, codec: Codec, *, batch: int, smoothing: float = 0.1) -> None:
        self.model: nn.Module = model
        self.batch, self.smoothing = batch, smoothing
        self.train, self.valid = (
            [(codec.encode(source), codec.encode(target)) for source, target in side]
            for side in (pairs.train, pairs.valid)
        )
        # Where targets are all alike, sources decide how much padding there is.
        self._lengths = torch.tensor([[len(source), len(target)] for source, target in self.train]).sum(1)

    def batches(self, generator: torch.Generator, step: int, parts: int) -> Sequence[Batch]:  # noqa: ARG002
        """Pairs of similar length: a pool is drawn, sorted by length, and one piece of it taken."""
        drawn = torch.randint(len(self.train), (_POOL * self.batch,), generator=generator)
        piece = int(torch.randint(_POOL, (), generator=generator))
        order = self._lengths[drawn].argsort(stable=True)
        chosen = drawn[order][piece * self.batch : (piece + 1) * self.batch]
        return [Batch.of([self.train[i] for i in part.tolist()]) for part in chosen.tensor_split(parts)]

    def count(self, batch: Batch) -> int:
        """Every target token but the first is predicted."""
        return int((batch.target[:, 1:] != PAD).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Nats per token, with smoothed labels."""
        logits, wanted = batch.logits(model)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD, label_smoothing=self.smoothing)

    def validate(self) -> dict[str, float]:
        """Figures on the pairs kept back: "loss" in nats per token, without smoothing, and "exact_match", the share of
        targets that greedy search finds: those of which each token is the likeliest after the ones before it."""
        total, tokens, exact = 0.0, 0, 0
        in_order = sorted(self.valid, key=lambda pair: len(pair[0]) + len(pair[1]))
        for start in range(0, len(in_order), _AT_ONCE):
            logits, wanted = Batch.of(in_order[start : start + _AT_ONCE]).logits(self.model)
            total += F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD, reduction="sum").item()
            tokens += int((wanted != PAD).sum())
            right = (logits.argmax(-1) == wanted) & (wanted != UNKNOWN) | (wanted == PAD)
            exact += int(right.all(1).sum())
        return {"loss": total / tokens, "exact_match": exact / len(in_order)}


def translate_texts(
    model: Translator, sources: Sequence[list[int]], *, beams: int, length_penalty: float, longest: int
) -> list[list[int]]:
    """The best translation that is found of each sentence, without END.

    Args:
        model: of a run.
        sources: encoded by its `Codec`.
        beams, length_penalty: as of `beam_search`.
        longest: the length of the longest target that was learned: translations are cut where they are far longer, and
            longer than twice their own source.

    Raises:
        Diverged: what the model predicts is NaN.
    """
    device = next(model.parameters()).device
    found: list[list[int]] = [[]] * len(sources)
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for start in range(0, len(order), _AT_ONCE):
        rows = order[start : start + _AT_ONCE]
        source = pad_sequence([torch.tensor(sources[i]) for i in rows], batch_first=True, padding_value=PAD).to(device)
        most = [max(longest + longest // 4, 2 * len(sources[i])) + 16 for i in rows]
        try:
            ranked = translate(
                model, source, START, END, keep=source != PAD, beams=beams, length_penalty=length_penalty,
                max_length=most, never=(PAD, START, UNKNOWN),
            )  # fmt: skip
        except ValueError as error:  # all else was checked
            raise Diverged("what the model predicts is NaN") from error
        for i, hypotheses in zip(rows, ranked, strict=True):
            found[i] = list(hypotheses[0].tokens)
    return found


# Judging --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quality:
    """How translations compare with those wanted."""

    pairs: int
    exact: int  # how many are the same, character for character
    bleu: float  # Papineni et al. 2002, from 0 to 100
    chrf: float  # Popovic 2015, from 0 to 100
    words: str  # how sacrebleu tells words apart: BLEU depends on it


def judge(translations: Sequence[str], pairs: Sequence[Pair]) -> Quality:
    """Compare translations with the targets of pairs, in order, by sacrebleu's figures.

    Raises:
        MissingPackage: there is no sacrebleu here.
    """
    metrics = need("sacrebleu.metrics", "cli", "BLEU and chrF")
    wanted = [target for _, target in pairs]
    words = _word_rule(wanted)
    bleu = metrics.BLEU(tokenize=words).corpus_score(list(translations), [wanted])
    chrf = metrics.CHRF().corpus_score(list(translations), [wanted])
    exact = sum(found == target for found, target in zip(translations, wanted, strict=True))
    return Quality(len(wanted), exact, bleu.score, chrf.score, words)


def _word_rule(texts: Sequence[str]) -> str:
    """sacrebleu's rule for where words end: Chinese has no spaces between them, nor has Japanese."""
    letters = [unicodedata.name(letter, "") for text in texts[:1000] for letter in text if letter.isalpha()]
    ideographs = sum(name.startswith("CJK") for name in letters)
    kana = sum(name.startswith(("HIRAGANA", "KATAKANA")) for name in letters)
    if 2 * (ideographs + kana) < len(letters) or not letters:
        return "13a"
    return "char" if kana else "zh"
