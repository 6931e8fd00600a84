"""Keep what the server carries from one round to the next: the model's tensors, and its memory.

The memory is what a run that goes on needs beside the tensors: the optimiser's moments, and the
changes that were usual (limit.py). Both are saved with every checkpoint.
"""

from collections.abc import Mapping

from torch import Tensor

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.wire import check_room
from ravan_flwr.methods.base import Method, Tensors
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.optimizer import ServerOptimizer
from ravan_flwr.server.update_norm_check import UpdateNormCheck

# What the names of the memory's tensors begin with.
MOMENTS = "server-optimizer/"
CHANGES = "usual-change/"


class ServerState:
    """Hold the global state of the model, and take the steps from one round to the next.

    `derived` is the fingerprint of the model that clients must have; a calibration changes it.
    """

    def __init__(self, config: Config, derived: list[float], memory: Tensors | None = None) -> None:
        self.tensors: Tensors = {}
        self.derived = derived
        self._robust, self._wire = config.robust, config.wire
        self._moments = _named(memory or {}, MOMENTS)
        step = config.learning_rate * (config.local_steps or 0)  # 0: each client has its own
        usual = _named(memory or {}, CHANGES)
        self._limit = UpdateNormCheck(config.max_update_norm, step, usual, config.wire)
        self._optimizer = ServerOptimizer(*config.parts("server-optimizer").values())

    @property
    def memory(self) -> Tensors:
        """Return what a run that goes on needs beside the tensors."""
        parts = {MOMENTS: self._moments, CHANGES: self._limit.memory}
        return {prefix + k: tensor for prefix, part in parts.items() for k, tensor in part.items()}

    def open_sums(self, method: Method) -> Aggregate:
        """Open the sums of a round of the method, which start from these tensors."""
        return Aggregate(method, self.tensors, self._limit, self._robust)

    def advance(self, sums: Aggregate) -> None:
        """Take the next state; ValueError, and no change, if honest replies cannot have made it."""
        self.take(sums.close(), sums.method.frozen_tensors)

    def take(self, mean: Tensors, held: tuple[str, ...] = ()) -> None:
        """Take the optimiser's step to a mean; ValueError if the wire has no room for it."""
        old, new = ({k: v for k, v in s.items() if k not in held} for s in (self.tensors, mean))
        moved, moments = self._optimizer.step(old, new, self._moments)
        state = mean | moved
        check_room(state, self._wire)  # else it could never be sent
        kept = {k: v for k, v in self._moments.items() if k.split("/")[0] in held}
        self.tensors, self._moments = state, kept | moments


def _named(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Select the tensors whose names begin with a prefix, and cut it off."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
