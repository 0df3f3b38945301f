"""Tokens per second of a GPT that goes on after a text: with its cache, without, and with a cache that concatenates.

python benchmarks/generation.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import multihead as mh
from multihead.cache_ledger import Step
from multihead.models.gpt import GPT
from pairs import Run, measure

SIZES = {"vocabulary": 1024, "width": 256, "layers": 4, "heads": 8}


class Concatenating(mh.KVCache):
    """A cache as it is often written: each token makes a new tensor of all keys, and one of all values."""

    kept: tuple[Tensor, Tensor] | None = None

    def write(self, step: Step, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.kept is not None:
            k, v = torch.cat([self.kept[0], k], -2), torch.cat([self.kept[1], v], -2)
        self.kept, self._ledger = (k, v), step._after
        return k, v

    def crop(self, length: int) -> None:
        super().crop(length)
        self.kept = self.kept[0][..., :length, :], self.kept[1][..., :length, :]


def token(model: GPT, caches: list[mh.KVCache], prompt: Tensor) -> Run:
    """Writes the token after the prompt, and forgets it again."""
    model(prompt, cache=caches, last=True)

    def once() -> None:
        model(prompt[:, -1:], cache=caches, last=True).argmax(-1)
        for cache in caches:
            cache.crop(prompt.shape[1])

    return once


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each cell")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(**SIZES).eval()
    told = ", ".join(f"{name} {size}" for name, size in SIZES.items())
    print(f"One token more, 1 row, {told}, {asked.threads} thread(s).\n")
    print("| context | cache, tokens/s | without cache | concatenating | cache / without | cache / concatenating |")
    print("|---|---|---|---|---|---|")
    for context in (64, 512, 2048):
        prompt = torch.randint(SIZES["vocabulary"], (1, context))
        ours = token(model, model.new_cache(), prompt)
        peers = (
            lambda prompt=prompt: model(prompt, last=True).argmax(-1),
            token(model, [Concatenating() for _ in model.blocks], prompt),
        )
        none, cat = (measure(ours, peer, seconds=asked.seconds, threads=asked.threads) for peer in peers)
        speeds = [1 / seconds for seconds in (none.ours, none.theirs, cat.theirs)]
        print(
            f"| {context} | {' | '.join(f'{speed:,.0f}' for speed in speeds)} | {none.ratio:.1f} | {cat.ratio:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
