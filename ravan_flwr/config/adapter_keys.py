"""List the keys that say what is trained: ranks, heads, their start and their choice."""

from ravan_flwr.config.key import AUTO, Key

# Values of `init` that make bases of the clients' examples, in a round before the first.
BASES_OF_DATA = ("data-aware", "first-round")

ADAPTERS: dict[str, Key] = {
    "targets": Key(
        str,
        AUTO,
        "layers to adapt: the ends of their names, with commas between; auto: query and value",
    ),
    "heads": Key(
        int, AUTO, "RAVAN's heads in each adapted matrix", low=1, high=4_096, from_preset=True
    ),
    "rank": Key(
        int,
        AUTO,
        "rank of an adapter, or of each head; auto: the preset's, or the largest within the "
        "parameter budget",
        low=1,
        high=65_536,
    ),
    "lora-rank": Key(
        int,
        AUTO,
        "parameter budget: as many parameters as a LoRA of this rank has",
        low=1,
        high=65_536,
    ),
    "parameter-budget": Key(
        str,
        "lower",
        "which of the preset's two parameter budgets, with its ranks and learning rates",
        ("lower", "higher"),
    ),
    "lora-scale": Key(
        float, AUTO, "scale of a LoRA's update, alpha / r", above=0, high=1e3, from_preset=True
    ),
    "init": Key(
        str,
        AUTO,
        "how RAVAN's frozen bases B and A are made",
        ("gram-schmidt", "normal", "constant", "shared-subspace", *BASES_OF_DATA),
        from_preset=True,
    ),
    "init-scale": Key(
        float,
        1.0,
        "norm of the columns of RAVAN's B and the rows of its A, and of the rows of a LoRA's A",
        above=0,
        high=1e3,
    ),
    "calibration-steps": Key(
        int,
        8,
        "batches from which each client helps to make data-aware bases",
        low=1,
        high=1_000_000,
    ),
    "calibration-learning-rate": Key(
        float,
        AUTO,
        "learning rate of the first round of Fed-SB and of init=first-round; auto: the preset's "
        "for method full, or learning-rate",
        above=0,
        high=10,
    ),
    "scaling": Key(
        str, "trained", "train the scale of each head, or keep it at 1", ("trained", "constant")
    ),
    "scoring": Key(
        str,
        "random",
        "how a client with a small budget ranks the heads",
        ("random", "weight", "gradient"),
    ),
    "selection": Key(
        str,
        "layer",
        "train the best heads of each layer, or the best of all layers together",
        ("layer", "global"),
    ),
    "head-mean": Key(
        str,
        "trained",
        "average a head over the clients that trained it, or over all of the round, where who did "
        "not train it has left it as it was",
        ("trained", "all"),
    ),
    "classifier": Key(
        str,
        AUTO,
        "keep the classifier random and frozen, or train and average it",
        ("frozen", "trained"),
        from_preset=True,
    ),
    "layer-form": Key(
        str,
        AUTO,
        "compute multi-head layers with the update merged into the weight, or beside it; auto: "
        "what is less work, and exact",
        (AUTO, "merged", "factored"),
    ),
}
