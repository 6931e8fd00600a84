"""A picture: one figure of matplotlib's, as an SVG for a page, or as a PNG for everywhere else.

Text and axes are drawn in one colour that stands for the page's own (`INK`): in an SVG for a
page it becomes `currentColor`, so that one picture serves light and dark pages alike. The
series' colours differ on both, and for people who see few colours (after Okabe and Ito).
"""

import io
import re
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from ravan_flwr.messages import plain_text
from ravan_flwr.runs.directory import write_atomically

INK = "#010203"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B97F00", "#3A93CC", "#8C6BB1", "#7F7F7F")
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
STYLE: dict[Any, Any] = dict.fromkeys((*_INKED, "grid.color"), INK) | {
    "font.family": "sans-serif", "font.size": 11, "svg.fonttype": "none",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.12,
    "axes.axisbelow": True, "legend.frameon": False, "figure.constrained_layout.use": True,
    "savefig.transparent": True,
}  # fmt: skip
# A figure is laid out by itself when it is made, and by `Chart` before it is drawn.
_DRAWN = STYLE | {"figure.constrained_layout.use": False}
_DPI = 150


class Caption(NamedTuple):
    """Hold the name of a picture's file, its heading, and a sentence on what it shows."""

    name: str
    title: str
    about: str  # below the heading, and for those who do not see the picture


@dataclass(frozen=True)
class Chart:
    """Hold a figure with its caption."""

    name: str
    title: str
    about: str
    figure: Figure
    broad: bool = False  # needs a page's whole width, and its text its full size
    numbers: bytes = b""  # the same as CSV

    def svg(self) -> Markup:
        """Draw it for a page, in the page's own colour, without styles that its policy refuses."""
        buffer = io.StringIO()
        with mpl.rc_context(_DRAWN | {"svg.hashsalt": self.name}):
            self._save(self.figure, buffer, format="svg", metadata={"Date": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :].replace(INK, "currentColor")
        text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
        # Groups are numbered in each picture anew, and nothing refers to them.
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        text = re.sub(r' style="([^"]*)"', _as_attributes, text)
        label = Markup('<svg role="img" aria-label="{}" stroke-linejoin="round"')
        # matplotlib has escaped the texts in it.
        return Markup(text.replace("<svg", label.format(self.about), 1))  # noqa: S704

    def png(self, origin: str = "") -> bytes:
        """Draw it for everywhere else, on white; a small line below it says whose it is."""
        with mpl.rc_context(_DRAWN | {"savefig.transparent": False}):
            parts = [self._pixels(self.figure)]
            if origin:
                parts.append(self._pixels(_line_below(origin, self.figure.get_figwidth())))
        buffer = io.BytesIO()
        Image.fromarray(np.concatenate(parts)).save(buffer, "png", dpi=(_DPI, _DPI))
        return buffer.getvalue()

    def write(self, folder: Path, origin: str = "") -> list[Path]:
        """Write the picture, and its numbers where it has some; return the paths."""
        written = {folder / f"{self.name}.png": self.png(origin)}
        if self.numbers:
            written[folder / f"{self.name}.csv"] = self.numbers
        for path, content in written.items():
            write_atomically(path, content)
        return list(written)

    def _pixels(self, figure: Figure) -> NDArray[np.uint8]:
        """Draw a figure on white: rows of pixels, each with four bytes."""
        buffer = io.BytesIO()
        self._save(figure, buffer, format="rgba", dpi=_DPI, facecolor="white")
        width = int(figure.get_figwidth() * _DPI)
        return np.frombuffer(buffer.getvalue(), np.uint8).reshape(-1, width, 4)

    @staticmethod
    def _save(figure: Figure, buffer: Any, **how: Any) -> None:
        """Give everything its place, once for all formats, and draw."""
        with warnings.catch_warnings():  # a page's font has the letters that matplotlib's lacks
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            if (engine := figure.get_layout_engine()) is not None:
                engine.execute(figure)
                figure.set_layout_engine(None)
            figure.savefig(buffer, **how)


def _as_attributes(style: re.Match[str]) -> str:
    """Write an SVG element's style as attributes, which a page's policy need not allow."""
    pairs = (part.partition(":") for part in style[1].split("; "))
    return "".join(f' {name.strip()}="{value.strip()}"' for name, _, value in pairs)


def _line_below(text: str, width: float) -> Figure:
    """Make a figure of a text, broken where it is broader than so many inches."""
    lines = textwrap.wrap(text, int(16 * width))
    figure = Figure(figsize=(width, 0.06 + 0.11 * len(lines)))
    figure.text(0.99, 0.5, "\n".join(map(plain, lines)), ha="right", va="center", fontsize=6.5)
    return figure


def plain(text: str) -> str:
    """Make a text, such as a path, one that can be drawn.

    Dollars are escaped, since between two of them stands a formula, and what cannot be printed:
    halves of characters, ends of lines, and what turns the direction of writing.
    """
    return plain_text.plain(text).replace("$", r"\$")
