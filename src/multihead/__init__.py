"""Multi-head attention for PyTorch that is right, fast and open to look into."""

from multihead.attention import KERNELS, KernelRefusal, attention, attention_weights
from multihead.masks import Mask, causal, dense, documents, lengths, padding, prefix, window

__version__ = "0.1.0"
