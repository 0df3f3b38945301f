"""Pictures, the report and `multihead view`: what is drawn, in what size, and what is refused."""

from __future__ import annotations

import base64
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import multihead as mh
from multihead import Record, capture, cli
from multihead.inspection import pictures
from multihead.inspection.pictures import maps_of
from multihead.inspection.summary import COLUMNS, summarize
from multihead.inspection.terminal import text_map
from multihead.models.gpt import GPT

pytest.importorskip("matplotlib")

from PIL import Image

from multihead.inspection.svg import map_svg

L, H = 12, 3


def record(length: int = L, **options: Any) -> Record:
    q, k = torch.randn(2, 1, H, length, 8, generator=torch.Generator().manual_seed(0)).unbind()
    return Record(q, k, **({"mask": mh.causal(), "name": "blocks.0.attn"} | options))


@pytest.fixture(scope="module")
def seen() -> Any:
    torch.manual_seed(0)
    model = GPT(20, 24, 2, H)
    with torch.no_grad(), capture(model) as rec:
        model(torch.arange(L)[None])
    return rec


# Panels ---------------------------------------------------------------------------------------------------------------


def test_a_map_shows_the_weights_and_greys_what_is_masked():
    made = record()
    ax = pictures.plot_map(made, 1, tokens=list("abcdefghijkl"))
    shown = ax.images[0].get_array()
    assert (shown.mask == torch.ones(L, L).triu(1).bool().numpy()).all()
    weights = made.weights(heads=1)[0, 0]
    kept = ~torch.from_numpy(shown.mask)
    torch.testing.assert_close(torch.from_numpy(shown.data)[kept], weights[kept].clamp(min=1e-4))
    assert [label.get_text() for label in ax.get_xticklabels()] == list("abcdefghijkl")
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("key", "query", "blocks.0.attn, head 1")
    assert ax.images[0].norm.__class__.__name__ == "LogNorm"


def test_more_tokens_are_pooled():
    made = record(200)
    ax = pictures.plot_map(made, 0)
    assert ax.images[0].get_array().shape == (50, 50)
    ticks = [label.get_text() for label in ax.get_yticklabels()]
    assert ticks[:2] == ["0", "32"]
    ax = pictures.plot_map(made, 0, size=10, reduce="max")
    values = torch.from_numpy(ax.images[0].get_array().filled(0))
    pooled = made.pooled(20, "max")[0, 0].clamp(min=1e-4)
    torch.testing.assert_close(values, pooled.where(torch.ones(10, 10).tril() > 0, 0))


def test_strange_tokens_are_labels():
    ax = pictures.plot_map(record(5), tokens=["$x$", " ", "\n", "\ud800", "中"])
    ax.figure.canvas.draw()
    told = [label.get_text() for label in ax.get_yticklabels()]
    assert told[:3] == ["$x$", "_", "\\n"]


def test_lines_for_each_head():
    made = record()
    for plot, values in (
        (pictures.plot_row, made.row(-1)),
        (pictures.plot_entropy, made.entropy(normalized=True)),
        (pictures.plot_received, made.received(mean=True)),
        (pictures.plot_distance, made.distance()),
    ):
        ax = plot(made)
        assert [line.get_label() for line in ax.lines] == ["head 0", "head 1", "head 2"]
        for head, line in enumerate(ax.lines):
            torch.testing.assert_close(torch.from_numpy(line.get_ydata()), values[0, head], equal_nan=True)
        assert len(plot(made, heads=[2], color="red").lines) == 1


def test_they_draw_where_they_are_told_and_touch_nothing_else(seen: Any):
    from matplotlib import pyplot, rcParams

    before = dict(rcParams), pyplot.get_fignums()
    ax = pictures.new_axes()
    assert pictures.plot_map(record(), ax=ax, colorbar=False) is ax
    assert len(ax.figure.axes) == 1
    assert pictures.plot_overview(seen.summary(), "distance").images[0].get_array().shape == (2, H)
    assert seen.plot("entropy").get_title() == "entropy"
    assert (dict(rcParams), pyplot.get_fignums()) == before


def test_what_pictures_refuse(seen: Any):
    with pytest.raises(ValueError, match="head: expected an index from -3 to 2"):
        pictures.plot_map(record(), 3)
    with pytest.raises(ValueError, match="row: expected an index"):
        pictures.plot_map(record(), 0, 1)
    with pytest.raises(ValueError, match="tokens: expected a name for each of 12 tokens, got 2 of them"):
        pictures.plot_map(record(), tokens=["a", "b"])
    with pytest.raises(ValueError, match="column: expected one of entropy"):
        seen.plot("beauty")


# The report -----------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("img", "meta", "image"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == "image" or self.open.pop() == tag


def test_a_report_is_one_file_that_asks_nobody(seen: Any, tmp_path: Path):
    path = tmp_path / "out.html"
    seen.report(path, tokens=list("abcdefghijkl"), title="<script>a & b</script>")
    text = path.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not {"script", "link", "iframe"} & {tag for tag, _ in tags.found}
    figures = [attributes["src"] for tag, attributes in tags.found if tag == "img"]
    maps = [attributes["href"] for tag, attributes in tags.found if tag == "image"]
    assert (len(figures), len(maps)) == (5, 2 * H)
    for source in figures + maps:
        assert base64.b64decode(source.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    assert "http" not in re.sub(r"base64,[^']*", "", text)
    assert "&lt;script&gt;a &amp; b" in text
    assert "blocks.1.attn" in text
    assert "not what the model does with it" in text


def test_a_notebook_keeps_its_own_styles(seen: Any):
    part = seen._repr_html_()
    tags = Tags()
    tags.feed(part)
    assert tags.open == []
    assert not {"html", "body", "h1"} & {tag for tag, _ in tags.found}
    (style,) = re.findall(r"<style>(.*?)</style>", part, re.DOTALL)
    selectors = [line for line in re.split(r"[{},]", re.sub(r"\([^)]*\)", "", style)) if "multihead" in line]
    assert len(selectors) > 10
    outside = re.sub(r"\.multihead [^{}]*\{[^{}]*\}", "", style)
    rest = set(re.findall(r"[\w.#-]+[^{}]*\{", outside))
    assert rest == {"media (max-width: 560px) {", "media print {"}


def test_a_report_of_a_long_text_stays_small(tmp_path: Path):
    torch.manual_seed(0)
    model = GPT(20, 64, 24, 16)
    with torch.no_grad(), capture(model) as rec:
        model(torch.randint(20, (1, 150)))
    rec.report(tmp_path / "out.html")
    size = (tmp_path / "out.html").stat().st_size
    assert size < 2**20
    assert "Left out, as the file would be too large: blocks." in (tmp_path / "out.html").read_text()


def test_names_are_beside_the_maps_of_layers_that_have_as_many_tokens(seen: Any, tmp_path: Path):
    seen.report(tmp_path / "out.html", tokens=["<a>", *"bcdefghijk", "a name that is far too long"])
    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert text.count(">&lt;a&gt;</text>") == 2 * 2 * H  # of the queries and of the keys
    assert text.count(">a_name_that_is_fa…</text>") == 2 * 2 * H
    with pytest.raises(ValueError, match="tokens: expected a name for each of 12 tokens, got 2 of them"):
        seen.report(tmp_path / "out.html", tokens=["a", "b"])


def test_names_that_would_take_too_much_are_numbers(tmp_path: Path):
    torch.manual_seed(0)
    model = GPT(20, 64, 12, 8)
    with torch.no_grad(), capture(model) as rec:
        model(torch.randint(20, (1, 64)))
    rec.report(tmp_path / "out.html", tokens=["&" * 18] * 64)
    text = (tmp_path / "out.html").read_text()
    assert len(text) < 2**20
    assert "Left out" not in text
    assert "&amp;&amp;" not in text
    assert text.count("<image ") == 12 * 8


def test_the_maps_pixels_are_the_weights():

    made = record(L)
    weights, visible, block = maps_of(made, [2], 0, size=64)
    drawn = map_svg(weights[0], visible, block, (None, None), "head 2")
    source = re.findall(r"base64,([^']*)'", drawn)
    image = Image.open(io.BytesIO(base64.b64decode(source[0])))
    assert image.size == (L, L)
    steps = torch.tensor(list(image.tobytes())).view(L, L)
    assert (steps[~visible] == 0).all()
    found = 10 ** (4 * ((steps - 2) / 253 - 1))  # a logarithmic scale from 1e-4 to 1
    torch.testing.assert_close(found[visible], weights[0][visible].clamp(min=1e-4), rtol=0.02, atol=0)


def test_nothing_to_report(tmp_path: Path):
    told = "one that saw a call"
    with pytest.raises(ValueError, match=told), capture(GPT(20, 24, 1, H)) as rec:
        rec.report(tmp_path / "out.html")
    assert not list(tmp_path.iterdir())


# In a terminal --------------------------------------------------------------------------------------------------------


def test_a_map_of_characters():
    q = torch.eye(4)[None, None] * 50
    lines = text_map(Record(q, q, mask=mh.causal()), 0).splitlines()
    assert lines[:4] == ["@@", "  @@", "    @@", "      @@"]
    assert "each character pair is a token" in lines[-1]
    wide = text_map(record(100), 0, size=10).splitlines()
    assert len(wide) == 11
    assert "10 x 10 tokens" in wide[-1]
    assert all(len(line) <= 20 for line in wide[:-1])


def call(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], prog_name="multihead")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("the cat sat on the mat. " * 40)
    sizes = {"layers": 2, "width": 16, "heads": 2, "context": 8, "batch": 4, "steps": 2, "threads": 1}
    options = [part for name, size in sizes.items() for part in (f"--{name}", size)]
    result = call("train", "--text", folder / "text.txt", "--out", folder / "run", "--chars", *options)
    assert result.exit_code == 0, result.output
    return folder / "run"


def test_view(run: Path, tmp_path: Path):
    result = call("view", run, "--prompt", "the cat sat", "--layer", 1, "--head", 1, "--html", tmp_path / "v.html")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0].split()[:3] == ["layer", "head", "entropy"]
    assert "blocks.1.attn, head 1: queries down, keys across\n@@\n" in result.stdout
    assert "the cat sat" in (tmp_path / "v.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--prompt", ""], "--prompt: expected at least one character"),
        (["--prompt", "the DOG"], "--prompt: expected characters that occur in the text"),
        (["--prompt", "the", "--layer", 2], "--layer: expected at most 1, got 2"),
        (["--prompt", "the", "--head", -1], "--head: expected at least 0"),
        (["--prompt", "the", "--size", 0], "--size: expected at least 1"),
        (["--prompt", "the", "--html", "no/such/file.html"], "--html: expected a file that can be written"),
    ],
)
def test_view_refuses(run: Path, arguments: list[object], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = call("view", run, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_notebook_shows_a_record(monkeypatch):
    made = record()
    part = made._repr_html_()
    assert part.startswith("<div class=multihead>")
    assert part.count("<svg") == made.shape[-3]
    assert f"{made.entropy()[0, 1].mean():.3f}" in part
    monkeypatch.setattr("multihead.packages.importlib.util.find_spec", lambda _: None)
    assert made._repr_html_() is None
    monkeypatch.undo()
    made.compute("entropy")
    made.let_go()
    assert made._repr_html_() is None


def test_a_notebook_shows_the_text_where_there_is_no_more():
    model, x = mh.Attention(24, H), torch.randn(1, 5, 24)
    with capture(model, stats=["entropy"]) as rec:
        assert rec._repr_html_() is None
        model(x)
    assert rec._repr_html_() is None


def test_what_is_no_number_is_seen():
    q, k = torch.randn(2, 1, H, 6, 8, generator=torch.Generator().manual_seed(0)).unbind()
    q[0, 0], q[0, 1, 4:] = torch.nan, torch.nan
    made = Record(q, k, mask=mh.causal(), name="a")
    rows = summarize({"a": made}).rows
    for column in ("entropy", "max weight", "max logit", "first token", "distance"):
        assert [math.isnan(row[column]) for row in rows] == [True, True, False], column
    drawn = pictures.plot_map(made, 1).images[0]
    shown = drawn.get_array()
    assert (shown.data[4:][~shown.mask[4:]] > drawn.norm.vmax).all()
    assert (shown.data[:4][~shown.mask[:4]] <= drawn.norm.vmax).all()
    assert drawn.cmap.get_over().tolist() == [1.0, 0.0, 1.0, 1.0]  # magenta
    weights, visible, block = maps_of(made, [1], 0, size=64)
    source = re.findall(r"base64,([^']*)'", map_svg(weights[0], visible, block, (None, None), ""))[0]
    indices = torch.tensor(list(Image.open(io.BytesIO(base64.b64decode(source))).tobytes())).view(6, 6)
    assert (indices[4:][visible[4:]] == 1).all()
    assert (indices[:4][visible[:4]] > 1).all()


def test_blind_queries_are_left_out_of_the_summary():
    q, k = torch.randn(2, 2, H, 6, 8, generator=torch.Generator().manual_seed(0)).unbind()
    keep = torch.tensor([[True] * 6, [False] * 6])
    both, first = (Record(q[:n], k[:n], mask=mh.padding(keep[:n])) for n in (2, 1))
    for one, other in zip(summarize({"": both}).rows, summarize({"": first}).rows, strict=True):
        assert [one[column] for column in COLUMNS] == pytest.approx([other[column] for column in COLUMNS], rel=1e-5)
    nobody = summarize({"": Record(q, k, mask=mh.lengths(0))}).rows
    assert all(math.isnan(row[column]) for row in nobody for column in COLUMNS)


@pytest.mark.parametrize("options", [{"tokens": 5}, {"reduce": "nope"}])
def test_mistakes_of_a_map(options):
    with pytest.raises((TypeError, ValueError), match="expected"):
        pictures.plot_map(record(), **options)
    with pytest.raises(ValueError, match="one with a query and a key to draw"):
        pictures.plot_map(record(0))
