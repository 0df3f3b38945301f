"""The definition of native dropout against the paper's generator: known answers, and a second way to compute it."""

import math

import numpy as np
import pytest
import torch

from multihead.kernels.philox import dropout_mask, philox, threshold

B, H, L, S = 2, 3, 5, 29  # S is no multiple of the four numbers that one counter gives

# Random123's kat_vectors: counter, key, answer.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
# Where a word of the key, a sum of keys or a product might overflow.
SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 0x299F31D0A4093822, 2**63 - 1]


def words(text):
    return [int(word, 16) for word in text.split()]


def by_numpy(seed, b, h, l, s):
    """The number of one weight, in unsigned 64 bits, where a product of two words has a place."""
    low = np.uint64(0xFFFFFFFF)
    counter = np.array([s // 4, l, b * H + h, 0], dtype=np.uint64)
    key = np.array([seed % 2**32, seed // 2**32], dtype=np.uint64)
    for _ in range(10):
        products = counter[[0, 2]] * np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
        upper, lower = products >> np.uint64(32), products & low
        counter = np.array([upper[1] ^ counter[1] ^ key[0], lower[1], upper[0] ^ counter[3] ^ key[1], lower[0]])
        key = (key + np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)) & low
    return int(counter[s % 4])


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    found = philox(tuple(torch.tensor(word) for word in words(counter)), tuple(words(key)))
    assert [int(word) for word in found] == words(answer)


def test_known_answers_at_once():
    """As one call, with the keys as tensors too."""
    counters, keys, answers = (torch.tensor([words(row[column]) for row in KNOWN]) for column in range(3))
    found = philox(tuple(counters.T), tuple(keys.T))
    assert torch.equal(torch.stack(found, -1), answers)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_weight_is_kept_by_its_own_number(seed):
    mask = dropout_mask(seed, 0.3, B, H, L, S)
    least = round(0.3 * 2**32)
    for b, h, l, s in np.ndindex(B, H, L, S):
        assert bool(mask[b, h, l, s]) == (by_numpy(seed, b, h, l, s) >= least), (b, h, l, s)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_may_be_a_tensor(seed):
    want = dropout_mask(seed, 0.3, B, H, L, S)
    assert torch.equal(dropout_mask(torch.tensor(seed), 0.3, B, H, L, S), want)
    assert torch.equal(dropout_mask(torch.tensor([seed]), 0.3, B, H, L, S), want)


def test_seeds_give_other_numbers():
    masks = {tuple(dropout_mask(seed, 0.5, B, H, L, S).flatten().tolist()) for seed in SEEDS}
    assert len(masks) == len(SEEDS)


def test_a_number_does_not_depend_on_the_sizes():
    whole = dropout_mask(7, 0.4, 3, H, 23, 53)
    for b, l, s in ((3, 23, 52), (3, 23, 51), (1, 23, 53), (2, 11, 13), (1, 1, 1), (3, 7, 4)):
        assert torch.equal(dropout_mask(7, 0.4, b, H, l, s), whole[:b, :, :l, :s])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked(p):
    mask = dropout_mask(11, p, 2, 2, 499, 503)
    kept = (mask != 0).double()
    off = math.sqrt(p * (1 - p) / mask.numel())
    assert abs(float(kept.mean()) - (1 - p)) < 4 * off
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
    rows, columns = kept.mean((0, 1, 3)), kept.mean((0, 1, 2))  # no query and no key is better off
    for share in (rows, columns):
        assert float((share - (1 - p)).abs().max()) < 5 * off * math.sqrt(share.numel())


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_all_or_nothing(p):
    assert torch.equal(dropout_mask(3, p, B, H, L, S), torch.full((B, H, L, S), 1 - p))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype(dtype):
    mask, wide = dropout_mask(5, 0.3, B, H, L, S, device="cpu", dtype=dtype), dropout_mask(5, 0.3, B, H, L, S)
    assert mask.dtype == dtype
    assert torch.equal(mask != 0, wide != 0)
    assert float(mask.max()) == torch.tensor(1 / 0.7, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("sizes", [(0, 3, 5, 7), (2, 3, 0, 7), (2, 3, 5, 0)])
def test_empty(sizes):
    for p in (0.0, 0.5):
        assert dropout_mask(1, p, *sizes).shape == sizes


def test_threshold():
    assert [threshold(p) for p in (0.0, 0.25, 0.5)] == [0, 2**30, 2**31]
    assert threshold(0.1) == 429496730  # 429496729.6
    assert threshold(1 - 2**-40) == 2**32 - 1  # 2^32 is no word
