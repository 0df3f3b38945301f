"""Pages for a browser that hold everything themselves: no scripts, no network. And parts of them for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

# Of what is made here, wherever it stands: a notebook's page around it has styles and colours of its own.
_STYLE = """
.multihead h2 { font-size: 1.15em; margin: 2em 0 .7em; }
.multihead table { border-collapse: collapse; font-size: .87em; font-variant-numeric: tabular-nums; }
.multihead th, .multihead td { padding: .15em .7em; text-align: right; border-bottom: 1px solid rgba(128,128,128,.4); }
.multihead td.text, .multihead th.text { text-align: left; }
.multihead .wide { overflow-x: auto; }
.multihead img, .multihead svg { max-width: 100%; height: auto; }
.multihead img { background: white; }
.multihead .row { display: flex; flex-wrap: wrap; gap: 8px; }
.multihead details { margin: .6em 0; }
.multihead summary { cursor: pointer; font-weight: 600; margin-bottom: .4em; }
.multihead .note { opacity: .8; }
@media print {
  .multihead details::details-content { content-visibility: visible; height: auto; }
  .multihead img, .multihead svg { break-inside: avoid; }
}
"""
# Of a page of its own. Paper is white: what is dark is dark on screens alone.
_PAGE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1a1a1a;
  background: white; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
@media screen and (prefers-color-scheme: dark) { body { background: #161616; color: #ddd; } }
"""


def page(title: str, part: str) -> str:
    """A page of its own, around what `fragment` gave."""
    told = html.escape(title)
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{told}</title><style>{_PAGE}</style></head>\n<body><h1>{told}</h1>\n{part}</body></html>\n"
    )


def fragment(parts: Sequence[str], style: str = "") -> str:
    """Pieces of HTML as a part of a page, whose styles are for itself alone.

    Args:
        parts: the pieces, in their order.
        style: rules besides, each of `.multihead`.
    """
    body = "\n".join(parts)
    return f"<div class=multihead><style>{_STYLE}{style}</style>\n{body}\n</div>\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1, told: Sequence[str] = ()) -> str:
    """A table.

    Args:
        head: names of the columns.
        rows: the cells' texts.
        texts: how many columns, the first, are words; the others are numbers.
        told: what a browser says of each column when it is pointed at.
    """

    def line(cells: Sequence[str], tag: str, titles: Sequence[str] = ()) -> str:
        made = []
        for i, cell in enumerate(cells):
            title = f" title='{html.escape(titles[i])}'" if titles and titles[i] else ""
            made.append(f"<{tag}{' class=text' if i < texts else ''}{title}>{html.escape(cell)}</{tag}>")
        return "".join(made)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{line(head, 'th', told)}</tr>{body}</table></div>"
