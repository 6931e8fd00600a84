"""Charts of simulated time: idle time of devices, and the fraction of used updates."""

from pathlib import Path
from typing import Any

from ravan_flwr.results.run_charts import run_charts
from ravan_flwr.runs.history import RecordedRun
from tests.records import client, record


def charts_of(records, **config):
    run = RecordedRun(Path("a-run"), {"num-clients": 3, **config}, records, None)
    charts = {chart.name: chart for chart in run_charts(run)}
    return {name: chart for name, chart in charts.items() if name in ("devices", "idle")}


def heights(chart):
    (axes,) = chart.figure.axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    return dict(zip(names, [patch.get_height() for patch in axes.patches], strict=True))


def trained(partition, begin, end, device):
    return client(partition, span=[begin, end], device=device)


ROUNDS: list[Any] = [
    record(1, time=4.0, clients=[trained(0, 0.0, 1.0, "fast"), trained(1, 0.0, 4.0, "slow")]),
    record(2, time=8.0, clients=[trained(2, 4.0, 5.0, "fast"), trained(1, 4.0, 8.0, "slow")]),
]


def test_three_clients_by_hand():
    """Of 8 s the slow client works 8, each fast one 1; half of the updates are its own."""
    charts = charts_of(ROUNDS, devices="a.yaml")
    assert heights(charts["idle"]) == {"fast": 87.5, "slow": 0.0}
    assert heights(charts["devices"]) == {"fast": 50.0, "slow": 50.0}


def test_clients_of_a_deployment_are_named():
    of_nodes: list[Any] = [
        record(n, time=4.0 * n, **{"link-bytes-estimate": 9}, clients=[client(5, span=[0.0, 2.0])])
        for n in (1, 2)
    ]
    assert heights(charts_of(of_nodes)["devices"]) == {"client 5": 100.0}


def test_real_time_is_not_drawn():
    assert charts_of([record(1, time=3.0, clients=[client(0, span=[0.0, 2.0])])]) == {}
    assert charts_of([record(1)], devices="phones") == {}  # of an earlier version


def test_only_some_of_many_clients_are_drawn():
    clients = [trained(n, 0.0, 1.0, f"kind {n}") for n in range(500)]
    charts = charts_of([record(1, time=2.0, clients=clients)], devices="a.yaml")
    assert len(charts["idle"].figure.axes[0].patches) <= 40
    assert len(charts["devices"].figure.axes[0].patches) <= 40
