"""Every part of a round on the pretend accelerator, where a tensor left on the CPU is an error."""

from typing import Any

import pytest
import torch

from ravan_flwr import simulate
from ravan_flwr.adapters import MultiHeadLinear
from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras.example_privacy.gradients import check_independent
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.results.spectrum import Spectra
from ravan_flwr.seeding import ClientRound
from ravan_flwr.server.aggregation import Aggregate, make_broadcast
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from ravan_flwr.training.local_steps import ClientWork, calibrate_locally, train_locally
from ravan_flwr.training.model_and_data import ModelAndData, get_model_and_data
from ravan_flwr.training.step import TrainingSettings
from tests.methods import calibration_sums
from tests.pretend import PretendTensor, register
from tests.short_runs import records_of
from tests.support.tiny import save_data, save_model


@pytest.fixture
def accelerator(monkeypatch):
    """Make `auto` choose the pretend accelerator."""
    device = register()
    monkeypatch.setattr("ravan_flwr.training.model_and_data.pick_device", lambda _: device)
    monkeypatch.setattr(
        "ravan_flwr.adapters.stored.autocasts", lambda _: False
    )  # the device casts nothing
    # A module's parameters stay the same objects when it moves, as on the way to a GPU.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    get_model_and_data.cache_clear()
    yield device
    get_model_and_data.cache_clear()
    torch.__future__.set_swap_module_params_on_conversion(before)


def run_rounds(settings, fraction, steps):
    """Run two clients' calibration, if any, and two rounds; return device, changes and metrics."""
    loaded = ModelAndData(read_config({"seed": 5, "lora-rank": 4} | settings))
    model, task, clients = loaded.model, loaded.task, [loaded.partition(i, 4).train for i in (0, 1)]
    state = first = model.initial_state()
    if model.method.calibration is not None:
        calibration = calibration_sums(model.method)
        for number, examples in enumerate(clients):
            work = ClientWork(examples, state, 1.0, steps, ClientRound(5, 0, number))
            result = calibrate_locally(model, task, work)
            calibration.add(result.upload, 1.0)
        fixed, changed = calibration.close()
        model.load_fixed(fixed)
        state = first = state | changed
    fraction = fraction if model.method.can_train(fraction) else 1.0
    personal: dict[int, Any] = {}  # client -> personal parameters
    for number in (1, 2):  # the second round starts from a trained state
        method = model.method.in_round(number)
        total = Aggregate(method, state, UpdateNormCheck(1e9))
        for client, examples in enumerate(clients):
            sent = make_broadcast(method, state, fraction)
            own = ClientWork(
                examples, sent, fraction, steps, ClientRound(5, number, client),
                personal.get(client),
            )  # fmt: skip
            result = train_locally(model, task, own)
            personal |= {client: result.personal} if result.personal else {}
            total.check_and_add(result.upload, fraction)
        state = total.close()
    with model.holding(state, personal.get(0)):
        deltas = [delta.cpu() for delta in model.method.delta_weights(model.adapters)]
        few = {name: test.select(test.rows[:32]) for name, test in loaded.test_sets.items()}
        measured = loaded.evaluate(sets=few)
    personal_tensors = [tensor for part in personal.values() for tensor in part.values()]
    assert {tensor.device.type for tensor in (*state.values(), *personal_tensors)} == {"cpu"}
    change = [state[CLASSIFIER] - first[CLASSIFIER]] if CLASSIFIER in state else []
    return model.device, deltas + change, measured


def compare(settings, fraction, steps):
    """Compare rounds on the accelerator with rounds on the CPU, whose kernels it uses."""
    device, changes, measured = run_rounds(settings, fraction, steps)
    assert device.type == "pretend"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ravan_flwr.training.model_and_data.pick_device", torch.device)
        on_cpu = settings | {"device": "cpu"}
        device, expected, measured_on_cpu = run_rounds(on_cpu, fraction, steps)
        assert device.type == "cpu"
    # Adam's step does not shrink with the gradient, so rounding of small gradients is visible.
    for actual, reference in zip(changes, expected, strict=True):
        assert reference.norm() > 0
        assert (actual - reference).norm() <= 0.02 * reference.norm()
    assert measured == pytest.approx(measured_on_cpu, rel=1e-2)


# `none` changes nothing.
@pytest.mark.slow(kept=2)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "none"])
def test_every_method_on_an_accelerator(method, accelerator):
    compare({"method": method}, 0.5, TrainingSettings(2, 8, 0.01, "float32"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"scoring": "gradient"}, {"scoring": "weight", "selection": "global"},
        {"init": "constant", "scaling": "constant"},
        {"gradient-checkpointing": True},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)  # fmt: skip
def test_every_kind_of_head_on_an_accelerator(settings, accelerator):
    compare(settings, 0.5, TrainingSettings(2, 8, 0.01, "float32", proximal_mu=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("merged", [True, False])
def test_both_forms_of_heads_on_an_accelerator(merged, accelerator, monkeypatch):
    monkeypatch.setattr("ravan_flwr.adapters.multihead.merges", lambda *_: merged)
    settings = {"classifier": "trained" if merged else "frozen"}
    compare(settings, 0.5, TrainingSettings(2, 8, 0.01, "float32", proximal_mu=0.1))


@pytest.mark.slow
def test_bases_from_data_on_an_accelerator(accelerator):
    """Without a comparison: rounding decides about directions with nearly no gradient."""
    settings = {"init": "data-aware", "heads": 2}
    device, moved, _ = run_rounds(settings, 0.5, TrainingSettings(2, 8, 0.01, "float32"))
    assert device.type == "pretend"
    assert all(tensor.norm() > 0 for tensor in moved)


def float16_client(settings, scale, precision="float16"):
    """Return a client's training with this initial loss scale; nothing is cast here."""
    loaded = ModelAndData(read_config({"seed": 5, "lora-rank": 4, "heads": 2} | settings))
    model = loaded.model
    vars(model)["scaler"] = torch.amp.GradScaler(model.device.type, init_scale=scale)
    steps = TrainingSettings(3, 8, 0.01, precision)
    examples, state = loaded.partition(0, 4).train, model.initial_state()

    def work(function, steps, client_round, fraction=1.0):
        own = ClientWork(examples, state, fraction, steps, client_round)
        return function(model, loaded.task, own)

    return model, work, steps


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0**16, 2.0**127])
def test_the_loss_scale_of_float16_changes_no_sketch_and_no_score(scale, accelerator, monkeypatch):
    """With the larger scale gradients are infinite at first."""
    sketches = {}
    for precision in ("float32", "float16"):
        arguments = {"init": "data-aware"}, scale, precision
        model, work, steps = float16_client(*arguments)
        sketches[precision] = work(calibrate_locally, steps, ClientRound(5, 0, 0)).upload["sketch"]
    assert (model.scaler.get_scale() < scale) == (scale > 2.0**16)  # the larger scale was halved
    assert sketches["float32"].norm() > 0
    torch.testing.assert_close(sketches["float16"], sketches["float32"], rtol=1e-4, atol=1e-7)

    scores_by_precision = {}
    monkeypatch.setattr(
        "ravan_flwr.methods.ravan.best_heads",
        lambda scores, number, *_: (
            scores_by_precision.update({precision: scores}) or [[0]] * len(scores)
        ),
    )
    for precision in ("float32", "float16"):
        arguments = {"scoring": "gradient"}, scale, precision
        model, work, steps = float16_client(*arguments)
        work(train_locally, steps, ClientRound(5, 1, 0), 0.5)
    assert (model.scaler.get_scale() < scale) == (scale > 2.0**16)
    torch.testing.assert_close(
        scores_by_precision["float16"], scores_by_precision["float32"], rtol=1e-4, atol=1e-9
    )


@pytest.mark.slow
def test_gradients_that_stay_infinite_at_every_loss_scale_are_an_error(accelerator, monkeypatch):
    model, work, steps = float16_client({"init": "data-aware"}, 8.0)
    with torch.no_grad():
        model.classifier[0].fill_(torch.inf)
    monkeypatch.setattr(model, "_set_classifier", lambda _: None)
    with pytest.raises(ValueError, match="precision = 'float16': .* use bfloat16 or float32"):
        work(calibrate_locally, steps, ClientRound(5, 0, 0))


@pytest.mark.slow
def test_the_loss_scale_of_float16_persists_and_skipped_steps_are_counted(accelerator):
    model, work, steps = float16_client({}, 2.0**127)
    first = work(train_locally, steps, ClientRound(5, 1, 0))
    assert first.skipped in (1, 2)  # of three: each halves the scale
    assert model.scaler.get_scale() == 2.0 ** (127 - first.skipped)
    in_float32 = TrainingSettings(3, 8, 0.01, "float32")
    expected = work(train_locally, in_float32, ClientRound(5, 1, 0)).upload["H"]
    second = work(train_locally, steps, ClientRound(5, 1, 0))
    assert not second.skipped
    torch.testing.assert_close(second.upload["H"], expected, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
def test_the_record_counts_steps_that_float16_skipped(accelerator, monkeypatch, tmp_path):
    make_scaler = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp,
        "GradScaler",
        lambda *of, **how: make_scaler(*of, **{"init_scale": 2.0**127} | how),
    )
    settings: dict[str, Any] = {
        "num-rounds": 1, "local-steps": 3, "batch-size": 8, "lora-rank": 4,
        "precision": "float16", "tracking": "none", "output-dir": str(tmp_path),
    }  # fmt: skip
    run = simulate(settings, 2)
    (record,) = records_of(run)
    skipped = [client.get("skipped-steps", 0) for client in record["clients"]]
    assert 0 < sum(skipped) < 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "task", "model", "method"),
    [
        ("svhn-vit-b16", "", "vit", "fedex-lora"), ("glue-llama", "rte", "llama", "full"),
        ("newsgroups-t5", "", "t5", "ravan"),
    ],
)  # fmt: skip
def test_a_run_of_every_kind_of_task(preset, task, model, method, accelerator, tmp_path):
    """Server, clients and the exported result."""
    settings = {
        "preset": preset, "model": str(save_model(model, tmp_path / "model")), "method": method,
        "data": str(save_data(preset, tmp_path / "data", task, test=8)), "lora-rank": 2,
        "num-rounds": 2, "local-steps": 2, "batch-size": 4, "learning-rate": 1e-3,
        "tracking": "none", "budgets": "uniform" if method == "ravan" else "full",
        "output-dir": str(tmp_path / "runs"),
    }  # fmt: skip
    settings |= {"glue-task": task} if task else {}
    settings |= {"max-length": 16} if model != "vit" else {}
    run = simulate(settings, 3)
    assert run.summary["rejected"] == 0
    assert all(record["clients"] for record in records_of(run))
    assert (run.run_dir / "adapter").is_dir() or (run.run_dir / "merged").is_dir()
    if method == "ravan":
        assert Spectra.of(run.run_dir).values


def test_independence_of_examples_is_checked_on_a_device_without_float64(accelerator):
    alone = [torch.randn(1, 3, 4).to(accelerator)]
    check_independent(alone, [torch.cat([alone[0], alone[0]])])  # does not raise
    with pytest.raises(ValueError, match="depends on the other examples"):
        check_independent(alone, [torch.cat([2 * alone[0], alone[0]])])


# The accelerator rejects what CUDA rejects.


def test_operations_on_tensors_of_two_devices_are_errors(accelerator):
    on_cpu, on_device = torch.randn(3, 4), torch.randn(3, 4).to(accelerator)
    assert isinstance(on_device, PretendTensor)
    for operation in (
        lambda: on_cpu + on_device,
        lambda: on_device @ on_cpu.T,
        lambda: torch.cat([on_cpu, on_device]),
        lambda: torch.where(on_device > 0, on_device, on_cpu),
        lambda: on_device.index_select(0, torch.tensor([1])),
        lambda: torch.nn.functional.linear(on_device, on_cpu),
        lambda: on_device.add_(on_cpu),
        lambda: on_cpu[torch.tensor([1]).to(accelerator)],
        lambda: torch.randn(2, generator=torch.Generator(), device=accelerator),
    ):
        with pytest.raises(RuntimeError, match="same device|generator"):
            operation()
    with pytest.raises((TypeError, RuntimeError), match="numpy"):
        on_device.numpy()
    # CUDA accepts these.
    torch.testing.assert_close(
        (on_device * torch.tensor(2.0)).cpu(), on_cpu * 0 + 2 * on_device.cpu()
    )
    torch.testing.assert_close(on_device[torch.tensor([1])].cpu(), on_device.cpu()[[1]])
    on_device.copy_(on_cpu)
    assert torch.equal(on_device.cpu(), on_cpu)
    assert on_device.tolist() == on_cpu.tolist()


def test_gradients_are_on_the_device_of_their_parameters(accelerator):
    layer = torch.nn.Linear(4, 2)
    parameters = list(layer.parameters())
    layer.to(accelerator)
    assert [a is b for a, b in zip(parameters, layer.parameters(), strict=True)] == [True, True]
    layer(torch.ones(3, 4, device=accelerator)).sum().backward()
    gradients = [parameter.grad for parameter in parameters]
    assert {None if g is None else g.device for g in gradients} == {torch.device("pretend:0")}


def test_a_base_left_on_the_cpu_is_an_error(accelerator):
    """The tests above find such an error only if the accelerator does."""
    B, A = torch.randn(2, 6, 2), torch.randn(2, 2, 4)
    layer = MultiHeadLinear(torch.nn.Linear(4, 6).to(accelerator), B, A, "factored")
    x = torch.randn(3, 4).to(accelerator)
    layer(x)
    layer.B_stack = layer.B_stack.cpu()
    with pytest.raises(RuntimeError, match=r"same device.*cpu \(4, 6\)"):
        layer(x)
