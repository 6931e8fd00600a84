"""Define Flower's ServerApp: set up a run, start it, save its result."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from logging import getLogger
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from ravan_flwr.config.checks import without_effect
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.flower_private import RunNotRunningException
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.methods.base import Tensors
from ravan_flwr.optional import DELIVER_AT_END, DELIVER_LATER, load
from ravan_flwr.results.card import write_card
from ravan_flwr.results.classes import write_classes
from ravan_flwr.results.export import natural_form, write_result
from ravan_flwr.runs.callback import Callbacks
from ravan_flwr.runs.console import Progress, log_to_stdout, log_without_traceback, logging_to
from ravan_flwr.runs.directory import (
    RunDirectory,
    is_write_error,
    parse_resume,
    resume_advice,
    run_name,
    write_error_message,
)
from ravan_flwr.runs.lock import locked
from ravan_flwr.runs.record import Summary
from ravan_flwr.runs.tracking import Trackers, check_tracking
from ravan_flwr.server.releases import release_class
from ravan_flwr.server.resume import (
    ResumePoint,
    is_to_be_delivered,
    load_resume_point,
    output_folder,
    report_if_finished,
)
from ravan_flwr.server.run_recorder import RunRecorder, carry_over, make_summary
from ravan_flwr.server.runtime import count_processes, in_process, simulating
from ravan_flwr.server.stop_conditions import check_limits
from ravan_flwr.server.strategy import FederatedTuning
from ravan_flwr.server.user_messages import (
    check_devices,
    check_simulation,
    report_default_learning_rate,
    report_float32,
    report_result,
)
from ravan_flwr.simulated_time.clock import SimulatedClock, find_clock
from ravan_flwr.specs import RESULT_FOLDERS, Scalar
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.training.model_and_data import ModelAndData, get_model_and_data

app = ServerApp()
log = getLogger(__name__)

RESULT = "ravan-flwr"  # the record in the context's state with the path of the run directory


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation once; Flower calls this."""
    run(grid, context)


def run(grid: Grid, context: Context, callbacks: Iterable[object] = ()) -> None:
    """Run the federation once, from the configuration to the summary.

    Flower logs one line for an error that this package raises.

    Args:
        grid: Flower's grid, or the grid of a simulation in this process.
        context: Flower's context, with the run config.
        callbacks: Objects with hooks of `Callback`, called during the run.
    """
    try:
        user_callbacks = Callbacks(callbacks)  # raises before anything is loaded
        log_to_stdout()
        _run(grid, context, user_callbacks)
    except Exception as error:
        if not in_process(grid):
            log_without_traceback(error)
        raise


def _run(grid: Any, context: Context, user_callbacks: Callbacks) -> None:
    """Read the config, load the model, open or create the run directory, run the rounds."""
    config = read_config(context.run_config)
    check_devices(grid, config)
    path, from_round = parse_resume(config.resume) if config.resume else (None, None)
    earlier = None if path is None else RunDirectory.open(path)
    # These checks raise before anything is loaded.
    parent = output_folder(config) if earlier is None else earlier.path.parent
    check_tracking(config.tracking)
    with ExitStack() as stack:
        if earlier is not None:
            stack.enter_context(locked(earlier.path, needed=config.privacy != "none"))
            write_held_log = stack.enter_context(logging_to(earlier.path, held=True))
        loaded = get_model_and_data(config)
        if earlier is None and loaded.model.is_calibrated:  # by an earlier run of this process
            get_model_and_data.cache_clear()
            loaded = get_model_and_data(config)
        if simulating(grid):
            check_simulation(grid, loaded, config)
        config = dataclasses.replace(loaded.config, rank=loaded.model.method.rank)
        # These checks raise before anything is written.
        release_class(config).check_model(loaded.model)
        if earlier is None:
            start = ResumePoint(loaded.model.initial_state())
        else:
            start = load_resume_point(earlier, from_round, config, loaded)
        number = len(list(grid.get_nodes())) if simulating(grid) else None
        check_limits(
            dataclasses.replace(config, num_clients=number or config.num_clients),
            loaded.task.metric,
            start.records,
        )
        if earlier is None:
            name = run_name(config, context.run_config, number)
            directory = RunDirectory.create(parent, name)
            stack.enter_context(locked(directory.path, "output-dir"))
            write_held_log = stack.enter_context(logging_to(directory.path))
        else:
            directory = earlier
        context.state[RESULT] = ConfigRecord({"run-dir": str(directory.path)})
        if isinstance(clock := find_clock(grid), SimulatedClock):
            clock.resume(start.time, start.memory)
        if in_process(grid) and start.personal_states is not None:
            grid.give_personal_states(start.personal_states)
        if from_round is None and is_to_be_delivered(directory, config, start):
            write_held_log()
            load(DELIVER_LATER)(grid, loaded, config, directory, start)
            return
        report_if_finished(start.last_round or 0, config.num_rounds, directory.path)
        log.info("run directory: %s", directory.path)
        report_default_learning_rate(context.run_config, config)
        report_float32(loaded, config)
        for message in without_effect(context.run_config):
            log.warning("%s", message)
        beginning = _Beginning(directory, config, context.run_config, write_held_log)
        with _recording_failure(beginning):
            if earlier is None:
                beginning.on_recruited()
            _run_rounds(grid, loaded, config, start, user_callbacks, beginning)


@dataclasses.dataclass
class _Beginning:
    """Write the settings when a run begins: a resumed one when its clients are accepted.

    Before that, nothing of the resumed run is changed, since the clients may not fit it.
    """

    directory: RunDirectory
    config: Config
    run_config: Mapping[str, Scalar]
    write_held_log: Callable[[], None]
    begun: bool = False

    def on_recruited(self) -> None:
        if self.begun:
            return
        self.begun = True
        self.write_held_log()
        (self.directory.path / "failure.json").unlink(missing_ok=True)  # written before the resume
        self.directory.write_settings(self.run_config)
        self.directory.write_config(self.config)


@contextmanager
def _recording_failure(beginning: _Beginning) -> Iterator[None]:
    """Write the reason of a failure to `failure.json` if the run has begun; log its directory."""
    directory = beginning.directory
    try:
        yield
    except (Exception, RunNotRunningException) as error:
        failure: Exception | RunNotRunningException = error
        if isinstance(error, RunNotRunningException):
            failure = RuntimeError(
                "Flower has ended this run: it was stopped, or its process gave no sign of life "
                "for too long, as after a suspension of the machine or a jump of its clock; "
                + resume_advice(directory.path)
            )
        elif isinstance(error, OSError) and is_write_error(error, directory.path):
            failure = OSError(write_error_message(error, directory.path))
        with suppress(OSError):  # the disk itself may be what failed
            if beginning.begun:
                content = {"error": f"{type(failure).__name__}: {failure}"}
                directory.write_json("failure.json", content)
        log.info("run directory: %s", directory.path)
        if failure is error:
            raise
        raise failure from error
    except KeyboardInterrupt:
        log.info("stopped; %s", resume_advice(directory.path))
        raise


def _run_rounds(
    grid: Any, loaded: ModelAndData, config: Config, start: ResumePoint, user_callbacks: Callbacks,
    beginning: _Beginning,
) -> None:  # fmt: skip
    """Run the rounds with the strategy; write summary, result and report."""
    directory = beginning.directory
    metric, budget = loaded.task.metric, release_class(config).budget
    privacy = None if budget is None else budget.of(config, directory, start)
    strategy = FederatedTuning(config, loaded, start, privacy=privacy)
    registry = strategy.federation.registry
    registry.owners.update({} if start.last_round is None else directory.read_node_keys())
    with (
        closing(Progress(start.first, config.num_rounds, metric, config.max_bytes, start.bytes))
        as progress,
        closing(Trackers(config.tracking, directory.path, config.as_dict())) as trackers,
    ):  # fmt: skip
        personal = in_process(grid) and loaded.model.method.personal is not None
        personal_states = grid.personal_states if personal else None
        recorder = RunRecorder(
            directory, loaded, progress, trackers, start, strategy, personal_states
        )
        strategy.callbacks.all += [beginning, recorder]
        if config.deliver:
            arguments = (config, registry, strategy.federation.message_builder)
            delivery = load(DELIVER_AT_END)(grid, *arguments, directory, start.state)
            strategy.callbacks.all.append(delivery)
        strategy.callbacks.all.append(user_callbacks)
        strategy.callbacks.on_run_begin()
        strategy.start(
            grid,
            to_record(start.state),
            config.num_rounds,
            config.round_timeout,
            evaluate_fn=_make_evaluation(loaded, config, directory, recorder),
        )
    recorder.drop_later_rounds()  # not done yet if no further round was run
    summary = make_summary(
        loaded, config, strategy.records, len(registry.clients), simulated=simulating(grid)
    )
    if privacy is not None:
        summary.update(cast(Summary, privacy.as_record()))
    if (processes := count_processes(grid)) is not None:
        summary["processes"] = processes
    carry_over(directory, start, summary)
    _save_result(strategy.federation.state.tensors, loaded, directory, summary)
    strategy.callbacks.on_run_end()
    report_result(summary, metric, directory, _report(config, directory))


def _make_evaluation(
    loaded: ModelAndData, config: Config, directory: RunDirectory, recorder: RunRecorder
) -> Callable[[int, ArrayRecord], MetricRecord] | None:
    """Return a function that evaluates a state on the server; None if clients evaluate."""
    if config.evaluate_on != "server":
        return None

    def evaluate_state(number: int, arrays: ArrayRecord) -> MetricRecord:
        tally = Tally() if loaded.task.classifies else None
        with loaded.model.holding(from_record(arrays)):
            measured = loaded.evaluate(tally)
        for name, value in measured.items():
            if not math.isfinite(value):
                raise RuntimeError(
                    f"round {number}: its evaluation gave {name} = {value}, expected a finite "
                    "number: training diverged; start again with a lower learning-rate"
                    + (f" (round {number - 1} is in the last checkpoint)" if number > 1 else "")
                )
        recorder.tally = tally
        if tally is not None:
            write_classes(directory, number, tally, loaded.task.data.labels)
        return MetricRecord(dict(measured))

    return evaluate_state


def _save_result(
    final: Tensors, loaded: ModelAndData, directory: RunDirectory, summary: Summary
) -> None:
    """Write the summary, the result's folder and its card: the run has succeeded then."""
    form, model = natural_form(loaded), loaded.model
    folder = directory.path / RESULT_FOLDERS[form]
    if model.method.personal is not None:
        directory.write_json("summary.json", summary)
    else:
        with model.holding(final):
            norms = model.method.head_norms(model.adapters)
            names = [layer.name for layer in model.layers]
            summary["head-norms"] = dict(zip(names, norms, strict=True))
            write_result(form, folder, loaded)
        directory.write_json("summary.json", summary)  # last: it says that the run is finished
        write_card(folder, form, directory)


def _report(config: Config, directory: RunDirectory) -> Path | None:
    """Write the run's report and return its path; None if it is off or cannot be written."""
    if config.tracking == "none":
        return None
    folder = directory.path / "report"
    try:
        from ravan_flwr.results.report import write_report  # noqa: PLC0415 (imports Matplotlib)

        return write_report([directory.path], folder)
    except Exception as error:  # noqa: BLE001 (the result is saved already)
        message = "no report in %s: %s; the result is whole; try again with ravan-flwr report %s"
        log.warning(message, folder, error, directory.path)
        return None
