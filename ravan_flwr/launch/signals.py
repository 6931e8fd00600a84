"""End a command on a signal as Ctrl-C does, with all that it started."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Ended(KeyboardInterrupt):
    """End the command on a signal: what cleans up after Ctrl-C cleans up after it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a terminal that closes, end a command once, as Ctrl-C does.

    Under `nohup` SIGHUP is ignored, and stays so. Only a process's main thread may set this.
    """
    ended = False

    def end(number: int, _: object) -> None:
        nonlocal ended
        if not ended:  # a second one does not stop the cleaning up
            ended = True
            raise Ended(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        wanted = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
        heard = [number for number in wanted if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
