"""The roofline plot of an explanation."""

from __future__ import annotations

from typing import Any

from multihead.explaining.explanation import Explanation
from multihead.packages import need

_ROOM = 10.0  # of the x axis on either side of the steps and the balance


def plot_roofline(found: Explanation, ax: Any) -> Any:
    """See `Explanation.plot`."""
    need("matplotlib", "plot", "a roofline plot")
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(7, 4.5), layout="constrained").add_subplot()
    machine = found.machine
    best = 1.0 if machine is None else machine.flops / 1e9
    steps = {name: cost for name, cost in found.rows() if cost.flops and cost.bytes}
    ends = [cost.intensity for cost in steps.values()] or [found.balance]
    left, right = min(found.balance, *ends) / _ROOM, max(found.balance, *ends) * _ROOM
    ax.loglog([left, found.balance, right], [best * left / found.balance, best, best], color="0.35", zorder=1)
    ax.axvline(found.balance, color="0.8", linestyle=":", zorder=0)
    for number, (name, cost) in enumerate(steps.items()):
        color, allowed = f"C{number}", best * min(1.0, cost.intensity / found.balance)
        # Where steps lie on one another all are seen: each is smaller than the one below, and the total a ring around.
        look = (
            {"markerfacecolor": "none", "markersize": 13}
            if name == "total"
            else {"markersize": max(4, 10 - 2 * number)}
        )
        ax.plot(cost.intensity, allowed, "o", color=color, label=name, zorder=2, **look)
        took = found.took(name)
        if took is not None:
            ax.plot(cost.intensity, cost.flops / took / 1e9, "x", color=color, markersize=8, zorder=3)
            ax.plot([cost.intensity] * 2, [allowed, cost.flops / took / 1e9], color=color, linewidth=0.8, zorder=1)
    ax.set(xlim=(left, right), ylim=(best * left / found.balance / 2, best * 4), xlabel="FLOP for each byte")
    ax.set_title(f"{found.kernel}: {found.inputs}", fontsize="medium")
    if machine is None:
        ax.set_ylabel("share of the machine's best")
        told = f"not calibrated: a balance of {found.balance:g} FLOP/byte is assumed"
    else:
        ax.set_ylabel("GFLOP/s")
        told = f"calibrated: {best:.3g} GFLOP/s, {machine.bandwidth / 1e9:.3g} GB/s, {machine.told}"
        told += "; x: measured" if found.measured is not None else ""
    ax.text(0.01, 0.98, told, transform=ax.transAxes, va="top", fontsize="small", color="0.35")
    if steps:
        ax.legend(loc="lower right", fontsize="small")
    ax.set_axisbelow(True)
    ax.grid(visible=True, which="major", color="0.92")
    return ax
