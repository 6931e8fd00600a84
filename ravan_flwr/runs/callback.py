"""Call what watches a run: at its beginning, after each round, and at its end.

The app's own files are written so: records and checkpoints, and the dashboard's status; and
devices are delivered their result.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.runs.status import RunStatus

HOOKS = ("on_run_begin", "on_round_end", "on_status", "on_run_end")


class Callback:
    """Watch a run on the server; override what is wanted.

    Pass instances to `simulate(..., callbacks=[...])`, or to `ravan_flwr.server_app.run` from a
    ServerApp of your own. They are called in their order, after the app's own, in the server's
    process. An error that a callback raises ends the run.
    """

    def on_run_begin(self) -> None:
        """Prepare, before clients are recruited; the run directory exists."""

    def on_round_end(self, record: RoundRecord, state: Mapping[str, Tensor]) -> None:
        """Look at a round, whose line and checkpoint are on disk.

        Args:
            record: The round's line of `rounds.jsonl`. Round 0 is a calibration, if there is one.
            state: The global state after the round, by name; RAVAN's is {"H": (layers, heads, r,
                r)}, and "classifier" where that is trained. Not to be changed.
        """

    def on_status(self, status: RunStatus) -> None:
        """Look at what the run does now, several times a round: who was asked, who answered.

        Args:
            status: What `status.json` has.
        """

    def on_run_end(self) -> None:
        """Finish, when the result and `summary.json` are on disk; not called if the run failed."""


class Callbacks(Callback):
    """Call several callbacks in turn. One may be any object with some of the hooks."""

    def __init__(self, callbacks: Iterable[object] = ()) -> None:
        if not isinstance(callbacks, Iterable):
            raise ValueError(
                f"callbacks = {callbacks!r}: got an object, expected a list of callbacks; pass "
                "callbacks=[...]"
            )
        self.all: list[Any] = list(callbacks)
        for number, callback in enumerate(self.all):
            if isinstance(callback, type):
                raise ValueError(
                    f"callbacks[{number}] = {callback!r}: got a class, expected an object; pass "
                    f"{callback.__name__}()"
                )
            if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
                raise ValueError(
                    f"callbacks[{number}] = {callback!r}: got an object without a hook, expected "
                    f"one of {', '.join(HOOKS)}; derive it from ravan_flwr.Callback"
                )

    def _call(self, hook: str, *arguments: object) -> None:
        for callback in self.all:
            getattr(callback, hook, _nothing)(*arguments)

    def on_run_begin(self) -> None:
        self._call("on_run_begin")

    def on_round_end(self, record: RoundRecord, state: Mapping[str, Tensor]) -> None:
        self._call("on_round_end", record, state)

    def on_status(self, status: RunStatus) -> None:
        self._call("on_status", status)

    def on_run_end(self) -> None:
        self._call("on_run_end")


def _nothing(*_: object) -> None:
    """Do nothing, where a callback has no such hook."""
