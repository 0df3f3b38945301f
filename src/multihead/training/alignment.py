"""A picture of cross-attention: which source tokens each token of a translation was predicted from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from multihead.errors import bad_value
from multihead.labels import escaped, fonts_for, shown
from multihead.packages import need
from multihead.whole_files import write_whole

_PNG = b"\x89PNG"
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

    families, missing = fonts_for("".join([*source, *target]))
    L, S = weights.shape
    figure = Figure(figsize=(2.5 + _INCH * S, 2.0 + _INCH * L), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(weights.numpy(), cmap="Greys", vmin=0.0, vmax=1.0, aspect="equal")
    text: dict[str, Any] = {"family": families, "parse_math": False}  # a dollar sign is a dollar sign
    axes.set_xticks(
        range(S), shown(source, missing), rotation=90 if missing or max(map(len, source)) > 3 else 0, **text
    )
    axes.set_yticks(range(L), shown(target, missing), **text)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_xlabel("source")
    axes.set_ylabel("translation")
    figure.colorbar(image, label="weight, mean of all heads", shrink=0.8)
    write_whole(path, lambda beside: FigureCanvasAgg(figure).print_png(str(beside)))
    if not missing:
        return ""
    named = ", ".join(f"{character} as {escaped(character)}" for character in sorted(missing))
    return f"no font here has some of the characters; the picture shows {named}"
