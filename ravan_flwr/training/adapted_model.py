"""Put a method's adapters into a frozen network that a process's clients use in turn.

The classifier is drawn from the seed. It is frozen as well, or trained and averaged. With a method
that has personal parameters (`Personal`), a trained classifier is one of them.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from logging import getLogger

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ravan_flwr.adapters import Layer, find_layers
from ravan_flwr.methods.base import CLASSIFIER, Method, Tensors, split_classifier
from ravan_flwr.methods.extensions import Calibration
from ravan_flwr.methods.tensors import check_names, check_tensor, checksum
from ravan_flwr.tasks.base import Batch
from ravan_flwr.training.captured import CapturedStep, GraphCache
from ravan_flwr.training.device import computing_with, release_cached_memory
from ravan_flwr.training.network import Backbone, pretrained_parameters
from ravan_flwr.training.step import OptimizerStep, TrainingSettings

log = getLogger(__name__)

FINGERPRINT = "model/fingerprint"  # key in a checkpoint: numbers computed from bases and classifier


class AdaptedModel:
    """A network with a method's adapters, used by one client at a time (`holding`)."""

    def __init__(
        self, backbone: "Backbone", make_method: Callable[[list[Layer], int], Method], *,
        train_classifier: bool, threads: int | None = None,
    ) -> None:  # fmt: skip
        """Put the method's adapters into the backbone; `threads` is its number of CPU threads."""
        network, classifier = backbone.network, backbone.classifier
        network.requires_grad_(False)
        self.network, self.threads = network, threads
        pretrained = pretrained_parameters(network, classifier)
        self.layers = find_layers(network, backbone.targets, classifier if train_classifier else ())
        self.method = make_method(self.layers, backbone.size)
        self.adapters = self.method.install(network, pretrained)
        self.classifier = classifier
        self.train_classifier = train_classifier
        if train_classifier and not classifier:
            raise ValueError(
                "classifier = 'trained': the model has no classifier, it answers with its "
                "pretrained language-model head, expected 'frozen'; set classifier=frozen"
            )
        self._initial_classifier = self._flat_classifier()
        self.training_graphs: GraphCache | None = None  # None: every step is computed eagerly
        self.evaluation_graphs: GraphCache | None = None
        self.examples_are_independent = False  # set by the check of extras/example_privacy/steps.py
        self._fixed_hash = ""  # of the method's fixed tensors, once they are loaded
        self.seed_fingerprint = self.fingerprint = self._compute_fingerprint()
        self.idle_state = self.method.idle_state(self.adapters) | self._first_classifier()
        self.load(self.idle_state)

    def initial_state(self) -> Tensors:
        """Return the global state before the first round, with the classifier if it is trained."""
        return self.method.initial_state(self.adapters) | self._first_classifier()

    def _first_classifier(self) -> Tensors:
        """Return the classifier as the state has it before the first round."""
        first = self._initial_classifier.cpu().clone()
        return {CLASSIFIER: first} if self._sends_classifier else {}

    def trainable_parameters(self) -> int:
        """Count the parameters that a client with the whole budget trains, with the classifier."""
        classifier = len(self._initial_classifier) if self.train_classifier else 0
        return self.method.trainable_parameters() + classifier

    @property
    def _sends_classifier(self) -> bool:
        return self.train_classifier and self.method.personal is None

    def personal_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the personal parameters; empty for most methods."""
        if self.method.personal is None:
            return {}
        classifier = {CLASSIFIER: tuple(self._initial_classifier.shape)}
        return {**self.method.personal.shapes, **(classifier if self.train_classifier else {})}

    def collect_personal(self) -> Tensors:
        """Copy the client's personal parameters, after its local steps."""
        if self.method.personal is None:
            return {}
        personal = self.method.personal.collect(self.adapters)
        return personal | (
            {CLASSIFIER: self._flat_classifier().cpu()} if self.train_classifier else {}
        )

    def check_personal(self, personal: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless names and shapes are `personal_shapes` and all numbers finite."""
        shapes = self.personal_shapes()
        check_names(personal, list(shapes))
        for name, shape in shapes.items():
            check_tensor(personal, name, shape, torch.float32)

    def _flat_classifier(self) -> Tensor:
        """Return a copy of the classifier's parameters as one flat tensor."""
        parts = [parameter.detach().flatten() for parameter in self.classifier]
        return torch.cat(parts) if parts else torch.zeros(0)

    @property
    def calibration(self) -> Calibration:
        """Return the method's calibration round; ValueError for a method without one."""
        if self.method.calibration is None:
            raise ValueError(
                f"calibration: {type(self.method).__name__} has no calibration round, expected a "
                "method that has one; start server and clients with one configuration"
            )
        return self.method.calibration

    @property
    def is_calibrated(self) -> bool:
        """Return whether the method's fixed tensors have replaced those of the seed."""
        return bool(self._fixed_hash)

    def load_fixed(self, fixed: Tensors, expected: str = "") -> list[float]:
        """Load a method's fixed tensors unless they are loaded; return the model's fingerprint.

        Raise ValueError if their checksum is not the expected one.
        """
        fixed_hash = checksum(fixed)
        if expected and fixed_hash != expected:
            raise ValueError(
                f"fixed tensors have hash {fixed_hash}, expected {expected}; the server sends them "
                "once more in the node's next round"
            )
        if fixed_hash != self._fixed_hash:
            self.calibration.load(self.adapters, fixed)
            self._fixed_hash, self.fingerprint = fixed_hash, self._compute_fingerprint()
        return self.fingerprint

    def check_fingerprint(self, memory: Mapping[str, Tensor], where: str) -> None:
        """Raise ValueError unless a checkpoint's bases and classifier are those of this model."""
        fingerprint = torch.tensor(self.fingerprint, dtype=torch.float64)
        saved = memory.get(FINGERPRINT, fingerprint)
        if saved.shape != fingerprint.shape or not torch.allclose(saved, fingerprint, 1e-4, 1e-4):
            raise ValueError(
                f"{where}: got a checkpoint of other bases, or of another classifier, than its "
                "config.json makes on this machine, expected the same; restore config.json, or "
                "install the PyTorch with which the run was made"
            )

    def _compute_fingerprint(self) -> list[float]:
        """Return numbers that are equal where bases and classifier are equal.

        `seed_fingerprint` is computed once, from the tensors drawn from the seed, and `fingerprint`
        again whenever fixed tensors are loaded.
        """
        weights = self._initial_classifier.cpu().double()
        ramp = torch.arange(len(weights), dtype=torch.float64).cos()
        return [*self.method.fingerprint(self.adapters), float(weights @ ramp)]

    @contextmanager
    def holding(
        self, tensors: Mapping[str, Tensor], personal: Mapping[str, Tensor] | None = None
    ) -> Iterator[None]:
        """Load a broadcast, or a global state, for the duration of a `with` block.

        `personal` are the client's personal parameters, if it has any. Afterwards the model is idle
        again (`Method.idle_state`).
        """
        try:
            self.load(tensors)
            if personal is not None:
                self.check_personal(personal)
                if self.method.personal is not None:
                    self.method.personal.put(self.adapters, split_classifier(personal)[0])
                if CLASSIFIER in personal:
                    self._set_classifier(personal[CLASSIFIER])
            with computing_with(self.threads):
                yield
        finally:
            self.load(self.idle_state)
            for parameter in self.network.parameters():
                parameter.grad = None
            release_cached_memory(self.device)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a broadcast, or a global state, within `holding`."""
        self.method.load(self.adapters, split_classifier(tensors)[0])
        if self._sends_classifier:
            shape = self._initial_classifier.shape
            self._set_classifier(check_tensor(tensors, CLASSIFIER, shape, torch.float32))
        elif self.train_classifier:
            self._set_classifier(self._initial_classifier)
        for parameter in self.classifier:
            parameter.requires_grad_(self.train_classifier)

    def _set_classifier(self, flat: Tensor) -> None:
        with torch.no_grad():
            # Copied, because vector_to_parameters makes the parameters views of its argument.
            nn.utils.vector_to_parameters(flat.to(self.device, copy=True), self.classifier)

    def upload(self, method: Method) -> Tensors:
        """Return the tensors that the client sends after its local steps, in a round's method."""
        tensors = method.upload(self.adapters)
        if self._sends_classifier:
            tensors[CLASSIFIER] = self._flat_classifier().cpu()
        return tensors

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters for the client's optimiser, once its heads are chosen."""
        classifier = self.classifier if self.train_classifier else []
        return [*self.method.parameters(self.adapters), *classifier]

    def set_training(self) -> None:
        """Set the network to training, except normalisations with running statistics.

        Their statistics are pretrained and never travel, so no client's batches may change them.
        """
        for norm in norms_with_statistics(self.network.train()):
            norm.eval()

    def make_step(
        self, parameters: Sequence[Tensor], settings: TrainingSettings,
        scaler: torch.amp.GradScaler, backward: Callable[[Sequence[Batch]], Tensor],
        *, clients: int = 1, captures: bool = True,
    ) -> OptimizerStep | CapturedStep:  # fmt: skip
        """Return a new optimiser's step: captured on a GPU, if the model has graphs."""
        graphs = self.training_graphs if captures else None
        step = OptimizerStep(
            parameters, settings, scaler, backward, capturable=graphs is not None, clients=clients
        )
        return step if graphs is None else graphs.wrap(self.network, step)

    @property
    def has_graphs(self) -> bool:
        """Return whether captured steps or evaluations hold memory."""
        caches = self.training_graphs, self.evaluation_graphs
        return any(cache is not None and cache.holds_memory for cache in caches)

    def drop_graphs(self) -> None:
        """Free the memory of captured steps and evaluations, and compute eagerly from now on.

        Not to be called while an exception is handled: its traceback holds that memory.
        """
        log.warning(
            "out of memory beside captured steps: they are dropped, and all is computed eagerly "
            "from now on; a smaller batch-size leaves room for them"
        )
        self.training_graphs = self.evaluation_graphs = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @cached_property
    def scaler(self) -> torch.amp.GradScaler:
        """Return the gradient scaler of float16; its loss scale is kept from client to client."""
        return torch.amp.GradScaler(self.device.type)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device


def norms_with_statistics(network: nn.Module) -> list[nn.Module]:
    """Return the normalisations that keep running statistics of what they are given."""
    return [
        module
        for module in network.modules()
        if isinstance(module, _NormBase) and module.track_running_stats
    ]
