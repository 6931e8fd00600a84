"""Define a federated method: a client half and a server half, both pure torch.

The global state is a dict of a few named tensors; broadcasts and uploads are, too. A round is

    server                                  client
    broadcast(state, fraction) --------->  load(adapters, tensors)
                                            choose(adapters, ...)      what to train
                                            ... local steps ...
    check(upload, fraction)  <------------  upload(adapters)
    open_round(state).add(upload, weight), .close() -> the next state

By default a client trains all trainable parameters of its adapters, and the next state is the mean
of the uploads, tensor by tensor. So the smallest method defines which adapter replaces a layer, and
which of its tensors travel. The following example is a complete method: a LoRA of rank 2 whose A is
drawn from the seed on both sides and frozen. Only B travels, and its mean is exact.

    class Smallest(Method[LoRALinear]):
        rank = 2

        def trainable_parameters(self):
            return self.rank * sum(layer.out_features for layer in self.layers)

        def upload_shapes(self, fraction):
            return {"B": (self.trainable_parameters(),)}

        def adapt(self, layer, linear):
            random = generator(self.settings.seed, "smallest", layer.name)
            A = torch.randn(self.rank, layer.in_features, generator=random)
            return LoRALinear(linear, torch.zeros(layer.out_features, self.rank), A)

        def initial_state(self, adapters):
            return {"B": torch.zeros(self.trainable_parameters())}

        def load(self, adapters, tensors):
            B = check_tensor(tensors, "B", self.upload_shapes(1.0)["B"], torch.float32)
            sizes = [adapter.B.numel() for adapter in adapters]
            for adapter, part in zip(adapters, B.split(sizes), strict=True):
                adapter.set_factors(part.view_as(adapter.B), adapter.A)
                adapter.A.requires_grad_(False)

        def upload(self, adapters):
            return {"B": flatten([adapter.B for adapter in adapters])}

        def lora_factors(self, adapter):
            return adapter.factors()

        def fingerprint(self, adapters):
            return probe([(adapter.A,) for adapter in adapters])

docs/extending.md adds another method, step by step. A method whose rounds differ lists their
attributes in `rounds`, and both sides call `in_round(number)` for the method of that round.
extensions.py has the interfaces that only some options need: sums of changes, limits of norms, a
calibration round, personal parameters.

The classifier, evaluation and Flower are handled elsewhere: they are the same for every method.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, cast

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, attach
from ravan_flwr.methods.extensions import Adapter, Calibration, Personal
from ravan_flwr.methods.tensors import Means, Sums, Tensors, check_form, check_names

__all__ = [
    "CLASSIFIER", "Adapter", "Method", "Settings", "Sums", "Tensors", "check_rank",
    "expand_to_state", "split_classifier",
]  # fmt: skip

CLASSIFIER = "classifier"  # key of the classifier's one flat tensor, beside the method's tensors


def split_classifier(tensors: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
    """Return the tensors of the method and, if it is present, the tensor of the classifier."""
    method_tensors = {name: tensor for name, tensor in tensors.items() if name != CLASSIFIER}
    return method_tensors, {name: tensor for name, tensor in tensors.items() if name == CLASSIFIER}


@dataclass(frozen=True)
class Settings:
    """The settings of a method."""

    seed: int = 0
    lora_rank: int = 32  # a LoRA of this rank has the parameter budget's number of parameters
    rank: int | None = None  # None: the largest rank within the parameter budget
    lora_scale: float = 1.0
    # If not 0: lora_scale is alpha, and a LoRA's scale is alpha sqrt(scale_clients / rank).
    scale_clients: int = 0
    heads: int = 4
    init: str = "gram-schmidt"
    calibration_steps: int = 8
    scaling: str = "trained"
    scoring: str = "random"
    # "layer": the best heads of each layer; "global": the best heads of all layers together;
    # "any": the client chooses how many heads of which layers.
    selection: str = "layer"
    head_mean: str = "trained"
    layer_form: str = "auto"  # of multi-head layers


class Method(ABC, Generic[Adapter]):
    """Train, send and aggregate adapters of one kind over the adapted layers of a network.

    `size` is the number of the network's pretrained parameters, adapted or not.
    """

    rank: int | None  # of the adapters; None if the method has no rank
    # Heads or ranks, of which a small budget trains some. None: a client trains all or nothing.
    budget_units: int | None = None
    cuts_broadcast: bool = False  # is a client with a small budget sent less than the others?
    calibration: Calibration[Adapter] | None = None  # the round before round 1, if there is one
    # The attributes of each round, cyclically, if rounds differ.
    rounds: tuple[Mapping[str, Any], ...] = ()
    frozen_tensors: tuple[str, ...] = ()  # tensors of the state that this round does not change
    personal: Personal[Adapter] | None = None  # the parameters that stay with each client, if any

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        self.settings = settings
        self.layers = list(layers)
        self.size = size
        # The parameter budget that methods are matched to: a LoRA of rank `lora_rank`.
        self.budget = settings.lora_rank * sum(
            layer.out_features + layer.in_features for layer in layers
        )

    def in_round(self, number: int) -> Self:
        """Return the method with the attributes of that training round."""
        if not self.rounds:
            return self
        method = copy.copy(self)
        vars(method).update(self.rounds[(number - 1) % len(self.rounds)])
        return method

    def different_rounds(self) -> list[Self]:
        """Return the method of each round of one cycle."""
        return [self.in_round(1 + turn) for turn in range(max(1, len(self.rounds)))]

    # Costs.

    @abstractmethod
    def trainable_parameters(self) -> int:
        """Count the parameters that a client with the whole budget trains, without classifier."""

    @abstractmethod
    def upload_shapes(self, fraction: float) -> dict[str, tuple[int, ...]]:
        """Return the shapes, by name, of the float32 tensors uploaded at that budget fraction."""

    def upload_bytes(self, fraction: float) -> int:
        """Count the bytes that a client with that budget fraction sends."""
        return 4 * sum(math.prod(shape) for shape in self.upload_shapes(fraction).values())

    def broadcast_bytes(self, initial: Tensors, fraction: float) -> int:
        """Return an upper bound of a broadcast's bytes at that budget fraction, in any round."""
        sent = self.broadcast(initial, fraction).values()
        return sum(tensor.numel() * tensor.element_size() for tensor in sent)

    def trained_tensors(self) -> set[str]:
        """Return the names of the tensors that clients train and send, in any round."""
        rounds = self.different_rounds()
        return {name for method in rounds for name in method.upload_shapes(1.0)}

    def can_train(self, fraction: float) -> bool:
        """Return whether a client with that budget fraction can train."""
        return self.budget_units is not None or fraction >= 1

    # The server's half.

    @abstractmethod
    def initial_state(self, adapters: Sequence[Adapter]) -> Tensors:
        """Return the global state before round 1, for adapters as `install` made them."""

    def broadcast(self, state: Tensors, fraction: float) -> Tensors:
        """Return the tensors that a client with that budget fraction is sent."""
        return state

    def check(self, upload: Mapping[str, Tensor], fraction: float) -> None:
        """Raise ValueError unless the upload has the names, shapes and dtypes of that fraction.

        The caller checks that its numbers are finite.
        """
        shapes = self.upload_shapes(fraction)
        check_names(upload, list(shapes))
        for name, shape in shapes.items():
            check_form(upload, name, shape, torch.float32)

    def heads_in(self, upload: Mapping[str, Tensor]) -> list[list[int]]:
        """Return the heads of each layer that a checked upload has; a LoRA has one head, 0."""
        return [[0] for _ in self.layers]

    def expand_upload(self, upload: Mapping[str, Tensor], state: Tensors) -> Tensors:
        """Return a checked upload in the state's shapes, NaN where the upload has no number."""
        return {
            name: upload[name] if name in upload else torch.full_like(old, torch.nan)
            for name, old in state.items()
        }

    def open_round(self, state: Tensors) -> Sums:
        """Return empty running sums for a round that starts from that state."""
        return Means(state)

    # The client's half. `install` made the `adapters`.

    def install(self, network: nn.Module, pretrained: Mapping[str, nn.Parameter]) -> list[Adapter]:
        """Put the adapters into the network and return them; the client's half works on them."""
        return list(attach(network, self.layers, self.adapt).values())

    def adapt(self, layer: Layer, linear: nn.Linear) -> Adapter:
        """Return the adapter that replaces a layer."""
        raise NotImplementedError

    def idle_state(self, adapters: Sequence[Adapter]) -> Tensors:
        """Return the state of adapters that no client uses, which is that of `install`."""
        return self.initial_state(adapters)

    @abstractmethod
    def load(self, adapters: Sequence[Adapter], tensors: Mapping[str, Tensor]) -> None:
        """Load a broadcast, or a global state, into the adapters; reset everything else in them."""

    def choose(
        self, adapters: Sequence[Adapter], fraction: float, random: torch.Generator,
        backward: Callable[..., object],
    ) -> None:  # fmt: skip
        """Make the parameters within the budget trainable, where `load` has not done so.

        `backward(sums)` runs one mini-batch of the client forward and backward. What hooks add to
        the tensors of `sums` during this pass must be proportional to the gradients.
        """

    def parameters(self, adapters: Sequence[Adapter]) -> list[nn.Parameter]:
        """Return the parameters for the client's optimiser, after `choose`."""
        return [p for adapter in adapters for p in adapter.parameters() if p.requires_grad]

    @abstractmethod
    def upload(self, adapters: Sequence[Adapter]) -> Tensors:
        """Return the tensors that the client sends after its local steps."""

    # The learned update.

    def delta_weights(self, adapters: Sequence[Adapter]) -> list[Tensor]:
        """Return the delta-weight of each layer, (out, in): adapted minus pretrained weight."""
        return [cast(Any, adapter).delta_weight().detach() for adapter in adapters]

    def head_norms(self, adapters: Sequence[Adapter]) -> list[list[float]]:
        """Return the norm of each head's delta-weight, by layer; a LoRA has one head."""
        return [[float(delta.norm())] for delta in self.delta_weights(adapters)]

    def lora_factors(self, adapter: Adapter) -> tuple[Tensor, Tensor] | None:
        """Return an adapter's delta-weight as one product, B (out, R) and A (R, in).

        None if no product represents the model: the method changes the pretrained weights, or its
        layers depend on the input in other ways.
        """
        return None

    def fingerprint(self, adapters: Sequence[Adapter]) -> list[float]:
        """Return numbers that agree, to rounding, if the seed gave both sides the same tensors."""
        return []


def check_rank(rank: int, side: int) -> None:
    """Raise ValueError if the rank exceeds the smallest side of the adapted matrices."""
    if rank > side:
        raise ValueError(
            f"rank = {rank}: the smallest side of an adapted matrix is {side}, so expected at most "
            f"{side}; lower rank"
        )


def expand_to_state(
    method: Method, sent: Mapping[str, Tensor], upload: Mapping[str, Tensor]
) -> Tensors:
    """Expand an upload to the shapes of the sent state, with NaN where nothing was trained."""
    method_tensors, classifier = split_classifier(sent)
    return method.expand_upload(split_classifier(upload)[0], method_tensors) | {
        name: upload[name] for name in classifier
    }
