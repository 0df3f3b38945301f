"""A head's map as SVG, for a page: the weights as an image, names and numbers as text that the page's reader draws.

That is small, quick to make, as sharp as the screen, and takes the colour of the text around it.
"""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from multihead.inspection.pictures import LEAST, MASKED, NAN, colors_of
from multihead.labels import shown

_LEAST_SIDE = 180  # pixels of a map
_LABEL = 11  # pixels that a token's name takes beside the next one
_CHARACTER = 6  # pixels, on average
_LONGEST = 18  # characters of a name; the rest is left out
_GAP = 4  # pixels between a map and its labels
_TITLE = 20  # pixels

Names = Sequence[str] | None


def map_svg(values: Tensor, visible: Tensor, block: int, names: tuple[Names, Names], title: str) -> str:
    """A map as `pictures.maps_of` gives it.

    Args:
        values: (n, m), of one head.
        visible: (n, m), bool; the rest is grey.
        block: how many tokens a row and a column are.
        names: of the queries and the keys; None: numbers. Only where block is 1.
        title: above it.
    """
    n, m = values.shape
    height, width = (max(_LEAST_SIDE, _LABEL * len(of)) if of is not None else _LEAST_SIDE for of in names)
    of_queries = _labels(names[0], range(0, n, max(1, n // 6)), block)
    of_keys = _labels(names[1], range(0, m, max(1, m // 3)), block)  # fewer: numbers lie side by side
    left, below = (_GAP * 2 + _CHARACTER * max(map(len, labels.values())) for labels in (of_queries, of_keys))
    flat = names[1] is None or max(map(len, of_keys.values())) == 1
    rows = "".join(_text(-_GAP, (i + 0.5) * height / n + 3.5, label) for i, label in of_queries.items())
    if flat:
        below = 16
        across = "".join(_text((j + 0.5) * width / m, height + 12, label) for j, label in of_keys.items())
        columns = f"<g text-anchor=middle>{across}</g>"
    else:
        across = "".join(_text(-height - _GAP, (j + 0.5) * width / m + 3.5, label) for j, label in of_keys.items())
        columns = f"<g text-anchor=end transform='rotate(-90)'>{across}</g>"
    whole_width, whole_height = round(left + width + 14), round(_TITLE + height + below)
    kind = "map" if names == (None, None) else "'map named'"
    return (
        f"<svg class={kind} role=img aria-label='{html.escape(title)}' width={whole_width} height={whole_height} "
        f"viewBox='0 0 {whole_width} {whole_height}' font-size=10 fill=currentColor>"
        f"<g transform='translate({left:.0f} {_TITLE})'>"
        f"<text x={width / 2:.0f} y=-6 font-size=12 text-anchor=middle>{html.escape(title)}</text>"
        f"<image width={width} height={height} preserveAspectRatio=none href='{_image(values, visible)}'/>"
        f"<g text-anchor=end>{rows}</g>{columns}</g></svg>"
    )


def _labels(names: Names, places: Iterable[int], block: int) -> dict[int, str]:
    """What stands beside rows: all names, or the numbers of the first tokens of some."""
    if names is None:
        return {place: f"{place * block:,}" for place in places}
    whole = shown(names, set())
    return {i: name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…" for i, name in enumerate(whole)}


def _text(x: float, y: float, label: str) -> str:
    return f"<text x={x:.0f} y={y:.0f}>{html.escape(label)}</text>"


def _image(values: Tensor, visible: Tensor) -> str:
    """A pixel for each weight, as PNG, with the weights' logarithms as indices into the colours."""
    from matplotlib.colors import to_rgb

    colors = colors_of("viridis")
    steps = 1 - values.clamp(LEAST, 1).log() / math.log(LEAST)  # from 0 to 1
    shades = (2 + (253 * steps).round()).nan_to_num(1)
    indices = shades.masked_fill(~visible, 0).to(torch.uint8)
    palette = [to_rgb(MASKED), to_rgb(NAN), *(colors(i / 253)[:3] for i in range(254))]
    rows = b"".join(b"\0" + bytes(row) for row in indices.tolist())  # each with its filter before it: none
    whole = b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, data)
        for kind, data in (
            (b"IHDR", struct.pack(">IIBBBBB", *reversed(values.shape), 8, 3, 0, 0, 0)),  # 8 bits, with a palette
            (b"PLTE", bytes(round(255 * part) for color in palette for part in color)),
            (b"IDAT", zlib.compress(rows, 9)),
            (b"IEND", b""),
        )
    )
    return f"data:image/png;base64,{base64.b64encode(whole).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
