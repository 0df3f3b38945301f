"""`multihead train-translator` and `multihead translate`: what they make and print, and what they refuse and how."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from multihead import cli, labels
from multihead.models import saving
from multihead.models.translator import Translator
from multihead.training import pairs, translating, translation_run
from multihead.training.alignment import draw_alignment
from multihead.training.translating import prepare_translating

TINY = ["--width", "16", "--layers", "1", "--heads", "2", "--batch", "8", "--device", "cpu", "--threads", "1"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAIRS = [(f"{a}{b}c $", f"{b} {a}") for a in LETTERS[:6] for b in LETTERS[:5]]


def call(*arguments: object, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin, prog_name="multihead")


def train(*arguments: object) -> Any:
    return call("train-translator", *TINY, *arguments)


def refusal(result: Any) -> str:
    """The one line that a refused call writes, without its start."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("multihead: ")
    assert result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("multihead: ").strip()


def tsv(folder: Path, pairs=PAIRS) -> Path:
    path = folder / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that has learned its pairs, more or less, and what it printed."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trained")
    result = train("--pairs", tsv(folder), "--chars", "--steps", 40, "--out", folder / "run", "--learning-rate", 1e-2)
    assert result.exit_code == 0, result.output
    return folder / "run", result.stdout


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that run, to be damaged."""
    shutil.copytree(trained[0], tmp_path / "run")
    return tmp_path / "run"


def test_what_training_leaves_and_says(trained):
    folder, told = trained
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "loss.png", "model.safetensors", "state.safetensors"} < names
    assert "tokenizer.json" in names
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["kind"] == "translator"
    assert config["longest_target"] == 4, "b, a space, a, the end"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 40
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert 0 <= lines[-1]["validation_exact_match"] <= 1
    assert "28 pairs to learn from, 1 kept back to watch by, 1 to judge by." in told
    assert "1 pairs kept back, translated with 4 beams:" in told
    assert re.search(r"exact match  [01], (100|0)\.0%", told)
    assert re.search(r"BLEU         [\d.]+, words by sacrebleu's rule '13a'", told)
    assert re.search(r"chrF         [\d.]+", told)
    assert f"multihead translate {folder}" in told


def test_it_translates_as_its_parts_do(trained):
    folder, _ = trained
    result = call("translate", folder, "abc $", " fec $ ", "--device", "cpu")
    assert result.exit_code == 0
    assert result.stderr == ""
    made = prepare_translating(
        folder, ["abc $", "fec $"], beams=4, length_penalty=0.6, picture=None, device="cpu", threads=None
    )
    assert result.stdout.splitlines() == [made.text(tokens) for tokens in made.translations()]
    assert call("translate", folder, "--device", "cpu", stdin="abc $\nfec $\n").stdout == result.stdout


def test_byte_pairs(tmp_path):
    path = tsv(tmp_path, [(f"the {word} cats", f"die {word} Katzen 猫") for word in LETTERS])
    result = train("--pairs", path, "--steps", 2, "--out", tmp_path / "run", "--vocabulary", 280, "--post-norm")
    assert result.exit_code == 0, result.output
    assert "280 different tokens" in result.stdout
    model = saving.load(tmp_path / "run" / "model.safetensors", kind=Translator)
    assert model.config["pre_norm"] is False
    assert model.config["source_vocabulary"] == 284
    assert call("translate", tmp_path / "run", "the ü 🎉", "--beams", 1, "--device", "cpu").exit_code == 0
    words = refusal(call("translate", tmp_path / "run", "caf\udce9"))
    assert words == "TEXT: expected text in UTF-8, got '\\udce9' in it."


def test_dates_are_the_default(tmp_path, monkeypatch):
    made = translation_run.made_pairs
    monkeypatch.setattr(translation_run, "made_pairs", lambda to, seed: made(to, dates=50, kept_back=9, seed=seed))
    monkeypatch.setattr(translation_run, "names", lambda to: pairs.names(to)[:3])
    result = train("--steps", 1, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert re.search(r"names        \d of the 3 that were learned, \d+\.\d%", result.stdout)
    assert "They are dates and names; the dates kept back are of years that are not learned." in result.stdout
    assert "9 dates of years that were not learned, translated with 4 beams:" in result.stdout
    assert "BLEU" not in result.stdout
    assert "(wanted: " in result.stdout
    assert f"multihead translate {tmp_path / 'run'} 'March 5, 1987'" in result.stdout
    assert call("translate", tmp_path / "run", "March 5, 1987", "--device", "cpu").exit_code == 0


def test_a_stopped_run_goes_on_to_the_same_numbers(tmp_path):
    path, at_once, later = tsv(tmp_path), tmp_path / "once", tmp_path / "later"
    options = ("--pairs", path, "--chars", "--warm-up", 1, "--save-every", 2)
    assert train(*options, "--steps", 6, "--out", at_once).exit_code == 0

    class Stop(BaseException):
        pass

    def stopping(self, generator, step, parts):
        if step == 3:
            raise Stop
        return batches(self, generator, step, parts)

    batches = translation_run.Translation.batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translation_run.Translation, "batches", stopping)
        with pytest.raises(Stop):
            train(*options, "--steps", 6, "--out", later)
    result = train("--out", later, "--resume")
    assert result.exit_code == 0, result.output
    models = [saving.load(folder / "model.safetensors", kind=Translator).state_dict() for folder in (at_once, later)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_finished_run_is_judged_again(run, trained):
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    result = train("--out", run, "--resume")
    assert result.exit_code == 0, result.output
    assert result.stdout == trained[1][trained[1].index("\n1 pairs kept back, translated with 4 beams:") :]
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before
    words = refusal(train("--out", run, "--resume", "--steps", 39))
    assert words.startswith("--steps: expected more than the 40 that are done, got 39.")


def test_pairs_that_moved_continue_a_run(run, tmp_path):
    moved = tsv(tmp_path)
    result = train("--out", run, "--resume", "--steps", 41, "--pairs", moved)
    assert result.exit_code == 0, result.output
    assert json.loads((run / "config.json").read_text())["settings"]["pairs"] == str(moved)


def test_pairs_do_not_continue_a_run_of_dates(run, tmp_path):
    config = json.loads((run / "config.json").read_text())
    config["settings"]["pairs"] = None
    (run / "config.json").write_text(json.dumps(config))
    words = refusal(train("--out", run, "--resume", "--steps", 41, "--pairs", tsv(tmp_path)))
    assert words.startswith("--pairs: expected the default, as the run began, got")


def test_the_example_can_be_copied(tmp_path):
    """Quoted for a shell, with the folder in its place alone, and no sentence that would be refused."""
    made = [(f"don't RUN ${letter}", letter) for letter in LETTERS]
    options = ("--chars", "--steps", 1, "--out", tmp_path / "run")
    result = train("--pairs", tsv(tmp_path, made), *options)
    assert result.exit_code == 0, result.output
    (line,) = re.findall(r"Let it translate: multihead (.*)", result.stdout)
    words = shlex.split(line)
    assert words[:2] == ["translate", str(tmp_path / "run")]
    assert (words[2], words[2][-1]) in made
    assert call(*words).exit_code == 0


def test_the_example_of_dates_is_no_longer_than_they_may_be(tmp_path, monkeypatch):
    made = translation_run.made_pairs
    monkeypatch.setattr(translation_run, "made_pairs", lambda to, seed: made(to, dates=50, kept_back=9, seed=seed))
    monkeypatch.setattr(translation_run, "names", lambda _: [("May", "五月"), ("x" * 12, "y")])
    result = train("--steps", 1, "--longest", 11, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert re.search(r"names        \d of the 1 that were learned, ", result.stdout)
    (line,) = re.findall(r"Let it translate: multihead (.*)", result.stdout)
    assert call(*shlex.split(line)).exit_code == 0
    assert call("translate", tmp_path / "run", "1 May 2000, ").exit_code == 0, "as long as they may be"


def test_other_pairs_do_not_continue_a_run(tmp_path):
    path = tsv(tmp_path)
    assert train("--pairs", path, "--chars", "--steps", 2, "--out", tmp_path / "run").exit_code == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    tsv(tmp_path, PAIRS[::-1])
    words = refusal(train("--out", tmp_path / "run", "--resume", "--steps", 4))
    assert words.startswith("--pairs: expected what the run began with, got something else.")
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "klingon"], "--to: expected one of CLDR's"),
        (["--vocabulary", 500], "--vocabulary: expected none with dates and names, got 500. There a token is a char"),
        (["--pairs", "FILE", "--to", "de"], "--to: expected none with --pairs, got de. The file says what is learned"),
        (["--pairs", "FILE", "--chars", "--vocabulary", 500], "--vocabulary: expected none with --chars"),
        (["--pairs", "FILE", "--vocabulary", 255], "--vocabulary: expected at least 256, got 255"),
        (["--pairs", "FILE", "--chars", "--longest", 2], "--longest: expected pairs of at most 2 characters"),
        (["--pairs", "FILE", "--longest", 0], "--longest: expected at least 1"),
        (["--pairs", "FILE", "--width", 10, "--heads", 4], "--width: expected a multiple of 2 * --heads = 8, got 10"),
        (["--pairs", "FILE", "--dropout", 1.5], "--dropout: expected a number from 0 to 1, got 1.5"),
        (["--pairs", "FILE", "--smoothing", 1], "--smoothing: expected a number below 1"),
        (["--pairs", "FILE", "--batch", 9, "--accumulate", 2], "--batch: expected a multiple of 2"),
        (["--pairs", "FILE", "--steps", 0], "--steps: expected at least 1"),
        (["--pairs", "FILE", "--resume"], "--resume: expected"),
        (["--pairs", "FILE", "--position", "learned"], "'--position'"),
        (["--pairs", "no.tsv"], "--pairs: expected a UTF-8 file whose lines are a source, a tab and a target, got"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_training_refuses(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    path = tsv(tmp_path)
    result = train(*(path if option == "FILE" else option for option in options))
    assert words in refusal(result)
    assert list(tmp_path.iterdir()) == [path], "nothing is written"


def test_a_bad_line_is_named_and_nothing_overwritten(run, tmp_path):
    path = tsv(tmp_path)
    path.write_text(path.read_text().replace("bac $\t", "bac $ "), encoding="utf-8")
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    words = refusal(train("--pairs", path, "--out", run, "--overwrite"))
    assert "pairs.tsv', line 6, without a tab." in words
    assert "line 6, without a tab" in words
    assert "There is a run in it." in refusal(train("--pairs", tsv(tmp_path), "--out", run))
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before


def test_missing_packages(tmp_path, monkeypatch):
    for name in ("babel", "sacrebleu"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            assert "pip install 'multihead[cli]'" in refusal(train("--out", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# Translating ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], "TEXT: expected a sentence, got a blank one"),
        (["abc $", ""], "TEXT 2: expected a sentence, got a blank one"),
        (["ab\udcff"], "TEXT: expected characters that occur in the text, got '\\udcff'"),
        (["abZ"], "TEXT: expected characters that occur in the text, got 'Z'"),
        (["a" * 300], "TEXT: expected at most 256 characters, the run's --longest, got 300"),
        (["abc", "--beams", 0], "--beams: expected at least 1, got 0"),
        (["abc", "--beams", 1000], "--beams: expected at most 256, got 1000"),
        (["abc", "--length-penalty", -1], "--length-penalty: expected a finite number of at least 0"),
        (["abc", "--length-penalty", "nan"], "--length-penalty: expected a finite number of at least 0"),
        (["abc", "--length-penalty", 1000], "--length-penalty: expected at most 20, got 1000"),
        (["abc", "--threads", 0], "--threads: expected at least 1"),
        (["abc", "--device", "moon"], "--device: expected a device of this machine"),
        (["abc", "acb", "--attention", "a.png"], "--attention: expected a single sentence, got 2"),
        (["abc", "--attention", "a.jpg"], "--attention: expected a PNG file that can be made, got 'a.jpg'"),
        (["abc", "--attention", "no/a.png"], "in a folder that does not exist"),
        (["abc", "--attention", "x" * 300 + ".png"], "x.png' (File name too long)"),
    ],
    ids=range(16),
)
def test_translating_refuses(trained, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in refusal(call("translate", trained[0], *arguments))
    assert not list(tmp_path.iterdir())


def test_no_run_to_translate_with(run, tmp_path):
    assert "RUN: expected the folder of a run, got" in refusal(call("translate", tmp_path / "no", "abc"))
    whole = (run / "tokenizer.json").read_text()
    (run / "tokenizer.json").write_text("{}")
    assert "a tokenizer" in refusal(call("translate", run, "abc"))
    (run / "tokenizer.json").write_text(whole)
    config = json.loads((run / "config.json").read_text())
    del config["longest_target"]
    (run / "config.json").write_text(json.dumps(config))
    assert "RUN: expected" in refusal(call("translate", run, "abc"))
    (run / "config.json").write_text(json.dumps(config | {"kind": "gpt"}))
    assert "RUN: expected a run of kind 'translator'" in refusal(call("translate", run, "abc"))


def test_a_damaged_run(run):
    whole = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(whole[:-10])
    assert "cut off" in refusal(call("translate", run, "abc $"))
    (run / "model.safetensors").unlink()
    assert "RUN: expected a run with model.safetensors" in refusal(call("translate", run, "abc $"))
    other = Translator(9, 9, 8, 1, 2)
    saving.save(other, run / "model.safetensors")
    assert "a model and a tokenizer of one vocabulary" in refusal(call("translate", run, "abc $"))


def test_standard_input_that_is_no_text(trained):
    words = refusal(call("translate", trained[0], stdin=b"abc\n\xff\xfe"))
    assert words == "TEXT: expected lines of UTF-8, got line 2, which is not. Save it as UTF-8 first."
    assert "TEXT: expected at least one sentence, got none" in refusal(call("translate", trained[0], stdin=""))
    words = refusal(call("translate", trained[0], stdin="abc\n\nbac\n"))
    assert words.startswith("TEXT 2: expected a sentence, got a blank one.")


def test_lines_are_those_that_are_seen():
    text = "\ufeffone\r\ntwo\u2028and\fmore\n\nfour\n\n"
    assert translating.read_sentences(text.encode()) == ["one\r", "two\u2028and\fmore", "", "four"]
    assert translating.read_sentences(b"") == []


def test_standard_input_of_another_system(trained):
    result = call("translate", trained[0], "--device", "cpu", stdin=b"\xef\xbb\xbfabc $\r\nfec $\r\n")
    assert result.stdout == call("translate", trained[0], "abc $", "fec $", "--device", "cpu").stdout
    assert result.stdout.count("\n") == 2


def test_a_model_that_gives_no_numbers(run):
    model = saving.load(run / "model.safetensors", kind=Translator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    saving.save(model, run / "model.safetensors")
    words = refusal(call("translate", run, "abc $"))
    assert words.startswith("RUN: expected a run that has learned something, got")
    result = train("--out", run, "--resume")  # to be judged again
    assert (result.exit_code, result.stderr) == (1, ""), result.exception
    assert result.stdout == "\nIt can't be judged: what the model predicts is NaN.\n"


# The picture ----------------------------------------------------------------------------------------------------------


def size_of(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_attention_is_drawn(trained, tmp_path):
    path = tmp_path / "a.png"
    plain = call("translate", trained[0], "abc $", "--device", "cpu")
    result = call("translate", trained[0], "abc $", "--device", "cpu", "--attention", path)
    assert result.exit_code == 0, result.output
    assert result.stdout == plain.stdout
    assert result.stderr == ""
    assert min(size_of(path)) > 100
    path.write_bytes(b"another file")
    words = refusal(call("translate", trained[0], "abc $", "--attention", path))
    assert "which is another file. It would be lost." in words
    assert path.read_bytes() == b"another file"


def test_the_alignment_is_what_the_decoder_looked_at(trained):
    made = prepare_translating(
        trained[0], ["abc $"], beams=1, length_penalty=0.0, picture=None, device="cpu", threads=None
    )
    (translation,) = made.translations()
    weights = made.alignment(made.sources[0], translation)
    assert weights.shape == (len(translation) + 1, len("abc $") + 1)
    torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)))


def test_characters_without_a_font_are_escaped(tmp_path, monkeypatch):
    monkeypatch.setattr(labels, "_LAST_RESORT", "")  # leaves the default font alone, on any machine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        note = draw_alignment(tmp_path / "a.png", torch.rand(2, 4), ["a", " ", "$x$", "\ufffd"], ["年", "b月"])
    assert note == r"no font here has some of the characters; the picture shows 年 as \u5e74, 月 as \u6708"
    assert size_of(tmp_path / "a.png")
    assert draw_alignment(tmp_path / "b.png", torch.rand(1, 1), ["ü"], ["ж"]) == ""


def test_labels():
    assert labels.shown(["a b", "年x", "\n"], {"年"}) == ["a_b", "\\u5e74x", "\\n"]


def test_a_font_is_found_that_has_the_characters(monkeypatch):
    """Of the fonts that come with matplotlib one has a sign that the default one lacks."""
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    default = next(font for font in fontManager.ttflist if font.name == "DejaVu Sans")
    others = [font for font in fontManager.ttflist if font.name.startswith(("STIX", "cm"))]
    assert others
    known = FT2Font(default.fname).get_charmap()
    sign = next(
        (
            chr(code)
            for font in others
            for code in FT2Font(font.fname).get_charmap()
            if code not in known and code > 255
        ),
        None,
    )
    assert sign is not None
    monkeypatch.setattr(fontManager, "ttflist", [default, *others])
    families, missing = labels.fonts_for(f"a{sign}")
    assert not missing
    assert families[0] == "DejaVu Sans"
    assert len(families) == 2


def test_without_matplotlib(trained, tmp_path, monkeypatch):
    assert importlib.util.find_spec("matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = refusal(call("translate", trained[0], "abc $", "--attention", tmp_path / "a.png"))
    assert "pip install 'multihead[plot]'" in words
