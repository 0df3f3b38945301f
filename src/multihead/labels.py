"""Tokens as the labels of a picture: in fonts that have their characters."""

from __future__ import annotations

from collections.abc import Iterable

_DEFAULT = "DejaVu Sans"  # comes with matplotlib
_LAST_RESORT = "Last Resort"  # a font whose characters are boxes


def fonts_for(text: str) -> tuple[list[str], set[str]]:
    """Families that have the characters of a text, to be tried in this order, and the characters that none has."""
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    families = [_DEFAULT]
    missing = {character for character in text if not character.isspace()}
    default = [font for font in fontManager.ttflist if font.name == _DEFAULT]
    others = [font for font in fontManager.ttflist if not font.name.startswith((_DEFAULT, _LAST_RESORT))]
    for font in (*default[:1], *others):
        if not missing:
            break
        try:
            face = FT2Font(font.fname)
            found = {character for character in missing if face.get_char_index(ord(character))}
        except (OSError, RuntimeError):  # listed, and gone or damaged since
            continue
        if found:
            missing -= found
            families += [font.name] if font.name not in families else []
    return families, missing


def shown(tokens: Iterable[str], missing: set[str]) -> list[str]:
    """Tokens as labels: spaces can be seen, characters that no font has are escaped."""
    spaced = (token.replace(" ", "_") for token in tokens)
    return ["".join(escaped(c) if c in missing or not c.isprintable() else c for c in token) for token in spaced]


def escaped(character: str) -> str:
    """A character by its number."""
    return character.encode("unicode_escape").decode()
