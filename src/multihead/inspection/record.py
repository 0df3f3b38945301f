"""`Record`: the attention of one call, to look into. Exact weights where you ask for them, and statistics of all of
them, made of q and k when they are asked for, without the L x S matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from multihead import reference
from multihead.errors import bad_type, bad_value, check_size, describe, is_number
from multihead.inspection import statistics
from multihead.inspection.picking import chosen, index, listed, spans
from multihead.inspection.walk import rows_at_once, walk
from multihead.masks import Mask
from multihead.positions import Position
from multihead.request import Request, make_request

_PATTERNS = ("previous", "duplicate", "induction")
MOST_BYTES = 2**30


class Record:
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
        name: of the layer.

    Attributes:
        q, k, v, out, name, dropout: as given.
        shape: (*batch, H, L, S), of the weights.

    Raises:
        ValueError, TypeError: as `attention`.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | Position | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        q_positions: Tensor | None = None,
        k_positions: Tensor | None = None,
        out: Tensor | None = None,
        join: Callable[[Tensor], Tensor] | None = None,
        dropout: float = 0.0,
        name: str = "",
    ) -> None:
        values = k[..., :1] if v is None and isinstance(k, Tensor) and k.ndim else v
        with torch.no_grad():
            self._call: Request | None = make_request(
                q, k, values, mask, bias, scale, softcap, 0.0, q_positions, k_positions, False,  # type: ignore[arg-type]
                reference.attention,
            )  # fmt: skip
        self.q, self.k, self.v, self.out, self.name, self.dropout = q, k, v, out, name, dropout
        self._sinks, self._join = sinks, join
        self._batch = tuple(q.shape[:-3])
        self.shape = (*q.shape[:-1], k.shape[-2])
        self._found: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        name, held = f"{self.name}: " if self.name else "", "" if self._call else f", only {', '.join(self._found)}"
        return f"Record({name}{', '.join(map(str, self.shape))}{held})"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it holds."""
        held = [t for t in (self.q, self.k, self.v, self.out, *self._found.values()) if t is not None]
        return sum(t.numel() * t.element_size() for t in held)

    # Exact weights ----------------------------------------------------------------------------------------------------

    def blocks(self, size: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """All weights, some queries at a time: (queries, weights (*batch, H, queries, S)). What you sum up over them
        needs no more memory than one block.

        Args:
            size: queries at a time; by default what makes some MiB.
        """
        size = rows_at_once(self._request) if size is None else check_size("size", size)
        S = self._request.sizes.S
        for block in walk(self._request, self._sinks, size):
            yield block.rows, self._whole(block.weights, block.columns, S)

    def row(self, i: int) -> Tensor:
        """Where query i looks: (*batch, H, S). In O(H S D).

        Args:
            i: from 0, or from the end below 0.

        Raises:
            ValueError, TypeError: there is no such query.
        """
        i = index("i", i, self._request.sizes.L)
        return self._rows(slice(i, i + 1))[..., 0, :]

    def weights(
        self,
        queries: slice | int | Sequence[int] | None = None,
        keys: slice | int | Sequence[int] | None = None,
        heads: slice | int | Sequence[int] | None = None,
        *,
        max_bytes: int = MOST_BYTES,
    ) -> Tensor:
        """A part of the weights, (*batch, heads, queries, keys); an axis asked for by a number stays, with size 1.

        Args:
            queries, keys, heads: which; None: all.
            max_bytes: more than these is refused, before anything is computed.

        Raises:
            ValueError, TypeError: an index is out of range, or it would be too large.
        """
        B, H, _, L, S, _, _ = self._request.sizes
        rows, columns, some = chosen("queries", queries, L), chosen("keys", keys, S), chosen("heads", heads, H)
        wide = torch.promote_types(self._request.q.dtype, torch.float32)
        needed = B * len(some) * len(rows) * len(columns) * wide.itemsize
        if needed > max_bytes:
            instead = "Ask for fewer, go through blocks(), or raise max_bytes."
            raise bad_value("weights()", f"at most max_bytes={max_bytes:,}", f"{needed:,} bytes", "", instead)
        device = self._request.q.device
        found = torch.empty((B, len(some), len(rows), len(columns)), dtype=wide, device=device)
        place = {row: i for i, row in enumerate(rows)}
        at_columns, at_heads = torch.tensor(columns, device=device), torch.tensor(some, device=device)
        for span in spans(sorted(place), rows_at_once(self._request)):
            part = self._rows(span).view(B, H, span.stop - span.start, S)
            part = part.index_select(1, at_heads).index_select(3, at_columns)
            for row in range(span.start, span.stop):
                found[:, :, place[row]] = part[:, :, row - span.start]
        if len(place) < len(rows):  # some were asked for twice
            found = found[:, :, [place[row] for row in rows]]
        return found.view(*self._batch, *found.shape[1:])

    def pairs(self, i: Tensor | Sequence[int], j: Tensor | Sequence[int]) -> Tensor:
        """The weights of query i[n] on key j[n]: (*batch, H, N).

        Args:
            i, j: N indices each.

        Raises:
            ValueError, TypeError: an index is out of range, or there is not one j for each i.
        """
        _, _, _, L, S, _, _ = self._request.sizes
        rows, columns = chosen("i", listed(i), L), chosen("j", listed(j), S)
        if len(rows) != len(columns):
            raise bad_value("j", f"as many as i, {len(rows)}", len(columns))
        found = self.q.new_empty((*self.shape[:-2], len(rows)), dtype=self._wide)
        wanted: dict[int, list[int]] = {}
        for n, row in enumerate(rows):
            wanted.setdefault(row, []).append(n)
        for span in spans(sorted(wanted), rows_at_once(self._request)):
            part = self._rows(span)
            for row in range(span.start, span.stop):
                for n in wanted[row]:
                    found[..., n] = part[..., row - span.start, columns[n]]
        return found

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
        if missing:
            self._found |= self.gather({name: statistics.BY_NAME[name] for name in missing})
        return {name: self._found[name] for name in names}

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
            among = keys.to(self._request.q.device)
        else:
            among = torch.zeros(S, dtype=torch.bool, device=self._request.q.device)
            among[chosen("keys", listed(keys), S)] = True
        return self._tensor(lambda request: statistics.Mass(request, among))

    def distance(self, coords: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor:
        """How far each query looks on average, sum_j p_ij d(i, j), (*batch, H, L). d is |i - j| in positions, or the
        Euclidean distance of coordinates, in their unit: for patches of an image the mean attention distance of
        Dosovitskiy et al. (2021) and Raghu et al. (2021). Weights are not renormalised.

        Args:
            coords: (S, c) of the keys, which are the queries too, or a pair: (L, c) of the queries, (S, c) of the keys.

        Raises:
            ValueError, TypeError: they don't fit.
        """
        both = coords if isinstance(coords, tuple) else (coords, coords)
        if coords is None:
            return self._tensor(lambda request: statistics.Distance(request, None))
        for tensor, axis, size in ((both[0], "L", self.shape[-2]), (both[1], "S", self.shape[-1])):
            if not isinstance(tensor, Tensor) or tensor.ndim != 2 or tensor.shape[0] != size:
                raise bad_value("coords", f"numbers ({axis}, c) with {axis}={size}", describe(tensor))
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

    def check(self) -> float:
        """max |P v - out|: whether these are the weights that the heads' output was made with. Some 1e-6 in float32.

        Raises:
            ValueError: v or the output is not here, or there was dropout.
        """
        B, H, K, L, _, _, V = self._request.sizes
        if self.v is None or self.out is None:
            raise bad_value("check()", "a record with v and out", "one without", "", "Pass both to Record.")
        if self.dropout:
            otherwise = "The output was made with weights that were dropped."
            raise bad_value("check()", "a call without dropout", f"dropout={self.dropout}", otherwise, "Use eval().")
        v, out = self._request.v.to(self._wide), None
        if self._join is None:
            out = self.out.reshape(B, H, L, V)
        heads, most = [], 0.0
        for block in walk(self._request, self._sinks, rows_at_once(self._request)):
            values = v[:, :, block.columns].repeat_interleave(H // K, 1)
            if block.visible is not None:  # what is hidden may hold anything
                values = values.nan_to_num(0.0, 0.0, 0.0)
            made = block.weights @ values
            if out is None:
                heads.append(made)
            else:
                most = max(most, _largest(made - out[:, :, block.rows]))
        if self._join is None:
            return most
        with torch.no_grad():
            return _largest(self._join(self._shaped(torch.cat(heads, 2)).to(self.v.dtype)) - self.out)

    def let_go(self) -> None:
        """Hold no more than the statistics that were computed."""
        self.q = self.k = self.v = self.out = self._sinks = self._join = None  # type: ignore[assignment]
        self._call = None

    # Inside -----------------------------------------------------------------------------------------------------------

    @property
    def _request(self) -> Request:
        if self._call is None:
            otherwise = "Its q and k were not kept."
            expected = f"one that was captured: {', '.join(self._found)}"
            raise bad_value(f"record of {self.name!r}", expected, "another statistic", otherwise)
        return self._call

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self._request.q.dtype, torch.float32)

    def _rows(self, rows: slice) -> Tensor:
        """(*batch, H, rows, S) of neighbouring queries."""
        (block,) = walk(self._request, self._sinks, rows.stop - rows.start, rows)
        return self._whole(block.weights, block.columns, self._request.sizes.S)

    def _whole(self, weights: Tensor, columns: slice, S: int) -> Tensor:
        if columns.start or columns.stop < S:
            weights = torch.nn.functional.pad(weights, (columns.start, S - columns.stop))
        return self._shaped(weights)

    def _of(self, make: Callable[[Request], statistics.Statistic]) -> Any:
        return self.gather({"": make})[""]

    def _tensor(self, make: Callable[[Request], statistics.Statistic]) -> Tensor:
        found: Tensor = self._of(make)
        return found

    def _shaped(self, found: Any) -> Any:
        if isinstance(found, tuple):
            return tuple(map(self._shaped, found))
        return found.reshape(*self._batch, *found.shape[1:])

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


def _largest(apart: Tensor) -> float:
    return float(apart.abs().max()) if apart.numel() else 0.0
