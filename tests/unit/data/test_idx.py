"""IDX files: Debian's Fashion-MNIST, compared with its own reader, and damaged files."""

import gzip
import runpy
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ravan_flwr.config.run_config import read_config
from ravan_flwr.data import idx
from ravan_flwr.data.examples import label_numbers, load_splits, other_examples
from ravan_flwr.data.idx import idx_splits, is_idx
from ravan_flwr.specs import Scalar
from ravan_flwr.tasks.extensions import Predicts, task_with
from ravan_flwr.tasks.vision import Vision
from ravan_flwr.training.model_and_data import ModelAndData
from tests.support.tiny import save_model

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
READER = Path("/usr/share/doc/dataset-fashion-mnist/utils/mnist_reader.py")
TRAIN, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx_file(array, dimensions=None):
    """Return an array in the IDX format: 0 0 type dimensions, sizes, bytes."""
    sizes = array.shape if dimensions is None else dimensions
    return bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + array.tobytes()


def digits(number, first=0):
    """Return real handwritten digits in the middle of 28 x 28 black pixels."""
    images, labels = load_digits(return_X_y=True)
    large = np.zeros((number, 28, 28), np.uint8)
    small = images[first : first + number].reshape(-1, 8, 8) * 15
    large[:, 2:26, 2:26] = small.repeat(3, 1).repeat(3, 2)
    return large, labels[first : first + number].astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Write forty training digits and ten test digits."""
    for begin, number, first in (("train", 40, 0), ("t10k", 10, 40)):
        images, labels = digits(number, first)
        (tmp_path / f"{begin}-images-idx3-ubyte").write_bytes(idx_file(images))
        (tmp_path / f"{begin}-labels-idx1-ubyte").write_bytes(idx_file(labels))
    return tmp_path


def spec_of(folder):
    return read_config({"preset": "fashion-vit", "data": str(folder)}).data


def encoded(splits, name="train"):
    task = Vision(
        read_config({"preset": "fashion-vit"}).data, 0, lambda: None,
        lambda: {"image_size": 28, "num_channels": 1},
    )  # fmt: skip
    return task.encode(splits[name])


def same(found, images, labels):
    pixels = found.take(np.arange(len(images)))
    assert np.array_equal(pixels["pixel_values"][:, 0].numpy(), images)
    assert np.array_equal(pixels["labels"].numpy(), labels)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_the_published_files_are_read_as_by_the_published_reader():
    splits = load_splits(spec_of(DEBIAN))
    assert {name: len(split) for name, split in splits.items()} == {"train": 60_000, "test": 10_000}
    for name in ("train", "test"):
        numbers = label_numbers(splits[name], spec_of(DEBIAN).labels, name)
        assert np.bincount(numbers).tolist() == [len(numbers) // 10] * 10
    if not READER.is_file():
        pytest.skip("the reader is in the package's documentation, which is not installed")
    reader = runpy.run_path(str(READER))
    images, labels = reader["load_mnist"](DEBIAN, kind="t10k")
    same(encoded(splits, "test"), images.reshape(-1, 28, 28), labels)


def test_plain_and_gzipped_files_are_read_under_any_extension(folder):
    images, labels = digits(40)
    same(encoded(load_splits(spec_of(folder))), images, labels)
    subprocess.run(["gzip", *folder.iterdir()], check=True)
    assert {path.suffix for path in folder.iterdir()} == {".gz"}
    same(encoded(load_splits(spec_of(folder))), images, labels)
    for path in folder.iterdir():  # names that some tools give them
        path.rename(path.with_name(path.name.removesuffix(".gz").replace("-idx", ".idx")))
    same(encoded(load_splits(spec_of(folder))), images, labels)


def test_the_same_files_have_the_same_fingerprint_and_an_evaluation_reads_the_test_files(folder):
    """The cache of processed examples is keyed by the fingerprint."""
    first, second = idx_splits(folder)["train"], idx_splits(folder)["train"]
    assert first._fingerprint == second._fingerprint
    examples, split = other_examples(spec_of(folder))
    assert (len(examples), split) == (10, "test")


def test_other_folders_are_not_idx_folders(tmp_path):
    assert not is_idx(tmp_path)
    assert not is_idx(tmp_path / "nowhere")
    (tmp_path / "images-idx3-ubyte").write_bytes(b"")
    assert not is_idx(tmp_path)


def test_a_models_processor_gives_the_same_pixels_as_for_pictures(folder, tmp_path):
    model = save_model("vit", tmp_path / "model")
    settings: dict[str, Scalar] = {"preset": "svhn-vit-b16", "data": str(folder)}
    loaded = ModelAndData(read_config(settings | {"model": str(model)}))
    found = loaded.test_sets["test"].take(np.arange(10))
    images, labels = digits(10, 40)
    pictures = [Image.fromarray(image) for image in images]
    expected = task_with(Predicts, loaded.task, "predict").inputs({"image": pictures})
    assert np.array_equal(found["pixel_values"].numpy(), expected["pixel_values"])
    assert np.array_equal(found["labels"].numpy(), labels)


IMAGES = digits(40)[0]
GOOD = idx_file(IMAGES)
SAYS = "its header says 00 00 08 03 and"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TRAIN, b"", r"it cannot be read \(error: unpack requires a buffer of 16"),
        (TRAIN, b"\x89PNG" * 4, "its header says 89 50 4e 47 and .*, expected 00 00 08 03"),
        (TRAIN, idx_file(digits(40)[1]), "its header says 00 00 08 01 and .* expected 00 00 08 03"),
        (TRAIN, b"\0\0\x0d\x03" + GOOD[4:], "its header says 00 00 0d 03 and 40"),  # floats
        (TRAIN, GOOD[:9], r"it cannot be read \(error: unpack requires a buffer of 16"),
        (TRAIN, GOOD[:-1], "got 31,359 bytes after its header, expected 31,360"),
        (TRAIN, GOOD + b"\0", "got more after its header, expected 31,360"),
        (TRAIN, idx_file(IMAGES, (40, 0, 28)), f"{SAYS} 40 x 0 x 28, expected .*, 1 to"),
        (TRAIN, idx_file(IMAGES, (2**32 - 1,) * 3), f"{SAYS} 4,294,967,295 x 4,294"),
        (TRAIN, idx_file(IMAGES[:39]), "got 39 images, but 40 labels in train-labels"),
        (LABELS, idx_file(digits(39)[1]), "got 40 images, but 39 labels in train-labels"),
        (TRAIN, gzip.compress(GOOD)[:-9], r"it cannot be read \(EOFError"),
        (TRAIN, gzip.compress(GOOD)[:40] + b"x" * 99, r"it cannot be read \(error: Error -3"),
        (TRAIN, b"\x1f\x8bxxxxxxxxxx", r"it cannot be read \(BadGzipFile"),
    ],
)
def test_a_damaged_file_is_reported(name, content, message, folder):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"data {folder}/train-.*-ubyte: {message}.*restore"):
        load_splits(spec_of(folder))


def test_no_more_bytes_are_unpacked_than_the_header_declares(folder, monkeypatch):
    """A few kilobytes may unpack to any number of zeros."""
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = bomb.compress(GOOD) + b"".join(bomb.compress(bytes(2**20)) for _ in range(64))
    (folder / TRAIN).write_bytes(packed + bomb.flush())
    most: list[int] = []
    read = gzip.GzipFile.read

    def counting_read(self, size=-1):
        most.append(size)
        return read(self, size)

    monkeypatch.setattr(gzip.GzipFile, "read", counting_read)
    with pytest.raises(ValueError, match="got more after its header"):
        load_splits(spec_of(folder))
    assert 0 < max(most) <= len(GOOD)
    assert min(most) > 0


def test_a_header_that_declares_too_much_is_refused_before_reading(folder, monkeypatch):
    monkeypatch.setattr(idx, "MAX_BYTES", 30_000)
    with pytest.raises(ValueError, match=f"{SAYS} 40 x 28 x 28, expected .* 30,000 bytes"):
        load_splits(spec_of(folder))


@pytest.mark.parametrize("name", [TRAIN, LABELS, "t10k-images-idx3-ubyte"])
def test_a_missing_file_is_reported(name, folder):
    (folder / name).unlink()
    error = rf"data {folder}/{name}: it cannot be read \(FileNotFoundError"
    with pytest.raises(ValueError, match=error):
        load_splits(spec_of(folder))


def test_labels_and_images_other_than_the_models_are_reported(folder):
    images, labels = digits(40)
    (folder / LABELS).write_bytes(idx_file(np.where(labels == 3, 10, labels).astype(np.uint8)))
    with pytest.raises(ValueError, match="unknown labels 10; expected numbers from 0 to 9"):
        encoded(load_splits(spec_of(folder)))
    (folder / LABELS).write_bytes(idx_file(labels))
    (folder / TRAIN).write_bytes(idx_file(np.ascontiguousarray(images[:, ::2, ::2])))
    with pytest.raises(ValueError, match=r"got arrays of \(1, 14, 14\), expected \(1, 28, 28\)"):
        encoded(load_splits(spec_of(folder)))
