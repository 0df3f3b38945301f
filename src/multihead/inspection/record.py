"""`Record`: the attention of one call, to look into. Exact weights where you ask for them, and statistics of all of
them, made of q and k when they are asked for, without the L x S matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from multihead.attention import attention
from multihead.errors import bad_type, bad_value, check_size, describe, is_number
from multihead.inspection import statistics
from multihead.inspection.exact import ExactWeights
from multihead.inspection.picking import chosen, spans
from multihead.inspection.walk import keys_of, rows_at_once, walk
from multihead.kernels import native
from multihead.packages import has
from multihead.request import Request

_PATTERNS = ("previous", "duplicate", "induction")
_COARSE = 3e-5  # of a weight, relative, that the rounding of its denominator may cost
_MANY = 16  # a key in so many, from where on all weights are gone through


class Record(ExactWeights):
    """The attention of q and k: of a call that `capture` saw, or made by hand from any library's tensors.

        record = Record(q, k, mask=causal())
        record.row(-1)           # where the last query looks
        record.entropy()         # of every query

    Heads are query heads everywhere, H. Weights are before dropout, in float32 (float64 for float64), and without
    gradients. One pass over the queries makes a statistic; `compute` makes several in one. What was made is kept.

    Args:
        q: (*batch, H, L, D), with positions already applied to it, as `attention` takes it; k: (*batch, K, S, D).
        v: (*batch, K, S, V), for `check`.
        mask, bias, scale, softcap, sinks, q_positions, k_positions: as of `attention`.
        out: (*batch, H, L, V), what the heads gave, for `check`; or what `join` makes of it.
        join: that.
        dropout: that `out` was made with.
        lse: (*batch, H, L), as `attention` gives it, if it is known. `mass` is made from it.
        name: of the layer.

    Attributes:
        q, k, v, out, name, dropout: as given.
        shape: (*batch, H, L, S), of the weights.

    Raises:
        ValueError, TypeError: as `attention`.
    """

    def _repr_html_(self) -> str | None:
        """Of a notebook; None: it shows the text."""
        if not self.is_whole or not math.prod(self.shape) or not has("matplotlib"):
            return None
        from multihead.inspection.report import of_record  # it draws records

        return of_record(self)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each query and their keys: both (*batch, H, L, k), the largest first.

        Raises:
            ValueError, TypeError: k is below 1 or above S.
        """
        if check_size("k", k) > self._request.sizes.S:
            raise bad_value("k", f"at most S={self._request.sizes.S} keys", k)
        found: tuple[Tensor, Tensor] = self._of(lambda request: statistics.TopKeys(request, k))
        return found

    # Statistics -------------------------------------------------------------------------------------------------------

    def compute(self, *names: str) -> dict[str, Tensor]:
        """Several statistics in one pass: "entropy", "max_weight", "max_logit", "received", and "visible_keys" (how
        many keys each query may see), "seen_by" (how many queries may see each key). As the methods give them.

        Raises:
            ValueError: there is none of a name.
        """
        statistics.check_names(names)
        missing = [name for name in dict.fromkeys(names) if name not in self._found]
        if missing and not self.is_whole:
            raise self._lacks(" and ".join(missing))
        if missing:
            self._found |= self._gathered(missing)
        return {name: self._found[name] for name in names}

    def visible_blocks(self, size: int) -> Tensor:
        """Which blocks of `size` x `size` of the map have a pair that the mask lets see each other, bool (*batch,
        ceil(L / size), ceil(S / size)); over all heads, and without what a bias hides."""
        B, _, _, L, S, _, _ = self._request.sizes
        bounds = self._request.bounds(check_size("size", size), size)
        if bounds is None:
            return torch.ones(
                *self._batch, -(-L // size), -(-S // size), dtype=torch.bool, device=self._request.q.device
            )
        found: Tensor = self._shaped(bounds.some.expand(B, *bounds.some.shape[1:]))
        return found

    def gather(self, wanted: Mapping[str, Callable[[Request], statistics.Statistic]]) -> dict[str, Any]:
        """Statistics of your own, in one pass: what each function makes of the checked call (a `Statistic`:
        `add(block)` for every block of weights, then `result()`)."""
        gathered = {name: make(self._request) for name, make in wanted.items()}
        for block in walk(self._request, self._sinks, rows_at_once(self._request)):
            for statistic in gathered.values():
                statistic.add(block)
        return {name: self._shaped(statistic.result()) for name, statistic in gathered.items()}

    def entropy(self, normalized: bool = False) -> Tensor:
        """How spread out each query's weights are: -sum_j p_ij ln p_ij, (*batch, H, L), in nats.

        0: all on one key; ln n_i: even over the n_i keys that the query may see. From Clark et al., "What Does BERT
        Look At?" (2019); as a monitor of training Zhai et al. (2023), whose "entropy collapse" is values near 0.

        Args:
            normalized: divided by ln n_i, so from 0 to 1; NaN for a query that may see one key only.
        """
        if not normalized:
            return self.compute("entropy")["entropy"]
        found = self.compute("entropy", "visible_keys")
        counts = found["visible_keys"]
        return found["entropy"] / counts.log().masked_fill(counts <= 1, torch.nan)

    def max_weight(self) -> Tensor:
        """Each query's largest weight, max_j p_ij, (*batch, H, L), from 0 to 1: a head's confidence (Voita et al.
        2019)."""
        return self.compute("max_weight")["max_weight"]

    def max_logit(self) -> Tensor:
        """Each query's largest score, max_j s_ij after scale, softcap and bias, (*batch, H, L). The largest of a head
        is what QK-clip watches (Kimi K2, 2025)."""
        return self.compute("max_logit")["max_logit"]

    def received(self, mean: bool = False) -> Tensor:
        """What each key receives from all queries, sum_i p_ij, (*batch, H, S). Large: a heavy hitter (H2O, Zhang et al.
        2023) or a sink.

        Args:
            mean: divided by the number of queries that may see the key; NaN where nobody may.
        """
        if not mean:
            return self.compute("received")["received"]
        found = self.compute("received", "seen_by")
        return found["received"] / found["seen_by"].masked_fill(found["seen_by"] == 0, torch.nan)

    def mass(self, keys: int | slice | Sequence[int] | Tensor) -> Tensor:
        """How much of each query's weight is on some keys, sum_{j in keys} p_ij, (*batch, H, L), from 0 to 1. That on
        the first token, `mass(0)`, is the attention sink (Xiao et al. 2023; Gu et al. 2025: above 0.3 a head is one).

        Args:
            keys: an index, a slice, indices, or a bool tensor (S,).

        Raises:
            ValueError, TypeError: an index is out of range.
        """
        S = self._request.sizes.S
        if isinstance(keys, Tensor) and keys.dtype == torch.bool:
            if keys.shape != (S,):
                raise bad_value("keys", f"bools (S,) with S={S}", describe(keys))
            keys = keys.nonzero()[:, 0]
        some = sorted({*chosen("keys", keys, S)})  # each once
        lse = self._denominators() if 0 < _MANY * len(some) <= S else None
        if lse is None or self._is_coarse(lse):
            among = torch.zeros(S, dtype=torch.bool, device=self._request.q.device)
            among[some] = True
            return self._tensor(lambda request: statistics.Mass(request, among))
        # Of few keys alone: their weights are exp(score - lse).
        parts = [keys_of(self._request, span, lse) for span in spans(some, S)]
        parts = [part[..., 0] if part.shape[-1] == 1 else part.sum(-1) for part in parts]
        return self._shaped(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))

    def distance(self, coords: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor:
        """How far each query looks on average, sum_j p_ij d(i, j), (*batch, H, L). d is |i - j| in positions, or the
        Euclidean distance of coordinates, in their unit: for patches of an image the mean attention distance of
        Dosovitskiy et al. (2021) and Raghu et al. (2021). Weights are not renormalised.

        Args:
            coords: (S, c) of the keys, which are the queries too, or a pair: (L, c) of the queries, (S, c) of the keys.

        Raises:
            ValueError, TypeError: they don't fit.
        """
        if coords is None:
            return self._tensor(lambda request: statistics.Distance(request, None))
        both = coords if isinstance(coords, tuple) else (coords, coords)
        if len(both) != 2:
            raise bad_value("coords", "a tensor, or a pair of queries' and keys'", f"{len(both)} of them")
        for tensor, axis, size in ((both[0], "L", self.shape[-2]), (both[1], "S", self.shape[-1])):
            if not isinstance(tensor, Tensor) or tensor.ndim != 2 or tensor.shape[0] != size:
                raise bad_value("coords", f"numbers ({axis}, c) with {axis}={size}", describe(tensor))
        if both[0].shape[1] != both[1].shape[1]:
            raise bad_value(
                "coords", "as many coordinates of queries as of keys", f"{both[0].shape[1]} and {both[1].shape[1]}"
            )
        device = self._request.q.device
        pair = tuple(tensor.to(device) for tensor in both if tensor is not None)
        return self._tensor(lambda request: statistics.Distance(request, pair))  # type: ignore[arg-type]

    def coverage(self, mass: float = 0.95) -> Tensor:
        """How many keys each query needs: the least number whose weights sum to `mass` of all its weights, (*batch, H,
        L). What a perfect choice of keys would read: the top-k oracle of sparse attention.

        Raises:
            ValueError, TypeError: mass is not above 0 and at most 1.
        """
        if not is_number(mass) or not 0 < mass <= 1:
            raise bad_value("mass", "a number above 0, at most 1", mass)
        return self._tensor(lambda request: statistics.Coverage(request, float(mass)))

    def similarity(self, kind: str = "js") -> Tensor:
        """How differently heads look, (*batch, H, H): the mean over queries of the Jensen-Shannon divergence of their
        weights, H((p + q) / 2) - (H(p) + H(q)) / 2 in nats. 0: the same, ln 2: nothing in common (Clark et al. 2019).

        Raises:
            ValueError: another kind than "js".
        """
        if kind != "js":
            raise bad_value("kind", '"js"', repr(kind))
        return self._tensor(statistics.Similarity)

    def pattern(self, kind: str, tokens: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor:
        """How much a head follows a pattern, (*batch, H), from 0 to 1: the mean, over the queries that may see such a
        key, of their weight on

        - "previous": the key one position before;
        - "duplicate": earlier keys of the same token;
        - "induction": keys that come right after an earlier occurrence of the query's token (Olsson et al. 2022).

        NaN where no query has such a key.

        Args:
            kind: which.
            tokens: ids (L,) or (*batch, L), or a pair of those of queries and keys; not for "previous".

        Raises:
            ValueError, TypeError: another kind, or tokens that don't fit.
        """
        if kind not in _PATTERNS:
            raise bad_value("kind", f"one of {', '.join(_PATTERNS)}", repr(kind))
        ids = None if kind == "previous" else self._tokens(tokens)
        return self._tensor(lambda request: statistics.Pattern(request, kind, ids))

    def pooled(self, size: int, reduce: str = "mean") -> Tensor:
        """The weights as a map of blocks, (*batch, H, ceil(L / size), ceil(S / size)).

        Args:
            size: queries and keys of a block.
            reduce: "mean": the mean over the block's queries of their weight on all its keys together, so that rows sum
                to 1; "max": the largest weight in it.

        Raises:
            ValueError, TypeError: size is below 1, or another reduce.
        """
        if reduce not in ("mean", "max"):
            raise bad_value("reduce", '"mean" or "max"', repr(reduce))
        check_size("size", size)
        return self._tensor(lambda request: statistics.Pooled(request, size, reduce == "max"))

    def _is_coarse(self, lse: Tensor) -> bool:
        """Whether weights made of it would be off by more than some 1e-5, as it is rounded where scores are large."""
        kind = lse.dtype if self._lse is None else self._lse.dtype
        least, most = map(float, lse.aminmax()) if lse.numel() else (0.0, 0.0)
        if least == -math.inf:  # a query that sees nothing
            least = float(lse.masked_fill(lse == -math.inf, math.inf).amin())
        return max(-least, most) * torch.finfo(kind).eps > _COARSE

    def _denominators(self) -> Tensor:
        """The lse, (B, H, L), -inf for queries that see nothing; made by one call of `attention` if it is not known."""
        request = self._request
        if self._lse is None:
            with torch.no_grad():
                q_at, k_at = request.positions()
                _, self._lse = attention(
                    request.q, request.k, request.k[..., :1], request.mask, bias=request.bias, scale=request.scale,
                    softcap=request.softcap, sinks=self._sinks, q_positions=q_at, k_positions=k_at, return_lse=True,
                )  # fmt: skip
        return self._lse.reshape(request.q.shape[:3]).to(self._wide)

    def _gathered(self, names: Sequence[str]) -> dict[str, Tensor]:
        """By the native kernel where it runs and needs no L x S table, else block by block."""
        request = self._request
        if native.refusals(request) or native.tables(request):
            return self.gather({name: statistics.BY_NAME[name] for name in names})
        found = native.statistics(request, self._sinks, names)
        return {name: self._shaped(tensor) for name, tensor in found.items()}

    def _of(self, make: Callable[[Request], statistics.Statistic]) -> Any:
        return self.gather({"": make})[""]

    def _tensor(self, make: Callable[[Request], statistics.Statistic]) -> Tensor:
        found: Tensor = self._of(make)
        return found

    def _tokens(self, tokens: object) -> tuple[Tensor, Tensor]:
        B, _, _, L, S, _, _ = self._request.sizes
        pair = tokens if isinstance(tokens, tuple) else (tokens, tokens)
        found = []
        for ids, axis, length in zip(pair, "LS", (L, S), strict=True):
            if not isinstance(ids, Tensor) or ids.is_floating_point():
                raise bad_type("tokens", f"ids ({axis},) or (*batch, {axis})", ids)
            if tuple(ids.shape) not in ((length,), (*self._batch, length)):
                expected = f"the shape ({axis},) or (*batch, {axis}) with {axis}={length}"
                raise bad_value("tokens", expected, describe(ids), "", "Where L and S differ pass a pair.")
            found.append(ids.to(self._request.q.device).long().expand(*self._batch, length).reshape(B, length))
        return found[0], found[1]
