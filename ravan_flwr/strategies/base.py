"""Run a federated method in Flower's loop: translate arrays by name, aggregate, translate back.

    server                                      client (client.py, or other code)
    configure_train: arrays by name   ------>   load_arrays, choose
                                                ... any training loop ...
    aggregate_train                   <------   collect_arrays

The names are those of PEFT's `get_peft_model_state_dict`. The aggregation is that of the app
(server/aggregation.py), so both give the same numbers. A strategy needs no model: it reads layers,
heads and ranks from the shapes of the arrays. It keeps the arrays that it sent last, the moments of
its server optimiser, and the reasons of rejected replies.
"""

import math
import numbers
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from logging import getLogger
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from ravan_flwr.config.key import check_choice
from ravan_flwr.messages.plain_text import plain, shown
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER, Method, Tensors
from ravan_flwr.methods.tensors import check_form, flatten
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.update import above_zero, as_value_error
from ravan_flwr.server.update_norm_check import UpdateNormCheck

log = getLogger("flwr")  # where FedAvg logs the same replies

MAX_NORM = 1e15  # of an update; products of two such changes are finite in float32
RESIDUAL = ("residual", "residual-rank")  # of FedEx-LoRA and FedMomentum, beside the factors
MAX_WEIGHT = 2.0**53  # of a reply; no product with a float32 overflows


class Arrays(Protocol):
    """Translate between the arrays of a PEFT model, by name, and the tensors of a method."""

    @property
    def method(self) -> Method:
        """Return the method of this round."""

    state: Tensors  # the method's state, read from the arrays
    names: frozenset[str]  # of the method's arrays, in a broadcast or in a reply
    fixed: frozenset[str]  # names of arrays that every broadcast has unchanged

    def read(self, upload: Tensors) -> tuple[Tensors, float]:
        """Return a reply as the method's upload, and the budget fraction to check its shapes by."""

    def write(self, state: Tensors) -> Tensors:
        """Return the arrays that a new state changes, by name."""


class MethodStrategy(FedAvg):
    """Run one federated method in the loop of Flower's `FedAvg`.

    Subclasses name the method. Fractions, minimum numbers of nodes, metrics functions, keys and
    `start` are those of `FedAvg`. A malformed reply is rejected with a warning, and counts neither
    for the arrays nor for the metrics. `start` raises ValueError if all clients of a round fail or
    are rejected before any reply was accepted: then their models differ from the server's.

    Args:
        server_optimizer: FedAvg | None (default: None). A strategy of Flower, such as
            `FedAdam(eta=0.01)`. It takes a step from the sent arrays towards their new mean, as it
            does for the mean of `FedAvg`. Only for methods whose next arrays are a mean.
        weighting: str (default: "uniform"). "uniform": the next arrays are the plain mean of the
            replies, as in the paper; "examples": weighted by `weighted_by_key`, as Flower's. The
            mean metrics are weighted in both.
        max_update_norm: float (default: 1e15). Replies whose update has a larger norm are rejected.
        seed: int (default: 0). Seed of the server's random numbers (FlexLoRA draws directions for
            unused ranks).
        **fedavg: Arguments of `FedAvg`, by name.

    Attributes:
        rejected: dict[int, dict[int, str]]. Why a client failed or its reply was rejected, by round
            and node id.
    """

    method: ClassVar[str]  # one of METHODS

    def __init__(
        self, *, server_optimizer: FedAvg | None = None, weighting: str = "uniform",
        max_update_norm: float = MAX_NORM, seed: int = 0, **fedavg: Any,
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
            server_optimizer.fraction_train = 0.0  # this strategy samples the nodes
        is_number = isinstance(max_update_norm, numbers.Real)
        if not is_number or not 0 < max_update_norm <= MAX_NORM:
            raise ValueError(
                f"max_update_norm = {max_update_norm!r}: expected a number above 0 and at most "
                f"{MAX_NORM:g}; leave it out to accept every finite update"
            )
        check_choice("weighting", weighting, ("uniform", "examples"))
        self.max_update_norm, self.seed, self.weighting = max_update_norm, seed, weighting
        self.rejected: dict[int, dict[int, str]] = {}
        self._sent: tuple[ArrayRecord, Tensors, Arrays] | None = None
        self._newest: ArrayRecord | None = None  # what was sent, or its successor
        self._has_accepted = False  # True once any reply was accepted

    @abstractmethod
    def translate(self, arrays: Tensors, server_round: int) -> Arrays:
        """Return the translation of the global arrays, which are given by name."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the train messages for the sampled nodes.

        Args:
            server_round: The current round, counted from 1.
            arrays: The global arrays, with the names of `get_peft_model_state_dict`.
            config: The configuration that is sent to the nodes.
            grid: The grid from which nodes are sampled.

        Returns:
            One message for each sampled node. ValueError if the arrays do not fit the method.
        """
        tensors = {name: _tensor(name, array) for name, array in arrays.items()}
        if wrong := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
            raise ValueError(
                f"round {server_round}: array {shown(wrong[0])} that would be sent is not finite, "
                "expected finite numbers; correct the initial arrays, or the server optimiser"
            )
        # A resumed run counts on: FedRot-LoRA's rounds differ.
        rounds_before = cast(int, config.get("rounds-before", 0))
        translated = self.translate(tensors, server_round + rounds_before)
        self._sent, self._newest = (arrays, tensors, translated), arrays
        if self.optimizer is not None:
            extras = {
                name: tensor for name, tensor in tensors.items() if name not in translated.names
            }
            trained = _in_order(extras | translated.write(translated.state))
            self.optimizer.configure_train(server_round, trained, ConfigRecord(), grid)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next global arrays and the aggregated metrics of a round.

        Args:
            server_round: The current round, counted from 1.
            replies: The nodes' replies to the messages of `configure_train`.

        Returns:
            The next arrays and the metrics: (None, None) if no reply was accepted, and no arrays if
            the method cannot aggregate the replies.
        """
        if self._sent is None:
            raise RuntimeError(
                "aggregate_train: got replies before anything was sent, expected configure_train "
                "first; call start, or configure_train"
            )
        answered, failed = self._check_and_log_replies(replies, is_train=True, validate=False)
        problems = {
            reply.metadata.src_node_id: f"its client failed: {_reason(reply)}" for reply in failed
        }
        sent, tensors, translated = self._sent
        method = translated.method
        extras = {name: tensor for name, tensor in tensors.items() if name not in translated.names}
        state = translated.state | ({CLASSIFIER: flatten([*extras.values()])} if extras else {})
        sums = Aggregate(method, state, UpdateNormCheck(self.max_update_norm))
        layouts = Counter(map(_layout, answered))
        common_layout = max(sorted(layouts), key=layouts.__getitem__, default=())
        accepted: list[RecordDict] = []
        for reply in answered:
            try:
                with as_value_error():
                    weight = self._weight(reply, common_layout)
                    upload, fraction = _read(reply, translated, extras)
                    sums.check_and_add(upload, fraction, weight)
            except ValueError as error:
                node = reply.metadata.src_node_id
                problems[node] = str(error)
                log.warning("round %d: reply of node %d rejected: %s", server_round, node, error)
            else:
                accepted.append(reply.content)
        if problems:
            self.rejected[server_round] = problems
        if not accepted:
            self._report_unchanged(server_round, list(problems.values()))
            return None, None
        self._has_accepted = True
        metrics = self.train_metrics_aggr_fn(accepted, self.weighted_by_key)
        try:
            new = sums.close()
        except ValueError as error:
            log.warning("round %d has no effect, the arrays stay: %s", server_round, error)
            return None, metrics
        changed = translated.write(new) | _unflattened(new.get(CLASSIFIER), extras)
        if self.optimizer is not None:
            changed |= self._stepped(server_round, changed)
        self._newest = _record(sent, changed, translated)
        return self._newest, metrics

    def save(self, folder: str | Path, model: Any) -> None:
        """Save the newest global arrays as a PEFT adapter.

        After each round, for example in the `evaluate_fn` of `start`. The adapter's arrays are the
        initial arrays of a run that continues: `ArrayRecord(get_peft_model_state_dict(loaded))`.

        Args:
            folder: str | Path. Where `PeftModel.from_pretrained` will find the adapter; one that is
                not called "default" is in a folder of its name there, as PEFT has it.
            model: PeftModel. A model that is built as the clients'. Its active adapter gets the
                arrays.
        """
        from peft import set_peft_model_state_dict  # noqa: PLC0415 (a strategy needs no PEFT)

        if self._newest is None:
            raise ValueError(
                f"save: nothing was sent that {str(folder)!r} could get, expected one round at "
                "least; call start first, and in evaluate_fn save from round 1 on"
            )
        if RESIDUAL[0] in self._newest:
            raise ValueError(
                "save: got arrays with what FedEx-LoRA adds to the pretrained weights, which no "
                "adapter holds, expected an adapter's alone; call load_arrays(model, arrays), and "
                "save model.merge_and_unload()"
            )
        tensors = {name: _tensor(name, array) for name, array in self._newest.items()}
        name = model.active_adapter
        set_peft_model_state_dict(model, tensors, adapter_name=name)
        model.save_pretrained(folder, selected_adapters=[name])

    def _report_unchanged(self, server_round: int, problems: Sequence[str]) -> None:
        """Log that all replies of a round were unused; ValueError if no reply was ever accepted."""
        if not problems:
            return
        message = f"round {server_round}: all {len(problems)} clients failed or were rejected"
        if not self._has_accepted:
            raise ValueError(
                f"{message}, expected one at least; the last of them: {problems[-1]}; build the "
                "clients' models as the server does, and send what collect_arrays returns"
            )
        log.warning("%s, the arrays stay as they were", message)

    # The server optimiser gets one reply: the mean.

    def _stepped(self, server_round: int, mean: Tensors) -> Tensors:
        """Return the arrays after the optimiser's step from the sent arrays towards the mean."""
        assert self.optimizer is not None
        weight = MetricRecord({self.optimizer.weighted_by_key: 1.0})
        content = RecordDict({"arrays": _in_order(mean), "metrics": weight})
        reply = Message(content, dst_node_id=0, message_type="train")
        new, _ = self.optimizer.aggregate_train(server_round, [reply])
        assert new is not None
        return {name: torch.from_numpy(array.numpy()) for name, array in new.items()}

    # Replies.

    def _weight(self, reply: Message, common_layout: object) -> float:
        """Return a reply's weight; ValueError unless its metrics are valid and like the others'."""
        if _layout(reply) != common_layout:
            raise ValueError(
                f"its metrics are {shown(_layout(reply))}, most have {shown(common_layout)}"
            )
        (metrics,) = reply.content.metric_records.values()
        weight = above_zero(metrics, self.weighted_by_key, MAX_WEIGHT)
        if wrong := [name for name, value in metrics.items() if not np.isfinite(value).all()]:
            raise ValueError(
                f"metric {shown(wrong[0])} is {metrics[wrong[0]]}, expected finite numbers"
            )
        return weight if self.weighting == "examples" else 1.0


def _reason(reply: Message) -> str:
    """Return why a client failed; in Flower's simulation, that is what follows Ray's traceback."""
    text = str(reply.error.reason)
    _, after_traceback, message = text.rpartition("ClientAppException occurred. Message: ")
    return plain(message.removesuffix("'>") if after_traceback else text)


def _in_order(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return the arrays in a record for the server optimiser, sorted by name."""
    return ArrayRecord({name: Array(tensors[name].numpy()) for name in sorted(tensors)})


def _tensor(name: str, array: Array) -> Tensor:
    """Return an array as a tensor, floats as float32; ValueError unless it has numbers."""
    value = array.numpy()
    if value.dtype.kind not in "fiub":
        raise ValueError(f"array {shown(name)} is of dtype {value.dtype}, expected numbers")
    return torch.from_numpy(value if value.dtype.kind != "f" else value.astype(np.float32))


def checked_array(
    arrays: Tensors, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the array of that name; ValueError if it is missing or of another shape or dtype."""
    if name not in arrays:
        raise ValueError(f"array {name!r} is missing")  # a list of all names would be long
    return check_form(arrays, name, shape, dtype)


def layers_in(arrays: Tensors, ending: str, made_with: str) -> list[str]:
    """Return the layers that have an array with that ending, sorted; ValueError without any."""
    layers = sorted(name.removesuffix(ending) for name in arrays if name.endswith(ending))
    if not layers:
        raise ValueError(
            f"initial_arrays: no name ends in {ending} among {shown(list(arrays))}, expected those "
            f"of a model with {made_with}; pass ArrayRecord(get_peft_model_state_dict(model))"
        )
    return layers


def _layout(reply: Message) -> tuple[str, ...]:
    """Return the names of a reply's metrics, those of lists with the list's length."""
    return tuple(
        sorted(
            f"{name}[{len(value)}]" if isinstance(value, list) else name
            for record in reply.content.metric_records.values()
            for name, value in record.items()
        )
    )


def _read(
    reply: Message, translated: Arrays, extras: Mapping[str, Tensor]
) -> tuple[Tensors, float]:
    """Return a reply's upload, with all other arrays as one tensor, and its budget fraction."""
    records = list(reply.content.array_records.values())
    if len(records) != 1:
        raise ValueError(f"it has {len(records)} ArrayRecords, expected 1")
    tensors = {name: _tensor(name, array) for name, array in records[0].items()}
    values = {
        name: checked_array(tensors, name, old.shape, old.dtype) for name, old in extras.items()
    }
    tensors = {name: tensor for name, tensor in tensors.items() if name not in values}
    unknown = sorted(tensors.keys() - translated.names)
    if unknown:
        raise ValueError(f"array {shown(unknown[0])} is unknown, expected names that were sent")
    upload, fraction = translated.read(tensors)
    return upload | ({CLASSIFIER: flatten([*values.values()])} if values else {}), fraction


def _unflattened(flat: Tensor | None, shapes: Mapping[str, Tensor]) -> Tensors:
    """Cut a flat tensor into tensors of these shapes, by name."""
    if flat is None:
        return {}
    parts = flat.split([math.prod(tensor.shape) for tensor in shapes.values()])
    return {
        name: part.view(tensor.shape)
        for (name, tensor), part in zip(shapes.items(), parts, strict=True)
    }


def _record(sent: ArrayRecord, changed: Mapping[str, Tensor], translated: Arrays) -> ArrayRecord:
    """Return the sent arrays with the changed ones replaced, in the dtypes that were sent."""
    arrays = {
        k: a
        for k, a in sent.items()
        if k not in translated.names - translated.fixed or k in changed
    }
    for name, tensor in changed.items():
        value = tensor.detach().numpy()
        arrays[name] = Array(value.astype(sent[name].dtype) if name in sent else value.copy())
    return ArrayRecord(arrays)
