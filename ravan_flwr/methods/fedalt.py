"""Train FedALT: personal heads beside the mean of the other clients' heads (Bian et al., 2026).

    y = W x + b + g_1(x) sum_i B_i P_i A_i x + g_2(x) sum_i B_i R_i A_i x,    g(x) = softmax(G x)

P_i (r, r) are the client's personal heads; R_i, frozen, are the means of the other clients' P_i.
P and the gate G (2, in) are trained, start at zero, and stay with the client between rounds. The
paper has two LoRAs, and its server averages their factors. Here P are RAVAN's products s H
(ravan.py). So R is exact, and a client can compute it from the broadcast H:

    upload:  H + P - P_before,               H <- mean_c of the uploads = mean_c P_c
    R = K / (K - 1) (H - Q),                 Q = sum over rounds (P - P_before) / K

P_before is P at the start of the round, K the number of clients in a round, which is part of the
state, and Q the client's own term in H. The server needs only the sum of the uploads. All clients
train in every round with equal weights. A client with a small budget trains some of its heads.

A client without P has R = H; the server evaluates this model. If H has not changed since the last
training, that round had no effect, and the client restores P_before. A client cannot detect that
its reply was lost: then it subtracts a change that H does not contain.
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
from ravan_flwr.methods.ravan import HeadMeans, Ravan
from ravan_flwr.methods.tensors import check_tensor, flatten, unpack_bits

PERSONAL = ("own", "counted", "in-sum", "seen")  # P, P_before, Q, and H of the last training


class MixedHeads(MultiHeadLinear):
    """A frozen linear layer with personal heads, and the mean of the other clients' heads."""

    shared: Tensor  # H of the broadcast
    others: Tensor  # R
    counted: Tensor  # P_before, which the mean H contains
    in_mean: Tensor  # Q
    ones: Tensor

    def __init__(self, base: nn.Linear, B: Tensor, A: Tensor, form: str) -> None:
        super().__init__(base, B, A, form)
        self.gate = nn.Parameter(self.H.new_zeros(2, base.in_features))
        for name in ("shared", "others", "counted", "in_mean"):
            self.register_buffer(name, torch.zeros_like(self.H.detach()), persistent=False)
        self.register_buffer("ones", torch.ones_like(self.s.detach()), persistent=False)
        self.clients = 0

    @torch.no_grad()
    def begin(self, shared: Tensor, clients: int) -> None:
        """Start as a client without personal heads."""
        self.clients = clients
        self.shared.copy_(shared)
        self.others.copy_(shared)
        for tensor in (self.counted, self.in_mean, self.gate):
            tensor.zero_()

    @torch.no_grad()
    def put(self, personal: Tensor, in_mean: Tensor, gate: Tensor) -> None:
        """Load a client's personal heads, their term in the mean, and the gate."""
        self.H.copy_(personal)
        self.counted.copy_(personal)
        self.in_mean.copy_(in_mean)
        self.gate.copy_(gate.view_as(self.gate))
        scale = self.clients / (self.clients - 1) if self.clients > 1 else 1.0
        self.others.copy_(scale * (self.shared - in_mean))

    def cores(self) -> Tensor:
        """Return P = s H of all heads, (heads, r, r)."""
        return self._heads().cores()

    def _other_heads(self) -> Heads:
        return Heads(self.B_stack, self.A_stack, self.others, self.ones)

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return g_1(x) and g_2(x), (..., 1) each."""
        personal_gate, other_gate = F.linear(x, self.gate).softmax(-1).split(1, -1)
        return personal_gate, other_gate

    @torch.no_grad()
    def head_inputs(self, x: Tensor) -> Tensor:
        return self._gates(x)[0] * x  # the gate is one number for each x

    def forward(self, x: Tensor) -> Tensor:
        personal_gate, other_gate = self._gates(x)
        y: Tensor = self.base(x)
        added: Tensor = personal_gate * self._heads().apply(
            x
        ) + other_gate * self._other_heads().apply(x)
        return y + added.to(y.dtype)

    def delta_weight(self) -> Tensor:
        """Return the delta-weight, (out, in), for equal gates."""
        return (super().delta_weight() + self._other_heads().delta_weight()) / 2


class FedALT(Ravan):
    """State: {"H", "clients"}; upload: {"H": products, "heads": packed bits}."""

    layer_class = MixedHeads

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        if settings.init == "first-round":
            raise ValueError(
                "init = 'first-round': got method 'fedalt', whose heads begin at zero, expected "
                "another init; choose one"
            )
        self.mean_over_cohort = True
        shapes = dict.fromkeys(PERSONAL, self._shape)
        self.personal = Personal(
            shapes | {"gate": (self._extra_parameters(),)}, self.collect, self.put
        )

    def _extra_parameters(self) -> int:
        return 2 * sum(layer.in_features for layer in self.layers)

    # The server's half.

    def initial_state(self, adapters: Sequence[MultiHeadLinear]) -> Tensors:
        return super().initial_state(adapters) | {"clients": torch.zeros(1, dtype=torch.int32)}

    def with_num_clients(self, state: Tensors, clients: int) -> Tensors:
        return state | {"clients": torch.tensor([clients], dtype=torch.int32)}

    def open_round(self, state: Tensors) -> "CohortMean":
        return CohortMean(self, state)

    # The client's half.

    def load(self, adapters: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        clients = int(check_tensor(tensors, "clients", (1,), torch.int32))
        zeros = {"H": torch.zeros(self._shape, device=tensors["H"].device)}
        super().load(adapters, zeros)
        H = check_tensor(tensors, "H", self._shape, torch.float32)
        for adapter, shared in zip(adapters, H, strict=True):
            adapter.begin(shared, clients)

    def upload(self, adapters: Sequence[Any]) -> Tensors:
        bits = super().upload(adapters)["heads"]
        changed = [a.shared + a.cores() - a.counted for a in adapters]
        chosen = unpack_bits(bits, len(adapters) * self.heads)
        return {"H": torch.cat(changed).detach().cpu()[chosen], "heads": bits}

    def collect(self, adapters: Sequence[Any]) -> Tensors:
        """Return copies of the gates, and of the tensors from which R is computed next time."""
        parts = zip(*[(a.cores(), a.counted, a.in_mean, a.shared) for a in adapters], strict=True)
        personal = {n: torch.stack(p).detach().cpu() for n, p in zip(PERSONAL, parts, strict=True)}
        return personal | {"gate": flatten([adapter.gate for adapter in adapters])}

    def put(self, adapters: Sequence[Any], personal: Mapping[str, Tensor]) -> None:
        """Load the client's personal heads, and subtract their term from the mean."""
        P, before, Q, last_H = (personal[name].to(adapters[0].H.device) for name in PERSONAL)
        if torch.equal(last_H, torch.stack([adapter.shared for adapter in adapters])):
            P = before  # the last round had no effect
        elif adapters[0].clients:
            Q = Q + (P - before) / adapters[0].clients
        gates = personal["gate"].split([adapter.gate.numel() for adapter in adapters])
        for adapter, *tensors in zip(adapters, P, Q, gates, strict=True):
            adapter.put(*tensors)

    def lora_factors(self, adapter: MultiHeadLinear) -> None:
        return None  # the gates depend on the input


class CohortMean(HeadMeans):
    """The mean over all clients of the round, with equal weights."""

    def __init__(self, method: FedALT, state: Tensors) -> None:
        super().__init__(state["H"], mean_over_cohort=True)
        self.method = method

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's products; `weight` is ignored."""
        super().add(upload, 1.0)

    def close(self) -> Tensors:
        """Return the next state."""
        return self.method.with_num_clients(super().close(), int(self.total))


METHOD = FedALT
