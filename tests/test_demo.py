"""The demo and its command line: what it prints, what it refuses and how, that it learns, and how Ctrl-C ends it."""

from __future__ import annotations

import inspect
import io
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from multihead import __version__, cli, demo
from multihead.models import gpt
from multihead.side_by_side import FORMS, Sizes, train_all

TINY = ["--width", "16", "--layers", "1", "--heads", "2", "--context", "16", "--sample-length", "40"]
POEM = "the cat sat on the mat. " * 40


@pytest.fixture
def poem(tmp_path: Path) -> Path:
    path = tmp_path / "poem.txt"
    path.write_text(POEM, encoding="utf-8")
    return path


def call(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], prog_name="multihead")


def tiny(*arguments: object) -> Any:
    return call("demo", *TINY, "--no-compare", *arguments)


def refusal(result: Any) -> str:
    """The one line that a refused call writes, without its start."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("multihead: ")
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("multihead: ").strip()


def sample_in(output: str) -> str:
    return output.split("\nA sample:\n")[1].split("\nHow the first layer")[0]


def value_in(output: str, name: str) -> float:
    found = re.search(rf"^{name} +([\d.,]+)", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1].replace(",", ""))


# What it prints -----------------------------------------------------------------------------------------------------


def test_prints_what_was_reached(poem: Path):
    result = tiny("--text", poem, "--steps", 3)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert value_in(result.stdout, "steps") == 3
    assert value_in(result.stdout, "tokens seen") == 3 * 512  # 32 pieces of 16 characters
    assert value_in(result.stdout, "speed") > 0
    assert 0 < value_in(result.stdout, "validation loss") < 2 * value_in(result.stdout, "  to compare")
    assert len(sample_in(result.stdout)) == 1 + 40 + 1  # the prompt, the sample, the line's end
    assert set(sample_in(result.stdout)) <= set(POEM + "\n")


def test_counts_the_parameters(poem: Path):
    result = tiny("--text", poem, "--steps", 1)
    V, E = len(set(POEM)), 16
    block = 4 * E * E + 4 * E + 8 * E * E + 5 * E + 4 * E  # attention, its biases, MLP, its biases, two norms
    assert value_in(result.stdout, "parameters") == V * E + 16 * E + block + 2 * E  # 16 positions; the last norm


def test_explains_a_layer_of_the_model(poem: Path):
    result = tiny("--text", poem, "--steps", 1)
    told = result.stdout.split("is computed:\n")[1]
    assert told.startswith("Attention(16, 2")
    assert "causal()" in told
    assert "x (32, 16, 16)" in told
    assert "not training" not in told


def test_learns_the_language_reference_without_a_text():
    result = tiny("--steps", 1)
    assert result.exit_code == 0, result.output
    learned, kept_back = (int(found.replace(",", "")) for found in re.findall(r"[\d,]{5,}", result.stdout)[:2])
    assert learned > 100_000
    assert kept_back == (learned + kept_back) // 10


def test_trains_for_a_time(poem: Path):
    result = tiny("--text", poem, "--seconds", 0.05)
    assert result.exit_code == 0, result.output
    assert value_in(result.stdout, "steps") >= 1
    assert "\n100%  step " in result.stdout


def test_without_a_terminal_it_writes_lines_and_no_escape_codes(poem: Path):
    result = tiny("--text", poem, "--steps", 40)
    assert "\x1b" not in result.stdout
    assert "  2%  step 1  loss " in result.stdout
    assert "100%  step 40  loss " in result.stdout


def test_on_a_terminal_it_moves_a_bar(poem: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = tiny("--text", poem, "--steps", 3)
    assert result.exit_code == 0, result.output
    assert "\x1b[?25l" in result.stdout  # the cursor is hidden while the bar moves,
    assert "\x1b[?25h" in result.stdout  # and comes back
    assert "━" in result.stdout


def test_help_names_every_option_and_teaches():
    help_ = re.sub(r"\x1b\[[\d;]*m", "", call("demo", "--help").stdout)
    names = [re.sub("_", "-", name) for name in inspect.signature(demo.prepare).parameters]
    assert len(names) == 12
    assert [name for name in names if f"--{name} " not in help_] == []
    assert "nats per character" in help_
    assert "multihead demo --text book.txt" in help_


def test_version_and_the_bare_command():
    assert call("--version").stdout == f"multihead {__version__}\n"
    assert call().exit_code == 0
    assert "demo" in call().stdout


def test_console_that_lacks_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "text.txt").write_text("äöü" * 100, encoding="utf-8")
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    line = ["multihead", "demo", *TINY, "--no-compare", "--steps", "1", "--text", str(tmp_path / "text.txt")]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert b"???" in console.buffer.getvalue()  # type: ignore[attr-defined]


# The same model on torch's layer --------------------------------------------------------------------------------------


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes to measure memory."""
    monkeypatch.setattr(demo, "peak_memory", lambda *_: [30 * 2**20, *[None] * (len(FORMS) - 1)])


@pytest.mark.usefixtures("unmeasured")
def test_shows_the_same_model_on_torchs_layer(poem: Path):
    result = call("demo", *TINY, "--text", poem, "--steps", 3)
    assert (result.exit_code, result.stderr) == (0, "")
    told = result.stdout.split("\nThe same model on torch.nn.MultiheadAttention, ")[1]
    assert "32 x 16 characters" in told
    assert "100%  step 3  losses " in told
    rows = {name: re.search(rf"^{re.escape(name)} +(.*)$", told, re.MULTILINE)[1].split() for name in FORMS.values()}
    losses = {(first, last) for first, last, *_ in rows.values()}
    assert len(losses) == 1  # of all, and falling
    ((first, last),) = losses
    assert float(last) < float(first)
    assert [row[4:] for row in rows.values()] == [["30", "MiB"], ["unknown"], ["unknown"], ["unknown"]]
    assert told.splitlines()[-1].startswith("The losses a")
    assert value_in(result.stdout, "parameters") == demo_parameters(poem)


def demo_parameters(text: Path) -> int:
    """Of the model that is compared: the one that was trained."""
    plan = plan_of(text)
    return sum(parameter.numel() for parameter in plan.sizes.model().parameters())


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("asked", "seconds", "steps"),
    [("--steps 3", math.inf, 3), ("--steps 61", math.inf, 60), ("--seconds 0.1", 0.1, math.inf)],
)
def test_compares_no_longer_than_it_trains(
    poem: Path, monkeypatch: pytest.MonkeyPatch, asked: str, seconds: float, steps: float
):
    called: list[dict[str, Any]] = []

    def record(text: torch.Tensor, sizes: Sizes, **lasts: Any) -> Any:
        called.append(lasts)
        return train_all(text, sizes, **(lasts | {"steps": 1}))

    monkeypatch.setattr(demo, "train_all", record)
    assert call("demo", *TINY, "--text", poem, *asked.split(), "--seed", 7).exit_code == 0
    assert called == [{"seed": 7, "seconds": seconds, "steps": steps}]


@pytest.mark.usefixtures("unmeasured")
def test_compares_on_the_shortest_text(tmp_path: Path):
    (tmp_path / "text.txt").write_text("ab\n" * 7)
    result = call("demo", *TINY, "--text", tmp_path / "text.txt", "--steps", 2)
    assert result.exit_code == 0, result.output
    assert "32 x 16 characters" in result.stdout  # 19 to learn from, 2 kept back


def test_need_not_compare(poem: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "train_all", interrupt)
    result = tiny("--text", poem, "--steps", 1)
    assert result.exit_code == 0
    assert "torch.nn" not in result.stdout


# That it learns -----------------------------------------------------------------------------------------------------


def test_loss_falls_on_a_repeated_text(poem: Path):
    result = tiny("--text", poem, "--steps", 80)
    assert value_in(result.stdout, "validation loss") < 0.5 * value_in(result.stdout, "  to compare")


def test_same_seed_same_sample(poem: Path):
    def told(seed: int) -> tuple[str, float]:
        output = tiny("--text", poem, "--steps", 5, "--seed", seed).stdout
        return sample_in(output), value_in(output, "validation loss")

    assert told(7) == told(7)
    assert told(7) != told(8)


def test_the_sample_starts_with_the_prompt(poem: Path):
    prompt = "the cat sat on the mat"  # longer than the context
    assert sample_in(tiny("--text", poem, "--steps", 1, "--prompt", prompt).stdout).startswith(prompt)


def test_leaves_the_number_of_threads_as_it_was(poem: Path):
    before = torch.get_num_threads()
    assert tiny("--text", poem, "--steps", 1, "--threads", before + 1).exit_code == 0
    assert torch.get_num_threads() == before


def plan_of(text: Path, **changes: Any) -> demo.Plan:
    usual: dict[str, Any] = {"seconds": None, "steps": 1, "seed": 0, "threads": 1, "prompt": None, "sample_length": 1}
    usual |= {"context": 16, "width": 16, "layers": 1, "heads": 2, "compare": False}
    return demo.prepare(text=text, **(usual | changes))


def test_validation_is_the_mean_over_the_text_kept_back(poem: Path):
    plan = plan_of(poem, context=5)
    torch.manual_seed(0)
    model = gpt.GPT(len(plan.vocabulary), 16, 1, 2)
    count = (len(plan.valid) - 1) // 5
    starts = range(0, 5 * count, 5)
    losses = [gpt.loss_of(model, plan.valid[None, i : i + 5], plan.valid[None, i + 1 : i + 6]).item() for i in starts]
    assert demo.validate(model, plan) == pytest.approx(sum(losses) / count, rel=1e-5)


def test_text_is_read_as_written(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffeins\r\nzwei\rdrei\nß ".encode() + b"x" * 40)
    plan = plan_of(path)
    assert plan.spell(torch.cat([plan.train, plan.valid])) == "eins\nzwei\ndrei\nß " + "x" * 40


@pytest.mark.parametrize("context", [1, 2, 9, 16, 128])
def test_the_shortest_text(tmp_path: Path, context: int):
    path = tmp_path / "text.txt"
    path.write_text("a")
    least = int(re.findall(r"at least (\d+)", refusal(tiny("--text", path, "--context", context)))[0])
    path.write_text("ab" * least)
    longer = plan_of(path, context=context)
    path.write_text(("ab" * least)[:least])
    plan = plan_of(path, context=context)
    assert len(plan.train) == context + 1 < len(longer.train)
    assert len(plan.valid) >= 2
    assert tiny("--text", path, "--context", context, "--steps", 1).exit_code == 0
    path.write_text(("ab" * least)[: least - 1])
    assert f"got {least - 1}." in refusal(tiny("--text", path, "--context", context))


# What it refuses ----------------------------------------------------------------------------------------------------


def test_refuses_to_do_without_any_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # how Python marks a module that can't be imported
    assert "got none, and this Python comes without pydoc_data.topics. Name a file." in refusal(tiny())


def test_refuses_a_missing_file(tmp_path: Path):
    assert "absent.txt', which does not exist. Check the path." in refusal(tiny("--text", tmp_path / "absent.txt"))


def test_refuses_a_directory(tmp_path: Path):
    assert f"--text: expected a UTF-8 text file, got '{tmp_path}', a directory." in refusal(tiny("--text", tmp_path))


def test_refuses_an_empty_file(tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    assert "empty.txt', which is empty." in refusal(tiny("--text", tmp_path / "empty.txt"))


@pytest.mark.parametrize(
    ("error", "told"),
    [(PermissionError(13, "Permission denied"), "which may not be read"), (OSError(5, "I/O error"), "(I/O error)")],
)
def test_refuses_an_unreadable_file(poem: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, told: str):
    # Not by the file's mode: the superuser may read any file.
    def refuse(_: Path) -> bytes:
        raise error

    for name in ("read_bytes", "is_dir"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refuse)
            assert told in refusal(tiny("--text", poem))


def test_refuses_what_is_not_utf8(tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait" * 20)
    assert "whose byte 3 (counted from 0), 0xe9, is not UTF-8." in refusal(tiny("--text", tmp_path / "latin.txt"))


def test_refuses_a_short_text(tmp_path: Path):
    (tmp_path / "short.txt").write_text("short")
    told = refusal(call("demo", "--text", tmp_path / "short.txt"))
    assert told.startswith("--text: expected at least 143 characters for --context 128, got 5.")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--width 18 --heads 4", "--width: expected a multiple of 2 * --heads = 8, got 18."),
        ("--width 18 --heads 4", "Try --width 16 or 24."),
        ("--width 4 --heads 4", "Try --width 8."),
        ("--width 0", "--width: expected at least 1, got 0."),
        ("--layers 0", "--layers: expected at least 1, got 0."),
        ("--heads -1", "--heads: expected at least 1, got -1."),
        ("--context 0", "--context: expected at least 1, got 0."),
        ("--context 100000", "--context: expected at most 8192, got 100000."),
        ("--threads 0", "--threads: expected at least 1, got 0."),
        ("--threads 100000", "--threads: expected at most 256, got 100000."),
        ("--sample-length 0", "--sample-length: expected at least 1, got 0."),
        ("--seed -1", "--seed: expected at least 0, got -1."),
        ("--seed 9223372036854775808", "--seed: expected at most 9223372036854775807, got 9223372036854775808."),
        ("--steps 0", "--steps: expected at least 1, got 0."),
        ("--seconds 0", "--seconds: expected a finite number above 0, got 0.0."),
        ("--seconds nan", "--seconds: expected a finite number above 0, got nan."),
        ("--seconds 5 --steps 5", "--steps, --seconds: expected one of the two, got 5 and 5."),
        ("--width 4096 --layers 96", "--width, --layers: expected a model of at most 100,000,000 parameters, got 19"),
        ("--steps many", "Invalid value for '--steps'"),
        ("--steps", "requires an argument"),
        ("--stpes 3", "--stpes"),
        ("leftover", "leftover"),
    ],
)
def test_refuses_bad_options(poem: Path, arguments: str, told: str):
    assert told in refusal(tiny("--text", poem, *arguments.split()))


def test_refuses_a_prompt_of_unknown_characters(poem: Path):
    told = refusal(tiny("--text", poem, "--prompt", "the ZéZ"))
    assert told.startswith(r"--prompt: expected characters that occur in the text, got 'Z\xe9'.")
    assert "--prompt: expected at least one character" in refusal(tiny("--text", poem, "--prompt", ""))


def test_refuses_an_unknown_command():
    assert refusal(call("dmeo")).startswith("No such command 'dmeo'")


def test_an_error_of_ours_is_not_taken_for_bad_input(poem: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(demo, "train", broken)
    result = tiny("--text", poem, "--steps", 1)
    assert isinstance(result.exception, ValueError)


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_without_the_packages_of_the_command_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, name, None)  # how Python marks a module that can't be imported
    monkeypatch.delitem(sys.modules, "rich.console")
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(cli.__file__))
    assert left.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("multihead: the command line needs typer and rich (")
    assert name in told.err.split("(")[1]
    assert told.err.endswith("Next: pip install 'multihead[cli]'\n")
    assert told.err.count("\n") == 1


# Ctrl-C -------------------------------------------------------------------------------------------------------------


def test_ctrl_c_shows_what_was_reached(poem: Path):
    environment = {**os.environ, "PYTHONPATH": str(Path(demo.__file__).parent.parent)}
    line = [sys.executable, "-m", "multihead.cli", "demo", *TINY, "--steps", "1000000000", "--text", str(poem)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, env=environment, **pipes) as child:
        try:
            for told in child.stdout:  # the first line of progress says that training has begun
                if " step 1 " in told:
                    break
            child.send_signal(signal.SIGINT)
            output, errors = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 130
    assert errors == ""
    assert re.search(r"Stopped after step [\d,]+, at a training loss of \d\.\d+\.", output)
    assert len(output.split("\nA sample:\n")[1]) == 1 + 40 + 1
    assert "validation loss" not in output


def interrupt(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_before_the_first_step(poem: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "train", interrupt)
    result = tiny("--text", poem, "--steps", 3)
    assert (result.exit_code, result.stderr) == (130, "")
    assert "Stopped before the first step." in result.stdout
    assert "sample" not in result.stdout


def test_ctrl_c_while_it_is_judged(poem: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "validate", interrupt)
    result = tiny("--text", poem, "--steps", 3)
    assert (result.exit_code, result.stderr) == (130, "")
    assert "Stopped after step 3, at" in result.stdout


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", ["train_all", "peak_memory"])
def test_ctrl_c_while_it_compares(poem: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(demo, name, interrupt)
    result = call("demo", *TINY, "--text", poem, "--steps", 3)
    assert (result.exit_code, result.stderr) == (130, "")
    assert result.stdout.endswith("\nStopped: the comparison was not finished.\n")
    assert "Stopped after" not in result.stdout


@pytest.mark.parametrize("name", ["prepare", "generate"])  # while the text is read; again, while it writes
def test_ctrl_c_elsewhere_leaves_without_a_word(poem: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(demo, name, interrupt)
    result = tiny("--text", poem, "--steps", 3)
    assert (result.exit_code, result.stderr) == (130, "")
