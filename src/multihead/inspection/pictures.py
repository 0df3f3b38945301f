"""Pictures of attention, one panel each: functions that draw on an Axes and return it.

Without `ax` a figure of its own is made, which `ax.figure.savefig("map.png")` writes. Nothing global is touched. Maps
are on a logarithmic scale, as most weights are small, with queries down and keys across; what is masked is grey. Up to
64 tokens are shown one by one, more are pooled.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multihead.errors import bad_type, bad_value, check_size
from multihead.inspection.picking import chosen, index
from multihead.inspection.record import Record
from multihead.inspection.summary import COLUMNS, Summary
from multihead.labels import fonts_for, shown
from multihead.packages import need

MOST_TOKENS = 64  # that are drawn one by one, and named
LEAST = 1e-4  # of a map's scale
_OVER = 2.0  # above the scale, whose end is 1
_LABEL = 0.12  # inches that a token's label takes beside the next one
MASKED = "0.82"  # grey
NAN = "magenta"  # what is no number is to be seen


def new_axes(width: float = 5.0, height: float = 4.2) -> Any:
    """An Axes of a figure of its own, without a screen.

    Raises:
        MissingPackage: there is no matplotlib here.
    """
    need("matplotlib", "plot", "a picture of attention")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.subplots()


def plot_map(
    record: Record,
    head: int = 0,
    row: int = 0,
    *,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    size: int = MOST_TOKENS,
    reduce: str = "mean",
    ax: Any = None,
    colorbar: bool = True,
    **style: Any,
) -> Any:
    """A head's weights as a map: who looks where.

    Args:
        record: whose.
        head: which of its query heads.
        row: of the batch.
        tokens: names of the L queries, and of the S keys unless `key_tokens` has those.
        key_tokens: names of the S keys.
        size: the most rows and columns; more tokens are pooled to blocks.
        reduce: of a block, "mean": the mean over its queries of the weight on all its keys, or "max".
        ax: where to draw; None for a figure of its own.
        colorbar: whether to show the scale beside it.
        style: of `Axes.imshow`, such as cmap.

    Returns:
        The Axes.

    Raises:
        ValueError, TypeError: there is no such head or row, or not one name for each token.
        MissingPackage: there is no matplotlib here.
    """
    values, visible, block = map_of(record, head, row, size=size, reduce=reduce)
    L, S = record.shape[-2:]
    of_queries = _names("tokens", tokens, L)
    of_keys = _names("key_tokens", key_tokens if key_tokens is not None else tokens, S)
    if ax is None:
        labels = [len(names) if names is not None and block == 1 else 0 for names in (of_keys, of_queries)]
        ax = new_axes(max(5.0, 1.8 + _LABEL * labels[0]), max(4.2, 1.2 + _LABEL * labels[1]))
    from matplotlib.colors import LogNorm

    options: dict[str, Any] = {
        "norm": LogNorm(LEAST, 1.0),
        "cmap": colors_of(style.pop("cmap", "viridis")),
        "aspect": "auto",
        "interpolation": "nearest",
    }
    image = ax.imshow(
        values.clamp(min=LEAST).nan_to_num(_OVER).masked_fill(~visible, torch.nan).numpy(), **options | style
    )
    if block == 1:
        _label(ax, (of_queries, of_keys))
    else:
        _number(ax, (L, S), block)
    ax.set(xlabel="key", ylabel="query", title=_title(record, head))
    if colorbar:
        told = "weight" if block == 1 else f"weight, {reduce} of {block} x {block} tokens"
        ax.figure.colorbar(image, ax=ax, label=told)
    return ax


def plot_row(record: Record, i: int = -1, row: int = 0, *, heads: Any = None, ax: Any = None, **style: Any) -> Any:
    """Where query i looks: a line over the keys for each head.

    Args:
        record, row, ax: as of `plot_map`.
        i: the query, from the end below 0.
        heads: which; None: all.
        style: of `Axes.plot`.
    """
    i = index("i", i, record.shape[-2])
    weights = _of_batch(record.row(i), row, 2)  # (H, S)
    ax = _lines(weights, record, heads, ax, style)
    ax.set(xlabel="key", ylabel=f"weight of query {i}", yscale="log", ylim=(LEAST, 1.2), title=record.name)
    return ax


def plot_entropy(record: Record, row: int = 0, *, heads: Any = None, ax: Any = None, **style: Any) -> Any:
    """How evenly each query looks at what it may see, 0 to 1: a line for each head. Arguments: as of `plot_row`."""
    values = _of_batch(record.entropy(normalized=True), row, 2)
    ax = _lines(values, record, heads, ax, style)
    ax.set(xlabel="query", ylabel="entropy / ln of the visible keys", ylim=(-0.02, 1.02), title=record.name)
    return ax


def plot_received(record: Record, row: int = 0, *, heads: Any = None, ax: Any = None, **style: Any) -> Any:
    """What each key receives from a query on average, of those that may see it. Arguments: as of `plot_row`."""
    values = _of_batch(record.received(mean=True), row, 2)
    ax = _lines(values, record, heads, ax, style)
    ax.set(xlabel="key", ylabel="weight received, mean over queries", yscale="log", title=record.name)
    return ax


def plot_distance(record: Record, row: int = 0, *, heads: Any = None, ax: Any = None, **style: Any) -> Any:
    """How far each query looks on average, in positions. Arguments: as of `plot_row`."""
    values = _of_batch(record.distance(), row, 2)
    ax = _lines(values, record, heads, ax, style)
    ax.set(xlabel="query", ylabel="mean distance, positions", title=record.name)
    return ax


def plot_overview(summary: Summary, column: str = "entropy", *, ax: Any = None, **style: Any) -> Any:
    """One number of each head: layers down, heads across.

    Args:
        summary: of a capture.
        column: one of its columns.
        ax: where to draw; None for a figure of its own.
        style: of `Axes.imshow`.

    Raises:
        ValueError: there is no such column.
        MissingPackage: there is no matplotlib here.
    """
    if column not in COLUMNS:
        raise bad_value("column", f"one of {', '.join(COLUMNS)}", repr(column))
    layers = list(dict.fromkeys(line["layer"] for line in summary.rows))
    most = 1 + max(line["head"] for line in summary.rows)
    table = torch.full((len(layers), most), torch.nan)
    for line in summary.rows:
        table[layers.index(line["layer"]), line["head"]] = line[column]
    ax = new_axes(2.8 + 0.45 * most, 1.8 + 0.35 * len(layers)) if ax is None else ax
    image = ax.imshow(table.numpy(), **{"aspect": "auto", "cmap": "viridis"} | style)
    ax.set_yticks(range(len(layers)), layers, parse_math=False)
    ax.set(xlabel="head", title=column)
    ax.set_xticks(range(0, most, max(1, most // 16)))
    bar = ax.figure.colorbar(image, ax=ax)
    bar.set_label(textwrap.fill(COLUMNS[column], 22), fontsize="small")  # a longer line is cut off where layers are few
    return ax


# What is drawn --------------------------------------------------------------------------------------------------------


def maps_of(
    record: Record, heads: Sequence[int], row: int, *, size: int, reduce: str = "mean"
) -> tuple[Tensor, Tensor, int]:
    """Maps of some heads of at most `size` x `size`, from one pass: weights (heads, n, m), what is visible of it at all
    (n, m), and how many tokens are a block."""
    check_size("size", size)
    if reduce not in ("mean", "max"):
        raise bad_value("reduce", '"mean" or "max"', repr(reduce))
    if not math.prod(record.shape):
        raise bad_value("record", "one with a query and a key to draw", f"the shape {tuple(record.shape)}")
    heads = [index("head", head, record.shape[-3]) for head in heads]
    block = -(-max(record.shape[-2:]) // size)
    if block == 1:
        weights = _of_batch(record.weights(heads=heads), row, 3)
    else:
        weights = _of_batch(record.pooled(block, reduce), row, 3)[heads]
    return weights.cpu().float(), _of_batch(record.visible_blocks(block), row, 2).cpu(), block


def map_of(record: Record, head: int, row: int, *, size: int, reduce: str = "mean") -> tuple[Tensor, Tensor, int]:
    """A head's map, as of `maps_of`: weights are (n, m)."""
    weights, visible, block = maps_of(record, [head], row, size=size, reduce=reduce)
    return weights[0], visible, block


def colors_of(name: str) -> Any:
    """A colour map that shows in grey what is masked, and weights that are NaN in a colour of their own."""
    from matplotlib import colormaps

    return colormaps[name].with_extremes(bad=MASKED, over=NAN)


def _of_batch(found: Tensor, row: int, own: int) -> Tensor:
    """A row of the batch of what has `own` axes besides."""
    rows = found.reshape(-1, *found.shape[found.ndim - own :])
    return rows[index("row", row, rows.shape[0])]


def _lines(values: Tensor, record: Record, heads: Any, ax: Any, style: dict[str, Any]) -> Any:
    ax = new_axes(6.5, 3.6) if ax is None else ax
    some = chosen("heads", heads, record.shape[-3])
    for head in some:
        ax.plot(values[head].cpu().numpy(), **{"linewidth": 1.0, "label": f"head {head}"} | style)
    ax.grid(alpha=0.3)
    if len(some) <= 12:
        ax.legend(frameon=False, fontsize="small", ncols=2)
    return ax


def _names(argument: str, tokens: Sequence[str] | None, length: int) -> list[str] | None:
    if tokens is None:
        return None
    if not hasattr(tokens, "__len__"):
        raise bad_type(argument, "names, one for each token", tokens)
    if len(tokens) != length:
        raise bad_value(argument, f"a name for each of {length} tokens", f"{len(tokens)} of them")
    return [str(token) for token in tokens]


def _label(ax: Any, names: tuple[list[str] | None, list[str] | None]) -> None:
    of_queries, of_keys = names
    families, missing = fonts_for("".join([*(of_queries or []), *(of_keys or [])]))
    text: dict[str, Any] = {"family": families, "parse_math": False, "fontsize": "x-small"}
    if of_keys is not None:
        labels = shown(of_keys, missing)
        ax.set_xticks(range(len(of_keys)), labels, rotation=90 if max(map(len, labels)) > 1 else 0, **text)
    if of_queries is not None:
        ax.set_yticks(range(len(of_queries)), shown(of_queries, missing), **text)
    ax.tick_params(length=0 if of_keys is not None else 3)


def _number(ax: Any, lengths: tuple[int, int], block: int) -> None:
    """Ticks that say which token a block begins with."""
    for axis, length in ((ax.yaxis, lengths[0]), (ax.xaxis, lengths[1])):
        blocks = -(-length // block)
        places = range(0, blocks, max(1, blocks // 6))
        axis.set_ticks(list(places), [f"{place * block:,}" for place in places])


def _title(record: Record, head: int) -> str:
    return f"{record.name}, head {head}" if record.name else f"head {head}"
