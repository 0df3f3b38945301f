"""Texts to learn from: read as they are, refused in one line where they are no text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from multihead.errors import bad_value


def read_texts(paths: Sequence[Path]) -> str:
    """All texts, one after the other with a new line between; without paths the text that comes with Python."""
    return "\n".join(read_text(path) for path in paths) if paths else read_text(None)


def read_text(path: Path | None) -> str:
    """A UTF-8 text with "\\n" for every kind of line end; for None the language reference that comes with Python.

    Raises:
        ValueError: it can't be read, or is empty or no text; the message names the option --text.
    """
    if path is None:
        try:
            from pydoc_data.topics import topics  # some systems lack it
        except ModuleNotFoundError:
            got = "none, and this Python comes without pydoc_data.topics"
            raise bad_value("--text", "a UTF-8 text file", got, "", "Name a file.") from None
        return "\n\n".join(topics.values())

    def unfit(what: str, instead: str) -> ValueError:
        return bad_value("--text", "a UTF-8 text file", f"{str(path)!r}, {what}", "", instead)

    try:
        if path.is_dir():
            raise unfit("a directory", "Name one file.")
        data = path.read_bytes()
    except FileNotFoundError:
        raise unfit("which does not exist", "Check the path.") from None
    except PermissionError:
        raise unfit("which may not be read", "Check its permissions.") from None
    except OSError as error:
        raise unfit(f"which can't be read ({error.strerror})", "Check the path.") from None
    if not data:
        raise unfit("which is empty", "Leave --text out for a text that comes with Python.")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        what = f"whose byte {error.start} (counted from 0), 0x{data[error.start]:02x}, is not UTF-8"
        raise unfit(what, "Save it as UTF-8 first.") from None
    if b"\0" in data:  # UTF-8 knows it, text does not: it is UTF-16 or no text at all
        what = f"whose byte {data.index(0)} (counted from 0), 0x00, is in no text"
        raise unfit(what, "Save it as UTF-8 first.")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def split(text: str, valid_share: float) -> tuple[str, str]:
    """What is learned from, and the end of the text, which is kept back to judge by.

    Args:
        text: of at least two characters.
        valid_share: how much of the text's characters is kept back, between 0 and 1.
    """
    kept_back = min(max(1, round(len(text) * valid_share)), len(text) - 1)
    return text[:-kept_back], text[-kept_back:]
