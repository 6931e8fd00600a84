"""Fixtures of the tests that run simulations."""

import datasets
import pytest

from ravan_flwr.config.run_config import read_config
from ravan_flwr.data import examples

EVALUATED = 96  # of 359 test examples of the digits


@pytest.fixture(scope="package", autouse=True)
def _few_test_examples():
    """Evaluate on fewer digits: the evaluation is a fifth of a short run's time."""
    read_all = examples.SOURCES["sklearn-digits"]
    few_test_examples = (
        read_all(read_config({}).data)["test"].select(range(EVALUATED)).flatten_indices()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            examples.SOURCES,
            "sklearn-digits",
            lambda spec: datasets.DatasetDict(
                train=read_all(spec)["train"], test=few_test_examples
            ),
        )
        yield
