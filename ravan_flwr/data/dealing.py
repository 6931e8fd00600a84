"""Draw class proportions for each client, and deal out everything once, in equal shares.

The paper's non-IID clients: client c draws its proportions p_c from Dirichlet(alpha) over the
classes, and has as many examples as every other. Drawn proportions never add up to the examples
that there are. So the table of counts (clients x classes) is the one nearest to them, by relative
entropy, with the clients' sizes as its row sums and the classes' sizes as its column sums: rows and
columns are scaled in turn until both hold (iterative proportional fitting), and rounded so that
both still hold.
"""

import numpy as np

ROUNDS = 200  # of scaling; what is missing then is less than rounding moves
LEAST = 1e-9  # a proportion of zero could not be scaled


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
        for cell in np.argsort(counts - table, axis=None, kind="stable"):
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


def deal_by_client(
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
