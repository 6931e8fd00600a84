"""Keep model and examples between a SuperNode's messages, in a process: the warm worker.

Flower starts a process for every message, and ends it with the reply. With `warm-worker=true` in
the node config that process hands its message to the worker, over a socket that only the
SuperNode's user can open, and takes the answer back. The worker is the process's child, so it
has its user, its environment and its log. It answers one message at a time, and it ends

- with the process that starts Flower's client processes, and so with the SuperNode,
- when whoever asked is gone before the answer, as after `flwr stop`, even in the middle of it,
- when it is asked by another app: other files, or the same in another folder,
- after an error that is not one of bad input: who knows what it leaves behind on a GPU,
- after half an hour without a question.

What it keeps is of one run: another one reads its model and its examples anew.
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

from ravan_flwr.client.on_device import folder_of_sockets, task_of_process, work_for_task
from ravan_flwr.config.node_config import read_node, use_cache
from ravan_flwr.importing import importing
from ravan_flwr.messages.fingerprint import code_fingerprint
from ravan_flwr.messages.records import receive_records, send_records

log = logging.getLogger(__name__)

IDLE_SECONDS = 1800.0
START_SECONDS = 60.0  # until a worker listens; it imports nothing heavy before
LOOK_SECONDS = 0.5  # how often it looks whether its owner and its asker are there
_READY = b"ready"

_started: list[subprocess.Popen[bytes]] = []  # they outlive this process, and are not waited for


# What Flower's client process does.


def ask(kind: str, content: RecordDict, context: Context) -> RecordDict:
    """Ask the worker, which is started if there is none. Changes the context's state."""
    owner = os.getppid()  # starts the client processes, and ends with the SuperNode
    path = folder_of_sockets() / f"{owner}.sock"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that one process alone starts it
        connection = _greet(path) or _start(path, owner)
    with connection:
        try:
            send_records(
                connection,
                {
                    "kind": kind,
                    "node-id": context.node_id,
                    "run-id": context.run_id,
                    "node-config": dict(context.node_config),
                    "run-config": dict(context.run_config),
                    "task-id": task_of_process(),
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
        if records:  # what it noted before it failed, as a process of its own would have
            (context.state,) = records
        # With the name of the class, where it is not the one that tells of bad input.
        raise (ValueError if header["bad-input"] else RuntimeError)(header["error"])
    reply, context.state = records
    return reply


def _greet(path: Path) -> Connection | None:
    """Connect to a worker that waits for a question; None if there is none of this code."""
    try:
        connection = Client(str(path), family="AF_UNIX")
    except (FileNotFoundError, ConnectionError):
        return None
    try:
        connection.send_bytes(_who())
        if connection.recv_bytes() == _READY:
            return connection
    except (EOFError, ConnectionError):
        pass
    connection.close()
    return None


def _start(path: Path, owner: int) -> Connection:
    """Start a worker, and connect to it."""
    path.unlink(missing_ok=True)  # of one that had no time to
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        # -P: not what lies in the working directory, which may be another checkout.
        [sys.executable, "-P", "-m", "ravan_flwr.client.worker", str(path), str(owner)],
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
    )
    _started.append(process)
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if connection := _greet(path):
            return connection
        time.sleep(0.01)
    process.kill()
    raise RuntimeError("the warm worker did not start; see the SuperNode's log")


def _who() -> bytes:
    """Name this app by its code, and by its folder, since presets lie beside the code."""
    return f"{code_fingerprint()} {Path(__file__).resolve().parents[1]}".encode()


# What the worker does.


class Worker:
    """Answer one question after the other, until there is a reason to end."""

    def __init__(self, path: Path, owner: int) -> None:
        import psutil  # noqa: PLC0415 (who asks does without it)

        self._owner = psutil.Process(owner)  # never mistaken for a later one of the same number
        self._listener = Listener(str(path), family="AF_UNIX", backlog=16)
        self._path = path
        self._busy = threading.Lock()  # held where the asker is looked at, or exchanged
        self._asker: Connection | None = None
        self._idle_since = time.monotonic()
        self._run: int | None = None  # whose model and examples it has
        self._retired = False

    def serve(self) -> None:
        """Answer until there is a reason to end."""
        threading.Thread(target=self._watch, daemon=True).start()
        who = _who()
        while not self._retired:
            with self._listener.accept() as connection:
                try:
                    if connection.recv_bytes() == who:
                        connection.send_bytes(_READY)
                        self._answer(connection)
                    else:
                        self._retire()
                except (EOFError, OSError):
                    log.info("whoever asked the warm worker is gone")
                finally:
                    self._free()

    def _answer(self, connection: Connection) -> None:
        header, (content, state) = receive_records(connection)
        with self._busy:
            self._asker = connection
        records = [state]  # with what an answer has noted before it failed
        try:
            records = _answer_of(header, content, state, new=header["run-id"] != self._run)
            self._run = header["run-id"]
            header = {}
        except Exception as error:
            log.exception("the warm worker could not answer")
            bad = isinstance(error, ValueError)
            text = str(error) if bad else f"{type(error).__name__}: {error}"
            header = {"error": text, "bad-input": bad}
            if not bad:
                self._retire()
        self._free()  # whoever asked may go now
        send_records(connection, header, records)

    def _retire(self) -> None:
        """Answer nobody any more; whoever comes next finds no socket, and starts another worker."""
        self._retired = True
        self._listener.close()

    def _free(self) -> None:
        with self._busy:
            self._asker, self._idle_since = None, time.monotonic()

    def _watch(self) -> None:
        """End the process when nobody wants it any more, whatever it is doing."""
        import psutil  # noqa: PLC0415 (as above)

        while True:
            time.sleep(LOOK_SECONDS)
            with self._busy:
                if self._asker is None:
                    unwanted = time.monotonic() - self._idle_since > IDLE_SECONDS
                else:
                    # Before the answer nothing but an end can be read.
                    unwanted = self._asker.poll()
                try:  # to psutil it still runs until its parent has noticed its end
                    alive = self._owner.is_running()
                    alone = not alive or self._owner.status() == psutil.STATUS_ZOMBIE
                except psutil.NoSuchProcess:
                    alone = True
                if alone:
                    self._path.with_suffix(".lock").unlink(missing_ok=True)
                if unwanted or alone:
                    self._path.unlink(missing_ok=True)
                    os._exit(0)


def _answer_of(
    header: dict[str, Any], content: RecordDict, state: RecordDict, *, new: bool
) -> list[RecordDict]:
    """Collect the client's answer, and the state that it leaves; `new` is the first of a run."""
    settings = header["node-config"], state, header["run-config"]
    context = Context(header["run-id"], header["node-id"], *settings)
    work_for_task(header["task-id"])
    use_cache(read_node(context.node_config).cache_dir)
    with importing():
        from ravan_flwr.client import answers  # noqa: PLC0415
    if new:
        answers.forget()
    reply = answers.answer(header["kind"], content, context)
    return [reply, context.state]


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.INFO)
    Worker(Path(sys.argv[1]), int(sys.argv[2])).serve()
