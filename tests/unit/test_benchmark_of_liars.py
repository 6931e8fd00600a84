"""benchmarks/liars.py: its columns."""

import pytest

from benchmarks.liars import LIES, cells, table
from ravan_flwr.config.run_config import read_config

ROBUST = {"median", "trimmed-mean", "krum", "multi-krum"}


def test_every_robust_weighting_has_a_column_where_clients_can_use_it():
    columns: dict[str, set[str]] = {"full": set(), "mixed": set()}
    for cell in cells(["ravan"]):
        columns[cell["budgets"]].add(cell["robust"])
    assert columns["full"] == ROBUST | {"none"}
    # The krums take whole updates, which no client with a quarter of the budget has.
    assert columns["mixed"] == columns["full"] - {"krum", "multi-krum"}
    for weighting in ROBUST:
        assert read_config({"weighting": weighting, "clients-per-round": 10}).robust == weighting


@pytest.mark.parametrize("robust", ["krum", "multi-krum"])
def test_the_table_has_a_cell_of_krum_for_each_lie(robust):
    done = [cell | {"accuracy": 0.5, "rejected": 0} for cell in cells(["ravan"])]
    full = table(done).split("ravan, mixed")[0]
    (head,) = [line for line in full.splitlines() if line.startswith("| lie |")]
    place = head.split(" | ").index(f"`weighting={robust}`")
    rows = [line.split(" | ") for line in full.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 1 + 2 * len(LIES)
    assert {row[place] for row in rows} == {"50.0"}
