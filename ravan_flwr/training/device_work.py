"""Count the operations and bytes of a client's device for a message, from shapes only."""

from functools import cached_property, lru_cache
from statistics import median

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.run_config import Config
from ravan_flwr.methods.budgets import BUDGET_FRACTIONS
from ravan_flwr.simulated_time.clock import estimate_seconds
from ravan_flwr.simulated_time.devices import Device
from ravan_flwr.training.cost import Skeleton, step_memory, step_operations
from ravan_flwr.training.model_and_data import get_model_and_data

CALIBRATE = "train.calibrate"  # the type of the messages of a calibration round


class Workload:
    """The work of each of a run's clients, and the speed and memory of its simulated device."""

    def __init__(self, config: Config, clients: int, devices: list[Device]) -> None:
        self.config, self.clients, self.devices = config, clients, devices
        skeleton = Skeleton(config)
        self.calibration = skeleton.method.calibration
        # The bytes of an upload, and of a broadcast, by budget fraction.
        self.bytes_up, self.bytes_down = (
            lru_cache(skeleton.bytes_up),
            lru_cache(skeleton.bytes_down),
        )

    @cached_property
    def examples(self) -> list[int]:
        """Return the number of training examples of each client."""
        return get_model_and_data(self.config).partition_sizes(self.clients)

    def operations(self, message_type: str, fraction: float, client: int) -> float:
        """Count the floating-point operations with which a client answers a message."""
        config = self.config
        forward, step = step_operations(config, fraction)
        if message_type == "evaluate":
            # The validation split has ceil(part n) of n examples, the training split the rest.
            part = config.validation_share
            validation = self.examples[client] * part / (1 - part)
            return forward * validation / config.batch_size
        if self.calibration and message_type == CALIBRATE and not self.calibration.by_steps:
            return step * config.calibration_steps
        return step * config.count_steps(self.examples[client])

    def upload_size(self, message_type: str, fraction: float) -> int:
        """Return the bytes of the arrays in a client's reply to a message."""
        if message_type == "evaluate":
            return 0
        if self.calibration and message_type == CALIBRATE:
            return self.calibration.bytes_up
        return self.bytes_up(fraction)

    def seconds(self, fraction: float, client: int) -> float:
        """Return the seconds of a client's round with that budget fraction, while it is online."""
        operations = self.operations("train", fraction, client)
        bytes_down, bytes_up = self.bytes_down(fraction), self.bytes_up(fraction)
        return estimate_seconds(self.devices[client], bytes_down, operations, bytes_up)

    def memory_shortage(self, fraction: float, client: int) -> str:
        """Return an error text if a device has too little memory for a step, else ""."""
        step, memory = step_memory(self.config, fraction), self.devices[client].memory
        need = step.weights + step.added
        if need <= memory:
            return ""
        name = self.devices[client].name
        return (
            f"out of memory: a step needs {need / 1e9:.2f} GB with a budget of {fraction:g}, and a "
            f"device {name} has {memory / 1e9:g} GB; lower batch-size or budgets"
        )

    def fractions_by_speed(self) -> list[float]:
        """Return each client's largest budget fraction whose round ends within the target time.

        The fractions are quarters. The target is SECONDS of `budgets=by-speed:SECONDS`, or the
        median over all devices with the whole budget. A client that is too slow gets a quarter.
        """
        value = self.config.parse("budgets")["seconds"]
        client_ids = range(self.clients)
        target = median(self.seconds(1.0, c) for c in client_ids) if value == AUTO else float(value)
        return [
            max(
                (
                    fraction
                    for fraction in BUDGET_FRACTIONS
                    if self.seconds(fraction, c) <= target and not self.memory_shortage(fraction, c)
                ),
                default=BUDGET_FRACTIONS[0],
            )
            for c in client_ids
        ]
