"""Log a line a round, and show a progress bar in a terminal; keep a log file.

Lines go to the logger `ravan_flwr`. `log_to_stdout` sends them to standard output without
timestamps, above the progress bar if there is one.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from ravan_flwr.files import check_file
from ravan_flwr.runs.record import ClientRecord, RoundRecord

log = logging.getLogger("ravan_flwr")


class _Plain(logging.Handler):
    """Write log lines to the present `sys.stdout`, which may be replaced during a run."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if record.levelno >= logging.WARNING:
            line = f"{record.levelname.lower()}: {line}"
        try:
            tqdm.write(_encodable(line, sys.stdout.encoding), file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe: the run continues
            discard_stdout()
        except (OSError, ValueError):  # a terminal that is gone, a full disk, a closed file
            pass


def _encodable(line: str, encoding: str | None) -> str:
    """Replace characters that the console cannot encode by escapes."""
    codec = encoding or "utf-8"
    return line.encode(codec, errors="backslashreplace").decode(codec)


def discard_stdout() -> None:
    """Redirect standard output to the null device, including what Python flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def log_to_stdout() -> None:
    """Send the package's log to standard output; calling it twice changes nothing."""
    log.setLevel(logging.INFO)
    log.propagate = False
    if not any(isinstance(handler, _Plain) for handler in log.handlers):
        log.addHandler(_Plain())


def log_without_traceback(error: Exception) -> None:
    """Make Flower log an error of this package without a traceback: its text is sufficient."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None or not frame.tb_frame.f_globals["__name__"].startswith("ravan_flwr."):
        return  # raised in a library: its traceback is needed

    def shorten(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is error:
            record.msg, record.args = f"{record.getMessage()}: {error}", ()
            record.exc_info = None
        return True

    logging.getLogger("flwr").addFilter(shorten)


def write_stdout(text: str) -> None:
    """Write to standard output and flush it; a closed pipe (`| head`) is no error."""
    try:
        sys.stdout.write(_encodable(text, sys.stdout.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def report_loading() -> None:
    """Write to a terminal that PyTorch and the model are loading, which takes some seconds."""
    if sys.stderr.isatty():
        sys.stderr.write("loading PyTorch and the model ...\n")
        sys.stderr.flush()


class Progress:
    """Log one line a round; in a terminal, show a bar below the lines."""

    def __init__(
        self, first: int, last: int, metric: str, max_bytes: float | None = None, sent: int = 0
    ) -> None:
        """Begin at round `first`, when `sent` bytes have been sent."""
        self.last, self.metric = last, metric
        self._max_bytes, self._bytes = max_bytes, sent
        self._seconds: list[float] = []
        hidden = not sys.stderr.isatty()
        start = first - 1
        self._bar = tqdm(total=last, initial=start, unit="round", disable=hidden, leave=False)

    def calibrated(self, record: RoundRecord) -> None:
        """Log a calibration round."""
        self._bytes += record["bytes-up"] + record["bytes-down"]
        clients = record["clients"]
        log.info(
            f"calibration  {_loss(record)}{count(len(clients), 'client')}  "
            f"{_sent(record)}  {record['seconds']:.1f} s"
        )

    def round(self, record: RoundRecord) -> None:
        """Log a finished round."""
        self._bytes += record["bytes-up"] + record["bytes-down"]
        self._seconds.append(record["seconds"])
        left = fmean(self._seconds[-10:]) * max(0, self.last - record["round"])
        clients, number = record["clients"], record["round"]
        value = record["metrics"].get(self.metric)
        score = f"{value:.4f}" if value is not None else "   -  "
        used = f"{self._bytes / self._max_bytes:.1%} of max-bytes  " if self._max_bytes else ""
        anew = f"  began anew {len(record['began-anew'])}" if "began-anew" in record else ""
        simulated = any("device" in client for client in clients)
        passed = f"simulated {record['time']:.4g} s  " if simulated else ""
        rejected = f"  rejected {len(record['rejected'])}" if record["rejected"] else ""
        log.info(
            f"round {number:{len(str(self.last))}d}/{self.last}  {_loss(record)}"
            f"{self.metric} {score}  {_epsilon(record)}{_budgets(clients)}{_sent(record)}  "
            f"{used}{passed}{record['seconds']:.1f} s  left {minutes(left)}{rejected}{anew}"
        )
        self._bar.update(1)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def _loss(record: RoundRecord) -> str:
    """Format the clients' mean loss, if the round has one."""
    return f"train loss {record['train-loss']:.4f}  " if "train-loss" in record else ""


def _epsilon(record: RoundRecord) -> str:
    """Format a private run's epsilon so far, with the cohort that it assumes, if any."""
    if (spent := record.get("privacy")) is None:
        return ""
    of = f" of {spent['noise-cohort']} a round" if "noise-cohort" in spent else ""
    return f"epsilon {spent['epsilon']:.3f}{of}  "


def _sent(record: RoundRecord) -> str:
    """Format the bytes that all clients sent (up) and received (down), evaluation included."""
    return f"up {megabytes(record['bytes-up'])}  down {megabytes(record['bytes-down'])}"


def _budgets(clients: list[ClientRecord]) -> str:
    """Format the heads that clients trained, or else their budget fractions; empty if all are 1."""
    budgets = {
        "heads": [client["heads"] for client in clients],
        "budget": [client["budget-fraction"] for client in clients],
    }
    for name, values in budgets.items():
        if any(value != 1 for value in values):
            low, high = min(values), max(values)
            same = f"{high:g} x {len(values)}"
            return f"{name} {same if low == high else f'{low:g} to {high:g}'}  "
    return ""


def count(number: int, noun: str) -> str:
    """Format a number with its noun: 1 node, 2 nodes."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def megabytes(number: int) -> str:
    """Format a number of bytes."""
    return f"{number / 1e6:.2f} MB" if number >= 1e5 else f"{number / 1e3:.1f} kB"


def minutes(seconds: float) -> str:
    """Format a duration."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def uploads_seen(config: Mapping[str, Any]) -> str:
    """Describe what a server with secure aggregation sees of uploads; empty without it."""
    if not config.get("secure-aggregation"):
        return ""
    min_clients = config["secure-minimum"]
    return f"masked: the server sees sums over at least {min_clients} clients, head by head"


LOG_FILE = "log.txt"
_LOG_FORMAT = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")


class _Appending(logging.FileHandler):
    """Append lines to a file; a write that fails, as on a full disk, raises no error."""

    def handleError(self, record: logging.LogRecord) -> None:
        del record


@contextmanager
def logging_to(folder: Path, *, held: bool = False) -> Iterator[Callable[[], None]]:
    """Append the package's log lines to the folder's log file within the block.

    With `held`, lines are kept back until the function that is yielded is called.
    """
    try:
        if (folder / LOG_FILE).exists():
            check_file(folder / LOG_FILE)
        # Text can contain lone surrogates, which UTF-8 cannot encode.
        handler = _Appending(
            folder / LOG_FILE, encoding="utf-8", errors="backslashreplace", delay=held
        )
    except (OSError, ValueError) as error:
        log.warning("no log file: %s", error)
        yield lambda: None
        return
    handler.setFormatter(_LOG_FORMAT)
    buffer = MemoryHandler(sys.maxsize, sys.maxsize, handler, flushOnClose=False)

    def release() -> None:
        buffer.flushLevel = 0  # every line is written at once
        buffer.flush()

    if not held:
        release()
    log.addHandler(buffer)
    try:
        yield release
    finally:
        log.removeHandler(buffer)
        buffer.close()
        handler.close()
