"""`multihead train`: a run that learns a text, prepared and carried out.

`prepare` reads and checks everything and writes nothing; `carry_out` makes the folder and trains.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from multihead.errors import bad_type, bad_value, check_probability, check_size, is_number
from multihead.models.gpt import GPT
from multihead.training.language import LanguageModelling
from multihead.training.options import check_batch, check_choice, check_model_sizes, check_range
from multihead.training.plan import Start, start
from multihead.training.plan import carry_out as carry_out_any
from multihead.training.runs import TOKENIZER
from multihead.training.texts import read_texts, split
from multihead.training.tokenizers import BytePairs, Characters, Tokenizer, tokenizer_from

KIND = "gpt"

_MOST_CONTEXT = 1 << 20
_MOST_VOCABULARY = 1 << 18


@dataclass(frozen=True)
class Plan:
    """A run that can be carried out: everything checked, the text read, the model made."""

    start: Start
    task: LanguageModelling
    tokenizer: Tokenizer
    text_sha256: str


def prepare(
    settings: Mapping[str, Any], *, given: Collection[str] = (), out: Path | None, resume: bool, overwrite: bool
) -> Plan:
    """Check everything, read the text and make the model, before anything is written.

    Args:
        settings: the options of `multihead train` by name, all of them: those of `Options`, and text (a list of paths),
            chars, vocabulary, valid_share, layers, heads, kv_heads, width, context, dropout, position, mlp, batch.
        given, out, resume, overwrite: as of `multihead.training.plan.start`.

    Raises:
        ValueError, TypeError: something can't be done; the message names the command line's option.
        ImportError: a package is missing.
    """
    settings = {**settings, "text": [str(Path(path).absolute()) for path in settings["text"]]}
    begun = start(KIND, settings, given=given, out=out, resume=resume, overwrite=overwrite)
    settings = begun.settings
    if settings["chars"] and "vocabulary" in given:
        otherwise = "There a token is a character."
        raise bad_value("--vocabulary", "none with --chars", settings["vocabulary"], otherwise, "Leave it out.")
    _check_sizes(settings, begun.options.accumulate * begun.processes.count)

    text = read_texts([Path(path) for path in settings["text"]])
    if len(text) < 2:
        raise bad_value("--text", "at least 2 characters", len(text), "One part is learned, another kept back.")
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    begun.check_same("--text", "text_sha256", fingerprint)
    learned, kept_back = split(text, settings["valid_share"])
    if begun.run is not None:
        tokenizer = tokenizer_from(begun.run.path(TOKENIZER))
    else:
        tokenizer = Characters.of(text) if settings["chars"] else BytePairs.of(learned, settings["vocabulary"])
    train, valid = (torch.tensor(tokenizer.encode(part, "--text")) for part in (learned, kept_back))
    _check_lengths(train, valid, settings, tokenizer.unit, len(text))

    model = _make_model(settings, tokenizer.size, begun.options.seed)
    if begun.checkpoint is not None:
        begun.checkpoint.check(model)
    sizes = {"context": settings["context"], "batch": settings["batch"]}
    task = LanguageModelling(model, train, valid, valid_bytes=len(kept_back.encode()), **sizes)
    return Plan(begun, task, tokenizer, fingerprint)


def carry_out(plan: Plan, console: Console) -> int:
    """Train as planned. Returns the exit code; for errors see `multihead.training.plan.carry_out`."""
    task, unit, steps = plan.task, plan.tokenizer.unit, plan.start.options.steps
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    times = steps * task.batch * task.context / len(task.train)
    about = (
        f"{len(task.train):,} {unit} to learn from, {len(task.valid):,} kept back to judge by.",
        f"{parameters:,} parameters; {plan.tokenizer.size:,} different {unit}.",
        f"{steps:,} steps of {task.batch} x {task.context} {unit}: {times:.1f} times the text.",
    )
    return carry_out_any(
        plan.start,
        task,
        console,
        config={"model": task.model.config, "text_sha256": plan.text_sha256},
        files={TOKENIZER: plan.tokenizer.to_json()},
        about=about,
        command="multihead train",
        then=lambda folder: f"Let it write: multihead generate {folder} --prompt ...",
    )


def _check_sizes(settings: Mapping[str, Any], parts: int) -> None:
    check_model_sizes(width=settings["width"], layers=settings["layers"], heads=settings["heads"])
    heads, kv_heads, share = settings["heads"], settings["kv_heads"], settings["valid_share"]
    if kv_heads is not None and heads % check_size("--kv-heads", kv_heads):
        otherwise = "Query heads could not be shared evenly among the key/value heads."
        raise bad_value("--kv-heads", f"a divisor of --heads = {heads}", kv_heads, otherwise)
    check_range("--context", settings["context"], 1, _MOST_CONTEXT)
    if not settings["chars"]:
        check_range("--vocabulary", settings["vocabulary"], 256, _MOST_VOCABULARY)
    check_choice("--position", settings["position"], ("rotary", "learned"))
    check_choice("--mlp", settings["mlp"], ("gelu", "swiglu"))
    check_probability("--dropout", settings["dropout"])
    if not is_number(share):
        raise bad_type("--valid-share", "a number between 0 and 1", share)
    if not 0 < share < 1:
        raise bad_value("--valid-share", "a number between 0 and 1", share, "", "0.1 keeps a tenth back.")
    check_batch(settings["batch"], parts)


def _check_lengths(train: Tensor, valid: Tensor, settings: Mapping[str, Any], unit: str, characters: int) -> None:
    context, total = settings["context"], len(train) + len(valid)
    if len(train) > context and len(valid) > 1:
        return
    share = settings["valid_share"]
    least = max(math.ceil((context + 1) / (1 - share)), math.ceil(2 / share)) + 1
    per = characters / max(1, total)
    about = "" if unit == "characters" else f", about {math.ceil(least * per):,} characters,"
    expected = f"at least {least:,} {unit}{about} for --context {context}"
    got = f"{total:,}" if unit == "characters" else f"{total:,} ({characters:,} characters)"
    otherwise = f"The part to learn from has to hold {context} and the next one, and the rest is kept back."
    raise bad_value("--text", expected, got, otherwise, "Take a longer text or a smaller --context.")


def _make_model(settings: Mapping[str, Any], vocabulary: int, seed: int) -> GPT:
    names = ("width", "layers", "heads", "kv_heads", "context", "dropout", "position", "mlp")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return GPT(vocabulary, **{name: settings[name] for name in names})
        except RuntimeError as error:  # what torch raises where there is not so much memory
            got = f"one that does not fit into memory ({str(error).splitlines()[0]})"
            raise bad_value("--width, --layers, --vocabulary", "a model that fits", got) from None
