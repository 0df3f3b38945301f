"""What `explain` finds, as fields, as text and as a dict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from multihead import whole
from multihead.explaining.costs import BALANCE, Cost, binary, decimal
from multihead.explaining.machine import Machine
from multihead.explaining.measured import Measured
from multihead.kernels.table import Table


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. Print it, read its fields, draw it with `plot()`, or write it with `to_html()`."""

    subject: str  # the layer, in one line
    inputs: str  # what it is called with
    kernel: str  # the one that runs; "whole" if the layer is one operation with its projections
    refusals: dict[str, list[str]]  # by kernel: why it can't
    drawbacks: dict[str, list[str]]  # by kernel that could: why another is preferred
    tables: list[Table]  # the L x S tensors that are made besides those given, and why
    steps: list[tuple[str, str]]  # (what runs, its shapes)
    costs: dict[str, Cost]  # by step: operations and bytes, in training with the backward pass
    pairs: tuple[int, int]  # of a query and a key, over all heads: that may see each other, and all
    parameters: int
    peak: int  # bytes: the most that is there at once besides inputs and parameters, without what a kernel works in
    cache_bytes: int  # of one token in a cache, as it comes
    hints: list[str]
    machine: Machine | None  # what predictions of time are made with; None: nothing was calibrated, there are none
    measured: Measured | None  # if it was asked for

    @property
    def total(self) -> Cost:
        """Of all steps."""
        return sum(self.costs.values(), Cost(0, 0))

    @property
    def balance(self) -> float:
        """Operations for each byte above which arithmetic is the limit: of the machine, or if nothing was calibrated of
        most."""
        return BALANCE if self.machine is None else self.machine.balance

    def predicted(self, step: str) -> float | None:
        """The least seconds that a step, or "total", can take on the machine that was calibrated; None: none was."""
        if self.machine is None:
            return None
        if step == "total":
            return sum(self.machine.seconds(cost) for cost in self.costs.values())
        return self.machine.seconds(self.costs[step])

    def took(self, step: str) -> float | None:
        """The seconds that a step took when it was measured, or "total" the call; None: it was not."""
        if self.measured is None:
            return None
        return self.measured.seconds if step == "total" else self.measured.steps.get(step)

    def rows(self) -> list[tuple[str, Cost]]:
        """Steps and their total, with their costs."""
        return [*self.costs.items(), ("total", self.total)]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can write it, with a "schema" that changes when its form does. Times are in seconds."""
        costs = {
            name: {
                "flops": cost.flops, "bytes": cost.bytes, "intensity": cost.intensity,
                "bound": cost.bound(self.balance), "predicted": self.predicted(name), "measured": self.took(name),
            }
            for name, cost in self.rows()
        }  # fmt: skip
        return {
            "schema": "multihead-explanation/1",
            **vars(self),
            "tables": [table._asdict() for table in self.tables],
            "costs": costs,
            "machine": None if self.machine is None else {**self.machine._asdict(), "balance": self.machine.balance},
            "measured": None if self.measured is None else asdict(self.measured),
        }

    def plot(self, *, ax: Any = None) -> Any:
        """A roofline plot (Williams et al. 2009): operations a second over operations for each byte, both logarithmic.
        A dot is the most that the machine allows a step, a cross what it reached when it was measured. Without
        calibration the machine's best is 1 and its balance an assumption.

        Args:
            ax: an Axes to draw on; by default a new one.

        Returns:
            It.

        Raises:
            MissingPackage: there is no matplotlib here.
        """
        from multihead.explaining.roofline import plot_roofline

        return plot_roofline(self, ax)

    def to_html(self) -> str:
        """A page with all of it and, where there is matplotlib, the roofline plot: no scripts, no network."""
        from multihead.explaining.page import page

        return page(self)

    def _repr_html_(self) -> str:
        from multihead.explaining.page import fragment

        return fragment(self)

    def kernels(self) -> list[tuple[str, str, str]]:
        """The kernels that were not taken: (name, "can't" or "not taken", the reason), one for each reason."""
        found = []
        for name in self.refusals:
            if name == self.kernel:
                continue
            said = "can't" if self.refusals[name] else "not taken"
            reasons = self.refusals[name] or self.drawbacks[name] or [f"{self.kernel} comes first"]
            found += [(name, said, reason) for reason in reasons]
        return found

    def made(self) -> list[str]:
        """What L x S tensors are made, in words."""
        return [f"makes {table.what}, {binary(table.bytes)}: {table.why}" for table in self.tables] or [
            "makes no L x S tensor"
        ]

    def notes(self) -> list[str]:
        """What the costs mean, and figures of the whole."""
        seen, every = self.pairs
        share = f"{seen:,} of {every:,} pairs" if seen != every else f"all {seen:,} pairs"
        how = "an assumption, nothing was measured"
        if self.machine is not None:
            rates = f"{decimal(self.machine.flops)}FLOP/s, {decimal(self.machine.bandwidth)}B/s"
            how = f"calibrated: {rates} in {self.machine.told}"
        notes = [
            f"2 for a multiply-add; {share} are visible by the mask; bound by: above {self.balance:.3g} FLOP/byte "
            f"compute, {how}",
            f"{self.parameters:,} parameters; at least {binary(self.peak)} at once besides inputs and parameters; a "
            f"token in a cache takes {self.cache_bytes:,} bytes",
        ]
        if self.measured is not None:
            found = self.measured
            notes.append(
                f"measured: the fastest of {found.runs} runs; attention's forward pass spent {found.share:.0%} of its "
                f"time in {found.operation}; {binary(found.peak)} at once"
            )
        return notes

    def __str__(self) -> str:
        lines = [self.subject, f"called with {self.inputs}", "", f"kernel: {self.kernel}"]
        lines += [f"  {name:<10} {said}: {reason}" for name, said, reason in self.kernels()]
        lines += [f"  {made}" for made in self.made()]
        if self.kernel == whole.NAME:
            lines.append(f"  runs all steps as one operation, {whole.OPERATION}")
        lines += ["", "steps:"]
        lines += [f"  {name:<10} {shapes}" for name, shapes in self.steps]
        lines += ["", *self._costs_told()]
        lines += [f"  {self.notes()[0]}", *self.notes()[1:]]
        return "\n".join([*lines, *(f"hint: {hint}" for hint in self.hints)])

    def _costs_told(self) -> list[str]:
        timed = f"{'predicted':>13}{'measured':>12}" if self.measured is not None else ""
        lines = [f"{'costs:':<14}{'FLOP':>10}{'bytes':>12}{'FLOP/byte':>11}  {'bound by':<8}{timed}".rstrip()]
        for name, cost in self.rows():
            told = f"{decimal(cost.flops):>10}{binary(cost.bytes):>12}{cost.intensity:>11.1f}"
            times = f"{span(self.predicted(name)):>13}{span(self.took(name)):>12}" if timed else ""
            lines.append(f"  {name:<12}{told}  {cost.bound(self.balance):<8}{times}".rstrip())
        return lines


def span(seconds: float | None) -> str:
    """A time: 3.21 ms."""
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
