"""The page of a run shows its clients, devices and settings, and not more than a page can hold."""

from pathlib import Path
from typing import Any

import pytest

from ravan_flwr.results.report import LISTED_CLIENTS, describe_run, render
from ravan_flwr.results.run_charts import run_charts
from ravan_flwr.runs.history import RecordedRun
from tests.hostile_texts import HOSTILE
from tests.records import client, record
from tests.tags import Tags

CONFIG: dict[str, Any] = {"method": "ravan", "preset": "digits-vit", "seed": 0, "num-rounds": 10}


def run_of(*records, **changes):
    return RecordedRun(Path("a-run"), CONFIG | changes, [*records], None)


class ReadPage(Tags):
    """Collect the tags of a page, and its text."""

    VOID = ("meta", "link")

    def __init__(self, run) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.feed(render([describe_run(run)], "title").decode())
        assert self.open == []
        self.words = " ".join(" ".join(self.pieces).split())

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.pieces.append(data)


def test_a_client_is_shown_with_its_replies():
    words = ReadPage(run_of(*(record(number) for number in (1, 2, 3)))).words
    assert "rounds 3 of 10 time 12 s" in words
    assert "sent by clients 0.15 MB sent to clients 0.31 MB rejected replies 0" in words
    assert "4 0.5 72 3 (last 3) 2 3.2 75.0 kB 0.15 MB" in words
    assert "This run has not finished." in words


def test_a_run_in_simulated_time_shows_its_devices_and_their_seconds():
    run = run_of(record(1, time=0.75, clients=[client(4, device="fast", span=[0.5, 0.75])]))
    words = ReadPage(run).words
    assert "4 fast 0.5 72 1 (last 1) 2 0.25" in words


def test_settings_of_model_and_data_are_shown_one_by_one():
    model = {"name": "digits-vit", "targets": ["query", "Schlüssel"]}
    words = ReadPage(run_of(record(1), model=model, deliver=True)).words
    assert 'model.name digits-vit model.targets ["query", "Schlüssel"]' in words
    assert "deliver true" in words  # as a user types it


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_clients_stay_texts(text):
    def page_with(text):
        rejected = [{"client": "partition 4", "reason": text}, {"client": text, "reason": text}]
        return ReadPage(run_of(record(1, rejected=rejected)))

    assert page_with(text).tags == page_with("x").tags
    shown = text.encode(errors="backslashreplace").decode().replace("\x00", "\ufffd").split()
    assert " ".join(shown) in page_with(text).words.replace("\x00", "\ufffd")


def test_of_many_clients_the_rejected_and_the_latest_ones_are_listed():
    rejected = [{"client": "partition 900", "reason": "late"}] * 2
    many = record(1, clients=[client(number) for number in range(1000)], rejected=rejected)
    run = run_of(many, record(2, clients=[client(999), client(998)]))
    people = describe_run(run)["clients"]
    listed = {one["partition"]: one for one in people["listed"]}
    assert [*listed] == sorted(listed)
    assert len(listed) == LISTED_CLIENTS
    assert people["more"] == 1000 - LISTED_CLIENTS
    assert {900, 998, 999} < listed.keys()
    assert listed[900]["rejected"] == 2
    assert "And 700 more clients." in ReadPage(run).words


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("selected", [[[10**9]], [[-1]], [], [[0], [1], [2]]])
def test_invalid_selected_heads_are_not_drawn(selected):
    charts = run_charts(run_of(record(1, clients=[client(0), client(1, selected=selected)])))
    assert all("How often each head was trained" not in chart.title for chart in charts)
    assert charts


def test_large_numbers_are_shown():
    words = ReadPage(run_of(record(1, clients=[client(0, seconds=1e300, heads=1e300)]))).words
    assert "1e+300" in words
