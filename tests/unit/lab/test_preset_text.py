"""Tuning changes one learning rate in a preset's text, and nothing else."""

import pytest
import yaml

from ravan_flwr.config.presets import conf_folder
from ravan_flwr.lab.tuning import as_written, with_rate
from tests.support.tiny import OF_DECODERS

NOTE = "tune: accuracy 0.9"

# Handwritten forms: in a block, empty, with comments, notes of version 0.2, Windows line ends.
TEXTS = [
    "task: vision\n",
    "task: vision  # no newline at the end",
    "a: 1\nlearning-rate:\n  ravan: 1.0e-2  # mine\n  fedit: 1.0e-3\nz: 2  # last\n",
    "a: 1\nlearning-rate:\n  fedit: 1.0e-3\n    # about nothing\n\n# the end\n",
    "a: 1\nlearning-rate:\n    fedit: 1.0e-3\n    ravan: 1.0e-2\n",
    "learning-rate:\n  fedit: 1.0\n\n# of ravan\n  ravan: 1.0e-3 # mine\nsteps:\n  ravan: 20\n",
    "learning-rate:\n  # tune of ravan: 0.8\n  # tune of ravan: tried 1\n  ravan: 1.0e-3\n",
    "a: é\r\nlearning-rate:\r\n  fedit: 1.0e-3\r\nb: ü\r\n",
    "learning-rate:  # none yet\nb: 1\n",
    "a: 1\nlearning-rate: {}  # none yet\nb: 1\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_only_the_rate_changes(text):
    edited = with_rate(text, "ravan", 3e-3, NOTE)
    before, after = yaml.safe_load(text), yaml.safe_load(edited)
    assert after.pop("learning-rate") == (before.pop("learning-rate", None) or {}) | {"ravan": 3e-3}
    assert after == before
    # All other lines are still there, in order.
    lines = iter(edited.splitlines())
    for line in text.splitlines():
        if not line.strip().startswith(("ravan: 1.0e", "learning-rate: {", "# tune of")):
            assert line in lines
    mine = "  # mine" if "# mine" in text else ""
    end = "\r\n" if "\r\n" in text else "\n"
    assert f"  ravan: 3.0e-3  # tune: accuracy 0.9{mine}{end}" in edited
    assert "# tune of" not in edited
    assert edited.count("\r\n") == (edited.count("\n") if "\r\n" in text else 0)


@pytest.mark.parametrize("text", TEXTS)
def test_a_second_tuning_removes_the_note_of_the_first(text):
    once = with_rate(text, "ravan", 3e-3, NOTE)
    again = with_rate(once, "ravan", 1.7e-4, "tune: other")
    assert again.count("# tune: other") == 1
    assert NOTE not in again
    assert with_rate(again, "ravan", 3e-3, NOTE) == once
    both = with_rate(again, "fedit", 1.0, "tune: of fedit")
    assert both.count("# tune: other") == both.count("# tune: of fedit") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning-rate: {ravan: {iid: 1.0e-3}}", "by other keys"),
        ("x: &r 1.0e-3\nlearning-rate: {ravan: *r}", "no edit of one line"),
        ("x: &r {ravan: 1.0}\nlearning-rate: *r\n", "no edit of one line"),
        ("{a: 1}", "no edit of one line"),
        ("learning-rate: {fedit: 1.0e-3}  # in braces", "no edit of one line"),
        ("learning-rate: {ravan: 1.0e-2,\n  fedit: 1.0e-3,}\nb: 1", "no edit of one line"),
        ("a: 1\n...\n", "no edit of one line"),
        ("learning-rate: null", "no edit of one line"),
        ("learning-rate:\n  ravan:\n    1.0e-2\n  fedit: 1.0e-3\n", "no edit of one line"),
        ('learning-rate:\n  "ravan": 0.003\n', "no edit of one line"),
        ("a: [", "no YAML any more"),
        ("", "no mapping any more"),
    ],
)
def test_files_that_cannot_be_edited_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        with_rate(text, "ravan", 3e-3, NOTE)


PRESETS = sorted(conf_folder().glob("*.yaml"))
# A rate for each method.
PLAIN = [
    path
    for path in PRESETS
    if path.stem in ("fashion-vit", "glue-llama", *OF_DECODERS)
    or path.stem.endswith(("-minilm", "-mpnet", "-smollm2"))
]


@pytest.mark.parametrize("path", sorted({*PRESETS} - {*PLAIN}), ids=lambda path: path.stem)
def test_the_papers_presets_keep_every_number(path):
    with pytest.raises(ValueError, match="keeps its numbers"):
        with_rate(path.read_text(), "ravan", 3e-3, NOTE)


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_other_presets_of_the_app_accept_a_rate(path):
    before = yaml.safe_load(path.read_text())
    after = yaml.safe_load(with_rate(path.read_text(), "ravan", 7e-3, NOTE))
    assert after.pop("learning-rate") == before.pop("learning-rate") | {"ravan": 7e-3}
    assert after == before


@pytest.mark.parametrize("rate", [1.0, 10.0, 3e-3, 1.7e-4, 1e-12, 1 / 3, 5e-324])
def test_written_rates_round_trip_through_yaml(rate):
    assert yaml.safe_load(as_written(rate)) == rate
