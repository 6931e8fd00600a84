"""Log a run's numbers after each round: to TensorBoard, optionally to Weights & Biases or MLflow.

TensorBoard's event files are in `tensorboard/` of the run directory. The other two are used
through their own packages, which must be installed, and with their own settings (WANDB_MODE,
MLFLOW_TRACKING_URI, ...).
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ravan_flwr.runs.record import RoundRecord

log = logging.getLogger(__name__)

Numbers = Mapping[str, float]
Settings = Mapping[str, Any]


Tracker = tuple[Callable[[Numbers, int], object], Callable[[], object]]  # log a step, close


def tensorboard(run: Path, _: str, settings: Settings) -> Tracker:
    """Write TensorBoard's event files."""
    from tensorboardX import SummaryWriter  # noqa: PLC0415 (needed by servers alone)

    writer = SummaryWriter(str(run / "tensorboard"), flush_secs=10)
    writer.add_text("settings", "\n".join(f"    {k}: {v}" for k, v in settings.items()))

    def log_numbers(numbers: Numbers, step: int) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)

    return log_numbers, writer.close


def wandb(run: Path, name: str, settings: Settings) -> Tracker:
    """Report to a run of Weights & Biases, in the project `ravan-flwr`."""
    import wandb  # noqa: PLC0415 (optional)

    # By default wandb sends the console output and the network traffic of the process. Both reveal
    # which clients take part, or how many.
    private = settings.get("privacy", "none") != "none"
    silent = {"console": "off", "x_disable_stats": True} if private else None
    session = wandb.init(
        project="ravan-flwr", name=name, config=settings, dir=str(run), settings=silent
    )
    return lambda numbers, step: session.log(dict(numbers), step=step), lambda: session.finish()  # noqa: PLW0108 (it is looked up late)


def mlflow(_: Path, name: str, settings: Settings) -> Tracker:
    """Report to a run of MLflow, in the experiment `ravan-flwr`."""
    import mlflow  # noqa: PLC0415 (optional)

    mlflow.set_experiment("ravan-flwr")
    mlflow.start_run(run_name=name)
    mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})
    return lambda numbers, step: mlflow.log_metrics(dict(numbers), step=step), mlflow.end_run


TRACKERS = {"wandb": wandb, "mlflow": mlflow}


def check_tracking(tracking: str) -> None:
    """Raise ValueError unless the tracker's package is installed."""
    if tracking in TRACKERS and not _is_installed(tracking):
        raise ValueError(
            f"tracking = {tracking!r}: the package {tracking} is not installed, expected it; "
            f"run pip install {tracking}, or leave tracking out"
        )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class Trackers:
    """All trackers of a run; a tracker that fails is dropped with a warning."""

    def __init__(self, tracking: str, run: Path, settings: Settings) -> None:
        usual = [] if tracking == "none" else [tensorboard]
        self._openers = [*usual, *([TRACKERS[tracking]] if tracking in TRACKERS else [])]
        self._arguments = run, run.name, settings
        self._all: dict[str, Tracker] = {}

    def open(self) -> None:
        """Start the trackers, when the first round begins."""
        for opener in self._openers:
            with self._warning(f"no tracking with {opener.__name__}"):
                self._all[opener.__name__] = opener(*self._arguments)

    @contextmanager
    def _warning(self, message: str) -> Iterator[None]:
        """Log an error as a warning: an error of tracking must not end the run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (whatever the package raises)
            log.warning("%s: %s", message, error)

    def round(self, record: RoundRecord) -> None:
        """Log a finished round."""
        for name, (log_numbers, close) in [*self._all.items()]:
            try:
                log_numbers(collect_numbers(record), record["round"])
            except Exception as error:  # noqa: BLE001 (whatever the package raises)
                log.warning("tracking with %s stops: %s", name, error)
                del self._all[name]
                with self._warning(f"tracking with {name}"):
                    close()

    def close(self) -> None:
        """Close all trackers, when the run has ended or failed."""
        for name, (_, close) in self._all.items():
            with self._warning(f"tracking with {name}"):
                close()


def collect_numbers(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a round's record, by the names that trackers show."""
    evaluation = {f"evaluation/{name}": value for name, value in record["metrics"].items()}
    if (spent := record.get("privacy")) is not None:  # only numbers that its account covers
        return {"epsilon": spent["epsilon"], **evaluation}
    return {
        **({"train-loss": record["train-loss"]} if "train-loss" in record else {}),
        **evaluation,
        "bytes/up": record["bytes-up"],
        "bytes/down": record["bytes-down"],
        "clients": len(record["clients"]),
        "rejected": len(record["rejected"]),
        "seconds": record["seconds"],
        **{f"seconds/{phase}": seconds for phase, seconds in record["phases"].items()},
    }
