"""Answer clients' messages in a worker process, for a run in process on several cores.

The server's process hands a worker one message after the other, with the client's context, and
takes back the reply and the client's new state. A worker has no state of rounds. It ends with the
server's process, even amid a computation.
"""

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from logging.handlers import BufferingHandler
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from flwr.app import Context, Error, Message

from ravan_flwr import client_app
from ravan_flwr.config.presets import with_preset_path
from ravan_flwr.flower_private import TaskIdentity
from ravan_flwr.specs import Scalar

FIRST_TO_END = "500"  # of 1000: out of memory, the system ends a worker rather than the server


def identify() -> None:
    """Set the identity of this process, from which a `Message` takes its run and its sender."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0


def compute_reply(message: Message, context: Context) -> Message:
    """Return a client's reply; an exception becomes an error reply, as under Flower."""
    try:
        return client_app.app(message, context)
    except Exception as error:  # noqa: BLE001
        return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)


def leave_signals_to_the_server() -> None:
    """Ignore signals that a terminal sends to all its processes: the server ends the workers."""
    for name in ("SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def prepare(run_config: Mapping[str, Scalar], threads: int | None) -> None:
    """Import torch; given `threads`, also set that number and load the model if necessary."""
    import torch  # noqa: PLC0415 (not at the top: new processes import it under `importing`)

    from ravan_flwr.config.run_config import read_config  # noqa: PLC0415
    from ravan_flwr.training.model_and_data import get_model_and_data  # noqa: PLC0415

    if threads is not None:
        torch.set_num_threads(threads)
        get_model_and_data(read_config(run_config)).model.threads = threads


def serve(connection: Connection) -> NoReturn:
    """Answer messages until the connection is closed."""
    with suppress(OSError):  # Linux has it
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_END)
    threading.Thread(target=_end_with_the_server, args=(connection,), daemon=True).start()
    log = _collect_log()
    with suppress(EOFError, OSError):
        while True:
            content, message_type, group, context = connection.recv()
            context.run_config = with_preset_path(
                context.run_config
            )  # may name a preset by its path
            reply = compute_reply(
                Message(content, context.node_id, message_type, group_id=group), context
            )
            answer = reply.error if reply.has_error() else reply.content
            lines = [(record.name, record.levelno, record.getMessage()) for record in log.buffer]
            log.buffer.clear()
            connection.send((answer, context.state, lines))
    os._exit(0)


def _end_with_the_server(connection: Connection) -> None:
    """End this process when the server closes the connection, even amid a computation."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # waits for a hang-up only
    poll.poll()
    os._exit(0)


def _collect_log() -> BufferingHandler:
    """Return a handler that collects the package's log, which the server's process then logs."""
    handler = BufferingHandler(sys.maxsize)
    package = logging.getLogger("ravan_flwr")
    package.handlers, package.propagate = [handler], False
    return handler


def _main(descriptor: int) -> NoReturn:
    """Serve in a new process, whose first message has run config and threads."""
    leave_signals_to_the_server()
    identify()
    connection = Connection(descriptor)
    run_config, threads = connection.recv()

    from ravan_flwr.importing import importing  # noqa: PLC0415

    with importing():
        prepare(with_preset_path(run_config), threads)
    serve(connection)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
