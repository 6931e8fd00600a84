"""Apply an optimiser to the mean update: FedAvgM (Hsu et al. 2019), FedAdam (Reddi et al. 2021).

The step from the old state to the mean of the replies is taken as a negative gradient, and
torch's own SGD with momentum, or Adam, takes the step instead:

    momentum   v <- beta v + (old - mean),    new = old - eta v
    adam       Adam with beta, 0.99 and epsilon 1e-3, as FedAdam's paper has them
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ravan_flwr.methods.base import Tensors


@dataclass(frozen=True)
class ServerOptimizer:
    """Take the server's step; with `kind` "none" the mean becomes the next state."""

    kind: str
    learning_rate: float = 1.0
    momentum: float = 0.9

    def step(self, old: Tensors, mean: Tensors, moments: Tensors) -> tuple[Tensors, Tensors]:
        """Return the next state and moments; `moments` are those of the step before, first none."""
        if self.kind == "none":
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


def _momentum(values: list[Tensor], how: ServerOptimizer) -> torch.optim.Optimizer:
    return torch.optim.SGD(values, lr=how.learning_rate, momentum=how.momentum)


def _adam(values: list[Tensor], how: ServerOptimizer) -> torch.optim.Optimizer:
    return torch.optim.Adam(values, lr=how.learning_rate, betas=(how.momentum, 0.99), eps=1e-3)


OPTIMIZERS: dict[str, Callable[[list[Tensor], ServerOptimizer], torch.optim.Optimizer]] = {
    "momentum": _momentum,
    "adam": _adam,
}
