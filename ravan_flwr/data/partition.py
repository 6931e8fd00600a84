"""Partition the training examples among simulated clients, each example to at most one client.

All partitions but `dirichlet-by-client` equal those of flwr-datasets' partitioners of these names,
to the bit. flwr-datasets takes 3.6 s to import, and partitions 10 to 200 times slower, since it
makes a data set for each client.

`dirichlet-by-client` is the paper's: client c draws its proportions p_c from Dirichlet(alpha) over
the classes, and all clients have equally many examples. The drawn proportions never match the
classes' sizes exactly. So the table of counts (clients x classes) is the nearest to them by
relative entropy whose row sums are the clients' sizes and whose column sums are the classes' sizes.
Rows and columns are scaled in turn until both sums hold (iterative proportional fitting); rounding
keeps both.

Devices with their own examples are not partitioned.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import datasets
import numpy as np

from ravan_flwr.seeding import derive
from ravan_flwr.specs import DataSpec

log = logging.getLogger(__name__)

SCALING_STEPS = 200  # the error that remains is less than rounding changes
MIN_PROPORTION = 1e-9  # a proportion of zero could not be scaled
DRAWS = 11  # with one seed, until every client has enough examples
SEEDS = 20  # that are tried in turn, until every client has enough examples

Values = Sequence[str | float]  # of the column to partition by; row numbers where none is read


def find_column(spec: DataSpec) -> str:
    """Return the name of the column to partition by after columns are renamed to roles."""
    roles = {column: role for role, column in spec.columns}
    by = spec.partition_by
    return by if by in roles.values() else roles.get(by, by)


def read_values(examples: datasets.Dataset, column: str) -> list[str | float]:
    """Return the column's value of each example; ValueError for a missing value or a wrong type."""
    if column not in examples.column_names:
        raise ValueError(
            f"partition: got the column {column!r}: the examples have "
            f"{examples.column_names}, expected one of them, or another column of the data; name "
            "one, as partition=dirichlet:0.3:COLUMN, or choose a partition that reads none: iid"
        )
    feature = examples.features[column]
    plain = isinstance(feature, datasets.Value) and not feature.dtype.endswith("binary")
    if not plain and not isinstance(feature, datasets.ClassLabel):
        raise ValueError(
            f"partition: got the column {column!r}: it holds {type(feature).__name__} values, "
            "expected texts, numbers or classes; name another column"
        )
    values: list[str | float] = examples[column][:]
    is_class = isinstance(feature, datasets.ClassLabel)  # -1 means no class
    missing = [
        row
        for row, value in enumerate(values)
        if value is None or value != value or (is_class and int(value) < 0)  # noqa: PLR0124 (NaN)
    ]
    if missing:
        raise ValueError(
            f"partition: got the column {column!r}: {len(missing):,} of {len(values):,} examples "
            "have no value there (None, NaN, or class -1), the first of them example "
            f"{missing[0]}; expected one for each; fill them in, or take these examples out"
        )
    return values


@dataclass(frozen=True)
class Partition:
    """How the training examples are partitioned among simulated clients."""

    scheme: str  # the first word of `partition`
    amount: float  # alpha of a Dirichlet distribution, or classes or shards per client
    number: int  # of clients
    seed: int


def partition_rows(train: datasets.Dataset, partition: Partition, column: str) -> list[np.ndarray]:
    """Return each client's rows of `train`.

    The column is read only by the partitions in `BY_COLUMN`.
    """
    check_enough_examples(partition.number, len(train))
    values = read_values(train, column) if partition.scheme in BY_COLUMN else range(len(train))
    random = np.random.default_rng(_seed(partition))
    parts = PARTITIONERS[partition.scheme](values, partition, random, column)
    if unused := len(train) - sum(map(len, parts)):
        log.info(
            "partition=%s: %d of %d examples belong to no client",
            partition.scheme,
            unused,
            len(train),
        )
    return parts


def _seed(partition: Partition) -> int:
    return derive(partition.seed, "partition") % 2**32


def numbered(values: Values) -> tuple[list[str | float], np.ndarray]:
    """Return the sorted different values, and the index of each value among them.

    NumPy is not used, since it drops zeros at the end of a text, and gives every text the memory
    of the longest.
    """
    different = sorted(set(values))
    index_of = {value: number for number, value in enumerate(different)}
    return different, np.fromiter((index_of[value] for value in values), np.int64, len(values))


def rows_by_number(numbers: np.ndarray, count: int) -> list[np.ndarray]:
    """Return, for each number below `count`, the sorted rows that have it."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.bincount(numbers, minlength=count).cumsum()[:-1])


def check_enough_examples(clients: int, examples: int) -> None:
    """Raise ValueError if there are fewer examples than clients."""
    if clients > examples:
        raise ValueError(
            f"{clients} clients share {examples} examples, expected at least one each; use fewer "
            "clients"
        )


def counts_by_client(
    proportions: np.ndarray, clients: np.ndarray, classes: np.ndarray
) -> np.ndarray:
    """Return integers near the proportions, (clients, classes), with these row and column sums."""
    table = np.maximum(proportions, MIN_PROPORTION)
    for _ in range(SCALING_STEPS):
        table *= (clients / table.sum(1))[:, None]
        table *= classes / table.sum(0)
    return _rounded(table, clients, classes)


def _rounded(table: np.ndarray, clients: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Round down, then add 1 where the fraction was largest and both sums are still too small."""
    counts: np.ndarray = np.floor(table).astype(np.int64)
    _lower_to(counts, clients)
    _lower_to(counts.T, classes)
    client_deficit, class_deficit = clients - counts.sum(1), classes - counts.sum(0)
    while client_deficit.any():
        order = np.argsort(counts - table, axis=None, kind="stable")
        may_grow = ((client_deficit > 0)[:, None] & (class_deficit > 0)).ravel()
        for cell in order[may_grow[order]]:
            client, label = divmod(int(cell), len(classes))
            if client_deficit[client] and class_deficit[label]:
                counts[client, label] += 1
                client_deficit[client] -= 1
                class_deficit[label] -= 1
    return counts


def _lower_to(counts: np.ndarray, sums: np.ndarray) -> None:
    """Lower the largest entries of each row until the row's sum is at most the given one."""
    for row, max_sum in zip(counts, sums, strict=True):
        while row.sum() > max_sum:
            row[row.argmax()] -= 1


def partition_by_class(
    labels: np.ndarray, clients: int, alpha: float, min_size: int, random: np.random.Generator
) -> list[np.ndarray] | None:
    """Split the rows of each class over the clients, by proportions drawn for that class.

    The draw is repeated while a client has fewer than `min_size` rows. Return None if that holds
    for all draws.
    """
    _, numbers, classes = np.unique(labels, return_inverse=True, return_counts=True)
    for _ in range(DRAWS):
        # Where each client's rows of each class end, (classes, clients).
        draws = (random.dirichlet(np.full(clients, alpha)).cumsum() * n for n in classes)
        ends = np.array([draw.astype(int) for draw in draws])
        ends[:, -1] = classes  # despite rounding
        counts = np.diff(ends, axis=1, prepend=0)
        sizes = counts.sum(0)
        if sizes.min() >= min_size:
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
    """Partition the rows by class proportions drawn for each client; see the module's docstring."""
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
    """Give each client all rows of one value; clients follow the sorted values."""
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
    """Give each client rows of `classes` values: the first in turn, the others drawn.

    The rows of a value are divided among its clients. With fewer clients than values, some values
    may belong to no client.
    """
    different, numbers = numbered(values)
    if classes > len(different):
        raise ValueError(
            f"partition = 'pathological:{classes}': there are {len(different)} different values, "
            "expected at most as many; lower the number"
        )
    clients_by_value: list[list[int]] = [[] for _ in different]
    for client in range(clients):
        for number in _draw(client % len(different), len(different), classes, random):
            clients_by_value[number].append(client)
    client_parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for value, rows, owners in zip(
        different, rows_by_number(numbers, len(different)), clients_by_value, strict=True
    ):
        if len(owners) > len(rows):
            raise ValueError(
                f"partition = 'pathological': {len(owners)} clients are to share the "
                f"{len(rows)} examples of {value!r}, expected at least one for each; use fewer "
                "clients, or fewer classes for each"
            )
        for client, part in zip(owners, np.array_split(rows, max(1, len(owners))), strict=False):
            client_parts[client].append(part)
    return [np.sort(np.concatenate(parts)) for parts in client_parts]


def _draw(first: int, different: int, classes: int, random: np.random.Generator) -> list[int]:
    """Return `classes` different values: `first`, and others drawn at random."""
    chosen = [first]
    while len(chosen) < classes:
        number = int(random.choice(different, size=1)[0])
        if number not in chosen:
            chosen.append(number)
    return chosen


def partition_shards(
    values: Values, clients: int, shards: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Sort the rows by value, cut them into shards of equal size, and give each client `shards`.

    The rows after the last shard belong to no client.
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
    positions = draws[:, :, None] * size + np.arange(size)
    return [np.sort(order[indices.ravel()]) for indices in positions]


def _dirichlet(values: Values, partition: Partition, *_: object) -> list[np.ndarray]:
    """Split each class over the clients by a draw from a Dirichlet distribution.

    Clients differ in their classes, and widely in their sizes. A draw that leaves a client with
    too few rows is repeated, ten times per seed as in flwr-datasets, then with further seeds.
    """
    labels, clients, alpha = numbered(values)[1], partition.number, partition.amount
    min_size = max(1, min(10, len(values) // (4 * clients)))
    for attempt in range(SEEDS):
        random = np.random.default_rng(_seed(partition) + attempt)
        parts = partition_by_class(labels, clients, alpha, min_size, random)
        if parts is not None:
            return parts
    raise ValueError(
        f"partition = 'dirichlet:{alpha:g}': {clients} clients got fewer than {min_size} of "
        f"{len(values)} examples, one of them at least, in each of {SEEDS * DRAWS} draws; raise "
        "alpha, use fewer clients, or partition=dirichlet-by-client"
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
