"""Hold a round before the first, from which every client gets *fixed* tensors, once.

    server                                  client
    initial state            ------------>  load
    open(sums).add(upload)   <------------  run(adapters, work)
    .close() -> fixed tensors, and what they change in the initial state
    fixed tensors            ------------>  load(adapters, fixed)

Uploads have to add up: the server sees their sum, or another middle, and nothing else. RAVAN's
data-aware bases (data_aware.py), and those of a first round, Fed-SB's and RAVAN's
(first_round.py), are made so.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol

from torch import Tensor, nn
from typing_extensions import TypeVar

from ravan_flwr.methods.means import Means, Sums
from ravan_flwr.methods.tensors import Tensors

Adapter = TypeVar("Adapter", bound=nn.Module, default=Any)


class LocalWork(Protocol):
    """Run a client's examples through the model, as a calibration asks for it."""

    def measure(self, seen: Sequence[Tensor]) -> object:
        """Run the next mini-batch forward and backward.

        What hooks add meanwhile to the tensors of `seen` has to be in proportion to the gradients.
        """

    def train(self, parameters: Sequence[Tensor]) -> None:
        """Take a round's local steps on these parameters."""


class CalibrationSums(Protocol):
    """Sum up the uploads of a calibration round."""

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Fold one upload into the sums; ValueError if it is not sound."""

    def close(self) -> tuple[Tensors, Tensors]:
        """Make the fixed tensors, and what they change in the initial state."""


class Calibration(ABC, Generic[Adapter]):
    """Describe a method's calibration round: both halves, and what travels."""

    # Does it take every client, or a sample like any other round?
    everyone: ClassVar[bool] = True
    # Are its uploads what local steps have changed? Then these bound them.
    by_steps: ClassVar[bool] = False

    @property
    @abstractmethod
    def bytes_up(self) -> int:
        """Count the bytes that a client sends."""

    @property
    @abstractmethod
    def bytes_down(self) -> int:
        """Count the bytes of the fixed tensors."""

    @abstractmethod
    def open(self, sums: Callable[[Tensors], Sums] = Means) -> CalibrationSums:
        """Begin running sums; `sums` makes their mean, or what takes its place."""

    @abstractmethod
    def run(self, adapters: Sequence[Adapter], work: LocalWork) -> Tensors:
        """Do a client's part; the adapters are afterwards as they were."""

    @abstractmethod
    def load(self, adapters: Sequence[Adapter], fixed: Mapping[str, Tensor]) -> None:
        """Put the fixed tensors into the adapters, for good."""
