"""The network: a pretrained backbone, the adapters in it, and what else is trained.

Everything pretrained is frozen. The parameters that the pretrained weights lack are the
classifier: drawn from the seed, and then frozen, or trained and averaged.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from ravan_flwr.adapters import Layer, find_layers
from ravan_flwr.adapters.attach import TARGETS
from ravan_flwr.backbones import read_backbone
from ravan_flwr.methods.base import CLASSIFIER, Method, Tensors, check_tensor
from ravan_flwr.preset import ModelSpec
from ravan_flwr.seeding import generator


class AdaptedModel:
    """A network with a method's adapters in it, lent to one client after the other."""

    def __init__(
        self,
        network: nn.Module,
        classifier: list[nn.Parameter],
        make_method: Callable[[list[Layer], int], Method],
        targets: tuple[str, ...],
        *,
        train_classifier: bool,
    ) -> None:
        network.requires_grad_(False)
        self.network = network
        pretrained = pretrained_parameters(network, classifier)
        self.backbone_fingerprint = _fingerprint(pretrained)
        self.layers = find_layers(network, targets)
        self.method = make_method(self.layers, num_parameters(pretrained))
        self.adapters = self.method.install(network, pretrained)
        self.classifier = classifier
        self.train_classifier = train_classifier
        self._drawn_classifier = nn.utils.parameters_to_vector(classifier).detach().clone()
        self.fixed_hash = ""  # of the method's fixed tensors, once it has them
        self.seed_fingerprint = self.derived = self._derived_fingerprint()
        self._state_at_rest = self.initial_state()
        self._load(self._state_at_rest)

    def initial_state(self) -> Tensors:
        """The global state before the first round, the classifier included if it is trained."""
        state = self.method.initial_state(self.adapters)
        if self.train_classifier:
            state[CLASSIFIER] = self._drawn_classifier.cpu().clone()
        return state

    def trainable_parameters(self) -> int:
        """How many a client with the whole budget trains, the classifier included."""
        classifier = len(self._drawn_classifier) if self.train_classifier else 0
        return self.method.trainable_parameters() + classifier

    def load_fixed(self, fixed_hash: str, fixed: Tensors) -> None:
        """Take a method's fixed tensors, if they are not those that it has."""
        if fixed_hash != self.fixed_hash:
            self.method.load_fixed(self.adapters, fixed)
            self.fixed_hash, self.derived = fixed_hash, self._derived_fingerprint()

    def _derived_fingerprint(self) -> list[float]:
        """Numbers that agree where bases and classifier agree.

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
            yield
        finally:
            self._load(self._state_at_rest)
            for parameter in self.network.parameters():
                parameter.grad = None

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

    def upload(self) -> Tensors:
        """What the client sends after its local steps."""
        tensors = self.method.upload(self.adapters)
        if self.train_classifier:
            flat = nn.utils.parameters_to_vector(self.classifier).detach()
            tensors[CLASSIFIER] = flat.cpu().clone()
        return tensors

    def parameters(self) -> list[nn.Parameter]:
        """What the client's optimiser is given, once its heads are chosen."""
        classifier = self.classifier if self.train_classifier else []
        return [*self.method.parameters(self.adapters), *classifier]

    @property
    def device(self) -> torch.device:
        return self.classifier[0].device


def build_network(
    spec: ModelSpec, num_labels: int, seed: int
) -> tuple[PreTrainedModel, list[nn.Parameter], tuple[str, ...]]:
    """The network with pretrained weights, its classifier, and the ends of its targets' names."""
    settings, weights = SOURCES[spec.source](spec)
    network = _architecture(settings, num_labels)
    result = network.load_state_dict(weights, strict=False)
    if result.unexpected_keys or any(not k.startswith("classifier") for k in result.missing_keys):
        raise ValueError(
            f"model {spec.name}: its weights do not fit this transformers: unexpected "
            f"{result.unexpected_keys}, missing {result.missing_keys}; install the version in "
            "constraints.txt"
        )
    classifier = [network.get_parameter(name) for name in result.missing_keys]
    for name, parameter in zip(result.missing_keys, classifier, strict=True):
        _draw(parameter, generator(seed, "classifier", name))
    return network.eval(), classifier, _targets(spec, network)


def build_skeleton(
    spec: ModelSpec, num_labels: int
) -> tuple[PreTrainedModel, list[nn.Parameter], tuple[str, ...]]:
    """The same network without weights, on the meta device, for plans and estimates."""
    settings, weights = SOURCES[spec.source](spec)
    with torch.device("meta"):
        network = _architecture(settings, num_labels)
    lacking = [p for name, p in network.named_parameters() if name not in weights]
    return network, lacking, _targets(spec, network)


def _architecture(settings: dict[str, Any], num_labels: int) -> PreTrainedModel:
    # The class by its name: the Auto classes import every architecture to find one.
    network_class: type[PreTrainedModel] = getattr(transformers, settings["architectures"][0])
    config = AutoConfig.for_model(**settings)
    config.num_labels = num_labels
    return network_class(config)


def _targets(spec: ModelSpec, network: PreTrainedModel) -> tuple[str, ...]:
    model_type = str(network.config.model_type)
    if model_type not in TARGETS:
        raise ValueError(
            f"model {spec.name}: its architecture is {model_type!r}, expected one of "
            f"{', '.join(TARGETS)}; choose another model"
        )
    return TARGETS[model_type]


def _bundled(spec: ModelSpec) -> tuple[dict[str, Any], Tensors]:
    """The configuration and weights of a backbone that travels with the app."""
    path = Path(__file__).resolve().parent / "backbones" / f"{spec.name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.json")))
        raise ValueError(f"model {spec.name!r} is not bundled; expected one of: {known}")
    return read_backbone(path)


SOURCES = {"bundled": _bundled}


def _draw(parameter: nn.Parameter, random: torch.Generator) -> None:
    """Weights so that logits of normalised features have variance one; biases of zero."""
    with torch.no_grad():
        if parameter.ndim < 2:
            parameter.zero_()
            return
        values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        parameter.copy_(values / math.sqrt(parameter.shape[1]))


def pretrained_parameters(
    network: nn.Module, classifier: Sequence[nn.Parameter]
) -> dict[str, nn.Parameter]:
    """All but the classifier, by name."""
    skip = {id(parameter) for parameter in classifier}
    return {name: p for name, p in network.named_parameters() if id(p) not in skip}


def num_parameters(parameters: Mapping[str, nn.Parameter]) -> int:
    """How many numbers they hold."""
    return sum(parameter.numel() for parameter in parameters.values())


def _fingerprint(pretrained: Mapping[str, nn.Parameter]) -> str:
    """A checksum over the names and bits of everything pretrained."""
    digest = hashlib.sha256()
    for name, parameter in sorted(pretrained.items()):
        digest.update(name.encode())
        flat = parameter.detach().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def pick_device(device: str) -> torch.device:
    """`auto` is the best accelerator at hand; one that is asked for must be there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    chosen = torch.device(device)
    number = chosen.index or 0
    present = {
        "cpu": True,
        "cuda": number < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }[chosen.type]
    if not present:
        raise ValueError(
            f"device = {device!r} is not there: PyTorch sees {torch.cuda.device_count()} CUDA "
            "devices; expected one that is; use device=auto or device=cpu"
        )
    return chosen
