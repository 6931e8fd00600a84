"""What a run imports by its settings: its transport, its release, and the optional parts.

A run imports the ones that its settings ask for, and no other. Nothing else names a module of
`extras/`, which may be missing.
"""

from pkgutil import resolve_name
from typing import Any

# How messages and replies travel, and when the state moves on (`Config.aggregation`).
TRANSPORTS = {
    "sync": "ravan_flwr.server.transports:Plain",
    "async": "ravan_flwr.server.buffered:Buffered",
}
# How updates become the next state (`Config.release`).
RELEASES = {
    "mean": "ravan_flwr.server.releases:Release",
    "client": "ravan_flwr.server.noised:Noised",
    "example": "ravan_flwr.extras.example_privacy.release:Counted",
    "masked": "ravan_flwr.extras.secure.release:Masked",
}

# Secure aggregation. The messages of a round, in their order; for one of them a client trains.
TRAINING_PHASE = "masked"
PHASES = ("keys", "shares", TRAINING_PHASE, "agree", "unmask")
PHASES_WITHOUT_TORCH = tuple(phase for phase in PHASES if phase != TRAINING_PHASE)
ANSWER_PHASE = "ravan_flwr.extras.secure.phases:answer_phase"
CHECK_KEYS = "ravan_flwr.extras.secure.phases:check_keys"
MAKE_KEYS = "ravan_flwr.extras.secure.node_keys:make_keys"
ROUND_BYTES = "ravan_flwr.extras.secure.cost:round_bytes"

# Delivery of the result to devices.
DELIVER_AT_END = "ravan_flwr.extras.delivery.server:DeliverAtEnd"
DELIVER_LATER = "ravan_flwr.extras.delivery.server:deliver_later"

# Differential privacy of single examples.
CHECK_PRIVATE = "ravan_flwr.extras.example_privacy.client:check_client"
TRAIN_PRIVATE = "ravan_flwr.extras.example_privacy.client:train_within_budget"
ENCODE_EACH = "ravan_flwr.extras.example_privacy.steps:encode_each"
EXAMPLE_GRADIENTS = "ravan_flwr.extras.example_privacy.gradients:ExampleGradients"
PLAN_RELEASES = "ravan_flwr.extras.example_privacy.cost:plan_releases"

# A client's answers to messages that only these parts send.
OPTIONAL_ANSWERS = {
    TRAINING_PHASE: "ravan_flwr.extras.secure.train:train_masked",
    "deliver": "ravan_flwr.extras.delivery.client:keep_result",
}


def load(place: str) -> Any:
    """Return the object of that name; raise ValueError if its part is not installed."""
    try:
        return resolve_name(place)
    except ModuleNotFoundError as error:
        module = place.partition(":")[0]
        if not module.startswith(f"{error.name}"):
            raise
        raise ValueError(
            f"{module}: got an installation without it, expected the whole package, since a "
            "setting of this run needs it; install ravan-flwr again, or leave the setting out"
        ) from error
