"""Names of layers in a report: short, and still different."""

import pytest

from ravan_flwr.results.report import short_names


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (
            ["vit.layers.0.attention.q_proj", "vit.layers.10.attention.v_proj"],
            ["0.q_proj", "10.v_proj"],
        ),
        (["model.layers.3.q_proj", "model.layers.3.v_proj"], ["q_proj", "v_proj"]),
        (["encoder.0.q.linear", "encoder.extra.0.q.linear"], ["encoder.0.q.linear", "extra"]),
        (["decoder.0.q", "encoder.0.self.q"], ["decoder.0", "encoder.0.self"]),
        (["a.b", "a.b.c"], ["a.b", "c"]),
        (["alone.in.the.model"], ["alone.in.the.model"]),
        ([], []),
    ],
)
def test_names_lose_the_words_that_all_of_them_share(names, short):
    assert short_names(names) == short
