"""What a table says of its rows: intervals, paired differences, who is ahead, what is bold."""

import csv

import numpy as np
import pytest
import yaml
from scipy import stats

from ravan_flwr.studies.lines import lines_of, sentence
from ravan_flwr.studies.numbers import rows_as_csv
from ravan_flwr.studies.reading import read_study
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.tables import markdown
from tests.studies import ends, fill

METHODS = ("ravan", "fedit", "ffa-lora", "hetlora", "flexlora")


def study_of(tmp_path, seeds=5, rows=METHODS, **table):
    rows = {name: {"method": name} for name in rows}
    content = {
        "title": "A study", "num-clients": 3, "seeds": list(range(seeds)),
        "settings": {"num-rounds": 2}, "tables": [{"title": "T", "rows": rows} | table],
    }  # fmt: skip
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return read_study(path)


def filled(tmp_path, values, metric="accuracy", **table):
    """A study with these values of each method, by seed."""
    study = study_of(tmp_path, len(next(iter(values.values()))), tuple(values), **table)
    results = Results(tmp_path)
    fill(study, results, lambda s: values[s["method"]][s["seed"]], metric)
    return study, results


@pytest.fixture
def random_values():
    """Luck of the seed is far larger than what sets the methods apart."""
    random = np.random.default_rng(3)
    luck = random.normal(0.7, 0.05, 5)
    means = dict(zip(METHODS, (0.0, 0.02, -0.02, 0.001, 0.03), strict=True))
    return {
        name: list(map(float, luck + mean + random.normal(0, 0.004, 5)))
        for name, mean in means.items()
    }


def test_intervals_and_differences_are_scipys(tmp_path, random_values):
    study, results = filled(tmp_path, random_values)
    table = study.tables[0]
    best = max(random_values, key=lambda name: np.mean(random_values[name]))
    for line in lines_of(table, results):
        mine = random_values[line.row]
        theirs = stats.ttest_1samp(mine, 0.0).confidence_interval(0.95)
        assert ends(line.interval) == pytest.approx((theirs.low, theirs.high))
        to_best = stats.ttest_rel(mine, random_values[best])
        assert line.best == (line.row == best or to_best.pvalue > 0.05)
        if line.row == "ravan":
            assert line.apart is None
            continue
        to_ravan = stats.ttest_rel(mine, random_values["ravan"])
        low, high = to_ravan.confidence_interval(0.95)
        assert ends(line.apart) == pytest.approx((low, high))
        assert line.standing == ("ahead" if low > 0 else "behind" if high < 0 else "alike")


def test_ahead_and_behind_are_words_for_intervals_without_zero(tmp_path, random_values):
    study, results = filled(tmp_path, random_values)
    assert sentence(study.tables[0], lines_of(study.tables[0], results)) == (
        "Ahead of ravan: fedit, flexlora. Behind ravan: ffa-lora. "
        "Not to be told apart from ravan: hetlora."
    )
    text = markdown(study, results)
    assert "|  | accuracy, % | to ravan | learning rate |" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| flexlora |")]
    mean, apart = line.split("|")[2:4]
    assert mean.strip().startswith("**")
    assert apart.strip().startswith("+")


def test_of_a_loss_less_is_ahead(tmp_path):
    values = {"ravan": [1.0, 1.1, 1.2], "fedit": [2.0, 2.1, 2.21], "full": [0.5, 0.6, 0.71]}
    study, results = filled(tmp_path, values, "perplexity")
    table = study.tables[0]
    assert sentence(table, lines_of(table, results)) == "Ahead of ravan: full. Behind ravan: fedit."
    assert [line.row for line in lines_of(table, results) if line.best] == ["full"]


@pytest.mark.parametrize(("seeds", "told"), [(1, "With one seed"), (2, "With 2 seeds")])
def test_with_a_seed_or_two_nobody_is_said_to_be_ahead(tmp_path, seeds, told):
    study, results = filled(tmp_path, {"ravan": [0.9, 0.8][:seeds], "fedit": [0.5, 0.4][:seeds]})
    text = markdown(study, results).partition("How to read")[0]
    assert f"{told} there is no interval: no row is said to be ahead of another." in text
    assert "±" not in text
    assert "Ahead" not in text
    assert "| by seed |" in text


def test_a_reference_is_compared_and_does_not_compete(tmp_path, random_values):
    study, results = filled(tmp_path, random_values, references=["flexlora"])
    lines = {line.row: line for line in lines_of(study.tables[0], results)}
    assert not lines["flexlora"].best
    assert lines["flexlora"].standing == "ahead"
    assert lines["fedit"].best


def test_differences_are_to_the_row_that_the_table_names(tmp_path, random_values):
    study, results = filled(tmp_path, random_values, against="fedit")
    assert "| to fedit |" in markdown(study, results)
    assert study_of(tmp_path, rows=("fedit", "full")).tables[0].against == "fedit"
    assert study_of(tmp_path, rows=("fedit", "full"), references=["fedit"]).tables[0].against == (
        "full"
    )
    with pytest.raises(ValueError, match=r"against \['x'\] are no rows, expected some of"):
        study_of(tmp_path, against="x")


def test_seeds_that_lack_are_told_and_pairs_are_of_those_that_both_have(tmp_path, random_values):
    study = study_of(tmp_path)
    results = Results(tmp_path)

    def value_of(settings):
        if settings["method"] == "fedit" and settings["seed"] == 4:
            return None
        return random_values[settings["method"]][settings["seed"]]

    fill(study, results, value_of)
    (line,) = [line for line in lines_of(study.tables[0], results) if line.row == "fedit"]
    theirs = stats.ttest_rel(random_values["fedit"][:4], random_values["ravan"][:4])
    assert ends(line.apart)[1] == pytest.approx(theirs.confidence_interval(0.95).high)
    assert " (4 of 5 seeds) |" in markdown(study, results)


def test_seconds_and_bytes_stand_beside_every_accuracy(tmp_path, random_values):
    study, results = filled(tmp_path, random_values)
    for row in csv.DictReader(rows_as_csv(study, results).splitlines()):
        assert (row["bytes-up"], row["bytes-down"]) == ("1000000", "2000000")
        assert row["client-seconds"] == "8.0"
        assert row["seeds"] == "0 1 2 3 4"
        finals = list(map(float, row["finals"].split()))
        assert finals == random_values[row["row"]]
        assert float(row["mean"]) == pytest.approx(np.mean(finals))
        assert float(row["spread"]) == pytest.approx(np.std(finals, ddof=1))
    assert markdown(study, results).count("| 1.00 MB | 2.00 MB | 8 |") == len(METHODS)
