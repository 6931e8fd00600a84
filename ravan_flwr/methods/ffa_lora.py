"""Train FFA-LoRA: LoRA with A frozen (Sun et al., 2024).

A is drawn from the seed on both sides and never travels; clients train B and the server takes
the mean, which is exact: mean(B_c) A = mean(B_c A). At one number of parameters its rank is
twice that of the other LoRA methods, where matrices are square.
"""

from ravan_flwr.methods.extensions import SumsChanges
from ravan_flwr.methods.lora import LoraMethod


class FFALora(SumsChanges, LoraMethod):
    """Keep the state {"B"}; an upload has the same."""

    trained = in_state = sent = ("B",)


METHOD = FFALora
