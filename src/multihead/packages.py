"""Packages that are not always there: imported when they are needed, with one line that says how to get them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType


class MissingPackage(ImportError):
    """A package that something asked for needs is not installed."""


def has(name: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(name) is not None


def need(name: str, extra: str, what_for: str) -> ModuleType:
    """A module of another package.

    Args:
        name: the module's full name.
        extra: which of multihead's extras brings the package.
        what_for: what can't be done without it.

    Raises:
        MissingPackage: it is not installed, or can't be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise MissingPackage(f"{what_for} needs {package} ({error}). Next: pip install 'multihead[{extra}]'") from None
