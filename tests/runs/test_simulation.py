"""Simulations in this process, through the public functions and commands."""

import contextlib
import functools
import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ravan_flwr import simulate
from ravan_flwr.cli import main
from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.budgets import affordable, budget_fraction
from ravan_flwr.runs.history import RecordedRun
from ravan_flwr.server.strategy import FederatedTuning
from ravan_flwr.training import local_steps as training
from ravan_flwr.training.cost import step_memory
from ravan_flwr.training.device import free_memory
from ravan_flwr.training.model_and_data import get_model_and_data
from tests import short_runs
from tests.short_runs import SHORT, records_of, same_bits, saved, state_of

run = functools.partial(short_runs.run, clients=4)
TRAIN = "ravan_flwr.client.answers.train_locally"


def without_times(summary):
    return {k: v for k, v in summary.items() if k not in {"seconds", "finished", "run-id"}}


def clients_of(simulation):
    """Return the records of all clients in all rounds."""
    return [client for record in records_of(simulation) for client in record["clients"]]


@pytest.mark.slow
def test_runs_in_two_threads_are_independent(tmp_path):
    """Neither logs nor results mix."""
    sequential = [run(tmp_path / "alone", seed=seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        concurrent = list(threads.map(lambda seed: run(tmp_path / "both", seed=seed), (1, 2)))
    for first, second in zip(sequential, concurrent, strict=True):
        lines = (second.run_dir / "log.txt").read_text().splitlines()
        assert len(lines) == len((first.run_dir / "log.txt").read_text().splitlines())
        with_paths = [line for line in lines if str(tmp_path) in line]
        assert with_paths
        assert all(str(second.run_dir) in line for line in with_paths)
        assert same_bits(saved(first), saved(second))
    assert not same_bits(saved(sequential[0]), saved(sequential[1]))


def test_a_run_directory_has_all_files_and_fields(tmp_path):
    untracked = {path.name for path in run(tmp_path / "none", num_rounds=1).run_dir.iterdir()}
    assert not {"report", "tensorboard"} & untracked
    simulation = run(tmp_path, tracking="tensorboard")
    directory = simulation.run_dir
    assert {p.name for p in directory.iterdir()} == {
        "config.json", "rounds.jsonl", "summary.json", "checkpoints", "adapter", "report",
        "tensorboard", "log.txt", "classes.json", "settings.json",
    }  # fmt: skip
    config = json.loads((directory / "config.json").read_text())
    assert (config["rank"], config["heads"], config["num-rounds"]) == (13, 4, 2)
    assert config["num-clients"] == 4  # not the preset's 20
    assert "auto" not in {config["init"], config["learning-rate"], config["partition"]}
    records = records_of(simulation)
    assert [record["round"] for record in records] == [1, 2]
    for record in records:
        assert set(record) == {
            "round", "train-loss", "metrics", "clients", "rejected", "not-eligible", "skipped",
            "unused", "partitions", "bytes-up", "bytes-down", "time", "seconds", "phases",
        }  # fmt: skip
        assert set(record["metrics"]) == {"loss", "accuracy", "macro-f1"}
        assert len(record["clients"]) == 3
        for client in record["clients"]:
            assert set(client) == {
                "partition-id", "budget-fraction", "heads", "selected", "examples", "steps",
                "train-loss", "seconds", "span", "bytes-up", "bytes-down",
            }  # fmt: skip
    summary = simulation.summary
    assert summary == json.loads((directory / "summary.json").read_text())
    assert summary["trainable-parameters"] == 8 * 4 * (13**2 + 1) + 970
    assert summary["num-clients"] == 4
    assert summary["rounds"] == 2
    assert summary["metrics"]["final"] == records[-1]["metrics"]
    assert summary["bytes-up"] == sum(client["bytes-up"] for client in clients_of(simulation))
    assert isinstance(summary["bytes-up"], int)


@pytest.mark.slow
@pytest.mark.parametrize("classifier", ["frozen", "trained"])
def test_bytes_up_are_those_of_the_selected_heads(tmp_path, classifier):
    clients = clients_of(run(tmp_path, budgets="uniform", classifier=classifier, num_rounds=4))
    for client in clients:
        num_bytes = 8 * client["heads"] * 13 * 13 * 4
        num_bytes += 970 * 4 if classifier == "trained" else 0
        assert num_bytes <= client["bytes-up"] <= num_bytes * 1.01
        assert [len(row) for row in client["selected"]] == [client["heads"]] * 8
    assert len({client["heads"] for client in clients}) > 1


def client_round_of(arguments):
    """Find the client and round in the arguments of `train_locally`."""
    return arguments[2].client_round


@contextlib.contextmanager
def interrupted_in(round_number):
    """Interrupt a run when its first client trains in this round."""

    def train(*arguments):
        if client_round_of(arguments).round == round_number:
            raise KeyboardInterrupt
        return training.train_locally(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TRAIN, train)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize(
    ("settings", "last"), [({"budgets": "uniform"}, 4), ({"method": "fed-sb"}, 1)]
)
def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, settings, last):
    """Interrupted in its last round, or in its first one, after a calibration."""
    settings = {"num_rounds": max(last, 2), **settings}
    uninterrupted = run(tmp_path, **settings)
    with interrupted_in(last):
        run(tmp_path, **settings)
    (stopped,) = [path for path in tmp_path.iterdir() if path != uninterrupted.run_dir]
    assert not (stopped / "summary.json").exists()
    # As if the process had been killed between the record of round 3 and its checkpoint.
    (stopped / "checkpoints" / "round-000003.safetensors").unlink(missing_ok=last < 4)

    resumed = run(tmp_path, resume=str(stopped), **settings)
    assert resumed.run_dir == stopped
    assert without_times(resumed.summary) == without_times(uninterrupted.summary)
    number = settings["num_rounds"]
    assert same_bits(saved(resumed, number), saved(uninterrupted, number))
    numbers = [record["round"] for record in records_of(uninterrupted)]
    assert [record["round"] for record in records_of(resumed)] == numbers
    assert numbers[-number:] == [*range(1, number + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ravan", "fed-sb"])
def test_an_epoch_has_as_many_steps_as_batches(tmp_path, method):
    """All clients have 119 or 120 examples, two batches, so both keys give the same run."""
    clients = {"method": method, "clients": 12, "batch_size": 64}
    by_steps = run(tmp_path / "1", **clients, local_steps=2)
    by_passes = run(tmp_path / "2", **clients, local_steps="epochs:1")
    assert without_times(by_passes.summary) == without_times(by_steps.summary)
    assert same_bits(saved(by_steps), saved(by_passes))
    assert by_passes.summary["steps"] == 3 * 2 * 2


@pytest.mark.slow
def test_clients_with_more_examples_take_more_steps(tmp_path):
    settings = {
        "partition": "dirichlet", "local_steps": "epochs:0.5", "batch_size": 32, "clients": 6,
        "clients_per_round": 4,
    }  # fmt: skip
    uninterrupted = run(tmp_path / "1", **settings)
    clients = clients_of(uninterrupted)
    assert len({client["steps"] for client in clients}) > 2
    for client in clients:
        batches = math.ceil(client["examples"] / 32)
        assert client["steps"] == math.ceil(batches / 2)
    assert uninterrupted.summary["steps"] == sum(client["steps"] for client in clients)


@pytest.mark.slow
def test_natural_partitions_fix_the_number_of_clients(tmp_path):
    settings = {"partition": "natural", "num_rounds": 1, "local_steps": 1}
    with pytest.raises(ValueError, match="num-clients = 4: .* 10 different values of 'label'"):
        run(tmp_path, **settings)
    assert not any(tmp_path.iterdir())
    for number in (None, 10):
        simulation = run(tmp_path, clients=number, **settings)
        assert simulation.summary["num-clients"] == 10
    assert json.loads((simulation.run_dir / "config.json").read_text())["num-clients"] is None
    settings |= {"resume": str(simulation.run_dir), "num_rounds": 2}
    resumed = run(tmp_path, clients=None, **settings)
    assert resumed.summary["rounds"] == 2
    assert RecordedRun.read(resumed.run_dir).config["num-clients"] == 10


@pytest.mark.slow
def test_a_run_resumes_with_more_rounds_but_not_with_other_settings(tmp_path, monkeypatch):
    first = run(tmp_path, num_rounds=1)
    more = run(tmp_path, num_rounds=2, resume=str(first.run_dir))
    assert more.summary["rounds"] == 2
    with monkeypatch.context() as patch:
        patch.setattr(TRAIN, lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="round 3: got no valid reply"):
            run(tmp_path, num_rounds=3, resume=str(first.run_dir))
    # The failed attempt keeps the summary of the former end.
    assert json.loads((first.run_dir / "summary.json").read_text()) == more.summary
    assert (first.run_dir / "failure.json").exists()
    with pytest.raises(ValueError, match=r"seed: then 0, now 1, "):
        run(tmp_path, seed=1, local_steps=4, resume=str(first.run_dir))
    repaired = run(tmp_path, num_rounds=3, resume=str(first.run_dir))
    with pytest.raises(ValueError, match="seed: then 0, now 1"):
        run(tmp_path, seed=1, resume=str(first.run_dir))
    # An invalid attempt does not mark a good run as failed.
    assert (repaired.run_dir / "summary.json").exists()
    assert not (repaired.run_dir / "failure.json").exists()


def test_a_diverged_run_stops_and_keeps_the_last_finite_round(tmp_path, monkeypatch):
    measured = iter([{"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.1, "loss": float("nan")}])
    monkeypatch.setattr(
        "ravan_flwr.training.model_and_data.ModelAndData.evaluate", lambda *_: next(measured)
    )
    message = "round 2: its evaluation gave loss = nan, .*round 1 is in the last checkpoint"
    with pytest.raises(RuntimeError, match=message):
        run(tmp_path, num_rounds=3)
    (directory,) = tmp_path.iterdir()
    assert len((directory / "rounds.jsonl").read_text().splitlines()) == 1
    assert (directory / "checkpoints" / "round-000001.safetensors").exists()


@pytest.mark.parametrize(("heads", "rank"), [(8, 13), (8, 12)])
def test_bases_of_more_than_one_orthonormal_block_are_logged(heads, rank, tmp_path):
    """A layer of the digits' ViT has 96 dimensions."""
    settings = {"heads": heads, "rank": rank, "num_rounds": 1, "local_steps": 1}
    log = (run(tmp_path, clients=2, **settings).run_dir / "log.txt").read_text()
    line = "heads x rank = 104, the smallest layer has 96 dimensions: the bases of 7 heads"
    assert (line in log) == (heads * rank > 96)


@pytest.mark.slow
def test_clients_evaluate_in_every_second_and_the_last_round(tmp_path):
    settings = {"evaluate_on": "clients", "validation_share": 0.3, "eval_every": 2}
    simulation = run(tmp_path, num_rounds=3, **settings)
    records = records_of(simulation)
    assert [bool(record["metrics"]) for record in records] == [False, True, True]
    assert 0 <= simulation.summary["metrics"]["final"]["accuracy"] <= 1
    state = 4 * (8 * 4 * 13 * 13 + 970)
    sizes = [record["bytes-down"] for record in records]
    assert sizes == [3 * state, (4 + 3) * state, (4 + 3) * state]
    assert simulation.summary["bytes-down"] == sum(sizes)


def set_node_configs(monkeypatch, **settings):
    """Change the node configs of all clients."""

    class Edge(InProcessGrid):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for context in self._contexts.values():
                context.node_config |= {k.replace("_", "-"): v for k, v in settings.items()}

    monkeypatch.setattr("ravan_flwr.launch.in_process.InProcessGrid", Edge)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.5, "auto"])
def test_a_node_config_sets_the_budget_or_fits_it_to_the_free_memory(budget, tmp_path, monkeypatch):
    need = step_memory(read_config(SHORT), 0.5).added
    # Two queries of four nodes; afterwards no memory is free.
    free = iter([int(need / 0.9) + 2] * 8)
    monkeypatch.setattr("ravan_flwr.client.client_request.free_memory", lambda _: next(free, 0))
    set_node_configs(monkeypatch, budget=budget, device="cpu")
    first = records_of(run(tmp_path))[0]
    assert {client["heads"] for client in first["clients"]} == {2}


def test_a_node_config_is_checked(tmp_path, monkeypatch):
    set_node_configs(monkeypatch, partition_id=9)
    with pytest.raises(RuntimeError, match="node config: partition-id = 9: expected 0 to 3"):
        run(tmp_path)


def test_relative_output_starts_at_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = SHORT | {"num-rounds": 1, "local-steps": 1}
    assert simulate(short, 2).run_dir.parent == tmp_path / "runs"
    assert simulate(short | {"output-dir": "mine"}, 2).run_dir.parent == tmp_path / "mine"


@pytest.mark.usefixtures("without_charts")
def test_the_command_prints_a_line_a_round_and_the_directory_first_and_last(tmp_path, capsys):
    main(["simulate", f"output-dir={tmp_path}", "num-clients=3", "num-rounds=2", "local-steps=1"])
    lines = capsys.readouterr().out.splitlines()
    (directory,) = tmp_path.iterdir()
    assert lines[0] == lines[-1] == f"run directory: {directory}"
    rounds = [line for line in lines if line.startswith("round ")]
    assert len(rounds) == 2
    assert "accuracy 0." in rounds[0]
    assert "heads 4 x 3  up" in rounds[0]
    assert any("; 3 clients a round, 1 local step of 32" in line for line in lines)
    assert lines[-3].startswith("done: accuracy 0.")
    assert " after 2 rounds in " in lines[-3]


def test_each_setting_without_effect_gives_a_warning(tmp_path, capsys):
    """The first three lack the setting that they belong to."""
    words = ["epsilon=8", "delta=1e-6", "secure-minimum=5", "method=fedit", "heads=8"]
    words += ["clients-per-round=30", "num-clients=2", "num-rounds=1", "local-steps=1"]
    main(["simulate", f"output-dir={tmp_path}", "tracking=none", *words])
    (run_dir,) = tmp_path.iterdir()
    (record,) = records_of(SimpleNamespace(run_dir=run_dir))
    assert len(record["clients"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert sum("warning" in line for line in lines) == 3
    private, masked, heads = lines[1:4]
    assert private.startswith("warning: no effect, and no client is protected")
    assert private.endswith(" privacy=example: delta=1e-06, epsilon=8")
    assert masked.startswith("warning: no effect, and no client is protected")
    assert masked.endswith(" secure-aggregation=true: secure-minimum=5")
    assert heads == "warning: no effect with method=fedit: heads=8"


def test_ctrl_c_prints_how_to_resume(tmp_path, capsys):
    def stopped_in(round_number):
        with interrupted_in(round_number):
            run(tmp_path / str(round_number), num_rounds=3)
        (folder,) = (tmp_path / str(round_number)).iterdir()
        return folder, capsys.readouterr().out.splitlines()[-1]

    folder, last = stopped_in(2)
    assert last.startswith(f"stopped; to continue: ravan-flwr simulate resume={folder}; with")
    assert last in (folder / "log.txt").read_text()
    folder, last = stopped_in(1)
    assert last.startswith("stopped; no round has finished")


def full_disk_for(monkeypatch, name):
    """Make the disk full for one file, with the system's error, which lacks the file's name."""
    flush = os.fsync

    def refuse(descriptor):
        if name in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(28, "No space left on device")
        flush(descriptor)

    monkeypatch.setattr("os.fsync", refuse)


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc")
@pytest.mark.parametrize(
    ("name", "file", "saved_round"),
    [
        ("round-000002", "checkpoints/round-000002.safetensors", 1),
        ("adapter_model", "adapter/adapter_model.safetensors", 2),
        ("config.json", "config.json", None),
        ("settings.json", "settings.json", None),
    ],
)
def test_a_full_disk_names_file_and_advice(tmp_path, monkeypatch, capsys, name, file, saved_round):
    words = [f"{key}={str(value).lower()}" for key, value in SHORT.items()]
    with monkeypatch.context() as patched:
        full_disk_for(patched, name)
        with pytest.raises(SystemExit) as end:
            main(["simulate", f"output-dir={tmp_path}", "num-clients=2", *words])
    assert end.value.code == 1
    (folder,) = tmp_path.iterdir()
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert f"{folder / file} cannot be written: No space left on device; " in errors
    if saved_round is None:
        assert "no round has finished" in errors
        return
    assert f"round {saved_round} is safe in the last checkpoint; free some space" in errors
    assert f"resume={folder}" in errors
    run(tmp_path, clients=2, resume=str(folder))
    assert (folder / "summary.json").is_file()
    assert not (folder / "failure.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc")
@pytest.mark.parametrize("name", [".png", "index.html"])
@pytest.mark.usefixtures("without_charts")
def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path, monkeypatch, capsys, name):
    full_disk_for(monkeypatch, name)
    ended = run(tmp_path, clients=2, num_rounds=1, tracking="tensorboard")
    lines = capsys.readouterr().out.splitlines()
    assert any(f"no report in {ended.run_dir / 'report'}: " in line for line in lines)
    assert any(line.startswith("done: ") for line in lines)
    assert not (ended.run_dir / "failure.json").exists()


def test_a_warning_counts_clients_without_training_examples(tmp_path, monkeypatch, capsys):
    rows = np.split(np.arange(1000), [1, 500, 501])
    monkeypatch.setattr("ravan_flwr.training.model_and_data.ModelAndData.rows", lambda *_: rows)
    run(tmp_path, method="local", num_rounds=1)
    lines = capsys.readouterr().out.splitlines()
    (warning,) = [line for line in lines if line.startswith("warning: validation-share = 0.2: ")]
    assert "2 of 4 clients would have no example left to train on" in warning


@pytest.mark.parametrize(
    ("method", "counts"), [("local", [0, 0, 0, 0]), ("centralised", [0, 5, 5, 5])]
)
def test_a_run_without_training_examples_is_refused(tmp_path, monkeypatch, method, counts):
    monkeypatch.setattr(
        "ravan_flwr.training.model_and_data.ModelAndData.partition_sizes", lambda *_: counts
    )
    with pytest.raises(ValueError, match="no example left to train on"):
        run(tmp_path, method=method, evaluate_on="clients", validation_share=0.2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("num_rounds", [1, 2, 3])
def test_resuming_a_finished_run_gives_a_warning(tmp_path, caplog, num_rounds):
    first = run(tmp_path)
    caplog.clear()
    resumed = run(tmp_path, num_rounds=num_rounds, resume=str(first.run_dir))
    assert resumed.summary["rounds"] == max(2, num_rounds)
    message = f"num-rounds = {num_rounds}: the run has 2 already, so that nothing is trained"
    assert (message in caplog.text) == (num_rounds < 3)
    assert ("nothing is trained" in caplog.text) == (num_rounds < 3)


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["rank=97"], 2, "rank = 97: the smallest side of an adapted matrix is 96"),
        (["precision=float16", "device=cpu"], 2, "precision = 'float16': got a CPU"),
        (["limits=max-update-norm=1e-9", "local-steps=1"], 1, "round 1: got no valid reply"),
    ],
)
def test_mistakes_end_with_a_status_and_one_line(tmp_path, capsys, words, status, message):
    with pytest.raises(SystemExit) as end:
        main(["simulate", f"output-dir={tmp_path}", *words])
    assert end.value.code == status
    printed = capsys.readouterr()
    assert printed.err.startswith("ravan-flwr: error: ")
    assert message in printed.err
    if status == 1:
        (directory,) = tmp_path.iterdir()
        failure = json.loads((directory / "failure.json").read_text())
        assert "upload has a change of norm" in failure["error"]
    else:  # before the run
        assert printed.err.count("\n") == 1
        assert printed.out == ""
        assert list(tmp_path.iterdir()) == []


def sizes_by_round(simulation):
    """Return round -> client -> bytes sent to it."""
    return {
        record["round"]: {c["partition-id"]: c["bytes-down"] for c in record["clients"]}
        for record in records_of(simulation)
    }


def check_that_bases_are_sent_once(by_round, state, bases):
    """Return the clients that trained."""
    sent_to = set()
    for number in range(1, max(by_round) + 1):
        for client, size in by_round[number].items():
            assert size == state + (0 if client in sent_to else bases)
            sent_to.add(client)
    return sent_to


@pytest.mark.slow
def test_data_aware_bases_are_sent_to_each_client_once_and_are_counted(tmp_path):
    simulation = run(tmp_path, init="data-aware", num_rounds=4, clients_per_round=2)
    by_round = sizes_by_round(simulation)
    assert set(by_round[0]) == {0, 1, 2, 3}  # all clients calibrate
    state = 4 * (8 * 4 * 13 * 13 + 970)
    check_that_bases_are_sent_once(by_round, state, bases=4 * 8 * 4 * 13 * (96 + 96))
    # Two of four clients in each of four rounds: some clients trained twice.
    assert simulation.summary["rounds"] == 4
    all_bytes = sum(size for sizes in by_round.values() for size in sizes.values())
    assert simulation.summary["bytes-down"] == all_bytes


def test_a_second_run_of_a_process_begins_with_the_bases_of_the_seed(tmp_path, monkeypatch):
    """Workers that load their own model have those; with others all their replies were rejected."""
    begins: list[list[float]] = []

    def start(strategy, *given, **named):
        begins.append(list(strategy.federation.state.fingerprint))
        return started(strategy, *given, **named)

    started = FederatedTuning.start
    monkeypatch.setattr(FederatedTuning, "start", start)
    first, second = (
        run(tmp_path, init="data-aware:1", num_rounds=1, local_steps=1) for _ in range(2)
    )
    assert begins[0] == begins[1]
    assert first.summary["metrics"] == second.summary["metrics"]


@pytest.mark.slow
def test_fed_sbs_calibration_samples_clients_and_its_bytes_are_counted(tmp_path):
    simulation = run(tmp_path, method="fed-sb", clients=8, classifier="frozen", num_rounds=3)
    by_round = sizes_by_round(simulation)
    assert len(by_round[0]) == 3
    check_that_bases_are_sent_once(by_round, 4 * 8 * 27**2, bases=4 * 8 * 27 * (96 + 96))
    first = records_of(simulation)[0]
    assert {client["bytes-up"] for client in first["clients"]} == {4 * 8 * 96 * 96}


RESUMED = [
    *({"method": method} for method in METHODS),
    {"server_optimizer": "adam"},
    {"method": "fedit", "server_optimizer": "momentum"},
    *({"init": init, "budgets": "uniform", "scoring": "gradient"}
      for init in ("data-aware", "first-round")),
    {"partition": "dirichlet", "local_steps": "epochs:0.5", "batch_size": 32},
    {"budgets": "skewed-right", "scoring": "random", "selection": "global"},
    {"budgets": "skewed-right", "scoring": "weight", "selection": "layer"},
    {"budgets": "skewed-right", "scoring": "gradient", "selection": "global"},
]  # fmt: skip


@pytest.mark.slow(kept=4)
@pytest.mark.parametrize(
    "settings", RESUMED, ids=lambda settings: " ".join(map(str, settings.values()))
)
def test_a_run_learns_and_resumes_to_the_same_bits(tmp_path, settings):
    uninterrupted = run(tmp_path, **settings)
    stopped = run(tmp_path, num_rounds=1, **settings)
    resumed = run(tmp_path, resume=str(stopped.run_dir), **settings)
    state = saved(uninterrupted)
    assert same_bits(state, saved(resumed))
    assert resumed.summary["metrics"] == uninterrupted.summary["metrics"]
    assert uninterrupted.summary["rejected"] == 0
    by_server = any(name.startswith("server-optimizer/") for name in state)
    assert by_server == ("server_optimizer" in settings)
    losses = [record["train-loss"] for record in records_of(uninterrupted)]
    assert losses[-1] < losses[0] or settings.keys() != {"method"}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "optimizer"), [("ravan", "adam"), ("fedit", "momentum")])
def test_a_server_optimizer_changes_the_result(tmp_path, method, optimizer):
    plain = run(tmp_path, method=method)
    changed = run(tmp_path, method=method, server_optimizer=optimizer)
    assert not same_bits(state_of(plain, 2), state_of(changed, 2))


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("method", METHODS)
def test_clients_with_small_budgets_train_a_part_or_are_not_eligible(tmp_path, method):
    simulation = run(tmp_path, clients=6, method=method, budgets="uniform")
    records = [record for record in records_of(simulation) if record["round"]]
    fractions = {c["budget-fraction"] for r in records for c in r["clients"]}
    bytes_by_fraction = {c["budget-fraction"]: c["bytes-up"] for r in records for c in r["clients"]}
    not_eligible = simulation.summary["not-eligible"]
    assert all(record["not-eligible"] == not_eligible for record in records)
    if get_model_and_data(read_config(SHORT | {"method": method})).model.method.budget_units:
        assert not_eligible == []
        assert len(bytes_by_fraction) > 1
        sizes = [size for _, size in sorted(bytes_by_fraction.items())]
        assert sizes == sorted(sizes)
    else:
        assert fractions == {1.0}
        assert not_eligible == [p for p in range(6) if budget_fraction("uniform", 0, p) < 1]


@pytest.mark.slow
def test_a_failed_reply_is_rejected_and_its_bytes_are_counted(tmp_path, monkeypatch):
    def fails(*arguments):
        if client_round_of(arguments).partition_id == 1:
            raise RuntimeError("no memory")
        return training.train_locally(*arguments)

    monkeypatch.setattr(TRAIN, fails)
    simulation = run(tmp_path, method="fedit", clients_per_round=4, classifier="frozen")
    state = 4 * 6144
    assert simulation.summary["rejected"] == 2
    assert simulation.summary["bytes-down"] == 2 * 4 * state
    assert simulation.summary["bytes-up"] == 2 * 3 * state


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("method", ["fedex-lora", "hetlora", "flexlora", "raflora"])
def test_bytes_to_and_from_each_client_are_counted(tmp_path, method):
    simulation = run(
        tmp_path, clients=6, method=method, classifier="frozen", local_steps=1,
        num_rounds=5 if method == "fedex-lora" else 2,  # until its residual has full rank
        budgets="full" if method == "fedex-lora" else "uniform", clients_per_round=4,
    )  # fmt: skip
    for number, record in enumerate(records_of(simulation)):
        for client in record["clients"]:
            factors = 4 * 8 * affordable(client["budget-fraction"], 4) * (96 + 96)
            # Four replies of rank 4 add a residual of rank 12, until a full matrix is smaller.
            rank = 12 * number if method == "fedex-lora" else 0
            residual = 4 * 8 * min(rank * (96 + 96), 96 * 96)
            extra = 4 if method == "fedex-lora" else 0  # its rank
            assert client["bytes-down"] == factors + residual + extra
            assert client["bytes-up"] == factors


@pytest.mark.slow
def test_a_run_cannot_resume_with_other_partitions_or_without_its_bases(tmp_path):
    stopped = run(tmp_path, num_rounds=1, method="fed-sb").run_dir
    with pytest.raises(ValueError, match=r"num-partitions = 6, expected 4 as before"):
        run(tmp_path, method="fed-sb", clients=6, resume=str(stopped))
    (stopped / "checkpoints" / "fixed.safetensors").unlink()
    with pytest.raises(ValueError, match=r"found no checkpoints/fixed.safetensors"):
        run(tmp_path, method="fed-sb", resume=str(stopped))


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    ("method", "name"), [("ravan", "H"), ("full", "weights"), ("hetlora", "B")]
)
def test_a_proximal_term_keeps_clients_near_the_start(tmp_path, method, name):
    settings = {"method": method, "num_rounds": 1, "local_steps": 10, "classifier": "frozen"}
    settings["clients_per_round"] = 1
    initial = get_model_and_data(read_config(SHORT | {"method": method})).model.initial_state()
    distances = [
        float((saved(simulation, 1)[name] - initial[name]).norm())
        for mu in (0, 1, 30)
        for simulation in [run(tmp_path, **settings, optimizer=f"fedprox:{mu}")]
    ]
    assert distances[0] > distances[1] > 0
    assert distances[2] < 0.7 * distances[0]


@pytest.mark.slow
def test_a_node_that_lost_the_bases_gets_them_again(tmp_path, monkeypatch):
    class Forgetful(InProcessGrid):
        def _deliver(self, message):
            settings = message.content.get("config", {})
            if settings.get("round") == 2 and message.metadata.dst_node_id == 1:
                self._contexts[1].state.clear()
            return super()._deliver(message)

    monkeypatch.setattr("ravan_flwr.launch.in_process.InProcessGrid", Forgetful)
    simulation = run(tmp_path, clients=2, clients_per_round=2, init="data-aware", num_rounds=4)
    rejected = {record["round"]: record["rejected"] for record in records_of(simulation)}
    assert [number for number, replies in rejected.items() if replies] == [2]
    assert "does not have the fixed tensors" in rejected[2][0]["reason"]
    sizes = sizes_by_round(simulation)
    (unaffected,) = sizes[2]  # the client that has its state
    affected = 1 - unaffected
    assert sizes[3][affected] > sizes[3][unaffected] == sizes[4][affected]


def test_free_memory_of_a_machine_is_that_of_psutil(monkeypatch):
    """psutil also works on macOS, which has no /proc."""
    assert free_memory(torch.device("cpu")) > 2**20
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=12345))
    for kind in ("cpu", "mps"):
        assert free_memory(torch.device(kind)) == 12345
