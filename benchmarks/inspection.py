"""What looking costs: statistics against one fused forward, and the drop-in's default call against one without weights.

python benchmarks/inspection.py
python benchmarks/inspection.py --length 1024
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

import multihead as mh
from multihead.inspection.statistics import BY_NAME
from pairs import Run, measure, show

H, D = 8, 64
STATISTICS = ("entropy", "max_logit", "received")
MODES = ("eval", "no_grad", "train")


def statistics(T: int, seconds: float, threads: int) -> None:
    """Of a causal call of 8 heads, each made anew."""
    q, k, v = torch.randn(3, 1, H, T, D).unbind()
    _, lse = mh.attention(q, k, v, mh.causal(), return_lse=True)

    def record() -> mh.Record:
        return mh.Record(q, k, mask=mh.causal(), lse=lse)

    asked = {
        ", ".join(STATISTICS): lambda: record().compute(*STATISTICS),
        "the same by blocks": lambda: record().gather({name: BY_NAME[name] for name in STATISTICS}),
        "row(-1)": lambda: record().row(-1),
        "mass(0), lse known": lambda: record().mass(0),
    }
    print(f"\nTime / that of one fused forward, T={T}, {H} heads, D={D}, causal, {threads} thread(s).\n")
    print("| asked for | forward | ratio |\n|---|---|---|")
    for name, run in asked.items():
        found = measure(run, lambda: mh.attention(q, k, v, mh.causal()), seconds=seconds, threads=threads)
        print(f"| {name} | {show(found.theirs)} | {1 / found.ratio:.3f} |", flush=True)


def peak(way: str, T: int) -> None:
    """In a process of its own: print the peak resident memory in KiB of "inputs", "statistics" or "forward"."""
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, H, T, D).unbind()
    small = q[:, :, :256]  # warm-up, so that libraries are loaded in every process
    mh.Record(small, small, mask=mh.causal()).compute(*STATISTICS)
    if way == "statistics":
        mh.Record(q, k, mask=mh.causal()).compute(*STATISTICS)
    if way == "forward":
        mh.attention(q, k, v, mh.causal())
    # Not ru_maxrss, which a process takes over from the one that started it.
    print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))


def memory(T: int) -> None:
    """Each figure is the peak of a process of its own, less that of one that only makes the inputs."""

    def of(way: str) -> float:
        command = [sys.executable, __file__, "--length", str(T), "--peak", way]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024

    base = of("inputs")
    told = ", ".join(f"{way} {of(way) - base:.0f} MiB" for way in ("statistics", "forward"))
    print(f"\nPeak memory over the inputs, T={T}: {told}; the weights would be {H * T * T * 4 / 2**20:,.0f} MiB.")


def call(layer: mh.MultiheadAttention, x: torch.Tensor, mode: str, weights: bool) -> Run:
    """One call, and in training its backward pass."""
    layer.train(mode == "train")

    def once() -> None:
        with torch.set_grad_enabled(mode != "no_grad"):
            out, _ = layer(x, x, x, need_weights=weights)
            if mode == "train":
                out.sum().backward()

    return once


def default_call(seconds: float, threads: int) -> None:
    """Weights that nobody reads."""
    print("\nTime of the default call / that of a call without weights, 512 wide, 8 heads.\n")
    print(f"| B x T | {' | '.join(MODES)} |\n|---|---|---|---|")
    layer = mh.MultiheadAttention(512, 8, batch_first=True)
    for B, T in ((1, 16), (8, 16), (1, 128), (8, 128), (1, 512), (1, 2048)):
        x, cells = torch.randn(B, T, 512), []
        for mode in MODES:
            pair = (call(layer, x, mode, weights) for weights in (True, False))
            cells.append(f"{1 / measure(*pair, seconds=seconds, threads=threads).ratio:.2f}")
        print(f"| {B} x {T} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="T of the statistics")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each cell")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peak:
        peak(asked.peak, asked.length)
        return
    memory(asked.length)
    statistics(asked.length, asked.seconds, asked.threads)
    default_call(asked.seconds, asked.threads)


if __name__ == "__main__":
    main()
