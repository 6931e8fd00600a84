"""Count the clients of a run in process that work at a time, each in a process of its own."""

from dataclasses import dataclass

import torch

from ravan_flwr.config.run_config import Config
from ravan_flwr.training.cores import usable_cores


@dataclass(frozen=True)
class Workers:
    """Say how many processes compute, and with how many threads each."""

    number: int
    threads: int


def most_workers(config: Config, num_clients: int, threads: int | None, *, on_cpu: bool) -> Workers:
    """Count the processes that `processes=N` asks for, and with "auto" those that may pay.

    `threads` are those of a client that has the machine to itself: see `suitable_threads`.
    """
    cores, alone = usable_cores(), threads or torch.get_num_threads()
    wanted = config.processes or (max(1, cores // alone) if on_cpu else 1)
    number = min(wanted, config.at_work_of(num_clients))
    # What a user has set is not divided; `threads` is None then.
    return Workers(number, min(alone, max(1, cores // number)) if threads else alone)
