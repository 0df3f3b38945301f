"""How fast the machine at hand is: what predictions of time are made with."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from multihead.explaining.costs import Cost

_WIDTH = 1024  # of the matrices: large enough to be bound by arithmetic
_COPIED = 2**26  # bytes: more than caches hold
_LEAST_RUNS, _MOST_RUNS = 3, 100


class Machine(NamedTuple):
    """What it was seen to do.

    Attributes:
        flops: operations a second of a matrix product, two for a multiply-add.
        bandwidth: bytes a second, read and written, of a copy.
        told: of what, in words.
    """

    flops: float
    bandwidth: float
    told: str

    @property
    def balance(self) -> float:
        """Operations for each byte, above which arithmetic is the limit."""
        return self.flops / self.bandwidth

    def seconds(self, cost: Cost) -> float:
        """The least that a step can take: its operations or its bytes, whichever takes longer (the roofline of Williams
        et al. 2009)."""
        return max(cost.flops / self.flops, cost.bytes / self.bandwidth)


def calibrate(device: torch.device, dtype: torch.dtype) -> Machine:
    """Multiply two matrices, as a layer does, and copy a tensor, several times. The fastest run counts: others shared
    the machine."""
    a, b = torch.zeros(2, _WIDTH, _WIDTH, device=device, dtype=dtype).unbind()
    products = [(a, b)]
    if device.type == "cpu" and dtype.itemsize < 4:  # in which multihead computes in float32
        products.append((a.float(), b.float()))
    source = torch.zeros(_COPIED // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    with torch.no_grad():
        product = min(fastest(partial(nn.functional.linear, *pair), device)[0] for pair in products)
        copy, _ = fastest(lambda: target.copy_(source), device)
    kind = str(dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    where = str(device) if device.type != "cpu" else f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    return Machine(2 * _WIDTH**3 / product, 2 * _COPIED / copy, f"{kind} on {where}")


def fastest(run: Callable[[], object], device: torch.device, seconds: float = 0.3) -> tuple[float, int]:
    """The shortest time of a run among those of about so many seconds, after one that does not count; and how many."""
    times: list[float] = []
    run()
    _wait(device)
    end = time.perf_counter() + seconds
    while len(times) < _LEAST_RUNS or (time.perf_counter() < end and len(times) < _MOST_RUNS):
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9), len(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
