"""`multihead translate`: sentences translated by a run's model, and a picture of what it looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from multihead.errors import bad_value, check_size, is_int
from multihead.models.translator import Translator
from multihead.training.alignment import check_picture, draw_alignment
from multihead.training.options import check_device, check_range, check_real, use_threads
from multihead.training.parallel import Processes
from multihead.training.runs import TOKENIZER, Run
from multihead.training.tokenizers import tokenizer_from
from multihead.training.translation import END, START, Codec, translate_texts
from multihead.training.translation_run import KIND, LONGEST

_MOST_BEAMS = 256
_MOST_PENALTY = 20.0  # of the length: its power of any length that there is room for is finite


@dataclass(frozen=True)
class Translating:
    """Sentences that can be translated: everything checked, the model read."""

    model: Translator
    codec: Codec
    sources: list[list[int]]
    beams: int
    length_penalty: float
    longest: int
    picture: Path | None

    def translations(self) -> list[list[int]]:
        """The tokens of each translation. Diverged if what the model predicts is NaN."""
        options = {"beams": self.beams, "longest": self.longest, "length_penalty": self.length_penalty}
        return translate_texts(self.model, self.sources, **options)  # type: ignore[arg-type]

    def text(self, translation: Sequence[int]) -> str:
        """A translation as it is read."""
        return self.codec.decode(translation)

    def draw(self, translation: Sequence[int]) -> str:
        """Draw the only sentence and its translation. Returns a line on what could not be shown, or ""."""
        assert self.picture is not None
        (source,) = self.sources
        names = ([self.codec.name(token) for token in tokens] for tokens in (source, [*translation, END]))
        return draw_alignment(self.picture, self.alignment(source, translation), *names)

    @torch.no_grad()
    def alignment(self, source: Sequence[int], translation: Sequence[int]) -> Tensor:
        """How much each token of a translation, its end included, was predicted from each of the source: (L, S), rows
        sum to 1. The mean over all heads and blocks of the decoder."""
        device = next(self.model.parameters()).device
        tokens = (torch.tensor([row], device=device) for row in (source, [START, *translation]))
        weights = self.model.eval().cross_weights(*tokens)
        return torch.stack(weights).mean((0, 1, 2)).cpu()  # of (blocks, B=1, H, L, S)


def read_sentences(data: bytes) -> list[str]:
    """The lines of standard input. ValueError, with the line's number, if they are not UTF-8."""
    try:
        text = data.decode().removeprefix("\ufeff").rstrip("\r\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        instead = "Save it as UTF-8 first."
        raise bad_value("TEXT", "lines of UTF-8", f"line {line}, which is not", "", instead) from None
    return text.split("\n") if text else []  # no splitlines: it would break at rarer signs too


def prepare_translating(
    folder: Path,
    texts: Sequence[str],
    *,
    beams: int,
    length_penalty: float,
    picture: Path | None,
    device: str,
    threads: int | None,
) -> Translating:
    """Check everything and read the model, before anything is translated.

    Args:
        folder: of a run of `multihead train-translator`.
        texts: sentences, at least one; just one with a picture.
        beams, length_penalty: as of `multihead.models.beam.beam_search`.
        picture: a PNG file to draw the alignment to.
        device: where the model computes.
        threads: how many of the CPU's cores to use; None for as many as torch chooses.

    Raises:
        ValueError, TypeError: something can't be done; the message names the command line's option.
        ImportError: a package is missing.
    """
    run = Run.open(folder, KIND, "RUN")
    if not texts:
        raise bad_value("TEXT", "at least one sentence", "none")
    check_range("--beams", beams, 1, _MOST_BEAMS)
    check_real("--length-penalty", length_penalty, most=_MOST_PENALTY)
    check_device(device, Processes())
    use_threads(threads)
    if picture is not None:
        if len(texts) != 1:
            raise bad_value("--attention", "a single sentence", len(texts), "The picture is of one.")
        check_picture("--attention", picture)
    codec = Codec(tokenizer_from(run.path(TOKENIZER)))
    settings, longest = run.config.get("settings"), run.config.get(LONGEST)
    most = settings.get("longest") if isinstance(settings, dict) else None
    if not is_int(longest) or not is_int(most):
        raise bad_value("RUN", f"a run whose config.json has {LONGEST}", repr(str(folder)), "It is damaged.")
    numbered = ((f"TEXT {i}" if len(texts) > 1 else "TEXT", text) for i, text in enumerate(texts, 1))
    sources = [_encoded(argument, text, codec, most) for argument, text in numbered]
    model = run.model(Translator, device)
    if model.config["source_vocabulary"] != codec.size:
        got = f"one of {model.config['source_vocabulary']} and one of {codec.size}"
        raise bad_value("RUN", "a model and a tokenizer of one vocabulary", got, "They are of different runs.")
    return Translating(model, codec, sources, beams, length_penalty, check_size(LONGEST, longest), picture)


def _encoded(argument: str, text: str, codec: Codec, most: int) -> list[int]:
    text = text.strip()
    if not text:
        raise bad_value(argument, "a sentence", "a blank one", "There is nothing to translate.")
    source = codec.encode(text, argument)
    length = len(source) - 1  # without the end
    if length > most:
        otherwise = "It has learned no longer ones."
        expected = f"at most {most} {codec.tokenizer.unit}, the run's --longest"
        raise bad_value(argument, expected, length, otherwise, "Cut it into sentences.")
    return source
