"""Share the GPUs of this machine among the clients of a simulation.

Ray runs as many clients at a time as their shares of CPUs and GPUs allow, and shows each client the
one GPU that it has a share of. A client that asks for no share sees no GPU, by Ray's default, which
superlink.py changes. Nothing limits a process to its GPU share. So the share follows from memory:
each client gets as much of a GPU's free memory as the plan estimates. The server's process is on
the first GPU.
"""

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.run_config import Config
from ravan_flwr.runs.console import count
from ravan_flwr.training.machine import VISIBLE, Gpu, visible_gpus

# Ray counts in ten-thousandths: shares of more clients would not add up on 16 GPUs.
MAX_CLIENTS_PER_GPU = 24
_TEN_THOUSANDTHS = 10_000
USABLE = 0.9  # fraction of the free memory: PyTorch's allocator leaves gaps


@dataclass(frozen=True)
class Sharing:
    """How many clients at a time share each of these GPUs; 0 if there is no GPU to share."""

    clients_per_gpu: int = 0
    gpus: Sequence[Gpu] = ()

    @property
    def share(self) -> float:
        """Return a client's share of a GPU, rounded down: Flower and Ray must fit all clients.

        Flower stores it as a float32 and divides by that: 0.2 becomes slightly more, so that only
        four clients would fit.
        """
        parts = _TEN_THOUSANDTHS // self.clients_per_gpu
        (carried,) = struct.unpack("f", struct.pack("f", parts / _TEN_THOUSANDTHS))
        return (parts if carried * self.clients_per_gpu <= 1 else parts - 1) / _TEN_THOUSANDTHS

    def federation(self, num_clients: int) -> str:
        """Return Flower's federation config."""
        words = f"num-supernodes={num_clients} client-resources-num-cpus=1"
        if self.clients_per_gpu:
            words += f" client-resources-num-gpus={self.share:g}"
        return words

    def description(self) -> str:
        """Return a line that describes the sharing; "" if there is no GPU to share."""
        if not self.clients_per_gpu:
            return ""
        names = ", ".join(sorted({gpu.name for gpu in self.gpus}))
        return (
            f"{count(len(self.gpus), 'GPU')} ({names}), "
            f"{count(self.clients_per_gpu, 'client')} at a time on "
            f"{'each' if len(self.gpus) > 1 else 'it'}\n"
        )


def share_gpus(
    config: Config,
    num_clients: int,
    clients_per_gpu: int | None = None,
    runs_at_a_time: int = 1,
    environment: Mapping[str, str] = os.environ,
) -> Sharing:
    """Return how the clients of a run share the GPUs that are visible in this environment.

    `clients_per_gpu` is the user's number; None computes it from memory. `runs_at_a_time` such runs
    share the machine.
    """
    if runs_at_a_time < 1:
        raise ValueError(f"--runs-at-a-time {runs_at_a_time}: expected a whole number at least 1")
    if clients_per_gpu is not None and not 1 <= clients_per_gpu <= MAX_CLIENTS_PER_GPU:
        raise ValueError(
            f"--clients-per-gpu {clients_per_gpu}: expected 1 to {MAX_CLIENTS_PER_GPU}; for a run "
            "on the CPU set device=cpu"
        )
    kind, _, number = config.device.partition(":")
    if kind == "cuda" and number not in ("", "0"):
        raise ValueError(
            f"device = {config.device!r}: a simulated client sees one GPU, its first, expected "
            f"cuda or auto; choose the GPU with {VISIBLE}={number} in the environment, and "
            "device=cuda"
        )
    gpus = visible_gpus(environment) if kind in (AUTO, "cuda") else []
    if clients_per_gpu:
        if not gpus:
            raise ValueError(
                f"--clients-per-gpu {clients_per_gpu}: found no GPU for device = "
                f"{config.device!r}: expected auto or cuda, nvidia-smi to list a GPU, and "
                f"{VISIBLE}, if set, to name it; leave --clients-per-gpu out"
            )
        return Sharing(clients_per_gpu, gpus)
    if not gpus:
        return Sharing()
    # The most clients at a time on a GPU.
    cpus = max(1, (os.cpu_count() or 1) // runs_at_a_time)
    useful = -(-min(cpus, config.max_concurrent(num_clients)) // len(gpus))
    fitting = _find_max_fitting(config, gpus, runs_at_a_time)
    return Sharing(min(fitting, useful, MAX_CLIENTS_PER_GPU), gpus)


def _find_max_fitting(config: Config, gpus: Sequence[Gpu], runs: int) -> int:
    """Return how many clients fit on the GPU with least room; the server is on the first GPU."""
    from ravan_flwr.training.cost import footprint  # noqa: PLC0415 (torch, which takes seconds)

    needs = footprint(config)
    rooms = [USABLE * _free(gpu, runs) for gpu in gpus]
    rooms[0] -= needs.server
    # Without room for captured steps a client computes eagerly.
    fitting = [
        max(int(room // (needs.client + needs.graph)), int(room >= needs.client)) for room in rooms
    ]
    if min(fitting) < 1:
        worst = gpus[fitting.index(min(fitting))]
        raise ValueError(
            f"GPU {worst.index} ({worst.name}) is too small: a client needs "
            f"{needs.client / 1e9:.1f} GB and the server {needs.server / 1e9:.1f} GB, but 90 % of "
            f"{_free(worst, runs) / 1e9:.1f} GB free are less; lower batch-size, set "
            f"gradient-checkpointing=true, backbone-dtype=4bit or device=cpu, name other GPUs in "
            f"{VISIBLE}, or try --clients-per-gpu 1"
        )
    return min(fitting)


def _free(gpu: Gpu, runs: int) -> int:
    """Return the bytes of a GPU's memory for one of `runs` runs."""
    if gpu.free is None or gpu.total is None:
        raise ValueError(
            f"GPU {gpu.index} ({gpu.name}): nvidia-smi does not report its memory, so the number "
            "of clients that fit is unknown; set --clients-per-gpu"
        )
    return min(gpu.free, gpu.total // runs)
