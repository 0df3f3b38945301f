"""`multihead.attention` against torch's scaled_dot_product_attention (SDPA), cell by cell, with what each should reach.

python benchmarks/attention.py                 all cells, one thread (process time), then two threads (wall time)
python benchmarks/attention.py -k window       only cells whose name has "window"
python benchmarks/attention.py --seconds 5     longer, on a noisy machine
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import multihead as mh
from pairs import Run, measure, show


class Cell(NamedTuple):
    name: str
    least: float  # what theirs / ours should reach on one thread
    ours: Run
    theirs: Run


def cells() -> Iterator[tuple[str, Callable[[], Cell]]]:
    for backward in (False, True):
        way = "forward + backward" if backward else "forward"
        yield f"window 256, T=4096, {way}", lambda b=backward: window(b)
        for H in (4, 8):
            yield f"16 packed documents, causal, T=2048, H={H}, {way}", lambda b=backward, h=H: packed(h, b)
        for B, H, T in ((8, 8, 128), (1, 4, 128), (1, 8, 512), (1, 4, 2048)):
            for causal in (False, True):
                name = f"{'causal' if causal else 'full'} {B}x{H}x{T}x64, {way}"
                yield name, lambda args=(B, H, T, causal, backward): plain(*args)
    yield "decode 32 query / 8 kv heads, S=4096, D=128", decode


def window(backward: bool) -> Cell:
    T, W = 4096, 256
    i = torch.arange(T)
    table = (i[:, None] >= i) & (i[:, None] - i < W)
    q, k, v = tensors(1, 4, 4, T, T, 64)
    return cell(5.0, backward, (q, k, v), mh.window(left=W - 1, right=0), {"attn_mask": table})


def packed(H: int, backward: bool) -> Cell:
    T = 2048
    share = torch.rand(16, generator=torch.Generator().manual_seed(0)) + 0.5
    lengths = (share / share.sum() * T).long()
    lengths[-1] += T - lengths.sum()
    ids, i = torch.repeat_interleave(torch.arange(16), lengths), torch.arange(T)
    table = (ids[:, None] == ids) & (i[:, None] >= i)
    return cell(4.0, backward, tensors(1, H, H, T, T, 64), mh.causal() & mh.documents(ids), {"attn_mask": table})


def plain(B: int, H: int, T: int, causal: bool, backward: bool) -> Cell:
    return cell(0.97, backward, tensors(B, H, H, T, T, 64), mh.causal() if causal else None, {"is_causal": causal})


def decode() -> Cell:
    return cell(2.3, False, tensors(1, 32, 8, 1, 4096, 128), mh.causal(), {"enable_gqa": True})


def tensors(B: int, H: int, K: int, L: int, S: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, H, L, D), torch.randn(B, K, S, D), torch.randn(B, K, S, D)


def cell(
    least: float, backward: bool, qkv: tuple[Tensor, ...], mask: mh.Mask | None, theirs: dict[str, object]
) -> Cell:
    def run(call: Callable[..., Tensor]) -> Run:
        leaves = [t.clone().requires_grad_(backward) for t in qkv]

        def once() -> None:
            if backward:
                torch.autograd.grad(call(*leaves).sum(), leaves)
            else:
                with torch.no_grad():
                    call(*leaves)

        return once

    def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **theirs)  # type: ignore[arg-type]

    return Cell("", least, run(lambda q, k, v: mh.attention(q, k, v, mask)), run(by_sdpa))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="WORD", help="only cells whose name has WORD")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each cell and number of threads (default 2)")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="numbers of threads (default 1 2)")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; ratio = SDPA / multihead")
    for threads in args.threads:
        clock = "process time" if threads == 1 else "wall time"
        print(f"\nthreads: {threads}, {clock}\n| cell | wanted | ratio | multihead | SDPA |\n|---|---|---|---|---|")
        for name, make in cells():
            if args.k in name:
                made = make()
                found = measure(made.ours, made.theirs, seconds=args.seconds, threads=threads)
                numbers = f"{made.least:.2f} | {found.ratio:.2f} | {show(found.ours)} | {show(found.theirs)}"
                print(f"| {name} | {numbers} |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
