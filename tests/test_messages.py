"""What callers are told who pass something that can't be right: which argument, what was expected, and what came.

Each case is a mistake, the exception and a pattern for its message. Every message begins with the argument's name. It
comes before any work on tensors is done, and leaves everything of the caller's as it was.
"""

import contextlib
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from multihead import (
    KERNELS,
    ALiBi,
    Attention,
    KernelRefusal,
    RelativeBias,
    Rotary,
    T5Bias,
    attention,
    attention_weights,
    causal,
    dense,
    documents,
    lengths,
    padding,
    prefix,
    window,
)

B, H, K, L, S, D, V = 2, 6, 3, 5, 7, 11, 13
E = 66  # H D


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, KEYS, VALUES = draw(B, H, L, D), draw(B, K, S, D, seed=1), draw(B, K, S, V, seed=2)
X, CONTEXT = draw(B, L, E, seed=3), draw(B, S, E, seed=4)
LAYER = Attention(E, H)
WIDE = Attention(E, H, kdim=19, vdim=23)
KEEP = torch.ones(B, 1, L, S, dtype=torch.bool)


def meta(*shape, dtype=torch.float32):
    """Something on another device."""
    return torch.empty(shape, device="meta", dtype=dtype)


# attention and attention_weights --------------------------------------------------------------------------------------

OF_BOTH = [
    # q and k: what they are
    ({"q": "text"}, TypeError, r"^q: expected a tensor \(\*batch, H, L, D\), got text"),
    ({"q": None}, TypeError, r"^q: expected a tensor .*got None"),
    ({"q": np.zeros((B, H, L, D))}, TypeError, r"^q: expected a tensor .*got an object of type ndarray"),
    ({"k": [1.0]}, TypeError, r"^k: expected a tensor \(\*batch, K, S, D\), got an object of type list"),
    ({"q": torch.ones(B, H, L, D, dtype=torch.int64)}, TypeError, r"^q: .*floating point.*int64.*Embed"),
    ({"k": torch.ones(B, K, S, D, dtype=torch.bool)}, TypeError, r"^k: .*floating point.*bool"),
    ({"q": torch.ones(B, H, L, D, dtype=torch.complex64)}, TypeError, r"^q, k, v: .*one dtype.*complex64"),
    ({"q": Q.double()}, TypeError, r"^q, k, v: expected one dtype, got q torch\.float64, k torch\.float32"),
    ({"k": KEYS.half()}, TypeError, r"^q, k, v: expected one dtype.*float16"),
    ({"k": meta(B, K, S, D)}, ValueError, r"^q, k, v: expected one device, got q on cpu, k on meta"),
    # their shapes
    ({"q": draw(L, D)}, ValueError, r"^q: expected at least three axes.*\(5, 11\)"),
    ({"k": torch.tensor(1.0)}, ValueError, r"^k: expected at least three axes"),
    ({"q": draw(B + 1, H, L, D)}, ValueError, r"^q, k, v: expected the same batch axes.*\(3, 6, 5, 11\)"),
    ({"k": draw(1, K, S, D)}, ValueError, r"^q, k, v: expected the same batch axes.*expand"),
    ({"q": draw(H, L, D)}, ValueError, r"^q, k, v: expected the same batch axes"),
    ({"k": draw(B, K, S, D + 2)}, ValueError, r"^k: .*D=11.*\(2, 3, 7, 13\)"),
    ({"q": draw(B, H, L, 0), "k": draw(B, K, S, 0)}, ValueError, r"^q: .*D of at least 1"),
    ({"q": draw(B, 4, L, D)}, ValueError, r"^k: .*K a divisor of H=4.*\(2, 3, 7, 11\).*transposed"),
    ({"q": draw(B, 1, L, D)}, ValueError, r"^k: .*K a divisor of H=1"),
    ({"q": Q.transpose(1, 2)}, ValueError, r"^k: .*K a divisor of H=5"),  # heads and length swapped
    # mask
    ({"mask": causal}, TypeError, r"^mask: .*Mask or a bool tensor.*causal\(\), not causal"),
    ({"mask": "causal"}, TypeError, r"^mask: .*got causal.*causal\(\)"),
    ({"mask": True}, TypeError, r"^mask: .*got True"),
    ({"mask": [[True]]}, TypeError, r"^mask: .*got an object of type list"),
    ({"mask": np.ones((L, S), dtype=bool)}, TypeError, r"^mask: .*got an object of type ndarray"),
    ({"mask": torch.zeros(L, S)}, TypeError, r"^mask: .*float32 tensor of shape \(5, 7\).*bias="),
    ({"mask": torch.ones(L, S, dtype=torch.int64)}, TypeError, r"^mask: .*int64.*comparison"),
    ({"mask": torch.ones(L, S, dtype=torch.uint8)}, TypeError, r"^mask: .*uint8.*comparison"),
    ({"mask": torch.ones(S, dtype=torch.bool)}, ValueError, r"^mask: .*at least the axes \(L, S\).*\(7,\).*padding"),
    ({"mask": KEEP[:, 0]}, ValueError, r"^mask: .*\(\*batch, H, L, S\) = \(2, 6, 5, 7\).*\(2, 5, 7\).*\[:, None\]"),
    ({"mask": KEEP.mT}, ValueError, r"^mask: .*\(2, 6, 5, 7\).*\(2, 1, 7, 5\)"),  # L and S swapped
    ({"mask": KEEP.repeat(1, K, 1, 1)}, ValueError, r"^mask: .*\(2, 6, 5, 7\).*\(2, 3, 5, 7\)"),  # K heads, not H
    ({"mask": KEEP[None]}, ValueError, r"^mask: .*\(1, 2, 1, 5, 7\)"),
    ({"mask": KEEP.to("meta")}, ValueError, r"^mask: .*device of q, cpu, got meta"),
    ({"mask": causal() & KEEP.mT}, ValueError, r"^mask: .*\(2, 1, 7, 5\)"),
    ({"mask": ~dense(KEEP.mT)}, ValueError, r"^mask: .*\(2, 1, 7, 5\)"),
    ({"mask": lengths([1, 2, 3])}, ValueError, r"^lengths\(n\): .*batch=\(2,\).*\(3,\)"),
    ({"mask": prefix(torch.tensor([[1, 2]]))}, ValueError, r"^prefix\(n\): .*batch=\(2,\).*\(1, 2\)"),
    ({"mask": lengths(meta(B, dtype=torch.int64))}, ValueError, r"^lengths\(n\): .*device of q, cpu, got meta"),
    ({"mask": padding(torch.ones(B, L, dtype=torch.bool))}, ValueError, r"^padding\(keep\): .*S=7.*\(2, 5\).*key"),
    ({"mask": padding(torch.ones(S, B, dtype=torch.bool))}, ValueError, r"^padding\(keep\): .*S=7.*\(7, 2\)"),
    ({"mask": padding(torch.ones(3, S, dtype=torch.bool))}, ValueError, r"^padding\(keep\): .*batch=\(2,\).*\(3, 7\)"),
    ({"mask": documents(torch.zeros(L, dtype=torch.int64))}, ValueError, r"^documents\(ids\): .*S=7.*\(5,\)"),
    (
        {"mask": documents(torch.arange(S), q_ids=torch.arange(S))},
        ValueError,
        r"^documents\(q_ids=\): .*L=5.*\(7,\).*query",
    ),
    # bias
    ({"bias": 1.0}, TypeError, r"^bias: expected a floating point tensor.*got 1\.0"),
    ({"bias": KEEP}, TypeError, r"^bias: .*bool tensor.*mask="),
    ({"bias": torch.zeros(L, S, dtype=torch.int64)}, TypeError, r"^bias: .*floating.*int64"),
    ({"bias": causal()}, TypeError, r"^bias: .*a floating point tensor"),
    ({"bias": Rotary()}, TypeError, r"^bias: .*Rotary.*position="),
    ({"bias": ALiBi}, TypeError, r"^bias: "),
    ({"bias": torch.zeros(S)}, ValueError, r"^bias: .*at least the axes \(L, S\).*\(7,\)"),
    ({"bias": torch.zeros(S, L)}, ValueError, r"^bias: .*\(2, 6, 5, 7\).*\(7, 5\)"),
    ({"bias": torch.zeros(B, L, S)}, ValueError, r"^bias: .*\(2, 6, 5, 7\).*\(2, 5, 7\)"),
    ({"bias": meta(L, S)}, ValueError, r"^bias: .*device of q, cpu, got meta"),
    ({"bias": ALiBi(H + 1)}, ValueError, r"^bias: .*H=6.*7"),
    ({"bias": T5Bias(K)}, ValueError, r"^bias: .*H=6.*3"),
    # scale, softcap, sinks
    ({"scale": "auto"}, TypeError, r"^scale: expected a number, got auto"),
    ({"scale": True}, TypeError, r"^scale: expected a number, got True"),
    ({"scale": torch.tensor(0.5)}, TypeError, r"^scale: expected a number.*float32"),
    ({"scale": math.nan}, ValueError, r"^scale: expected a finite number, got nan"),
    ({"scale": -math.inf}, ValueError, r"^scale: expected a finite number, got -inf"),
    ({"softcap": 0}, ValueError, r"^softcap: expected a number above 0, or None, got 0"),
    ({"softcap": -30.0}, ValueError, r"^softcap: .*above 0.*-30\.0"),
    ({"softcap": math.inf}, ValueError, r"^softcap: .*inf"),
    ({"softcap": math.nan}, ValueError, r"^softcap: .*nan"),
    ({"softcap": True}, TypeError, r"^softcap: .*True"),
    ({"softcap": "50"}, TypeError, r"^softcap: .*50"),
    ({"sinks": True}, TypeError, r"^sinks: expected a floating point tensor \(H,\) with H=6, got True"),
    ({"sinks": 0.0}, TypeError, r"^sinks: .*H=6.*0\.0"),
    ({"sinks": [0.0] * H}, TypeError, r"^sinks: .*list"),
    ({"sinks": torch.zeros(H, dtype=torch.int64)}, TypeError, r"^sinks: .*floating.*int64"),
    ({"sinks": torch.zeros(K)}, ValueError, r"^sinks: .*\(H,\) with H=6.*\(3,\)"),
    ({"sinks": torch.zeros(H, 1)}, ValueError, r"^sinks: .*\(6, 1\)"),
    ({"sinks": torch.tensor(0.0)}, ValueError, r"^sinks: .*H=6"),
    ({"sinks": meta(H)}, ValueError, r"^sinks: .*device of q, cpu, got meta"),
    # positions
    ({"q_positions": 3}, TypeError, r"^q_positions: .*\(L,\).*got 3"),
    ({"k_positions": list(range(S))}, TypeError, r"^k_positions: .*\(S,\).*list"),
    ({"q_positions": torch.ones(L, dtype=torch.bool)}, TypeError, r"^q_positions: .*bool"),
    ({"k_positions": torch.ones(S, dtype=torch.complex64)}, TypeError, r"^k_positions: .*complex"),
    ({"q_positions": torch.tensor(3)}, ValueError, r"^q_positions: .*\(L,\).*\(\)"),
    ({"q_positions": torch.arange(S)}, ValueError, r"^q_positions: .*L=5.*\(7,\)"),
    ({"k_positions": torch.arange(L)}, ValueError, r"^k_positions: .*S=7.*\(5,\)"),
    ({"q_positions": torch.zeros(B, 1, L)}, ValueError, r"^q_positions: .*batch=\(2,\).*\(2, 1, 5\)"),
    ({"k_positions": torch.zeros(3, S)}, ValueError, r"^k_positions: .*batch=\(2,\).*\(3, 7\)"),
    ({"q_positions": meta(L)}, ValueError, r"^q_positions: .*device of q, cpu, got meta"),
    ({"q": draw(B, H, 9, D), "k_positions": torch.arange(S)}, ValueError, r"^q_positions: .*L=9 > S=7.*None"),
    ({"q": draw(B, H, 9, D), "mask": documents(torch.arange(S))}, ValueError, r"^documents\(ids\): .*L=9.*q_ids="),
    ({"q_positions": torch.zeros(L), "bias": RelativeBias(H, 3)}, TypeError, r"^q_positions: .*integer.*float32"),
]

OF_ATTENTION = [
    ({"v": "text"}, TypeError, r"^v: expected a tensor \(\*batch, K, S, V\), got text"),
    ({"v": torch.ones(B, K, S, V, dtype=torch.int32)}, TypeError, r"^v: .*floating point.*int32"),
    ({"v": VALUES.double()}, TypeError, r"^q, k, v: expected one dtype.*v torch\.float64"),
    ({"v": meta(B, K, S, V)}, ValueError, r"^q, k, v: expected one device.*v on meta"),
    ({"v": draw(S, V)}, ValueError, r"^v: expected at least three axes"),
    ({"v": draw(B, K, L, V)}, ValueError, r"^v: .*K=3, S=7.*\(2, 3, 5, 13\)"),
    ({"v": draw(B, H, S, V)}, ValueError, r"^v: .*K=3, S=7.*\(2, 6, 7, 13\)"),
    ({"v": draw(3, K, S, V)}, ValueError, r"^q, k, v: expected the same batch axes"),
    ({"dropout": nn.Dropout(0.1)}, TypeError, r"^dropout: expected a number from 0 to 1.*Dropout.*0\.1"),
    ({"dropout": "0.1"}, TypeError, r"^dropout: .*0\.1"),
    ({"dropout": True}, TypeError, r"^dropout: .*True"),
    ({"dropout": False}, TypeError, r"^dropout: .*False"),
    ({"dropout": None}, TypeError, r"^dropout: .*None"),
    ({"dropout": torch.tensor([0.1, 0.2])}, TypeError, r"^dropout: .*float32"),
    ({"dropout": torch.tensor(0.1)}, TypeError, r"^dropout: .*float32"),
    ({"dropout": 1.1}, ValueError, r"^dropout: expected a number from 0 to 1, got 1\.1"),
    ({"dropout": -0.1}, ValueError, r"^dropout: .*-0\.1"),
    ({"dropout": 10}, ValueError, r"^dropout: .*10"),
    ({"dropout": math.nan}, ValueError, r"^dropout: .*nan"),
    ({"kernel": "spda"}, ValueError, r"^kernel: expected one of native, small, sdpa, .*reference, or None, got spda"),
    ({"kernel": ""}, ValueError, r"^kernel: expected one of"),
    ({"kernel": 3}, (TypeError, ValueError), r"^kernel: expected one of .*got 3"),
    ({"kernel": attention}, (TypeError, ValueError), r"^kernel: expected one of .*function"),
    ({"return_lse": "yes"}, TypeError, r"^return_lse: expected True or False, got yes"),
    ({"return_lse": None}, TypeError, r"^return_lse: expected True or False, got None"),
    ({"return_lse": torch.ones(2)}, TypeError, r"^return_lse: expected True or False.*float32"),
]


def call_attention(**changes):
    return attention(**{"q": Q, "k": KEYS, "v": VALUES} | changes)


def call_weights(**changes):
    return attention_weights(**{"q": Q, "k": KEYS} | changes)


# The layer ------------------------------------------------------------------------------------------------------------

OF_CONSTRUCTOR = [
    ({"embed_dim": 66.0}, TypeError, r"^embed_dim: expected an int, got 66\.0"),
    ({"embed_dim": "66"}, TypeError, r"^embed_dim: expected an int, got 66"),
    ({"embed_dim": True}, TypeError, r"^embed_dim: expected an int, got True"),
    ({"embed_dim": 0}, ValueError, r"^embed_dim: expected at least 1, got 0"),
    ({"embed_dim": -66}, ValueError, r"^embed_dim: .*-66"),
    ({"embed_dim": 64}, ValueError, r"^embed_dim: expected a multiple of num_heads=6, got 64.*head_dim="),
    ({"num_heads": 6.0}, TypeError, r"^num_heads: expected an int, got 6\.0"),
    ({"num_heads": None}, TypeError, r"^num_heads: expected an int, got None"),
    ({"num_heads": 0}, ValueError, r"^num_heads: expected at least 1, got 0"),
    ({"num_heads": 132}, ValueError, r"^embed_dim: expected a multiple of num_heads=132"),
    ({"num_kv_heads": 4}, ValueError, r"^num_kv_heads: expected a divisor of num_heads=6, got 4.*1, 2, 3, 6"),
    ({"num_kv_heads": 12}, ValueError, r"^num_kv_heads: expected a divisor of num_heads=6, got 12"),
    ({"num_kv_heads": 0}, ValueError, r"^num_kv_heads: expected at least 1, got 0"),
    ({"num_kv_heads": 3.0}, TypeError, r"^num_kv_heads: expected an int, got 3\.0"),
    ({"head_dim": 0}, ValueError, r"^head_dim: expected at least 1, got 0"),
    ({"head_dim": 11.0}, TypeError, r"^head_dim: expected an int, got 11\.0"),
    ({"value_dim": -1}, ValueError, r"^value_dim: .*-1"),
    ({"value_dim": "11"}, TypeError, r"^value_dim: expected an int"),
    ({"kdim": 0}, ValueError, r"^kdim: .*0"),
    ({"kdim": 1.5}, TypeError, r"^kdim: .*1\.5"),
    ({"vdim": 0}, ValueError, r"^vdim: .*0"),
    ({"vdim": [66]}, TypeError, r"^vdim: .*list"),
    ({"out_dim": 0}, ValueError, r"^out_dim: .*0"),
    ({"out_dim": False}, TypeError, r"^out_dim: .*False"),
    ({"bias": 0.1}, TypeError, r"^bias: expected True or False, got 0\.1"),
    ({"bias": None}, TypeError, r"^bias: expected True or False, got None"),
    ({"out_bias": "no"}, TypeError, r"^out_bias: expected True or False or None, got no"),
    ({"packed": 1}, TypeError, r"^packed: expected True or False or None, got 1"),
    ({"packed": True, "kdim": 19, "vdim": 23}, ValueError, r"^packed: expected kdim = vdim.*kdim=19, vdim=23"),
    ({"qk_norm": "rms"}, TypeError, r"^qk_norm: expected True or False, got rms"),
    ({"gate": nn.Sigmoid()}, TypeError, r"^gate: expected True or False.*Sigmoid"),
    ({"sinks": 2}, TypeError, r"^sinks: expected True or False, got 2"),
    ({"sinks": torch.zeros(H)}, TypeError, r"^sinks: expected True or False.*float32"),
    ({"position": Rotary}, TypeError, r"^position: .*Rotary\(\)"),
    ({"position": "rope"}, TypeError, r"^position: expected a Position or None, got rope"),
    ({"position": nn.Linear(1, 1)}, TypeError, r"^position: .*Linear"),
    ({"position": ALiBi(4)}, ValueError, r"^position: .*H=6.*4"),
    ({"position": Rotary(12)}, ValueError, r"^(position|rotary_dim): .*at most D=11, got 12"),
    ({"position": Rotary()}, ValueError, r"^(position|rotary_dim): .*even number.*D=11"),
    ({"softcap": 0.0}, ValueError, r"^softcap: expected a number above 0, or None, got 0\.0"),
    ({"softcap": "50"}, TypeError, r"^softcap: .*50"),
    ({"softcap": True}, TypeError, r"^softcap: .*True"),
    ({"scale": "auto"}, TypeError, r"^scale: expected a number or None, got auto"),
    ({"scale": math.inf}, ValueError, r"^scale: expected a finite number.*inf"),
    ({"scale": math.nan}, ValueError, r"^scale: expected a finite number.*nan"),
    ({"mask": causal}, TypeError, r"^mask: .*causal\(\), not causal"),
    ({"mask": "causal"}, TypeError, r"^mask: .*got causal"),
    ({"mask": torch.zeros(L, L)}, TypeError, r"^mask: .*float32.*bias="),
    ({"dropout": nn.Dropout(0.1)}, TypeError, r"^dropout: .*Dropout.*0\.1"),
    ({"dropout": 50}, ValueError, r"^dropout: .*50"),
    ({"dropout": None}, TypeError, r"^dropout: .*None"),
    ({"out_dropout": -0.5}, ValueError, r"^out_dropout: .*-0\.5"),
    ({"out_dropout": "half"}, TypeError, r"^out_dropout: .*half"),
    ({"dtype": torch.int64}, TypeError, r"^dtype: .*floating.*int64"),
    ({"dtype": "float32"}, TypeError, r"^dtype: .*float32"),
]


def call_constructor(**changes):
    return Attention(**{"embed_dim": E, "num_heads": H} | changes)


BIASED = Attention(E, H, position=ALiBi(H))
ROTATED = Attention(E, H, position=Rotary(10))
LARGE = meta(B, L, E)

OF_FORWARD = [
    # sources
    ({"query": "text"}, TypeError, r"^query: expected a tensor \(\*batch, L, E=66\), got text"),
    ({"query": None}, TypeError, r"^query: expected a tensor .*None"),
    ({"query": np.zeros((B, L, E))}, TypeError, r"^query: .*ndarray"),
    ({"query": torch.ones(B, L, E, dtype=torch.int64)}, TypeError, r"^query: .*float.*int64"),
    (
        {"query": torch.ones(B, L, dtype=torch.int64)},
        (TypeError, ValueError),
        r"^query: .*int64",
    ),  # tokens, not embedded
    ({"query": X.double()}, TypeError, r"^query: .*float32.*float64"),
    ({"query": X.to(torch.complex64)}, TypeError, r"^query: .*complex64"),
    ({"query": LARGE}, ValueError, r"^query: .*cpu.*meta"),
    ({"query": X[..., :-1]}, ValueError, r"^query: expected the shape \(\*batch, L, E=66\).*\(2, 5, 65\)"),
    ({"query": draw(E)}, ValueError, r"^query: .*\(66,\)"),
    ({"query": X.mT}, ValueError, r"^query: .*E=66.*\(2, 66, 5\)"),  # channels first
    ({"key": "text"}, TypeError, r"^key: expected a tensor \(\*batch, S, kdim=66\), got text"),
    ({"key": CONTEXT.double()}, TypeError, r"^key: .*float32.*float64"),
    ({"key": CONTEXT.to("meta")}, ValueError, r"^key: .*cpu.*meta"),
    ({"key": CONTEXT[..., :19]}, ValueError, r"^key: .*kdim=66.*\(2, 7, 19\)"),
    ({"key": CONTEXT.transpose(0, 1)}, ValueError, r"^key: .*batch axes of query, \(2,\).*\(7, 2, 66\).*batch first"),
    ({"key": draw(3, S, E)}, ValueError, r"^key: .*\(2,\).*\(3, 7, 66\)"),
    ({"key": CONTEXT[0]}, ValueError, r"^key: .*\(2,\).*\(7, 66\)"),
    ({"value": CONTEXT}, ValueError, r"^key: expected given where value is, got None"),
    ({"key": CONTEXT, "value": 3}, TypeError, r"^value: expected a tensor \(\*batch, S, vdim=66\), got 3"),
    ({"key": CONTEXT, "value": CONTEXT.half()}, TypeError, r"^value: .*float32.*float16"),
    ({"key": CONTEXT, "value": CONTEXT.to("meta")}, ValueError, r"^value: .*cpu.*meta"),
    ({"key": CONTEXT, "value": CONTEXT[:, 1:]}, ValueError, r"^value: .*S of key, \(2, 7\).*\(2, 6, 66\)"),
    ({"key": CONTEXT, "value": CONTEXT[..., 1:]}, ValueError, r"^value: .*vdim=66.*\(2, 7, 65\)"),
    ({"layer": WIDE}, ValueError, r"^key: .*kdim=19.*\(2, 5, 66\)"),
    ({"layer": WIDE, "key": draw(B, S, 19)}, ValueError, r"^value: .*vdim=23.*\(2, 7, 19\)"),
    # mask and bias: as of attention
    ({"mask": causal}, TypeError, r"^mask: .*causal\(\), not causal"),
    ({"mask": torch.zeros(L, L)}, TypeError, r"^mask: .*bias="),
    ({"mask": torch.ones(L, L, dtype=torch.int64)}, TypeError, r"^mask: .*int64"),
    ({"mask": torch.ones(B, L, L, dtype=torch.bool)}, ValueError, r"^mask: .*\(2, 6, 5, 5\).*\(2, 5, 5\).*\[:, None\]"),
    ({"mask": KEEP}, ValueError, r"^mask: .*\(2, 6, 5, 5\).*\(2, 1, 5, 7\)"),  # of the context that was not given
    ({"mask": lengths([1, 2, 3])}, ValueError, r"^lengths\(n\): .*\(2,\).*\(3,\)"),
    ({"mask": padding(torch.ones(B, S, dtype=torch.bool))}, ValueError, r"^padding\(keep\): .*S=5.*\(2, 7\)"),
    ({"mask": meta(L, L, dtype=torch.bool)}, ValueError, r"^mask: .*device.*meta"),
    ({"layer": Attention(E, H, mask=KEEP)}, ValueError, r"^mask: .*\(2, 6, 5, 5\).*\(2, 1, 5, 7\)"),
    ({"bias": torch.zeros(B, L, L)}, ValueError, r"^bias: .*\(2, 6, 5, 5\).*\(2, 5, 5\)"),
    ({"bias": torch.ones(L, L, dtype=torch.bool)}, TypeError, r"^bias: .*mask="),
    ({"bias": Rotary()}, TypeError, r"^bias: .*Rotary"),
    ({"bias": ALiBi(4)}, ValueError, r"^bias: .*H=6.*4"),
    ({"bias": 0.5}, TypeError, r"^bias: .*0\.5"),
    # the same beside the bias of a position
    ({"layer": BIASED, "bias": torch.zeros(B, L, L)}, ValueError, r"^bias: .*\(2, 6, 5, 5\).*\(2, 5, 5\)"),
    ({"layer": BIASED, "bias": torch.zeros(L, S)}, ValueError, r"^bias: .*\(2, 6, 5, 5\).*\(5, 7\)"),
    ({"layer": BIASED, "bias": torch.zeros(L)}, ValueError, r"^bias: .*\(L, S\).*\(5,\)"),
    ({"layer": BIASED, "bias": torch.ones(L, L, dtype=torch.bool)}, TypeError, r"^bias: .*mask="),
    ({"layer": BIASED, "bias": Rotary()}, TypeError, r"^bias: .*Rotary"),
    ({"layer": BIASED, "bias": ALiBi(4)}, ValueError, r"^bias: .*H=6.*4"),
    ({"layer": BIASED, "bias": 0.5}, TypeError, r"^bias: .*0\.5"),
    ({"layer": BIASED, "bias": "text"}, TypeError, r"^bias: .*text"),
    # positions
    ({"positions": 3}, TypeError, r"^positions: expected a tensor \(L,\).*pair"),
    ({"positions": list(range(L))}, TypeError, r"^positions: .*list"),
    ({"positions": (torch.arange(L),)}, TypeError, r"^positions: .*pair"),
    ({"positions": (torch.arange(L), None)}, TypeError, r"^positions: .*pair"),
    ({"positions": torch.arange(L), "key": CONTEXT}, ValueError, r"^positions: .*pair \(q_positions, k_positions\)"),
    *[
        ({"layer": layer, "positions": positions}, error, pattern)
        for layer in (LAYER, ROTATED, BIASED)
        for positions, error, pattern in [
            (torch.arange(S), ValueError, r"^positions: .*L=5.*\(7,\)"),
            (torch.arange(L).expand(3, L), ValueError, r"^positions: .*\(2,\).*\(3, 5\)"),
            (torch.tensor(3), ValueError, r"^positions: .*\(L,\).*\(\)"),
            (torch.ones(L, dtype=torch.bool), TypeError, r"^positions: .*bool"),
            (meta(L), ValueError, r"^positions: .*cpu.*meta"),
        ]
    ],
    ({"key": CONTEXT, "positions": (torch.arange(L), torch.arange(L))}, ValueError, r"^positions\[1\]: .*S=7.*\(5,\)"),
    # weights
    ({"weights": "mean"}, TypeError, r"^weights: expected True or False, got mean"),
    ({"weights": None}, TypeError, r"^weights: expected True or False, got None"),
    ({"weights": torch.ones(2)}, TypeError, r"^weights: expected True or False.*float32"),
]


def call_forward(layer=LAYER, query=X, **changes):
    return layer(query, **changes)


# Masks ----------------------------------------------------------------------------------------------------------------

ONES = torch.ones(S)

OF_MASKS = [
    (window, {"left": -1}, ValueError, r"^window\(left=\): expected at least 0, got -1.*None"),
    (window, {"right": -1}, ValueError, r"^window\(right=\): .*-1"),
    (window, {"left": 2.0}, TypeError, r"^window\(left=\): expected an int or None, got 2\.0"),
    (window, {"right": "0"}, TypeError, r"^window\(right=\): expected an int or None, got 0"),
    (window, {"right": True}, TypeError, r"^window\(right=\): .*True"),
    (window, {"left": torch.tensor(3)}, TypeError, r"^window\(left=\): .*int64"),
    (window, {"left": (3, 0)}, TypeError, r"^window\(left=\): .*tuple"),
    *[
        (make, {"n": n}, error, rf"^{name}\(n\): {pattern}")
        for make, name in ((lengths, "lengths"), (prefix, "prefix"))
        for n, error, pattern in [
            (None, TypeError, r"expected an int, or ints of shape \(\*batch\), got None"),
            (2.0, TypeError, r".*2\.0"),
            (True, TypeError, r".*True"),
            ("3", TypeError, r".*3"),
            ([1, 2.5], TypeError, r".*list"),
            ([1, True], TypeError, r".*list"),
            ([[1], [2, 3]], TypeError, r".*list"),
            (ONES, TypeError, r".*float32 tensor of shape \(7,\)"),
            (ONES.bool(), TypeError, r".*bool tensor of shape \(7,\)"),
            (-1, ValueError, r"expected .*at least 0, got -1"),
            ([3, -2], ValueError, r".*-2"),
            (torch.tensor([3, -2]), ValueError, r".*-2"),
        ]
    ],
    (padding, {"keep": ONES}, TypeError, r"^padding\(keep\): expected a bool tensor.*float32.*tokens != pad_id"),
    (padding, {"keep": ONES.long()}, TypeError, r"^padding\(keep\): .*int64"),
    (padding, {"keep": [True]}, TypeError, r"^padding\(keep\): .*list"),
    (padding, {"keep": 3}, TypeError, r"^padding\(keep\): .*3"),
    (padding, {"keep": torch.tensor(True)}, ValueError, r"^padding\(keep\): expected the shape \(S,\).*\(\)"),
    (documents, {}, ValueError, r"^documents\(ids, cu_seqlens=\): expected exactly one of the two, got none"),
    (
        documents,
        {"ids": ONES.long(), "cu_seqlens": torch.tensor([0, S])},
        ValueError,
        r"^documents\(ids, cu_seqlens=\): .*both",
    ),
    (documents, {"ids": ONES}, TypeError, r"^documents\(ids\): expected an integer tensor.*float32"),
    (documents, {"ids": ONES.bool()}, TypeError, r"^documents\(ids\): .*bool"),
    (documents, {"ids": [0, 0, 1]}, TypeError, r"^documents\(ids\): .*list"),
    (documents, {"ids": torch.tensor(3)}, ValueError, r"^documents\(ids\): expected the shape \(S,\).*\(\)"),
    (documents, {"ids": ONES.long(), "q_ids": ONES}, TypeError, r"^documents\(q_ids=?\): .*float32"),
    (documents, {"ids": ONES.long(), "q_ids": torch.tensor(3)}, ValueError, r"^documents\(q_ids=?\): .*\(L,\).*\(\)"),
    (
        documents,
        {"cu_seqlens": [0, 7]},
        TypeError,
        r"^documents\(cu_seqlens=\): expected an integer tensor \(N\+1,\).*list",
    ),
    (documents, {"cu_seqlens": torch.tensor([0.0, 7.0])}, TypeError, r"^documents\(cu_seqlens=\): .*float32"),
    (
        documents,
        {"cu_seqlens": torch.tensor([[0, 7]])},
        ValueError,
        r"^documents\(cu_seqlens=\): .*\(N\+1,\).*\(1, 2\)",
    ),
    (documents, {"cu_seqlens": torch.tensor([0])}, ValueError, r"^documents\(cu_seqlens=\): .*N >= 1.*\(1,\)"),
    (
        documents,
        {"cu_seqlens": torch.tensor([3, 7])},
        ValueError,
        r"^documents\(cu_seqlens=\): .*rise from 0.*\[3, 7\]",
    ),
    (
        documents,
        {"cu_seqlens": torch.tensor([3, 4, 0])},
        ValueError,
        r"^documents\(cu_seqlens=\): .*\[3, 4, 0\]",
    ),  # lengths
    (documents, {"cu_seqlens": torch.tensor([0, 4, 3])}, ValueError, r"^documents\(cu_seqlens=\): .*\[0, 4, 3\]"),
    (dense, {"keep": torch.zeros(L, S)}, TypeError, r"^dense\(keep\): expected a bool tensor.*float32.*bias="),
    (dense, {"keep": torch.ones(L, S, dtype=torch.uint8)}, TypeError, r"^dense\(keep\): .*uint8"),
    (dense, {"keep": [[True]]}, TypeError, r"^dense\(keep\): .*list"),
    (dense, {"keep": causal()}, TypeError, r"^dense\(keep\): "),
    (dense, {"keep": ONES.bool()}, ValueError, r"^dense\(keep\): expected at least the axes \(L, S\).*\(7,\).*padding"),
    (lambda other: causal() & other, {"other": torch.zeros(L, S)}, TypeError, r"^the other side of &: .*float32"),
    (lambda other: causal() | other, {"other": None}, TypeError, r"^the other side of \|: .*None"),
    (lambda other: causal() & other, {"other": causal}, TypeError, r"^the other side of &: .*causal\(\)"),
    (
        lambda other: causal() & other,
        {"other": ONES.bool()},
        ValueError,
        r"^the other side of &: .*\(7,\)",
    ),
    (lengths([1, 2]).dense, {"L": L, "S": -1}, ValueError, r"^S: .*-1"),
    (causal().dense, {"L": 2.0, "S": S}, TypeError, r"^L: .*2\.0"),
    (padding(ONES.bool()).dense, {"L": L, "S": L}, ValueError, r"^padding\(keep\): .*S=5.*\(7,\)"),
    (dense(KEEP).dense, {"L": S, "S": L}, ValueError, r"^mask: .*\(2, 1, 5, 7\)"),
    (causal().dense, {"L": L, "S": S, "q_positions": torch.arange(S)}, ValueError, r"^q_positions: .*L=5.*\(7,\)"),
    (causal().dense, {"L": L, "S": S, "k_positions": torch.arange(L)}, ValueError, r"^k_positions: .*S=7.*\(5,\)"),
    (causal().dense, {"L": S, "S": L, "k_positions": torch.arange(L)}, ValueError, r"^q_positions: .*L=7 > S=5"),
]


# The table ------------------------------------------------------------------------------------------------------------


def table(rows):
    """The cases with ids: of what is called, and of the arguments by name."""

    def names(function, arguments):
        name = function.__name__.removeprefix("call_").strip("<>")
        told = [f"{key}={value}" if isinstance(value, str | int | float) else key for key, value in arguments.items()]
        return f"{name}-{'-'.join(told)}"

    return [pytest.param(*row, id=names(*row[:2])) for row in rows]


CASES = table(
    [(call_attention, *row) for row in OF_BOTH + OF_ATTENTION]
    + [(call_weights, *row) for row in OF_BOTH]
    + [(call_constructor, *row) for row in OF_CONSTRUCTOR]
    + [(call_forward, *row) for row in OF_FORWARD]
    + OF_MASKS
)


class Operations(TorchDispatchMode):
    """Counts what is computed; views, memory that nobody has read, and positions are no work."""

    FREE = (
        "view",
        "expand",
        "unsqueeze",
        "select",
        "slice",
        "alias",
        "detach",
        "transpose",
        "new_empty",
        "empty",
        "_to_copy",
        "arange",
    )
    # Of values: bounds are read where that costs no synchronisation.
    READING = ("min", "any", "diff", "lt", "sub", "_local_scalar_dense", "lift_fresh", "narrow")

    def __init__(self):
        super().__init__()
        self.work = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.FREE + self.READING:
            self.work[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("function", "arguments", "error", "pattern"), CASES)
def test_message(function, arguments, error, pattern):
    """The exception's own type, not a subclass: UnicodeError is a ValueError as well."""
    with pytest.raises(Exception) as info:  # noqa: PT011  (its type and message are looked at below)
        function(**arguments)
    exact = error if isinstance(error, tuple) else (error,)
    message = str(info.value)
    assert type(info.value) in exact, f"{info.type.__name__}: {message}"
    assert re.search(pattern, message, re.DOTALL), message
    assert ": expected " in message
    assert ", got " in message
    assert message.endswith((".", "?")), "a message is made of sentences"


@pytest.mark.parametrize(("function", "arguments", "error", "pattern"), CASES)
def test_it_comes_before_any_work(function, arguments, error, pattern):  # noqa: ARG001
    with Operations() as operations, contextlib.suppress(Exception):  # which one is tested above
        function(**arguments)
    assert not operations.work


def test_nothing_is_changed():
    """By any of the mistakes: the inputs, the layers, the generator of random numbers."""
    layers = (LAYER, WIDE, BIASED, ROTATED)

    def everything():
        tensors = [Q, KEYS, VALUES, X, CONTEXT, KEEP, ONES, torch.get_rng_state()]
        return [t.clone() for t in tensors] + [p.clone() for layer in layers for p in layer.state_dict().values()]

    before, texts = everything(), [repr(layer) for layer in layers]
    for case in CASES:
        function, arguments, *_ = case.values
        with contextlib.suppress(Exception):
            function(**arguments)
    assert all(torch.equal(now, then) for now, then in zip(everything(), before, strict=True))
    assert [repr(layer) for layer in layers] == texts
    assert all(p.grad is None for layer in layers for p in layer.parameters())


def test_what_the_mistakes_are_made_from_is_right():
    """Without a mistake none of the calls complains: what the cases change is what they are about."""
    assert call_attention(mask=KEEP).shape == (B, H, L, V)
    assert call_weights(mask=KEEP).shape == (B, H, L, S)
    assert call_forward(key=CONTEXT, value=CONTEXT, mask=KEEP).shape == (B, L, E)
    assert call_forward(BIASED, bias=torch.zeros(B, 1, L, L)).shape == (B, L, E)
    assert call_forward(WIDE, key=draw(B, S, 19), value=draw(B, S, 23)).shape == (B, L, E)
    assert call_constructor(num_kv_heads=2).num_kv_heads == 2


# Kernels asked for by name --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "options", "reasons"),
    [
        ("sdpa", {"softcap": 5.0}, ["softcap"]),
        ("sdpa", {"dropout": 0.5}, ["dropout"]),
        ("native", {"q": Q.double(), "k": KEYS.double(), "v": VALUES.double()}, ["float64"]),
        ("flex", {}, ["cpu", "CUDA"]),
        ("varlen", {"mask": causal(), "softcap": 5.0}, ["cpu", "CUDA", r"causal\(\)", "softcap"]),
    ],
)
def test_a_kernel_that_can_not_says_why(kernel, options, reasons):
    """It is a ValueError with every reason, and names one that can. It never falls back silently."""
    with pytest.raises(KernelRefusal, match=rf"^kernel='{kernel}' can't run this call: ") as info:
        call_attention(kernel=kernel, **options)
    assert isinstance(info.value, ValueError)
    for reason in reasons:
        assert re.search(reason, str(info.value)), reason
    assert any(re.search(rf"\b{name} can\b", str(info.value)) for name in KERNELS if name != kernel)
    assert call_attention(kernel="reference", **options).shape == (B, H, L, V)


def test_arguments_are_checked_before_kernels():
    """A mistake is told as such, and not as something that a kernel can't do."""
    with pytest.raises(ValueError, match=r"^softcap: ") as info:
        call_attention(kernel="flex", softcap=0)
    assert not isinstance(info.value, KernelRefusal)


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask", "is_causal", "need_weights", "causal"])
@pytest.mark.parametrize("function", [call_attention, call_weights, call_forward])
def test_names_of_other_libraries_are_not_taken_silently(function, name):
    with pytest.raises(TypeError, match=name):
        function(**{name: None})


def test_options_are_not_taken_by_place():
    """attention(q, k, v, mask, 0.1) elsewhere means dropout, here it could be a bias."""
    with pytest.raises(TypeError):
        attention(Q, KEYS, VALUES, None, 0.1)
    with pytest.raises(TypeError):
        LAYER(X, X, X, KEEP)
    with pytest.raises(TypeError):
        Attention(E, H, 0.1)
