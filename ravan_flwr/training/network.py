"""Build a pretrained network for a task, with its weights or as a skeleton without.

The parameters that the pretrained weights lack are the classifier, drawn from the seed.
"""

import hashlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ravan_flwr.adapters.attach import TARGETS
from ravan_flwr.adapters.stored import keep_in
from ravan_flwr.config.run_config import Config
from ravan_flwr.data.hub_errors import no_bars
from ravan_flwr.data.model_folder import (
    check_weights,
    config_of,
    model_folder,
    reading,
    settings_in,
    weight_files,
)
from ravan_flwr.seeding import generator
from ravan_flwr.specs import ModelSpec
from ravan_flwr.tasks.base import Task
from ravan_flwr.tasks.packing import check_packing
from ravan_flwr.training.bundled import bundled_file, read_backbone, read_backbone_config
from ravan_flwr.training.digests import file_digest


@dataclass(frozen=True)
class Backbone:
    """Hold a network before anything is put into it."""

    network: PreTrainedModel
    classifier: list[nn.Parameter]  # what is drawn from the seed, or was trained for these labels
    targets: tuple[str, ...]  # the ends of the names of the layers to adapt
    size: int  # how many pretrained parameters


def build_network(
    spec: ModelSpec, task: Task, seed: int, dtype: torch.dtype = torch.float32
) -> Backbone:
    """Build the network for a task with its pretrained weights, kept in `dtype`, on the CPU."""
    network, lacking = LOADERS[spec.source](spec, task, dtype)
    wanted = {*lacking, *_heads(network, task)}
    classifier = [p for name, p in network.named_parameters() if name in wanted]
    keep_in(network, dtype, classifier)
    for name in lacking:  # in float32 by now
        _draw(name, network.get_parameter(name), generator(seed, "classifier", name))
    pretrained = pretrained_parameters(network, classifier)
    task.adjust(network)
    return Backbone(network.eval(), classifier, _targets(spec, network), num_parameters(pretrained))


def stored_dtype(spec: ModelSpec) -> torch.dtype:
    """Find the dtype that a model's weights are kept in, which may be smaller than in training."""
    if spec.source == "bundled":
        return torch.float32
    settings = config_of(spec)
    name = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"model {spec.name}: its config.json says dtype = {name!r}, expected a dtype of "
            "PyTorch such as bfloat16; correct it, or choose another model"
        )
    return dtype


def build_skeleton(spec: ModelSpec, task: Task, dtype: torch.dtype = torch.float32) -> Backbone:
    """Build the same network without weights, on the meta device, for plans and estimates."""
    settings = dict(spec.shape) or CONFIGS[spec.source](spec)
    with torch.device("meta"), at_most(_TENSORS, sys.maxsize):
        network = _architecture(settings, task, spec.name)
    task.adjust(network)
    heads = [network.get_parameter(name) for name in _heads(network, task)]
    keep_in(network, dtype, heads)
    size = num_parameters(pretrained_parameters(network, heads))
    return Backbone(network, heads, _targets(spec, network), size)


def _generates(task: Task) -> bool:
    """Tell whether it answers with the pretrained language-model head, which is no classifier."""
    return task.data.target_length > 0


def _heads(network: PreTrainedModel, task: Task) -> list[str]:
    """List the parameters beside the base model: the classifier, where the task has one."""
    if _generates(task):
        return []
    base = network.base_model_prefix + "."
    return [name for name, _ in network.named_parameters() if not name.startswith(base)]


# A network is built of shapes alone before its weights are read. It has more than its files have: a
# classifier, and words that are held once for several layers.
_TENSORS = 2**16  # of a network whose files are not there
_TIMES, _MORE, _MORE_NUMBERS = 4, 256, 2**24
_BUFFERS = 2**28  # numbers that are no parameters, such as masks


@contextmanager
def at_most(tensors: int, numbers: int) -> Iterator[None]:
    """Raise ValueError, in this thread, as soon as a network has more parameters than that."""
    thread, left = threading.get_ident(), {"parameter": numbers, "buffer": numbers + _BUFFERS}
    made = 0

    def count(kind: str, tensor: Tensor | None) -> None:
        nonlocal made
        if tensor is None or threading.get_ident() != thread:
            return
        made += 1
        left[kind] -= tensor.numel()
        if made > tensors or left[kind] < 0:
            raise ValueError(
                f"config.json describes a larger network than the weights are: more than "
                f"{tensors:,} tensors, {numbers:,} numbers, or {numbers + _BUFFERS:,} in buffers"
            )

    hooks = (
        register_module_parameter_registration_hook(lambda _, __, it: count("parameter", it)),
        register_module_buffer_registration_hook(lambda _, __, it: count("buffer", it)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _architecture(settings: Mapping[str, Any], task: Task, model: str) -> PreTrainedModel:
    made = network_class(settings, task)
    config = _config(settings, task, model)
    with reading(model, "config.json"):
        return made(config)


def network_class(settings: Mapping[str, Any], task: Task) -> type[PreTrainedModel]:
    """Find the class of transformers that serves an architecture for a task."""
    # By its name: the Auto classes import every architecture to find one.
    table: dict[str, str | tuple[str, ...]] = getattr(modeling_auto, task.classes)
    kind = str(settings.get("model_type", ""))
    if kind not in table:
        words = task.classes.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES")
        raise ValueError(
            f"model of architecture {kind!r}: transformers has none of that architecture for "
            f"{words.lower().replace('_', ' ')}; choose another model"
        )
    names = table[kind]
    first = names if isinstance(names, str) else names[0]
    network: type[PreTrainedModel] = getattr(transformers, first)
    return network


def _config(settings: Mapping[str, Any], task: Task, model: str) -> Any:
    with reading(model, "config.json"):
        config = AutoConfig.for_model(**settings)
    if not _generates(task):
        config.num_labels = len(task.data.labels)
    return config


def _targets(spec: ModelSpec, network: PreTrainedModel) -> tuple[str, ...]:
    if spec.targets:
        return spec.targets
    model_type = str(network.config.model_type)
    if model_type not in TARGETS:
        linears = [
            name for name, module in network.named_modules() if isinstance(module, nn.Linear)
        ]
        raise ValueError(
            f"model {spec.name}: no layers to adapt are known for its architecture "
            f"{model_type!r}, only for {', '.join(TARGETS)}; name the ends of their names with "
            f"targets=..., of its linear layers {', '.join(linears)}"
        )
    return TARGETS[model_type]


def _bundled(
    spec: ModelSpec,
    task: Task,
    _: torch.dtype,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a backbone that travels with the app, and name the parameters that it lacks."""
    settings, weights = read_backbone(bundled_file(spec.name))
    network = _architecture(settings, task, spec.name)
    result = network.load_state_dict(weights, strict=False)
    if result.unexpected_keys or set(result.missing_keys) != set(_heads(network, task)):
        raise ValueError(
            f"model {spec.name}: its weights do not fit this transformers: unexpected "
            f"{result.unexpected_keys}, missing {result.missing_keys}; install the version in "
            "constraints.txt"
        )
    return network, result.missing_keys


def _from_folder(
    spec: ModelSpec, task: Task, dtype: torch.dtype
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model of the hub or of a folder, and name the parameters that it lacks.

    A classifier is kept where it was trained for the task's labels, and drawn anew elsewhere.
    What is to be kept in 16 bits is loaded as the files have it: never twice as large in between.
    """
    folder = model_folder(spec)
    settings = settings_in(folder, spec.name)
    _check_shape(spec, settings)
    made = network_class(settings, task)
    config = _config(settings, task, spec.name)
    tensors, numbers = check_weights(folder, spec.name)
    limits = at_most(_TIMES * tensors + _MORE, _TIMES * numbers + _MORE_NUMBERS)
    with no_bars(), reading(spec.name, "config.json and weights"), limits:
        loaded: Any = made.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32 if dtype == torch.float32 else stored_dtype(spec),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    network, found = loaded
    lacking = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    heads = set(_heads(network, task))
    if wrong := sorted(name for name in lacking - heads if ".pooler." not in f".{name}"):
        raise ValueError(
            f"model {spec.name}: its weights lack {', '.join(wrong[:5])}"
            f"{' and more' if len(wrong) > 5 else ''} of {type(network).__name__}, which only "
            "pretraining gives; choose another model"
        )
    told = settings.get("id2label")
    labels = told if isinstance(told, dict) else {}
    names = tuple(str(labels.get(str(n))) for n in range(config.num_labels))
    if names != task.data.labels:
        lacking |= heads
    return network, [name for name, _ in network.named_parameters() if name in lacking]


def _check_shape(spec: ModelSpec, settings: Mapping[str, Any]) -> None:
    """Refuse a model of another shape than the preset's, for which its plan was made."""
    for key, expected in spec.shape:
        if key in settings and settings[key] != expected:
            raise ValueError(
                f"model {spec.name}: its config.json says {key} = {settings[key]!r}, but the "
                f"preset's shape {expected!r}; correct the preset"
            )


# source -> the network with its weights, and what it lacks; its configuration alone.
LOADERS = {"bundled": _bundled, "hub": _from_folder}


CONFIGS: dict[str, Callable[[ModelSpec], dict[str, Any]]] = {
    "bundled": lambda spec: read_backbone_config(bundled_file(spec.name)),
    "hub": config_of,
}


def _draw(name: str, parameter: nn.Parameter, random: torch.Generator) -> None:
    """Draw weights so that logits of normalised features have variance one; biases are zero."""
    with torch.no_grad():
        if parameter.ndim < 2:
            parameter.fill_(float(name.endswith("weight")))  # that of a normalisation
            return
        values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        parameter.copy_(values / math.sqrt(parameter.shape[1]))


def prepare_network(network: PreTrainedModel, config: Config) -> None:
    """Let a network train as a run asks; ValueError for what it cannot do."""
    if config.packing:
        check_packing(network)
    if config.precision == "float16":
        _check_float16(network, config.model.name)
    if config.gradient_checkpointing:
        _checkpoint_gradients(network, config.model.name)


def _check_float16(network: PreTrainedModel, name: str) -> None:
    """Refuse a network of which transformers knows that it overflows: T5, for one."""
    if kept := getattr(network, "_keep_in_fp32_modules", None):
        raise ValueError(
            f"precision = 'float16': the numbers of model {name}, a {type(network).__name__}, "
            f"become too large for it in {', '.join(sorted(kept))}, expected bfloat16 or float32; "
            "set precision=bfloat16"
        )


def _checkpoint_gradients(network: PreTrainedModel, name: str) -> None:
    """Keep few activations for the backward pass, and compute the others again."""
    if not network.supports_gradient_checkpointing:
        raise ValueError(
            f"gradient-checkpointing = true: model {name}, a {type(network).__name__}, cannot; "
            "leave it out"
        )
    # The method's name of transformers 5, and that of its first releases.
    newer = getattr(network, "activation_checkpointing_enable", None)
    (newer or network.gradient_checkpointing_enable)({"use_reentrant": False})


def pretrained_parameters(
    network: nn.Module, classifier: Sequence[nn.Parameter]
) -> dict[str, nn.Parameter]:
    """List all parameters but the classifier's, by name."""
    skip = {id(parameter) for parameter in classifier}
    return {name: p for name, p in network.named_parameters() if id(p) not in skip}


def num_parameters(parameters: Mapping[str, nn.Parameter]) -> int:
    """Count the numbers that parameters hold."""
    return sum(parameter.numel() for parameter in parameters.values())


def backbone_fingerprint(spec: ModelSpec) -> str:
    """Hash the files of everything pretrained."""
    files = (
        [bundled_file(spec.name)] if spec.source == "bundled" else weight_files(model_folder(spec))
    )
    digest = hashlib.sha256()
    for path in files:
        digest.update(file_digest(path))
    return digest.hexdigest()[:16]
