"""Keep model and examples in memory between a SuperNode's messages: the warm worker.

Flower starts a process for every message, and ends it with the reply. With `warm-worker=true` in
the node config that process hands its message to the worker, over a socket that only the
SuperNode's user can open, and takes the answer back. The worker is a child of such a process, so it
has its user, its environment and its log. It answers one message at a time, and it ends

- with the process that starts Flower's client processes, and so with the SuperNode,
- when the requesting process ends before the answer, as after `flwr stop`, even amid its work,
- when another app connects: other files, or the same in another folder,
- after an error other than bad input, which may leave a GPU in an unknown state,
- after half an hour without a message.

Model and examples belong to one run: for another run the worker reads them again.
"""

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from ravan_flwr.client.on_device import adopt_task, find_socket_folder, find_task
from ravan_flwr.config.node_config import read_node, use_cache
from ravan_flwr.importing import importing
from ravan_flwr.messages.fingerprint import code_fingerprint
from ravan_flwr.messages.records import receive_records, send_records

log = logging.getLogger(__name__)

IDLE_SECONDS = 1800.0
START_SECONDS = 60.0  # until a worker listens; it imports nothing heavy before
POLL_SECONDS = 0.5  # how often it checks that its owner and its requester are alive
_READY = b"ready"

_started: list[subprocess.Popen[bytes]] = []  # workers outlive this process: no wait for their end


# In Flower's client process.


def ask(message_type: str, content: RecordDict, context: Context) -> RecordDict:
    """Return the worker's answer, after starting one if necessary; change the context's state."""
    owner = os.getppid()  # starts the client processes, and ends with the SuperNode
    path = find_socket_folder() / f"{owner}.sock"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that only one process starts a worker
        connection = _connect(path) or _start(path, owner)
    with connection:
        try:
            send_records(
                connection,
                {
                    "message-type": message_type,
                    "node-id": context.node_id,
                    "run-id": context.run_id,
                    "node-config": dict(context.node_config),
                    "run-config": dict(context.run_config),
                    "task-id": find_task(),
                },
                [content, context.state],
            )
            header, records = receive_records(connection)
        except (EOFError, OSError):
            raise RuntimeError(
                "the warm worker ended before it answered; memory that ran out is the usual "
                "reason, and the SuperNode's log may have it. The next message starts another one"
            ) from None
    if "error" in header:
        if records:  # state written before the failure, as a separate process would keep it
            (context.state,) = records
        # The text includes the class of the error unless it is bad input.
        raise (ValueError if header["bad-input"] else RuntimeError)(header["error"])
    reply, context.state = records
    return reply


def _connect(path: Path) -> Connection | None:
    """Return a connection to a waiting worker of the same app; None if there is none."""
    try:
        connection = Client(str(path), family="AF_UNIX")
    except (FileNotFoundError, ConnectionError):
        return None
    try:
        connection.send_bytes(_app_id())
        if connection.recv_bytes() == _READY:
            return connection
    except (EOFError, ConnectionError):
        pass
    connection.close()
    return None


def _start(path: Path, owner: int) -> Connection:
    """Start a worker, and return a connection to it."""
    path.unlink(missing_ok=True)  # left by a worker that was killed
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        # -P: import nothing from the working directory, which may be another checkout.
        [sys.executable, "-P", "-m", "ravan_flwr.client.warm_worker", str(path), str(owner)],
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
    )
    _started.append(process)
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if connection := _connect(path):
            return connection
        time.sleep(0.01)
    process.kill()
    raise RuntimeError("the warm worker did not start; see the SuperNode's log")


def _app_id() -> bytes:
    """Return an identifier of this app: its code's fingerprint, and its folder with the presets."""
    return f"{code_fingerprint()} {Path(__file__).resolve().parents[1]}".encode()


# In the worker.


class Worker:
    """A process that answers one message at a time, until it has a reason to end."""

    def __init__(self, path: Path, owner: int) -> None:
        import psutil  # noqa: PLC0415 (the requesting process does not need it)

        self._owner = psutil.Process(owner)  # psutil recognises a reused process id
        self._listener = Listener(str(path), family="AF_UNIX", backlog=16)
        self._path = path
        self._busy = threading.Lock()  # held while the requester is checked or replaced
        self._requester: Connection | None = None
        self._idle_since = time.monotonic()
        self._run: int | None = None  # the run whose model and examples are in memory
        self._retired = False

    def serve(self) -> None:
        """Answer messages until the worker retires."""
        threading.Thread(target=self._watch, daemon=True).start()
        app_id = _app_id()
        while not self._retired:
            with self._listener.accept() as connection:
                try:
                    if connection.recv_bytes() == app_id:
                        with self._busy:
                            self._idle_since = time.monotonic()  # receiving may take a while
                        connection.send_bytes(_READY)
                        self._answer(connection)
                    else:
                        self._retire()
                except (EOFError, OSError):
                    log.info("the process that asked the warm worker has ended")
                finally:
                    self._release()

    def _answer(self, connection: Connection) -> None:
        header, (content, state) = receive_records(connection)
        with self._busy:
            self._requester = connection
        records = [state]  # with changes that an answer made before it failed
        try:
            records = _compute_answer(header, content, state, new=header["run-id"] != self._run)
            self._run = header["run-id"]
            header = {}
        except Exception as error:
            log.exception("the warm worker could not answer")
            bad = isinstance(error, ValueError)
            text = str(error) if bad else f"{type(error).__name__}: {error}"
            header = {"error": text, "bad-input": bad}
            if not bad:
                self._retire()
        self._release()  # from here on the requester may end
        send_records(connection, header, records)

    def _retire(self) -> None:
        """Close the socket, so that the next message starts another worker."""
        self._retired = True
        self._listener.close()

    def _release(self) -> None:
        with self._busy:
            self._requester, self._idle_since = None, time.monotonic()

    def _watch(self) -> None:
        """End the process when its requester or its owner has ended, or it was idle too long."""
        import psutil  # noqa: PLC0415 (as above)

        while True:
            time.sleep(POLL_SECONDS)
            with self._busy:
                if self._requester is None:
                    unwanted = time.monotonic() - self._idle_since > IDLE_SECONDS
                else:
                    # Before the answer the requester sends nothing: readable means closed.
                    unwanted = self._requester.poll()
                try:  # psutil reports a zombie, which has ended, as running
                    alive = self._owner.is_running()
                    orphaned = not alive or self._owner.status() == psutil.STATUS_ZOMBIE
                except psutil.NoSuchProcess:
                    orphaned = True
                if orphaned:
                    self._path.with_suffix(".lock").unlink(missing_ok=True)
                if unwanted or orphaned:
                    self._path.unlink(missing_ok=True)
                    os._exit(0)


def _compute_answer(
    header: dict[str, Any], content: RecordDict, state: RecordDict, *, new: bool
) -> list[RecordDict]:
    """Return the client's reply and its new state; `new` is True for a run's first message."""
    settings = header["node-config"], state, header["run-config"]
    context = Context(header["run-id"], header["node-id"], *settings)
    adopt_task(header["task-id"])
    use_cache(read_node(context.node_config).cache_dir)
    with importing():
        from ravan_flwr.client import answers  # noqa: PLC0415
    if new:
        answers.forget()
    reply = answers.answer(header["message-type"], content, context)
    return [reply, context.state]


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.INFO)
    Worker(Path(sys.argv[1]), int(sys.argv[2])).serve()
