"""`multihead train` and `multihead generate`: a GPT learns a text, and writes."""

from __future__ import annotations

import sys
from enum import Enum
from itertools import chain
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
from multihead.training import text_run, writing
from multihead.training.loop import Diverged
from multihead.training.progress import drop

_TEXT = "Text"

_TRAIN_HELP = "\n\n".join(
    (
        "Train a GPT made of multihead.Attention on a text. [bold]multihead generate[/] then lets it write.",
        "It learns to predict the next token: a piece of a word (byte pairs, learned from the text), or with --chars a "
        "character. With the defaults that is some minutes on a CPU. Nothing is downloaded. The last tenth of the text "
        "is kept back to judge by.",
        "[bold]Loss[/] is in nats per token: 0 is perfect, and an even guess among V tokens is ln V, 6.9 for 1,024 of "
        "them. [bold]Validation loss[/] is on the part kept back: compare by that one. Where it rises while the other "
        "falls, the model learns by heart: take more text, fewer --steps or a larger --dropout. [bold]Bits per byte[/] "
        "are the same for any vocabulary.",
        "[bold]The folder[/] has config.json, metrics.jsonl (a line a step), loss.png, tokenizer.json, "
        "model.safetensors and state.safetensors, the checkpoint. Ctrl-C finishes the step, saves, says how to go on, "
        "and gives exit code 130, or in the last step 0, as all is done; --resume goes on to the same numbers as if it "
        "had never stopped. After a kill, what came since the last checkpoint is done again. Exit code 1: the loss is "
        "no number any more. Exit code 2: something that was asked for can't be done; nothing was written then, unless "
        "it shows only in a step: --compile without a compiler, too little memory, a full disk. Then what was saved "
        "last stands, but with --overwrite the older run is gone.",
    )
)
_TRAIN_EXAMPLES = "\n\n".join(
    (
        "Examples:",
        "[bold]multihead train[/] learns Python's language reference.",
        "[bold]multihead train --text book.txt --text letters.txt --out runs/mine --steps 3000[/] learns yours.",
        "[bold]multihead train --out runs/mine --resume[/] goes on where it was stopped; with [bold]--steps 5000[/] "
        "for longer.",
        "[bold]multihead train --kv-heads 2 --mlp swiglu --dtype bfloat16 --device cuda --compile[/] is how "
        "larger ones are made.",
        "[bold]torchrun --nproc-per-node 2 -m multihead.cli train --parallel ddp[/] shares each step among processes.",
    )
)


class Position(str, Enum):
    """How a model knows where a token stands."""

    rotary = "rotary"
    learned = "learned"


class Mlp(str, Enum):
    """The MLPs that `train` knows."""

    gelu = "gelu"
    swiglu = "swiglu"


def _train(
    context: typer.Context,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A UTF-8 file to learn; several are joined. By default Python's reference.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    vocabulary: Annotated[
        int,
        typer.Option(
            help="How many different tokens there are at most, at least 256; not with --chars.", rich_help_panel=_TEXT
        ),
    ] = 1024,
    chars: Annotated[
        bool,
        typer.Option("--chars", help="A token is a character instead of a piece of a word.", rich_help_panel=_TEXT),
    ] = False,
    valid_share: Annotated[
        float, typer.Option(help="How much of the text, its end, is kept back.", rich_help_panel=_TEXT)
    ] = 0.1,
    layers: Annotated[int, typer.Option(help="How many blocks of attention and MLP.", rich_help_panel=MODEL)] = 4,
    width: Width = 128,
    heads: Heads = 4,
    kv_heads: Annotated[
        int | None,
        typer.Option(help="Key/value heads, a divisor of heads. By default as many.", rich_help_panel=MODEL),
    ] = None,
    mlp: Annotated[Mlp, typer.Option(help="The MLP's activation.", rich_help_panel=MODEL)] = Mlp.gelu,
    position: Annotated[
        Position, typer.Option(help="How it knows where a token stands.", rich_help_panel=MODEL)
    ] = Position.rotary,
    dropout: Annotated[
        float, typer.Option(help="The share that is dropped while training.", rich_help_panel=MODEL)
    ] = 0.1,
    context_: Annotated[
        int, typer.Option("--context", help="How many tokens the model sees at once.", rich_help_panel=MODEL)
    ] = 256,
    steps: Steps = 400,
    batch: Annotated[
        int, typer.Option(help="Pieces of --context tokens a step, over all processes.", rich_help_panel=STEPS)
    ] = 16,
    accumulate: Accumulate = 1,
    learning_rate: LearningRate = 2e-3,
    warm_up: WarmUp = None,
    weight_decay: WeightDecay = 0.1,
    clip: Clip = 1.0,
    seed: Annotated[
        int, typer.Option(help="Of the first weights, the data's order and dropout.", rich_help_panel=STEPS)
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder to make. By default runs/gpt- and the time.", rich_help_panel=WHOLE),
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
        "text": text or [], "vocabulary": vocabulary, "chars": chars, "valid_share": valid_share, "layers": layers,
        "width": width, "heads": heads, "kv_heads": kv_heads, "mlp": mlp.value, "position": position.value,
        "dropout": dropout, "context": context_, "steps": steps, "batch": batch, "accumulate": accumulate,
        "learning_rate": learning_rate, "warm_up": warm_up, "weight_decay": weight_decay, "clip": clip, "seed": seed,
        "validate_every": validate_every, "save_every": save_every, "device": device or default_device(),
        "dtype": dtype.value, "threads": threads, "compile": compile_,
        "parallel": None if parallel is None else parallel.value,
    }  # fmt: skip
    try:
        plan = text_run.prepare(settings, given=given_options(context), out=out, resume=resume, overwrite=overwrite)
    except (TypeError, ValueError, ImportError) as error:
        refuse(str(error))
    finish(plan.start, lambda: text_run.carry_out(plan, Console()))


_GENERATE_HELP = "\n\n".join(
    (
        "Let the model of a run of [bold]multihead train[/] write on after a prompt, shown as it is written.",
        "The likeliest token at every place makes dull and repeating text, so one is drawn. [bold]--temperature[/] "
        "below 1 makes likely tokens likelier still; 0 takes the likeliest. [bold]--top-k[/], [bold]--top-p[/] and "
        "[bold]--min-p[/] leave out the unlikely ones: the k likeliest stay, those that make up a share p of the "
        "probability, or those at least p times so likely as the likeliest.",
        "Ctrl-C ends it early, with exit code 130. Exit code 2: the run or an option can't be used.",
    )
)
_GENERATE_EXAMPLES = "\n\n".join(
    (
        "Examples:",
        '[bold]multihead generate runs/mine --prompt "Once upon a time"[/] writes another text each time.',
        "[bold]multihead generate runs/mine --temperature 0.7 --top-k 40 --seed 1[/] writes the same text each time.",
        '[bold]multihead generate runs/mine --prompt "Q: Why?" --stop "Q:" --max-new-tokens 500[/] ends before the '
        "next question.",
    )
)


def _generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that multihead train made.")],
    prompt: Annotated[
        str | None, typer.Option(help="What the text starts with. By default a new line, if the model knows it.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="Above 0; below 1 is safer, above 1 bolder. 0: no draw.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many of the likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the fewest that have this share.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Draw from those this much as likely as the likeliest.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: what was there becomes less likely.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draw. By default another text each time.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda ... By default cuda where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(help="How many cores to use. By default as torch chooses.")] = None,
) -> None:
    try:
        made = writing.prepare_writing(
            run,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=stop or [],
            seed=seed,
            device=device or default_device(),
            threads=threads,
        )
    except (TypeError, ValueError, ImportError) as error:
        refuse(str(error))
    try:
        for piece in chain([made.prompt], made.pieces()):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        drop(sys.stdout)
    except Diverged as error:
        sys.stdout.write("\n")
        sys.stdout.flush()
        refuse_diverged(run, error)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("train", help=_TRAIN_HELP, epilog=_TRAIN_EXAMPLES)(_train)
    app.command("generate", help=_GENERATE_HELP, epilog=_GENERATE_EXAMPLES)(_generate)
