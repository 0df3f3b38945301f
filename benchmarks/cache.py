"""Decoding one token with a cache, against `attention` on the same tensors: what the cache itself costs.

python benchmarks/cache.py                    4,096 tokens in the cache
python benchmarks/cache.py --tokens 512
"""

from __future__ import annotations

import argparse

import torch

import multihead as mh
from multihead.attention import attention_over
from pairs import Pair, measure, show

SIZES = {"8 heads, D=64": (1, 8, 8, 64), "32/8 heads, D=128": (1, 32, 8, 128), "8 rows of 8 heads, D=64": (8, 8, 8, 64)}


def caches(tokens: int) -> dict[str, mh.KVCache]:
    pool, packed = mh.PagePool(8 * (tokens // 64 + 2)), mh.PagePool(8 * (tokens // 64 + 2), dtype=torch.int8)
    return {
        "growing": mh.KVCache(),
        "fixed": mh.KVCache("fixed", capacity=tokens + 16),
        "ring": mh.KVCache("ring", capacity=tokens + 16),
        "growing, rows of different length": mh.KVCache(),
        "paged": mh.KVCache("paged", pool=pool),
        "growing, bfloat16": mh.KVCache(dtype=torch.bfloat16),
        "growing, int8": mh.KVCache(dtype=torch.int8),
        "paged, int8": mh.KVCache("paged", pool=packed),
    }


@torch.no_grad()
def cost(
    cache: mh.KVCache, sizes: tuple[int, int, int, int], tokens: int, ragged: bool, asked: argparse.Namespace
) -> Pair:
    """One token with the cache, which is cropped now and then, against attention on tensors of that length."""
    B, H, K, D = sizes
    q, (k, v) = torch.randn(B, H, 1, D), torch.randn(2, B, K, tokens + 1, D).unbind()
    keep = None
    if ragged:  # the first row is shorter
        keep = torch.ones(B, tokens, dtype=torch.bool)
        keep[0, :100] = False
    cache.append(k[:, :, :-1], v[:, :, :-1], keep=keep)
    before, taken = cache.lengths(), 0

    def step() -> None:
        nonlocal taken
        if taken % 16 == 0:  # seldom: it is no part of decoding, and 8 tokens more are nothing beside thousands
            cache.crop(before)
        taken += 1
        at = cache.prepare((B,), 1, k.device)  # as a layer does it
        held = cache.write(at, k[:, :, -1:], v[:, :, -1:])
        mask = mh.causal() if at.mask is None else mh.causal() & at.mask
        attention_over(q, held, mask, q_positions=at.q_positions, k_positions=at.k_positions)

    return measure(step, lambda: mh.attention(q, k, v, mh.causal()), seconds=asked.seconds, threads=asked.threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="how many the cache holds")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each cell")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    print(f"One token after {asked.tokens}, float32, {asked.threads} thread(s): time with the cache / of attention.\n")
    names = list(caches(asked.tokens))
    print(f"| | attention | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for told, sizes in SIZES.items():
        cells = []
        for name, cache in caches(asked.tokens).items():
            found = cost(cache, sizes, asked.tokens, "different" in name and sizes[0] > 1, asked)
            cells.append(f"{1 / found.ratio:.2f}")
        print(f"| {told} | {show(found.theirs)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
