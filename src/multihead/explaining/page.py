"""An explanation as a page for a browser, or a part of one."""

from __future__ import annotations

import base64
import html
import io

from multihead import web
from multihead.explaining.costs import binary, decimal
from multihead.explaining.explanation import Explanation, span
from multihead.packages import has


def page(found: Explanation) -> str:
    """A page of its own, with the roofline plot where there is matplotlib."""
    return web.page(found.subject, fragment(found, with_plot=has("matplotlib")))


def fragment(found: Explanation, with_plot: bool = False) -> str:
    """A part of a page."""
    kernels = [(name, said, reason) for name, said, reason in found.kernels()]
    costs = [
        [
            name, decimal(cost.flops), binary(cost.bytes), f"{cost.intensity:.1f}", cost.bound(found.balance),
            span(found.predicted(name)), span(found.took(name)),
        ]
        for name, cost in found.rows()
    ]  # fmt: skip
    head = ["step", "FLOP", "bytes", "FLOP/byte", "bound by", "predicted", "measured"]
    if found.machine is None:
        head, costs = head[:5], [row[:5] for row in costs]
    parts = [
        f"<p>called with {html.escape(found.inputs)}</p>",
        f"<h2>Kernel: {html.escape(found.kernel)}</h2>",
        web.table(["other kernel", "", "why"], kernels, 3),
        f"<p>It {html.escape('; '.join(found.made()))}.</p>",
        "<h2>Steps</h2>",
        web.table(["step", "shapes"], found.steps, 2),
        "<h2>Costs</h2>",
        web.table(head, costs),
        *(f"<p class=note>{html.escape(note)}</p>" for note in found.notes()),
    ]
    if with_plot:
        parts.append(f"<img alt='roofline plot' src='data:image/png;base64,{_png(found)}'>")
    if found.hints:
        told = "".join(f"<li>{html.escape(hint)}</li>" for hint in found.hints)
        parts.append(f"<h2>Hints</h2><ul>{told}</ul>")
    return web.fragment(parts)


def _png(found: Explanation) -> str:
    file = io.BytesIO()
    found.plot().figure.savefig(file, format="png", dpi=110)
    return base64.b64encode(file.getvalue()).decode()
