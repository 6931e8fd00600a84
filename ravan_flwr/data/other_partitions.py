"""Deal out rows by what a column says, by shards, by a few classes for each, or by size.

`pathological`, `shards`, `linear`, `square` and `exponential` give what flwr-datasets' partitioners
of these names give. Theirs make a data set for each client, and import a plotting library.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from ravan_flwr.data.columns import numbered, rows_by_number

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
    """Deal out shuffled rows in parts whose sizes grow with the client's number."""
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
