"""A picture of cross-attention: which source tokens each token of a translation was predicted from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from multihead.errors import bad_value
from multihead.training.packages import need
from multihead.whole_files import write_whole

_PNG = b"\x89PNG"
_DEFAULT = "DejaVu Sans"  # comes with matplotlib
_LAST_RESORT = "Last Resort"  # a font whose characters are boxes
_INCH = 0.28  # of a token


def check_picture(argument: str, path: Path) -> None:
    """Raise ValueError, by the argument's name, if a PNG can't be drawn there; ImportError without matplotlib."""
    need("matplotlib", "plot", "a picture of the attention")
    expected = "a PNG file that can be made"
    if path.suffix.lower() != ".png":
        raise bad_value(argument, expected, repr(str(path)), "Pictures are drawn as PNG.", "Name it something.png.")
    try:
        if not path.parent.is_dir():
            raise bad_value(argument, expected, f"{str(path)!r}, in a folder that does not exist")
        if path.is_dir():
            raise bad_value(argument, expected, f"{str(path)!r}, a folder")
        begin = _PNG
        if path.exists():
            with path.open("rb") as file:
                begin = file.read(len(_PNG))
    except OSError as error:
        raise bad_value(argument, expected, f"{str(path)!r} ({error.strerror})") from None
    if begin != _PNG:
        raise bad_value(argument, expected, f"{str(path)!r}, which is another file", "It would be lost.")


def draw_alignment(path: Path, weights: Tensor, source: Sequence[str], target: Sequence[str]) -> str:
    """Draw weights as a table of grey squares.

    Args:
        path: the PNG file.
        weights: (L, S), from 0 to 1.
        source, target: the S and L tokens, as they are read.

    Returns:
        A line on the characters that no font here has, which are shown as escapes; "" if there are none.

    Raises:
        OSError: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a screen, and changes no setting
    from matplotlib.figure import Figure

    families, missing = _fonts("".join([*source, *target]))
    L, S = weights.shape
    figure = Figure(figsize=(2.5 + _INCH * S, 2.0 + _INCH * L), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(weights.numpy(), cmap="Greys", vmin=0.0, vmax=1.0, aspect="equal")
    text: dict[str, Any] = {"family": families, "parse_math": False}  # a dollar sign is a dollar sign
    axes.set_xticks(
        range(S), _shown(source, missing), rotation=90 if missing or max(map(len, source)) > 3 else 0, **text
    )
    axes.set_yticks(range(L), _shown(target, missing), **text)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_xlabel("source")
    axes.set_ylabel("translation")
    figure.colorbar(image, label="weight, mean of all heads", shrink=0.8)
    write_whole(path, lambda beside: FigureCanvasAgg(figure).print_png(str(beside)))
    if not missing:
        return ""
    named = ", ".join(f"{character} as {_escaped(character)}" for character in sorted(missing))
    return f"no font here has some of the characters; the picture shows {named}"


def _fonts(text: str) -> tuple[list[str], set[str]]:
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


def _shown(tokens: Iterable[str], missing: set[str]) -> list[str]:
    """Tokens as labels: spaces can be seen, characters that no font has are escaped."""
    spaced = (token.replace(" ", "_") for token in tokens)
    return ["".join(_escaped(c) if c in missing or not c.isprintable() else c for c in token) for token in spaced]


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
