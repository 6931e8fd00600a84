"""Put a method's adapters into a frozen network and lend it to one client after the other.

The classifier, drawn from the seed, is frozen as well, or trained and averaged. Where a part of the
model stays with each client (`Personal`), a trained classifier is in that part.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, find_layers
from ravan_flwr.methods.base import CLASSIFIER, Method, Tensors, split_classifier
from ravan_flwr.methods.extensions import Calibration
from ravan_flwr.methods.tensors import check_names, check_tensor, checksum
from ravan_flwr.training.device import computing_with, give_back_memory
from ravan_flwr.training.network import Backbone, pretrained_parameters

FINGERPRINT = "model/fingerprint"  # in a checkpoint: numbers that follow from bases and classifier


class AdaptedModel:
    """Lend a network with a method's adapters in it to one client after the other."""

    def __init__(
        self, backbone: "Backbone", make_method: Callable[[list[Layer], int], Method], *,
        train_classifier: bool, threads: int | None = None,
    ) -> None:  # fmt: skip
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
        if train_classifier and not classifier:
            raise ValueError(
                "classifier = 'trained': the model has none, it answers with its pretrained "
                "language-model head; expected 'frozen'; set it"
            )
        self._initial_classifier = self._flat_classifier()
        self.has_examples_apart = False  # not known yet: private steps find out
        self._fixed_hash = ""  # of the method's fixed tensors, once it has them
        self.seed_fingerprint = self.derived = self._derived_fingerprint()
        self._state_at_rest = self.initial_state()
        self._load(self._state_at_rest)

    def initial_state(self) -> Tensors:
        """Make the global state before the first round, with the classifier if it is trained."""
        state = self.method.initial_state(self.adapters)
        if self._classifier_travels:
            state[CLASSIFIER] = self._initial_classifier.cpu().clone()
        return state

    def trainable_parameters(self) -> int:
        """Count what a client with the whole budget trains, with the classifier."""
        classifier = len(self._initial_classifier) if self.train_classifier else 0
        return self.method.trainable_parameters() + classifier

    @property
    def _classifier_travels(self) -> bool:
        return self.train_classifier and self.method.personal is None

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name the tensors that stay with each client, with their shapes; none for most methods."""
        if self.method.personal is None:
            return {}
        classifier = {CLASSIFIER: tuple(self._initial_classifier.shape)}
        return {**self.method.personal.shapes, **(classifier if self.train_classifier else {})}

    def personal_state(self) -> Tensors:
        """Copy what stays with the client after its local steps."""
        if self.method.personal is None:
            return {}
        own = self.method.personal.collect(self.adapters)
        return own | ({CLASSIFIER: self._flat_classifier().cpu()} if self.train_classifier else {})

    def check_own(self, own: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless it is what `personal_state` returns, with finite numbers."""
        shapes = self.own_shapes()
        check_names(own, list(shapes))
        for name, shape in shapes.items():
            check_tensor(own, name, shape, torch.float32)

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

    def load_fixed(self, fixed: Tensors, expected: str = "") -> list[float]:
        """Take a method's fixed tensors unless the model has them; refuse another checksum.

        Return the model's fingerprint with them.
        """
        fixed_hash = checksum(fixed)
        if expected and fixed_hash != expected:
            raise ValueError(
                f"fixed tensors have hash {fixed_hash}, expected {expected}; the server sends them "
                "once more in the node's next round"
            )
        if fixed_hash != self._fixed_hash:
            self.calibration.load(self.adapters, fixed)
            self._fixed_hash, self.derived = fixed_hash, self._derived_fingerprint()
        return self.derived

    def check_fingerprint(self, memory: Mapping[str, Tensor], where: str) -> None:
        """Raise ValueError unless a checkpoint was made with the bases and classifier of this."""
        here = torch.tensor(self.derived, dtype=torch.float64)
        there = memory.get(FINGERPRINT, here)
        if there.shape != here.shape or not torch.allclose(there, here, 1e-4, 1e-4):
            raise ValueError(
                f"{where}: got a checkpoint of other bases, or of another classifier, than its "
                "config.json makes on this machine, expected the same; restore config.json, or "
                "install the PyTorch with which the run was made"
            )

    def _derived_fingerprint(self) -> list[float]:
        """Compute numbers that agree where bases and classifier agree.

        `seed_fingerprint` is that of what is made from the seed, `derived` that of what the
        model has now.
        """
        weights = self._initial_classifier.cpu().double()
        ramp = torch.arange(len(weights), dtype=torch.float64).cos()
        return [*self.method.fingerprint(self.adapters), float(weights @ ramp)]

    @contextmanager
    def holding(
        self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """Load a broadcast, or a global state; afterwards the model is as it was before.

        `own` is the client's part of the model, if it has one.
        """
        try:
            self._load(tensors)
            if own is not None:
                self._put(own)
            with computing_with(self.threads):
                yield
        finally:
            self._load(self._state_at_rest)
            for parameter in self.network.parameters():
                parameter.grad = None
            give_back_memory(self.device)

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        self.method.load(self.adapters, split_classifier(tensors)[0])
        if self._classifier_travels:
            shape = self._initial_classifier.shape
            self._set_classifier(check_tensor(tensors, CLASSIFIER, shape, torch.float32))
        elif self.train_classifier:
            self._set_classifier(self._initial_classifier)
        for parameter in self.classifier:
            parameter.requires_grad_(self.train_classifier)

    def _put(self, own: Mapping[str, Tensor]) -> None:
        """Put a client's own part into the model, on top of a broadcast."""
        self.check_own(own)
        if self.method.personal is not None:
            self.method.personal.put(self.adapters, split_classifier(own)[0])
        if CLASSIFIER in own:
            self._set_classifier(own[CLASSIFIER])

    def _set_classifier(self, flat: Tensor) -> None:
        with torch.no_grad():
            # It makes the parameters views of what it is given.
            nn.utils.vector_to_parameters(flat.to(self.device, copy=True), self.classifier)

    def upload(self, method: Method) -> Tensors:
        """Collect what the client sends after its local steps, in a round of the method."""
        tensors = method.upload(self.adapters)
        if self._classifier_travels:
            tensors[CLASSIFIER] = self._flat_classifier().cpu()
        return tensors

    def parameters(self) -> list[nn.Parameter]:
        """List what the client's optimiser is given, once its heads are chosen."""
        classifier = self.classifier if self.train_classifier else []
        return [*self.method.parameters(self.adapters), *classifier]

    @cached_property
    def scaler(self) -> torch.amp.GradScaler:
        """Hold the loss scale of float16, which one client leaves to the next."""
        return torch.amp.GradScaler(self.device.type)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device
