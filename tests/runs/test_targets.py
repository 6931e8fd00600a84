"""A run rejects labels longer than `target-length` before it trains."""

import dataclasses

import pytest

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.specs import Scalar
from tests.support.tiny import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model("t5", tmp_path_factory.mktemp("targets") / "model")


def test_labels_are_checked_before_training(folder, tmp_path, monkeypatch):
    """The server checks them, also if only clients have examples, before it loads weights."""

    def refuse(*_):
        raise AssertionError("the run went on")

    places = (
        "training.model_and_data.build_network",
        "training.model_and_data.load_splits",
        "server.strategy.FederatedTuning.start",
    )
    for name in places:
        monkeypatch.setattr(f"ravan_flwr.{name}", refuse)
    real = read_config({"preset": "newsgroups-t5"}).data
    short = dataclasses.replace(real, target_length=1)
    monkeypatch.setattr("ravan_flwr.config.preset.Preset.choose_data", lambda *_: short)
    settings: dict[str, Scalar] = {
        "preset": "newsgroups-t5", "model": str(folder), "data": "nobody/has-this",
        "evaluate-on": "clients", "validation-share": 0.2, "output-dir": str(tmp_path),
        "tracking": "none",
    }  # fmt: skip
    with pytest.raises(ValueError, match="target-length = 1: got labels of more tokens: alt.ath"):
        simulate(settings, 2)
