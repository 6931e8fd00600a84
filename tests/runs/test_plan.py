"""A plan agrees with the run."""

import pytest

from ravan_flwr.cli import main
from ravan_flwr.config.run_config import read_config
from ravan_flwr.data import model_folder
from ravan_flwr.specs import Scalar
from ravan_flwr.training import network
from ravan_flwr.training.plan import describe
from tests.short_runs import records_of, run
from tests.support import ROOT


@pytest.mark.slow
def test_a_plans_parameters_and_bytes_are_those_of_a_run(tmp_path, capsys):
    """With a trained classifier, for every method: test_every_method.py."""
    settings = {"classifier": "frozen", "heads": 2, "budgets": "full", "num-rounds": 1}
    main(["plan", *(f"{key}={value}" for key, value in settings.items())])
    plan = capsys.readouterr().out
    ended = run(tmp_path, 4, settings, local_steps=1)
    client = records_of(ended)[0]["clients"][0]
    assert f"trained         {ended.summary['trainable-parameters']:,} parameters" in plan
    assert f"{client['bytes-up']:,}" in plan
    assert f"{client['bytes-down']:,}" in plan
    assert f"rank            {ended.summary['rank']}, 2 heads" in plan


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "conf").glob("*.yaml")))
def test_a_plan_of_a_preset_sends_no_request_to_the_hub(preset, two_blocks, monkeypatch, capsys):
    def fail_on_request(*_, **__):
        raise AssertionError("the hub was asked")

    for module, name in ((model_folder, "snapshot_download"), (network, "read_config_json")):
        monkeypatch.setattr(module, name, fail_on_request)
    monkeypatch.setitem(network.CONFIGS, "hub", fail_on_request)
    main(["plan", f"preset={preset}"])
    assert "trained " in capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_counts_the_calibration_round(tmp_path):
    settings: dict[str, Scalar] = {"init": "data-aware", "num-rounds": 1}
    plan = describe(read_config(settings))
    records = records_of(run(tmp_path, 2, settings, local_steps=1))
    (first, *_), (second, *_) = (record["clients"] for record in records)
    bases = second["bytes-down"] - first["bytes-down"]
    assert f"20 clients send {first['bytes-up']:,} bytes each" in plan
    assert f"a client gets {bases:,} once" in plan
    assert "before round 1" not in describe(read_config({}))
