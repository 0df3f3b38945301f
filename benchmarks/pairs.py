"""Two ways to do one thing, measured alternately in one process.

Machines are shared and change speed, so a single time means little. Here both sides run in turn, and what is quoted is
the median of the ratios of neighbouring runs. One thread is measured in process time, several threads in wall time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

Run = Callable[[], object]


class Pair(NamedTuple):
    """Seconds (medians) and the ratio theirs / ours: above 1, ours is faster."""

    ours: float
    theirs: float
    ratio: float


def measure(ours: Run, theirs: Run, *, seconds: float, threads: int) -> Pair:
    """Run both alternately for about `seconds`, at least five times each, after a warm-up."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    try:
        for run in (ours, theirs):
            run()
        once = max(_time(ours, clock, 1), _time(theirs, clock, 1), 1e-7)
        inner = max(1, round(2e-3 / once))  # short calls are timed several at a time, clocks being coarse
        times: list[tuple[float, float]] = []
        end = time.perf_counter() + seconds
        while len(times) < 5 or (time.perf_counter() < end and len(times) < 501):
            times.append((_time(ours, clock, inner), _time(theirs, clock, inner)))
    finally:
        torch.set_num_threads(before)
    ratio = statistics.median(b / a for a, b in times)
    return Pair(statistics.median(a for a, _ in times), statistics.median(b for _, b in times), ratio)


def _time(run: Run, clock: Callable[[], float], inner: int) -> float:
    start = clock()
    for _ in range(inner):
        run()
    return (clock() - start) / inner


def show(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
