"""Callbacks: which hooks are called, when, and with what arguments."""

import json

import pytest
import torch

from ravan_flwr import Callback, simulate
from ravan_flwr.runs.callback import Callbacks
from ravan_flwr.runs.checkpoint import load_checkpoint
from tests.short_runs import SHORT, same_bits


def run(folder, callbacks, **settings):
    quick = SHORT | {"local-steps": 1, "clients-per-round": 2, "output-dir": str(folder)}
    return simulate(quick | settings, 3, callbacks=callbacks)


class Recorder(Callback):
    """Records its calls, and checks the files on disk at each."""

    def __init__(self, runs):
        self.runs, self.calls, self.states = runs, [], {}

    @property
    def directory(self):
        (directory,) = self.runs.iterdir()
        return directory

    def on_run_begin(self):
        self.calls.append("begin")
        assert (self.directory / "config.json").is_file()
        assert not (self.directory / "rounds.jsonl").exists()

    def on_round_end(self, record, state):
        self.calls.append(record["round"])
        last = (self.directory / "rounds.jsonl").read_text().splitlines()[-1]
        assert json.loads(last) == record
        saved = load_checkpoint(self.directory / "checkpoints").state
        assert same_bits(saved, state)
        self.states[record["round"]] = dict(state)

    def on_run_end(self):
        self.calls.append("end")
        assert (self.directory / "summary.json").is_file()
        assert (self.directory / "adapter" / "adapter_config.json").is_file()


class Minimal:
    """An object with one hook, without a base class."""

    def __init__(self):
        self.rounds = []

    def on_round_end(self, record, state):
        self.rounds.append((record["round"], sorted(state)))


@pytest.mark.slow
def test_callbacks_are_called_after_the_files_are_written(tmp_path):
    recorder, minimal = Recorder(tmp_path), Minimal()
    simulation = run(tmp_path, [recorder, minimal])
    assert recorder.calls == ["begin", 1, 2, "end"]
    assert minimal.rounds == [(1, ["H", "classifier"]), (2, ["H", "classifier"])]
    assert not torch.equal(recorder.states[1]["H"], recorder.states[2]["H"])
    assert simulation.summary["rounds"] == 2


@pytest.mark.slow
def test_a_calibration_is_round_0_for_a_callback(tmp_path):
    recorder = Recorder(tmp_path)
    run(tmp_path, [recorder], init="data-aware")
    assert recorder.calls == ["begin", 0, 1, 2, "end"]


def test_an_error_of_a_callback_ends_the_run_and_keeps_the_round(tmp_path):
    class Full(Callback):
        def on_round_end(self, record, state):
            raise RuntimeError("no room for my copy")

        def on_run_end(self):
            raise AssertionError("the run has failed")

    with pytest.raises(RuntimeError, match="no room for my copy"):
        run(tmp_path, [Full()])
    (directory,) = tmp_path.iterdir()
    assert len((directory / "rounds.jsonl").read_text().splitlines()) == 1
    assert "no room for my copy" in (directory / "failure.json").read_text()
    assert not (directory / "summary.json").exists()


def test_a_run_whose_result_cannot_be_written_has_failed(tmp_path, monkeypatch):
    """A study would count a run with a summary as done."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ravan_flwr.server_app.write_result", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, [])
    (directory,) = tmp_path.iterdir()
    assert "No space left" in (directory / "failure.json").read_text()
    assert not (directory / "summary.json").exists()


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Callback(), r"got an object, expected a list .* callbacks=\[\.\.\.\]"),
        ([Callback], r"callbacks\[0\] = .*: expected an object .* pass an in"),
        *(([Callback(), wrong], r"callbacks\[1\] = .*: expected an object with one of on_run_begin")
          for wrong in (3, print, object())),
    ],
)  # fmt: skip
def test_what_is_no_list_of_objects_with_a_hook_is_refused_at_once(callbacks, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, callbacks)
    assert not list(tmp_path.iterdir())


def test_callbacks_are_called_in_their_order():
    order = []

    class Named(Callback):
        def __init__(self, name):
            self.name = name

        def on_run_end(self):
            order.append(self.name)

    Callbacks([Named("a"), Minimal(), Callbacks([Named("b")]), Named("c")]).on_run_end()
    assert order == ["a", "b", "c"]
