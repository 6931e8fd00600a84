"""Train FedIT: federated averaging of LoRA's B and A, each by itself (Zhang et al., 2024).

    B <- mean_c B_c,    A <- mean_c A_c

It is not exact: the product of the means is not the mean of the products. The difference,
mean(B A) - mean(B) mean(A) = mean((B_c - mean B) (A_c - mean A)), grows with how far the
clients are apart; FedEx-LoRA (fedex_lora.py) adds it to W.
"""

from ravan_flwr.methods.extensions import SumsChanges
from ravan_flwr.methods.lora import LoraMethod


class FedIT(SumsChanges, LoraMethod):
    """Average B and A each by itself, as `LoraMethod` does; nothing is added."""


METHOD = FedIT
