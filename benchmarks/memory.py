"""Peak memory of a window of 256 tokens, forward and backward, as T grows: it should double with T, not quadruple.

Each figure is the peak of a process of its own, less that of one that only makes the inputs.

    python benchmarks/memory.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LENGTHS = (4096, 8192, 16384, 32768)
WAYS = ("inputs only", "multihead", "SDPA")


def child(way: str, T: int) -> None:
    """Do it once and print the peak resident memory in KiB."""
    import torch
    import torch.nn.functional as F

    import multihead as mh

    torch.set_num_threads(1)
    leaves = [torch.randn(1, 4, T, 64, requires_grad=True) for _ in range(3)]
    grads = [torch.zeros_like(t) for t in (*leaves, leaves[0])]
    small = [t[:, :, :256] for t in leaves]  # warm-up, so that libraries are loaded in every process
    torch.autograd.grad(mh.attention(*small, mh.window(left=63, right=0)).sum(), leaves)
    if way == "multihead":
        torch.autograd.grad(mh.attention(*leaves, mh.window(left=255, right=0)).sum(), leaves)
    elif way == "SDPA":
        i = torch.arange(T)
        table = (i[:, None] >= i) & (i[:, None] - i < 256)
        torch.autograd.grad(F.scaled_dot_product_attention(*leaves, attn_mask=table).sum(), leaves)
    del grads
    # Not ru_maxrss, which a process takes over from the one that started it.
    print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line))


def peak(way: str, T: int) -> float:
    """MiB."""
    done = subprocess.run([sys.executable, __file__, way, str(T)], capture_output=True, text=True, check=True)
    return int(done.stdout) / 1024


def main() -> None:
    print("1 x 4 x T x 64, window 256, forward + backward, MiB over the inputs and their gradients")
    print("| T | multihead | SDPA with the dense mask |\n|---|---|---|")
    for T in LENGTHS:
        base = peak("inputs only", T)
        dense = f"{peak('SDPA', T) - base:.0f}" if T <= 16384 else "-"
        print(f"| {T} | {peak('multihead', T) - base:.0f} | {dense} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        child(sys.argv[1], int(sys.argv[2]))
    else:
        main()
