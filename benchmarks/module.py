"""`multihead.Attention` against torch.nn.MultiheadAttention with the same weights, and their peak memory.

python benchmarks/module.py               the README's table
python benchmarks/module.py --seconds 5   longer, on a noisy machine
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

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


def cases(T: int) -> dict[str, tuple[Run, Run]]:
    """What is measured, by name: (ours, theirs)."""
    x = torch.randn(1, T, E)
    i = torch.arange(T)
    hidden = i[:, None] < i
    windowed = hidden | (i[:, None] - i >= WINDOW)

    def pair(train: bool, mask: mh.Mask | None, table: Tensor | None, dropout: float = 0.0, weights: bool = False):
        ours, theirs = (layer.train(train) for layer in layers(dropout))
        their = {"need_weights": weights, "attn_mask": table}
        return (
            _run(train, lambda: ours(x, mask=mask, weights=weights), weights),
            _run(train, lambda: theirs(x, x, x, **their), True),
        )

    return {
        "eval": pair(False, None, None),
        "eval, causal": pair(False, mh.causal(), hidden),
        "eval, weights": pair(False, None, None, weights=True),
        "training": pair(True, None, None),
        "training, causal": pair(True, mh.causal(), hidden),
        "training, causal, dropout 0.1": pair(True, mh.causal(), hidden, dropout=0.1),
        f"training, window of {WINDOW}": pair(True, mh.window(left=WINDOW - 1, right=0), windowed),
    }


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
    small = cases(16)
    small[name][0](), small[name][1]()  # libraries are loaded in every process
    ours, theirs = cases(T)[name]
    if side != "none":
        (ours if side == "ours" else theirs)()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row (default 3)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048], help="T (default 512 2048)")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, 1 x T x {E}, {H} heads, one thread")
    print("| call | T | torch | multihead | ratio | memory, torch | memory, multihead |\n|---|---|---|---|---|---|---|")
    for T in args.lengths:
        for name, (ours, theirs) in cases(T).items():
            found = measure(ours, theirs, seconds=args.seconds, threads=1)
            none = peak("none", name, T)
            memory = [f"{peak(side, name, T) - none:.0f} MiB" for side in ("theirs", "ours")]
            times = f"{show(found.theirs)} | {show(found.ours)} | {found.ratio:.2f}"
            print(f"| {name} | {T} | {times} | {' | '.join(memory)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in ("ours", "theirs", "none"):
        child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
