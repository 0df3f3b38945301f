"""Files that are whole or not there: written beside their place and renamed, so that no kill leaves a part."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside its place, then move it there, once it is on the disk.

    Args:
        path: its place; what is there before stays until the new one is whole.
        write: is called with the path to write to, where there is an empty file with the mode that new files get here.

    Raises:
        OSError: it can't be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
        write(beside)
        os.chmod(beside, mode)  # some libraries make files of a mode of their own
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    with suppress(OSError):  # the new name, where the system can sync a directory
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
