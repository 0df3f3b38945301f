"""The exact weights of one call: a row, a part, some pairs, or all of them block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from multihead import reference
from multihead.attention import check_sinks
from multihead.errors import bad_type, bad_value, check_size, describe
from multihead.inspection.picking import chosen, index, listed, spans
from multihead.inspection.walk import row_of, rows_at_once, walk
from multihead.masks import Mask
from multihead.positions import Position
from multihead.request import Request, make_request
from multihead.watching import Join

MOST_BYTES = 2**30


class ExactWeights:
    """What `Record` gives without gathering anything. Its arguments are those of `Record`."""

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
        join: Join | None = None,
        dropout: float = 0.0,
        lse: Tensor | None = None,
        name: str = "",
    ) -> None:
        values = k[..., :1] if v is None and isinstance(k, Tensor) and k.ndim else v
        with torch.no_grad():
            self._call: Request | None = make_request(
                q, k, values, mask, bias, scale, softcap, 0.0, q_positions, k_positions, False,  # type: ignore[arg-type]
                reference.attention,
            )  # fmt: skip
        if sinks is not None:
            check_sinks(sinks, q)
        if lse is not None:
            _check_floats("lse", "(*batch, H, L)", lse, q.shape[:-1])
        if out is not None and v is not None and join is None:
            _check_floats("out", "(*batch, H, L, V)", out, (*q.shape[:-1], v.shape[-1]))
        self.q, self.k, self.v, self.out, self.name, self.dropout = q, k, v, out, name, dropout
        self._sinks, self._join, self._lse = sinks, join, lse
        self._batch = tuple(q.shape[:-3])
        self.shape = (*q.shape[:-1], k.shape[-2])
        self._found: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        name, held = f"{self.name}: " if self.name else "", "" if self._call else f", only {', '.join(self._found)}"
        return f"Record({name}{', '.join(map(str, self.shape))}{held})"

    @property
    def is_whole(self) -> bool:
        """Whether q and k are here, of which everything can be made."""
        return self._call is not None

    @property
    def device(self) -> torch.device:
        """Of q and k."""
        return self._request.q.device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it holds."""
        return sum(t.numel() * t.element_size() for t in self.held())

    def held(self) -> list[Tensor]:
        """The tensors that it holds: what it was given, tables of a mask and a bias, and statistics made so far."""
        found = [self.q, self.k, self.v, self.out, self._lse, self._sinks, *self._found.values()]
        if self._call is not None:
            found += [] if self._call.has_default_positions else self._call.positions()
            found += [self._call.bias if isinstance(self._call.bias, Tensor) else None]
            found += [] if self._call.mask is None else self._call.mask.tensors().values()
        return [t for t in found if t is not None]

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
        at_columns, at_heads = (torch.tensor(at, device=device, dtype=torch.long) for at in (columns, some))
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

    def check(self) -> float:
        """max |P v - out|: whether these are the weights that the heads' output was made with. Some 1e-6 in float32.

        Raises:
            ValueError: v or the output is not here, there was dropout, or the layer has learned since.
        """
        B, H, K, L, _, _, V = self._request.sizes
        if self.v is None or self.out is None:
            raise bad_value("check()", "a record with v and out", "one without", "", "Pass both to Record.")
        if self.dropout:
            otherwise = "The output was made with weights that were dropped."
            raise bad_value("check()", "a call without dropout", f"dropout={self.dropout}", otherwise, "Use eval().")
        if self._join is not None and self._join.has_changed:
            otherwise = "The output can't be made again."
            raise bad_value(
                "check()", "the layer's parameters as they were", "others by now", otherwise, "Check first."
            )
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
        self.q = self.k = self.v = self.out = self._sinks = self._join = self._lse = None  # type: ignore[assignment]
        self._call = None

    # Inside -----------------------------------------------------------------------------------------------------------

    @property
    def _request(self) -> Request:
        if self._call is None:
            raise self._lacks("anything else")
        return self._call

    def _lacks(self, asked: str) -> ValueError:
        expected = f"what was captured, {', '.join(self._found)}"
        instead = "Name it in stats=, or capture without stats=."
        return bad_value(f"record of {self.name!r}", expected, asked, "Its q and k were not kept.", instead)

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self._request.q.dtype, torch.float32)

    def _rows(self, rows: slice) -> Tensor:
        """(*batch, H, rows, S) of neighbouring queries."""
        if rows.stop - rows.start == 1:
            weights, columns = row_of(self._request, self._sinks, rows.start)
        else:
            (block,) = walk(self._request, self._sinks, rows.stop - rows.start, rows)
            weights, columns = block.weights, block.columns
        return self._whole(weights, columns, self._request.sizes.S)

    def _whole(self, weights: Tensor, columns: slice, S: int) -> Tensor:
        if columns.start or columns.stop < S:
            weights = torch.nn.functional.pad(weights, (columns.start, S - columns.stop))
        return self._shaped(weights)

    def _shaped(self, found: Any) -> Any:
        if isinstance(found, tuple):
            return tuple(map(self._shaped, found))
        return found.reshape(*self._batch, *found.shape[1:])


def _check_floats(name: str, axes: str, tensor: object, shape: Sequence[int]) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise bad_type(name, f"a floating point tensor {axes}", tensor)
    if tuple(tensor.shape) != tuple(shape):
        raise bad_value(name, f"the shape {axes} = {tuple(shape)}", describe(tensor))


def _largest(apart: Tensor) -> float:
    return float(apart.abs().max()) if apart.numel() else 0.0
