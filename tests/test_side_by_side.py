"""The drop-in side by side: that both sides learn the same, what is said of it, and what happens to the processes."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import multihead as mh
from multihead import side_by_side
from multihead.side_by_side import Both, Decoder, Sizes, Trainee, peak_memory, table, train_both

SMALL = Sizes(13, context=11, width=12, layers=2, heads=3, batch=5)
STEPS = 4


def text() -> torch.Tensor:
    return torch.arange(101) % SMALL.vocabulary


def trained(**changes: Any) -> list[Both]:
    return list(train_both(text(), SMALL, **({"seed": 0, "seconds": math.inf, "steps": STEPS} | changes)))


# Training -----------------------------------------------------------------------------------------------------------


def test_both_sides_learn_the_same():
    done = trained(steps=30)
    assert done[-1].losses[0] < 0.9 * done[0].losses[0]
    for step in done:
        assert step.losses[0] == pytest.approx(step.losses[1], rel=1e-5)


def test_one_side_is_swapped_and_the_other_is_not(monkeypatch: pytest.MonkeyPatch):
    made: list[Trainee] = []
    monkeypatch.setattr(side_by_side, "Trainee", lambda *given: made.append(Trainee(*given)) or made[-1])
    trained()
    kinds = [{type(m) for m in side.model.modules() if isinstance(m, nn.MultiheadAttention)} for side in made]
    assert kinds == [{nn.MultiheadAttention}, {mh.MultiheadAttention}]


def test_the_optimizer_is_made_before_the_swap_and_reaches_every_parameter(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    order: list[str] = []
    make, swap = torch.optim.AdamW, side_by_side.swap
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, **k: order.append("optimizer") or make(*a, **k))
    monkeypatch.setattr(side_by_side, "swap", lambda model: order.append("swap") or swap(model))
    trainee = Trainee(Decoder(SMALL), swapped=True)
    assert order == ["optimizer", "swap"]
    before = {name: p.detach().clone() for name, p in trainee.model.named_parameters()}
    trainee.step(text()[: SMALL.context + 1][None])
    assert [name for name, p in trainee.model.named_parameters() if torch.equal(p, before[name])] == []


def test_a_token_sees_only_those_before_it():
    torch.manual_seed(0)
    model, tokens = Decoder(SMALL), text()[None, : SMALL.context]
    changed = tokens.clone()
    changed[0, 7] = 3
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
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
    (both,) = train_both(shortest, SMALL, seed=0, seconds=math.inf, steps=1)
    assert math.isfinite(both.losses[0])


# Memory -------------------------------------------------------------------------------------------------------------

on_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")


@on_linux
def test_peak_memory_of_both():
    sizes = Sizes(5003, context=17, width=64, layers=1, heads=2, batch=1)
    parameters = 4 * sum(p.numel() for p in Decoder(sizes).parameters())
    for found in peak_memory(sizes, threads=1):
        assert found is not None
        assert 2 * parameters < found < 100 * parameters  # the gradients and the optimizer's two averages


@pytest.mark.parametrize("executable", ["", "/absent/python"])
def test_memory_is_unknown_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch, executable: str):
    monkeypatch.setattr(sys, "executable", executable)
    assert peak_memory(SMALL, threads=1) == (None, None)


def test_memory_is_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(side_by_side, "_STATUS", tmp_path / "absent")
    monkeypatch.setattr(subprocess, "Popen", None)  # no process is started at all
    assert peak_memory(SMALL, threads=1) == (None, None)


@on_linux
@pytest.mark.parametrize("does", ["exit 0", "echo many", "echo 5; exit 1", "kill -9 $$"])
def test_memory_is_unknown_where_a_process_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert peak_memory(SMALL, threads=1) == (None, None)


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
    assert len(children) == 2
    assert all(child.returncode is not None and child.returncode != 0 for child in children)


# What came out ------------------------------------------------------------------------------------------------------


def both(theirs: float, ours: float, took: tuple[float, float] = (0.5, 0.25)) -> Both:
    return Both((theirs, ours), took, 1.0, 1.0)


def test_table():
    done = [both(4.6, 4.6), both(3.25, 3.25 + 2e-6, (0.5, 0.2)), both(2.5, 2.5 + 1e-6, (1.0, 0.3))]
    assert table(done, SMALL, (50 * 2**20, 25 * 2**20)) == [
        "                       torch  multihead   ratio",
        "loss, step 1           4.600      4.600",
        "loss, step 3           2.500      2.500",
        "tokens/s                 110        220    2.50",  # 55 tokens by the medians; the ratios are 2, 2.5 and 3.3
        "peak memory           50 MiB     25 MiB    0.50",
        "The losses agree to 2e-6 at every step.",
    ]


def test_table_of_one_step_with_unknown_memory():
    assert table([both(4.6, 4.6)], SMALL, (None, 2**20)) == [
        "                       torch  multihead   ratio",
        "loss, step 1           4.600      4.600",
        "tokens/s                 110        220    2.00",
        "peak memory          unknown      1 MiB",
        "The losses are equal, bit for bit.",
    ]


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([(1.0, 1.0), (1.0, 1.0)], "The losses are equal, bit for bit."),
        ([(1.0, 1.0), (1.0, 1.0 + 2**-21)], "The losses agree to 5e-7 at every step."),  # 4.8e-7: never less than it is
        ([(1.0, 1.0 + 2**-10)], "The losses agree to 1e-3 at every step."),  # 9.8e-4
        ([(1.0, 1.0), (1.0, 1.5), (9.0, 1.0)], "at step 2 they are 0.5 apart"),
        ([(1.0, math.nan)], "at step 1 they are nan apart"),
        ([(1.0, 1.0), (math.nan, math.nan)], "at step 2 they are nan apart"),
    ],
)
def test_says_whether_the_losses_agree(pairs: list[tuple[float, float]], told: str):
    line = table([both(*pair) for pair in pairs], SMALL, (None, None))[-1]
    assert told in line
    assert line.startswith("The losses do not agree: ") == ("apart" in told)
