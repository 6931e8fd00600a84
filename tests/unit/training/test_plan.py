"""A plan agrees with a run."""

import re
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.preset_wizard.model_summary import suggested_heads
from ravan_flwr.specs import Scalar
from ravan_flwr.training.cost import largest_fraction, step_memory, step_seconds
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.plan import describe, plan_of
from tests.memory import bytes_for_backward
from tests.support.tiny import save_model


def config(**settings):
    return read_config({key.replace("_", "-"): value for key, value in settings.items()})


def test_an_automatic_budget_where_nothing_is_trained():
    assert largest_fraction(config(method="none", classifier="frozen"), 10**9) == 1.0


@pytest.mark.parametrize("method", ["hetlora", "fedit"])
def test_an_automatic_budget_fraction_of_ranks(method):
    settings = config(method=method, lora_rank=8)
    assert largest_fraction(settings, 10**12) == 1.0
    half = step_memory(settings, 0.5 if method == "hetlora" else 1.0).added
    assert largest_fraction(settings, int(half / 0.9) + 2) == (0.5 if method == "hetlora" else 1.0)
    if method == "fedit":  # with less it is excluded, not refused
        assert 0 < largest_fraction(settings, half // 3) < 0.34
        assert 0 < largest_fraction(settings, 0) < 0.01
    assert ("not eligible" in describe(settings)) == (method == "fedit")


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_kept_memory_equals_that_of_autograd_on_the_real_model(fraction):
    settings = config(batch_size=16)
    measured, trained = bytes_for_backward(ModelAndData(settings), fraction, 16)
    estimate = step_memory(settings, fraction)
    assert estimate.trained == 4 * trained
    assert measured == pytest.approx(estimate.activations, rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("two_blocks")
def test_a_t5_is_refused_in_float16_in_which_it_overflows(tmp_path):
    message = r"precision = 'float16': .* too large for it in wo, .* set precision=bfloat16"
    for preset in ("newsgroups-t5", "mrqa-t5"):
        with pytest.raises(ValueError, match=message):
            plan_of({"preset": preset, "precision": "float16"})
    assert plan_of({"preset": "newsgroups-t5", "precision": "bfloat16"})
    assert plan_of({"preset": "cifar100-vit-b16", "precision": "float16"})
    settings = {"preset": "newsgroups-t5", "precision": "float16", "device": "cpu"}
    settings |= {"model": str(save_model("t5", tmp_path))}
    with pytest.raises(ValueError, match=message):
        _ = ModelAndData(read_config(settings)).model


def test_an_automatic_budget_fraction_affords_the_most_heads_that_fit():
    settings, fractions = config(heads=4), (0.25, 0.5, 0.75, 1.0)
    memory = [step_memory(settings, fraction) for fraction in fractions]
    added = [step.added for step in memory]
    assert added == sorted(set(added))
    # The trained heads are copies: one of four frozen saves the memory of its copy.
    totals = [step.total for step in memory]
    assert totals[0] < totals[1] < totals[2] <= totals[3] + 100
    assert largest_fraction(settings, 10**12) == 1.0
    for fraction, need in zip(fractions[:3], added[:3], strict=True):
        assert largest_fraction(settings, int(need / 0.9) + 2) == fraction
    with pytest.raises(ValueError, match="budget is 'auto', and the smallest .* lower batch-"):
        largest_fraction(settings, added[0] // 2)


def test_the_papers_rule_for_the_number_of_heads():
    # ViT-B/16 at LoRA 32: N = 49,152 a matrix, d = 768: sqrt(N h) < 768 up to h = 12.
    assert suggested_heads(49_152, 768) == 8
    assert suggested_heads(98_304, 768) == 4
    assert suggested_heads(768**2, 768) == 1


@pytest.fixture
def half_seconds(monkeypatch):
    """Let each step take half a second; a step that was measured is not measured again."""
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 2)
    monkeypatch.setattr("ravan_flwr.training.cost.time", clock)
    step_seconds.cache_clear()
    yield
    step_seconds.cache_clear()


@pytest.mark.usefixtures("half_seconds")
def test_a_plan_estimates_time_from_a_step_that_it_tries_on_this_machine():
    def time_of(**settings):
        (row,) = re.findall(r"^time .*(?:\n .*)*", plan_of(settings, 20), re.MULTILINE)
        return " ".join(row.split())

    # Three clients of fifty steps in a round; twenty rounds.
    row = time_of(device="cpu")
    assert "a step takes about 0.5 s on this machine (cpu): 1 min 15 s a round, 25 min" in row
    assert "Tried just now, with made-up weights and examples" in row
    assert "evaluations and messages are not counted" in row
    # Of a step in two parts, one part is tried. With epochs, the steps depend on the data.
    row = time_of(**{"device": "cpu", "micro-batch-size": 16, "local-steps": "epochs:1"})
    assert "a step takes about 1 s on this machine (cpu). Tried" in row


def test_a_plan_of_a_model_that_is_too_large_to_try_says_so(monkeypatch):
    monkeypatch.setattr("ravan_flwr.training.cost.MAX_TRIED_BYTES", 1000)
    step_seconds.cache_clear()
    plan = " ".join(plan_of({"device": "cpu"}).split())
    assert "time not estimated: no step was tried on this machine (cpu): the model takes" in plan
    untrained = plan_of({"method": "none", "classifier": "frozen"})
    assert "time " not in untrained
    assert "no step of a client" in untrained


@pytest.mark.parametrize("method", METHODS)
def test_a_step_of_every_method_can_be_tried(method):
    settings = config(method=method, device="cpu", batch_size=4)
    step_seconds.cache_clear()
    assert 0 < step_seconds(settings) < 60


def test_a_plan_loads_neither_weights_nor_data(monkeypatch):
    def refuse(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr("ravan_flwr.data.examples.load_splits", refuse)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", refuse)
    assert "8 matrices of 96 x 96" in describe(config())


def test_a_plan_reports_keys_without_effect():
    plan = plan_of({"epsilon": 8.0, "secure-minimum": 5})
    assert "without privacy=client or privacy=example: epsilon=8.0" in plan
    assert "without secure-aggregation=true: secure-minimum=5" in plan
    # With a noise multiplier no protection is expected.
    protected: dict[str, Scalar] = {"privacy": "client", "epsilon": 8.0, "noise-multiplier": 1.0}
    assert "is protected" not in plan_of(protected)
    settings: dict[str, Scalar] = {"head-mean": "all", "heads": 8}
    plan = plan_of(settings | {"method": "hetlora"})
    assert plan.endswith("\n\nno effect with method=hetlora: head-mean=all, heads=8")
    assert "no effect" not in plan_of(settings)
