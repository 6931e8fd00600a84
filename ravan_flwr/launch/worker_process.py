"""Answer clients' messages in a process of their own, for a run in process on several cores.

The process that runs the server hands it one message after the other, with the client's context,
and takes back the reply and the state that the client keeps. A worker knows nothing of rounds. It
ends with the process that it works for, whatever it is doing then.
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
from ravan_flwr.config.presets import own_preset
from ravan_flwr.flower_private import TaskIdentity
from ravan_flwr.specs import Scalar

FIRST_TO_END = "500"  # of a thousand: when memory runs out, a worker rather than the server


def identify() -> None:
    """Give this process the identity from which a `Message` takes its run and its sender."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0


def reply_of(message: Message, context: Context) -> Message:
    """Let a client answer; its error is a reply, as it is to Flower."""
    try:
        return client_app.app(message, context)
    except Exception as error:  # noqa: BLE001
        return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)


def leave_signals_to_the_server() -> None:
    """Ignore what a terminal sends to all of its processes: the server ends the workers."""
    for name in ("SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def prepare(run_config: Mapping[str, Scalar], threads: int | None) -> None:
    """Import torch; with a number of threads, load the model unless it is there, and set them."""
    import torch  # noqa: PLC0415 (a worker's own module must not: it is forked, or imported anew)

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
            content, kind, group, context = connection.recv()
            context.run_config = own_preset(context.run_config)  # may name a preset by its path
            reply = reply_of(Message(content, context.node_id, kind, group_id=group), context)
            answer = reply.error if reply.has_error() else reply.content
            lines = [(record.name, record.levelno, record.getMessage()) for record in log.buffer]
            log.buffer.clear()
            connection.send((answer, context.state, lines))
    os._exit(0)


def _end_with_the_server(connection: Connection) -> None:
    """End this process when the other end of the connection is gone, also amid a computation."""
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # nothing but a hang-up
    poll.poll()
    os._exit(0)


def _collect_log() -> BufferingHandler:
    """Collect what the package logs, for the server's process to log it."""
    handler = BufferingHandler(sys.maxsize)
    package = logging.getLogger("ravan_flwr")
    package.handlers, package.propagate = [handler], False
    return handler


def _main(descriptor: int) -> NoReturn:
    """Serve in a new process, whose first message says what to load."""
    leave_signals_to_the_server()
    identify()
    connection = Connection(descriptor)
    run_config, threads = connection.recv()

    from ravan_flwr.importing import importing  # noqa: PLC0415

    with importing():
        prepare(own_preset(run_config), threads)
    serve(connection)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
