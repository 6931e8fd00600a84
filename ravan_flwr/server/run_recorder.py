"""Write each round's record, checkpoint and line on the screen; make the run's summary."""

import secrets
import time
from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Any

from torch import Tensor

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import from_record
from ravan_flwr.messages.fingerprint import code_version
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.callback import Callback
from ravan_flwr.runs.checkpoint import drop_after, save_checkpoint, save_fixed, save_personal_states
from ravan_flwr.runs.collapse_detection import best_round, collapse_reason, merit
from ravan_flwr.runs.console import Progress
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord, Summary
from ravan_flwr.runs.tracking import Trackers
from ravan_flwr.server.resume import ResumePoint, total_seconds
from ravan_flwr.server.stop_conditions import reached
from ravan_flwr.server.strategy import FederatedTuning
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.training.model_and_data import ModelAndData

log = getLogger(__name__)


class RunRecorder(Callback):
    """Write a finished round: its record, then its checkpoint, then its line on the screen."""

    def __init__(
        self,
        directory: RunDirectory,
        loaded: ModelAndData,
        progress: Progress,
        trackers: Trackers,
        start: ResumePoint,
        strategy: FederatedTuning,
        personal_states: Callable[[], Mapping[int, Tensors]] | None = None,
    ) -> None:
        self.directory, self.loaded, self.metric = directory, loaded, loaded.task.metric
        self.strategy = strategy
        self.tally: Tally | None = None  # of the last evaluation, if the server made it
        self.progress, self.trackers = progress, trackers
        self._earlier = start.records  # of the run that is resumed
        self._personal_states = personal_states  # by client, of a run in process
        self.after = start.last_round  # later rounds are dropped when the next round is done

    def drop_later_rounds(self) -> None:
        """Drop records and checkpoints after the round that the run was resumed from, once."""
        if self.after is not None:
            drop_after(self.directory.checkpoints, self.after)
            self.directory.write_rounds(self._earlier)
            self.after = None

    def on_recruited(self) -> None:
        """Start the trackers."""
        self.trackers.open()

    def on_round_end(self, record: RoundRecord, state: Mapping[str, Tensor]) -> None:
        """Save a round and its state; log a warning if an evaluation is the first collapsed one."""
        self.drop_later_rounds()
        records = self.strategy.records  # `record` is the last
        before, reason, number = records[:-1], None, record["round"]
        if number and self.loaded.model.trainable_parameters():
            labels = self.loaded.task.data.labels if self.loaded.task.classifies else ()
            last = number == self.progress.last
            reason = collapse_reason(before, record, self.metric, labels, self.tally, last=last)
        if reason:
            record["collapsed"] = reason
        measured = [earlier for earlier in before if earlier["metrics"]]
        begins = reason and not (measured and "collapsed" in measured[-1])
        self.directory.append_round(record)
        self.directory.write_num_clients(record["partitions"])
        self.directory.write_node_keys(self.strategy.federation.registry.owners)
        folder, best = self.directory.checkpoints, None
        if number:
            best = best_round(records, self.metric)
            if self._personal_states is not None:
                save_personal_states(folder, number, self._personal_states())
            save_checkpoint(folder, number, dict(state), self.strategy.memory, best)
            self.progress.round(record)
        else:  # the calibration
            fixed = self.strategy.federation.message_builder.fixed
            assert fixed is not None
            save_fixed(folder, from_record(fixed))
            save_checkpoint(folder, 0, dict(state), self.strategy.memory)
            self.progress.calibrated(record)
        self.trackers.round(record)
        if begins:
            back = any(r["round"] == best and "collapsed" not in r for r in records)
            log.warning(
                "round %d COLLAPSED: %s. The likely cause is a learning rate that is too high "
                "(here %g), for which a new run needs a lower learning-rate; another is a false "
                "reply%s",
                *(number, reason, self.loaded.config.learning_rate),
                f", after which resume={self.directory.path}@{best} goes back" if back else "",
            )


def make_summary(
    loaded: ModelAndData,
    config: Config,
    records: list[RoundRecord],
    num_clients: int,
    *,
    simulated: bool,
) -> Summary:
    """Return the content of `summary.json`, without the norms of the heads."""
    measured = [record["metrics"] for record in records if record["metrics"]]
    metric = loaded.task.metric
    summary: Summary = {
        "method": config.method,
        "preset": config.preset,
        "seed": config.seed,
        "classifier": config.classifier,
        "num-clients": num_clients,
        "simulated": simulated,
        "rounds": sum(record["round"] > 0 for record in records),  # 0 is the calibration
        "rank": config.rank,
        "learning-rate": config.learning_rate,
        "trainable-parameters": loaded.model.trainable_parameters(),
        "adapter-parameters": loaded.model.method.trainable_parameters(),
        "metric": metric,
        "metrics": {
            "final": measured[-1] if measured else {},
            "best": max(measured, key=lambda m: merit(m, metric)) if measured else {},
        },
        "bytes-up": sum(record["bytes-up"] for record in records),
        "bytes-down": sum(record["bytes-down"] for record in records),
        "rejected": sum(len(record["rejected"]) for record in records),
        "collapsed": [record["round"] for record in records if "collapsed" in record],
        "without-effect": [record["round"] for record in records if "refused" in record],
        "not-eligible": records[-1]["not-eligible"] if records else [],
        "seconds": total_seconds(records),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "code": code_version(),
    }
    trained = [client for record in records if record["round"] for client in record["clients"]]
    if all("steps" in client for client in trained):
        summary["steps"] = sum(client["steps"] for client in trained)
    links = [record["link-bytes-estimate"] for record in records if "link-bytes-estimate" in record]
    if links:
        summary["link-bytes-estimate"] = sum(links)
    if spreads := [record["per-client"] for record in records if record.get("per-client")]:
        summary["per-client"] = spreads[-1]
    if config.until_metric:
        summary["until-metric"] = config.until_metric
        if (first := reached(config, metric, records)) is not None:
            summary["reached"] = first["round"]
    if loaded.model.method.personal is not None:
        summary["began-anew"] = sum(len(record.get("began-anew", ())) for record in records)
    return summary


def carry_over(directory: RunDirectory, start: ResumePoint, summary: Summary) -> None:
    """Keep the earlier run id, and the delivery records if no round was added since."""
    before: Mapping[str, Any] = {}
    if start.last_round is not None and (directory.path / "summary.json").is_file():
        before = directory.read_summary()
    summary["run-id"] = before.get("run-id") or secrets.token_hex(8)
    measured = summary["rounds"], summary["seconds"]  # others, if the run went back in between
    if (before.get("rounds"), before.get("seconds")) == measured and "delivered" in before:
        summary["delivered"] = before["delivered"]
        summary["not-delivered"] = before["not-delivered"]
