"""RAVAN with a learning rate for scales of ten times that of H."""

from collections.abc import Sequence

from torch import Tensor

from ravan_flwr.methods.ravan import Ravan
from ravan_flwr.training.captured import CapturedClient
from ravan_flwr.training.local_steps import Stepper
from ravan_flwr.training.step import Step

TIMES = 10


class Scales(Ravan):
    """Differ in the clients' optimiser alone."""


def _step_of(steps: Stepper, parameters: Sequence[Tensor]) -> Step | CapturedClient:
    step = _plain(steps, parameters)
    if isinstance(steps.model.method, Scales) and isinstance(step, Step):
        (group,) = step.optimizer.param_groups
        scales = [parameter for parameter in group["params"] if parameter.dim() == 1]
        group["params"] = [parameter for parameter in group["params"] if parameter.dim() != 1]
        step.optimizer.add_param_group({"params": scales, "lr": TIMES * group["lr"]})
    return step


_plain = Stepper.step_of
Stepper.step_of = _step_of  # type: ignore[method-assign, assignment]

METHOD = Scales
