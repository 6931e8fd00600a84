"""List the keys of a run config that say how simulated clients share the data."""

from ravan_flwr.config.key import AUTO, Key

PARTITION_KEYS: dict[str, Key] = {
    "partition": Key(
        str,
        AUTO,
        "how simulated clients divide the data: alike, with different shares of the classes, one "
        "client for each value of a column, with few classes each, or in different sizes",
        (
            "iid",
            "dirichlet",
            "dirichlet-by-client",
            "natural",
            "pathological",
            "shards",
            "linear",
            "square",
            "exponential",
        ),
        from_preset=True,
    ),
    "partition-by": Key(
        str,
        AUTO,
        "column by which clients differ, or whose values they are (natural); auto: the preset's, "
        "or the label",
    ),
    "partition-alpha": Key(
        float,
        AUTO,
        "concentration of the Dirichlet distribution: the smaller, the more clients differ",
        above=0,
        high=1_000_000,
        from_preset=True,
    ),
    "classes-per-client": Key(
        int,
        AUTO,
        "classes that each client has under partition=pathological",
        low=1,
        high=1_000_000,
        from_preset=True,
    ),
    "shards-per-client": Key(
        int,
        AUTO,
        "pieces of the examples, sorted by class, that each client has under partition=shards",
        low=1,
        high=1_000_000,
        from_preset=True,
    ),
}
