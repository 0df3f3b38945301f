"""`multihead train-translator` and `multihead translate`: a transformer learns to translate, and translates."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from multihead.commands.options import (
    MODEL,
    STEPS,
    WHOLE,
    Accumulate,
    Clip,
    Compile,
    Device,
    Dtype,
    DtypeOption,
    Heads,
    LearningRate,
    Overwrite,
    ParallelOption,
    Resume,
    SaveEvery,
    Steps,
    Threads,
    ValidateEvery,
    WarmUp,
    WeightDecay,
    Width,
    default_device,
    finish,
    given_options,
    refuse_diverged,
)
from multihead.commands.refusing import refuse
from multihead.training import translating, translation_run
from multihead.training.loop import Diverged
from multihead.training.progress import drop

_PAIRS = "Pairs"

_TRAIN_HELP = "\n\n".join(
    (
        "Train the transformer of [italic]Attention Is All You Need[/], made of multihead.Attention, to translate. "
        "[bold]multihead translate[/] then lets it.",
        "By default it learns to translate English dates, and the names of countries, languages and currencies, to "
        "Chinese, in a few minutes on a CPU. Nothing is downloaded: babel knows how each language writes them. "
        "[bold]--pairs[/] has it learn sentences of yours: a UTF-8 file whose lines are a source, a tab and a target.",
        "[bold]Loss[/] is in nats per token: 0 is perfect. [bold]Training loss[/] is of smoothed labels, so it stays "
        "above 0; compare runs by the [bold]validation loss[/], on pairs that are kept back. [bold]Exact match[/] is "
        "the share of them that is translated without any difference, by greedy search. In the end other pairs, kept "
        "back too, are translated by beam search and compared with what was wanted; those of a file also by "
        "[bold]BLEU[/] and [bold]chrF[/], from 0 to 100. A twentieth of a file's sources, 1,000 at most, is kept back "
        "for each of the two.",
        "[bold]The folder[/] is as that of multihead train, and so are Ctrl-C, --resume and the exit codes. --resume "
        "of a run whose steps are all done judges it again.",
    )
)
_TRAIN_EXAMPLES = "\n\n".join(
    (
        "Examples:",
        "[bold]multihead train-translator[/] learns to translate dates and names to Chinese.",
        "[bold]multihead train-translator --to de --out runs/german[/] to German.",
        "[bold]multihead train-translator --pairs en-fr.tsv --steps 5000 --width 256 --heads 8[/] learns yours.",
        "[bold]multihead train-translator --out runs/german --resume[/] goes on where it was stopped.",
    )
)


class Position(str, Enum):
    """How a translator knows where a token stands."""

    sinusoidal = "sinusoidal"
    rotary = "rotary"


def _train(
    context: typer.Context,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 file: source, tab, target. By default dates and names are made.", rich_help_panel=_PAIRS
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="The language of the dates and names, as CLDR calls it: de, pt_BR ... By default zh.",
            rich_help_panel=_PAIRS,
        ),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Of --pairs: how many different tokens at most, from 256 on. By default 4000.", rich_help_panel=_PAIRS
        ),
    ] = None,
    chars: Annotated[
        bool,
        typer.Option(
            "--chars", help="A token is a character, as in dates, not a piece of a word.", rich_help_panel=_PAIRS
        ),
    ] = False,
    longest: Annotated[
        int, typer.Option(help="Pairs with more tokens on a side are left out.", rich_help_panel=_PAIRS)
    ] = 256,
    layers: Annotated[
        int, typer.Option(help="How many blocks the encoder and the decoder each have.", rich_help_panel=MODEL)
    ] = 2,
    width: Width = 128,
    heads: Heads = 4,
    position: Annotated[
        Position, typer.Option(help="How it knows where a token stands.", rich_help_panel=MODEL)
    ] = Position.sinusoidal,
    post_norm: Annotated[
        bool, typer.Option("--post-norm", help="Norms after each sum, as in the paper.", rich_help_panel=MODEL)
    ] = False,
    dropout: Annotated[
        float | None,
        typer.Option(
            help="The share that is dropped while training. By default 0, with --pairs 0.1.", rich_help_panel=MODEL
        ),
    ] = None,
    steps: Steps = 1500,
    batch: Annotated[int, typer.Option(help="Pairs a step, over all processes.", rich_help_panel=STEPS)] = 64,
    smoothing: Annotated[
        float, typer.Option(help="The share of each label that is spread over all tokens.", rich_help_panel=STEPS)
    ] = 0.1,
    accumulate: Accumulate = 1,
    learning_rate: LearningRate = 2e-3,
    warm_up: WarmUp = None,
    weight_decay: WeightDecay = 0.01,
    clip: Clip = 1.0,
    seed: Annotated[int, typer.Option(help="Of the first weights, the pairs and dropout.", rich_help_panel=STEPS)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to make. By default runs/translator- and the time.", rich_help_panel=WHOLE),
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    validate_every: ValidateEvery = 100,
    save_every: SaveEvery = 100,
    device: Device = None,
    dtype: DtypeOption = Dtype.float32,
    threads: Threads = None,
    compile_: Compile = False,
    parallel: ParallelOption = None,
) -> None:
    settings: dict[str, Any] = {
        "pairs": pairs, "to": to, "vocabulary": vocabulary, "chars": chars, "longest": longest, "layers": layers,
        "width": width, "heads": heads, "position": position.value, "post_norm": post_norm, "dropout": dropout,
        "steps": steps, "batch": batch, "smoothing": smoothing, "accumulate": accumulate,
        "learning_rate": learning_rate, "warm_up": warm_up, "weight_decay": weight_decay, "clip": clip, "seed": seed,
        "validate_every": validate_every, "save_every": save_every, "device": device or default_device(),
        "dtype": dtype.value, "threads": threads, "compile": compile_,
        "parallel": None if parallel is None else parallel.value,
    }  # fmt: skip
    try:
        plan = translation_run.prepare(
            settings, given=given_options(context), out=out, resume=resume, overwrite=overwrite
        )
    except (TypeError, ValueError, ImportError) as error:
        refuse(str(error))
    finish(plan.start, lambda: translation_run.carry_out(plan, Console()))


_TRANSLATE_HELP = "\n\n".join(
    (
        "Translate sentences by the model of a run of [bold]multihead train-translator[/], a line for each.",
        "[bold]--beams[/]: so many translations of a sentence are followed at once, the likeliest so far; 1 is greedy "
        "search, more are slower and find likelier ones. [bold]--length-penalty[/]: sums of log probabilities favour "
        "short translations; the larger it is, the less (Wu et al. 2016).",
        "[bold]--attention[/] draws which tokens of the sentence (columns) each token of the translation (rows) was "
        "predicted from: the mean over all heads of all blocks. _ is a space.",
        "Exit code 2: the run, a sentence or an option can't be used.",
    )
)
_TRANSLATE_EXAMPLES = "\n\n".join(
    (
        "Examples:",
        '[bold]multihead translate runs/mine "Thursday, March 5, 1987"[/] prints 1987年3月5日星期四.',
        '[bold]multihead translate runs/mine "March 5, 1987" --attention dates.png[/] draws the alignment.',
        "[bold]multihead translate runs/mine < sentences.txt[/] translates each line.",
    )
)


def _translate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that multihead train-translator made.")],
    text: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT...", help="Sentences. By default the lines of standard input.")
    ] = None,
    beams: Annotated[int, typer.Option(help="How many translations are followed at once.")] = 4,
    length_penalty: Annotated[float, typer.Option(help="From 0 to 20; the larger, the longer.")] = 0.6,
    attention: Annotated[Path | None, typer.Option(help="A PNG file to draw the cross-attention to.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda ... By default cuda where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(help="How many cores to use. By default as torch chooses.")] = None,
) -> None:
    try:
        texts = text or translating.read_sentences(sys.stdin.buffer.read())
        made = translating.prepare_translating(
            run,
            texts,
            beams=beams,
            length_penalty=length_penalty,
            picture=attention,
            device=device or default_device(),
            threads=threads,
        )
    except (TypeError, ValueError, ImportError) as error:
        refuse(str(error))
    try:
        translations = made.translations()
    except Diverged as error:
        refuse_diverged(run, error)
    try:
        for translation in translations:
            sys.stdout.write(f"{made.text(translation)}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        drop(sys.stdout)
    if attention is not None:
        try:
            note = made.draw(translations[0])
        except OSError as error:
            refuse(f"--attention: {attention} can't be written to ({error.strerror or error}).")
        if note:
            typer.echo(f"multihead: {note}.", err=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("train-translator", help=_TRAIN_HELP, epilog=_TRAIN_EXAMPLES)(_train)
    app.command("translate", help=_TRANSLATE_HELP, epilog=_TRANSLATE_EXAMPLES)(_translate)
