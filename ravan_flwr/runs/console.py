"""Show a person a line a round, a progress bar in a terminal, and a summary.

Lines go to the logger `ravan_flwr`. `show` sends them to standard output as they are, and
keeps them out of the way of a progress bar where there is one.
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ravan_flwr.files import LARGE, check_file, opened
from ravan_flwr.runs.record import ClientRecord, RoundRecord

log = logging.getLogger("ravan_flwr")


class _Plain(logging.Handler):
    """Write log lines to whatever standard output is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if record.levelno >= logging.WARNING:
            line = f"{record.levelname.lower()}: {line}"
        try:
            tqdm.write(_encodable(line, sys.stdout.encoding), file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever read along has seen enough: the run goes on
            hush()
        except (OSError, ValueError):  # a terminal that is gone, a full disk, a closed file
            pass


def _encodable(line: str, encoding: str | None) -> str:
    """Replace each character that the console does not know by an escape."""
    codec = encoding or "utf-8"
    return line.encode(codec, errors="backslashreplace").decode(codec)


def hush() -> None:
    """Let standard output go nowhere from here on, also what Python writes out at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def show() -> None:
    """Send the package's log to standard output; calling it twice changes nothing."""
    log.setLevel(logging.INFO)
    log.propagate = False
    if not any(isinstance(handler, _Plain) for handler in log.handlers):
        log.addHandler(_Plain())


def show_in_one_line(error: Exception) -> None:
    """Let Flower log an error of this package without a traceback: its text says what to do."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None or not frame.tb_frame.f_globals["__name__"].startswith("ravan_flwr."):
        return  # of a library: where it was raised says more than its text

    def shorten(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is error:
            record.msg, record.args = f"{record.getMessage()}: {error}", ()
            record.exc_info = None
        return True

    logging.getLogger("flwr").addFilter(shorten)


def say(text: str) -> None:
    """Write to standard output at once; a reader that has seen enough (`| head`) ends nothing."""
    try:
        sys.stdout.write(_encodable(text, sys.stdout.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        hush()


def say_loading() -> None:
    """Tell a person at a terminal why nothing else is printed for some seconds."""
    if sys.stderr.isatty():
        sys.stderr.write("loading PyTorch and the model ...\n")
        sys.stderr.flush()


class Progress:
    """Write one line a round, and in a terminal a bar below the lines."""

    def __init__(
        self, first: int, last: int, metric: str, most: float | None = None, spent: int = 0
    ) -> None:
        """Begin at that round; of `most` bytes that may be sent so many are spent."""
        self.last, self.metric = last, metric
        self._most, self._spent = most, spent
        self._seconds: list[float] = []
        hidden = not sys.stderr.isatty()
        start = first - 1
        self._bar = tqdm(total=last, initial=start, unit="round", disable=hidden, leave=False)

    def calibrated(self, record: RoundRecord) -> None:
        """Tell of a calibration round."""
        self._spent += record["bytes-up"] + record["bytes-down"]
        clients = record["clients"]
        log.info(
            f"calibration  {_loss(record)}{count(len(clients), 'client')}  "
            f"{_sent(record)}  {record['seconds']:.1f} s"
        )

    def round(self, record: RoundRecord) -> None:
        """Tell of a finished round."""
        self._spent += record["bytes-up"] + record["bytes-down"]
        self._seconds.append(record["seconds"])
        left = remaining(self._seconds, self.last - record["round"])
        clients, number = record["clients"], record["round"]
        value = record["metrics"].get(self.metric)
        score = f"{value:.4f}" if value is not None else "   -  "
        used = f"{self._spent / self._most:.1%} of max-bytes  " if self._most else ""
        anew = f"  began anew {len(record['began-anew'])}" if "began-anew" in record else ""
        simulated = any("device" in client for client in clients)
        passed = f"simulated {record['time']:.4g} s  " if simulated else ""
        rejected = f"  rejected {len(record['rejected'])}" if record["rejected"] else ""
        log.info(
            f"round {number:{len(str(self.last))}d}/{self.last}  {_loss(record)}"
            f"{self.metric} {score}  {_spent(record)}{_amounts(clients)}{_sent(record)}  "
            f"{used}{passed}{record['seconds']:.1f} s  left {minutes(left)}{rejected}{anew}"
        )
        self._bar.update(1)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


def _loss(record: RoundRecord) -> str:
    """Write the clients' mean loss, if they told it."""
    return f"train loss {record['train-loss']:.4f}  " if "train-loss" in record else ""


def _spent(record: RoundRecord) -> str:
    """Write what a private run has spent so far, and for how many clients a round that holds."""
    if (spent := record.get("privacy")) is None:
        return ""
    of = f" of {spent['noise-cohort']} a round" if "noise-cohort" in spent else ""
    return f"epsilon {spent['epsilon']:.3f}{of}  "


def _sent(record: RoundRecord) -> str:
    """Write how much all clients sent (up) and received (down), evaluation included."""
    return f"up {megabytes(record['bytes-up'])}  down {megabytes(record['bytes-down'])}"


def _amounts(clients: list[ClientRecord]) -> str:
    """Write how many heads each client trained, or what part of another method's ranks."""
    amounts = {
        "heads": [client["heads"] for client in clients],
        "budget": [client["budget-fraction"] for client in clients],
    }
    for name, values in amounts.items():
        if any(value != 1 for value in values):
            least, most = min(values), max(values)
            same = f"{most:g} x {len(values)}"
            return f"{name} {same if least == most else f'{least:g} to {most:g}'}  "
    return ""


def remaining(seconds: Sequence[float], rounds: int) -> float:
    """Estimate how many seconds so many more rounds take, by the last ten."""
    last = seconds[-10:]
    return sum(last) / len(last) * max(0, rounds)


def count(number: int, noun: str) -> str:
    """Write a number of things for people: 1 node, 2 nodes."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def megabytes(number: int) -> str:
    """Write bytes for people."""
    return f"{number / 1e6:.2f} MB" if number >= 1e5 else f"{number / 1e3:.1f} kB"


def minutes(seconds: float) -> str:
    """Write seconds for people."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def uploads_seen(config: Mapping[str, Any]) -> str:
    """Say what a server with secure aggregation sees of uploads; "" of a run without."""
    if not config.get("secure-aggregation"):
        return ""
    least = config["secure-minimum"]
    return f"masked: the server sees sums over at least {least} clients, head by head"


LOG_FILE = "log.txt"
_LOG_FORM = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")


class _Appending(logging.FileHandler):
    """Append lines; a full disk loses some, and stops nothing."""

    def handleError(self, record: logging.LogRecord) -> None:
        del record


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """Append what the package logs meanwhile to the folder's log."""
    try:
        if (folder / LOG_FILE).exists():
            check_file(folder / LOG_FILE)
        # Text can hold halves of characters, which are no text in UTF-8.
        handler = _Appending(folder / LOG_FILE, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        log.warning("no log file: %s", error)
        yield
        return
    handler.setFormatter(_LOG_FORM)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def last_lines(folder: Path, most: int = 200, most_bytes: int = 65536) -> list[str]:
    """Read the last lines of the folder's log; none if there is no log."""
    try:
        with opened(folder / LOG_FILE, LARGE) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            text = file.read().decode(errors="replace")
    except (OSError, ValueError):  # there is none, or it is none
        return []
    lines = text.splitlines()
    return lines[1 if size > most_bytes else 0 :][-most:]  # the first may have been cut
