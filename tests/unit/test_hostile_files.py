"""Malicious files must not start programs, nor use unlimited time or memory.

Each file is small and made here. Comments have its effect on a reader without checks, as
measured before the checks were added.
"""

import gzip
import io
import json
import os
import stat
import struct
import tracemalloc
import zipfile
import zlib
from subprocess import CalledProcessError
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import EpsImagePlugin, Image

from ravan_flwr.config.yaml_file import read_yaml
from ravan_flwr.data.examples import device_examples, load_splits, other_examples
from ravan_flwr.data.rows import UnreadableError, read_image, read_rows
from ravan_flwr.files import LARGE, check_unpacked, read_file
from ravan_flwr.preset_wizard.data_summary import summarise_data
from ravan_flwr.results.prediction import new_table
from ravan_flwr.runs.checkpoint import load_checkpoint
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.vision import Vision
from tests.hand_made import ROUND

# The garbage collector closes the CSV files of `datasets`.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
showpage
%%EOF
"""
AS_IMAGE = {"bytes": EPS, "path": None}
IMAGES = DataSpec(
    "hub", "", columns=(("image", "image"), ("label", "label")), labels=("a", "b"), partition_by=""
)
TEXTS = DataSpec("hub", "", columns=(("text", "text"), ("label", "label")), labels=("a", "b"))


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Put a program `gs` on the PATH; return the file that it writes when it is started."""
    mark, program = tmp_path / "started", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # as before its first search
    return mark


def folders(root, content):
    """Write a folder of images as a user has it: a folder for each label, with PNG names."""
    for split in ("train", "test"):
        for number, label in enumerate("ab"):
            (root / split / label).mkdir(parents=True)
            (root / split / label / f"{number}.png").write_bytes(content)
    return root


def encode(examples):
    shape = {"image_size": 8, "num_channels": 1}
    Vision(IMAGES, 0, lambda: None, lambda: shape).encode(examples)


def on_a_device(root):
    encode(device_examples(str(folders(root, EPS) / "train"), IMAGES))


def for_a_run(root):
    encode(load_splits(DataSpec(**vars(IMAGES) | {"name": str(folders(root, EPS))}))["train"])


def to_evaluate(root):
    encode(other_examples(DataSpec(**vars(IMAGES) | {"name": str(folders(root, EPS))}))[0])


def to_predict(root):
    (row, *_) = read_rows(folders(root, EPS), {"image": "image"})
    read_image(row.values["image"], root)


def as_bytes(root, features, row):
    """Write a table whose own metadata declares a column of images."""
    root.mkdir()
    table = datasets.Dataset.from_list([row] * 4, features=datasets.Features(features))
    table.to_parquet(root / "train.parquet")
    return str(root)


def as_bytes_of_a_hub(root):
    features = {"image": datasets.Image(), "label": datasets.Value("string")}
    name = as_bytes(root, features, {"image": AS_IMAGE, "label": "a"})
    encode(load_splits(DataSpec(**vars(IMAGES) | {"name": name, "test_share": 0.5}))["train"])


def as_a_label(root):
    features = {"label": datasets.Image(), "image": datasets.Value("int64")}
    encode(device_examples(as_bytes(root, features, {"label": AS_IMAGE, "image": 1}), IMAGES))


EVERYWHERE = [on_a_device, for_a_run, to_evaluate, to_predict, as_bytes_of_a_hub, as_a_label]


@pytest.mark.parametrize("use", EVERYWHERE)
def test_no_image_starts_a_program(use, started, tmp_path):
    with pytest.raises((ValueError, UnreadableError)):
        use(tmp_path / "data")
    assert not started.exists()


def test_pillow_starts_a_program_for_this_image_if_it_may_guess_the_format(started):
    with pytest.raises((OSError, CalledProcessError)), Image.open(io.BytesIO(EPS)) as image:
        image.load()
    assert started.exists()


def png(width, height):
    """Return an image of one colour; one of 13,000 x 13,000 pixels takes 164 kB."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(width // 8 + 2)) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)  # a bit a pixel
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", rows + packer.flush()) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(13_000, 13_000), (30_000, 8), (8, 30_000)])
def test_an_image_of_too_many_pixels_is_not_unpacked(size, tmp_path):
    """An image of 8 x 30,000 has few pixels, until a processor enlarges the 8 to 224."""
    content = png(*size)
    assert len(content) < 100_000
    tracemalloc.start()
    with pytest.raises(UnreadableError, match=r"its image has [\d,]+ x [\d,]+ pixels, expected"):
        read_image(content, tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()
    with pytest.raises(ValueError, match=r"images: 2 of 2 cannot be read: .*/a/0.png \(its image"):
        encode(device_examples(str(folders(tmp_path / "data", content) / "train"), IMAGES))


def test_other_images_are_read(tmp_path):
    for kind, mode in (("png", "RGBA"), ("jpeg", "L"), ("bmp", "RGB"), ("webp", "RGB"),
                       ("tiff", "CMYK"), ("gif", "P")):  # fmt: skip
        path = tmp_path / f"a.{kind}"
        Image.new(mode, (9, 7)).save(path)
        assert read_image(path.name, tmp_path).size == (9, 7)
        assert read_image({"bytes": path.read_bytes(), "path": None}, tmp_path).size == (9, 7)


def test_a_large_yaml_file_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("a: 'x" + "x" * 2**20)
    with pytest.raises(ValueError, match="has 1,048,581 bytes, expected 1,048,576 at most"):
        read_yaml(path)


def test_yaml_with_a_few_aliases_is_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("a: &a {x: 1:30, y: &y [1.5, z]}\nb: {<<: *a, v: *y, x: 2}\nc: [*a, *a]")
    mapping = {"x": 90, "y": [1.5, "z"]}
    merged = mapping | {"v": [1.5, "z"], "x": 2}
    assert read_yaml(path) == {"a": mapping, "b": merged, "c": [mapping] * 2}


UNPACKED = 17  # MiB, in these tests one more than a small file may unpack to


def gzipped(path):
    """Write a table of 17 MiB in 17 kB; gzip compresses to a thousandth."""
    line = gzip.compress(b"x" * 2**20 + b",a\n")  # a gzip file may have several members
    path.write_bytes(gzip.compress(b"text,label\n") + UNPACKED * line)


def zipped(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.csv", bytes(UNPACKED * 2**20), compresslevel=1)


def one_text(path, in_lists=False):
    """Write a hundred thousand rows with the same text of 100 kB, stored once: 10 GB."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), ["x" * 100_000])
    if in_lists:
        texts = pa.ListArray.from_arrays(np.arange(0, 100_001, 10, dtype=np.int32), texts)
    table = pa.table({"text": texts, "label": ["a"] * len(texts)})
    pyarrow.parquet.write_table(table, path, compression="zstd")


def one_text_in_a_list(path):
    one_text(path, in_lists=True)


def one_number(path):
    """Write rows with the same number: 40 MB in 30 kB."""
    table = pa.table({"text": pa.array(np.zeros(10**7, np.int8)), "label": pa.nulls(10**7)})
    pyarrow.parquet.write_table(table, path, row_group_size=10**7)


BOMBS = [
    ("csv", gzipped), ("csv", zipped), ("jsonl", gzipped), ("parquet", one_text),
    ("parquet", one_text_in_a_list), ("parquet", one_number),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "make"), BOMBS)
def test_a_file_that_expands_too_much_is_not_unpacked(kind, make, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", None)  # it must not be called
    monkeypatch.setattr(datasets, "load_dataset_builder", None)
    monkeypatch.setattr("ravan_flwr.files._UNPACKED", 2**24)  # a limit for all readers
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / f"train.{kind}"
    make(path)
    size = path.stat().st_size
    assert size < 2**17
    spec, of_file = (DataSpec(**vars(TEXTS) | {"name": str(place)}) for place in (folder, path))
    message = rf"train.{kind}: its {size:,} bytes unpack to [\d,]+ or more, expected"
    if make is zipped:
        message = "train.csv is packed by zip, expected a plain or gzipped file; unpack it"
    for read in (
        lambda: device_examples(str(folder), TEXTS),
        lambda: device_examples(str(path), TEXTS),
        lambda: load_splits(spec),
        lambda: other_examples(spec),
        lambda: other_examples(of_file),
        lambda: summarise_data(str(folder), "", {}),
    ):
        with pytest.raises(ValueError, match=message):
            read()
    if kind == "parquet":
        with pytest.raises(ValueError, match=message):
            read_rows(path, {"text": "text"})


@pytest.mark.parametrize(("packed", "most"), [(1, 2**28), (2**24, 100 * 2**24), (2**35, 2**36)])
def test_a_file_may_unpack_to_256_mib_or_a_hundred_times_its_size(packed, most, tmp_path):
    check_unpacked(tmp_path, packed, most)
    with pytest.raises(ValueError, match=rf"unpack to {most + 1:,} or more"):
        check_unpacked(tmp_path, packed, most + 1)


def test_a_file_that_unpacks_to_a_few_times_its_size_is_read(tmp_path):
    rows = {"text": [f"text {number}" for number in range(500)] * 4, "label": ["a", "b"] * 1000}
    table = datasets.Dataset.from_dict(rows)
    table.to_csv(tmp_path / "train.csv")
    (tmp_path / "train.csv").write_bytes(gzip.compress((tmp_path / "train.csv").read_bytes()))
    table.to_parquet(tmp_path / "train.parquet")
    for name in ("train.csv", "train.parquet"):
        assert device_examples(str(tmp_path / name), TEXTS)["text"][:] == rows["text"]
    check_unpacked(tmp_path, LARGE // 50, LARGE)
    with pytest.raises(ValueError, match="expected 68,719,476,736 at most"):
        check_unpacked(tmp_path, LARGE // 50, LARGE + 1)


def test_an_endless_line_is_not_read_completely(tmp_path):
    """A sparse file uses no disk space, and would fill the memory."""
    for name, begin in (("a.csv", b"text\n"), ("a.jsonl", b"{}\n")):
        with (tmp_path / name).open("wb") as file:
            file.write(begin)
            file.truncate(2**40)
        rows = read_rows(tmp_path / name, {"text": "text"})
        with pytest.raises(ValueError, match=f"{name}.*a line of 16,777,216 characters or more"):
            list(rows)


@pytest.fixture(params=["pipe", "zero"])
def endless(request):
    """Replace a file by a pipe without a writer, or by an endless device."""

    def put(path):
        path.unlink(missing_ok=True)
        if request.param == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")

    return put


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_data_must_be_regular_files(name, endless, tmp_path):
    endless(path := tmp_path / name)
    spec = DataSpec(**vars(TEXTS) | {"name": str(path)})
    for read in (
        lambda: device_examples(str(path), TEXTS),
        lambda: other_examples(spec),
        lambda: read_rows(path, {"text": "text"}),
        lambda: read_file(path),
        lambda: read_yaml(path),
    ):
        with pytest.raises(ValueError, match=r"is a pipe or a device, expected|it is not a file"):
            read()


@pytest.fixture
def run(tmp_path):
    """Write the files of a run with a round."""
    directory = RunDirectory.create(tmp_path, "run")
    settings = {"method": "ravan", "preset": "x", "seed": 0, "num-rounds": 2}
    directory.write_json("config.json", settings)
    record: Any = ROUND
    directory.append_round(record)
    return directory.path


@pytest.mark.parametrize("name", ["log.txt", "lock", "rounds.jsonl", "summary.json"])
def test_a_runs_files_must_be_regular_files(name, endless, run):
    """A report must not block."""
    from ravan_flwr.runs.history import RecordedRun

    (run / name).unlink(missing_ok=True)
    endless(run / name)
    if name == "rounds.jsonl":
        with pytest.raises(ValueError, match=r"rounds.jsonl is a pipe or a device, expected"):
            RecordedRun.read(run)
        return
    recorded = RecordedRun.read(run)
    assert (recorded.summary, len(recorded.rounds)) == (None, 1)


def test_checkpoints_must_be_regular_files(endless, run):
    (run / "checkpoints").mkdir()
    endless(run / "checkpoints" / "round-000001.safetensors")
    with pytest.raises(ValueError, match="is damaged .*is a pipe or a device"):
        load_checkpoint(run / "checkpoints", 1)


FORMULAS = ['=cmd|" /C calc"!A0', "+A1+B1", "-A1", "@SUM(A1)", "\t=1", "\r=1"]


def test_no_cell_of_a_table_is_a_spreadsheet_formula(tmp_path):
    import csv

    path = tmp_path / "a.csv"
    harmless = ["-5", "+3.25", "a=b", "", "label", "'=1"]
    with new_table(path, {"file": str, "label": str}) as write:
        write([f"{text}.png", text] for text in (*FORMULAS, *harmless))
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert [label for _, label in rows] == [*(f"'{text}" for text in FORMULAS), *harmless]
    assert all(name.startswith("'") for name, _ in rows[: len(FORMULAS)])
    with new_table(tmp_path / "a.jsonl", {"label": str}) as write:
        write([FORMULAS[:1]])
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {"label": FORMULAS[0]}
