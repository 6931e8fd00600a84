"""Read a folder of IDX files, the format of MNIST, Fashion-MNIST and similar data sets.

Images and labels are in separate files, for training and for test:
`train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, and the same with `t10k`, each plain or
gzipped. A file begins with two zeros, the type of its numbers (8: bytes), the number of dimensions,
and their sizes as four bytes each, big-endian. The header is checked before the content is read,
and no more is unpacked than the header states.
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

SPLITS = {"train": "train", "test": "t10k"}  # the prefixes of their file names
DIMENSIONS = {"images": 3, "labels": 1}
MAX_EXAMPLES, MAX_BYTES = 2**24, 2**31 - 1  # of one file
_BYTES = 8  # the code of the type
_GZIPPED = b"\x1f\x8b"


def is_idx(folder: Path) -> bool:
    """Return whether a folder has any of the files."""
    return any(
        _file(folder, split, content_type).is_file()
        for split in SPLITS
        for content_type in DIMENSIONS
    )


def idx_splits(folder: Path) -> datasets.DatasetDict:
    """Read `train` and `test` with the columns `image` and `label`."""
    return datasets.DatasetDict(
        {
            split: _examples(_file(folder, split, "images"), _file(folder, split, "labels"))
            for split in SPLITS
        }
    )


def _file(folder: Path, split: str, content_type: str) -> Path:
    """Return a file's path, by either of its usual names, plain before gzipped."""
    begin, end = f"{SPLITS[split]}-{content_type}", f"idx{DIMENSIONS[content_type]}-ubyte"
    paths = [folder / f"{begin}{dot}{end}{packed}" for packed in ("", ".gz") for dot in "-."]
    return next(filter(Path.is_file, paths), paths[0])


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
    """Return all images as lists of rows in one step; `datasets` would make each list in turn."""
    count, height, width = images.shape
    rows = pa.ListArray.from_arrays(
        np.arange(count * height + 1, dtype=np.int32) * width, pa.array(images.ravel())
    )
    return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * height, rows)


def _read(path: Path, content_type: str) -> np.ndarray:
    """Read a file, gzipped or not by its content; ValueError for an invalid one."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIPPED
            file.seek(0)
            with gzip.open(file) if packed else file as content:
                return _array(path, cast(BinaryIO, content), content_type)
    except (OSError, EOFError, zlib.error, struct.error) as error:  # a disk error, or too short
        raise ValueError(
            f"data {path}: it cannot be read ({type(error).__name__}: {error}), expected an IDX "
            "file, plain or gzipped; restore it (docs/reference.md says where Fashion-MNIST is)"
        ) from None


def _array(path: Path, file: BinaryIO, content_type: str) -> np.ndarray:
    """Read and check the header, then read the array that it describes."""
    number = DIMENSIONS[content_type]
    begin, *sizes = struct.unpack(f">4s{number}I", file.read(4 + 4 * number))
    magic, size = bytes([0, 0, _BYTES, number]), math.prod(sizes)
    if begin != magic or not size or sizes[0] > MAX_EXAMPLES or size > MAX_BYTES:
        shape = " x ".join(f"{side:,}" for side in sizes)
        raise ValueError(
            f"data {path}: its header says {begin.hex(' ')} and {shape}, expected {magic.hex(' ')} "
            f"(bytes), 1 to {MAX_EXAMPLES:,} {content_type} and {MAX_BYTES:,} bytes at "
            "most; restore it"
        )
    content = file.read(size + 1)
    if len(content) != size:
        length = f"{len(content):,} bytes" if len(content) < size else "more"
        raise ValueError(
            f"data {path}: got {length} after its header, expected {size:,} as it states; "
            "restore it"
        )
    return np.frombuffer(content, np.uint8).reshape(sizes)
