"""Partition the rows of a data set, each at most once, in the ways that a run config names.

All but the paper's give what flwr-datasets' partitioners of these names give, to the bit. Theirs
take 3.6 s to import, and 10 to 200 times as long: they make a data set for each client.

The paper's non-IID clients are another thing: client c draws its proportions p_c from
Dirichlet(alpha) over the classes, and has as many examples as every other. Drawn proportions never
add up to the examples that there are. So the table of counts (clients x classes) is the one nearest
to them, by relative entropy, with the clients' sizes as its row sums and the classes' sizes as its
column sums: rows and columns are scaled in turn until both hold (iterative proportional fitting),
and rounded so that both still hold.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

ROUNDS = 200  # of scaling; what is missing then is less than rounding moves
LEAST = 1e-9  # a proportion of zero could not be scaled
DRAWS = 11  # of one generator, until every client has enough


def numbered(values: Sequence[str | float]) -> tuple[list[str | float], np.ndarray]:
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


def equal_shares(number: int, clients: int) -> np.ndarray:
    """Compute the sizes of as many shares, which differ by one at most."""
    return np.array([(number + other) // clients for other in reversed(range(clients))])


def partition_evenly(number: int, clients: int, random: np.random.Generator) -> list[np.ndarray]:
    """Give out equal shares of so many shuffled rows."""
    return np.array_split(random.permutation(number), clients)


def partition_by_class(
    labels: np.ndarray, clients: int, alpha: float, least: int, random: np.random.Generator
) -> list[np.ndarray] | None:
    """Split the rows of every class over the clients, by proportions drawn for that class.

    Draw again while a client has fewer than `least` rows; None if every draw leaves one with fewer.
    """
    _, numbers, classes = np.unique(labels, return_inverse=True, return_counts=True)
    for _ in range(DRAWS):
        # How many rows of each class each client has, (classes, clients), by where they end.
        drawn = (random.dirichlet(np.full(clients, alpha)).cumsum() * n for n in classes)
        ends = np.array([mine.astype(int) for mine in drawn])
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
    for mine in parts:
        random.shuffle(mine)
    return parts


def partition_by_client(
    labels: np.ndarray, clients: int, alpha: float, random: np.random.Generator
) -> list[np.ndarray]:
    """Partition the rows among the clients, by the value that each row has."""
    _, numbers, classes = np.unique(labels, return_inverse=True, return_counts=True)
    proportions = random.dirichlet(np.full(len(classes), alpha), size=clients)
    counts = counts_by_client(proportions, equal_shares(len(labels), clients), classes)
    rows_of_class = [random.permutation(np.flatnonzero(numbers == k)) for k in range(len(classes))]
    parts = [
        np.split(rows, ends[:-1])
        for rows, ends in zip(rows_of_class, counts.T.cumsum(1), strict=True)
    ]
    return [np.sort(np.concatenate(mine)) for mine in zip(*parts, strict=True)]


SIZES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda number: number,
    "square": np.square,
    "exponential": np.exp,
}


def partition_naturally(
    values: Sequence[str | float], clients: int, column: str
) -> list[np.ndarray]:
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
    values: Sequence[str | float], clients: int, classes: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Give each client rows of so many values: one in turn, the others drawn.

    The rows of a value are shared by those that have it. With fewer clients than values, and few
    values each, nobody has some of them.
    """
    different, numbers = numbered(values)
    if classes > len(different):
        raise ValueError(
            f"partition = 'pathological:{classes}': there are {len(different)} different values, "
            "expected at most as many; lower the number"
        )
    holders: list[list[int]] = [[] for _ in different]
    for client in range(clients):
        for one in _drawn(client % len(different), len(different), classes, random):
            holders[one].append(client)
    mine: list[list[np.ndarray]] = [[] for _ in range(clients)]
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
            mine[client].append(part)
    return [np.sort(np.concatenate(parts)) for parts in mine]


def _drawn(first: int, different: int, classes: int, random: np.random.Generator) -> list[int]:
    """Draw values beside the first until there are as many as wanted."""
    chosen = [first]
    while len(chosen) < classes:
        one = int(random.choice(different, size=1)[0])
        if one not in chosen:
            chosen.append(one)
    return chosen


def partition_shards(
    values: Sequence[str | float], clients: int, shards: int, random: np.random.Generator
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
    drawn = random.permutation(len(values) // size)[: clients * shards].reshape(clients, shards)
    places = drawn[:, :, None] * size + np.arange(size)
    return [np.sort(order[mine.ravel()]) for mine in places]


def partition_by_size(
    kind: str, number: int, clients: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Divide shuffled rows into parts whose sizes grow with the client's number."""
    sizes = _sizes(kind, number, clients)
    if sizes[0] < 1:
        most = bisect_left(range(1, clients), 1, key=lambda n: _sizes(kind, number, n)[0] < 1)
        without = np.count_nonzero(sizes < 1)
        who = "client 0" if without == 1 else f"clients 0 to {without - 1}"
        raise ValueError(
            f"partition = {kind!r}: {without} of {clients} clients get none of "
            f"{number:,} examples ({who}), expected at least one each; use at most {most} clients"
        )
    return [np.sort(rows) for rows in np.split(random.permutation(number), sizes.cumsum()[:-1])]


def _sizes(kind: str, number: int, clients: int) -> np.ndarray:
    """Compute the parts' sizes; the last has what rounding leaves."""
    with np.errstate(over="ignore", invalid="ignore"):  # e to the power of thousands
        units = SIZES[kind](np.arange(1.0, clients + 1))
        exact = np.nan_to_num(units / units.sum() * number, nan=0.0)
    sizes: np.ndarray = exact.astype(np.int64)
    sizes[-1] += number - sizes.sum()
    return sizes
