"""Tests of settings as a person types them."""

import pytest

from ravan_flwr.config.words import read_settings, words_of
from ravan_flwr.specs import Scalar


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("report=false", False),
        ("report=False", False),  # as Python writes it
        ("colour=True", "True"),
        ("report=no", "no"),  # a former value, which its key reads
        ("output-dir=2024", "2024"),
        ("output-dir=1e3", "1e3"),
        ("output-dir=true", "true"),
        ("data='a b'", "a b"),
        ("seed=3", 3),
        ("seed=true", "true"),
        ("learning-rate=1e-3", 1e-3),
        ("learning-rate=auto", "auto"),
        ("heads=4.0", 4.0),
        ("colour=3", 3),
    ],
)
def test_a_word_is_read_as_what_its_key_takes(word, value):
    (got,) = read_settings([word])[0].values()
    assert (type(got), got) == (type(value), value)


def test_words_read_back_as_the_settings_that_they_were_written_from():
    settings: dict[str, Scalar] = {
        "report": False,
        "seed": 3,
        "output-dir": "2024",
        "learning-rate": 0.001,
    }
    assert read_settings(words_of(settings)) == (settings, None)


def test_a_key_that_is_given_twice_is_refused():
    with pytest.raises(ValueError, match="seed: got it twice, as 1 and 2"):
        read_settings(["seed=1", "seed=2"])
