"""Answer a message in several processes of this machine, with torchrun's environment variables.

So accelerate, and a Trainer, find their rank. The process that Flower started trains nothing: it
starts the ranks with Python's own `spawn`, waits for all of them, and returns the answer of rank 0.
"""

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from flwr.app import Context, RecordDict
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported all the same
from torch.multiprocessing.spawn import (
    ProcessException,
    ProcessExitedException,
    start_processes,
)

Answer = Callable[[RecordDict, Context], RecordDict]
HOST = "127.0.0.1"
GRACE = 5.0  # seconds that other ranks have to end by themselves, and again after SIGTERM


def answer_in_ranks(
    answer: Answer, ranks: int, content: RecordDict, context: Context
) -> RecordDict:
    """Call the function in new processes; return what rank 0 returns, with its state in `context`.

    RuntimeError with the reason, and the other processes ended, as soon as one of them fails.
    """
    try:
        call = pickle.dumps((answer, content, context))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"processes = {ranks}: got a function that other processes cannot import ({error}), "
            "expected one at the top of a module; define it there, without lambda"
        ) from error
    with TemporaryDirectory() as folder:
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        started = start_processes(_answer, (call, ranks, store.port, folder), ranks, join=False)
        try:
            while not started.join(grace_period=GRACE):
                pass
        except ProcessException as error:
            first = Path(folder, "error")
            known = first.exists() and not isinstance(error, ProcessExitedException)
            reason = first.read_text() if known else f"rank {error.error_index}: {error}"
            raise RuntimeError(
                f"{reason} (one of {ranks} processes; the others were ended)"
            ) from error
        finally:
            for process in started.processes:
                process.kill()
        if not (written := Path(folder, "reply")).exists():
            raise RuntimeError(
                f"rank 0: it ended with exit code 0 and without a reply, one of {ranks} processes, "
                "expected metrics and arrays; leave sys.exit() out of the loop and its callbacks"
            )
        reply, state = pickle.loads(written.read_bytes())  # noqa: S301 (our own)
    context.state.clear()
    context.state.update(state)
    assert isinstance(reply, RecordDict)
    return reply


def _answer(rank: int, call: bytes, ranks: int, port: int, folder: str) -> None:
    """Answer as one rank; rank 0 writes the reply, the first rank that fails its reason."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    # The store is the first process's, as with torchrun: no other program can take its port.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    try:
        # Only now: it imports the user's module, which may ask accelerate for the rank.
        answer, content, context = pickle.loads(call)  # noqa: S301 (our own)
        reply = answer(content, context)
        if rank == 0:
            Path(folder, "reply").write_bytes(pickle.dumps((reply, context.state)))
    except Exception as error:
        with suppress(FileExistsError), Path(folder, "error").open("x") as file:
            file.write(f"rank {rank}: {type(error).__name__}: {error}")
        raise
    if distributed.is_initialized():
        distributed.destroy_process_group()
