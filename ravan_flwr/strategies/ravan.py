"""Average the heads of RAVAN, and the single head of Fed-SB, under the names of PEFT's tuner.

Global arrays of a layer: `<layer>.ravan_H` (heads, r, r), and `<layer>.ravan_s` (heads,) where the
tuner trains scales. A reply has, for each layer,

    <layer>.ravan_H       (selected, r, r)    the products s_i H_i of the trained heads
    <layer>.ravan_heads   (selected,)         the numbers of these heads, counted from 0

A whole PEFT state dict is a valid reply, too: without `ravan_heads` all heads count as trained, in
order, and `ravan_s` (selected,), if present, is multiplied into `ravan_H`.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ravan_flwr.adapters import Layer
from ravan_flwr.messages.plain_text import shown
from ravan_flwr.methods import get_method
from ravan_flwr.methods.base import Settings, Tensors
from ravan_flwr.methods.tensors import pack_bits
from ravan_flwr.strategies.base import MethodStrategy, checked_array, layers_in

HEADS = "ravan_heads"
BASES = ("ravan_A", "ravan_B")  # sent where the tuner saves them


class RavanArrays:
    """Translate the arrays of PEFT's RAVAN tuner."""

    def __init__(self, arrays: Tensors, method: str, settings: dict[str, Any]) -> None:
        self.layers = layers_in(arrays, ".ravan_H", "RavanConfig")
        shapes = {layer: tuple(arrays[f"{layer}.ravan_H"].shape) for layer in self.layers}
        shape = shapes[self.layers[0]]
        for layer, sides in shapes.items():
            if len(sides) != 3 or sides[1] != sides[2] or sides != shape:
                raise ValueError(
                    f"initial_arrays: {layer}.ravan_H has shape {sides}, expected (heads, r, r) as "
                    f"the first layer's {shape}; give all layers the same heads and rank"
                )
        self.heads, self.rank, _ = shape
        parts = (*BASES, "ravan_H", "ravan_s", HEADS)
        self.names = frozenset(f"{layer}.{part}" for layer in self.layers for part in parts)
        self.fixed = frozenset(f"{layer}.{part}" for layer in self.layers for part in BASES)
        self.scaled = [f"{layer}.ravan_s" for layer in self.layers if f"{layer}.ravan_s" in arrays]
        # The server's result does not depend on a layer's in and out features.
        side = self.heads * self.rank
        method_settings = Settings(
            rank=self.rank, heads=self.heads, init="normal", selection="any", **settings
        )
        square_layers = [Layer(layer, side, side) for layer in self.layers]
        self.method = get_method(method)(method_settings, square_layers, 0)
        H = torch.stack([self._all_heads(arrays, layer) for layer in self.layers])
        self.state = {"H": H if self.method.budget_units else H[:, 0]}

    def _all_heads(self, arrays: Tensors, layer: str) -> Tensor:
        """Return the products of all heads, (heads, r, r)."""
        products, heads = self._products(arrays, layer)
        if heads != list(range(self.heads)):
            raise ValueError(f"{layer} has heads {heads}, expected all {self.heads} of them")
        return products

    def _products(self, arrays: Tensors, layer: str) -> tuple[Tensor, list[int]]:
        """Return a layer's products (selected, r, r), sorted by head, and their heads' numbers."""
        index = arrays.get(f"{layer}.{HEADS}", torch.arange(self.heads))
        heads = self._heads(f"{layer}.{HEADS}", index)
        H = checked_array(arrays, f"{layer}.ravan_H", (len(heads), self.rank, self.rank))
        if f"{layer}.ravan_s" in arrays:
            H = checked_array(arrays, f"{layer}.ravan_s", (len(heads),))[:, None, None] * H
        return H[torch.tensor(heads).argsort()], sorted(heads)

    def _heads(self, name: str, index: Tensor) -> list[int]:
        """Return a reply's head numbers; ValueError unless they are valid and unique."""
        if index.ndim != 1 or index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(
                f"array {name!r} is {index.dtype} {tuple(index.shape)}, expected whole numbers in "
                "one dimension"
            )
        heads: list[int] = index.tolist()
        if unknown := [head for head in heads if not 0 <= head < self.heads]:
            raise ValueError(
                f"array {name!r} has the unknown head {unknown[0]}, expected 0 to {self.heads - 1}"
            )
        if len(set(heads)) != len(heads):
            raise ValueError(f"array {name!r} has a head twice: {shown(heads)}, expected each once")
        return heads

    def read(self, upload: Tensors) -> tuple[Tensors, float]:
        """Return {"H": products, "heads": packed bits}, and 1.0: a client may train any number."""
        if self.method.budget_units is None:  # Fed-SB: one head, always whole
            return {"H": torch.cat([self._all_heads(upload, layer) for layer in self.layers])}, 1.0
        chosen = torch.zeros(len(self.layers), self.heads, dtype=torch.bool)
        products = []
        for row, layer in zip(chosen, self.layers, strict=True):
            of_layer, heads = self._products(upload, layer)
            row[heads] = True
            products.append(of_layer)
        return {"H": torch.cat(products), "heads": pack_bits(chosen.flatten())}, 1.0

    def write(self, state: Tensors) -> Tensors:
        """Return H of every layer, and scales of one: the products include the scales."""
        H = state["H"].view(len(self.layers), self.heads, self.rank, self.rank)
        arrays = {
            f"{layer}.ravan_H": of_layer for layer, of_layer in zip(self.layers, H, strict=True)
        }
        return arrays | {name: torch.ones(self.heads) for name in self.scaled}


class RavanStrategy(MethodStrategy):
    """Average each head over the replies that trained it (RAVAN, equation 8).

    A head that no reply trained is unchanged. The products s_i H_i are averaged, so the weight of
    the mean is exactly the mean of the clients' weights. All other arrays, such as a classifier of
    `modules_to_save`, are averaged as `FedAvg` does.

    With `initial_arrays = ArrayRecord(get_peft_model_state_dict(model))` of a model with
    `RavanConfig`, `start` is that of Flower:

        strategy = RavanStrategy(fraction_train=0.5)
        result = strategy.start(grid, initial_arrays, num_rounds=10)

    Args:
        head_mean: str (default: "trained"). "trained": average a head over the replies that trained
            it, as in the paper. "all": average over all replies; a reply that did not train a head
            counts with the head that was sent.
        weighted_by_key: str (default: "num-examples"). The metric by which metrics are weighted,
            and, with `weighting="examples"`, the replies.
        **kwargs: The arguments of `MethodStrategy`, and those of `FedAvg`, by name.
    """

    method: ClassVar[str] = "ravan"

    def __init__(
        self, *, head_mean: str = "trained", weighted_by_key: str = "num-examples", **kwargs: Any
    ) -> None:
        super().__init__(weighted_by_key=weighted_by_key, **kwargs)
        if head_mean not in ("trained", "all"):
            raise ValueError(
                f"head_mean = {head_mean!r}: expected 'trained' (over the replies that trained a "
                "head) or 'all'; leave it out for the paper's"
            )
        self.head_mean = head_mean

    def translate(self, arrays: Tensors, server_round: int) -> RavanArrays:  # noqa: ARG002
        """Return the translation of the global arrays."""
        return RavanArrays(arrays, self.method, {"head_mean": self.head_mean})


class FedSBStrategy(MethodStrategy):
    """Average the core of Fed-SB: RAVAN with one head, which every client trains whole.

    Clients use `RavanConfig(num_heads=1, trainable_scales=False)`. Fed-SB computes its bases in a
    first round of full fine-tuning, which this strategy does not have. Pass them in the initial
    arrays (`save_bases=True`), or use the bases of the seed. The app's `method=fed-sb` has that
    round.

    Args:
        **fedavg: The arguments of `MethodStrategy`, and those of `FedAvg`, by name.
    """

    method: ClassVar[str] = "fed-sb"

    def translate(self, arrays: Tensors, server_round: int) -> RavanArrays:  # noqa: ARG002
        """Return the translation of the global arrays; ValueError unless layers have one head."""
        translated = RavanArrays(arrays, self.method, {})
        if translated.heads != 1:
            raise ValueError(
                f"initial_arrays: {translated.heads} heads in a layer, expected 1 for Fed-SB; set "
                "num_heads=1, or use RavanStrategy"
            )
        return translated
