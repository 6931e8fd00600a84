"""Keep what the server carries from one round to the next: the model's tensors, and its memory.

The memory is what a resumed run needs beside the tensors: the optimiser's moments, and by what it
is seen that the model has the same bases. It is saved with every checkpoint.

The server's optimiser is FedAvgM's (Hsu et al. 2019) or FedAdam's (Reddi et al. 2021). The step
from the old state to the mean of the replies is taken as a negative gradient, and torch's own SGD
with momentum, or Adam, takes the step instead:

    momentum   v <- beta v + (old - mean),    new = old - eta v
    adam       Adam with beta, 0.99 and epsilon 1e-3, as FedAdam's paper has them
"""

from dataclasses import dataclass

import torch

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.wire import check_room
from ravan_flwr.methods.base import Method, Tensors
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from ravan_flwr.training.adapted_model import FINGERPRINT

MOMENTS = "server-optimizer/"  # what the names of the memory's tensors begin with
BETA2, EPSILON = 0.99, 1e-3  # of FedAdam


class ServerState:
    """Hold the global state of the model, and take the steps from one round to the next.

    `derived` is the fingerprint of the model that clients must have; a calibration changes it.
    """

    def __init__(
        self, config: Config, derived: list[float], tensors: Tensors, memory: Tensors
    ) -> None:
        self.tensors = dict(tensors)
        self.derived = derived
        self._robust, self._wire = config.robust, config.wire
        self._moments = {
            name.removeprefix(MOMENTS): tensor
            for name, tensor in memory.items()
            if name.startswith(MOMENTS)
        }
        step = config.learning_rate * (config.local_steps or 0)  # 0: each client has its own
        self._limit = UpdateNormCheck(config.max_update_norm, step, config.wire)
        self._optimizer = ServerOptimizer(*config.parts("server-optimizer").values())

    @property
    def memory(self) -> Tensors:
        """Return what a run that goes on needs beside the tensors."""
        moments = {MOMENTS + k: tensor for k, tensor in self._moments.items()}
        return moments | {FINGERPRINT: torch.tensor(self.derived, dtype=torch.float64)}

    def open_sums(self, method: Method) -> Aggregate:
        """Open the sums of a round of the method, which start from these tensors."""
        return Aggregate(method, self.tensors, self._limit, self._robust)

    def take(self, mean: Tensors, frozen: tuple[str, ...] = ()) -> None:
        """Take the optimiser's step to a mean; ValueError if the wire has no room for it."""
        old, new = ({k: v for k, v in s.items() if k not in frozen} for s in (self.tensors, mean))
        moved, moments = self._optimizer.step(old, new, self._moments)
        state = mean | moved
        check_room(state, self._wire)  # else it could never be sent
        frozen_moments = {k: v for k, v in self._moments.items() if k.split("/")[0] in frozen}
        self.tensors, self._moments = state, frozen_moments | moments


@dataclass(frozen=True)
class ServerOptimizer:
    """Take the server's step; with `kind` "none" the mean becomes the next state."""

    kind: str
    learning_rate: float = 1.0
    momentum: float = 0.9

    def step(self, old: Tensors, mean: Tensors, moments: Tensors) -> tuple[Tensors, Tensors]:
        """Return the next state and moments; `moments` are those of the step before, first none."""
        if self.kind == "none" or not old:  # a round in which the state is frozen
            return mean, {}
        values = {name: tensor.clone().requires_grad_() for name, tensor in old.items()}
        parameters, rate = list(values.values()), self.learning_rate
        if self.kind == "momentum":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, rate, self.momentum)
        else:
            optimizer = torch.optim.Adam(parameters, rate, (self.momentum, BETA2), EPSILON)
        for name, value in values.items():
            value.grad = old[name] - mean[name]
            state = {
                k.rpartition("/")[2]: v for k, v in moments.items() if k.startswith(f"{name}/")
            }
            if state:
                optimizer.state[value] = {key: tensor.clone() for key, tensor in state.items()}
        optimizer.step()
        return (
            {name: value.detach() for name, value in values.items()},
            {
                f"{name}/{key}": tensor
                for name, value in values.items()
                for key, tensor in optimizer.state[value].items()
            },
        )
