"""Show how the clients differ: the spread of a metric over them, where they evaluate."""

from ravan_flwr.reports.chart import Chart
from ravan_flwr.reports.charts import bands
from ravan_flwr.runs.client_statistics import KEYS, QUARTILES, Spread
from ravan_flwr.runs.history import RecordedRun, common_metric


def spreads(run: RecordedRun) -> tuple[str, dict[int, Spread]]:
    """Collect the spread of the run's metric over the clients, by round; a damaged one is none."""
    name = common_metric([run])
    found = {record["round"]: record.get("spread", {}) for record in run.rounds}
    return name, {
        number: spread[name]
        for number, spread in found.items()
        if isinstance(spread, dict) and _whole(spread.get(name))
    }


def _whole(spread: object) -> bool:
    """Tell whether it has a number under every key."""
    return isinstance(spread, dict) and all(
        isinstance(spread.get(key), int | float) and not isinstance(spread[key], bool)
        for key in KEYS
    )


def in_words(run: RecordedRun) -> str:
    """Describe the last spread in a line; empty where there is none."""
    name, found = spreads(run)
    if not found:
        return ""
    last = found[max(found)]
    return (
        f"{name} {last['min']:.4f} to {last['max']:.4f}, median {last['median']:.4f}, standard "
        f"deviation {last['std']:.4f}, over {last['clients']:.0f} clients"
    )


def clients_chart(run: RecordedRun, prefix: str) -> list[Chart]:
    """Draw the spread by round; nothing where the clients did not evaluate."""
    name, found = spreads(run)
    if not found:
        return []
    low, middle, high = QUARTILES
    return [
        bands(
            f"{prefix}clients",
            "How the clients differ",
            f"The {name} that each client measures on the examples that it holds back: the median "
            "of all clients, the middle half of them, and from the least to the greatest.",
            list(found),
            [one[middle] for one in found.values()],
            {
                "all clients": [(one["min"], one["max"]) for one in found.values()],
                "the middle half": [(one[low], one[high]) for one in found.values()],
            },
            labels=("round", name),
        )
    ]
