"""Serve as Flower's ServerApp: put a run together, start it, save what comes out."""

import dataclasses
import math
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from ravan_flwr.config.checks import without_effect
from ravan_flwr.config.keys import AUTO, FREE_ON_RESUME
from ravan_flwr.config.run_config import Config, has_default_rate, read_config
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.methods.base import Tensors
from ravan_flwr.results.card import measured, write_card
from ravan_flwr.results.classes import write_classes
from ravan_flwr.results.export import natural_form, write_result
from ravan_flwr.results.report import write_report
from ravan_flwr.runs.checkpoint import (
    drop_after,
    load_checkpoint,
    load_fixed,
    save_checkpoint,
    save_fixed,
)
from ravan_flwr.runs.console import Progress, megabytes, minutes, show
from ravan_flwr.runs.directory import RunDirectory, how_to_go_on
from ravan_flwr.runs.lock import locked
from ravan_flwr.runs.log_file import logging_to
from ravan_flwr.runs.record import RoundRecord, Summary
from ravan_flwr.runs.status import write_status
from ravan_flwr.runs.tracking import Trackers, check_tracking
from ravan_flwr.runs.watch import best_round, collapse
from ravan_flwr.server.delivery import Delivery, hand_out
from ravan_flwr.server.envelope import guard
from ravan_flwr.server.inbox import in_process, simulating
from ravan_flwr.server.mailbox import Mailbox
from ravan_flwr.server.roster import Roster
from ravan_flwr.server.status import Status
from ravan_flwr.server.strategy import FederatedTuning
from ravan_flwr.specs import RESULT_FOLDERS, Scalar
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.training.local_steps import check_precision
from ravan_flwr.training.workbench import Workbench, get_workbench

app = ServerApp()
log = getLogger(__name__)

RESULT = "ravan-flwr"  # the record in the context's state that says where the result lies


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run once, from the configuration to the summary."""
    show()
    config = read_config(context.run_config)
    parent = _output_folder(config)  # refused, if at all, before anything is loaded
    check_tracking(config.tracking)
    earlier, back_to = _resumed(config)
    with ExitStack() as stack:
        if earlier is not None:
            stack.enter_context(locked(earlier.path))
            stack.enter_context(logging_to(earlier.path))
        bench = get_workbench(config)
        if simulating(grid):
            _check_simulation(grid, bench, config)
        resolved = dataclasses.replace(bench.config, rank=bench.model.method.rank)
        if earlier is not None:
            start = _go_on(earlier, back_to, resolved, bench)
            if back_to is None and _is_to_be_delivered(earlier, resolved, start):
                context.state[RESULT] = ConfigRecord({"run-dir": str(earlier.path)})
                _deliver_again(grid, bench, resolved, earlier, start)
            else:
                _tell_if_all_are_done(start.done or 0, config.num_rounds, earlier.path)
                _run_here(grid, context, bench, resolved, earlier, start)
        else:
            name = f"{config.preset}-{config.method}-seed{config.seed}"
            directory = RunDirectory.create(parent, name)
            stack.enter_context(locked(directory.path, "output-dir"))
            stack.enter_context(logging_to(directory.path))
            start = Start(bench.model.initial_state())
            _run_here(grid, context, bench, resolved, directory, start)


def _tell_of_the_rate(run_config: Mapping[str, Scalar], config: Config) -> None:
    """Say in a line that nobody has chosen the learning rate."""
    if has_default_rate(run_config):
        preset = run_config.get("preset", config.preset)
        log.info(
            "learning rate %g: the default of %s, since the preset names none; `ravan-flwr tune "
            "preset=%s method=%s` chooses a better one",
            *(config.learning_rate, config.method, preset, config.method),
        )


def _tell_what_has_no_effect(run_config: Mapping[str, Scalar], config: Config, grid: Grid) -> None:
    """Say in a line which of the settings change nothing."""
    idle = without_effect(run_config)
    if idle:
        log.warning("no effect with method=%s: %s", config.method, ", ".join(idle))
    given = run_config.get("clients-per-round", AUTO) != AUTO
    number = len(list(grid.get_node_ids())) if simulating(grid) else 0
    if given and number and config.clients_per_round > number:
        log.warning(
            "clients-per-round=%d: there %s, and every round asks all of them",
            config.clients_per_round,
            "is 1 client" if number == 1 else f"are {number} clients",
        )


def _check_simulation(grid: Grid, bench: Workbench, config: Config) -> None:
    """Refuse at once, and once, what every simulated client would refuse by itself."""
    check_precision(config.precision, bench.model.device)
    number = len(list(grid.get_node_ids()))
    if not number:
        return
    if in_process(grid):  # whose examples these are as well
        _ = bench.partition(0, number)
    else:
        bench.dealt_out(number)


def _run_here(
    grid: Grid,
    context: Context,
    bench: Workbench,
    config: Config,
    directory: RunDirectory,
    start: "Start",
) -> None:
    """Run, and say where; a run that fails says why in its directory."""
    context.state[RESULT] = ConfigRecord({"run-dir": str(directory.path)})
    log.info("run directory: %s", directory.path)
    _tell_of_the_rate(context.run_config, config)
    _tell_what_has_no_effect(context.run_config, config, grid)
    try:
        _run(grid, bench, config, directory, start)
    except Exception as error:
        with suppress(OSError):  # the disk itself may be what failed
            directory.write_json("failure.json", {"error": f"{type(error).__name__}: {error}"})
        log.info("run directory: %s", directory.path)
        raise
    except KeyboardInterrupt:
        log.info("stopped; %s", how_to_go_on(directory.path))
        raise


@dataclasses.dataclass(frozen=True)
class Start:
    """Hold what a run begins with: a new one, or one that goes on after round `done`."""

    state: Tensors
    done: int | None = None
    memory: Tensors = dataclasses.field(default_factory=dict)
    records: list[RoundRecord] = dataclasses.field(default_factory=list)
    fixed: Tensors | None = None

    @property
    def first(self) -> int:
        """Number the next round."""
        return (self.done or 0) + 1


def _go_on(directory: RunDirectory, back_to: int | None, config: Config, bench: Workbench) -> Start:
    """Read what a run directory has to go on from, and check it; nothing is changed yet."""
    _check_same_run(directory, config)
    model = bench.model
    checkpoint = load_checkpoint(directory.checkpoints, back_to)
    records = directory.rounds_until(checkpoint.round)
    fixed = load_fixed(directory.checkpoints)
    if fixed is None and model.method.calibration is not None:
        raise ValueError(
            f"resume = {str(directory.path)!r}: found no checkpoints/fixed.safetensors, "
            "expected what the calibration round made; restore it, or start a new run"
        )
    if fixed is not None:
        model.load_fixed(fixed)
    log.info("going on after round %d", checkpoint.round)
    return Start(checkpoint.state, checkpoint.round, checkpoint.memory, records, fixed)


def _tell_if_all_are_done(done: int, wanted: int, run: Path) -> None:
    """Say so if a run that goes on has no round to hold."""
    if done < wanted:
        return
    back = f", or go back with resume={run}@{wanted}" if done > wanted else ""
    log.warning(
        "num-rounds = %d: %s already done, so that nothing is trained; ask for more than %d%s",
        wanted,
        "1 round is" if done == 1 else f"{done} rounds are",
        done,
        back,
    )


def _run(
    grid: Grid, bench: Workbench, config: Config, directory: RunDirectory, start: Start
) -> None:
    """Hold the rounds, save what comes out of them, and tell it."""
    if start.done is None:
        directory.write_json("config.json", config.as_dict())
    final, strategy = _hold_rounds(grid, bench, config, directory, start)
    summary = _summary(bench, config, start.records, len(strategy.roster.members))
    _carry_over(directory, start, summary)
    _save_result(final, bench, directory, summary)
    if config.deliver:
        delivery = Delivery(config, strategy.roster, strategy.mail, strategy.status)
        hand_out(grid, delivery, directory, final, summary, measured(summary, directory))
    _tell(summary, bench.task.metric, directory, _report(config, directory))


def _hold_rounds(
    grid: Grid, bench: Workbench, config: Config, directory: RunDirectory, start: Start
) -> tuple[Tensors, FederatedTuning]:
    """Let the strategy run its rounds; return the last state, and the strategy."""
    progress = Progress(start.first, config.num_rounds, bench.task.metric)
    trackers = Trackers(config.tracking, directory.path, config.as_dict())
    keeper = _Keeper(directory, bench, progress, trackers, start)
    strategy = _strategy(bench, config, keeper, start)

    def evaluate_state(number: int, arrays: ArrayRecord) -> MetricRecord:
        tally = Tally() if bench.task.classifies else None
        with bench.model.holding(from_record(arrays)):
            measured = MetricRecord(_finite(bench.evaluate(tally), number))
        if tally is not None:
            write_classes(directory, number, tally, bench.task.data.labels)
        return measured

    try:
        result = strategy.start(
            grid,
            to_record(start.state),
            num_rounds=config.num_rounds,
            timeout=config.round_timeout,
            evaluate_fn=evaluate_state if config.evaluate_on == "server" else None,
        )
    finally:
        progress.close()
        trackers.close()
    keeper.go_on()  # where there was no further round
    final = from_record(result.arrays) if result.arrays else start.state
    return final, strategy


def _strategy(bench: Workbench, config: Config, keeper: "_Keeper", start: Start) -> FederatedTuning:
    """Make the strategy of a run that begins there."""
    model, records = bench.model, start.records
    return FederatedTuning(
        config,
        model.method,
        backbone=bench.backbone_fingerprint,
        seed_fingerprint=model.seed_fingerprint,
        derived=model.derived,
        recorder=keeper,
        first_round=start.first,
        fixed=start.fixed,
        memory=start.memory,
        partitions=records[-1]["partitions"] if records else None,
        measured=("loss", bench.task.metric),
        dealt_out=bench.dealt_out,
        tell=partial(write_status, keeper.directory.path),
    )


def _save_result(
    final: Tensors, bench: Workbench, directory: RunDirectory, summary: Summary
) -> None:
    """Write the summary, the result's folder and its card; the run has not failed then."""
    form, model = natural_form(bench), bench.model
    folder = directory.path / RESULT_FOLDERS[form]
    with model.holding(final):
        norms = model.method.head_norms(model.adapters)
        names = [layer.name for layer in model.layers]
        summary["head-norms"] = dict(zip(names, norms, strict=True))
        directory.write_json("summary.json", summary)
        write_result(form, folder, bench)
    write_card(folder, form, directory)
    (directory.path / "failure.json").unlink(missing_ok=True)


def _carry_over(directory: RunDirectory, start: Start, summary: Summary) -> None:
    """Keep the names of the devices that have the result, where no round was added to it."""
    if start.done != summary["rounds"] or not (directory.path / "summary.json").is_file():
        return
    before = directory.read_summary()
    if before["rounds"] == start.done and "delivered" in before:
        summary["delivered"] = before["delivered"]
        summary["not-delivered"] = before["not-delivered"]


def _is_to_be_delivered(directory: RunDirectory, config: Config, start: Start) -> bool:
    """Tell whether a run has ended, so that there is nothing to do but to deliver its result."""
    over = start.done is not None and config.num_rounds <= start.done
    if not (config.deliver and over and (directory.path / "summary.json").is_file()):
        return False
    return directory.read_summary()["rounds"] == start.done


def _deliver_again(
    grid: Grid, bench: Workbench, config: Config, directory: RunDirectory, start: Start
) -> None:
    """Give the nodes of today the result of a run that has ended; nothing else of it changes."""
    roster = Roster(
        config.num_clients, bench.backbone_fingerprint, bench.model.seed_fingerprint,
        dealt_out=False,
    )  # fmt: skip
    guard()
    roster.gather(grid, wait=True)
    mail = Mailbox(to_record(start.fixed) if start.fixed else None)
    delivery = Delivery(config, roster, mail, Status(roster, tell=None))
    summary = directory.read_summary()
    hand_out(grid, delivery, directory, start.state, summary, measured(summary, directory))
    log.info("run directory: %s", directory.path)


def _report(config: Config, directory: RunDirectory) -> Path | None:
    """Write the page of the run, if it is wanted and can be."""
    page = None
    if config.report:
        try:
            page = write_report([directory.path], directory.path / "report")
        except Exception as error:  # noqa: BLE001 (the result is safe already)
            log.warning("no report: %s; try again with ravan-flwr report %s", error, directory.path)
    return page


class _Keeper:
    """Write a finished round to the record, then the checkpoint, then the screen."""

    def __init__(
        self,
        directory: RunDirectory,
        bench: Workbench,
        progress: Progress,
        trackers: Trackers,
        start: Start,
    ) -> None:
        self.directory, self.model, self.metric = directory, bench.model, bench.task.metric
        self.progress, self.trackers, self.records = progress, trackers, start.records
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
        """Save a round and its state; warn if the round has lost what was learned before."""
        if told := collapse(self.records, record, self.metric):
            record["collapsed"] = told
        self._append(record)
        self.records.append(record)
        best = best_round(self.records, self.metric)
        save_checkpoint(self.directory.checkpoints, record["round"], state, memory, best)
        self.progress.round(record)
        self.trackers.round(record)
        if told:
            back = f"resume={self.directory.path}@{best}"
            log.warning(
                "round %d COLLAPSED: %s. A false reply or a learning rate that is too high can be "
                "the cause; to go back: %s",
                record["round"],
                told,
                back,
            )


def _finite(measured: Mapping[str, float], number: int) -> dict[str, Any]:
    """Return what was measured; RuntimeError if a number is not finite: training diverged."""
    for name, value in measured.items():
        if not math.isfinite(value):
            raise RuntimeError(
                f"round {number}: its evaluation gave {name} = {value}, expected a finite number: "
                "training diverged; start again with a lower learning-rate"
                + (f" (round {number - 1} is in the last checkpoint)" if number > 1 else "")
            )
    return dict(measured)


def _output_folder(config: Config) -> Path:
    """Find the folder of the run directories, as an absolute path.

    A SuperLink keeps the working directory of whoever started it first, so a relative path would
    land anywhere.
    """
    if config.output_dir == AUTO:
        return Path.home() / "ravan-flwr" / "runs"
    path = Path(config.output_dir).expanduser()
    if not path.is_absolute():
        raise ValueError(
            f"output-dir = {config.output_dir!r}: got a relative path, expected an absolute one, "
            "since a SuperLink keeps the directory that it was started in; write "
            f"output-dir='{path.absolute()}', say"
        )
    return path


def _resumed(config: Config) -> tuple[RunDirectory | None, int | None]:
    """Open the run directory to go on with, and read the round to go back to if one is named."""
    if not config.resume:
        return None, None
    path = Path(config.resume).expanduser()
    match = re.fullmatch(r"(.+)@(\d+)", str(path))
    if match and not path.is_dir():
        return RunDirectory.open(Path(match[1])), int(match[2])
    return RunDirectory.open(path), None


def _check_same_run(directory: RunDirectory, config: Config) -> None:
    """Refuse to go on with settings that would make it another run."""
    before, now = directory.read_config(), config.as_dict()
    # A key that came with a later version than the run's had what is its default now.
    before = read_config({}).as_dict() | before
    different = [k for k in now if k not in FREE_ON_RESUME and before.get(k) != now[k]]
    if different:
        details = ", ".join(f"{k}: then {before.get(k)!r}, now {now[k]!r}" for k in different)
        raise ValueError(
            f"resume = {str(directory.path)!r}: the run differs from this one in {details}; "
            "give the same settings, or start a new run"
        )


def _summary(
    bench: Workbench, config: Config, records: list[RoundRecord], num_clients: int
) -> Summary:
    measured = [record["metrics"] for record in records if record["metrics"]]
    metric = bench.task.metric
    return {
        "method": config.method,
        "preset": config.preset,
        "seed": config.seed,
        "classifier": config.classifier,
        "num-clients": num_clients,
        "rounds": sum(record["round"] > 0 for record in records),  # 0 is the calibration
        "rank": config.rank,
        "learning-rate": config.learning_rate,
        "trainable-parameters": bench.model.trainable_parameters(),
        "adapter-parameters": bench.model.method.trainable_parameters(),
        "metric": metric,
        "metrics": {
            "final": measured[-1] if measured else {},
            "best": max(measured, key=lambda m: m[metric]) if measured else {},
        },
        "bytes-up": sum(record["bytes-up"] for record in records),
        "bytes-down": sum(record["bytes-down"] for record in records),
        "rejected": sum(len(record["rejected"]) for record in records),
        "collapsed": [record["round"] for record in records if "collapsed" in record],
        "without-effect": [record["round"] for record in records if "refused" in record],
        "left-out": records[-1]["left-out"] if records else [],
        "seconds": round(sum(record["seconds"] for record in records), 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _tell(summary: Summary, metric: str, directory: RunDirectory, page: Path | None) -> None:
    """Log how the run ended, and where its files are."""
    final, best = (summary["metrics"][which].get(metric) for which in ("final", "best"))
    score = "not evaluated" if final is None else f"{metric} {final:.4f} (best {best:.4f})"
    rounds, trained = summary["rounds"], summary["trainable-parameters"]
    took = f"{rounds} round{'s' * (rounds != 1)} in {minutes(summary['seconds'])}"
    up, down = megabytes(summary["bytes-up"]), megabytes(summary["bytes-down"])
    sent = f"{trained} trainable parameters; up {up}, down {down}"
    log.info("done: %s after %s; %s", score, took, sent)
    for what, numbers in (
        ("its evaluation collapsed", summary["collapsed"]),
        ("no effect", summary["without-effect"]),
    ):
        if numbers:
            log.warning("%s in rounds %s", what, ", ".join(map(str, numbers)))
    if page is not None:
        log.info("report: %s", page)
    log.info("run directory: %s", directory.path)
