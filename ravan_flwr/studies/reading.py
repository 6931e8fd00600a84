"""Read a study file and check all of it, so that no run begins of a study that has a mistake."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ravan_flwr.config.keys import KEYS, check_key
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import read_config
from ravan_flwr.config.yaml_file import read_yaml
from ravan_flwr.specs import Scalar
from ravan_flwr.studies.earlier_tables import check_title, with_change_from, with_rates_of
from ravan_flwr.studies.intervals import LEAST
from ravan_flwr.studies.rates import EXTENSIONS, RATE
from ravan_flwr.studies.side_by_side import check_equal, check_last, check_measured_alike
from ravan_flwr.studies.spec import Row, Study, Table

MOST_EXTENSIONS = 10
# What a table's rows may choose.
CHOSEN = (RATE, "clip-norm", "calibration-learning-rate")
OF_A_MACHINE = ("data", "model", "device", "processes")

_FIELDS = {"title": str, "num-clients": int, "seeds": list, "settings": dict, "tables": list}
_OPTIONS = {"choose": dict, "paper": str}
_CHOOSE = {"learning-rate": list, "seeds": list}
_CHOOSE_OPTIONS = {"extensions": int}
_TABLE = {"title": str, "rows": dict}
_TABLE_OPTIONS = {
    "settings": dict,
    "equal-parameters": bool,
    "references": list,
    "choose": dict,
    "rates-of": str,
    "run-as-good": bool,
    "spectra": bool,
    "metric": str,
    "against": str,
    "change-from": str,
    "compare-last": int,
}


def read_study(path: Path, here: Mapping[str, Scalar] | None = None) -> Study:
    """Read and check a study; every run's settings must be such as `simulate` takes.

    `here` has settings of this machine for all runs, which change nothing in what they are.
    """
    _check_here(here or {})
    where = f"study {path}"
    content = _read_content(where, path) | {"here": dict(here or {})}
    numbers = _read_paper(path, content["paper"]) if "paper" in content else {}
    tables: list[Table] = []
    choosing: dict[
        str | None, dict[str, list[float]]
    ] = {}  # by title: a key, and what to choose from
    for table in content["tables"]:
        _check_fields(f"{where}: a table", table, _TABLE, _TABLE_OPTIONS)
        title = table["title"]
        check_title(where, title, tables)
        its = f"{where}: table {title!r}"
        table["choose"] = choosing[title] = _values_of(its, content["choose"], table, choosing)
        read = _read_table(where, content, table, numbers.pop(title, {}))
        read = with_change_from(its, read, table.get("change-from"), tables)
        tables.append(with_rates_of(its, read, tables))
    if numbers:
        raise ValueError(
            f"{where}: the paper's numbers name tables {list(numbers)}, which it does not "
            "have; correct them"
        )
    return Study(content["title"], tables)


def _read_content(where: str, path: Path) -> dict[str, Any]:
    """Read the file; check its fields, but for the tables, and what all of its rows share."""
    content = read_yaml(path)
    _check_fields(where, content, _FIELDS, _OPTIONS)
    choose = content.setdefault("choose", {"learning-rate": [], "seeds": []})
    _check_fields(f"{where}: choose", choose, _CHOOSE, _CHOOSE_OPTIONS)
    if not 0 <= choose.setdefault("extensions", EXTENSIONS) <= MOST_EXTENSIONS:
        raise ValueError(
            f"{where}: choose: extensions = {choose['extensions']}: expected a whole number "
            f"from 0 to {MOST_EXTENSIONS}; correct it"
        )
    for seeds in (content["seeds"], choose["seeds"]):
        for seed in seeds:
            check_key("seed", seed)
        if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            raise ValueError(f"{where}: got seeds {twice} twice; expected each once")
    if not content["seeds"] or bool(choose["seeds"]) != bool(choose["learning-rate"]):
        raise ValueError(
            f"{where}: got seeds {content['seeds']}, and to choose from learning rates "
            f"{choose['learning-rate']} with seeds {choose['seeds']}; expected at least one seed, "
            "and for learning rates some of their own; name some"
        )
    return dict(content)


def _check_here(here: Mapping[str, Scalar]) -> None:
    for key, value in here.items():
        if key not in OF_A_MACHINE:
            raise ValueError(
                f"study: got {key}={value}, expected {' or '.join(OF_A_MACHINE)}, which say where "
                "something lies or computes; write what belongs to the runs into the study's file"
            )
        check_key(key, value)


def _values_of(
    where: str,
    choose: Mapping[str, Any],
    table: Mapping[str, Any],
    choosing: Mapping[str | None, dict[str, list[float]]],
) -> dict[str, list[float]]:
    """Find from which values of which key a table's rows choose: its own, or another table's."""
    if "choose" in table and "rates-of" in table:
        raise ValueError(
            f"{where}: got choose and rates-of, expected one: rows choose for themselves, or "
            "take what was chosen for another table; take one away"
        )
    shared = choosing.get(table.get("rates-of"), {RATE: choose[RATE]})
    return _check_choose(where, table.get("choose", shared), choose["seeds"])


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


def _read_table(
    whose: str, study: Mapping[str, Any], table: Mapping[str, Any], paper: dict[str, float]
) -> Table:
    """Read a table of a study; `paper` has the paper's number for each of its rows, if any."""
    where = f"{whose}: table {table['title']!r}"
    shared = study["settings"] | table.get("settings", {})
    ((key, values),) = table["choose"].items()
    rows = {
        str(name): _read_row(f"{whose}: row {name!r}", study, shared | (changes or {}), key, values)
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
    if table.get("run-as-good"):
        rows = _running_as_good(where, rows)
    check_measured_alike(where, rows, spectra=table.get("spectra", False))
    if "compare-last" in table:
        check_last(where, table["compare-last"], rows)
    if table.get("equal-parameters"):
        check_equal(where, {k: v for k, v in rows.items() if k not in references})
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
        compare_last=table.get("compare-last", 0),
    )


def _running_as_good(where: str, rows: Mapping[str, Row]) -> dict[str, Row]:
    """Let rows be run with all rates that are as good; with fewer seeds none is found to be."""
    seeds = min((len(row.rate_seeds) for row in rows.values() if row.rates), default=0)
    if seeds < LEAST:
        raise ValueError(
            f"{where}: run-as-good, and rates are chosen with {seeds} seeds; expected rates to "
            f"choose from, with {LEAST} seeds at least (choose); add them, or take it away"
        )
    return {name: replace(row, run_as_good=True) for name, row in rows.items()}


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
