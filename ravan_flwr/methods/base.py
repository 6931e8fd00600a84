"""What a federated method is: a client half and a server half, both pure torch.

The global state is a dict of few tensors, and so is what travels. A round is

    server                                  client
    broadcast(state, share)  ------------>  load(adapters, tensors)
                                            choose(adapters, ...)      what to train
                                            ... local steps ...
    check(upload, share)     <------------  upload(adapters)
    open_round(state).add(upload, weight), .close() -> the next state

Where a method says nothing else, a client trains all that its adapters have to train, and the
next state is the plain mean of the uploads, tensor by tensor.

A method may first hold one calibration round, in which clients upload something that adds up,
and the server makes *fixed* tensors of the sum: they travel to each client once.

Nothing here knows of the classifier, of evaluation or of Flower: those are the same for
every method.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, attach
from ravan_flwr.methods.means import Means
from ravan_flwr.methods.tensors import check_form, check_names

Tensors = dict[str, Tensor]

CLASSIFIER = "classifier"  # the classifier's one flat tensor, beside a method's own


@dataclass(frozen=True)
class Settings:
    """What a method may be told. `rank` None means the largest within the budget."""

    seed: int
    lora_rank: int
    rank: int | None
    lora_scale: float
    heads: int
    init: str
    init_scale: float
    calibration_steps: int
    scaling: str
    scoring: str
    selection: str
    layer_form: str = "auto"  # of multi-head layers


class Round(Protocol):
    """The server's running sums over one round's uploads; order does not matter."""

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Fold one checked upload into the sums."""

    def close(self) -> Tensors:
        """The next global state."""


class Calibration(Protocol):
    """The server's running sums over the calibration round's uploads."""

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Fold one upload into the sums; ValueError if it is not sound."""

    def close(self) -> tuple[Tensors, Tensors]:
        """The fixed tensors, and what they change in the initial state."""


class LocalWork(Protocol):
    """What a client can do with its examples in a calibration round."""

    def backward(self) -> object:
        """Run the next mini-batch forward and backward."""

    def train(self, parameters: Sequence[Tensor]) -> None:
        """Take a round's local steps on these parameters."""


class Method(ABC):
    """One federated method over the adapted layers of one network.

    `size` is the number of the network's pretrained parameters, adapted or not.
    """

    # Does the calibration round take every client, or a sample like any other round?
    calibrates_everyone: ClassVar[bool] = True
    # Are its uploads what local steps have changed? Then these bound them.
    calibrates_by_steps: ClassVar[bool] = False

    rank: int | None  # of the adapters; None if the method has no rank
    # In how many parts a client can train it: heads, or ranks. None: whole, or not at all.
    parts: int | None = None

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        self.settings = settings
        self.layers = list(layers)
        self.size = size
        # The trainable parameters of a LoRA of the preset's rank: what methods are matched to.
        self.budget = settings.lora_rank * sum(
            layer.out_features + layer.in_features for layer in layers
        )

    @abstractmethod
    def trainable_parameters(self) -> int:
        """How many a client with the whole budget trains, the classifier not counted."""

    @abstractmethod
    def upload_shapes(self, share: float) -> dict[str, tuple[int, ...]]:
        """The float32 tensors that a client with that share sends."""

    def upload_bytes(self, share: float) -> int:
        """What the upload of a client with that share weighs."""
        return 4 * sum(math.prod(shape) for shape in self.upload_shapes(share).values())

    def can_train(self, share: float) -> bool:
        """Can a client with that share of the budget take part?"""
        return self.parts is not None or share >= 1

    def effective_rank_bound(self) -> int | None:
        """The largest rank that a matrix's update can have, where it is not the rank itself."""
        return None

    def install(
        self,
        network: nn.Module,
        pretrained: Mapping[str, nn.Parameter],  # noqa: ARG002 (full fine-tuning trains them)
    ) -> list[nn.Module]:
        """Put the adapters into the network; they are what the client's half works on."""
        return list(attach(network, self.layers, self.adapt).values())

    def adapt(self, layer: Layer, linear: nn.Linear) -> nn.Module:
        """The adapter that takes the place of a layer."""
        raise NotImplementedError

    # The calibration round, of the methods that have one.

    def open_calibration(
        self,
        sums: Callable[[Tensors], Round] = Means,  # noqa: ARG002
    ) -> Calibration | None:
        """Running sums that start empty; None for a method without a calibration round.

        `sums` makes their mean, or what takes its place, of tensors of the uploads' shapes.
        """
        return None

    def calibration_bytes(self) -> tuple[int, int]:
        """What a client sends in the calibration round, and the fixed tensors that it gets."""
        return 0, 0

    def calibrate(self, adapters: Sequence[nn.Module], work: LocalWork) -> Tensors:
        """A client's part; the adapters are afterwards as they were."""
        raise NotImplementedError

    def load_fixed(self, adapters: Sequence[nn.Module], fixed: Mapping[str, Tensor]) -> None:
        """Put the fixed tensors into the adapters, for good."""
        raise NotImplementedError

    # The server's half.

    @abstractmethod
    def initial_state(self, adapters: Sequence[nn.Module]) -> Tensors:
        """The global state before the first round; the adapters are as `install` made them."""

    def broadcast(self, state: Tensors, share: float) -> Tensors:  # noqa: ARG002 (some methods differ by share)
        """What a client with that share of the budget is sent."""
        return state

    def broadcast_bytes(self, initial: Tensors, share: float) -> int:
        """What a broadcast to such a client weighs at most, in a run from that initial state."""
        sent = self.broadcast(initial, share).values()
        return sum(tensor.numel() * tensor.element_size() for tensor in sent)

    def check(self, upload: Mapping[str, Tensor], share: float) -> None:
        """Raise ValueError unless uploads of such a client look like this one.

        That its numbers are finite is no question of the method.
        """
        shapes = self.upload_shapes(share)
        check_names(upload, list(shapes))
        for name, shape in shapes.items():
            check_form(upload, name, shape, torch.float32)

    def heads_in(self, upload: Mapping[str, Tensor]) -> list[list[int]]:  # noqa: ARG002
        """The heads of each layer that a checked upload holds; a LoRA has the one head 0."""
        return [[0] for _ in self.layers]

    def filled(self, upload: Mapping[str, Tensor], state: Tensors) -> Tensors:  # noqa: ARG002
        """A checked upload in the shapes of the state, NaN where it has nothing."""
        return dict(upload)

    def start_of(self, upload: Mapping[str, Tensor], sent: Tensors) -> Tensors:
        """What a checked upload's tensors were when they were sent: changes count from there."""
        return {name: sent[name] for name in upload}

    def open_round(self, state: Tensors) -> Round:
        """Running sums that start empty."""
        return Means(state)

    def norms_alone(self, upload: Mapping[str, Tensor]) -> dict[str, float]:  # noqa: ARG002
        """The norms that the next state would have, were a checked upload the only one.

        Only of tensors that are not the uploads' means, whose changes say nothing of it.
        """
        return {}

    # The client's half. `adapters` are what `install` made.

    @abstractmethod
    def load(self, adapters: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> None:
        """Put a broadcast, or a global state, into the adapters; everything else is reset."""

    def choose(  # noqa: B027 (most methods have nothing left to choose)
        self,
        adapters: Sequence[nn.Module],
        share: float,
        random: torch.Generator,
        backward: Callable[[], object],
    ) -> None:
        """Make trainable what the share pays for, where `load` has not done it.

        `backward` runs one mini-batch of the client forward and backward.
        """

    def parameters(self, adapters: Sequence[nn.Module]) -> list[nn.Parameter]:
        """What the client's optimiser is given after `choose`."""
        return [p for adapter in adapters for p in adapter.parameters() if p.requires_grad]

    @abstractmethod
    def upload(self, adapters: Sequence[nn.Module]) -> Tensors:
        """What the client sends after its local steps."""

    def delta_weights(self, adapters: Sequence[nn.Module]) -> list[Tensor]:
        """What the adapters add to each layer's pretrained weight, (out, in)."""
        return [cast(_Adds, adapter).delta_weight().detach() for adapter in adapters]

    def head_norms(self, adapters: Sequence[nn.Module]) -> list[list[float]]:
        """The norm of what each head adds to its layer's weight; a LoRA has one head."""
        return [[float(delta.norm())] for delta in self.delta_weights(adapters)]

    def lora_factors(self, adapter: nn.Module) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """An adapter's delta-weight as one product, B (out, R) and A (R, in).

        None if the method changes the pretrained weights: then no adapter holds it all.
        """
        return None

    def fingerprint(self, adapters: Sequence[nn.Module]) -> list[float]:  # noqa: ARG002
        """Numbers that agree, to rounding, where what is derived from the seed agrees."""
        return []


class _Adds(Protocol):
    def delta_weight(self) -> Tensor:
        """What an adapter adds to its layer's weight."""


def check_rank(rank: int, side: int) -> None:
    """Raise ValueError if the smallest side of the adapted matrices has no room for the rank."""
    if rank > side:
        raise ValueError(
            f"rank = {rank}: the smallest side of an adapted matrix is {side}, so expected at most "
            f"{side}; lower rank"
        )
