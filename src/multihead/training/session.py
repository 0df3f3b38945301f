"""A training from its first step, or its last checkpoint, to its end, or to Ctrl-C: shown, judged, written down."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import FrameType
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor, nn

from multihead.models import saving
from multihead.packages import MissingPackage
from multihead.training.loop import Diverged, Step, Task, Trainer
from multihead.training.options import Options
from multihead.training.parallel import Processes
from multihead.training.progress import INTERRUPTED, display, say
from multihead.training.runs import MODEL, PICTURE, Run

DIVERGED = 1  # the exit code where the loss became infinite or NaN


class CannotCompile(Exception):
    """The model can't be compiled here, most often because there is no compiler."""


@dataclass(frozen=True)
class Outcome:
    """How a training ended."""

    code: int  # the exit code: 0, 128 and the signal's number, or DIVERGED
    done: int  # steps that are saved
    loss: float  # nats per token, a mean over about the last 50 steps
    validation: dict[str, float]  # the last figures on the data kept back


def fit(
    task: Task,
    options: Options,
    run: Run,
    *,
    processes: Processes,
    console: Console,
    state: dict[str, Tensor] | None = None,
    seconds: float = 0.0,
) -> Outcome:
    """Train until all steps are done or a signal (Ctrl-C, SIGTERM) asks to stop, which leaves a checkpoint.

    Args:
        task: what is trained.
        options: how, checked.
        run: the folder, which the first process writes to.
        processes: this one and the others, joined.
        console: where progress is shown.
        state: what to go on from, which `check_state` found to fit; None for a new run.
        seconds: that it took so far.

    Raises:
        OSError: the folder can't be written to. The last checkpoint stands.
        CannotCompile: with `options.compile`, before the first step.
    """
    threads_before = torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        return _Session(task, options, run, processes, console, seconds).go(state)
    finally:
        run.end_metrics()
        torch.set_num_threads(threads_before)


class _Session:
    def __init__(
        self, task: Task, options: Options, run: Run, processes: Processes, console: Console, seconds: float
    ) -> None:
        self.options, self.run, self.processes, self.console = options, run, processes, console
        self.trainer = Trainer(task, options, processes)
        self.begin = perf_counter() - seconds
        self.validation: dict[str, float] = {}
        self.saved = 0  # steps
        self.draws = True

    def go(self, state: dict[str, Tensor] | None) -> Outcome:
        with _signals() as signals:
            if state is not None:
                self.trainer.load_state(state)
                self.saved = self.trainer.done
            if self.processes.first:
                self.run.begin_metrics(self.trainer.done)
            if state is None:
                self._save()  # so that there is something to go on from at any time
            try:
                with display(self.console, begin=self.trainer.done / self.options.steps) as show:
                    return self._steps(signals, show)
            except Diverged as error:
                advice = "A smaller --learning-rate or a longer --warm-up may help."
                say(self.console, f"\nStopped: {error}. {advice} Step {self.saved:,} is saved.")
                return Outcome(DIVERGED, self.saved, math.nan, self.validation)
            except RuntimeError as error:
                if self.options.compile and isinstance(error, torch._dynamo.exc.TorchDynamoException):
                    if signals.last:  # it ended the compiler too: a terminal sends it to all that belongs together
                        return Outcome(128 + signals.last, self.saved, math.nan, self.validation)
                    raise CannotCompile(str(error).splitlines()[0]) from error
                raise
            except KeyboardInterrupt:  # the second one
                return Outcome(INTERRUPTED, self.saved, math.nan, self.validation)

    def _steps(self, signals: _Signals, show: Callable[[float, float, str], None]) -> Outcome:
        trainer, options = self.trainer, self.options
        total = weight = 0.0
        stop = 0
        while trainer.done < options.steps and not stop:
            begin = perf_counter()
            step = trainer.advance()
            speed = step.tokens / (perf_counter() - begin)
            self._log(step, speed)
            total, weight = 0.98 * total + step.loss, 0.98 * weight + 1
            line = f"step {step.number:,}  loss {total / weight:.3f}"
            if "loss" in self.validation:
                line += f"  validation {self.validation['loss']:.3f}"
            show(step.number / options.steps, perf_counter() - self.begin, f"{line}  {speed:,.0f} tokens/s")
            # The signal may have reached some processes alone; all have to stop after the same step.
            stop = self.processes.most(signals.last, trainer.device)
            if stop or self._due(options.save_every):
                self._save()
        # A signal in the last step stops nothing: all is done.
        code = 128 + stop if stop and trainer.done < options.steps else 0
        return Outcome(code, trainer.done, total / weight, self.validation)

    def _due(self, every: int) -> bool:
        return self.trainer.done % every == 0 or self.trainer.done == self.options.steps

    def _log(self, step: Step, speed: float) -> None:
        line: dict[str, Any] = {"step": step.number, "loss": step.loss}
        if self._due(self.options.validate_every):
            self.validation = self.trainer.validate()
            if not all(map(math.isfinite, self.validation.values())):
                raise Diverged(f"the validation loss after step {step.number:,} is {self.validation.get('loss')}")
            line |= {f"validation_{name}": value for name, value in self.validation.items()}
        if self.processes.first:
            seconds = round(perf_counter() - self.begin, 3)
            self.run.add_metrics(line | {"lr": step.rate, "tokens_per_second": round(speed, 1), "seconds": seconds})

    def _save(self) -> None:
        state = self.trainer.state()  # by all processes: each has a shard
        # The loss of a step is that before it: whether the step itself ruined the model is only seen here.
        if not all(bool(tensor.isfinite().all()) for name, tensor in state.items() if name.startswith("model.")):
            raise Diverged(f"step {self.trainer.done:,} made weights infinite or NaN")
        if self.processes.first:
            # The checkpoint last: from the one of the last step nothing goes on that could mend a model left behind.
            saving.save(self._plain(state), self.run.path(MODEL))
            self.run.write_state(state, {"seconds": perf_counter() - self.begin})
            self._draw()
        self.saved = self.trainer.done

    def _draw(self) -> None:
        if self.draws:
            try:
                self.run.draw()
            except MissingPackage as missing:
                self.draws = False
                say(self.console, f"There will be no {PICTURE}: {missing}")

    def _plain(self, state: dict[str, Tensor]) -> nn.Module:
        """The model as it is saved: of plain tensors, where the one that is trained is sharded."""
        bare = self.trainer.bare
        if self.options.parallel != "fsdp":
            return bare
        make, config = cast(Callable[..., nn.Module], type(bare)), cast(dict[str, Any], bare.config)
        with torch.random.fork_rng(devices=[]):
            plain = make(**config)
        weights = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
        plain.load_state_dict(weights, strict=False)  # what is shared is there once
        return plain


@dataclass
class _Signals:
    last: int = 0  # the number of the signal that came; 0 for none


@contextmanager
def _signals() -> Generator[_Signals, None, None]:
    """Notes Ctrl-C and SIGTERM, so that the step can be finished; the second Ctrl-C ends it there and then."""
    found = _Signals()

    def note(number: int, _: FrameType | None) -> None:
        if found.last and number == signal.SIGINT:
            raise KeyboardInterrupt
        found.last = number

    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield found
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
