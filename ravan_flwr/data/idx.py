"""Read a folder of IDX files, the format of MNIST, Fashion-MNIST and their kin.

Images and labels are files of their own, of the training and of the test:
`train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, and the same with `t10k`, each plain or
gzipped. A file begins with two zeros, the type of its numbers (8: bytes), how many dimensions it
has, and their sizes as four bytes each, the largest first. What a header says is checked before
anything of that size is read, and no more is unpacked than it says.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import datasets
import numpy as np
import pyarrow as pa

SPLITS = {"train": "train", "test": "t10k"}  # what the names of their files begin with
DIMENSIONS = {"images": 3, "labels": 1}
MOST_EXAMPLES, MOST_BYTES = 2**24, 2**31 - 1  # of one file
_BYTES = 8  # the type
_GZIPPED = b"\x1f\x8b"


def is_idx(folder: Path) -> bool:
    """Tell whether a folder has any of the files."""
    return any(_file_of(folder, split, what) for split in SPLITS for what in DIMENSIONS)


def idx_splits(folder: Path) -> datasets.DatasetDict:
    """Read `train` and `test` with the columns `image` and `label`."""
    # All of them are found before any is read.
    files = {(split, what): _file(folder, split, what) for split in SPLITS for what in DIMENSIONS}
    return datasets.DatasetDict(
        {split: _examples(files[split, "images"], files[split, "labels"]) for split in SPLITS}
    )


def _file(folder: Path, split: str, what: str) -> Path:
    if path := _file_of(folder, split, what):
        return path
    name = f"{SPLITS[split]}-{what}-idx{DIMENSIONS[what]}-ubyte"
    raise ValueError(
        f"data {folder}: it has IDX files, but neither {name} nor {name}.gz, expected images and "
        "labels of train and t10k; add it (those of Fashion-MNIST: `apt-get install "
        "dataset-fashion-mnist`, then data=/usr/share/datasets/fashion-mnist)"
    )


def _file_of(folder: Path, split: str, what: str) -> Path | None:
    """Find a file under the names that it goes by; a plain one first."""
    begin, end = f"{SPLITS[split]}-{what}", f"idx{DIMENSIONS[what]}-ubyte"
    names = [f"{begin}{dot}{end}{packed}" for packed in ("", ".gz") for dot in "-."]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _examples(images_file: Path, labels_file: Path) -> datasets.Dataset:
    labels, images = _read(labels_file, "labels"), _read(images_file, "images")
    if len(images) != len(labels):
        raise ValueError(
            f"data {images_file}: got {len(images):,} images, but {len(labels):,} labels in "
            f"{labels_file.name}, expected one for each; restore both files"
        )
    feature = datasets.Array2D(images.shape[1:], "uint8")
    features = datasets.Features({"image": feature, "label": datasets.Value("int64")})
    column = pa.ExtensionArray.from_storage(feature(), _nested(images))
    return datasets.Dataset.from_dict(
        {"image": column, "label": labels.astype(np.int64)}, features=features
    )


def _nested(images: np.ndarray) -> pa.ListArray:
    """Make lists of rows of all images at once; `datasets` makes one list after another."""
    count, height, width = images.shape
    rows = pa.ListArray.from_arrays(
        np.arange(count * height + 1, dtype=np.int32) * width, pa.array(images.ravel())
    )
    return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * height, rows)


def _read(path: Path, what: str) -> np.ndarray:
    """Read a file, unpacked if it is packed, whatever its name says; tell what is wrong with it."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIPPED
            file.seek(0)
            with gzip.open(file) if packed else file as content:
                return _array(path, cast(BinaryIO, content), what)
    except (OSError, EOFError, zlib.error, struct.error) as error:  # of the disk, or too short
        raise ValueError(
            f"data {path}: it cannot be read ({type(error).__name__}: {error}), expected an IDX "
            "file, plain or gzipped; restore it"
        ) from None


def _array(path: Path, file: BinaryIO, what: str) -> np.ndarray:
    """Read the header, check it, and read what it promises."""
    number = DIMENSIONS[what]
    begin, *sizes = struct.unpack(f">4s{number}I", file.read(4 + 4 * number))
    magic, size = bytes([0, 0, _BYTES, number]), math.prod(sizes)
    if begin != magic or not size or sizes[0] > MOST_EXAMPLES or size > MOST_BYTES:
        shape = " x ".join(f"{side:,}" for side in sizes)
        raise ValueError(
            f"data {path}: its header says {begin.hex(' ')} and {shape}, expected {magic.hex(' ')} "
            f"(bytes), 1 to {MOST_EXAMPLES:,} {what} and {MOST_BYTES:,} bytes at most; restore it"
        )
    content = file.read(size + 1)
    if len(content) != size:
        length = f"{len(content):,} bytes" if len(content) < size else "more"
        raise ValueError(
            f"data {path}: got {length} after its header, expected {size:,} by what that says; "
            "restore it"
        )
    return np.frombuffer(content, np.uint8).reshape(sizes)
