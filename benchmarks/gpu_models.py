"""Presets with generated weights and examples, for measurements on a GPU without a network."""

import argparse
from unittest import mock

from ravan_flwr.config.presets import read_preset
from ravan_flwr.config.run_config import read_config
from ravan_flwr.specs import Scalar
from ravan_flwr.training.model_and_data import ModelAndData
from tests.support import tiny
from tests.support.tiny import ARCHITECTURES, save_data, save_model

PRESETS = ("digits-vit", "cifar100-vit-b16", "glue-llama")
SMALL: dict[str, Scalar] = {"lora-rank": 4, "batch-size": 4}


def loaded_of(options: argparse.Namespace, preset: str, **settings: Scalar) -> ModelAndData:
    """Return a preset's model and data, with generated weights and examples."""
    return ModelAndData(read_config(settings_of(options, preset, **settings)))


def settings_of(options: argparse.Namespace, preset: str, **settings: Scalar) -> dict[str, Scalar]:
    """Return the run config; model and examples are in the folder, once for all parts."""
    device = "cpu" if options.device == "pretend" else options.device
    found: dict[str, Scalar] = {"preset": preset, "device": device, "partition": "iid"}
    found |= {"precision": precision_of(options)} | (SMALL if options.small else {})
    if preset in ARCHITECTURES:
        place = options.folder / f"{preset}{'-small' * options.small}"
        if not place.exists():
            task = "rte" if preset == "glue-llama" else ""
            rows = (40, 40) if options.small else (640, 2048)
            shape = {} if options.small else dict(read_preset(preset).model.shape)
            shape.pop("model_type", None)
            # Full texts are as long as the preset's `max-length`, or longer.
            with mock.patch.object(tiny, "MOST_WORDS", tiny.MOST_WORDS if options.small else 200):
                save_data(preset, place / "data", task, *rows)
            save_model(ARCHITECTURES[preset], place / "model", **shape)
        found |= {"model": str(place / "model"), "data": str(place / "data")}
        found |= {"glue-task": "rte"} if preset == "glue-llama" else {}
    return found | settings


def precision_of(options: argparse.Namespace) -> str:
    """Return the precision to measure; the tests' accelerator has no autocast."""
    return "float32" if options.device == "pretend" else "bfloat16"


def failure(error: Exception) -> str:
    """Return one line with the reason why a measurement failed."""
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
