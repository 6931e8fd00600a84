"""A learning rate is chosen by the mean over seeds, with the grid extended at its edges."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.lab.choosing import RateChoice, Score, candidates, table_runs
from ravan_flwr.lab.lines import compare_rows
from ravan_flwr.lab.results import Results
from ravan_flwr.lab.spec import Grid, read_study
from ravan_flwr.lab.tables import markdown, rates_as_csv
from tests.studies import chosen, fill, result
from tests.unit.lab import written

GRID = [1e-3, 3e-3, 1e-2]
ROWS = {"ravan": {}, "fedit": {"method": "fedit"}}
T = {"title": "T", "rows": ROWS}
IID = {"title": "IID", "rows": ROWS, "settings": {"partition": "iid"}, "rates-of": "T"}
EACH = {"title": "T", "rows": {"ravan": {}}, "leave-one-seed-out": True}


def study_of(tmp_path, *tables, number=3, **choose):
    """Return a study with this number of seeds and these choices of a learning rate."""
    choose = {"learning-rate": GRID, "seeds": [100, 101, 102]} | choose
    seeds = list(range(number))
    return written.study_of(tmp_path, seeds=seeds, choose=choose, tables=[*tables] or [T])


def peak_at(best):
    """Return a metric that is larger the nearer the rate is to the best, plus noise by seed."""

    def value_of(settings):
        distance = abs(
            math.log10(settings["learning-rate"] / best.get(settings.get("method"), 3e-3))
        )
        return round(0.9 - 0.1 * distance + 0.001 * (settings["seed"] % 10), 6)

    return value_of


def settings_of(runs):
    return [dict(run.settings) for run in runs]


def test_the_grid_is_extended_while_the_best_rate_is_at_its_edge(tmp_path):
    study, results = study_of(tmp_path), Results(tmp_path)
    first = settings_of(candidates(study, results))
    assert len(first) == 2 * 3 * 3  # the same number of runs for every row
    for settings in first:  # never on the test split, nor with seeds of the tables
        assert (settings["evaluate-on"], settings["validation-share"]) == ("clients", 0.2)
        assert settings["seed"] in (100, 101, 102)
    fill(study, results, peak_at({"fedit": 1e-1}))
    ravan, fedit = (chosen(row, results) for row in study.rows)
    assert (ravan.tried, ravan.rate, ravan.runs) == (GRID, 3e-3, 9)
    assert (fedit.tried, fedit.rate, fedit.runs) == ([*GRID, 3e-2, 0.1, 0.3], 0.1, 18)
    assert not fedit.at_the_edge
    runs = settings_of(table_runs(study, results))
    assert {settings["learning-rate"] for settings in runs} == {3e-3, 0.1}
    assert not any("evaluate-on" in settings for settings in runs)
    text = markdown(study, results)
    assert "(edge)" not in text
    assert "| 18 |" in text


def test_keys_of_several_values_are_lists_or_texts_with_commas(tmp_path):
    rows = {
        "list": {"targets": ["query", "value"], "limits": ["max-share=0.5", "min-replies=2"]},
        "text": {"targets": "query,value", "limits": "max-share=0.5,min-replies=2"},
    }
    listed, text = study_of(tmp_path, {"title": "T", "rows": rows}).rows
    assert listed == text
    run = listed.runs(1e-3)[0]
    assert "targets=query,value" in run.command(tmp_path, "process")
    assert run.resolved["max-share"] == 0.5


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
    table = EACH | {"metric": "time", "settings": {"devices": "edge-gpus"}}
    study, results = study_of(tmp_path, table, extensions=0, seeds=[]), Results(tmp_path)
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


# The first seed alone would take 1e-2. By the mean 3e-3 is best, 1e-2 not significantly worse.
IN_NOISE = {1e-3: [0.50, 0.51, 0.52], 3e-3: [0.80, 0.82, 0.84], 1e-2: [0.95, 0.70, 0.75]}


def test_the_mean_over_seeds_decides_and_rates_within_noise_are_marked(tmp_path):
    study, results = study_of(tmp_path), Results(tmp_path)
    fill(study, results, lambda s: IN_NOISE[s["learning-rate"]][s["seed"] % 100])
    choice = chosen(study.rows[0], results)
    assert choice.rate == 3e-3
    assert choice.within_noise == [3e-3, 1e-2]
    text = markdown(study, results)
    assert "| 0.003 | 0.01 | 9 |" in text
    assert "| 51.0 ± 2.5 | **82.0 ± 5.0** | *80.0 ± 32.9* | 9 |" in text
    assert "*As good*: rates not significantly different from the chosen one" in text
    assert "No learning rate was chosen by results" not in text
    lines = rates_as_csv(study, results).splitlines()
    assert len(lines) == 1 + 2 * 9
    assert "T,ravan,learning-rate,0.01,101,accuracy,0.7" in lines


def test_pending_runs_are_marked_and_with_one_seed_no_rate_is_as_good_as_another(tmp_path):
    study, results = study_of(tmp_path), Results(tmp_path)
    fill(study, results, peak_at({}))
    wider = study_of(tmp_path, **{"learning-rate": [*GRID, 3e-2]})
    assert chosen(wider.rows[0], results).pending
    assert "| 0.003 (open) |" in markdown(wider, results)
    assert "| 0.003 | unknown | 3 |" in markdown(study_of(tmp_path, seeds=[100]), results)


def test_a_table_uses_rates_chosen_for_an_earlier_table(tmp_path):
    study, results = study_of(tmp_path, T, IID), Results(tmp_path)
    first = settings_of(candidates(study, results))
    assert len(first) == 2 * 3 * 3  # those of the first table alone
    assert not any("partition" in settings for settings in first)
    # Under the second table's partition another rate would be better, but it is not searched.
    first, second = peak_at({"fedit": 1e-2}), peak_at({"fedit": 1e-3})
    fill(study, results, lambda s: (second if s.get("partition") else first)(s))
    for table in study.tables:
        assert chosen(table.rows["fedit"], results).rate == 1e-2
        assert chosen(table.rows["ravan"], results).rate == 3e-3
    runs = settings_of(table_runs(study, results))
    assert [(s.get("partition"), s.get("method"), s["learning-rate"]) for s in runs[::3]] == [
        (None, None, 3e-3), (None, "fedit", 1e-2), ("iid", None, 3e-3), ("iid", "fedit", 1e-2),
    ]  # fmt: skip
    text = markdown(study, results)
    assert text.count("The learning rates were chosen for *T*") == 1
    assert text.count("by what they reached on validation splits") == 1
    lines = rates_as_csv(study, results).splitlines()
    assert {line.split(",")[0] for line in lines} == {"table", "T"}


def test_a_table_may_choose_another_key_for_a_later_table(tmp_path):
    private = {"privacy": "client", "noise-cohort": 50, "learning-rate": 1e-2, "epsilon": 2.0}
    rows = ROWS | {"set": {"heads": 2, "clip-norm": 0.5}}
    first = {"title": "T", "rows": rows, "settings": private, "choose": {"clip-norm": [0.3, 1, 3]}}
    second = {"title": "8", "rows": rows, "settings": private | {"epsilon": 8.0}, "rates-of": "T"}
    study, results = study_of(tmp_path, first, second), Results(tmp_path)
    searched = settings_of(candidates(study, results))
    assert len(searched) == 2 * 3 * 3
    for settings in searched:
        assert (settings["learning-rate"], settings["epsilon"]) == (1e-2, 2.0)
        assert settings["evaluate-on"] == "clients"

    def value_of(settings):
        best = 10 if settings.get("method") else 1
        return 0.9 - 0.1 * abs(math.log10(settings["clip-norm"] / best)) + settings["seed"] / 1e6

    fill(study, results, value_of)
    for table in study.tables:
        assert chosen(table.rows["ravan"], results).rate == 1
        assert chosen(table.rows["fedit"], results).tried == [0.3, 1, 3, 10, 30]
    runs = settings_of(table_runs(study, results))
    assert [(s["epsilon"], s["clip-norm"]) for s in runs[::3]] == [
        (2, 1), (2, 10), (2, 0.5), (8, 1), (8, 10), (8, 0.5),
    ]  # fmt: skip
    text = markdown(study, results)
    assert "| learning rate | clip norm | as good |" in text
    of_set = [line for line in text.splitlines() if line.startswith("| set |")]
    assert [" | 0.01 | - | - | - |" in line for line in of_set] == [False, True, True]  # overview
    assert "Clip norms, by what they reached on validation splits:" in text
    assert "in a table of rates they are in italics" in text
    assert "The clip norms were chosen for *T*" in text
    assert "T,fedit,clip-norm,0.3,100,accuracy," in rates_as_csv(study, results)


def test_a_table_and_a_row_may_choose_nothing(tmp_path):
    nothing = {"title": "N", "rows": {"ravan": {}}, "choose": {"learning-rate": []}}
    of_itself = IID | {"rows": {"other": {"method": "fedit", "learning-rate": 0.5}}}
    _, first, second = study_of(tmp_path, T, nothing, of_itself).tables
    assert first.rows["ravan"].grid is None
    assert second.rows["other"].rate_source is None


def test_rates_within_noise_are_run_after_the_best_of_all_rows(tmp_path):
    """0.003 and 0.01 do not differ significantly for ravan; for fedit its best is alone."""
    of_fedit = {1e-3: 0.1, 3e-3: 0.5, 1e-2: 0.3}
    table = {"title": "T", "rows": ROWS | {"full": {"learning-rate": 0.5}}, "run-as-good": True}
    study, results = study_of(tmp_path, table), Results(tmp_path)

    def value_of(settings):
        rate, seed = settings["learning-rate"], settings["seed"]
        if rate == 0.5:
            return 0.7
        return of_fedit[rate] + seed / 1e4 if "method" in settings else IN_NOISE[rate][seed % 100]

    fill(study, results, value_of)
    runs = settings_of(table_runs(study, results))
    assert [(run.get("method", "ravan"), run["learning-rate"]) for run in runs] == [
        *[("ravan", 3e-3)] * 3, *[("fedit", 3e-3)] * 3, *[("ravan", 0.5)] * 3,
        *[("ravan", 1e-2)] * 3,
    ]  # fmt: skip
    without = study_of(tmp_path, table | {"run-as-good": False})
    assert len(table_runs(without, results)) == 9
    taking = study_of(tmp_path, T, IID | {"run-as-good": True, "rows": {"ravan": {}}})
    of_second = settings_of(table_runs(taking, results)[6:])
    assert [settings["learning-rate"] for settings in of_second] == [3e-3] * 3 + [1e-2] * 3


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
    study, results = study_of(tmp_path, EACH, number=4, seeds=[], extensions=0), Results(tmp_path)
    measured = candidates(study, results)
    assert not any("evaluate-on" in settings for settings in settings_of(measured))
    fill(study, results, lambda s: values[s["learning-rate"]][s["seed"]])
    taken = out_of(values)
    assert taken == {0: 1e-2, 1: 1e-2, 2: 3e-3, 3: 1e-2}
    (line,) = compare_rows(study.tables[0], results)
    assert line.values == {seed: values[rate][seed] for seed, rate in taken.items()}
    assert chosen(study.rows[0], results).by_seed == taken
    text = markdown(study, results)
    assert "| 1×0.003 3×0.01 (edge) |" in text
    assert "Each seed has the learning rate that is best by the other seeds" in text
    runs = table_runs(study, results)
    assert {run["seed"]: run["learning-rate"] for run in settings_of(runs)} == taken
    assert {run.name for run in runs} <= {run.name for run in measured}  # no further run is made


@given(st.data())
def test_leave_one_seed_out_equals_a_plain_loop(data):
    """A seed's own value has no influence on its rate: any other value gives the same rate."""
    by_seed = data.draw(st.integers(3, 5))
    value = st.integers(0, 10**6).map(lambda number: number / 2**20)  # sums are exact
    row = st.lists(value, min_size=by_seed, max_size=by_seed)
    values = {rate: data.draw(row) for rate in GRID}
    scores = {rate: Score("accuracy", row, []) for rate, row in values.items()}
    grid = Grid("learning-rate", tuple(GRID), tuple(range(by_seed)), 0, None)
    choice = RateChoice(grid, GRID, scores, False)
    assert choice.by_seed == out_of(values)
    seed = data.draw(st.integers(0, by_seed - 1))
    for row in values.values():
        row[seed] = data.draw(value)
    assert choice.by_seed is not None
    assert choice.by_seed[seed] == out_of(values)[seed]


def test_leave_one_seed_out_extends_the_grid_for_a_seed_at_its_edge(tmp_path):
    study, results = study_of(tmp_path, EACH, seeds=[]), Results(tmp_path)
    fill(study, results, peak_at({None: 3e-2}))
    choice = chosen(study.rows[0], results)
    assert choice.tried == [*GRID, 3e-2, 0.1]
    assert choice.by_seed == dict.fromkeys(range(3), 3e-2)
    assert choice.runs == 15
    assert "| 3×0.03 |" in markdown(study, results)


def test_rates_may_be_written_without_a_point(tmp_path):
    """YAML 1.1 takes 3e-3 for a text."""
    path = tmp_path / "study.yaml"
    path.write_text(
        "choose: {learning-rate: [1e-3, 3E-03, 1e+0], seeds: [7]}\ntitle: A study\n"
        "num-clients: 3\nseeds: [0]\ntables: [{title: 1e-3x, rows: {ravan: {}}}]\n"
    )
    (table,) = read_study(path).tables
    assert table.grid is not None
    assert (table.title, table.grid.values) == ("1e-3x", (1e-3, 3e-3, 1.0))
