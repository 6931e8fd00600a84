"""Keep what each round made: its record, its checkpoint, its line on the screen."""

from collections.abc import Callable, Mapping
from logging import getLogger

from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.checkpoint import drop_after, save_checkpoint, save_fixed, save_own_parts
from ravan_flwr.runs.console import Progress
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.runs.tracking import Trackers
from ravan_flwr.runs.watch import best_round, collapse
from ravan_flwr.server.start import Start
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.training.workbench import Workbench

log = getLogger(__name__)


class Keeper:
    """Write a finished round to the record, then the checkpoint, then the screen."""

    def __init__(
        self,
        directory: RunDirectory,
        bench: Workbench,
        progress: Progress,
        trackers: Trackers,
        start: Start,
        own_parts: Callable[[], Mapping[int, Tensors]] | None = None,
    ) -> None:
        self.directory, self.bench, self.model = directory, bench, bench.model
        self.metric = bench.task.metric
        self.tally: Tally | None = None  # what was predicted in the last evaluation, if known
        self.progress, self.trackers = progress, trackers
        self.records = list(start.records)
        self._own_parts = own_parts  # of the clients, where they are in this process and have some
        self.after = start.done  # what lies behind that round is dropped when the next is done

    def go_on(self) -> None:
        """Drop what lies behind the round that the run went on after, once."""
        if self.after is not None:
            drop_after(self.directory.checkpoints, self.after)
            self.directory.write_rounds(self.records)
            self.after = None

    def _append(self, record: RoundRecord) -> None:
        self.go_on()
        self.directory.append_round(record)

    def calibrated(self, record: RoundRecord, fixed: Tensors, state: Tensors) -> list[float]:
        """Save what a calibration round made, and load it; return the model's new fingerprint."""
        self._append(record)
        save_fixed(self.directory.checkpoints, fixed)
        save_checkpoint(self.directory.checkpoints, 0, state)
        self.model.load_fixed(fixed)
        self.records.append(record)
        self.progress.calibrated(record)
        self.trackers.round(record)
        return self.model.derived

    def round_done(self, record: RoundRecord, state: Tensors, memory: Tensors) -> None:
        """Save a round and its state; warn where evaluations begin to be collapsed."""
        if told := self._collapse(record):
            record["collapsed"] = told
        measured = [earlier for earlier in self.records if earlier["metrics"]]
        begins = told and not (measured and "collapsed" in measured[-1])
        self._append(record)
        self.records.append(record)
        best = best_round(self.records, self.metric)
        if self._own_parts is not None:
            save_own_parts(self.directory.checkpoints, record["round"], self._own_parts())
        save_checkpoint(self.directory.checkpoints, record["round"], state, memory, best)
        self.progress.round(record)
        self.trackers.round(record)
        if begins:
            log.warning("round %d COLLAPSED: %s. %s", record["round"], told, self._advice(best))

    def _collapse(self, record: RoundRecord) -> str | None:
        """Say how the evaluation of a round has collapsed; None if it has not."""
        if not self.model.trainable_parameters():
            return None
        labels = self.bench.task.data.labels if self.bench.task.classifies else ()
        last = record["round"] == self.progress.last
        return collapse(self.records, record, self.metric, labels, self.tally, last=last)

    def _advice(self, best: int | None) -> str:
        """Give the likely cause of a collapse, and what to do."""
        rate = self.bench.config.learning_rate
        back = [r["round"] for r in self.records if r["round"] == best and "collapsed" not in r]
        return (
            f"The likely cause is a learning rate that is too high (here {rate:g}), another is a "
            "false reply. Start again with a lower learning-rate"
            + (f", or go back: resume={self.directory.path}@{best}" if back else "")
        )
