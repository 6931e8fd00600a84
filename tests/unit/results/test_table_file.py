"""A table file is written completely or not at all, and replaces no file."""

from contextlib import suppress

import pandas as pd  # its types are a separate package
import pytest

from ravan_flwr.results.prediction import new_table

KINDS = {"row": int, "label": str, "probability": float}
ROWS = [(1, 'a "quoted", label', 0.25), (2, None, None), (3, "two\nlines ☃", 1.0)]
KINDS_OF_FILES = ["csv", "jsonl", "parquet"]


def read(path):
    """Read a table with other software."""
    kind = {"csv": "csv", "jsonl": "json", "parquet": "parquet"}[path.suffix[1:]]
    frame = getattr(pd, f"read_{kind}")(path, **({"lines": True} if kind == "json" else {}))
    return [tuple(None if pd.isna(cell) else cell for cell in row) for row in frame.values]


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_other_software_reads_the_written_tables_and_a_failed_write_leaves_none(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    with new_table(path, KINDS) as write:
        assert not path.exists()
        for row in ROWS:
            write([row])
    assert read(path) == ROWS
    with suppress(RuntimeError), new_table(tmp_path / f"half.{kind}", KINDS) as write:
        write(ROWS[:1])
        raise RuntimeError("half of it")
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_a_table_of_many_rows_or_of_none(kind, tmp_path):
    for number in (20_000, 0):
        path = tmp_path / f"{number}.{kind}"
        with new_table(path, KINDS) as write:
            for start in range(0, number, 8000):
                write((row, "a", 0.5) for row in range(start, min(start + 8000, number)))
        assert len(read(path)) == number


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_a_name_with_invalid_characters_is_written(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    with new_table(path, {"file": str}) as write:
        write([["caf\udce9.png"]])
    ((name,),) = read(path)
    assert name.startswith("caf")


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_a_column_of_any_name_is_written(kind, tmp_path):
    """Latin-1 bytes of a header, as Python reads them, and a formula of a spreadsheet."""
    path = tmp_path / f"a.{kind}"
    latin = "größe".encode("latin-1").decode("utf-8", "surrogateescape")
    with new_table(path, {latin: str, "=1+1": str}) as write:
        write([["3", "4"]])
    assert read(path) == [("3", "4")] or read(path) == [(3, 4)]
    formula = b"'=1+1" if kind == "csv" else b"=1+1"
    assert formula in path.read_bytes()
    assert (b'"=1+1' in path.read_bytes()) == (kind == "jsonl")


def test_columns_whose_names_become_the_same_keep_their_values(tmp_path):
    path = tmp_path / "a.csv"
    with new_table(path, {"=a": str, "'=a": str}) as write:
        write([["x", "y"]])
    assert path.read_text().splitlines() == ['"\'=a","\'=a"', '"x","y"']


def test_no_file_is_replaced(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("mine")
    with pytest.raises(ValueError, match="is there already"), new_table(path, KINDS):
        pass
    late = tmp_path / "b.csv"
    with pytest.raises(ValueError, match="is there already"), new_table(late, KINDS):
        late.write_text("mine, too")
    assert (path.read_text(), late.read_text()) == ("mine", "mine, too")
    assert len([*tmp_path.iterdir()]) == 2
    for name, message in (("a.xlsx", r"ends in \.csv"), ("no/a.csv", "make it first")):
        with pytest.raises(ValueError, match=message), new_table(tmp_path / name, KINDS):
            pass
