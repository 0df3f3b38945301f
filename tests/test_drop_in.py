"""The drop-in against a formula over its state_dict: every way to call it, drawn at random, in every mode.

The formula is float64, knows masks only as tables, and shares no code with the package.
"""

import functools
import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import MultiheadAttention

f64 = torch.float64
MODES = {"train": (True, True), "eval": (False, True), "eval, no_grad": (False, False)}
LENGTHS = ((5, 5), (3, 7), (7, 3), (1, 1), (1, 6), (4, 1), (67, 67), (17, 71), (66, 19))


def draw(*shape, seed=0, dtype=f64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64).to(dtype)


def build(E, H, seed=0, dtype=f64, **options):
    """A layer none of whose parameters is 0, or is close to another."""
    layer = MultiheadAttention(E, H, dtype=dtype, **options)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(draw(*p.shape, seed=1000 * seed + i) * (0.9 / math.sqrt(p.shape[-1]) if p.ndim == 2 else 0.5))
    return layer


def close(found, want, what="", atol=1e-12):
    __tracebackhide__ = True
    assert tuple(found.shape) == tuple(want.shape), f"{what}: shape {tuple(found.shape)}, wanted {tuple(want.shape)}"
    found, want = found.detach().to(f64), want.detach().to(f64)
    assert found.isfinite().all(), f"{what}: {int((~found.isfinite()).sum())} of {found.numel()} are not finite"
    if found.numel():
        error, size = float((found - want).abs().max()), max(1.0, float(want.abs().max()))
        assert error <= atol * size, f"{what}: off by {error:.3g} of {size:.3g}"


# The formula ----------------------------------------------------------------------------------------------------------


def oracle(p, H, query, key, value, hidden=None, added=0.0, zero_attn=False, K=None, scale=None):
    """(output (N, L, E), weights (N, H, L, S)) of inputs (N, L, E), (N, S, kdim), (N, S, vdim).

    p: the layer's parameters by name. hidden, added: what broadcasts to (N, H, L, S).
    """
    K = K or H
    if p.get("in_proj_weight") is not None:
        rows = p["in_proj_weight"]
        D = rows.shape[0] // (H + 2 * K)
        matrices = rows.split([H * D, K * D, K * D])
    else:
        matrices = [p[f"{part}_proj_weight"] for part in "qkv"]
    biases = [0.0] * 3 if p.get("in_proj_bias") is None else p["in_proj_bias"].split([len(m) for m in matrices])
    q, k, v = (x @ m.T + b for x, m, b in zip((query, key, value), matrices, biases, strict=True))
    S = k.shape[1]
    ends = []  # pairs of one more key and value, in the layout (N, 1, width)
    if p.get("bias_k") is not None:
        ends.append((p["bias_k"].expand(len(q), 1, -1), p["bias_v"].expand(len(q), 1, -1)))
    if zero_attn:
        ends.append((torch.zeros_like(k[:, :1]) if S else k.new_zeros(len(q), 1, k.shape[-1]),) * 2)
    k, v = (torch.cat([t, *(pair[i] for pair in ends)], 1) for i, t in enumerate((k, v)))
    q = q.unflatten(-1, (H, -1)).transpose(1, 2)
    k, v = (t.unflatten(-1, (K, -1)).transpose(1, 2).repeat_interleave(H // K, 1) for t in (k, v))
    scores = torch.einsum("nhld,nhsd->nhls", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    real = scores[..., :S] + added
    if hidden is not None:
        real = real.masked_fill(hidden, -math.inf)
    scores = torch.cat([real, scores[..., S:]], -1)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    e = (
        torch.exp(scores - scores.masked_fill(blind, 0.0).amax(-1, keepdim=True).detach())
        if scores.shape[-1]
        else scores
    )
    weights = e / e.sum(-1, keepdim=True).masked_fill(blind, 1.0)
    out = torch.einsum("nhls,nhsd->nlhd", weights, v).flatten(2) @ p["out_proj.weight"].T
    return out if p.get("out_proj.bias") is None else out + p["out_proj.bias"], weights


# The cases ------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    layer: MultiheadAttention
    inputs: list[Tensor]  # as the layer takes them
    call: dict[str, Any]
    hidden: Tensor  # (N, H, L, S)
    added: Tensor  # (N, H, L, S)
    batched: bool
    told: str
    learned: list[Tensor] = field(default_factory=list)  # masks that get a gradient

    @functools.cached_property
    def leaves(self):
        given = {id(t): t for t in (*self.inputs, *self.learned)}
        return [*self.layer.parameters(), *given.values()]

    def rows(self):
        """The inputs as the formula takes them."""
        if not self.batched:
            return [t[None] for t in self.inputs]
        return self.inputs if self.layer.batch_first else [t.transpose(0, 1) for t in self.inputs]

    def expected(self):
        """Output and weights by head, in the layout of the call."""
        parameters = dict(self.layer.named_parameters())
        H, zero = self.layer.num_heads, self.layer.add_zero_attn
        K = self.layer.num_kv_heads
        out, weights = oracle(parameters, H, *self.rows(), self.hidden, self.added, zero, K)
        if not self.batched:
            return out[0], weights[0]
        return (out if self.layer.batch_first else out.transpose(0, 1)), weights


def make_case(number):
    """Case `number`, the same on every run."""
    rng = random.Random(number)
    torch.manual_seed(number)
    N, H, D, (L, S) = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4, 6)), rng.choice((2, 3, 5)), rng.choice(LENGTHS)
    options: dict[str, Any] = {"bias": rng.random() < 0.75, "batch_first": rng.random() < 0.6}
    options["add_bias_kv"], options["add_zero_attn"] = rng.random() < 0.2, rng.random() < 0.2
    sources = rng.choice(("self", "self", "encoder-decoder", "three"))
    if sources == "self":
        S = L
    elif rng.random() < 0.4:
        options["kdim"] = 11
        options["vdim"] = 11 if sources == "encoder-decoder" else 13
    if rng.random() < 0.15 and H > 1:
        options["num_kv_heads"] = 1 if H % 2 else H // 2
    batched = N > 1 or rng.random() < 0.5
    i, j = torch.arange(S - L, S), torch.arange(S)
    places = None
    if rng.random() < 0.2:
        shape = rng.choice(((), (N,) if batched else ()))
        i = torch.randint(0, 9, (*shape, L))
        j = i if sources == "self" else torch.randint(0, 9, (*shape, S))
        places = i if sources == "self" else (i, j)
    distance = (i[..., :, None] - j[..., None, :]).expand(N, L, S)[:, None]  # (N, 1, L, S)
    hidden, added = torch.zeros(N, H, L, S, dtype=torch.bool), torch.zeros(N, H, L, S, dtype=f64)
    if rng.random() < 0.1:
        options["sliding_window"] = rng.choice((1, 2, 4))
        hidden |= (distance < 0) | (distance >= options["sliding_window"])

    layer = build(H * D, H, number, **options)
    x, context, values = draw(N, L, H * D), draw(N, S, layer.kdim, seed=1), draw(N, S, layer.vdim, seed=2)
    inputs = {"self": [x], "encoder-decoder": [x, context], "three": [x, context, values]}[sources]
    if not batched:
        inputs = [t[0] for t in inputs]
    elif not layer.batch_first:
        inputs = [t.transpose(0, 1).contiguous() for t in inputs]
    inputs = [t.requires_grad_() for t in inputs]
    call: dict[str, Any] = {} if places is None else {"positions": places}
    learned: list[Tensor] = []

    if rng.random() < 0.55:
        whole = [(1, 1, L, S), (N, 1, L, S), (N, H, L, S)]
        shape = rng.choice((*whole, (1, H, L, S), (N, H, 1, S), (N, 1, L, 1), (1, 1, 1, S)))
        call["attn_mask"] = table = mask_table(rng, shape)
        if table.dtype == f64 and rng.random() < 0.4:
            learned.append(table.requires_grad_())
        hides, adds = meant(table)
        hidden, added = hidden | hides, added + adds
        forms = {(1, 1, L, S): (L, S), (N, 1, L, S): (N, L, S), (N, H, L, S): (N * H, L, S)}
        if shape in forms and rng.random() < 0.8:
            call["attn_mask"] = table.reshape(forms[shape])
        if not batched and shape == (1, H, L, S):
            call["attn_mask"] = table[0]
    if rng.random() < 0.45:
        table = mask_table(rng, (N, S))
        if table.dtype == f64 and rng.random() < 0.4:
            learned.append(table.requires_grad_())
        hides, adds = meant(table)
        hidden, added = hidden | hides[:, None, None], added + adds[:, None, None]
        call["key_padding_mask"] = table if batched else table[0]
    if rng.random() < 0.35:
        call["is_causal"] = True
        hidden = hidden | (distance < 0)
    if rng.random() < 0.25:
        call["mask"], keep = mask_value(rng, N if batched else None, L, S, distance)
        hidden = hidden | ~keep
    if rng.random() < 0.2:
        if H in (2, 4) and rng.random() < 0.5:
            call["bias"] = mh.ALiBi(H)
            slopes = 2.0 ** (-8.0 * torch.arange(1, H + 1, dtype=f64) / H)
            added = added - slopes[:, None, None] * distance.abs()
        else:
            call["bias"] = draw(*rng.choice(((L, S), (H, L, 1), (1, S))), seed=9)
            added = added + call["bias"]
    given = {name: (tuple(t.shape), t.dtype) if isinstance(t, Tensor) else t for name, t in call.items()}
    told = f"case {number}: N={N} H={H} L={L} S={S} {sources} {'' if batched else 'un'}batched {options} {given}"
    return Case(layer, inputs, call, hidden, added, batched, told, learned)


def mask_table(rng, shape):
    """A mask in torch's sense: bool hides, float of any dtype is added; the lowest number hides like -inf."""
    dtype = rng.choice((torch.bool, torch.bool, f64, f64, torch.float32, torch.bfloat16, torch.float16))
    hides = torch.rand(shape) < rng.choice((0.2, 0.7))
    if dtype == torch.bool:
        return hides
    numbers = torch.randn(shape, dtype=f64).to(dtype)
    return numbers.masked_fill(hides, rng.choice((-math.inf, torch.finfo(dtype).min, 0.0)))


def meant(table):
    """(hidden, added) of such a mask."""
    if table.dtype == torch.bool:
        return table, torch.zeros(table.shape, dtype=f64)
    low = table.detach() <= torch.finfo(table.dtype).min
    return low, table.to(f64).masked_fill(low, 0.0)


def mask_value(rng, N, L, S, distance):
    """A mask of the package and its table, True = may attend."""
    rows = () if N is None else (N,)
    kind = rng.choice(("causal", "window", "lengths", "padding", "documents", "dense", "table"))
    if kind == "window":
        return mh.window(2, 1), (distance <= 2) & (distance >= -1)
    if kind == "lengths":
        n = torch.randint(0, S + 1, rows)
        return mh.lengths(n), (torch.arange(S) < n[..., None]).expand(N or 1, S)[:, None, None]
    if kind == "padding":
        keep = torch.rand(*rows, S) < 0.7
        return mh.padding(keep), keep.expand(N or 1, S)[:, None, None]
    if kind == "documents":
        ids, q_ids = torch.randint(0, 3, (S,)), torch.randint(0, 3, (L,))
        return mh.documents(ids, q_ids=q_ids), (q_ids[:, None] == ids)[None, None]
    keep = torch.rand(L, S) < 0.7
    if kind == "causal":
        return mh.causal(), distance >= 0
    return (keep if kind == "table" else mh.dense(keep)), keep[None, None]


# The product ----------------------------------------------------------------------------------------------------------

CHUNKS, PER_CHUNK = 8, 50


def run(case, mode, weights, **change):
    training, recorded = MODES[mode]
    case.layer.train(training)
    query = case.inputs[0]
    key = case.inputs[min(1, len(case.inputs) - 1)]
    with torch.set_grad_enabled(recorded):
        return case.layer(
            query, key, case.inputs[-1], need_weights=weights is not None,
            average_attn_weights=weights != "heads", **{**case.call, **change},
        )  # fmt: skip


def three(case):
    """A case's sources: query, key and value, as often the same object as in the call."""
    query, *rest = case.inputs
    return query, (rest or [query])[0], (rest or [query])[-1]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_call_is_the_formula_in_every_mode(chunk):
    """Wrong in one mode or another: https://github.com/pytorch/pytorch/issues/99282, 97128, 107084; masks of mixed
    dtypes: 95702, 92554; of every shape: 64706, 97605; bias_k under a causal flag, with and without weights."""
    for number in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        case = make_case(number)
        held = [t for t in (*case.inputs, *case.call.values()) if isinstance(t, Tensor)]
        before = [t.detach().clone() for t in held]
        case.inputs = list(three(case))
        with torch.no_grad():
            out, weights = case.expected()
        for mode, look in itertools.product(MODES, (None, "average", "heads")):
            what = f"{mode}, weights {look}, {case.told}"
            found, seen = run(case, mode, look)
            close(found, out, f"output, {what}")
            if look is None:
                assert seen is None
            else:
                close(seen, weights if look == "heads" else weights.mean(-3), f"weights, {what}")
        for tensor, was in zip(held, before, strict=True):
            assert torch.equal(tensor, was), f"an input was changed, {case.told}"


@pytest.mark.parametrize("chunk", range(3))
def test_gradients_are_those_of_the_formula(chunk):
    """Through the output, through the weights, and through both; to parameters, inputs and float masks."""
    for number in range(10_000 + chunk * 40, 10_000 + (chunk + 1) * 40):
        case = make_case(number)
        leaves = case.leaves
        case.inputs = list(three(case))
        out, weights = case.expected()
        up, up_w = draw(*out.shape, seed=1), draw(*weights.shape, seed=2)
        for look, through in (
            (None, "out"),
            ("average", "out"),
            ("average", "both"),
            ("heads", "both"),
            ("heads", "w"),
        ):
            seen = weights.mean(-3) if look == "average" else weights
            factor = up_w.mean(-3) if look == "average" else up_w
            loss = sum([(out * up).sum()] * (through != "w") + [(seen * factor).sum()] * (through != "out"))
            want = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
            found, ours = run(case, "train", look)
            loss = sum([(found * up).sum()] * (through != "w"))
            if through != "out":
                loss = loss + (ours * factor).sum()
            have = torch.autograd.grad(loss, leaves, allow_unused=True)
            for i, (a, b) in enumerate(zip(have, want, strict=True)):
                what = f"gradient {i} through {through}, weights {look}, {case.told}"
                a, b = (torch.zeros_like(leaves[i]) if g is None else g for g in (a, b))
                close(a, b, what)
