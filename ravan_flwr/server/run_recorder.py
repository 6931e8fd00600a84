"""Keep what each round made: its record, its checkpoint, its line on the screen."""

from collections.abc import Callable, Mapping
from logging import getLogger

from torch import Tensor

from ravan_flwr.messages.arrays import from_record
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.callback import Callback
from ravan_flwr.runs.checkpoint import drop_after, save_checkpoint, save_fixed, save_own_parts
from ravan_flwr.runs.collapse_detection import best_round, collapse
from ravan_flwr.runs.console import Progress
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.runs.tracking import Trackers
from ravan_flwr.server.resume import ResumePoint
from ravan_flwr.server.strategy import FederatedTuning
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.training.model_and_data import ModelAndData

log = getLogger(__name__)


class RunRecorder(Callback):
    """Write a finished round to the record, then the checkpoint, then the screen."""

    def __init__(
        self,
        directory: RunDirectory,
        bench: ModelAndData,
        progress: Progress,
        trackers: Trackers,
        start: ResumePoint,
        strategy: FederatedTuning,
        own_parts: Callable[[], Mapping[int, Tensors]] | None = None,
    ) -> None:
        self.directory, self.bench, self.metric = directory, bench, bench.task.metric
        self.strategy = strategy
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
        self.directory.note_clients(record["partitions"])

    def on_round_end(self, record: RoundRecord, state: Mapping[str, Tensor]) -> None:
        """Save a round and its state; warn where evaluations begin to be collapsed."""
        if record["round"] == 0:
            self._save_calibration(record, state)
            return
        if told := self._collapse(record):
            record["collapsed"] = told
        measured = [earlier for earlier in self.records if earlier["metrics"]]
        begins = told and not (measured and "collapsed" in measured[-1])
        self._append(record)
        self.records.append(record)
        best = best_round(self.records, self.metric)
        if self._own_parts is not None:
            save_own_parts(self.directory.checkpoints, record["round"], self._own_parts())
        memory = self.strategy.memory
        save_checkpoint(self.directory.checkpoints, record["round"], dict(state), memory, best)
        self.progress.round(record)
        self.trackers.round(record)
        if begins:
            log.warning("round %d COLLAPSED: %s. %s", record["round"], told, self._advice(best))

    def _save_calibration(self, record: RoundRecord, state: Mapping[str, Tensor]) -> None:
        """Save what a calibration round made."""
        self._append(record)
        assert self.strategy.mail.fixed is not None  # the round has made it
        save_fixed(self.directory.checkpoints, from_record(self.strategy.mail.fixed))
        save_checkpoint(self.directory.checkpoints, 0, dict(state))
        self.records.append(record)
        self.progress.calibrated(record)
        self.trackers.round(record)

    def _collapse(self, record: RoundRecord) -> str | None:
        """Say how the evaluation of a round has collapsed; None if it has not."""
        if not self.bench.model.trainable_parameters():
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
