"""Call a run's hooks: at its beginning, after each round, and at its end.

The app itself uses them to write records and checkpoints, and to deliver the result to devices.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ravan_flwr.runs.record import RoundRecord

HOOKS = ("on_run_begin", "on_round_end", "on_run_end")


class Callback:
    """Watch a run on the server; a subclass overrides the hooks that it needs.

    Pass instances to `simulate(..., callbacks=[...])`, or to `ravan_flwr.server_app.run` from a
    ServerApp of your own. Callbacks are called in their order, after the app's own, in the server's
    process. An error that a callback raises ends the run.
    """

    def on_run_begin(self) -> None:
        """Prepare: the run directory exists, and no client has been recruited."""

    def on_round_end(self, record: RoundRecord, state: Mapping[str, Tensor]) -> None:
        """Read a finished round, whose record and checkpoint are on disk.

        Args:
            record: The round's line of `rounds.jsonl`. Round 0 is a calibration, if there is one.
            state: The global state after the round, by name. RAVAN's is {"H": (layers, heads, r,
                r)}, with "classifier" where that is trained. Do not change it.
        """

    def on_run_end(self) -> None:
        """Finish: the result and `summary.json` are on disk. It is not called if the run failed."""


class Callbacks(Callback):
    """Call several callbacks in turn. A callback is any object with at least one of the hooks."""

    def __init__(self, callbacks: Iterable[object] = ()) -> None:
        if not isinstance(callbacks, Iterable):
            raise ValueError(
                f"callbacks = {callbacks!r}: got an object, expected a list of callbacks; pass "
                "callbacks=[...]"
            )
        self.all: list[Any] = list(callbacks)
        for number, callback in enumerate(self.all):
            has_hook = any(callable(getattr(callback, hook, None)) for hook in HOOKS)
            if isinstance(callback, type) or not has_hook:
                raise ValueError(
                    f"callbacks[{number}] = {callback!r}: expected an object with one of "
                    f"{', '.join(HOOKS)}; pass an instance of a class that is derived from "
                    "ravan_flwr.Callback"
                )

    def _call(self, hook: str, *arguments: object) -> None:
        for callback in self.all:
            if (call := getattr(callback, hook, None)) is not None:
                call(*arguments)

    def on_run_begin(self) -> None:
        self._call("on_run_begin")

    def on_recruited(self) -> None:
        """Call the app's own callbacks: the clients are accepted, and the first round follows."""
        self._call("on_recruited")

    def on_round_end(self, record: RoundRecord, state: Mapping[str, Tensor]) -> None:
        self._call("on_round_end", record, state)

    def on_run_end(self) -> None:
        self._call("on_run_end")
