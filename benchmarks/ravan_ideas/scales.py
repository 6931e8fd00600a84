"""RAVAN with a learning rate for scales of ten times that of H."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ravan_flwr.methods.ravan import Ravan
from ravan_flwr.training.local_steps import Stepper

TIMES = 10


class Scales(Ravan):
    """Differ in the clients' optimiser alone."""


def _optimizer(steps: Stepper, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    optimizer = _plain(steps, parameters)
    if isinstance(steps.model.method, Scales):
        (group,) = optimizer.param_groups
        scales = [parameter for parameter in group["params"] if parameter.dim() == 1]
        group["params"] = [parameter for parameter in group["params"] if parameter.dim() != 1]
        optimizer.add_param_group({"params": scales, "lr": TIMES * group["lr"]})
    return optimizer


_plain = Stepper._optimizer
Stepper._optimizer = _optimizer  # type: ignore[method-assign, assignment]

METHOD = Scales
