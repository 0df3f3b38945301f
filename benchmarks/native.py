"""What attention should reach on the CPU, cell by cell: `multihead.attention` as a user calls it against torch's
scaled_dot_product_attention (SDPA), and the share of the machine's peak that it takes; then layers, then memory.

    python benchmarks/native.py                          one thread (process time), then two threads (wall time)
    python benchmarks/native.py -k "forward causal"      only cells whose name has this
    python benchmarks/native.py -k decode bfloat16 --seconds 0.5 --threads 1       ... all of these
    python benchmarks/native.py --kernel blocks          a kernel by name; layers, which take none, are left out
    python benchmarks/native.py --flex                   a window against compiled FlexAttention too

A multiply-add counts as two operations and only visible pairs count: 4 B H pairs D operations in a forward pass, 3.5
times as many in forward + backward.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multihead as mh
from multihead import reference
from multihead.attention import choose
from multihead.request import make_request
from pairs import Run, measure, show
from peak import Peak, measure_peak

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Shape = tuple[int, int, int, int, int, int]  # B, H, K, L, S, D

# B, H, T, D, and what a forward pass should reach: full, causal
PLAIN = (
    ((8, 8, 128, 64), 1.2, 1.8),
    ((1, 8, 512, 64), 1.2, 1.6),
    ((1, 4, 2048, 64), 1.2, 1.4),
    ((1, 4, 1024, 128), 1.0, 1.3),
)
MEMORY = "peak memory 1x8xTx64"
MEMORY_LENGTHS = (2048, 4096, 8192)
MEMORY_HEADS = 8
CHILD = "--child"


class Cell(NamedTuple):
    least: float  # what theirs / ours should reach
    ours: Run
    theirs: Run
    operations: float | None = None  # of one call of ours; None: it does more than attention
    kernel: str = "-"
    refusals: tuple[str, ...] = ()  # why a kernel asked for by name can't


def cells(kernel: str | None, flex: bool) -> Iterator[tuple[str, Callable[[], Cell]]]:
    """Each cell's name and what makes it."""
    make = partial(attend, kernel)
    causal, at_once = mh.causal(), {"is_causal": True}
    for sizes, full, _ in PLAIN:
        yield f"forward full {_told(sizes)}", partial(make, full, square(*sizes), None, {})
    for sizes, _, half in PLAIN:
        yield f"forward causal {_told(sizes)}", partial(make, half, square(*sizes), causal, at_once)
    for sizes, _, _ in PLAIN:
        yield f"forward + backward full {_told(sizes)}", partial(make, 1.1, square(*sizes), None, {}, backward=True)
    for sizes, _, _ in PLAIN:
        name = f"forward + backward causal {_told(sizes)}"
        yield name, partial(make, 1.4, square(*sizes), causal, at_once, backward=True)
    for sizes, _, _ in PLAIN:
        name = f"forward + backward dropout 0.1 causal {_told(sizes)}"
        yield name, partial(make, 3.5, square(*sizes), causal, at_once, backward=True, dropout=0.1)

    window = mh.window(left=255, right=0)
    yield "forward window 256 1x4x4096x64", partial(make, 8.0, square(1, 4, 4096, 64), window, "dense")
    if flex:
        name = "forward window 256 1x4x4096x64, against FlexAttention"
        yield name, partial(make, 2.0, square(1, 4, 4096, 64), window, "flex")
    name = "forward + backward window 256 1x4x2048x64"
    yield name, partial(make, 4.0, square(1, 4, 2048, 64), window, "dense", backward=True)
    packed = causal & documents(2048)
    for H in (4, 8):
        yield (
            f"forward 16 packed documents causal 1x{H}x2048x64",
            partial(make, 4.0, square(1, H, 2048, 64), packed, "dense"),
        )
    name = "forward + backward 16 packed documents causal 1x4x2048x64"
    yield name, partial(make, 6.0, square(1, 4, 2048, 64), packed, "dense", backward=True)
    yield "forward bias (H, T, T) 1x4x1024x64", partial(make, 1.0, square(1, 4, 1024, 64), None, {}, biased=True)

    grouped, bfloat16 = {"enable_gqa": True}, torch.bfloat16
    long: Shape = (1, 32, 8, 1, 4096, 128)
    yield "decode 32/8 heads S=4096 D=128", partial(make, 2.5, long, causal, grouped)
    yield "decode 32/8 heads B=8 S=1024 D=128", partial(make, 2.0, (8, 32, 8, 1, 1024, 128), causal, grouped)
    yield "decode 8 heads S=4096 D=64", partial(make, 1.0, (1, 8, 8, 1, 4096, 64), causal, {})
    yield "decode bfloat16 32/8 heads S=4096 D=128", partial(make, 3.0, long, causal, grouped, dtype=bfloat16)
    for dtype, least in ((bfloat16, 1.1), (torch.float16, 2.0)):
        name = f"prefill {str(dtype).removeprefix('torch.')} 1x8x512x64"
        yield name, partial(make, least, square(1, 8, 512, 64), None, {}, dtype=dtype)
    for backward in (False, True):
        for told, mask, options in (("full", None, {}), ("causal", causal, at_once)):
            name = f"small forward{' + backward' if backward else ''} {told} 1x4x128x64"
            yield name, partial(make, 0.97, square(1, 4, 128, 64), mask, options, backward=backward)
    yield "tiny 1x4x16x16", partial(make, 0.5, square(1, 4, 16, 16), None, {})

    if kernel is None:
        yield "layer in training 1x512x512, 8 heads, dropout 0.1, weights off", partial(layer, 1.5, False)
        yield "layer in training 1x512x512, 8 heads, dropout 0.1, default call", partial(layer, 2.0, True)


def square(B: int, H: int, T: int, D: int) -> Shape:
    return B, H, H, T, T, D


def _told(sizes: tuple[int, int, int, int]) -> str:
    return "x".join(map(str, sizes))


def documents(T: int) -> mh.Mask:
    """16 documents of different lengths, one after the other."""
    share = torch.rand(16, generator=torch.Generator().manual_seed(0)) + 0.5
    lengths = (share / share.sum() * T).long()
    lengths[-1] += T - lengths.sum()
    return mh.documents(torch.repeat_interleave(torch.arange(16), lengths))


def attend(
    kernel: str | None,
    least: float,
    shape: Shape,
    mask: mh.Mask | None,
    theirs: dict[str, Any] | str,
    *,
    backward: bool = False,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    biased: bool = False,
) -> Cell:
    """One call. `theirs`: what SDPA is called with, besides dropout and a bias; "dense": the mask as a table; "flex":
    the peer is FlexAttention, with a window of 256."""
    torch.manual_seed(0)
    B, H, K, L, S, D = shape
    made = [torch.randn(*axes, dtype=dtype) for axes in ((B, H, L, D), (B, K, S, D), (B, K, S, D))]
    upstream = torch.randn(B, H, L, D, dtype=dtype)
    ours: dict[str, Any] = {} if kernel is None else {"kernel": kernel}
    table = None if mask is None else mask.dense(L, S)
    if biased:
        ours["bias"] = torch.randn(H, L, S, dtype=dtype)
        theirs = {"attn_mask": ours["bias"][None]}
    elif theirs == "dense":
        theirs = {"attn_mask": table}
    if dropout:
        ours["dropout"] = dropout
        assert isinstance(theirs, dict)
        theirs = theirs | {"dropout_p": dropout}

    def run(call: Call) -> Run:
        leaves = [t.clone().requires_grad_(backward) for t in made]

        def once() -> None:
            with torch.set_grad_enabled(backward):
                out = call(*leaves)
            if backward:
                torch.autograd.grad(out, leaves, upstream)

        return once

    peer = flex_window(L) if isinstance(theirs, str) else partial(_sdpa, theirs)
    share = 1.0 if table is None else int(table.sum()) / table.numel()
    operations = 4 * B * H * L * S * share * D * (3.5 if backward else 1)
    with torch.set_grad_enabled(backward):
        leaves = [t.clone().requires_grad_(backward) for t in made]
        request = make_request(
            *leaves, mask, ours.get("bias"), None, None, dropout, None, None, False, reference.attention
        )
        taken = kernel or choose(request).kernel.NAME
        refusals = tuple(mh.KERNELS[taken].refusals(request))
    return Cell(least, run(lambda q, k, v: mh.attention(q, k, v, mask, **ours)), run(peer), operations, taken, refusals)


def _sdpa(options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def flex_window(T: int) -> Call:
    """FlexAttention with a window of 256 over T tokens. It is compiled at the first call."""
    import torch._functorch.config
    import torch._inductor.config
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()
    # Nothing that was compiled for another number of threads.
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001  (what it is called with)
        return (i >= j) & (i - j < 256)

    blocks = flex.create_block_mask(sees, None, None, T, T, device="cpu")
    compiled = torch.compile(flex.flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def layer(least: float, weights: bool) -> Cell:
    """The drop-in against torch's layer with the same weights, forward + backward."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(512, 8, dropout=0.1, batch_first=True)
    ours = mh.MultiheadAttention(512, 8, dropout=0.1, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x, upstream = torch.randn(1, 512, 512), torch.randn(1, 512, 512)

    def run(one: nn.MultiheadAttention) -> Run:
        parameters = list(one.parameters())
        call = one if weights else partial(one, need_weights=False)
        return lambda: torch.autograd.grad(call(x, x, x)[0], parameters, upstream)

    return Cell(least, run(ours), run(theirs))


# Time -----------------------------------------------------------------------------------------------------------------


def times(args: argparse.Namespace, threads: int) -> None:
    """The table at one number of threads, row by row as it is measured."""
    chosen = [(name, make) for name, make in cells(args.kernel, args.flex) if _is_chosen(args, name)]
    if not chosen:
        return
    torch.set_num_threads(threads)  # what compiles looks at it
    peak = measure_peak(threads)
    print(f"peak: {peak.flops / 1e9:.0f} GFLOP/s ({peak.how})\n")
    heads = ["cell", "wanted", "ratio", "multihead", "peer", "GFLOP/s", "of peak", "kernel"]
    heads += [f"1 thread / {threads}"] if threads > 1 else []
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    reached = []
    for name, make in chosen:
        row, ratio = _row(make(), peak, args.seconds, threads)
        print(f"| {name} | {' | '.join(row)} |", flush=True)
        reached.append(ratio)
    print(f"\n{sum(reached)} of {len(reached)} reach what is wanted")


def _row(made: Cell, peak: Peak, seconds: float, threads: int) -> tuple[list[str], bool]:
    """The columns after the name, and whether the ratio is as wanted."""
    row = [f"{made.least:.1f}"]
    if made.refusals:
        return [*row, f"{made.kernel} can't: {'; '.join(made.refusals)}"], False
    found = measure(made.ours, made.theirs, seconds=seconds, threads=threads)
    row += [f"{found.ratio:.2f}", show(found.ours), show(found.theirs)]
    if made.operations is None:
        row += ["-", "-"]
    else:
        speed = made.operations / found.ours
        row += [f"{speed / 1e9:.1f}", f"{speed / peak.flops:.0%}"]
    row.append(made.kernel)
    if threads > 1:
        row.append(f"{_scaling(made.ours, seconds, threads):.2f}")
    return row, found.ratio >= made.least


def _scaling(run: Run, seconds: float, threads: int) -> float:
    """Wall time on one thread / on several, alternately."""

    def alone() -> None:
        torch.set_num_threads(1)
        run()
        torch.set_num_threads(threads)

    return measure(run, alone, seconds=seconds / 2, threads=threads).ratio


# Memory ---------------------------------------------------------------------------------------------------------------


def memory(kernel: str | None, threads: int) -> None:
    """The peak of forward + backward, less that of a process that only makes what goes in and comes out."""
    if not Path("/proc/self/status").exists():
        print("\nmemory: not measured, which needs /proc")
        return
    print(f"\n{MEMORY}, causal, forward + backward, beyond what goes in and comes out (gradients too)\n")
    print("| T | MiB | bytes per B x H x (L + S) |\n|---|---|---|", flush=True)
    tokens, beyond = [], []
    for T in MEMORY_LENGTHS:
        tokens.append(MEMORY_HEADS * 2 * T)
        beyond.append(1024 * (_peak("attention", T, threads, kernel) - _peak("tensors", T, threads, kernel)))
        print(f"| {T} | {beyond[-1] / 2**20:.1f} | {beyond[-1] / tokens[-1]:.1f} |", flush=True)
    grows = (beyond[-1] - beyond[0]) / (tokens[-1] - tokens[0])
    constant = (beyond[-1] - grows * tokens[-1]) / 2**20
    print(f"\nfrom the first to the last: {grows:.1f} bytes per B x H x (L + S), wanted are less than 40;", end=" ")
    print(f"and {constant:.1f} MiB at any T", flush=True)


def _peak(way: str, T: int, threads: int, kernel: str | None) -> int:
    """KiB."""
    command = [sys.executable, __file__, CHILD, way, str(T), str(threads), kernel or ""]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def child(way: str, T: int, threads: int, kernel: str | None) -> None:
    """Do it once and print the peak resident memory in KiB."""
    torch.set_num_threads(threads)
    causal = mh.causal()

    def run(qkv: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
        out = mh.attention(*qkv, causal, kernel=kernel)
        return out, *torch.autograd.grad(out, qkv, upstream)

    def tensors(length: int) -> tuple[list[Tensor], Tensor]:
        q, k, v, upstream = (torch.randn(1, MEMORY_HEADS, length, 64) for _ in range(4))
        return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()], upstream

    run(*tensors(64))  # libraries are loaded, threads have started
    qkv, upstream = tensors(T)
    held = run(qkv, upstream) if way == "attention" else [torch.ones_like(t) for t in (*qkv, upstream)]
    # Not ru_maxrss, which a process takes over from the one that started it.
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
    del held


def _is_chosen(args: argparse.Namespace, name: str) -> bool:
    return all(word in name for word in args.k)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default=[], nargs="+", metavar="WORD", help="only cells whose name has each WORD")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each cell and number of threads (default 2)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (default 1 2)")
    parser.add_argument("--kernel", choices=mh.KERNELS, help="by default the one that attention chooses")
    parser.add_argument("--flex", action="store_true", help="compile FlexAttention, which takes 7 to 28 s")
    args = parser.parse_args()
    if args.flex and not any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name):
        parser.error("--flex needs a C++ compiler, g++ or clang++, to compile FlexAttention with")
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; ratio = time of peer / of multihead")
    for threads in args.threads:
        clock = "process time" if threads == 1 else "wall time"
        print(f"\nthreads: {threads}, {clock}", flush=True)
        times(args, threads)
        if _is_chosen(args, MEMORY):
            memory(args.kernel, threads)


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == [CHILD]:
            child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] or None)
        else:
            main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
