"""Run a federated method in Flower's own loop: translate arrays by name, aggregate, translate back.

    server                                      client (client.py, or other code)
    configure_train: arrays by name   ------>   load_arrays, choose
                                                ... any training loop ...
    aggregate_train                   <------   collect_arrays

The names are those of PEFT's `get_peft_model_state_dict`. The aggregation is that of the app
(server/aggregation.py), so that both give the same numbers. A strategy needs no model: it reads
layers, heads and ranks from the shapes of the arrays. It keeps nothing but the arrays that it sent
last, and the moments of its server optimiser.
"""

import math
import numbers
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from logging import getLogger
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from ravan_flwr.messages.plain_text import shown
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER, Method, Tensors
from ravan_flwr.methods.tensors import check_form, flatten
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.replies import above_zero, as_value_error
from ravan_flwr.server.update_norm_check import UpdateNormCheck

log = getLogger("flwr")  # beside the lines of FedAvg about the same replies

MOST_CHANGE = 1e15  # the norm of an update; products of two such changes are finite in float32
MOST_WEIGHT = 2.0**53  # of a reply; no product with a float32 overflows


class Arrays(Protocol):
    """Translate between the arrays of a PEFT model, by name, and the tensors of a method."""

    @property
    def method(self) -> Method:
        """Return the method, as it is in this round."""

    state: Tensors  # of the method, as the arrays have it
    names: frozenset[str]  # of the method's arrays, in a broadcast or in a reply
    fixed: frozenset[str]  # those of them that travel with every broadcast as they are

    def read(self, upload: Tensors) -> tuple[Tensors, float]:
        """Return a reply as the method's upload, and the budget fraction that it shows."""

    def write(self, state: Tensors) -> Tensors:
        """Return the arrays that a new state changes, by name."""


class MethodStrategy(FedAvg):
    """Run one federated method in the loop of Flower's `FedAvg`.

    Subclasses name the method. All that `FedAvg` documents holds: fractions, minimum numbers of
    nodes, metrics functions, keys and `start`. A malformed reply is rejected with a warning, and
    counts neither for the arrays nor for the metrics. Where all replies are rejected before any was
    used, `start` ends with a ValueError: then the clients are not built as the server is.

    Args:
        server_optimizer: A strategy of Flower, such as `FedAdam(eta=0.01)`. It takes the step from
            the arrays that were sent to their new mean, as it does for the mean of `FedAvg`.
        max_update_norm: The largest norm of an update that is accepted.
        seed: Seed of what the server itself draws (FlexLoRA: directions for unused ranks).
        **fedavg: Every argument of `FedAvg`, by name.

    Attributes:
        rejected: By round and node id, the reason for which a reply was rejected.
    """

    method: ClassVar[str]  # one of METHODS

    def __init__(
        self, *, server_optimizer: FedAvg | None = None, max_update_norm: float = MOST_CHANGE,
        seed: int = 0, **fedavg: Any,
    ) -> None:  # fmt: skip
        super().__init__(**fedavg)
        self.optimizer = server_optimizer
        if server_optimizer is not None:
            where = f"server_optimizer = {server_optimizer!r}: "
            if not METHODS[self.method].averages:
                raise ValueError(
                    f"{where}the next arrays of {self.method} are no mean of the replies, expected "
                    "none; leave it out, or use RavanStrategy, FedSBStrategy, FFALoraStrategy or "
                    "FedRotLoraStrategy"
                )
            if not isinstance(server_optimizer, FedAvg):
                raise ValueError(f"{where}expected a strategy of Flower; pass FedAdam(), say")
            server_optimizer.fraction_train = 0.0  # it samples no nodes itself
        is_number = isinstance(max_update_norm, numbers.Real)
        if not is_number or not 0 < max_update_norm <= MOST_CHANGE:
            raise ValueError(
                f"max_update_norm = {max_update_norm!r}: expected a number above 0 and at most "
                f"{MOST_CHANGE:g}; leave it out to accept every finite update"
            )
        self.max_update_norm, self.seed = max_update_norm, seed
        self.rejected: dict[int, dict[int, str]] = {}
        self._sent: tuple[ArrayRecord, Tensors, Arrays] | None = None
        self._used = False  # whether any reply was

    @abstractmethod
    def translate(self, arrays: Tensors, server_round: int) -> Arrays:
        """Read the layers and the method's state out of the global arrays, by name."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the arrays to the sampled nodes; ValueError if they are not those of the method."""
        tensors = {name: _tensor(name, array) for name, array in arrays.items()}
        own = self.translate(tensors, server_round)
        self._sent = arrays, tensors, own
        if self.optimizer is not None:
            extras = {name: tensor for name, tensor in tensors.items() if name not in own.names}
            trained = _in_order(extras | own.write(own.state))
            self.optimizer.configure_train(server_round, trained, ConfigRecord(), grid)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next arrays and the mean metrics; (None, None) without a usable reply."""
        if self._sent is None:
            raise RuntimeError(
                "aggregate_train: got replies before anything was sent, expected configure_train "
                "first; call start, or configure_train"
            )
        answered, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        sent, tensors, own = self._sent
        method = own.method
        extras = {name: tensor for name, tensor in tensors.items() if name not in own.names}
        state = own.state | ({CLASSIFIER: flatten([*extras.values()])} if extras else {})
        sums = Aggregate(method, state, UpdateNormCheck(self.max_update_norm))
        counted = Counter(map(_layout, answered))
        usual = max(sorted(counted), key=counted.__getitem__, default=())
        accepted: list[RecordDict] = []
        for reply in answered:
            try:
                with as_value_error():
                    weight = self._weight(reply, usual)
                    upload, fraction = _read(reply, own, extras)
                    sums.offer(upload, fraction, weight)
            except ValueError as error:
                node = reply.metadata.src_node_id
                self.rejected.setdefault(server_round, {})[node] = str(error)
                log.warning("round %d: reply of node %d rejected: %s", server_round, node, error)
            else:
                accepted.append(reply.content)
        if answered and not accepted:
            message = f"round {server_round}: all {len(answered)} replies were rejected"
            if not self._used:
                raise ValueError(
                    f"{message}, expected at least one that can be used; the last of them: "
                    f"{self.rejected[server_round][answered[-1].metadata.src_node_id]}; build the "
                    "clients' models as the server does, and send what collect_arrays returns"
                )
            log.warning("%s, the arrays stay as they were", message)
        if not accepted:
            return None, None
        self._used = True
        metrics = self.train_metrics_aggr_fn(accepted, self.weighted_by_key)
        try:
            new = sums.close()
        except ValueError as error:
            log.warning("round %d has no effect, the arrays stay: %s", server_round, error)
            return None, metrics
        changed = own.write(new) | _unflattened(new.get(CLASSIFIER), extras)
        if self.optimizer is not None:
            changed |= self._stepped(server_round, changed)
        return _record(sent, changed, own), metrics

    # The server's optimiser, which sees one reply: the mean.

    def _stepped(self, server_round: int, mean: Tensors) -> Tensors:
        """Take the optimiser's step from what was sent to the mean."""
        assert self.optimizer is not None
        weight = MetricRecord({self.optimizer.weighted_by_key: 1.0})
        content = RecordDict({"arrays": _in_order(mean), "metrics": weight})
        reply = Message(content, dst_node_id=0, message_type="train")
        new, _ = self.optimizer.aggregate_train(server_round, [reply])
        assert new is not None
        return {name: torch.from_numpy(array.numpy()) for name, array in new.items()}

    # Replies.

    def _weight(self, reply: Message, usual: object) -> float:
        """Return the weight of a reply; ValueError unless its metrics are like most replies'."""
        if _layout(reply) != usual:
            raise ValueError(f"its metrics are {shown(_layout(reply))}, most have {shown(usual)}")
        (metrics,) = reply.content.metric_records.values()
        return above_zero(metrics, self.weighted_by_key, MOST_WEIGHT)


def _in_order(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Make the record that the server's optimiser works on, always in the same order."""
    return ArrayRecord({name: Array(tensors[name].numpy()) for name in sorted(tensors)})


def _tensor(name: str, array: Array) -> Tensor:
    """Read an array of numbers; ValueError for anything else."""
    value = array.numpy()
    if value.dtype.kind not in "fiub":
        raise ValueError(f"array {shown(name)} is of dtype {value.dtype}, expected numbers")
    return torch.from_numpy(value if value.dtype.kind != "f" else value.astype(np.float32))


def checked(
    arrays: Tensors, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the array of that name; ValueError if there is none, or one of another form."""
    if name not in arrays:
        raise ValueError(f"array {name!r} is missing")  # a list of all would be long
    return check_form(arrays, name, shape, dtype)


def layers_in(arrays: Tensors, ending: str, made_with: str) -> list[str]:
    """List the layers that have an array with that ending; ValueError if none has."""
    layers = [name.removesuffix(ending) for name in arrays if name.endswith(ending)]
    if not layers:
        raise ValueError(
            f"initial_arrays: no name ends in {ending} among {shown(list(arrays))}, expected those "
            f"of a model with {made_with}; pass ArrayRecord(get_peft_model_state_dict(model))"
        )
    return layers


def _layout(reply: Message) -> tuple[str, ...]:
    """Describe the metrics of a reply: their names, and how many values lists have."""
    return tuple(
        sorted(
            f"{name}[{len(value)}]" if isinstance(value, list) else name
            for record in reply.content.metric_records.values()
            for name, value in record.items()
        )
    )


def _read(reply: Message, own: Arrays, extras: Mapping[str, Tensor]) -> tuple[Tensors, float]:
    """Return a reply's upload, with the arrays that are not the method's own as one tensor."""
    records = list(reply.content.array_records.values())
    if len(records) != 1:
        raise ValueError(f"it has {len(records)} ArrayRecords, expected 1")
    tensors = {name: _tensor(name, array) for name, array in records[0].items()}
    values = {name: checked(tensors, name, old.shape, old.dtype) for name, old in extras.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in values}
    unknown = sorted(tensors.keys() - own.names)
    if unknown:
        raise ValueError(f"array {shown(unknown[0])} is unknown, expected names that were sent")
    upload, fraction = own.read(tensors)
    return upload | ({CLASSIFIER: flatten([*values.values()])} if values else {}), fraction


def _unflattened(flat: Tensor | None, shapes: Mapping[str, Tensor]) -> Tensors:
    """Cut one tensor into the shapes of these."""
    if flat is None:
        return {}
    parts = flat.split([math.prod(tensor.shape) for tensor in shapes.values()])
    return {
        name: part.view(tensor.shape)
        for (name, tensor), part in zip(shapes.items(), parts, strict=True)
    }


def _record(sent: ArrayRecord, changed: Mapping[str, Tensor], own: Arrays) -> ArrayRecord:
    """Put the changed arrays in the place of those that were sent, in the dtypes of these."""
    arrays = {k: a for k, a in sent.items() if k not in own.names - own.fixed or k in changed}
    for name, tensor in changed.items():
        value = tensor.detach().numpy()
        arrays[name] = Array(value.astype(sent[name].dtype) if name in sent else value.copy())
    return ArrayRecord(arrays)
