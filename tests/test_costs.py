"""What steps cost: operations counted by hand and by torch's own counter, visible pairs one by one."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import multihead as mh
from cases import draw
from multihead import cli, reference
from multihead.explaining import costs
from multihead.request import make_request

E, H, B, L = 24, 4, 2, 50


def request_of(q, k, mask, **positions):
    places = positions.get("q_positions"), positions.get("k_positions")
    return make_request(q, k, k, mask, None, None, None, 0.0, *places, False, reference.attention)


@pytest.mark.parametrize("cell", [1, 7, 64])
def test_visible_pairs_are_counted_exactly(cell, monkeypatch):
    monkeypatch.setattr(costs, "_CELL", cell)
    for number in range(90_000, 90_060):
        case = draw(number)
        request = request_of(case.q, case.k, case.mask, **case.options)
        B, H, _, L, S, _, _ = request.sizes
        want = B * H * L * S if request.mask is None else int(request.visible().expand(B, H, L, S).sum())
        assert costs.visible_pairs(request) == want, case.told


def test_large_ones_take_no_time_and_no_memory():
    hollow = torch.empty(()).expand(1, 8, 10**6, 64)
    assert costs.visible_pairs(request_of(hollow, hollow, None)) == 8 * 10**12
    T = 50_000
    hollow = torch.empty(()).expand(1, 8, T, 64)
    assert costs.visible_pairs(request_of(hollow, hollow, mh.causal())) == 8 * T * (T + 1) // 2
    window = 8 * (255 * 256 // 2 + (T - 255) * 256)
    assert costs.visible_pairs(request_of(hollow, hollow, mh.window(left=255, right=0))) == window
    ids = torch.arange(T) // 100
    assert costs.visible_pairs(request_of(hollow, hollow, mh.documents(ids) & mh.causal())) == 8 * 500 * 100 * 101 // 2


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "value_dim": 3, "gate": True}, {"packed": False}])
def test_operations_are_those_that_torch_counts(options):
    """Of the definition, which multiplies every query by every key."""
    layer = mh.Attention(E, H, **options).eval()
    x = torch.randn(B, L, E)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        q, k, v = layer.project(x, x, x, (None, None))
        out = reference.attention(q, k, v).out.transpose(1, 2).flatten(2)
        if layer.gate_proj is not None:
            layer.gate_proj(x)
        layer.out_proj(out)
    assert mh.explain(layer, batch=B, length=L).total.flops == counter.get_total_flops()


def test_by_hand():
    told = mh.explain({"embed_dim": E, "num_heads": H, "num_kv_heads": 2, "mask": mh.causal()}, batch=B, length=L)
    D, pairs = E // H, B * H * L * (L + 1) // 2
    assert told.pairs == (pairs, B * H * L * L)
    assert told.costs["qkv_proj"] == (
        2 * B * L * E * (E + 4 * D),
        4 * (B * L * E + E * (E + 4 * D) + B * L * (E + 4 * D)),
    )
    assert told.costs["attention"] == (4 * pairs * D, 4 * B * (2 * H * L * D + 2 * 2 * L * D))
    assert told.costs["out_proj"].flops == 2 * B * L * E * E
    assert told.parameters == E * (E + 4 * D) + E + 4 * D + E * E + E
    assert told.cache_bytes == 2 * 2 * D * 4
    assert told.peak == 4 * B * L * (E + 4 * D + E + E)
    trained = mh.explain(
        {"embed_dim": E, "num_heads": H, "num_kv_heads": 2, "mask": mh.causal()}, batch=B, length=L, training=True
    )
    assert trained.costs["qkv_proj"].flops == 3 * told.costs["qkv_proj"].flops
    assert trained.costs["attention"].flops == 14 * pairs * D
    half = mh.explain({"embed_dim": E, "num_heads": H}, batch=B, length=L, dtype=torch.bfloat16)
    assert half.cache_bytes == 2 * H * D * 2


def test_bytes_by_hand():
    layer = {"embed_dim": E, "num_heads": H, "qk_norm": True, "position": mh.Rotary(6)}
    plain, trained = (mh.explain(layer, batch=B, length=L, training=training).costs for training in (False, True))
    rows = 2 * B * L * E  # q and k
    for step in ("norms", "Rotary"):
        assert plain[step] == (0, 4 * 2 * rows)  # read and written
        assert trained[step] == (0, 4 * 4 * rows)  # and the same of their gradients
    assert trained["out_proj"].bytes == 3 * plain["out_proj"].bytes == 3 * 4 * (2 * B * L * E + E * E)
    one = 4 * B * L * E  # q, k, v, out, or a gradient
    assert plain["attention"].bytes == 4 * one
    assert trained["attention"].bytes == (4 + 4 + 1 + 4) * one  # read; again; the output's gradient; three gradients


def test_what_does_not_learn_has_no_gradient():
    layer = mh.Attention(E, H, packed=False)
    layer.k_proj.requires_grad_(False)
    costs = mh.explain(layer, batch=B, length=L, training=True).costs
    assert costs["k_proj"].flops == 2 * 2 * B * L * E * E
    assert costs["q_proj"].flops == 3 * 2 * B * L * E * E


def test_complex_numbers():
    layer = mh.Attention(E, H, dtype=torch.complex64)
    found, real = (
        mh.explain(layer, batch=B, length=L, training=False),
        mh.explain({"embed_dim": E, "num_heads": H}, batch=B, length=L),
    )
    for step in ("qkv_proj", "out_proj"):
        assert found.costs[step] == (4 * real.costs[step].flops, 2 * real.costs[step].bytes)
    assert found.costs["attention"] == (2 * real.costs["attention"].flops, 2 * real.costs["attention"].bytes)


def test_tables_are_counted_in_bytes():
    table = mh.explain({"embed_dim": E, "num_heads": H, "position": mh.T5Bias(H)}, length=L).tables[0]
    assert table.bytes == L * L * (4 * H + 8)


@pytest.mark.parametrize("training", [True, False])
def test_peak_of_a_gate(training):
    T = 200
    plain, gated = (
        mh.explain({"embed_dim": E, "num_heads": H, "gate": gate}, length=T, training=training).peak
        for gate in (False, True)
    )
    # Two of the heads' outputs in place of the layer's; in training it is kept besides.
    assert gated - plain == 4 * T * E


def test_bound():
    heads = {"embed_dim": 512, "num_heads": 8}
    assert mh.explain(heads, length=4096).total.bound() == "compute"
    one = mh.explain(heads, length=1, source_length=4096).costs["attention"]
    assert one.bound() == "memory"
    assert one.bound(balance=0.01) == "compute"
    assert costs.Cost(0, 0).intensity == 0


def test_hints():
    heads = {"embed_dim": 512, "num_heads": 8}
    told = mh.explain(heads, length=4096).hints
    assert "scores take 1 x 8 x 4096 x 4096, 512 MiB" in told[0]
    assert "num_kv_heads=2 would take 1,024 instead of 4,096 bytes" in told[1]
    few = heads | {"num_kv_heads": 2}
    assert mh.explain(few, length=16).hints == []
    assert (
        "has no num_kv_heads, no Rotary, no softcap"
        in mh.explain(few | {"position": mh.Rotary(64), "softcap": 3.0}, length=4096).hints[1]
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mask": torch.ones(300, 300, dtype=torch.bool)}, "the mask is a table of 87.9 KiB"),
        ({"bias": torch.zeros(8, 300, 300)}, "the bias is a table, 2.75 MiB"),
        ({"bias": mh.T5Bias(8)}, "T5Bias becomes a table here"),
        ({"mask": mh.causal(), "dtype": torch.float64, "source_length": 310}, "the mask becomes a table here"),
        ({"mask": mh.causal()}, None),
        ({"bias": mh.ALiBi(8)}, None),
        ({"bias": torch.zeros(1, 300)}, None),
    ],
)
def test_which_argument_is_a_table(given, said):
    told = mh.explain({"embed_dim": 512, "num_heads": 8, "num_kv_heads": 2}, length=300, **given)
    about = [hint for hint in told.hints if "table" in hint]
    assert (said is None and not about) or (said is not None and len(about) == 1 and said in about[0]), told.hints


@pytest.mark.parametrize(
    "options", [{"batch_first": False}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}]
)
def test_what_is_said_of_a_drop_in_is_what_torchs_layer_does(options):
    options = {"batch_first": True} | options
    (said, *_) = [
        hint for hint in mh.explain(mh.MultiheadAttention(12, 4, **options).eval(), length=300).hints if "torch" in hint
    ]
    x = torch.randn(1, 300, 12) if options["batch_first"] else torch.randn(300, 1, 12)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.nn.MultiheadAttention(12, 4, **options).eval()(x, x, x)
    assert "aten::_native_multi_head_attention" not in {event.key for event in seen.key_averages()}
    assert "would not take its fast path" in said


@pytest.mark.parametrize(
    ("mask", "size"),
    [
        (mh.causal(), "300 x 300, 352 KiB"),
        (mh.lengths([7, 300]), "2 x 300, 2.34 KiB"),
        (mh.documents(torch.zeros(2, 300, dtype=torch.long)), "8 x 300 x 300, 2.75 MiB"),
    ],
)
def test_the_mask_that_torchs_layer_would_take(mask, size):
    told = mh.explain({"embed_dim": 12, "num_heads": 4}, batch=2, length=300, training=True, mask=mask)
    assert told.hints[0].endswith(f"scaled_dot_product_attention with a mask of {size}")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("heads", "options"),
    [(4, {}), (3, {}), (4, {"source_length": 270}), (4, {"mask": mh.causal()}), (4, {"bias": torch.zeros(300, 300)})],
)
def test_what_is_said_of_torchs_layer_is_what_it_does(heads, options, weights, training):
    (said, *_) = mh.explain({"embed_dim": 12, "num_heads": heads}, length=300, training=training, **options).hints
    layer = torch.nn.MultiheadAttention(12, heads, batch_first=True).train(training)
    x = torch.randn(1, 300, 12)
    source = torch.randn(1, 270, 12) if "source_length" in options else x
    mask = torch.ones(300, 300, dtype=torch.bool).triu(1) if "mask" in options else options.get("bias")
    with torch.set_grad_enabled(training), profile(activities=[ProfilerActivity.CPU]) as seen:
        layer(x, source, source, need_weights=weights, attn_mask=mask)
    ran = {event.key for event in seen.key_averages()}
    assert ("would run aten::_native_multi_head_attention" in said) == ("aten::_native_multi_head_attention" in ran)
    if "would not take its fast path" in said:
        assert ("aten::scaled_dot_product_attention" in ran) == (not weights)
        assert ("aten::softmax" in ran) == weights


def test_as_json():
    line = ["explain", "--embed-dim", "64", "--heads", "4", "--length", "32", "--causal", "--json"]
    result = CliRunner().invoke(cli.app, line, prog_name="multihead")
    told = json.loads(result.stdout)
    assert told["schema"] == "multihead-explanation/1"
    assert told["costs"]["attention"]["flops"] == 4 * 16 * 4 * 32 * 33 // 2
    assert set(told["costs"]) == {"qkv_proj", "attention", "out_proj", "total"}
    assert told["pairs"] == [4 * 32 * 33 // 2, 4 * 32 * 32]


@pytest.mark.parametrize(
    ("number", "thousands", "bytes_"),
    [
        (0, "0", "0 B"),
        (999, "999", "999 B"),
        (1024, "1.02 k", "1 KiB"),
        (3.22e9, "3.22 G", "3 GiB"),
        (2e18, "2e+03 P", "1.82e+06 TiB"),
    ],
)
def test_numbers_are_short(number, thousands, bytes_):
    assert (costs.decimal(number), costs.binary(number)) == (thousands, bytes_)
