"""How to train: what every task has in common. Checked once, before anything is read or written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from multihead.errors import bad_type, bad_value, check_size, is_number
from multihead.training.parallel import WAYS, Processes

DTYPES = ("float32", "bfloat16", "float16")
MOST_THREADS = 256
_MOST_STEPS = 10**12
_MOST_BATCH = 1 << 20
_MOST_WIDTH = 1 << 20
_MOST_LAYERS = 4096
_MOST_RATE = 1e6  # of learning and of decay: nobody wants more, and float32 holds their product


@dataclass(frozen=True)
class Options:
    """How a task is trained. Fields have the names of the command line's options."""

    steps: int = 1000  # the whole training, from which the rate's course follows
    accumulate: int = 1  # in how many parts each process takes its share of a step, one after the other
    learning_rate: float = 1e-3  # the highest
    warm_up: int | None = None  # steps until the rate is there; None for a twentieth of all
    weight_decay: float = 0.1  # of matrices and tables
    clip: float = 1.0  # the longest that a step's gradient may be; 0 for no bound
    dtype: str = "float32"  # what products are computed in; weights are float32 in any case
    device: str = "cpu"
    compile: bool = False
    parallel: str | None = None  # "ddp" or "fsdp" under torchrun; None alone
    seed: int = 0
    threads: int | None = None  # None for as many as torch chooses
    validate_every: int = 100  # steps
    save_every: int = 100  # steps

    @property
    def warm_up_steps(self) -> int:
        """How many steps the rate rises."""
        return self.warm_up if self.warm_up is not None else math.ceil(self.steps / 20)

    def check(self, processes: Processes) -> None:
        """Raise ValueError or TypeError, by the option's name, if something can't be done."""
        check_range("--steps", self.steps, 1, _MOST_STEPS)
        for name in ("accumulate", "validate_every", "save_every"):
            check_size(option(name), getattr(self, name))
        if self.warm_up is not None:
            check_range("--warm-up", self.warm_up, 0, self.steps)
        if self.threads is not None:
            check_range("--threads", self.threads, 1, MOST_THREADS)
        check_range("--seed", self.seed, 0, 2**63 - 1)
        check_real("--learning-rate", self.learning_rate, above=True, most=_MOST_RATE)
        check_real("--weight-decay", self.weight_decay, most=_MOST_RATE)
        check_real("--clip", self.clip)
        check_choice("--dtype", self.dtype, DTYPES)
        check_device(self.device, processes)
        if self.dtype == "float16" and torch.device(self.device).type != "cuda":
            otherwise = "Small gradients would become 0 in float16, and their scaling is made for CUDA."
            raise bad_value("--dtype", "float32 or bfloat16 without CUDA", "float16", otherwise, "Take bfloat16.")
        if self.parallel is not None:
            check_choice("--parallel", self.parallel, WAYS)
        if self.dtype == "float16" and self.parallel == "fsdp":
            otherwise = "Each process would scale its own shard's gradients."
            raise bad_value("--dtype", "float32 or bfloat16 with fsdp", "float16", otherwise, "Take bfloat16.")


def option(name: str) -> str:
    """How the command line calls a field."""
    return f"--{name.replace('_', '-')}"


def check_device(name: str, processes: Processes) -> None:
    """Raise ValueError, in one line, if there is no such device here."""
    try:
        torch.empty(0, device=processes.device(name))
    # What torch raises, each for another device.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise bad_value("--device", "a device of this machine", f"{name} ({why})", "", "Try --device cpu.") from None
    if torch.device(name).type == "meta":
        raise bad_value("--device", "a device of this machine", "meta, which computes nothing", "", "Try --device cpu.")


def check_range(argument: str, value: object, least: int, most: int) -> int:
    """`value` back, if it is an int from `least` to `most`."""
    if check_size(argument, value, least=least) > most:
        raise bad_value(argument, f"at most {most}", value)
    assert isinstance(value, int)
    return value


def check_real(argument: str, value: object, *, above: bool = False, most: float = math.inf) -> float:
    """`value` back, if it is a finite number of at least 0, or above 0, and at most `most`."""
    words = f"a finite number {'above' if above else 'of at least'} 0"
    if not is_number(value):
        raise bad_type(argument, words, value)
    if not 0 <= value < math.inf or (above and value == 0):
        raise bad_value(argument, words, value)
    if value > most:
        raise bad_value(argument, f"at most {most:g}", value)
    return float(value)


def use_threads(threads: int | None) -> None:
    """Let torch use so many cores, if that can be; None: as many as it chooses."""
    if threads is not None:
        torch.set_num_threads(check_range("--threads", threads, 1, MOST_THREADS))


def check_choice(argument: str, value: Any, choices: tuple[str, ...]) -> str:
    """`value` back, if it is one of the choices."""
    if value not in choices:
        raise bad_value(argument, " or ".join((", ".join(choices[:-1]), choices[-1])), repr(value))
    return str(value)


def check_batch(batch: object, parts: int) -> None:
    """Raise ValueError or TypeError, by the option's name, if a step can't be cut into so many parts of one size."""
    if check_range("--batch", batch, 1, _MOST_BATCH) % parts:
        expected = f"a multiple of {parts}, the processes times --accumulate"
        raise bad_value("--batch", expected, batch, "They could not have equal shares.")


def check_model_sizes(*, width: int, layers: int, heads: int) -> None:
    """Raise ValueError, by the option's name, for sizes that no model of rotary positions can have."""
    check_range("--width", width, 1, _MOST_WIDTH)
    check_range("--layers", layers, 1, _MOST_LAYERS)
    check_size("--heads", heads)
    if width % (2 * heads):
        below, above = width // (2 * heads) * 2 * heads, (width // (2 * heads) + 1) * 2 * heads
        otherwise = "Each head has an equal part of the width, and rotary positions turn its channels in pairs."
        instead = f"Try --width {below} or {above}." if below else f"Try --width {above}."
        raise bad_value("--width", f"a multiple of 2 * --heads = {2 * heads}", width, otherwise, instead)
