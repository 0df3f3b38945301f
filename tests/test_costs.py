"""What steps cost: operations counted by hand and by torch's own counter, visible pairs one by one."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import multihead as mh
from cases import draw
from multihead import cli, costs, reference
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
    assert told.activations == 4 * B * L * (2 * E + 4 * D + E)
    trained = mh.explain(
        {"embed_dim": E, "num_heads": H, "num_kv_heads": 2, "mask": mh.causal()}, batch=B, length=L, training=True
    )
    assert trained.costs["qkv_proj"].flops == 3 * told.costs["qkv_proj"].flops
    assert trained.costs["attention"].flops == 14 * pairs * D
    half = mh.explain({"embed_dim": E, "num_heads": H}, batch=B, length=L, dtype=torch.bfloat16)
    assert half.cache_bytes == 2 * H * D * 2


def test_bound():
    assert mh.explain({"embed_dim": 512, "num_heads": 8}, length=4096).total.bound == "compute"
    assert (
        mh.explain({"embed_dim": 512, "num_heads": 8}, length=1, source_length=4096).costs["attention"].bound
        == "memory"
    )
    assert costs.Cost(0, 0).intensity == 0


def test_hints():
    heads = {"embed_dim": 512, "num_heads": 8}
    told = mh.explain(heads, length=4096).hints
    assert "weights of 1 x 8 x 4096 x 4096 here, 512 MiB" in told[0]
    assert "num_kv_heads=2 would take 1,024 instead of 4,096 bytes" in told[1]
    assert mh.explain(heads | {"num_kv_heads": 2}, length=16).hints == []
    table = mh.explain(heads | {"num_kv_heads": 2}, length=100, mask=torch.ones(100, 100, dtype=torch.bool)).hints
    assert "the mask is a table of 9.77 KiB" in table[0]


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
