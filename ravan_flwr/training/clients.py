"""Count the clients of a simulation: as many as asked for, or as the data has users."""

from ravan_flwr.config.run_config import Config


def number_of_clients(config: Config, asked: int | None = None) -> int:
    """Return how many clients there are: as asked, or as the preset says.

    A natural partition has a client for each value of its column: the data is read, and any other
    number is refused.
    """
    said = config.num_clients if asked is None else asked
    if config.division == "natural":
        from ravan_flwr.data.examples import load_splits  # noqa: PLC0415 (slow)
        from ravan_flwr.data.partition import (  # noqa: PLC0415
            check_column,
            check_natural,
            column_of,
            values_of,
        )

        train, column = load_splits(config.data)["train"], column_of(config.data)
        check_column(config.data, train)
        found = len(set(values_of(train, column)))
        check_natural(found, found if said is None else said, column)
        said = found
    assert said is not None  # the configuration has a number then
    if 0 < said < config.min_replies:
        raise ValueError(
            f"min-replies = {config.min_replies}: got num-clients = {said}, and a round gets no "
            "more replies than that; start more clients, or lower min-replies (with "
            "secure-aggregation=true it is secure-minimum at least)"
        )
    return said
