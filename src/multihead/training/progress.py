"""How training is shown: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

INTERRUPTED = 130  # the exit code that shells give to a command ended by Ctrl-C

_SECONDS_BETWEEN_LINES = 10


@contextmanager
def display(console: Console, *, begin: float = 0.0) -> Generator[Callable[[float, float, str], None], None, None]:
    """What to call after each step, with the share that is done, the seconds it took and a line about it.

    It moves a bar, or where no bar can be drawn, writes a line now and then.

    Args:
        console: where.
        begin: the share that was done before, by a run that is continued.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        yield _Lines(console).show
        return
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (BarColumn(bar_width=20), *times, TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=1.0)
        bar.update(task, completed=begin)
        yield lambda share, _, line: bar.update(task, completed=share, description=line)


class _Lines:
    """Writes the first step, the last, and one now and then."""

    def __init__(self, console: Console) -> None:
        self.console, self.due = console, 0.0

    def show(self, share: float, seconds: float, line: str) -> None:
        if seconds >= self.due or share == 1:
            self.due = seconds + _SECONDS_BETWEEN_LINES
            say(self.console, f"{share:4.0%}  {line}")


def say(console: Console, line: str) -> None:
    """A line as it is, past rich: brackets in it are no markup, and after Ctrl-C rich might write it once more."""
    try:
        console.file.write(f"{line}\n")
        console.file.flush()
    except BrokenPipeError:  # training goes on without who watched it
        drop(console.file)


def drop(stream: IO[str]) -> None:
    """Write nowhere from now on: who reads has had enough, such as `head`. Python would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
