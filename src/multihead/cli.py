"""The command line: `multihead`. Each command reads its options and calls the module that does the work.

A command that can't do what it was asked for says so in one line on standard error and exits with code 2.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
    from rich.console import Console
    from typer.core import TyperGroup
except ModuleNotFoundError as missing:
    sys.stderr.write(
        f"multihead: the command line needs typer and rich ({missing}). Next: pip install 'multihead[cli]'\n"
    )
    raise SystemExit(2) from None

from multihead import __version__, demo

# The base of all errors about how a command was called, which has no public name: it is click's, or typer's own copy.
_CALL_ERROR: Any = typer.BadParameter.__mro__[2]


class _Commands(TyperGroup):
    """The commands, with typer's errors as one line instead of a framed text."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except _CALL_ERROR as error:
            context = getattr(error, "ctx", None)
            instead = f" See {context.command_path} --help." if context is not None else ""
            _refuse(f"{error.format_message().rstrip('.')}.{instead}")
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


def _refuse(message: str) -> NoReturn:
    """Leave with code 2 and a message on one line."""
    sys.stderr.write(f"multihead: {' '.join(message.split())}\n")
    raise SystemExit(2)


@app.callback(invoke_without_command=True)
def _whole(  # pyright: ignore[reportUnusedFunction]  (typer calls it)
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
def _demo(  # pyright: ignore[reportUnusedFunction]  (typer calls it)
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
        )
    except (TypeError, ValueError) as error:
        _refuse(str(error))
    raise typer.Exit(demo.run(plan, Console()))


if __name__ == "__main__":
    main()
