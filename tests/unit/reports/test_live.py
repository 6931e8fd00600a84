"""The dashboard agrees with the run's files at any time, and escapes text from clients."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from ravan_flwr.reports.dashboard import DashboardPage
from ravan_flwr.reports.run_charts import comparison_charts, run_charts
from ravan_flwr.reports.run_view import LISTED_CLIENTS, MOST_REJECTED, RunSnapshot, view_of
from ravan_flwr.runs.history import group_runs
from ravan_flwr.runs.lock import holder_of, locked
from tests.followed import NOW, client, lines, node, record, run_in, status
from tests.hand_made import SUMMARY
from tests.hostile_texts import HOSTILE
from tests.tags import Tags


@pytest.fixture(autouse=True)
def _at_that_moment(monkeypatch):
    monkeypatch.setattr("ravan_flwr.reports.dashboard.time.time", lambda: NOW)


class ReadPage(Tags):
    """Collect the tags of a page, and its text."""

    VOID = ("meta", "link")

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.feed(page.decode())
        assert self.open == []
        self.text = "".join(self.pieces)
        self.words = " ".join(" ".join(self.pieces).split()).replace(" .", ".")

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.pieces.append(data)


def page_of(folder):
    return ReadPage(DashboardPage(folder).get())


@pytest.mark.slow
def test_a_running_run_shows_its_progress(tmp_path):
    page = page_of(run_in(tmp_path))
    assert "ravan on digits-vit" in page.words
    assert "running Round 4 of 10: training, 1 of 2 clients have answered, for 21 s." in page.words
    assert f"accuracy, last {record(3)['metrics']['accuracy']:.4f}" in page.words
    assert "rounds 3 of 10 time 12 s, about 28 s left" in page.words
    assert "sent by clients 0.15 MB sent to clients 0.31 MB rejected replies 0" in page.words
    assert "0 at work 0 s ago cuda:0 0.5 72" in page.words
    assert (
        "4 has answered 4 min 00 s ago cuda:0 0.5 72 3 (last 3) 2 3.2 75.0 kB 0.15 MB" in page.words
    )
    assert "round 1/10 loss 2.8400" in page.words
    assert "report true" in page.words  # a setting, as a user types it
    pictures = [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]
    run = RunSnapshot.read(tmp_path).run
    assert pictures == [
        chart.about for chart in (*comparison_charts(group_runs([run])), *run_charts(run))
    ]
    assert len(pictures) == 7
    (bar,) = [attributes for tag, attributes in page.tags if tag == "progress"]
    assert bar["value"] == "0.3000"


@pytest.mark.usefixtures("without_charts")
def test_while_the_report_is_written_no_remaining_time_is_shown(tmp_path):
    page = page_of(run_in(tmp_path, rounds=10))
    assert "rounds 10 of 10 time 40 s sent by clients" in page.words


@pytest.mark.usefixtures("without_charts")
def test_a_run_in_simulated_time_shows_its_devices_and_their_seconds(tmp_path):
    """The processor that simulates the devices, and its seconds, are not shown."""
    config = {"method": "ravan", "preset": "digits-vit", "seed": 0, "devices": "phones"}
    folder = run_in(tmp_path, config=config)
    lines(folder, [record(1, time=0.75, clients=[client(4, device="fast", span=[0.5, 0.75])])])
    page = page_of(folder)
    assert "simulated time 0.75 s" in page.words
    assert "4 has answered 4 min 00 s ago fast 0.5 72 1 (last 1) 2 0.25" in page.words
    assert "cuda:0" not in page.words


@pytest.mark.usefixtures("without_charts")
def test_settings_of_model_and_data_are_shown_one_by_one(tmp_path):
    model = {"name": "digits-vit", "targets": ["query", "Schlüssel"]}
    config = {"method": "ravan", "preset": "digits-vit", "seed": 0, "model": model}
    words = page_of(run_in(tmp_path, config=config)).words
    assert 'model.name digits-vit model.targets ["query", "Schlüssel"]' in words


OF_A_STEP: dict[str, list[int]] = {"asked": [], "answered": []}
STOPPED = "stopped It was stopped after 3 rounds, without a result. Nothing was written for"


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"pid": 0, "summary": SUMMARY}, "finished It ended after 3 rounds."),
        ({"pid": 0, "rounds": 1, "summary": SUMMARY}, "finished It ended after 1 round."),
        (
            {"pid": 0, "failure": {"error": "OSError: x"}},
            "failed It failed after 3 rounds: OSError: x",
        ),
        ({"pid": 0}, STOPPED),
        ({"pid": 0, "rounds": 0}, "No round has finished, so there is nothing to resume"),
        ({"rounds": 0}, "No round has finished yet; the pictures come with the first."),
        (
            {"status": status(doing="recruiting", round=0, **OF_A_STEP)},
            "Waiting for clients, 2 are here, for 21 s.",
        ),
        ({"status": status(doing="saving", **OF_A_STEP)}, "Round 4 of 10: saving, for 21 s."),
        (
            {"status": status(doing="calibrating", round=0)},
            "Calibrating before the first round, 1 of 2 clients have answered",
        ),
        ({"status": {"x": 1}}, "running It is running. Nothing was written for"),
        ({"summary": SUMMARY, "status": status(rounds=20)}, "running Round 4 of 20: training"),
    ],
)
def test_each_phase_of_a_run_is_shown(tmp_path, files, text):
    assert text in page_of(run_in(tmp_path, **files)).words


@pytest.mark.usefixtures("without_charts")
def test_a_killed_run_is_reported(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    folder = run_in(tmp_path, pid=process.pid)
    assert holder_of(folder) == "a dead process"
    for path in folder.iterdir():
        os.utime(path, (NOW - 7200, NOW - 7200))
    words = page_of(folder).words
    assert "stopped Its process is gone after 3 rounds, without a result." in words
    assert "Nothing was written for 2 h 00 min." in words
    assert f"To continue: ravan-flwr simulate resume={folder}; with flwr run" in words
    assert "s left" not in words
    assert "at work" not in words


def test_a_later_process_with_the_same_pid_is_not_the_run(tmp_path):
    folder = run_in(tmp_path)
    assert holder_of(folder) == "a process"
    os.utime(folder / "lock", (NOW - 10**8, NOW - 10**8))  # long before the start of this process
    assert holder_of(folder) == "a dead process"


@pytest.mark.usefixtures("without_charts")
def test_a_process_on_another_host_is_unknown(tmp_path):
    (run_in(tmp_path) / "lock").write_text("process 1 on another.example.org")
    assert holder_of(tmp_path) == "unknown"
    assert "Whether its process is alive cannot be seen" in page_of(tmp_path).words
    for text in ("", "process x on y", "\x00" * 300, "process 99999999999999 on z"):
        (tmp_path / "lock").write_text(text)
        assert holder_of(tmp_path) == "unknown"


def test_reading_does_not_take_the_lock(tmp_path):
    (tmp_path / "lock").unlink(missing_ok=True)
    assert holder_of(tmp_path) == "no process"
    with locked(tmp_path):
        assert holder_of(tmp_path) == "a process"
        inode = (tmp_path / "lock").stat().st_ino
        assert (tmp_path / "lock").stat().st_ino == inode


@pytest.mark.usefixtures("without_charts")
def test_a_run_of_an_older_version_is_shown_without_status_and_log(tmp_path):
    folder = run_in(tmp_path, pid=0, summary=SUMMARY)
    (folder / "status.json").unlink()
    (folder / "log.txt").unlink()
    words = page_of(folder).words
    assert "a run of an earlier version keeps no log" in words
    assert "4 0.5 72 3 (last 3) 2 3.2 75.0 kB 0.15 MB" in words  # the values that the records have


def test_a_run_without_any_round_is_shown(tmp_path):
    with locked(tmp_path):
        words = page_of(tmp_path).words
    assert "running It is being prepared. Nothing was written for" in words
    assert "None yet." in words


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"report = .* found no config.json there, expected a run"):
        DashboardPage(tmp_path)


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("name", ["config.json", "rounds.jsonl", "summary.json", "failure.json"])
@pytest.mark.parametrize("content", ["{\n", "[]\n", "\x00\xff\n", "[" * 100_000, '{"round": 1}\n'])
def test_a_damaged_file_is_reported_and_the_rest_is_shown(tmp_path, name, content):
    folder = run_in(tmp_path)
    page = DashboardPage(folder)
    good = page.get()
    (folder / name).write_text(content, encoding="latin-1")
    page.get()
    if name == "rounds.jsonl" and content.endswith("\n"):
        assert "rounds.jsonl: line 1 is damaged" in ReadPage(page.get()).words
    if content == "{\n":
        assert f"{name}" in ReadPage(page.get()).words
    sections = [one["id"] for tag, one in ReadPage(good).tags if tag == "section"]
    assert [one["id"] for tag, one in ReadPage(page.get()).tags if tag == "section"] == sections
    run_in(folder)
    (folder / name).unlink() if name in ("summary.json", "failure.json") else None
    assert "running Round 4 of 10" in ReadPage(page.get()).words


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize(
    "odd", [{"bytes-up": "x"}, {"heads": None}, {"selected": 7}, {"partition-id": "x"}], ids=str
)
def test_invalid_values_are_reported(tmp_path, odd):
    lines(run_in(tmp_path), [record(1, clients=[client(0, **odd)]), record(2)])
    words = page_of(tmp_path).words
    assert f"rounds.jsonl: line 1 is damaged (it has clients.0.{next(iter(odd))}: got" in words


@pytest.mark.slow
def test_large_numbers_are_shown(tmp_path):
    people = [client(0, seconds=1e300, heads=1e300)]
    lines(run_in(tmp_path), [record(1, clients=people, phases={"train": 1}), record(2)])
    assert "running Round 4 of 10" in page_of(tmp_path).words


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("selected", [[[10**9]], [[-1]], [], [[0], [1], [2]]])
def test_invalid_selected_heads_are_not_drawn(tmp_path, selected):
    clients = [client(0), client(1, selected=selected)]
    lines(run_in(tmp_path), [record(1, clients=clients)])
    words = page_of(tmp_path).words
    assert "running Round 4 of 10" in words
    assert "How often each head was trained" not in words


@pytest.mark.usefixtures("without_charts")
def test_a_removed_run_directory_is_reported(tmp_path):
    page = DashboardPage(run_in(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    assert "cannot be shown" in ReadPage(page.get()).words
    assert "found no config.json there" in ReadPage(page.get()).words


@pytest.mark.slow
def test_text_from_clients_is_escaped(tmp_path):
    """Text from a client is escaped wherever it is shown."""

    def tags_with(text):
        device = text.encode(errors="backslashreplace").decode()
        rejected = [{"client": "partition 0", "reason": text}, {"client": text, "reason": text}]
        folder = run_in(
            tmp_path,
            status=status(
                nodes=[node(0, device=device, versions=device), node(4)],
                refused=[{"node": device, "reason": device}],
            ),
        )
        lines(folder, [record(1, rejected=rejected)])
        (folder / "log.txt").write_text(f"WARNING {text}", errors="backslashreplace")
        page = page_of(folder)
        return page, [
            (tag, attributes) for tag, attributes in page.tags if tag not in ("main", "span")
        ]

    _, harmless = tags_with("x")
    for text in HOSTILE:
        page, tags = tags_with(text)
        assert tags == harmless
        shown = text.encode(errors="backslashreplace").decode().replace("\x00", "\ufffd")
        plain = page.text.replace("\x00", "\ufffd").replace("\r", "")
        assert plain.count(shown.replace("\r", "")) >= 6, text


@pytest.mark.usefixtures("without_charts")
def test_the_numbers_of_clients_and_rejections_shown_are_limited(tmp_path):
    nodes = [node(number) for number in range(1000)]
    folder = run_in(tmp_path, status=status(nodes=nodes, partitions=1002))
    rejected = [{"client": f"partition {n % 7}", "reason": "late"} for n in range(500)]
    lines(folder, [record(1, rejected=rejected)])
    view = view_of(RunSnapshot.read(folder))
    assert len(view["clients"]["listed"]) == LISTED_CLIENTS
    assert view["clients"]["more"] == 1000 - LISTED_CLIENTS
    assert view["clients"]["missing"] == 2
    assert len(view["rejected"]) == MOST_REJECTED
    assert view["rejections"] == 500
    assert view["clients"]["listed"][0]["rejected"] == 72
    assert "And 700 more clients." in page_of(folder).words


def test_an_incomplete_line_is_not_read(tmp_path):
    folder = run_in(tmp_path)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(record(4)) + '\n{"round": 5, "tr')
    assert [one["round"] for one in RunSnapshot.read(folder).run.rounds] == [1, 2, 3, 4]


@pytest.mark.usefixtures("without_charts")
def test_the_page_is_not_made_again_without_a_change(tmp_path, monkeypatch):
    page = DashboardPage(run_in(tmp_path))
    version, made = page.version(), page.get()
    monkeypatch.setattr(page, "_write", None)
    assert page.get() is made
    assert page.version() == version
    with (tmp_path / "log.txt").open("a") as file:
        file.write("another line\n")
    assert page.version() != version


@pytest.mark.slow
def test_slow_charts_are_drawn_less_often_than_numbers_are_updated(tmp_path, monkeypatch):
    now = [NOW]
    monkeypatch.setattr("ravan_flwr.reports.dashboard.time.time", lambda: now[0])
    page = DashboardPage(run_in(tmp_path))

    def pictures():
        return page.get().partition(b'id="pictures"')[2].partition(b"</section>")[0]

    first = pictures()
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(record(4)) + "\n")
    assert "rounds 4 of 10" in ReadPage(page.get()).words
    assert pictures() == first
    version = page.version()
    now[0] += 3600
    assert page.version() != version  # a browser requests the page again
    assert pictures() != first
    assert page.version() == version  # but not once more


@pytest.mark.slow
def test_a_long_run_is_shown_quickly(tmp_path):
    people = [client(number) for number in range(20)]
    folder = run_in(tmp_path)
    lines(folder, [record(number, clients=people) for number in range(1, 1001)])
    page = DashboardPage(folder)
    began = time.process_time()
    page.get()
    first = time.process_time() - began
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(record(1001)) + "\n")
    began = time.process_time()
    size = len(page.get())
    assert time.process_time() - began < first  # a 25th of it
    assert size < 300_000


@pytest.mark.usefixtures("without_charts")
def test_of_ten_thousand_clients_the_active_ones_are_listed(tmp_path):
    """The status describes some clients, and has the number of all."""
    last = 9_999
    described = [node(last), *(node(number) for number in range(999))]
    folder = run_in(
        tmp_path,
        status=status(
            nodes=described, clients=10_000, partitions=10_001, asked=[7, last], answered=[7]
        ),
    )
    rejected = [{"client": "partition 5000", "reason": "late"}]
    took_part = [client(6_000), client(5_000)]
    lines(folder, [record(1, clients=took_part, rejected=rejected, partitions=10_001)])
    people = view_of(RunSnapshot.read(folder))["clients"]
    listed = {one["partition"]: one for one in people["listed"]}
    assert len(people["listed"]) == LISTED_CLIENTS
    assert [*listed] == sorted(listed)
    assert listed[last]["now"] == "at work"
    assert listed[7]["now"] == "has answered"
    assert listed[5_000]["rejected"] == 1
    assert listed[6_000]["rounds"] == 1
    assert people["more"] == 10_000 - LISTED_CLIENTS
    assert people["missing"] == 1
    words = page_of(folder).words
    assert "And 9700 more clients." in words
    assert "1 more partition has not been seen." in words


def test_a_run_that_waits_for_clients_shows_their_number(tmp_path):
    folder = run_in(
        tmp_path,
        rounds=0,
        status=status(doing="recruiting", nodes=[node(0)], clients=10_000, asked=[], answered=[]),
    )
    assert "10000 are here" in page_of(folder).words


@pytest.mark.parametrize("clients", ["many", -1.5, True, None, [1], 1e400])
def test_a_status_with_an_invalid_number_of_clients_is_ignored(tmp_path, clients):
    folder = run_in(tmp_path, status=status(clients=clients))
    assert RunSnapshot.read(folder).status is None
