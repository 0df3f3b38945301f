"""What every training command does around the loop: begin or continue a run, carry it out, say what came of it.

A command's own module reads its data and makes a `Task` between `start` and `carry_out`. Until the latter nothing is
written.
"""

from __future__ import annotations

import io
import json
import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from multihead.errors import bad_value, is_number
from multihead.packages import need
from multihead.training.loop import Task, check_state
from multihead.training.options import Options
from multihead.training.parallel import Processes, joined, processes_here
from multihead.training.progress import say
from multihead.training.runs import PICTURE, STATE, Run, check_new, default_folder
from multihead.training.session import DIVERGED, Outcome, fit


@dataclass(frozen=True)
class Checkpoint:
    """What a run is continued from."""

    path: Path
    tensors: dict[str, Tensor]
    seconds: float  # that it took to get there

    @classmethod
    def read(cls, run: Run, steps: int, *, finished: bool = False) -> Checkpoint:
        """A run's last checkpoint. ValueError if it can't be read, or if all of `steps` are done, or with `finished`
        more than these."""
        tensors, facts = run.read_state()
        seconds = facts.get("seconds")
        if "done" not in tensors or not is_number(seconds):
            raise bad_value(str(run.path(STATE)), "a checkpoint that says how many steps it took", "none")
        found = cls(run.path(STATE), tensors, float(seconds))
        if found.done > steps or (found.done == steps and not finished):
            expected, instead = f"more than the {found.done} that are done", "Pass a larger one to go on."
            raise bad_value("--steps", expected, steps, "The run is finished.", instead)
        return found

    @property
    def done(self) -> int:
        """How many steps it took to get there."""
        return int(self.tensors["done"])

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if it is of another model."""
        try:
            check_state(model, self.tensors)
        except ValueError as error:
            raise bad_value(str(self.path), "a checkpoint of this run's model", f"another ({error})") from None


@dataclass
class Start:
    """What a run begins with, or is continued with."""

    kind: str
    folder: Path  # of a new run: another one, if a run without --out finds that it was taken meanwhile
    named: bool  # whether the folder was asked for
    overwrite: bool
    settings: dict[str, Any]  # all of them, as config.json keeps them
    options: Options  # those that every training has
    processes: Processes
    run: Run | None  # the one to continue; None for a new one
    checkpoint: Checkpoint | None  # of that one

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.checkpoint is not None and self.checkpoint.done == self.options.steps

    def check_same(self, argument: str, name: str, value: str) -> None:
        """Raise ValueError, by the argument's name, where a run is continued and has another value in its config."""
        if self.run is not None and self.run.config.get(name) != value:
            otherwise = "The steps would not be those of a run that was never stopped."
            instead = "Pass what the run began with, or begin another run."
            raise bad_value(argument, "what the run began with", "something else", otherwise, instead)


def start(
    kind: str,
    settings: Mapping[str, Any],
    *,
    given: Collection[str],
    out: Path | None,
    resume: bool,
    overwrite: bool,
    finished: bool = False,
) -> Start:
    """Check how a run is to begin or to go on, and the options that every training has. Nothing is written.

    Args:
        kind: what is trained, such as "gpt"; a run is continued by the command that began it.
        settings: the command's options by name, as JSON can hold them: all of `Options`, and its own.
        given: the names of those that were asked for, not left to their defaults: a run that is continued has its own.
        out: the run's folder; None for a new one by the date.
        resume: continue the run in `out`.
        overwrite: begin anew in its place.
        finished: whether a run may be continued of which all steps are done; then there is nothing to `carry_out`.

    Raises:
        ValueError, TypeError: something can't be done; the message names the command line's option.
        ImportError: a package is missing.
    """
    need("safetensors", "models", "a checkpoint")
    if resume and overwrite:
        raise bad_value("--resume, --overwrite", "one of the two", "both", "", "Leave one out.")
    if resume and out is None:
        raise bad_value("--resume", "a run's folder in --out", "none", "", "Add --out and the folder.")
    run = None
    if out is not None and resume:
        run = Run.open(out, kind, "--out")
        settings = run.continued(settings, given)
        if "parallel" not in given and not processes_here(None).started:
            settings["parallel"] = None  # what several processes began, one can go on with
    elif out is not None:
        check_new(out, overwrite=overwrite)
    processes = processes_here(settings["parallel"])
    options = Options(**{field.name: settings[field.name] for field in fields(Options)})
    options.check(processes)
    checkpoint = None if run is None else Checkpoint.read(run, options.steps, finished=finished)
    folder, named = out or default_folder(kind), out is not None
    return Start(kind, folder, named, overwrite, dict(settings), options, processes, run, checkpoint)


def carry_out(
    begun: Start,
    task: Task,
    console: Console,
    *,
    config: Mapping[str, Any],
    files: Mapping[str, str],
    about: Sequence[str],
    command: str,
    then: Callable[[str], str],
) -> int:
    """Make the folder, or go on in it; train; say what came out and how to go on.

    Args:
        begun: after all checks. Its folder is that of the run afterwards.
        task: what is trained.
        console: where it is shown.
        config: what config.json keeps besides the settings: "model" and what the task's data is to be known by.
        files: what else a new run's folder holds, by name: tokenizers.
        about: lines about what will be done.
        command: the one that continues the run, such as "multihead train".
        then: says what to do with the model, of the folder as a shell reads it.

    Returns:
        The exit code: 0; 130 after Ctrl-C; 1 where the loss is no number any more.

    Raises:
        OSError: the folder can't be written to. What was saved last stands.
        CannotCompile: with --compile; the run can be continued without.
        UnequalProcesses: the processes of a parallel run have other settings or data.
    """
    processes, options, run = begun.processes, begun.options, begun.run
    whole = {"settings": begun.settings, **config}
    with joined(processes, options.device):
        processes.agree(json.dumps(whole, sort_keys=True), processes.device(options.device))
        if run is None:
            if processes.first:
                run = _create(begun, whole, files)
            begun.folder = Path(processes.share(str(begun.folder)))  # two clocks may have named two
            run = run or Run(begun.folder, whole)
        elif processes.first:
            run.config.update(whole)
            run.write_config()
        if not processes.first:
            console = Console(file=io.StringIO())
        for line in about:
            say(console, line)
        if begun.checkpoint is not None:
            say(console, f"{begun.checkpoint.done:,} of {options.steps:,} steps are done.")
        say(console, f"Into {run.folder}. Ctrl-C saves and ends it early.\n")
        tensors, seconds = (None, 0.0)
        if begun.checkpoint is not None:
            tensors, seconds = begun.checkpoint.tensors, begun.checkpoint.seconds
        outcome = fit(task, options, run, processes=processes, console=console, state=tensors, seconds=seconds)
    _report(outcome, options, run, console, command)
    if outcome.code == 0:
        say(console, then(shlex.quote(str(run.folder))))
    return outcome.code


def _create(begun: Start, config: Mapping[str, Any], files: Mapping[str, str]) -> Run:
    while True:
        try:
            return Run.create(begun.folder, begun.kind, config, files, overwrite=begun.overwrite)
        except FileExistsError:
            if begun.named:
                raise
            begun.folder = default_folder(begun.kind)


def _report(outcome: Outcome, options: Options, run: Run, console: Console, command: str) -> None:
    if outcome.code == DIVERGED:
        return  # it was said when it happened
    place = shlex.quote(str(run.folder))
    say(console, "")
    if outcome.code:
        say(console, f"Stopped. {outcome.done:,} of {options.steps:,} steps are saved in {place}.")
        say(console, f"To go on: {command} --out {place} --resume")
        return
    rows = {"training loss": f"{outcome.loss:.3f} nats per token"}
    for name, value in outcome.validation.items():
        unit = f" nats per token, perplexity {math.exp(min(value, 700)):.1f}" if name == "loss" else ""
        rows[f"validation {name.replace('_', ' ')}"] = f"{value:.3f}{unit}"
    width = max(map(len, rows)) + 2
    for name, told in rows.items():
        say(console, f"{name:<{width}}{told}")
    say(console, f"\nSaved in {place}: the model, its losses ({PICTURE}), and what it takes to go on.")
