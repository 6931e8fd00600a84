"""From uploads to the next state: check uploads one by one, sum them, take the server's step.

Methods do not handle the classifier, which all of them train alike. Here it is added to the
method's broadcast, and averaged next to the method's sums.

Memory does not grow with the number of clients. Exceptions are robust rounds, and methods whose
sums keep every reply until they close. A rejected upload never reaches a sum.

The server's optimiser is FedAvgM's (Hsu et al. 2019) or FedAdam's (Reddi et al. 2021). The step
from the old state to the mean of the replies is treated as a negative gradient. PyTorch's SGD with
momentum, or Adam, takes the step instead:

    momentum   v <- beta v + (old - mean),    new = old - eta v
    adam       Adam with beta, 0.99 and epsilon 1e-3, as in FedAdam's paper
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.changes import apply_change, find_start
from ravan_flwr.messages.wire import check_overflow
from ravan_flwr.methods.base import Method, Sums, Tensors, expand_to_state, split_classifier
from ravan_flwr.methods.extensions import Calibration, norm_limits
from ravan_flwr.methods.tensors import Means, MeansByNorm, check_form, check_names, check_tensor
from ravan_flwr.server.robust import RobustRound
from ravan_flwr.server.update_norm_check import UpdateNormCheck, measure_changes
from ravan_flwr.training.adapted_model import FINGERPRINT

MOMENTS = "server-optimizer/"  # prefix of the moments' names in the memory
BETA2, EPSILON = 0.99, 1e-3  # of FedAdam
KEPT_BROADCASTS = 4  # budget fractions whose broadcasts are cached during a round


def make_broadcast(method: Method, state: Tensors, fraction: float) -> Tensors:
    """Return the tensors that a client with that budget fraction is sent."""
    method_part, classifier = split_classifier(state)
    return method.broadcast(method_part, fraction) | classifier


def check_upload(
    method: Method, upload: Mapping[str, Tensor], classifier: Tensors, fraction: float
) -> None:
    """Raise ValueError if an upload has wrong names, shapes or types for that budget fraction.

    `classifier` has the classifier's state, if it travels.
    """
    method.check({name: upload[name] for name in upload if name not in classifier}, fraction)
    for name, tensor in classifier.items():
        check_form(upload, name, tensor.shape, torch.float32)


def upload_from_change(method: Method, change: Tensors, fraction: float, state: Tensors) -> Tensors:
    """Return the upload that a checked change of the state makes, at that budget fraction."""
    return apply_change(method, change, make_broadcast(method, state, fraction))


def rebase(
    method: Method,
    upload: Tensors,
    fraction: float,
    old_state: Tensors,
    new_state: Tensors,
    weight: float,
) -> Tensors:
    """Return a checked upload that changes `new_state` by `weight` times its change of `old_state`.

    So an update that began from an earlier state becomes one of the present state.
    """
    before, after = (
        find_start(method, upload, make_broadcast(method, state, fraction))
        for state in (old_state, new_state)
    )
    return {
        name: (after[name].double() + weight * (tensor.double() - before[name].double())).float()
        if name in before
        else tensor
        for name, tensor in upload.items()
    }


class Aggregate:
    """One round's sums: the method's, and the classifier's mean if it is trained.

    `check_form`, `check` and `add` take one upload: the checks may refuse it, `add` cannot fail.
    `robust` replaces means by a statistic of robust.py, for methods whose next state is a mean.
    """

    def __init__(
        self, method: Method, state: Tensors, limit: UpdateNormCheck, robust: str = "none"
    ) -> None:
        self.method, self.limit, self._norms = method, limit, norm_limits(method)
        self._state, self._classifier = split_classifier(state)
        # Broadcasts by budget fraction; the cache stays small with any number of clients.
        self._sent = lru_cache(maxsize=KEPT_BROADCASTS)(partial(method.broadcast, self._state))
        self._robust = robust != "none"
        self._rounds: tuple[Sums, ...] = (
            (RobustRound(self._state | self._classifier, robust),)
            if self._robust
            else (method.open_round(self._state), Means(self._classifier))
        )
        self.count = 0  # accepted uploads
        self._max_move = 0.0  # the largest learning rate times steps among the clients
        self._alone: dict[str, float] = {}  # by tensor: the largest norm of one upload

    def check_form(self, upload: Mapping[str, Tensor], fraction: float) -> None:
        """Raise ValueError if an upload has wrong names, shapes or types for that budget."""
        check_upload(self.method, upload, self._classifier, fraction)

    def check(
        self, upload: Mapping[str, Tensor], fraction: float, max_move: float
    ) -> dict[str, float]:
        """Return the `norms_if_alone` of an upload; raise ValueError if it changes too much.

        Its form is valid.

        `max_move` is the client's learning rate times its steps. It is used if the limit has none
        for all clients.
        """
        method_part = self._method_part(upload)
        sent = self._norms.find_start(method_part, self._sent(fraction))
        start = sent | self._classifier
        self.limit.check(measure_changes(upload, start, self.limit.wire), max_move)
        alone = self._norms.norms_if_alone(method_part, sent)
        for name, norm in alone.items():
            self.limit.check_growth(name, self._state.get(name, start[name]), norm, max_move)
        return alone

    def add(
        self,
        upload: Mapping[str, Tensor],
        weight: float,
        norms_if_alone: Mapping[str, float],
        max_move: float = 0.0,
    ) -> None:
        """Add an upload that was checked, with what `check` returned."""
        added = (
            [expand_to_state(self.method, self._state | self._classifier, upload)]
            if self._robust
            else [self._method_part(upload), upload]
        )
        for sums, tensors in zip(self._rounds, added, strict=True):
            sums.add(tensors, weight)
        self.count += 1
        self._max_move = max(self._max_move, max_move)
        for name, norm in norms_if_alone.items():
            self._alone[name] = max(norm, self._alone.get(name, 0.0))

    def check_and_add(
        self,
        upload: Mapping[str, Tensor],
        fraction: float,
        weight: float = 1.0,
        max_move: float = 0.0,
    ) -> None:
        """Check an upload, its form too, and add it; raise ValueError if it is not valid."""
        self.check_form(upload, fraction)
        self.add(upload, weight, self.check(upload, fraction, max_move), max_move)

    def close(self) -> Tensors:
        """Return the next state; raise ValueError if the accepted uploads cannot have made it.

        Without uploads the state stays the same.
        """
        if not self.count:
            return self._state | self._classifier
        new: Tensors = {}
        for sums in self._rounds:
            new |= sums.close()
        method_norms = self._norms.norm_bounds(self._state, self._alone)
        self.limit.check_state(self._state | self._classifier, new, method_norms, self._max_move)
        return new

    def _method_part(self, upload: Mapping[str, Tensor]) -> Tensors:
        return {name: tensor for name, tensor in upload.items() if name not in self._classifier}


class ServerState:
    """Keep the model's global state, and step it from one round to the next.

    Its memory has the optimiser's moments and the fingerprint of the model's bases. It is saved
    with every checkpoint.

    `fingerprint` is that of the model that every client must have. A calibration changes it.
    """

    def __init__(
        self, config: Config, fingerprint: list[float], tensors: Tensors, memory: Tensors
    ) -> None:
        self.tensors = dict(tensors)
        self.fingerprint = fingerprint
        self._robust, self._wire = config.robust, config.wire
        self._moments = {
            name.removeprefix(MOMENTS): tensor
            for name, tensor in memory.items()
            if name.startswith(MOMENTS)
        }
        max_move = config.learning_rate * (config.local_steps or 0)  # 0: clients differ in steps
        self._limit = UpdateNormCheck(config.max_update_norm, max_move, config.wire)
        self._optimizer = ServerOptimizer(*config.parse("server-optimizer").values())

    @property
    def memory(self) -> Tensors:
        """Return the tensors that a resumed run needs in addition to the state."""
        moments = {MOMENTS + k: tensor for k, tensor in self._moments.items()}
        return moments | {FINGERPRINT: torch.tensor(self.fingerprint, dtype=torch.float64)}

    def open_sums(self, method: Method) -> Aggregate:
        """Return empty sums of a round of the method that starts from these tensors."""
        return Aggregate(method, self.tensors, self._limit, self._robust)

    def step(self, mean: Tensors, frozen: tuple[str, ...] = ()) -> None:
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


class CalibrationSums:
    """The sums of a calibration, with hooks of the same names as those of `Aggregate`.

    `norm` and `max_move` are those of `UpdateNormCheck`. No step bounds a gradient. In its place,
    sketches far larger than most are left out of the mean.
    """

    def __init__(
        self, calibration: Calibration, norm: float | None, max_move: float, robust: str = "none"
    ) -> None:
        self.calibration = calibration
        self.start = {calibration.name: torch.zeros(sum(calibration.sizes))}
        # A gradient is no change of the state, to which `max-update-norm` refers.
        self.limit = (
            UpdateNormCheck(norm, max_move)
            if calibration.by_steps
            else UpdateNormCheck(None, math.inf)
        )
        if robust != "none":
            self._sums: Sums = RobustRound(self.start, robust)
        else:
            self._sums = (Means if calibration.by_steps else MeansByNorm)(self.start)

    def check_form(self, upload: Mapping[str, Tensor]) -> None:
        """Raise ValueError if an upload has wrong names, shapes or types."""
        check_names(upload, [*self.start])
        for name, tensor in self.start.items():
            check_tensor(upload, name, tensor.shape, torch.float32)

    def check(self, upload: Mapping[str, Tensor]) -> None:
        """Raise ValueError if an upload of valid form changes too much."""
        self.limit.check(measure_changes(upload, self.start))

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add an upload that was checked."""
        self._sums.add(upload, weight)

    def check_and_add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Check an upload, its form too, and add it; raise ValueError if it is not valid."""
        self.check_form(upload)
        self.check(upload)
        self.add(upload, weight)

    def close(self) -> tuple[Tensors, Tensors]:
        """Return the fixed tensors, and the tensors that they change in the initial state."""
        mean = self._sums.close()[self.calibration.name]
        return self.calibration.make(mean.split(self.calibration.sizes))
