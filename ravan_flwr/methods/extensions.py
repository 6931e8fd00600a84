"""Define the optional interfaces of a method, beside those of every method (base.py).

SumsChanges     needed for `privacy=client` and `secure-aggregation=true`
NormLimits      limits of an upload's norm, if it has other shapes than the state, or if the next
                state is not the mean
Personal        parameters that stay with each client from one round to the next
Calibration     a round before round 1, from which every client gets fixed tensors once
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from ravan_flwr.adapters import Layer
from ravan_flwr.methods.tensors import Tensors

Adapter = TypeVar("Adapter", bound=nn.Module, default=Any)


class SumsChanges:
    """Sum the changes of clients, each of which trains some rows of the state's tensors.

    A row is the smallest part of a tensor that a client can train alone: a head in RAVAN, the whole
    tensor in other methods. Server and client must choose the same rows.
    """

    mean_over_cohort: bool = False  # does a row's mean include the clients that did not train it?
    layers: list[Layer]

    def coverage(self, state: Mapping[str, Tensor], fraction: float) -> Tensors:
        """Return the probability that a client of that budget fraction trains each number.

        Each tensor can be broadcast to the shape of the state's.
        """
        return {name: torch.ones([1] * tensor.ndim) for name, tensor in state.items()}

    def rows(self, state: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of rows of each tensor."""
        return dict.fromkeys(state, 1)

    def rows_trained(
        self, state: Mapping[str, Tensor], fraction: float, random: torch.Generator
    ) -> Tensors:
        """Return masks of the rows that a client trains, as `choose` would, without its data."""
        return {name: torch.ones(rows).bool() for name, rows in self.rows(state).items()}

    def train_rows(
        self, adapters: Sequence[Any], rows: Mapping[str, Tensor], fraction: float
    ) -> None:
        """Make these rows trainable, instead of `choose`; ValueError if they exceed the budget."""

    def with_num_clients(self, state: Tensors, clients: int) -> Tensors:
        """Return the next state with its number of clients, if the state has a tensor for that."""
        return state

    def heads_in_rows(self, rows: Mapping[str, Tensor]) -> list[list[int]]:
        """Return the heads of each layer that these rows are, as `heads_in` does for an upload."""
        return [[0] for _ in self.layers]


def sums_changes(method: object) -> SumsChanges:
    """Return the method, typed as `SumsChanges`; ValueError unless it is one."""
    if not isinstance(method, SumsChanges):
        raise ValueError(
            f"method: {type(method).__name__} does not sum clients' changes, expected one that "
            "does with privacy=client or secure-aggregation=true; choose another method, or derive "
            "it from SumsChanges"
        )
    return method


class NormLimits:
    """The norms by which the server limits an upload, if tensor-wise differences do not suffice."""

    def find_start(self, upload: Mapping[str, Tensor], sent: Tensors) -> Tensors:
        """Return the values that a checked upload's tensors had when the server sent them."""
        return {name: sent[name] for name in upload}

    def norms_if_alone(self, upload: Mapping[str, Tensor], start: Tensors) -> dict[str, float]:
        """Return the norms, by tensor, of the next state if a checked upload were the only one.

        For example, B of FlexLoRA's next state is U S of the mean product, whatever B was sent.

        `start` is the result of `find_start`. Only tensors that are not means of the uploads have
        an entry: the change of an upload does not bound the change of such a tensor.
        """
        return {}

    def norm_bounds(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        """Return upper bounds of the next state's norms, by tensor, for honest replies.

        Only tensors that are not means of the uploads have an entry. `alone` has the largest
        `norms_if_alone` of the accepted uploads.
        """
        return {}


def norm_limits(method: object) -> NormLimits:
    """Return the method's limits; the defaults if its uploads have the tensors of the broadcast."""
    return method if isinstance(method, NormLimits) else NormLimits()


@dataclass(frozen=True)
class Personal(Generic[Adapter]):
    """The personal parameters of a method's adapters, which stay with each client.

        server                                  client
        broadcast(state, fraction) --------->  load(adapters, tensors)
                                                put(adapters, personal)   if the client has them
                                                ... local steps ...
                                                collect(adapters) -> personal, kept by the client
        check(upload, fraction)  <------------  upload(adapters)

    There is no single final model: a client predicts with the server's state and its personal
    parameters. A client without them, in its first round or after their loss, starts from the
    result of `load`. A trained classifier is personal, too. The server sees none of these.
    """

    shapes: Mapping[str, tuple[int, ...]]  # of the personal float32 tensors
    collect: Callable[[Sequence[Adapter]], Tensors]  # copies them, after the local steps
    put: Callable[[Sequence[Adapter], Mapping[str, Tensor]], None]  # loads them after `load`


class CalibrationLoop(Protocol):
    """What a calibration uses of a client's training loop (training/local_steps.py)."""

    def measure(self, sums: Sequence[Tensor]) -> object:
        """Run the next mini-batch forward and backward.

        What hooks add to the tensors of `sums` during this pass must be proportional to the
        gradients.
        """

    def train(self, parameters: Sequence[Tensor]) -> None:
        """Take a round's local steps on these parameters."""


class Calibration(ABC, Generic[Adapter]):
    """A method's calibration round: both halves, and the tensors that travel.

        server                                  client
        initial state            ------------>  load
        mean of the uploads      <------------  run(adapters, loop)
        make(means) -> fixed tensors, new values of tensors of the initial state
        fixed tensors            ------------>  load(adapters, fixed)

    Uploads must be additive: the server uses their mean, or a robust mean, and nothing else. RAVAN
    and Fed-SB compute their bases this way (calibrated_bases.py).
    """

    # Do all clients take part, or a sample as in other rounds?
    all_clients: ClassVar[bool] = True
    # Is an upload the change of local steps? Then the number of steps bounds its norm.
    by_steps: ClassVar[bool] = False
    name: ClassVar[str]  # of the one flat tensor that a client sends
    sizes: list[int]  # of its parts, layer by layer
    bytes_up: int  # of a client's upload
    bytes_down: int  # of the fixed tensors

    @abstractmethod
    def run(self, adapters: Sequence[Adapter], loop: CalibrationLoop) -> Tensors:
        """Return a client's upload; leave the adapters as they were."""

    @abstractmethod
    def make(self, means: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Return the fixed tensors, and new values of tensors of the initial state.

        `means` has the mean of the uploads, layer by layer.
        """

    @abstractmethod
    def load(self, adapters: Sequence[Adapter], fixed: Mapping[str, Tensor]) -> None:
        """Put the fixed tensors into the adapters, permanently."""
