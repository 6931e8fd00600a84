"""What the app trains: a small network, and handwritten digits."""

from functools import lru_cache

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ravan_flwr import RavanConfig


class Network(nn.Module):
    """Classify digits by a frozen network, whose adapters and classifier are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 128)
        self.classifier = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(torch.relu(self.second(torch.relu(self.first(x)))))
        return y


@lru_cache(maxsize=1)
def load_model(strategy: str) -> PeftModel:
    """Make the network with its adapter, once in each process and the same in all."""
    layers, saved = ["first", "second"], ["classifier"]
    config: PeftConfig = LoraConfig(r=4, lora_alpha=4, target_modules=layers, modules_to_save=saved)
    if strategy == "ravan":
        config = RavanConfig(r=16, num_heads=4, target_modules=layers, modules_to_save=saved)
    with torch.random.fork_rng():  # clients draw heads and batches of their own afterwards
        torch.manual_seed(0)
        adapted = get_peft_model(Network(), config)
    assert isinstance(adapted, PeftModel)
    return adapted


def load_data(part: int = 0, parts: int = 0) -> tuple[Tensor, Tensor]:
    """Load a client's part of the training examples; without parts, the test examples."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    mine = order[300 + part :: parts] if parts else order[:300]
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return images[mine], torch.tensor(digits.target)[mine]
