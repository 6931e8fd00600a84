"""Draw docs/ravan.svg: a client's trained heads, its upload, and the server's average.

Also draw docs/averages.svg: an example why a mean of factors is not the mean of the updates.

python scripts/draw_ravan.py
"""

from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
FROZEN, TRAINED, IDLE, LINE = "#d7dde4", "#1f77b4", "#eef1f4", "#4a5560"
WRONG, RIGHT = "#b3261e", "#1b7837"
HEADS = 4


def text(
    x: float, y: float, words: str, size: int = 14, colour: str = "#1d252c", **more: str
) -> str:
    """Return a line of text, centred on x."""
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="middle"'
        f"{attributes}>{words}</text>"
    )


def box(
    x: float, y: float, wide: float, high: float, colour: str, words: str = "", ink: str = LINE
) -> str:
    """Return a rectangle with a word in it."""
    return (
        f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="3" fill="{colour}" '
        f'stroke="{LINE}" stroke-width="1"/>'
        + (text(x + wide / 2, y + high / 2 + 5, words, 13, ink) if words else "")
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return an arrow."""
    middle = (x + to_x) / 2
    return (
        f'<path d="M{x},{y} C{middle},{y} {middle},{to_y} {to_x},{to_y}" fill="none" '
        f'stroke="{TRAINED}" stroke-width="1.6" marker-end="url(#tip)"/>'
    )


def head(x: float, y: float, number: int, trains: bool) -> str:
    """Return one head, B H A, with its upload if it is trained."""
    fill = FROZEN if trains else IDLE
    return (
        box(x, y, 34, 44, fill, "B")
        + box(
            x + 40,
            y + 9,
            26,
            26,
            TRAINED if trains else IDLE,
            f"H{number}",
            "white" if trains else LINE,
        )
        + box(x + 72, y + 9, 62, 26, fill, "A")
    )


def client(x: float, y: float, title: str, trained: set[int]) -> str:
    """Return an adapted layer of a client that trains some of the heads."""
    parts = [
        f'<rect x="{x}" y="{y}" width="330" height="290" rx="8" fill="white" stroke="{LINE}"/>',
        text(x + 165, y + 24, title, 15, font_weight="600"),
        box(x + 18, y + 92, 96, 96, FROZEN, "W"),
        text(x + 66, y + 208, "frozen weight", 12),
        text(x + 140, y + 146, "+", 22),
    ]
    parts.extend(
        head(x + 172, y - 16 + number * 56, number, number in trained)
        for number in range(1, HEADS + 1)
    )
    parts.append(text(x + 238, y + 278, "heads s B H A", 12))
    return "".join(parts)


def draw() -> str:
    """Return the picture as SVG."""
    parts = [
        client(10, 30, "Client with a full budget", {1, 2, 3, 4}),
        client(10, 340, "Small client: half of the budget", {2, 4}),
        f'<rect x="560" y="150" width="310" height="350" rx="8" fill="white" stroke="{LINE}"/>',
        text(715, 178, "Server", 15, font_weight="600"),
        text(715, 202, "averages s·H for each head,", 13),
        text(715, 220, "over the clients that trained it", 13),
    ]
    for number in range(1, HEADS + 1):
        y = 240 + (number - 1) * 62
        parts.append(box(650, y, 130, 44, TRAINED, f"mean of s·H{number}", "white"))
        parts.append(arrow(318, 92 + (number - 1) * 56, 648, y + 14))
        if number in {2, 4}:
            parts.append(arrow(318, 402 + (number - 1) * 56, 648, y + 30))
    parts.append(text(465, 60, "only s·H travels", 14, font_weight="600"))
    parts.append(text(465, 80, "(r × r for each head)", 12))
    parts.append(text(715, 528, "W, B and A are the same everywhere and never", 12))
    parts.append(text(715, 546, "change: the mean of s·H is the mean update.", 12))
    return page(
        640,
        "RAVAN: clients train some heads of each layer, send s·H, and the server averages it "
        "head by head",
        parts,
    )


def page(high: int, label: str, parts: list[str]) -> str:
    """Return a whole SVG of a width of 880."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {high}" role="img" '
        f'font-family="Helvetica, Arial, sans-serif" aria-label="{label}">'
        f'<rect width="880" height="{high}" fill="#fafbfc"/>'
        f'<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
        f'<path d="M0,0 L7,3 L0,6 z" fill="{TRAINED}"/></marker></defs>'
        + "".join(parts)
        + "</svg>\n"
    )


def exchange(
    x: float, title: str, clients: list[list[str]], means: str, got: float, expected: float
) -> list[str]:
    """Return two clients above a server that averages their uploads, with values."""
    colour, sign = (RIGHT, "=") if got == expected else (WRONG, "≠")
    parts = [text(x + 200, 30, title, 16, font_weight="600")]
    for index, lines in enumerate(clients):
        left = x + 210 * index
        parts += [box(left, 50, 190, 94, "white")]
        parts += [text(left + 95, 74 + 24 * row, line, 14) for row, line in enumerate(lines)]
        parts += [arrow(left + 95, 146, x + 165 + 70 * index, 188)]
    parts += [box(x, 190, 400, 110, "white")]
    parts.append(text(x + 200, 214, f"the updates have the mean {expected:g}", 14))
    parts.append(text(x + 200, 238, means, 14))
    last = f"the new update is {got:g} {sign} {expected:g}"
    return [*parts, text(x + 200, 286, last, 15, colour, font_weight="600")]


def averages() -> str:
    """Return the picture of both averages, of matrices of one number each."""
    b, a = (1.0, 3.0), (4.0, 2.0)  # of the clients' LoRA
    frozen_b, frozen_a, h = 1.0, 2.0, (2.0, 3.0)  # the same two updates by RAVAN's core
    expected = (b[0] * a[0] + b[1] * a[1]) / 2
    mean_b, mean_a, mean_h = sum(b) / 2, sum(a) / 2, sum(h) / 2
    factors = [
        [f"client {i + 1}", f"sends B = {b[i]:g} and A = {a[i]:g}", f"update BA = {b[i] * a[i]:g}"]
        for i in range(2)
    ]
    cores = [
        [f"client {i + 1}", f"sends H = {h[i]:g}", f"update BHA = {frozen_b * h[i] * frozen_a:g}"]
        for i in range(2)
    ]
    left = exchange(
        10, "LoRA: factors are averaged", factors,
        f"mean B = {mean_b:g}, mean A = {mean_a:g}", mean_b * mean_a, expected,
    )  # fmt: skip
    right = exchange(
        470, f"RAVAN: B = {frozen_b:g} and A = {frozen_a:g} stay as they are", cores,
        f"mean H = {mean_h:g}", frozen_b * mean_h * frozen_a, expected,
    )  # fmt: skip
    return page(
        320,
        "With the same updates of two clients, averaging LoRA's factors misses their mean, and "
        "averaging RAVAN's cores gives it",
        [*left, *right],
    )


if __name__ == "__main__":
    (DOCS / "ravan.svg").write_text(draw())
    (DOCS / "averages.svg").write_text(averages())
