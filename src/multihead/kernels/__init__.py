"""The kernels: ways to compute a request. Each is a module with the same four functions.

    refusals(request) -> list[str]     why it can't; empty: it can
    drawbacks(request) -> list[str]    why another one should be preferred although it can
    tables(request) -> list[Table]     which L x S tensors it makes besides those given, and why
    run(request) -> (out, lse)         lse may be None unless request.needs_lse

The dispatcher, `explain` and `doctor` all read the same lists.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from multihead.kernels import blocks, flex, native, sdpa, small, varlen
from multihead.kernels import flops as flops  # registers its formulas
from multihead.kernels.table import Table
from multihead.request import Request

__all__ = ["FAST", "Kernel"]


class Kernel(Protocol):
    """What a kernel module looks like."""

    NAME: str

    def refusals(self, request: Request) -> list[str]: ...
    def drawbacks(self, request: Request) -> list[str]: ...
    def tables(self, request: Request) -> list[Table]: ...
    def run(self, request: Request) -> tuple[Tensor, Tensor | None]: ...


FAST: tuple[Kernel, ...] = (native, small, sdpa, blocks, flex, varlen)  # in the order in which they are asked
