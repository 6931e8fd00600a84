"""Draw when each client trained, how long it was idle, and whose updates were used."""

from collections import Counter
from collections.abc import Iterator
from statistics import mean

from ravan_flwr.reports.charts import Caption, Chart, bars, spans
from ravan_flwr.runs.history import RecordedRun

_MOST_ROWS = 40  # clients whose training is drawn
_MOST_KINDS = 40  # bars

Spans = dict[int, list[tuple[float, float]]]  # by partition


def time_charts(run: RecordedRun, prefix: str = "") -> list[Chart]:
    """Draw the time of the clients of one run, if it was measured on devices."""
    clients = [client for r in run.rounds if r["round"] for client in r["clients"]]
    if not (run.has_time_of_devices and clients and all("span" in one for one in clients)):
        return []
    trained: Spans = {}
    kinds: dict[int, str] = {}
    for client in clients:
        begin, end = client["span"]
        trained.setdefault(client["partition-id"], []).append((begin, end))
        kinds[client["partition-id"]] = client.get("device", f"client {client['partition-id']}")
    return [
        _when(trained, "simulated seconds" if run.in_simulated_time else "seconds", prefix),
        *_idle(trained, kinds, run.rounds[-1].get("time", 0.0), prefix),
        _updates(Counter(kinds[client["partition-id"]] for client in clients), prefix),
    ]


def _when(trained: Spans, unit: str, prefix: str) -> Chart:
    step = -(-len(trained) // _MOST_ROWS)
    shown = {str(one): trained[one] for one in sorted(trained)[::step]}
    about = (
        "For each client, named by its partition of the data: from a message to the reply, of "
        "replies that were used."
    )
    about += f" Every {step}th client is drawn." if step > 1 else ""
    caption = Caption(f"{prefix}trained-when", "Who trained when", about)
    return spans(caption, shown, unit, "client (partition)")


def _idle(trained: Spans, kinds: dict[int, str], end: float, prefix: str) -> Iterator[Chart]:
    """Draw the mean idle part of the run's time, by kind of device."""
    if not end > 0:
        return
    idle: dict[str, list[float]] = {}
    for partition, of_client in trained.items():
        busy = sum(until - since for since, until in of_client)
        idle.setdefault(kinds[partition], []).append(max(0.0, 100 * (1 - busy / end)))
    if len(idle) > _MOST_KINDS:
        return
    about = (
        "For each kind of device: the part of the run's time in which a client worked on no update "
        "that was used, as a mean over the clients that took part."
    )
    caption = Caption(f"{prefix}idle", "Idle time by device", about)
    yield bars(caption, {kind: mean(idle[kind]) for kind in sorted(idle)}, "device", "%")


def _updates(kinds: Counter[str], prefix: str) -> Chart:
    about = "For each kind of device: its part of all updates that were used."
    caption = Caption(f"{prefix}devices", "Updates by device", about)
    shown = sorted(kinds)[:: -(-len(kinds) // _MOST_KINDS)]
    parts = {kind: 100 * kinds[kind] / kinds.total() for kind in shown}
    return bars(caption, parts, "device", "%")
