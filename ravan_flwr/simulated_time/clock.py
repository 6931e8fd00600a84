"""Provide the time of a run: real seconds, or simulated ones that advance from event to event.

A client's reply arrives after bytes down / downlink + operations / speed + bytes up / uplink. Only
the time in which its device is online counts. A device answers messages one by one.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ravan_flwr.simulated_time.devices import DAY, Device

HOUR = 3600.0
BUSY_UNTIL = "clock/free"  # in a checkpoint: when each device has finished its work


class Clock:
    """Real time."""

    @property
    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Wait for at most that many seconds."""
        time.sleep(seconds)

    def wait_for_node(self) -> None:
        """Wait until another node may have connected."""
        time.sleep(0.2)

    def find_device(self, client: int) -> str | None:  # noqa: ARG002
        """Return the kind of a client's device; None if it is not simulated."""
        return None

    @property
    def memory(self) -> dict[str, torch.Tensor]:
        """Return the clock's tensors for a checkpoint, without the time."""
        return {}


REAL = Clock()


class SimulatedClock(Clock):
    """Simulated time, which orders the replies of clients by their arrival.

    Time advances in `wait` only, at most to the next arrival, and in `wait_for_node`.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices, self._now = devices, 0.0
        self.busy_until = [0.0] * len(devices)  # when each finishes its work
        self.times: dict[str, float] = {}  # by message, in order: when its reply arrives

    @property
    def now(self) -> float:
        return self._now

    def send(
        self, message_id: str, client: int, bytes_down: float, operations: float, bytes_up: float
    ) -> float:
        """Record a message to a client; return when its reply arrives."""
        device = self.devices[client]
        seconds = estimate_seconds(device, bytes_down, operations, bytes_up)
        self.busy_until[client] = finish(
            max(self.now, self.busy_until[client]), seconds, device.online
        )
        self.times[message_id] = self.busy_until[client]
        return self.busy_until[client]

    def arrived(self, message_ids: Collection[str]) -> list[str]:
        """List those of these messages whose replies have arrived, in order of arrival."""
        here = [key for key, time in self.times.items() if time <= self.now and key in message_ids]
        return sorted(here, key=self.times.__getitem__)

    def has(self, message_id: str) -> bool:
        """Return whether the reply to a message has arrived, or takes no time."""
        return self.times.get(message_id, self.now) <= self.now

    def forget(self, message_id: str) -> None:
        """Remove a message whose reply was read or is no longer awaited."""
        self.times.pop(message_id, None)

    def restore(self, arrivals: Mapping[str, float], busy_until: list[float]) -> None:
        """Restore the arrivals and the busy devices of a run that was stopped."""
        self.times |= arrivals
        self.busy_until = busy_until

    def wait(self, seconds: float) -> None:
        """Advance time by that many seconds, or to the next arrival if that is earlier."""
        coming = (time for time in self.times.values() if time > self.now)
        self._now = min([self.now + seconds, *coming])

    def online(self, client: int) -> bool:
        """Return whether a client's device is online now."""
        begin, end = self.devices[client].online
        return (self.now - begin * HOUR) % (DAY * HOUR) < (end - begin) * HOUR

    def wait_for_node(self) -> None:
        """Advance time until another device comes online."""
        day = DAY * HOUR
        self._now += min((d.online[0] * HOUR - self.now) % day or day for d in self.devices)

    def find_device(self, client: int) -> str | None:
        return self.devices[client].name

    @property
    def memory(self) -> dict[str, torch.Tensor]:
        return {BUSY_UNTIL: torch.tensor(self.busy_until, dtype=torch.float64)}

    def resume(self, now: float, memory: Mapping[str, torch.Tensor]) -> None:
        """Continue at a checkpoint's time, with its busy devices."""
        self._now = now
        if BUSY_UNTIL in memory:
            self.busy_until = memory[BUSY_UNTIL].tolist()


def find_clock(grid: Any) -> Clock:
    """Return a grid's simulated clock, or the real one."""
    clock: Clock | None = getattr(grid, "clock", None)
    return REAL if clock is None else clock


def estimate_seconds(
    device: Device, bytes_down: float, operations: float, bytes_up: float
) -> float:
    """Return the online seconds that a device needs for a message and its reply."""
    return bytes_down / device.downlink + operations / device.operations + bytes_up / device.uplink


def finish(start: float, seconds: float, online: tuple[float, float]) -> float:
    """Return when work of `seconds` seconds ends if a device works in its online hours only."""
    begin, end = (hour * HOUR for hour in online)
    day, length = DAY * HOUR, end - begin
    if length >= day:
        return start + seconds
    since = (start - begin) % day  # seconds since the online hours last began
    if since >= length:
        start, since = start + day - since, 0.0
    left = length - since
    if seconds <= left:
        return start + seconds
    days, remainder = divmod(seconds - left, length)
    if remainder == 0.0:
        days, remainder = days - 1, length
    return start - since + (days + 1) * day + remainder
