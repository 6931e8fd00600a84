"""Fine-tune everything: every pretrained parameter is trained, sent and averaged.

    W <- mean_c W_c

This is FedAvg (McMahan et al., 2017) with local steps of Adam, the reference for
parameter-efficient methods. It trains the whole pretrained network. As in every method, an option
of the run decides whether the classifier is trained, too.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ravan_flwr.methods.base import Method, Tensors
from ravan_flwr.methods.extensions import SumsChanges
from ravan_flwr.methods.tensors import check_tensor, flatten


class Full(SumsChanges, Method["Everything"]):
    """State and upload: {"weights"}, one flat tensor of all parameters."""

    rank = None

    def trainable_parameters(self) -> int:
        return self.size

    def upload_shapes(self, fraction: float) -> dict[str, tuple[int, ...]]:
        return {"weights": (self.size,)}

    def install(
        self, network: nn.Module, pretrained: Mapping[str, nn.Parameter]
    ) -> list["Everything"]:
        return [Everything(pretrained)]

    def initial_state(self, adapters: Sequence["Everything"]) -> Tensors:
        (everything,) = adapters
        return {"weights": everything.pretrained}

    def load(self, adapters: Sequence["Everything"], tensors: Mapping[str, Tensor]) -> None:
        (everything,) = adapters
        flat = check_tensor(tensors, "weights", (self.size,), torch.float32)
        with torch.no_grad():
            for weight, part in everything.split(flat).values():
                weight.requires_grad_(True).copy_(part)

    def upload(self, adapters: Sequence["Everything"]) -> Tensors:
        (everything,) = adapters
        return {"weights": flatten(list(everything.weights.values()))}

    def delta_weights(self, adapters: Sequence["Everything"]) -> list[Tensor]:
        (everything,) = adapters
        parts = everything.split(everything.pretrained)
        pairs = [parts[f"{layer.name}.weight"] for layer in self.layers]
        return [weight.detach() - old.to(weight.device) for weight, old in pairs]


METHOD = Full


class Everything(nn.Module):
    """A network's parameters, and a copy of their pretrained values on the CPU."""

    def __init__(self, pretrained: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.weights = dict(pretrained)
        for number, weight in enumerate(pretrained.values()):
            weight.requires_grad_(True)
            self.register_parameter(str(number), weight)
        if any(weight.is_meta for weight in pretrained.values()):
            size = sum(weight.numel() for weight in pretrained.values())
            self.pretrained = torch.empty(size, device="meta")
        else:
            self.pretrained = flatten(list(pretrained.values()))

    def split(self, flat: Tensor) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Return each parameter, by name, with its part of a flat tensor in its shape."""
        parts = flat.split([weight.numel() for weight in self.weights.values()])
        return {
            name: (weight, part.view(weight.shape))
            for (name, weight), part in zip(self.weights.items(), parts, strict=True)
        }
