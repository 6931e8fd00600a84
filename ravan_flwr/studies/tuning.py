"""Choose the learning rate of a method by a study of one row, and write it into the preset.

Rates around the method's default begin with a quarter of the rounds and one seed. The better half
of them gets half of the rounds, the best two get all rounds and three seeds: successive halving.
The test examples take no part. Where the best of a rung is the largest or smallest rate of all, the
next is tried, too.
"""

import importlib.metadata
import logging
import math
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import yaml

from ravan_flwr.config.keys import as_key_values, check_key
from ravan_flwr.config.presets import own_preset, preset_file
from ravan_flwr.config.run_config import HELD_BACK, Config, read_config
from ravan_flwr.runs.console import count
from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.specs import Scalar
from ravan_flwr.studies.choosing import RateChoice, candidates, choose, grid_around
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.running import RunOptions, run_missing
from ravan_flwr.studies.spec import EXTENSIONS, RATE, Grid, Row, Rung, Study, Table
from ravan_flwr.studies.tables import write_tables
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.model_and_data import ModelAndData, validation_size

SEED, SEEDS = 100, 3  # the first seed, and how many the last rung has, unless some are given
# What a tuning sets itself, in every run, or what is the folder's that it writes to.
OWN = ("learning-rate", "evaluate-on", "eval-every", "resume", "output-dir", "report", "tracking")
FEW = 100  # with fewer examples to compare on, a single answer is more than a percent
# With one of these the rate is that of another model or other data than the preset's.
_OTHER = ("model", "data", "targets", "glue-task")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuning:
    """Hold what is tuned: the settings of every run, and the row that chooses."""

    request: dict[str, Scalar]  # what the person gave
    preset: Path  # its file
    config: Config  # as the settings resolve
    row: Row
    grid: Grid

    @property
    def study(self) -> Study:
        """Return the study that it is."""
        title = f"Learning rate of {self.config.method} in preset {self.config.preset}"
        rows = {self.config.method: self.row}
        return Study(title, [Table(title=self.config.method, rows=rows)])

    def describe(self) -> str:
        """Tell a person what will be run."""
        config, grid = self.config, self.grid
        extension = "; more where the best is the largest or smallest" if grid.extensions else ""
        runs = [len(rung.seeds) * (rung.rates or len(grid.values)) for rung in grid.rungs]
        rounds = sum(n * (rung.rounds or 0) for n, rung in zip(runs, grid.rungs, strict=True))
        return "\n".join(
            [
                f"learning rate of {config.method} in preset {config.preset}, "
                f"{count(self.row.num_clients, 'client')}, on their validation splits of "
                f"{100 * config.validation_share:g} %",
                f"rates: {' '.join(f'{rate:g}' for rate in grid.values)}{extension}",
                *(
                    f"  {count(rung.rates or len(grid.values), 'rate')}, {_length(rung)}"
                    for rung in grid.rungs
                ),
                f"{count(sum(runs), 'run')}, {count(rounds, 'round')} in all",
            ]
        )


def plan_tuning(
    request: Mapping[str, Scalar],
    num_clients: int | None = None,
    rates: Sequence[float] = (),
    seeds: Sequence[int] = (),
) -> Tuning:
    """Check the settings, and plan the tuning: around the default rate, or of these rates alone."""
    if conflicts := {key: value for key, value in request.items() if key in OWN}:
        raise ValueError(
            f"tune: got {' '.join(as_key_values(conflicts))}, expected settings other than "
            f"{', '.join(OWN)}, which it sets itself; leave it out, or name rates to try with "
            "--rates and a folder with --output"
        )
    own: dict[str, Scalar] = {"evaluate-on": "clients", "validation-share": HELD_BACK}
    settings = own_preset({"preset": "digits-vit", "method": "ravan", **own, **request})
    if seeds and "seed" in settings:
        raise ValueError(
            f"--seeds: got seed={settings['seed']} beside it, expected one of them; leave one out"
        )
    for option, numbers in (("--seeds", seeds), ("--rates", sorted(set(rates)))):
        if numbers and len(set(numbers)) < max(2, len(numbers)):
            raise ValueError(f"{option}: got {list(numbers)}, expected at least two different ones")
    first = int(check_key("seed", settings.pop("seed", SEED)))
    chosen = tuple(seeds) or tuple(range(first, first + SEEDS))
    for seed in chosen:
        check_key("seed", seed)
    for rate in rates:
        check_key("learning-rate", rate)
    config = read_config(settings | ({"learning-rate": rates[0]} if rates else {}))
    begin = tuple(sorted(set(rates))) or tuple(grid_around(config.learning_rate))
    grid = Grid(
        "learning-rate", begin, _rungs(len(begin), config.num_rounds, chosen),
        0 if rates else EXTENSIONS, config.validation_share,
    )  # fmt: skip
    row = Row(settings, number_of_clients(config, num_clients), (), grid)
    return Tuning(dict(request), preset_file(cast(str, settings["preset"])), config, row, grid)


def _rungs(rates: int, rounds: int, seeds: tuple[int, ...]) -> tuple[Rung, ...]:
    """Plan a quarter of the rounds, half, and all; equal lengths count once."""
    before: dict[int, Rung] = {}
    for part in (4, 2):
        length, number = math.ceil(rounds / part), rates if not before else math.ceil(rates / 2)
        if length < rounds and number > min(rates, 2) and length not in before:
            before[length] = Rung(seeds[:1], number, length)
    # Of a single round no part can be run: then all rates get it, with every seed.
    return (*before.values(), Rung(seeds, min(rates, 2) if before else rates, rounds))


def check_validation_size(tuning: Tuning) -> int:
    """Count the examples that all clients hold back; ValueError where one has none to train on."""
    numbers = []
    for seed in tuning.grid.rungs[-1].seeds:
        config = replace(tuning.config, seed=seed)
        sizes = [len(rows) for rows in ModelAndData(config).rows(tuning.row.num_clients)]
        if validation_size(config, min(sizes)) >= min(sizes):
            raise ValueError(
                f"tune: a client has {min(sizes)} of the {sum(sizes):,} examples under seed "
                f"{seed}, expected enough for a validation split of "
                f"{100 * config.validation_share:g} % and for training; use fewer clients with "
                "num-clients=..., or more examples"
            )
        numbers.append(sum(validation_size(config, size) for size in sizes))
    number = min(numbers)
    if number < FEW:
        log.warning(
            "the validation splits have %d examples in all, so that one answer changes the metric "
            "by %.1f %%: rates may differ by chance; raise validation-share, or use more examples",
            number,
            100 / number,
        )
    return number


def tune(tuning: Tuning, folder: Path, options: RunOptions) -> RateChoice:
    """Run what is not done yet, and write `results.md`; RuntimeError where every rate failed."""
    study, results = tuning.study, Results(folder)
    run_missing(study, results, options)
    runs = candidates(study, results)
    failed = {str(run): why for run in runs if (why := results.failure(run)) is not None}
    choice = choose(tuning.row, results)
    if choice is None or not choice.rungs[-1].scores:
        run, reason = next(iter(failed.items()))
        raise RuntimeError(f"every learning rate failed; the first: {run}: {reason}")
    write_tables(study, results, failed)
    return choice


def summary(choice: RateChoice) -> str:
    """Write the rate that was chosen, and those that are as good as it, for people."""
    rate, scores = cast(float, choice.rate), choice.scores
    best = scores[rate]
    text = [f"learning rate {rate:g}: {best.metric} {best} ({_length(choice.rungs[-1].rung)})"]
    for value in sorted(set(scores) - {rate}):
        noise = "within noise of it" if value in choice.alternatives else "worse by more than noise"
        text.append(f"  {value:g}: {scores[value]}, {noise}")
    if choice.at_the_edge:
        tried = ", ".join(f"{value:g}" for value in choice.tried)
        text.append(
            f"  it is the last of the rates tried ({tried}): a better one may lie beyond; name "
            "others with --rates"
        )
    if any(rate not in measured.scores for measured in choice.rungs for rate in measured.rates):
        text.append("  some runs failed; results.md says why")
    return "\n".join(text)


def adopt(tuning: Tuning, choice: RateChoice, *, write: bool = True) -> str:
    """Write the rate into the preset's file; return what was done, for people."""
    path, rate, method = tuning.preset, cast(float, choice.rate), tuning.config.method
    comments = notes(tuning, choice)
    changes = as_key_values({key: tuning.request[key] for key in _OTHER if key in tuning.request})
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if not write:
            why = "--no-write"
        elif changes:
            why = f"the rate was chosen with {' '.join(changes)}, which the preset does not have"
        elif not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            why = "the file is read-only"
        else:
            place = path.resolve()
            edited = with_rate(place.read_bytes().decode("utf-8"), method, rate, comments)
            write_atomically(place, edited.encode())
            place.chmod(mode)
            return f"written: {RATE} of {method} is {as_written(rate)} in {path}"
    except (ValueError, OSError, LookupError) as error:
        why = str(error)
    return "\n".join(
        [
            f"not written to {path}: {why}. Give {RATE}={rate:g}, or write in a preset of your "
            "own:",
            f"{RATE}:",
            *(f"  # tune of {method}: {note}" for note in comments),
            f"  {method}: {as_written(rate)}",
        ]
    )


def notes(tuning: Tuning, choice: RateChoice) -> list[str]:
    """Write what the rate was chosen from, for the comment above it."""
    score = choice.scores[cast(float, choice.rate)]
    shown = {k: v for k, v in tuning.request.items() if k not in ("preset", "method", "seed")}
    suffix = f", with {' '.join(as_key_values(shown))}" if shown else ""
    version = importlib.metadata.version("ravan-flwr")
    today = datetime.now().astimezone().date().isoformat()
    seeds = " ".join(map(str, choice.rungs[-1].rung.seeds))
    lines = [
        f"{score.metric} {score} on the validation splits of "
        f"{count(tuning.row.num_clients, 'client')}, seeds {seeds}, "
        f"{count(choice.rungs[-1].rung.rounds or 0, 'round')}{suffix}",
        f"tried {' '.join(f'{rate:g}' for rate in choice.tried)}; ravan-flwr {version}, {today}",
    ]
    return [" ".join(line.split()) for line in lines]


def _length(rung: Rung) -> str:
    """Write how long its runs are, and with which seeds."""
    return f"{count(rung.rounds or 0, 'round')}, seed {' '.join(map(str, rung.seeds))}"


def with_rate(text: str, method: str, rate: float, notes: Sequence[str]) -> str:
    """Return the text with a method's rate, and notes above it in place of earlier ones.

    ValueError, which says why, where that cannot be done in this file.
    """
    expected = _loaded(text)
    rates = expected.get(RATE) or {}
    if not isinstance(rates, dict) or any(isinstance(value, dict) for value in rates.values()):
        raise ValueError(f"it has a {RATE} by other keys, and keeps its numbers")
    expected[RATE] = rates | {method: rate}
    edited = _edited(text, method, as_written(rate), notes)
    try:
        if _loaded(edited) == expected:
            return edited
    except ValueError:  # it is not read as it looks
        pass
    raise ValueError(f"it writes its {RATE} in a way that no edit of one line can change")


def as_written(rate: float) -> str:
    """Write a rate so that YAML reads the same number: 3.0e-3, since 3e-3 would be a text."""
    digits = next(n for n in range(1, 18) if float(f"{rate:.{n}e}") == rate)
    mantissa, exponent = f"{rate:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent):+d}"


def _loaded(text: str) -> dict[str, Any]:
    """Read the text as a preset is read; ValueError if it is no mapping."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML any more ({error})") from None
    if not isinstance(content, dict):
        raise ValueError("it is no mapping any more")
    return content


def _edited(text: str, method: str, rate: str, notes: Sequence[str]) -> str:
    """Put the method's line, with its notes, in place of the former one, or first in the block.

    A comment behind the former rate stays.
    """
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.removesuffix(end).split(end)
    root: Any = yaml.compose(text)
    entries = {key.value: (key, value) for key, value in root.value}
    if RATE not in entries:
        lines.append(f"{RATE}:")
    key, block = entries.get(RATE, (None, None))
    at, indent, tail = (key.start_mark.line + 1 if key else len(lines)), "  ", ""
    rates = block.value if isinstance(block, yaml.MappingNode) else []
    if not rates:
        lines[at - 1] = lines[at - 1].replace("{}", "", 1)
    for name, value in rates:
        indent = " " * name.start_mark.column
        if name.value == method:
            at, tail = name.start_mark.line, lines[value.end_mark.line][value.end_mark.column :]
            del lines[at : value.end_mark.line + 1]
    note = f"# tune of {method}: "
    while lines[at - 1].lstrip().startswith(note):
        at -= 1
        del lines[at]
    own = [indent + x for x in (*(note + line for line in notes), f"{method}: {rate}{tail}")]
    return end.join([*lines[:at], *own, *lines[at:], ""])
