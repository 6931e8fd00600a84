"""Fixtures of whole runs."""

import datasets
import pytest

from ravan_flwr.config.run_config import read_config
from ravan_flwr.data import examples

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
