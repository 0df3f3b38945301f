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
        visible = found["visible"]
        found["evenness"] = found["entropy"] / visible.log().masked_fill(visible <= 1, torch.nan)
        of_heads: dict[str, list[float]] = {}
        for column in COLUMNS:
            numbers = found[column]
            if column == "max logit":
                numbers = numbers.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(-1).flatten(0, -2).amax(0)
            elif column == "previous":
                numbers = numbers.flatten(0, -2).nanmean(0)
            else:
                numbers = numbers.transpose(-1, -2).flatten(0, -2).nanmean(0)
            of_heads[column] = numbers.tolist()
        for head in range(record.shape[-3]):
            rows.append({"layer": name, "head": head} | {column: of_heads[column][head] for column in COLUMNS})
    return Summary(rows)


def _first(S: int, device: torch.device) -> Tensor:
    return torch.arange(S, device=device) == 0
