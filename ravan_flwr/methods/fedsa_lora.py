"""Train FedSA-LoRA: a LoRA whose A is shared, and whose B is personal (Guo et al., 2025).

    A <- mean_c A_c,    B_c stays with client c

So client c predicts with W + scale B_c A, and the server has no model of its own. According to the
paper (arXiv 2410.01463), A learns knowledge common to all clients, and B client-specific knowledge.
As in its authors' code, a trained classifier is personal, too.

A client's B is zero before its first round; only its own steps change it. Between them the server
changes A. So B_c A differs from the client's product at the end of its last round, unless it was
the only client.
"""

from ravan_flwr.methods.lora import PersonalLora


class FedSALora(PersonalLora):
    """State and upload: {"A"}; personal: {"B"}."""

    in_state = sent = ("A",)


METHOD = FedSALora
