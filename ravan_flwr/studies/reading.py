"""Read a study file and check all of it, so that no run begins of a study that has a mistake."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ravan_flwr.config.keys import KEYS, check_key
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import read_config
from ravan_flwr.config.yaml_file import read_yaml
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar
from ravan_flwr.studies.rates import EXTENSIONS, RATE
from ravan_flwr.studies.spec import OVERVIEW, Row, Study, Table

MOST_EXTENSIONS = 10
CHOSEN = (
    RATE,
    "clip-norm",
    "server-learning-rate",
    "calibration-learning-rate",
)  # that rows choose
OF_A_MACHINE = ("data", "model", "device", "processes")
TOLERANCE = 0.05  # numbers of parameters that differ by no more are called equal

_FIELDS = {"title": str, "num-clients": int, "seeds": list, "settings": dict, "tables": list}
_CHOOSE = {"learning-rate": list, "seeds": list}
_CHOOSE_OPTIONS = {"extensions": int}
_TABLE = {"title": str, "rows": dict}
_TABLE_OPTIONS = {
    "settings": dict,
    "equal-parameters": bool,
    "references": list,
    "choose": dict,
    "rates-of": str,
    "spectra": bool,
    "metric": str,
    "against": str,
    "change-from": str,
}


def read_study(path: Path, here: Mapping[str, Scalar] | None = None) -> Study:
    """Read and check a study; every run's settings must be such as `simulate` takes.

    `here` has settings of this machine for all runs, which change nothing in what they are.
    """
    _check_here(here or {})
    content = read_yaml(path)
    _check_fields(f"study {path}", content, _FIELDS, {"choose": dict, "paper": str})
    choose = content.setdefault("choose", {"learning-rate": [], "seeds": []})
    _check_fields(f"study {path}: choose", choose, _CHOOSE, _CHOOSE_OPTIONS)
    if not 0 <= choose.setdefault("extensions", EXTENSIONS) <= MOST_EXTENSIONS:
        raise ValueError(
            f"study {path}: choose: extensions = {choose['extensions']}: expected a whole number "
            f"from 0 to {MOST_EXTENSIONS}; correct it"
        )
    for seeds in (content["seeds"], choose["seeds"]):
        for seed in seeds:
            check_key("seed", seed)
        if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            raise ValueError(f"study {path}: got seeds {twice} twice; expected each once")
    if not content["seeds"] or bool(choose["seeds"]) != bool(choose["learning-rate"]):
        raise ValueError(
            f"study {path}: got seeds {content['seeds']}, and to choose from learning rates "
            f"{choose['learning-rate']} with seeds {choose['seeds']}; expected at least one seed, "
            "and for learning rates some of their own; name some"
        )
    numbers = _read_paper(path, content["paper"]) if "paper" in content else {}
    tables: list[Table] = []
    chosen: dict[str, dict[str, list[float]]] = {}  # by title: a key, and what to choose from
    for table in content["tables"]:
        _check_fields(f"study {path}: a table", table, _TABLE, _TABLE_OPTIONS)
        if table["title"] == OVERVIEW:
            raise ValueError(
                f"study {path}: a table is called {OVERVIEW!r}, which in a page stands for all of "
                "them; rename it"
            )
        if table["title"] in (known.title for known in tables):
            raise ValueError(
                f"study {path}: two tables are called {table['title']!r}, expected different "
                "titles; rename one"
            )
        paper = numbers.pop(table["title"], {})
        where = f"study {path}: table {table['title']!r}"
        if "choose" in table and "rates-of" in table:
            raise ValueError(
                f"{where}: got choose and rates-of, expected one: rows choose for themselves, or "
                "take what was chosen for another table; take one away"
            )
        theirs = chosen.get(table.get("rates-of"), {RATE: choose[RATE]})
        wanted = table.get("choose", theirs)
        table["choose"] = _check_choose(where, wanted, choose["seeds"])
        chosen[table["title"]] = table["choose"]
        read = _read_table(path, content | {"here": dict(here or {})}, table, paper)
        read = _with_change_from(where, read, table.get("change-from"), tables)
        tables.append(_with_rates_of(where, read, tables))
    if numbers:
        raise ValueError(
            f"study {path}: the paper's numbers name tables {list(numbers)}, which it does not "
            "have; correct them"
        )
    return Study(content["title"], tables)


def _check_here(here: Mapping[str, Scalar]) -> None:
    for key, value in here.items():
        if key not in OF_A_MACHINE:
            raise ValueError(
                f"study: got {key}={value}, expected {' or '.join(OF_A_MACHINE)}, which say where "
                "something lies or computes; write what belongs to the runs into the study's file"
            )
        check_key(key, value)


def _read_table(
    path: Path, study: Mapping[str, Any], table: Mapping[str, Any], paper: dict[str, float]
) -> Table:
    """Read a table; `paper` has the paper's number for each of its rows, if any."""
    where = f"study {path}: table {table['title']!r}"
    shared = study["settings"] | table.get("settings", {})
    ((key, values),) = table["choose"].items()
    rows = {
        str(name): _read_row(
            f"study {path}: row {name!r}", study, shared | (changes or {}), key, values
        )
        for name, changes in table["rows"].items()
    }
    references = tuple(table.get("references", []))
    against = [table["against"]] if "against" in table else []
    for what, names in (("references", references), ("the paper's", paper), ("against", against)):
        if unknown := [name for name in names if name not in rows]:
            raise ValueError(
                f"{where}: {what} {unknown} are no rows, expected some of {list(rows)}; correct "
                "them"
            )
    _check_measured_alike(where, rows, spectra=table.get("spectra", False))
    if table.get("equal-parameters"):
        _check_equal(where, {k: v for k, v in rows.items() if k not in references})
    return Table(
        title=table["title"],
        rows=rows,
        spectra=table.get("spectra", False),
        metric=table.get("metric", ""),
        paper=paper,
        references=references,
        rates_of=table.get("rates-of", ""),
        against=_against(table, list(rows), references),
        chosen=key,
    )


def _with_rates_of(where: str, table: Table, earlier: Sequence[Table]) -> Table:
    """Let the rows take the rates that are chosen for the table that this one names, if any."""
    if not table.rates_of:
        return table
    choosing = {one.title: one for one in earlier if not one.rates_of}
    if table.rates_of not in choosing:
        raise ValueError(
            f"{where}: rates-of = {table.rates_of!r}, expected an earlier table whose rates are "
            f"chosen for it: one of {list(choosing)}; correct it"
        )
    theirs = choosing[table.rates_of].rows
    taking = {name: row for name, row in table.rows.items() if row.rates}
    if unknown := [name for name in taking if name not in theirs or not theirs[name].rates]:
        raise ValueError(
            f"{where}: rates-of = {table.rates_of!r}: no rate is chosen there for rows {unknown}, "
            "expected one for each row without a learning-rate; rename the row, or set its rate"
        )
    taken = {name: replace(row, chosen_as=theirs[name]) for name, row in taking.items()}
    return replace(table, rows=table.rows | taken)


def _check_choose(
    where: str, content: Mapping[str, Any], seeds: Sequence[int]
) -> dict[str, list[float]]:
    """Check from which values of which key a table's rows choose."""
    if content == {RATE: []}:
        return {RATE: []}
    key, values = next(iter(content.items()), ("", None))
    numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    if len(content) != 1 or key not in CHOSEN or not numbers or not values or not seeds:
        raise ValueError(
            f"{where}: choose = {content!r}, expected one of {', '.join(CHOSEN)} with a list of "
            "numbers, such as {clip-norm: [0.3, 1.0]}, and the study's own choose with seeds; "
            "correct it"
        )
    if len(set(values)) < len(values):
        raise ValueError(f"{where}: choose = {content!r} has a value twice; name each once")
    for value in values:
        try:
            check_key(key, value)
        except ValueError as error:
            raise ValueError(f"{where}: choose: {error}") from None
    return {key: [float(value) for value in values]}


def _with_change_from(
    where: str, table: Table, title: str | None, earlier: Sequence[Table]
) -> Table:
    """Let the rows be compared with those of the table that this one names, if any."""
    if title is None:
        return table
    tables = {one.title: one for one in earlier}
    if title not in tables:
        raise ValueError(
            f"{where}: change-from = {title!r}, expected an earlier table: one of {list(tables)}; "
            "correct it"
        )
    if table.metric != tables[title].metric:
        raise ValueError(
            f"{where}: change-from = {title!r} tells {tables[title].metric or 'the task'!r} where "
            f"this table tells {table.metric or 'the task'!r}, expected one metric in both; "
            "correct it"
        )
    if not table.rows.keys() & tables[title].rows.keys():
        raise ValueError(
            f"{where}: change-from = {title!r} has rows {list(tables[title].rows)}, expected some "
            f"of {list(table.rows)}; rename a row"
        )
    return replace(table, change_from=tables[title])


def _against(table: Mapping[str, Any], rows: Sequence[str], references: Sequence[str]) -> str:
    """Name the row that differences are to: as the table says, `ravan`, or the first."""
    competing = [name for name in rows if name not in references] or list(rows)
    usual = next(iter(["ravan"] if "ravan" in rows else competing), "")
    return str(table.get("against", usual))


def _read_row(
    where: str, study: Mapping[str, Any], settings: dict[str, Any], key: str, values: list[float]
) -> Row:
    """Read a row, and check its settings with each value of the key that it may be run with."""
    clients = settings.pop("num-clients", study["num-clients"])
    if type(clients) is not int or clients < 1:
        raise ValueError(f"{where}: num-clients = {clients!r}: expected a whole number at least 1")
    choose = study["choose"]
    rates = [] if key in settings else values
    try:
        for rate in rates or [settings.get(key, KEYS[key].default)]:
            read_config(own_preset(settings | study["here"] | {key: rate}))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Row(
        settings=settings,
        num_clients=clients,
        seeds=study["seeds"],
        rates=rates,
        rate_seeds=choose["seeds"],
        extensions=choose["extensions"],
        chosen=key,
        here=study["here"],
    )


def _read_paper(study: Path, name: str) -> dict[str, dict[str, float]]:
    """Read the numbers of a file in `paper/` beside the study: table -> row -> percent."""
    path = study.parent / "paper" / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"study {study}: paper = {name!r}: found no file {path}; correct it")
    content = read_yaml(path)
    tables = content.items() if isinstance(content, dict) else []
    for title, rows in tables:
        if not isinstance(rows, dict) or not all(type(x) in (int, float) for x in rows.values()):
            raise ValueError(f"{path}: {title!r} is {rows!r}, expected numbers by row; correct it")
    return {str(title): {str(row): float(x) for row, x in rows.items()} for title, rows in tables}


def _check_fields(
    where: str, content: object, fields: Mapping[str, type], options: Mapping[str, type]
) -> None:
    """Raise ValueError unless `content` is a mapping with these fields, and no others."""
    got = set(content) if isinstance(content, dict) else type(content).__name__
    if not isinstance(content, dict) or not set(fields) <= set(content) <= {*fields, *options}:
        shown = sorted(got, key=str) if isinstance(got, set) else got
        optional = f", and if need be {sorted(options)}" if options else ""
        raise ValueError(f"{where}: got {shown}, expected the fields {sorted(fields)}{optional}")
    for field, kind in {**fields, **options}.items():
        if field in content and not isinstance(content[field], kind):
            raise ValueError(f"{where}: {field} is no {kind.__name__}; correct it")


def _check_measured_alike(where: str, rows: Mapping[str, Row], *, spectra: bool) -> None:
    """Raise ValueError where a row of a personalised method cannot stand beside the others."""
    configs = {
        name: read_config(own_preset({"learning-rate": 1.0, **row.settings}))
        for name, row in rows.items()
    }
    personal = [name for name, config in configs.items() if METHODS[config.method].personalised]
    if not personal:
        return
    if spectra:
        raise ValueError(
            f"{where}: spectra: rows {personal} have another update for each client, expected rows "
            "with one model for all; take spectra away"
        )
    if len({(config.evaluate_on, config.validation_share) for config in configs.values()}) > 1:
        told = ", ".join(
            f"{name} evaluate-on={config.evaluate_on} validation-share={config.validation_share:g}"
            for name, config in configs.items()
        )
        raise ValueError(
            f"{where}: its rows are measured on different examples ({told}), expected the same for "
            "all; set evaluate-on: clients and validation-share: 0.2 in the study's settings"
        )


def _check_equal(where: str, rows: Mapping[str, Row]) -> None:
    """Raise ValueError unless the rows train the same number of parameters, to 5 %."""
    from ravan_flwr.training.cost import adapter_parameters  # noqa: PLC0415 (imports torch)

    if len(rows) < 2:
        raise ValueError(f"{where}: equal-parameters has rows {list(rows)}, expected at least two")
    numbers = {
        name: adapter_parameters(read_config(own_preset({"learning-rate": 1.0, **row.settings})))
        for name, row in rows.items()
    }
    apart = 1 - min(numbers.values()) / max(numbers.values())
    if apart > TOLERANCE:
        listed = ", ".join(f"{name} {number:,}" for name, number in numbers.items())
        raise ValueError(
            f"{where} calls its rows equal, but the parameters that they train differ by "
            f"{100 * apart:.1f} % ({listed}), expected at most {100 * TOLERANCE:.0f} %; change "
            "lora-rank, heads or rank, name references, or take equal-parameters away"
        )
