"""One model side by side: that all its forms learn the same, what is said of it, and what happens to the processes."""

from __future__ import annotations

import math
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import multihead as mh
from multihead import side_by_side
from multihead.models.gpt import GPT
from multihead.side_by_side import (
    FORMS,
    OURS,
    SWAPPED,
    TORCH,
    TORCH_FAST,
    Sizes,
    Together,
    Trainee,
    peak_memory,
    table,
    train_all,
)

SMALL = Sizes(13, context=11, width=12, layers=2, heads=3, batch=5)
STEPS = 4
UNKNOWN = [None] * len(FORMS)


def text() -> torch.Tensor:
    return torch.arange(101) % SMALL.vocabulary


def trained(**changes: Any) -> list[Together]:
    return list(train_all(text(), SMALL, **({"seed": 0, "seconds": math.inf, "steps": STEPS} | changes)))


def of_form(form: str) -> GPT:
    torch.manual_seed(0)
    return Trainee(SMALL.model(), form).model


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, (nn.MultiheadAttention, mh.Attention))]


# Training -----------------------------------------------------------------------------------------------------------


def test_all_forms_learn_the_same():
    done = trained(steps=30)
    assert done[-1].losses[0] < 0.9 * done[0].losses[0]
    for step in done:
        assert step.losses == pytest.approx([step.losses[0]] * len(FORMS), rel=1e-5)


def test_each_form_is_what_it_is_called():
    kinds = {form: {type(layer) for layer in layers_of(of_form(form))} for form in FORMS}
    assert kinds == {
        TORCH: {nn.MultiheadAttention},
        TORCH_FAST: {nn.MultiheadAttention},
        SWAPPED: {mh.MultiheadAttention},
        OURS: {mh.Attention},
    }


@pytest.mark.parametrize("form", FORMS)
def test_torch_is_asked_for_weights_as_the_form_says(form: str):
    model, asked = of_form(form), []
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda _, *given: asked.append(given[1]), with_kwargs=True)
    model(text()[None, : SMALL.context])
    assert len(asked) == SMALL.layers
    assert all(options.get("need_weights", True) == (form != TORCH_FAST) for options in asked)


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_are_one_model(form: str):
    tokens = text()[None, : SMALL.context]
    torch.testing.assert_close(of_form(form)(tokens), of_form(OURS)(tokens), rtol=1e-5, atol=1e-5)
    count = sum(parameter.numel() for parameter in of_form(form).parameters())
    assert count == sum(parameter.numel() for parameter in of_form(OURS).parameters())


@pytest.mark.parametrize("form", FORMS)
def test_the_optimizer_reaches_every_parameter_of_a_form(monkeypatch: pytest.MonkeyPatch, form: str):
    order: list[str] = []
    make, swap = torch.optim.AdamW, side_by_side.swap
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: order.append("optimizer") or make(*a, **k))
    monkeypatch.setattr(side_by_side, "swap", lambda model: order.append("swap") or swap(model))
    torch.manual_seed(0)
    trainee = Trainee(SMALL.model(), form)
    assert order == ["optimizer", "swap"][: 2 if form == SWAPPED else 1]
    before = deepcopy(dict(trainee.model.named_parameters()))
    trainee.step(text()[: SMALL.context + 1][None])
    assert [name for name, p in trainee.model.named_parameters() if torch.equal(p, before[name])] == []


@pytest.mark.parametrize("form", FORMS)
def test_a_token_sees_only_those_before_it(form: str):
    model, tokens = of_form(form), text()[None, : SMALL.context]
    changed = tokens.clone()
    changed[0, 7] = 3
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_repeats_under_a_seed():
    assert [step.losses for step in trained()] == [step.losses for step in trained()]
    assert trained()[0].losses != trained(seed=1)[0].losses


def test_ends_by_steps_or_by_time():
    done = trained()
    assert [step.share for step in done] == [0.25, 0.5, 0.75, 1.0]
    assert all(took > 0 for step in done for took in step.took)
    assert len(trained(seconds=1e-9, steps=math.inf)) == 1


def test_trains_on_the_shortest_text():
    shortest = text()[: SMALL.context + 1]
    (step,) = train_all(shortest, SMALL, seed=0, seconds=math.inf, steps=1)
    assert math.isfinite(step.losses[0])


# Memory -------------------------------------------------------------------------------------------------------------

on_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")


@on_linux
def test_peak_memory_of_all():
    sizes = Sizes(5003, context=17, width=64, layers=1, heads=2, batch=1)
    parameters = 4 * sum(p.numel() for p in sizes.model().parameters())
    for found in peak_memory(sizes, threads=1):
        assert found is not None
        assert 2 * parameters < found < 100 * parameters  # the gradients and the optimizer's two averages


@pytest.mark.parametrize("executable", ["", "/absent/python"])
def test_memory_is_unknown_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch, executable: str):
    monkeypatch.setattr(sys, "executable", executable)
    assert peak_memory(SMALL, threads=1) == UNKNOWN


def test_memory_is_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(side_by_side, "_STATUS", tmp_path / "absent")
    monkeypatch.setattr(subprocess, "Popen", None)  # no process is started at all
    assert peak_memory(SMALL, threads=1) == UNKNOWN


@on_linux
@pytest.mark.parametrize("does", ["exit 0", "echo many", "echo 5; exit 1", "kill -9 $$"])
def test_memory_is_unknown_where_a_process_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert peak_memory(SMALL, threads=1) == UNKNOWN


@on_linux
def test_ctrl_c_ends_the_processes(monkeypatch: pytest.MonkeyPatch):
    children: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def record(*given: Any, **options: Any) -> subprocess.Popen[str]:
        children.append(start(*given, **options))
        return children[-1]

    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", record)
    monkeypatch.setattr(side_by_side, "_answer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        peak_memory(SMALL, threads=1)
    assert len(children) == len(FORMS)
    assert all(child.returncode is not None and child.returncode != 0 for child in children)


# What came out ------------------------------------------------------------------------------------------------------


def together(*losses: float, took: tuple[float, ...] = (0.5, 0.4, 0.5, 0.25)) -> Together:
    return Together(losses, took, 1.0, 1.0)


def test_table():
    done = [
        together(4.6, 4.6, 4.6, 4.6),
        together(3.25, 3.25, 3.25, 3.25 + 2e-6, took=(0.5, 0.4, 1.0, 0.2)),
        together(2.5, 2.5, 2.5 - 1e-6, 2.5, took=(1.0, 0.5, 1.0, 0.3)),
    ]
    # 55 tokens by the medians; the ratios of the last are 2, 2.5 and 3.3
    assert table(done, SMALL, [50 * 2**20, None, 30 * 2**20, 25 * 2**20]) == [
        "                                   loss, step 1     step 3   tokens/s   ratio   peak memory",
        "torch.nn.MultiheadAttention               4.600      2.500        110    1.00        50 MiB",
        "  called with need_weights=False          4.600      2.500        138    1.25       unknown",
        "  after multihead.swap(model)             4.600      2.500         55    1.00        30 MiB",
        "multihead.Attention                       4.600      2.500        220    2.50        25 MiB",
        "The losses agree to 2e-6 at every step.",
    ]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(1.0, 1.0), (1.0, 1.0)], "The losses are equal, bit for bit."),
        ([(1.0, 1.0), (1.0, 1.0 + 2**-21)], "The losses agree to 5e-7 at every step."),  # 4.8e-7: never less than it is
        ([(1.0, 1.0 + 2**-10)], "The losses agree to 1e-3 at every step."),  # 9.8e-4
        ([(1.0, 1.0), (1.0, 1.5), (9.0, 1.0)], "at step 2 they are 0.5 apart"),
        ([(1.0, math.nan)], "at step 1 they are nan apart"),
        ([(1.0, 1.0), (math.nan, math.nan)], "at step 2 they are nan apart"),
    ],
)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_says_whether_the_losses_agree(steps: list[tuple[float, float]], told: str, place: int):
    done = []
    for theirs, other in steps:
        losses = [theirs] * len(FORMS)
        losses[place] = other
        done.append(together(*losses))
    line = table(done, SMALL, UNKNOWN)[-1]
    assert told in line
    assert line.startswith("The losses do not agree: ") == ("apart" in told)
