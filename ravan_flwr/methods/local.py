"""Train each client alone, the reference that says what federation is worth.

Every client trains FedIT's LoRA (fedit.py) from the same start, on its own examples, in every
round: so it takes all of a run's local steps. Nothing travels, and the state has no tensors.
"""

from ravan_flwr.methods.lora import PersonalLora


class Local(PersonalLora):
    """Keep an empty state; {"B", "A"} are a client's own."""

    in_state = sent = ()


METHOD = Local
