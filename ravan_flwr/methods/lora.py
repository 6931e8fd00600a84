"""Share the code of methods that train a LoRA: y = W x + b + scale B A x.

B(0) = 0, and A(0) is drawn from the seed for each layer, with rows of norm 1 in expectation. The
state and an upload are {"B", "A"}: one flat tensor with the B of all layers, layer by layer, and
another with the A, since layers have different sides. The rank of such a pair is its size divided
by the sum of the sides. So the tensors of a client of smaller rank are shorter, but have the same
form.

`ResidualLora` adds products of clients' factors to the pretrained weight. The residual is the sum
of all products so far. A client may have missed any round, so the residual is part of the state and
of every broadcast. For each layer it has the cheapest exact form: two factors while their rank k
has k (out + in) < out in, then the (out, in) matrix."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, LoRALinear
from ravan_flwr.adapters.lora import ProductSum
from ravan_flwr.methods.base import Method, Settings, Tensors, check_rank
from ravan_flwr.methods.budgets import affordable
from ravan_flwr.methods.extensions import Personal
from ravan_flwr.methods.tensors import Mean, check_tensor, flatten, probe
from ravan_flwr.seeding import generator

BOTH = ("B", "A")


class LoraMethod(Method[LoRALinear]):
    """Send B and A both ways; the next state is the mean of each.

    A method that treats B and A differently overrides these attributes.
    """

    rank: int
    trained: tuple[str, ...] = BOTH  # trained, and counted in the budget; the others are frozen
    in_state: tuple[str, ...] = BOTH  # in the state, and sent; the others keep their initial values
    sent: tuple[str, ...] = BOTH  # sent by clients in this round
    layer_class: type[LoRALinear] = LoRALinear  # the adapter that replaces a layer
    by_ranks = False  # may a client train floor(fraction * r) ranks, at least one?

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        self.outs = [layer.out_features for layer in self.layers]
        self.ins = [layer.in_features for layer in self.layers]
        self.side = min(*self.outs, *self.ins)
        self.rank = settings.rank or min(self.side, self.budget // self.parameters_per_rank())
        check_rank(self.rank, self.side)
        if settings.scale_clients:
            # A mean of N clients has 1 / N of their variance, and sqrt(N) makes up for it.
            scale = settings.lora_scale * math.sqrt(settings.scale_clients / self.rank)
            self.settings = replace(settings, lora_scale=scale)
        self.budget_units = self.rank if self.by_ranks else None

    def parameters_per_rank(self) -> int:
        """Return the number of trained parameters for each rank."""
        return sum(math.prod(shape) for shape in self.shapes(1, self.trained).values())

    def trainable_parameters(self) -> int:
        return self.rank * self.parameters_per_rank()

    def shapes(self, rank: int, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the flat tensors with these names at that rank."""
        sides = {"B": sum(self.outs), "A": sum(self.ins)}
        return {name: (rank * sides[name],) for name in names}

    def upload_shapes(self, fraction: float) -> dict[str, tuple[int, ...]]:
        rank = self.rank if self.budget_units is None else affordable(fraction, self.rank)
        return self.shapes(rank, self.sent)

    @cached_property
    def initial_A(self) -> list[Tensor]:
        """Draw A(0) of every layer."""
        return self.draw_A()

    def draw_A(self, *purpose: int) -> list[Tensor]:
        """Draw an A for every layer; different purposes give different draws."""
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
        """Flatten the layers' factors into two tensors, in float32 on the CPU."""
        return {"B": flatten(Bs), "A": flatten(As)}

    def split(self, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Split two checked flat tensors into the layers' factors."""
        rank = len(tensors["B"]) // sum(self.outs)
        return (
            [b.view(-1, rank) for b in tensors["B"].split([rank * out for out in self.outs])],
            [a.view(rank, -1) for a in tensors["A"].split([rank * side for side in self.ins])],
        )

    def first_factors(self, names: Sequence[str]) -> Tensors:
        """Return the initial values, the same for every client, of the factors with these names."""
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
        """Load both factors, of any common rank, into the adapters."""
        rank = max(1, len(tensors.get("B", ())) // sum(self.outs))  # not checked yet
        for name, sides in (("B", self.outs), ("A", self.ins)):
            check_tensor(tensors, name, (rank * sum(sides),), torch.float32)
        for adapter, B, A in zip(adapters, *self.split(tensors), strict=True):
            adapter.set_factors(B, A)

    def upload(self, adapters: Sequence[LoRALinear]) -> Tensors:
        return self.read_factors(adapters, self.sent)

    def read_factors(self, adapters: Sequence[LoRALinear], names: Sequence[str]) -> Tensors:
        """Return copies of the adapters' factors with these names."""
        return {name: flatten([a.get_parameter(name) for a in adapters]) for name in names}

    def lora_factors(self, adapter: LoRALinear) -> tuple[Tensor, Tensor] | None:
        return adapter.factors()

    def fingerprint(self, adapters: Sequence[LoRALinear]) -> list[float]:
        return probe([(adapter.A,) for adapter in adapters])


class RankedLora(LoraMethod):
    """Send a client only the first ranks within its budget, which it trains."""

    by_ranks = cuts_broadcast = True

    def broadcast(self, state: Tensors, fraction: float) -> Tensors:
        rank = affordable(fraction, self.rank)
        Bs, As = self.split(state)
        return self.pack([B[:, :rank] for B in Bs], [A[:rank] for A in As])


class PersonalLora(LoraMethod):
    """Keep the factors that are not sent as personal parameters.

    They start as in every LoRA, B = 0 and A drawn from the seed, so all clients start alike.
    """

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        personal_names = [name for name in BOTH if name not in self.sent]
        collect = partial(self.read_factors, names=personal_names)
        self.personal = Personal(self.shapes(self.rank, personal_names), collect, self.put)

    def put(self, adapters: Sequence[LoRALinear], personal: Mapping[str, Tensor]) -> None:
        """Load a client's personal factors into the adapters, beside the factors that travel."""
        self.set_factors(adapters, self.read_factors(adapters, BOTH) | dict(personal))


class ProductSums:
    """The sum of the clients' B_c A_c for each layer, kept as factors while these are smaller."""

    def __init__(self, method: LoraMethod, state: Tensors) -> None:
        self.method, self.state = method, state
        self.sums = [ProductSum(layer.out_features, layer.in_features) for layer in method.layers]
        self.weight, self.rank = 0.0, 0  # summed over all uploads

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's B and A, of its own rank."""
        Bs, As = self.method.split(upload)
        for total, B, A in zip(self.sums, Bs, As, strict=True):
            total.add(B, A, weight)
        self.weight += weight
        self.rank += len(As[0])


class CoMoments(ProductSums):
    """The means of B and A, and for each layer the co-moment of B and A about them.

    The error of averaging B and A separately, mean(B A) - mean(B) mean(A), is
    mean_c((B_c - mean B) (A_c - mean A)). The co-moment sum_c w_c (B_c - mean B) (A_c - mean A) is
    updated as in Welford's variance: each upload but the first adds one product of rank r.
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
    """A LoRA layer whose base weight is the pretrained one plus a residual, restorable exactly."""

    pretrained: Tensor

    def __init__(self, base: nn.Linear, B: Tensor, A: Tensor, scale: float) -> None:
        super().__init__(base, B, A, scale)
        self.register_buffer("pretrained", base.weight.detach(), persistent=False)

    def set_residual(self, residual: Tensor | None) -> None:
        """Set the base's weight to the pretrained one plus the residual; None: without."""
        weight = self.pretrained
        if residual is not None:
            weight = weight + residual.to(weight.device, weight.dtype)
        self.base.weight.data = weight

    def delta_weight(self) -> Tensor:
        """Compute scale B A plus the residual, (out, in)."""
        return super().delta_weight() + (self.base.weight - self.pretrained)


class ResidualLora(LoraMethod):
    """Add the residual to the pretrained weights; the state has {"residual", "residual-rank"}."""

    layer_class = ResidualLoRALinear
    ranks_differ = False  # may the residuals of the layers have different ranks?

    def empty_residual(self) -> Tensors:
        """Return the residual's tensors in the initial state: nothing was added."""
        ranks = torch.zeros(len(self.layers) if self.ranks_differ else 1, dtype=torch.int32)
        return {"residual": torch.zeros(0), "residual-rank": ranks}

    def broadcast_bytes(self, initial: Tensors, fraction: float) -> int:
        matrices = sum(layer.out_features * layer.in_features for layer in self.layers)
        return super().broadcast_bytes(initial, fraction) + 4 * matrices

    def load_residual(self, adapters: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        """Set every layer's weight to the pretrained one plus the residual."""
        for adapter, residual in zip(adapters, self.residuals(tensors), strict=True):
            adapter.set_residual(residual.dense() if residual.rank else None)

    def lora_factors(self, adapter: LoRALinear) -> None:
        return None

    def residuals(self, tensors: Mapping[str, Tensor]) -> list["Residual"]:
        """Return each layer's residual, read from checked tensors of the state."""
        number = len(self.layers) if self.ranks_differ else 1
        read = check_tensor(tensors, "residual-rank", (number,), torch.int32)
        ranks = read.expand(len(self.layers)).tolist()
        sizes = [Residual.size(*each) for each in zip(self.layers, ranks, strict=True)]
        flat = check_tensor(tensors, "residual", (sum(sizes),), torch.float32)
        return [
            Residual.read(*each) for each in zip(self.layers, ranks, flat.split(sizes), strict=True)
        ]

    def add_products(
        self, state: Tensors, products: Sequence[ProductSum], factor: float, rank: int | list[int]
    ) -> Tensors:
        """Return the residual of the next state: the old one plus factor * products.

        `rank` is the sum of the products' ranks in each layer, or a list of them if these differ.
        """
        ranks = state["residual-rank"] + torch.tensor(rank, dtype=torch.int32)
        each = zip(
            self.residuals(state), products, ranks.expand(len(self.layers)).tolist(), strict=True
        )
        added = [old.plus(product, factor, new_rank).flat() for old, product, new_rank in each]
        return {"residual": torch.cat(added), "residual-rank": ranks}


class Residual:
    """One layer's residual: factors U (out, k) and V (k, in), or the matrix itself."""

    def __init__(self, layer: Layer, rank: int, factors: tuple[Tensor, ...]) -> None:
        self.layer, self.rank, self.factors = layer, rank, factors

    @staticmethod
    def size(layer: Layer, rank: int) -> int:
        """Return the number of entries of the cheapest exact form."""
        out, inside = layer.out_features, layer.in_features
        return min(rank * (out + inside), out * inside)

    @classmethod
    def read(cls, layer: Layer, rank: int, flat: Tensor) -> "Residual":
        """Return the residual whose `flat` is this tensor."""
        out, inside = layer.out_features, layer.in_features
        if rank * (out + inside) < out * inside:
            U, V = flat.split([out * rank, rank * inside])
            return cls(layer, rank, (U.view(out, rank), V.view(rank, inside)))
        return cls(layer, rank, (flat.view(out, inside),))

    def flat(self) -> Tensor:
        """Return one flat tensor, for the state."""
        return flatten(self.factors)

    def dense(self) -> Tensor:
        """Return the (out, in) matrix."""
        if len(self.factors) == 1:
            return self.factors[0]
        U, V = self.factors
        return U @ V

    def plus(self, moment: ProductSum, factor: float, rank: int) -> "Residual":
        """Return this residual plus factor * moment, of total rank `rank`."""
        if self.size(self.layer, rank) < self.layer.out_features * self.layer.in_features:
            U, V = self.factors
            B, A = moment.factors()
            return Residual(self.layer, rank, (torch.cat([U, factor * B], 1), torch.cat([V, A])))
        return Residual(self.layer, rank, (factor * moment.dense() + self.dense(),))
