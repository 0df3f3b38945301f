"""A report on what `capture` saw: one HTML file with everything in it, no scripts, no network."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multihead import web
from multihead.errors import bad_type, bad_value
from multihead.inspection import pictures, svg
from multihead.inspection.record import Record
from multihead.inspection.summary import COLUMNS, Summary, summarize
from multihead.packages import need
from multihead.whole_files import write_whole

_OVERVIEWS = ("entropy", "evenness", "first token", "previous", "max logit")
_MOST_BYTES = 900_000  # of pictures, so that the file stays below 1 MiB
_MOST_HEADS = 16  # of a layer, whose maps are shown
_DPI = 76  # two figures of eight heads beside each other

_READING = "Queries down, keys across; grey is masked. Weights, logarithmic:"
_STYLE = """
.multihead svg { font-family: "DejaVu Sans", Verdana, system-ui, sans-serif; }
.multihead svg image { image-rendering: pixelated; }
.multihead .bar { white-space: nowrap; }
.multihead .scale { display: inline-block; width: 8em; height: .8em; vertical-align: baseline; }
@media (max-width: 560px) { .multihead svg.map:not(.named) { width: calc(50% - 4px); } }
@media print { .multihead .scale { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
_CAUTION = (
    "Weights say where a head reads, not what the model does with it, nor why it decided: a weight on a key whose "
    "value is small, or that later layers ignore, changes nothing (Jain & Wallace 2019). What a head matters for is "
    "asked by changing it: see head_importance."
)


def write_report(path: Path, records: Mapping[str, Record], tokens: Sequence[str] | None, title: str) -> None:
    """Write a report.

    Args:
        path: the HTML file.
        records: of the layers, by name.
        tokens: names of the tokens, for the layers that have as many queries or keys.
        title: of the page.

    Raises:
        ValueError: no layer has a query or key for each name.
        OSError: the file can't be written.
        MissingPackage: there is no matplotlib here.
    """
    need("matplotlib", "plot", "a report with pictures")
    if not isinstance(title, str):
        raise bad_type("title", "a text", title)
    text = web.page(title, fragment(records, tokens))
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def fragment(records: Mapping[str, Record], tokens: Sequence[str] | None, *, figures: bool = True) -> str:
    """The report as a part of a page, whose styles are for itself alone. `figures`: whether numbers have pictures,
    which take a second or two."""
    if tokens is not None and not any(len(tokens) in record.shape[-2:] for record in records.values()):
        lengths = " or ".join(dict.fromkeys(str(size) for record in records.values() for size in record.shape[-2:]))
        raise bad_value("tokens", f"a name for each of {lengths} tokens", f"{len(tokens)} of them")
    summary = summarize(records)
    columns = _OVERVIEWS if figures else ()
    overviews = {column: _png(pictures.plot_overview(summary, column)) for column in columns}
    shown = "".join(_image(png, f"{column} of each head") for column, png in overviews.items())
    parts = [
        f"<p class=note>{_shapes(records)}</p>",
        f"<h2>Heads</h2><div class=row>{shown}</div>",
        f"<details{'' if figures else ' open'}><summary>All numbers</summary>{_table(summary)}</details>",
        f"<h2>Maps</h2><p>{_READING} {_scale()}</p>",
    ]
    budget = _MOST_BYTES - sum(map(len, overviews.values()))
    share = budget // len(records)
    left_out = []
    for i, (name, record) in enumerate(records.items()):
        drawn = _maps(record, tokens, share)
        size = sum(map(len, drawn))
        if size > budget:
            left_out.append(name)
            continue
        budget -= size
        told = f"{html.escape(name or 'layer')}: {'first ' if record.shape[-3] > _MOST_HEADS else ''}heads"
        opened = "" if i else " open"
        parts.append(f"<details{opened}><summary>{told}</summary><div class=row>{''.join(drawn)}</div></details>")
    if left_out:
        parts.append(f"<p class=note>Left out, as the file would be too large: {html.escape(', '.join(left_out))}.</p>")
    parts.append(f"<h2>What this does not say</h2><p>{html.escape(_CAUTION)}</p>")
    return web.fragment(parts, _STYLE)


def of_record(record: Record) -> str:
    """One call as a part of a page: numbers and maps of its heads."""
    records = {record.name: record}
    parts = [
        f"<p class=note>{_shapes(records)}</p>",
        _table(summarize(records)),
        f"<p>{_READING} {_scale()}</p>",
        f"<div class=row>{''.join(_maps(record, None, 0))}</div>",
    ]
    return web.fragment(parts, _STYLE)


def _shapes(records: Mapping[str, Record]) -> str:
    of_shapes: dict[str, list[str]] = {}
    for name, record in records.items():
        of_shapes.setdefault(" x ".join(map(str, record.shape)), []).append(name or "layer")
    lines = [f"{shape} in {', '.join(names)}" for shape, names in of_shapes.items()]
    told = html.escape("; ".join(lines))
    return f"Weights (batch, heads, queries, keys): {told}. Numbers are of the whole batch, maps of its first row."


def _table(summary: Summary) -> str:
    rows = [[row["layer"], str(row["head"]), *(f"{row[name]:.3f}" for name in COLUMNS)] for row in summary.rows]
    return web.table(["layer", "head", *COLUMNS], rows, told=["", "", *COLUMNS.values()])


def _scale() -> str:
    """The maps' colours, as a bar in a line of text."""
    from matplotlib.colors import to_hex

    colors = pictures.colors_of("viridis")
    stops = ", ".join(to_hex(colors(i / 8)) for i in range(9))
    bar = f"<span class=scale style='background: linear-gradient(to right, {stops})'></span>"
    return f"<span class=bar>{pictures.LEAST:g} or less {bar} 1</span>"


def _maps(record: Record, tokens: Sequence[str] | None, share: int) -> list[str]:
    """The maps of a layer's heads, with the tokens' names if all then take no more than so many bytes."""
    heads = range(min(record.shape[-3], _MOST_HEADS))
    L, S = record.shape[-2:]
    weights, visible, block = pictures.maps_of(record, heads, 0, size=pictures.MOST_TOKENS)

    def drawn(names: tuple[svg.Names, svg.Names]) -> list[str]:
        return [svg.map_svg(weights[h], visible, block, names, f"head {h}") for h in heads]

    names = [str(token) for token in tokens] if tokens is not None and block == 1 else []
    of_both = (names if len(names) == L else None, names if len(names) == S else None)
    found = drawn(of_both)
    return found if of_both == (None, None) or sum(map(len, found)) <= share else drawn((None, None))


def _png(ax: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    file = io.BytesIO()
    FigureCanvasAgg(ax.figure)
    ax.figure.savefig(file, format="png", dpi=_DPI)
    return base64.b64encode(file.getvalue())


def _image(png: bytes, told: str) -> str:
    return f"<img alt='{told}' src='data:image/png;base64,{png.decode()}'>"
