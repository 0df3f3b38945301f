"""The dropout that the native kernel draws, as a definition in plain integer arithmetic.

The generator is Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): a bijection of a
counter under a key, so each weight's number follows from where the weight stands and nothing is kept between calls. A
forward and a backward pass, one thread or many, and this file draw the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

Word = Tensor | int  # numbers below 2^32, in int64

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def dropout_mask(
    seed: Tensor | int,
    p: float,
    B: int,
    H: int,
    L: int,
    S: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What the weights are multiplied by: 0 where one is dropped, 1 / (1 - p) where it is kept.

    The weight of batch row b, query head h, query l and key s has the number u, word s % 4 of Philox with the counter
    (s // 4, l, b * H + h, 0) and the key (seed % 2^32, seed // 2^32). It is kept if u >= threshold(p).

    Args:
        seed: non-negative and below 2^63, an int64 tensor of one element or a number.
        p: the share that is dropped, 0 to 1. 1 drops all, which no threshold would.
        B, H, L, S: sizes. The number of a weight depends on H, and not on B, L or S.
        device, dtype: of the answer.

    Returns:
        (B, H, L, S). On the way there are some int64 tensors of a quarter of as many elements.
    """
    if p <= 0.0 or p >= 1.0:
        return torch.full((B, H, L, S), 1.0 if p <= 0.0 else 0.0, device=device, dtype=dtype)
    if isinstance(seed, Tensor):
        seed = seed.to(device).reshape(())
    key = seed & _LOW, (seed >> 32) & _LOW
    fours = torch.arange(-(-S // 4), device=device)
    rows = torch.arange(L, device=device)[:, None]
    heads = torch.arange(B * H, device=device)[:, None, None]
    words = philox((fours, rows, heads, torch.zeros_like(fours)), key)
    kept = torch.stack([word >= threshold(p) for word in words], -1)  # (B * H, L, fours, 4)
    scale = torch.tensor(1.0 / (1.0 - p), device=device, dtype=dtype)
    return (kept.flatten(-2)[..., :S] * scale).reshape(B, H, L, S)


def threshold(p: float) -> int:
    """The least of the 2^32 numbers that keeps a weight. At p = 1 it would keep one in 2^32."""
    return min(round(p * 2**32), _LOW)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Word, Word]) -> tuple[Tensor, ...]:
    """Four words for each counter, by Philox4x32-10.

    Args:
        counter: four words, int64 tensors that broadcast.
        key: two words.

    Returns:
        Four int64 tensors with numbers below 2^32, of the shape that all of the counter broadcasts to.
    """
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        high_0, low_0 = _product(word_0, _MULTIPLIERS[0])
        high_2, low_2 = _product(word_2, _MULTIPLIERS[1])
        word_0, word_1, word_2, word_3 = high_2 ^ word_1 ^ key_0, low_2, high_0 ^ word_3 ^ key_1, low_0
        key_0, key_1 = (key_0 + _WEYL[0]) & _LOW, (key_1 + _WEYL[1]) & _LOW
    return word_0, word_1, word_2, word_3


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower word of word * multiplier. By halves of 16 bits, as the product itself may pass 2^63."""
    lower = (word & 0xFFFF) * multiplier  # below 2^48
    upper = (word >> 16) * multiplier + (lower >> 16)  # below 2^48 too
    return upper >> 16, (upper & 0xFFFF) << 16 | lower & 0xFFFF
