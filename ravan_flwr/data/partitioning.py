"""Deal out the rows of a data set, each once: alike, or with classes in other proportions.

Alike, and with every class split over the clients by a draw from a Dirichlet distribution, are
flwr-datasets' `IidPartitioner` and `DirichletPartitioner`, to the bit. Theirs make a data set for
each client, and lists of Python numbers: a minute and more for 10,000 clients.

The paper's non-IID clients are another thing: client c draws its proportions p_c from
Dirichlet(alpha) over the classes, and has as many examples as every other. Drawn proportions never
add up to the examples that there are. So the table of counts (clients x classes) is the one nearest
to them, by relative entropy, with the clients' sizes as its row sums and the classes' sizes as its
column sums: rows and columns are scaled in turn until both hold (iterative proportional fitting),
and rounded so that both still hold.
"""

import numpy as np

ROUNDS = 200  # of scaling; what is missing then is less than rounding moves
LEAST = 1e-9  # a proportion of zero could not be scaled
DRAWS = 11  # of one generator, until every client has enough


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
    """Deal out equal shares of so many shuffled rows."""
    return np.array_split(random.permutation(number), clients)


def partition_by_class(
    labels: np.ndarray, clients: int, alpha: float, least: int, random: np.random.Generator
) -> list[np.ndarray] | None:
    """Split the rows of every class over the clients, by proportions drawn for that class.

    Draw again while a client has fewer than `least` rows; None if every draw leaves one with fewer.
    """
    _, numbers, classes = np.unique(labels, return_inverse=True, return_counts=True)
    for _ in range(DRAWS):
        counts = _counts_by_class(classes, clients, alpha, random)
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


def _counts_by_class(
    classes: np.ndarray, clients: int, alpha: float, random: np.random.Generator
) -> np.ndarray:
    """Draw how many rows of each class each client has, (classes, clients)."""
    ends = [
        (random.dirichlet(np.full(clients, alpha)).cumsum() * number).astype(int)
        for number in classes
    ]
    for mine, number in zip(ends, classes, strict=True):
        mine[-1] = number  # whatever was rounded
    return np.diff(np.array(ends), axis=1, prepend=0)


def partition_by_client(
    labels: np.ndarray, clients: int, alpha: float, random: np.random.Generator
) -> list[np.ndarray]:
    """Deal out the rows to the clients, by the value that each row has."""
    _, numbers, classes = np.unique(labels, return_inverse=True, return_counts=True)
    proportions = random.dirichlet(np.full(len(classes), alpha), size=clients)
    counts = counts_by_client(proportions, equal_shares(len(labels), clients), classes)
    rows_of_class = [random.permutation(np.flatnonzero(numbers == k)) for k in range(len(classes))]
    parts = [
        np.split(rows, ends[:-1])
        for rows, ends in zip(rows_of_class, counts.T.cumsum(1), strict=True)
    ]
    return [np.sort(np.concatenate(mine)) for mine in zip(*parts, strict=True)]
