"""Define what a method may have beside what every method is (base.py), and what needs it.

SumsChanges     `privacy=client` and `secure-aggregation=true`
NormLimits      the check of a reply's norm, where an upload is no state, or the next no mean
Personal        a part of the model that stays with its client from one round to the next
Calibration     a round before the first, from which every client gets fixed tensors, once
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
    """Add up the changes of clients, each of which trains some rows of the state's tensors.

    A row is what a client may train without the rest of a tensor: in RAVAN a head, else the whole.
    Server and client must choose the same rows.
    """

    mean_over_cohort: bool = False  # do clients that left a row as it was count for its mean?
    layers: list[Layer]

    def coverage(self, state: Mapping[str, Tensor], fraction: float) -> Tensors:
        """Return how likely a client with that budget fraction trains each number of the state.

        Each tensor broadcasts to that of the state.
        """
        return {name: torch.ones([1] * tensor.ndim) for name, tensor in state.items()}

    def rows(self, state: Mapping[str, Tensor]) -> dict[str, int]:
        """Count the rows of each tensor."""
        return dict.fromkeys(state, 1)

    def rows_trained(
        self, state: Mapping[str, Tensor], fraction: float, random: torch.Generator
    ) -> Tensors:
        """Choose the rows that such a client trains, as `choose` would, without its data."""
        return {name: torch.ones(rows).bool() for name, rows in self.rows(state).items()}

    def train_rows(
        self, adapters: Sequence[Any], rows: Mapping[str, Tensor], fraction: float
    ) -> None:
        """Make these rows trainable, in place of `choose`; ValueError if the budget cannot pay."""

    def counted(self, state: Tensors, clients: int) -> Tensors:
        """Note in the next state of how many clients it has the changes, where it has a place."""
        return state

    def heads_of(self, rows: Mapping[str, Tensor]) -> list[list[int]]:
        """List the heads of each layer that these rows are; a LoRA has the one head 0."""
        return [[0] for _ in self.layers]


def sums_changes(method: object) -> SumsChanges:
    """Return the method as one that sums changes; ValueError if it is none."""
    if not isinstance(method, SumsChanges):
        raise ValueError(
            f"method: {type(method).__name__} does not sum clients' changes, expected one that "
            "does with privacy=client or secure-aggregation=true; choose another method, or derive "
            "it from SumsChanges"
        )
    return method


class NormLimits:
    """Say how far an upload moves the state, beyond a difference tensor by tensor."""

    def start_of(self, upload: Mapping[str, Tensor], sent: Tensors) -> Tensors:
        """Find what a checked upload's tensors were when sent: changes count from there."""
        return {name: sent[name] for name in upload}

    def norms_alone(self, upload: Mapping[str, Tensor], start: Tensors) -> dict[str, float]:
        """Measure the norms that the next state would have, were a checked upload the only one.

        `start` is what `start_of` found. Only of tensors that are not the uploads' means, whose
        changes say nothing of it.
        """
        return {}

    def norms_made(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        """Return the norms that tensors of the next state may have by its making, if no reply lied.

        `alone` has the largest of the accepted uploads' `norms_alone`.
        """
        return {}


def norm_limits(method: object) -> NormLimits:
    """Return the method's own limits, or those of a method that sends what it was sent."""
    return method if isinstance(method, NormLimits) else NormLimits()


@dataclass(frozen=True)
class Personal(Generic[Adapter]):
    """Describe what of a method's adapters stays with each client.

        server                                  client
        broadcast(state, fraction) --------->  load(adapters, tensors)
                                                put(adapters, own)     if it has a part of its own
                                                ... local steps ...
                                                collect(adapters) -> its part, which stays
        check(upload, fraction)  <------------  upload(adapters)

    There is no one result: a client predicts with the server's state and its own part together.
    Without one, in its first round or after it was lost, it begins with what `load` left. A trained
    classifier stays with the part. The server sees none of this.
    """

    shapes: Mapping[str, tuple[int, ...]]  # of the float32 tensors that stay
    collect: Callable[[Sequence[Adapter]], Tensors]  # copies of them, after the local steps
    put: Callable[[Sequence[Adapter], Mapping[str, Tensor]], None]  # after `load`, a checked part


class LocalWork(Protocol):
    """Run a client's examples through the model, as a calibration asks for it."""

    def measure(self, sums: Sequence[Tensor]) -> object:
        """Run the next mini-batch forward and backward.

        What hooks add meanwhile to the tensors of `sums` has to be in proportion to the gradients.
        """

    def train(self, parameters: Sequence[Tensor]) -> None:
        """Take a round's local steps on these parameters."""


class Calibration(ABC, Generic[Adapter]):
    """Describe a method's calibration round: both halves, and what travels.

        server                                  client
        initial state            ------------>  load
        mean of the uploads      <------------  run(adapters, work)
        make(means) -> fixed tensors, and what they change in the initial state
        fixed tensors            ------------>  load(adapters, fixed)

    Uploads have to add up: the server sees their mean, or another middle, and nothing else. RAVAN
    and Fed-SB make bases so (calibrated_bases.py).
    """

    # Does it take every client, or a sample like any other round?
    everyone: ClassVar[bool] = True
    # Are its uploads what local steps have changed? Then these bound them.
    by_steps: ClassVar[bool] = False
    name: ClassVar[str]  # of the one flat tensor that a client sends
    sizes: list[int]  # of its parts, one layer after the other
    bytes_up: int  # that a client sends
    bytes_down: int  # of the fixed tensors

    @abstractmethod
    def run(self, adapters: Sequence[Adapter], work: LocalWork) -> Tensors:
        """Do a client's part; the adapters are afterwards as they were."""

    @abstractmethod
    def make(self, means: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Make the fixed tensors, and what they change in the initial state, of the mean."""

    @abstractmethod
    def load(self, adapters: Sequence[Adapter], fixed: Mapping[str, Tensor]) -> None:
        """Put the fixed tensors into the adapters, for good."""
