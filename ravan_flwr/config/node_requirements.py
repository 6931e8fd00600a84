"""Refuse runs that do not protect a device as its node config wants them to.

What a device can see by itself is what the run's settings say, and what it does itself: it masks,
or it noises its own gradients. How much noise a server adds it must take on the server's word.
docs/deploy.md says so to who sets these keys.
"""

from ravan_flwr.config.node_config import Node
from ravan_flwr.config.run_config import Config


def check_node_requirements(node: Node, config: Config) -> None:
    """Raise ValueError unless a run has what this device insists on."""
    if node.require_secure_aggregation and not config.secure_aggregation:
        raise ValueError(
            "require-secure-aggregation = true: got a run with secure-aggregation = false; this "
            "device takes part in runs with masked uploads alone"
        )
    if node.max_epsilon is None:
        return
    what = f"max-epsilon = {node.max_epsilon:g}"
    if config.privacy == "none":
        raise ValueError(
            f"{what}: got a run with privacy = 'none'; this device takes part in private runs alone"
        )
    if config.delta > node.max_delta:
        raise ValueError(
            f"{what}: got a run with delta = {config.delta:g}, expected {node.max_delta:g} "
            "(max-delta) at most"
        )
    if config.noise_cohort is not None:
        raise ValueError(
            f"{what}: got a run with noise-cohort = {config.noise_cohort}, whose epsilon is that "
            "of a larger federation; this device takes part in runs without it alone"
        )
    if config.privacy == "client" and not config.secure_aggregation:
        _check_word(what, node.max_epsilon, config.epsilon)


def _check_word(what: str, most: float, epsilon: float | None) -> None:
    """Check what the server promises, where it alone adds the noise."""
    if epsilon is None or epsilon > most:
        raise ValueError(
            f"{what}: got a run with privacy = 'client' and epsilon = {epsilon or 'auto'}, "
            f"expected epsilon = {most:g} at most, which the server then keeps to"
        )


def limit_of(node: Node, epsilon: float | None) -> float | None:
    """Return the lower of two limits: the run's epsilon and the device's, if there are any."""
    limits = [limit for limit in (node.max_epsilon, epsilon) if limit is not None]
    return min(limits, default=None)
