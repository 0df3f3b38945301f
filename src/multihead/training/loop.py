"""The loop: one step of training after another, of anything that is a `Task`.

What a step does is a function of the weights, the optimizer's state, the seed and the step's number: the data and the
dropout are drawn from generators seeded by the last two. So there is no state of a generator to keep, and a run that
is continued takes the same steps as one that was never stopped.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from multihead.training.optimizer import make_optimizer, rate_at
from multihead.training.options import Options
from multihead.training.parallel import Processes


class Task(Protocol):
    """What is trained, on what. The loop knows no more of it.

    A batch is whatever `batches` makes and `loss` takes. Every process of a parallel run calls `batches` with a
    generator in the same state and trains on its own share of the parts, so their number changes the numbers only by
    rounding.
    """

    @property
    def model(self) -> nn.Module:
        """What is trained; of a class that `multihead.models.saving` knows."""
        ...

    def batches(self, generator: torch.Generator, step: int, parts: int) -> Sequence[Any]:
        """The data of one step (counted from 0), drawn with the generator alone, in `parts` parts of about one size."""
        ...

    def count(self, batch: Any) -> int:
        """How many tokens of a part the loss is the mean of: how much the part weighs in its step."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss () of a part. `model` is the task's, perhaps in a wrapper: call it and no other."""
        ...

    def validate(self) -> dict[str, float]:
        """Figures on data that is kept back, by name: "loss" and others. Called without gradients, in eval mode."""
        ...


class Diverged(Exception):
    """The loss, or what the model predicts, is no finite number any more: nothing can be learned from here on."""


@dataclass(frozen=True)
class Step:
    """What a step did."""

    number: int  # counted from 1
    loss: float  # mean over all of the step's tokens, before the step
    rate: float  # the learning rate
    tokens: int  # that were predicted, by all processes


class Trainer:
    """A task with what its training needs: the optimizer, the precision, the other processes.

    Args:
        task: what is trained. Its model is moved to the device, and sharded for `parallel="fsdp"`.
        options: how.
        processes: this one and the others.
    """

    def __init__(self, task: Task, options: Options, processes: Processes) -> None:
        self.task, self.options, self.processes = task, options, processes
        self.done = 0  # steps
        self.device = processes.device(options.device)
        self.bare = task.model.to(self.device)  # whose parameters have the names that are saved
        self.model = processes.wrap(self.bare, options.parallel, self.device)
        if options.compile:
            self.bare.compile()
        self.optimizer = make_optimizer(self.bare, options.weight_decay)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=options.dtype == "float16")

    def advance(self) -> Step:
        """Take one step.

        Raises:
            Diverged: the loss is infinite or NaN; weights and optimizer are left as they were before the step.
        """
        options, processes = self.options, self.processes
        torch.manual_seed(seed_of(options.seed, self.done, "dropout", processes.rank))
        generator = torch.Generator().manual_seed(seed_of(options.seed, self.done, "data"))
        parts = self.task.batches(generator, self.done, options.accumulate * processes.count)
        counts = [self.task.count(part) for part in parts]
        mine = range(processes.rank, len(parts), processes.count)

        self.bare.train()
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for i in mine:
            share = counts[i] / sum(counts)
            with processes.reducing(self.model, i == mine[-1]):
                with self._precision():
                    part = self.task.loss(self.model, parts[i]) * share
                # The gradients of the processes are averaged, and should be summed: a share is of the whole step.
                self.scaler.scale(part * processes.count).backward()
            loss += part.detach()
        found = processes.sum(loss).item()
        if not math.isfinite(found):
            raise Diverged(f"the loss of step {self.done + 1:,} is {found}")

        self.scaler.unscale_(self.optimizer)
        if options.clip:
            nn.utils.clip_grad_norm_(self.bare.parameters(), options.clip)
        rate = options.learning_rate * rate_at(self.done, options.steps, options.warm_up_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.done += 1
        return Step(self.done, found, rate, sum(counts))

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The task's figures on the data kept back. Every process makes them, as a sharded model needs them all."""
        self.bare.eval()
        with self._precision():
            return self.task.validate()

    def _precision(self) -> AbstractContextManager[Any]:
        dtype: torch.dtype = getattr(torch, self.options.dtype)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32)

    # What is saved ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All that decides about the steps to come, as tensors by name. Every process has to call it."""
        whole = self.processes.whole
        tensors = {f"model.{name}": whole(tensor) for name, tensor in stored(self.bare).items()}
        for name, parameter in self.bare.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = whole(value)
        for key, value in self.scaler.state_dict().items():
            tensors[f"scaler.{key}"] = torch.tensor(value)
        return tensors | {"done": torch.tensor(self.done)}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Go on from `state`, which `check_state` found to fit."""
        like = self.processes.like
        for name, tensor in stored(self.bare).items():
            tensor.copy_(like(tensors[f"model.{name}"], tensor))
        for name, parameter in self.bare.named_parameters():
            start = f"optimizer.{name}."
            found = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
            if found:  # none before the first step
                # The count of steps stays where it is, on the CPU: AdamW reads it there.
                self.optimizer.state[parameter] = {
                    key: like(value, parameter) if value.ndim else value.clone() for key, value in found.items()
                }
        scaler = {key.removeprefix("scaler."): value.item() for key, value in tensors.items() if key[:7] == "scaler."}
        if scaler and self.scaler.is_enabled():
            self.scaler.load_state_dict(scaler)
        self.done = int(tensors["done"])


def check_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError, with what it is, if `Trainer.state` was of another model."""
    weights = stored(model)
    strange = {key.removeprefix("model.") for key in tensors if key.startswith("model.")} ^ weights.keys()
    if strange:
        raise ValueError(f"{min(strange)!r} is only in one of the two")
    shapes = {f"model.{name}": tensor.shape for name, tensor in weights.items()}
    for name, tensor in weights.items():
        moments = {f"optimizer.{name}.{key}": tensor.shape for key in ("exp_avg", "exp_avg_sq")}
        shapes |= {key: shape for key, shape in moments.items() if key in tensors}
    for key, shape in shapes.items():
        if tensors[key].shape != shape:
            raise ValueError(f"{key!r} has shape {tuple(tensors[key].shape)} there and {tuple(shape)} here")
    if "done" not in tensors:
        raise ValueError("it does not say how many steps were done")


def stored(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as state_dict names them, those that are shared once, and themselves, not copies."""
    seen: dict[int, str] = {}
    every = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in every.items() if seen.setdefault(id(tensor), name) == name}


def seed_of(seed: int, step: int, *what: object) -> int:
    """A seed for one purpose of one step; seeds that differ in anything have nothing to do with each other."""
    told = repr((seed, step, *what)).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big") >> 1
