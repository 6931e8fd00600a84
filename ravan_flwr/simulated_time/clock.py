"""Measure time: real seconds, or simulated ones, which pass from one event to the next.

A client's reply arrives after bytes down / downlink + operations / speed + bytes up / uplink, of
time in which its device is online. A device answers one message after the other.
"""

import heapq
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ravan_flwr.simulated_time.devices import DAY, Device

HOUR = 3600.0
FREE = "clock/free"  # in a checkpoint: when each device has done what it was sent


class Clock:
    """Tell real time, and wait."""

    @property
    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Wait so long, or less."""
        time.sleep(seconds)

    def wait_for_node(self) -> None:
        """Wait until another node may have come."""
        time.sleep(0.2)

    def device_of(self, client: int) -> str | None:  # noqa: ARG002
        """Name the kind of a client's device; None if it is not simulated."""
        return None

    @property
    def memory(self) -> dict[str, torch.Tensor]:
        """Return what a run that is resumed needs, beside the time."""
        return {}


REAL = Clock()


class SimulatedClock(Clock):
    """Order the replies of simulated clients by the second in which they arrive.

    Time passes where somebody waits, which ends with the next arrival.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices, self._now = devices, 0.0
        self.free = [0.0] * len(devices)  # when each has done all that it was sent
        self._arrivals: list[tuple[float, int, str]] = []  # a heap; ties in the order of sending
        self._sent = 0
        self._replies: dict[str, None] = {}  # messages that are answered, in order
        self.times: dict[str, float] = {}  # by message: when the reply arrives

    @property
    def now(self) -> float:
        return self._now

    def send(
        self, message_id: str, client: int, bytes_down: float, operations: float, bytes_up: float
    ) -> float:
        """Note a message that a client answers; return when its reply arrives."""
        device = self.devices[client]
        seconds = seconds_of(device, bytes_down, operations, bytes_up)
        self.free[client] = finish(max(self.now, self.free[client]), seconds, device.online)
        self.expect(message_id, self.free[client])
        return self.free[client]

    def expect(self, message_id: str, arrives: float) -> None:
        """Note when a reply arrives."""
        heapq.heappush(self._arrivals, (arrives, self._sent, message_id))
        self.times[message_id] = arrives
        self._sent += 1

    def arrived(self, message_ids: Collection[str]) -> list[str]:
        """List the messages, of those that are wanted, that are answered by now, in order."""
        self._settle()
        return [message_id for message_id in self._replies if message_id in message_ids]

    def has(self, message_id: str) -> bool:
        """Return whether the reply to a message is there, or takes no time."""
        return message_id in self._replies or message_id not in self.times

    def take(self, message_id: str) -> None:
        """Forget a message, whose reply was taken."""
        self._replies.pop(message_id, None)
        self.times.pop(message_id, None)

    def restore(self, arrivals: Mapping[str, float], free: list[float]) -> None:
        """Wait for these replies as in the run that was stopped."""
        for message_id, arrives in arrivals.items():
            self.expect(message_id, arrives)
        self.free = free

    def wait(self, seconds: float) -> None:
        """Let time pass: so long, or until the next reply arrives."""
        self._settle()
        until = self.now + seconds
        if self._arrivals:
            until = min(until, self._arrivals[0][0])
        self._now = max(self._now, until)
        self._settle()

    def _settle(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            arrives, _, message_id = heapq.heappop(self._arrivals)
            if self.times.get(message_id) == arrives:  # nobody has given it up, or moved it
                self._replies[message_id] = None

    def online(self, client: int) -> bool:
        """Return whether a client's device is online now."""
        begin, end = self.devices[client].online
        return (self.now - begin * HOUR) % (DAY * HOUR) < (end - begin) * HOUR

    def wait_for_node(self) -> None:
        """Let time pass until another device comes online."""
        day = DAY * HOUR
        self._now += min((d.online[0] * HOUR - self.now) % day or day for d in self.devices)

    def device_of(self, client: int) -> str | None:
        return self.devices[client].kind

    @property
    def memory(self) -> dict[str, torch.Tensor]:
        return {FREE: torch.tensor(self.free, dtype=torch.float64)}

    def resume(self, now: float, memory: Mapping[str, torch.Tensor]) -> None:
        """Go on from a time, with devices that are as busy as they were then."""
        self._now = now
        if FREE in memory:
            self.free = memory[FREE].tolist()


def clock_of(grid: Any) -> Clock:
    """Return a grid's simulated clock, or that of real time."""
    clock: Clock | None = getattr(grid, "clock", None)
    return REAL if clock is None else clock


def seconds_of(device: Device, bytes_down: float, operations: float, bytes_up: float) -> float:
    """Compute how long a client of that device takes for a round, while it is online."""
    return bytes_down / device.downlink + operations / device.operations + bytes_up / device.uplink


def finish(start: float, seconds: float, online: tuple[float, float]) -> float:
    """Return when work of so many seconds ends that goes on only in the device's hours."""
    begin, end = (hour * HOUR for hour in online)
    day, length = DAY * HOUR, end - begin
    if length >= day:
        return start + seconds
    since = (start - begin) % day  # seconds since the hours last began
    if since >= length:
        start, since = start + day - since, 0.0
    left = length - since
    if seconds <= left:
        return start + seconds
    days, remainder = divmod(seconds - left, length)
    if remainder == 0.0:
        days, remainder = days - 1, length
    return start - since + (days + 1) * day + remainder
