"""Captured steps give the bits of eager ones; the recorder stands in for CUDA graphs."""

import logging
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_steps import FURTHER, check_method
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import Scalar
from ravan_flwr.training import captured
from ravan_flwr.training.captured import CapturedStep, FixedTensors, GraphCache
from ravan_flwr.training.local_steps import (
    ClientWork,
    calibrate_locally,
    evaluate_all,
    train_locally,
)
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.step import OptimizerStep, TrainingSettings
from tests.short_runs import same_bits
from tests.support.recorder import Recorder
from tests.support.tiny import ARCHITECTURES, OF_DECODERS, save_data, save_model, save_speaker

RUNS: dict[str, dict[str, Scalar]] = {**{name: {"method": name} for name in METHODS}, **FURTHER}
STEPS: dict[str, Any] = {
    "num_steps": 4, "batch_size": 12, "learning_rate": 0.01, "precision": "float32",
}  # fmt: skip


@pytest.mark.slow(kept=4)
@pytest.mark.parametrize("name", RUNS)
def test_replayed_steps_upload_the_bits_of_eager_ones(name):
    okay, line = check_method(RUNS[name], "cpu", Recorder())
    assert okay, line


ADOPT = FixedTensors.adopt


def without_moving(state, network, step):
    """Reset the optimiser, but leave a client's tensors where they are."""
    places = state.tensors
    state.tensors = {n: t.data for n, t in captured._tensors(network).items()}
    ADOPT(state, network, step)
    state.tensors = places


def with_the_first_rate(state, network, step):
    """Move a client's tensors, but keep the learning rate of the captured step."""
    rate = state.rate.clone()
    ADOPT(state, network, step)
    state.rate.copy_(rate)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [without_moving, with_the_first_rate])
def test_a_wrong_replay_is_noticed(mutant, monkeypatch):
    monkeypatch.setattr(FixedTensors, "adopt", mutant)
    monkeypatch.setattr(CapturedStep, "finish", lambda client: client.step.skipped)
    okay, line = check_method({"method": "fedit"}, "cpu", Recorder())
    assert not okay
    assert "same bits: False" in line


@pytest.fixture
def loaded():
    return ModelAndData(read_config({"device": "cpu", "lora-rank": 2}))


def upload(loaded, client=0, **options):
    steps = TrainingSettings(**STEPS | options)
    examples = loaded.partition(client, 40).train
    state = loaded.model.initial_state()
    work = ClientWork(examples, state, 1.0, steps, ClientRound(0, 1, client))
    return train_locally(loaded.model, loaded.task, work)


def assert_same(results, expected):
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one.upload["H"], other.upload["H"])
        assert one.train_loss == other.train_loss


@pytest.mark.parametrize("after", [0, 2])
def test_a_step_that_cannot_be_captured_is_computed_eagerly(loaded, after, caplog, monkeypatch):
    def fail(run):
        for _ in range(after):
            run()
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    expected, failing = upload(loaded), Recorder()
    monkeypatch.setattr(Recorder, "__call__", lambda _, run: fail(run))
    loaded.model.training_graphs = GraphCache(failing)
    with caplog.at_level(logging.INFO, "ravan_flwr"):
        results = [upload(loaded), upload(loaded)]
    assert_same(results, [expected] * 2)
    assert [record.getMessage() for record in caplog.records] == [
        "steps are not captured as a CUDA graph: CUDA error: out of memory"
    ]


def test_full_memory_at_a_capture_is_logged_once_though_its_text_changes(
    loaded, caplog, monkeypatch
):
    taken = []

    def fail(*_):
        taken.append(1)
        raise torch.OutOfMemoryError(f"CUDA out of memory. {len(taken)} GiB is free.")

    expected = [upload(loaded, batch_size=size) for size in (8, 10)]
    monkeypatch.setattr(Recorder, "__call__", fail)
    loaded.model.training_graphs = GraphCache(Recorder())
    with caplog.at_level(logging.INFO, "ravan_flwr"):
        results = [upload(loaded, batch_size=size) for size in (8, 10)]
    assert len(taken) == 2
    assert_same(results, expected)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "memory" in message


def full_unless_eager(loaded, monkeypatch, size):
    """Let batches of that size find the memory full while captured steps hold some."""
    logits = type(loaded.task).logits

    def reading(task, network, batch):
        if len(batch["labels"]) == size and loaded.model.has_graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits(task, network, batch)

    monkeypatch.setattr(type(loaded.task), "logits", reading)


def test_memory_that_captured_steps_hold_is_given_back_to_a_step_that_needs_it(
    loaded, caplog, monkeypatch
):
    """A client has 36 examples: three batches of ten are replayed, and six examples are not."""
    expected = [upload(loaded, client, batch_size=10) for client in (0, 1)]
    full_unless_eager(loaded, monkeypatch, 6)
    loaded.model.training_graphs = GraphCache(recorder := Recorder())
    results = [upload(loaded, client, batch_size=10) for client in (0, 1)]
    assert recorder.recordings == 1
    assert_same(results, expected)
    assert not loaded.model.has_graphs
    assert [r.levelname for r in caplog.records if "out of memory" in r.getMessage()] == ["WARNING"]


def test_memory_that_captured_steps_hold_is_given_back_to_an_evaluation(loaded, monkeypatch):
    examples = {"data": loaded.partition(1, 40).train}
    expected = evaluate_all(loaded.model, loaded.task, examples, 36)
    full_unless_eager(loaded, monkeypatch, 36)
    loaded.model.training_graphs = GraphCache(Recorder())
    upload(loaded)
    assert evaluate_all(loaded.model, loaded.task, examples, 36) == expected
    assert loaded.model.training_graphs is None


@pytest.mark.parametrize("step", ["training", "evaluation"])
def test_a_network_with_captured_steps_is_freed_at_once(step, without_collector):
    """For another run a worker builds another one, for which a GPU may have no room beside it."""
    loaded = ModelAndData(read_config({"device": "cpu", "lora-rank": 2}))
    network = weakref.ref(loaded.model.network)
    graphs = GraphCache(recorder := Recorder(), at_first=step == "training")
    setattr(loaded.model, f"{step}_graphs", graphs)
    for _ in range(3):
        upload(loaded)
        evaluate_all(loaded.model, loaded.task, {"data": loaded.partition(1, 40).train}, 36)
    assert recorder.recordings == 1
    del loaded, graphs
    assert network() is None


def test_full_memory_without_captured_steps_is_an_error(loaded, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(loaded.task), "logits", fail)
    for graphs in (None, GraphCache(Recorder())):  # nothing could be captured
        loaded.model.training_graphs = graphs
        with pytest.raises(torch.OutOfMemoryError):
            upload(loaded)
        assert loaded.model.training_graphs is graphs
    with pytest.raises(torch.OutOfMemoryError):
        evaluate_all(loaded.model, loaded.task, {"data": loaded.partition(1, 40).train}, 36)


def test_dropout_draws_in_captured_steps_what_it_draws_in_eager_ones(loaded):
    """Neither the steps before a capture nor the capture itself take draws from the client's."""
    without = upload(loaded)
    for module in loaded.model.network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    expected = [upload(loaded, client) for client in (0, 1)]
    loaded.model.training_graphs = GraphCache(recorder := Recorder())
    results = [upload(loaded, client) for client in (0, 1)]
    assert recorder.recordings == 1
    assert_same(results, expected)
    assert not torch.equal(expected[0].upload["H"], without.upload["H"])


@pytest.mark.parametrize(
    "settings", [{"method": "fed-sb"}, {"init": "first-round"}, {"init": "data-aware"}]
)
def test_calibrations_are_computed_eagerly(settings):
    """A graph of a calibration, and Adam's moments of whole matrices, would be kept for nothing."""
    loaded = ModelAndData(read_config({"device": "cpu", "lora-rank": 2} | settings))
    work = ClientWork(
        loaded.partition(0, 40).train, loaded.model.initial_state(), 1.0,
        TrainingSettings(**STEPS), ClientRound(0, 0, 0),
    )  # fmt: skip
    expected = calibrate_locally(loaded.model, loaded.task, work)
    loaded.model.training_graphs = GraphCache(recorder := Recorder())
    assert same_bits(calibrate_locally(loaded.model, loaded.task, work).upload, expected.upload)
    assert recorder.recordings == 0
    assert not loaded.model.training_graphs.fixed_tensors


def test_a_step_that_reads_a_value_is_not_captured(loaded, monkeypatch):
    logits = type(loaded.task).logits

    def looking(task, network, batch):
        read = logits(task, network, batch)
        return read if float(read.detach().sum()) < 1e9 else -read

    monkeypatch.setattr(type(loaded.task), "logits", looking)
    expected = upload(loaded)
    loaded.model.training_graphs = GraphCache(Recorder())
    assert torch.equal(upload(loaded).upload["H"], expected.upload["H"])
    (state,) = loaded.model.training_graphs.fixed_tensors.values()
    assert [*state.graphs.values()] == [None]


def test_one_graph_serves_clients_with_other_rates_and_batches(loaded):
    recorder = Recorder()
    options = [{}, {"learning_rate": 0.003}, {"learning_rate": 0.001, "num_steps": 7}]
    expected = [upload(loaded, n, **changes) for n, changes in enumerate(options)]
    loaded.model.training_graphs = GraphCache(recorder)
    results = [upload(loaded, n, **changes) for n, changes in enumerate(options)]
    assert recorder.recordings == 1
    assert_same(results, expected)


def test_further_shapes_are_computed_eagerly(loaded, monkeypatch):
    monkeypatch.setattr(captured, "MAX_GRAPHS", 2)
    recorder = Recorder()
    sizes = [4, 6, 8, 10]
    expected = [upload(loaded, batch_size=size) for size in sizes]
    loaded.model.training_graphs = GraphCache(recorder)
    for size, other in zip(sizes * 2, expected * 2, strict=True):
        assert torch.equal(upload(loaded, batch_size=size).upload["H"], other.upload["H"])
    assert recorder.recordings == 2


def test_further_shapes_of_a_batch_are_computed_eagerly(loaded, monkeypatch):
    """82 examples are evaluated in a batch of 28 and two of 27."""
    monkeypatch.setattr(captured, "MAX_GRAPHS", 1)
    examples = {"data": loaded.partition(0, 10).train}
    assert [len(rows) for rows in np.array_split(examples["data"].rows[:82], 3)] == [28, 27, 27]
    examples = {"data": examples["data"].select(np.arange(82))}
    expected = evaluate_all(loaded.model, loaded.task, examples, 30)
    loaded.model.evaluation_graphs = GraphCache(recorder := Recorder(), at_first=False)
    for _ in range(3):
        assert evaluate_all(loaded.model, loaded.task, examples, 30) == expected
    assert recorder.recordings == 1


def move(network):
    parameter = next(network.parameters())
    parameter.data = parameter.data.clone()


def train(network):
    next(network.parameters()).requires_grad_(True)


def add(network):
    network.register_buffer("added", torch.zeros(1), persistent=False)


@pytest.mark.parametrize("change", [move, train, add])
def test_a_tensor_that_changes_while_a_client_trains_is_an_error(change, loaded, monkeypatch):
    loaded.model.training_graphs = GraphCache(Recorder())
    upload(loaded)
    logits = type(loaded.task).logits

    def changing(task, network, batch):
        change(network)
        return logits(task, network, batch)

    monkeypatch.setattr(type(loaded.task), "logits", changing)
    with pytest.raises(RuntimeError, match="cuda-graphs=off"):
        upload(loaded, batch_size=10)


def test_the_quicker_kind_of_step_is_kept(loaded, monkeypatch):
    """The second client's first steps are timed: three eager ones, three replayed ones."""
    clock = [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    expected = [upload(loaded, n, num_steps=9, batch_size=8) for n in range(3)]
    for slower in (True, False):
        recorder = Recorder()
        recorder.compares = True
        loaded.model.training_graphs = GraphCache(recorder)
        times = {OptimizerStep: 1.0, captured.Graph: 2.0 if slower else 0.5}
        with monkeypatch.context() as patch:
            for kind, seconds in times.items():

                def timed(self, *given, call=kind.__call__, seconds=seconds):
                    clock[0] += seconds
                    return call(self, *given)

                patch.setattr(kind, "__call__", timed)
            results = [upload(loaded, n, num_steps=9, batch_size=8) for n in range(3)]
        assert_same(results, expected)
        (state,) = loaded.model.training_graphs.fixed_tensors.values()
        assert (None in state.graphs.values()) is slower


def test_a_model_is_as_before_after_captured_clients(loaded):
    before = {name: tensor.clone() for name, tensor in loaded.model.network.state_dict().items()}
    loaded.model.training_graphs = GraphCache(Recorder())
    upload(loaded)
    assert same_bits(before, loaded.model.network.state_dict())


@pytest.mark.parametrize("preset", ["glue-llama", "newsgroups-t5", "medical", "preference"])
def test_padded_texts_are_captured_in_few_lengths(preset, tmp_path):
    """Losses do not count padding, so few lengths, and few graphs, serve all batches."""
    task = "rte" if preset == "glue-llama" else ""
    save_data(preset, tmp_path / "data", task, 60, 10)
    kind, folder = ARCHITECTURES[preset], tmp_path / "model"
    if preset in OF_DECODERS:
        save_speaker(kind, folder)
    else:  # dropout would draw other numbers for other shapes
        save_model(kind, folder, **({"dropout_rate": 0.0} if kind == "t5" else {}))
    config: dict[str, Scalar] = {
        "preset": preset, "model": str(tmp_path / "model"), "data": str(tmp_path / "data"),
        "device": "cpu", "partition": "iid", "rank": 2, "batch-size": 4, "max-length": 48,
        "precision": "float32", "backbone-dtype": "float32", "gradient-checkpointing": False,
        "micro-batch-size": 4,
    }  # fmt: skip
    loaded = ModelAndData(read_config(config | ({"glue-task": task} if task else {})))
    results, captured_steps = [], GraphCache(Recorder())
    for is_captured in (False, True):
        if is_captured:
            loaded.model.training_graphs, loaded.task.multiple = captured_steps, 16
        steps = TrainingSettings(8, 4, 0.01, "float32")
        state = {name: t + 0.01 for name, t in loaded.model.initial_state().items()}
        examples = loaded.partition(0, 2).train
        work = ClientWork(examples, state, 1.0, steps, ClientRound(0, 1, 0))
        results.append(train_locally(loaded.model, loaded.task, work))
    eager, replayed = results
    assert replayed.train_loss == pytest.approx(eager.train_loss, rel=1e-4)
    (fixed,) = captured_steps.fixed_tensors.values()
    assert None not in fixed.graphs.values()
    assert 1 <= len(fixed.graphs) <= 6
    for name, tensor in eager.upload.items():
        assert torch.allclose(tensor, replayed.upload[name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bfloat16", "classifier": "trained"}, {"method": "fedit"},
     {"method": "fedex-lora"}, {"method": "full"}],
)  # fmt: skip
def test_captured_evaluations_have_the_metrics_of_eager_ones(settings):
    """Between evaluations clients train with other heads, so that tensors move."""
    config = {"preset": "digits-vit", "device": "cpu"} | settings
    loaded, measured = ModelAndData(read_config(config)), []
    examples = loaded.partition(0, 4).train
    for recorder in (None, Recorder(), None):
        model, found, state = loaded.model, [], loaded.model.initial_state()
        model.training_graphs = model.evaluation_graphs = None
        evaluations = GraphCache(recorder or Recorder(), at_first=False)
        if recorder is not None:
            model.training_graphs, model.evaluation_graphs = GraphCache(recorder), evaluations
        for number in (1, 2, 3, 4):
            steps = TrainingSettings(2, 16, 0.01, loaded.config.precision)
            fraction = 0.5 if number % 2 and model.method.budget_units else 1.0
            work = ClientWork(examples, state, fraction, steps, ClientRound(0, number, 0))
            train_locally(model, loaded.task, work)
            state = {n: t + 0.02 if t.is_floating_point() else t for n, t in state.items()}
            with model.holding(state):
                found.append(evaluate_all(
                    model, loaded.task, {"data": examples}, 40, loaded.config.precision
                ))  # fmt: skip
        measured.append(found)
        graphs = [graph for s in evaluations.fixed_tensors.values() for graph in s.graphs.values()]
        assert bool(graphs) is (recorder is not None)
        assert None not in graphs
    assert measured[0] == measured[1] == measured[2]
    assert len({one["loss"] for one in measured[0]}) == 4
