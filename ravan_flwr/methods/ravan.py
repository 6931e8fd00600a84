"""RAVAN: multi-head low-rank adaptation for federated fine-tuning (Raje et al.).

    y = W x + b + sum_i s_i B_i H_i A_i x

B_i and A_i are frozen, made from the seed on both sides, and never travel. The global
state is one array H of shape (layers, heads, r, r), zero at first. In a round a client with
a share of the budget picks floor(share * heads) heads in each layer, trains their H_i and
s_i (s_i = 1 at the start of every round), and uploads the products s_i H_i of those heads
and a bit for each head that says which. The server's new H_i is the plain mean over the
clients that trained head i of that layer, and the old H_i where nobody did (equation 8):
the mean of products, so that the aggregate's delta-weight is exactly the mean of theirs.

With `init = data-aware` the bases come from one calibration round instead (adapters/sketch.py):
half of the heads span the leading subspaces of the clients' summed gradients. Then B and A do
travel, once to each client.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, MultiHeadLinear, make_bases
from ravan_flwr.adapters.sketch import GradientSketch, Sketcher, fill_heads, watch_gradients
from ravan_flwr.methods.base import LocalWork, Method, Round, Settings, Tensors, check_rank
from ravan_flwr.methods.budgets import affordable
from ravan_flwr.methods.means import Means, add_to
from ravan_flwr.methods.multihead import fingerprint_of_bases, load_bases, multiheads
from ravan_flwr.methods.selection import best_heads, score_heads
from ravan_flwr.methods.tensors import check_form, check_names, check_tensor
from ravan_flwr.seeding import generator

log = logging.getLogger(__name__)


class Ravan(Method):
    """The state is {"H"}; an upload is {"H": products, "heads": packed bits}."""

    rank: int

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        self.heads = self.parts = settings.heads
        self.data_aware = settings.init == "data-aware"
        self.side = min(min(layer.out_features, layer.in_features) for layer in self.layers)
        self.rank = settings.rank or self._largest_rank()
        check_rank(self.rank, self.side)
        if settings.init in {"gram-schmidt", "data-aware"} and self.heads * self.rank > self.side:
            log.info(
                "%s: %d heads of rank %d are more than %d dimensions hold; bases are "
                "orthonormal in blocks of as many heads as fit",
                settings.init, self.heads, self.rank, self.side,
            )  # fmt: skip

    def _largest_rank(self) -> int:
        """The largest r with layers * heads * (r^2 + 1) parameters within the budget."""
        per_head = self.budget / (len(self.layers) * self.heads)
        rank = math.isqrt(max(0, math.floor(per_head) - self._scales_per_head()))
        if rank < 1:
            raise ValueError(
                f"heads = {self.heads}: the budget of {self.budget} trainable parameters has "
                f"room for {per_head:.2f} a head, expected at least 2; lower heads or set rank"
            )
        return min(rank, self.side)

    def _scales_per_head(self) -> int:
        return 1 if self.settings.scaling == "trained" else 0

    def trainable_parameters(self) -> int:
        return len(self.layers) * self.heads * (self.rank**2 + self._scales_per_head())

    def upload_shapes(self, share: float) -> dict[str, tuple[int, ...]]:
        return {"H": (len(self.layers) * affordable(share, self.heads), self.rank, self.rank)}

    def upload_bytes(self, share: float) -> int:
        return super().upload_bytes(share) + math.ceil(len(self.layers) * self.heads / 8)

    def effective_rank_bound(self) -> int:
        return min(self.heads * self.rank, self.side)

    def adapt(self, layer: Layer, linear: nn.Linear) -> MultiHeadLinear:
        if linear.weight.is_meta:  # a plan needs shapes only
            shape = (self.heads, self.rank)
            B = torch.empty(self.heads, layer.out_features, self.rank, device="meta")
            A = torch.empty(*shape, layer.in_features, device="meta")
            return MultiHeadLinear(linear, B, A, self.settings.layer_form)
        # Data-aware bases arrive later; until then there must be some.
        B, A = make_bases(
            "gram-schmidt" if self.data_aware else self.settings.init,
            heads=self.heads,
            rank=self.rank,
            out_features=layer.out_features,
            in_features=layer.in_features,
            seed=self.settings.seed,
            layer=layer.name,
            scale=self.settings.init_scale,
        )
        return MultiHeadLinear(linear, B, A, self.settings.layer_form)

    # The calibration round of `init = data-aware`.

    def _sketchers(self) -> list[Sketcher]:
        """Half of the heads, at least one, get leading directions, as many as the layer holds."""
        sketchers = []
        for layer in self.layers:
            fit = min(layer.out_features, layer.in_features) // self.rank
            leading = min(max(1, self.heads // 2), fit) * self.rank
            sketchers.append(Sketcher(layer, leading, self.settings.seed))
        return sketchers

    def open_calibration(self, sums: Callable[[Tensors], Round] = Means) -> "SketchedBases | None":
        if not self.data_aware:
            return None
        return SketchedBases(self._sketchers(), self.heads, self.rank, self.settings, sums)

    def calibration_bytes(self) -> tuple[int, int]:
        if not self.data_aware:
            return 0, 0
        sides = sum(layer.out_features + layer.in_features for layer in self.layers)
        sketches = sum(sketcher.size for sketcher in self._sketchers())
        return 4 * sketches, 4 * self.heads * self.rank * sides

    def calibrate(self, adapters: Sequence[nn.Module], work: LocalWork) -> Tensors:
        layers = multiheads(adapters)
        sketches = [
            GradientSketch(sketcher, layer.H.device)
            for sketcher, layer in zip(self._sketchers(), layers, strict=True)
        ]
        with ExitStack() as stack:
            for layer, sketch in zip(layers, sketches, strict=True):
                stack.enter_context(watch_gradients(layer, sketch.see))
            for _ in range(self.settings.calibration_steps):
                work.backward()
        flat = torch.cat([sketch.flat() for sketch in sketches])
        return {"sketch": flat / self.settings.calibration_steps}

    def load_fixed(self, adapters: Sequence[nn.Module], fixed: Mapping[str, Tensor]) -> None:
        load_bases(adapters, fixed)

    # The server's half.

    def initial_state(self, adapters: Sequence[nn.Module]) -> Tensors:  # noqa: ARG002
        return {"H": torch.zeros(len(self.layers), self.heads, self.rank, self.rank)}

    def check(self, upload: Mapping[str, Tensor], share: float) -> None:
        check_names(upload, ["H", "heads"])
        total = len(self.layers) * self.heads
        packed = check_form(upload, "heads", [math.ceil(total / 8)], torch.uint8)
        bits = _unpack_bits(packed)
        if bits[total:].any():
            raise ValueError(f"heads marks a head beyond the last of {total}")
        chosen = bits[:total].view(len(self.layers), self.heads)
        number = affordable(share, self.heads)
        counts = chosen.sum(1).tolist()
        if self.settings.selection == "layer" and set(counts) != {number}:
            raise ValueError(f"heads marks {counts} heads by layer, expected {number} in each")
        if sum(counts) != number * len(self.layers):
            raise ValueError(
                f"heads marks {sum(counts)} heads, expected {number * len(self.layers)}"
            )
        check_form(upload, "H", [sum(counts), self.rank, self.rank], torch.float32)

    def heads_in(self, upload: Mapping[str, Tensor]) -> list[list[int]]:
        bits = _unpack_bits(upload["heads"])[: len(self.layers) * self.heads]
        return [row.nonzero().flatten().tolist() for row in bits.view(-1, self.heads)]

    def filled(self, upload: Mapping[str, Tensor], state: Tensors) -> Tensors:
        H = torch.full_like(state["H"], torch.nan).flatten(0, 1)
        H[_unpack_bits(upload["heads"])[: len(H)]] = upload["H"]
        return {"H": H.view_as(state["H"])}

    def start_of(self, upload: Mapping[str, Tensor], sent: Tensors) -> Tensors:
        H = sent["H"].flatten(0, 1)
        return {"H": H[_unpack_bits(upload["heads"])[: len(H)]]}

    def open_round(self, state: Tensors) -> "HeadMeans":
        return HeadMeans(state["H"])

    # The client's half.

    def load(self, adapters: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> None:
        H = check_tensor(
            tensors, "H", [len(self.layers), self.heads, self.rank, self.rank], torch.float32
        )
        with torch.no_grad():
            for adapter, layer_H in zip(multiheads(adapters), H, strict=True):
                adapter.train_all_heads()
                adapter.H.copy_(layer_H)
                adapter.s.fill_(1.0)

    def choose(
        self,
        adapters: Sequence[nn.Module],
        share: float,
        random: torch.Generator,
        backward: Callable[[], object],
    ) -> None:
        layers = multiheads(adapters)
        number = affordable(share, self.heads)
        if number < self.heads:
            scores = score_heads(self.settings.scoring, layers, random, backward)
            chosen = best_heads(scores, number, self.settings.selection, random)
            for layer, heads in zip(layers, chosen, strict=True):
                layer.train_heads(heads)
        if self.settings.scaling == "constant":
            for layer in layers:
                (layer.subset or layer).s.requires_grad_(False)

    def upload(self, adapters: Sequence[nn.Module]) -> Tensors:
        layers = multiheads(adapters)
        chosen = torch.zeros(len(layers), self.heads, dtype=torch.bool)
        for row, layer in zip(chosen, layers, strict=True):
            row[layer.trained_heads()] = True
        products = torch.cat([layer.products() for layer in layers])
        return {"H": products.cpu(), "heads": _pack_bits(chosen.flatten())}

    def head_norms(self, adapters: Sequence[nn.Module]) -> list[list[float]]:
        norms = []
        for layer in multiheads(adapters):
            cores = layer.s[:, None, None] * layer.H
            # |B C A|^2 = sum((B^T B C) * (C A A^T)), all of side r
            left = torch.bmm(layer.B.mT @ layer.B, cores)
            right = torch.bmm(cores, layer.A @ layer.A.mT)
            norms.append((left * right).sum((1, 2)).clamp(min=0).sqrt().tolist())
        return norms

    def lora_factors(self, adapter: nn.Module) -> tuple[Tensor, Tensor]:
        (layer,) = multiheads([adapter])
        with torch.no_grad():
            B = torch.cat(list(layer.s[:, None, None] * (layer.B @ layer.H)), dim=1)
        return B, layer.A_stack

    def fingerprint(self, adapters: Sequence[nn.Module]) -> list[float]:
        return fingerprint_of_bases(adapters)


METHOD = Ravan


class SketchedBases:
    """The mean of the clients' sketches, and the bases that it gives."""

    def __init__(
        self,
        sketchers: list[Sketcher],
        heads: int,
        rank: int,
        settings: Settings,
        sums: Callable[[Tensors], Round],
    ) -> None:
        self.sketchers, self.heads, self.rank, self.settings = sketchers, heads, rank, settings
        self.size = sum(sketcher.size for sketcher in sketchers)
        self.sums = sums({"sketch": torch.zeros(self.size)})

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        check_names(upload, ["sketch"])
        check_tensor(upload, "sketch", [self.size], torch.float32)
        self.sums.add(upload, weight)

    def close(self) -> tuple[Tensors, Tensors]:
        Bs, As = [], []
        flats = self.sums.close()["sketch"].split([sketcher.size for sketcher in self.sketchers])
        for sketcher, flat in zip(self.sketchers, flats, strict=True):
            random = generator(self.settings.seed, "complement", sketcher.layer.name)
            U, V = sketcher.subspaces(flat)
            Bs.append(fill_heads(U, self.heads, self.rank, random).flatten())
            As.append(fill_heads(V, self.heads, self.rank, random).mT.flatten())
        scale = self.settings.init_scale
        fixed = {"B": (scale * torch.cat(Bs)).float(), "A": (scale * torch.cat(As)).float()}
        return fixed, {}


class HeadMeans:
    """A sum and a weight for each (layer, head)."""

    def __init__(self, H: Tensor) -> None:
        self.old = H
        self.sum = torch.zeros_like(H, dtype=torch.float64).flatten(0, 1)
        self.weight = torch.zeros(len(self.sum), dtype=torch.float64)

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Products of some heads, with the bits that say which."""
        chosen = _unpack_bits(upload["heads"])[: len(self.weight)]
        at = 0
        for start, number in _runs(chosen):
            add_to(self.sum[start : start + number], upload["H"][at : at + number], weight)
            at += number
        self.weight[chosen] += weight

    def close(self) -> Tensors:
        """H, with the mean of every head that somebody trained."""
        trained = self.weight > 0
        H = self.old.flatten(0, 1).clone()
        H[trained] = (self.sum[trained] / self.weight[trained, None, None]).float()
        return {"H": H.view_as(self.old)}


def _runs(chosen: Tensor) -> Iterator[tuple[int, int]]:
    """Where consecutive ones begin, and how many they are."""
    padded = torch.nn.functional.pad(chosen.to(torch.int8), (1, 1))
    edges = padded.diff().nonzero().flatten().tolist()
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield start, end - start


_BIT = 1 << torch.arange(8)


def _pack_bits(bits: Tensor) -> Tensor:
    """Booleans to bytes, the first in the lowest bit."""
    padded = torch.zeros(math.ceil(len(bits) / 8) * 8, dtype=torch.int64)
    padded[: len(bits)] = bits
    return (padded.view(-1, 8) * _BIT).sum(1).to(torch.uint8)


def _unpack_bits(packed: Tensor) -> Tensor:
    return (packed.long()[:, None] & _BIT).bool().flatten()
