"""A training step of `models.gpt.GPT` against the same model written plainly on torch's SDPA.

python benchmarks/gpt.py
python benchmarks/gpt.py --threads 2
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multihead.models.gpt import GPT
from pairs import Run, measure, show

VOCABULARY, WIDTH, LAYERS, HEADS = 65, 128, 4, 4  # the small CPU setting of nanoGPT for tiny Shakespeare
SETTINGS = {"context 64, batch 12": (64, 12, 0.0), "context 256, batch 16, dropout 0.2": (256, 16, 0.2)}


class PlainBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        B, L, E = x.shape
        q, k, v = self.qkv(self.attn_norm(x)).view(B, L, 3, HEADS, E // HEADS).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        out = self.proj(out.transpose(1, 2).reshape(B, L, E))
        x = x + F.dropout(out, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class PlainGPT(nn.Module):
    def __init__(self, context: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(context, WIDTH)
        self.blocks = nn.Sequential(*(PlainBlock(dropout) for _ in range(LAYERS)))
        self.norm, self.dropout = nn.LayerNorm(WIDTH), dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.norm(self.blocks(F.dropout(x, self.dropout, self.training)))
        return x @ self.embedding.weight.t()


def step(model: nn.Module, tokens: Tensor) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def once() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each cell")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    print(f"A step of training, {LAYERS} layers, {HEADS} heads, {WIDTH} wide, {asked.threads} thread(s).\n")
    print("| setting | SDPA, plainly | multihead | steps/s, ratio |\n|---|---|---|---|")
    for name, (context, batch, dropout) in SETTINGS.items():
        torch.manual_seed(0)
        tokens = torch.randint(VOCABULARY, (batch, context + 1))
        ours = GPT(VOCABULARY, WIDTH, LAYERS, HEADS, context=context, position="learned", dropout=dropout)
        found = measure(
            step(ours, tokens), step(PlainGPT(context, dropout), tokens), seconds=asked.seconds, threads=asked.threads
        )
        print(f"| {name} | {show(found.theirs)} | {show(found.ours)} | {found.ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
