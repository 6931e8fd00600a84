"""Count the clients of a simulation: the requested number, or the number of users in the data."""

from ravan_flwr.config.keys import check_num_clients
from ravan_flwr.config.run_config import Config


def number_of_clients(config: Config, num_clients: int | None = None) -> int:
    """Return the number of clients: the argument, or the number in the configuration.

    A natural partition has one client for each value of its column. The data is then read, and any
    other number raises ValueError.
    """
    number = config.num_clients if num_clients is None else num_clients
    if config.partition_scheme == "natural":
        from ravan_flwr.data.examples import load_splits  # noqa: PLC0415 (slow)
        from ravan_flwr.data.partition import (  # noqa: PLC0415
            check_natural,
            find_column,
            read_values,
        )

        train, column = load_splits(config.data)["train"], find_column(config.data)
        num_values = len(set(read_values(train, column)))
        check_natural(num_values, num_values if number is None else number, column)
        number = num_values
    number = check_num_clients(number)
    if number < config.min_replies:
        raise ValueError(
            f"min-replies = {config.min_replies}: got num-clients = {number}, and a round gets no "
            "more replies than that; start more clients, or lower min-replies (with "
            "secure-aggregation=true it is secure-minimum at least)"
        )
    return number
