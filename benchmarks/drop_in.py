"""`multihead.MultiheadAttention` against torch.nn.MultiheadAttention with the same weights: time, and peak memory.

python benchmarks/drop_in.py                  the README's tables
python benchmarks/drop_in.py --seconds 5      longer, on a noisy machine
python benchmarks/drop_in.py --lengths 16     only these T
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import multihead as mh
from pairs import Run, measure, show

E, H = 512, 8
MODES = ("eval", "no_grad", "train")


def layers(dropout: float = 0.0) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """(ours, theirs), with the same weights."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, dropout=dropout, batch_first=True)
    ours = mh.MultiheadAttention(E, H, dropout=dropout, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def run(layer: nn.MultiheadAttention, mode: str, x: torch.Tensor, weights: bool, **masks: object) -> Run:
    """One call, and in training its backward pass."""
    layer.train(mode == "train")

    def once() -> None:
        with torch.set_grad_enabled(mode != "no_grad"):
            out, _ = layer(x, x, x, need_weights=weights, **masks)
            if mode == "train":
                out.sum().backward()

    return once


def times(lengths: list[int], seconds: float, threads: int) -> None:
    """The ratio of torch's time to ours, for each mode, without weights and in the default call."""
    print(f"\nTime of torch / time of multihead, {threads} thread(s), {E} wide, {H} heads; in brackets torch's time.\n")
    kinds = [(mode, weights) for mode in MODES for weights in (False, True)]
    names = [f"{mode}, {'default call' if weights else 'weights off'}" for mode, weights in kinds]
    print(f"| B x T | {' | '.join(names)} |\n|---{'|---' * len(kinds)}|")
    for B, T in [(B, length) for length in lengths for B in ((1, 8) if length <= 128 else (1,))]:
        x, cells = torch.randn(B, T, E), []
        ours, theirs = layers()
        for mode, weights in kinds:
            found = measure(
                run(ours, mode, x, weights), run(theirs, mode, x, weights), seconds=seconds, threads=threads
            )
            cells.append(f"{found.ratio:.2f} ({show(found.theirs)})")
        print(f"| {B} x {T} | {' | '.join(cells)} |", flush=True)


def masks(B: int, T: int) -> dict[str, dict[str, object]]:
    """What is passed, by name: the causal mask as torch wants it, padding over a quarter of the keys, and both."""
    kept = torch.linspace(T / 2, T, B).long()
    causal = {"attn_mask": torch.ones(T, T).triu(1).bool(), "is_causal": True}
    padding = {"key_padding_mask": torch.arange(T) >= kept[:, None]}
    return {"none": {}, "causal": causal, "padding": padding, "both": causal | padding}


def masked(seconds: float, threads: int) -> None:
    """The same with masks, without weights."""
    print(f"\nWith masks, weights off, 4 x 512 x {E}, {threads} thread(s): time of torch / time of multihead.\n")
    print(f"| masks | {' | '.join(MODES)} |\n|---|---|---|---|")
    x = torch.randn(4, 512, E)
    ours, theirs = layers()
    for name, given in masks(4, 512).items():
        cells = []
        for mode in MODES:
            pair = (run(layer, mode, x, False, **given) for layer in (ours, theirs))
            cells.append(f"{measure(*pair, seconds=seconds, threads=threads).ratio:.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def memory(lengths: list[int]) -> None:
    """Growth of the peak resident set by one call in eval without weights, each in a process of its own."""
    print("\nPeak memory of one call, eval, no_grad, weights off, 1 x T x 512, beyond the layer and its input.\n")
    print("| T | torch | multihead |\n|---|---|---|")
    for T in lengths:
        cells = [f"{_peak(side, T):.0f} MiB" for side in ("theirs", "ours")]
        print(f"| {T} | {' | '.join(cells)} |", flush=True)


def _peak(side: str, T: int) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--child", side, str(T)], capture_output=True, text=True, check=True
    )
    return int(done.stdout) / 1024


def _child(side: str, T: int) -> None:
    torch.set_num_threads(1)
    layer = layers()[side == "theirs"]
    run(layer, "no_grad", torch.randn(1, 16, E), False)()  # libraries are loaded
    run(layer, "no_grad", torch.randn(1, 256, E), False)()
    x = torch.randn(1, T, E)
    before = _high_water()
    run(layer, "no_grad", x, False)()
    print(max(0, _high_water() - before))


def _high_water() -> int:
    """In KiB. Not ru_maxrss, which a process takes over from the one that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each cell (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="process time on one, wall time on more (default 1)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[16, 128, 512, 2048], help="T")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    times(args.lengths, args.seconds, args.threads)
    masked(args.seconds, args.threads)
    memory([1024, 2048, 4096, 8192])


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "--child":
        _child(sys.argv[2], int(sys.argv[3]))
    else:
        main()
