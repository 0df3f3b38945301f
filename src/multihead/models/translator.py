"""`Translator`: the encoder-decoder transformer of "Attention Is All You Need" (Vaswani et al. 2017).

The encoder reads the source once; the decoder writes the target from left to right, looking at what it has written
and, by cross-attention, at what the encoder made of the source.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multihead.cache import KVCache
from multihead.errors import bad_type, bad_value, check_probability, check_size, describe
from multihead.kernels.autograd import readable
from multihead.masks import causal
from multihead.module import Attention
from multihead.options import check_flags
from multihead.rotary import Rotary

POSITIONS = ("sinusoidal", "rotary")


class _Block(nn.Module):
    """What both kinds of blocks share: an MLP, and a norm and a residual around each sublayer."""

    def __init__(self, width: int, hidden: int, pre_norm: bool, dropout: float) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        linears = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.mlp = nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.Dropout(dropout))
        self.mlp_norm = nn.LayerNorm(width)
        for linear in linears:
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def around(self, norm: nn.Module, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x and what the sublayer adds to it. The paper's form norms the sum; normed inputs train more easily."""
        return x + sublayer(norm(x)) if self.pre_norm else norm(x + sublayer(x))


class EncoderBlock(_Block):
    """Source tokens exchange what they know, then each thinks for itself."""

    def __init__(self, width: int, heads: int, hidden: int, pre_norm: bool, dropout: float, rotary: bool) -> None:
        super().__init__(width, hidden, pre_norm, dropout)
        self.attn = Attention(width, heads, position=Rotary() if rotary else None, out_dropout=dropout)
        self.attn_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """x (B, S, E), keep (B, S) or None."""
        x = self.around(self.attn_norm, x, lambda x: self.attn(x, keep=keep))
        return self.around(self.mlp_norm, x, self.mlp)


class DecoderBlock(_Block):
    """Target tokens look at those before them, then at the source, then each thinks for itself."""

    def __init__(self, width: int, heads: int, hidden: int, pre_norm: bool, dropout: float, rotary: bool) -> None:
        super().__init__(width, hidden, pre_norm, dropout)
        position = Rotary() if rotary else None
        self.attn = Attention(width, heads, mask=causal(), position=position, out_dropout=dropout)
        self.cross = Attention(width, heads, out_dropout=dropout)  # a source has no place relative to the target
        self.attn_norm, self.cross_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(
        self,
        x: Tensor,
        keep: Tensor | None,
        memory: Tensor | None,
        memory_keep: Tensor | None,
        caches: tuple[KVCache | None, KVCache | None] = (None, None),
        seen: list[Tensor] | None = None,
    ) -> Tensor:
        """x (B, L, E), memory (B, S, E) or caches in its place. Weights (B, H, L, S) are added to `seen`, if given."""

        def cross(x: Tensor) -> Tensor:
            if seen is None:
                return self.cross(x, memory, keep=memory_keep, cache=caches[1])
            out, weights = self.cross(x, memory, keep=memory_keep, weights=True)
            seen.append(weights)
            return out

        x = self.around(self.attn_norm, x, lambda x: self.attn(x, keep=keep, cache=caches[0]))
        x = self.around(self.cross_norm, x, cross)
        return self.around(self.mlp_norm, x, self.mlp)


class DecoderCache:
    """What decoding in steps need not compute again: each block's keys and values of the target so far, which grow, and
    of the source, made once. Made by `Translator.cache`."""

    def __init__(self, own: list[KVCache], cross: list[KVCache], rows: Tensor) -> None:
        self.own, self.cross = own, cross  # of each block
        self._sentences = rows  # (B,) which row of the memory each row reads

    def reorder(self, rows: Tensor) -> None:
        """Let row i continue what was row rows[i], for beam search; rows (B',) may repeat rows and drop others."""
        for cache in self.own:
            if cache.batch_shape is not None:  # before the first step there is nothing to order
                cache.reorder(rows)
        sentences = self._sentences[rows]
        if not torch.equal(sentences, self._sentences):  # among hypotheses of one sentence the source is the same
            for cache in self.cross:
                cache.reorder(rows)
        self._sentences = sentences


class Translator(nn.Module):
    """An encoder-decoder transformer (Vaswani et al. 2017): from tokens of a source to tokens of a target.

    Args:
        source_vocabulary, target_vocabulary: how many different tokens there are on each side.
        width: E, a multiple of 2 * heads.
        layers: how many blocks the encoder has, and the decoder too unless told.
        heads: H of each attention.
        decoder_layers: how many blocks the decoder has; by default `layers`.
        hidden: width of the MLPs' middle; by default 4 * width.
        pre_norm: whether sublayers get normed inputs (Xiong et al. 2020). False: the paper's form, which norms the sums
            and needs a warm-up of the learning rate.
        shared_embeddings: whether source and target have one table of embeddings; then the vocabularies are one.
        tied: whether the output has the target's embeddings as its weights (Press and Wolf 2017); else its own.
        dropout: while training, of embeddings and of what sublayers add.
        position: "sinusoidal", added to the embeddings as in the paper, or "rotary", in self-attention.

    The paper's base model is Translator(V, V, 512, 6, 8, pre_norm=False, shared_embeddings=True).

    Raises:
        ValueError, TypeError: sizes or options that do not fit, before any parameter is made.
    """

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        *,
        decoder_layers: int | None = None,
        hidden: int | None = None,
        pre_norm: bool = True,
        shared_embeddings: bool = False,
        tied: bool = True,
        dropout: float = 0.1,
        position: str = "sinusoidal",
    ) -> None:
        super().__init__()
        decoder_layers = layers if decoder_layers is None else decoder_layers
        hidden = 4 * check_size("width", width) if hidden is None else hidden
        sizes: dict[str, Any] = {"source_vocabulary": source_vocabulary, "target_vocabulary": target_vocabulary}
        sizes |= {"width": width, "layers": layers, "heads": heads, "decoder_layers": decoder_layers, "hidden": hidden}
        for name, size in sizes.items():
            check_size(name, size)
        flags = {"pre_norm": pre_norm, "shared_embeddings": shared_embeddings, "tied": tied}
        check_flags(**flags)
        if position not in POSITIONS:
            raise bad_value("position", f"one of {', '.join(POSITIONS)}", describe(position))
        if width % (2 * heads):
            otherwise = "Each head has width / heads of it, and positions act on pairs of numbers."
            raise bad_value("width", f"a multiple of 2 * heads={2 * heads}", width, otherwise)
        if shared_embeddings and source_vocabulary != target_vocabulary:
            expected = f"source_vocabulary={source_vocabulary} with shared_embeddings"
            raise bad_value("target_vocabulary", expected, target_vocabulary, "One table has one number of tokens.")
        self.config = sizes | flags | {"dropout": check_probability("dropout", dropout), "position": position}
        self.width, self.is_rotary = width, position == "rotary"
        self.source_embedding = nn.Embedding(source_vocabulary, width)
        self.target_embedding = self.source_embedding if shared_embeddings else nn.Embedding(target_vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        block = (width, heads, hidden, pre_norm, dropout, self.is_rotary)
        self.encoder = nn.ModuleList(EncoderBlock(*block) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderBlock(*block) for _ in range(decoder_layers))
        self.encoder_norm = nn.LayerNorm(width) if pre_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if pre_norm else nn.Identity()
        self.output = None if tied else nn.Linear(width, target_vocabulary, bias=False)
        for table in dict.fromkeys((self.source_embedding, self.target_embedding)):
            nn.init.normal_(table.weight, std=width**-0.5)  # of length 1: the logits start at about 1 each

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_keep: Tensor | None = None,
        target_keep: Tensor | None = None,
    ) -> Tensor:
        """Predict the token after each target token, given the source and the target up to it.

        Args:
            source: (B, S) int64 tokens.
            target: (B, L) int64 tokens, a start token first.
            source_keep, target_keep: (B, S) and (B, L) bool, True = real token. Others change nothing, wherever they
                stand; what comes out at their places means nothing.

        Returns:
            Logits (B, L, target_vocabulary).

        Raises:
            ValueError, TypeError: an input does not fit.
        """
        self._check_target(target, target_keep)
        memory = self.encode(source, source_keep)
        return self.decode(target, memory, memory_keep=source_keep, keep=target_keep)

    def cross_weights(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_keep: Tensor | None = None,
        target_keep: Tensor | None = None,
    ) -> list[Tensor]:
        """Which source tokens each prediction of `forward` looked at: (B, H, L, S) of each decoder block, rows that sum
        to 1. Arguments and errors: as of `forward`."""
        self._check_target(target, target_keep)
        memory = self.encode(source, source_keep)
        _check_batch(target, memory)
        seen: list[Tensor] = []
        self._decoded(target, memory, source_keep, target_keep, None, seen)
        return seen

    def encode(self, source: Tensor, keep: Tensor | None = None) -> Tensor:
        """Read the source, tokens (B, S) with `keep` as in `forward`: gives the memory (B, S, E)."""
        check_tokens("source", source, keep, self.source_embedding.num_embeddings, "S")
        x = self._embedded(self.source_embedding, source, _positions(source, keep))
        for block in self.encoder:
            x = block(x, keep)
        return self.encoder_norm(x)

    def cache(self, memory: Tensor, keep: Tensor | None = None) -> DecoderCache:
        """What `decode` needs to go on in steps, for a memory (B, S, E) and its `keep` (B, S)."""
        blocks: Any = self.decoder  # a list of modules, to the type checker
        cross = [block.cross.context_cache(memory, keep=keep) for block in blocks]
        return DecoderCache([KVCache() for _ in cross], cross, torch.arange(memory.shape[0], device=memory.device))

    def decode(
        self,
        target: Tensor,
        memory: Tensor | None = None,
        *,
        memory_keep: Tensor | None = None,
        keep: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Predict the token after each target token (B, L): all at once, or with a `cache` the next L in place of all.

        Args:
            target, keep: as `target` and `target_keep` of `forward`.
            memory: (B, S, E) of `encode`, with `memory_keep` (B, S); not with a cache, which has read it.
            cache: of `Translator.cache`; the target tokens are appended to it.

        Returns, raises: as `forward`.
        """
        self._check_target(target, keep)
        if (memory is None) == (cache is None):
            raise bad_value("decode(memory, cache=)", "exactly one of the two", "none" if memory is None else "both")
        if memory is not None:
            _check_batch(target, memory)
        return self._decoded(target, memory, memory_keep, keep, cache, None)

    def _decoded(
        self,
        target: Tensor,
        memory: Tensor | None,
        memory_keep: Tensor | None,
        keep: Tensor | None,
        cache: DecoderCache | None,
        seen: list[Tensor] | None,
    ) -> Tensor:
        """Logits (B, L, target_vocabulary); to `seen`, if it is given, each block adds its weights."""
        if cache is None:
            positions = _positions(target, keep)
        else:
            positions = cache.own[0].next_positions(target.shape[1], keep, target.device)
        x = self._embedded(self.target_embedding, target, positions)
        for i, block in enumerate(self.decoder):
            caches = (None, None) if cache is None else (cache.own[i], cache.cross[i])
            x = block(x, keep, memory, memory_keep, caches, seen)
        x = self.decoder_norm(x)
        return F.linear(x, self.target_embedding.weight) if self.output is None else self.output(x)

    def _check_target(self, target: Tensor, keep: Tensor | None) -> None:
        check_tokens("target", target, keep, self.target_embedding.num_embeddings, "L")

    def _embedded(self, table: nn.Embedding, tokens: Tensor, positions: Tensor) -> Tensor:
        x = table(tokens) * math.sqrt(self.width)
        if not self.is_rotary:
            x = x + sinusoids(positions, self.width).to(x.dtype)
        return self.dropout(x)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """The paper's positional encoding: of each pair of numbers the sine and the cosine of position / 10000^(2i/E).

    Args:
        positions: of any shape.
        width: E, even.

    Returns:
        (*positions, E) in float32.
    """
    pairs = torch.arange(0, width, 2, device=positions.device)
    angles = positions[..., None] * torch.exp(pairs * (-math.log(10_000.0) / width))
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)


def check_tokens(name: str, tokens: object, keep: object, vocabulary: int, letter: str) -> None:
    """Whether tokens (B, letter) are indices of a vocabulary (looked at on the CPU only: elsewhere that would wait for
    the device), and `keep` fits them."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        raise bad_type(name, f"int64 tokens (B, {letter})", tokens)
    if tokens.ndim != 2:
        raise bad_value(name, f"the shape (B, {letter})", describe(tokens), "", "A single row is tokens[None].")
    if tokens.numel() and readable(tokens):
        least, most = (int(bound) for bound in tokens.aminmax())
        if least < 0 or most >= vocabulary:
            got = f"{least if least < 0 else most}"
            raise bad_value(name, f"tokens from 0 to {vocabulary - 1}", got, "It has no embedding.")
    if keep is None:
        return
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise bad_type(f"keep of {name}", f"a bool tensor (B, {letter}), True = real token", keep)
    if keep.shape != tokens.shape:
        raise bad_value(f"keep of {name}", f"the shape of {name}, {tuple(tokens.shape)}", describe(keep))


def _check_batch(target: Tensor, memory: Tensor) -> None:
    if memory.shape[0] != target.shape[0]:
        raise bad_value("target", f"the B of the source, {memory.shape[0]}", describe(target))


def _positions(tokens: Tensor, keep: Tensor | None) -> Tensor:
    """Where tokens stand, (L,) or (B, L): by how many real ones there are before, so that padding moves nothing."""
    if keep is None:
        return torch.arange(tokens.shape[1], device=tokens.device)
    return keep.cumsum(1) - keep.to(torch.int64)
