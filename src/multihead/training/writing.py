"""`multihead generate`: a run's model writes on after a prompt, shown as it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from multihead.errors import bad_value, check_size
from multihead.models.generation import stream
from multihead.models.gpt import GPT
from multihead.models.stops import StopStrings
from multihead.training.loop import Diverged
from multihead.training.options import check_device, option, use_threads
from multihead.training.parallel import Processes
from multihead.training.runs import TOKENIZER, Run
from multihead.training.text_run import KIND
from multihead.training.tokenizers import Characters, Speller, Tokenizer, tokenizer_from


@dataclass(frozen=True)
class Writing:
    """A text that can be written: everything checked, the model read."""

    prompt: str
    tokenizer: Tokenizer
    tokens: Iterator[torch.Tensor]  # of each step, (1,)
    stop: StopStrings

    def pieces(self) -> Iterator[str]:
        """The text after the prompt, as it is written: whole characters, and nothing of a stop string.

        Raises:
            Diverged: what the model predicts is NaN or infinite.
        """
        speller = Speller(self.tokenizer)
        try:
            for token in self.tokens:
                yield self.stop.feed(speller.feed(int(token)))
                if self.stop.met:
                    return
        except ValueError as error:  # all else was checked
            raise Diverged("what the model predicts is NaN or infinite") from error
        yield self.stop.feed(speller.end())
        yield self.stop.finish()


def prepare_writing(
    folder: Path,
    *,
    prompt: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float,
    stop: Sequence[str],
    seed: int | None,
    device: str,
    threads: int | None,
) -> Writing:
    """Check everything and read the model, before anything is written.

    Args:
        folder: of a run of `multihead train`.
        prompt: what the text starts with, at least one character; None for a new line, or where the model knows none,
            the first character that it knows.
        max_new_tokens: how many tokens to write, unless a stop string comes.
        temperature, top_k, top_p, min_p, repetition_penalty, seed: as of `multihead.models.generation.generate`.
        stop: the text ends before any of these.
        device: where the model computes.
        threads: how many of the CPU's cores to use; None for as many as torch chooses.

    Raises:
        ValueError, TypeError: something can't be done; the message names the command line's option.
        ImportError: a package is missing.
    """
    run = Run.open(folder, KIND, "RUN")
    check_size("--max-new-tokens", max_new_tokens)
    check_device(device, Processes())
    use_threads(threads)
    if prompt == "":
        raise bad_value("--prompt", "at least one character", "none", "", "Leave it out to start with a new line.")
    if "" in stop:
        raise bad_value("--stop", "at least one character", "none", "It would stop before the first.")
    tokenizer = tokenizer_from(run.path(TOKENIZER))
    if prompt is None:
        known = tokenizer.vocabulary if isinstance(tokenizer, Characters) else "\n"
        prompt = "\n" if "\n" in known else known[0]
    tokens = torch.tensor(tokenizer.encode(prompt, "--prompt"))
    model = run.model(GPT, device)
    if model.vocabulary != tokenizer.size:
        got = f"one of {model.vocabulary} and one of {tokenizer.size}"
        raise bad_value("RUN", "a model and a tokenizer of one vocabulary", got, "They are of different runs.")
    try:
        steps = stream(
            model,
            [tokens],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            context=model.context,
        )
    except (TypeError, ValueError) as error:  # named after its argument: the option's name, but for the form
        name, _, rest = str(error).partition(":")
        raise type(error)(f"{option(name)}:{rest}") from None
    return Writing(prompt, tokenizer, steps, StopStrings(list(stop)))
