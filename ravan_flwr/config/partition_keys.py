"""List the keys of a run config that say how simulated clients share the data."""

from ravan_flwr.config.key import AUTO, Key

PARTITION_KEYS: dict[str, Key] = {
    "partition": Key(
        str,
        AUTO,
        "how simulated clients divide the data: alike, or with different shares of the classes",
        ("iid", "dirichlet", "dirichlet-by-client"),
        from_preset=True,
    ),
    "partition-alpha": Key(
        float,
        AUTO,
        "concentration of the Dirichlet distribution: the smaller, the more clients differ",
        above=0,
        high=1_000_000,
        from_preset=True,
    ),
}
