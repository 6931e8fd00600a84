"""Train FedDPA: a LoRA for all beside one of each client, mixed by input (Yang et al., 2024).

    y = W x + b + (1 - a) scale B A x + a scale B_c A_c x

Odd rounds train B and A, without the client's own (a = 0), and the server averages them as FedIT
does. Even rounds train a client's own B_c and A_c beside those, frozen, with a = 1/2, and send
nothing. So a round takes as many steps as any other method's. Afterwards an input is mixed by how
like it is to what the client has trained on: with m the mean input of its last own round,

    a = LAMBDA max(0, cos(mean over tokens of x, m))

layer by layer. A client that has not trained its own has m = 0, and computes with B and A alone.

The authors (their code is public) train both in each round, one after the other, and compare the
network's last hidden state of an input with that of five of the client's examples, once for all
layers. Here no example is kept, and nothing is computed twice.
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
    """Add two LoRAs to a frozen linear layer, of which the second is the client's own."""

    personal_weight: float | None = None  # a while one of the two is trained; by input if None
    mean: Tensor
    total: Tensor

    def __init__(self, base: nn.Linear, B: Tensor, A: Tensor, scale: float) -> None:
        super().__init__(base, B, A, scale)
        self.set_own(B, A, torch.zeros(base.in_features))

    def set_own(self, B: Tensor, A: Tensor, mean: Tensor) -> None:
        """Take copies of a client's own factors, and the mean input that they were trained on."""
        device = self.base.weight.device
        self.own_B = nn.Parameter(B.detach().to(device, copy=True))
        self.own_A = nn.Parameter(A.detach().to(device, copy=True))
        self.register_buffer("mean", mean.to(device, copy=True), persistent=False)
        self.register_buffer("total", torch.zeros_like(self.mean), persistent=False)
        self.personal_weight, self.count = None, 0

    def train_own(self, *, own: bool) -> None:
        """Train the own factors beside the others, or the others alone."""
        self.personal_weight = 0.5 if own else 0.0
        for factor in (self.B, self.A):
            factor.requires_grad_(not own)
        for factor in (self.own_B, self.own_A):
            factor.requires_grad_(own)

    def mean_input(self) -> Tensor:
        """Compute the mean input of the own factors' last training."""
        return self.total / self.count if self.count else self.mean

    def forward(self, x: Tensor) -> Tensor:
        if self.personal_weight == 0:
            return super().forward(x)
        inputs = x.detach().float().flatten(1, -2).mean(1) if x.ndim > 2 else x.detach().float()
        if self.personal_weight is None:
            alike = F.cosine_similarity(inputs, self.mean[None]).clamp(min=0)
            weight = (LAMBDA * alike).to(x.dtype).view(-1, *[1] * (x.ndim - 1))
        else:
            self.total += inputs.sum(0)
            self.count += len(inputs)
            weight = torch.full((1,), self.personal_weight, dtype=x.dtype, device=x.device)
        of_all = F.linear(F.linear(x, self.A), self.B)
        own = F.linear(F.linear(x, self.own_A), self.own_B)
        y: Tensor = self.base(x)
        return y + (self.scale * ((1 - weight) * of_all + weight * own)).to(y.dtype)

    def delta_weight(self) -> Tensor:
        """Compute what is added, (out, in), to an input as the client's own are."""
        weight = self.personal_weight
        if weight is None:
            weight = LAMBDA if self.mean.any() else 0.0
        own = self.scale * self.own_B @ self.own_A
        return (1 - weight) * super().delta_weight() + weight * own


class FedDPA(LoraMethod):
    """Keep the state {"B", "A"}; {"own-B", "own-A", "mean-input"} stay with a client."""

    layer_class = DualLoRALinear
    rounds = ({"sent": BOTH, "frozen_tensors": ()}, {"sent": (), "frozen_tensors": BOTH})

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        if self.rank < 1:
            raise ValueError(
                f"lora-rank = {settings.lora_rank}: got a budget without room for two LoRAs, "
                "expected 2 at least; raise lora-rank or set rank"
            )
        own = {f"own-{name}": shape for name, shape in self.shapes(self.rank, BOTH).items()}
        shapes = own | {"mean-input": (sum(self.ins),)}
        self.personal = Personal(shapes, self.collect, self.put)

    def parameters_a_rank(self) -> int:
        return 2 * super().parameters_a_rank()

    def load(self, adapters: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        super().load(adapters, tensors)
        factors = self.split(self.first_factors(BOTH))
        means = [torch.zeros(side) for side in self.ins]
        for adapter, B, A, mean in zip(adapters, *factors, means, strict=True):
            adapter.set_own(B, A, mean)

    def choose(
        self, adapters: Sequence[Any], fraction: float, random: torch.Generator,
        backward: Callable[..., object],
    ) -> None:  # fmt: skip
        for adapter in adapters:
            adapter.train_own(own=bool(self.frozen_tensors))

    def collect(self, adapters: Sequence[Any]) -> Tensors:
        """Copy a client's own factors, and the mean of what it trained them on."""
        own = self.pack([a.own_B for a in adapters], [a.own_A for a in adapters])
        means = flatten([adapter.mean_input() for adapter in adapters])
        return {f"own-{name}": tensor for name, tensor in own.items()} | {"mean-input": means}

    def put(self, adapters: Sequence[Any], own: Mapping[str, Tensor]) -> None:
        """Put a client's own factors beside those of all."""
        factors = self.split({"B": own["own-B"], "A": own["own-A"]})
        means = own["mean-input"].split(self.ins)
        for adapter, B, A, mean in zip(adapters, *factors, means, strict=True):
            adapter.set_own(B, A, mean)

    def lora_factors(self, adapter: LoRALinear) -> None:
        return None  # no product of two factors mixes by input


METHOD = FedDPA
