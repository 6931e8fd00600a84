"""Train FFA-LoRA: LoRA with A frozen (Sun et al., 2024).

    B <- mean_c B_c,    A fixed

A is drawn from the seed on both sides and never travels. Clients train B, and the server takes the
mean. It is exact: mean(B_c) A = mean(B_c A). For the same parameter budget and square matrices, its
rank is twice that of methods that train both factors.
"""

from ravan_flwr.methods.extensions import SumsChanges
from ravan_flwr.methods.lora import LoraMethod


class FFALora(SumsChanges, LoraMethod):
    """State and upload: {"B"}."""

    trained = in_state = sent = ("B",)


METHOD = FFALora
