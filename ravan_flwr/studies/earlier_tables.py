"""Give a table of a study what it takes from earlier ones: what was chosen, and what to compare."""

from collections.abc import Sequence
from dataclasses import replace

from ravan_flwr.studies.spec import OVERVIEW, Table


def check_title(where: str, title: str, earlier: Sequence[Table]) -> None:
    """Raise ValueError if a page could not tell the table from another one."""
    if title == OVERVIEW:
        raise ValueError(
            f"{where}: a table is called {OVERVIEW!r}, which in a page stands for all of "
            "them; rename it"
        )
    if title in (known.title for known in earlier):
        raise ValueError(
            f"{where}: two tables are called {title!r}, expected different titles; rename one"
        )


def with_rates_of(where: str, table: Table, earlier: Sequence[Table]) -> Table:
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


def with_change_from(
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
