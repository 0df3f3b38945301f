"""A checkpoint: one safetensors file with all that training goes on from: weights, optimizer, the count of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from multihead.errors import bad_value
from multihead.models import saving
from multihead.whole_files import write_whole

_FORMAT = "multihead checkpoint"


def write_json(path: Path, value: Any) -> None:
    """A value as a JSON file, to be read by people too."""
    # In ASCII: a file's name need not be UTF-8, and what Python makes of its other bytes has no UTF-8 either.
    told = json.dumps(value, indent=2) + "\n"
    write_whole(path, lambda beside: beside.write_text(told, encoding="utf-8"))


def write_checkpoint(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """A checkpoint: contiguous tensors by name, and what else is to be known, as JSON."""
    saving.write(tensors, path, {"format": _FORMAT, "facts": json.dumps(facts)})


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_checkpoint` wrote.

    Raises:
        ValueError: there is none, or it is cut off, damaged or something else.
    """
    try:
        metadata = saving.read_metadata(path)
    except FileNotFoundError:
        instead = "Train anew with --overwrite."
        raise bad_value(str(path), "a checkpoint", "no file", "There is nothing to go on from.", instead) from None
    except OSError as error:
        raise bad_value(str(path), "a checkpoint", f"a file that can't be read ({error.strerror})") from None
    try:
        facts = json.loads(metadata["facts"]) if metadata.get("format") == _FORMAT else None
    except (KeyError, ValueError):
        facts = None
    if not isinstance(facts, dict):
        raise bad_value(str(path), "a checkpoint", "another safetensors file", "It holds no state of a training.")
    return saving.read(path), facts
