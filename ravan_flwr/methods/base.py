"""What a federated method is: a client half and a server half, both pure torch.

The global state is a dict of few tensors, and so is what travels. A round is

    server                                  client
    broadcast(state, share)  ------------>  load(adapters, tensors)
                                            choose(adapters, ...)      what to train
                                            ... local steps ...
    check(upload, share)     <------------  upload(adapters)
    open_round(state).add(upload), .close() -> the next state

A method may first hold one calibration round, in which every client uploads something that
adds up, and the server makes *fixed* tensors of the sum: they travel to each client once.

Nothing here knows of the classifier, of evaluation or of Flower: those are the same for
every method.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer

Tensors = dict[str, Tensor]

CLASSIFIER = "classifier"  # the classifier's one flat tensor, beside a method's own


@dataclass(frozen=True)
class Settings:
    """What a method may be told. `rank` None means the largest within the budget."""

    seed: int
    lora_rank: int
    rank: int | None
    heads: int
    init: str
    init_scale: float
    calibration_steps: int
    scaling: str
    scoring: str
    selection: str


class Round(Protocol):
    """The server's running sums over one round's uploads; order does not matter."""

    def add(self, upload: Mapping[str, Tensor]) -> None:
        """Fold one checked upload into the sums."""

    def close(self) -> Tensors:
        """The next global state."""


class Calibration(Protocol):
    """The server's running sums over the calibration round's uploads."""

    def add(self, upload: Mapping[str, Tensor]) -> None:
        """Fold one upload into the sums; ValueError if it is not sound."""

    def close(self) -> Tensors:
        """The fixed tensors."""


class Method(ABC):
    """One federated method over the adapted layers of one network."""

    rank: int

    def __init__(self, settings: Settings, layers: Sequence[Layer]) -> None:
        self.settings = settings
        self.layers = list(layers)
        # The trainable parameters of a LoRA of the preset's rank: what methods are matched to.
        self.budget = settings.lora_rank * sum(
            layer.out_features + layer.in_features for layer in layers
        )

    @abstractmethod
    def trainable_parameters(self) -> int:
        """How many a client with the whole budget trains, the classifier not counted."""

    @abstractmethod
    def upload_bytes(self, share: float) -> int:
        """What the upload of a client with that share weighs."""

    def effective_rank_bound(self) -> int | None:
        """The largest rank that a matrix's update can have, where it is not the rank itself."""
        return None

    @abstractmethod
    def adapt(self, layer: Layer, linear: nn.Linear) -> nn.Module:
        """The adapter that takes the place of a layer."""

    # The calibration round, of the methods that have one.

    def open_calibration(self) -> Calibration | None:
        """Running sums that start empty; None for a method without a calibration round."""
        return None

    def calibration_bytes(self) -> tuple[int, int]:
        """What a client sends in the calibration round, and the fixed tensors that it gets."""
        return 0, 0

    def calibrate(self, adapters: Sequence[nn.Module], backward: Callable[[], object]) -> Tensors:
        """A client's part: `backward` runs the next mini-batch forward and backward."""
        raise NotImplementedError

    def load_fixed(self, adapters: Sequence[nn.Module], fixed: Mapping[str, Tensor]) -> None:
        """Put the fixed tensors into the adapters, for good."""
        raise NotImplementedError

    # The server's half.

    @abstractmethod
    def initial_state(self) -> Tensors:
        """The global state before the first round."""

    def broadcast(self, state: Tensors, share: float) -> Tensors:  # noqa: ARG002 (some methods differ by share)
        """What a client with that share of the budget is sent."""
        return state

    @abstractmethod
    def check(self, upload: Mapping[str, Tensor], share: float) -> None:
        """Raise ValueError unless such a client may send such an upload."""

    def heads_in(self, upload: Mapping[str, Tensor]) -> list[list[int]]:  # noqa: ARG002
        """The heads of each layer that a checked upload holds; a LoRA has the one head 0."""
        return [[0] for _ in self.layers]

    @abstractmethod
    def open_round(self, state: Tensors) -> Round:
        """Running sums that start empty."""

    # The client's half. `adapters` are what `adapt` made, in the order of the layers.

    @abstractmethod
    def load(self, adapters: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> None:
        """Put a broadcast, or a global state, into the adapters; everything else is reset."""

    @abstractmethod
    def choose(
        self,
        adapters: Sequence[nn.Module],
        share: float,
        random: torch.Generator,
        backward: Callable[[], object],
    ) -> None:
        """Make trainable what the share pays for.

        `backward` runs one mini-batch of the client forward and backward.
        """

    @abstractmethod
    def parameters(self, adapters: Sequence[nn.Module]) -> list[nn.Parameter]:
        """What the client's optimiser is given after `choose`."""

    @abstractmethod
    def upload(self, adapters: Sequence[nn.Module]) -> Tensors:
        """What the client sends after its local steps."""

    @abstractmethod
    def lora_factors(self, adapter: nn.Module) -> tuple[Tensor, Tensor]:
        """An adapter's delta-weight as one product: B (out, R) and A (R, in)."""

    @abstractmethod
    def fingerprint(self, adapters: Sequence[nn.Module]) -> list[float]:
        """Numbers that agree, to rounding, where what is derived from the seed agrees."""


def check_tensor(
    upload: Mapping[str, Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The upload's tensor of that name, of exactly that shape and dtype, finite throughout."""
    if name not in upload:
        raise ValueError(f"upload has {sorted(upload)}, expected {name!r} among them")
    tensor = upload[name]
    if tensor.dtype != dtype or tensor.shape != torch.Size(shape):
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {tuple(shape)}"
        )
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ValueError(f"{name} has values that are not finite, expected finite ones")
    return tensor


def check_names(upload: Mapping[str, Tensor], expected: Sequence[str]) -> None:
    """Raise ValueError unless the upload has exactly these tensors."""
    if sorted(upload) != sorted(expected):
        raise ValueError(f"upload has {sorted(upload)}, expected {sorted(expected)}")
