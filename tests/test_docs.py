"""The code in the docs runs as it is written, from top to bottom, and prints what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from multihead import cli
from multihead.kernels import library

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)  # code, and what it prints if that follows


needs_native = pytest.mark.skipif(not library.available(), reason=f"it shows the native kernel: {library.why_not()}")


@needs_native
def test_the_code_of_the_native_kernel_runs_and_prints_what_is_said(capsys):
    hold_code("docs/kernel.md", capsys)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["README.md", "docs/drop_in.md", "docs/inspection.md"])
def test_the_code_runs_and_prints_what_is_said(name, capsys):
    hold_code(name, capsys)


def hold_code(name, capsys):
    torch.manual_seed(0)
    blocks = BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))
    assert len(blocks) >= 2
    space: dict[str, object] = {}
    for code, said in blocks:
        exec(compile(code, name, "exec"), space)
        printed = capsys.readouterr().out
        assert not said or printed == said


@needs_native
def test_explain_prints_what_the_readme_shows():
    shown = re.search(r"```\n\$ multihead (explain .*?)\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert shown
    result = CliRunner().invoke(cli.app, shown[1].split(), prog_name="multihead")
    assert result.stdout == shown[2]


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target
