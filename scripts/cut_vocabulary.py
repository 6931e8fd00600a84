"""Reduce an encoder to the tokens that a data set uses, with weights in bfloat16.

On these texts the smaller model computes what the whole one does, up to the rounding of its
weights: half of all-mpnet-base-v2's vocabulary never occurs in the definitions of WordNet. It is
for machines to which few megabytes can be carried.

    python -m scripts.cut_vocabulary MODEL DATA FOLDER              # DATA: a folder of JSON lines
    python -m scripts.cut_vocabulary MODEL DATA FOLDER --layers 2   # to try a run on a CPU
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

WEIGHTS, TOKENIZER, CONFIG = "model.safetensors", "tokenizer.json", "config.json"
TABLE = "embeddings.word_embeddings.weight"
SPECIAL = re.compile(r"(bos|eos|pad|sep|cls|unk|mask)_token_id")


def texts_of(data: Path, column: str) -> list[str]:
    """Return the texts of all JSON lines of a folder."""
    files = sorted(data.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{data}: found no *.jsonl, expected JSON lines; name another folder")
    lines = (line for path in files for line in path.read_text(encoding="utf-8").splitlines())
    return [json.loads(line)[column] for line in lines]


def used_tokens(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    """Return the ids of the tokens of these texts and of all special tokens, in order."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    used = set(tokenizer.get_added_tokens_decoder())
    for encoding in tokenizer.encode_batch(texts):
        used.update(encoding.ids)
    return sorted(used)


def renumbered(content: dict[str, Any], places: Mapping[int, int]) -> dict[str, Any]:
    """Return a tokenizer's file with the tokens that have a place, by their new ids."""
    new: dict[str, Any] = json.loads(json.dumps(content))
    vocabulary = {token: places[n] for token, n in content["model"]["vocab"].items() if n in places}
    new["model"]["vocab"] = vocabulary
    for token in new["added_tokens"]:
        token["id"] = places[token["id"]]
    processor = new.get("post_processor") or {}
    for name in ("sep", "cls"):  # of RobertaProcessing and BertProcessing
        if name in processor:
            processor[name][1] = places[processor[name][1]]
    for token in processor.get("special_tokens", {}).values():  # of TemplateProcessing
        token["ids"] = [places[number] for number in token["ids"]]
    return new


def kept_weights(
    weights: Mapping[str, torch.Tensor], kept: list[int], layers: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in bfloat16, the table of tokens with the kept rows, and few layers."""
    for name, tensor in weights.items():
        layer = re.search(r"\.layer\.(\d+)\.", name)
        if layer and layers is not None and int(layer[1]) >= layers:
            continue
        rows = tensor[kept] if name.endswith(TABLE) else tensor
        yield name, rows.bfloat16() if rows.is_floating_point() else rows


def cut(
    model: Path, data: Path, folder: Path, *, column: str = "text", layers: int | None = None
) -> int:
    """Write the smaller model to a folder; return the number of its tokens."""
    texts = texts_of(data, column)
    content = json.loads((model / TOKENIZER).read_text(encoding="utf-8"))
    if (kind := content["model"]["type"]) != "WordPiece":  # others merge tokens into the used ones
        raise ValueError(f"{model}: its tokens are of kind {kind}, expected WordPiece")
    whole = Tokenizer.from_file(str(model / TOKENIZER))
    kept = used_tokens(whole, texts)
    places = {number: place for place, number in enumerate(kept)}
    folder.mkdir(parents=True, exist_ok=True)
    few = json.dumps(renumbered(content, places), ensure_ascii=False)
    (folder / TOKENIZER).write_text(few, encoding="utf-8")
    small = Tokenizer.from_file(str(folder / TOKENIZER))
    small.no_truncation()
    small.no_padding()
    pairs = zip(whole.encode_batch(texts), small.encode_batch(texts), strict=True)
    if any(one.tokens != other.tokens for one, other in pairs):
        raise ValueError(f"{model}: its tokenizer divides texts otherwise with fewer tokens")
    weights = dict(kept_weights(load_file(model / WEIGHTS), kept, layers))
    if not any(name.endswith(TABLE) for name in weights):
        raise ValueError(f"{model}: found no {TABLE}, expected an encoder with such a table")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((model / CONFIG).read_text())
    config |= {key: places.get(n, n) for key, n in config.items() if SPECIAL.fullmatch(key)}
    config |= {"vocab_size": len(kept), "dtype": "bfloat16"}
    if layers is not None:
        config["num_hidden_layers"] = layers
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (model / name).is_file():
            shutil.copy(model / name, folder / name)
    return len(kept)


def main() -> None:
    """Write the smaller model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--column", default="text", help="of the texts (text)")
    parser.add_argument("--layers", type=int, help="keep the first layers alone")
    options = parser.parse_args()
    try:
        number = cut(
            options.model,
            options.data,
            options.folder,
            column=options.column,
            layers=options.layers,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    size = (options.folder / WEIGHTS).stat().st_size / 1e6
    sys.stdout.write(f"wrote {options.folder.absolute()}: {number:,} tokens, {size:.0f} MB\n")


if __name__ == "__main__":
    main()
