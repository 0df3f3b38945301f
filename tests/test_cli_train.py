"""`multihead train` and `multihead generate`: what they print and make, and what they refuse and how."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from multihead import cli
from multihead.commands import train
from multihead.models.gpt import GPT
from multihead.training import session, text_run
from multihead.training.runs import Run
from multihead.training.texts import read_text

SMALL = ["--width", "8", "--layers", "1", "--heads", "2", "--context", "8", "--batch", "4"]
SMALL += ["--steps", "4", "--threads", "1", "--device", "cpu"]
TINY, CHARS = [*SMALL, "--vocabulary", "270"], [*SMALL, "--chars"]
POEM = "the cat sat on the mat. é☃\n" * 40
FILES = ["config.json", "loss.png", "metrics.jsonl", "model.safetensors", "state.safetensors", "tokenizer.json"]


DRAW = Run.draw


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pictures but where they are looked for: they take longer than all else."""
    monkeypatch.setattr(Run, "draw", lambda _: None)


@pytest.fixture
def poem(tmp_path: Path) -> Path:
    path = tmp_path / "poem.txt"
    path.write_text(POEM, encoding="utf-8")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that others copy."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "poem.txt").write_text(POEM, encoding="utf-8")
    result = call("train", *TINY, "--text", folder / "poem.txt", "--out", folder / "run", "--save-every", 3)
    assert result.exit_code == 0, result.output
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A finished run, to be spoiled."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def call(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], prog_name="multihead")


def refusal(result: Any) -> str:
    """The one line that a refused call writes, without its start."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("multihead: ")
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("multihead: ").strip()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in Run(folder, {}).metrics()]


# train ----------------------------------------------------------------------------------------------------------------


def test_trains_into_a_folder(poem: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Run, "draw", DRAW)
    result = call("train", *TINY, "--text", poem, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert sorted(path.name for path in out.iterdir()) == FILES
    told = result.stdout
    assert "270 different tokens." in told
    assert "4 steps of 4 x 8 tokens: " in told
    assert f"Into {out}. Ctrl-C saves and ends it early." in told
    assert re.search(r"^ 25%  step 1  loss \d\.\d{3}  [\d,]+ tokens/s$", told, re.MULTILINE)
    assert re.search(r"^100%  step 4  loss \d\.\d{3}  validation \d\.\d{3}  [\d,]+ tokens/s$", told, re.MULTILINE)
    assert re.search(r"^validation loss +\d\.\d{3} nats per token, perplexity \d+\.\d$", told, re.MULTILINE)
    assert told.endswith(f"\nLet it write: multihead generate {out} --prompt ...\n")
    model = GPT.load(out / "model.safetensors")
    assert model.config["vocabulary"] == 270
    assert model.config == json.loads((out / "config.json").read_text(encoding="utf-8"))["model"]


def test_every_option_reaches_the_model(poem: Path, out: Path):
    form = "--mlp swiglu --position learned --heads 4 --kv-heads 2 --dropout 0.25 --valid-share 0.3"
    how = "--accumulate 2 --learning-rate 0.5 --warm-up 0 --weight-decay 0 --clip 0 --seed 3 --dtype bfloat16"
    result = call("train", *CHARS, "--text", poem, "--out", out, *form.split(), *how.split(), "--validate-every", 2)
    assert result.exit_code == 0, result.output
    config = GPT.load(out / "model.safetensors").config
    assert {name: config[name] for name in ("mlp", "position", "heads", "kv_heads", "dropout", "context")} == {
        "mlp": "swiglu", "position": "learned", "heads": 4, "kv_heads": 2, "dropout": 0.25, "context": 8
    }  # fmt: skip
    assert config["vocabulary"] == len(set(POEM))
    lines = Run(out, {}).metrics()
    assert lines[0]["lr"] == 0.5
    assert ["validation_loss" in line for line in lines] == [False, True, False, True]
    kept_back = int(re.findall(r"([\d,]+) kept back", result.stdout)[0].replace(",", ""))
    assert kept_back == round(0.3 * len(POEM))


def test_several_texts_are_joined(poem: Path, tmp_path: Path, out: Path):
    (tmp_path / "more.txt").write_text("zebra\n" * 30, encoding="utf-8")
    arguments = ("--text", poem, "--text", tmp_path / "more.txt", "--out", out)
    result = call("train", *CHARS, *arguments)
    assert result.exit_code == 0, result.output
    assert f"{len(set(POEM + 'zebra'))} different characters." in result.stdout


def test_learns_the_language_reference_without_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = call("train", *CHARS, "--steps", 1)
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("gpt-")
    learned, kept_back = (int(found.replace(",", "")) for found in re.findall(r"[\d,]{5,}", result.stdout)[:2])
    assert learned + kept_back == len(read_text(None))


def test_same_seed_same_run(made: Path, poem: Path, tmp_path: Path):
    for seed in (0, 1):
        call("train", *TINY, "--text", poem, "--out", tmp_path / str(seed), "--seed", seed)
    assert losses(tmp_path / "0") == losses(made)
    assert losses(tmp_path / "1") != losses(made)


def test_on_a_terminal_it_moves_a_bar(poem: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = call("train", *TINY, "--text", poem, "--out", out)
    assert result.exit_code == 0, result.output
    assert "\x1b[?25h" in result.stdout  # the cursor, hidden while the bar moves, comes back
    assert "━" in result.stdout


def test_help_names_every_option_and_teaches():
    for name, function, count in (("train", train._train, 29), ("generate", train._generate, 12)):
        help_ = re.sub(r"\x1b\[[\d;]*m", "", call(name, "--help").stdout)
        parameters = [given.strip("_").replace("_", "-") for given in inspect.signature(function).parameters]
        options = [given for given in parameters if given not in ("run", "out", "resume")]
        assert len(parameters) - 1 >= count - 1
        assert [option for option in options if f"--{option} " not in help_ and option != "context"] == []
        assert "Examples:" in help_
    assert "nats per token" in re.sub(r"\s+", " ", call("train", "--help").stdout)


# Stopped and continued ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves_and_says_how_to_go_on(poem: Path, out: Path, made: Path, name: str):
    """A process of its own, as a shell has it."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    line = [sys.executable, "-m", "multihead.cli", "train", *TINY, "--steps", "1000000", "--text", poem, "--out", out]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([str(part) for part in line], env=environment, **pipes) as child:
        try:
            for told in child.stdout:  # the first line of progress says that training has begun
                if " step 1 " in told:
                    break
            child.send_signal(getattr(signal, name))
            output, errors = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 128 + getattr(signal, name)
    assert errors == ""
    done = int(re.findall(r"Stopped\. ([\d,]+) of 1,000,000 steps are saved", output)[0].replace(",", ""))
    assert output.endswith(f"\nTo go on: multihead train --out {out} --resume\n")
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert len(losses(out)) == done
    assert losses(out)[0] == losses(made)[0]


def test_resume_goes_on_to_the_same_numbers(made: Path, poem: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    fit = session._Session._due
    with monkeypatch.context() as patch:  # Ctrl-C in step 2
        patch.setattr(session._Session, "_due", lambda self, every: press(self) or fit(self, every))

        def press(self: Any) -> None:
            if self.trainer.done == 2:
                signal.raise_signal(signal.SIGINT)

        stopped = call("train", *TINY, "--text", poem, "--out", out)
    assert stopped.exit_code == 130
    assert "Stopped. 2 of 4 steps are saved" in stopped.stdout
    result = call("train", "--out", out, "--resume")
    assert result.exit_code == 0, result.output
    assert "2 of 4 steps are done." in result.stdout
    assert losses(out) == losses(made)
    theirs = GPT.load(made / "model.safetensors").state_dict()
    assert all(
        torch.equal(tensor, theirs[name]) for name, tensor in GPT.load(out / "model.safetensors").state_dict().items()
    )


def test_resume_for_longer_with_the_text_elsewhere(run: Path, made: Path, tmp_path: Path):
    moved = tmp_path / "moved.txt"
    moved.write_text(POEM, encoding="utf-8")
    result = call("train", "--out", run, "--resume", "--steps", 6, "--text", moved, "--validate-every", 1)
    assert result.exit_code == 0, result.output
    assert losses(run)[:4] == losses(made)
    assert len(losses(run)) == 6
    settings = json.loads((run / "config.json").read_text(encoding="utf-8"))["settings"]
    assert (settings["steps"], settings["width"], settings["text"]) == (6, 8, [str(moved)])


def test_overwrite_begins_anew(run: Path, poem: Path):
    (run / "notes.txt").write_text("mine")
    result = call("train", *TINY, "--text", poem, "--out", run, "--overwrite", "--steps", 2)
    assert result.exit_code == 0, result.output
    assert len(losses(run)) == 2
    assert (run / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "--out: expected a folder without a run, got"),
        ("--resume", "--steps: expected more than the 4 that are done, got 4. The run is finished."),
        ("--resume --steps 3", "--steps: expected more than the 4 that are done, got 3."),
        ("--resume --steps 9 --width 16", "--width: expected 8, as the run began, got 16."),
        ("--resume --steps 9 --chars", "--chars: expected False, as the run began, got True."),
        ("--resume --steps 9 --seed 1", "--seed: expected 0, as the run began, got 1."),
        ("--resume --overwrite", "--resume, --overwrite: expected one of the two, got both."),
        ("--overwrite --steps 0", "--steps: expected at least 1, got 0."),
        ("--overwrite --text absent.txt", "absent.txt', which does not exist. Check the path."),
        ("--overwrite --context 5000", "--text: expected at least 5,558 tokens"),
    ],
)
def test_refuses_and_loses_nothing(run: Path, poem: Path, arguments: str, told: str):
    before = contents(run)
    assert told in refusal(call("train", "--text", poem, "--out", run, *arguments.split()))
    assert contents(run) == before


def test_refuses_to_resume_with_another_text(run: Path, poem: Path):
    poem.write_text(POEM + "!", encoding="utf-8")
    before = contents(run)
    told = refusal(call("train", "--out", run, "--resume", "--steps", 9, "--text", poem))
    assert told.startswith("--text: expected what the run began with, got something else.")
    assert contents(run) == before


def spoil(run: Path, name: str) -> None:
    path = run / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", ["config.json", "state.safetensors", "tokenizer.json"])
def test_refuses_to_resume_what_is_damaged(run: Path, name: str):
    spoil(run, name)
    before = contents(run)
    assert name in refusal(call("train", "--out", run, "--resume", "--steps", 9))
    assert contents(run) == before


def test_refuses_the_checkpoint_of_another_model(run: Path, poem: Path, out: Path):
    call("train", *TINY, "--width", 16, "--text", poem, "--out", out)
    shutil.copy(out / "state.safetensors", run)
    told = refusal(call("train", "--out", run, "--resume", "--steps", 9))
    assert "expected a checkpoint of this run's model, got another (" in told
    assert "has shape (270, 16) there and (270, 8) here" in told


# What train refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--width 18 --heads 4", "--width: expected a multiple of 2 * --heads = 8, got 18."),
        ("--kv-heads 3", "--kv-heads: expected a divisor of --heads = 2, got 3."),
        ("--kv-heads 0", "--kv-heads: expected at least 1, got 0."),
        ("--context 0", "--context: expected at least 1, got 0."),
        ("--chars", "--vocabulary: expected none with --chars, got 270. There a token is a character. Leave it out."),
        ("--width 100000000000000000000", "--width: expected at most 1048576, got 100000000000000000000."),
        ("--layers 100000000000000000000", "--layers: expected at most 4096, got 100000000000000000000."),
        ("--batch 100000000000000000000", "--batch: expected at most 1048576, got 100000000000000000000."),
        (f"--steps 1{'0' * 400}", "--steps: expected at most 1000000000000, got 1000"),
        ("--learning-rate 3e38", "--learning-rate: expected at most 1e+06, got 3e+38."),
        ("--weight-decay 1e300", "--weight-decay: expected at most 1e+06, got 1e+300."),
        (f"--text {'x' * 400}", "which can't be read (File name too long). Check the path."),
        ("--vocabulary 255", "--vocabulary: expected at least 256, got 255."),
        ("--dropout 1.5", "--dropout: expected a number from 0 to 1, got 1.5."),
        ("--valid-share 1", "--valid-share: expected a number between 0 and 1, got 1.0."),
        ("--batch 0", "--batch: expected at least 1, got 0."),
        ("--accumulate 3", "--batch: expected a multiple of 3, the processes times --accumulate, got 4."),
        ("--dtype float16", "--dtype: expected float32 or bfloat16 without CUDA, got float16."),
        ("--device abacus", "--device: expected a device of this machine, got abacus ("),
        ("--parallel ddp", "--parallel: expected a run of torchrun, got a single process."),
        ("--learning-rate -1", "--learning-rate: expected a finite number above 0, got -1.0."),
        ("--resume", "--out: expected the folder of a run"),
        ("--mlp relu", "Invalid value for '--mlp'"),
        ("--steps many", "Invalid value for '--steps'"),
        ("--stpes 3", "--stpes"),
        ("leftover", "leftover"),
    ],
)
def test_refuses_bad_options(poem: Path, out: Path, arguments: str, told: str):
    assert told in refusal(call("train", *TINY, "--text", poem, "--out", out, *arguments.split()))
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "which is empty"),
        (b"caf\xe9 au lait", "whose byte 3 (counted from 0), 0xe9, is not UTF-8"),
        (b"PK\x03\x04\x00", "whose byte 4 (counted from 0), 0x00, is in no text"),
        (b"x", "--text: expected at least 2 characters, got 1."),
    ],
)
def test_refuses_bad_texts(poem: Path, out: Path, data: bytes, told: str):
    poem.write_bytes(data)
    assert told in refusal(call("train", *TINY, "--text", poem, "--out", out))
    assert not out.parent.exists()


@pytest.mark.parametrize("chars", [True, False])
@pytest.mark.parametrize("context", [1, 8, 32])
def test_says_how_long_a_text_must_be(poem: Path, out: Path, context: int, chars: bool):
    arguments = [*(CHARS if chars else TINY), "--text", poem, "--out", out, "--context", context, "--steps", 1]
    poem.write_text("ab")
    told = refusal(call("train", *arguments))
    least = int(re.findall(r"expected at least ([\d,]+) (?:tokens|characters)", told)[0].replace(",", ""))
    poem.write_text("".join(chr(ord("a") + i * i % 23) for i in range(least if chars else 5 * least)))
    assert call("train", *arguments).exit_code == 0


def test_refuses_a_folder_of_something_else(poem: Path, tmp_path: Path):
    before = contents(tmp_path)
    for overwrite in ([], ["--overwrite"]):
        told = refusal(call("train", *TINY, "--text", poem, "--out", tmp_path, *overwrite))
        assert told.startswith("--out: expected a new or empty folder, got")
        assert contents(tmp_path) == before


def test_of_several_processes_each_says_which_it_is(run: Path, monkeypatch: pytest.MonkeyPatch):
    """What is missing may be missing on one machine alone."""
    monkeypatch.setenv("RANK", "1")
    assert refusal(call("train", "--out", run)).startswith("rank 1: --out: expected a folder without a run")
    monkeypatch.setenv("RANK", "0")
    assert refusal(call("train", "--out", run)).startswith("--out: expected a folder without a run")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits of this kind")
def test_a_full_disk_is_told_in_one_line(poem: Path, out: Path):
    """As it comes from the library that writes: here because no file may be as long as the model's."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        result = call("train", *TINY, "--width", 64, "--text", poem, "--out", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith(f"multihead: {out}: can't be written to (")
    assert "File too large" in result.stderr
    assert result.stderr.endswith("What was saved last stands.\n")
    assert result.stderr.count("\n") == 1
    assert not list(out.glob(".*.tmp"))


def test_a_text_whose_name_is_not_utf8(poem: Path, out: Path):
    try:
        named = poem.rename(os.fsdecode(os.fsencode(poem.parent) + b"/caf\xe9.txt"))
    except (OSError, UnicodeError):
        pytest.skip("this file system has no such names")
    result = call("train", *TINY, "--text", named, "--out", out)
    assert result.exit_code == 0, result.exception
    result = call("train", "--out", out, "--resume", "--steps", 5)
    assert result.exit_code == 0, result.exception


def test_a_model_that_can_not_be_compiled(poem: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise torch._dynamo.exc.TorchDynamoException("no compiler found\n\nSet TORCH_LOGS for more")

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "compile", lambda _: None)  # imports what warns
        patch.setattr(session.Trainer, "advance", fail)
        result = call("train", *TINY, "--text", poem, "--out", out, "--compile")
    assert result.exit_code == 2
    assert result.stderr == (
        "multihead: --compile: expected a model that can be compiled here, got: no compiler found. "
        "Add --resume --no-compile.\n"
    )
    assert call("train", "--out", out, "--resume", "--no-compile").exit_code == 0


def test_a_signal_that_ends_the_compiler_too(poem: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        raise torch._dynamo.exc.TorchDynamoException("the compiler was interrupted")

    monkeypatch.setattr(GPT, "compile", lambda _: None)
    monkeypatch.setattr(session.Trainer, "advance", fail)
    result = call("train", *TINY, "--text", poem, "--out", out, "--compile")
    assert (result.exit_code, result.stderr) == (130, "")
    assert result.stdout.endswith(f"\nTo go on: multihead train --out {out} --resume\n")


@pytest.mark.parametrize("how", [lambda: torch.empty(1 << 50, dtype=torch.uint8), lambda: [0] * (1 << 60)])
def test_too_little_memory_is_told_in_one_line(poem: Path, out: Path, monkeypatch: pytest.MonkeyPatch, how: Any):
    """However torch or Python tell it."""
    advance = session.Trainer.advance
    monkeypatch.setattr(session.Trainer, "advance", lambda self: how() if self.done == 2 else advance(self))
    result = call("train", *TINY, "--text", poem, "--out", out, "--save-every", 1)
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith("multihead: --batch: expected steps that fit into memory, got larger ones.")
    assert result.stderr.count("\n") == 1
    monkeypatch.undo()
    assert "2 of 4 steps are done." in call("train", "--out", out, "--resume").stdout


def test_another_error_is_not_taken_for_too_little_memory(poem: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session.Trainer, "advance", lambda _: torch.ones(2) @ torch.ones(3))
    assert isinstance(call("train", *TINY, "--text", poem, "--out", out).exception, RuntimeError)


def test_a_reader_that_has_enough_does_not_stop_it(poem: Path, out: Path):
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    line = [sys.executable, "-m", "multihead.cli", "train", *TINY, "--text", str(poem), "--out", str(out)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, env=environment, **pipes) as child:
        try:
            child.stdout.close()
            errors = child.stderr.read()
            child.wait(timeout=60)
        finally:
            child.kill()
    assert (child.returncode, errors) == (0, b"")
    assert len(losses(out)) == 4


def test_says_how_to_get_what_is_missing(poem: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("safetensors", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)  # how Python marks a module that can't be imported
            told = refusal(call("train", *TINY, "--text", poem, "--out", out))
            assert f"needs {name}" in told
            assert told.endswith("Next: pip install 'multihead[models]'")
    assert not out.parent.exists()


def test_an_error_of_ours_is_not_taken_for_bad_input(poem: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(text_run, "carry_out", broken)
    assert isinstance(call("train", *TINY, "--text", poem, "--out", out).exception, ValueError)


# generate -------------------------------------------------------------------------------------------------------------


def generated(run: Path, *arguments: object) -> str:
    result = call("generate", run, "--device", "cpu", "--threads", 1, *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return str(result.stdout)


def test_writes_on_after_the_prompt(run: Path):
    told = generated(run, "--prompt", "the cat é", "--max-new-tokens", 20, "--seed", 1)
    assert told.startswith("the cat é")
    assert told.endswith("\n")
    assert len(told) > 20
    assert told == generated(run, "--prompt", "the cat é", "--max-new-tokens", 20, "--seed", 1)
    assert told != generated(run, "--prompt", "the cat é", "--max-new-tokens", 20, "--seed", 2)
    assert generated(run, "--max-new-tokens", 1).startswith("\n")


def test_samples_as_it_is_told(run: Path):
    greedy = generated(run, "--temperature", 0, "--max-new-tokens", 12)
    for arguments in (["--top-k", 1], ["--top-p", 1e-9], ["--min-p", 1], ["--temperature", 1e-5]):
        assert generated(run, "--max-new-tokens", 12, *arguments) == greedy
    penalised = generated(run, "--temperature", 0, "--max-new-tokens", 12, "--repetition-penalty", 1e9)
    assert penalised != greedy


def test_starts_with_a_character_that_the_model_knows(poem: Path, out: Path):
    poem.write_text("cab" * 40)
    assert call("train", *CHARS, "--text", poem, "--out", out).exit_code == 0
    assert generated(out, "--max-new-tokens", 3).startswith("a")


def test_a_model_that_gives_no_numbers(run: Path):
    model = GPT.load(run / "model.safetensors")
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    model.save(run / "model.safetensors")
    result = call("generate", run, "--prompt", "the", "--device", "cpu")
    assert (result.exit_code, result.stdout) == (2, "the\n"), result.exception
    assert result.stderr.startswith("multihead: RUN: expected a run that has learned something, got")
    assert result.stderr.count("\n") == 1


def test_ends_before_a_stop_string(run: Path):
    whole = generated(run, "--temperature", 0, "--max-new-tokens", 30, "--prompt", "the")
    written = whole.removeprefix("the").removesuffix("\n")
    stop = written[5:8]
    told = generated(run, "--temperature", 0, "--max-new-tokens", 30, "--prompt", "the", "--stop", stop)
    assert told == "the" + written.split(stop)[0] + "\n"


def test_shows_whole_characters_as_they_come(run: Path, monkeypatch: pytest.MonkeyPatch):
    from multihead.training import writing
    from multihead.training.tokenizers import tokenizer_from

    tokens = tokenizer_from(run / "tokenizer.json").encode("x𝄞y")
    assert len(tokens) == 6
    monkeypatch.setattr(writing, "stream", lambda *_, **__: iter([torch.tensor([token]) for token in tokens[:-2]]))
    options: dict[str, Any] = dict.fromkeys(("top_k", "top_p", "min_p", "seed", "threads"))
    options |= {"max_new_tokens": 1, "temperature": 1.0, "repetition_penalty": 1.0, "stop": [], "device": "cpu"}
    made = writing.prepare_writing(run, prompt="a", **options)
    assert list(made.pieces()) == ["x", "", "", "", "\ufffd", ""]
    monkeypatch.setattr(writing, "stream", lambda *_, **__: iter([torch.tensor([token]) for token in tokens]))
    made = writing.prepare_writing(run, prompt="a", **options)
    assert list(made.pieces()) == ["x", "", "", "", "𝄞", "y", "", ""]


def test_needs_no_training_to_be_finished(poem: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session.Trainer, "advance", stop)
    result = call("train", *TINY, "--text", poem, "--out", out)
    assert result.exit_code == 130
    assert "Stopped. 0 of 4 steps are saved" in result.stdout
    assert len(generated(out, "--max-new-tokens", 5)) > 1


def test_a_reader_that_has_enough_is_no_error(run: Path):
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    line = [sys.executable, "-m", "multihead.cli", "generate", str(run), "--prompt", "the cat", "--threads", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*line, "--max-new-tokens", "100000"], env=environment, **pipes) as child:
        try:
            assert child.stdout.read(7) == b"the cat"
            child.stdout.close()
            errors = child.stderr.read()
            child.wait(timeout=60)
        finally:
            child.kill()
    assert errors == b""
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-new-tokens", 0], "--max-new-tokens: expected at least 1, got 0."),
        (["--temperature", -1], "--temperature: expected 0, or a number from"),
        (["--top-k", 0], "--top-k: expected at least 1, got 0."),
        (["--top-p", 1.5], "--top-p: expected a number above 0 and at most 1, got 1.5."),
        (["--min-p", -0.5], "--min-p: expected a number from 0 to 1, got -0.5."),
        (["--repetition-penalty", 0], "--repetition-penalty: expected a number from 1e-05 to 1e+09, got 0.0."),
        (["--seed", -1], "--seed: expected None or an int from 0 to 2^63 - 1, got -1."),
        (["--prompt", ""], "--prompt: expected at least one character, got none."),
        (["--prompt", "caf\udce9"], "--prompt: expected text in UTF-8, got '\\udce9' in it."),
        (["--stop", ""], "--stop: expected at least one character, got none."),
        (["--device", "abacus"], "--device: expected a device of this machine, got abacus ("),
        (["--threads", 0], "--threads: expected at least 1, got 0."),
    ],
)
def test_generate_refuses_bad_options(run: Path, arguments: list[object], told: str):
    assert refusal(call("generate", run, "--device", "cpu", *arguments)).startswith(told)


def test_refuses_a_prompt_of_unknown_characters(poem: Path, out: Path):
    call("train", *CHARS, "--text", poem, "--out", out)
    told = refusal(call("generate", out, "--prompt", "the Z"))
    assert told.startswith("--prompt: expected characters that occur in the text, got 'Z'.")


def test_generate_refuses_what_is_no_run(run: Path, poem: Path):
    assert "RUN: expected the folder of a run" in refusal(call("generate", poem))
    assert "which does not exist" in refusal(call("generate", run / "absent"))
    assert "File name too long" in refusal(call("generate", "a prompt in its place " * 20))
    assert "Missing argument 'RUN'" in refusal(call("generate"))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        copy = Path(shutil.copytree(run, run.parent / name))
        spoil(copy, name)
        assert name in refusal(call("generate", copy))
        (copy / name).unlink()
        assert name in refusal(call("generate", copy))


def test_refuses_a_damaged_model(run: Path):
    path = run / "model.safetensors"
    data = path.read_bytes()
    for spoiled, told in (
        (data + b"x", f"{len(data) + 1} bytes, but its tensors end at {len(data)}"),
        (data.replace(b'"F32"', b'"F16"', 1), "a damaged one ("),
        (data.replace(b"[0,", b"[4,", 1), "a damaged one ("),
    ):
        path.write_bytes(spoiled)
        assert refusal(call("generate", run)).startswith(f"{path}: expected a safetensors file, got {told}")


def test_refuses_a_model_and_a_tokenizer_that_do_not_fit(run: Path, poem: Path, out: Path):
    call("train", *TINY, "--vocabulary", 260, "--text", poem, "--out", out)
    shutil.copy(out / "tokenizer.json", run)
    told = refusal(call("generate", run))
    assert told.startswith("RUN: expected a model and a tokenizer of one vocabulary, got one of 270 and one of 260.")
