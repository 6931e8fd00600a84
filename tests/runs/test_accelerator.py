"""Every part of a round on a device that is not the CPU: a tensor left behind is an error here."""

import json
from typing import Any

import pytest
import torch

from ravan_flwr import simulate
from ravan_flwr.adapters import MultiHeadLinear
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.privacy.example_gradients import check_independent
from ravan_flwr.reports.spectrum import Spectra
from ravan_flwr.seeding import ClientRound
from ravan_flwr.server.aggregation import Aggregate, outgoing
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from ravan_flwr.training.local_steps import LocalSteps, calibrate_locally, train_locally
from ravan_flwr.training.model_and_data import ModelAndData, get_model_and_data
from testing.tiny import save_data, save_model
from tests.methods import calibration_sums
from tests.pretend import PretendTensor, register


@pytest.fixture
def accelerator(monkeypatch):
    """The device that `auto` finds."""
    device = register()
    monkeypatch.setattr("ravan_flwr.training.model_and_data.pick_device", lambda _: device)
    monkeypatch.setattr("ravan_flwr.adapters.stored.autocasts", lambda _: False)  # it casts nothing
    # A module's parameters stay the objects that they are, as they do on the way to a GPU.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    get_model_and_data.cache_clear()
    yield device
    get_model_and_data.cache_clear()
    torch.__future__.set_swap_module_params_on_conversion(before)


def a_round(settings, fraction, steps):
    """Two clients' calibration, if there is one, and two rounds of theirs; what came of them."""
    loaded = ModelAndData(read_config({"seed": 5, "lora-rank": 4} | settings))
    model, task, clients = loaded.model, loaded.task, [loaded.partition(i, 4).train for i in (0, 1)]
    state = first = model.initial_state()
    if model.method.calibration is not None:
        calibration = calibration_sums(model.method)
        for number, examples in enumerate(clients):
            done = calibrate_locally(model, task, examples, state, steps, ClientRound(5, 0, number))
            calibration.add(done.upload, 1.0)
        fixed, changed = calibration.close()
        model.load_fixed(fixed)
        state = first = state | changed
    fraction = fraction if model.method.can_train(fraction) else 1.0
    own: dict[int, Any] = {}  # what stays with each client
    for number in (1, 2):  # in the second, the state is one of the middle of a run
        method = model.method.in_round(number)
        pot = Aggregate(method, state, UpdateNormCheck(1e9))
        for client, examples in enumerate(clients):
            sent = outgoing(method, state, fraction)
            done = train_locally(
                model, task, examples, sent, fraction, steps, ClientRound(5, number, client),
                own.get(client),
            )  # fmt: skip
            own |= {client: done.personal} if done.personal else {}
            pot.offer(done.upload, fraction)
        state = pot.close()
    with model.holding(state, own.get(0)):
        deltas = [delta.cpu() for delta in model.method.delta_weights(model.adapters)]
        few = {name: held.select(held.rows[:32]) for name, held in loaded.test_sets.items()}
        measured = loaded.evaluate(sets=few)
    kept = [tensor for part in own.values() for tensor in part.values()]
    assert {tensor.device.type for tensor in (*state.values(), *kept)} == {"cpu"}
    moved = [state[CLASSIFIER] - first[CLASSIFIER]] if CLASSIFIER in state else []
    return model.device, deltas + moved, measured


def compare(settings, fraction, steps):
    """The accelerator's round with that of the CPU, whose kernels it uses."""
    device, moved, measured = a_round(settings, fraction, steps)
    assert device.type == "pretend"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ravan_flwr.training.model_and_data.pick_device", torch.device)
        device, expected, measured_there = a_round(settings | {"device": "cpu"}, fraction, steps)
        assert device.type == "cpu"
    # Adam makes a step of any gradient, so that where it is nearly zero its rounding shows.
    for got, right in zip(moved, expected, strict=True):
        assert right.norm() > 0
        assert (got - right).norm() <= 0.02 * right.norm()
    assert measured == pytest.approx(measured_there, rel=1e-2)


# `none` has nothing to move.
@pytest.mark.parametrize("method", [name for name in METHODS if name != "none"])
def test_every_method_on_an_accelerator(method, accelerator):
    compare({"method": method}, 0.5, LocalSteps(2, 8, 0.01, "float32"))


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
    compare(settings, 0.5, LocalSteps(2, 8, 0.01, "float32", proximal_mu=0.1))


@pytest.mark.parametrize("merged", [True, False])
def test_both_forms_of_heads_on_an_accelerator(merged, accelerator, monkeypatch):
    monkeypatch.setattr("ravan_flwr.adapters.multihead.merges", lambda *_: merged)
    compare(
        {"classifier": "trained" if merged else "frozen"},
        0.5,
        LocalSteps(2, 8, 0.01, "float32", proximal_mu=0.1),
    )


def test_bases_from_data_on_an_accelerator(accelerator):
    """Not compared: of directions that a gradient hardly has, rounding decides."""
    settings = {"init": "data-aware", "heads": 2}
    device, moved, _ = a_round(settings, 0.5, LocalSteps(2, 8, 0.01, "float32"))
    assert device.type == "pretend"
    assert all(tensor.norm() > 0 for tensor in moved)


def float16_client(settings, scale, precision="float16"):
    """A client's stepper with the loss scale at which float16 begins; nothing is cast here."""
    loaded = ModelAndData(read_config({"seed": 5, "lora-rank": 4, "heads": 2} | settings))
    model = loaded.model
    vars(model)["scaler"] = torch.amp.GradScaler(model.device.type, init_scale=scale)
    steps = LocalSteps(3, 8, 0.01, precision)
    examples, state = loaded.partition(0, 4).train, model.initial_state()

    def work(do, *more):
        return do(model, loaded.task, examples, state, *more)

    return model, work, steps


@pytest.mark.parametrize("scale", [2.0**16, 2.0**127])
def test_the_loss_scale_of_float16_is_in_nothing_that_is_measured(scale, accelerator, monkeypatch):
    """With the larger scale gradients are infinite at first."""
    found = {}
    for precision in ("float32", "float16"):
        how = {"init": "data-aware"}, scale, precision
        model, work, steps = float16_client(*how)
        found[precision] = work(calibrate_locally, steps, ClientRound(5, 0, 0)).upload["sketch"]
    assert (model.scaler.get_scale() < scale) == (scale > 2.0**16)  # as it was halved
    assert found["float32"].norm() > 0
    torch.testing.assert_close(found["float16"], found["float32"], rtol=1e-4, atol=1e-7)

    seen = {}
    monkeypatch.setattr(
        "ravan_flwr.methods.ravan.best_heads",
        lambda scores, number, *_: seen.update({precision: scores}) or [[0]] * len(scores),
    )
    for precision in ("float32", "float16"):
        how = {"scoring": "gradient"}, scale, precision
        model, work, steps = float16_client(*how)
        work(train_locally, 0.5, steps, ClientRound(5, 1, 0))
    assert (model.scaler.get_scale() < scale) == (scale > 2.0**16)
    torch.testing.assert_close(seen["float16"], seen["float32"], rtol=1e-4, atol=1e-9)


def test_gradients_that_no_loss_scale_makes_finite_are_an_error(accelerator, monkeypatch):
    model, work, steps = float16_client({"init": "data-aware"}, 8.0)
    with torch.no_grad():
        model.classifier[0].fill_(torch.inf)
    monkeypatch.setattr(model, "_set_classifier", lambda _: None)
    with pytest.raises(ValueError, match="precision = 'float16': .* use bfloat16 or float32"):
        work(calibrate_locally, steps, ClientRound(5, 0, 0))


def test_the_loss_scale_of_float16_stays_and_skipped_steps_are_counted(accelerator):
    model, work, steps = float16_client({}, 2.0**127)
    first = work(train_locally, 1.0, steps, ClientRound(5, 1, 0))
    assert first.skipped in (1, 2)  # of three: each halves the scale
    assert model.scaler.get_scale() == 2.0 ** (127 - first.skipped)
    whole = LocalSteps(3, 8, 0.01, "float32")
    expected = work(train_locally, 1.0, whole, ClientRound(5, 1, 0)).upload["H"]
    second = work(train_locally, 1.0, steps, ClientRound(5, 1, 0))
    assert not second.skipped
    torch.testing.assert_close(second.upload["H"], expected, rtol=1e-2, atol=1e-4)


def test_the_record_counts_steps_that_float16_skipped(accelerator, monkeypatch, tmp_path):
    made = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda *of, **how: made(*of, **{"init_scale": 2.0**127} | how)
    )
    settings: dict[str, Any] = {
        "num-rounds": 1, "local-steps": 3, "batch-size": 8, "lora-rank": 4, "report": False,
        "precision": "float16", "tracking": "none", "output-dir": str(tmp_path),
    }  # fmt: skip
    run = simulate(settings, 2)
    (line,) = (run.run_dir / "rounds.jsonl").read_text().splitlines()
    told = [client.get("skipped-steps", 0) for client in json.loads(line)["clients"]]
    assert 0 < sum(told) < 6


@pytest.mark.parametrize(
    ("preset", "task", "model", "method"),
    [
        ("svhn-vit-b16", "", "vit", "fedex-lora"), ("glue-llama", "rte", "llama", "full"),
        ("newsgroups-t5", "", "t5", "ravan"),
    ],
)  # fmt: skip
def test_a_run_of_every_kind_of_task(preset, task, model, method, accelerator, tmp_path):
    """The server's part and the clients', and the result's way home."""
    settings = {
        "preset": preset, "model": str(save_model(model, tmp_path / "model")), "method": method,
        "data": str(save_data(preset, tmp_path / "data", task, test=8)), "lora-rank": 2,
        "num-rounds": 2, "local-steps": 2, "batch-size": 4, "learning-rate": 1e-3,
        "tracking": "none", "report": False, "budgets": "uniform" if method == "ravan" else "full",
        "output-dir": str(tmp_path / "runs"),
    }  # fmt: skip
    settings |= {"glue-task": task} if task else {}
    settings |= {"max-length": 16} if model != "vit" else {}
    run = simulate(settings, 3)
    assert run.summary["rejected"] == 0
    lines = (run.run_dir / "rounds.jsonl").read_text().splitlines()
    assert all(json.loads(line)["clients"] for line in lines)
    assert (run.run_dir / "adapter").is_dir() or (run.run_dir / "merged").is_dir()
    if method == "ravan":
        assert Spectra.of(run.run_dir).values


def test_an_example_in_company_is_compared_on_a_device_without_float64(accelerator):
    alone = [torch.randn(1, 3, 4).to(accelerator)]
    check_independent(alone, [torch.cat([alone[0], alone[0]])])  # does not raise
    with pytest.raises(ValueError, match="depends on the other examples"):
        check_independent(alone, [torch.cat([2 * alone[0], alone[0]])])


# The accelerator refuses what CUDA refuses.


def test_tensors_of_two_devices_do_not_meet(accelerator):
    here, there = torch.randn(3, 4), torch.randn(3, 4).to(accelerator)
    assert isinstance(there, PretendTensor)
    for meet in (
        lambda: here + there,
        lambda: there @ here.T,
        lambda: torch.cat([here, there]),
        lambda: torch.where(there > 0, there, here),
        lambda: there.index_select(0, torch.tensor([1])),
        lambda: torch.nn.functional.linear(there, here),
        lambda: there.add_(here),
        lambda: here[torch.tensor([1]).to(accelerator)],
        lambda: torch.randn(2, generator=torch.Generator(), device=accelerator),
    ):
        with pytest.raises(RuntimeError, match="same device|generator"):
            meet()
    with pytest.raises((TypeError, RuntimeError), match="numpy"):
        there.numpy()
    # These CUDA takes.
    torch.testing.assert_close((there * torch.tensor(2.0)).cpu(), here * 0 + 2 * there.cpu())
    torch.testing.assert_close(there[torch.tensor([1])].cpu(), there.cpu()[[1]])
    there.copy_(here)
    assert torch.equal(there.cpu(), here)
    assert there.tolist() == here.tolist()


def test_gradients_are_on_the_device_of_their_parameters(accelerator):
    layer = torch.nn.Linear(4, 2)
    parameters = list(layer.parameters())
    layer.to(accelerator)
    assert [a is b for a, b in zip(parameters, layer.parameters(), strict=True)] == [True, True]
    layer(torch.ones(3, 4, device=accelerator)).sum().backward()
    gradients = [parameter.grad for parameter in parameters]
    assert {None if g is None else g.device for g in gradients} == {torch.device("pretend:0")}
    with pytest.raises(RuntimeError, match="same device"):
        layer(torch.ones(3, 4))


def test_a_base_that_was_left_behind_is_found(accelerator):
    """What the tests above would be blind to, if the accelerator were."""
    B, A = torch.randn(2, 6, 2), torch.randn(2, 2, 4)
    layer = MultiHeadLinear(torch.nn.Linear(4, 6).to(accelerator), B, A, "factored")
    x = torch.randn(3, 4).to(accelerator)
    layer(x)
    layer.B_stack = layer.B_stack.cpu()
    with pytest.raises(RuntimeError, match=r"same device.*cpu \(4, 6\)"):
        layer(x)
