"""What a run is for: its adapters, in a form that other software loads.

A RAVAN layer is a LoRA layer of rank heads * r: A is the A_i on top of each other, B the
s_i B_i H_i side by side. A folder of it loads with `PeftModel.from_pretrained`.
"""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ravan_flwr.model import AdaptedModel
from ravan_flwr.records import write_atomically


def write_adapter(folder: Path, model: AdaptedModel) -> bool:
    """Write the adapters as the model holds them now, and the classifier, as a PEFT folder.

    False, and nothing written, if the method changes pretrained weights.
    """
    tensors: dict[str, Tensor] = {}
    ranks = set()
    for layer, adapter in zip(model.layers, model.adapters, strict=True):
        factors = model.method.lora_factors(adapter)
        if factors is None:
            return False
        B, A = factors
        ranks.add(len(A))
        tensors[f"base_model.model.{layer.name}.lora_A.weight"] = A
        tensors[f"base_model.model.{layer.name}.lora_B.weight"] = B
    (rank,) = ranks
    names = {id(parameter): name for name, parameter in model.network.named_parameters()}
    for parameter in model.classifier:
        tensors[f"base_model.model.{names[id(parameter)]}"] = parameter
    modules = sorted({names[id(p)].split(".")[0] for p in model.classifier})
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [layer.name for layer in model.layers],
        "modules_to_save": modules,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        "base_model_name_or_path": None,
        "task_type": None,
    }
    saved = {k: v.detach().float().cpu().contiguous().clone() for k, v in tensors.items()}
    write_atomically(folder / "adapter_model.safetensors", safetensors.torch.save(saved))
    write_atomically(
        folder / "adapter_config.json", (json.dumps(settings, indent=2) + "\n").encode()
    )
    return True
