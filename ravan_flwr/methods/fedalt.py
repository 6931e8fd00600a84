"""Train FedALT: a client's own heads beside the mean of the others' (Bian et al., 2026).

    y = W x + b + g_1(x) sum_i B_i P_i A_i x + g_2(x) sum_i B_i R_i A_i x,    g(x) = softmax(G x)

P, r x r for each head, is the client's own, and goes on from where it was; R, frozen, is the mean
of the other clients' P. G (2, in) and P are trained, and stay with the client. The paper has two
LoRAs, of which the server averages the factors. Here P are RAVAN's products s H (ravan.py), so that
R is exact, and a client can compute it of what the server sends to all:

    a client sends H + P - (its P before),    H <- mean_c of that = mean_c P_c
    R = K / (K - 1) (H - Q),                  Q = sum over rounds (P - P before) / K

with K clients in a round, of which the state has the number: the client subtracts its own from the
sum. So it works where the server sees sums alone. All clients train in every round, each of them
counts the same, and P begins at zero, G as well. One with a small budget trains some heads.

A client that has no P yet has R = H, which is also what the server evaluates. After a round without
effect, in which H has not moved, P is again what it was before. A client whose reply was lost does
not know it, and subtracts what is not there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.adapters import Layer, MultiHeadLinear
from ravan_flwr.adapters.multihead import Heads
from ravan_flwr.methods.base import Settings, Tensors
from ravan_flwr.methods.extensions import Personal
from ravan_flwr.methods.ravan import Ravan
from ravan_flwr.methods.tensors import HeadMeans, check_tensor, flatten, unpack_bits

OWN = ("own", "counted", "in-sum", "seen")  # P, P before, Q, and H at the last training


class MixedHeads(MultiHeadLinear):
    """Add heads of the client's own and those of the others to a frozen linear layer."""

    shared: Tensor  # H, as it was sent
    others: Tensor  # R
    counted: Tensor  # P, as the mean has it
    in_sum: Tensor  # Q
    ones: Tensor

    def __init__(self, base: nn.Linear, B: Tensor, A: Tensor, form: str) -> None:
        super().__init__(base, B, A, form)
        self.gate = nn.Parameter(self.H.new_zeros(2, base.in_features))
        for name in ("shared", "others", "counted", "in_sum"):
            self.register_buffer(name, torch.zeros_like(self.H.detach()), persistent=False)
        self.register_buffer("ones", torch.ones_like(self.s.detach()), persistent=False)
        self.clients = 0

    @torch.no_grad()
    def begin(self, shared: Tensor, clients: int) -> None:
        """Begin as a client without heads of its own."""
        self.clients = clients
        self.shared.copy_(shared)
        self.others.copy_(shared)
        for tensor in (self.counted, self.in_sum, self.gate):
            tensor.zero_()

    @torch.no_grad()
    def put(self, own: Tensor, in_sum: Tensor, gate: Tensor) -> None:
        """Take a client's own heads, which the mean has as `in_sum`."""
        self.H.copy_(own)
        self.counted.copy_(own)
        self.in_sum.copy_(in_sum)
        self.gate.copy_(gate.view_as(self.gate))
        scale = self.clients / (self.clients - 1) if self.clients > 1 else 1.0
        self.others.copy_(scale * (self.shared - in_sum))

    def cores(self) -> Tensor:
        """Compute P = s H of all heads, (heads, r, r)."""
        return self._heads().cores()

    def _of_others(self) -> Heads:
        return Heads(self.B_stack, self.A_stack, self.others, self.ones)

    def forward(self, x: Tensor) -> Tensor:
        own_gate, other_gate = F.linear(x, self.gate).softmax(-1).split(1, -1)
        y: Tensor = self.base(x)
        added: Tensor = own_gate * self._heads().apply(x) + other_gate * self._of_others().apply(x)
        return y + added.to(y.dtype)

    def delta_weight(self) -> Tensor:
        """Compute what is added, (out, in), where both count the same."""
        return (super().delta_weight() + self._of_others().delta_weight()) / 2


class FedALT(Ravan):
    """Keep the state {"H", "clients"}; an upload is {"H": products, "heads": packed bits}."""

    layer_class = MixedHeads

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        if settings.init == "first-round":
            raise ValueError(
                "init = 'first-round': got method 'fedalt', whose heads begin at zero, expected "
                "another init; choose one"
            )
        self.mean_over_cohort = True
        shapes = dict.fromkeys(OWN, self._shape)
        self.personal = Personal(
            shapes | {"gate": (self._extra_parameters(),)}, self.collect, self.put
        )

    def _extra_parameters(self) -> int:
        return 2 * sum(layer.in_features for layer in self.layers)

    # The server's half.

    def initial_state(self, adapters: Sequence[MultiHeadLinear]) -> Tensors:
        return super().initial_state(adapters) | {"clients": torch.zeros(1, dtype=torch.int32)}

    def counted(self, state: Tensors, clients: int) -> Tensors:
        return state | {"clients": torch.tensor([clients], dtype=torch.int32)}

    def open_round(self, state: Tensors) -> "CohortMean":
        return CohortMean(self, state)

    # The client's half.

    def load(self, adapters: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        clients = int(check_tensor(tensors, "clients", (1,), torch.int32))
        nothing = {"H": torch.zeros(self._shape, device=tensors["H"].device)}
        super().load(adapters, nothing)
        H = check_tensor(tensors, "H", self._shape, torch.float32)
        for adapter, shared in zip(adapters, H, strict=True):
            adapter.begin(shared, clients)

    def upload(self, adapters: Sequence[Any]) -> Tensors:
        bits = super().upload(adapters)["heads"]
        changed = [a.shared + a.cores() - a.counted for a in adapters]
        chosen = unpack_bits(bits, len(adapters) * self.heads)
        return {"H": torch.cat(changed).detach().cpu()[chosen], "heads": bits}

    def collect(self, adapters: Sequence[Any]) -> Tensors:
        """Copy what the client computes R of next time, and its gates."""
        parts = zip(*[(a.cores(), a.counted, a.in_sum, a.shared) for a in adapters], strict=True)
        own = {n: torch.stack(p).detach().cpu() for n, p in zip(OWN, parts, strict=True)}
        return own | {"gate": flatten([adapter.gate for adapter in adapters])}

    def put(self, adapters: Sequence[Any], own: Mapping[str, Tensor]) -> None:
        """Take the client's own products out of the mean, and put them beside the rest."""
        P, before, Q, last_H = (own[name].to(adapters[0].H.device) for name in OWN)
        if torch.equal(last_H, torch.stack([adapter.shared for adapter in adapters])):
            P = before  # the round had no effect
        elif adapters[0].clients:
            Q = Q + (P - before) / adapters[0].clients
        gates = own["gate"].split([adapter.gate.numel() for adapter in adapters])
        for adapter, *tensors in zip(adapters, P, Q, gates, strict=True):
            adapter.put(*tensors)

    def lora_factors(self, adapter: MultiHeadLinear) -> None:
        return None  # no product of two factors mixes by input


class CohortMean(HeadMeans):
    """Take the mean over all clients of the round, each of which counts the same."""

    def __init__(self, method: FedALT, state: Tensors) -> None:
        super().__init__(state["H"], mean_over_cohort=True)
        self.method = method

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add products of some heads."""
        super().add(upload, 1.0)

    def close(self) -> Tensors:
        """Make the next state."""
        return self.method.counted(super().close(), int(self.total))


METHOD = FedALT
