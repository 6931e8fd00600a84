"""Train no adapter, the reference that says what adapters are worth.

With `classifier=trained` the classifier alone is trained, travels and is averaged; the network
below it stays as it was pretrained. With `classifier=frozen` nothing is trained at all: one round
of it measures the pretrained network as it is.
"""

import dataclasses
from collections.abc import Sequence

from ravan_flwr.adapters import Layer
from ravan_flwr.methods.base import Settings
from ravan_flwr.methods.extensions import SumsChanges
from ravan_flwr.methods.lora import LoraMethod


class NoAdapter(SumsChanges, LoraMethod):
    """Keep an empty state; the network has a LoRA of rank 1 in it, which is zero and stays so."""

    trained = in_state = sent = ()

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(dataclasses.replace(settings, rank=1), layers, size)


METHOD = NoAdapter
