"""Multi-head attention for PyTorch that is right, fast and open to look into.

`Attention` is the layer, `attention` the function under it. `causal`, `window`, `lengths`, `padding`, `documents`,
`prefix` and `dense` make masks; `Rotary`, `ALiBi`, `T5Bias` and `RelativeBias` are positions. `explain` says which
kernel runs and why. True means *may attend*.
"""

from multihead.attention import KERNELS, KernelRefusal, attention
from multihead.cache import KVCache
from multihead.cache_pages import PagePool
from multihead.compat import MultiheadAttention
from multihead.doctor import Diagnosis, doctor
from multihead.explaining.explain import explain
from multihead.explaining.explanation import Explanation
from multihead.inspection import Capture, Record, capture, head_importance
from multihead.masks import Mask, causal, dense, documents, lengths, padding, prefix, window
from multihead.module import Attention
from multihead.positions import ALiBi, Position, RelativeBias, T5Bias
from multihead.rotary import LinearScaling, Llama3Scaling, NTKScaling, Rotary, YarnScaling
from multihead.swapping import SwapReport, swap, unswap
from multihead.weights import attention_weights

__version__ = "0.1.0"

__all__ = [
    "KERNELS",
    "ALiBi",
    "Attention",
    "Capture",
    "Diagnosis",
    "Explanation",
    "KVCache",
    "KernelRefusal",
    "LinearScaling",
    "Llama3Scaling",
    "Mask",
    "MultiheadAttention",
    "NTKScaling",
    "PagePool",
    "Position",
    "Record",
    "RelativeBias",
    "Rotary",
    "SwapReport",
    "T5Bias",
    "YarnScaling",
    "attention",
    "attention_weights",
    "capture",
    "causal",
    "dense",
    "doctor",
    "documents",
    "explain",
    "head_importance",
    "lengths",
    "padding",
    "prefix",
    "swap",
    "unswap",
    "window",
]
