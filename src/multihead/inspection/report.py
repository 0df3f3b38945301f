"""A report on what `capture` saw: one HTML file with everything in it, no scripts, no network."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multihead.inspection import pictures
from multihead.inspection.record import Record
from multihead.inspection.summary import COLUMNS, Summary, summarize
from multihead.packages import need
from multihead.whole_files import write_whole

_OVERVIEWS = ("entropy", "evenness", "first token", "previous", "max logit")
_MOST_BYTES = 900_000  # of pictures, so that the file stays below 1 MiB
_MOST_HEADS = 16  # of a layer, whose maps are shown
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; background: white; } .row { display: flex; flex-wrap: wrap; gap: .5rem; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; } .note { color: #555; }
@media (prefers-color-scheme: dark) {
  body { background: #161616; color: #ddd; } td, th { border-color: #333; } .note { color: #999; }
}
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
        tokens: names of the tokens, if all layers have the same.
        title: of the page.

    Raises:
        ValueError: not one name for each token.
        OSError: the file can't be written.
        MissingPackage: there is no matplotlib here.
    """
    need("matplotlib", "plot", "a report with pictures")
    text = page(records, tokens, title)
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def page(records: Mapping[str, Record], tokens: Sequence[str] | None, title: str) -> str:
    """The report as HTML."""
    summary = summarize(records)
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p class=note>{_shapes(records)}</p>"]
    budget = _MOST_BYTES
    overviews = [_png(pictures.plot_overview(summary, column), 72) for column in _OVERVIEWS]
    budget -= sum(map(len, overviews))
    shown = "".join(_image(png, "one number of each head") for png in overviews)
    parts.append(f"<h2>Heads</h2><div class=row>{shown}</div>")
    parts.append(f"<details><summary>All numbers</summary>{_table(summary)}</details>")
    told = "Queries down, keys across; grey is masked. Scale from 1e-4 to 1, logarithmic."
    parts.append(f"<h2>Maps</h2><p class=note>{told}</p>")
    left_out = []
    for name, record in records.items():
        drawn = _maps(record, tokens)
        if len(drawn) > budget:
            left_out.append(name)
            continue
        budget -= len(drawn)
        opened = " open" if len(parts) == 5 else ""
        told = f"{html.escape(name or 'layer')}: {'first ' if record.shape[-3] > _MOST_HEADS else ''}heads"
        parts.append(f"<details{opened}><summary>{told}</summary>{_image(drawn, 'maps of the heads')}</details>")
    if left_out:
        parts.append(f"<p class=note>Left out, as the file would be too large: {html.escape(', '.join(left_out))}.</p>")
    parts.append(f"<h2>What this does not say</h2><p>{html.escape(_CAUTION)}</p>")
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _shapes(records: Mapping[str, Record]) -> str:
    lines = [f"{name or 'layer'}: {' x '.join(map(str, record.shape))}" for name, record in records.items()]
    told = html.escape("; ".join(lines))
    return f"Weights (batch, heads, queries, keys). Shown is the first row of the batch. {told}."


def _table(summary: Summary) -> str:
    head = "".join(f"<th title='{html.escape(told)}'>{html.escape(name)}</th>" for name, told in COLUMNS.items())
    rows = "".join(
        f"<tr><td>{html.escape(row['layer'])}</td><td>{row['head']}</td>"
        + "".join(f"<td>{row[name]:.3f}</td>" for name in COLUMNS)
        + "</tr>"
        for row in summary.rows
    )
    return f"<table><tr><th>layer</th><th>head</th>{head}</tr>{rows}</table>"


def _maps(record: Record, tokens: Sequence[str] | None) -> bytes:
    """The maps of a layer's heads, side by side, as PNG."""
    from matplotlib.figure import Figure

    heads = min(record.shape[-3], _MOST_HEADS)
    across = min(4, heads)
    down = -(-heads // across)
    figure = Figure(figsize=(2.7 * across, 2.6 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for head, ax in enumerate(grid.flat):
        if head >= heads:
            ax.set_axis_off()
            continue
        named = tokens if heads == 1 else None
        pictures.plot_map(record, head, tokens=named, ax=ax, colorbar=False)
        ax.set(title=f"head {head}", xlabel="", ylabel="")
        ax.tick_params(labelsize="xx-small")
    return _png(grid.flat[0], 80)


def _png(ax: Any, dpi: int) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    file = io.BytesIO()
    FigureCanvasAgg(ax.figure)
    ax.figure.savefig(file, format="png", dpi=dpi)
    return base64.b64encode(file.getvalue())


def _image(png: bytes, told: str) -> str:
    return f"<img alt='{told}' src='data:image/png;base64,{png.decode()}'>"
