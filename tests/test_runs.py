"""The folder of a run: nothing is lost or half written, and what was stopped or killed goes on to the same numbers."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from multihead import whole_files
from multihead.models.gpt import GPT
from multihead.training import runs
from multihead.training.checkpoints import read_checkpoint, write_checkpoint, write_json
from multihead.training.language import LanguageModelling
from multihead.training.loop import Step, Trainer
from multihead.training.options import Options
from multihead.training.parallel import Processes
from multihead.training.plan import Checkpoint, carry_out, start
from multihead.training.runs import Run, check_new, default_folder
from multihead.training.session import Outcome, fit
from multihead.whole_files import write_whole

OPTIONS = Options(steps=9, warm_up=2, learning_rate=3e-3, validate_every=3, save_every=4)
TOKENS = torch.arange(150) * 7 % 11
SETTINGS: dict[str, Any] = {**vars(OPTIONS), "width": 8, "text": []}
NEW: dict[str, Any] = {"given": [], "resume": False, "overwrite": False}
QUIET: dict[str, Any] = {
    "console": Console(file=io.StringIO()), "config": {}, "files": {}, "about": [], "command": "", "then": str
}  # fmt: skip


class Killed(BaseException):
    """Stands for the end of the process: nobody catches it."""


class Watched(LanguageModelling):
    """Calls something at the beginning of each step."""

    at_step: Callable[[int], None] = staticmethod(lambda _: None)

    def batches(self, generator: torch.Generator, step: int, parts: int) -> Any:
        self.at_step(step)
        return super().batches(generator, step, parts)


def make_task(seed: int = 0) -> Watched:
    torch.manual_seed(seed)
    model = GPT(11, 8, 1, 2, context=5, dropout=0.1)
    return Watched(model, TOKENS[:130], TOKENS[130:], valid_bytes=20, context=5, batch=3)


def go(run: Run, task: Watched, options: Options = OPTIONS, **how: Any) -> Outcome:
    return fit(task, options, run, processes=Processes(), console=Console(file=io.StringIO()), **how)


def begin(folder: Path, **how: Any) -> Run:
    return Run.create(folder, "gpt", {"settings": {}}, {"tokenizer.json": "{}"}, **how)


def resume(folder: Path, options: Options = OPTIONS) -> Outcome:
    run, task = Run.open(folder, "gpt", "--out"), make_task(seed=1)
    found = Checkpoint.read(run, options.steps)
    found.check(task.model)
    return go(run, task, options, state=found.tensors, seconds=found.seconds)


def what_counts(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The numbers of a run, without its times."""
    lines = Run(folder, {}).metrics()
    for line in lines:
        del line["seconds"], line["tokens_per_second"]
    return lines, read_checkpoint(folder / "state.safetensors")[0], GPT.load(folder / "model.safetensors").state_dict()


def assert_same_run(one: Path, other: Path) -> None:
    (lines, *tensors), (wanted, *expected) = what_counts(one), what_counts(other)
    assert lines == wanted
    for mine, theirs in zip(tensors, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


class Now(runs.datetime):
    """A clock that stands."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return cls(2025, 1, 2, 3, 4, 5, tzinfo=tz)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pictures: they take longer than all else."""
    monkeypatch.setattr(Run, "draw", lambda _: None)


@pytest.fixture
def whole(tmp_path: Path, undrawn: None) -> Path:  # noqa: ARG001
    """A run that was never stopped."""
    folder = tmp_path / "whole"
    assert go(begin(folder), make_task()).code == 0
    return folder


# What is in it --------------------------------------------------------------------------------------------------------


def test_a_finished_run(tmp_path: Path):
    folder = tmp_path / "runs" / "new"
    outcome = go(begin(folder), make_task())
    assert (outcome.code, outcome.done) == (0, 9)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "loss.png", "metrics.jsonl", "model.safetensors", "state.safetensors", "tokenizer.json"
    ]  # fmt: skip
    lines = Run(folder, {}).metrics()
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6, 9]
    assert set(lines[0]) == {"step", "loss", "lr", "tokens_per_second", "seconds"}
    assert set(lines[8]) - set(lines[0]) == {"validation_loss", "validation_bits_per_byte"}
    assert outcome.validation["loss"] == lines[8]["validation_loss"]
    picture = (folder / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 700
    assert height > 400


def test_the_model_is_that_of_the_checkpoint(whole: Path):
    _, state, model = what_counts(whole)
    assert all(torch.equal(state[f"model.{name}"], tensor) for name, tensor in model.items())
    assert state["done"] == 9


def test_folders_are_named_after_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first = default_folder("gpt")
    assert re.fullmatch(r"runs/gpt-\d{8}-\d{6}", first.as_posix())

    monkeypatch.setattr(runs, "datetime", Now)
    for name in ("runs/gpt-20250102-030405", "runs/gpt-20250102-030405-2"):
        assert default_folder("gpt").as_posix() == name
        Path(name).mkdir(parents=True)


def test_a_run_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # how Python marks a module that can't be imported
    told = io.StringIO()
    run = begin(tmp_path / "run")
    outcome = fit(make_task(), OPTIONS, run, processes=Processes(), console=Console(file=told))
    assert outcome.code == 0
    assert told.getvalue().count("There will be no loss.png: ") == 1
    assert "Next: pip install 'multihead[plot]'" in told.getvalue()


# Stopped and killed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [0, 4, 5, 7])
def test_a_signal_saves_and_it_goes_on_to_the_same_numbers(tmp_path: Path, whole: Path, step: int, number: int):
    folder, task = tmp_path / "stopped", make_task()
    task.at_step = lambda at: signal.raise_signal(number) if at == step else None
    before = signal.getsignal(number)
    outcome = go(begin(folder), task)
    assert (outcome.code, outcome.done) == (128 + number, step + 1)  # the step is finished
    assert signal.getsignal(number) is before
    assert read_checkpoint(folder / "state.safetensors")[0]["done"] == step + 1
    assert resume(folder).code == 0
    assert_same_run(folder, whole)


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path, whole: Path):
    folder, task = tmp_path / "stopped", make_task()

    def press(step: int) -> None:
        if step == 6:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    task.at_step = press
    outcome = go(begin(folder), task)
    assert (outcome.code, outcome.done) == (130, 4)  # the last checkpoint's
    resume(folder)
    assert_same_run(folder, whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_step_stops_nothing(tmp_path: Path, whole: Path, number: int):
    folder, task = tmp_path / "stopped", make_task()
    task.at_step = lambda at: signal.raise_signal(number) if at == 8 else None
    outcome = go(begin(folder), task)
    assert (outcome.code, outcome.done) == (0, 9)
    assert_same_run(folder, whole)


def test_killed_between_checkpoints(tmp_path: Path, whole: Path):
    folder, task = tmp_path / "killed", make_task()

    def kill(step: int) -> None:
        if step == 6:
            raise Killed

    task.at_step = kill
    with pytest.raises(Killed):
        go(begin(folder), task)
    assert len(Run(folder, {}).metrics()) == 6  # of which two came after the checkpoint
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # and one that was being written
    (folder / ".state.safetensors.123.tmp").write_bytes(b"half of it")
    (folder / ".tokenizer.json.45.tmp").touch()
    mine = {folder / name for name in ("mine.tmp", "old-config.json.tmp", ".config.json.mine.tmp")}
    for path in mine:
        path.touch()
    assert resume(folder).code == 0
    assert_same_run(folder, whole)
    assert set(folder.glob("*.tmp")) == mine


def test_killed_at_any_moment_of_writing(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch):
    """Before and after each time that a file takes its place."""
    replaced = os.replace
    state = {"left": 0, "before": True}

    def kill(*names: Any) -> None:
        state["left"] -= 1
        if state["left"] == 0 and state["before"]:
            raise Killed
        replaced(*names)
        if state["left"] == 0:
            raise Killed

    monkeypatch.setattr(os, "replace", kill)
    moments = 0
    for count in range(1, 100):
        for before in (True, False):
            folder = tmp_path / f"killed-{count}-{before}"
            state.update(left=10**9)
            run = begin(folder)
            state.update(left=count, before=before)
            try:
                go(run, make_task())
            except Killed:
                moments += 1
            else:
                assert moments >= 12
                return
            finally:
                run.end_metrics()
            state.update(left=10**9)
            if not (folder / "state.safetensors").exists():
                assert count <= 3  # before the first checkpoint, which is of step 0
                with pytest.raises(ValueError, match="a checkpoint, got no file"):
                    resume(folder)
                continue
            if read_checkpoint(folder / "state.safetensors")[0]["done"] < 9:
                resume(folder)
            assert_same_run(folder, whole)
    raise AssertionError("it never ended")


def test_goes_on_for_longer(whole: Path):
    with pytest.raises(ValueError, match=re.escape("--steps: expected more than the 9 that are done, got 9.")):
        resume(whole)
    outcome = resume(whole, replace(OPTIONS, steps=12))
    assert (outcome.code, outcome.done) == (0, 12)
    seconds = [line["seconds"] for line in Run(whole, {}).metrics()]
    assert len(seconds) == 12
    assert seconds == sorted(seconds)  # the time goes on too


def test_a_loss_that_is_no_number(tmp_path: Path, undrawn: None):  # noqa: ARG001
    folder, task, told = tmp_path / "run", make_task(), io.StringIO()

    def break_it(step: int) -> None:
        if step == 5:
            torch.nn.init.constant_(task.model.norm.weight, float("inf"))

    task.at_step = break_it
    outcome = fit(task, OPTIONS, begin(folder), processes=Processes(), console=Console(file=told))
    assert (outcome.code, outcome.done) == (1, 4)
    assert "Stopped: the loss of step 6 is nan. A smaller --learning-rate" in told.getvalue()
    assert "Step 4 is saved." in told.getvalue()
    assert what_counts(folder)[1]["done"] == 4


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_step_that_ruins_the_model_is_not_saved(
    tmp_path: Path,
    undrawn: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    last: bool,
    finite: bool,
):
    """Of the last step no other could show it; of those before, a checkpoint that is good would be replaced."""
    folder, task, told, at = tmp_path / "run", make_task(), io.StringIO(), 9 if last else 8
    advance = Trainer.advance

    def ruin(self: Trainer) -> Step:
        step = advance(self)
        if step.number == at:  # to logits that are infinite
            torch.nn.init.constant_(task.model.norm.weight, 1e38 if finite else float("nan"))
        return step

    monkeypatch.setattr(Trainer, "advance", ruin)
    options = replace(OPTIONS, validate_every=1 if finite else 100, save_every=4)
    outcome = fit(task, options, begin(folder), processes=Processes(), console=Console(file=told))
    saved = 8 if last else 4
    assert (outcome.code, outcome.done) == (1, saved)
    # The last step is validated before it is saved.
    why = rf"the validation loss after step {at} is (inf|nan)" if finite or last else f"step {at} made weights infinite"
    assert re.search(rf"\nStopped: {why}.* A smaller --learning-rate", told.getvalue())
    assert f"Step {saved} is saved." in told.getvalue()
    assert what_counts(folder)[1]["done"] == saved
    assert all(tensor.isfinite().all() for tensor in GPT.load(folder / "model.safetensors").state_dict().values())
    assert "NaN" not in (folder / "metrics.jsonl").read_text()


# Files that are whole or not there ------------------------------------------------------------------------------------


def test_what_fails_leaves_what_was_there(tmp_path: Path):
    path = tmp_path / "x.json"
    write_json(path, {"a": "é"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}

    def fail(beside: Path) -> None:
        beside.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, fail)
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    synced, replaced = os.fsync, os.replace
    monkeypatch.setattr(whole_files.os, "fsync", lambda file: (told.append("fsync"), synced(file)))
    monkeypatch.setattr(whole_files.os, "replace", lambda *names: (told.append("replace"), replaced(*names)))
    write_json(tmp_path / "x.json", 1)
    assert told[:2] == ["fsync", "replace"]
    told.clear()
    write_checkpoint(tmp_path / "x.safetensors", {"a": torch.ones(2)}, {})
    assert told[:2] == ["fsync", "replace"]


def test_checkpoints_are_read_as_written(tmp_path: Path):
    path = tmp_path / "state.safetensors"
    tensors = {"a": torch.randn(2, 3), "done": torch.tensor(7), "half": torch.ones(3, dtype=torch.bfloat16)}
    write_checkpoint(path, tensors, {"seconds": 1.5})
    found, facts = read_checkpoint(path)
    assert facts == {"seconds": 1.5}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in tensors)


def test_refuses_what_is_no_checkpoint(tmp_path: Path, whole: Path):
    data = (whole / "state.safetensors").read_bytes()
    path = tmp_path / "state.safetensors"
    for length in (0, 4, 9, 200, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=re.escape(f"{path}: expected a")) as error:
            read_checkpoint(path)
        assert "\n" not in str(error.value)
    header = b'{"__metadata__":[1]}'
    for spoiled in (data + b"x", data.replace(b'"F32"', b'"F16"', 1), len(header).to_bytes(8, "little") + header):
        path.write_bytes(spoiled)
        with pytest.raises(ValueError, match=re.escape(f"{path}: expected a safetensors file, got ")) as error:
            read_checkpoint(path)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=re.escape("got another safetensors file. It holds no state of a training.")):
        read_checkpoint(whole / "model.safetensors")
    with pytest.raises(ValueError, match="expected a checkpoint, got no file"):
        read_checkpoint(tmp_path / "absent")


def test_refuses_the_checkpoint_of_another_model(whole: Path):
    found = Checkpoint.read(Run.open(whole, "gpt", "--out"), 100)
    with pytest.raises(ValueError, match="expected a checkpoint of this run's model, got another"):
        found.check(GPT(11, 16, 1, 2))
    write_checkpoint(whole / "state.safetensors", {"a": torch.ones(1)}, {"seconds": 1.0})
    with pytest.raises(ValueError, match="a checkpoint that says how many steps it took"):
        Checkpoint.read(Run.open(whole, "gpt", "--out"), 100)


# Where a run may begin ------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_begins_in_a_new_or_empty_folder(tmp_path: Path):
    check_new(tmp_path / "a" / "b", overwrite=False)
    check_new(tmp_path, overwrite=False)
    check_new(tmp_path, overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten_unless_asked(whole: Path):
    (whole / "notes.txt").write_text("mine")
    before = contents(whole)
    with pytest.raises(ValueError, match="Add --resume to continue it, --overwrite to begin"):
        check_new(whole, overwrite=False)
    check_new(whole, overwrite=True)
    assert contents(whole) == before
    with pytest.raises(FileExistsError, match="another run has begun in it"):
        begin(whole)
    assert contents(whole) == before
    begin(whole, overwrite=True)
    assert sorted(path.name for path in whole.iterdir()) == [
        "config.json", "metrics.jsonl", "notes.txt", "tokenizer.json"
    ]  # fmt: skip
    assert (whole / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("made", [True, False])
def test_of_two_runs_that_begin_in_one_folder_one_is_refused(tmp_path: Path, undrawn: None, made: bool):  # noqa: ARG001
    folder = tmp_path / "run"
    if made:
        folder.mkdir()
    first, second = (start("gpt", SETTINGS, **NEW, out=folder) for _ in range(2))
    assert carry_out(first, make_task(), **QUIET) == 0
    before = contents(folder)
    with pytest.raises(FileExistsError, match="another run has begun in it"):
        carry_out(second, make_task(seed=1), **QUIET)
    assert contents(folder) == before


def test_of_two_runs_of_one_moment_each_has_a_folder(
    tmp_path: Path,
    undrawn: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "datetime", Now)
    begun = [start("gpt", SETTINGS, **NEW, out=None) for _ in range(2)]
    assert begun[0].folder == begun[1].folder
    for each in begun:
        assert carry_out(each, make_task(), **QUIET) == 0
    assert [each.folder.name for each in begun] == ["gpt-20250102-030405", "gpt-20250102-030405-2"]
    assert sorted((tmp_path / "runs").iterdir()) == [tmp_path / each.folder for each in begun]
    assert all(len(Run(each.folder, {}).metrics()) == 9 for each in begun)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_run_is_never_overwritten(tmp_path: Path, overwrite: bool):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.txt").write_text("mine")
    before = contents(tmp_path)
    for name, told in [
        ("file", "a file. It would be lost."),
        ("file/below", "is a file"),
        ("folder", "It holds something else than a run."),
    ]:
        with pytest.raises(ValueError, match=r"^--out: expected a ") as error:
            check_new(tmp_path / name, overwrite=overwrite)
        assert told in str(error.value)
    assert contents(tmp_path) == before


def test_refuses_what_can_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    long = tmp_path / ("x" * 300)
    with pytest.raises(ValueError, match=r"^--out: expected a folder that can be made, got .*too long"):
        check_new(long, overwrite=False)
    with pytest.raises(ValueError, match=r"^RUN: expected the folder of a run, got .*too long"):
        Run.open(long, "gpt", "RUN")

    def locked(*_: object, **__: object) -> None:  # as below a folder without permission
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", locked)
    with pytest.raises(ValueError, match=r"^--out: expected a folder that can be made, got .*\(Permission denied\)"):
        check_new(tmp_path / "run", overwrite=False)
    with pytest.raises(ValueError, match=r"^RUN: expected the folder of a run, got .*\(Permission denied\)"):
        Run.open(tmp_path / "run", "gpt", "RUN")
    with pytest.raises(ValueError, match=r"^--out: expected a folder that can be made, got 'runs' \(Permission denied"):
        default_folder("gpt")


@pytest.mark.parametrize("told", ["{", "[]", '{"format": "of another program"}'])
def test_anothers_config_is_not_overwritten(tmp_path: Path, told: str):
    (tmp_path / "config.json").write_text(told)
    with pytest.raises(ValueError, match=r"^--out: expected the folder of a run"):
        check_new(tmp_path, overwrite=True)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent", "which does not exist."),
        ("whole/metrics.jsonl", "a file. Name the folder it is in."),
        (".", "which has no config.json."),
    ],
)
def test_refuses_what_is_no_run(tmp_path: Path, whole: Path, name: str, told: str):
    assert whole.parent == tmp_path
    with pytest.raises(ValueError, match=r"^RUN: expected the folder of a run, got ") as error:
        Run.open(tmp_path / name, "gpt", "RUN")
    assert told in str(error.value)


def test_refuses_a_run_of_another_kind(whole: Path):
    with pytest.raises(ValueError, match=r"^RUN: expected a run of kind 'translator', got '.*whole', of kind 'gpt'"):
        Run.open(whole, "translator", "RUN")


# Around the loop, for any task ----------------------------------------------------------------------------------------


def test_any_task_is_begun_stopped_and_continued(tmp_path: Path, whole: Path):
    """As a command for another task calls it."""
    folder = tmp_path / "run"

    def call(task: Watched, **how: Any) -> tuple[int, str]:
        begun = start("gpt", SETTINGS, **(NEW | {"out": folder} | how))
        told = io.StringIO()
        code = carry_out(
            begun,
            task,
            Console(file=told),
            config={"model": task.model.config, "data": "x"},
            files={"tokenizer.json": "{}"},
            about=["a task"],
            command="multihead do",
            then="Then: use {}".format,
        )
        return code, told.getvalue()

    task = make_task()
    task.at_step = lambda step: signal.raise_signal(signal.SIGINT) if step == 5 else None
    code, told = call(task)
    assert code == 130
    assert told.startswith(f"a task\nInto {folder}. Ctrl-C saves and ends it early.\n")
    assert told.endswith(
        f"\nStopped. 6 of 9 steps are saved in {folder}.\nTo go on: multihead do --out {folder} --resume\n"
    )
    with pytest.raises(ValueError, match="--data: expected what the run began with"):
        start("gpt", SETTINGS, given=[], out=folder, resume=True, overwrite=False).check_same("--data", "data", "y")
    code, told = call(make_task(seed=1), resume=True)
    assert code == 0
    assert "6 of 9 steps are done.\n" in told
    assert "validation bits per byte" in told
    assert told.endswith(f"\nThen: use {folder}\n")
    assert_same_run(folder, whole)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["settings"] == SETTINGS
    assert config["data"] == "x"


def test_a_continued_run_keeps_its_settings(whole: Path):
    run = Run(whole, {"settings": SETTINGS})
    asked = {**SETTINGS, "width": 16, "steps": 20, "threads": 2}
    assert run.continued(asked, []) == SETTINGS
    assert run.continued(asked, ["steps", "threads"]) == {**SETTINGS, "steps": 20, "threads": 2}
    told = "--width: expected 8, as the run began, got 16."
    with pytest.raises(ValueError, match=re.escape(told)):
        run.continued(asked, ["width", "steps"])
    with pytest.raises(ValueError, match="--out: expected a run of this version of multihead"):
        run.continued({**asked, "new": 1}, [])
    with pytest.raises(ValueError, match=re.escape("--to: expected the default, as the run began, got zh.")):
        Run(whole, {"settings": {**SETTINGS, "to": None}}).continued({**SETTINGS, "to": "zh"}, ["to"])


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_what_several_processes_began_one_goes_on_with(
    tmp_path: Path,
    undrawn: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    way: str,
):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    folder, task = tmp_path / "run", make_task()
    task.at_step = lambda step: signal.raise_signal(signal.SIGINT) if step == 5 else None
    assert carry_out(start("gpt", SETTINGS, **NEW, out=folder), task, **QUIET) == 130
    config = json.loads((folder / "config.json").read_text())
    config["settings"]["parallel"] = way
    write_json(folder / "config.json", config)
    again = start("gpt", SETTINGS, **(NEW | {"resume": True}), out=folder)
    assert again.options.parallel is None
    assert carry_out(again, make_task(seed=1), **QUIET) == 0
    write_json(folder / "config.json", config)
    asked = NEW | {"resume": True, "given": ["parallel"]}
    with pytest.raises(ValueError, match="--parallel: expected a run of torchrun, got a single process"):
        start("gpt", {**SETTINGS, "parallel": way}, **asked, out=folder)


def test_resume_and_overwrite_do_not_go_together():
    with pytest.raises(ValueError, match=re.escape("--resume, --overwrite: expected one of the two, got both.")):
        start("gpt", SETTINGS, given=[], out=Path("x"), resume=True, overwrite=True)
    with pytest.raises(ValueError, match=re.escape("--resume: expected a run's folder in --out, got none.")):
        start("gpt", SETTINGS, given=[], out=None, resume=True, overwrite=False)
