"""Define what a federated method is: a client half and a server half, both pure torch.

The global state is a dict of few tensors, and so is what travels. A round is

    server                                  client
    broadcast(state, fraction) --------->  load(adapters, tensors)
                                            choose(adapters, ...)      what to train
                                            ... local steps ...
    check(upload, fraction)  <------------  upload(adapters)
    open_round(state).add(upload, weight), .close() -> the next state

Where a method says nothing else, a client trains all that its adapters have to train, and the
next state is the plain mean of the uploads, tensor by tensor. So the smallest method says what it
puts in the place of a layer, and what of that travels. This one, whole, is a LoRA of rank 2 whose
A is drawn from the seed on both sides and frozen: B alone travels, and its mean is exact.

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

docs/extending.md adds another one, step by step. A method whose rounds are not all alike lists them
in `rounds`: both sides ask it for the method of the round (`in_round`), and the others never see
the number. What only some options ask of a method stands in extensions.py: sums of changes, limits
of norms, a round before the first, a part of the model that stays with each client.

Nothing here knows of the classifier, of evaluation or of Flower: those are the same for
every method.
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
    "split_classifier",
]  # fmt: skip

CLASSIFIER = "classifier"  # the classifier's one flat tensor, beside a method's own


def split_classifier(tensors: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
    """Part the tensors into the method's own, and the classifier's if it is among them."""
    own = {name: tensor for name, tensor in tensors.items() if name != CLASSIFIER}
    return own, {name: tensor for name, tensor in tensors.items() if name == CLASSIFIER}


@dataclass(frozen=True)
class Settings:
    """Hold the settings of a method. `rank` None means the largest within the budget."""

    seed: int = 0
    lora_rank: int = 32  # whose number of parameters is the budget
    rank: int | None = None
    lora_scale: float = 1.0
    heads: int = 4
    init: str = "gram-schmidt"
    calibration_steps: int = 8
    scaling: str = "trained"
    scoring: str = "random"
    # "global": the best heads of all layers; "any": a client chooses how many, and where.
    selection: str = "layer"
    head_mean: str = "trained"
    layer_form: str = "auto"  # of multi-head layers


class Method(ABC, Generic[Adapter]):
    """Train, send and aggregate adapters of one kind over the adapted layers of a network.

    `size` is the number of the network's pretrained parameters, adapted or not.
    """

    rank: int | None  # of the adapters; None if the method has no rank
    # In how many parts a client can train it: heads, or ranks. None: whole, or not at all.
    parts: int | None = None
    calibration: Calibration[Adapter] | None = None  # the round before the first, if there is one
    # Where rounds are not all alike: the attributes of each, in turn.
    rounds: tuple[Mapping[str, Any], ...] = ()
    frozen_tensors: tuple[str, ...] = ()  # tensors of the state that stay as they are in this round
    personal: Personal[Adapter] | None = None  # what stays with each client, if something does

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        self.settings = settings
        self.layers = list(layers)
        self.size = size
        # The trainable parameters of a LoRA of the preset's rank: what methods are matched to.
        self.budget = settings.lora_rank * sum(
            layer.out_features + layer.in_features for layer in layers
        )

    def in_round(self, number: int) -> Self:
        """Give the method as it is in a training round, where its rounds differ."""
        if not self.rounds:
            return self
        method = copy.copy(self)
        vars(method).update(self.rounds[(number - 1) % len(self.rounds)])
        return method

    def different_rounds(self) -> list[Self]:
        """List the method as it is in each of its rounds, until they are the same again."""
        return [self.in_round(1 + turn) for turn in range(max(1, len(self.rounds)))]

    # What it costs.

    @abstractmethod
    def trainable_parameters(self) -> int:
        """Count what a client with the whole budget trains, without the classifier."""

    @abstractmethod
    def upload_shapes(self, fraction: float) -> dict[str, tuple[int, ...]]:
        """Return the float32 tensors that a client with that budget sends: name -> shape."""

    def upload_bytes(self, fraction: float) -> int:
        """Count the bytes of such an upload."""
        return 4 * sum(math.prod(shape) for shape in self.upload_shapes(fraction).values())

    def broadcast_bytes(self, initial: Tensors, fraction: float) -> int:
        """Bound the bytes of a broadcast to such a client, in a run from that initial state."""
        sent = self.broadcast(initial, fraction).values()
        return sum(tensor.numel() * tensor.element_size() for tensor in sent)

    def trained_tensors(self) -> set[str]:
        """Name the tensors that clients train, in whichever round."""
        rounds = self.different_rounds()
        return {name for method in rounds for name in method.upload_shapes(1.0)}

    def can_train(self, fraction: float) -> bool:
        """Return whether a client with that budget fraction can take part."""
        return self.parts is not None or fraction >= 1

    def effective_rank_bound(self) -> int | None:
        """Bound the rank of a matrix's update, where that is not the rank itself."""
        return None

    # The server's half.

    @abstractmethod
    def initial_state(self, adapters: Sequence[Adapter]) -> Tensors:
        """Make the global state before the first round; the adapters are as `install` made them."""

    def broadcast(self, state: Tensors, fraction: float) -> Tensors:
        """Pick what a client with that budget fraction is sent."""
        return state

    def check(self, upload: Mapping[str, Tensor], fraction: float) -> None:
        """Raise ValueError unless uploads of such a client look like this one.

        That its numbers are finite is no question of the method.
        """
        shapes = self.upload_shapes(fraction)
        check_names(upload, list(shapes))
        for name, shape in shapes.items():
            check_form(upload, name, shape, torch.float32)

    def heads_in(self, upload: Mapping[str, Tensor]) -> list[list[int]]:
        """List the heads of each layer that a checked upload holds; a LoRA has the one head 0."""
        return [[0] for _ in self.layers]

    def expand_upload(self, upload: Mapping[str, Tensor], state: Tensors) -> Tensors:
        """Bring a checked upload into the shapes of the state, NaN where it has nothing."""
        return {
            name: upload[name] if name in upload else torch.full_like(old, torch.nan)
            for name, old in state.items()
        }

    def open_round(self, state: Tensors) -> Sums:
        """Begin running sums."""
        return Means(state)

    # The client's half. `adapters` are what `install` made.

    def install(self, network: nn.Module, pretrained: Mapping[str, nn.Parameter]) -> list[Adapter]:
        """Put the adapters into the network; they are what the client's half works on."""
        return list(attach(network, self.layers, self.adapt).values())

    def adapt(self, layer: Layer, linear: nn.Linear) -> Adapter:
        """Make the adapter that takes the place of a layer."""
        raise NotImplementedError

    @abstractmethod
    def load(self, adapters: Sequence[Adapter], tensors: Mapping[str, Tensor]) -> None:
        """Put a broadcast, or a global state, into the adapters; everything else is reset."""

    def choose(
        self, adapters: Sequence[Adapter], fraction: float, random: torch.Generator,
        backward: Callable[..., object],
    ) -> None:  # fmt: skip
        """Make trainable what the budget pays for, where `load` has not done it.

        `backward(sums)` runs one mini-batch of the client forward and backward. What hooks add
        meanwhile to the tensors of `sums` has to be in proportion to the gradients.
        """

    def parameters(self, adapters: Sequence[Adapter]) -> list[nn.Parameter]:
        """List what the client's optimiser is given after `choose`."""
        return [p for adapter in adapters for p in adapter.parameters() if p.requires_grad]

    @abstractmethod
    def upload(self, adapters: Sequence[Adapter]) -> Tensors:
        """Collect what the client sends after its local steps."""

    # What has been learned.

    def delta_weights(self, adapters: Sequence[Adapter]) -> list[Tensor]:
        """Compute what the adapters add to each layer's pretrained weight, (out, in)."""
        return [cast(Any, adapter).delta_weight().detach() for adapter in adapters]

    def head_norms(self, adapters: Sequence[Adapter]) -> list[list[float]]:
        """Measure what each head adds to its layer's weight, by norm; a LoRA has one head."""
        return [[float(delta.norm())] for delta in self.delta_weights(adapters)]

    def lora_factors(self, adapter: Adapter) -> tuple[Tensor, Tensor] | None:
        """Write an adapter's delta-weight as one product, B (out, R) and A (R, in).

        None if the method changes the pretrained weights: then no adapter holds it all.
        """
        return None

    def fingerprint(self, adapters: Sequence[Adapter]) -> list[float]:
        """Compute numbers that agree, to rounding, where what is derived from the seed agrees."""
        return []


def check_rank(rank: int, side: int) -> None:
    """Raise ValueError if the smallest side of the adapted matrices has no room for the rank."""
    if rank > side:
        raise ValueError(
            f"rank = {rank}: the smallest side of an adapted matrix is {side}, so expected at most "
            f"{side}; lower rank"
        )
