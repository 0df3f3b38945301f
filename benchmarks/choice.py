"""What the choice of a kernel rests on: tiles against a dense mask by the share that is visible, dropout over
few scores, a layer as one operation, how many rows of weights at a time, and half precision as it is
against half precision converted to float32.

    python benchmarks/choice.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import multihead as mh
from multihead import reference, whole
from multihead.kernels import rows
from multihead.request import make_request
from pairs import measure, show


def shares() -> None:
    print("blocks against sdpa with a dense mask, causal window of W over T with padding, 64 wide, forward, one thread")
    print("| T | heads | W | share visible | sdpa / blocks |\n|---|---|---|---|---|")
    for T, H in ((512, 8), (1024, 8), (2048, 4)):
        q, k, v = (torch.randn(1, H, T, 64) for _ in range(3))
        keep = torch.rand(T) < 0.95
        for W in (T // 8, T // 4, T // 2, T):
            mask = mh.window(left=W - 1, right=0) & mh.padding(keep)

            def run(kernel: str, mask: mh.Mask = mask, qkv: tuple[torch.Tensor, ...] = (q, k, v)) -> torch.Tensor:
                with torch.no_grad():
                    return mh.attention(*qkv, mask, kernel=kernel)

            found = measure(lambda run=run: run("blocks"), lambda run=run: run("sdpa"), seconds=1, threads=1)
            share = float(mask.dense(T, T).float().mean())
            print(f"| {T} | {H} | {W} | {share:.0%} | {found.ratio:.2f} |", flush=True)


def few() -> None:
    print("\nsmall against blocks, 64 wide, dropout 0.1, forward + backward, one thread")
    print("| B x H x T | scores | causal | blocks / small |\n|---|---|---|---|")
    for B, H, T in ((1, 4, 16), (8, 8, 16), (1, 8, 64), (1, 8, 128), (1, 8, 256), (1, 8, 512)):
        for mask in (None, mh.causal()):
            q, k, v = (torch.randn(B, H, T, 64, requires_grad=True) for _ in range(3))

            def run(kernel: str, mask: mh.Mask | None = mask, qkv: tuple[torch.Tensor, ...] = (q, k, v)) -> None:
                mh.attention(*qkv, mask, kernel=kernel, dropout=0.1).sum().backward()

            found = measure(lambda run=run: run("small"), lambda run=run: run("blocks"), seconds=1, threads=1)
            print(f"| {B} x {H} x {T} | {B * H * T * T} | {'yes' if mask else 'no'} | {found.ratio:.2f} |", flush=True)


def wholes() -> None:
    print("\nA layer 512 wide with 8 heads as one operation, against its own way, no_grad, one thread")
    print("| B x T | weights off | mean of the weights |\n|---|---|---|")
    attn = mh.MultiheadAttention(512, 8, batch_first=True).eval()
    for B, T in ((1, 16), (8, 16), (1, 64), (8, 64), (1, 128), (4, 128), (1, 256), (1, 512)):
        x, cells = torch.randn(B, T, 512), []
        for look in (None, "average"):

            def own(x: torch.Tensor = x, look: str | None = look) -> None:
                with torch.no_grad():
                    attn.attend(*attn.project(x, x, x, (None, None)), None, look, 0.0, {})
                    attn.out_proj(x)

            def one(x: torch.Tensor = x, look: str | None = look) -> None:
                with torch.no_grad():
                    whole.run(attn, x, look)

            cells.append(f"{measure(one, own, seconds=1, threads=1).ratio:.2f}")
        print(f"| {B} x {T} | {' | '.join(cells)} |", flush=True)


def tiles() -> None:
    print("\nOutput and mean weights in rows, 8 heads, 64 wide: time by bytes of scores at a time, 1 = the best")
    sizes = [2**n for n in (18, 19, 20, 21, 22)]
    print(f"| T | {' | '.join(f'{size // 1024} KiB' for size in sizes)} |\n|---{'|---' * len(sizes)}|")
    for T in (512, 1024, 2048):
        q, k, v = (torch.randn(1, T, 8, 64).transpose(1, 2) for _ in range(3))
        request = make_request(q, k, v, None, None, None, None, 0.0, None, None, False, reference.attention)
        times = []
        for size in sizes:
            rows._TILE_BYTES, rows._LEAST_ROWS = size, 1  # the bytes alone decide here
            found = measure(lambda request=request: rows.attend(request, True), lambda: None, seconds=1, threads=1)
            times.append(found.ours)
        print(f"| {T} | {' | '.join(f'{time / min(times):.2f}' for time in times)} |", flush=True)


def halves() -> None:
    print("\nSDPA in half precision, as it is and converted to float32 first, one thread")
    print("| dtype | queries | keys | as it is | converted | as it is / converted |\n|---|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float16):
        for L, S in ((512, 512), (1, 2048)):
            q, k, v = (torch.randn(1, 8, n, 64).to(dtype) for n in (L, S, S))
            found = measure(
                lambda qkv=(q, k, v), dtype=dtype: F.scaled_dot_product_attention(*(t.float() for t in qkv)).to(dtype),
                lambda qkv=(q, k, v): F.scaled_dot_product_attention(*qkv),
                seconds=1,
                threads=1,
            )
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {L} | {S} | {show(found.theirs)} | {show(found.ours)} | {found.ratio:.2f} |", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    shares()
    few()
    wholes()
    halves()
    tiles()
