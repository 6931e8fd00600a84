"""A grid for runs in process whose clients take the simulated time of devices."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from flwr.app import Error, Message, MessageType

from ravan_flwr.config.run_config import Config
from ravan_flwr.flower_private import NodeInfo
from ravan_flwr.launch.in_process_grid import InProcessGrid, node_and_type
from ravan_flwr.messages.arrays import array_bytes
from ravan_flwr.simulated_time.clock import SimulatedClock
from ravan_flwr.simulated_time.devices import make_devices
from ravan_flwr.specs import Scalar
from ravan_flwr.training.device_work import CALIBRATE, Workload

TRAINING = (MessageType.TRAIN, CALIBRATE)
TIMED = (*TRAINING, MessageType.EVALUATE)  # kinds of message that take simulated time


class TimedGrid(InProcessGrid):
    """A grid that yields replies in the order of their simulated arrival, from online devices."""

    def __init__(self, run_config: Mapping[str, Scalar], num_clients: int, config: Config) -> None:
        super().__init__(run_config, num_clients)
        self._timeout = math.inf  # in real time
        devices = make_devices(str(config.devices), config.seed, num_clients)
        self.clock = SimulatedClock(devices)
        self._work = Workload(config, num_clients, devices)
        if config.parse("budgets")[""] == "by-speed":
            fractions = self._work.fractions_by_speed()
            for context, fraction in zip(self._contexts.values(), fractions, strict=True):
                context.node_config["budget"] = fraction

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the clients that are online."""
        return [node for node in super().get_node_ids() if self.clock.online(node - 1)]

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the NodeInfos of all clients: answers stay valid while a device is offline."""
        return self._listed(super().get_node_ids())

    def _push(self, message: Message) -> str:
        message_id = super()._push(message)
        if node_and_type(message)[1] in TIMED:
            self._begin(message_id, message)
        return message_id

    def drop(self, message_id: str) -> None:
        """Forget a message, and when its reply would arrive."""
        super().drop(message_id)
        self.clock.forget(message_id)

    def _begin(self, message_id: str, message: Message) -> None:
        """Start the simulated work of a client's device on a message."""
        node, message_type = node_and_type(message)
        fraction = _fraction(message)
        self.clock.send(
            message_id, node - 1,
            array_bytes(message),
            self._work.operations(message_type, fraction, node - 1),
            self._work.upload_size(message_type, fraction),
        )  # fmt: skip

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the next client whose reply has arrived; untimed messages arrive at once."""
        return super().pull_messages(filter(self.clock.has, message_ids))

    def expect(self, message_ids: Sequence[str]) -> Sequence[str]:
        """Let workers begin messages in the order of their arrival; return the arrived ids."""
        times = self.clock.times
        ids = self.clock.arrived(set(message_ids))
        ids += [message_id for message_id in message_ids if message_id not in times]
        super().expect(sorted(message_ids, key=lambda message_id: times.get(message_id, 0.0)))
        return ids

    def _deliver(self, message: Message) -> Message:
        """Return a client's reply, or an error if its device lacks memory."""
        self.clock.forget(message.metadata.message_id)
        node, message_type = node_and_type(message)
        if message_type in TRAINING and (
            reason := self._work.memory_shortage(_fraction(message), node - 1)
        ):
            return Message(Error(2, reason), reply_to=message)
        return super()._deliver(message)


def _fraction(message: Message) -> float:
    """Return the budget fraction in a message."""
    return cast(float, message.content.config_records["config"]["budget-fraction"])
