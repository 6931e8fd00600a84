"""A mistake in a study's file is found before anything is run."""

import re
from typing import Any

import pytest

from ravan_flwr.lab.spec import read_study
from tests.unit.lab.written import study_of, written

ROWS = {"ravan": {}, "fedit": {"method": "fedit"}}
T = {"title": "T", "rows": ROWS}
U = T | {"title": "U", "settings": {"partition": "iid"}}
OF_ONE = T | {"rows": {"ravan": {}}}
CHOOSE = {"learning-rate": [1e-3, 3e-3, 1e-2], "seeds": [100, 101, 102]}
EQUAL = T | {"equal-parameters": True, "rows": ROWS | {"full": {"method": "full"}}}


def of_fields():
    """Return mistakes in a study's fields, with words of the error."""
    yield {"seed": 1}, r"seed is unknown: did you mean 'seeds'\?"
    yield {"paper": {}}, "paper is unknown"
    yield {"seeds": 3}, "seeds: got 3"
    yield {"seeds": []}, r"seeds: got \[\]"
    yield {"seeds": ["x"]}, r"seeds\.0: got 'x'"
    yield {"settings": {"method": "ravn"}}, "row 'ravan': method 'ravn' .* 'ravan'"
    yield {"settings": {"num-clients": "many"}}, "row 'ravan': num-clients = 'many'"
    yield {"settings": {"method": "hetlora", "server-optimizer": "adam"}}, "server-optimizer = 'ad"
    yield {"settings": {"method": "hetlora", "weighting": "median"}}, "weighting = 'median'"
    four_bits = {"method": "full", "backbone-dtype": "4bit", "learning-rate": 1e-3}
    yield {"settings": four_bits}, "row 'ravan': backbone-dtype = '4bit'"


def of_tables():
    """Return mistakes in one table."""
    yield {"title": "T", "row": {}}, r"tables\.0\.row is unknown.* 'rows'\?"
    yield {"title": "T"}, r"tables\.0\.rows is missing"
    yield T | {"equal-parameters": 1}, r"tables\.0\.equal-parameters: got 1"
    yield T | {"rows": {}}, "table 'T': rows: got none"
    yield T | {"title": "overview"}, "table 'overview': its title .* rename it"
    yield T | {"title": "Overview!"}, "table 'Overview!': its title .* rename it"
    yield T | {"rows": {"ravan": {"seed": 9}}}, "row 'ravan': seed = 9"
    yield T | {"settings": {"seed": 9}}, "row 'ravan': seed = 9"
    yield T | {"rows": {"ravan": {"method": ["ravan"]}}}, r"row 'ravan': method = \['ravan'\]"
    yield T | {"against": "x"}, r"against \['x'\] are no rows"
    yield T | {"contrasts": ["x"]}, r"contrasts \['x'\] are no rows"
    yield T | {"contrasts": ["ravan", "fedit"]}, "contrasts has 'ravan'"
    yield T | {"paper": {"x": 1.0}}, r"paper \['x'\] are no rows"
    yield T | {"paper": {"ravan": "x"}}, "tables.0.paper.ravan: got 'x'"
    yield T | {"contrasts": ["fedit", "fedit"]}, "contrasts = .* expected each row once"
    yield T | {"references": ["fedit", "fedit"]}, "references = .* expected each row once"
    yield T | {"metric": "acuracy"}, r"row 'ravan' measures loss, accuracy, .* mean 'accuracy'\?"
    measured = "loss, accuracy, macro-f1, expected"
    answers = {"rows": ROWS | {"answers": {"preset": "mrqa-t5"}}}
    yield T | answers, "different metrics .*'fedit': 'accuracy', 'answers': 'f1'"
    yield T | {"metric": "f1"}, f"metric = 'f1': row 'ravan' measures {measured}"
    of_pairs = {"preset": "glue-llama", "glue-task": "mnli"}
    on_clients = of_pairs | {"evaluate-on": "clients", "validation-share": 0.2}
    matched = {"metric": "accuracy-matched", "settings": on_clients}
    yield T | matched, "metric = 'accuracy-matched': row 'ravan' measures loss, accuracy, expected"
    yield T | {"metric": "time"}, r"metric = 'time': rows \['ravan', 'fedit'\]"
    for last in (-1, 0, 1, 3):
        yield T | {"compare-last": last}, f"compare-last = {last}, expected 2 .* than the 2 of"
    yield T | {"mean-of-last": 3}, "mean-of-last = 3, expected 2 .* than the 2 of"
    every_fourth = {"a": {"eval-every": 4, "num-rounds": 8}, "b": {"num-rounds": 8}}
    yield T | {"mean-of-last": 5, "rows": every_fourth}, "mean-of-last = 5, .* than the 2 of"
    yield EQUAL, r"differ by 98.2 % \(ravan 5,440, fedit 6,144, full 301,536\)"
    yield EQUAL | {"references": ["full"]}, "differ by 11.5 %"
    yield EQUAL | {"references": ["ful"]}, r"references \['ful'\] are no rows"
    yield EQUAL | {"references": ["full", "ravan"]}, r"\['fedit'\], expected at least two"


def of_tables_that_choose():
    """Return mistakes in what a table chooses."""
    choose: dict[str, Any]
    for choose in (
        {}, {"clip-norm": ["auto", 1.0]}, {"clip-norm": [True]}, {"validation-share": [0.1]},
        {"clip-norm": []}, {"clip-norm": 1.0}, {"heads": [1, 2]}, {"nothing": [1.0]},
        {"clip-norm": [1.0], "epsilon": [2.0]},
    ):  # fmt: skip
        message = r"tables\.0\.choose.*(expected one of lear|valid (num|li))"
        yield {"tables": [OF_ONE | {"choose": choose}]}, message
    for values, message in (([-1.0], "clip-norm = -1"), ([1.0, 1.0], "each value once")):
        table = OF_ONE | {"choose": {"clip-norm": values}}
        yield {"tables": [table]}, rf"tables\.0\.choose: .*{message}"
    of_noise = {"run-as-good": True}
    with_a_rate = {"rows": {"ravan": {"learning-rate": 0.5}}}
    few = {"choose": CHOOSE | {"seeds": [100, 101]}}
    yield {"tables": [OF_ONE | of_noise]} | few, "table 'T': run-as-good, and "
    yield {"tables": [OF_ONE | of_noise | with_a_rate]}, "table 'T': run-as-good, and "
    each = {"leave-one-seed-out": True}
    no_seeds = {"choose": CHOOSE | {"seeds": []}}
    two = {"seeds": [0, 1], "tables": [OF_ONE | each]}
    yield two | no_seeds, "leave-one-seed-out, where rates are chosen with 2 seeds"
    beside = "leave-one-seed-out beside rates-of or run-as-good"
    yield {"tables": [OF_ONE | each | of_noise]} | no_seeds, beside
    yield {"tables": [OF_ONE | each | with_a_rate]} | no_seeds, "expected rates to choose from"


def of_references():
    """Return mistakes in what one table takes from another: the two tables' fields."""
    for key in ("rates-of", "change-from"):
        yield {}, {key: "no"}, f"{key} = 'no', expected an earlier table"
    yield {}, {"rates-of": "U"}, "rates-of = 'U', expected an earlier table"
    yield {"rates-of": "U"}, {}, r"rates-of = 'U', expected an earlier .*: one of \[\]"
    yield {}, {"title": "T"}, "its title is another's"
    yield {"title": "Noise +1"}, {"title": "noise -1"}, r"pictures would all be noise-1-\*\.png"
    yield {"title": "A" * 99}, {"title": "A" * 98}, r"pictures would all be a{60}-\*\.png"
    yield {}, {"change-from": "T", "metric": "loss"}, "expected one metric in both"
    yield {}, {"change-from": "T", "rows": {"new": {}}}, r"expected some of \['new'\]"
    yield {}, {"rates-of": "T", "choose": {"clip-norm": [1.0]}}, "got choose and rates-of"
    yield {}, {"rates-of": "T", "rows": {"new": {}}}, r"no rate .* for rows \['new'\]"


def of_choices():
    """Return mistakes in what a study chooses."""
    yield {"halving": 1}, r"choose\.halving is unknown"
    yield {"seeds": [1]}, r"choose\.learning-rate is missing"
    yield CHOOSE | {"seeds": []}, "expected seeds for that in choose"
    yield CHOOSE | {"seeds": [2, 100]}, r"seeds and choose.seeds both have \[2\]"
    yield CHOOSE | {"learning-rate": [-1]}, "choose.learning-rate: .* learning-rate = -1"
    for number in (-1, 11):
        yield CHOOSE | {"extensions": number}, f"choose.extensions: got {number}"


MISTAKES = [
    *of_fields(),
    *(({"tables": [table]}, message) for table, message in of_tables()),
    *(({"choose": CHOOSE} | changes, message) for changes, message in of_tables_that_choose()),
    *(({"tables": [T | a, U | b], "choose": CHOOSE}, words) for a, b, words in of_references()),
    *(({"choose": choose}, message) for choose, message in of_choices()),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_in_a_study_is_found_before_anything_is_run(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        study_of(tmp_path, **{"tables": [T]} | changes)


def test_a_reference_row_need_not_have_as_many_parameters_as_the_others(tmp_path):
    table = EQUAL | {"references": ["full"], "settings": {"lora-rank": 7}}
    assert study_of(tmp_path, tables=[table]).tables[0].rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: vision", "got a preset, expected a study; simulate preset="),
        ("[]", "is no mapping"),
        ("a: [", "expected YAML; correct the file"),
    ],
)
def test_a_preset_and_a_file_without_a_mapping_are_no_study(text, message, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_study(path)


@pytest.mark.parametrize(
    ("here", "message"),
    [({"learning-rate": 0.1}, "got learning-rate=0.1, expected data or"), ({"device": 3}, "= 3")],
)
def test_keys_of_the_study_file_are_refused_on_the_command_line(here, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_study(written(tmp_path, tables=[T]), here)
