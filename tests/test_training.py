"""The loop: what a step does, that a run can be continued bit for bit, and that processes share a step."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, distributed, nn

from multihead.models.gpt import GPT, loss_of
from multihead.training.language import LanguageModelling, text_loss
from multihead.training.loop import Diverged, Trainer, check_state, seed_of, stored
from multihead.training.optimizer import LEAST_RATE, make_optimizer, rate_at
from multihead.training.options import Options, check_model_sizes, option
from multihead.training.parallel import Processes, UnequalProcesses, joined, processes_here

ALONE = Processes()
OPTIONS = Options(steps=20, warm_up=2, learning_rate=3e-3)


def text(length: int = 700) -> Tensor:
    """Tokens (length,) that can be learned: each follows from the one before, mostly."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randint(3, (length,), generator=generator)
    return (torch.arange(length) * 3 + noise) % 11


def make_task(seed: int = 0, *, batch: int = 6, dropout: float = 0.0, dtype: torch.dtype = torch.float32, **form: Any):
    torch.manual_seed(seed)
    model = GPT(11, 16, 2, 2, context=13, dropout=dropout, **form).to(dtype)
    return LanguageModelling(model, text()[:600], text()[600:], valid_bytes=100, context=13, batch=batch)


def trained(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.advance().loss for _ in range(steps)]


def assert_equal_weights(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


class Sums:
    """A task whose parts weigh differently: sums of numbers, of which some are left out."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 1).double()

    def batches(self, generator: torch.Generator, step: int, parts: int) -> Sequence[tuple[Tensor, Tensor]]:
        assert step < OPTIONS.steps
        x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
        kept = torch.rand(12, generator=generator) < 0.2 + 0.06 * torch.arange(12)
        kept[::2] = True
        return [(x[i], kept[i]) for i in torch.arange(12).tensor_split(parts)]

    def count(self, batch: tuple[Tensor, Tensor]) -> int:
        return int(batch[1].sum())

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, kept = batch
        return (model(x)[:, 0] - x.sum(1)).square()[kept].mean()

    def validate(self) -> dict[str, float]:
        return {"loss": 0.0, "grad": float(torch.is_grad_enabled()), "training": float(self.model.training)}


# The rate and the optimizer -------------------------------------------------------------------------------------------


def test_the_rate_rises_then_falls_to_a_tenth():
    rates = [rate_at(step, 110, 10) for step in range(110)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[10] == 1
    assert rates[60] == pytest.approx((1 + LEAST_RATE) / 2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert LEAST_RATE < rates[-1] < LEAST_RATE + 0.001
    assert rate_at(500, 110, 10) == LEAST_RATE
    assert rate_at(0, 1, 0) == 1


def test_weight_decay_draws_matrices_alone():
    model = make_task(position="learned").model
    optimizer = make_optimizer(model, 0.3)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert sum(map(len, (decayed["params"], others["params"]))) == len(list(model.parameters()))
    before = deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    optimizer.step()
    for (name, after), old in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.allclose(after, old * (0.85 if old.ndim >= 2 else 1)), name


# A step ---------------------------------------------------------------------------------------------------------------


def test_it_learns():
    trainer = Trainer(make_task(), replace(OPTIONS, steps=60), ALONE)
    losses = trained(trainer, 60)
    assert losses[0] == pytest.approx(math.log(11), abs=0.7)
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]
    assert trainer.validate()["loss"] < 0.7 * losses[0]


def test_what_a_step_tells():
    trainer = Trainer(make_task(), OPTIONS, ALONE)
    first, second, third = (trainer.advance() for _ in range(3))
    assert [step.number for step in (first, second, third)] == [1, 2, 3]
    assert (first.rate, second.rate) == (1.5e-3, 3e-3)
    assert first.tokens == 6 * 13


def test_the_loss_is_that_before_the_step():
    task = make_task()
    generator = torch.Generator().manual_seed(seed_of(OPTIONS.seed, 0, "data"))
    (piece,) = task.batches(generator, 0, 1)
    expected = loss_of(task.model, piece[:, :-1], piece[:, 1:]).item()
    assert Trainer(task, OPTIONS, ALONE).advance().loss == pytest.approx(expected, rel=1e-6)


def test_every_step_has_other_data_and_every_seed():
    seeds = {seed_of(seed, step, what) for seed in range(5) for step in range(5) for what in ("data", "dropout")}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, 2, "data") == 9059930278144250459  # the same on every machine


@pytest.mark.parametrize("accumulate", [2, 3, 4])
def test_parts_of_a_step_make_the_whole_step(accumulate: int):
    """Also where they weigh differently."""
    whole, parted = Sums(), Sums()
    losses = trained(Trainer(whole, OPTIONS, ALONE), 5)
    assert trained(Trainer(parted, replace(OPTIONS, accumulate=accumulate), ALONE), 5) == pytest.approx(losses, 1e-6)
    for mine, theirs in zip(whole.model.parameters(), parted.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_parts_of_a_text_make_the_whole_step():
    whole, parted = (make_task(dtype=torch.float64) for _ in range(2))
    trained(Trainer(whole, OPTIONS, ALONE), 4)
    trained(Trainer(parted, replace(OPTIONS, accumulate=3), ALONE), 4)
    for mine, theirs in zip(whole.model.parameters(), parted.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_long_gradients_are_clipped():
    def gradient(clip: float) -> float:
        task = make_task()
        Trainer(task, replace(OPTIONS, clip=clip), ALONE).advance()
        return math.sqrt(sum(parameter.grad.square().sum().item() for parameter in task.model.parameters()))

    free = gradient(0)
    assert free > 0.1
    assert gradient(1e9) == free
    assert gradient(0.1) == pytest.approx(0.1, rel=1e-3)


def test_a_loss_that_is_no_number_ends_it_and_changes_nothing():
    task = make_task()
    trainer = Trainer(task, OPTIONS, ALONE)
    trained(trainer, 2)
    with torch.no_grad():
        task.model.norm.weight[0] = math.nan
    before = {name: tensor.clone() for name, tensor in trainer.state().items()}
    with pytest.raises(Diverged, match="the loss of step 3 is nan"):
        trainer.advance()
    after = trainer.state()
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)


def test_validation_is_in_eval_mode_without_gradients():
    trainer = Trainer(Sums(), OPTIONS, ALONE)
    trainer.advance()
    assert trainer.validate() == {"loss": 0, "grad": 0, "training": 0}


def test_bfloat16_computes_in_it_and_keeps_the_weights():
    exact, rough = make_task(), make_task()
    losses = trained(Trainer(exact, OPTIONS, ALONE), 8)
    told = trained(Trainer(rough, replace(OPTIONS, dtype="bfloat16"), ALONE), 8)
    assert told != losses
    assert told == pytest.approx(losses, rel=0.02)
    assert {parameter.dtype for parameter in rough.model.parameters()} == {torch.float32}


def test_text_loss_is_the_mean_over_all_tokens():
    model, tokens = make_task().model, text(60)
    pieces = [tokens[start : start + 14] for start in range(0, 52, 13)]
    losses = [loss_of(model, piece[None, :-1], piece[None, 1:]).item() for piece in pieces]
    assert text_loss(model, tokens, context=13, batch=3) == pytest.approx(sum(losses) / 4, rel=1e-5)
    assert text_loss(model, tokens, context=13, batch=3, most=2) == pytest.approx((losses[0] + losses[3]) / 2, rel=1e-5)


def test_bits_per_byte():
    found = make_task().validate()
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))  # 100 tokens for 100 bytes


# Continued ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_continues_bit_for_bit(steps: int, dtype: str):
    """With dropout, from the checkpoint of step 0 on."""
    options = replace(OPTIONS, dtype=dtype)
    whole = make_task(dropout=0.2)
    losses = trained(Trainer(whole, options, ALONE), 7)
    begun, other = Trainer(make_task(dropout=0.2), options, ALONE), make_task(seed=1, dropout=0.2)
    before = trained(begun, steps)
    state = begun.state()
    trained(begun, 1)  # what comes after is not in it
    torch.manual_seed(123)
    again = Trainer(other, options, ALONE)
    check_state(again.bare, state)
    again.load_state(state)
    assert again.done == steps
    assert before + trained(again, 7 - steps) == losses
    assert_equal_weights(whole.model, other.model)


def test_dropout_differs_from_step_to_step():
    task = make_task(dropout=0.5)
    trainer = Trainer(task, replace(OPTIONS, learning_rate=1e-30), ALONE)
    same = task.batches(torch.Generator().manual_seed(0), 0, 1)
    task.batches = lambda *_: same  # type: ignore[method-assign]
    assert len(set(trained(trainer, 4))) == 4


def test_what_is_shared_is_stored_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
    model["b"].weight = model["a"].weight
    assert list(stored(model)) == [
        "a.weight", "a.bias", "b.bias", "norm.weight", "norm.bias",
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip


def test_refuses_the_state_of_another_model():
    state = Trainer(make_task(), OPTIONS, ALONE).state()
    check_state(make_task().model, state)
    with pytest.raises(ValueError, match=re.escape("'position_embedding.weight' is only in one of the two")):
        check_state(make_task(position="learned").model, state)
    wider = GPT(13, 16, 2, 2, context=13)
    with pytest.raises(
        ValueError, match=re.escape("'model.embedding.weight' has shape (11, 16) there and (13, 16) here")
    ):
        check_state(wider, state)
    with pytest.raises(ValueError, match="how many steps"):
        check_state(make_task().model, {name: tensor for name, tensor in state.items() if name != "done"})
    trainer = Trainer(make_task(), OPTIONS, ALONE)
    trainer.advance()
    state = trainer.state()
    state["optimizer.norm.bias.exp_avg"] = torch.zeros(3)
    with pytest.raises(
        ValueError, match=re.escape("'optimizer.norm.bias.exp_avg' has shape (3,) there and (16,) here")
    ):
        check_state(make_task().model, state)


# Several processes ----------------------------------------------------------------------------------------------------


def _work(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    processes = processes_here("ddp")
    assert processes == Processes(rank, 2, rank, started=True)
    with joined(processes, "cpu"):
        for way in ("ddp", "fsdp"):
            _share(processes, replace(OPTIONS, parallel=way, accumulate=3))
        uneven, want = Sums(), Sums()
        trained(Trainer(uneven, replace(OPTIONS, parallel="ddp"), processes), 3)
        trained(Trainer(want, OPTIONS, ALONE), 3)
        torch.testing.assert_close(uneven.model.weight, want.model.weight, rtol=0, atol=1e-6)
        assert processes.most(rank, torch.device("cpu")) == 1
        assert processes.share(f"from {rank}") == "from 0"
        processes.agree("the same", torch.device("cpu"))
        with pytest.raises(UnequalProcesses):
            processes.agree(f"from {rank}", torch.device("cpu"))
    # Not through the interpreter's end: https://github.com/pytorch/pytorch/pull/179291
    os._exit(0)


def _share(processes: Processes, options: Options) -> None:
    """A step that is shared is the step of one process; what is saved of it is whole, and shared again when read."""
    alone, shared = make_task(dtype=torch.float64), make_task(dtype=torch.float64)
    plain = Trainer(alone, OPTIONS, ALONE)
    losses = trained(plain, 4)
    trainer = Trainer(shared, options, processes)
    told = trained(trainer, 2)
    state, other = trainer.state(), make_task(seed=7, dtype=torch.float64)
    again = Trainer(other, options, processes)
    check_state(other.model, state)
    again.load_state(state)
    assert told + trained(again, 2) == pytest.approx(losses, abs=1e-6)
    for (name, mine), theirs in zip(again.state().items(), plain.state().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6, msg=name)
    assert again.validate()["loss"] == pytest.approx(plain.validate()["loss"], abs=1e-6)


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes_do_the_step_of_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_work, (port,), nprocs=2)


def test_parallel_needs_torchrun(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert processes_here(None) == ALONE
    told = "--parallel: expected a run of torchrun, got a single process. Write torchrun --nproc-per-node 2 -m"
    with pytest.raises(ValueError, match=re.escape(told)):
        processes_here("ddp")


def test_ranks_without_an_address_are_no_torchrun(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert processes_here(None) == ALONE
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert processes_here(None) == Processes(0, 1, 0, started=True)


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"steps": 0}, "--steps: expected at least 1, got 0."),
        ({"steps": 2.5}, "--steps: expected an int, got 2.5."),
        ({"accumulate": 0}, "--accumulate: expected at least 1, got 0."),
        ({"validate_every": 0}, "--validate-every: expected at least 1, got 0."),
        ({"save_every": -1}, "--save-every: expected at least 1, got -1."),
        ({"warm_up": 21}, "--warm-up: expected at most 20, got 21."),
        ({"threads": 0}, "--threads: expected at least 1, got 0."),
        ({"seed": -1}, "--seed: expected at least 0, got -1."),
        ({"learning_rate": 0.0}, "--learning-rate: expected a finite number above 0, got 0.0."),
        ({"learning_rate": math.nan}, "--learning-rate: expected a finite number above 0, got nan."),
        ({"weight_decay": -1.0}, "--weight-decay: expected a finite number of at least 0, got -1.0."),
        ({"clip": math.inf}, "--clip: expected a finite number of at least 0, got inf."),
        ({"dtype": "float8"}, "--dtype: expected float32, bfloat16 or float16, got 'float8'."),
        ({"dtype": "float16"}, "--dtype: expected float32 or bfloat16 without CUDA, got float16. Small gradients"),
        ({"device": "abacus"}, "--device: expected a device of this machine, got abacus ("),
        ({"device": "meta"}, "--device: expected a device of this machine, got meta, which computes nothing."),
        ({"parallel": "swarm"}, "--parallel: expected ddp or fsdp, got 'swarm'."),
    ],
)
def test_refuses_bad_options(changes: dict[str, Any], told: str):
    with pytest.raises((ValueError, TypeError), match=re.escape(told)) as error:
        replace(OPTIONS, **changes).check(ALONE)
    assert "\n" not in str(error.value)


def test_refuses_a_device_that_is_a_package_of_its_own():
    """torch knows its name and imports what is not there."""
    with pytest.raises(ValueError, match="--device: expected a device of this machine, got hpu"):
        replace(OPTIONS, device="hpu").check(ALONE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_refuses_cuda_where_there_is_none():
    with pytest.raises(ValueError, match="--device: expected a device of this machine, got cuda") as error:
        replace(OPTIONS, device="cuda").check(ALONE)
    assert "\n" not in str(error.value)


def test_good_options_and_their_defaults():
    Options().check(ALONE)
    assert Options(steps=30).warm_up_steps == 2
    assert Options(steps=30, warm_up=0).warm_up_steps == 0
    assert option("learning_rate") == "--learning-rate"
    check_model_sizes(width=12, layers=1, heads=3)
