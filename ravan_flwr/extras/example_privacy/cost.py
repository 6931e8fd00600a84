"""Describe the releases of a run with `privacy=example`, for a plan."""

from ravan_flwr.config.run_config import Config
from ravan_flwr.extras.example_privacy.gradients import check_trained
from ravan_flwr.extras.example_privacy.steps import sampling_rate
from ravan_flwr.training.cost import Skeleton
from ravan_flwr.training.model_and_data import get_model_and_data


def plan_releases(config: Config, skeleton: Skeleton, num_clients: int) -> tuple[int, float, str]:
    """Return the releases of a round, their sampling rate, and what they protect.

    They are those of the client with the fewest examples, whose epsilon is the largest.
    """
    skeleton.receive(1.0)
    check_trained(skeleton.network, skeleton.trained())
    fewest = min(filter(None, get_model_and_data(config).partition_sizes(num_clients)))
    protected = f"of each example of the client with the fewest ({fewest}), in a step"
    return config.local_steps or 0, sampling_rate(config.batch_size, fewest), protected
