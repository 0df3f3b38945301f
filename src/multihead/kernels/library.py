"""The native library `libmultihead_native.so`, made of `csrc/` when multihead is installed: found, and loaded into
PyTorch; or why it is not there. That happens when this file is imported, so that compiled code need not do it.

Two environment variables are read at that time. `MULTIHEAD_LIBRARY` is the path of another build of it.
`MULTIHEAD_ISA` names the instruction set whose kernels are to be taken, by default the best that the CPU has: `avx512`,
`avx2`, `baseline` on x86-64, `neon` on arm64.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import multihead

NAME = "libmultihead_native.so"
INTERFACE = 3  # the operations and their arguments, as csrc/op.cpp has them too


@dataclass(frozen=True)
class _Found:
    """Either the instruction sets, the best first, and which is taken, or why there are none."""

    isas: tuple[str, ...] = ()
    isa: str = ""
    why_not: str | None = None


def available() -> bool:
    """Whether `torch.ops.multihead` has the operations of the library."""
    return _FOUND.why_not is None


def why_not() -> str | None:
    """Why it is not available and what to do about it, or None if it is."""
    return _FOUND.why_not


def isa() -> str:
    """The instruction set whose kernels are taken.

    Raises:
        RuntimeError: the library is not available.
    """
    if not available():
        raise RuntimeError(why_not())
    return _FOUND.isa


def isas() -> tuple[str, ...]:
    """The instruction sets that this CPU has kernels for, the best first; empty if the library is not available."""
    return _FOUND.isas


def _look() -> _Found:
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or (int(version[1]), int(version[2])) < (2, 10):
        return _Found(why_not=f"it needs PyTorch 2.10 or newer, and this is {torch.__version__}")
    path = _path()
    if isinstance(path, str):
        return _Found(why_not=path)
    try:
        torch.ops.load_library(str(path))
        for operation in ("forward", "backward", "weights", "statistics"):
            getattr(torch.ops.multihead, operation)  # one that PyTorch could not register is not there
        if torch.ops.multihead.interface() != INTERFACE:
            return _Found(why_not=f"{path} is of another version of multihead. Next: install multihead again")
        return _Found(tuple(torch.ops.multihead.isas().split(",")), torch.ops.multihead.isa())
    except Exception as error:  # whatever goes wrong, multihead works without
        said = str(error.__cause__ or error)
        return _Found(why_not=said if said.startswith("MULTIHEAD_ISA") else f"{path} could not be loaded: {said}")


def _path() -> Path | str:
    """Where the library is, or why it is nowhere."""
    named = os.environ.get("MULTIHEAD_LIBRARY")
    if named:
        path = Path(named).absolute()
        return path if path.is_file() else f"MULTIHEAD_LIBRARY: expected a file, got {named}"
    # In an editable install the package is two folders, the sources and the one that the library was installed to.
    for folder in multihead.__path__:
        path = Path(folder).absolute() / NAME
        if path.is_file():
            return path
    if not sys.platform.startswith("linux"):
        return "it is built on Linux only, for now"
    return (
        "it was not built when multihead was installed, which takes a C++17 compiler. "
        "Next: install one (g++ or clang++), then multihead again; where there is one, `make native` says what fails"
    )


_FOUND = _look()
