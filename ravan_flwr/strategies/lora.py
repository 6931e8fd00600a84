"""Aggregate PEFT's LoRA by the baselines' rules.

Global arrays of a layer: `<layer>.lora_A.weight` (r, in) and `<layer>.lora_B.weight` (out, r). A
reply has the arrays that the method's clients train. Where ranks may differ, it has the first ranks
that the client's budget fraction allows. FedEx-LoRA's global arrays also have the residuals added
to the weights so far, as the method's state has them (methods/lora.py): `residual`, of all layers
in the order of their names, and `residual-rank`. A client adds them, times its LoRA's scaling.
FedMomentum's have the same.
"""

import re
from typing import ClassVar

from torch import Tensor

from ravan_flwr.adapters import Layer
from ravan_flwr.methods import get_method
from ravan_flwr.methods.base import Settings, Tensors
from ravan_flwr.methods.lora import LoraMethod, ResidualLora
from ravan_flwr.methods.tensors import flatten
from ravan_flwr.strategies.base import RESIDUAL, MethodStrategy, checked_array, layers_in

# Arrays of a layer whose plain mean is not what the method's rule would make of it.
_OTHER_LORA = re.compile(r"\.lora_(embedding_[AB]|magnitude_vector)\b")


class LoraArrays:
    """Translate the arrays of PEFT's LoRA."""

    method: LoraMethod

    def __init__(self, arrays: Tensors, method: str, *, seed: int, server_round: int) -> None:
        if others := sorted(name for name in arrays if _OTHER_LORA.search(name)):
            raise ValueError(
                f"initial_arrays: got {others[0]!r}, of a DoRA or a LoRA of an embedding, of which "
                f"{method} has no rule, expected LoRAs of linear layers; leave use_dora out, take "
                "embeddings out of target_modules, or use Flower's FedAvg, which takes plain means"
            )
        self.layers = layers_in(arrays, ".lora_A.weight", "LoraConfig")
        Bs, As = ([_factor(arrays, layer, name) for layer in self.layers] for name in "BA")
        rank = self.rank = len(As[0])
        for layer, B, A in zip(self.layers, Bs, As, strict=True):
            if A.ndim != 2 or B.ndim != 2 or len(A) != rank or B.shape[1] != rank:
                raise ValueError(
                    f"initial_arrays: {layer} has lora_A {tuple(A.shape)} and lora_B "
                    f"{tuple(B.shape)}, expected (r, in) and (out, r) with r = {rank} in every "
                    "layer; leave rank_pattern out, and adapt linear layers only"
                )
        sides = [
            Layer(layer, len(B), A.shape[1])
            for layer, B, A in zip(self.layers, Bs, As, strict=True)
        ]
        round_method = get_method(method)(Settings(seed=seed, rank=rank), sides, 0).in_round(
            server_round
        )
        assert isinstance(round_method, LoraMethod)
        self.method = round_method
        self.trained = round_method.sent
        fixed = set("BA") - set(round_method.in_state)  # sent, and never trained
        factors = (f"{layer}.lora_{n}.weight" for layer in self.layers for n in "AB")
        self.names = frozenset([*factors, *RESIDUAL])
        self.fixed = frozenset(f"{layer}.lora_{n}.weight" for layer in self.layers for n in fixed)
        self._factors = round_method.pack(Bs, As)
        self.state = {name: self._factors[name] for name in round_method.in_state}
        if isinstance(round_method, ResidualLora):
            check_residual(arrays)
            sent = {name: arrays[name] for name in RESIDUAL if name in arrays}
            self.state |= sent or round_method.empty_residual()

    def read(self, upload: Tensors) -> tuple[Tensors, float]:
        """Return the factors that the method's clients train, as one tensor each, and r / rank."""
        rank = int(_factor(upload, self.layers[0], "B").shape[-1])
        min_rank = self.rank if self.method.budget_units is None else 1
        if not min_rank <= rank <= self.rank:
            expected = f"{self.rank}" if min_rank == self.rank else f"1 to {self.rank}"
            raise ValueError(f"its LoRA has rank {rank}, expected {expected}")
        parts: dict[str, list[Tensor]] = {name: [] for name in self.trained}
        for layer in self.method.layers:
            sides = {"B": (layer.out_features, rank), "A": (rank, layer.in_features)}
            for name, factors in parts.items():
                factors.append(
                    checked_array(upload, f"{layer.name}.lora_{name}.weight", sides[name])
                )
        extra = sorted(upload.keys() - {f"{x}.lora_{n}.weight" for x in self.layers for n in parts})
        if extra:
            raise ValueError(
                f"array {extra[0]!r} is no part of a reply, expected "
                f"{' and '.join(f'lora_{name}' for name in parts)} alone; freeze it on the clients"
            )
        return {name: flatten(factors) for name, factors in parts.items()}, rank / self.rank

    def write(self, state: Tensors) -> Tensors:
        """Return the factors of every layer, and the residuals of the weights."""
        factors = dict(zip("BA", self.method.split(self._factors | state), strict=True))
        arrays = {
            f"{layer}.lora_{name}.weight": factor
            for name in "BA"
            if name in state
            for layer, factor in zip(self.layers, factors[name], strict=True)
        }
        if isinstance(self.method, ResidualLora) and int(state["residual-rank"]):
            arrays |= {name: state[name] for name in RESIDUAL}
        return arrays


def check_residual(arrays: Tensors) -> None:
    """Raise ValueError if arrays have residuals without their rank, or vice versa."""
    missing = [name for name in RESIDUAL if name not in arrays]
    if len(missing) == 1:
        raise ValueError(
            f"array {missing[0]!r} is missing, expected both of {', '.join(RESIDUAL)} or none; "
            "give the arrays as the strategy sent them"
        )


def _factor(arrays: Tensors, layer: str, name: str) -> Tensor:
    """Return a factor of a layer; ValueError if it is missing."""
    if f"{layer}.lora_{name}.weight" not in arrays:
        raise ValueError(f"array '{layer}.lora_{name}.weight' is missing")
    return arrays[f"{layer}.lora_{name}.weight"]


class LoraStrategy(MethodStrategy):
    """Aggregate PEFT's LoRA by a baseline's rule. Subclasses name the method.

    FedIT has no strategy here: it is Flower's `FedAvg` over the same arrays.

    Args:
        **fedavg: The arguments of `MethodStrategy`, and those of `FedAvg`, by name.
    """

    def translate(self, arrays: Tensors, server_round: int) -> LoraArrays:
        """Return the translation of the global arrays for this round."""
        return LoraArrays(arrays, self.method, seed=self.seed, server_round=server_round)


class FedExLoraStrategy(LoraStrategy):
    """Average B and A, and add the averaging error to the pretrained weight (Singhal et al., 2024).

    The error is sent as a residual: `load_arrays` adds it to the weight, `restore` removes it.
    """

    method: ClassVar[str] = "fedex-lora"


class FedMomentumStrategy(LoraStrategy):
    """Keep the leading part of the mean product in B and A, add the rest to W (Yan et al., 2026).

    The rest is sent as a residual: `load_arrays` adds it to the weight, `restore` removes it.
    """

    method: ClassVar[str] = "fedmomentum"


class FFALoraStrategy(LoraStrategy):
    """Average B, and keep A as in the initial arrays (Sun et al., 2024).

    Clients must freeze A: `parameter.requires_grad_(False)` where "lora_A" is in the name.
    """

    method: ClassVar[str] = "ffa-lora"


class HetLoraStrategy(LoraStrategy):
    """Average LoRAs of different ranks, weighted by the norms of their products (Cho et al., 2024).

    Clients train the first ranks; `choose` sets their number from the budget fraction.
    """

    method: ClassVar[str] = "hetlora"


class FlexLoraStrategy(LoraStrategy):
    """Decompose the mean of the products of LoRAs of different ranks (Bai et al., 2024).

    Clients train the first ranks; `choose` sets their number from the budget fraction.
    """

    method: ClassVar[str] = "flexlora"


class RaFLoraStrategy(LoraStrategy):
    """Average the products rank by rank, over the clients that have a rank (Wu et al., 2026)."""

    method: ClassVar[str] = "raflora"


class FedSVDStrategy(LoraStrategy):
    """Average B, and recompute B and A by an SVD of their product (Lee et al., 2025).

    Clients must freeze A, which changes from round to round.
    """

    method: ClassVar[str] = "fedsvd"


class FedRotLoraStrategy(LoraStrategy):
    """Align the clients' factors by rotations before averaging them (Zhang et al., 2026)."""

    method: ClassVar[str] = "fedrot-lora"


class LoraFairStrategy(LoraStrategy):
    """Average B and A, and correct B for the averaging error (Bian et al., 2025)."""

    method: ClassVar[str] = "lora-fair"
