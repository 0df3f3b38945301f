"""`KVCache`: attending in chunks is attending at once, for every storage, mask, position, grouping and padding."""

from __future__ import annotations

import random

import pytest
import torch

import multihead as mh
from cache_cases import CHUNKS, POSITIONS, STORAGES, WINDOW, E, H, close, f64, filled, in_chunks, layer, tokens
from cases import draw
from multihead import KVCache, PagePool
from multihead.cache_format import Format


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("mask", ["causal", "window", "hole"])
@torch.no_grad()
def test_in_any_chunks_as_at_once(storage, position, mask):
    attn, x = layer(position, mask), tokens(3)
    want = attn(x, mask=WINDOW if storage == "ring" else None)
    for sizes in CHUNKS:
        close(in_chunks(attn, x, sizes, STORAGES[storage]()), want)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("side", ["left", "right", "both"])
@torch.no_grad()
def test_rows_of_different_length(storage, side):
    """Padding on any side of any chunk: each row is what it is alone and unpadded."""
    rng = random.Random(3)
    for position in POSITIONS:
        attn = layer(position, qk_norm=True, sinks=True)
        real = [[rng.randint(0, 9) for _ in range(5)] for _ in range(3)]  # tokens of each row in each chunk
        alone = [tokens(1, length=sum(counts)) * (row + 1) for row, counts in enumerate(real)]
        want = [attn(x, mask=WINDOW if storage == "ring" else None)[0] for x in alone]
        cache, done = STORAGES[storage](), [0, 0, 0]
        for chunk in range(5):
            L = 12
            x, keep = torch.full((3, L, E), 1e3, dtype=f64), torch.zeros(3, L, dtype=torch.bool)
            for row in range(3):
                count = real[row][chunk]
                at = {"left": L - count, "right": 0, "both": (L - count) // 2}[side]
                x[row, at : at + count] = alone[row][0, done[row] : done[row] + count]
                keep[row, at : at + count] = True
            out = attn(x, cache=cache, keep=keep)
            for row in range(3):
                count = real[row][chunk]
                close(out[row][keep[row]], want[row][done[row] : done[row] + count])
                done[row] += count
        assert cache.lengths().tolist() == done
        assert cache.length == max(done)


@torch.no_grad()
def test_keep_means_the_same_without_a_cache():
    attn, x = layer(), tokens(2, length=7)
    keep = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    out = attn(x, keep=keep)
    for row in range(2):
        close(out[row][keep[row]], attn(x[row][keep[row]]))
    close(attn(x, keep=keep, cache=KVCache())[keep], out[keep])


@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_positions_of_the_caller(storage):
    """Gaps, rows that differ, numbers with a fraction; chunks without positions go on after the last."""
    attn, x = layer(), tokens(2, length=30)
    steps = torch.rand(2, 30, dtype=f64, generator=torch.Generator().manual_seed(4)) * 3 + 1
    for places in (torch.arange(30) * 3 + 5, (steps.cumsum(1) + 0.5), steps.cumsum(1).long()):
        want = attn(x, positions=places, mask=WINDOW if storage == "ring" else None)
        for sizes in ([1] * 30, [30], [7, 1, 22]):
            close(in_chunks(attn, x, sizes, STORAGES[storage](), positions=places), want)
    places = torch.arange(30) + 100
    want = attn(x, positions=places, mask=WINDOW if storage == "ring" else None)
    cache = STORAGES[storage]()
    first = attn(x[:, :4], positions=places[:4], cache=cache)
    close(torch.cat([first, in_chunks(attn, x[:, 4:], [1] * 26, cache)], 1), want)
    assert cache.next_positions(2).tolist() == [130, 131]


@pytest.mark.parametrize("batch", [(), (2, 3), (0,)], ids=str)
@torch.no_grad()
def test_any_batch_axes(batch):
    attn, x = layer(), tokens(*batch, length=11)
    for make in STORAGES.values():
        want = attn(x, mask=WINDOW) if make is STORAGES["ring"] else attn(x)
        close(in_chunks(attn, x, [4, 1, 6], make()), want)


@torch.no_grad()
def test_weights_and_masks_count_the_slots():
    attn, x = layer(), tokens(2, length=6)
    want, weights = attn(x, weights=True)
    cache = KVCache()
    attn(x[:, :4], cache=cache)
    out, found = attn(x[:, 4:], cache=cache, weights=True)
    close(out, want[:, 4:])
    close(found, weights[:, :, 4:])
    table = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) > 0.3
    cache = KVCache()
    first, second = attn(x[:, :4], cache=cache, mask=table[:4, :4]), attn(x[:, 4:], cache=cache, mask=table[4:])
    close(
        torch.cat([first, second], 1),
        attn(x, mask=torch.cat([torch.cat([table[:4, :4], table[:4, 4:] & False], 1), table[4:]])),
    )
    with pytest.raises(ValueError, match=r"= \(2, 4, 1, 7\)"):
        attn(x[:, :1], cache=cache, mask=torch.ones(1, 6, dtype=torch.bool))
    assert cache.length == 6  # as it was


def test_every_drawn_case_through_a_cache():
    """The function: keys and values of the product test, added in chunks, give what they give at once."""
    rng, tried = random.Random(0), 0
    for number in range(70_000, 70_150):
        case = draw(number)
        S = case.k.shape[-2]
        options = {name: value for name, value in case.options.items() if name != "k_positions"}
        k_at = case.options.get("k_positions")
        places = torch.arange(S) if k_at is None else k_at
        if case.options.get("q_positions") is None and k_at is not None:
            continue
        cache, start = KVCache(), 0
        with torch.no_grad():
            while start < S or not cache.length:
                size = rng.randint(1, max(1, S - start))
                stop = min(S, start + size)
                k, v, step = cache.append(
                    case.k[..., start:stop, :], case.v[..., start:stop, :], positions=places[..., start:stop]
                )
                start = stop
                if not S:
                    break
            if case.options.get("q_positions") is None:
                k_at = None
            else:
                k_at = step.k_positions if step.k_positions is not None else torch.arange(S)
            assert step.mask is None
            out = mh.attention(case.q, k, v, case.mask, k_positions=k_at, **options)
            close(out, mh.attention(case.q, case.k, case.v, case.mask, **case.options))
        tried += 1
    assert tried > 100


@torch.no_grad()
def test_a_ring_stays_small():
    attn = layer()
    cache, sizes = KVCache("ring", capacity=32), set()
    x = tokens(2, length=500)
    for step in range(10_000):
        k = x[:, step % 500, :10].view(2, 2, 1, 5)
        cache.append(k, k)
        if step > 200:
            sizes.add(cache.nbytes)
    assert sizes == {2 * 2 * (2 * 32 + 64) * 5 * 2 * 8}
    assert cache.length == 10_000
    assert attn(x, cache=KVCache("ring", capacity=32)).shape == x.shape


@torch.no_grad()
def test_what_a_ring_let_go_still_counts():
    """Positions go on, so masks of absolute positions are right, also when the window is all that is left."""
    attn, x = layer(mask="none"), tokens(2, length=96)
    mask = mh.causal() & ~mh.prefix(90)
    cache = KVCache("ring", capacity=5)
    for start in range(0, 90, 10):
        attn(x[:, start : start + 10], cache=cache, mask=mask)
    close(attn(x[:, 90:], cache=cache, mask=mask), attn(x, mask=mask & WINDOW)[:, 90:])
    cache = KVCache("ring", capacity=5)
    k = x[:, :, :10].view(2, 96, 2, 5).transpose(1, 2)
    for token in range(96):
        _, _, step = cache.append(k[:, :, token : token + 1], k[:, :, token : token + 1])
        if step.k_positions is not None:
            assert step.k_positions[-1] == token
    assert step.k_positions is not None


@torch.no_grad()
def test_a_large_chunk_does_not_stay():
    cache, _, _ = filled(KVCache("ring", capacity=4), L=5_000)
    assert cache.nbytes == 3 * 2 * (2 * 4 + 64) * 5 * 2 * 8


@torch.no_grad()
def test_a_token_is_copied_about_once():
    """Growing doubles: of 4,096 appends few move what is there."""
    cache, moved, where = KVCache(), 0, None
    k = torch.zeros(1, 1, 1, 8)
    for _ in range(4096):
        keys, _, _ = cache.append(k, k)
        moved += keys.data_ptr() != where
        where = keys.data_ptr()
    assert moved <= 8


@pytest.mark.parametrize("storage", ["growing", "fixed", "ring"])
@torch.no_grad()
def test_reading_copies_nothing(storage):
    cache, _, _ = filled(storage, L=5)
    assert cache.read()[0].data_ptr() == cache.read()[0].data_ptr()


@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_reorder(storage):
    attn, x = layer(), tokens(3, length=20)
    mask = WINDOW if storage == "ring" else None
    keep = torch.ones(3, 8, dtype=torch.bool)
    keep[1, :3] = False
    for rows in ([2, 0, 0, 1], [1, 1], [0, 1, 2], []):
        cache = STORAGES[storage]()
        attn(x[:, :8], cache=cache, keep=keep)
        cache.reorder(torch.tensor(rows, dtype=torch.int64))
        found = attn(x[rows, 8:], cache=cache)
        for row, old in enumerate(rows):
            real = torch.cat([x[old, :8][keep[old]], x[old, 8:]])
            close(found[row], attn(real, mask=mask)[-12:])


@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_crop(storage):
    attn, x = layer(), tokens(2, length=40)
    want = attn(x, mask=WINDOW if storage == "ring" else None)
    cache = STORAGES[storage]()
    attn(x[:, :30], cache=cache)
    attn(x[:, 10:17] * 3, cache=cache)  # a draft
    cache.crop(33)
    cache.crop(30)
    close(attn(x[:, 30:33], cache=cache), want[:, 30:33])
    cache.crop([31, 33])
    keep = torch.tensor([[True, True], [True, False]])
    out = attn(torch.stack([x[0, 31:33], x[1, [33, 0]]]), cache=cache, keep=keep)
    close(out[0], want[0, 31:33])
    close(out[1, 0], want[1, 33])
    assert cache.lengths().tolist() == [33, 34]


@torch.no_grad()
def test_a_ring_says_when_it_is_too_late_to_crop():
    cache, k, v = filled(KVCache("ring", capacity=5), L=1000)
    cache.crop(1000 - 64)
    with pytest.raises(ValueError, match="let go"):
        cache.crop(1000 - 65)
    assert cache.length == 1000 - 64
    _, _, step = cache.append(k[:, :, 936:937], v[:, :, 936:937])
    assert step.k_positions.tolist() == [932, 933, 934, 935, 936]


@torch.no_grad()
def test_pages_are_shared_and_given_back():
    pool = PagePool(12, page_size=4)
    cache, k, _ = filled(KVCache("paged", pool=pool), L=9, B=1)
    assert pool.free_pages == 9
    cache.reorder([0, 0, 0])
    other = cache.fork()
    assert pool.free_pages == 9  # one prompt, four holders
    new = torch.full((3, 2, 1, 5), 7.0, dtype=f64)
    cache.append(new, new)
    assert pool.free_pages == 6  # the page that is written into, for each row
    torch.testing.assert_close(other.read()[0], k.expand(3, -1, -1, -1))
    torch.testing.assert_close(cache.read()[0], torch.cat([k.expand(3, -1, -1, -1), new], 2))
    cache.crop(8)
    assert pool.free_pages == 9
    cache.reset()
    assert pool.free_pages == 9
    del other
    assert pool.free_pages == 12


@torch.no_grad()
def test_a_pool_that_is_used_up():
    pool = PagePool(3, page_size=4)
    cache, k, v = filled(KVCache("paged", pool=pool), L=9, B=1)
    with pytest.raises(ValueError, match=r"pool: expected 2 free pages .* got 0 of 3"):
        cache.append(k, v)
    assert cache.length == 9
    torch.testing.assert_close(cache.read()[0], k)
    cache.reorder([0, 0])
    one = torch.zeros(2, 2, 1, 5, dtype=f64)
    with pytest.raises(ValueError, match="pool"):  # a page of its own for one of the two
        cache.append(one, one)
    cache.crop(8)
    with pytest.raises(ValueError, match="pool"):
        cache.append(one, one)
    cache.reorder([0])
    cache.append(one[:1], one[:1])
    cache.reset()
    with pytest.raises(ValueError, match="pool: expected tokens of K=2"):
        cache.append(one[:, :1], one[:, :1])
    assert pool.free_pages == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("storage", ["growing", "fixed", "ring", "paged"])
@torch.no_grad()
def test_stored_in_fewer_bits(storage, dtype):
    make = {
        "growing": lambda: KVCache(dtype=dtype),
        "fixed": lambda: KVCache("fixed", capacity=40, dtype=dtype),
        "ring": lambda: KVCache("ring", capacity=40, dtype=dtype),
        "paged": lambda: KVCache("paged", pool=PagePool(20, page_size=8, dtype=dtype)),
    }[storage]
    k, v = torch.randn(2, 2, 3, 40, 32, generator=torch.Generator().manual_seed(0)).unbind()
    k[0, 0, 3] = 0.0
    cache = make()
    for start in range(0, 40, 8):
        keys, values, _ = cache.append(k[:, :, start : start + 8], v[:, :, start : start + 8])
    assert keys.dtype == values.dtype == torch.float32
    step = k.abs().amax(-1, keepdim=True) * (
        1 / 254 if dtype == torch.int8 else 2.0 ** -(8 if dtype == torch.bfloat16 else 11)
    )
    assert ((keys - k).abs() <= step * 1.01).all()
    assert keys[0, 0, 3].count_nonzero() == 0
    plain = KVCache()
    plain.append(k, v)
    assert cache.nbytes < 0.7 * plain.nbytes * (2 if storage == "ring" else 1) * (2.5 if storage == "ring" else 1)
    again = make()
    again.load_state_dict(cache.state_dict())
    assert torch.equal(again.read()[0], keys)


def test_int8_keeps_what_is_no_number():
    x = torch.tensor([[[[1.0, float("nan")], [float("inf"), 1.0], [2.0, -1.0]]]])
    back = Format(torch.int8).restored(Format(torch.int8).stored(x), torch.float32)
    assert back[0, 0, :2].isnan().any(-1).all()
    torch.testing.assert_close(back[0, 0, 2], x[0, 0, 2], rtol=0, atol=2 / 254)


@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_kept_and_loaded(storage):
    attn, x = layer(), tokens(2, length=90)
    for options in ({}, {"positions": torch.arange(80) * 2}, {"keep": torch.rand(2, 80) > 0.3}):
        cache, other = STORAGES[storage](), STORAGES[storage]()
        attn(x[:, :80], cache=cache, **options)
        other.load_state_dict(cache.state_dict())
        assert torch.equal(other.lengths(), cache.lengths())
        assert torch.equal(attn(x[:, 80:], cache=other), attn(x[:, 80:], cache=cache))
    other.load_state_dict({})
    assert other.length == 0
    assert KVCache().state_dict() == {}


@torch.no_grad()
def test_what_does_not_load():
    cache, _, _ = filled()
    state = cache.state_dict()
    small, _, _ = filled(KVCache("fixed", capacity=5), L=2)
    for target, given, words in (
        (small, state, "capacity=5"),
        (KVCache(dtype=torch.int8), state, "k_scale"),
        (KVCache(dtype=torch.bfloat16), state, "bfloat16"),
        (KVCache("ring", capacity=2), filled(L=99)[0].state_dict(), "ring"),
        (KVCache(), filled(KVCache("ring", capacity=2), L=99)[0].state_dict(), "growing"),
        (KVCache(), {"k": state["k"]}, "lengths"),
    ):
        with pytest.raises(ValueError, match=words):
            target.load_state_dict(given)
    assert small.length == 2


@torch.no_grad()
def test_a_context_is_projected_once():
    torch.manual_seed(0)
    attn = mh.Attention(E, H, kdim=10, vdim=10, num_kv_heads=2, position=mh.Rotary(), qk_norm=True, dtype=f64).eval()
    x, context = tokens(2, length=7), torch.randn(2, 11, 10, dtype=f64)
    calls = []
    attn.kv_proj.register_forward_hook(lambda *_: calls.append(1))
    cache = attn.context_cache(context)
    assert len(calls) == 1
    want, weights = attn(x, context, weights=True)
    out, found = attn(x, cache=cache, weights=True)
    close(out, want)
    close(found, weights)
    places = torch.arange(3, 10)
    close(attn(x, cache=cache, positions=places), attn(x, context, positions=(places, torch.arange(11))))
    close(
        in_chunks(attn, x, [1, 2, 4], cache, positions=places), attn(x, context, positions=(places, torch.arange(11)))
    )
    assert len(calls) == 4  # by the calls without a cache
    keep = torch.rand(2, 11, generator=torch.Generator().manual_seed(0)) > 0.4
    padded = attn(x, cache=attn.context_cache(context, keep=keep), positions=places)
    k_at = (keep.long().cumsum(1) - 1).clamp(min=0)
    close(padded, attn(x, context, mask=mh.padding(keep), positions=(places.expand(2, 7), k_at)))
    cache.reorder([1, 1, 0])
    close(attn(x[[1, 1, 0]], cache=cache), want[[1, 1, 0]])
    apart = mh.Attention(E, H, packed=False, dtype=f64).eval()
    close(apart(x, cache=apart.context_cache(x * 2, x)), apart(x, x * 2, x))


@torch.no_grad()
def test_the_drop_in():
    torch.manual_seed(0)
    x = torch.randn(3, 9, E)
    for first in (True, False):
        attn = mh.MultiheadAttention(E, H, batch_first=first, add_bias_kv=True).eval()
        give = (lambda t: t) if first else (lambda t: t.transpose(0, 1))
        hidden = torch.zeros(3, 9, dtype=torch.bool)
        hidden[1, :2] = True
        want, weights = attn(*[give(x)] * 3, is_causal=True, key_padding_mask=hidden)
        cache, outs = attn.new_cache(3, 9), []
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            part = give(x[:, start:stop])
            out, found = attn(part, part, part, hidden[:, start:stop], is_causal=True, cache=cache)
            outs.append(give(out))
        torch.testing.assert_close(torch.cat(outs, 1)[~hidden], give(want)[~hidden], rtol=0, atol=2e-6)
        torch.testing.assert_close(found[0], weights[0, 5:], rtol=0, atol=2e-6)
        with pytest.raises(ValueError, match="capacity=9"):
            attn(part, part, part, cache=cache)
        other, weights = attn(give(x), give(x * 2), give(x), key_padding_mask=hidden)
        context = attn.context_cache(give(x * 2), give(x), key_padding_mask=hidden)
        torch.testing.assert_close(attn(give(x), None, None, cache=context)[0], other, rtol=0, atol=2e-6)
        with pytest.raises(TypeError, match="key_padding_mask: expected with a cache a bool tensor"):
            attn(part, part, part, torch.zeros(3, 4), cache=attn.new_cache())
        with pytest.raises(ValueError, match=r"key_padding_mask: expected with a cache the new tokens' shape"):
            attn(part, part, part, hidden, cache=attn.new_cache())
        with pytest.raises(TypeError, match="key"):
            attn(part, None, None, cache=attn.new_cache())
        with pytest.raises(TypeError, match="key"):
            attn(part, None, None)
    single = mh.MultiheadAttention(E, H).eval()
    want = single(x[0], x[0], x[0], is_causal=True)[0]
    cache = single.new_cache()
    parts = [single(p, p, p, is_causal=True, cache=cache)[0] for p in x[0].split([4, 5])]
    torch.testing.assert_close(torch.cat(parts), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("storage", ["growing", "fixed", "ring"])
def test_gradients_go_through_what_was_kept(storage):
    attn, x = layer(), tokens(2, length=30)
    given = {}
    for sizes in ([30], [10, 1, 1, 18]):
        x_i = x.clone().requires_grad_()
        cache = STORAGES[storage]()
        if sizes == [30]:
            out = attn(x_i, mask=WINDOW if storage == "ring" else None)
        else:
            out = in_chunks(attn, x_i, sizes, cache)
        given[len(sizes)] = torch.autograd.grad(out.square().sum(), [x_i, *attn.parameters()])
    for one, many in zip(given[1], given[4], strict=True):
        torch.testing.assert_close(many, one, rtol=1e-10, atol=1e-10)


def test_gradients_through_rows_of_different_length():
    attn, x = layer(), tokens(2, length=9)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, 2:5] = keep[1, 8] = False
    one, two = (x.clone().requires_grad_() for _ in range(2))
    attn(one, keep=keep)[keep].square().sum().backward()
    in_chunks(attn, two, [3, 2, 4], KVCache(), keep=keep)[keep].square().sum().backward()
    close(two.grad, one.grad)


def test_what_autograd_kept_is_not_written_over():
    """Also where the buffer has room, because the first tokens came without gradients."""
    attn, x = layer(), tokens(2, length=9)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, 3:5] = keep[1, 6] = False
    given = []
    for sizes in ([6], [1, 1, 2, 2]):
        cache, tail = KVCache(), x[:, 3:].clone().requires_grad_()
        with torch.no_grad():
            attn(x[:, :3], cache=cache, keep=keep[:, :3])
        out = in_chunks(attn, tail, sizes, cache, keep=keep[:, 3:])
        given.append(torch.autograd.grad(out[keep[:, 3:]].square().sum(), tail)[0])
    close(given[1], given[0])


@pytest.mark.parametrize("make", [lambda: KVCache("paged", pool=PagePool(9)), lambda: KVCache(dtype=torch.int8)])
def test_what_would_lose_a_gradient_says_so(make):
    attn, x = layer(), tokens(1, length=3)
    cache = make()
    with pytest.raises(ValueError, match=r"cache: expected no gradients to keep.*torch.no_grad"):
        attn(x, cache=cache)
    assert cache.length == 0
    with torch.no_grad():
        attn(x, cache=cache)


@torch.no_grad()
def test_hidden_garbage_is_not_even_stored():
    attn, x = layer(), tokens(2, length=6)
    keep = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    want = attn(x, keep=keep)[keep]
    x[~keep] = float("nan")
    cache = KVCache()
    close(in_chunks(attn, x, [2, 4], cache, keep=keep)[keep], want)
    assert not cache.read()[0].isnan().any()


def test_what_is_refused():
    cache, k, v = filled(KVCache("fixed", capacity=10))
    one = k[:, :, :1]
    before = cache.read()[0].clone()
    for call, kind, words in (
        (
            lambda: cache.append(k, v),
            ValueError,
            r"cache: expected at most capacity=10 tokens, got 18 tokens, of which 9",
        ),
        (lambda: cache.append(one[:2], one[:2]), ValueError, r"batch axes of the cache, \(3,\), got \(2,\)"),
        (lambda: cache.append(one.float(), one.float()), ValueError, r"got K=2, D=5, V=5, dtype=torch.float32"),
        (lambda: cache.append(one[:, :1], one[:, :1]), ValueError, "K=1"),
        (lambda: cache.append(one, one[..., :2]), ValueError, "V=2"),
        (lambda: cache.append(one, v), ValueError, "v: expected the batch axes, K and L of k"),
        (lambda: cache.append(one, one.float()), ValueError, "v: expected the dtype and device of k"),
        (lambda: cache.append(one[0, 0], one[0, 0]), ValueError, r"k: expected the shape \(\*batch, K, L, width\)"),
        (lambda: cache.append(one.long(), one.long()), TypeError, "k: expected a floating tensor"),
        (
            lambda: cache.append(one, one, keep=torch.ones(3, 2, dtype=torch.bool)),
            ValueError,
            r"keep: expected the shape",
        ),
        (lambda: cache.append(one, one, keep=torch.ones(3, 1)), TypeError, "keep: expected a bool tensor"),
        (lambda: cache.append(one, one, positions=torch.arange(2)), ValueError, "positions: expected the shape"),
        (lambda: cache.append(one, one, positions=torch.ones(1) > 0), TypeError, "positions: expected a tensor of num"),
        (lambda: cache.reorder([3]), ValueError, "rows from 0 to 2, got 3"),
        (lambda: cache.reorder([0.5]), TypeError, "reorder"),
        (lambda: cache.crop(10), ValueError, "0 to 9"),
        (lambda: cache.crop(-1), ValueError, "0 to 9"),
        (lambda: cache.crop([1, 2]), ValueError, "3 ints"),
        (lambda: cache.crop([1, 2, 10]), ValueError, "0 to 9"),
        (lambda: KVCache("large"), ValueError, "storage: expected one of growing, fixed, ring, paged, got large"),
        (lambda: KVCache("fixed"), ValueError, 'capacity: expected a number of tokens for storage "fixed"'),
        (lambda: KVCache(capacity=3), ValueError, 'capacity: expected nothing for storage "growing"'),
        (lambda: KVCache("ring", capacity=0), ValueError, "at least 1"),
        (lambda: KVCache("paged"), TypeError, "pool: expected a PagePool"),
        (lambda: KVCache(pool=PagePool(2)), ValueError, "pool: expected nothing"),
        (lambda: KVCache("paged", pool=PagePool(2), dtype=torch.int8), ValueError, "dtype: expected nothing"),
        (lambda: KVCache(dtype=torch.int32), TypeError, "dtype: expected a floating dtype, torch.int8"),
        (lambda: KVCache().read(), ValueError, "an empty one"),
        (lambda: PagePool(0), ValueError, "pages"),
    ):
        with pytest.raises(kind, match=words):
            call()
        assert cache.length == 9
        assert torch.equal(cache.read()[0], before)


@torch.no_grad()
def test_what_a_layer_refuses():
    attn, x = layer(), tokens(3, length=4)
    cache = attn.new_cache(3, 6)
    attn(x, cache=cache)
    context = attn.context_cache(x)
    for call, kind, words in (
        (lambda: attn(x, cache=cache), ValueError, "capacity=6"),
        (lambda: attn(x[:2], cache=cache), ValueError, "batch axes"),
        (lambda: attn(x[:2], cache=attn.new_cache(3)), ValueError, "batch axes"),
        (
            lambda: attn(x, x[:, :2], cache=KVCache()),
            ValueError,
            "key: expected as many keys as queries .* context_cache",
        ),
        (lambda: attn(x, cache=[]), TypeError, "cache: expected a KVCache"),
        (lambda: attn(x, x, cache=context), ValueError, "the queries alone"),
        (lambda: attn(x, cache=context, keep=torch.ones(3, 4, dtype=torch.bool)), ValueError, "the queries alone"),
        (lambda: attn(x[:2], cache=context), ValueError, "batch axes"),
        (lambda: attn(x, cache=KVCache().freeze()), ValueError, "an empty one"),
        (lambda: context.append(*context.read()), ValueError, "a frozen one"),
        (lambda: context.crop(2), ValueError, "a frozen one"),
        (lambda: attn(x, cache=cache, positions=(torch.arange(4),) * 2), TypeError, "positions: expected with a cache"),
        (
            lambda: attn(x, keep=torch.ones(3, 5, dtype=torch.bool)),
            ValueError,
            r"keep: expected the shape \(\*batch, S\)",
        ),
        (lambda: attn(x, keep=torch.ones(3, 4)), TypeError, "keep"),
        (lambda: attn.context_cache(x[..., :3]), ValueError, "key: expected the shape"),
        (lambda: attn.context_cache(x, x[:, :2]), ValueError, "value: expected the batch axes and S"),
        (lambda: attn.context_cache("x"), TypeError, "key: expected a tensor"),
    ):
        with pytest.raises(kind, match=words):
            call()
        assert cache.length == 4
    assert "fixed" in repr(cache)
    assert "4 tokens of 3 rows" in repr(cache)


@torch.no_grad()
def test_reset_takes_other_tokens():
    cache, _, _ = filled()
    cache.reset()
    assert (cache.length, cache.nbytes, cache.batch_shape) == (0, 0, None)
    cache.append(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 4))
    assert cache.read()[1].shape == (1, 1, 2, 4)


@torch.no_grad()
def test_a_fork_goes_its_own_way():
    for make in STORAGES.values():
        cache, k, v = filled(make(), L=4)
        other = cache.fork()
        cache.append(k[:, :, :1] * 2, v[:, :, :1])
        other.append(k[:, :, 1:2] * 3, v[:, :, :1])
        assert torch.equal(cache.read()[0][:, :, 4], k[:, :, 0] * 2)
        assert torch.equal(other.read()[0][:, :, 4], k[:, :, 1] * 3)


@torch.no_grad()
def test_half_precision_and_autocast():
    attn = mh.Attention(E, H, mask=mh.causal()).eval()
    x = tokens(2, length=8).float()
    with torch.autocast("cpu", torch.bfloat16):
        want = attn(x)
        cache = KVCache()
        out = in_chunks(attn, x, [5, 1, 2], cache)
    assert cache.read()[0].dtype == torch.bfloat16
    torch.testing.assert_close(out, want, rtol=0, atol=0.02)
