"""Fixtures of whole runs, for tests of less than the whole."""

from typing import Any

import datasets
import pytest
from markupsafe import Markup

from ravan_flwr.config.run_config import read_config
from ravan_flwr.data import examples
from ravan_flwr.reports.charts import Chart
from ravan_flwr.training import network
from ravan_flwr.training.cost import step_memory

EVALUATED = 96  # of 359 test examples of the digits


@pytest.fixture(scope="package", autouse=True)
def _few_test_examples():
    """Measure each round on fewer digits: a fifth of a short run's time goes there."""
    whole = examples.SOURCES["sklearn-digits"]
    few = whole(read_config({}).data)["test"].select(range(EVALUATED)).flatten_indices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            examples.SOURCES,
            "sklearn-digits",
            lambda spec: datasets.DatasetDict(train=whole(spec)["train"], test=few),
        )
        yield


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out what pictures show, where a test reads the rest of a page: they take most time.

    Their data are collected and laid out all the same, and each has its file.
    """
    empty = Markup('<svg role="img" aria-label="{}"></svg>')
    monkeypatch.setattr(Chart, "png", lambda *_: b"\x89PNG\r\n\x1a\n")
    monkeypatch.setattr(Chart, "svg", lambda chart: empty.format(chart.about))


DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers")


@pytest.fixture
def shallow(monkeypatch):
    """Plan with two blocks of each kind, where a test reads nothing that the others would change.

    What a plan takes grows with the blocks, which are equal but for their number.
    """
    configured = network._config

    def with_two_blocks(*given: Any) -> Any:
        config = configured(*given)
        for name in DEPTHS:
            if hasattr(config, name):
                setattr(config, name, 2)
        return config

    monkeypatch.setattr(network, "_config", with_two_blocks)
    step_memory.cache_clear()
    yield
    step_memory.cache_clear()
