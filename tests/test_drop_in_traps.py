"""Traps that reading and trying found: each of these once gave a wrong answer, or none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import multihead as mh
from cases import NATIVE
from multihead import whole
from multihead.kernels import small
from multihead.request import make_request

MODES = {"train": (True, True), "eval": (False, True), "no_grad": (False, False)}


def make(*args, seed=0, **options):
    torch.manual_seed(seed)
    layer = mh.MultiheadAttention(*(args or (8, 2)), **{"batch_first": True} | options)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.4)
    return layer


@pytest.mark.usefixtures("native")
def test_tables_that_are_kept_are_on_the_cpu():
    """They may not be made on the default device of whoever comes first."""
    q, k = torch.randn(1, 2, 21, 4, device="cpu"), torch.randn(1, 2, 23, 4, device="cpu")
    layer, x = make().eval(), torch.randn(1, 19, 8)
    table = torch.ones(19, 19, dtype=torch.bool).triu(1)
    with torch.device("meta"):
        out, own = mh.attention(q, k, k, mh.causal()), layer(x, x, x, attn_mask=table)[0]
        mh.attention(q, k, k, dropout=0.5, kernel="blocks")
    torch.testing.assert_close(out, mh.attention(q, k, k, mh.causal(), kernel="reference"))
    torch.testing.assert_close(own, layer(x, x, x, is_causal=True)[0])
    torch.testing.assert_close(layer(x, x, x, attn_mask=table)[0], own)


@pytest.mark.usefixtures("native")
def test_tables_that_are_kept_outlive_inference_mode():
    q, k = (torch.randn(1, 2, n, 4, requires_grad=True) for n in (22, 24))
    with torch.inference_mode():
        mh.attention(q, k, k, mh.causal())
    mh.attention(q, k, k, mh.causal()).sum().backward()
    assert q.grad is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float", "padding", "causal"])
def test_traced_at_one_length_and_run_at_another(kind, weights):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = make().eval()

        def forward(self, x, mask):
            given = {"key_padding_mask" if kind == "padding" else "attn_mask": mask}
            if kind == "causal":
                given = {"is_causal": True}
            return self.layer(x, x, x, need_weights=weights, **given)[0]

    def inputs(L):
        torch.manual_seed(L)
        x, table = torch.randn(2, L, 8), (torch.rand(L, L) < 0.4) & ~torch.eye(L, dtype=torch.bool)
        return x, {"bool": table, "float": torch.randn(L, L), "padding": torch.rand(2, L) < 0.3, "causal": table}[kind]

    with torch.no_grad():
        traced = torch.jit.trace(Wrapped(), inputs(5), check_trace=False)
        for L in (5, 9):
            torch.testing.assert_close(traced(*inputs(L)), Wrapped()(*inputs(L)))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("T", [6, 530])
@pytest.mark.parametrize("lowest", [-math.inf, torch.finfo(torch.float32).min])
def test_nan_behind_a_float_mask_stays_there(mode, T, lowest):
    """torch.nn.TransformerEncoderLayer makes float masks of all: https://github.com/pytorch/pytorch/issues/101967"""
    training, grad = MODES[mode]
    layer = make().train(training)
    q, k = torch.randn(1, 5, 8), torch.randn(1, T, 8)
    padding = torch.zeros(1, T).masked_fill(torch.arange(T) >= T - 2, lowest)
    table = padding.expand(5, T).contiguous()
    with torch.set_grad_enabled(grad):
        for weights in (True, False):
            for given in ({"key_padding_mask": padding}, {"attn_mask": table}):
                want = layer(q, k, k, need_weights=weights, **given)[0]
                dirty = k.clone()
                dirty[:, -2:] = math.nan
                out = layer(q, dirty, dirty, need_weights=weights, **given)[0]
                torch.testing.assert_close(out, want)
                if grad:
                    layer.zero_grad()
                    out.sum().backward()
                    assert all(
                        p.grad is None or p.grad.isfinite().all() for n, p in layer.named_parameters() if "out" in n
                    )


@pytest.mark.parametrize("kernel", [NATIVE, "small", "sdpa", "blocks", "blocks, softcap", "reference", None])
@pytest.mark.parametrize("S", [6, 300])
@pytest.mark.parametrize("by", ["mask", "bias", "both"])
@pytest.mark.parametrize("junk", [3e38, math.inf, math.nan])
@pytest.mark.parametrize("held_by", ["kv", "v"])
def test_what_hidden_keys_hold_does_not_reach_gradients(kernel, S, by, junk, held_by):
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 64) for n in (5, S, S))
    last, first = torch.arange(S) < S - 1, torch.arange(S) > 0
    keep = last & first if by == "both" else last
    options = {"mask": mh.padding(last)} if by != "bias" else {}
    if by != "mask":
        options["bias"] = torch.zeros(1, S).masked_fill(~(first if by == "both" else last), -math.inf)
    if kernel == "blocks, softcap":
        options["softcap"] = 5.0
    grads = []
    for held in (0.0, junk):
        leaves = [t.where(keep[:, None], held) if name in held_by else t for name, t in (("k", k), ("v", v))]
        leaves = [t.clone().requires_grad_() for t in (q, *leaves)]
        out = mh.attention(*leaves, kernel=kernel and kernel.split(",")[0], **options)
        grads.append(torch.autograd.grad(out.sum(), leaves))  # so that products with huge values add up
    for have, want in zip(*grads, strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("T", [20, 200, 290])
def test_asking_for_weights_does_not_change_what_dropout_draws(T):
    layer, x = make(64, 8, dropout=0.3), torch.randn(1, T, 64)
    outs = []
    for options in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        torch.manual_seed(1)
        outs.append(layer(x, x, x, **options)[0])
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(outs[0], outs[2])


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 5}], ids=["joined", "split"])
def test_loaded_parameters_are_not_drawn_again(options):
    """transformers marks what it has loaded, and then calls _reset_parameters of every torch.nn.MultiheadAttention."""
    layer = make(**options)
    for p in layer.parameters():
        p._is_hf_initialized = True
    before = {name: p.clone() for name, p in layer.named_parameters() if "weight" in name and "out" not in name}
    layer._reset_parameters()
    assert all(torch.equal(before[name], dict(layer.named_parameters())[name]) for name in before)
    fresh = make(**options)
    fresh._reset_parameters()
    assert not any(torch.equal(before[name], dict(fresh.named_parameters())[name]) for name in before)


def test_explain_of_the_drop_in_says_what_runs(monkeypatch):
    ran = []
    run = whole.run
    monkeypatch.setattr(whole, "run", lambda *a: ran.append(1) or run(*a))
    for options in ({}, {"batch_first": False}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        layer, x = make(**options).eval(), torch.randn(2, 7, 8)
        ran.clear()
        with torch.no_grad():
            layer(x, x, x, need_weights=False)
        told = mh.explain(layer, batch=2, length=7)
        assert (told.kernel == "whole") == bool(ran), options
        assert not told.refusals[told.kernel]
    layer.out_proj = nn.Identity()
    assert mh.explain(layer, length=7).kernel != "whole"
    with pytest.raises(ValueError, match=r"^subject: .*batch_first"):
        mh.explain({"embed_dim": 8, "num_heads": 2, "batch_first": True})


def test_a_replaced_forward_is_not_swapped():
    layer = nn.MultiheadAttention(8, 2)
    own = layer.forward
    layer.forward = lambda *a, **k: own(*a, **k)
    assert "forward was replaced" in mh.swap(layer).skipped[""]
    assert type(layer) is nn.MultiheadAttention


def test_many_heads_of_one_key_head():
    layer, x = make(320, 320, num_kv_heads=1, dtype=torch.float64), torch.randn(1, 60, 320, dtype=torch.float64)
    with torch.no_grad():
        out, weights = layer(x, x, x)
    torch.testing.assert_close(out, layer(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 60, dtype=torch.float64))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize(("L", "S"), [(2, 2), (7, 11), (300, 310)])
def test_the_causal_table_is_known_and_no_other(dtype, L, S):
    """By what is computed: a known one goes by the causal flag, or by no table of floats."""
    hidden = torch.ones(L, S, dtype=torch.bool).triu(S - L + 1)
    table = hidden if dtype == torch.bool else torch.zeros(L, S).masked_fill(hidden, -math.inf)
    layer, q, k = make(), torch.randn(1, L, 8), torch.randn(1, S, 8)
    want = layer(q, k, k, is_causal=True, need_weights=False)[0]
    assert torch.equal(layer(q, k, k, attn_mask=table, need_weights=False)[0], want)
    for i, j in ((L - 1, 0), (0, S - 1), (L // 2, S - 1)):
        other = table.clone()
        other[i, j] = not hidden[i, j] if dtype == torch.bool else 0.5
        assert not torch.equal(layer(q, k, k, attn_mask=other, need_weights=False)[0], want), (i, j)


def test_looking_for_the_causal_table_takes_no_memory():
    layer, x = make(), torch.randn(1, 1024, 8)
    table = torch.zeros(1024, 1024).masked_fill(torch.ones(1024, 1024, dtype=torch.bool).triu(1), -math.inf)
    largest = 0

    from multihead import torch_masks

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                largest = max(largest, out.numel() * out.element_size())
            return out

    # A dispatch mode would keep the table from being looked at, so the looking is tried by itself.
    readable, torch_masks.readable = torch_masks.readable, lambda _: True
    try:
        with Largest():
            assert torch_masks._is_causal_table(table)
    finally:
        torch_masks.readable = readable
    assert 0 < largest <= 2**19
    assert layer(x, x, x, attn_mask=table, need_weights=False)[0].isfinite().all()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": 1e4, "head_dim": 3}, "rope_theta"),
        ({"sliding_window": 3, "mask": "causal"}, "mask"),
    ],
    ids=str,
)
def test_messages_name_the_argument(options, name):
    with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
        mh.MultiheadAttention(8, 2, **options)


def test_a_tensor_set_as_mask_moves_with_the_layer():
    layer, x = make(), torch.randn(1, 5, 8)
    layer.mask = torch.ones(5, 5, dtype=torch.bool).tril()
    want = layer(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(layer.double()(x.double(), x.double(), x.double(), need_weights=False)[0].float(), want)


def test_small_is_for_what_the_fused_operation_lacks():
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    for options, wanted in (({}, False), ({"dropout": 0.1}, True), ({"mask": mh.causal()}, False)):
        request = make_request(
            q, q, q, options.get("mask"), None, None, None, options.get("dropout", 0.0), None, None, False, None
        )
        assert (not small.drawbacks(request)) == wanted
