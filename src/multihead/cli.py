"""The command line: `multihead`. Each command reads its options and calls the module that does the work.

A command that can't do what it was asked for says so in one line on standard error and exits with code 2.
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from typer.core import TyperGroup
except ModuleNotFoundError as missing:
    sys.stderr.write(
        f"multihead: the command line needs typer and rich ({missing}). Next: pip install 'multihead[cli]'\n"
    )
    raise SystemExit(2) from None

import torch

from multihead import __version__, demo
from multihead.commands import train, translate, view
from multihead.commands.refusing import refuse
from multihead.doctor import doctor
from multihead.explaining.explain import explain
from multihead.explaining.explanation import Explanation
from multihead.masks import causal as causal_mask
from multihead.masks import window
from multihead.packages import MissingPackage
from multihead.positions import ALiBi, Position, T5Bias
from multihead.rotary import Rotary
from multihead.whole_files import write_whole

# The base of all errors about how a command was called, which has no public name: it is click's, or typer's own copy.
_CALL_ERROR: Any = typer.BadParameter.__mro__[2]


class _Commands(TyperGroup):
    """The commands, with typer's errors as one line instead of a framed text."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except _CALL_ERROR as error:
            context = getattr(error, "ctx", None)
            instead = f" See {context.command_path} --help." if context is not None else ""
            refuse(f"{error.format_message().rstrip('.')}.{instead}")
        if standalone_mode:
            raise SystemExit(code or 0)
        return code


app = typer.Typer(
    name="multihead", cls=_Commands, rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False
)


def main() -> None:
    """Run the command line on this process's arguments."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a sample may hold characters that the console's encoding lacks
    app(prog_name="multihead")


@app.callback(invoke_without_command=True)
def _whole(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Multi-head attention for PyTorch that is right, fast and open to look into."""
    if version:
        typer.echo(f"multihead {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# Paragraphs are single lines, so that the terminal's width alone decides where they wrap.
_DEMO_HELP = "\n\n".join(
    (
        "Train a small GPT made of multihead.Attention on a text, and let it write.",
        "It learns to predict the next character, on the CPU, for about a minute. Nothing is downloaded. The last "
        "tenth of the text is kept back to judge by. In the end it prints what was reached, a sample, and how the "
        "attention was computed.",
        "Then the same model is trained on torch.nn.MultiheadAttention for a few seconds, from the same weights on the "
        "same text: as most code calls that layer, in the way that it is fastest in, and after "
        "[bold]multihead.swap(model)[/], all beside multihead.Attention. The losses should be the same. [bold]Ratio[/] "
        "is the speed by that of torch's layer as it is. [bold]Peak memory[/] is there what training adds to that of a "
        "process.",
        "[bold]Loss[/] is in nats per character: 0 is perfect, and an even guess among V characters is ln V, 4.6 for "
        "100 of them. [bold]Training loss[/] is on the text it learns from, [bold]validation loss[/] on the part kept "
        "back: compare by that one. Where training loss is much lower, it learns by heart. [bold]Bits[/] are nats / "
        "ln 2. [bold]Perplexity[/] is e to the loss: among how many characters it is, in effect, undecided. "
        "[bold]Tokens/s[/] are the characters it learns from each second.",
        "Ctrl-C ends it early, shows what was reached, and gives exit code 130. Exit code 2: an option or the text "
        "can't be used.",
    )
)
_DEMO_EXAMPLES = "\n\n".join(
    (
        "Examples:",
        "[bold]multihead demo[/] learns Python's language reference for a minute.",
        '[bold]multihead demo --text book.txt --seconds 300 --prompt "Once upon"[/] learns a text of yours for longer.',
        "[bold]multihead demo --steps 200 --seed 7[/] writes the same sample each time, on one machine.",
    )
)


@app.command("demo", help=_DEMO_HELP, epilog=_DEMO_EXAMPLES)
def _demo(
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 file to learn. By default Python's language reference.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="How long to train. By default 60.")] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps to train, instead of a time: repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights, the order of the text and the sample.")] = 0,
    context: Annotated[int, typer.Option(help="How many characters the model sees at once.")] = 128,
    width: Annotated[int, typer.Option(help="How many numbers stand for a character; a multiple of 2 * heads.")] = 128,
    layers: Annotated[int, typer.Option(help="How many blocks of attention and MLP.")] = 3,
    heads: Annotated[int, typer.Option(help="How many heads each attention has.")] = 4,
    threads: Annotated[
        int, typer.Option(help="How many cores to use. More are faster on an idle machine, far slower on a busy one.")
    ] = 1,
    prompt: Annotated[str | None, typer.Option(help="What the sample starts with. By default a new line.")] = None,
    sample_length: Annotated[int, typer.Option(help="How many characters to write at the end.")] = 400,
    compare: Annotated[bool, typer.Option(help="Whether to show the same model on torch's layer too.")] = True,
) -> None:
    try:
        plan = demo.prepare(
            text=text,
            seconds=seconds,
            steps=steps,
            seed=seed,
            context=context,
            width=width,
            layers=layers,
            heads=heads,
            threads=threads,
            prompt=prompt,
            sample_length=sample_length,
            compare=compare,
        )
    except (TypeError, ValueError) as error:
        refuse(str(error))
    raise typer.Exit(demo.run(plan, Console()))


_EXPLAIN_HELP = "\n\n".join(
    (
        "Tell which kernel an attention layer will take and why not the others, and its steps with their shapes.",
        "Nothing is computed, so large sizes cost nothing. [bold]can't[/]: the kernel has no way to do it. "
        "[bold]not taken[/]: it could, and another is better.",
        "[bold]Costs[/] are operations, two for a multiply-add, of the pairs that the mask lets see each other alone, "
        "and bytes of each tensor once: what no way of computing it can do without. With --train the backward pass is "
        "counted too.",
        "With [bold]--measure[/] the layer is run for some seconds: first a matrix product and a copy tell what the "
        "machine can do, which the predictions are made with; then each step and the whole call, the fastest run of "
        "each, and the operation that the profiler saw. One number of each is no benchmark: on a busy machine run it "
        "again.",
        "[bold]--png[/] is a roofline plot: how many operations a second each step can reach, and did if measured, "
        "over its operations for each byte. Exit code 2: an option can't be used.",
    )
)
_EXPLAIN_EXAMPLES = "\n\n".join(
    (
        "Examples:",
        "[bold]multihead explain --embed-dim 512 --heads 8 --length 4096 --causal[/] a language model's layer.",
        "[bold]multihead explain --embed-dim 512 --heads 8 --kv-heads 2 --length 4096 --left 255 --causal --train[/] "
        "grouped heads and a window of 256 tokens, while training.",
        "[bold]multihead explain --embed-dim 512 --heads 8 --length 1024 --measure --png roof.png[/] "
        "what it takes on this machine.",
    )
)


class _Position(str, Enum):
    """The positions that `explain` knows by name."""

    none = "none"
    rotary = "rotary"
    alibi = "alibi"
    t5 = "t5"


class _Dtype(str, Enum):
    """The dtypes that `explain` knows by name."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


@app.command("explain", help=_EXPLAIN_HELP, epilog=_EXPLAIN_EXAMPLES)
def _explain(
    embed_dim: Annotated[int, typer.Option(help="E, the model's width.")],
    heads: Annotated[int, typer.Option(help="H, query heads.")],
    kv_heads: Annotated[int | None, typer.Option(help="K, key/value heads. By default H.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="D, the width of a head. By default E / H.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="V, the width of a head's values. By default D.")] = None,
    batch: Annotated[int, typer.Option(help="B, sequences at once.")] = 1,
    length: Annotated[int, typer.Option(help="L, tokens of a sequence.")] = 128,
    source_length: Annotated[
        int | None, typer.Option(help="S, tokens of a context. By default self-attention.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Tokens see themselves and those before.")] = False,
    left: Annotated[int | None, typer.Option(help="A window: how many tokens before the own one are visible.")] = None,
    right: Annotated[int | None, typer.Option(help="A window: how many tokens after the own one are visible.")] = None,
    position: Annotated[_Position, typer.Option(help="How positions act.")] = _Position.none,
    softcap: Annotated[float | None, typer.Option(help="Bound of the scores.")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="A learned logit for each head that takes a share.")] = False,
    dropout: Annotated[float, typer.Option(help="Of the weights, while training.")] = 0.0,
    train: Annotated[bool, typer.Option("--train", help="Training: dropout acts, gradients are recorded.")] = False,
    dtype: Annotated[_Dtype, typer.Option(help="Of the inputs.")] = _Dtype.float32,
    device: Annotated[str, typer.Option(help="Where it would run: cpu, cuda ...")] = "cpu",
    measure: Annotated[bool, typer.Option("--measure", help="Run it too, and show times beside predictions.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON, in place of text.")] = False,
    html: Annotated[Path | None, typer.Option(help="A file for all of it as a page.")] = None,
    png: Annotated[Path | None, typer.Option(help="A file for a roofline plot.")] = None,
) -> None:
    if png is not None and png.suffix != ".png":
        refuse(f"--png: expected a name that ends in .png, got {str(png)!r}.")
    if measure:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler tells of itself between the lines
    try:
        if causal and right is not None:
            refuse("--right: expected none with --causal, which shows no token after the own one. Leave one out.")
        is_window = left is not None or right is not None
        mask = window(left=left, right=0 if causal else right) if is_window else causal_mask() if causal else None
        made: Position | None = None
        if position is not _Position.none:
            made = (
                Rotary() if position is _Position.rotary else (ALiBi if position is _Position.alibi else T5Bias)(heads)
            )
        layer: dict[str, Any] = {
            "embed_dim": embed_dim,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
        }
        layer |= {"value_dim": value_dim, "softcap": softcap, "sinks": sinks, "dropout": dropout, "mask": mask}
        waiting = Console(stderr=True).status("measuring, which takes some seconds") if measure else nullcontext()
        with waiting:
            found = explain(
                layer | {"position": made},
                batch=batch,
                length=length,
                source_length=source_length,
                training=train,
                dtype=getattr(torch, dtype.value),
                device=device,
                measure=measure,
            )
    except (TypeError, ValueError) as error:
        refuse(str(error))
    except RuntimeError as error:  # such as sizes past what a tensor can have
        refuse(str(error).splitlines()[0])
    for option, path, write in (("--html", html, _write_page), ("--png", png, _write_plot)):
        if path is not None:
            try:
                write(found, path)
            except MissingPackage as error:
                refuse(str(error))
            except OSError as error:
                refuse(f"{option}: expected a file that can be written, got {str(path)!r} ({error.strerror or error}).")
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))


def _write_page(found: Explanation, path: Path) -> None:
    text = found.to_html()
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def _write_plot(found: Explanation, path: Path) -> None:
    figure = found.plot().figure
    write_whole(path, lambda beside: figure.savefig(beside, format="png", dpi=150))


@app.command("doctor")
def _doctor() -> None:
    """Print versions, threads and devices, and run each kernel on a tiny input against the reference.

    Exit code 1: a kernel gave wrong numbers here.
    """
    found = doctor()
    typer.echo(str(found))
    raise typer.Exit(0 if found.healthy else 1)


train.register(app)
translate.register(app)
view.register(app)


if __name__ == "__main__":
    main()
