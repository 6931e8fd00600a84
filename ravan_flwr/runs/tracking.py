"""Report a run's numbers as they come: to TensorBoard, and to Weights & Biases or MLflow if asked.

TensorBoard's events lie in `tensorboard/` of the run directory. The other two are used
through their own packages, which must be installed, and with their own settings (WANDB_MODE,
MLFLOW_TRACKING_URI, ...).
"""

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ravan_flwr.runs.record import RoundRecord

log = logging.getLogger(__name__)

Numbers = Mapping[str, float]
Settings = Mapping[str, Any]


class Tracker(ABC):
    """Report the numbers of each round to one tracker."""

    @abstractmethod
    def log(self, numbers: Numbers, step: int) -> None:
        """Report the numbers of one round."""

    @abstractmethod
    def close(self) -> None:
        """Finish: no more rounds will come."""


class TensorBoard(Tracker):
    """Write TensorBoard's event files."""

    def __init__(self, run: Path, name: str, settings: Settings) -> None:
        from tensorboardX import SummaryWriter  # noqa: PLC0415 (needed by servers alone)

        del name
        self._writer = SummaryWriter(str(run / "tensorboard"), flush_secs=10)
        self._writer.add_text("settings", "\n".join(f"    {k}: {v}" for k, v in settings.items()))

    def log(self, numbers: Numbers, step: int) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB(Tracker):
    """Report to a run of Weights & Biases, in the project `ravan-flwr`."""

    def __init__(self, run: Path, name: str, settings: Settings) -> None:
        import wandb  # noqa: PLC0415 (optional)

        # By default it sends what the process prints, and the bytes that it sends: both tell who
        # takes part, or how many.
        private = settings.get("privacy", "none") != "none"
        silent = {"console": "off", "x_disable_stats": True} if private else None
        self._run = wandb.init(
            project="ravan-flwr", name=name, config=settings, dir=str(run), settings=silent
        )

    def log(self, numbers: Numbers, step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """Report to a run of MLflow, in the experiment `ravan-flwr`."""

    def __init__(self, run: Path, name: str, settings: Settings) -> None:
        import mlflow  # noqa: PLC0415 (optional)

        del run
        self._mlflow = mlflow
        mlflow.set_experiment("ravan-flwr")
        mlflow.start_run(run_name=name)
        mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})

    def log(self, numbers: Numbers, step: int) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, str, Settings], Tracker]] = {"wandb": WandB, "mlflow": MLflow}


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
    """Report to all trackers of a run; go on without one that fails."""

    def __init__(self, tracking: str, run: Path, settings: Settings) -> None:
        kinds = [] if tracking == "none" else [TensorBoard]
        chosen = [TRACKERS[tracking]] if tracking in TRACKERS else []
        self._all: list[Tracker] = []
        for kind in [*kinds, *chosen]:
            try:
                self._all.append(kind(run, run.name, settings))
            except Exception as error:  # noqa: BLE001 (a run must not be lost to its tracking)
                log.warning("no tracking with %s: %s", tracking, error)

    def round(self, record: RoundRecord) -> None:
        """Report a round that has ended."""
        for tracker in list(self._all):
            try:
                tracker.log(numbers_of(record), record["round"])
            except Exception as error:  # noqa: BLE001 (as above)
                log.warning("tracking with %s stops: %s", type(tracker).__name__, error)
                self._all.remove(tracker)
                _close(tracker)

    def close(self) -> None:
        """Close all trackers: the run has ended, or failed."""
        for tracker in self._all:
            _close(tracker)


def _close(tracker: Tracker) -> None:
    try:
        tracker.close()
    except Exception as error:  # noqa: BLE001 (as above)
        log.warning("tracking with %s: %s", type(tracker).__name__, error)


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """Pick the numbers out of a round's record, under the names that trackers show."""
    evaluation = {f"evaluation/{name}": value for name, value in record["metrics"].items()}
    if (spent := record.get("privacy")) is not None:  # what its account does not cover stays here
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
