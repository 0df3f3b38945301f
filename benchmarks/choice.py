"""What the choice of a kernel rests on: tiles against a dense mask by the share that is visible, and half precision as
it is against half precision converted to float32.

    python benchmarks/choice.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import multihead as mh
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
    halves()
