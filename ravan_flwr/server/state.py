"""The server's state between rounds: the model's tensors, and a memory for resumed runs.

The memory has the optimiser's moments and the fingerprint of the model's bases. It is saved with
every checkpoint.

The server's optimiser is FedAvgM's (Hsu et al. 2019) or FedAdam's (Reddi et al. 2021). The step
from the old state to the mean of the replies is treated as a negative gradient. PyTorch's SGD with
momentum, or Adam, takes the step instead:

    momentum   v <- beta v + (old - mean),    new = old - eta v
    adam       Adam with beta, 0.99 and epsilon 1e-3, as in FedAdam's paper
"""

from dataclasses import dataclass

import torch

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.wire import check_overflow
from ravan_flwr.methods.base import Method, Tensors
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from ravan_flwr.training.adapted_model import FINGERPRINT

MOMENTS = "server-optimizer/"  # prefix of the moments' names in the memory
BETA2, EPSILON = 0.99, 1e-3  # of FedAdam


class ServerState:
    """Keep the model's global state, and step it from one round to the next.

    `derived` is the fingerprint of the model that every client must have. A calibration changes it.
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
        step = config.learning_rate * (config.local_steps or 0)  # 0: clients differ in steps
        self._limit = UpdateNormCheck(config.max_update_norm, step, config.wire)
        self._optimizer = ServerOptimizer(*config.parts("server-optimizer").values())

    @property
    def memory(self) -> Tensors:
        """Return the tensors that a resumed run needs in addition to the state."""
        moments = {MOMENTS + k: tensor for k, tensor in self._moments.items()}
        return moments | {FINGERPRINT: torch.tensor(self.derived, dtype=torch.float64)}

    def open_sums(self, method: Method) -> Aggregate:
        """Return empty sums of a round of the method that starts from these tensors."""
        return Aggregate(method, self.tensors, self._limit, self._robust)

    def take(self, mean: Tensors, frozen: tuple[str, ...] = ()) -> None:
        """Take the optimiser's step to a mean; raise ValueError if the wire cannot carry it."""
        old, new = ({k: v for k, v in s.items() if k not in frozen} for s in (self.tensors, mean))
        moved, moments = self._optimizer.step(old, new, self._moments)
        state = mean | moved
        check_overflow(state, self._wire)  # a state that overflows could never be sent
        frozen_moments = {k: v for k, v in self._moments.items() if k.split("/")[0] in frozen}
        self.tensors, self._moments = state, frozen_moments | moments


@dataclass(frozen=True)
class ServerOptimizer:
    """The server's optimiser; with `kind` "none" the mean becomes the next state."""

    kind: str
    learning_rate: float = 1.0
    momentum: float = 0.9

    def step(self, old: Tensors, mean: Tensors, moments: Tensors) -> tuple[Tensors, Tensors]:
        """Return the next state and moments; `moments` are the previous step's, or empty."""
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
