"""`multihead train-translator`: a run that learns to translate, prepared and carried out.

`prepare` reads and checks everything and writes nothing; `carry_out` makes the folder, trains and judges.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from multihead.errors import bad_value, check_probability
from multihead.models import saving
from multihead.models.translator import POSITIONS, Translator
from multihead.packages import need
from multihead.training.loop import Diverged
from multihead.training.options import check_batch, check_choice, check_model_sizes, check_range
from multihead.training.pairs import Pair, Pairs, made_pairs, names, read_pairs, split_pairs
from multihead.training.plan import Start, start
from multihead.training.plan import carry_out as carry_out_any
from multihead.training.progress import say
from multihead.training.runs import MODEL, TOKENIZER
from multihead.training.session import DIVERGED
from multihead.training.tokenizers import BytePairs, Characters, Tokenizer, tokenizer_from
from multihead.training.translation import UNKNOWN, Codec, Translation, judge, translate_texts

KIND = "translator"
LONGEST = "longest_target"  # in config.json

_TO = "zh"
_VOCABULARY = 4000
_DROPOUT = 0.1
_MOST_VOCABULARY = 1 << 18
_MOST_LENGTH = 1 << 16
_SHOWN = 3  # translations


@dataclass(frozen=True)
class Plan:
    """A run that can be carried out: everything checked, the pairs read, the model made."""

    start: Start
    task: Translation
    codec: Codec
    pairs: Pairs
    left_out: int  # pairs that are too long
    pairs_sha256: str

    @property
    def is_made(self) -> bool:
        """Whether the pairs are made here, and not read from a file."""
        return self.start.settings["pairs"] is None


def prepare(
    settings: Mapping[str, Any], *, given: Collection[str] = (), out: Path | None, resume: bool, overwrite: bool
) -> Plan:
    """Check everything, get the pairs and make the model, before anything is written.

    Args:
        settings: the options of `multihead train-translator` by name, all of them: those of `Options`, and pairs (a
            path or None), to, vocabulary, chars, longest, layers, width, heads, dropout, position, post_norm,
            smoothing, batch.
        given, out, resume, overwrite: as of `multihead.training.plan.start`.

    Raises:
        ValueError, TypeError: something can't be done; the message names the command line's option.
        ImportError: a package is missing.
    """
    need("sacrebleu", "cli", "judging translations")
    path = settings["pairs"]
    settings = {**settings, "pairs": None if path is None else str(Path(path).absolute())}
    begun = start(KIND, settings, given=given, out=out, resume=resume, overwrite=overwrite, finished=True)
    settings = begun.settings
    _check(settings, begun.options.accumulate * begun.processes.count)
    pairs = _get_pairs(settings, begun.options.seed)
    fingerprint = hashlib.sha256(json.dumps([pairs.train, pairs.valid, pairs.test]).encode()).hexdigest()
    begun.check_same("--pairs" if settings["pairs"] else "--to", "pairs_sha256", fingerprint)
    tokenizer = tokenizer_from(begun.run.path(TOKENIZER)) if begun.run is not None else _learned(settings, pairs)
    codec = Codec(tokenizer)
    kept = Pairs(*(_short_enough(side, codec, settings["longest"]) for side in (pairs.train, pairs.valid, pairs.test)))
    before, after = (sum(map(len, (of.train, of.valid, of.test))) for of in (pairs, kept))
    if not (kept.train and kept.valid and kept.test):
        expected = f"pairs of at most {settings['longest']} {tokenizer.unit} on each side"
        raise bad_value("--longest", expected, "none", "", "Pass a larger one.")

    model = _make_model(settings, codec.size, begun.options.seed)
    if begun.checkpoint is not None:
        begun.checkpoint.check(model)
    task = Translation(model, kept, codec, batch=settings["batch"], smoothing=settings["smoothing"])
    return Plan(begun, task, codec, kept, before - after, fingerprint)


def _check(settings: Mapping[str, Any], parts: int) -> None:
    made = settings["pairs"] is None
    if settings["to"] is not None and not made:
        raise bad_value("--to", "none with --pairs", settings["to"], "The file says what is learned.", "Leave one out.")
    if settings["vocabulary"] is not None:
        if made or settings["chars"]:
            why = "--chars" if settings["chars"] else "dates and names"
            otherwise = "There a token is a character."
            raise bad_value("--vocabulary", f"none with {why}", settings["vocabulary"], otherwise, "Leave it out.")
        check_range("--vocabulary", settings["vocabulary"], 256, _MOST_VOCABULARY)
    check_range("--longest", settings["longest"], 1, _MOST_LENGTH)
    check_model_sizes(width=settings["width"], layers=settings["layers"], heads=settings["heads"])
    check_choice("--position", settings["position"], POSITIONS)
    if settings["dropout"] is not None:
        check_probability("--dropout", settings["dropout"])
    if check_probability("--smoothing", settings["smoothing"]) == 1:
        raise bad_value("--smoothing", "a number below 1", 1, "Nothing would be left of the right token.")
    check_batch(settings["batch"], parts)


def _get_pairs(settings: Mapping[str, Any], seed: int) -> Pairs:
    if settings["pairs"] is None:
        return made_pairs(settings["to"] or _TO, seed=seed)
    return split_pairs(read_pairs(Path(settings["pairs"])), seed=seed)


def _learned(settings: Mapping[str, Any], pairs: Pairs) -> Tokenizer:
    """One vocabulary for both languages: what they share, digits above all, then is the same from the start."""
    text = "\n".join(side for pair in pairs.train for side in pair)
    if settings["pairs"] is None or settings["chars"]:
        return Characters.of(text)
    return BytePairs.of(text, settings["vocabulary"] or _VOCABULARY)


def _short_enough(pairs: list[Pair], codec: Codec, longest: int) -> list[Pair]:
    return [pair for pair in pairs if max(len(codec.encode(side)) - 1 for side in pair) <= longest]  # without the end


def _make_model(settings: Mapping[str, Any], vocabulary: int, seed: int) -> Translator:
    names = ("width", "layers", "heads", "position")
    dropout = settings["dropout"]
    if dropout is None:  # dates are made as many as are needed, so there is nothing to learn by heart
        dropout = 0.0 if settings["pairs"] is None else _DROPOUT
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return Translator(
                vocabulary,
                vocabulary,
                shared_embeddings=True,
                dropout=dropout,
                pre_norm=not settings["post_norm"],
                **{name: settings[name] for name in names},
            )
        except RuntimeError as error:  # what torch raises where there is not so much memory
            got = f"one that does not fit into memory ({str(error).splitlines()[0]})"
            raise bad_value("--width, --layers, --vocabulary", "a model that fits", got) from None


# Carried out ----------------------------------------------------------------------------------------------------------


def carry_out(plan: Plan, console: Console) -> int:
    """Train as planned, unless all of it is done, and judge the model by the pairs of `test`.

    Returns:
        The exit code; 1 also for a model that gives no numbers for them.

    Raises:
        OSError, UnequalProcesses: as `multihead.training.plan.carry_out`.
    """
    task, settings, steps = plan.task, plan.start.settings, plan.start.options.steps
    unit = plan.codec.tokenizer.unit
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    kept_back = f"{len(plan.pairs.valid):,} kept back to watch by, {len(plan.pairs.test):,} to judge by"
    about = [f"{len(plan.pairs.train):,} pairs to learn from, {kept_back}."]
    if plan.is_made:
        about.append("They are dates and names; the dates kept back are of years that are not learned.")
    if plan.left_out:
        about.append(f"{plan.left_out:,} pairs with more than {settings['longest']} {unit} on a side are left out.")
    times = steps * task.batch / len(plan.pairs.train)
    about += [
        f"{parameters:,} parameters; {plan.codec.tokenizer.size:,} different {unit}.",
        f"{steps:,} steps of {task.batch} pairs: {times:.1f} times all of them.",
    ]
    longest = max(len(target) for _, target in task.train)
    example = shlex.quote(_example(plan))
    code = 0
    if not plan.start.finished:
        code = carry_out_any(
            plan.start,
            task,
            console,
            config={"model": task.model.config, "pairs_sha256": plan.pairs_sha256, LONGEST: longest},
            files={TOKENIZER: plan.codec.tokenizer.to_json()},
            about=about,
            command="multihead train-translator",
            then=lambda folder: f"Let it translate: multihead translate {folder} {example}",
        )
    if code == 0 and plan.start.processes.first:
        try:
            _judge(plan, longest, console)
        except Diverged as error:
            say(console, f"\nIt can't be judged: {error}.")
            return DIVERGED
    return code


def _example(plan: Plan) -> str:
    """A sentence that `multihead translate` takes: not too long, of known characters, and no option."""
    tried = [("March 5, 1987", "")] if plan.is_made else []
    tried = [*_short_enough(tried, plan.codec, plan.start.settings["longest"]), *plan.pairs.test, *plan.pairs.train]
    fit = (source for source, _ in tried if not source.startswith("-") and UNKNOWN not in plan.codec.encode(source))
    return next(fit, plan.pairs.train[0][0])


def _judge(plan: Plan, longest: int, console: Console) -> None:
    begun, pairs = plan.start, plan.pairs.test
    model = saving.load(begun.folder / MODEL, device=begun.processes.device(begun.options.device), kind=Translator)

    def translated(pairs: list[Pair]) -> list[str]:
        sources = [plan.codec.encode(source) for source, _ in pairs]
        found = translate_texts(model, sources, beams=4, length_penalty=0.6, longest=longest)
        return [plan.codec.decode(tokens) for tokens in found]

    translations = translated(pairs)
    quality = judge(translations, pairs)
    what = "dates of years that were not learned" if plan.is_made else "pairs kept back"
    say(console, f"\n{quality.pairs:,} {what}, translated with 4 beams:")
    say(console, f"exact match  {quality.exact:,}, {quality.exact / quality.pairs:.1%}")
    if plan.is_made:
        learned = _short_enough(names(begun.settings["to"] or _TO), plan.codec, begun.settings["longest"])
        exact = judge(translated(learned), learned).exact if learned else 0
        share = f", {exact / len(learned):.1%}" if learned else ""
        say(console, f"names        {exact:,} of the {len(learned):,} that were learned{share}")
    else:
        say(console, f"BLEU         {quality.bleu:.1f}, words by sacrebleu's rule {quality.words!r}")
        say(console, f"chrF         {quality.chrf:.1f}")
    for (source, target), translation in list(zip(pairs, translations, strict=True))[:_SHOWN]:
        wanted = "" if translation == target else f"   (wanted: {target})"
        say(console, f"\n  {source}\n  {translation}{wanted}")
