"""Train in one place, the reference that says what federation costs.

One client a round trains FedIT's LoRA (fedit.py) on the examples that all clients train on, and
the server takes what it sends. So there are a run's rounds x local-steps steps in all, one after
the other, as many as a client has that takes part in every round. As with every method Adam's
moments begin anew in each round.

Only clients that share one data set can do this, in a simulation: what a device has of its own
stays there.
"""

from ravan_flwr.methods.lora import LoraMethod


class Centralised(LoraMethod):
    """Send B and A to one client and back; the next state is what it sends."""


METHOD = Centralised
