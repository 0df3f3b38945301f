"""A small GPT made of `Attention` layers, as the demo trains it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multihead.masks import causal
from multihead.module import Attention
from multihead.rotary import Rotary


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
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # What a block adds to x starts smaller, so that the sum over all blocks keeps its size (GPT-2).
                adds = name.endswith(("out_proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=(width * 2 * layers if adds else width) ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, L, vocabulary) of the token after each of `tokens` (B, L)."""
        x = self.blocks(self.embedding(tokens))  # (B, L, E)
        return F.linear(self.norm(x), self.embedding.weight)


def loss_of(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; tokens and targets are (B, L), targets one place ahead."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@torch.no_grad()
def sample(model: GPT, prompt: Tensor, length: int, context: int, temperature: float = 0.7, top_k: int = 40) -> Tensor:
    """Let the model write on.

    Args:
        model: predicts the next token.
        prompt: (L,) tokens, at least one.
        length: how many tokens to write.
        context: how many of the last tokens the model is shown for each new one.
        temperature: above 0; below 1 likely tokens become likelier still.
        top_k: only so many of the likeliest tokens are drawn from.

    Returns:
        (length,) tokens, without the prompt. Repeats under `torch.manual_seed`.
    """
    tokens = prompt
    for _ in range(length):
        logits = model(tokens[None, -context:])[0, -1] / temperature
        likeliest = logits.topk(min(top_k, logits.numel()))
        drawn = torch.multinomial(likeliest.values.softmax(-1), 1)
        tokens = torch.cat([tokens, likeliest.indices[drawn]])
    return tokens[len(prompt) :]
