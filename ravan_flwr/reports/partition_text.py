"""Tell in a terminal who has what: some lines of numbers, and a table of classes by client."""

import numpy as np

from ravan_flwr.messages.plain_text import plain
from ravan_flwr.reports.partition import Assignment

ROWS = 40  # clients that have a line of their own
SHADES = ("·░▒▓█", ".:+*#")  # from little to much; the second where a terminal has letters alone
NAME = 24  # characters of a name


def as_text(dealt: Assignment, width: int = 100, *, ascii_only: bool = False) -> str:
    """Write who has what for people, within so many characters a line."""
    shades = SHADES[ascii_only]
    rows = _table(dealt, width, shades) if dealt.classes else _bars(dealt, width, shades[-1])
    return "\n".join([*_numbers(dealt), "", *rows])


def _numbers(dealt: Assignment) -> list[str]:
    found, config = dealt.holdings, dealt.config
    by = "" if not dealt.classes else f", counted by {plain(dealt.classes, NAME)!r}"
    lines = [
        f"who has what    {len(found.sizes):,} clients, {found.sizes.sum():,} examples, "
        f"partition {config.partition}{by}",
        f"examples each   {_span(found.sizes)}",
    ]
    if found.nobodys:
        lines.append(f"nobody's        {found.nobodys:,} examples, which were left over")
    if found.classes:
        each = np.count_nonzero(found.counts, axis=1)
        lines += [
            f"classes each    {_span(each)}, of {len(found.classes):,}",
            f"unlike          {found.unlike:.2f} (0: each client is like the whole, towards 1: it "
            "has nothing in common)",
        ]
    lines.append(f"steps a round   {_span(dealt.steps)}")
    if config.validation_share:
        lines.append(f"held back       {config.validation_share:g} of them, to evaluate on")
    return lines


def _span(numbers: np.ndarray) -> str:
    low, middle, high = numbers.min(), np.median(numbers), numbers.max()
    if low == high:
        return f"{low:,}"
    return f"{low:,} to {high:,}, median {middle:,.10g}"


def _table(dealt: Assignment, width: int, shades: str) -> list[str]:
    """Write a line a client: numbers where there is room, else shades."""
    found = dealt.holdings
    shown, told = _shown(dealt)
    digits = max(3, len(str(found.counts[shown].max())) + 1)
    room = width - 16 - (NAME + 2 if found.names else 0)
    if digits * len(found.classes) <= room:
        heads = [plain(name, digits - 1) if len(name) < digits else "" for name in found.classes]
        if not all(heads):
            heads = [str(number) for number in range(len(found.classes))]
        cells = [
            "".join(f"{count or '.':>{digits}}" for count in found.counts[client])
            for client in shown
        ]
        header = "".join(f"{head:>{digits}}" for head in heads)
        legend = _legend(found.classes, heads)
    else:
        together = -(-len(found.classes) // max(1, room))
        cells, most = _shaded(dealt, shown, together, shades)
        header = "classes in their order" + (f", {together} a place" * (together > 1))
        legend = [f"{shades[-1]} is {100 * most:.0f} % of a client's examples, {shades[0]} any"]
    lines = [
        f"{client:>7}{found.sizes[client]:>8}  {row}{_called(dealt, client)}"
        for client, row in zip(shown, cells, strict=True)
    ]
    return [*told, f" client     all  {header}", *lines, *legend]


def _shown(dealt: Assignment) -> tuple[np.ndarray, list[str]]:
    """Choose the clients that have a line, and say so if these are not all."""
    found = dealt.holdings
    number = len(found.sizes)
    if number <= ROWS:
        return np.arange(number), []
    order = found.in_order()
    way = "their largest class" if found.classes else "size"
    chosen = order[np.linspace(0, number - 1, ROWS).round().astype(int)]
    return chosen, [f"{ROWS} of {number:,} clients, in the order of {way}:"]


def _shaded(
    dealt: Assignment, shown: np.ndarray, together: int, shades: str
) -> tuple[list[str], float]:
    """Draw shares as shades, so many classes a place; return the largest share, too."""
    shares = dealt.holdings.shares[shown]
    starts = np.arange(0, shares.shape[1], together)
    sums = np.add.reduceat(shares, starts, axis=1)
    most = float(sums.max())
    levels = np.ceil(sums / most * len(shades) - 1e-9).astype(int)
    return ["".join((" " + shades)[level] for level in row) for row in levels], most


def _legend(classes: tuple[str, ...], heads: list[str]) -> list[str]:
    """Name the classes whose names have no room above their numbers."""
    if list(classes) == heads:
        return []
    named = (f"{head} {plain(name, NAME)}" for head, name in zip(heads, classes, strict=True))
    return ["classes: " + ", ".join(named)]


def _bars(dealt: Assignment, width: int, block: str) -> list[str]:
    """Draw the numbers of examples of clients that have no classes."""
    sizes = dealt.holdings.sizes
    shown, told = _shown(dealt)
    room = max(10, width - 16 - (NAME + 2 if dealt.holdings.names else 0))
    bars = [block * max(1, round(room * sizes[client] / sizes.max())) for client in shown]
    lines = [
        f"{client:>7}{sizes[client]:>8}  {bar}{_called(dealt, client)}"
        for client, bar in zip(shown, bars, strict=True)
    ]
    return [*told, " client     all", *lines]


def _called(dealt: Assignment, client: int) -> str:
    """Name a client at the end of its line, where letters of any width do no harm."""
    names = dealt.holdings.names
    return f"  {plain(names[client], NAME)}" if names else ""
