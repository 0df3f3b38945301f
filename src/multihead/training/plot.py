"""The curve of a run's losses, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multihead.packages import need
from multihead.whole_files import write_whole

_MOST_POINTS = 400  # a curve of single steps would be a band of noise


def draw_losses(path: Path, metrics: Sequence[dict[str, Any]]) -> None:
    """Draw training and validation loss over the steps. Nothing is drawn of no steps.

    Args:
        path: the PNG file.
        metrics: a run's lines: "step", "loss" and, in some, "validation_loss".
    """
    if not metrics:
        return
    need("matplotlib", "plot", "a picture of the losses")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a screen, and changes no setting
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    size = -(-len(metrics) // _MOST_POINTS)
    pieces = [metrics[start : start + size] for start in range(0, len(metrics), size)]
    name = "training" if size == 1 else f"training, mean of {size} steps"
    means = [sum(line["loss"] for line in piece) / len(piece) for piece in pieces]
    axes.plot([piece[-1]["step"] for piece in pieces], means, color="tab:blue", linewidth=1, label=name)
    judged = [line for line in metrics if "validation_loss" in line]
    if judged:
        steps, losses = [line["step"] for line in judged], [line["validation_loss"] for line in judged]
        axes.plot(steps, losses, color="tab:orange", marker="o", markersize=3.5, label="validation")
        axes.annotate(
            f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(0, 7), textcoords="offset points", ha="right"
        )
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    write_whole(path, lambda beside: FigureCanvasAgg(figure).print_png(str(beside)))
