"""Train in one place: the baseline that shows the cost of federation.

One client a round trains FedIT's LoRA (fedit.py) on the training examples of all clients, and its
upload is the next state. So a run has rounds x local-steps steps in sequence, as many as a client
that trains in every round. As in every method, Adam's moments are reset in each round.

This needs clients that share one data set, as in a simulation: the examples of a device never leave
it.
"""

from ravan_flwr.methods.lora import LoraMethod


class Centralised(LoraMethod):
    """State and upload: {"B", "A"}; the next state is the upload of one client."""


METHOD = Centralised
