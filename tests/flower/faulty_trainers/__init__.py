"""examples/own_trainer with clients that are wrong, each in its own way, by partition."""

# What a client does, in order of the partitions; from which round on it is rejected, and why.
FAULTS = {
    "nothing": None,
    "nothing either": None,
    "ends early": None,  # which is reported, and counts
    "has no model of PEFT": (1, "got a ViTForImageClassification .* make it with get_peft_model"),
    "has another tuner": (1, "adapter 'default' is of a IA3Model, expected heads or a LoRA"),
    "trains less from the second round on": (2, "classifier.* is no longer trained, expected"),
    "learns from NaN": (1, "is not finite after training, expected finite numbers; lower"),
}
