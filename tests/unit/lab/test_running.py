"""A study runs all candidate rates before it runs the tables."""

import sys
from typing import Any

import pytest

from ravan_flwr.cli import main
from ravan_flwr.lab.choosing import candidates
from ravan_flwr.lab.planning import plan_study
from ravan_flwr.lab.results import Results
from ravan_flwr.lab.running import ROUND_LINE, RunOptions, _Clock, run_missing, run_study
from ravan_flwr.lab.spec import PlannedRun, read_study
from ravan_flwr.runs.console import Progress, log_to_stdout
from tests.hand_made import CLIENT, ROUND
from tests.studies import result
from tests.unit.lab.written import study_of, written


def of_one_table(tmp_path, rows, **table):
    """Return a study of one table whose rows have a learning rate."""
    table |= {"title": "T", "settings": {"learning-rate": 1e-3}, "rows": rows}
    return study_of(tmp_path, seeds=[0, 1], tables=[table])


@pytest.fixture
def path(tmp_path):
    rows = {"ravan": {}, "fedit": {"method": "fedit", "num-rounds": 3}}
    tables = [
        {"title": "T", "rows": rows},
        {"title": "IID", "rates-of": "T", "settings": {"partition": "iid"}, "rows": rows},
        {"title": "T again", "rates-of": "T", "rows": {"ravan": {}}},
    ]
    choose = {"learning-rate": [1e-3, 3e-3, 1e-2], "seeds": [100, 101]}
    return written(tmp_path, seeds=[0, 1], choose=choose, tables=tables)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 97}, "rank=97 .*rank = 97: the smallest side of an adapted matrix is 96"),
        ({"targets": "nothing"}, "targets=nothing .*nothing"),
        ({"until-metric": 95.0}, "until-metric = 95: the metric is accuracy"),
        ({"partition": "natural"}, "num-clients = 3: .* 10 different values of 'label'"),
    ],
)
def test_a_row_that_does_not_fit_its_model_or_data_is_refused_before_the_first_run(
    settings, message, tmp_path, monkeypatch
):
    begun: list[PlannedRun] = []

    def command(run, *_):
        begun.append(run)
        return ["false"]

    monkeypatch.setattr(PlannedRun, "command", command)
    table = {"title": "T", "rows": {"good": {}, "wrong": settings}}
    path = written(tmp_path, tables=[table])
    with pytest.raises(ValueError, match=message):
        run_study(path, tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        plan_study(path, tmp_path / "out", RunOptions())
    assert not begun
    run_study(path, tmp_path / "out", tables_only=True)  # which needs neither model nor data


def test_the_runs_of_tables_start_after_all_candidates(path, tmp_path, monkeypatch):
    """A rate measured earlier is not chosen before all others are measured."""
    study, begun = read_study(path), []

    def command(run, *_):
        begun.append(run)
        return ["false"]

    results = Results(tmp_path)
    for run in candidates(study, results):
        settings = dict(run.settings)
        if "method" not in settings and settings["learning-rate"] != 1e-2:
            results.add(run, result(0.5))
    monkeypatch.setattr(PlannedRun, "command", command)
    assert not run_study(path, tmp_path)
    on_validation = [dict(run.settings).get("evaluate-on") == "clients" for run in begun]
    assert on_validation[: 2 + 6] == [True] * 8  # the last rate of ravan, and all of fedit
    assert not any(on_validation[8:])


def test_failed_runs_of_rows_with_other_numbers_of_clients_are_all_listed(
    tmp_path, monkeypatch, caplog
):
    rows = {"two": {"num-clients": 2}, "four": {"num-clients": 4}}
    path = written(tmp_path / "study", tables=[{"title": "T", "rows": rows}])
    monkeypatch.setattr(PlannedRun, "command", lambda *_: ["false"])
    assert not run_study(path, tmp_path)
    for listed in ((tmp_path / "results.md").read_text(), caplog.text):
        assert [listed.count(f"num-clients={number} ") for number in (2, 4)] == [3, 3]


LINES = [
    "run directory: runs/x",
    "round  1/2  train loss 0.4678  accuracy   -     up 76.5 kB  down 76.5 kB  6.0 s  left 6 s",
    "round  2/2  train loss 0.0890  accuracy 0.8412  up 76.5 kB  down 76.5 kB  2.0 s  left 0 s",
    "done: accuracy 0.8412 (best 0.8412) after 2 rounds in 12 s",
]


def test_a_continued_study_still_names_the_method_of_its_last_row(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(PlannedRun, "command", lambda *_: ["false"])
    caplog.set_level("INFO")
    study = of_one_table(tmp_path, {"ravan": {}, "fedit": {"method": "fedit"}})
    results = Results(tmp_path)
    for run in study.tables[0].rows["ravan"].runs():
        results.add(run, result(0.5))
    run_missing(study, results, RunOptions())
    ended = [line for line in caplog.messages if line[:4] in ("1/2 ", "2/2 ")]
    assert len(ended) == 2
    assert all("  method=fedit seed=" in line for line in ended)


def test_an_interrupted_study_says_that_it_can_be_continued(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ravan_flwr.lab.running.run_missing", interrupted)
    path = written(tmp_path, tables=[{"title": "T", "rows": {"ravan": {}}}])
    with pytest.raises(SystemExit) as end:
        main(["study", str(path), "--output", str(tmp_path / "out")])
    assert end.value.code == 130
    output = capsys.readouterr().out
    assert f"finished runs are kept in {tmp_path / 'out'}; the same command continues" in output


def test_each_round_is_logged_with_the_time_left_of_all_runs(tmp_path, monkeypatch, caplog):
    """The command's last line comes only when its first round has been logged."""
    mark = tmp_path / "logged"
    script = (
        f"import pathlib, time\nlines = {LINES!r}\nprint(*lines[:2], sep=chr(10), flush=True)\n"
        f"while not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.01)\n"
        "print(*lines[2:], sep=chr(10))"
    )
    monkeypatch.setattr(PlannedRun, "command", lambda *_: [sys.executable, "-c", script])
    caplog.set_level("INFO")
    noted = _Clock.round

    def note(clock, run, seconds):
        mark.touch()
        return noted(clock, run, seconds)

    monkeypatch.setattr(_Clock, "round", note)
    study = of_one_table(tmp_path, {"ravan": {}})
    run_missing(study, Results(tmp_path), RunOptions())
    runs = [line for line in caplog.messages if line[:4] in ("1/2 ", "2/2 ")]
    assert len(runs) == 2 * 3
    for number, (first, second, done) in enumerate((runs[:3], runs[3:]), start=1):
        for line in (first, second, done):
            assert line.startswith(f"{number}/2  left ")
            assert f" s  seed={number - 1}: " in line  # what differs between the runs, alone
        assert first.endswith("round  1/2  train loss 0.4678  accuracy   -     up 76.5 kB  "
                              "down 76.5 kB  6.0 s")  # fmt: skip
        assert ": round  2/2  train loss 0.0890  accuracy 0.8412" in second
        assert ": done: accuracy 0.8412" in done


def test_the_time_left_counts_rounds_and_the_start_of_each_run(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    seeds = ((), (("seed", 1),), (("seed", 2),))
    runs = [PlannedRun(settings, 3) for settings in seeds]
    rounds = sum(run.num_rounds for run in runs)
    clock = _Clock(runs, 1)
    clock.begin(runs[0])
    now[0] += 10 + 4  # it starts for ten seconds, and a round takes four
    assert clock.round(runs[0], 4.0) == pytest.approx(4 * (rounds - 1) + 10 * 2)
    now[0] += 6
    left = rounds - runs[0].num_rounds
    assert clock.round(runs[0], 6.0) == pytest.approx(5 * (rounds - 2) + 10 * 2)
    now[0] += 2  # it ends early, and writes its result
    assert clock.end(runs[0]) == pytest.approx(5 * left + 12 * 2)
    for run in runs[1:]:
        clock.begin(run)
        assert clock.end(run) >= 0
    assert clock.end(runs[1]) == 0


def test_a_runs_lines_of_rounds_are_recognised(capsys):
    log_to_stdout()
    progress = Progress(1, 20, "accuracy")
    record: Any = ROUND | {"clients": [CLIENT], "rejected": [{}]}
    progress.round(record)
    progress.close()
    (line,) = capsys.readouterr().out.splitlines()
    match = ROUND_LINE.search(line)
    assert match is not None
    assert match["seconds"] == "0.1"
    assert match[1].startswith("round  1/20  train loss 1.0000  accuracy 0.5")
