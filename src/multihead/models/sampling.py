"""How the next token is chosen: pure functions over logits (B, vocabulary), and `Sampling`, which applies them.

The order is `repetition_penalty`, `temperature`, `top_k`, `top_p`, `min_p`; then a token is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value, check_size, is_number

# What logits are divided or multiplied by, so that they stay numbers in float32. A temperature at the least is as good
# as 0, one at the most as good as infinite.
_LEAST, _MOST = 1e-5, 1e9


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. The fields are arguments of `generate`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        temperature = _check_number("temperature", self.temperature)
        if not (temperature == 0 or _LEAST <= temperature <= _MOST):
            otherwise = "Logits are divided by it."
            raise bad_value("temperature", f"0, or a number from {_LEAST:g} to {_MOST:g}", temperature, otherwise)
        if self.top_k is not None:
            check_size("top_k", self.top_k)
        if self.top_p is not None and not 0 < _check_number("top_p", self.top_p) <= 1:
            raise bad_value("top_p", "a number above 0 and at most 1", self.top_p, "It is a share of the probability.")
        if self.min_p is not None and not 0 <= _check_number("min_p", self.min_p) <= 1:
            raise bad_value("min_p", "a number from 0 to 1", self.min_p, "It is a share of the likeliest token's.")
        if not _LEAST <= _check_number("repetition_penalty", self.repetition_penalty) <= _MOST:
            otherwise, expected = "Logits are divided by it.", f"a number from {_LEAST:g} to {_MOST:g}"
            raise bad_value("repetition_penalty", expected, self.repetition_penalty, otherwise)

    def choose(self, logits: Tensor, seen: Tensor | None, generators: Sequence[torch.Generator]) -> Tensor:
        """A token of each row.

        Args:
            logits: (B, vocabulary).
            seen: as of `penalise_repetition`, or None for no penalty.
            generators: one for each row, on the CPU.

        Returns:
            (B,) int64 on the CPU.

        Raises:
            ValueError: logits are NaN or infinite, as those of a model whose training has diverged.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if seen is not None:
            logits = penalise_repetition(logits, seen, self.repetition_penalty)
        logits = logits / (self.temperature or 1.0)
        if not logits.amax(-1).isfinite().all():
            raise bad_value(
                "model", "one that gives finite logits", "NaN or infinity", "There is nothing to draw from."
            )
        if self.temperature == 0:
            return logits.argmax(-1).cpu()
        logits = logits if self.top_k is None else keep_top_k(logits, self.top_k)
        logits = logits if self.top_p is None else keep_top_p(logits, self.top_p)
        logits = logits if not self.min_p else keep_min_p(logits, self.min_p)
        numbers = [torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators]
        return draw(logits, torch.cat(numbers))


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits of tokens that were seen, made smaller: divided by the penalty, or below zero multiplied by it.

    Keskar et al., "CTRL" (2019), section 4.1, which divides; there a negative logit would become likelier.

    Args:
        logits: (B, vocabulary).
        seen: (B, vocabulary) bool, which tokens a row holds, its prompt included.
        penalty: above 0; 1 changes nothing.
    """
    return logits.where(~seen, torch.where(logits > 0, logits / penalty, logits * penalty))


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Logits (B, vocabulary) with -inf for all but the k likeliest of a row, and those as likely as the last of them.

    Fan et al., "Hierarchical Neural Story Generation" (2018).
    """
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]  # (B, 1)
    return logits.where(logits >= least, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Logits (B, vocabulary) with -inf for all but the nucleus: the fewest tokens whose probabilities add up to p.

    Of tokens that are equally likely the one of the lower number comes first. Holtzman et al., "The Curious Case of
    Neural Text Degeneration" (2020).
    """
    if p == 1:
        return logits
    ranked, order = logits.softmax(-1).sort(descending=True, stable=True)
    # In float64, which not every device has: sums in float32 are 1 long before the end of a large vocabulary.
    probabilities = ranked.cpu().double()
    sums = probabilities.cumsum(-1)
    nucleus = sums - probabilities < p * sums[:, -1:]  # those that are likelier do not add up to p
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, nucleus.to(order.device))
    return logits.where(kept, -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Logits (B, vocabulary) with -inf where a token is less likely than p times the likeliest of the row.

    Nguyen et al., "Turning Up the Heat: Min-p Sampling" (2024).
    """
    return logits.where(logits >= logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """A token of each row: where the sum of the probabilities, in the order of the vocabulary, passes a number.

    Args:
        logits: (B, vocabulary), some of each row finite.
        uniform: (B,) float64 on the CPU, from 0 to below 1.

    Returns:
        (B,) int64 on the CPU, none of probability 0.
    """
    sums = logits.float().softmax(-1).cpu().double().cumsum(-1)
    return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]


def _check_number(name: str, value: object) -> float:
    if not is_number(value):
        raise bad_type(name, "a number", value)
    return value
