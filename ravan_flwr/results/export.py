"""Export a run's result in forms that other software loads.

- `peft`: a folder for `PeftModel.from_pretrained`. A RAVAN layer is a LoRA layer of rank
  heads * r: A is the A_i on top of each other, B the s_i B_i H_i side by side.
- `ravan`: a folder for `PeftModel.from_pretrained` as well, with the heads themselves, which can be
  trained further there (peft/). It includes bases that the seed does not reproduce.
- `merged`: a folder for transformers' `from_pretrained`, with every adapter added to the weight
  that it adapts, in float32, and rounded back to the weight's own type.

A method that changes pretrained weights has no adapter that holds its result, and is exported as
`merged` only. All folders have a model card and the preprocessing of examples:

- images: `preprocessor_config.json`. It is the model's; for a model without one it describes what
  the run did: the model's size, and pixels from -1 to 1.
- texts: the tokenizer's files, with the run's `max-length` as the length of truncation (not for a
  language model, which continues texts of any length).
- `labels.json`: the names of the classes, if there are classes, in the order of their numbers.
"""

import copy
import errno
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import PreTrainedModel

from ravan_flwr.adapters.bases import describe_bases, make_bases
from ravan_flwr.config.key import check_choice
from ravan_flwr.data.hub import no_bars
from ravan_flwr.data.model_folder import PROCESSOR, read_json
from ravan_flwr.files import write_atomically
from ravan_flwr.methods import METHODS, MIXES
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.multihead import MultiHeadMethod
from ravan_flwr.results.card import write_card
from ravan_flwr.results.evaluation import result_of
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.specs import EXPORT_FORMS
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.network import build_network, stored_dtype

_BILINEAR = 2  # of Pillow


def export_run(
    run: Path | str, form: str, folder: Path | str, client: int | None = None,
    model: Path | str | None = None,
) -> None:  # fmt: skip
    """Write a finished run's result to a new folder; `client` and `model` as for `result_of`."""
    check_choice("export: form", form, EXPORT_FORMS)
    folder = Path(folder)
    directory = RunDirectory.open(Path(run), "export")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = "is not empty" if folder.is_dir() else "is a file"
        raise ValueError(f"export: {folder} {problem}, expected a new folder; name another")
    method = directory.read_summary()["method"]  # raises for an unfinished run
    if METHODS[method].mixes:
        raise ValueError(
            f"export: method {method!r} has no such form, since {MIXES}; expected another method; "
            "use `evaluate` and `predict` with --client N"
        )
    with result_of(directory.path, client, model) as loaded:
        write_result(form, folder, loaded)
        write_card(folder, form, directory, loaded.config.as_dict() if model else None)


def natural_form(loaded: ModelAndData) -> str:
    """Return `peft` if an adapter holds the whole result, else `merged`."""
    model = loaded.model
    return "peft" if model.method.lora_factors(model.adapters[0]) else "merged"


def write_result(form: str, folder: Path, loaded: ModelAndData) -> None:
    """Write the model's present state in a form; raise ValueError if it has no such form."""
    if form == "peft" and natural_form(loaded) != "peft":
        raise ValueError(
            f"export --as peft: method {loaded.config.method!r} changes pretrained weights, which "
            "no adapter holds; expected --as merged; use that"
        )
    if form == "merged":
        write_merged(folder, loaded)
    else:
        write_adapter(folder, loaded, *{"peft": _as_lora, "ravan": _as_heads}[form](loaded))
    write_reader(folder, loaded)


def write_adapter(
    folder: Path, loaded: ModelAndData, settings: Mapping[str, Any], parts: Sequence[Tensors]
) -> None:
    """Write a PEFT folder: the adapter's settings, its tensors by layer, and the classifier."""
    model, spec = loaded.model, loaded.config.model
    tensors = {
        f"base_model.model.{layer.name}.{part}": tensor
        for layer, tensors_of_layer in zip(model.layers, parts, strict=True)
        for part, tensor in tensors_of_layer.items()
    }
    names = {id(parameter): name for name, parameter in model.network.named_parameters()}
    for parameter in model.classifier:
        tensors[f"base_model.model.{names[id(parameter)]}"] = parameter
    config = {
        **settings,
        "target_modules": [layer.name for layer in model.layers],
        "modules_to_save": sorted({names[id(p)].rpartition(".")[0] for p in model.classifier}),
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": spec.name if spec.source == "hub" else None,
        "revision": spec.revision or None,
        "task_type": loaded.task.peft_type,
    }
    saved = {k: v.detach().float().cpu().contiguous().clone() for k, v in tensors.items()}
    write_atomically(folder / "adapter_model.safetensors", safetensors.torch.save(saved))
    _write_json(folder / "adapter_config.json", config)


def _as_lora(loaded: ModelAndData) -> tuple[dict[str, Any], list[Tensors]]:
    """Return PEFT settings, and each adapter's tensors as a LoRA."""
    factors = [loaded.model.method.lora_factors(adapter) for adapter in loaded.model.adapters]
    parts = [{"lora_A.weight": A, "lora_B.weight": B} for B, A in filter(None, factors)]
    (rank,) = {len(part["lora_A.weight"]) for part in parts}
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0}, parts


def _as_heads(loaded: ModelAndData) -> tuple[dict[str, Any], list[Tensors]]:
    """Return PEFT settings, and each adapter's heads, with bases that the seed does not make."""
    model, seed, method = loaded.model, loaded.config.seed, loaded.model.method
    if not isinstance(method, MultiHeadMethod):
        raise ValueError(
            f"export --as ravan: method {loaded.config.method!r} trains no heads between frozen "
            f"bases, expected a run of one that does, or --as {natural_form(loaded)}; use that"
        )
    bases = {
        layer.name: (adapter.B.cpu(), adapter.A.cpu())
        for layer, adapter in zip(model.layers, model.adapters, strict=True)
    }
    first = model.adapters[0]
    seeded = {
        layer.name: make_bases(
            method.init, heads=first.heads, rank=first.rank, out_features=layer.out_features,
            in_features=layer.in_features, seed=seed, layer=layer.name,
        )
        for layer in model.layers
    }  # fmt: skip
    from_seed = all(map(torch.equal, chain(*seeded.values()), chain(*bases.values())))
    parts = [{"ravan_H": adapter.H, "ravan_s": adapter.s} for adapter in model.adapters]
    if not from_seed:
        for part, (B, A) in zip(parts, bases.values(), strict=True):
            part |= {"ravan_B": B, "ravan_A": A}
    settings = {
        "peft_type": "RAVAN",
        "r": first.rank,
        "num_heads": first.heads,
        "init": method.init,
        "base_seed": seed,
        "trainable_scales": method.trains_scales,
        "save_bases": not from_seed,
        "base_layers": describe_bases(bases),
    }
    return settings, parts


def write_merged(folder: Path, loaded: ModelAndData) -> None:
    """Write the network without adapters, their delta-weights added to its weights."""
    network = merged_network(loaded)
    torch.nn.Module.to(network, stored_dtype(loaded.config.model))
    try:
        with no_bars():
            network.save_pretrained(folder)
    except safetensors.SafetensorError as error:  # raised on a full disk, too
        raise OSError(errno.EIO, str(error), str(folder)) from error


def merged_network(loaded: ModelAndData) -> PreTrainedModel:
    """Build a network without adapters that computes the same as the adapted one."""
    model, config = loaded.model, loaded.config
    network = build_network(config.model, loaded.task, config.seed).network
    if labels := loaded.task.data.labels:
        network.config.id2label = dict(enumerate(labels))
        network.config.label2id = {label: number for number, label in enumerate(labels)}
    trained = dict(model.network.named_parameters())
    deltas = dict(zip(model.layers, model.method.delta_weights(model.adapters), strict=True))
    adapted = {f"{layer.name}.weight": delta for layer, delta in deltas.items()}
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in trained and trained[name].dtype == parameter.dtype:  # not quantized
                parameter.copy_(trained[name])
            elif name in adapted:
                parameter.copy_(parameter.float() + adapted[name].float().cpu())
    return network


def write_reader(folder: Path, loaded: ModelAndData) -> None:
    """Write the processor or the tokenizer, and the names of the labels."""
    reader = loaded.task.reader
    if reader is None:
        shapes = loaded.task.shapes(loaded.model.network.config, 1)
        if "pixel_values" in shapes:
            _write_json(folder / PROCESSOR, _processor(*shapes["pixel_values"][0][1:]))
    elif hasattr(reader, "backend_tokenizer"):
        _save_tokenizer(folder, reader, loaded.task.cut_at)
    else:  # under the name of an image processor that every version of transformers knows
        with no_bars():
            reader.save_pretrained(folder)
        content = read_json(folder / PROCESSOR, str(folder))
        processor = str(content.get("image_processor_type", "")).removesuffix("Pil")
        _write_json(folder / PROCESSOR, content | {"image_processor_type": processor})
    if labels := loaded.task.data.labels:
        _write_json(folder / "labels.json", list(labels))


def _processor(channels: int, height: int, width: int) -> dict[str, Any]:
    """Return the processor settings of a run whose model has no processor."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": _BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * channels,
        "image_std": [0.5] * channels,
    }


def _save_tokenizer(folder: Path, reader: Any, max_length: int) -> None:
    """Save the tokenizer, which truncates on request only, to the run's length."""
    tokenizer = copy.deepcopy(reader)
    tokenizer.backend_tokenizer.no_padding()  # that of the run's last batch
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.model_max_length = max_length
    with no_bars():
        tokenizer.save_pretrained(folder)


def _write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
