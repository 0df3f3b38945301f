"""`multihead view`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from multihead.commands.options import default_device
from multihead.commands.refusing import refuse
from multihead.training import viewing
from multihead.training.progress import drop

_HELP = "\n\n".join(
    (
        "Show where the heads of a run of [bold]multihead train[/] look in a text: a line of figures for each head, "
        "and the map of one.",
        "[bold]Entropy[/] is how spread out a head's weights are, in nats; [bold]evenness[/] the same from 0, all on "
        "one token, to 1, even over all that may be seen. [bold]First token[/] is the weight on the text's first "
        "token: much of it is an attention sink. [bold]Previous[/] is that on the token before. [bold]Distance[/] is "
        "how many tokens back a head looks on average.",
        "Weights say where a head reads, not why the model decided. Exit code 2: the run or an option can't be used.",
    )
)
_EXAMPLES = "\n\n".join(
    (
        "Examples:",
        '[bold]multihead view runs/mine --prompt "to be or not to be"[/] shows the first head.',
        '[bold]multihead view runs/mine --prompt "to be or not to be" --layer 2 --head 1 --html view.html[/] another, '
        "and writes maps of all heads.",
    )
)


def _view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that multihead train made.")],
    prompt: Annotated[str, typer.Option(help="The text.")],
    layer: Annotated[int, typer.Option(help="Whose head's map is shown, from 0.")] = 0,
    head: Annotated[int, typer.Option(help="Which head's, from 0.")] = 0,
    size: Annotated[int, typer.Option(help="The most rows and columns of the map; more tokens are pooled.")] = 48,
    html: Annotated[Path | None, typer.Option(help="A file for a report with maps of all heads.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda ... By default cuda where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(help="How many cores to use. By default as torch chooses.")] = None,
) -> None:
    try:
        made = viewing.prepare_viewing(
            run, prompt=prompt, layer=layer, head=head, size=size, device=device or default_device(), threads=threads
        )
        if html is not None:
            made.write(html)
    except (TypeError, ValueError, ImportError) as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"--html: expected a file that can be written, got {str(html)!r} ({error.strerror or error}).")
    try:
        sys.stdout.write(f"{made.told()}\n")
        if html is not None:
            sys.stdout.write(f"Maps of all heads: {html}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        drop(sys.stdout)


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("view", help=_HELP, epilog=_EXAMPLES)(_view)
