"""Validation splits that leave a client no training example."""

import numpy as np
import pytest

from ravan_flwr.config.run_config import read_config
from ravan_flwr.training.model_and_data import ModelAndData


@pytest.mark.parametrize(
    ("number", "share", "advice"), [(1, 0.1, "; use fewer"), (2, 0.9, "; lower it, or use fewer")]
)
def test_a_validation_split_of_all_examples_is_an_error(number, share, advice, monkeypatch):
    """All clients have the same message, so that equal messages can be counted."""
    loaded = ModelAndData(read_config({"validation-share": share}))
    monkeypatch.setattr(loaded, "rows", lambda _: [np.arange(number)] * 2)
    message = rf"a client with {number} examples? would have none .*{advice} clients"
    reasons = set()
    for partition in range(2):
        with pytest.raises(ValueError, match=message) as raised:
            loaded.partition(partition, 2)
        reasons.add(str(raised.value))
    assert len(reasons) == 1
