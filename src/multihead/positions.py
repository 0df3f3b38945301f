"""Position: what acts on q and k, or on the scores, by where tokens stand.

A position is a value or a module with up to two parts. `rotate` turns q and k before the scores are made
(`multihead.rotary`); `bias` gives something to add to the scores (here). Both follow the positions they are
given and nothing else, so they need no rule of their own for decoding, packing or padding.

Letters as in `docs/design.md`: H query heads, K key/value heads, L query length, S key length, D head dim;
*batch is any number of leading axes, also none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multihead.errors import bad_type, bad_value, check_size, describe, is_number


class Position:
    """What acts by position. This base does nothing; override what acts.

    Attributes:
        rotates: whether `rotate` changes q and k.
        biases: whether `bias` gives a tensor.
    """

    rotates: bool = False
    biases: bool = False

    def rotate(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k as the scores should see them, in their own shapes and dtypes.

        Args:
            q: (*batch, H, L, D).
            k: (*batch, K, S, D).
            q_positions: (L,) or (*batch, L), integer or floating, in tokens.
            k_positions: (S,) or (*batch, S), likewise.
        """
        del q_positions, k_positions
        return q, k

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """What is added to the scaled scores, or None.

        Args:
            q_positions: (L,) or (*batch, L), in tokens.
            k_positions: (S,) or (*batch, S), in tokens.

        Returns:
            (H, L, S) where both positions are 1-D, else (*batch, H, L, S).
        """
        del q_positions, k_positions
        return None

    def check(self, num_heads: int, head_dim: int, argument: str = "position") -> None:
        """Raises if this does not fit a layer of H=`num_heads` query heads of head dim D=`head_dim`.

        `argument` is the caller's name of it.

        Raises:
            ValueError: it does not fit.
            TypeError: a size is not an int.
        """
        del argument
        check_size("num_heads", num_heads)
        check_size("head_dim", head_dim)


def without_lowest(bias: Tensor) -> Tensor:
    """A bias with -inf in place of the lowest numbers of its dtype.

    Models write `torch.finfo(dtype).min` where they mean -inf. Added to a score it swallows all digits of it, so that a
    row of nothing else would be neither hidden nor a softmax of its scores.
    """
    return F.threshold(bias, torch.finfo(bias.dtype).min / 2, -math.inf)


def check_positions(argument: str, letter: str, positions: object, heads: Tensor | None = None) -> Tensor:
    """`positions` back, if they can say where tokens stand.

    Args:
        argument: the caller's name of them.
        letter: of their length, "L" or "S".
        positions: (length,) or (*batch, length), integer or floating.
        heads: (*batch, heads, length, D), the tensor whose tokens they place, if there is one.

    Raises:
        TypeError: not a tensor, or of bool or complex dtype.
        ValueError: of a shape or on a device that does not fit.
    """
    if not isinstance(positions, Tensor):
        instead = f"For tokens in order pass torch.arange({letter})."
        raise bad_type(argument, f"a tensor of shape ({letter},) or (*batch, {letter})", positions, "", instead)
    if positions.dtype == torch.bool or positions.is_complex():
        otherwise = "A position is a place counted in tokens, and a mask holds none."
        raise bad_type(argument, "integers or real numbers", positions, otherwise)
    if positions.ndim == 0:
        raise bad_value(argument, f"shape ({letter},) or (*batch, {letter})", describe(positions))
    if heads is None:
        return positions
    batch, length = heads.shape[:-3], heads.shape[-2]
    own = positions.shape[:-1]
    fits = not own or (len(own) == len(batch) and all(a in (1, b) for a, b in zip(own, batch, strict=True)))
    if not fits or positions.shape[-1] != length:
        expected = f"shape ({letter},) or (*batch, {letter}) with {letter}={length} and *batch={tuple(batch)}"
        raise bad_value(argument, expected, describe(positions), "Tokens would be given the places of others.")
    if positions.device != heads.device:
        instead = "Make them where the inputs are, with torch.arange(..., device=q.device)."
        raise bad_value(argument, f"a tensor on {heads.device}", f"one on {positions.device}", "", instead)
    return positions


def _distances(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """k position minus q position, (*batch, L, S): int64, or the positions' own dtype where they are floating.

    Narrow and unsigned integers would wrap around, narrow floats would round, so both are widened first.
    """
    check_positions("q_positions", "L", q_positions)
    check_positions("k_positions", "S", k_positions)
    q_batch, k_batch, device = q_positions.shape[:-1], k_positions.shape[:-1], q_positions.device
    same_axes = not q_batch or not k_batch or len(q_batch) == len(k_batch)
    if not same_axes or any(a != b and 1 not in (a, b) for a, b in zip(q_batch, k_batch, strict=False)):
        expected = f"shape (S,) or (*batch, S) with *batch={tuple(q_batch)} as in q_positions"
        raise bad_value("k_positions", expected, describe(k_positions), "Sequences would be paired with others.")
    if k_positions.device != device:
        raise bad_value("k_positions", f"a tensor on {device} as q_positions is", f"one on {k_positions.device}")
    q, k = (
        p.to(torch.promote_types(p.dtype, torch.float32) if p.is_floating_point() else torch.int64)
        for p in (q_positions, k_positions)
    )
    return k[..., None, :] - q[..., :, None]


def _check_heads(argument: str, own: int, num_heads: int) -> None:
    """Raises if a bias for `own` heads is asked to serve a layer of `num_heads`."""
    if check_size("num_heads", num_heads) != own:
        otherwise = "Heads would be left without a bias, or a bias without a head."
        instead = f"Make the bias with num_heads={num_heads}."
        raise bad_value(argument, f"a bias for H={num_heads} query heads", f"one for {own}", otherwise, instead)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The H slopes of Press et al., "Train Short, Test Long" (2022), section 3 and its published code.

    For H a power of two, head h has 2 ** (-8 (h + 1) / H). For any other H the slopes are those of the
    largest power of two n below H, then every other slope of 2 n heads, from the first on, until there are H.

    Raises:
        ValueError: num_heads is below 1.
        TypeError: num_heads is not an int.
    """
    check_size("num_heads", num_heads)
    power = 1 << (num_heads.bit_length() - 1)
    between = (2.0 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power))
    return (*(2.0 ** (-8 * (head + 1) / power) for head in range(power)), *between)


@dataclass(frozen=True, repr=False)
class ALiBi(Position):
    """Attention with linear biases: far keys count less, at a fixed rate per head.

    The bias is -slope[h] * |q position - k position|. The published method is causal and says nothing of keys
    after the query; the distance is taken on both sides here, so no key ever gains by being far. Press et al.,
    "Train Short, Test Long" (2022). A value without parameters: frozen, hashable, comparable.

    Args:
        num_heads: H.
        slopes: H numbers of at least 0, in score per token; None for `alibi_slopes(num_heads)`, the paper's.

    Raises:
        ValueError: num_heads is below 1, slopes are not H in number, or one is negative or not finite.
        TypeError: num_heads is not an int, or slopes are not numbers.
    """

    biases = True
    num_heads: int
    slopes: tuple[float, ...]

    def __init__(self, num_heads: int, slopes: Iterable[float] | None = None) -> None:
        check_size("num_heads", num_heads)
        object.__setattr__(self, "num_heads", num_heads)
        object.__setattr__(
            self, "slopes", alibi_slopes(num_heads) if slopes is None else _check_slopes(slopes, num_heads)
        )

    def __repr__(self) -> str:
        usual = self.slopes == alibi_slopes(self.num_heads)
        return f"ALiBi(num_heads={self.num_heads}{'' if usual else f', slopes={self.slopes}'})"

    def check(self, num_heads: int, head_dim: int, argument: str = "position") -> None:
        super().check(num_heads, head_dim)
        _check_heads(argument, self.num_heads, num_heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The bias, float32, nowhere above 0. Shapes as in `Position.bias`; positions may be floating.

        Raises:
            ValueError: the positions' shapes or devices do not fit each other.
            TypeError: positions are not tensors, or are bool or complex.
        """
        far = _distances(q_positions, k_positions).abs().to(torch.float32)
        slopes = torch.tensor(self.slopes, dtype=torch.float32, device=far.device)
        return -slopes[:, None, None] * far[..., None, :, :]


def _check_slopes(slopes: object, num_heads: int) -> tuple[float, ...]:
    if isinstance(slopes, Tensor | str) or not isinstance(slopes, Iterable):
        instead = "They are constants: from a tensor pass slopes.tolist()." if isinstance(slopes, Tensor) else ""
        raise bad_type("slopes", "a sequence of H numbers", slopes, "", instead)
    numbers: list[float] = []
    for slope in cast(Iterable[object], slopes):
        if not is_number(slope):
            raise bad_type("slopes", "a sequence of H numbers", slope)
        if not (math.isfinite(slope) and slope >= 0):
            otherwise = "A negative slope would favour the farthest keys."
            raise bad_value(
                "slopes", "finite numbers of at least 0", slope, otherwise, "The minus sign is ALiBi's own."
            )
        numbers.append(float(slope))
    if len(numbers) != num_heads:
        raise bad_value("slopes", f"H={num_heads} numbers", f"{len(numbers)}", "Each query head has one slope.")
    return tuple(numbers)


def _check_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> tuple[int, int, tuple[int, ...]]:
    """Of one direction: buckets in all, how many of them are exact, and where each further one starts, in tokens."""
    check_size("num_buckets", num_buckets, least=4 if bidirectional else 2)
    check_size("max_distance", max_distance)
    if bidirectional and num_buckets % 2:
        otherwise = "Keys before and after the query have half of the buckets each."
        raise bad_value("num_buckets", "an even number where bidirectional=True", num_buckets, otherwise)
    count = num_buckets // 2 if bidirectional else num_buckets
    exact = count // 2
    if max_distance <= exact:
        otherwise = (
            f"The first {exact} distances have a bucket each, and the logarithmic ones would have none to cover."
        )
        raise bad_value("max_distance", f"more than {exact}", max_distance, otherwise)
    wide = count - exact
    starts: list[int] = []
    for step in range(1, wide):
        # The smallest n with log(n / exact) / log(max_distance / exact) * wide >= step. Floats come near and integers
        # decide, for at the very edge, such as n = 16 of 8 .. 128, a rounded logarithm falls on either side.
        start = math.floor(exact * (max_distance / exact) ** (step / wide))
        while start**wide < max_distance**step * exact ** (wide - step):
            start += 1
        starts.append(start)
    return count, exact, tuple(starts)


def _bucket(relative: Tensor, count: int, exact: int, starts: tuple[int, ...], bidirectional: bool) -> Tensor:
    far = relative.abs() if bidirectional else (-relative).clamp(min=0)
    bucket = far.clamp(max=exact)
    for start in starts:
        bucket = bucket + (far >= start)
    return bucket + count * (relative > 0) if bidirectional else bucket


def t5_bucket(relative: Tensor, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Tensor:
    """The bucket of each relative position, by the rule of T5 (Raffel et al. 2020, section 2.1 and its code).

    Half of a direction's buckets hold one distance each, 0, 1, 2 and so on. The others widen logarithmically up
    to `max_distance`, and the last holds all that is farther. The edges are exact, free of rounding.

    Args:
        relative: k position minus q position, any shape, integer, in tokens.
        num_buckets: of both directions together.
        max_distance: in tokens; from here on all distances share the last bucket.
        bidirectional: whether keys after the query have the second half of the buckets; else they are all in
            bucket 0 and keys before it have all buckets.

    Returns:
        int64 of the shape of `relative`, from 0 to num_buckets - 1.

    Raises:
        ValueError: num_buckets is below 4 (2 where not bidirectional) or, where bidirectional, odd; or max_distance
            is not above the number of exact buckets.
        TypeError: `relative` is not an integer tensor, or a size is not an int.
    """
    count, exact, starts = _check_buckets(num_buckets, max_distance, bidirectional)
    return _bucket(_check_whole("relative", relative).to(torch.int64), count, exact, starts, bidirectional)


def _check_whole(argument: str, positions: Tensor) -> Tensor:
    """`positions` back, if integer: a table has a row for each whole distance and nothing between two rows."""
    if not isinstance(positions, Tensor):
        raise bad_type(argument, "an integer tensor", positions)
    if positions.dtype == torch.bool or positions.is_floating_point() or positions.is_complex():
        otherwise = "A table has a row for each whole distance and nothing between two rows."
        instead = "Round them first, as in positions.round().long()." if positions.is_floating_point() else ""
        raise bad_type(argument, "an integer tensor", positions, otherwise, instead)
    return positions


class _TableBias(nn.Module, Position):
    """A learned table of scores with a column for each head, looked up by the distance of q and k."""

    biases = True

    def __init__(
        self, num_heads: int, rows: int, max_distance: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        if dtype is not None and not dtype.is_floating_point:
            raise bad_type("dtype", "a floating dtype", str(dtype), "The table is learned.")
        self.num_heads = num_heads
        self.max_distance = max_distance
        self.weight = nn.Parameter(torch.empty(rows, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws `weight` anew from a normal distribution of mean 0 and standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def check(self, num_heads: int, head_dim: int, argument: str = "position") -> None:
        super().check(num_heads, head_dim)
        _check_heads(argument, self.num_heads, num_heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The bias in the table's dtype, with gradients to the table. Shapes as in `Position.bias`.

        Raises:
            ValueError: the positions' shapes or devices do not fit each other or the table.
            TypeError: positions are not integer tensors.
        """
        # Through __call__, so that hooks on the module see it.
        bias: Tensor = self(q_positions, k_positions)
        return bias

    def forward(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """What `bias` gives."""
        for argument, positions in (("q_positions", q_positions), ("k_positions", k_positions)):
            if _check_whole(argument, positions).device != self.weight.device:
                expected = f"a tensor on {self.weight.device}, where the table is"
                raise bad_value(argument, expected, f"one on {positions.device}")
        relative = _distances(q_positions, k_positions).clamp(-self.max_distance, self.max_distance)
        rows = relative + self.max_distance
        # index_select on the transposed table gives (H, ...) contiguous, forward and backward without a sort.
        scores = self._by_distance().t().index_select(1, rows.flatten())
        return scores.reshape(self.num_heads, *rows.shape).movedim(0, -3)

    def _by_distance(self) -> Tensor:
        """The rows for the distances -max_distance .. max_distance, (2 * max_distance + 1, H)."""
        return self.weight


class T5Bias(_TableBias):
    """The learned bias of T5: one score for each head and each bucket of distances.

    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020), section
    2.1. The buckets are those of `t5_bucket`. In T5 itself one such table serves every layer of a stack, and scores
    are not scaled by D ** -0.5.

    Args:
        num_heads: H.
        num_buckets: rows of the table.
        max_distance: in tokens; from here on all distances share the last bucket.
        bidirectional: True for an encoder, False for a decoder, as in `t5_bucket`.
        device: of the table.
        dtype: of the table and the bias, floating.

    Attributes:
        weight: (num_buckets, H), learned. T5 checkpoints hold it as `relative_attention_bias.weight`.

    Raises:
        ValueError: num_heads is below 1, or buckets as in `t5_bucket`.
        TypeError: a size is not an int, or dtype is not floating.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_size("num_heads", num_heads)
        buckets = _check_buckets(num_buckets, max_distance, bidirectional)
        super().__init__(num_heads, num_buckets, max_distance, device, dtype)
        self.num_buckets = num_buckets
        self.bidirectional = bidirectional
        self._buckets = buckets

    def _by_distance(self) -> Tensor:
        relative = torch.arange(-self.max_distance, self.max_distance + 1, device=self.weight.device)
        return self.weight.index_select(0, _bucket(relative, *self._buckets, self.bidirectional))

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )


class RelativeBias(_TableBias):
    """A free learned bias: one score for each head and each distance up to `max_distance`, on either side.

    The distance k position - q position is clipped to -max_distance .. max_distance, as in Shaw et al.,
    "Self-Attention with Relative Position Representations" (2018), section 3.2, here with one score a head in place
    of a vector.

    Args:
        num_heads: H.
        max_distance: in tokens, at least 1; all that is farther shares the outermost rows.
        device: of the table.
        dtype: of the table and the bias, floating.

    Attributes:
        weight: (2 * max_distance + 1, H), learned; row `max_distance` is for a key where the query is.

    Raises:
        ValueError: a size is below 1.
        TypeError: a size is not an int, or dtype is not floating.
    """

    def __init__(
        self,
        num_heads: int,
        max_distance: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_size("num_heads", num_heads)
        check_size("max_distance", max_distance)
        super().__init__(num_heads, 2 * max_distance + 1, max_distance, device, dtype)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, max_distance={self.max_distance}"
