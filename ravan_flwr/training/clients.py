"""Count the clients of a simulation: as many as asked for, or as the data has users."""

from ravan_flwr.config.run_config import Config


def number_of_clients(config: Config, num_clients: int | None = None) -> int:
    """Return how many clients there are: as asked, or as the preset says.

    A natural partition has a client for each value of its column: the data is read, and any other
    number is refused.
    """
    number = config.num_clients if num_clients is None else num_clients
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
        num_values = len(set(values_of(train, column)))
        check_natural(num_values, num_values if number is None else number, column)
        number = num_values
    assert number is not None  # the configuration has a number then
    if 0 < number < config.min_replies:
        raise ValueError(
            f"min-replies = {config.min_replies}: got num-clients = {number}, and a round gets no "
            "more replies than that; start more clients, or lower min-replies (with "
            "secure-aggregation=true it is secure-minimum at least)"
        )
    return number
