"""A learning rate is chosen by the mean over seeds, with the grid extended at its edges."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.studies.choosing import RateChoice, Score, candidates, table_runs
from ravan_flwr.studies.lines import lines_of
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.spec import Grid, read_study
from ravan_flwr.studies.tables import markdown, rates_as_csv
from tests.studies import chosen, fill, result

GRID = [1e-3, 3e-3, 1e-2]


def study_of(tmp_path, rows=None, tables=None, **choose):
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1, 2], "settings": {"num-rounds": 2},
        "choose": {"learning-rate": GRID, "seeds": [100, 101, 102]} | choose,
        "tables": tables or [
            {"title": "T", "rows": rows or {"ravan": {}, "fedit": {"method": "fedit"}}}
        ],
    }  # fmt: skip
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return read_study(path)


def peak_at(best):
    """Return a metric that is larger the nearer the rate is to the best, plus noise by seed."""

    def value_of(settings):
        distance = abs(
            math.log10(settings["learning-rate"] / best.get(settings.get("method"), 3e-3))
        )
        return round(0.9 - 0.1 * distance + 0.001 * (settings["seed"] % 10), 6)

    return value_of


def test_the_grid_is_extended_while_the_best_rate_is_at_its_edge(tmp_path):
    study, results = study_of(tmp_path), Results(tmp_path)
    assert len(candidates(study, results)) == 2 * 3 * 3  # the same number of runs for every row
    fill(study, results, peak_at({"fedit": 1e-1}))
    ravan, fedit = (chosen(row, results) for row in study.rows)
    assert (ravan.tried, ravan.rate, ravan.runs) == (GRID, 3e-3, 9)
    assert (fedit.tried, fedit.rate) == ([*GRID, 3e-2, 0.1, 0.3], 0.1)
    assert not fedit.at_the_edge
    assert fedit.runs == 18
    assert {dict(run.settings)["learning-rate"] for run in table_runs(study, results)} == {
        3e-3,
        0.1,
    }
    text = markdown(study, results)
    assert "(edge)" not in text
    assert "| 18 |" in text


def test_keys_of_several_values_are_lists_or_texts_with_commas(tmp_path):
    rows = {
        "list": {"targets": ["query", "value"], "limits": ["max-share=0.5", "min-replies=2"]},
        "text": {"targets": "query,value", "limits": "max-share=0.5,min-replies=2"},
    }
    listed, text = study_of(tmp_path, rows).rows
    assert listed == text
    run = listed.runs(1e-3)[0]
    assert "targets=query,value" in run.command(tmp_path, "process")
    assert run.resolved["max-share"] == 0.5
    with pytest.raises(ValueError, match=r"row 'a': method = \['ravan'\]: .* got a list"):
        study_of(tmp_path, {"a": {"method": ["ravan"]}})


def test_the_number_of_extensions_is_limited_and_the_edge_marked(tmp_path):
    study, results = study_of(tmp_path, extensions=1), Results(tmp_path)
    fill(study, results, peak_at({"fedit": 1e-5}))
    fedit = chosen(study.rows[1], results)
    assert (fedit.tried, fedit.rate, fedit.at_the_edge) == ([3e-4, *GRID], 3e-4, True)
    assert "| 0.0003 (edge) |" in markdown(study, results)
    study = study_of(tmp_path, extensions=0)
    assert chosen(study.rows[1], results).tried == GRID


def test_a_failed_rate_beyond_the_edge_ends_the_extension(tmp_path):
    study, results = study_of(tmp_path), Results(tmp_path)
    near = peak_at({None: 10.0, "fedit": 10.0})
    fill(study, results, lambda s: near(s) if s["learning-rate"] < 0.05 else None)
    choice = chosen(study.rows[0], results)
    assert (choice.tried, choice.rate) == ([*GRID, 3e-2, 0.1], 3e-2)
    assert 0.1 not in choice.scores
    assert not choice.at_the_edge  # a larger rate was tried
    assert "| failed |" in markdown(study, results)


def test_a_rate_with_a_run_short_of_its_target_is_not_chosen(tmp_path):
    table = {
        "title": "T", "metric": "time", "leave-one-seed-out": True,
        "settings": {"devices": "edge-gpus"}, "rows": {"ravan": {}},
    }  # fmt: skip
    study = study_of(tmp_path, extensions=0, seeds=[], tables=[table])
    results = Results(tmp_path)
    for run in candidates(study, results):
        settings = dict(run.settings)
        time = {1e-3: 1.0, 3e-3: 5.0, 1e-2: 6.0}[float(settings["learning-rate"])]
        missed = settings["learning-rate"] == 1e-3 and settings["seed"] == 1
        one = result(0.5)
        more = {"final": one.final | ({} if missed else {"time": time})}
        results.add(run, one.model_copy(update=more | {"curve": one.curve | {"time": [1.0, 2.0]}}))
    assert chosen(study.rows[0], results).scores.keys() == {3e-3, 1e-2}
    assert chosen(study.rows[0], results).rate == 3e-3


def test_of_equal_rates_the_smallest_is_chosen_without_an_extension(tmp_path):
    study, results = study_of(tmp_path), Results(tmp_path)
    fill(study, results, lambda _: 0.5)
    choice = chosen(study.rows[0], results)
    assert (choice.tried, choice.rate, choice.within_noise) == (GRID, 1e-3, GRID)


def test_the_mean_over_seeds_decides_and_rates_within_noise_are_marked(tmp_path):
    # The first seed alone would take 1e-2. By the mean 3e-3 is best, 1e-2 not significantly worse.
    values = {1e-3: [0.50, 0.51, 0.52], 3e-3: [0.80, 0.82, 0.84], 1e-2: [0.95, 0.70, 0.75]}
    study, results = study_of(tmp_path), Results(tmp_path)
    fill(study, results, lambda s: values[s["learning-rate"]][s["seed"] % 100])
    choice = chosen(study.rows[0], results)
    assert choice.rate == 3e-3
    assert choice.within_noise == [3e-3, 1e-2]
    assert "| 0.003 | 0.01 | 9 |" in markdown(study, results)
    assert "| 51.0 ± 2.5 | **82.0 ± 5.0** | *80.0 ± 32.9* | 9 |" in markdown(study, results)
    lines = rates_as_csv(study, results).splitlines()
    assert len(lines) == 1 + 2 * 9
    assert "T,ravan,learning-rate,0.01,101,accuracy,0.7" in lines


def test_pending_runs_are_marked(tmp_path):
    study, results = study_of(tmp_path), Results(tmp_path)
    fill(study, results, peak_at({}))
    wider = study_of(tmp_path, **{"learning-rate": [*GRID, 3e-2]})
    assert chosen(wider.rows[0], results).pending
    assert "| 0.003 (open) |" in markdown(wider, results)


def test_with_one_seed_no_rate_is_as_good_as_another(tmp_path):
    study, results = study_of(tmp_path, seeds=[100]), Results(tmp_path / "out")
    fill(study, results, peak_at({}))
    assert "| 0.003 | unknown | 3 |" in markdown(study, results)


def test_rates_are_not_chosen_on_the_test_split(tmp_path):
    study, results = study_of(tmp_path), Results(tmp_path)
    for run in candidates(study, results):
        settings = dict(run.settings)
        assert (settings["evaluate-on"], settings["validation-share"]) == ("clients", 0.2)
        assert settings["seed"] in (100, 101, 102)


def of_two_tables(tmp_path, second, first=None):
    rows = {"ravan": {}, "fedit": {"method": "fedit"}}
    tables = [
        {"title": "T", "rows": rows, **(first or {})},
        {"title": "IID", "settings": {"partition": "iid"}, "rows": rows, **second},
    ]
    return study_of(tmp_path, tables=tables)


def test_a_table_uses_rates_chosen_for_an_earlier_table(tmp_path):
    study, results = of_two_tables(tmp_path, {"rates-of": "T"}), Results(tmp_path)
    assert len(candidates(study, results)) == 2 * 3 * 3  # those of the first table alone
    assert all("partition" not in dict(run.settings) for run in candidates(study, results))
    # Under the second table's partition another rate would be better, but it is not searched.
    first, second = peak_at({"fedit": 1e-2}), peak_at({"fedit": 1e-3})
    fill(study, results, lambda s: (second if s.get("partition") else first)(s))
    for table in study.tables:
        assert chosen(table.rows["fedit"], results).rate == 1e-2
        assert chosen(table.rows["ravan"], results).rate == 3e-3
    runs = [dict(run.settings) for run in table_runs(study, results)]
    assert [(s.get("partition"), s.get("method"), s["learning-rate"]) for s in runs[::3]] == [
        (None, None, 3e-3), (None, "fedit", 1e-2), ("iid", None, 3e-3), ("iid", "fedit", 1e-2),
    ]  # fmt: skip
    text = markdown(study, results)
    assert text.count("The learning rates were chosen for *T*, not for this table.") == 1
    assert text.count("by what they reached on validation splits") == 1
    assert {line.split(",")[0] for line in rates_as_csv(study, results).splitlines()} == {
        "table", "T",
    }  # fmt: skip


def test_a_table_may_choose_another_key_for_a_later_table(tmp_path):
    private = {"privacy": "client", "noise-cohort": 50, "learning-rate": 1e-2, "epsilon": 2.0}
    rows = {"ravan": {}, "fedit": {"method": "fedit"}, "set": {"heads": 2, "clip-norm": 0.5}}
    tables = [
        {"title": "T", "rows": rows, "settings": private, "choose": {"clip-norm": [0.3, 1, 3]}},
        {"title": "8", "rows": rows, "settings": private | {"epsilon": 8.0}, "rates-of": "T"},
    ]
    study, results = study_of(tmp_path, tables=tables), Results(tmp_path)
    first = candidates(study, results)
    assert len(first) == 2 * 3 * 3
    for run in first:
        settings = dict(run.settings)
        assert settings["learning-rate"] == 1e-2
        assert settings["evaluate-on"] == "clients"
        assert settings["epsilon"] == 2.0

    def value_of(settings):
        best = 10 if settings.get("method") else 1
        return 0.9 - 0.1 * abs(math.log10(settings["clip-norm"] / best)) + settings["seed"] / 1e6

    fill(study, results, value_of)
    for table in study.tables:
        assert chosen(table.rows["ravan"], results).rate == 1
        assert chosen(table.rows["fedit"], results).tried == [0.3, 1, 3, 10, 30]
    runs = [dict(run.settings) for run in table_runs(study, results)]
    assert [(s["epsilon"], s["clip-norm"]) for s in runs[::3]] == [
        (2, 1), (2, 10), (2, 0.5), (8, 1), (8, 10), (8, 0.5),
    ]  # fmt: skip
    text = markdown(study, results)
    assert "| learning rate | clip norm | as good |" in text
    of_set = [line for line in text.splitlines() if line.startswith("| set |")]
    assert [" | 0.01 | - | - | - |" in line for line in of_set] == [False, True, True]  # overview
    assert "Clip norms, by what they reached on validation splits:" in text
    assert "The clip norms were chosen for *T*, not for this table." in text
    assert "T,fedit,clip-norm,0.3,100,accuracy," in rates_as_csv(study, results)


@pytest.mark.parametrize(
    "choose",
    [{}, {"clip-norm": ["auto", 1.0]}, {"clip-norm": [True]}, {"validation-share": [0.1]},
     {"clip-norm": []}, {"clip-norm": 1.0}, {"heads": [1, 2]}, {"nothing": [1.0]},
     {"clip-norm": [1.0], "epsilon": [2.0]}],
)  # fmt: skip
def test_unsupported_choices_of_a_table_are_refused(tmp_path, choose):
    tables = [{"title": "T", "rows": {"ravan": {}}, "choose": choose}]
    with pytest.raises(
        ValueError, match=r"tables\.0\.choose.*(expected one of lear|valid (num|li))"
    ):
        study_of(tmp_path, tables=tables)


@pytest.mark.parametrize(
    ("values", "message"), [([-1.0], "clip-norm = -1"), ([1.0, 1.0], "expected each value once")]
)
def test_an_invalid_value_is_refused(tmp_path, values, message):
    tables = [{"title": "T", "rows": {"ravan": {}}, "choose": {"clip-norm": values}}]
    with pytest.raises(ValueError, match=rf"study .*tables\.0\.choose: .*{message}"):
        study_of(tmp_path, tables=tables)


def test_a_table_may_choose_nothing(tmp_path):
    tables = [{"title": "T", "rows": {"ravan": {}}, "choose": {"learning-rate": []}}]
    assert study_of(tmp_path, tables=tables).tables[0].rows["ravan"].grid is None


def test_a_row_with_its_own_rate_uses_no_chosen_rate(tmp_path):
    rows = {"other": {"method": "fedit", "learning-rate": 0.5}}
    study = of_two_tables(tmp_path, {"rates-of": "T", "rows": rows})
    assert study.tables[1].rows["other"].rate_source is None


@pytest.mark.parametrize(
    ("second", "first", "message"),
    [
        ({"rates-of": "no"}, {}, "rates-of = 'no', expected an earlier table"),
        ({"rates-of": "IID"}, {}, "rates-of = 'IID', expected an earlier table"),
        ({}, {"rates-of": "IID"}, r"rates-of = 'IID', expected an earlier .*: one of \[\]"),
        ({"change-from": "no"}, {}, "change-from = 'no', expected an earlier table"),
        ({"change-from": "T", "metric": "loss"}, {}, "expected one metric in both"),
        ({"change-from": "T", "rows": {"new": {}}}, {}, r"expected some of \['new'\]"),
        ({"rates-of": "T", "choose": {"clip-norm": [1.0]}}, {}, "got choose and rates-of"),
        (
            {"title": "overview"},
            {},
            "table 'overview': its title is another's, or 'overview', .* rename it",
        ),
        ({"rates-of": "T", "rows": {"new": {}}}, {}, r"no rate is chosen there for rows \['new'\]"),
    ],
)
def test_references_to_missing_tables_are_refused(tmp_path, second, first, message):
    with pytest.raises(ValueError, match=message):
        of_two_tables(tmp_path, second, first)


def test_rates_within_noise_are_run_after_the_best_of_all_rows(tmp_path):
    """0.003 and 0.01 do not differ significantly for ravan; for fedit its best is alone."""
    values = {1e-3: [0.50, 0.51, 0.52], 3e-3: [0.80, 0.82, 0.84], 1e-2: [0.95, 0.70, 0.75]}
    fedit_values = {1e-3: 0.1, 3e-3: 0.5, 1e-2: 0.3}
    rows = {"ravan": {}, "fedit": {"method": "fedit"}, "full": {"learning-rate": 0.5}}
    table = {"title": "T", "rows": rows, "run-as-good": True}
    study, results = study_of(tmp_path, tables=[table]), Results(tmp_path)

    def value_of(settings):
        rate, seed = settings["learning-rate"], settings["seed"]
        return (
            values[rate][seed % 100]
            if "method" not in settings
            else fedit_values[rate] + seed / 1e4
        )

    fill(study, results, lambda s: 0.7 if s["learning-rate"] == 0.5 else value_of(s))
    runs = [dict(run.settings) for run in table_runs(study, results)]
    by_method = [(run.get("method", "ravan"), run["learning-rate"]) for run in runs]
    assert by_method == [
        *[("ravan", 3e-3)] * 3, *[("fedit", 3e-3)] * 3, *[("ravan", 0.5)] * 3,
        *[("ravan", 1e-2)] * 3,
    ]  # fmt: skip
    without = study_of(tmp_path, tables=[{**table, "run-as-good": False}])
    assert len(table_runs(without, results)) == 9
    taking = of_two_tables(tmp_path, {"rates-of": "T", "run-as-good": True, "rows": {"ravan": {}}})
    rates = [dict(run.settings)["learning-rate"] for run in table_runs(taking, results)[6:]]
    assert rates == [3e-3] * 3 + [1e-2] * 3


@pytest.mark.parametrize(
    ("choose", "rows"),
    [({"seeds": [100, 101]}, {"ravan": {}}), ({}, {"ravan": {"learning-rate": 0.5}})],
)
def test_rates_within_noise_need_three_seeds_and_rates_to_choose(tmp_path, choose, rows):
    table = {"title": "T", "rows": rows, "run-as-good": True}
    with pytest.raises(ValueError, match="table 'T': run-as-good, and .* expected rates to choose"):
        study_of(tmp_path, tables=[table], **choose)


@pytest.mark.parametrize("number", [-1, 11])
def test_an_invalid_number_of_extensions_is_refused(tmp_path, number):
    with pytest.raises(
        ValueError, match=f"choose.extensions: got {number}: Input should be .* than or equal to"
    ):
        study_of(tmp_path, extensions=number)


def out_of(values):
    """Compute by hand: for each seed the rate with the largest sum over the other seeds."""
    taken = {}
    for seed in range(len(values[1e-3])):
        totals = {
            rate: sum(value for other, value in enumerate(row) if other != seed)
            for rate, row in values.items()
        }
        taken[seed] = max(totals, key=lambda rate: totals[rate])
    return taken


def test_each_seed_uses_the_rate_that_is_best_by_the_other_seeds(tmp_path):
    """By its own value seed 2 would take 0.01, which is best over all seeds because of seed 2."""
    values = {
        1e-3: [0.6, 0.5, 0.4, 0.5], 3e-3: [0.70, 0.72, 0.71, 0.70], 1e-2: [0.6, 0.7, 0.98, 0.7],
    }  # fmt: skip
    table = {"title": "T", "rows": {"ravan": {}}, "leave-one-seed-out": True}
    study_of(tmp_path, tables=[table], seeds=[], extensions=0)
    study = read_study(with_seeds(tmp_path / "study.yaml", 4))
    results = Results(tmp_path)
    assert {dict(run.settings).get("evaluate-on") for run in candidates(study, results)} == {None}
    fill(study, results, lambda s: values[s["learning-rate"]][s["seed"]])
    taken = out_of(values)
    assert taken == {0: 1e-2, 1: 1e-2, 2: 3e-3, 3: 1e-2}
    (line,) = lines_of(study.tables[0], results)
    assert line.values == {seed: values[rate][seed] for seed, rate in taken.items()}
    assert chosen(study.rows[0], results).by_seed == taken
    text = markdown(study, results)
    assert "| 1×0.003 3×0.01 (edge) |" in text
    assert "Each seed has the learning rate that is best by the other seeds of this table." in text
    runs = [dict(run.settings) for run in table_runs(study, results)]
    assert {run["seed"]: run["learning-rate"] for run in runs} == taken
    measured = {run.name for run in candidates(study, results)}
    assert {run.name for run in table_runs(study, results)} <= measured  # no further run is made


T = {"title": "T", "rows": {"ravan": {}, "fedit": {"method": "fedit"}}}


@pytest.mark.parametrize(
    ("table", "choose", "message"),
    [
        ({"contrasts": ["ravan", "fedit"]}, {}, "contrasts has 'ravan', expected other rows"),
        ({"rows": {"ravan": {"seed": 9}}}, {}, "row 'ravan': seed = 9: every row has the study's"),
        ({"settings": {"seed": 9}}, {}, "row 'ravan': seed = 9: every row has the study's seeds"),
        ({"rows": {}}, {}, "table 'T': rows: got none, expected one at least"),
        ({"metric": "time"}, {}, r"metric = 'time': rows \['ravan', 'fedit'\] have no simulated"),
        ({}, {"seeds": [2, 100]}, r"seeds and choose.seeds both have \[2\], expected no seed in"),
    ],
)
def test_mistakes_in_a_study_are_found_before_anything_is_run(tmp_path, table, choose, message):
    with pytest.raises(ValueError, match=message):
        study_of(tmp_path, tables=[T | table], **choose)


def test_rates_may_be_written_without_a_point(tmp_path):
    """YAML 1.1 takes 3e-3 for a text."""
    study_of(tmp_path)
    path = tmp_path / "study.yaml"
    lines = ["choose: {learning-rate: [1e-3, 3E-03, 1e+0], seeds: [7]}", "title: A study"]
    lines += ["num-clients: 3", "seeds: [0]", "tables: [{title: 1e-3x, rows: {ravan: {}}}]"]
    path.write_text("\n".join(lines))
    (table,) = read_study(path).tables
    assert table.grid is not None
    assert (table.title, table.grid.values) == ("1e-3x", (1e-3, 3e-3, 1.0))


def with_seeds(path, number):
    content = yaml.safe_load(path.read_text()) | {"seeds": list(range(number))}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@given(st.data())
def test_leave_one_seed_out_equals_a_plain_loop(data):
    """A seed's own value has no influence on its rate: any other value gives the same rate."""
    rates, by_seed = [1e-3, 3e-3, 1e-2], data.draw(st.integers(3, 5))
    value = st.integers(0, 10**6).map(lambda number: number / 2**20)  # sums are exact
    row = st.lists(value, min_size=by_seed, max_size=by_seed)
    values = {rate: data.draw(row) for rate in rates}
    scores = {rate: Score("accuracy", row, []) for rate, row in values.items()}
    grid = Grid("learning-rate", tuple(rates), tuple(range(by_seed)), 0, None)
    choice = RateChoice(grid, rates, scores, False)
    assert choice.by_seed == out_of(values)
    seed = data.draw(st.integers(0, by_seed - 1))
    for row in values.values():
        row[seed] = data.draw(value)
    assert choice.by_seed is not None
    assert choice.by_seed[seed] == out_of(values)[seed]


def test_leave_one_seed_out_extends_the_grid_for_a_seed_at_its_edge(tmp_path):
    table = {"title": "T", "rows": {"ravan": {}}, "leave-one-seed-out": True}
    study = study_of(tmp_path, tables=[table], seeds=[])
    results = Results(tmp_path)
    fill(study, results, peak_at({None: 3e-2}))
    choice = chosen(study.rows[0], results)
    assert choice.tried == [*GRID, 3e-2, 0.1]
    assert choice.by_seed == dict.fromkeys(range(3), 3e-2)
    assert choice.runs == 15
    assert "| 3×0.03 |" in markdown(study, results)


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ({}, {"seeds": [0, 1]}, "leave-one-seed-out, where rates are chosen with 2 seeds"),
        ({"run-as-good": True}, {}, "leave-one-seed-out beside rates-of or run-as-good"),
        ({"rows": {"ravan": {"learning-rate": 0.1}}}, {}, "expected rates to choose from"),
    ],
)
def test_invalid_uses_of_leave_one_seed_out_are_refused(tmp_path, table, changes, message):
    table = {"title": "T", "rows": {"ravan": {}}, "leave-one-seed-out": True} | table
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1, 2], "settings": {"num-rounds": 2},
        "choose": {"learning-rate": GRID, "seeds": []}, "tables": [table],
    } | changes  # fmt: skip
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=message):
        read_study(path)
