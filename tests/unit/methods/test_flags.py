"""What each method is, as its paper has it: the flags decide which options a run may have."""

from ravan_flwr.methods import METHODS

# The flags that nearly all methods have.
USUAL = {"averages", "frozen_backbone", "serves", "sparse_down", "sparse_up"}
FLAGS = USUAL | {
    "sums_changes", "asynchronous", "by_example", "personalised", "mixes", "all_clients", "pools",
    "has_heads",
}  # fmt: skip
# A mean of linear parts: the next state is the last one plus the mean of the clients' changes.
LINEAR = USUAL | {"sums_changes", "asynchronous"}
# The server multiplies, decomposes or weighs what clients send: no mean of the uploads.
COMBINED = USUAL - {"averages"}
PAPERS = {
    # Heads s_i B_i H_i A_i with frozen A and B, whose s H are averaged head by head.
    "ravan": LINEAR | {"by_example", "has_heads"},
    # Full fine-tuning: the weights are the state, so a broadcast cannot be thinned out.
    "full": LINEAR - {"frozen_backbone", "sparse_down"},
    # FedIT: means of B and of A, factor by factor.
    "fedit": LINEAR | {"by_example"},
    # FedEx-LoRA adds the residual of the mean of products to the pretrained weights.
    "fedex-lora": COMBINED - {"frozen_backbone"} | {"by_example"},
    # FFA-LoRA: A frozen, B averaged.
    "ffa-lora": LINEAR | {"by_example"},
    # Fed-SB and SLoRA begin with a round of full fine-tuning, then average changes.
    "fed-sb": USUAL - {"frozen_backbone"} | {"asynchronous"},
    "slora": USUAL - {"frozen_backbone"} | {"asynchronous"},
    # Zero-padding with norms as weights; SVD of the mean of products; stacks and blocks of ranks.
    "hetlora": COMBINED | {"by_example"},
    "flexlora": COMBINED | {"by_example"},
    "fedsvd": COMBINED | {"by_example"},
    "raflora": COMBINED | {"by_example"},
    # FLoRA stacks the clients' factors and adds the product to the weights.
    "flora": COMBINED - {"frozen_backbone"} | {"by_example"},
    # What the factors do not hold goes into the weights: the rest of an SVD, the gain over a start
    # from principal directions, the leading part of the stacked product.
    "fedmomentum": COMBINED - {"frozen_backbone"} | {"by_example"},
    "frlora": COMBINED - {"frozen_backbone"} | {"by_example"},
    "florist": COMBINED - {"frozen_backbone"} | {"by_example"},
    # Rotations, partial ranks, and alternation of the factor that is trained, before a mean.
    "fedrot-lora": USUAL | {"by_example"},
    "fed-plora": USUAL | {"by_example"},
    "fslora": USUAL | {"by_example"},  # random sketches: changes averaged over all clients
    "rolora": USUAL | {"by_example"},
    # LoRA-FAIR corrects B on the server.
    "lora-fair": COMBINED | {"by_example"},
    # FedALT: the rest of the world's adapter, mixed with a client's own by the input.
    "fedalt": USUAL - {"averages", "sparse_down", "sparse_up"}
    | {"sums_changes", "personalised", "mixes", "all_clients", "has_heads"},
    # FedSA-LoRA shares A and keeps B; FedDPA mixes a global and a personal LoRA.
    "fedsa-lora": USUAL - {"serves"} | {"personalised"},
    "feddpa": USUAL | {"personalised", "mixes"},
    # FedRPCA takes the robust principal components of the clients' updates.
    "fedrpca": COMBINED | {"by_example", "has_heads"},
    "none": LINEAR | {"by_example"},
    "local": COMBINED - {"serves"} | {"personalised", "all_clients"},
    "centralised": COMBINED | {"pools"},
}


def test_methods_have_the_flags_of_their_papers():
    """All in one test, so that `make test` has every method."""
    found = {name: {flag for flag in FLAGS if getattr(METHODS[name], flag)} for name in METHODS}
    assert found == PAPERS


def test_the_table_has_every_flag():
    flags = {
        name for name in dir(METHODS["ravan"]) if isinstance(getattr(METHODS["ravan"], name), bool)
    }
    assert flags == FLAGS
