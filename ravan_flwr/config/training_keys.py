"""List the keys that say how a client trains."""

from ravan_flwr.config.key import AUTO, Key

TRAINING: dict[str, Key] = {
    "local-steps": Key(
        int,
        AUTO,
        "optimiser steps of a client in each round",
        low=1,
        high=1_000_000,
        from_preset=True,
    ),
    "local-epochs": Key(
        float,
        AUTO,
        "in place of local-steps: passes of a client over its examples in each round, so that "
        "who has more takes more steps",
        above=0,
        high=10_000,
        from_preset=True,
    ),
    "batch-size": Key(int, AUTO, "examples in each step", low=1, high=65_536, from_preset=True),
    "micro-batch-size": Key(
        int,
        AUTO,
        "examples of a step at a time, whose gradients are added up, to save memory; auto: all",
        low=1,
        high=65_536,
    ),
    "micro-batch-tokens": Key(
        int,
        AUTO,
        "tokens of a step at a time, padding included, as for micro-batch-size; auto: all",
        low=1,
        high=2**31 - 1,
    ),
    "packing": Key(
        bool,
        False,
        "lay short texts of a language model's batch side by side, with less padding",
    ),
    "batching": Key(
        str,
        "random",
        "examples of a step: drawn at random, or texts of like lengths together, with less padding",
        ("random", "length"),
    ),
    "learning-rate": Key(float, AUTO, "learning rate of the clients' Adam", above=0, high=10),
    "learning-rate-schedule": Key(
        str,
        AUTO,
        "learning rate by round: the same, or from learning-rate down to final-learning-rate",
        ("constant", "cosine"),
        from_preset=True,
    ),
    "final-learning-rate": Key(
        float,
        AUTO,
        "learning rate of the last round under a cosine; auto: the preset's, or a fiftieth of "
        "learning-rate",
        low=0,
        high=10,
        from_preset=True,
    ),
    "warm-up-rounds": Key(
        int, 0, "first rounds, in which the learning rate rises", low=0, high=1_000_000
    ),
    "weight-decay": Key(
        float, 0.0, "decay of what is trained, as AdamW's, in each step", low=0, high=1e3
    ),
    "max-gradient-norm": Key(
        float, 0.0, "norm to which a step's gradient is cut; 0: none", low=0, high=1e9
    ),
    "proximal-mu": Key(
        float, 0.0, "FedProx: strength of the pull towards the round's start", low=0, high=1e6
    ),
    "max-length": Key(int, AUTO, "tokens that are read of each text", low=1, high=1_048_576),
    "device": Key(
        str,
        AUTO,
        "where to compute; auto: a GPU if there is one",
        pattern=r"(auto|cpu|cuda|mps)(:\d+)?",
        in_words="auto, cpu, cuda, cuda:N or mps",
        of_result=False,
    ),
    "processes": Key(
        int,
        AUTO,
        "clients at work at a time in a run in process, each in a process of its own; auto: "
        "as many as there are cores for, where that pays",
        low=1,
        high=4096,
        of_result=False,
    ),
    "precision": Key(
        str,
        AUTO,
        "numbers in which training steps and evaluations are computed",
        ("float32", "bfloat16", "float16"),
        from_preset=True,
    ),
    "gradient-checkpointing": Key(
        bool,
        AUTO,
        "keep few activations and compute the others twice, to save memory",
        from_preset=True,
    ),
    "backbone-dtype": Key(
        str,
        AUTO,
        "numbers in which the frozen backbone is kept, which changes no result where the "
        "model's files have no more bits; auto: as in the files with CUDA, float32 elsewhere",
        (AUTO, "float32", "bfloat16", "float16"),
    ),
    "quantize": Key(
        str,
        AUTO,
        "bits in which bitsandbytes keeps the frozen backbone, to save memory; auto: the "
        "preset's, or none of a method that changes the backbone",
        ("none", "8bit", "4bit"),
        from_preset=True,
    ),
}
