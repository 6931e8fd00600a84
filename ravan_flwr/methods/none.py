"""Train no adapter: the baseline that shows the benefit of adapters.

With `classifier=trained` this is a linear probe: only the classifier is trained, sent and averaged,
on the frozen pretrained network. With `classifier=frozen` nothing is trained: one round evaluates
the pretrained network without training (zero-shot).
"""

import dataclasses
from collections.abc import Sequence

from ravan_flwr.adapters import Layer
from ravan_flwr.methods.base import Settings
from ravan_flwr.methods.extensions import SumsChanges
from ravan_flwr.methods.lora import LoraMethod


class NoAdapter(SumsChanges, LoraMethod):
    """State and upload: empty; the network contains a LoRA of rank 1 that stays zero."""

    trained = in_state = sent = ()

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(dataclasses.replace(settings, rank=1), layers, size)


METHOD = NoAdapter
