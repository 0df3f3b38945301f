"""GPT: a decoder-only transformer made of `Attention` layers, from GPT-2's form to Llama's."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multihead.cache import KVCache
from multihead.errors import bad_type, bad_value, check_probability, check_size, describe, is_number
from multihead.kernels.autograd import readable
from multihead.masks import causal
from multihead.models import published, saving
from multihead.module import Attention
from multihead.options import check_flags
from multihead.rotary import LinearScaling, Llama3Scaling, NTKScaling, Rotary, Scaling, YarnScaling

if TYPE_CHECKING:
    from typing_extensions import Self

_SCALINGS = {kind.__name__: kind for kind in (LinearScaling, NTKScaling, Llama3Scaling, YarnScaling)}


class MLP(nn.Module):
    """What a token thinks for itself: up to the hidden width, an activation, and down again.

    "swiglu" multiplies what goes up by silu of a second projection (Shazeer, "GLU Variants Improve Transformer", 2020).
    """

    def __init__(self, width: int, hidden: int, kind: str, bias: bool) -> None:
        super().__init__()
        self.kind = kind
        self.gate_proj = nn.Linear(width, hidden, bias) if kind == "swiglu" else None
        self.up_proj = nn.Linear(width, hidden, bias)
        self.down_proj = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        if self.gate_proj is not None:
            return self.down_proj(F.silu(self.gate_proj(x)) * up)
        return self.down_proj(F.gelu(up, approximate="tanh" if self.kind == "gelu_tanh" else "none"))


class Block(nn.Module):
    """A pre-norm transformer block: tokens exchange what they know, then each thinks for itself."""

    def __init__(self, attn: Attention, mlp: MLP, norms: tuple[nn.Module, nn.Module], dropout: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = norms
        self.attn, self.mlp, self.dropout = attn, mlp, nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None, keep: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), cache=cache, keep=keep))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer, pre-norm (Radford et al. 2019), with the options that later ones brought.

    GPT-2 is `position="learned", mlp="gelu_tanh"`, Llama `mlp="swiglu", norm="rms", bias=False`: `from_gpt2` and
    `from_llama` take their published weights. Matrices start normal with a standard deviation of 1 / sqrt(E), those
    that add to the residual stream (`out_proj`, `down_proj`) with 1 / sqrt(2 * layers * E), so that the sum over all
    blocks keeps its size; biases start at 0, norms at 1.

    Args:
        vocabulary: how many different tokens there are.
        width: E.
        layers: how many blocks.
        heads: H of each block.
        kv_heads: K, a divisor of H; by default H.
        head_dim: D, even with rotary positions; by default E / H.
        hidden: width of the MLP; by default 4 E, and 8/3 E (rounded up to a multiple of 8) for "swiglu", whose third
            matrix then adds no parameters.
        context: the most positions there are. Learned positions need it; rotary ones go on beyond it, and for them it
            says no more than the length of training.
        position: "rotary" (Su et al. 2021), in every block; or "learned", added to the embeddings.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they change for longer texts, such as `Llama3Scaling()`; or, as in `config`, a dict of its
            arguments and its name under "kind".
        mlp: "gelu", "gelu_tanh" (its approximation by tanh, as GPT-2 has it) or "swiglu".
        norm: "layer" (Ba et al. 2016) or "rms" (Zhang & Sennrich 2019).
        norm_eps: added to the variance in the norms.
        bias: whether linear maps and layer norms have a bias. The head never has one.
        attn_bias, out_bias: whether the projections to q, k, v and the one out of attention have one, where it is not
            as `bias` says; `out_bias` is by default as `attn_bias`.
        tied: whether the embedding is also the matrix of the head.
        dropout: of the embeddings, of the attention weights and of what each block adds, while training.

    Attributes:
        config: the arguments, as JSON can hold them: `GPT(**model.config)` has the same form.

    Raises:
        ValueError, TypeError: sizes or options that do not fit.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        hidden: int | None = None,
        context: int | None = None,
        position: Literal["rotary", "learned"] = "rotary",
        rope_theta: float = 10000.0,
        rope_scaling: Scaling | Mapping[str, Any] | None = None,
        mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu",
        norm: Literal["layer", "rms"] = "layer",
        norm_eps: float = 1e-5,
        bias: bool = True,
        attn_bias: bool | None = None,
        out_bias: bool | None = None,
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, size in (("vocabulary", vocabulary), ("width", width), ("layers", layers), ("heads", heads)):
            check_size(name, size)
        optional = {"kv_heads": kv_heads, "head_dim": head_dim, "hidden": hidden, "context": context}
        for name, choice in optional.items():
            if choice is not None:
                check_size(name, choice)
        _check_choice("position", position, ("rotary", "learned"))
        _check_choice("mlp", mlp, ("gelu", "gelu_tanh", "swiglu"))
        _check_choice("norm", norm, ("layer", "rms"))
        kv_heads = heads if kv_heads is None else kv_heads
        _check_heads(width, heads, kv_heads, head_dim, position)
        if position == "learned" and context is None:
            otherwise = "There is a learned vector for each position, and no more."
            raise bad_value("context", "an int where position is 'learned'", None, otherwise, "Pass the longest text.")
        if not is_number(norm_eps) or not 0 < norm_eps < 1:
            raise bad_value("norm_eps", "a number between 0 and 1", norm_eps)
        if not is_number(rope_theta) or not 1 < rope_theta < math.inf:
            raise bad_value("rope_theta", "a finite number above 1", rope_theta)
        attn_bias = bias if attn_bias is None else attn_bias
        out_bias = attn_bias if out_bias is None else out_bias
        check_flags(bias=bias, attn_bias=attn_bias, out_bias=out_bias, tied=tied)
        dropout = check_probability("dropout", dropout)
        scaling = _as_scaling(rope_scaling)
        rotary = Rotary(base=rope_theta, scaling=scaling) if position == "rotary" else None
        if hidden is None:
            hidden = -(-width // 3) * 8 if mlp == "swiglu" else 4 * width

        self.vocabulary, self.width, self.context, self.position = vocabulary, width, context, position
        self.config: dict[str, Any] = {
            "vocabulary": vocabulary, "width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads,
            "head_dim": head_dim, "hidden": hidden, "context": context, "position": position, "rope_theta": rope_theta,
            "rope_scaling": None if scaling is None else {"kind": type(scaling).__name__, **vars(scaling)},
            "mlp": mlp, "norm": norm, "norm_eps": norm_eps, "bias": bias, "attn_bias": attn_bias, "out_bias": out_bias,
            "tied": tied, "dropout": dropout,
        }  # fmt: skip

        def make_norm() -> nn.Module:
            return nn.LayerNorm(width, norm_eps, bias=bias) if norm == "layer" else nn.RMSNorm(width, norm_eps)

        def make_block() -> Block:
            attn = Attention(
                width, heads, num_kv_heads=kv_heads, head_dim=head_dim, bias=attn_bias, out_bias=out_bias,
                mask=causal(), position=rotary, dropout=dropout,
            )  # fmt: skip
            return Block(attn, MLP(width, hidden, mlp, bias), (make_norm(), make_norm()), dropout)

        self.embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width) if context and position == "learned" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(make_block() for _ in range(layers))
        self.norm = make_norm()
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)
        self._reset_parameters(layers)

    def _reset_parameters(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("out_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=(self.width * 2 * layers if adds else self.width) ** -0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: Sequence[KVCache] | None = None,
        keep: Tensor | None = None,
        last: bool = False,
    ) -> Tensor:
        """Logits of the token after each.

        Args:
            tokens: (B, L) int64 or int32.
            cache: as `new_cache` makes it: the tokens follow those that it holds, and join them.
            keep: (B, L) bool, True = real token. The others are padding: nobody sees them, they take no position, and
                their own logits say nothing.
            last: only the logits after the last of the L tokens, as generating needs them.

        Returns:
            (B, L, vocabulary), or (B, 1, vocabulary) with `last`.

        Raises:
            ValueError, TypeError: tokens beyond the vocabulary (looked at on the CPU only: elsewhere that would wait
                for the device), more positions than are learned, or an argument of a wrong shape or dtype.
        """
        self._check(tokens, cache, keep)
        x = self.embedding(tokens)  # (B, L, E)
        if self.position_embedding is not None:
            x = x + self.position_embedding(self._places(tokens, cache, keep))
        x = self.dropout(x)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[i], keep)
        x = self.norm(x[:, -1:] if last else x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def new_cache(self, storage: str = "growing", **options: Any) -> list[KVCache]:
        """Empty caches for `forward`, one for each block. The arguments are those of `KVCache`."""
        return [KVCache(storage, **options) for _ in self.blocks]

    def _check(self, tokens: Tensor, cache: Sequence[KVCache] | None, keep: Tensor | None) -> None:
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
            raise bad_type("tokens", "an int64 or int32 tensor (B, L)", tokens)
        if tokens.ndim != 2:
            raise bad_value("tokens", "the shape (B, L)", describe(tokens), "", "For one text pass tokens[None].")
        if tokens.numel() and readable(tokens):
            least, most = (int(bound) for bound in tokens.aminmax())
            if least < 0 or most >= self.vocabulary:
                expected = f"numbers from 0 to {self.vocabulary - 1}, the vocabulary's"
                raise bad_value("tokens", expected, least if least < 0 else most, "There is no vector for it.")
        if cache is not None and len(cache) != len(self.blocks):
            got = f"{len(cache)} of them"
            raise bad_value("cache", f"one for each of {len(self.blocks)} blocks", got, "", "Make it by new_cache().")
        if cache is not None and len({id(part) for part in cache}) < len(cache):
            otherwise = "It would mix the keys of blocks."
            raise bad_value("cache", "another for each block", "one twice", otherwise, "Make it by new_cache().")
        if keep is not None and (not isinstance(keep, Tensor) or keep.dtype != torch.bool):
            raise bad_type("keep", "a bool tensor (B, L), True = real token", keep)
        if keep is not None and keep.shape != tokens.shape:
            raise bad_value("keep", f"the shape of tokens, {tuple(tokens.shape)}", tuple(keep.shape))

    def _places(self, tokens: Tensor, cache: Sequence[KVCache] | None, keep: Tensor | None) -> Tensor:
        """Where the tokens stand, by the learned vectors that there are: (L,) or (B, L)."""
        assert self.context is not None
        L = tokens.shape[1]
        if cache is not None:
            places = cache[0].next_positions(L, keep, tokens.device)
        elif keep is None:
            places = torch.arange(L, device=tokens.device)
        else:
            places = (keep.long().cumsum(-1) - 1).clamp(min=0)  # real tokens alone are counted
        most = L + (cache[0].length if cache is not None else 0)
        if keep is not None and most > self.context:  # padding may make it no more than it seems
            most = int((places + 1).where(keep, 0).amax()) if keep.numel() else 0
        if most > self.context:
            otherwise = "There is no vector for those beyond."
            instead = "Pass fewer tokens, such as the last ones, or take rotary positions."
            raise bad_value("tokens", f"at most {self.context} positions, the context", most, otherwise, instead)
        return places if keep is None else places.clamp(max=self.context - 1)  # padding may lie beyond

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights and `config` as one safetensors file. See `multihead.models.saving.save`."""
        saving.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Self:
        """The model that `save` wrote. See `multihead.models.saving.load`."""
        return saving.load(path, device=device, kind=cls)

    @classmethod
    def from_gpt2(cls, state_dict: Mapping[str, Tensor], *, heads: int | None = None, norm_eps: float = 1e-5) -> Self:
        """GPT-2 with published weights. See `multihead.models.published.from_gpt2`."""
        return published.from_gpt2(cls, state_dict, heads=heads, norm_eps=norm_eps)

    @classmethod
    def from_llama(
        cls,
        state_dict: Mapping[str, Tensor],
        *,
        heads: int,
        context: int | None = None,
        rope_theta: float = 10000.0,
        rope_scaling: Scaling | None = None,
        norm_eps: float = 1e-5,
    ) -> Self:
        """Llama, and what is made like it, with published weights. See `multihead.models.published.from_llama`."""
        options: dict[str, Any] = {"context": context, "rope_theta": rope_theta, "rope_scaling": rope_scaling}
        return published.from_llama(cls, state_dict, heads=heads, norm_eps=norm_eps, **options)


def loss_of(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; tokens and targets are (B, L), targets one place ahead."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise bad_value(name, f"one of {', '.join(map(repr, choices))}", repr(value))


def _check_heads(width: int, heads: int, kv_heads: int, head_dim: int | None, position: str) -> None:
    if heads % kv_heads:
        otherwise = "Query heads could not be shared evenly among the key/value heads."
        raise bad_value("kv_heads", f"a divisor of heads={heads}", kv_heads, otherwise)
    if head_dim is None and width % heads:
        otherwise = "Each head's width is width / heads unless told."
        raise bad_value("width", f"a multiple of heads={heads}", width, otherwise, "Or pass head_dim=.")
    D = width // heads if head_dim is None else head_dim
    if position == "rotary" and D % 2:
        otherwise = "Rotary positions turn channels in pairs."
        raise bad_value("head_dim", "an even number", D, otherwise, "Choose another width, or position='learned'.")


def _as_scaling(given: object) -> Scaling | None:
    """A scaling, given as it is or as `config` writes it."""
    if isinstance(given, Mapping):
        arguments = dict(given)
        kind = arguments.pop("kind", None)
        _check_choice("rope_scaling['kind']", kind, tuple(_SCALINGS))
        try:
            return _SCALINGS[kind](**arguments)
        except TypeError:
            raise bad_value("rope_scaling", f"the arguments of {kind}", ", ".join(arguments) or "none") from None
    if given is not None and type(given) not in _SCALINGS.values():
        raise bad_type("rope_scaling", f"None or one of {', '.join(_SCALINGS)}, or a dict of its arguments", given)
    return given  # type: ignore[return-value]
