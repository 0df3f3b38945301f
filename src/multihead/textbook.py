"""From one head to the real thing: five classes, to be read from top to bottom.

Each is complete, needs torch only, and gives the same numbers as `multihead.Attention` with the same weights:

    SelfAttention            one head: every token looks at every token
    MultiHeadSelfAttention   several heads side by side, a mask, dropout
    CrossAttention           queries from one sequence, keys and values from another
    PackedAttention          the three projections in one matrix
    CausalSelfAttention      the layer of a GPT: no token sees a later one

They are one formula, from "Attention Is All You Need" (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762):

    scores  = q k^T / sqrt(D)     how well each query matches each key; D is their width
    weights = softmax(scores)     over the keys, so that each query's weights sum to 1
    output  = weights v           the mean of the values, weighted

The letters: L target length (queries), S source length (keys and values), N batch, E embed_dim, H heads, D = E / H the
width of one head. The first four classes take the sequence first, (L, N, E), as torch.nn.MultiheadAttention does, and
give the weights too, before dropout, for looking at. The last is batch first, as GPT code is, with B, T, C for N, L, E.

They make every score, L x S for each head, so that one can see them. `multihead.attention` does without that.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """One head: every token asks (q) all tokens what they offer (k), and takes the mean of what they hold (v).

    Input (L, N, E), or (L, E) without a batch. Gives the output, of the same shape, and the weights, (N, L, L) or
    (L, L): row i says how much token i takes from each token. ValueError or TypeError for another input.

    Classic mistake:
    - `softmax(dim=-2)` runs over the queries: nothing fails, but the weights of a query do not sum to 1.
    """

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        _check_sizes(embed_dim=embed_dim)
        self.embed_dim = embed_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _check_input("x", x, "(L, N, E) or (L, E)", self.embed_dim, axes=(2, 3))
        x = x.movedim(0, -2)  # (N, L, E), so that @ multiplies per batch item; (L, E) stays as it is
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)  # (N, L, E) each
        # A dot product of E random numbers grows like sqrt(E). Undivided, the softmax would soon pick one key only.
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.embed_dim)  # (N, L, L)
        weights = scores.softmax(dim=-1)  # (N, L, L), each row sums to 1
        out = weights @ v  # (N, L, E)
        return out.movedim(-2, 0), weights  # (L, N, E), (N, L, L)


class MultiHeadSelfAttention(nn.Module):
    """H heads look at once, each in its own share D = E / H of the width; `out_proj` mixes what they bring.

    Input (L, N, E); mask bool, True = blocked, (L, L) or what broadcasts to (N, H, L, L): padding (N, L) is given as
    padding[:, None, None]. Gives (L, N, E) and weights (N, H, L, L). ValueError or TypeError for what does not fit.

    Classic mistakes:
    - sqrt(E) for sqrt(D): nothing fails, but scores are sqrt(H) times too small, and the weights too even.
    - `masked_fill(mask, -1e9)` in float16, whose lowest number is -65504: RuntimeError, "value cannot be converted to
      type c10::Half without overflow". `torch.tensor(-1e9).half()` is -inf without a word.
    - `view` after `transpose` or `permute`, for `reshape` or `contiguous().view`: H and D are not neighbours in memory
      then. RuntimeError, "view size is not compatible with input tensor's size and stride".
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        _check_heads(embed_dim=embed_dim, num_heads=num_heads)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, nn.Dropout(_rate("dropout", dropout))
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        _check_input("x", x, "(L, N, E)", self.embed_dim)
        (L, N, E), H, D = x.shape, self.num_heads, self.embed_dim // self.num_heads
        blocked = _mask_or_nothing(mask, (N, H, L, L), x.device)
        q = self.q_proj(x).unflatten(-1, (H, D)).permute(1, 2, 0, 3)  # (L, N, E) to (L, N, H, D) to (N, H, L, D)
        k = self.k_proj(x).unflatten(-1, (H, D)).permute(1, 2, 0, 3)  # (N, H, L, D)
        v = self.v_proj(x).unflatten(-1, (H, D)).permute(1, 2, 0, 3)  # (N, H, L, D)
        scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # (N, H, L, L)
        # A row that sees nothing: filled with -inf it would be 0 / 0 = NaN. The lowest number makes it even, then 0.
        scores = scores.masked_fill(blocked, torch.finfo(scores.dtype).min)  # (N, H, L, L)
        weights = scores.softmax(dim=-1).masked_fill(blocked, 0.0)  # (N, H, L, L)
        out = self.dropout(weights) @ v  # (N, H, L, D)
        out = out.permute(2, 0, 1, 3).reshape(L, N, E)  # to (L, N, H, D) to (L, N, E): the heads side by side
        return self.out_proj(out), weights  # (L, N, E), (N, H, L, L)


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another, each with a length and a width of its own.

    query (L, N, E), key (S, N, kdim), value (S, N, vdim), kdim and vdim being E unless told; mask bool, True = blocked,
    (L, S) or what broadcasts to (N, H, L, S). Gives (L, N, E) and weights (N, H, L, S). Errors as above.

    Classic mistakes:
    - `nn.Linear(embed_dim, kdim)`: it takes (in, out), and keys come in with kdim and leave with E. RuntimeError, "mat1
      and mat2 shapes cannot be multiplied", as soon as kdim is not E.
    - `k.view(L, N, H, D)`: the keys' length is S. RuntimeError, "is invalid for input of size"; but not while L = S.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, kdim: int | None = None, vdim: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        kdim, vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        _check_heads(embed_dim=embed_dim, num_heads=num_heads)
        _check_sizes(kdim=kdim, vdim=vdim)
        self.dropout = nn.Dropout(_rate("dropout", dropout))
        self.num_heads, self.widths = num_heads, (embed_dim, kdim, vdim)
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(kdim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(vdim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        _check_sources(query, key, value, self.widths)
        (L, N, E), S, H, D = query.shape, key.shape[0], self.num_heads, self.widths[0] // self.num_heads
        blocked = _mask_or_nothing(mask, (N, H, L, S), query.device)
        # Only the last axis is cut, E into (H, D), so that no length can be mistaken for another.
        q = self.q_proj(query).unflatten(-1, (H, D)).permute(1, 2, 0, 3)  # (L, N, E) to (L, N, H, D) to (N, H, L, D)
        k = self.k_proj(key).unflatten(-1, (H, D)).permute(1, 2, 0, 3)  # (S, N, kdim) to (S, N, E) to (N, H, S, D)
        v = self.v_proj(value).unflatten(-1, (H, D)).permute(1, 2, 0, 3)  # (S, N, vdim) to (S, N, E) to (N, H, S, D)
        scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # (N, H, L, S)
        scores = scores.masked_fill(blocked, torch.finfo(scores.dtype).min)  # (N, H, L, S), the lowest number, as above
        weights = scores.softmax(dim=-1).masked_fill(blocked, 0.0)  # (N, H, L, S), 0 in a row that sees nothing
        out = (self.dropout(weights) @ v).permute(2, 0, 1, 3).reshape(L, N, E)  # (N, H, L, D) to (L, N, E)
        return self.out_proj(out), weights  # (L, N, E), (N, H, L, S)


class PackedAttention(nn.Module):
    """The matrices of q, k and v stacked into one, `in_proj`, in this order: self attention is one product, not three.

    query (L, N, E), key and value (S, N, E); mask, results and errors as above. Which products to make is told by which
    objects come in, as torch.nn.functional._in_projection_packed does it: copies of x give the same numbers by three.

    Classic mistake:
    - `in_proj(query).chunk(3)` whatever came: nothing fails and self attention is right, but key and value are ignored.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        _check_heads(embed_dim=embed_dim, num_heads=num_heads)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, nn.Dropout(_rate("dropout", dropout))
        self.in_proj, self.out_proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        _check_sources(query, key, value, (self.embed_dim,) * 3)
        (L, N, E), S, H, D = query.shape, key.shape[0], self.num_heads, self.embed_dim // self.num_heads
        blocked = _mask_or_nothing(mask, (N, H, L, S), query.device)
        W, b = self.in_proj.weight, self.in_proj.bias  # (3E, E), (3E,)
        if query is key and key is value:  # self attention: one product
            q, k, v = self.in_proj(query).chunk(3, dim=-1)  # (L, N, 3E) to three (L, N, E)
        elif key is value:  # encoder-decoder attention: two
            q = F.linear(query, W[:E], b[:E])  # (L, N, E)
            k, v = F.linear(key, W[E:], b[E:]).chunk(2, dim=-1)  # (S, N, 2E) to two (S, N, E)
        else:  # three
            (Wq, Wk, Wv), (bq, bk, bv) = W.chunk(3), b.chunk(3)  # (E, E) each, (E,) each
            q, k, v = F.linear(query, Wq, bq), F.linear(key, Wk, bk), F.linear(value, Wv, bv)  # (L or S, N, E)
        q = q.unflatten(-1, (H, D)).permute(1, 2, 0, 3)  # (L, N, E) to (L, N, H, D) to (N, H, L, D)
        k = k.unflatten(-1, (H, D)).permute(1, 2, 0, 3)  # (N, H, S, D)
        v = v.unflatten(-1, (H, D)).permute(1, 2, 0, 3)  # (N, H, S, D)
        scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # (N, H, L, S)
        scores = scores.masked_fill(blocked, torch.finfo(scores.dtype).min)  # (N, H, L, S), the lowest number, as above
        weights = scores.softmax(dim=-1).masked_fill(blocked, 0.0)  # (N, H, L, S), 0 in a row that sees nothing
        out = (self.dropout(weights) @ v).permute(2, 0, 1, 3).reshape(L, N, E)  # (N, H, L, D) to (L, N, E)
        return self.out_proj(out), weights  # (L, N, E), (N, H, L, S)


class CausalSelfAttention(nn.Module):
    """The attention of a GPT (Radford et al., 2019): batch first, and token i sees tokens 0 to i.

    Input and output (B, T, C), C = n_embd, T up to block_size. Each token sees itself, so no row sees nothing.
    `visible`, the lower triangle, is a buffer: no parameter, but it moves and is saved with the model. Errors as above.

    Classic mistakes:
    - T > block_size unchecked: the triangle cannot be cut larger. RuntimeError, with 5 and 4 "The size of tensor a
      (4) must match the size of tensor b (5)".
    - `if self.dropout > 0` where it is an nn.Dropout: TypeError, "'>' not supported between instances of 'Dropout' and
      'int'", at the first call. Its rate is `self.dropout.p`; it does nothing in eval() by itself.
    """

    visible: Tensor

    def __init__(self, n_embd: int, n_heads: int, block_size: int, bias: bool = True, drop_rate: float = 0.1) -> None:
        super().__init__()
        _check_heads(n_embd=n_embd, n_heads=n_heads)
        _check_sizes(block_size=block_size)
        self.n_embd, self.n_heads, self.block_size = n_embd, n_heads, block_size
        self.dropout, self.out_dropout = nn.Dropout(_rate("drop_rate", drop_rate)), nn.Dropout(drop_rate)
        self.qkv_proj, self.out_proj = nn.Linear(n_embd, 3 * n_embd, bias), nn.Linear(n_embd, n_embd, bias)
        self.register_buffer("visible", torch.ones(block_size, block_size, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        _check_input("x", x, "(B, T, C)", self.n_embd)
        if x.shape[1] > self.block_size:
            raise ValueError(f"x: expected T up to block_size={self.block_size}, got {x.shape[1]}. Cut it shorter.")
        B, T, C = x.shape
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)  # (B, T, 3C) to three (B, T, C)
        q = q.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, T, H, D) to (B, H, T, D)
        k = k.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, H, T, D)
        v = v.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, H, T, D)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, T)
        scores = scores.masked_fill(~self.visible[:T, :T], -math.inf)  # (B, H, T, T), exp(-inf) = 0: no later token
        weights = self.dropout(scores.softmax(dim=-1))  # (B, H, T, T)
        out = (weights @ v).transpose(1, 2).reshape(B, T, C)  # (B, H, T, D) to (B, T, H, D) to (B, T, C)
        return self.out_dropout(self.out_proj(out))  # (B, T, C)


# The checks, apart so that the classes stay short. All come before any work on tensors. -------------------------------


def _check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name}: expected an int, got {size!r}.")
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}.")


def _check_heads(**sizes: int) -> None:
    """Of the width and the number of heads, by their names in the caller."""
    _check_sizes(**sizes)
    (width, E), (heads, H) = sizes.items()
    if E % H:
        raise ValueError(
            f"{width}: expected a multiple of {heads}={H}, got {E}. Each head has {width} / {heads} of it."
        )


def _rate(name: str, rate: float) -> float:
    """The rate of a dropout, if it is one."""
    if not isinstance(rate, int | float) or isinstance(rate, bool):
        raise TypeError(f"{name}: expected a number from 0 to 1, got {rate!r}. Pass the rate itself, such as 0.1.")
    if not 0 <= rate <= 1:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {rate}. It is the share that is dropped.")
    return rate


def _check_input(name: str, x: Tensor, form: str, width: int, axes: tuple[int, ...] = (3,)) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor {form}, got {type(x).__name__}.")
    if x.ndim not in axes or x.shape[-1] != width:
        raise ValueError(f"{name}: expected the shape {form} with {width} as the last axis, got {tuple(x.shape)}.")


def _check_sources(query: Tensor, key: Tensor, value: Tensor, widths: tuple[int, int, int]) -> None:
    _check_input("query", query, "(L, N, E)", widths[0])
    _check_input("key", key, "(S, N, kdim)", widths[1])
    _check_input("value", value, "(S, N, vdim)", widths[2])
    if key.shape[:2] != value.shape[:2]:
        raise ValueError(f"value: expected S and N of key, {tuple(key.shape[:2])}, got {tuple(value.shape[:2])}.")
    if key.shape[1] != query.shape[1]:
        N, instead = query.shape[1], "The sequence comes first: is the batch in the first place?"
        raise ValueError(f"key: expected N={N} as in query, got {key.shape[1]}. {instead}")


def _mask_or_nothing(mask: Tensor | None, full: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """The mask if it fits (N, H, L, S); without one, nothing is blocked."""
    if mask is None:
        return torch.zeros(full[2:], dtype=torch.bool, device=device)  # (L, S)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: expected a bool tensor, True = blocked, got {got}. Numbers would not hide anything.")
    if mask.ndim not in (2, 4) or any(m not in (1, n) for m, n in zip(mask.shape, full[-mask.ndim :], strict=True)):
        instead = "One of (N*H, L, S) becomes it by mask.unflatten(0, (N, H))."
        raise ValueError(f"mask: expected (L, S) or (N, H, L, S), here {full}, got {tuple(mask.shape)}. {instead}")
    return mask
