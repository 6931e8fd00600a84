"""Partition the training examples among simulated clients, each example at most once.

All ways but the paper's give what flwr-datasets' partitioners of these names give, to the bit.
Theirs take 3.6 s to import, and 10 to 200 times as long: they make a data set for each client.

The paper's non-IID clients are another thing: client c draws its proportions p_c from
Dirichlet(alpha) over the classes, and has as many examples as every other. Drawn proportions never
add up to the examples that there are. So the table of counts (clients x classes) is the one nearest
to them, by relative entropy, with the clients' sizes as its row sums and the classes' sizes as its
column sums: rows and columns are scaled in turn until both hold (iterative proportional fitting),
and rounded so that both still hold.

A device with its own examples never comes here.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import datasets
import numpy as np

from ravan_flwr.data.examples import SOURCES
from ravan_flwr.seeding import derive
from ravan_flwr.specs import DataSpec

log = logging.getLogger(__name__)

ROUNDS = 200  # of scaling; what is missing then is less than rounding moves
LEAST = 1e-9  # a proportion of zero could not be scaled
DRAWS = 11  # of one generator, until every client has enough
SEEDS = 20  # that are tried, one after the other, until every client has enough

Values = Sequence[str | float]  # of the column, where it is read


def column_of(spec: DataSpec) -> str:
    """Find what the column to divide by is called once columns are called by role."""
    roles = {column: role for role, column in spec.columns}
    by = spec.partition_by
    return by if by in roles.values() else roles.get(by, by)


def check_column(spec: DataSpec, examples: datasets.Dataset) -> None:
    """Raise ValueError, with the columns of the data itself, if there is none to divide by."""
    column = column_of(spec)
    if column in examples.column_names:
        return
    train = SOURCES[spec.source](spec)["train"]  # read once more: `examples` has what is used
    lacks = "the task has no label" if column == "label" else "the data has no such column"
    names = []
    for name in train.column_names:
        with suppress(ValueError):
            names += [repr(name)] if values_of(train, name) else []
    usable = ", ".join(names)
    has = f"that has a value for each example: {usable}" if usable else "(none of them will do)"
    raise ValueError(
        f"partition: got the column {spec.partition_by!r}: {lacks}, expected a column of "
        f"the data {has}; name one, as partition=dirichlet:0.3:COLUMN, or choose a partition that "
        "reads none, such as iid"
    )


def values_of(examples: datasets.Dataset, column: str) -> list[str | float]:
    """Return the value of each example; ValueError if one has none, or values are no names."""
    if column not in examples.column_names:
        raise ValueError(
            f"partition: got the column {column!r}: the examples have "
            f"{examples.column_names}, expected one of them, or another column of the "
            "data set; correct it"
        )
    feature = examples.features[column]
    plain = isinstance(feature, datasets.Value) and not feature.dtype.endswith("binary")
    if not plain and not isinstance(feature, datasets.ClassLabel):
        raise ValueError(
            f"partition: got the column {column!r}: it holds {type(feature).__name__} values, "
            "expected texts, numbers or classes; name another column"
        )
    values: list[str | float] = examples[column][:]
    is_class = isinstance(feature, datasets.ClassLabel)  # of which -1 is none
    lacking = [
        row
        for row, value in enumerate(values)
        if value is None or value != value or (is_class and int(value) < 0)  # noqa: PLR0124 (NaN)
    ]
    if lacking:
        raise ValueError(
            f"partition: got the column {column!r}: {len(lacking):,} of {len(values):,} examples "
            "have no value there (None, NaN, or class -1), the first of them example "
            f"{lacking[0]}; expected one for each; fill them in, or take these examples out"
        )
    return values


@dataclass(frozen=True)
class Partition:
    """Say how simulated clients share the training examples."""

    kind: str  # the first word of `partition`
    amount: float  # alpha of a Dirichlet distribution, or classes or shards of a client
    number: int
    seed: int


def partition_rows(train: datasets.Dataset, partition: Partition, column: str) -> list[np.ndarray]:
    """Partition the rows of `train` among the clients.

    Where only the number of examples counts, no column is read.
    """
    check_number(partition.number, len(train))
    values = values_of(train, column) if partition.kind in BY_COLUMN else range(len(train))
    random = np.random.default_rng(_seed(partition))
    parts = PARTITIONERS[partition.kind](values, partition, random, column)
    if left := len(train) - sum(map(len, parts)):
        log.info(
            "partition=%s: %d of %d examples belong to no client", partition.kind, left, len(train)
        )
    return parts


def _seed(partition: Partition) -> int:
    return derive(partition.seed, "partition") % 2**32


def numbered(values: Values) -> tuple[list[str | float], np.ndarray]:
    """List the different values in their order, and number each value by its place there.

    Not by NumPy: there a text with a zero at its end is the same as one without, and every text
    takes as much room as the longest.
    """
    different = sorted(set(values))
    place = {value: number for number, value in enumerate(different)}
    return different, np.fromiter((place[value] for value in values), np.int64, len(values))


def rows_by_number(numbers: np.ndarray, count: int) -> list[np.ndarray]:
    """List the rows of each number below `count`, in their order."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.bincount(numbers, minlength=count).cumsum()[:-1])


def check_number(clients: int, examples: int) -> None:
    """Raise ValueError if there are fewer examples than clients that share them."""
    if clients > examples:
        raise ValueError(
            f"{clients} clients share {examples} examples, expected at least one each; use fewer "
            "clients"
        )


def counts_by_client(
    proportions: np.ndarray, clients: np.ndarray, classes: np.ndarray
) -> np.ndarray:
    """Find whole numbers near the proportions, (clients, classes), of these row and column sums."""
    table = np.maximum(proportions, LEAST)
    for _ in range(ROUNDS):
        table *= (clients / table.sum(1))[:, None]
        table *= classes / table.sum(0)
    return _rounded(table, clients, classes)


def _rounded(table: np.ndarray, clients: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Round down, then up again where most was cut off and both sums still lack something."""
    counts: np.ndarray = np.floor(table).astype(np.int64)
    _lower_to(counts, clients)
    _lower_to(counts.T, classes)
    of_client, of_class = clients - counts.sum(1), classes - counts.sum(0)
    while of_client.any():
        order = np.argsort(counts - table, axis=None, kind="stable")
        may_grow = ((of_client > 0)[:, None] & (of_class > 0)).ravel()
        for cell in order[may_grow[order]]:
            client, label = divmod(int(cell), len(classes))
            if of_client[client] and of_class[label]:
                counts[client, label] += 1
                of_client[client] -= 1
                of_class[label] -= 1
    return counts


def _lower_to(counts: np.ndarray, sums: np.ndarray) -> None:
    """Take from the largest entries of rows that hold more than their sum."""
    for row, most in zip(counts, sums, strict=True):
        while row.sum() > most:
            row[row.argmax()] -= 1


def partition_by_class(
    labels: np.ndarray, clients: int, alpha: float, least: int, random: np.random.Generator
) -> list[np.ndarray] | None:
    """Split the rows of every class over the clients, by proportions drawn for that class.

    Draw again while a client has fewer than `least` rows; None if every draw leaves one with fewer.
    """
    _, numbers, classes = np.unique(labels, return_inverse=True, return_counts=True)
    for _ in range(DRAWS):
        # How many rows of each class each client has, (classes, clients), by where they end.
        draws = (random.dirichlet(np.full(clients, alpha)).cumsum() * n for n in classes)
        ends = np.array([draw.astype(int) for draw in draws])
        ends[:, -1] = classes  # whatever was rounded
        counts = np.diff(ends, axis=1, prepend=0)
        sizes = counts.sum(0)
        if sizes.min() >= least:
            break
    else:
        return None
    owners = np.repeat(np.tile(np.arange(clients), len(classes)), counts.ravel())
    by_class = np.argsort(numbers, kind="stable")
    rows = by_class[np.argsort(owners, kind="stable")]
    parts = np.split(rows, sizes.cumsum()[:-1])
    for part in parts:
        random.shuffle(part)
    return parts


def partition_by_client(
    labels: np.ndarray, clients: int, alpha: float, random: np.random.Generator
) -> list[np.ndarray]:
    """Partition the rows among the clients, by the value that each row has."""
    _, numbers, classes = np.unique(labels, return_inverse=True, return_counts=True)
    proportions = random.dirichlet(np.full(len(classes), alpha), size=clients)
    sizes = np.array([len(part) for part in np.array_split(labels, clients)])
    counts = counts_by_client(proportions, sizes, classes)
    rows_of_class = [random.permutation(np.flatnonzero(numbers == k)) for k in range(len(classes))]
    parts = [
        np.split(rows, ends[:-1])
        for rows, ends in zip(rows_of_class, counts.T.cumsum(1), strict=True)
    ]
    return [np.sort(np.concatenate(pieces)) for pieces in zip(*parts, strict=True)]


def partition_naturally(values: Values, clients: int, column: str) -> list[np.ndarray]:
    """Give each client the rows of one value, in the values' order."""
    different, numbers = numbered(values)
    check_natural(len(different), clients, column)
    return rows_by_number(numbers, clients)


def check_natural(different: int, clients: int, column: str) -> None:
    """Raise ValueError unless there are as many clients as values."""
    if clients != different:
        raise ValueError(
            f"num-clients = {clients}: with partition=natural there is a client for each of the "
            f"{different:,} different values of {column!r}; leave num-clients out, or set "
            f"num-clients={different} (with `flwr run`, num-supernodes={different})"
        )


def partition_few_classes(
    values: Values, clients: int, classes: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Give each client rows of so many values: one in turn, the others drawn.

    The clients that have a value share its rows. With fewer clients than values, and few values
    each, nobody has some of them.
    """
    different, numbers = numbered(values)
    if classes > len(different):
        raise ValueError(
            f"partition = 'pathological:{classes}': there are {len(different)} different values, "
            "expected at most as many; lower the number"
        )
    holders: list[list[int]] = [[] for _ in different]
    for client in range(clients):
        for number in _draw(client % len(different), len(different), classes, random):
            holders[number].append(client)
    client_parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for value, rows, having in zip(
        different, rows_by_number(numbers, len(different)), holders, strict=True
    ):
        if len(having) > len(rows):
            raise ValueError(
                f"partition = 'pathological': {len(having)} clients are to share the "
                f"{len(rows)} examples of {value!r}, expected at least one for each; use fewer "
                "clients, or fewer classes for each"
            )
        for client, part in zip(having, np.array_split(rows, max(1, len(having))), strict=False):
            client_parts[client].append(part)
    return [np.sort(np.concatenate(parts)) for parts in client_parts]


def _draw(first: int, different: int, classes: int, random: np.random.Generator) -> list[int]:
    """Draw values beside the first until there are as many as wanted."""
    chosen = [first]
    while len(chosen) < classes:
        number = int(random.choice(different, size=1)[0])
        if number not in chosen:
            chosen.append(number)
    return chosen


def partition_shards(
    values: Values, clients: int, shards: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Sort the rows by value, cut them into shards of one size, and give each client so many.

    What is left behind the last shard is nobody's.
    """
    size = len(values) // (clients * shards)
    if not size:
        raise ValueError(
            f"partition = 'shards:{shards}': {clients} clients have {clients * shards} shards, "
            f"which share {len(values)} examples, expected at least one in each; use fewer "
            "clients, or fewer shards for each"
        )
    order = np.argsort(numbered(values)[1], kind="stable")
    draws = random.permutation(len(values) // size)[: clients * shards].reshape(clients, shards)
    places = draws[:, :, None] * size + np.arange(size)
    return [np.sort(order[indices.ravel()]) for indices in places]


def _dirichlet(values: Values, partition: Partition, *_: object) -> list[np.ndarray]:
    """Split every class over the clients by a draw from a Dirichlet distribution.

    Clients differ in what they have, and widely in how much. Draws that leave a client with next to
    nothing are repeated, as flwr-datasets does ten times a seed, then with further seeds.
    """
    labels, clients, alpha = numbered(values)[1], partition.number, partition.amount
    least = max(1, min(10, len(values) // (4 * clients)))
    for attempt in range(SEEDS):
        random = np.random.default_rng(_seed(partition) + attempt)
        parts = partition_by_class(labels, clients, alpha, least, random)
        if parts is not None:
            return parts
    raise ValueError(
        f"partition = 'dirichlet:{alpha:g}': {clients} clients got fewer than {least} of "
        f"{len(values)} examples in every of {SEEDS * DRAWS} draws; raise alpha, use fewer "
        "clients, or partition=dirichlet-by-client"
    )


# By the first word of `partition`. `by` is the partition, `r` the generator, `c` the column.
PARTITIONERS: dict[str, Callable[..., list[np.ndarray]]] = {
    "iid": lambda values, by, r, _: np.array_split(r.permutation(len(values)), by.number),
    "dirichlet": _dirichlet,
    "dirichlet-by-client": lambda values, by, r, _: partition_by_client(
        numbered(values)[1], by.number, by.amount, r
    ),
    "natural": lambda values, by, _, c: partition_naturally(values, by.number, c),
    "pathological": lambda values, by, r, _: partition_few_classes(
        values, by.number, int(by.amount), r
    ),
    "shards": lambda values, by, r, _: partition_shards(values, by.number, int(by.amount), r),
}
BY_COLUMN = PARTITIONERS.keys() - {"iid"}
