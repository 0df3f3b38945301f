"""Rotary position: pairs of channels of q and k turn by an angle that grows with the position.

The score of a query and a key then depends on their distance and not on where they stand. A scaling maps the
frequencies, so that a model trained on short sequences reads long ones; a new scaling is a new class here.

Letters as in `docs/design.md`: H query heads, K key/value heads, L query length, S key length, D head dim.
R is the number of channels that turn, D or fewer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value, check_size, describe, is_number
from multihead.positions import Position, check_positions


def _check_number(argument: str, value: object, *, least: float | None = None, above: float = 0.0) -> float:
    """`value` back, if it is a finite number of at least `least`, or, without that, above `above`."""
    if not is_number(value):
        raise bad_type(argument, "a number", value)
    if not math.isfinite(value) or (value <= above if least is None else value < least):
        bound = f"above {above:g}" if least is None else f"of at least {least:g}"
        raise bad_value(argument, f"a finite number {bound}", value)
    return value


def _check_factor(factor: object) -> None:
    if is_number(factor) and 0 < factor < 1:
        otherwise = "It is by how much longer sequences become than those of training."
        raise bad_value("factor", "a finite number of at least 1", factor, otherwise, f"Try {1 / factor:g}.")
    _check_number("factor", factor, least=1.0)


class Scaling(ABC):
    """How rotary frequencies change to reach beyond the length of training. A value: frozen, hashable."""

    @abstractmethod
    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """The scaled frequencies.

        Args:
            frequencies: (R / 2,) float64, in radians per token, falling: base ** (-2 i / R).
            base: what they were made from, above 1.
        """

    def magnitude(self) -> float:
        """What cos and sin are multiplied by: a temperature on the scores, in effect its square."""
        return 1.0


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation: every frequency is divided by `factor`, as if positions were.

    Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation" (2023).

    Args:
        factor: at least 1, the new length over that of training.

    Raises:
        ValueError: factor is below 1 or not finite.
        TypeError: factor is not a number.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        del base
        return frequencies / self.factor


@dataclass(frozen=True)
class NTKScaling(Scaling):
    """The base grows to base * factor ** (R / (R - 2)): fast pairs stay, the slowest is divided by `factor`.

    Known as NTK-aware scaling; published in Peng et al., "YaRN" (2023), section 3.1.

    Args:
        factor: at least 1, the new length over that of training.

    Raises:
        ValueError: factor is below 1 or not finite.
        TypeError: factor is not a number.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        del base
        # (base * factor ** (R / (R - 2))) ** (-2 i / R) is the old frequency times factor ** (-i / (R / 2 - 1)). So
        # written it holds for R = 2 too, whose only frequency is 1 for any base.
        pairs = frequencies.shape[-1]
        i = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
        return frequencies * self.factor ** (-i / max(pairs - 1, 1))


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Llama 3.1's rule: pairs that turn often within the trained length stay, those that hardly turn are divided.

    A pair that turns at least `high_freq_factor` times within `original_length` tokens keeps its frequency, one that
    turns at most `low_freq_factor` times has it divided by `factor`, and between the two the frequency goes linearly
    with the number of turns. Grattafiori et al., "The Llama 3 Herd of Models" (2024), and the released model's code.

    Args:
        factor: at least 1, by how much low frequencies are divided.
        low_freq_factor: turns, above 0.
        high_freq_factor: turns, above low_freq_factor.
        original_length: the length of training, in tokens.

    Raises:
        ValueError: a value is out of the ranges above.
        TypeError: a value is not a number, or original_length not an int.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_number("low_freq_factor", self.low_freq_factor)
        _check_number("high_freq_factor", self.high_freq_factor)
        check_size("original_length", self.original_length)
        if self.high_freq_factor <= self.low_freq_factor:
            expected = f"a number above low_freq_factor={self.low_freq_factor}"
            otherwise = "There would be no range to go over from divided to kept frequencies."
            raise bad_value("high_freq_factor", expected, self.high_freq_factor, otherwise)

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        del base
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _divide_partly(frequencies, kept, self.factor)


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN: fast pairs stay, slow pairs are divided by `factor`, a ramp over the pair's index joins them.

    The ramp runs between the pairs that turn `beta_fast` and `beta_slow` times within `original_length` tokens, and
    cos and sin are multiplied by an attention factor, 0.1 ln(factor) + 1 unless said otherwise. Peng et al., "YaRN:
    Efficient Context Window Extension of Large Language Models" (2023), sections 3.2 to 3.4.

    Args:
        factor: at least 1, the new length over that of training.
        original_length: the length of training, in tokens.
        beta_fast: turns, above beta_slow.
        beta_slow: turns, above 0.
        attention_factor: above 0, in place of the paper's.
        mscale: above 0, given together with mscale_all_dim: the attention factor is then
            (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), as DeepSeek-V2 has it. That model also
            multiplies its softmax scale by the square of the divisor; that is for the scale of attention to say.
        mscale_all_dim: see mscale.
        truncate: whether the ramp's ends are widened to whole indices, as most checkpoints have it.

    Raises:
        ValueError: a value is out of the ranges above, one of mscale and mscale_all_dim is missing, or both they and
            attention_factor are given.
        TypeError: a value is not a number, or original_length not an int.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        check_size("original_length", self.original_length)
        _check_number("beta_slow", self.beta_slow)
        _check_number("beta_fast", self.beta_fast)
        if self.beta_fast <= self.beta_slow:
            otherwise = "The ramp from kept to divided frequencies would run backwards."
            raise bad_value("beta_fast", f"a number above beta_slow={self.beta_slow}", self.beta_fast, otherwise)
        for argument in ("attention_factor", "mscale", "mscale_all_dim"):
            value: object = getattr(self, argument)
            if value is not None:
                _check_number(argument, value)
        if (self.mscale is None) != (self.mscale_all_dim is None):
            missing, there = ("mscale", "mscale_all_dim") if self.mscale is None else ("mscale_all_dim", "mscale")
            otherwise = "Only the ratio of the two is defined."
            raise bad_value(
                missing, f"a number together with {there}", None, otherwise, f"Give both or leave {there} out."
            )
        if self.attention_factor is not None and self.mscale is not None:
            otherwise = "mscale and mscale_all_dim give the attention factor themselves."
            raise bad_value("attention_factor", "None where mscale is given", self.attention_factor, otherwise)

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        pairs = frequencies.shape[-1]
        low, high = self._ramp(2 * pairs, base)
        i = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
        return _divide_partly(frequencies, 1 - (i - low) / (high - low), self.factor)

    def _ramp(self, dim: int, base: float) -> tuple[float, float]:
        """The pair indices where the ramp starts and ends, for R=`dim`."""

        def index(turns: float) -> float:
            # Where base ** (-2 i / R) * original_length is `turns` full turns.
            return dim * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        # The published 0.001 keeps a ramp of no width from dividing by zero. Ends that lie on the same side of all
        # indices are such a ramp too.
        return low, high if high > low else low + 0.001

    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


def _divide_partly(frequencies: Tensor, kept: Tensor, factor: float) -> Tensor:
    """Frequencies between themselves (kept >= 1) and themselves over `factor` (kept <= 0)."""
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


@dataclass(frozen=True)
class Rotary(Position):
    """Rotary position embedding: pair i of the channels of q and k turns by position * frequency[i].

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021). Frequencies are held in
    float64; angles, cos, sin and the turning are in float32, or in float64 for float64 input. The result has the
    input's dtype. A value without state: frozen, hashable, comparable.

    Args:
        rotary_dim: R, even: the first R channels turn and the others pass. None for all D.
        base: above 1; frequency[i] is base ** (-2 i / R) radians per token, before scaling.
        interleaved: which channels are pairs. False: i and i + R / 2, as in GPT-NeoX and in Llama checkpoints of the
            transformers library. True: 2 i and 2 i + 1, as in RoFormer, GPT-J and Llama's own release. The wrong one
            loads without complaint and gives another model.
        scaling: how frequencies change to reach beyond the length of training, or None.

    Raises:
        ValueError: rotary_dim is odd or below 2, or base is not a finite number above 1.
        TypeError: rotary_dim is not an int, base not a number, or scaling not a Scaling.
    """

    rotates = True
    rotary_dim: int | None = None
    base: float = 10000.0
    interleaved: bool = field(default=False, kw_only=True)
    scaling: Scaling | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.rotary_dim is not None:
            _check_pairs("rotary_dim", self.rotary_dim)
        _check_number("base", self.base, above=1.0)
        if not isinstance(self.scaling, Scaling | None):
            expected = "None or a scaling such as LinearScaling(factor=4.0)"
            raise bad_type("scaling", expected, self.scaling)

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by: 1, unless the scaling says otherwise."""
        return 1.0 if self.scaling is None else self.scaling.magnitude()

    def inverse_frequencies(self, dim: int, device: torch.device | str | None = None) -> Tensor:
        """The scaled frequencies of R=`dim` turning channels: (R / 2,) float64, in radians per token.

        Raises:
            ValueError: dim is odd or below 2.
            TypeError: dim is not an int.
        """
        _check_pairs("dim", dim)
        frequencies = float(self.base) ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        return frequencies if self.scaling is None else self.scaling.scale(frequencies, float(self.base))

    def check(self, num_heads: int, head_dim: int, argument: str = "position") -> None:
        super().check(num_heads, head_dim, argument)
        self._turning(head_dim)

    def rotate(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k turned to their positions. Shapes as in `Position.rotate`; positions may be floating.

        Raises:
            ValueError: D differs between q and k, is below R, or is odd where R is D; or positions do not fit the
                inputs in shape or device.
            TypeError: q or k is not floating, or positions are not tensors, or are bool or complex.
        """
        for argument, letter, x in (("q", "L", q), ("k", "S", k)):
            shape = f"(*batch, {'H' if argument == 'q' else 'K'}, {letter}, D)"
            if not x.is_floating_point():
                raise bad_type(argument, f"a floating tensor of shape {shape}", x)
            if x.ndim < 3:
                raise bad_value(argument, f"shape {shape}", tuple(x.shape))
        if q.shape[-1] != k.shape[-1]:
            raise bad_value("k", f"head dim D={q.shape[-1]} as q has", describe(k), "No score could be made.")
        check_positions("q_positions", "L", q_positions, q)
        check_positions("k_positions", "S", k_positions, k)
        dim = self._turning(q.shape[-1])

        dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype) else torch.float32
        q_turn = self._cos_sin(q_positions, dim, dtype)
        k_turn = q_turn if k_positions is q_positions else self._cos_sin(k_positions, dim, dtype)
        return _turn(q, *q_turn, self.interleaved), _turn(k, *k_turn, self.interleaved)

    def _turning(self, head_dim: int) -> int:
        """R, for a head dim of D."""
        if self.rotary_dim is None:
            if head_dim % 2:
                instead = f"Leave one channel unturned with rotary_dim={head_dim - 1}." if head_dim > 2 else ""
                raise bad_value("rotary_dim", "an even number", f"D={head_dim}", "Channels turn in pairs.", instead)
            return head_dim
        if self.rotary_dim > head_dim:
            otherwise = "There are not that many channels to turn."
            raise bad_value("rotary_dim", f"at most D={head_dim}", self.rotary_dim, otherwise)
        return self.rotary_dim

    def _cos_sin(self, positions: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, (L, R / 2) or (*batch, 1, L, R / 2)."""
        # Apple's GPUs have no float64: there the few frequencies are made on the CPU.
        device = torch.device("cpu") if positions.device.type == "mps" else positions.device
        frequencies = self.inverse_frequencies(dim, device).to(dtype).to(positions.device)
        angles = positions.to(dtype)[..., None] * frequencies
        if positions.ndim > 1:
            angles = angles[..., None, :, :]
        cos, sin = angles.cos(), angles.sin()
        factor = self.attention_factor
        return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def _check_pairs(argument: str, dim: int) -> None:
    if check_size(argument, dim, least=2) % 2:
        raise bad_value(argument, "an even number", dim, "Channels turn in pairs.", f"Choose {dim - 1} or {dim + 1}.")


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first R channels of x (..., D) turned by angles whose cos and sin are (..., R / 2)."""
    half = cos.shape[-1]
    dim = 2 * half
    turning = x[..., :dim].to(cos.dtype)
    if interleaved:
        a, b = turning.reshape(*x.shape[:-1], half, 2).unbind(-1)
    else:
        a, b = turning[..., :half], turning[..., half:]
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = (torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)).to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), -1)
