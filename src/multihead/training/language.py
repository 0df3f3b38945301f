"""A language model on a text: the task of `multihead train`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from multihead.models.gpt import GPT, loss_of

MOST_VALIDATED = 512  # pieces: enough to tell models apart, few enough not to hold up training


class LanguageModelling:
    """To predict the next token of a text. A `Task`.

    Args:
        model: predicts.
        train: (N,) tokens to learn from, N > context.
        valid: (M,) tokens that are kept back, M >= 2.
        valid_bytes: how many bytes the text kept back has.
        context: L, the tokens of a piece.
        batch: how many pieces a step learns from, by all processes together.
    """

    def __init__(self, model: GPT, train: Tensor, valid: Tensor, *, valid_bytes: int, context: int, batch: int) -> None:
        self.model = model
        self.train, self.valid, self.valid_bytes = train, valid, valid_bytes
        self.context, self.batch = context, batch

    def batches(self, generator: torch.Generator, step: int, parts: int) -> Sequence[Tensor]:  # noqa: ARG002
        """Pieces (b, context + 1) from anywhere in the text: so any step needs no other's."""
        starts = torch.randint(len(self.train) - self.context, (self.batch, 1), generator=generator)
        return self.train[starts + torch.arange(self.context + 1)].tensor_split(parts)

    def count(self, batch: Tensor) -> int:
        """Every token but a piece's first is predicted."""
        return batch.shape[0] * self.context

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Nats per token."""
        device = next(model.parameters()).device
        batch = batch.to(device, non_blocking=True)
        return loss_of(model, batch[:, :-1], batch[:, 1:])  # type: ignore[arg-type]  # or a wrapper of one

    def validate(self) -> dict[str, float]:
        """ "loss" in nats per token, and "bits_per_byte", which is the same for any vocabulary."""
        loss = text_loss(self.model, self.valid, context=self.context, batch=self.batch)
        tokens = len(self.valid)
        return {"loss": loss, "bits_per_byte": loss / math.log(2) * tokens / self.valid_bytes}


@torch.no_grad()
def text_loss(model: nn.Module, tokens: Tensor, *, context: int, batch: int, most: int = MOST_VALIDATED) -> float:
    """A model's loss on a text, in nats per token: over all of it, or over `most` evenly spread pieces of it.

    Args:
        model: a GPT, or a wrapper of one.
        tokens: (M,), M >= 2.
        context: the tokens of a piece.
        batch: how many pieces are looked at at once.
        most: how many pieces at most.
    """
    device = next(model.parameters()).device
    length = min(context, len(tokens) - 1)
    pieces = (len(tokens) - 1) // length
    inputs = tokens[: pieces * length].view(pieces, length)
    targets = tokens[1 : pieces * length + 1].view(pieces, length)
    chosen = torch.linspace(0, pieces - 1, min(pieces, most)).long()
    total = 0.0
    for start in range(0, len(chosen), batch):
        rows = chosen[start : start + batch]
        loss = loss_of(model, inputs[rows].to(device), targets[rows].to(device))  # type: ignore[arg-type]
        total += len(rows) * loss.item()
    return total / len(chosen)
