"""Choose the learning rate of a method by a study of one row, and write it into the preset.

The search is successive halving. Rates around the method's default are run for a quarter of the
rounds with one seed. The better half is run for half of the rounds, and the best two for all rounds
with three seeds. Test examples are not used. If the best rate of a rung is the largest or smallest
tried, the next rate beyond it is tried too.
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
from ravan_flwr.config.presets import preset_file, with_preset_path
from ravan_flwr.config.run_config import VALIDATION_SHARE, Config, read_config
from ravan_flwr.files import write_atomically
from ravan_flwr.runs.console import count
from ravan_flwr.specs import Scalar
from ravan_flwr.studies.choosing import RateChoice, candidates, choose, grid_around
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.running import RunOptions, run_missing
from ravan_flwr.studies.spec import EXTENSIONS, RATE, Grid, Row, Rung, Study, Table
from ravan_flwr.studies.tables import write_tables
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.model_and_data import ModelAndData, validation_size

SEED, SEEDS = 100, 3  # default first seed, and number of seeds of the last rung
# Settings that a tuning sets itself in every run, or that belong to its output folder.
RESERVED_KEYS = (
    "learning-rate",
    "evaluate-on",
    "eval-every",
    "resume",
    "output-dir",
    "report",
    "tracking",
)
FEW_EXAMPLES = 100  # with fewer validation examples, one answer is more than a percent
# With one of these settings the rate is not for the preset's own model and data.
_MODEL_AND_DATA = ("model", "data", "targets", "glue-task")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuning:
    """A planned tuning: the settings of every run, and the row that chooses."""

    request: dict[str, Scalar]  # the user's settings
    preset: Path  # the preset's file
    config: Config  # the resolved settings
    row: Row
    grid: Grid

    @property
    def study(self) -> Study:
        """Return the tuning as a study of one row."""
        title = f"Learning rate of {self.config.method} in preset {self.config.preset}"
        rows = {self.config.method: self.row}
        return Study(title, [Table(title=self.config.method, rows=rows)])

    def describe(self) -> str:
        """Return a text that lists the planned runs."""
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
    """Return the tuning, with checked settings: around the default rate, or of these rates."""
    if conflicts := {key: value for key, value in request.items() if key in RESERVED_KEYS}:
        raise ValueError(
            f"tune: got {' '.join(as_key_values(conflicts))}, expected settings other than "
            f"{', '.join(RESERVED_KEYS)}, which it sets itself; leave it out, or name rates to try "
            "with --rates and a folder with --output"
        )
    validation: dict[str, Scalar] = {"evaluate-on": "clients", "validation-share": VALIDATION_SHARE}
    settings = with_preset_path(
        {"preset": "digits-vit", "method": "ravan", **validation, **request}
    )
    if seeds and "seed" in settings:
        raise ValueError(
            f"--seeds: got seed={settings['seed']} beside it, expected one of them; leave one out"
        )
    for option, numbers in (("--seeds", seeds), ("--rates", sorted(set(rates)))):
        if numbers and len(set(numbers)) < max(2, len(numbers)):
            raise ValueError(f"{option}: got {list(numbers)}, expected at least two different ones")
    first = int(check_key("seed", settings.pop("seed", SEED)))
    run_seeds = tuple(seeds) or tuple(range(first, first + SEEDS))
    for seed in run_seeds:
        check_key("seed", seed)
    for rate in rates:
        check_key("learning-rate", rate)
    config = read_config(settings | ({"learning-rate": rates[0]} if rates else {}))
    start_rates = tuple(sorted(set(rates))) or tuple(grid_around(config.learning_rate))
    grid = Grid(
        "learning-rate", start_rates, _rungs(len(start_rates), config.num_rounds, run_seeds),
        0 if rates else EXTENSIONS, config.validation_share,
    )  # fmt: skip
    row = Row(settings, number_of_clients(config, num_clients), (), grid)
    return Tuning(dict(request), preset_file(cast(str, settings["preset"])), config, row, grid)


def _rungs(rates: int, rounds: int, seeds: tuple[int, ...]) -> tuple[Rung, ...]:
    """Return rungs of a quarter, half and all of the rounds; equal lengths make one rung."""
    shorter: dict[int, Rung] = {}
    for divisor in (4, 2):
        length, number = math.ceil(rounds / divisor), rates if not shorter else math.ceil(rates / 2)
        if length < rounds and number > min(rates, 2) and length not in shorter:
            shorter[length] = Rung(seeds[:1], number, length)
    # A single round has no shorter rung: then all rates are run with every seed.
    return (*shorter.values(), Rung(seeds, min(rates, 2) if shorter else rates, rounds))


def check_validation_size(tuning: Tuning) -> int:
    """Return the size of all validation splits; ValueError if a client has none to train on."""
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
    if number < FEW_EXAMPLES:
        log.warning(
            "the validation splits have %d examples in all, so that one answer changes the metric "
            "by %.1f %%: rates may differ by chance; raise validation-share, or use more examples",
            number,
            100 / number,
        )
    return number


def tune(tuning: Tuning, folder: Path, options: RunOptions) -> RateChoice:
    """Run the missing runs, and write `results.md`; RuntimeError if every rate failed."""
    study, results = tuning.study, Results(folder)
    run_missing(study, results, options)
    runs = candidates(study, results)
    failed = {str(run): text for run in runs if (text := results.failure(run)) is not None}
    choice = choose(tuning.row, results)
    if choice is None or not choice.rungs[-1].scores:
        run, reason = next(iter(failed.items()))
        raise RuntimeError(f"every learning rate failed; the first: {run}: {reason}")
    write_tables(study, results, failed)
    return choice


def summary(choice: RateChoice) -> str:
    """Return a text with the chosen rate, and the other rates compared to it."""
    rate, scores = cast(float, choice.rate), choice.scores
    best = scores[rate]
    text = [f"learning rate {rate:g}: {best.metric} {best} ({_length(choice.rungs[-1].rung)})"]
    for value in sorted(set(scores) - {rate}):
        standing = "not significantly worse" if value in choice.alternatives else "worse"
        text.append(f"  {value:g}: {scores[value]}, {standing}")
    if choice.at_the_edge:
        tried = ", ".join(f"{value:g}" for value in choice.tried)
        text.append(
            f"  it is at the edge of the rates tried ({tried}): a better rate may be beyond; name "
            "others with --rates"
        )
    if any(rate not in measured.scores for measured in choice.rungs for rate in measured.rates):
        text.append("  some runs failed; results.md has the reasons")
    return "\n".join(text)


def adopt(tuning: Tuning, choice: RateChoice, *, write: bool = True) -> str:
    """Write the rate into the preset's file; return a text with the outcome."""
    path, rate, method = tuning.preset, cast(float, choice.rate), tuning.config.method
    comments = notes(tuning, choice)
    changes = as_key_values(
        {key: tuning.request[key] for key in _MODEL_AND_DATA if key in tuning.request}
    )
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if not write:
            reason = "--no-write"
        elif changes:
            reason = f"the rate was chosen with {' '.join(changes)}, which the preset does not have"
        elif not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            reason = "the file is read-only"
        else:
            target = path.resolve()
            edited = with_rate(target.read_bytes().decode("utf-8"), method, rate, comments)
            write_atomically(target, edited.encode())
            target.chmod(mode)
            return f"written: {RATE} of {method} is {as_written(rate)} in {path}"
    except (ValueError, OSError, LookupError) as error:
        reason = str(error)
    return "\n".join(
        [
            f"not written to {path}: {reason}. Give {RATE}={rate:g}, or write in a preset of your "
            "own:",
            f"{RATE}:",
            *(f"  # tune of {method}: {note}" for note in comments),
            f"  {method}: {as_written(rate)}",
        ]
    )


def notes(tuning: Tuning, choice: RateChoice) -> list[str]:
    """Return the comment above the rate: score, seeds, rounds, rates tried, version, date."""
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
    """Return a rung's rounds and seeds as text."""
    return f"{count(rung.rounds or 0, 'round')}, seed {' '.join(map(str, rung.seeds))}"


def with_rate(text: str, method: str, rate: float, notes: Sequence[str]) -> str:
    """Return a preset's text with a method's rate, and notes above it in place of earlier notes.

    Raise ValueError, with the reason, if this file cannot be edited.
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
    except ValueError:  # the edited text is not valid YAML
        pass
    raise ValueError(f"it writes its {RATE} in a way that no edit of one line can change")


def as_written(rate: float) -> str:
    """Return a rate as YAML reads it: 3.0e-3, since YAML reads 3e-3 as a string."""
    digits = next(n for n in range(1, 18) if float(f"{rate:.{n}e}") == rate)
    mantissa, exponent = f"{rate:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent):+d}"


def _loaded(text: str) -> dict[str, Any]:
    """Return the text's YAML mapping; raise ValueError if it is not a mapping."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML any more ({error})") from None
    if not isinstance(content, dict):
        raise ValueError("it is no mapping any more")
    return content


def _edited(text: str, method: str, rate: str, notes: Sequence[str]) -> str:
    """Return the text with the method's line and notes, in place of the old, or first in the block.

    A comment after the old rate stays.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.removesuffix(newline).split(newline)
    root: Any = yaml.compose(text)
    entries = {key.value: (key, value) for key, value in root.value}
    if RATE not in entries:
        lines.append(f"{RATE}:")
    key, block = entries.get(RATE, (None, None))
    index, indent, tail = (key.start_mark.line + 1 if key else len(lines)), "  ", ""
    rates = block.value if isinstance(block, yaml.MappingNode) else []
    if not rates:
        lines[index - 1] = lines[index - 1].replace("{}", "", 1)
    for name, value in rates:
        indent = " " * name.start_mark.column
        if name.value == method:
            index, tail = name.start_mark.line, lines[value.end_mark.line][value.end_mark.column :]
            del lines[index : value.end_mark.line + 1]
    note = f"# tune of {method}: "
    while lines[index - 1].lstrip().startswith(note):
        index -= 1
        del lines[index]
    new_lines = [indent + x for x in (*(note + line for line in notes), f"{method}: {rate}{tail}")]
    return newline.join([*lines[:index], *new_lines, *lines[index:], ""])
