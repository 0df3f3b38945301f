"""The folder of a run: what was asked for, what happened, and what was learned.

    config.json          what was asked for, and what a model has to be made of
    metrics.jsonl        one JSON object a step
    loss.png             the losses over the steps
    model.safetensors    the model, to be used
    state.safetensors    the checkpoint, to be continued: all of it in one file, so that its parts fit each other
    tokenizer.json       what the task makes tokens by

A file is replaced whole. What is continued is the checkpoint. It is written after the metrics and the model that it
goes with, so that after a kill these may be ahead of it, never behind; a run that is continued brings them in line.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from multihead import __version__
from multihead.errors import bad_value
from multihead.models import saving
from multihead.training.checkpoints import read_checkpoint, write_checkpoint, write_json
from multihead.training.options import option
from multihead.training.plot import draw_losses
from multihead.whole_files import write_whole

# What a run that is continued may do in another way. Texts and pairs are compared by what is in them.
MAY_CHANGE = {"text", "pairs", "steps", "device", "threads", "compile", "parallel", "validate_every", "save_every"}

_FORMAT = "multihead run"
_METRICS = "metrics.jsonl"
CONFIG, MODEL, STATE, PICTURE = "config.json", "model.safetensors", "state.safetensors", "loss.png"
TOKENIZER = "tokenizer.json"

# What a process that is killed while it writes one of them leaves.
_LITTER = re.compile(rf"\.({'|'.join(map(re.escape, (CONFIG, MODEL, STATE, PICTURE, TOKENIZER, _METRICS)))})\.\d+\.tmp")


@contextmanager
def _looking(argument: str, expected: str, folder: Path) -> Generator[None, None, None]:
    """Around looking at a folder: what the system says against it (a name too long, no permission) is a ValueError."""
    try:
        yield
    except OSError as error:
        raise bad_value(argument, expected, f"{str(folder)!r} ({error.strerror})") from None


def default_folder(kind: str) -> Path:
    """A folder of this moment's name that is not there yet. ValueError where there can't be one."""
    name = f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    tries = (Path("runs", name if i == 1 else f"{name}-{i}") for i in range(1, 1000))
    with _looking("--out", "a folder that can be made", Path("runs")):
        return next(path for path in tries if not path.exists())


def check_new(folder: Path, *, overwrite: bool) -> None:
    """Raise ValueError if a run can't begin in this folder without something being lost. Nothing is changed."""
    with _looking("--out", "a folder that can be made", folder):
        _check_new(folder, overwrite)


def _check_new(folder: Path, overwrite: bool) -> None:
    for parent in folder.parents:
        if parent.exists():
            if not parent.is_dir():
                raise bad_value("--out", "a folder", f"{str(folder)!r}, and {str(parent)!r} is a file")
            break
    if not folder.exists():
        return
    if not folder.is_dir():
        raise bad_value("--out", "a folder", f"{str(folder)!r}, a file", "It would be lost.", "Name another.")
    if (folder / CONFIG).is_file():
        if not overwrite:
            otherwise = "There is a run in it."
            instead = "Add --resume to continue it, --overwrite to begin anew in its place, or name another folder."
            raise bad_value("--out", "a folder without a run", repr(str(folder)), otherwise, instead)
        _read_config(folder, "--out")  # that it is a run, and no other program's folder
    elif any(folder.iterdir()):
        otherwise = "It holds something else than a run."
        raise bad_value("--out", "a new or empty folder", repr(str(folder)), otherwise, "Name another.")


M = TypeVar("M", bound=nn.Module)


class Run:
    """A run's folder.

    Args:
        folder: where it is.
        config: what config.json holds: "kind", "model" and what the task adds.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder, self.config = folder, config
        self._log: Any = None

    @classmethod
    def create(
        cls, folder: Path, kind: str, config: Mapping[str, Any], files: Mapping[str, str], *, overwrite: bool = False
    ) -> Run:
        """Begin a run: make the folder, or clear it of an older run's files and no others.

        Args:
            folder: after `check_new`.
            kind: what is trained, such as "gpt".
            config: what the task wants to keep, JSON-able.
            files: further files by name, such as tokenizer.json.
            overwrite: whether there may be an older run, which is lost.

        Raises:
            FileExistsError: another run has begun there since it was checked.
            OSError: the folder can't be made or written to.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if overwrite:
            # The checkpoint goes first and config.json stays: after a kill it is still known as a run, with none to go
            # on from.
            for name in (STATE, MODEL, _METRICS, PICTURE):
                (folder / name).unlink(missing_ok=True)
        try:  # of processes that begin here at once only one can make the file
            (folder / _METRICS).open("x").close()
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, "another run has begun in it") from None
        whole = {"format": _FORMAT, "kind": kind, "multihead": __version__, "torch": torch.__version__, **config}
        run = cls(folder, whole)
        for name, text in files.items():
            run.write(name, text)
        run.write_config()
        return run

    @classmethod
    def open(cls, folder: Path, kind: str, argument: str) -> Run:
        """A run that is there.

        Raises:
            ValueError: it is none, or one of another kind; the message names the argument.
        """
        config = _read_config(folder, argument)
        if config.get("kind") != kind:
            raise bad_value(argument, f"a run of kind {kind!r}", f"{str(folder)!r}, of kind {config.get('kind')!r}")
        return cls(folder, config)

    def continued(self, settings: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
        """The settings that the run began with, and those that were asked for where they may change.

        Args:
            settings: all of them, by name, as JSON can hold them.
            given: the names of those that were asked for and not left to their defaults.

        Raises:
            ValueError: another value was asked for of one that decides about the numbers.
        """
        own = self.config.get("settings")
        if not isinstance(own, dict) or own.keys() != settings.keys():
            raise bad_value("--out", "a run of this version of multihead", f"{str(self.folder)!r}, of another")
        asked = [name for name in given if name in own]
        for name in asked:
            # Pairs that were made are in no file that could have moved.
            fixed = name not in MAY_CHANGE or (name == "pairs" and own[name] is None)
            if fixed and settings[name] != own[name]:
                otherwise = "A run that is continued takes the steps that it would have taken."
                expected = f"{'the default' if own[name] is None else own[name]}, as the run began"
                raise bad_value(option(name), expected, settings[name], otherwise, "Leave it out.")
        return {**own, **{name: settings[name] for name in asked}}

    def path(self, name: str) -> Path:
        """Where one of its files is."""
        return self.folder / name

    def model(self, kind: type[M], device: str) -> M:
        """The trained model, of this class.

        Raises:
            ValueError: there is none, or it can't be read or is of another class.
        """
        try:
            return saving.load(self.path(MODEL), device=device, kind=kind)
        except FileNotFoundError:
            otherwise, got = "It was stopped before its first checkpoint.", repr(str(self.folder))
            raise bad_value("RUN", f"a run with {MODEL}", got, otherwise, "Train it first.") from None
        except OSError as error:
            raise bad_value("RUN", "a run that can be read", f"{str(self.folder)!r} ({error.strerror})") from None

    def write(self, name: str, text: str) -> None:
        """Write a file whole."""
        write_whole(self.folder / name, lambda beside: beside.write_text(text, encoding="utf-8"))

    def write_config(self) -> None:
        """Write config.json anew."""
        write_json(self.folder / CONFIG, self.config)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def read_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The checkpoint's tensors and facts. ValueError if there is none or it is damaged."""
        return read_checkpoint(self.folder / STATE)

    def write_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write the checkpoint, after the metrics that led to it."""
        if self._log is not None:
            self._log.flush()
            os.fsync(self._log.fileno())
        write_checkpoint(self.folder / STATE, tensors, facts)

    # Metrics ----------------------------------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """All lines so far. A last line that a kill cut off is left out."""
        try:
            lines = self.path(_METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def begin_metrics(self, done: int) -> None:
        """Be ready for lines after step `done`: those past it, of steps that were lost, are dropped."""
        for path in list(self.folder.iterdir()):
            if _LITTER.fullmatch(path.name):
                path.unlink()
        kept = [line for line in self.metrics() if line["step"] <= done]
        self.write(_METRICS, "".join(f"{json.dumps(line)}\n" for line in kept))
        self._log = self.path(_METRICS).open("a", encoding="utf-8")

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Add a step's line. It can be read at once, by who watches."""
        self._log.write(f"{json.dumps(line)}\n")
        self._log.flush()

    def end_metrics(self) -> None:
        """No more lines will come."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def draw(self) -> None:
        """Draw loss.png of the metrics so far."""
        draw_losses(self.path(PICTURE), self.metrics())


def _read_config(folder: Path, argument: str) -> dict[str, Any]:
    def unfit(what: str, instead: str = "") -> ValueError:
        return bad_value(argument, "the folder of a run", f"{str(folder)!r}, {what}", "", instead)

    with _looking(argument, "the folder of a run", folder):
        if not folder.exists():
            raise unfit("which does not exist", "Check the path.")
        if not folder.is_dir():
            raise unfit("a file", "Name the folder it is in." if (folder.parent / CONFIG).exists() else "")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise unfit(f"which has no {CONFIG}", "Check the path.") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise unfit(f"whose {CONFIG} can't be read ({why})") from None
    if not isinstance(config, dict) or config.get("format") != _FORMAT:
        raise unfit(f"whose {CONFIG} is not of a run")
    return config
