"""Say how a metric differs from client to client: mean, deviation, extremes and quartiles.

Each client counts once, whatever its number of examples.
"""

from collections.abc import Mapping, Sequence

Spread = dict[str, float]
QUARTILES = ("lower-quartile", "median", "upper-quartile")


def spread_of(values: Sequence[float]) -> Spread:
    """Describe the values of one metric, one a client."""
    import numpy as np  # noqa: PLC0415 (`--help` needs none)

    numbers = np.asarray(values, float)
    quartiles = np.quantile(numbers, (0.25, 0.5, 0.75))
    return {
        "clients": len(numbers),
        "mean": float(numbers.mean()),
        "std": float(numbers.std()),
        "min": float(numbers.min()),
        **{name: float(value) for name, value in zip(QUARTILES, quartiles, strict=True)},
        "max": float(numbers.max()),
    }


def spreads_of(answers: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Describe every metric of the clients' answers."""
    return {name: spread_of([one[name] for one in answers]) for name in answers[0]}


KEYS = ("clients", "mean", "std", "min", *QUARTILES, "max")
