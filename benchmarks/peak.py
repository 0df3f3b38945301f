"""How many float32 operations a second this machine can do at best: multiply-adds in registers, none of them waiting.

A few lines of C, compiled for this machine; without a compiler a large matrix product says it, a little too low.

    python benchmarks/peak.py
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

SOURCE = """
#if defined(__AVX512F__)
enum { WIDTH = 16, CHAINS = 24 };
#elif defined(__AVX__)
enum { WIDTH = 8, CHAINS = 12 };
#else
enum { WIDTH = 4, CHAINS = 24 };
#endif
typedef float vec __attribute__((vector_size(4 * WIDTH)));

double operations(long rounds) { return 2.0 * WIDTH * CHAINS * rounds; }

float spin(long rounds, float a, float b) {
  vec factor, term, x[CHAINS], sum;
  float total = 0;
  for (int j = 0; j < WIDTH; j++) factor[j] = a, term[j] = b, sum[j] = 0;
  for (int i = 0; i < CHAINS; i++) x[i] = term * (float)(i + 1);
  for (long round = 0; round < rounds; round++)
    for (int i = 0; i < CHAINS; i++) x[i] = x[i] * factor + term;
  for (int i = 0; i < CHAINS; i++) sum += x[i];
  for (int j = 0; j < WIDTH; j++) total += sum[j];
  return total;
}
"""
FLAGS = ("-march=native", "-mcpu=native", "")  # the first that the compiler knows


class Peak(NamedTuple):
    """Operations a second (a multiply-add is two), and how they were found."""

    flops: float
    how: str


def measure_peak(threads: int, seconds: float = 0.3) -> Peak:
    """The best stretch of about 10 ms among `seconds`. One thread in process time, several at once in wall time."""
    with tempfile.TemporaryDirectory() as folder:
        found = _compiled(Path(folder))
        if found is None:
            return _by_product(threads, seconds)
        work, how = found
        clock = time.process_time if threads == 1 else time.perf_counter
        with ThreadPoolExecutor(threads) as pool:

            def once(rounds: int) -> float:
                start = clock()
                list(pool.map(work, [rounds] * threads))  # the lock of the interpreter is not held in C
                return clock() - start

            once(10_000)
            rounds, best, end = 100_000, 0.0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                took = max(once(rounds), 1e-6)
                best = max(best, threads * work.operations(rounds) / took)
                rounds = max(10_000, round(rounds * min(2.0, 1e-2 / took)))
    return Peak(best, how)


class _Work:
    """The compiled functions."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self.operations: Callable[[int], float] = loaded.operations
        self._spin: Callable[[int, float, float], float] = loaded.spin
        loaded.operations.argtypes, loaded.operations.restype = [ctypes.c_long], ctypes.c_double
        loaded.spin.argtypes = [ctypes.c_long, ctypes.c_float, ctypes.c_float]
        loaded.spin.restype = ctypes.c_float

    def __call__(self, rounds: int) -> float:
        return self._spin(rounds, 0.999, 0.001)  # it stays near 1: no infinity, no denormal number


def _compiled(folder: Path) -> tuple[_Work, str] | None:
    source, library = folder / "peak.c", folder / "peak.so"
    source.write_text(SOURCE, encoding="ascii")
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        for flag in FLAGS if shutil.which(name) else ():
            options = ["-O3", "-shared", "-fPIC", *([flag] if flag else [])]
            done = subprocess.run([name, *options, str(source), "-o", str(library)], capture_output=True, check=False)
            if done.returncode == 0:
                return _Work(library), f"multiply-adds in registers, {name} {' '.join(options)}"
    return None


def _by_product(threads: int, seconds: float) -> Peak:
    n, before = 1024, torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    a, b, best = torch.randn(n, n), torch.randn(n, n), 0.0
    try:
        torch.mm(a, b)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = clock()
            torch.mm(a, b)
            best = max(best, 2 * n**3 / max(clock() - start, 1e-6))
    finally:
        torch.set_num_threads(before)
    return Peak(best, f"no C compiler, so this is what torch.mm of {n} x {n} reaches; the true peak is higher")


def main() -> None:
    for threads in (1, 2):
        peak = measure_peak(threads)
        print(f"{threads} thread(s): {peak.flops / 1e9:.1f} GFLOP/s, {peak.how}", flush=True)


if __name__ == "__main__":
    main()
