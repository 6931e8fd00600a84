"""Adapt frozen linear layers with small trainable adapters, in pure torch."""

from ravan_flwr.adapters.attach import Layer, attach, find_layers, without_adapters
from ravan_flwr.adapters.bases import make_bases
from ravan_flwr.adapters.lora import LoRALinear
from ravan_flwr.adapters.multihead import MultiHeadLinear

__all__ = [
    "Layer",
    "LoRALinear",
    "MultiHeadLinear",
    "attach",
    "find_layers",
    "make_bases",
    "without_adapters",
]
