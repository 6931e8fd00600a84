"""A plan says what a run does."""

import json

import pytest
import torch

from ravan_flwr import simulate
from ravan_flwr.cli import main
from ravan_flwr.config.run_config import read_config
from ravan_flwr.data import model_folder
from ravan_flwr.specs import Scalar
from ravan_flwr.training import network, speed
from ravan_flwr.training.cost import Skeleton
from ravan_flwr.training.plan import describe
from testing import ROOT

SHORT: dict[str, Scalar] = {"local-steps": 1, "report": False, "tracking": "none"}


@pytest.mark.parametrize("classifier", ["frozen", "trained"])
def test_parameters_and_bytes_are_those_of_a_run(classifier, tmp_path, capsys):
    settings = {"classifier": classifier, "heads": 2, "budgets": "full", "num-rounds": 1}
    main(["plan", *(f"{key}={value}" for key, value in settings.items())])
    told = capsys.readouterr().out
    run = simulate(settings | SHORT | {"output-dir": str(tmp_path)}, 4)
    client = json.loads((run.run_dir / "rounds.jsonl").read_text())["clients"][0]
    assert f"trained         {run.summary['trainable-parameters']:,} parameters" in told
    assert f"{client['bytes-up']:,}" in told
    assert f"{client['bytes-down']:,}" in told
    assert f"rank            {run.summary['rank']}, 2 heads" in told


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "conf").glob("*.yaml")))
def test_a_plan_of_a_preset_asks_no_hub(preset, shallow, monkeypatch, capsys):
    def ask(*_, **__):
        raise AssertionError("the hub was asked")

    for module, name in ((model_folder, "snapshot_download"), (network, "config_of")):
        monkeypatch.setattr(module, name, ask)
    monkeypatch.setitem(network.CONFIGS, "hub", ask)
    main(["plan", f"preset={preset}"])
    assert "trained " in capsys.readouterr().out


def test_a_calibration_round_is_planned_for(tmp_path):
    settings: dict[str, Scalar] = {**SHORT, "init": "data-aware", "num-rounds": 1}
    told = describe(read_config(settings))
    run = simulate(settings | {"output-dir": str(tmp_path)}, 2)
    lines = (run.run_dir / "rounds.jsonl").read_text().splitlines()
    (first, *_), (second, *_) = (json.loads(line)["clients"] for line in lines)
    bases = second["bytes-down"] - first["bytes-down"]
    assert f"20 clients send {first['bytes-up']:,} bytes each" in told
    assert f"a client gets {bases:,} once" in told
    assert "before round 1" not in describe(read_config({}))


def test_the_time_of_a_step_is_that_of_its_products(monkeypatch):
    """At a nanosecond an operation of a product, and nothing for the rest.

    By hand: every linear layer reads each of 17 tokens of 32 images, but for the classifier's one;
    the products of attention and of the adapters come on top. The backward pass takes as long.
    """
    timed = iter([2 * 17 * 8 * 8 * 96 * 96 * 1e-9, 0.0, 0.0])
    monkeypatch.setattr(speed, "_timed", lambda _: next(timed))
    monkeypatch.setattr(speed, "_rows_of", lambda *_: 17 * 8 * 8)
    config = read_config({"local-steps": 7})
    layers = [
        module
        for module in Skeleton.build(read_config({"method": "full"})).network.modules()
        if isinstance(module, torch.nn.Linear) and module.out_features > 10
    ]
    products = 2 * 32 * 17 * sum(layer.in_features * layer.out_features for layer in layers)
    step = speed.pace_of(config).step
    assert 1 < step / (2 * products * 1e-9) < 1.5


def test_a_plan_estimates_the_time_and_says_how(monkeypatch, capsys):
    monkeypatch.setattr(speed, "pace_of", lambda _: speed.Pace(step=0.5, at_a_time=2))
    main(["plan", "num-rounds=10", "clients-per-round=5", "local-steps=8"])
    told = capsys.readouterr().out
    assert "about 2 min 00 s of training on this machine" in told  # 10 rounds, 3 turns, 4 s each
    assert "a step's operations are counted, and timed by some like them" in told
    main(["plan", "local-epochs=1"])
    assert "not estimated: the steps of a pass depend on the examples" in capsys.readouterr().out


def test_a_tuning_estimates_its_time_before_it_begins(monkeypatch, capsys):
    monkeypatch.setattr(speed, "pace_of", lambda _: speed.Pace(step=0.5, at_a_time=3))
    main(["tune", "--dry-run", "local-steps=8", "num-rounds=4"])
    told = capsys.readouterr().out
    assert "one run after the other: 4 s for the training of a round" in told
    assert "s to start a run" in told
    main(["tune", "--dry-run", "local-epochs=1"])
    assert "time not estimated: the steps of a pass" in capsys.readouterr().out
