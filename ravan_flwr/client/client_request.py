"""A message with the context of its node, from which every answer begins."""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from logging import getLogger
from typing import Any, cast

from flwr.app import ArrayRecord, Context, RecordDict

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import FREE_ON_RESUME
from ravan_flwr.config.node_config import check_node_requirements, read_node
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.messages.arrays import FIXED, from_record, to_record
from ravan_flwr.messages.sparsity import Sparsity, densify, sparsity_of_round
from ravan_flwr.messages.wire import decode, wire_of_round
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.budgets import budget_fraction
from ravan_flwr.seeding import ClientRound
from ravan_flwr.tasks.base import Encoded
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.cost import largest_fraction
from ravan_flwr.training.device import free_memory
from ravan_flwr.training.local_steps import ClientWork, make_training_settings
from ravan_flwr.training.model_and_data import Examples, ModelAndData, get_model_and_data

log = getLogger(__name__)

PERSONAL_RECORD = "personal"  # the record in the node's state with its personal parameters
HIDDEN_REASON = (
    "this device could not work on its examples; its own log has the reason, which is not sent "
    "to the server, since it could reveal an example"
)


class ClientRequest:
    """A message, its node, and the run config with the node's overrides."""

    def __init__(self, content: RecordDict, context: Context) -> None:
        self.started = time.perf_counter()
        self.content, self.context = content, context
        self.node = read_node(context.node_config)
        config = read_config(context.run_config)
        self.config = replace(config, device=self.node.device or config.device)
        check_node_requirements(self.node, config)
        if self.node.data_path is not None and not config.data.labels_known:
            raise ValueError(
                f"preset {config.preset}: it leaves the labels to the data, but this device has "
                "examples of its own, expected the labels of all devices; write them into the "
                "preset, `labels: [...]` under `data`, as `ravan-flwr new` does"
            )
        if self.node.data_path is not None and METHODS[config.method].pools:
            raise ValueError(
                f"method {config.method!r}: this device has examples of its own, which stay there, "
                "expected clients that share one data set; choose another method, or simulate"
            )

    @property
    def loaded(self) -> ModelAndData:
        return get_model_and_data(self.config)

    @property
    def examples(self) -> Examples:
        node = self.node
        with self.hiding_reasons():
            if node.data_path is not None:
                return self.loaded.device_examples(node.data_path, node.partition_id)
            return self.loaded.partition(node.partition_id, node.num_partitions)

    @contextmanager
    def hiding_reasons(self) -> Iterator[None]:
        """Hide from the server why work on the examples fails, with privacy=example.

        Flower sends an error's class and text to the server, so all errors become the same one. It
        is a RuntimeError, since a warm worker stays alive after a ValueError (bad input).
        """
        try:
            yield
        except Exception:
            if self.config.privacy != "example":
                raise
            log.exception("work on the examples failed; the server does not get this reason")
            raise RuntimeError(HIDDEN_REASON) from None

    @property
    def trained_on(self) -> Encoded:
        """Return the examples that a round trains on: the client's, or those of all clients."""
        if METHODS[self.config.method].pools:
            return self.loaded.pooled(self.node.num_partitions)
        return self.examples.train

    @property
    def budget_fraction(self) -> float:
        """Return the budget fraction of the node config, else that of the run's distribution."""
        budget, config = self.node.budget, self.config
        if budget is None:
            return budget_fraction(config.budgets, config.seed, self.node.partition_id)
        if budget == AUTO:
            return largest_fraction(config, free_memory(self.loaded.model.device))
        return float(budget)

    @property
    def round(self) -> int:
        return cast(int, self.content.config_records["config"]["round"])

    @property
    def work(self) -> ClientWork:
        """Return the work that the message asks for."""
        # The fraction that the node reported to `query`; free memory may have changed.
        granted = cast(float, self.content.config_records["config"]["budget-fraction"])
        return ClientWork(
            self.trained_on, self.broadcast, granted,
            make_training_settings(self.config, self.round, len(self.examples.train)),
            self.client_round, find_personal(self.context.state, self.loaded.model),
        )  # fmt: skip

    @property
    def broadcast(self) -> Tensors:
        sent = from_record(self.content.array_records["arrays"])
        return densify(decode(sent, self.wire), self.sparsity[0])

    @property
    def wire(self) -> str:
        return wire_of_round(self.config.wire, self.round)

    @property
    def sparsity(self) -> Sparsity:
        return sparsity_of_round(self.config.densities, self.round)

    @property
    def client_round(self) -> ClientRound:
        return ClientRound(self.config.seed, self.round, self.node.partition_id)

    @property
    def upload_metrics(self) -> dict[str, Any]:
        """Return the metrics of every upload, with the time that it took unless that is private."""
        metrics = {"round": self.round, "fingerprint": self.loaded.model.fingerprint}
        if self.config.privacy == "example":  # seconds could reveal something about the examples
            return metrics
        return metrics | {"seconds": time.perf_counter() - self.started}

    def load_fixed_tensors(self) -> None:
        """Load the fixed tensors, which are sent once and kept in the node's state for the run."""
        digest = str(self.content.config_records["config"].get("fixed-hash", ""))
        if not digest:
            return
        node_state = self.context.state
        if FIXED in self.content:
            node_state[FIXED] = self.content.array_records[FIXED]
        if FIXED not in node_state:
            raise ValueError(
                f"this node does not have the fixed tensors {digest}: it was started again since "
                "they were sent; the server sends them once more in its next round"
            )
        self.loaded.model.load_fixed(from_record(node_state.array_records[FIXED]), digest)


# A client's personal parameters are in its node's state. That state belongs to one run alone
# (replay_guard.py), and is lost when the node is restarted. Parameters read from it are checked:
# other shapes, or numbers that are not finite, count as lost.


def run_hash(config: Config, run_id: int) -> str:
    """Return a hash of a run's id and of the settings that determine its result."""
    settings = {k: v for k, v in config.as_dict().items() if k not in FREE_ON_RESUME}
    text = json.dumps([run_id, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def store_personal(node_state: RecordDict, personal: Tensors) -> None:
    """Store personal parameters in a node's state, in place of earlier ones."""
    node_state[PERSONAL_RECORD] = to_record(personal)


def read_personal(node_state: RecordDict) -> Tensors | None:
    """Return the personal parameters in a node's state, unchecked; None if there are none."""
    arrays = node_state.get(PERSONAL_RECORD)
    return from_record(arrays) if isinstance(arrays, ArrayRecord) else None


def find_personal(node_state: RecordDict, model: AdaptedModel) -> Tensors | None:
    """Return the valid personal parameters in a node's state; None if there are none."""
    if not model.personal_shapes():
        return None
    try:
        personal = read_personal(node_state)
        if personal is not None:
            model.check_personal(personal)
    except ValueError as error:
        log.warning("this client's personal parameters cannot be used, it begins anew: %s", error)
        return None
    return personal
