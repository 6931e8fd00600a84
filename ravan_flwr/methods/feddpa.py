"""Train FedDPA: a global and a personal LoRA, mixed by the input (Yang et al., 2024).

    y = W x + b + (1 - a) scale B A x + a scale B_c A_c x

Odd rounds train the global B and A with a = 0, and the server averages them as FedIT does. Even
rounds train the personal B_c and A_c with a = 1/2, beside the frozen B and A, and send nothing. So
a round takes as many steps as in any other method. For evaluation a depends on the similarity of
the input and the client's training inputs, layer by layer:

    a = LAMBDA max(0, cos(mean over tokens of x, m))

with m the mean input of the layer in the client's last even round. A client without personal
factors has m = 0, so a = 0: it computes with B and A alone.

The authors (their code is public) train both in each round, one after the other. They compare the
network's last hidden state of an input with that of five of the client's examples, once for all
layers. Here no example is kept, and an input needs one forward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.adapters import Layer, LoRALinear
from ravan_flwr.methods.base import Settings, Tensors
from ravan_flwr.methods.extensions import Personal
from ravan_flwr.methods.lora import BOTH, LoraMethod
from ravan_flwr.methods.tensors import flatten

LAMBDA = 0.5


class DualLoRALinear(LoRALinear):
    """A frozen linear layer with a global and a personal LoRA."""

    personal_weight: float | None = None  # a during training; None: a depends on the input
    mean: Tensor  # m
    total: Tensor  # the sum of the inputs in this training
    count: Tensor  # their number

    def __init__(self, base: nn.Linear, B: Tensor, A: Tensor, scale: float) -> None:
        super().__init__(base, B, A, scale)
        self.set_personal(B, A, torch.zeros(base.in_features))

    def set_personal(self, B: Tensor, A: Tensor, mean: Tensor) -> None:
        """Load copies of a client's personal factors, and of the mean input of their training."""
        device = self.base.weight.device
        self.personal_B = nn.Parameter(B.detach().to(device, copy=True))
        self.personal_A = nn.Parameter(A.detach().to(device, copy=True))
        self.register_buffer("mean", mean.to(device, copy=True), persistent=False)
        self.register_buffer("total", torch.zeros_like(self.mean), persistent=False)
        self.register_buffer("count", torch.zeros((), device=device), persistent=False)
        self.personal_weight = None

    def train_personal(self, *, personal: bool) -> None:
        """Train the personal factors with a = 1/2, or the global factors with a = 0."""
        self.personal_weight = 0.5 if personal else 0.0
        for factor in (self.B, self.A):
            factor.requires_grad_(not personal)
        for factor in (self.personal_B, self.personal_A):
            factor.requires_grad_(personal)

    def mean_input(self) -> Tensor:
        """Return the mean input of the personal factors' last training."""
        return torch.where(self.count > 0, self.total / self.count.clamp(min=1), self.mean)

    def forward(self, x: Tensor) -> Tensor:
        if self.personal_weight == 0:
            return super().forward(x)
        inputs = x.detach().float().flatten(1, -2).mean(1) if x.ndim > 2 else x.detach().float()
        if self.personal_weight is None:
            similarity = F.cosine_similarity(inputs, self.mean[None]).clamp(min=0)
            weight = (LAMBDA * similarity).to(x.dtype).view(-1, *[1] * (x.ndim - 1))
        else:
            self.total += inputs.sum(0)
            self.count += len(inputs)
            weight = torch.full((1,), self.personal_weight, dtype=x.dtype, device=x.device)
        shared = F.linear(F.linear(x, self.A), self.B)
        personal = F.linear(F.linear(x, self.personal_A), self.personal_B)
        y: Tensor = self.base(x)
        return y + (self.scale * ((1 - weight) * shared + weight * personal)).to(y.dtype)

    def delta_weight(self) -> Tensor:
        """Return the delta-weight, (out, in), for an input equal to the mean training input."""
        weight = self.personal_weight
        if weight is None:
            weight = LAMBDA if self.mean.any() else 0.0
        personal = self.scale * self.personal_B @ self.personal_A
        return (1 - weight) * super().delta_weight() + weight * personal


class FedDPA(LoraMethod):
    """State: {"B", "A"}; upload: {"B", "A"} in odd rounds; personal: own-B, own-A, mean-input."""

    layer_class = DualLoRALinear
    rounds = ({"sent": BOTH, "frozen_tensors": ()}, {"sent": (), "frozen_tensors": BOTH})

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        if self.rank < 1:
            raise ValueError(
                f"lora-rank = {settings.lora_rank}: got a budget without room for two LoRAs, "
                "expected 2 at least; raise lora-rank or set rank"
            )
        personal = {f"own-{name}": shape for name, shape in self.shapes(self.rank, BOTH).items()}
        shapes = personal | {"mean-input": (sum(self.ins),)}
        self.personal = Personal(shapes, self.collect, self.put)

    def parameters_per_rank(self) -> int:
        return 2 * super().parameters_per_rank()

    def load(self, adapters: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        super().load(adapters, tensors)
        factors = self.split(self.first_factors(BOTH))
        means = [torch.zeros(side) for side in self.ins]
        for adapter, B, A, mean in zip(adapters, *factors, means, strict=True):
            adapter.set_personal(B, A, mean)

    def choose(
        self, adapters: Sequence[Any], fraction: float, random: torch.Generator,
        backward: Callable[..., object],
    ) -> None:  # fmt: skip
        for adapter in adapters:
            adapter.train_personal(personal=bool(self.frozen_tensors))

    def collect(self, adapters: Sequence[Any]) -> Tensors:
        """Return copies of a client's personal factors, and the mean input of their training."""
        personal = self.pack([a.personal_B for a in adapters], [a.personal_A for a in adapters])
        means = flatten([adapter.mean_input() for adapter in adapters])
        return {f"own-{name}": tensor for name, tensor in personal.items()} | {"mean-input": means}

    def put(self, adapters: Sequence[Any], personal: Mapping[str, Tensor]) -> None:
        """Load a client's personal factors beside the global ones."""
        factors = self.split({"B": personal["own-B"], "A": personal["own-A"]})
        means = personal["mean-input"].split(self.ins)
        for adapter, B, A, mean in zip(adapters, *factors, means, strict=True):
            adapter.set_personal(B, A, mean)

    def lora_factors(self, adapter: LoRALinear) -> None:
        return None  # the weights of the two LoRAs depend on the input


METHOD = FedDPA
