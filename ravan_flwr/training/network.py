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

from ravan_flwr.adapters.attach import TARGETS
from ravan_flwr.adapters.stored import keep_in
from ravan_flwr.config.checks import trains_backbone
from ravan_flwr.config.key import AUTO
from ravan_flwr.config.run_config import Config
from ravan_flwr.data.hub import NotHereError, no_bars
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
from ravan_flwr.tasks.token_loss import check_packing
from ravan_flwr.training.bundled import bundled_file, read_backbone, read_backbone_config


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
    names = {*lacking, *_heads(network, task)}
    classifier = [p for name, p in network.named_parameters() if name in names]
    keep_in(network, dtype, classifier)
    for name in lacking:  # in float32 by now
        # So that logits of normalised features have variance one; biases are zero.
        parameter = network.get_parameter(name)
        if parameter.ndim < 2:
            values = torch.full(parameter.shape, float(name.endswith("weight")))  # normalisation's
        else:
            random = generator(seed, "classifier", name)
            values = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            values /= math.sqrt(parameter.shape[1])
        parameter.data.copy_(values)
    pretrained = pretrained_parameters(network, classifier)
    task.adjust(network)
    size = sum(parameter.numel() for parameter in pretrained.values())
    return Backbone(network.eval(), classifier, _targets(spec, network), size)


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
    size = sum(parameter.numel() for parameter in pretrained_parameters(network, heads).values())
    return Backbone(network, heads, _targets(spec, network), size)


def _heads(network: PreTrainedModel, task: Task) -> list[str]:
    """List the parameters beside the base model: the classifier, where the task has one."""
    if task.data.target_length:  # it answers with the pretrained language-model head
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
        register_module_parameter_registration_hook(lambda _, __, p: count("parameter", p)),
        register_module_buffer_registration_hook(lambda _, __, b: count("buffer", b)),
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
    mapping = getattr(transformers, task.auto_class)._model_mapping
    table: dict[str, str | tuple[str, ...]] = mapping._model_mapping
    kind = str(settings.get("model_type", ""))
    if kind not in table:
        raise ValueError(
            f"model of architecture {kind!r}: transformers has none of that architecture for "
            f"{task.auto_class}; choose another model"
        )
    names = table[kind]
    first = names if isinstance(names, str) else names[0]
    network: type[PreTrainedModel] = getattr(transformers, first)
    return network


def _config(settings: Mapping[str, Any], task: Task, model: str) -> Any:
    with reading(model, "config.json"):
        config = AutoConfig.for_model(**settings)
    if not task.data.target_length:
        config.num_labels = task.outputs
        if not config.num_labels and task.data.settled:
            raise ValueError(
                f"model {model}: got a task without labels, expected at least one output; name "
                "data.labels, or let the task override `outputs`"
            )
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


def _bundled(spec: ModelSpec, task: Task, _: torch.dtype) -> tuple[PreTrainedModel, list[str]]:
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
    for key, expected in spec.shape:
        if key in settings and settings[key] != expected:
            raise ValueError(
                f"model {spec.name}: its config.json says {key} = {settings[key]!r}, but the "
                f"preset's shape {expected!r}; correct the preset"
            )
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
    network, info = loaded
    lacking = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    heads = set(_heads(network, task))
    if wrong := sorted(name for name in lacking - heads if ".pooler." not in f".{name}"):
        raise ValueError(
            f"model {spec.name}: its weights lack {', '.join(wrong[:5])}"
            f"{' and more' if len(wrong) > 5 else ''} of {type(network).__name__}, which only "
            "pretraining gives; choose another model"
        )
    id2label = settings.get("id2label")
    labels = id2label if isinstance(id2label, dict) else {}
    names = tuple(str(labels.get(str(n))) for n in range(config.num_labels))
    if names != task.data.labels:
        lacking |= heads
    return network, [name for name, _ in network.named_parameters() if name in lacking]


# source -> the network with its weights, and what it lacks; its configuration alone.
LOADERS = {"bundled": _bundled, "hub": _from_folder}


CONFIGS: dict[str, Callable[[ModelSpec], dict[str, Any]]] = {
    "bundled": lambda spec: read_backbone_config(bundled_file(spec.name)),
    "hub": config_of,
}


def prepare_network(network: PreTrainedModel, config: Config) -> None:
    """Let a network train as a run asks; ValueError for what it cannot do."""
    name, kind = config.model.name, type(network).__name__
    if config.packing:
        check_packing(network)
    # By transformers: T5 overflows, for one.
    fp32_modules = getattr(network, "_keep_in_fp32_modules", None)
    if config.precision == "float16" and fp32_modules:
        raise ValueError(
            f"precision = 'float16': the numbers of model {name}, a {kind}, become too large for "
            f"it in {', '.join(sorted(fp32_modules))}, expected bfloat16 or float32; set "
            "precision=bfloat16"
        )
    if not config.gradient_checkpointing:
        return
    if not network.supports_gradient_checkpointing:
        raise ValueError(
            f"gradient-checkpointing = true: model {name}, a {kind}, cannot; leave it out"
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


def backbone_fingerprint(spec: ModelSpec) -> str:
    """Hash the files of everything pretrained."""
    files = (
        [bundled_file(spec.name)] if spec.source == "bundled" else weight_files(model_folder(spec))
    )
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def backbone_dtype(config: Config, device: str) -> torch.dtype:
    """Find the dtype for a device of that type; `auto`: the checkpoint's own 16 bits, on a GPU.

    Pretrained weights that are trained, be it in a round before the first, are in float32: in 16
    bits a weight of 0.02 does not move by steps of 1e-5.
    """
    if config.backbone_dtype in DTYPES:
        return DTYPES[config.backbone_dtype]
    if device != "cuda" or trains_backbone(vars(config)):
        return torch.float32
    try:
        own = stored_dtype(config.model)
    except NotHereError:  # a plan of a model that is not here yet; one for few bits comes in 16
        return torch.float32 if config.quantize == "none" else torch.bfloat16
    return own if own in DTYPES.values() else torch.float32


def keeps_casts(config: Config) -> bool:
    """Return whether weights in the 16 bits of the precision stay from step to step.

    With gradient checkpointing no more than one block's are there at a time.
    """
    without_casts = config.precision == "float32" or config.gradient_checkpointing
    return not without_casts and not trains_backbone(vars(config))


def likely_device(name: str) -> str:
    """Name the type of device that `pick_device` would pick, be it here or not."""
    if name == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name).type
