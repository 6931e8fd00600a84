"""Decide what a run begins with: a new state, or a checked checkpoint of an earlier run."""

import dataclasses
from collections.abc import Iterable
from logging import getLogger
from pathlib import Path

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import FREE_ON_RESUME
from ravan_flwr.config.run_config import Config
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.checkpoint import load_checkpoint, load_fixed, load_personal_states
from ravan_flwr.runs.directory import RunDirectory, check_writable
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.training.model_and_data import ModelAndData

log = getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """What a run begins with; `last_round` is None in a new run."""

    state: Tensors
    last_round: int | None = None
    memory: Tensors = dataclasses.field(default_factory=dict)
    records: list[RoundRecord] = dataclasses.field(default_factory=list)
    fixed: Tensors | None = None
    personal_states: dict[int, Tensors] | None = None  # by client, of a run in process

    @property
    def trained(self) -> set[int]:
        """Return the partitions whose replies were used in earlier rounds."""
        rounds = (record["clients"] for record in self.records if record["round"])
        return {client["partition-id"] for clients in rounds for client in clients}

    @property
    def bytes(self) -> int:
        """Return the bytes sent in earlier rounds, both ways."""
        return sum(record["bytes-up"] + record["bytes-down"] for record in self.records)

    @property
    def time(self) -> float:
        """Return the seconds that earlier rounds took, by the run's clock."""
        return self.records[-1].get("time", 0.0) if self.records else 0.0

    @property
    def first(self) -> int:
        """Return the number of the next round."""
        return (self.last_round or 0) + 1


def output_folder(config: Config) -> Path:
    """Return the folder of the run directories; raise ValueError if its path is relative.

    A relative path would depend on the directory in which the SuperLink was started.
    """
    folder = config.output_dir
    path = Path("~/ravan-flwr/runs" if folder == AUTO else folder).expanduser()
    if not path.is_absolute():
        raise ValueError(
            f"output-dir = {config.output_dir!r}: got a relative path, expected an absolute one, "
            "since a SuperLink keeps the directory that it was started in; write "
            f"output-dir='{path.absolute()}', say"
        )
    check_writable(path)
    return path


def load_resume_point(
    directory: RunDirectory, from_round: int | None, config: Config, loaded: ModelAndData
) -> ResumePoint:
    """Read a run directory's checkpoint and records, and check them; change nothing."""
    _check_same_run(directory, config)
    model = loaded.model
    checkpoint = load_checkpoint(directory.checkpoints, from_round)
    records = directory.rounds_until(checkpoint.round)
    if from_round is None and config.num_rounds <= checkpoint.round:
        _check_last_checkpoint(directory, checkpoint.round)
    fixed = load_fixed(directory.checkpoints)
    if fixed is None and model.method.calibration is not None:
        raise ValueError(
            f"resume = {str(directory.path)!r}: found no checkpoints/fixed.safetensors, "
            "expected what the calibration round made; restore it, or start a new run"
        )
    if fixed is not None:
        model.load_fixed(fixed)
    model.check_fingerprint(checkpoint.memory, f"resume = {str(directory.path)!r}")
    log.info("resuming after round %d", checkpoint.round)
    personal_states = None
    if model.method.personal is not None:
        personal_states = load_personal_states(directory.checkpoints, checkpoint.round)
    return ResumePoint(
        checkpoint.state, checkpoint.round, checkpoint.memory, records, fixed, personal_states
    )


def _check_last_checkpoint(directory: RunDirectory, usable: int) -> None:
    """Raise ValueError if rounds would be dropped, and none trained in their place."""
    last = directory.read_rounds()[-1]["round"]
    if last > usable:
        raise ValueError(
            f"resume = {str(directory.path)!r}: the run has {last} rounds, but its last usable "
            f"checkpoint is of round {usable}; restore checkpoints/round-{last:06d}.safetensors, "
            f"train what is missing again with num-rounds={last}, or give the later rounds up "
            f"with resume={directory.path}@{usable}"
        )


def _check_same_run(directory: RunDirectory, config: Config) -> None:
    """Raise ValueError if a setting differs that must stay the same in a resumed run."""
    before, now = directory.read_config(), config.as_dict()
    # The number of partitions is compared later, when clients are connected.
    free = FREE_ON_RESUME | {"num-clients"}
    different = [k for k in now if k not in free and before.get(k) != now[k]]
    if different:
        details = ", ".join(f"{k}: then {before.get(k)!r}, now {now[k]!r}" for k in different)
        raise ValueError(
            f"resume = {str(directory.path)!r}: the run differs from this one in {details}; "
            "leave out those that you set (`flwr run` needs all settings of the run), give the old "
            "value of each key that the preset has changed, restore the run's files if they were "
            "changed, or start a new run"
        )


def report_if_finished(last_round: int, num_rounds: int, run: Path) -> None:
    """Log a warning if a resumed run has no further round."""
    if last_round >= num_rounds:
        log.warning(
            "num-rounds = %d: the run has %d already, so that nothing is trained; ask for more, or "
            "go back with resume=%s@ROUND",
            *(num_rounds, last_round, run),
        )


def is_to_be_delivered(directory: RunDirectory, config: Config, start: ResumePoint) -> bool:
    """Return whether a run has ended and only its result must be delivered."""
    over = start.last_round is not None and config.num_rounds <= start.last_round
    if not (config.deliver and over and (directory.path / "summary.json").is_file()):
        return False
    summary = directory.read_summary()
    # After the run has gone back, its old summary may be of as many rounds: of other ones.
    measured = summary["rounds"], summary["seconds"]
    return measured == (start.last_round, total_seconds(start.records))


def total_seconds(records: Iterable[RoundRecord]) -> float:
    """Return the seconds that rounds took together."""
    return round(sum(record["seconds"] for record in records), 3)
