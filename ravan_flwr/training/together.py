"""Train several clients of a round in one pass through the network.

Clients share the frozen network and, with RAVAN, the bases B and A. Only small tensors differ: the
cores H, the factors of a LoRA, a trained classifier. So the batches of K clients are one batch, the
network computes it once, and each adapter applies the tensors of each client to its examples. The
loss is the sum of the clients' mean losses, so every client gets its own gradient. One Adam steps
them all, since it treats each number on its own.

A small network leaves a GPU nearly idle, and K clients then take about as long as one.

A batch with fewer examples than others, such as the last one of a pass, is padded by examples whose
loss does not count.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from ravan_flwr.adapters import LoRALinear, MultiHeadLinear
from ravan_flwr.methods.base import Method
from ravan_flwr.tasks.base import IGNORED, Batch, Encoded, Task
from ravan_flwr.tasks.extensions import Classification, task_with
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.local_steps import ClientWork, LocalResult, draw_batches, read_batches
from ravan_flwr.training.step import TrainingSettings, autocast, no_scaler


def reason_for_one_by_one(model: AdaptedModel, task: Task, settings: TrainingSettings) -> str:
    """Return why clients cannot be trained in one pass; "" if they can."""
    method, modules = model.method, [*model.network.modules()]
    config: dict[str, object] = cast(Any, model.network).config.to_dict()
    # CvT has a rate for each stage, in a list.
    dropout = tree_leaves([value for key, value in config.items() if "drop" in key])
    reasons = {
        "the method's clients change more than the factors of an adapter": any(
            type(adapter) not in (MultiHeadLinear, LoRALinear) for adapter in model.adapters
        ),
        "the method has parameters that stay with each client": method.personal is not None,
        "the method trains no adapter": not method.trainable_parameters(),
        "scoring=gradient computes a batch for each client": method.settings.scoring == "gradient",
        "the task has no loss by example": not isinstance(task, Classification),
        "precision=float16, micro-batch-size and batching=packed are for one client": (
            settings.precision == "float16"
            or settings.micro_batch_size is not None
            or settings.packing
        ),
        "the network normalises over the examples of a batch": any(
            isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.track_running_stats
            for module in modules
        ),
        "the network has dropout, whose draws are each client's own": any(
            isinstance(value, float) and value > 0 for value in dropout
        ),
        "the classifier has other layers than linear ones": (
            model.train_classifier and not _only_linear(model.network, model.classifier)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def train_together(
    model: AdaptedModel, task: Task, clients: Sequence[ClientWork]
) -> list[LocalResult | None]:
    """Train clients in one pass; None for a client that does not fit the first one.

    Clients fit if they train tensors of the same shapes, by the same settings. The results are
    those of `train_locally`, up to rounding.
    """
    began = time.perf_counter()
    results: list[LocalResult | None] = [None] * len(clients)
    first = clients[0]
    chosen = [
        number
        for number, client in enumerate(clients)
        if client.settings == first.settings and client.examples.table is first.examples.table
    ]
    with model.holding(first.broadcast):
        values = {number: _Values.read(model, clients[number]) for number in chosen}
        chosen = [n for n in chosen if values[n].shapes == values[chosen[0]].shapes]
        together = [clients[number] for number in chosen]
        with _joined(model, [values[number] for number in chosen]) as parameters:
            losses = _train(model, task, together, parameters)
        for place, number in enumerate(chosen):
            method = _prepare(model, clients[number])
            own = model.parameters()
            with torch.no_grad():
                for parameter, stack in zip(own, parameters, strict=True):
                    parameter.copy_(stack.view(len(chosen), *parameter.shape)[place])
            results[number] = LocalResult(model.upload(method), {}, losses[place])
    seconds = (time.perf_counter() - began) / len(chosen)
    return [result and replace(result, seconds=seconds) for result in results]


def _prepare(model: AdaptedModel, client: ClientWork) -> Method:
    """Load a client's broadcast and choose its heads; return the round's method."""
    model.load(client.broadcast)
    method = model.method.in_round(client.client_round.round)
    random = client.client_round.generator("heads")
    method.choose(model.adapters, client.fraction, random, _no_scores)
    return method


def _no_scores(*_: object) -> None:
    raise AssertionError("scores by gradients are computed client by client")


@dataclass(frozen=True)
class _Values:
    """Copies of a client's parameters before its steps, trained or not."""

    adapters: list[dict[str, Tensor]]  # by adapter and name
    heads: list[list[int] | None]  # that are trained, by adapter; None: all
    requires_grad: list[dict[str, bool]]
    classifier: list[Tensor]

    @classmethod
    def read(cls, model: AdaptedModel, client: ClientWork) -> "_Values":
        """Prepare a client, and copy what it would train."""
        _prepare(model, client)
        subsets = [getattr(adapter, "subset", None) for adapter in model.adapters]
        return cls(
            [{n: p.detach().clone() for n, p in _own(adapter)} for adapter in model.adapters],
            [None if subset is None else list(subset.heads) for subset in subsets],
            [
                {n: p.requires_grad for n, p in _own(subset or adapter)}
                for adapter, subset in zip(model.adapters, subsets, strict=True)
            ],
            [p.detach().clone() for p in model.classifier],
        )

    @property
    def shapes(self) -> object:
        """Return what has to be equal for clients to be computed together."""
        return (
            [{name: tensor.shape for name, tensor in own.items()} for own in self.adapters],
            [None if heads is None else len(heads) for heads in self.heads],
            self.requires_grad,
        )


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False)


@contextmanager
def _joined(model: AdaptedModel, values: Sequence[_Values]) -> Iterator[list[nn.Parameter]]:
    """Put the parameters of all clients into the network; yield those that are trained.

    Each is the clients' parameters one after the other, along the first dimension. They are in the
    order of `AdaptedModel.parameters`.
    """
    before = [dict(_own(adapter)) for adapter in model.adapters]
    linears = _linears(model.network, model.classifier) if model.train_classifier else {}
    trained: list[nn.Parameter] = []
    try:
        for position, adapter in enumerate(model.adapters):
            for name in before[position]:
                joined = torch.cat([own.adapters[position][name] for own in values])
                setattr(adapter, name, nn.Parameter(joined))
            owner, heads = adapter, [own.heads[position] for own in values]
            if heads[0] is not None:
                size = adapter.heads
                adapter.train_heads(
                    [k * size + i for k, own in enumerate(heads) for i in own or ()]
                )
                owner = adapter.subset
            for name, parameter in _own(owner):
                parameter.requires_grad_(values[0].requires_grad[position][name])
                trained += [parameter] if parameter.requires_grad else []
        classifier = {
            id(old): nn.Parameter(torch.cat([own.classifier[place] for own in values]))
            for place, old in enumerate(model.classifier)
        }
        for name, linear in linears.items():
            model.network.set_submodule(name, _ClientsLinear(linear, classifier, len(values)))
        yield [*trained, *(classifier.values() if model.train_classifier else ())]
    finally:
        for adapter, parameters in zip(model.adapters, before, strict=True):
            if hasattr(adapter, "subset"):
                adapter.train_all_heads()
            for name, parameter in parameters.items():
                setattr(adapter, name, parameter)
        for name, linear in linears.items():
            model.network.set_submodule(name, linear)


class _ClientsLinear(nn.Module):
    """A linear layer with a weight and a bias for each client."""

    def __init__(self, linear: nn.Linear, joined: dict[int, nn.Parameter], clients: int) -> None:
        super().__init__()
        self.clients = clients
        self.weight = joined[id(linear.weight)]  # (clients * out, in)
        self.bias = None if linear.bias is None else joined[id(linear.bias)]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(self.clients, -1, x.shape[-1])
        y = torch.bmm(x.reshape(self.clients, -1, x.shape[-1]), weight.mT)
        y = y if self.bias is None else y + self.bias.view(self.clients, 1, -1).to(y.dtype)
        return y.view(*x.shape[:-1], -1)


def _linears(network: nn.Module, parameters: Sequence[nn.Parameter]) -> dict[str, nn.Linear]:
    """Return the linear layers to which these parameters belong, by name."""
    ids = {id(parameter) for parameter in parameters}
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and any(id(p) in ids for p in module.parameters())
    }


def _only_linear(network: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether all these parameters belong to linear layers."""
    linears = _linears(network, parameters).values()
    found = {id(parameter) for linear in linears for parameter in linear.parameters()}
    return found == {id(parameter) for parameter in parameters}


def _train(
    model: AdaptedModel, task: Task, clients: Sequence[ClientWork],
    parameters: Sequence[nn.Parameter],
) -> list[float]:  # fmt: skip
    """Run the steps of all clients, and return their mean losses."""
    settings, number = clients[0].settings, len(clients)
    classification = task_with(Classification, task, "clients-per-pass")

    def backward(micro_batches: Sequence[Batch]) -> Tensor:
        """Add the gradients of the sum of the clients' mean losses, and return the losses."""
        (batch,) = micro_batches
        labels = batch["labels"]
        with autocast(model.device.type, settings.precision):
            logits = classification.logits(model.network, batch).float()
            by_example = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        sums = by_example.view(number, -1).sum(1)
        losses = sums / (labels != IGNORED).view(number, -1).sum(1)
        losses.sum().backward()
        return losses.detach()

    step = model.make_step(parameters, settings, no_scaler(model.device), backward, clients=number)
    model.set_training()
    examples, order = _joint_batches(task, clients)
    batches = read_batches(examples, task.collate, order, model.device)
    losses = [step([next(batches)]) for _ in range(settings.num_steps)]
    step.finish()
    means: list[float] = torch.stack(losses).mean(0).tolist()
    return means


def _joint_batches(
    task: Task, clients: Sequence[ClientWork]
) -> tuple["_Padded", Iterator[np.ndarray]]:
    """Return the examples of all clients, and the rows of each step's batch, without end."""
    every = [client.examples for client in clients]
    size = min(clients[0].settings.batch_size, max(map(len, every)))
    starts = np.cumsum([0, *map(len, every)])
    orders = [draw_batches(task, client) for client in clients]

    def joint() -> Iterator[np.ndarray]:
        while True:
            rows = [start + next(order) for start, order in zip(starts, orders, strict=False)]
            yield np.concatenate(
                [np.pad(own, (0, size - len(own)), constant_values=-1) for own in rows]
            )

    examples = np.concatenate([own.rows for own in every])
    return _Padded(every[0].table, examples), joint()


class _Padded(Encoded):
    """Examples of which row -1 is padding: some example, with a label that counts nothing."""

    def take(self, rows: np.ndarray) -> Batch:
        batch = super().take(np.maximum(rows, 0))
        labels, padding = batch["labels"], torch.from_numpy(rows < 0)
        return batch | {"labels": labels.masked_fill(padding.to(labels.device), IGNORED)}
