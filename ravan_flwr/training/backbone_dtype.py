"""Decide in which dtype a run keeps its frozen backbone (adapters/stored.py keeps it so)."""

import torch

from ravan_flwr.config.checks import trains_backbone
from ravan_flwr.config.keys import AUTO
from ravan_flwr.config.run_config import Config
from ravan_flwr.data.hub_errors import NotHereError
from ravan_flwr.training.network import stored_dtype

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def backbone_dtype(config: Config, device: str) -> torch.dtype:
    """Find the dtype for a device of that type; `auto`: the checkpoint's own 16 bits, on a GPU.

    Pretrained weights that are trained, be it in a round before the first, are in float32: in 16
    bits a weight of 0.02 does not move by steps of 1e-5.
    """
    if config.backbone_dtype != AUTO:
        return DTYPES[config.backbone_dtype]
    if device != "cuda" or _trains_backbone(config):
        return torch.float32
    try:
        own = stored_dtype(config.model)
    except NotHereError:  # a plan of a model that is not here yet
        return torch.float32
    return own if own in DTYPES.values() else torch.float32


def keeps_casts(config: Config) -> bool:
    """Tell whether weights in the 16 bits of the precision stay from step to step.

    With gradient checkpointing no more than one block's are there at a time.
    """
    whole = config.precision == "float32" or config.gradient_checkpointing
    return not whole and not _trains_backbone(config)


def _trains_backbone(config: Config) -> bool:
    return trains_backbone({"method": config.method, "init": config.init})


def likely_device(name: str) -> str:
    """Name the type of device that `pick_device` would pick, be it here or not."""
    if name == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name).type
