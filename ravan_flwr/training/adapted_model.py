"""Put a method's adapters into a frozen network and lend it to one client after the other.

The classifier, drawn from the seed, is frozen as well, or trained and averaged.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, find_layers
from ravan_flwr.methods.base import CLASSIFIER, Method, Tensors
from ravan_flwr.methods.calibration import Calibration
from ravan_flwr.methods.tensors import check_tensor, checksum
from ravan_flwr.training.network import Backbone, pretrained_parameters
from ravan_flwr.training.threads import computing_with


class AdaptedModel:
    """Lend a network with a method's adapters in it to one client after the other."""

    def __init__(
        self,
        backbone: "Backbone",
        make_method: Callable[[list[Layer], int], Method],
        *,
        train_classifier: bool,
        threads: int | None = None,
        shares_device: bool = True,
    ) -> None:
        """Put the method's adapters into the backbone; on a CPU it computes with `threads`."""
        network, classifier = backbone.network, backbone.classifier
        network.requires_grad_(False)
        self.network, self.threads = network, threads
        pretrained = pretrained_parameters(network, classifier)
        self.layers = find_layers(network, backbone.targets)
        self.method = make_method(self.layers, backbone.size)
        self.adapters = self.method.install(network, pretrained)
        self.classifier = classifier
        self.train_classifier = train_classifier
        self.shares_device = shares_device  # with other processes, which may want its memory
        if train_classifier and not classifier:
            raise ValueError(
                "classifier = 'trained': the model has none, it answers with its pretrained "
                "language-model head; expected 'frozen'; set it"
            )
        self._drawn_classifier = self._flat_classifier()
        self._fixed_hash = ""  # of the method's fixed tensors, once it has them
        self.seed_fingerprint = self.derived = self._derived_fingerprint()
        self._state_at_rest = self.initial_state()
        self._load(self._state_at_rest)

    def initial_state(self) -> Tensors:
        """Make the global state before the first round, with the classifier if it is trained."""
        state = self.method.initial_state(self.adapters)
        if self.train_classifier:
            state[CLASSIFIER] = self._drawn_classifier.cpu().clone()
        return state

    def trainable_parameters(self) -> int:
        """Count what a client with the whole budget trains, with the classifier."""
        classifier = len(self._drawn_classifier) if self.train_classifier else 0
        return self.method.trainable_parameters() + classifier

    def _flat_classifier(self) -> Tensor:
        """Copy the classifier's parameters, one after the other."""
        parts = [parameter.detach().flatten() for parameter in self.classifier]
        return torch.cat(parts) if parts else torch.zeros(0)

    @property
    def calibration(self) -> Calibration:
        """Give the method's calibration round; ValueError where it holds none."""
        if self.method.calibration is None:
            raise ValueError(
                f"calibration: {type(self.method).__name__} holds none, expected a method that "
                "does; start server and clients with one configuration"
            )
        return self.method.calibration

    def load_fixed(self, fixed: Tensors, expected: str = "") -> None:
        """Take a method's fixed tensors unless the model has them; refuse another checksum."""
        found = checksum(fixed)
        if expected and found != expected:
            raise ValueError(
                f"fixed tensors have hash {found}, expected {expected}; the server sends them once "
                "more in the node's next round"
            )
        if found != self._fixed_hash:
            self.calibration.load(self.adapters, fixed)
            self._fixed_hash, self.derived = found, self._derived_fingerprint()

    def _derived_fingerprint(self) -> list[float]:
        """Compute numbers that agree where bases and classifier agree.

        `seed_fingerprint` is that of what is made from the seed, `derived` that of what the
        model has now.
        """
        weights = self._drawn_classifier.cpu().double()
        ramp = torch.arange(len(weights), dtype=torch.float64).cos()
        return [*self.method.fingerprint(self.adapters), float(weights @ ramp)]

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Load a broadcast, or a global state; afterwards the model is as it was before."""
        try:
            self._load(tensors)
            with computing_with(self.threads):
                yield
        finally:
            self._load(self._state_at_rest)
            for parameter in self.network.parameters():
                parameter.grad = None
            if self.shares_device and self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        self.method.load(self.adapters, {k: v for k, v in tensors.items() if k != CLASSIFIER})
        if self.train_classifier:
            shape = self._drawn_classifier.shape
            flat = check_tensor(tensors, CLASSIFIER, shape, torch.float32)
            with torch.no_grad():
                # It makes the parameters views of what it is given.
                nn.utils.vector_to_parameters(flat.to(self.device, copy=True), self.classifier)
        for parameter in self.classifier:
            parameter.requires_grad_(self.train_classifier)

    def upload(self, method: Method) -> Tensors:
        """Collect what the client sends after its local steps, in a round of the method."""
        tensors = method.upload(self.adapters)
        if self.train_classifier:
            tensors[CLASSIFIER] = self._flat_classifier().cpu()
        return tensors

    def parameters(self) -> list[nn.Parameter]:
        """List what the client's optimiser is given, once its heads are chosen."""
        classifier = self.classifier if self.train_classifier else []
        return [*self.method.parameters(self.adapters), *classifier]

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device
