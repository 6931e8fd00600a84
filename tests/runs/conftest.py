"""What whole runs share: the bundled digits are read once a session."""

import functools

import datasets
import pytest

from ravan_flwr.data import examples


@pytest.fixture(scope="session", autouse=True)
def _digits_read_once():
    """Read them once: a fifth of a short run's time goes there, and nobody changes them."""
    read = functools.cache(examples.SOURCES["sklearn-digits"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            examples.SOURCES, "sklearn-digits", lambda spec: datasets.DatasetDict(read(spec))
        )
        yield
