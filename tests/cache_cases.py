"""Layers, tokens and caches for the tests of `KVCache`."""

from __future__ import annotations

import torch

import multihead as mh
from multihead import KVCache, PagePool

f64 = torch.float64
E, H, T = 24, 4, 97
POSITIONS = {
    "none": lambda: None,
    "rotary": mh.Rotary,
    "alibi": lambda: mh.ALiBi(H),
    "t5": lambda: mh.T5Bias(H),
    "relative": lambda: mh.RelativeBias(H, 8),
}
MASKS = {
    "none": None,
    "causal": mh.causal(),
    "window": mh.window(left=3, right=0),
    "hole": mh.causal() & ~mh.window(left=2, right=-1 + 1) | mh.window(left=0, right=0),
}
STORAGES = {
    "growing": KVCache,
    "fixed": lambda: KVCache("fixed", capacity=T),
    "paged": lambda: KVCache("paged", pool=PagePool(80, page_size=7)),
    "ring": lambda: KVCache("ring", capacity=5),
}
CHUNKS = ([1] * T, [T], [50, 47], [13, 1, 1, 1, 60, 1, 1, 19])
WINDOW = mh.window(left=4)


def layer(position="rotary", mask="causal", **options):
    torch.manual_seed(0)
    options = {"num_kv_heads": 2, "dtype": f64, **options}
    attn = mh.Attention(E, H, position=POSITIONS[position](), mask=MASKS[mask], **options).eval()
    for parameter in attn.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attn


def tokens(*batch, length=T):
    return torch.randn(*batch, length, E, dtype=f64, generator=torch.Generator().manual_seed(1))


def in_chunks(attn, x, sizes, cache, **options):
    """The outputs of consecutive chunks; options are cut along the tokens, as x is."""
    outs, start = [], 0
    for size in sizes:
        part = {name: value[..., start : start + size] for name, value in options.items()}
        outs.append(attn(x[..., start : start + size, :], cache=cache, **part))
        start += size
    return torch.cat(outs, -2)


def close(found, want):
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


def filled(storage="growing", L=9, B=3, **options):
    """A cache with L tokens in B rows, and what they were."""
    cache = STORAGES[storage]() if isinstance(storage, str) else storage
    k, v = torch.randn(2, B, 2, L, 5, dtype=f64, generator=torch.Generator().manual_seed(2)).unbind()
    cache.append(k, v, **options)
    return cache, k, v
