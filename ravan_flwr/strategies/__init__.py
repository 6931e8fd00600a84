"""Flower strategies for RAVAN and its baselines, and functions for their clients (docs/library.md).

RavanStrategy, FedSBStrategy        aggregate the arrays of a PEFT model with RavanConfig
FedExLoraStrategy, FedMomentumStrategy, FFALoraStrategy, HetLoraStrategy, FlexLoraStrategy,
RaFLoraStrategy, FedSVDStrategy, FedRotLoraStrategy, LoraFairStrategy
                                    aggregate those of one with LoraConfig

load_arrays, choose, collect_arrays, restore            a client's round
federated                                               a ClientApp of a Trainer, or of a function
"""

from ravan_flwr.strategies.client import choose, collect_arrays, load_arrays, restore
from ravan_flwr.strategies.federated import federated
from ravan_flwr.strategies.lora import (
    FedExLoraStrategy,
    FedMomentumStrategy,
    FedRotLoraStrategy,
    FedSVDStrategy,
    FFALoraStrategy,
    FlexLoraStrategy,
    HetLoraStrategy,
    LoraFairStrategy,
    RaFLoraStrategy,
)
from ravan_flwr.strategies.ravan import FedSBStrategy, RavanStrategy

__all__ = [
    "FFALoraStrategy", "FedExLoraStrategy", "FedMomentumStrategy", "FedRotLoraStrategy",
    "FedSBStrategy", "FedSVDStrategy", "FlexLoraStrategy", "HetLoraStrategy", "LoraFairStrategy",
    "RaFLoraStrategy", "RavanStrategy", "choose", "collect_arrays", "federated", "load_arrays",
    "restore",
]  # fmt: skip
