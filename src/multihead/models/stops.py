"""Where a text ends: before strings that the caller names, which may come in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from multihead.errors import bad_type, bad_value


class StopStrings:
    """Tells how much of a text that comes in pieces may be shown, when it is to end before any of some strings.

        stop = StopStrings(["\\nUser:"])
        for piece in pieces:
            show(stop.feed(piece))
            if stop.met:
                break
        show(stop.finish())

    What may be the beginning of such a string is held back until it is clear. How the text is cut into pieces changes
    nothing in all: the text ends before the string that is the first to be complete, of several the longest.

    Args:
        strings: none of them empty; none at all lets everything pass.

    Attributes:
        met: whether a string has come. Nothing is shown from then on.

    Raises:
        ValueError, TypeError: strings are not strings, or one is empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if not isinstance(strings, list | tuple) or not all(isinstance(string, str) for string in strings):
            raise bad_type("strings", "a list of strings", strings)
        if "" in strings:
            raise bad_value("strings", "no empty string", repr(""), "It would stop before the first character.")
        self.strings = tuple(strings)
        self.met = False
        self._held = ""

    def feed(self, piece: str) -> str:
        """What may be shown once `piece` has come too."""
        if self.met:
            return ""
        text = self._held + piece
        found = [(text.find(string) + len(string), -len(string)) for string in self.strings if string in text]
        if found:
            end, length = min(found)
            self.met, self._held = True, ""
            return text[: end + length]
        longest = min(len(text), max(map(len, self.strings), default=0))
        starts = range(len(text) - longest, len(text))
        start = next((at for at in starts if any(s.startswith(text[at:]) for s in self.strings)), len(text))
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held
