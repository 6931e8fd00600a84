"""Tables are read row by row, and an error in one row affects no other."""

import csv
import json
import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ravan_flwr.data.rows import UnreadableError, check_text, read_columns, read_image, read_rows

TEXT = {"text": "sentence"}
# Docstrings of the standard library have commas, quotes and line breaks.
TEXTS = [text for text in (getattr(json, name).__doc__ for name in json.__all__) if text]
TEXTS += [text for text in (getattr(csv, name).__doc__ for name in csv.__all__) if text]


def write(path):
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("number", "sentence"), *enumerate(TEXTS)])
    elif path.suffix == ".jsonl":
        lines = [json.dumps({"number": n, "sentence": text}) for n, text in enumerate(TEXTS)]
        path.write_text("\n".join(lines) + "\n\n")
    else:
        table = pa.table({"number": list(range(len(TEXTS))), "sentence": TEXTS})
        pyarrow.parquet.write_table(table, path, row_group_size=3)
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("columns", [{"sentence": "sentence"}, TEXT])
def test_every_kind_of_table_gives_the_same_rows(kind, columns, tmp_path):
    rows = [*read_rows(write(tmp_path / f"table.{kind}"), columns)]
    assert [row.number for row in rows] == list(range(1, len(TEXTS) + 1))
    assert [next(iter(row.values.values())) for row in rows] == TEXTS
    assert not any(row.problem for row in rows)


def test_a_column_may_have_the_name_of_its_role(tmp_path):
    (tmp_path / "a.csv").write_text("\ufefftext,other\r\nHello,1\r\n", encoding="utf-8")
    (row,) = read_rows(tmp_path / "a.csv", TEXT)
    assert row.values == {"text": "Hello"}


def test_an_open_quotation_mark_swallows_no_rows(tmp_path):
    (tmp_path / "a.csv").write_text('text\ngood one\n"the red\ncat\ndog\n')
    rows = read_rows(tmp_path / "a.csv", TEXT)
    assert next(rows).values == {"text": "good one"}
    with pytest.raises(ValueError, match="line 5 is no CSV"):
        next(rows)


def test_text_after_a_quoted_field_is_said_to_be_misquoted(tmp_path):
    (tmp_path / "a.csv").write_text('text\n"good" one\n')
    with pytest.raises(ValueError, match="line 2 is no CSV .*quotation marks around whole fields"):
        next(read_rows(tmp_path / "a.csv", TEXT))


def problems_of(path, columns=TEXT):
    """Return the problem of each row; values are checked as for predictions."""
    problems = []
    for row in read_rows(path, columns):
        try:
            if row.problem:
                raise UnreadableError(row.problem)
            [check_text(role, value) for role, value in row.values.items()]
            problems.append("")
        except UnreadableError as error:
            problems.append(str(error))
    return problems


def test_an_invalid_csv_line_affects_no_other(tmp_path):
    lines = [b"id,sentence", b"1,good", b"2", b"3,good,more", b"4,", b"5,\xff\xfe", b'6,"a', b'b"']
    (tmp_path / "a.csv").write_bytes(b"\n".join([*lines, b"", b"7," + b"x" * 200_000, b"8,good"]))
    problems = problems_of(tmp_path / "a.csv")
    assert len(problems) == 8
    # Long texts are accepted.
    assert [number for number, problem in enumerate(problems) if problem] == [1, 2, 3, 4]
    assert "has 1 fields, expected 2" in problems[1]
    assert "its text is missing" in problems[3]
    assert "no UTF-8" in problems[4]


def test_an_unterminated_field_is_refused_and_the_csv_limit_is_restored(tmp_path):
    """The limit is global to the process, and other code reads CSV as well."""
    limit = csv.field_size_limit()
    with (tmp_path / "a.csv").open("w") as file:
        file.write('sentence\ngood\n"')
        file.writelines("x" * 2**20 + "\n" for _ in range(17))
    rows = read_rows(tmp_path / "a.csv", TEXT)
    assert next(rows).values == {"text": "good"}
    assert csv.field_size_limit() == limit < 2**20
    with pytest.raises(ValueError, match=r"line \d+ is no CSV .*expected fields of 16,777,216"):
        next(rows)
    assert csv.field_size_limit() == limit


def test_an_invalid_json_line_affects_no_other(tmp_path):
    lines = [
        '{"sentence": "good"}', "{", "[1]", "{}", '{"sentence": 5}', '{"sentence": null}',
        '{"sentence": "\\ud800"}', "[" * 100_000, '{"sentence": "good"}',
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    problems = problems_of(tmp_path / "a.jsonl")
    assert [bool(problem) for problem in problems] == [False, *[True] * 7, False]
    assert "expected a text" in problems[4]


def test_a_column_that_begins_in_a_later_line_is_a_column(tmp_path):
    lines = ["{", '{"sentence": "good"}', "[1]", '{"id": 1}', '{"note": "n", "sentence": "good"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert [*read_columns(tmp_path / "a.jsonl")] == ["sentence", "id", "note"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a,b\n1,2\n", "got the columns 'a', 'b', expected 'sentence' or 'text'"),
        ("a.csv", b"", r"got the columns \(none\), expected"),
        ("a.jsonl", b' [\n{"sentence": "x"}]', "expected JSON lines: an object a line"),
        ("a.parquet", b"PAR1 and no more", "cannot be read as parquet"),
        ("a.xlsx", b"", "got a file of kind '.xlsx', expected .csv"),
        ("a.png", b"", "got an image, expected a file of texts"),
    ],
)
def test_files_without_a_table_of_these_columns_are_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name, TEXT)
    with pytest.raises(ValueError, match="found nothing there"):
        read_rows(tmp_path / "absent.csv", TEXT)


def test_damage_inside_a_parquet_file_is_reported_with_its_place(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"sentence": [f"{i} {'x' * 50}" for i in range(5000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=1000, compression="zstd")
    content = bytearray(path.read_bytes())
    middle = slice(len(content) // 4, len(content) // 2)
    content[middle] = b"\xff" * len(content[middle])
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read after row \d+"):
        list(read_rows(path, TEXT))


@pytest.mark.slow
def test_a_long_table_is_read_with_the_memory_of_a_few_rows(tmp_path):
    with (tmp_path / "a.csv").open("w") as file:
        file.write("sentence\n")
        file.writelines(f"{'word ' * 20}{number}\n" for number in range(30_000))
    tracemalloc.start()
    try:
        number = sum(1 for _ in read_rows(tmp_path / "a.csv", TEXT))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert number == 30_000
    assert peak < 1_000_000 < (tmp_path / "a.csv").stat().st_size


def digits(number):
    pixels = load_digits().images[:number] * 15
    return [Image.fromarray(array.astype(np.uint8)) for array in pixels]


def test_images_of_a_folder_have_relative_names_in_order(tmp_path):
    for name, image in zip(("b/2.png", "b/1.PNG", "a.jpg", ".hidden.png"), digits(4), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        image.save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    rows = [*read_rows(tmp_path, {"image": "image"})]
    assert [row.file for row in rows] == ["a.jpg", "b/1.PNG", "b/2.png"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="found no image"):
        read_rows(tmp_path / "empty", {"image": "image"})
    with pytest.raises(ValueError, match="got a folder, expected a file of texts"):
        read_rows(tmp_path, TEXT)


def test_images_are_read_from_files_bytes_and_tables_of_datasets(tmp_path):
    images = digits(5)
    features = datasets.Features({"picture": datasets.Image()})
    examples = datasets.Dataset.from_dict({"picture": images}, features=features)
    examples.to_parquet(tmp_path / "a.parquet")
    rows = read_rows(tmp_path / "a.parquet", {"image": "picture"})
    for row, image in zip(rows, images, strict=True):
        read = read_image(row.values["image"], tmp_path)
        assert np.array_equal(np.asarray(read), np.asarray(image))
    images[0].save(tmp_path / "a.png")
    (tmp_path / "a.csv").write_text("picture\na.png\n")
    (row,) = read_rows(tmp_path / "a.csv", {"image": "picture"})
    assert read_image(row.values["image"], tmp_path).size == (8, 8)


def test_exif_orientation_is_applied(tmp_path):
    image, exif = Image.new("L", (8, 4)), Image.Exif()
    exif[0x0112] = 6  # rotated: its top is on the right
    image.save(tmp_path / "a.jpg", exif=exif)
    assert read_image("a.jpg", tmp_path).size == (4, 8)


def test_an_unreadable_image_is_reported_with_the_reason(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (99, 99), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.png").write_text("no image")
    for value, message in (
        ("cut.png", "truncated"),
        ("text.png", "it is no image"),
        ("absent.png", "there is no file"),
        (".", "there is no file"),
        (None, "is missing"),
        ({"bytes": None, "path": None}, "is missing"),
        (5, "is a int, expected a path or bytes"),
        (content[:40], "cannot be read|no image"),
    ):
        with pytest.raises(UnreadableError, match=message):
            read_image(value, tmp_path)
