"""`KVCache` where it once went wrong, or easily could: each was found by looking for trouble."""

from __future__ import annotations

import copy

import pytest
import torch

import multihead as mh
from cache_cases import POSITIONS, STORAGES, E, close, f64, filled, in_chunks, layer, tokens
from multihead import KVCache, PagePool


@torch.no_grad()
def test_reorder_leaves_out_the_longest_row():
    attn, x = layer(), tokens(2, length=10)
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[1, 4:] = False
    cache = KVCache()
    attn(x[:, :8], cache=cache, keep=keep, positions=torch.arange(8) * 2)
    cache.reorder([1, 1])
    real = torch.cat([x[1, :4], x[1, 8:]])
    want = attn(real, positions=torch.tensor([0, 2, 4, 6, 7, 8]))[4:]
    close(attn(x[[1, 1], 8:], cache=cache)[0], want)


@torch.no_grad()
def test_a_context_with_positions_says_where_its_queries_stand():
    """By default they stand where its last tokens do, for rotary, masks and biases alike."""
    x, places = tokens(2, length=20), torch.arange(20) * 3 + 7
    for position in POSITIONS:
        attn = layer(position, mask="none")
        q = tokens(2, length=6) * 2
        cache = attn.context_cache(x, positions=places)
        want = attn(q, x, mask=mh.window(left=30), positions=(places[-6:], places))
        close(attn(q, cache=cache, mask=mh.window(left=30)), want)
        with pytest.raises(ValueError, match="positions: expected given where L=97 queries"):
            attn(tokens(2), cache=cache)


@torch.no_grad()
def test_a_ring_does_not_load_what_it_would_miss():
    state = filled(KVCache("ring", capacity=4), L=290)[0].state_dict()
    with pytest.raises(ValueError, match="state: expected the last 128 tokens"):
        KVCache("ring", capacity=128).load_state_dict(state)
    KVCache("ring", capacity=5).load_state_dict(state)


@torch.no_grad()
def test_a_context_stays_one_when_loaded():
    attn, x = layer(), tokens(2, length=5)
    cache = KVCache()
    cache.load_state_dict(attn.context_cache(x).state_dict())
    assert cache.frozen
    assert attn(x[:, :1], cache=cache).shape == (2, 1, E)
    assert cache.length == 5
    with pytest.raises(ValueError, match="batch axes"):
        attn.new_cache(3).load_state_dict(cache.state_dict())


def test_gradients_of_queries_alone():
    """What a query's gradient needs is not written over either: of q_proj or a learned bias, over frozen keys."""
    given = []
    for sizes in ([6], [3, 1, 2]):
        attn, x = layer("t5", packed=False), tokens(2, length=6)
        for name, parameter in attn.named_parameters():
            parameter.requires_grad_("q_proj" in name or "position" in name)
        out = in_chunks(attn, x, sizes, KVCache())
        wanted = [p for p in attn.parameters() if p.requires_grad]
        given.append(torch.autograd.grad(out.square().sum(), wanted))
    for one, many in zip(*given, strict=True):
        torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-5)  # the bias' table is float32


def test_what_was_read_with_gradients_stays_after_a_crop():
    attn, x = layer(), tokens(1, length=6)
    cache = KVCache()
    out = attn(x, cache=cache)
    with torch.no_grad():
        cache.crop(3)
        attn(x[:, :3], cache=cache)
    out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@torch.no_grad()
def test_positions_with_a_fraction_go_on_exactly(dtype):
    for first in torch.linspace(12, 13, 50, dtype=dtype):
        cache, _, _ = filled(L=1, B=1, positions=first[None])
        places = cache.next_positions(3)
        assert places.dtype == dtype
        assert torch.equal(places, first + 1 + torch.arange(3))


@torch.no_grad()
def test_a_ring_wants_positions_that_rise():
    """Else the last tokens would not be those of the window."""
    cache, k, v = filled(KVCache("ring", capacity=5), L=3, positions=torch.tensor([0, 1, 5]))
    for places in ([5, 6], [6, 6], [6, 4]):
        with pytest.raises(ValueError, match="positions: expected in a ring each 1 or more after"):
            cache.append(k[:, :, :2], v[:, :, :2], positions=torch.tensor(places))
    assert cache.length == 3


@torch.no_grad()
def test_no_tokens_at_all():
    for make in STORAGES.values():
        cache, _, _ = filled(make(), L=0, positions=torch.arange(0))
        assert cache.length == 0
    attn, x = layer(), tokens(2, length=4)
    cache = KVCache()
    attn(x, cache=cache)
    assert attn(x[:, :0], cache=cache, keep=torch.ones(2, 0, dtype=torch.bool)).shape == (2, 0, E)
    assert cache.length == 4


@torch.no_grad()
def test_steps_and_tokens_that_do_not_belong_together():
    cache, k, v = filled(L=4)
    step = cache.prepare((3,), 4, k.device)
    with pytest.raises(ValueError, match="k: expected L=4 tokens"):
        cache.write(step, k[:, :, :1], v[:, :, :1])
    cache.write(step, k, v)
    with pytest.raises(ValueError, match="step: expected one that was prepared for what the cache holds now"):
        cache.write(step, k, v)
    assert cache.length == 8
    with pytest.raises(TypeError, match="step: expected a step of prepare"):
        cache.write(filled()[0].freeze().look((3,), 1, k.device), k, v)
    with pytest.raises(TypeError, match="keep"):
        cache.next_positions(1, keep=[True])


@torch.no_grad()
def test_dtypes_that_would_lose_something():
    k = torch.randn(1, 2, 3, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match="k: expected stored as it comes where it is complex"):
        KVCache(dtype=torch.bfloat16).append(k, k)
    assert KVCache().append(k, k)[0].dtype == torch.complex64
    with pytest.raises(ValueError, match="dtype: expected at least 16 bits"):
        PagePool(4, dtype=torch.float8_e4m3fn)


def test_from_inference_mode_into_another():
    attn, x = layer(), tokens(2, length=6)
    with torch.no_grad():
        want = attn(x)
    cache = KVCache()
    with torch.inference_mode():
        attn(x[:, :3], cache=cache)
    with torch.no_grad():
        close(attn(x[:, 3:], cache=cache), want[:, 3:])


@torch.no_grad()
def test_a_copy_is_a_fork():
    cache, k, v = filled(L=4)
    other = copy.copy(cache)
    cache.crop(2)
    cache.append(k[:, :, :1] * 5, v[:, :, :1])
    assert torch.equal(other.read()[0], k)


@torch.no_grad()
def test_a_layer_without_anything_fills_its_cache_too():
    """One that would otherwise run as a single operation of PyTorch, which knows of no cache."""
    torch.manual_seed(0)
    attn, x = mh.Attention(E, 4).eval(), torch.randn(2, 6, E)
    cache = KVCache()
    attn(x[:, :4], cache=cache)
    assert cache.length == 4
    torch.testing.assert_close(attn(x[:, 4:], cache=cache), attn(x)[:, 4:], rtol=0, atol=2e-6)
