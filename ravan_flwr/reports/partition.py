"""Partition a run's examples as its clients will have them, and count them by client and class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import datasets
import numpy as np

from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.data.examples import load_splits
from ravan_flwr.data.partition import BY_COLUMN, deal_out, values_of
from ravan_flwr.data.partitioning import numbered
from ravan_flwr.messages.plain_text import plain
from ravan_flwr.specs import Scalar
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.model_and_data import column_for, held_back, partition_of, settle

ROWS = 40  # clients that have a line of their own
SHADES = ("·░▒▓█", ".:+*#")  # from little to much; the second where a terminal has letters alone
NAME = 24  # characters of a name


@dataclass(frozen=True)
class PartitionReport:
    """Hold the numbers of examples of each client, of each class where there are classes."""

    counts: np.ndarray  # (clients, classes); one column where there are no classes
    classes: tuple[str, ...]  # their names; none where there are none
    names: tuple[str, ...]  # of the clients, where the data has names for them
    nobodys: int  # examples that were left over

    @property
    def sizes(self) -> np.ndarray:
        """Count the examples of each client."""
        found: np.ndarray = self.counts.sum(1)
        return found

    @property
    def shares(self) -> np.ndarray:
        """Compute of each client which share of its examples is of which class."""
        shares: np.ndarray = self.counts / self.sizes[:, None]
        return shares

    @property
    def unlike(self) -> float:
        """Compute how unlike the whole the clients are: 0 alike, towards 1 nothing in common.

        It is the share of a client's examples that would have to be of other classes, in the mean.
        """
        whole = self.counts.sum(0) / self.counts.sum()
        return float(np.abs(self.shares - whole).sum(1).mean() / 2)

    def in_order(self) -> np.ndarray:
        """List the clients by their largest class, and within it by its share; else by size."""
        if not self.classes:
            return np.argsort(-self.sizes, kind="stable")
        shares = self.shares
        return np.lexsort((-shares.max(1), shares.argmax(1)))


@dataclass(frozen=True)
class Assignment:
    """Hold what clients have, under which settings, and how long they train on it."""

    config: Config  # with the number of clients
    report: PartitionReport
    classes: str  # the column that they are counted by; "" if none
    steps: np.ndarray  # of each client in a round

    @property
    def by_label(self) -> bool:
        """Tell whether they are counted by the task's own labels, whose names are no secret."""
        return self.classes == "label" and bool(self.config.data.labels)


def deal(settings: Mapping[str, Scalar], num_clients: int | None = None) -> Assignment:
    """Deal out the examples as in a run with these settings."""
    config = settle(read_config(own_preset(settings)))
    number = number_of_clients(config, num_clients)
    config = replace(config, num_clients=number)
    train = load_splits(config.data)["train"]
    column = column_for(config, train)
    dealt = deal_out(train, partition_of(config, number, config.seed), column)
    natural = config.division == "natural"
    classes = _classes(config, train, column)
    found = report_of(train, dealt, classes, config.data.labels, column if natural else "")
    trained = [size - held_back(config, size) for size in found.sizes.tolist()]
    return Assignment(config, found, classes, np.array([config.steps_of(size) for size in trained]))


def _classes(config: Config, train: datasets.Dataset, column: str) -> str:
    """Choose the column to count by: the one that makes clients differ, or the label."""
    if config.division in BY_COLUMN and config.division != "natural":
        return column
    other = column if config.division != "natural" else ""
    return next((name for name in ("label", other) if name in train.column_names), "")


def report_of(
    train: datasets.Dataset,
    dealt: Sequence[np.ndarray],
    classes: str,
    labels: Sequence[str],
    names: str = "",
) -> PartitionReport:
    """Count what was dealt out, by the column `classes` if there is one.

    `labels` are the names of labels that are numbers. The column `names` has the clients' names.
    """
    number = sum(map(len, dealt))
    owners = np.repeat(np.arange(len(dealt)), [len(rows) for rows in dealt])
    of_class, called = np.zeros(number, np.int64), [""]
    if classes:
        different, places = numbered(values_of(train, classes))
        called = [_name_of(train, classes, value, labels) for value in different]
        of_class = places[np.concatenate(dealt)]
    counts = np.bincount(owners * len(called) + of_class, minlength=len(dealt) * len(called))
    who = train[names][:] if names else []
    return PartitionReport(
        counts.reshape(len(dealt), len(called)),
        tuple(called) if classes else (),
        tuple(_name_of(train, names, who[rows[0]], labels) for rows in dealt if who),
        len(train) - number,
    )


def _name_of(
    train: datasets.Dataset, column: str, value: str | float, labels: Sequence[str]
) -> str:
    """Name a class or a client, which may be a number."""
    feature = train.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return str(feature.names[int(value)])
    if column == "label" and type(value) is int and 0 <= value < len(labels):
        return labels[value]
    return str(value)


def as_text(dealt: Assignment, width: int = 100, *, ascii_only: bool = False) -> str:
    """Write the partition for people, within so many characters a line."""
    shades = SHADES[ascii_only]
    rows = _table(dealt, width, shades) if dealt.classes else _bars(dealt, width, shades[-1])
    return "\n".join([*_numbers(dealt), "", *rows])


def _numbers(dealt: Assignment) -> list[str]:
    found, config = dealt.report, dealt.config
    by = "" if not dealt.classes else f", counted by {plain(dealt.classes, NAME)!r}"
    lines = [
        f"partition       {len(found.sizes):,} clients, {found.sizes.sum():,} examples, "
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
    found = dealt.report
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
    found = dealt.report
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
    shares = dealt.report.shares[shown]
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
    sizes = dealt.report.sizes
    shown, told = _shown(dealt)
    room = max(10, width - 16 - (NAME + 2 if dealt.report.names else 0))
    bars = [block * max(1, round(room * sizes[client] / sizes.max())) for client in shown]
    lines = [
        f"{client:>7}{sizes[client]:>8}  {bar}{_called(dealt, client)}"
        for client, bar in zip(shown, bars, strict=True)
    ]
    return [*told, " client     all", *lines]


def _called(dealt: Assignment, client: int) -> str:
    """Name a client at the end of its line, where letters of any width do no harm."""
    names = dealt.report.names
    return f"  {plain(names[client], NAME)}" if names else ""
