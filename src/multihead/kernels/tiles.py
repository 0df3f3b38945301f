"""What `blocks` computes in one tile: some heads, a block of queries, the keys it can see.

There are two ways to do it, with one meaning. `FusedTiles` hands the tile to PyTorch's fused CPU operation.
`PlainTiles` writes it out in plain PyTorch, for what that operation has no place for: softcap, dropout, V != D, a
gradient to the bias, other devices. With P the weights, S the scores and delta = rowsum(dO * O), the gradients are

    dV = P^T dO      dS = P * (dO V^T - delta + grad_lse)      dQ = scale dS K      dK = scale dS^T Q

(Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135, appendix B.4; the term grad_lse is there because
d lse / d S = P). P is computed again from q, k and lse, never kept.

Letters of a tile: b of the B rows of the batch, k of the K key/value heads, G = H / K query heads for each, l of the L
queries, n of the S keys.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.kernels import flash_cpu
from multihead.request import Request


class Step(NamedTuple):
    """One tile of the work."""

    number: int
    batch: slice
    heads: slice  # key/value heads
    rows: slice
    columns: list[slice]  # of the keys, in order and apart
    masked: list[tuple[slice, slice]]  # where the mask must be asked: (place among the n gathered keys, place in S)
    span: tuple[
        slice, slice
    ]  # rows and columns that hold this and the neighbouring tiles: one question for all of them

    @property
    def width(self) -> int:
        return sum(c.stop - c.start for c in self.columns)


class Gradients(NamedTuple):
    q: Tensor  # (b, k, G, l, D)
    k: Tensor  # (b, k, n, D)
    v: Tensor  # (b, k, n, V)
    scores: Tensor | None  # (b, k, G, l, n), which is the gradient of a bias; None from the fused operation


class Tiles(ABC):
    """The tensors of a request in float32 or better, and how a tile of them is computed.

    `careful` replaces keys and values that no query of a tile may see, and queries that see nothing in it, by zeros, so
    that NaN or inf in them can't come back as 0 * NaN. It costs copies, so it is only asked for after something came
    out that is not finite.
    """

    def __init__(self, request: Request, seed: int | None, careful: bool) -> None:
        self.request, self.seed, self.careful = request, seed, careful
        self.wide = torch.promote_types(request.q.dtype, torch.float32)
        self.q = self.by_group(request.q.to(self.wide))  # (B, K, G, L, D)
        self.k, self.v = request.k.to(self.wide).contiguous(), request.v.to(self.wide).contiguous()

    @abstractmethod
    def attend(self, step: Step) -> tuple[Tensor, Tensor]:
        """out (b, k, G, l, V) and lse (b, k, G, l) of a tile."""

    @abstractmethod
    def gradients(self, step: Step, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
        """Gradients of a tile. out, lse and their gradients are as `attend` gave them; lse is 0 for -inf."""

    def dropout_mask(self, step: Step) -> Tensor | None:  # noqa: ARG002  (for the tiles that have dropout)
        """What the weights of a tile are multiplied by, (b, k, G, l, n), the same at each call; None = no dropout."""
        return None

    def by_group(self, tensor: Tensor) -> Tensor:  # (B, H, L, ...) -> (B, K, G, L, ...)
        return tensor.unflatten(1, (self.request.sizes.K, -1))

    def of_batch(self, table: Tensor, step: Step) -> Tensor:  # (B or 1, ...) -> (b or 1, ...)
        return table[step.batch] if table.shape[0] == self.request.sizes.B else table

    def of_heads(self, table: Tensor, step: Step) -> Tensor:  # (B or 1, H or 1, l, n) -> (b or 1, k or 1, G or 1, l, n)
        table = self.of_batch(table, step)
        if table.shape[1] != self.request.sizes.H:
            return table[:, :, None]
        return self.by_group(table)[:, step.heads]

    def columns(self, tensor: Tensor, step: Step) -> Tensor:  # (B, K, S, X) -> (b, k, n, X)
        parts = [tensor[step.batch, step.heads, columns] for columns in step.columns]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class FusedTiles(Tiles):
    """Tiles by PyTorch's fused CPU operation. Their steps take all heads."""

    def __init__(self, request: Request, seed: int | None, careful: bool) -> None:
        super().__init__(request, seed, careful)
        self._asked: tuple[slice, tuple[slice, slice]] | None = None  # rows of the batch and span of the last question
        self._answer = self.q  # to it: mask and bias as one tensor to add

    def attend(self, step: Step) -> tuple[Tensor, Tensor]:
        q, k, v, added = self._operands(step)
        out, lse = flash_cpu.forward(q, k, v, added, False, self.request.scale)
        if added is not None and (lse == 0).any():  # what the operation says of a row that sees nothing
            lse = lse.masked_fill((added == -math.inf).all(-1), -math.inf)
        return self.by_group(out), self.by_group(lse)

    def gradients(self, step: Step, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
        q, k, v, added = self._operands(step)
        d_lse = None if grad_lse is None else grad_lse.flatten(1, 2)
        flat = [t.flatten(1, 2) for t in (grad_out, out, lse)]
        d_q, d_k, d_v = flash_cpu.backward(
            flat[0], d_lse, q, k, v, flat[1], flat[2], added, False, self.request.scale
        )  # fmt: skip
        return Gradients(self.by_group(d_q), d_k, d_v, None)

    def _operands(self, step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q (b, H, l, D), k, v, and mask and bias as one tensor to add (b or 1, H or 1, l, n)."""
        q = self.request.q[step.batch, :, step.rows].to(self.wide)
        k, v = self.columns(self.k, step), self.columns(self.v, step)
        if not step.masked and self.request.bias is None:
            return q, k, v, None
        table, (rows, first) = self._table(step), (step.span[0].start, step.span[1].start)
        lines = table[:, :, step.rows.start - rows : step.rows.stop - rows]
        parts = [lines[..., c.start - first : c.stop - first] for c in step.columns]
        added = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self.careful:
            unseen = (added == -math.inf).all(-2)  # (b or 1, H or 1, n)
            if unseen.shape[1] == self.request.sizes.H:
                unseen = self.by_group(unseen).all(2)
            k, v = k.masked_fill(unseen[..., None], 0.0), v.masked_fill(unseen[..., None], 0.0)
            q = q.masked_fill((added == -math.inf).all(-1)[..., None], 0.0)
        return q, k, v, added

    def _table(self, step: Step) -> Tensor:
        """Mask and bias of the step's span as one tensor to add (b or 1, H or 1, rows, columns)."""
        if self._asked != (step.batch, step.span):
            rows, columns = step.span
            visible, bias = self.request.visible(rows, columns), self.request.added(rows, columns)
            table = self.q.new_zeros(()) if bias is None else self.of_batch(bias, step).to(self.wide)
            if visible is not None:
                table = torch.where(self.of_batch(visible, step), table, -math.inf)
            size = rows.stop - rows.start, columns.stop - columns.start
            self._asked, self._answer = (step.batch, step.span), table.expand(*table.shape[:2], *size)
        return self._answer


class PlainTiles(Tiles):
    """Tiles in plain PyTorch, with every option."""

    def __init__(self, request: Request, seed: int | None, careful: bool) -> None:
        super().__init__(request, seed, careful)
        self.generator = torch.Generator(request.q.device)

    def attend(self, step: Step) -> tuple[Tensor, Tensor]:
        _, _, v, scores, _ = self._scores(step)
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill_(top == -math.inf, 0.0)  # a row that sees nothing
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        kept = self.dropout_mask(step)
        if kept is not None:
            weights *= kept
        out = _by_key_head(weights) @ v / _by_key_head(total.masked_fill(total == 0, 1.0))
        return out.unflatten(2, weights.shape[2:4]), (top + total.log()).squeeze(-1)

    def gradients(self, step: Step, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
        q, k, v, scores, slope = self._scores(step)
        weights = scores.sub_(lse[..., None]).exp_()
        delta = (grad_out * out).sum(-1, keepdim=True)  # dropout included: it is in out
        if grad_lse is not None:
            delta -= grad_lse[..., None]
        d_out = _by_key_head(grad_out)
        d_scores = (d_out @ v.transpose(-1, -2)).unflatten(2, weights.shape[2:4])
        kept = self.dropout_mask(step)
        if kept is not None:
            d_scores *= kept
        d_scores.sub_(delta).mul_(weights)
        if kept is not None:
            weights *= kept
        d_products = _by_key_head(d_scores if slope is None else d_scores * slope)  # scores before the softcap
        d_q = (d_products @ k).mul_(self.request.scale).unflatten(2, weights.shape[2:4])
        d_k = d_products.transpose(-1, -2) @ _by_key_head(q)
        return Gradients(d_q, d_k, _by_key_head(weights).transpose(-1, -2) @ d_out, d_scores)

    def dropout_mask(self, step: Step) -> Tensor | None:
        if self.seed is None:
            return None
        rate = self.request.dropout
        shape = (*self.q[step.batch, step.heads, :, step.rows, 0].shape, step.width)
        self.generator.manual_seed(self.seed + step.number)
        drawn = torch.rand(shape, generator=self.generator, dtype=self.wide, device=self.q.device)
        return (drawn >= rate).to(self.wide).mul_(1.0 / (1.0 - rate) if rate < 1.0 else 0.0)

    def _scores(self, step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """q (scaled), k, v, the masked scores (b, k, G, l, n), and the softcap's slope at each."""
        q = self.q[step.batch, step.heads, :, step.rows] * self.request.scale
        k, v = self.columns(self.k, step), self.columns(self.v, step)
        scores = (_by_key_head(q) @ k.transpose(-1, -2)).unflatten(2, q.shape[2:4])
        slope = None
        if self.request.softcap is not None:
            bounded = scores.div_(self.request.softcap).tanh_()
            slope = 1 - bounded.square()
            scores = bounded * self.request.softcap
        unseen = torch.zeros_like(scores, dtype=torch.bool) if self.careful else None  # pairs that are hidden
        start = 0
        for columns in step.columns if self.request.bias is not None else ():
            place = slice(start, start + columns.stop - columns.start)
            bias = self.request.added(step.rows, columns)
            if bias is not None:
                bias = self.of_heads(bias, step)
                scores[..., place] += bias
                if unseen is not None:
                    unseen[..., place] |= bias == -math.inf
            start = place.stop
        for place, columns in step.masked:
            visible = self.request.visible(step.rows, columns)
            assert visible is not None
            hidden = ~self.of_heads(visible, step)  # (b or 1, k or 1, G or 1, l or 1, width)
            scores[..., place].masked_fill_(hidden, -math.inf)
            if slope is not None:
                slope[..., place].masked_fill_(hidden, 0.0)
            if unseen is not None:
                unseen[..., place] |= hidden
        if unseen is not None:
            scores.masked_fill_(unseen, -math.inf)
            if slope is not None:
                slope.masked_fill_(unseen, 0.0)
            nobody = unseen.all(3).all(2)[..., None]  # (b, k, n, 1)
            k, v = k.masked_fill(nobody, 0.0), v.masked_fill(nobody, 0.0)
            q = q.masked_fill((scores == -math.inf).all(-1)[..., None], 0.0)
        return q, k, v, scores, slope


def _by_key_head(tensor: Tensor) -> Tensor:  # (b, k, G, l, X) -> (b, k, G*l, X): one product for the heads of a group
    return tensor.flatten(2, 3)
