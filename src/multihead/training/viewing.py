"""`multihead view`: where the heads of a run's model look in a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from multihead.errors import bad_value
from multihead.inspection.capturing import Capture, capture
from multihead.inspection.terminal import text_map
from multihead.models.gpt import GPT
from multihead.training.options import check_device, check_range, use_threads
from multihead.training.parallel import Processes
from multihead.training.runs import TOKENIZER, Run
from multihead.training.text_run import KIND
from multihead.training.tokenizers import spell, tokenizer_from

_MOST_SIZE = 200


@dataclass(frozen=True)
class Viewing:
    """A text that a model has read."""

    rec: Capture
    tokens: list[str]  # as they are spelled
    layer: int
    head: int
    size: int

    def told(self) -> str:
        """The heads' summary, and one head's map."""
        name = list(self.rec)[self.layer]
        picture = text_map(self.rec[self.layer], self.head, size=self.size)
        return f"{self.rec.summary()}\n\n{name}, head {self.head}: queries down, keys across\n{picture}"

    def write(self, path: Path) -> None:
        """The report, as HTML. OSError where it can't be written; MissingPackage without matplotlib."""
        self.rec.report(path, tokens=self.tokens, title="".join(self.tokens)[:80])


def prepare_viewing(
    folder: Path, *, prompt: str, layer: int, head: int, size: int, device: str, threads: int | None
) -> Viewing:
    """Check everything, and let the model read the text.

    Args:
        folder: of a run of `multihead train`.
        prompt: the text, at least one token.
        layer, head: whose map is shown.
        size: its most rows and columns.
        device: where the model computes.
        threads: how many of the CPU's cores to use; None for as many as torch chooses.

    Raises:
        ValueError, TypeError: something can't be done; the message names the command line's option.
        ImportError: a package is missing.
    """
    run = Run.open(folder, KIND, "RUN")
    check_device(device, Processes())
    check_range("--size", size, 1, _MOST_SIZE)
    use_threads(threads)
    tokenizer = tokenizer_from(run.path(TOKENIZER))
    tokens = tokenizer.encode(prompt, "--prompt")
    if not tokens:
        raise bad_value("--prompt", "at least one character", "none", "", "Give it a text to look at.")
    model = run.model(GPT, device).eval()
    check_range("--layer", layer, 0, len(model.blocks) - 1)
    check_range("--head", head, 0, model.config["heads"] - 1)
    if model.context is not None and len(tokens) > model.context and model.position == "learned":
        otherwise = "There is no vector for positions beyond."
        raise bad_value("--prompt", f"at most {model.context} tokens", f"{len(tokens)}", otherwise)
    with torch.no_grad(), capture(model) as rec:
        model(torch.tensor([tokens], device=device))
    return Viewing(rec, [spell(tokenizer, [token]) for token in tokens], layer, head, size)
