"""Train FedSA-LoRA: both factors of a LoRA, of which A alone is shared (Guo et al., 2025).

    A <- mean_c A_c,    B_c stays with client c

So client c predicts with W + scale B_c A, and there is no model of the server's. A holds what is
common to all, says the paper (arXiv 2410.01463), and B what is a client's own. As in its authors'
code a classifier that is trained stays with B.

A client's B is zero before its first round, and is what its own steps made of it since. Between
them A has moved: B_c A is not what the client had at the end of its last round, but for a client
alone.
"""

from ravan_flwr.methods.lora import PersonalLora


class FedSALora(PersonalLora):
    """Keep the state {"A"}; an upload has the same, and {"B"} is a client's own."""

    in_state = sent = ("A",)


METHOD = FedSALora
