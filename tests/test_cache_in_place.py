"""What a cache stores is read where it lies: pages, half precision and int8, whatever acts on the scores."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from multihead import KVCache, PagePool, attention
from multihead.attention import attention_over
from multihead.cache_format import Stored
from multihead.kernels import library, native

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not there")

H, K, S = 6, 3, 211
FORMS = {
    "pages of 64": lambda B: KVCache("paged", pool=PagePool(4 * B + 3)),
    "pages of 5": lambda B: KVCache("paged", pool=PagePool(43 * B + 3, page_size=5)),
    "pages of 192": lambda B: KVCache("paged", pool=PagePool(2 * B, page_size=192)),
    "bfloat16": lambda B: KVCache(dtype=torch.bfloat16),  # noqa: ARG005
    "float16": lambda B: KVCache("fixed", capacity=S + 3, dtype=torch.float16),  # noqa: ARG005
    "int8": lambda B: KVCache(dtype=torch.int8),  # noqa: ARG005
    "int8 in pages of 7": lambda B: KVCache("paged", pool=PagePool(31 * B + 1, page_size=7, dtype=torch.int8)),
    "bfloat16 in pages of 64": lambda B: KVCache("paged", pool=PagePool(4 * B, dtype=torch.bfloat16)),
}
SCORES = {
    "nothing": {},
    "causal": {"mask": mh.causal()},
    "window": {"mask": mh.window(left=30) & mh.causal()},
    "documents": {"mask": mh.documents(torch.arange(S) // 50)},
    "alibi": {"mask": mh.causal(), "bias": mh.ALiBi(H)},
    "bias": {"bias": torch.linspace(-2, 2, S).expand(H, 1, S)},
    "softcap, scale": {"softcap": 3.0, "scale": 0.7, "mask": mh.causal()},
    "sinks": {"sinks": torch.linspace(-1, 1, H), "mask": mh.causal()},
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a cache as tensors fails."""

    def refuse(_: Stored) -> None:
        raise AssertionError("the cache was copied")

    monkeypatch.setattr(Stored, "read", refuse)
    monkeypatch.setattr(Stored, "in_rows", refuse)


def filled(form: str, B: int = 2, D: int = 20, V: int = 11, ragged: bool = False) -> KVCache:
    """A cache whose pages were used before, and hold NaN where it has written nothing."""
    cache = FORMS[form](B)
    k, v = draw(B, K, S, D, seed=1), draw(B, K, S, V, seed=2)
    cache.append(k, v)
    cache.reset()
    if cache.storage == "paged":
        for part in cache._store.pool.parts:  # type: ignore[attr-defined]
            part.fill_(float("nan") if part.is_floating_point() else 99)
    keep = torch.ones(B, S, dtype=torch.bool)
    if ragged:
        keep[0, 17:150] = False
    first = 130
    cache.append(k[:, :, :first], v[:, :, :first], keep=keep[:, :first])
    cache.append(k[:, :, first:], v[:, :, first:], keep=keep[:, first:])
    return cache


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scores", SCORES)
@torch.no_grad()
def test_it_is_what_the_copies_give(form: str, scores: str, request: pytest.FixtureRequest):
    cache, told = filled(form), SCORES[scores]
    k, v = cache.read()
    wants = {L: attention(draw(2, H, L, 20), k, v, **told) for L in (1, 3, 70)}
    request.getfixturevalue("never_copied")
    for L, want in wants.items():
        found = attention_over(draw(2, H, L, 20), cache.stored(), **told)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", [(1, 1), (8, 16), (64, 64), (33, 7)])
@torch.no_grad()
def test_any_width(form: str, widths: tuple[int, int]):
    cache = filled(form, 1, *widths)
    for L in (1, 50):
        q = draw(1, H, L, widths[0])
        want = attention(q, *cache.read(), mh.causal())
        torch.testing.assert_close(attention_over(q, cache.stored(), mh.causal()), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_rows_of_different_length(form: str):
    """What lies behind a shorter row, NaN here, is nobody's."""
    cache = filled(form, ragged=True)
    mask, q = mh.lengths(cache.lengths()), draw(2, H, 1, 20)
    found = attention_over(q, cache.stored(), mask)
    k, v = cache.read()
    alone = attention(q[:1], k[:1, :, :78], v[:1, :, :78])
    torch.testing.assert_close(found[:1], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1:], attention(q[1:], k[1:], v[1:]), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_pages_give_one_query_the_same_bits():
    cache, q = filled("pages of 5"), draw(2, H, 1, 20)
    assert torch.equal(attention_over(q, cache.stored()), attention(q, *cache.read()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [False, True])
@torch.no_grad()
def test_tokens_of_any_dtype(dtype: torch.dtype, sinks: bool):
    cache = KVCache("paged", pool=PagePool(40, dtype=torch.int8))
    cache.append(draw(2, K, S, 16, seed=1).to(dtype), draw(2, K, S, 16, seed=2).to(dtype))
    q, told = draw(2, H, 1, 16).to(dtype), {"sinks": torch.ones(H)} if sinks else {}
    found = attention_over(q, cache.stored(), **told)
    assert found.dtype == dtype
    k, v = cache.stored()._replace(dtype=torch.float32).read()  # what int8 stands for, not rounded again
    torch.testing.assert_close(found, attention(q.float(), k, v, **told).to(dtype))


@torch.no_grad()
def test_no_batch_axes_and_several():
    for batch in ((), (2, 3)):
        cache = KVCache(dtype=torch.int8)
        cache.append(draw(*batch, K, S, 8, seed=1), draw(*batch, K, S, 8, seed=2))
        q = draw(*batch, H, 2, 8)
        found = attention_over(q, cache.stored(), mh.causal())
        assert found.shape == (*batch, H, 2, 8)
        torch.testing.assert_close(found, attention(q, *cache.read(), mh.causal()), rtol=1e-5, atol=1e-5)


# Layers ---------------------------------------------------------------------------------------------------------------


def decoded(attn: torch.nn.Module, cache: KVCache, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([attn(piece, cache=cache) for piece in x.split([100, 1, 1, 30, 1], 1)], 1)


@pytest.mark.usefixtures("never_copied")
@pytest.mark.parametrize("form", [form for form in FORMS if "pages" in form and "int8" not in form])
@torch.no_grad()
def test_a_layer_decodes_from_pages(form: str):
    torch.manual_seed(0)
    attn = mh.Attention(48, H, num_kv_heads=K, mask=mh.causal(), position=mh.Rotary(), sinks=True).eval()
    x = draw(2, 133, 48)
    close = {"rtol": 0.02, "atol": 0.02} if "bfloat16" in form else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(decoded(attn, FORMS[form](2), x), attn(x), **close)


@pytest.mark.usefixtures("never_copied")
@torch.no_grad()
def test_a_context_in_half_precision():
    attn = mh.Attention(48, H).eval()
    x, memory = draw(2, 3, 48), draw(2, S, 48, seed=1)
    cache = attn.context_cache(memory, dtype=torch.bfloat16)
    torch.testing.assert_close(attn(x, cache=cache), attn(x, memory), rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("never_copied")
@torch.no_grad()
def test_the_drop_in_decodes_from_pages():
    torch.manual_seed(0)
    attn, x = mh.MultiheadAttention(48, H, batch_first=True, mask=mh.causal()).eval(), draw(2, 20, 48)
    cache = KVCache("paged", pool=PagePool(10, page_size=8))
    parts = [attn(piece, piece, piece, need_weights=False, cache=cache)[0] for piece in x.split(7, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), attn(x, x, x, need_weights=False)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
@torch.no_grad()
def test_keys_besides_those_of_the_cache(options: dict[str, bool]):
    torch.manual_seed(0)
    attn, x = mh.MultiheadAttention(48, H, batch_first=True, mask=mh.causal(), **options).eval(), draw(2, 20, 48)
    cache = KVCache("paged", pool=PagePool(10, page_size=8))
    parts = [attn(piece, piece, piece, need_weights=False, cache=cache)[0] for piece in x.split(7, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), attn(x, x, x, need_weights=False)[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_ring_in_half_precision_takes_more_than_it_keeps():
    """The tokens that move to the front while a chunk is looked at are those of the chunk after it."""
    attn = mh.Attention(48, H, mask=mh.causal(), position=mh.ALiBi(H)).eval()
    x, window = draw(1, 300, 48), mh.window(left=15)
    cache = KVCache("ring", capacity=16, dtype=torch.bfloat16)
    parts = [attn(piece, cache=cache) for piece in x.split([250, 1, 1, 48], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), attn(x, mask=window), rtol=0.02, atol=0.02)


# Where it can't be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["gradients", "autocast", "float64", "weights", "own method", "no library"])
def test_elsewhere_it_is_copied(how: str, monkeypatch: pytest.MonkeyPatch):
    dtype = torch.float64 if how == "float64" else torch.float32
    torch.manual_seed(0)
    attn, x = mh.Attention(48, H, mask=mh.causal(), dtype=dtype).eval(), draw(2, 20, 48).to(dtype)
    with torch.no_grad():
        want = attn(x)
    copies: list[bool] = []
    read = Stored.read
    monkeypatch.setattr(Stored, "read", lambda held: copies.append(True) or read(held))
    if how == "no library":
        monkeypatch.setattr(native, "refusals", lambda _: ["the native library is not there"])
    if how == "own method":
        monkeypatch.setattr(attn, "attend", lambda *given: mh.Attention.attend(attn, *given))
    cache = KVCache("paged", pool=PagePool(10, page_size=8))
    with torch.set_grad_enabled(how == "gradients"), torch.autocast("cpu", enabled=how == "autocast"):
        if how == "gradients":
            attn.requires_grad_(False)
            x.requires_grad_(False)
        found = [attn(piece, cache=cache, weights=how == "weights") for piece in x.split(10, 1)]
    if how == "weights":
        found = [out for out, _ in found]
    assert len(copies) == 2
    close = {"rtol": 0.02, "atol": 0.02} if how == "autocast" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(torch.cat(found, 1).to(dtype), want, **close)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pages": torch.tensor([[0, 3]])}, "pages: expected numbers of pages that there are"),
        ({"pages": torch.tensor([[0, -1]])}, "pages: expected numbers of pages that there are"),
        ({"pages": torch.tensor([[0]])}, "pages: expected enough for all tokens"),
        ({"pages": torch.tensor([[0, 1], [0, 1]])}, r"pages: expected int64 \(B, n\)"),
        ({"pages": torch.tensor([[0.0, 1.0]])}, r"pages: expected int64 \(B, n\)"),
        ({"pages": None}, "k: expected a row for each of the batch, with all tokens"),
        ({"k_factors": torch.ones(3, 2, 4, 1)}, "k: expected int8, where there are factors"),
        ({"k": torch.ones(3, 2, 4, 5, dtype=torch.int8), "v": torch.ones(3, 2, 4, 5, dtype=torch.int8)}, "float16"),
        ({"k": torch.ones(3, 2, 4, 6)}, "k: expected heads and width that fit"),
        ({"v": torch.ones(3, 1, 4, 5)}, "v: expected heads and width that fit"),
        ({"stored": 9}, "pages: expected enough for all tokens"),
        ({"stored": -1}, "k: expected a shape that fits the other tensors"),
    ],
)
def test_the_operation_checks_what_is_stored(changes: dict[str, object], told: str):
    given = {"q": torch.ones(1, 2, 1, 5), "k": torch.ones(3, 2, 4, 5), "v": torch.ones(3, 2, 4, 5)}
    given |= {"stored": 7, "k_factors": None, "v_factors": None, "pages": torch.tensor([[2, 0]])}
    torch.ops.multihead.forward(**given)
    with pytest.raises(RuntimeError, match=told):
        torch.ops.multihead.forward(**(given | changes))


def test_the_operation_checks_the_factors():
    numbers, factors = torch.ones(1, 2, 4, 5, dtype=torch.int8), torch.full((1, 2, 4, 1), 0.5)
    given = {"q": torch.ones(1, 2, 1, 5), "k": numbers, "v": numbers, "stored": 4}
    out = torch.ops.multihead.forward(**given, k_factors=factors, v_factors=factors)[0]
    torch.testing.assert_close(out, torch.full((1, 2, 1, 5), 0.5))
    for wrong in (factors[:, :, :3], factors.double(), factors[:, :1], factors.expand(1, 2, 4, 5)):
        with pytest.raises(RuntimeError, match="k: expected a float32 factor for each row"):
            torch.ops.multihead.forward(**given, k_factors=wrong, v_factors=factors)
