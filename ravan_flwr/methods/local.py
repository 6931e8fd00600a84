"""Train each client alone: the baseline that shows the benefit of federation.

Every client trains FedIT's LoRA (fedit.py) in every round, from the same start and on its own
examples, so that it takes all local steps of the run. Nothing is sent; the state has no tensors.
"""

from ravan_flwr.methods.lora import PersonalLora


class Local(PersonalLora):
    """State and upload: empty; personal: {"B", "A"}."""

    in_state = sent = ()


METHOD = Local
