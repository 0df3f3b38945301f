"""The demo: a small GPT of `Attention` layers learns a text, one character at a time, in about a minute on a CPU.

`prepare` checks every wish and reads the text, `train` learns and `sample` writes; `run` puts them together on a console.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics  # pyright: ignore[reportMissingTypeStubs]
from time import perf_counter

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor, nn

from multihead.errors import bad_type, bad_value, check_size, is_number
from multihead.masks import causal
from multihead.module import Attention
from multihead.rotary import Rotary

INTERRUPTED = 130  # the exit code that shells give to a command ended by Ctrl-C

_TOKENS_PER_STEP = 1024  # small, as a minute on a slow CPU then still holds hundreds of steps
_LEARNING_RATE = 3e-3
_MOST_PARAMETERS = 100_000_000
_MOST_CONTEXT = 8192
_SECONDS_BETWEEN_LINES = 10


# The model ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block: tokens exchange what they know, then each thinks for itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, mask=causal(), position=Rotary())
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer (Radford et al. 2019), with rotary positions and tied embeddings.

    Args:
        vocabulary: how many different tokens there are.
        width: E, a multiple of 2 * heads.
        layers: how many blocks.
        heads: H of each block.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if parameter.ndim == 2:
                # What is added to x is scaled so that the sum over all layers keeps its size (GPT-2).
                added = name.endswith(("out_proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, L, vocabulary) of the token after each of `tokens` (B, L)."""
        x = self.blocks(self.embedding(tokens))  # (B, L, E)
        return F.linear(self.norm(x), self.embedding.weight)


def loss_of(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; tokens and targets (B, L), targets one place ahead."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
