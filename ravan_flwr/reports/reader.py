"""Save what turns examples into numbers beside an exported model, so that no one has to guess it.

- images: `preprocessor_config.json`. That of the model, or, for a model that has none, what the
  run did instead: the model's size, and pixels from -1 to 1.
- texts: the tokenizer's files, with the run's `max-length` as the length to cut texts off at (not
  for a language model, which goes on with texts of any length).
- `labels.json`: the names of the classes in the order of their numbers, where there are some.
"""

import copy
import json
from pathlib import Path
from typing import Any

from ravan_flwr.data.hub_errors import no_bars
from ravan_flwr.data.model_folder import read_json
from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.training.model_and_data import ModelAndData

PROCESSOR = "preprocessor_config.json"
_BILINEAR = 2  # of Pillow


def write_reader(folder: Path, bench: ModelAndData) -> None:
    """Write the processor or the tokenizer, and the names of the labels."""
    reader = bench.task.reader
    if reader is None:
        _write_json(folder / PROCESSOR, _processor(bench))
    elif hasattr(reader, "backend_tokenizer"):
        _save_tokenizer(folder, reader, bench.task.cut_at)
    else:
        _save_processor(folder, reader)
    if labels := bench.task.data.labels:
        _write_json(folder / "labels.json", list(labels))


def _processor(bench: ModelAndData) -> dict[str, Any]:
    """Describe what the run does with the images of a model that has no processor."""
    shapes = bench.task.shapes(bench.model.network.config, 1)
    _, channels, height, width = shapes["pixel_values"][0]
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": _BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * channels,
        "image_std": [0.5] * channels,
    }


def _save_processor(folder: Path, reader: Any) -> None:
    """Save an image processor under the name that every version of transformers knows."""
    with no_bars():
        reader.save_pretrained(folder)
    content = read_json(folder / PROCESSOR, str(folder))
    kind = str(content.get("image_processor_type", ""))
    _write_json(folder / PROCESSOR, content | {"image_processor_type": kind.removesuffix("Pil")})


def _save_tokenizer(folder: Path, reader: Any, max_length: int) -> None:
    """Save a tokenizer that cuts texts off where the run did, when it is asked to cut."""
    tokenizer = copy.deepcopy(reader)
    tokenizer.backend_tokenizer.no_padding()  # as the run's last batch was padded
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.model_max_length = max_length
    with no_bars():
        tokenizer.save_pretrained(folder)


def _write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
