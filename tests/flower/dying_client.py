"""Kill a device in a phase of a secure round: its SuperNode and all of its processes.

Each process that Flower starts for a message runs `INSTALL` at its start (at_start.py).
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ravan_flwr.launch.superlink import list_processes

INSTALL = "from tests.flower import dying_client; dying_client.install({plan!r})"

Plan = dict[int, tuple[int, str]]  # partition -> (round, kind of message)


def install(plan: Plan) -> None:
    """Kill the device after its work for a planned message, before the reply is sent."""
    answer = ClientApp.__call__

    def answer_or_die(self: ClientApp, message: Message, context: Context) -> Message:
        reply = answer(self, message, context)
        kind = message.metadata.message_type.partition(".")[2]
        if kind:
            number = int(str(message.content.config_records["config"]["round"]))
            if plan.get(int(str(context.node_config["partition-id"]))) == (number, kind):
                _kill_the_machine()
        return reply

    ClientApp.__call__ = answer_or_die  # type: ignore[method-assign]


def _kill_the_machine() -> None:
    """Kill the SuperNode and all processes that it has started, this one last.

    The oldest first: this process ends with the one that stands for it (tests/fork_server.py).
    """
    processes = map(psutil.Process, list_processes(Path(os.environ["FLWR_HOME"])))
    for process in sorted(processes, key=psutil.Process.create_time):
        if process.pid != os.getpid():
            with suppress(psutil.NoSuchProcess):
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)
