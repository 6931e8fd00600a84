"""The model and the data, which script and app share."""

from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

from ravan_flwr import RavanConfig
from ravan_flwr.training.bundled import bundled_file, read_backbone


def make_model(method: str) -> PeftModel:
    """Make the pretrained network with a new classifier and an adapter, the same everywhere."""
    config, weights = read_backbone(bundled_file("digits-vit"))  # pretrained on rendered letters
    saved, layers = ["classifier"], ["q_proj", "v_proj"]
    adapter: PeftConfig = LoraConfig(r=4, target_modules=layers, modules_to_save=saved)
    if method == "ravan":
        adapter = RavanConfig(r=8, num_heads=4, target_modules=layers, modules_to_save=saved)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = ViTForImageClassification(ViTConfig(**config | {"num_labels": 10}))
        network.load_state_dict(weights, strict=False)
        model = get_peft_model(network, adapter)
    if method == "ffa-lora":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and "lora_A" not in name)
    assert isinstance(model, PeftModel)
    return model


def load_examples(node: Mapping[str, Any] | None = None, *, test: bool = False) -> list[Any]:
    """Load the training examples, or a node's part of them; or the test examples."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (images, 1, 8, 8)
    pairs = zip(pixels, digits.target, strict=True)
    examples = [{"pixel_values": x, "labels": int(y)} for x, y in pairs]
    if test:
        return examples[1400:]
    part, parts = (0, 1) if node is None else (node["partition-id"], node["num-partitions"])
    return examples[part:1400:parts]
