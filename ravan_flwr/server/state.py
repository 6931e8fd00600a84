"""Keep what the server carries from one round to the next: the model's tensors, and its memory.

The memory is what a resumed run needs beside the tensors, the optimiser's moments. It is saved with
every checkpoint.

The server's optimiser is FedAvgM's (Hsu et al. 2019) or FedAdam's (Reddi et al. 2021). The step
from the old state to the mean of the replies is taken as a negative gradient, and torch's own SGD
with momentum, or Adam, takes the step instead:

    momentum   v <- beta v + (old - mean),    new = old - eta v
    adam       Adam with beta, 0.99 and epsilon 1e-3, as FedAdam's paper has them
    fadas      m and v as Adam's, uncorrected; new = old - eta_t m / (sqrt(max v so far) + epsilon),
               where eta_t = eta, but 1 / s at most if the oldest update is s versions old and s is
               above the delay (arXiv 2407.18365)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.wire import check_room
from ravan_flwr.methods.base import Method, Tensors
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.update_norm_check import UpdateNormCheck

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
        self.delay = 0  # versions that the oldest update of the round was old by
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
        return {MOMENTS + k: tensor for k, tensor in self._moments.items()}

    def open_sums(self, method: Method) -> Aggregate:
        """Open the sums of a round of the method, which start from these tensors."""
        return Aggregate(method, self.tensors, self._limit, self._robust)

    def take(self, mean: Tensors, held: tuple[str, ...] = ()) -> None:
        """Take the optimiser's step to a mean; ValueError if the wire has no room for it."""
        old, new = ({k: v for k, v in s.items() if k not in held} for s in (self.tensors, mean))
        moved, moments = self._optimizer.delayed(self.delay).step(old, new, self._moments)
        state = mean | moved
        check_room(state, self._wire)  # else it could never be sent
        kept = {k: v for k, v in self._moments.items() if k.split("/")[0] in held}
        self.tensors, self._moments = state, kept | moments


@dataclass(frozen=True)
class ServerOptimizer:
    """Take the server's step; with `kind` "none" the mean becomes the next state."""

    kind: str
    learning_rate: float = 1.0
    momentum: float = 0.9
    delay: int = 1  # FADAS: versions from which on the learning rate falls

    def delayed(self, staleness: int) -> "ServerOptimizer":
        """Return the optimiser for a buffer whose oldest update is so many versions old."""
        if self.kind != "fadas" or staleness <= self.delay:
            return self
        return replace(self, learning_rate=min(self.learning_rate, 1 / staleness))

    def step(self, old: Tensors, mean: Tensors, moments: Tensors) -> tuple[Tensors, Tensors]:
        """Return the next state and moments; `moments` are those of the step before, first none."""
        if self.kind == "none" or not old:  # a round in which the state is frozen
            return mean, {}
        values = {name: tensor.clone().requires_grad_() for name, tensor in old.items()}
        optimizer = OPTIMIZERS[self.kind](list(values.values()), self)
        for name, value in values.items():
            value.grad = old[name] - mean[name]
            mine = {k.rpartition("/")[2]: v for k, v in moments.items() if k.startswith(f"{name}/")}
            if mine:
                optimizer.state[value] = {key: tensor.clone() for key, tensor in mine.items()}
        optimizer.step()
        return (
            {name: value.detach() for name, value in values.items()},
            {
                f"{name}/{key}": tensor
                for name, value in values.items()
                for key, tensor in optimizer.state[value].items()
            },
        )


class Fadas(torch.optim.Optimizer):
    """Take FADAS's step: AMSGrad's, without a correction of the moments' start."""

    def __init__(self, values: list[Tensor], how: ServerOptimizer) -> None:
        super().__init__(values, {})
        self.how = how

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # noqa: ARG002
        beta, rate = self.how.momentum, self.how.learning_rate
        for value in self.param_groups[0]["params"]:
            if not self.state[value]:
                self.state[value] = {k: torch.zeros_like(value) for k in ("m", "v", "most")}
            moments = self.state[value]
            moments["m"].lerp_(value.grad, 1 - beta)
            moments["v"].lerp_(value.grad.square(), 1 - BETA2)
            torch.maximum(moments["most"], moments["v"], out=moments["most"])
            value.addcdiv_(moments["m"], moments["most"].sqrt() + EPSILON, value=-rate)


OPTIMIZERS: dict[str, Callable[[list[Tensor], ServerOptimizer], torch.optim.Optimizer]] = {
    "momentum": lambda values, how: torch.optim.SGD(
        values, lr=how.learning_rate, momentum=how.momentum
    ),
    "adam": lambda values, how: torch.optim.Adam(
        values, lr=how.learning_rate, betas=(how.momentum, BETA2), eps=EPSILON
    ),
    "fadas": Fadas,
}
