"""Draw a device for each simulated client: its speed, links, memory and hours online.

The devices of a profile are drawn from the run's seed. Published figures:

- `edge-gpus`: NVIDIA's Jetson modules, each equally likely, with the memory of their data sheets.
  The peak in float32 is two operations per cycle and CUDA core, at the data sheet's highest clock.
  Downloads have the first and the last decile of fixed broadband in the United States (Ookla, May
  2025: 30 and 699 Mbit/s).
- `phones`: downloads and uploads have the worldwide medians of 5G (Ookla, third quarter of 2021:
  166 and 21 Mbit/s).

Assumed, without a published source: training reaches 0.3 of the peak, a fixed upload is a fifth of
the download, and links of phones vary as much as fixed ones. A phone trains in the eight hours of a
night, which starts at a different hour for each. The three classes of phones are assumed, too:
Qualcomm publishes no peaks, and databases differ by a quarter for the same GPU.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BeforeValidator, Field

from ravan_flwr.config.yaml_file import Part, read_yaml
from ravan_flwr.seeding import generator

UTILISATION = 0.3  # of the peak, in training
MBIT = 1e6 / 8  # bytes a second
GB = 1e9
DAY = 24.0
DECILES = (30.49, 698.62)  # Mbit/s
SIGMA = math.log(DECILES[1] / DECILES[0]) / (2 * 1.2815515655446004)  # of a lognormal
MEDIAN = math.sqrt(DECILES[0] * DECILES[1])
# Teraflops in float32, gigabytes.
JETSONS = {
    "jetson-nano": (0.236, 4), "jetson-tx2": (0.665, 8), "jetson-xavier-nx": (0.844, 8),
    "jetson-agx-xavier": (1.41, 32), "jetson-orin-nano": (1.28, 8), "jetson-orin-nx": (1.88, 16),
    "jetson-agx-orin": (5.33, 64),
}  # fmt: skip
PHONES = {"phone-entry": (0.4, 4), "phone-middle": (1.2, 8), "phone-high": (3.4, 12)}
NIGHT = 8.0
EXAMPLE = "docs/simulation.md has an example"

_ABOVE_0 = "a number above 0; change it in the file"
_HOURS = "hours of a day such as 22-6; change it in the file"
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, description=_ABOVE_0)]


@dataclass(frozen=True)
class Device:
    """A client's simulated device."""

    name: str
    operations: float  # floating-point operations a second, in training
    downlink: float  # bytes a second
    uplink: float
    memory: float = math.inf  # bytes
    online: tuple[float, float] = (0.0, DAY)  # hours of each day; the end may be on the next day


class _Entry(Part):
    """A device of a YAML file, and the number of clients that have it."""

    name: Annotated[str, BeforeValidator(str)] = "device"  # YAML may read a name as a number
    clients: int = Field(1, ge=1, description="a whole number at least 1; change it in the file")
    teraflops: _Positive
    downlink: _Positive  # Mbit/s
    uplink: _Positive
    memory: float = Field(math.inf, gt=0, description=_ABOVE_0)  # gigabytes
    online: str = Field("0-24", description=_HOURS)


def uniform(random: torch.Generator) -> Device:  # noqa: ARG001
    """Return the same device for every client."""
    return Device("uniform", UTILISATION * 1e12, 100 * MBIT, 20 * MBIT)


def edge_gpus(random: torch.Generator) -> Device:
    """Draw an edge GPU on a fixed link."""
    name, (teraflops, memory) = _draw(JETSONS, random)
    down = MEDIAN * _lognormal_factor(random) * MBIT
    return Device(name, UTILISATION * teraflops * 1e12, down, down / 5, memory * GB)


def phones(random: torch.Generator) -> Device:
    """Draw a phone on a mobile link."""
    name, (teraflops, memory) = _draw(PHONES, random)
    link = _lognormal_factor(random)
    begin = DAY * float(torch.rand((), generator=random))
    return Device(
        name, UTILISATION * teraflops * 1e12, 166.13 * link * MBIT, 21.08 * link * MBIT,
        memory * GB, (begin, begin + NIGHT),
    )  # fmt: skip


PROFILES = {"uniform": uniform, "edge-gpus": edge_gpus, "phones": phones}


def make_devices(profile: str, seed: int, clients: int) -> list[Device]:
    """Return a device for each client, from a profile or a YAML file."""
    if profile in PROFILES:
        draw = PROFILES[profile]
        return [draw(generator(seed, "device", client)) for client in range(clients)]
    path = Path(profile)
    if not path.is_file():
        raise ValueError(
            f"devices = {profile!r}: got no file, expected one of {', '.join(PROFILES)} or a YAML "
            f"file; {EXAMPLE}"
        )
    return read_devices(path, clients)


def read_devices(path: Path, clients: int) -> list[Device]:
    """Return a device for each client, in the order of a YAML file."""
    content = read_yaml(path)
    if not isinstance(content, list) or not content:
        raise ValueError(
            f"{path}: got {type(content).__name__}, expected a list of devices; {EXAMPLE}"
        )
    devices: list[Device] = []
    for number, entry in enumerate(content):
        where = f"{path}, device {number}."
        spec = _Entry.read(where, entry)
        device = Device(
            spec.name, spec.teraflops * 1e12, spec.downlink * MBIT, spec.uplink * MBIT,
            spec.memory * GB, _read_hours(where, spec.online),
        )  # fmt: skip
        devices += [device] * min(spec.clients, clients)
    if len(devices) < clients:
        raise ValueError(
            f"{path}: got devices of {len(devices)} clients, expected {clients}; raise `clients` "
            "of one of them, or lower num-clients"
        )
    return devices[:clients]


def _read_hours(where: str, text: str) -> tuple[float, float]:
    try:
        begin, end = (float(part) for part in text.split("-"))
    except ValueError:
        begin = end = math.nan
    if not (0 <= begin < DAY and 0 <= end <= DAY and begin != end):
        raise ValueError(f"{where}online = {text!r}: expected {_HOURS}")
    return begin, end if end > begin else end + DAY


def _draw(
    table: Mapping[str, tuple[float, float]], random: torch.Generator
) -> tuple[str, tuple[float, float]]:
    return list(table.items())[int(torch.randint(len(table), (), generator=random))]


def _lognormal_factor(random: torch.Generator) -> float:
    """Draw a lognormal factor with median 1 and the ratio of deciles of fixed links."""
    return math.exp(SIGMA * float(torch.randn((), generator=random, dtype=torch.float64)))
