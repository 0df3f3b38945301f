"""`multihead.Attention` against torch.nn.MultiheadAttention with the same weights, and their peak memory.

python benchmarks/module.py               the README's table
python benchmarks/module.py --seconds 5   longer, on a noisy machine
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import multihead as mh
from pairs import Run, measure, show

E, H = 512, 8
WINDOW = 256


def layers(dropout: float = 0.0) -> tuple[mh.Attention, nn.MultiheadAttention]:
    """Both with the same weights."""
    torch.manual_seed(0)
    ours, theirs = mh.Attention(E, H, dropout=dropout), nn.MultiheadAttention(E, H, dropout=dropout, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv_proj.weight)
        theirs.in_proj_bias.copy_(ours.qkv_proj.bias)
        theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    return ours, theirs


CASES: dict[str, tuple[bool, str, float, bool]] = {  # training, mask, dropout, weights
    "eval": (False, "none", 0.0, False),
    "eval, causal": (False, "causal", 0.0, False),
    "eval, weights": (False, "none", 0.0, True),
    "training": (True, "none", 0.0, False),
    "training, causal": (True, "causal", 0.0, False),
    "training, causal, dropout 0.1": (True, "causal", 0.1, False),
    f"training, window of {WINDOW}": (True, "window", 0.0, False),
}


def case(name: str, T: int) -> tuple[Run, Run]:
    """What is measured: (ours, theirs)."""
    train, kind, dropout, weights = CASES[name]
    x, i = torch.randn(1, T, E), torch.arange(T)
    ours, theirs = (layer.train(train) for layer in layers(dropout))
    table = None if kind == "none" else i[:, None] < i
    if kind == "window":
        table = table | (i[:, None] - i >= WINDOW)
    mask = {"none": None, "causal": mh.causal(), "window": mh.window(left=WINDOW - 1, right=0)}[kind]
    return (
        _run(train, lambda: ours(x, mask=mask, weights=weights), weights),
        _run(train, lambda: theirs(x, x, x, need_weights=weights, attn_mask=table), True),
    )


def _run(train: bool, call: Callable[[], object], is_pair: bool) -> Run:
    def once() -> None:
        with torch.set_grad_enabled(train):
            out = call()
            if train:
                first = out[0] if is_pair else out  # type: ignore[index]
                first.sum().backward()  # type: ignore[union-attr]

    return once


def peak(side: str, name: str, T: int) -> float:
    """Peak resident memory in MiB of a process that makes the layers and runs one side once ("none": no side)."""
    done = subprocess.run([sys.executable, __file__, side, name, str(T)], capture_output=True, text=True, check=True)
    return int(done.stdout) / 1024


def child(side: str, name: str, T: int) -> None:
    torch.set_num_threads(1)
    for run in case(name, 16):  # libraries are loaded in every process
        run()
    ours, theirs = case(name, T)
    if side != "none":
        (ours if side == "ours" else theirs)()
    # Not ru_maxrss, which a process takes over from the one that started it.
    print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row (default 3)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048], help="T (default 512 2048)")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, 1 x T x {E}, {H} heads, one thread")
    print("| call | T | torch | multihead | ratio | memory, torch | memory, multihead |\n|---|---|---|---|---|---|---|")
    for T in args.lengths:
        for name in CASES:
            ours, theirs = case(name, T)
            found = measure(ours, theirs, seconds=args.seconds, threads=1)
            none = peak("none", name, T)
            memory = [f"{max(0, peak(side, name, T) - none):.0f} MiB" for side in ("theirs", "ours")]
            times = f"{show(found.theirs)} | {show(found.ours)} | {found.ratio:.2f}"
            print(f"| {name} | {T} | {times} | {' | '.join(memory)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in ("ours", "theirs", "none"):
        child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
