"""`capture`: the attention of every layer that a model runs, without changing what runs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from multihead.errors import bad_type, bad_value, check_size, is_int
from multihead.inspection import pictures
from multihead.inspection.exact import MOST_BYTES
from multihead.inspection.record import Record
from multihead.inspection.report import fragment, write_report
from multihead.inspection.rollout import rollout
from multihead.inspection.statistics import check_names
from multihead.inspection.summary import Summary, summarize
from multihead.inspection.watched import Chosen, layers_of, watched
from multihead.packages import has
from multihead.watching import Seen


class _NoSuchLayer(KeyError, IndexError):
    """As a mapping and as a list has it."""


class Capture(Mapping[str, Record]):
    """What `capture` saw: by a layer's name the record of its last call. An index counts layers in their order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._calls: dict[str, list[Record]] = {name: [] for name in names}

    def __getitem__(self, key: str | int) -> Record:
        return self.calls(key)[-1]

    def calls(self, key: str | int) -> list[Record]:
        """All calls of a layer in their order: those of each step of decoding, of each place of a shared layer.

        Raises:
            KeyError, IndexError: no such layer was watched, or it was not called.
        """
        names = list(self._calls)
        if is_int(key):
            ran = list(self)
            if not -len(ran) <= key < len(ran):
                raise _NoSuchLayer(f"{len(ran)} layers of attention ran: {', '.join(map(repr, ran))}")
            return self._calls[ran[key]]
        if not isinstance(key, str):
            raise bad_type("key", "a layer's name, or its place", key)
        if key not in self._calls:
            raise KeyError(f"{key!r} was not watched; there are {', '.join(map(repr, names))}")
        if not self._calls[str(key)]:
            raise KeyError(f"{key!r} was not called")
        return self._calls[str(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(name for name, calls in self._calls.items() if calls)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def summary(self) -> Summary:
        """One line for each layer and head, of the last calls: entropy, largest weight and logit, what is on the first
        token and on the one before, distance. Print it, or take `to_dict()`, `to_csv()`."""
        return summarize(self)

    def rollout(self, rows: int | slice | Sequence[int] | None = None, residual: float = 0.5) -> Tensor:
        """Attention rollout (Abnar & Zuidema 2020) through all layers that ran, (*batch, R, T): how much of input token
        t reaches output token r if the heads' mean weights and the residual were all there is. Rows sum to 1.

        Args:
            rows: R output tokens, such as 0 for a class token; None: all.
            residual: the share of what goes past each attention.

        Raises:
            ValueError, TypeError: the layers are not self-attention over the same tokens, or an option does not fit.
        """
        return rollout(list(self.values()), rows, residual)

    def plot(self, column: str = "entropy", *, ax: Any = None, **style: Any) -> Any:
        """A column of `summary` as a picture, layers down and heads across: see `pictures.plot_overview`."""
        return pictures.plot_overview(self.summary(), column, ax=ax, **style)

    def report(
        self, path: str | os.PathLike[str], *, tokens: Sequence[str] | None = None, title: str = "Attention"
    ) -> None:
        """Write what the last calls did as one HTML file: numbers and maps of all heads. It holds everything itself,
        has no scripts, asks no network, and stays below 1 MiB.

        Args:
            path: of the file.
            tokens: names of the tokens, where a layer has them one by one.
            title: of the page.

        Raises:
            ValueError: not one name for each token, or nothing was captured.
            OSError: the file can't be written.
            MissingPackage: there is no matplotlib here.
        """
        write_report(Path(path), self._ran(), tokens, title)

    def _repr_html_(self) -> str | None:
        """Of a notebook; None: it shows the text."""
        can = all(record.is_whole and math.prod(record.shape) for record in self.values()) and has("matplotlib")
        return fragment(self._ran(), None, figures=False) if len(self) and can else None

    def _ran(self) -> dict[str, Record]:
        if not len(self):
            raise bad_value("capture", "one that saw a call", "an empty one")
        return dict(self)

    def __repr__(self) -> str:
        return f"Capture({', '.join(f'{name!r}: {len(self._calls[name])}' for name in self)})"


@contextmanager
def capture(
    model: nn.Module,
    layers: Chosen | None = None,
    *,
    stats: Sequence[str] | None = None,
    max_bytes: int = MOST_BYTES,
) -> Iterator[Capture]:
    """Record the attention of a model's layers: `Attention`, `MultiheadAttention`, torch.nn.MultiheadAttention.

        with capture(model) as rec:
            model(x)
        rec["encoder.layers.0.self_attn"].entropy()

    Which kernels run and what they give stays as it is, bit for bit. A layer of torch's is looked at from outside: its
    projections of q and k are made once more.

    Args:
        model: any module; also a layer itself, whose name is "".
        layers: which: a name as named_modules() has it, with * and ? as in file names, several of them, or a function
            of (name, layer). By default all.
        stats: names that `Record.compute` knows. They are made during the call, and q and k are not kept: small enough
            to log in a training loop. None keeps q, k, v, and everything can be asked for later.
        max_bytes: of what is kept, in all.

    Raises:
        ValueError, TypeError: no layer of attention is there or fits, a statistic has no such name, or the model is
            compiled.
        RuntimeError: more than max_bytes were to be kept, or, at the end of the block, nothing was called.
    """
    chosen = layers_of(model, layers)
    check_size("max_bytes", max_bytes, least=0)
    if stats is not None:
        check_names(stats)
        if not stats:
            raise bad_value("stats", "at least one name", "none", "", "stats=None keeps q and k for later.")
    found = Capture(list(chosen))
    kept: dict[tuple[int, int], int] = {}  # bytes by their place in memory: a mask of all layers is there once

    def watch(name: str, seen: Seen) -> None:
        record = _record(name, seen)
        if stats is not None:
            record.compute(*stats)
            record.let_go()
        kept.update({(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in record.held()})
        if sum(kept.values()) > max_bytes:
            raise RuntimeError(
                f"multihead.capture: more than max_bytes={max_bytes:,} to keep, at layer {name!r}. Choose fewer "
                "layers, name what you want with stats=, or raise max_bytes."
            )
        found._calls[name].append(record)

    with ExitStack() as stack:
        for name, layer in chosen.items():
            stack.enter_context(watched(layer, partial(watch, name)))
        yield found
    if not len(found):
        raise RuntimeError(
            f"multihead.capture: none of {', '.join(map(repr, chosen))} was called. In eval mode and without gradients "
            "torch.nn.TransformerEncoderLayer goes past its self_attn: multihead.swap(model), or "
            "torch.backends.mha.set_fastpath_enabled(False)."
        )


def _record(name: str, seen: Seen) -> Record:
    scores = {key: value for key, value in seen.scores.items() if value is not None}
    tensors: dict[str, Any] = {
        key: value.detach() if isinstance(value, Tensor) else value for key, value in scores.items()
    }
    return Record(
        seen.q.detach(), seen.k.detach(), seen.v.detach(), mask=seen.mask, **tensors, out=seen.out.detach(),
        join=seen.join, dropout=seen.dropout, lse=None if seen.lse is None else seen.lse.detach(), name=name,
    )  # fmt: skip
