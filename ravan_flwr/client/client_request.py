"""Hold a message together with the node that it came to: what every answer begins with."""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from logging import getLogger
from typing import Any, cast

from flwr.app import ArrayRecord, Context, RecordDict

from ravan_flwr.client.account import check_kept
from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import FREE_ON_RESUME
from ravan_flwr.config.node_config import check_node_requirements, read_node
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.messages.arrays import FIXED, from_record, to_record
from ravan_flwr.messages.sparsity import Sparsity, densify, sparsity_of_round
from ravan_flwr.messages.wire import decode, wire_of_round
from ravan_flwr.methods import METHODS, budget_fraction
from ravan_flwr.methods.base import Tensors
from ravan_flwr.seeding import ClientRound
from ravan_flwr.tasks.base import Encoded, Task
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.cost import largest_fraction
from ravan_flwr.training.device import free_memory
from ravan_flwr.training.local_steps import LocalSteps, steps_of
from ravan_flwr.training.model_and_data import Examples, ModelAndData, get_model_and_data

log = getLogger(__name__)

OWN = "own-part"  # the record in the node's state with its part of the model
KEPT = (
    "this device could not work on its examples; its own log has the reason, which is not sent "
    "to the server, since it could reveal an example"
)


class ClientRequest:
    """Hold a message and the node that it came to: the run config, with what the node changes."""

    def __init__(self, content: RecordDict, context: Context) -> None:
        self.started = time.perf_counter()
        self.content, self.context = content, context
        self.node = read_node(context.node_config)
        config = read_config(context.run_config)
        self.config = replace(config, device=self.node.device or config.device)
        check_node_requirements(self.node, config)
        check_kept(self.node)
        if self.node.data_path is not None and not config.data.settled:
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
        with self.keeping_reasons():
            if node.data_path is not None:
                return self.loaded.own_examples(node.data_path, node.partition_id)
            return self.loaded.partition(node.partition_id, node.num_partitions)

    @contextmanager
    def keeping_reasons(self) -> Iterator[None]:
        """Keep to the device why work on its examples fails, where it does not trust the server.

        Flower sends the class and the text of an error to the server: one of both for all. It is
        not that of bad input, after which a warm worker would stay.
        """
        try:
            yield
        except Exception:
            if self.config.privacy != "example":
                raise
            log.exception("the server learns that this device failed, and not why")
            raise RuntimeError(KEPT) from None

    @property
    def trained_on(self) -> Encoded:
        """Get what a round trains on: the client's own examples, or those of all."""
        if METHODS[self.config.method].pools:
            return self.loaded.pooled(self.node.num_partitions)
        return self.examples.train

    @property
    def budget_fraction(self) -> float:
        """Find the node's own budget if it has one, or its draw from the run's distribution."""
        budget, config = self.node.budget, self.config
        if budget is None:
            return budget_fraction(config.budgets, config.seed, self.node.partition_id)
        if budget == AUTO:
            return largest_fraction(config, self.free_memory)
        return float(budget)

    @property
    def free_memory(self) -> int:
        return free_memory(self.loaded.model.device)

    @property
    def granted(self) -> float:
        """Return the fraction that this node named when asked: free memory may have changed."""
        return cast(float, self.content.config_records["config"]["budget-fraction"])

    @property
    def steps(self) -> LocalSteps:
        return steps_of(self.config, self.round, len(self.examples.train))

    @property
    def round(self) -> int:
        return cast(int, self.content.config_records["config"]["round"])

    @property
    def work(self) -> tuple[AdaptedModel, Task, Encoded, Tensors]:
        """Collect what every kind of local work begins with."""
        loaded = self.loaded
        return loaded.model, loaded.task, self.trained_on, self.broadcast

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
    def turn(self) -> ClientRound:
        return ClientRound(self.config.seed, self.round, self.node.partition_id)

    @property
    def mark(self) -> str:
        return run_mark(self.config, self.context.run_id)

    @property
    def upload_metrics(self) -> dict[str, Any]:
        """Say what every upload tells of itself, and how long it has taken if that may be told."""
        metrics = {"round": self.round, "derived": self.loaded.model.derived}
        if self.config.privacy == "example":  # seconds would tell of the examples
            return metrics
        return metrics | {"seconds": time.perf_counter() - self.started}

    def find_own(self) -> Tensors | None:
        """Find the part of the model that has stayed with this client, if one has."""
        model = self.loaded.model
        return find_own(self.context.state, model) if model.own_shapes() else None

    def take_fixed(self) -> None:
        """Load the fixed tensors: sent once, then kept in this node's state for the run."""
        digest = str(self.content.config_records["config"].get("fixed-hash", ""))
        if not digest:
            return
        state = self.context.state
        if FIXED in self.content:
            state[FIXED] = self.content.array_records[FIXED]
        if FIXED not in state:
            raise ValueError(
                f"this node does not have the fixed tensors {digest}: it was started again since "
                "they were sent; the server sends them once more in its next round"
            )
        self.loaded.model.load_fixed(from_record(state.array_records[FIXED]), digest)


# A client's own part of the model lies in its node's state, which is of one run alone
# (replay_guard.py), and is forgotten when the node is started again. What is read from it is
# checked as what comes from elsewhere is: a part of other shapes, or with numbers that are not
# finite, counts as lost.


def run_mark(config: Config, run_id: int) -> str:
    """Name a run by its number and by the settings that its result follows from."""
    settings = {k: v for k, v in config.as_dict().items() if k not in FREE_ON_RESUME}
    text = json.dumps([run_id, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keep_own(state: RecordDict, own: Tensors) -> None:
    """Put the part into a node's state, in place of the one before."""
    state[OWN] = to_record(own)


def own_tensors(state: RecordDict) -> Tensors | None:
    """Read the tensors of the part, as they are; None if there is none."""
    arrays = state.get(OWN)
    return from_record(arrays) if isinstance(arrays, ArrayRecord) else None


def find_own(state: RecordDict, model: AdaptedModel) -> Tensors | None:
    """Find the part that the client has; None if it has none that can be used."""
    try:
        own = own_tensors(state)
        if own is not None:
            model.check_own(own)
    except ValueError as error:
        log.warning("this client's personal parameters are of no use, it begins anew: %s", error)
        return None
    return own
