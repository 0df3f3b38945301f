"""Operations of the native kernel under torch's own counter: pairs that see each other, counted one by one."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import multihead as mh
from cases import draw
from multihead.kernels import library, native
from test_costs import request_of

pytestmark = pytest.mark.skipif(not library.available(), reason=str(library.why_not()))

H, K, L, S, D, V = 4, 2, 37, 41, 6, 5


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


def inputs(grad=True, B=2):
    return [torch.randn(B, n, t, w, requires_grad=grad) for n, t, w in ((H, L, D), (K, S, D), (K, S, V))]


MASKS = {
    "none": {},
    "causal": {"mask": mh.causal()},
    "window": {"mask": mh.window(left=5, right=2)},
    "lengths": {"mask": mh.lengths([40, 3])},
    "documents": {"mask": mh.documents(torch.arange(S) // 9) & mh.causal()},
    "bias": {"bias": torch.where(torch.arange(S) < 30, 0.0, -torch.inf)[None]},
    "positions": {"mask": mh.causal(), "q_positions": torch.arange(L) * 2, "k_positions": torch.arange(S)},
}


@pytest.mark.parametrize("name", MASKS)
def test_forward_and_backward(name):
    q, k, v = inputs()
    options = MASKS[name]
    weights = mh.attention_weights(q, k, **options)
    pairs = int((weights != 0).sum())
    found = counted(lambda: mh.attention(q, k, v, **options, kernel="native").sum().backward())
    assert found == {"multihead.forward": 2 * pairs * (D + V), "multihead.backward": 2 * pairs * (3 * D + 2 * V)}


def test_random_calls():
    for number in range(95_000, 95_060):
        case = draw(number)
        request = request_of(case.q, case.k, case.mask)
        if native.refusals(request) or case.mask is None:
            continue
        B, H, _, L, S, D, _ = request.sizes
        pairs = int(request.visible().expand(B, H, L, S).sum())
        with torch.no_grad():
            found = counted(lambda case=case: mh.attention(case.q, case.k, case.k, case.mask, kernel="native"))
        assert found == {"multihead.forward": 4 * pairs * D}, case.told


def test_gradients_that_are_not_wanted_are_not_counted():
    for wanted, products in (("q", 2 * D + V), ("kv", 2 * D + 2 * V), ("qkv", 3 * D + 2 * V)):
        leaves = dict(zip("qkv", inputs(grad=False), strict=True))
        for part in wanted:
            leaves[part].requires_grad_()
        out = mh.attention(*leaves.values(), kernel="native")
        found = counted(lambda out=out: out.sum().backward())
        assert found["multihead.backward"] == 2 * (2 * H * L * S) * products, wanted


def test_weights_and_statistics():
    q, k, _ = inputs(grad=False)
    pairs = int((mh.attention_weights(q, k, mh.causal()) != 0).sum())
    layer, x = mh.Attention(24, H, mask=mh.causal()), torch.randn(2, L, 24)
    found = counted(lambda: layer(x, weights=True))
    assert found["multihead.weights"] == 2 * (2 * H * L * (L + 1) // 2) * 6
    found = counted(lambda: mh.Record(q, k, mask=mh.causal()).entropy())
    assert found == {"multihead.forward": 2 * pairs * (D + 1), "multihead.statistics": 2 * pairs * D}


@pytest.mark.parametrize("kind", ["growing", "int8", "paged"])
def test_over_a_cache(kind):
    layer = mh.Attention(24, H, mask=mh.window(left=7, right=0)).eval()
    pool = mh.PagePool(4, page_size=6)
    cache = (
        mh.KVCache("paged", pool=pool) if kind == "paged" else mh.KVCache(dtype=torch.int8 if kind == "int8" else None)
    )
    with torch.no_grad():
        layer(torch.randn(1, 20, 24), cache=cache)
        found = counted(lambda: layer(torch.randn(1, 1, 24), cache=cache))
    assert found["multihead.forward"] == 2 * (H * 8) * 12
    without = mh.Attention(24, H).eval()
    with torch.no_grad():
        found = counted(lambda: without(torch.randn(1, 1, 24), cache=cache))
    assert found["multihead.forward"] == 2 * (H * 22) * 12


def test_explain_and_the_counter_agree():
    for training in (False, True):
        layer = mh.Attention(24, H, num_kv_heads=K, value_dim=5, mask=mh.causal()).train(training)
        x = torch.randn(2, L, 24, requires_grad=training)

        def run(layer=layer, x=x, training=training):
            with torch.set_grad_enabled(training):
                out = layer(x)
                if training:
                    out.sum().backward()

        assert sum(counted(run).values()) == mh.explain(layer, batch=2, length=L).total.flops


def test_of_fake_tensors_all_pairs_are_counted():
    with FakeTensorMode():
        q, k, v = inputs(grad=False)
        found = counted(lambda: mh.attention(q, k, v, mh.causal(), kernel="native"))
    assert found == {"multihead.forward": 2 * (2 * H * L * S) * (D + V)}
