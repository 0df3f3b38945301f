"""`AttentionLayer`: project, normalise, position, attend, gate, project out.

It is what `Attention` (`module.py`) shares with the drop-in for torch.nn.MultiheadAttention (`compat.py`): all but the
way it is called and the names of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from multihead import whole
from multihead.attention import attended, attention, attention_over
from multihead.cache import KVCache
from multihead.cache_calls import CacheCalls
from multihead.cache_format import Stored
from multihead.cache_ledger import Step
from multihead.errors import bad_type, bad_value, check_probability, check_size, describe
from multihead.layouts import Layout
from multihead.masks import Mask, as_mask
from multihead.options import check_flags, check_head_dim, check_kv_heads, check_number, check_position
from multihead.plane import Plane, default_positions
from multihead.positions import Position
from multihead.projections import Projections, ProjectionView
from multihead.request import check_scores
from multihead.watching import Join, Seen, Watcher
from multihead.weights import Look, attention_with_weights

if TYPE_CHECKING:
    from typing_extensions import Self


class AttentionLayer(CacheCalls, Projections):
    """What a layer of attention is made of and computes. The arguments are those of `Attention`."""

    watcher: Watcher | None = None  # is told of each call

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        out_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        packed: bool | None = None,
        position: Position | None = None,
        qk_norm: bool = False,
        gate: bool = False,
        sinks: bool = False,
        softcap: float | None = None,
        scale: float | None = None,
        mask: Mask | Tensor | None = None,
        dropout: float = 0.0,
        out_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # by name: the drop-in is also a torch.nn.MultiheadAttention, which would make its own
        self.embed_dim = check_size("embed_dim", embed_dim)
        self.num_heads = check_size("num_heads", num_heads)
        self.num_kv_heads = check_kv_heads(num_heads, num_kv_heads)
        self.head_dim = check_head_dim(embed_dim, num_heads, head_dim)
        sizes = {"value_dim": value_dim, "kdim": kdim, "vdim": vdim, "out_dim": out_dim}
        given = {name: check_size(name, size) for name, size in sizes.items() if size is not None}
        self.value_dim = given.get("value_dim", self.head_dim)
        self.kdim, self.vdim = given.get("kdim", embed_dim), given.get("vdim", embed_dim)
        self.out_dim = given.get("out_dim", embed_dim)
        check_flags(bias=bias, out_bias=out_bias, packed=packed, qk_norm=qk_norm, gate=gate, sinks=sinks)
        if position is not None:
            check_position(position).check(num_heads, self.head_dim)
        self.softcap, self.scale = check_number("softcap", softcap, above_zero=True), check_number("scale", scale)
        self.mask = None if mask is None else as_mask(mask)
        self.dropout = check_probability("dropout", dropout)
        check_probability("out_dropout", out_dropout)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
            raise bad_type("dtype", "a floating point or complex dtype such as torch.float32, or None", str(dtype))
        if dtype is not None and dtype.is_complex:
            rotates = position is not None and position.rotates
            for name, asked in (("qk_norm", qk_norm), ("gate", gate), ("sinks", sinks), ("position", rotates)):
                if asked:
                    got = describe(position) if name == "position" else True
                    raise bad_value(name, f"left out of a layer of {dtype}", got, "It is defined for real numbers.")
        if packed and self.kdim != self.vdim:
            otherwise = "One projection would need one width for the inputs of k and v."
            got = f"kdim={self.kdim}, vdim={self.vdim}"
            raise bad_value("packed", "kdim = vdim where it is True", got, otherwise, "Leave packed out.")

        make: dict[str, Any] = {"device": device, "dtype": dtype}
        self.make_projections(packed is not False, bias, **make)
        heads_width = num_heads * self.value_dim
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **make) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **make) if qk_norm else None
        self.position = position
        self.sinks = nn.Parameter(torch.empty(num_heads, **make)) if sinks else None
        self.gate_proj = nn.Linear(embed_dim, heads_width, bias, **make) if gate else None
        self.out_proj = nn.Linear(heads_width, self.out_dim, bias if out_bias is None else out_bias, **make)
        self.out_dropout = nn.Dropout(out_dropout) if out_dropout else None
        self._reset_own_parameters()  # not those of a position: it may be shared with other layers, or loaded

    def reset_parameters(self) -> None:
        """Draw all parameters anew.

        Matrices are Xavier-uniform, each of q, k, v for itself, so that packed and split layouts have one law, and with
        one seed the same numbers; biases and sinks 0, norms 1, a learned position by its own law.
        """
        self._reset_own_parameters()
        reset: Callable[[], None] | None = getattr(self.position, "reset_parameters", None)
        if reset is not None:
            reset()

    def _reset_own_parameters(self) -> None:
        for projection, rows in self.rows_by_part().values():
            _draw(projection.weight, rows)
        for projection in filter(None, (self.gate_proj, self.out_proj)):
            _draw(projection.weight, slice(None))
        for module in self.children():
            if isinstance(module, ProjectionView):
                continue  # the bias is a parameter of the layer
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def extra_repr(self) -> str:
        """The configuration, as the constructor takes it."""
        told = [f"{self.embed_dim}, {self.num_heads}", f"num_kv_heads={self.num_kv_heads}", f"head_dim={self.head_dim}"]
        usual: dict[str, object] = {
            "value_dim": self.head_dim,
            "kdim": self.embed_dim,
            "vdim": self.embed_dim,
            "out_dim": self.embed_dim,
        }
        usual |= {"softcap": None, "scale": None, "mask": None, "dropout": 0.0}
        told += [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        told += ["sinks=True"] if self.sinks is not None else []
        shown_below = isinstance(self.position, nn.Module) or self.position is None
        return ", ".join(told if shown_below else [*told, f"position={self.position}"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.mask = None if self.mask is None else as_mask(self.mask)  # a tensor, if somebody has set one
        if self.mask is not None and self.mask.tensors():  # no parameters, but they go where the parameters go
            at = next(iter(self.mask.tensors().values())).device
            self.mask = self.mask.to(fn(torch.empty(0, device=at)).device)
        return self

    def compute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        look: Look | None,
        *,
        layouts: tuple[Layout | None, Layout | None] = (None, None),
        bias: Tensor | Position | None = None,
        q_positions: Tensor | None = None,
        k_positions: Tensor | None = None,
        cache: KVCache | None = None,
        step: Step | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Everything between the inputs and the output, once the inputs are checked.

        Args:
            query, key, value: (*batch, tokens, width), or as `layouts` says.
            mask: as `joined` gave it.
            look: which weights to give; None: none.
            layouts: how the tokens of query, and those of key and value, lie in memory; None = batch first.
            bias: as `joined` gave it.
            q_positions, k_positions: as `attention` takes them.
            cache: attended to, and unless it is frozen, key and value are added to it first.
            step: what `cache_step` gave for it.

        Returns:
            (*batch, L, out_dim), or as the layout of query has it; weights (*batch, H, L, S), (*batch, L, S) or None.
        """
        options: dict[str, Any] = {"bias": bias, "q_positions": q_positions, "k_positions": k_positions}
        options |= {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}
        # Of few tokens each argument that is passed on costs its part of a per cent, so only those that say something.
        scores = {name: option for name, option in options.items() if option is not None}
        is_bare = query is key and key is value and mask is None and layouts[0] is None and not scores
        looks = look is not None and look.average and not look.lazy  # what is lazy is made for less
        if is_bare and cache is None and whole.why_not(self, query, looks) is None:
            found = whole.run(self, query, look)
            if self.watcher is not None:
                q, k, v = self.project(query, key, value, layouts)
                self.watcher(Seen(q, k, v, None, {}, 0.0, found[0], join=Join(self._joined, self.out_proj)))
            return found
        dropout = self.dropout if self.training else 0.0
        if cache is not None and step is not None:
            q, held = self._with_cache(cache, step, query, key, value, layouts)
            if step.mask is not None:
                mask = step.mask if mask is None else step.mask & mask
            out, weights = self.attend_stored(q, held, mask, look, dropout, scores)
            if self.watcher is not None:  # by the time somebody looks the cache may hold something else
                k, v = (tensor.clone() for tensor in held.read())
                self.watcher(Seen(q, k, v, mask, scores, dropout, out))
        else:
            # Shapes: (*batch, H, L, D), (*batch, K, S, D), (*batch, K, S, V).
            q, k, v = self.project(query, key, value, layouts)
            q, k = self._placed(q, k, q_positions, k_positions)
            attend = self.attend if self.watcher is None else self._attend_watched
            out, weights = attend(q, k, v, mask, look, dropout, scores)
        out = out.transpose(-2, -3)  # (*batch, L, H, V)
        out = (out if layouts[0] is None else layouts[0].back(out)).flatten(-2)
        if self.gate_proj is not None:
            out = out * torch.sigmoid(self.gate_proj(query))
        out = self.out_proj(out)
        return (out if self.out_dropout is None else self.out_dropout(out)), weights

    def _joined(self, out: Tensor) -> Tensor:
        """What a layer of nothing but projections and heads makes of the heads' outputs (*batch, H, L, V)."""
        return self.out_proj(out.transpose(-2, -3).flatten(-2))

    def normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k by the layer's norms, if it has any."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return _normalised(self.q_norm, q), _normalised(self.k_norm, k)

    def _placed(
        self, q: Tensor, k: Tensor, q_positions: Tensor | None, k_positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """q and k normalised, and turned to their positions."""
        q, k = self.normalised(q, k)
        if self.position is not None and self.position.rotates:
            places = default_positions(q.shape[-2], k.shape[-2], q_positions, k_positions, q.device)
            q, k = self.position.rotate(q, k, *places)
        return q, k

    def _with_cache(
        self,
        cache: KVCache,
        step: Step,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layouts: tuple[Layout | None, Layout | None],
    ) -> tuple[Tensor, Stored]:
        """q of the call, and all that the cache holds then."""
        if cache.frozen:
            (q,) = self.project_some({"q": query}, layouts)
            q, _ = self._placed(q, q[..., :0, :], step.places, step.places[..., :0])
            return q, cache.stored()
        q, k, v = self.project(query, key, value, layouts)
        q, k = self._placed(q, k, step.places, step.places)
        return q, cache.write(step, k, v)

    def filled_cache(
        self,
        key: Tensor,
        value: Tensor,
        layout: Layout | None,
        positions: Tensor | None,
        keep: Tensor | None,
        dtype: torch.dtype | None,
    ) -> KVCache:
        """A frozen cache of the keys and values of checked inputs."""
        k, v = self.project_some({"k": key, "v": value}, (layout, layout))
        cache = KVCache(dtype=dtype)
        step = cache.prepare(tuple(k.shape[:-3]), k.shape[-2], k.device, positions=positions, keep=keep)
        _, k = self._placed(k[..., :0, :], k, step.places[..., :0], step.places)
        cache.write(step, k, v)
        return cache.freeze()

    @property
    def needs_lse(self) -> bool:
        """Whether attention has to tell the softmax's denominator, for what shares it besides the keys."""
        return self.sinks is not None

    def is_simple(self) -> bool:
        """Whether it has nothing but projections and as many key/value heads as heads, all as torch.nn has them, and
        computes in its own way."""
        return (
            _is_own(self.project) and _is_own(self.attend)
            and self.position is None and self.q_norm is None and self.gate_proj is None and self.sinks is None
            and self.softcap is None and self.scale is None and self.mask is None and self.out_dropout is None
            and self.num_kv_heads == self.num_heads and self.value_dim == self.head_dim
            and self.num_heads * self.head_dim == self.embed_dim == self.out_dim
        )  # fmt: skip

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        look: Look | None,
        dropout: float,
        scores: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs (*batch, H, L, V) and the weights asked for. `scores` are arguments of `attention`."""
        if look is None:
            return attention(q, k, v, mask, dropout=dropout, **scores), None
        return attention_with_weights(q, k, v, mask, look=look, dropout=dropout, **scores)

    @property
    def attends_plainly(self) -> bool:
        """Whether `attend` without weights is nothing but `attention`."""
        return _is_own(self.attend)

    def _attend_watched(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        look: Look | None,
        dropout: float,
        scores: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """`attend`, of which the watcher is told."""
        assert self.watcher is not None
        weights: Tensor | None = None
        lse: Tensor | None = None
        if look is None and self.attends_plainly:
            out, lse = attended(q, k, v, mask, dropout=dropout, **scores)
        else:
            out, weights = self.attend(q, k, v, mask, look, dropout, scores)
        self.watcher(Seen(q, k, v, mask, scores, dropout, out, lse))
        return out, weights

    def attend_stored(
        self,
        q: Tensor,
        held: Stored,
        mask: Mask | None,
        look: Look | None,
        dropout: float,
        scores: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """What `attend` gives over what a cache holds, which is read where it lies if that can be."""
        if look is None and self.attends_plainly:
            return attention_over(q, held, mask, dropout=dropout, **scores), None
        look = None if look is None else look._replace(lazy=False)  # by then the cache may hold something else
        return self.attend(q, *held.read(), mask, look, dropout, scores)

    def check_kind(self, name: str, tensor: Tensor) -> None:
        """Whether an input has the layer's dtype, or autocast will give it one, and its device."""
        projection = self._modules[next(self.layers())[0]]
        like = projection.weight if isinstance(projection, nn.Linear) else tensor
        device = tensor.device
        if tensor.dtype != like.dtype:
            autocast = device.type != "meta" and torch.is_autocast_enabled(device.type) and tensor.is_floating_point()
            if not autocast:
                raise bad_type(name, f"the layer's dtype, {like.dtype}", tensor, "", "Convert one with .to(dtype).")
        if device != like.device:
            raise bad_value(name, f"the layer's device, {like.device}", device, "", "Move one with .to(device).")

    def joined(
        self,
        mask: Mask | Tensor | None,
        bias: Tensor | Position | None,
        plane: Plane,
        q_positions: Tensor | None,
        k_positions: Tensor | None,
        is_self: bool,
    ) -> tuple[Mask | None, Tensor | Position | None]:
        """The layer's own mask and bias together with the call's, checked before anything is computed."""
        names = ("positions", "positions") if is_self else ("positions[0]", "positions[1]")
        whole = check_scores(plane, self.head_dim, mask, bias, q_positions, k_positions, names)
        if self.mask is not None:
            own = as_mask(self.mask)
            own.check(plane)
            whole = own if whole is None else own & whole
        if self.position is None or not self.position.biases:
            return whole, bias
        if bias is None:
            return whole, self.position
        places = default_positions(plane.L, plane.S, q_positions, k_positions, plane.device)
        both = [part.bias(*places) if isinstance(part, Position) else part for part in (self.position, bias)]
        return whole, both[0] if both[1] is None else both[1] if both[0] is None else both[0] + both[1]


def _draw(weight: Tensor, rows: slice) -> None:
    """Xavier-uniform; of complex numbers too, whose two parts share the variance (Trabelsi et al. 2018)."""
    if not getattr(weight, "_is_hf_initialized", False):  # transformers' mark on what it has loaded; rows don't have it
        nn.init.xavier_uniform_(weight[rows], gain=math.sqrt(0.5) if weight.is_complex() else 1.0)


def _normalised(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """The norm in the dtype of its gain, which autocast leaves alone: it has no fused operation for a mixture."""
    return norm(x) if norm.weight is None or norm.weight.dtype == x.dtype else norm(x.to(norm.weight.dtype)).to(x.dtype)


def _is_own(method: Callable[..., Any]) -> bool:
    """Whether a method is this package's, and not a subclass' or put in its place."""
    return str(getattr(method, "__module__", "")).startswith(f"{__package__}.")
