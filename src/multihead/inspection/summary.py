"""One line for each head: what the heads of a model do, at a glance."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multihead.inspection import statistics
from multihead.inspection.record import Record

COLUMNS = {
    "entropy": "nats, mean over queries",
    "evenness": "entropy / ln of the visible keys",
    "max weight": "mean over queries",
    "max logit": "the largest score",
    "first token": "weight on key 0, mean over queries: a sink",
    "previous": "weight on the key one before",
    "distance": "tokens, mean over queries",
}


@dataclass(frozen=True)
class Summary:
    """Means over batch and queries, a row for each layer and head. `str()` is an aligned table."""

    rows: list[dict[str, Any]]  # "layer", "head", and the names of COLUMNS

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows, as JSON can write them."""
        return [dict(row) for row in self.rows]

    def to_csv(self) -> str:
        """The rows as CSV, with a line of names."""
        text = io.StringIO()
        writer = csv.DictWriter(text, ["layer", "head", *COLUMNS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def __str__(self) -> str:
        width = max([len("layer"), *(len(row["layer"]) for row in self.rows)])
        lines = [f"{'layer':<{width}}  head" + "".join(f"{name:>13}" for name in COLUMNS)]
        for row in self.rows:
            numbers = "".join(f"{row[name]:>13.3f}" for name in COLUMNS)
            lines.append(f"{row['layer']:<{width}}  {row['head']:>4}{numbers}")
        return "\n".join(lines)


def summarize(records: Mapping[str, Record]) -> Summary:
    """Of each layer's record, in one pass over its weights."""
    rows = []
    for name, record in records.items():
        found = record.gather(
            {
                "entropy": statistics.Entropy, "visible": statistics.VisibleKeys, "max weight": statistics.MaxWeight,
                "max logit": statistics.MaxLogit, "distance": lambda request: statistics.Distance(request, None),
                "first token": lambda request: statistics.Mass(request, _first(request.sizes.S, request.q.device)),
                "previous": lambda request: statistics.Pattern(request, "previous", None),
            }
        )  # fmt: skip
        visible = found["visible"].nan_to_num()
        found["evenness"] = found["entropy"] / visible.log()
        of_heads: dict[str, list[float]] = {}
        for column in COLUMNS:
            if column == "previous":
                of_heads[column] = found[column].flatten(0, -2).nanmean(0).tolist()
                continue
            # Queries that see nothing, or have nothing to be even over, are left out; any other NaN is the head's own.
            counts = visible > (1 if column == "evenness" else 0)
            over = _of_heads(found[column]), _of_heads(counts)
            of_heads[column] = (_largest if column == "max logit" else _mean)(*over).tolist()
        for head in range(record.shape[-3]):
            rows.append({"layer": name, "head": head} | {column: of_heads[column][head] for column in COLUMNS})
    return Summary(rows)


def _of_heads(found: Tensor) -> Tensor:
    """(*batch, H, L) as (H, all queries)."""
    return found.movedim(-2, 0).flatten(1)


def _mean(numbers: Tensor, counts: Tensor) -> Tensor:
    return numbers.masked_fill(~counts, 0.0).sum(1) / counts.sum(1)


def _largest(numbers: Tensor, counts: Tensor) -> Tensor:
    if not numbers.shape[1]:
        return numbers.new_full(numbers.shape[:1], torch.nan)
    return numbers.masked_fill(~counts, -torch.inf).amax(1).masked_fill(~counts.any(1), torch.nan)


def _first(S: int, device: torch.device) -> Tensor:
    return torch.arange(S, device=device) == 0
