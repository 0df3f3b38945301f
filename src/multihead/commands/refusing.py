"""How a command that can't do what it was asked for leaves: in one line on standard error, with exit code 2."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def refuse(message: str) -> NoReturn:
    """Leave with code 2 and a message on one line; of the processes that torchrun started each says which it is, but
    for the first."""
    rank = os.environ.get("RANK", "0")
    who = "" if rank == "0" else f"rank {rank}: "
    sys.stderr.write(f"multihead: {who}{' '.join(message.split())}\n")
    raise SystemExit(2)
