"""Share what methods that train a LoRA have in common: y = W x + b + scale B A x.

B(0) = 0, and A(0) is drawn from the seed, for each layer anew, with rows of norm 1
in expectation. The state and an upload are {"B", "A"}: the B of all layers one
after the other in one flat tensor, and the A in another, since layers have different sides.
The rank of such a pair is its size divided by the sum of the sides, so that a client of
smaller rank sends and gets the same two tensors, only shorter.

`ResidualLora` adds products of clients' factors to the pretrained weight, and sends all that was
added. A client may have missed any round, so the sum of all that was added so far, the residual,
is part of the state and travels with every broadcast. Layer by layer it travels in the cheapest
exact form: as two factors while their rank k has k (out + in) < out in, and as the (out, in)
matrix from then on."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, LoRALinear
from ravan_flwr.adapters.lora import ProductSum
from ravan_flwr.methods import affordable
from ravan_flwr.methods.base import Method, Settings, Tensors, check_rank
from ravan_flwr.methods.extensions import Personal
from ravan_flwr.methods.tensors import Mean, check_tensor, flatten, probe
from ravan_flwr.seeding import generator

BOTH = ("B", "A")


class LoraMethod(Method[LoRALinear]):
    """Send B and A both ways; the next state is the mean of each.

    Where a method treats one of the two otherwise, it says so by these names.
    """

    rank: int
    trained: tuple[str, ...] = BOTH  # which the budget pays for; the other is frozen
    in_state: tuple[str, ...] = BOTH  # which the server has and sends; the other is as drawn
    sent: tuple[str, ...] = BOTH  # which clients send in this round
    layer_class: type[LoRALinear] = LoRALinear  # what takes the place of a layer
    by_ranks = False  # May a client train floor(fraction * r) ranks, at least one?

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        self.outs = [layer.out_features for layer in self.layers]
        self.ins = [layer.in_features for layer in self.layers]
        self.side = min(*self.outs, *self.ins)
        self.rank = settings.rank or min(self.side, self.budget // self.parameters_a_rank())
        check_rank(self.rank, self.side)
        self.parts = self.rank if self.by_ranks else None

    def parameters_a_rank(self) -> int:
        """Count the parameters of one more rank."""
        return sum(math.prod(shape) for shape in self.shapes(1, self.trained).values())

    def trainable_parameters(self) -> int:
        return self.rank * self.parameters_a_rank()

    def shapes(self, rank: int, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the flat tensors of these names, of that rank."""
        sides = {"B": sum(self.outs), "A": sum(self.ins)}
        return {name: (rank * sides[name],) for name in names}

    def upload_shapes(self, fraction: float) -> dict[str, tuple[int, ...]]:
        rank = self.rank if self.parts is None else affordable(fraction, self.rank)
        return self.shapes(rank, self.sent)

    @cached_property
    def initial_A(self) -> list[Tensor]:
        """Draw A(0) of every layer."""
        return self.draw_A()

    def draw_A(self, *purpose: int) -> list[Tensor]:
        """Draw an A for every layer, another one for each purpose."""
        As = []
        for layer in self.layers:
            random = generator(self.settings.seed, "lora", layer.name, *purpose)
            A = torch.randn(self.rank, layer.in_features, generator=random, dtype=torch.float64)
            As.append((1 / math.sqrt(layer.in_features) * A).float())
        return As

    def adapt(self, layer: Layer, linear: nn.Linear) -> LoRALinear:
        A = self.initial_A[self.layers.index(layer)]
        B = torch.zeros(layer.out_features, self.rank)
        return self.layer_class(linear, B, A, self.settings.lora_scale)

    def pack(self, Bs: Sequence[Tensor], As: Sequence[Tensor]) -> Tensors:
        """Flatten these factors into two tensors, in float32 on the CPU."""
        return {"B": flatten(Bs), "A": flatten(As)}

    def split(self, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Cut two flat tensors, which fit, into factors."""
        rank = len(tensors["B"]) // sum(self.outs)
        return (
            [b.view(-1, rank) for b in tensors["B"].split([rank * out for out in self.outs])],
            [a.view(rank, -1) for a in tensors["A"].split([rank * side for side in self.ins])],
        )

    def first_factors(self, names: Sequence[str]) -> Tensors:
        """Make the factors of these names as every client begins with them."""
        first = self.pack([torch.zeros(out, self.rank) for out in self.outs], self.initial_A)
        return {name: first[name] for name in names}

    def initial_state(self, adapters: Sequence[LoRALinear]) -> Tensors:
        return self.first_factors(self.in_state)

    def load(self, adapters: Sequence[LoRALinear], tensors: Mapping[str, Tensor]) -> None:
        if names := [name for name in BOTH if name not in self.in_state]:
            tensors = dict(tensors) | self.first_factors(names)
        self.set_factors(adapters, tensors)
        for name in set(BOTH) - set(self.trained):
            for adapter in adapters:
                adapter.get_parameter(name).requires_grad_(False)

    def set_factors(self, adapters: Sequence[LoRALinear], tensors: Mapping[str, Tensor]) -> None:
        """Put both factors of one rank into the adapters."""
        rank = max(1, len(tensors.get("B", ())) // sum(self.outs))  # of unknown origin
        for name, sides in (("B", self.outs), ("A", self.ins)):
            check_tensor(tensors, name, (rank * sum(sides),), torch.float32)
        for adapter, B, A in zip(adapters, *self.split(tensors), strict=True):
            adapter.set_factors(B, A)

    def upload(self, adapters: Sequence[LoRALinear]) -> Tensors:
        return self.factors_of(adapters, self.sent)

    def factors_of(self, adapters: Sequence[LoRALinear], names: Sequence[str]) -> Tensors:
        """Copy the factors of these names out of the adapters."""
        return {name: flatten([a.get_parameter(name) for a in adapters]) for name in names}

    def lora_factors(self, adapter: LoRALinear) -> tuple[Tensor, Tensor] | None:
        return adapter.factors()

    def fingerprint(self, adapters: Sequence[LoRALinear]) -> list[float]:
        return probe([(adapter.A,) for adapter in adapters])


class RankedLora(LoraMethod):
    """Let a client train the first ranks, and send it no others."""

    by_ranks = True

    def broadcast(self, state: Tensors, fraction: float) -> Tensors:
        rank = affordable(fraction, self.rank)
        Bs, As = self.split(state)
        return self.pack([B[:, :rank] for B in Bs], [A[:rank] for A in As])


class PersonalLora(LoraMethod):
    """Leave the factors that are not sent with each client.

    They begin as every LoRA does, B = 0 and A drawn from the seed, so that all clients begin alike.
    """

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        stay = [name for name in BOTH if name not in self.sent]
        collect = partial(self.factors_of, names=stay)
        self.personal = Personal(self.shapes(self.rank, stay), collect, self.put)

    def put(self, adapters: Sequence[LoRALinear], own: Mapping[str, Tensor]) -> None:
        """Put a client's own factors into the adapters, beside those that travel."""
        self.set_factors(adapters, self.factors_of(adapters, BOTH) | dict(own))


class ProductSums:
    """Sum up the clients' B_c A_c per layer, as factors while those are the smaller."""

    def __init__(self, method: LoraMethod, state: Tensors) -> None:
        self.method, self.state = method, state
        self.sums = [ProductSum(layer.out_features, layer.in_features) for layer in method.layers]
        self.weight, self.rank = 0.0, 0  # of all replies

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's B and A, of its own rank."""
        Bs, As = self.method.split(upload)
        for total, B, A in zip(self.sums, Bs, As, strict=True):
            total.add(B, A, weight)
        self.weight += weight
        self.rank += len(As[0])


class CoMoments(ProductSums):
    """Keep the means of B and A, and per layer the co-moment of B and A about them.

    What averaging B and A each by itself loses, mean(B A) - mean(B) mean(A), is
    mean_c((B_c - mean B) (A_c - mean A)). The co-moment sum_c w_c (B_c - mean B) (A_c - mean A)
    grows by one product of rank r for each reply but the first, as Welford's variance does.
    """

    def __init__(self, method: LoraMethod, state: Tensors) -> None:
        super().__init__(method, state)
        self.means = {name: Mean(state[name]) for name in ("B", "A")}
        self.count = 0

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's B and A."""
        if self.count:
            before = self.weight
            difference = {k: upload[k].double() - m.sum / before for k, m in self.means.items()}
            factor = weight * before / (before + weight)
            for moment, B, A in zip(self.sums, *self.method.split(difference), strict=True):
                moment.add(B, A, factor)
        for name, mean in self.means.items():
            mean.add(upload[name], weight)
        self.count += 1
        self.weight += weight


class ResidualLoRALinear(LoRALinear):
    """Add to a LoRA layer's pretrained weight, which can come back to the bit."""

    pretrained: Tensor

    def __init__(self, base: nn.Linear, B: Tensor, A: Tensor, scale: float) -> None:
        super().__init__(base, B, A, scale)
        self.register_buffer("pretrained", base.weight.detach(), persistent=False)

    def set_residual(self, residual: Tensor | None) -> None:
        """Make the base's weight the pretrained one plus this."""
        weight = self.pretrained
        if residual is not None:
            weight = weight + residual.to(weight.device, weight.dtype)
        self.base.weight.data = weight

    def delta_weight(self) -> Tensor:
        """Compute scale B A and the residual, (out, in)."""
        return super().delta_weight() + (self.base.weight - self.pretrained)


class ResidualLora(LoraMethod):
    """Keep {"residual", "residual-rank"} in the state, and add it to the pretrained weights."""

    layer_class = ResidualLoRALinear

    def no_residual(self) -> Tensors:
        """Make the part of the state that says what was added: nothing yet."""
        return {"residual": torch.zeros(0), "residual-rank": torch.zeros(1, dtype=torch.int32)}

    def broadcast_bytes(self, initial: Tensors, fraction: float) -> int:
        matrices = sum(layer.out_features * layer.in_features for layer in self.layers)
        return super().broadcast_bytes(initial, fraction) + 4 * matrices

    def load_residual(self, adapters: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        """Make every layer's weight the pretrained one plus the residual."""
        for adapter, residual in zip(adapters, self.residuals(tensors), strict=True):
            adapter.set_residual(residual.dense())

    def lora_factors(self, adapter: LoRALinear) -> None:
        return None

    def residuals(self, tensors: Mapping[str, Tensor]) -> list["Residual"]:
        """Read what was added to each layer's weight so far."""
        rank = int(check_tensor(tensors, "residual-rank", (1,), torch.int32))
        sizes = [Residual.size(layer, rank) for layer in self.layers]
        flat = check_tensor(tensors, "residual", (sum(sizes),), torch.float32)
        return [
            Residual.read(layer, rank, part)
            for layer, part in zip(self.layers, flat.split(sizes), strict=True)
        ]

    def add_products(
        self, state: Tensors, products: Sequence[ProductSum], factor: float, rank: int
    ) -> Tensors:
        """Add that many times the products, of `rank` in all, to the state's residual."""
        rank += int(state["residual-rank"])
        added = [
            residual.plus(product, factor, rank).flat()
            for residual, product in zip(self.residuals(state), products, strict=True)
        ]
        return {
            "residual": torch.cat(added),
            "residual-rank": torch.tensor([rank], dtype=torch.int32),
        }


class Residual:
    """Keep what was added to one layer's weight: U (out, k) and V (k, in), or the matrix itself."""

    def __init__(self, layer: Layer, rank: int, parts: tuple[Tensor, ...]) -> None:
        self.layer, self.rank, self.parts = layer, rank, parts

    @staticmethod
    def size(layer: Layer, rank: int) -> int:
        """Count the numbers of the cheapest exact form."""
        out, inside = layer.out_features, layer.in_features
        return min(rank * (out + inside), out * inside)

    @classmethod
    def read(cls, layer: Layer, rank: int, flat: Tensor) -> "Residual":
        """Read what `flat` wrote."""
        out, inside = layer.out_features, layer.in_features
        if rank * (out + inside) < out * inside:
            U, V = flat.split([out * rank, rank * inside])
            return cls(layer, rank, (U.view(out, rank), V.view(rank, inside)))
        return cls(layer, rank, (flat.view(out, inside),))

    def flat(self) -> Tensor:
        """Write it as one tensor, for the state."""
        return flatten(self.parts)

    def dense(self) -> Tensor | None:
        """Make the (out, in) matrix; None where nothing was added."""
        if self.rank == 0:
            return None
        if len(self.parts) == 1:
            return self.parts[0]
        U, V = self.parts
        return U @ V

    def plus(self, moment: ProductSum, factor: float, rank: int) -> "Residual":
        """Add that many times the moment, which makes the rank of all of it `rank`."""
        if self.size(self.layer, rank) < self.layer.out_features * self.layer.in_features:
            U, V = self.parts
            B, A = moment.factors()
            return Residual(self.layer, rank, (torch.cat([U, factor * B], 1), torch.cat([V, A])))
        dense = self.dense()
        total = factor * moment.dense()
        return Residual(self.layer, rank, (total if dense is None else total + dense,))
