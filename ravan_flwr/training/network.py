"""Build a pretrained network for a task, with its weights or as a skeleton without weights.

The parameters that the pretrained weights lack are the classifier, drawn from the seed.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from logging import getLogger
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ravan_flwr.adapters.attach import TARGETS, find_layers, find_projections, name_endings
from ravan_flwr.adapters.stored import store_in
from ravan_flwr.config.checks import trains_backbone
from ravan_flwr.config.key import AUTO
from ravan_flwr.config.run_config import Config
from ravan_flwr.data.hub import NotAvailableError, no_bars
from ravan_flwr.data.model_folder import (
    check_weights,
    model_file_errors,
    model_folder,
    read_config_json,
    settings_in,
    weight_files,
)
from ravan_flwr.seeding import generator
from ravan_flwr.specs import ModelSpec
from ravan_flwr.tasks.base import Task
from ravan_flwr.tasks.token_loss import check_packing
from ravan_flwr.training.bundled import bundled_file, read_backbone, read_backbone_config
from ravan_flwr.training.step import DTYPES

log = getLogger(__name__)


@dataclass(frozen=True)
class Backbone:
    """A network without adapters."""

    network: PreTrainedModel
    classifier: list[nn.Parameter]  # drawn from the seed, or already trained for these labels
    targets: tuple[str, ...]  # the names of the layers to adapt, or ends of them
    size: int  # the number of pretrained parameters


def build_network(
    spec: ModelSpec, task: Task, seed: int, dtype: torch.dtype = torch.float32
) -> Backbone:
    """Build the network for a task on the CPU, with its pretrained weights stored in `dtype`."""
    network, missing = LOADERS[spec.source](spec, task, dtype)
    names = {*missing, *_classifier_names(network, task)}
    classifier = [p for name, p in network.named_parameters() if name in names]
    store_in(network, dtype, classifier)
    for name in missing:  # now in float32
        # Logits of normalised features then have variance one; biases are zero.
        parameter = network.get_parameter(name)
        if parameter.ndim < 2:  # weight or bias of a normalisation, or another bias
            values = torch.full(parameter.shape, float(name.endswith("weight")))
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
    """Return the dtype of a model's stored weights, which may be smaller than that of training."""
    if spec.source == "bundled":
        return torch.float32
    settings = read_config_json(spec)
    name = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"model {spec.name}: its config.json has dtype = {name!r}, expected a dtype of "
            "PyTorch such as bfloat16; change it there, or choose another model"
        )
    return dtype


def build_skeleton(spec: ModelSpec, task: Task, dtype: torch.dtype = torch.float32) -> Backbone:
    """Build the network without weights on the meta device, for plans and estimates."""
    settings = dict(spec.shape) or CONFIGS[spec.source](spec)
    with torch.device("meta"):
        network = _architecture(settings, task, spec.name)
    task.adjust(network)
    classifier = [network.get_parameter(name) for name in _classifier_names(network, task)]
    store_in(network, dtype, classifier)
    size = sum(
        parameter.numel() for parameter in pretrained_parameters(network, classifier).values()
    )
    return Backbone(network, classifier, _targets(spec, network), size)


def _classifier_names(network: PreTrainedModel, task: Task) -> list[str]:
    """List the names of the classifier's parameters: those outside the base model."""
    if task.data.target_length:  # the task uses the pretrained language-model head
        return []
    if network.base_model is network:
        raise ValueError(
            f"model of architecture {network.config.model_type!r}: expected a backbone with a "
            f"head, but {type(network).__name__} has no module {network.base_model_prefix!r}, so "
            "that its pretrained layers cannot be told from the head; choose another model"
        )
    base = network.base_model_prefix + "."
    return [name for name, _ in network.named_parameters() if not name.startswith(base)]


# A network is built from config.json before its weights are read, so its size is limited by that of
# the weights. It may be larger than its files: they lack a classifier, and store embeddings once
# that several layers share.
_SIZE_FACTOR, _EXTRA_TENSORS, _EXTRA_NUMBERS = 4, 256, 2**24
_MAX_IN_BUFFERS = 2**28  # numbers in buffers, such as masks


def _check_size(skeleton: PreTrainedModel, tensors: int, numbers: int) -> None:
    """Raise ValueError if a network on the meta device is far larger than its weights."""
    tensors = _SIZE_FACTOR * tensors + _EXTRA_TENSORS
    numbers = _SIZE_FACTOR * numbers + _EXTRA_NUMBERS
    sizes = [parameter.numel() for parameter in skeleton.parameters()]
    in_buffers = sum(buffer.numel() for buffer in skeleton.buffers())
    if len(sizes) > tensors or sum(sizes) > numbers or in_buffers > _MAX_IN_BUFFERS:
        raise ValueError(
            f"config.json describes a larger network than the weights are: more than "
            f"{tensors:,} tensors, {numbers:,} numbers, or {_MAX_IN_BUFFERS:,} in buffers"
        )


def _architecture(settings: Mapping[str, Any], task: Task, model: str) -> PreTrainedModel:
    model_class = network_class(settings, task)
    config = _config(settings, task, model)
    with model_file_errors(model, "config.json"):
        return model_class(config)


def network_class(settings: Mapping[str, Any], task: Task) -> type[PreTrainedModel]:
    """Return the class of transformers for an architecture and a task."""
    # By name, because the Auto classes import every architecture to find one.
    mapping = getattr(transformers, task.auto_class)._model_mapping
    table: dict[str, str | tuple[str, ...]] = mapping._model_mapping
    model_type = str(settings.get("model_type", ""))
    if model_type not in table:
        reads = _reads(model_type)
        if reads and reads != task.reads:
            raise ValueError(
                f"your data are {task.reads}, but this model reads {reads} (its architecture is "
                f"{model_type!r}); choose a model that reads {task.reads}, or other data"
            )
        raise ValueError(
            f"model of architecture {model_type!r}: transformers has none of that architecture for "
            f"{task.auto_class}; choose another model"
        )
    names = table[model_type]
    first = names if isinstance(names, str) else names[0]
    network: type[PreTrainedModel] = getattr(transformers, first)
    return network


def _reads(model_type: str) -> str:
    """Return what networks of an architecture read: images or texts; "" if that is unknown."""
    from transformers.models.auto import modeling_auto as auto  # noqa: PLC0415 (names of classes)

    if model_type in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "images"
    texts = (
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    return "texts" if any(model_type in names for names in texts) else ""


def _config(settings: Mapping[str, Any], task: Task, model: str) -> Any:
    with model_file_errors(model, "config.json"):
        config = AutoConfig.for_model(**settings)
    if not task.data.target_length:
        config.num_labels = task.outputs
        if not config.num_labels and task.data.labels_known:
            raise ValueError(
                f"model {model}: got a task without labels, expected at least one output; name "
                "data.labels, or let the task override `outputs`"
            )
    return config


def _targets(spec: ModelSpec, network: PreTrainedModel) -> tuple[str, ...]:
    if spec.targets:
        for target in spec.targets:
            find_layers(network, [target])  # raises ValueError if there is none
        return spec.targets
    return default_targets(spec.name, network)


def default_targets(model: str, network: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the layers to adapt, or ends of them, of a network of that name.

    They are those of the table, else the query and value projections that are found by their
    names, else all linear layers but the head.
    """
    model_type = str(network.config.model_type)
    if model_type in TARGETS:
        return TARGETS[model_type]
    base, output = network.base_model, network.get_output_embeddings()
    in_base = {module for module in base.modules() if isinstance(module, nn.Linear)} - {output}
    linears = [
        name
        for name, module in network.named_modules()
        if module in in_base and ".pooler." not in f".{name}."  # often without pretrained weights
    ]
    if not linears:
        raise ValueError(
            f"model {model}: expected linear layers (torch.nn.Linear) to adapt, but its "
            f"architecture {model_type!r} has none except in its head; choose another model"
        )
    if projections := find_projections(linears):
        return projections
    _log_all_linear(model, model_type, len(linears), name_endings(linears))
    return tuple(linears)


@cache
def _log_all_linear(model: str, model_type: str, number: int, endings: str) -> None:
    """Log, once per process, that all linear layers are adapted."""
    log.info(
        "model %s: its architecture %r has no known query and value projections; all %d linear "
        "layers but the head are adapted, as by PEFT's all-linear; targets=... selects some of %s",
        *(model, model_type, number, endings),
    )


def _bundled(spec: ModelSpec, task: Task, _: torch.dtype) -> tuple[PreTrainedModel, list[str]]:
    """Load a bundled backbone; return it with the names of the parameters that it lacks."""
    settings, weights = read_backbone(bundled_file(spec.name))
    network = _architecture(settings, task, spec.name)
    result = network.load_state_dict(weights, strict=False)
    if result.unexpected_keys or set(result.missing_keys) != set(_classifier_names(network, task)):
        raise ValueError(
            f"model {spec.name}: its weights do not fit this transformers: unexpected "
            f"{result.unexpected_keys}, missing {result.missing_keys}; install the version in "
            "constraints.txt"
        )
    return network, result.missing_keys


def _from_folder(
    spec: ModelSpec, task: Task, dtype: torch.dtype
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model of the hub or a folder; return it with the names of parameters that it lacks.

    A classifier is kept if it was trained for the task's labels, and drawn anew otherwise. Weights
    for 16 bits are loaded in the dtype of the files, so that they never take twice the memory.
    """
    folder = model_folder(spec)
    settings = settings_in(folder, spec.name)
    for key, expected in spec.shape:
        if key in settings and settings[key] != expected:
            raise ValueError(
                f"model {spec.name}: its config.json has {key} = {settings[key]!r}, but the "
                f"preset's shape {expected!r}; correct the preset"
            )
    model_class = network_class(settings, task)
    config = _config(settings, task, spec.name)
    tensors, numbers = check_weights(folder, spec.name)
    with no_bars(), model_file_errors(spec.name, "config.json and weights"):
        with torch.device("meta"):
            _check_size(_architecture(settings, task, spec.name), tensors, numbers)
        loaded: Any = model_class.from_pretrained(
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
    missing = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    classifier = set(_classifier_names(network, task))
    if unexpected := sorted(name for name in missing - classifier if ".pooler." not in f".{name}"):
        raise ValueError(
            f"model {spec.name}: its weights lack {', '.join(unexpected[:5])}"
            f"{' and more' if len(unexpected) > 5 else ''} of {type(network).__name__}, which only "
            "pretraining gives; choose another model"
        )
    id2label = settings.get("id2label")
    labels = id2label if isinstance(id2label, dict) else {}
    names = tuple(str(labels.get(str(n))) for n in range(config.num_labels))
    if names != task.data.labels:
        missing |= classifier
    return network, [name for name, _ in network.named_parameters() if name in missing]


# By source: load the network with its weights, and the names of missing parameters.
LOADERS = {"bundled": _bundled, "hub": _from_folder}

# By source: load the configuration only.
CONFIGS: dict[str, Callable[[ModelSpec], dict[str, Any]]] = {
    "bundled": lambda spec: read_backbone_config(bundled_file(spec.name)),
    "hub": read_config_json,
}


def prepare_network(network: PreTrainedModel, config: Config) -> None:
    """Enable gradient checkpointing if configured; ValueError for an unsupported setting."""
    name, class_name = config.model.name, type(network).__name__
    if config.packing:
        check_packing(network)
    # Modules that transformers keeps in float32; T5's overflow in float16.
    fp32_modules = getattr(network, "_keep_in_fp32_modules", None)
    if config.precision == "float16" and fp32_modules:
        raise ValueError(
            f"precision = 'float16': the numbers of model {name}, a {class_name}, become too large "
            f"for it in {', '.join(sorted(fp32_modules))}, expected bfloat16 or float32; set "
            "precision=bfloat16"
        )
    if not config.gradient_checkpointing:
        return
    if not network.supports_gradient_checkpointing:
        raise ValueError(
            f"gradient-checkpointing = true: model {name}, a {class_name}, cannot; leave it out"
        )
    # The method's name in transformers 5, and that in its first releases.
    newer = getattr(network, "activation_checkpointing_enable", None)
    (newer or network.gradient_checkpointing_enable)({"use_reentrant": False})


def pretrained_parameters(
    network: nn.Module, classifier: Sequence[nn.Parameter]
) -> dict[str, nn.Parameter]:
    """Return all parameters except the classifier's, by name."""
    skip = {id(parameter) for parameter in classifier}
    return {name: p for name, p in network.named_parameters() if id(p) not in skip}


def backbone_fingerprint(spec: ModelSpec) -> str:
    """Return a hash of the files of the pretrained weights."""
    files = (
        [bundled_file(spec.name)] if spec.source == "bundled" else weight_files(model_folder(spec))
    )
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def backbone_dtype(config: Config, device: str) -> torch.dtype:
    """Return the dtype of the backbone on a device; `auto` is the checkpoint's, on a GPU.

    A GPU that computes in bfloat16 stores it so (`computes_narrowly`).

    Pretrained weights that are trained, even in a calibration round only, are in float32. In 16
    bits a step of 1e-5 does not change a weight of 0.02.
    """
    if config.backbone_dtype in DTYPES:
        return DTYPES[config.backbone_dtype]
    if computes_narrowly(config, device):
        return torch.bfloat16
    if device != "cuda" or trains_backbone(vars(config)):
        return torch.float32
    try:
        stored = stored_dtype(config.model)
    except NotAvailableError:  # a plan for a missing model; models to quantize have 16 bits
        return torch.float32 if config.quantize == "none" else torch.bfloat16
    return stored if stored in DTYPES.values() else torch.float32


def computes_narrowly(config: Config, device: str) -> bool:
    """Return whether a frozen network's residual stream is in bfloat16 (adapters/stored.py)."""
    is_default = config.backbone_dtype == AUTO and config.quantize == "none"
    is_frozen = not trains_backbone(vars(config))
    return device == "cuda" and config.precision == "bfloat16" and is_default and is_frozen


def keeps_casts(config: Config) -> bool:
    """Return whether weights cast to a 16-bit precision are kept from step to step.

    With gradient checkpointing only one block's casts exist at a time.
    """
    without_casts = config.precision == "float32" or config.gradient_checkpointing
    return not without_casts and not trains_backbone(vars(config))


def captures_steps(config: Config) -> bool:
    """Return whether steps on a GPU are captured as CUDA graphs, where all can be."""
    eager = config.gradient_checkpointing or config.packing or config.privacy == "example"
    return config.cuda_graphs == "auto" and not eager


def likely_device(name: str) -> str:
    """Return the device type that `pick_device` would return, whether or not the device exists."""
    if name == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name).type
