"""Train FedIT: federated averaging of LoRA's B and A, each separately (Zhang et al., 2024).

    B <- mean_c B_c,    A <- mean_c A_c

It is not exact: the product of the means is not the mean of the products. The error,
mean(B A) - mean(B) mean(A) = mean((B_c - mean B) (A_c - mean A)), grows with the differences
between clients. FedEx-LoRA (fedex_lora.py) adds it to W. With one client a round FedIT is exact.
"""

from ravan_flwr.methods.extensions import SumsChanges
from ravan_flwr.methods.lora import LoraMethod


class FedIT(SumsChanges, LoraMethod):
    """State and upload: {"B", "A"}; `LoraMethod` averages each."""


METHOD = FedIT
