"""A picture: one figure of matplotlib's, as an SVG for a page, or as a PNG for everywhere else.

Text and axes are drawn in one colour that stands for the page's own (`INK`): in an SVG for a
page it becomes `currentColor`, so that one picture serves light and dark pages alike. The
series' colours are told apart on both, and by people who see few colours (after Okabe and Ito).
"""

import io
import re
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 11,
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.transparent": True,
}
# A figure is laid out by itself when it is made, and by `Chart` before it is drawn.
_DRAWN = STYLE | {"figure.constrained_layout.use": False}
_DPI = 150


@dataclass(frozen=True)
class Chart:
    """A picture with the name of its file, its heading, and a sentence on what it shows."""

    name: str
    title: str
    about: str  # below the heading, and for those who do not see the picture
    figure: Figure
    broad: bool = False  # needs a page's whole width, and its text its full size
    numbers: bytes = b""  # the same as CSV

    def svg(self) -> Markup:
        """Draw it for a page: no XML header, and the page's own colour for text and axes."""
        buffer = io.StringIO()
        with mpl.rc_context(_DRAWN | {"svg.hashsalt": self.name}), _any_letter():
            self._lay_out()
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :].replace(INK, "currentColor")
        # Groups are numbered in each picture anew, and nothing refers to them.
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        label = Markup('<svg role="img" aria-label="{}"').format(self.about)
        if self.broad:
            width = round(float(self.figure.get_figwidth()), 2)
            label += Markup(' style="width:{}in"').format(width)
        # matplotlib has escaped the texts in it.
        return Markup(text.replace("<svg", label, 1))  # noqa: S704

    def png(self, origin: str = "") -> bytes:
        """Draw it for everywhere else, on white; a small line below it says whose it is."""
        with mpl.rc_context(_DRAWN | {"savefig.transparent": False}), _any_letter():
            self._lay_out()
            parts = [_pixels(self.figure)]
            if origin:
                parts.append(_pixels(_line_below(origin, self.figure.get_figwidth())))
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

    def _lay_out(self) -> None:
        """Give everything its place, once for all formats: `savefig` would draw twice for it."""
        if (engine := self.figure.get_layout_engine()) is not None:
            engine.execute(self.figure)
            self.figure.set_layout_engine(None)


def _pixels(figure: Figure) -> NDArray[np.uint8]:
    """Draw a figure on white: rows of pixels, each with four bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="rgba", dpi=_DPI, facecolor="white")
    return np.frombuffer(buffer.getvalue(), np.uint8).reshape(
        -1, int(figure.get_figwidth() * _DPI), 4
    )


def _line_below(text: str, width: float) -> Figure:
    """Make a figure of a text, broken where it is broader than so many inches."""
    lines = textwrap.wrap(text, int(16 * width))
    figure = Figure(figsize=(width, 0.06 + 0.11 * len(lines)))
    figure.text(0.99, 0.5, "\n".join(map(plain, lines)), ha="right", va="center", fontsize=6.5)
    return figure


@contextmanager
def _any_letter() -> Iterator[None]:
    """Draw letters that matplotlib's font lacks as boxes, in silence: a page's font has them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def plain(text: str) -> str:
    """Make a text, such as a path, one that can be drawn.

    Dollars are escaped, since between two of them stands a formula, and what cannot be printed:
    halves of characters, ends of lines, and what turns the direction of writing.
    """
    return plain_text.plain(text).replace("$", r"\$")
