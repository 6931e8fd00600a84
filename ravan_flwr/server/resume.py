"""Decide what a run begins with: anew, or going on with an earlier one, whose files are checked."""

import dataclasses
from logging import getLogger
from pathlib import Path

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import FREE_ON_RESUME
from ravan_flwr.config.run_config import Config
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.checkpoint import load_checkpoint, load_fixed, load_personal_states
from ravan_flwr.runs.directory import RunDirectory, check_writable, named_by
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.training.model_and_data import ModelAndData

log = getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """Hold what a run begins with: a new one, or one that continues after `last_round`."""

    state: Tensors
    last_round: int | None = None
    memory: Tensors = dataclasses.field(default_factory=dict)
    records: list[RoundRecord] = dataclasses.field(default_factory=list)
    fixed: Tensors | None = None
    personal_states: dict[int, Tensors] | None = None  # by client, of a run in process

    @property
    def trained(self) -> set[int]:
        """Return the partitions of which a reply was used in an earlier round."""
        rounds = (record["clients"] for record in self.records if record["round"])
        return {client["partition-id"] for clients in rounds for client in clients}

    @property
    def bytes(self) -> int:
        """Count what was sent in earlier rounds, both ways."""
        return sum(record["bytes-up"] + record["bytes-down"] for record in self.records)

    @property
    def time(self) -> float:
        """Return the seconds that earlier rounds took, by the clock of the run."""
        return self.records[-1].get("time", 0.0) if self.records else 0.0

    @property
    def first(self) -> int:
        """Number the next round."""
        return (self.last_round or 0) + 1


def output_folder(config: Config) -> Path:
    """Find the folder of the run directories, as an absolute path.

    A SuperLink keeps the working directory of whoever started it first, so a relative path would
    land anywhere.
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


def resumed(config: Config) -> tuple[RunDirectory | None, int | None]:
    """Open the run directory to go on with, and read the round to go back to if one is named."""
    if not config.resume:
        return None, None
    path, back_to = named_by(config.resume)
    return RunDirectory.open(path), back_to


def go_on(
    directory: RunDirectory, back_to: int | None, config: Config, loaded: ModelAndData
) -> ResumePoint:
    """Read what a run directory has to go on from, and check it; nothing is changed yet."""
    _check_same_run(directory, config)
    model = loaded.model
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
    model.check_fingerprint(checkpoint.memory, f"resume = {str(directory.path)!r}")
    log.info("going on after round %d", checkpoint.round)
    personal_states = None
    if model.method.personal is not None:
        personal_states = load_personal_states(directory.checkpoints, checkpoint.round)
    return ResumePoint(
        checkpoint.state, checkpoint.round, checkpoint.memory, records, fixed, personal_states
    )


def _check_same_run(directory: RunDirectory, config: Config) -> None:
    """Refuse to go on with settings that would make it another run."""
    before, now = directory.read_config(), config.as_dict()
    # In how many parts the clients share the data is compared when they are here.
    free = FREE_ON_RESUME | {"num-clients"}
    different = [k for k in now if k not in free and before.get(k) != now[k]]
    if different:
        details = ", ".join(f"{k}: then {before.get(k)!r}, now {now[k]!r}" for k in different)
        raise ValueError(
            f"resume = {str(directory.path)!r}: the run differs from this one in {details}; "
            "leave out those that you set (`flwr run` needs all settings of the run), give the old "
            "value of each key that the preset has changed, restore the files of the run if they "
            "were changed, or start a new run"
        )


def report_if_finished(last_round: int, num_rounds: int, run: Path) -> None:
    """Say so if a run that goes on has no round to hold."""
    if last_round < num_rounds:
        return
    back = f", or go back with resume={run}@{num_rounds}" if last_round > num_rounds else ""
    log.warning(
        "num-rounds = %d: %s already done, so that nothing is trained; ask for more than %d%s",
        num_rounds,
        "1 round is" if last_round == 1 else f"{last_round} rounds are",
        last_round,
        back,
    )


def is_to_be_delivered(directory: RunDirectory, config: Config, start: ResumePoint) -> bool:
    """Tell whether a run has ended, so that there is nothing to do but to deliver its result."""
    over = start.last_round is not None and config.num_rounds <= start.last_round
    if not (config.deliver and over and (directory.path / "summary.json").is_file()):
        return False
    return directory.read_summary()["rounds"] == start.last_round
