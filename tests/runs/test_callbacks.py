"""Callbacks: which hooks are called, when, and with what arguments."""

import json
from typing import Any, cast

import pytest
import torch

from ravan_flwr import Callback, simulate
from ravan_flwr.runs.callback import Callbacks
from ravan_flwr.runs.checkpoint import load_checkpoint
from ravan_flwr.specs import Scalar

SHORT: dict[str, Scalar] = {
    "num-rounds": 2, "local-steps": 1, "clients-per-round": 2, "report": False, "tracking": "none",
    "processes": 1,
}  # fmt: skip


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
        assert all(torch.equal(saved[name], tensor) for name, tensor in state.items())
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
    run = simulate({**SHORT, "output-dir": str(tmp_path)}, 4, callbacks=[recorder, minimal])
    assert recorder.calls == ["begin", 1, 2, "end"]
    assert minimal.rounds == [(1, ["H", "classifier"]), (2, ["H", "classifier"])]
    assert not torch.equal(recorder.states[1]["H"], recorder.states[2]["H"])
    assert run.summary["rounds"] == 2


@pytest.mark.slow
def test_a_calibration_is_round_0_for_a_callback(tmp_path):
    recorder = Recorder(tmp_path)
    config: dict[str, Scalar] = {
        **SHORT,
        "init": "data-aware",
        "output-dir": str(tmp_path),
        "num-rounds": 1,
    }
    simulate(config, 3, callbacks=[recorder])
    assert recorder.calls == ["begin", 0, 1, "end"]


def test_an_error_of_a_callback_ends_the_run_and_keeps_the_round(tmp_path):
    class Full(Callback):
        def on_round_end(self, record, state):
            raise RuntimeError("no room for my copy")

        def on_run_end(self):
            raise AssertionError("the run has failed")

    with pytest.raises(RuntimeError, match="no room for my copy"):
        simulate({**SHORT, "output-dir": str(tmp_path)}, 3, callbacks=[Full()])
    (directory,) = tmp_path.iterdir()
    assert len((directory / "rounds.jsonl").read_text().splitlines()) == 1
    assert "no room for my copy" in (directory / "failure.json").read_text()
    assert not (directory / "summary.json").exists()


def test_a_callback_without_a_list_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"got an object, expected a list .* callbacks=\[\.\.\.\]"):
        simulate({**SHORT, "output-dir": str(tmp_path)}, 3, callbacks=cast(Any, Callback()))
    assert not list(tmp_path.iterdir())


def test_a_class_is_refused_before_anything_is_written(tmp_path):
    class Mine(Callback):
        pass

    with pytest.raises(ValueError, match=r"callbacks\[0\] = .*: expected an object .* pass an in"):
        simulate({**SHORT, "output-dir": str(tmp_path)}, 3, callbacks=[Mine])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [3, print, object()])
def test_an_object_without_a_hook_is_refused_before_anything_is_written(wrong, tmp_path):
    message = r"callbacks\[1\] = .*: expected an object with one of on_run_begin, "
    with pytest.raises(ValueError, match=message):
        simulate({**SHORT, "output-dir": str(tmp_path)}, 3, callbacks=[Callback(), wrong])
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
