"""Choose the learning rate of a method by a study of one row, and write it into the preset.

The method's rate and its neighbours are each run with three seeds. Test examples are not used.
While the best rate is the largest or smallest tried, the next rate beyond it is tried too.
"""

import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from ravan_flwr.config.keys import as_key_values, check_key
from ravan_flwr.config.presets import preset_file, with_preset_path
from ravan_flwr.config.run_config import VALIDATION_SHARE, Config, read_config
from ravan_flwr.files import write_atomically
from ravan_flwr.lab.choosing import RateChoice, candidates, choose, grid_around
from ravan_flwr.lab.results import Results
from ravan_flwr.lab.running import RunOptions, run_missing
from ravan_flwr.lab.spec import EXTENSIONS, RATE, Grid, Row, Study, Table
from ravan_flwr.lab.tables import write_tables
from ravan_flwr.runs.console import count
from ravan_flwr.specs import Scalar
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.model_and_data import ModelAndData, validation_size

SEED, SEEDS = 100, 3  # default first seed, and number of seeds
# Settings that a tuning sets itself in every run, or that belong to its output folder.
RESERVED_KEYS = (RATE, "evaluate-on", "eval-every", "resume", "output-dir")
# With one of these settings the rate is not for the preset's own model and data.
_MODEL_AND_DATA = ("model", "data", "targets", "glue-task")


@dataclass(frozen=True)
class Tuning:
    """A planned tuning: the settings of every run, and the row that chooses."""

    request: dict[str, Scalar]  # the user's settings
    preset: Path  # the preset's file
    config: Config  # the resolved settings
    row: Row
    grid: Grid  # of the row

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
        runs = count(len(grid.values) * len(grid.seeds), "run")
        return (
            f"learning rate of {config.method} in preset {config.preset}, "
            f"{count(self.row.num_clients, 'client')}, on their validation splits of "
            f"{100 * config.validation_share:g} %\n"
            f"rates: {' '.join(f'{rate:g}' for rate in grid.values)}{extension}\n"
            f"{runs} of {count(config.num_rounds, 'round')}, seeds {_joined(grid.seeds)}"
        )


def plan_tuning(
    request: Mapping[str, Scalar],
    num_clients: int | None = None,
    rates: Sequence[float] = (),
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
    if len(set(rates)) == 1:
        raise ValueError(f"--rates: got {list(rates)}, expected at least two different ones")
    first = int(check_key("seed", settings.pop("seed", SEED)))
    seeds = tuple(range(first, first + SEEDS))
    check_key("seed", seeds[-1])
    for rate in rates:
        check_key(RATE, rate)
    config = read_config(settings | ({RATE: rates[0]} if rates else {}))
    start_rates = sorted(set(rates)) or grid_around(config.learning_rate)
    extensions = 0 if rates else EXTENSIONS
    grid = Grid(RATE, tuple(start_rates), seeds, extensions, config.validation_share)
    row = Row(settings, number_of_clients(config, num_clients), (), grid)
    return Tuning(dict(request), preset_file(cast(str, settings["preset"])), config, row, grid)


def tune(tuning: Tuning, folder: Path, options: RunOptions) -> RateChoice:
    """Run the missing runs, and write `results.md`; RuntimeError if every rate failed."""
    _check_examples(tuning)
    study, results = tuning.study, Results(folder)
    run_missing(study, results, options)
    runs = candidates(study, results)
    failed = {str(run): text for run in runs if (text := results.failure(run)) is not None}
    choice = choose(tuning.row, results)
    if choice is None or not choice.scores:
        run, reason = next(iter(failed.items()))
        raise RuntimeError(f"every learning rate failed; the first: {run}: {reason}")
    write_tables(study, results, failed)
    return choice


def _check_examples(tuning: Tuning) -> None:
    """Raise ValueError if a client has too few examples for a validation split and training."""
    data = ModelAndData(tuning.config)
    for seed in tuning.grid.seeds:
        config = replace(data.config, seed=seed)
        of_seed = ModelAndData(config)
        of_seed.splits = data.splits  # read once
        min_examples = min(map(len, of_seed.rows(tuning.row.num_clients)))
        if validation_size(config, min_examples) >= min_examples:
            raise ValueError(
                f"tune: a client has {count(min_examples, 'example')} under seed {seed}, expected "
                "some for training and some for a validation split of "
                f"{100 * config.validation_share:g} %; use fewer clients with num-clients=..., or "
                "more examples"
            )


def summary(choice: RateChoice) -> str:
    """Return a text with the chosen rate, and the other rates compared to it."""
    rate, scores = cast(float, choice.rate), choice.scores
    best = scores[rate]
    text = [f"learning rate {rate:g}: {best.metric} {best} (seeds {_joined(choice.grid.seeds)})"]
    for value in sorted(set(scores) - {rate}):
        standing = "not significantly worse" if value in choice.alternatives else "worse"
        text.append(f"  {value:g}: {scores[value]}, {standing}")
    if choice.at_the_edge:
        tried = ", ".join(f"{value:g}" for value in choice.tried)
        text.append(
            f"  it is at the edge of the rates tried ({tried}): a better rate may be beyond; name "
            "others with --rates"
        )
    if len(scores) < len(choice.tried):
        text.append("  some runs failed; results.md has the reasons")
    return "\n".join(text)


def adopt(tuning: Tuning, choice: RateChoice, *, write: bool = True) -> str:
    """Write the rate into the preset's file; return a text with the outcome."""
    path, rate, method = tuning.preset, cast(float, choice.rate), tuning.config.method
    shown = {k: v for k, v in tuning.request.items() if k not in ("preset", "method", "seed")}
    setting = f", with {' '.join(as_key_values(shown))}" if shown else ""
    note = f"tune: {choice.scores[rate].metric} {choice.scores[rate]}{setting}"
    changes = as_key_values(
        {key: tuning.request[key] for key in _MODEL_AND_DATA if key in tuning.request}
    )
    try:
        target, mode = path.resolve(), stat.S_IMODE(path.stat().st_mode)
        if not write:
            raise ValueError("--no-write")
        if changes:
            raise ValueError(
                f"the rate was chosen with {' '.join(changes)}, which the preset does not have"
            )
        if not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("the file is read-only")
        edited = with_rate(target.read_bytes().decode(), method, rate, note)
        write_atomically(target, edited.encode())
        target.chmod(mode)
    except (ValueError, OSError) as error:
        return (
            f"not written to {path}: {error}. Give {RATE}={rate:g}, or write in a preset of your "
            f"own:\n{RATE}:\n{_line(method, rate, note)}"
        )
    return f"written: {RATE} of {method} is {as_written(rate)} in {path}"


def _joined(seeds: Sequence[int]) -> str:
    return " ".join(map(str, seeds))


def _line(method: str, rate: float, note: str) -> str:
    return f"  {method}: {as_written(rate)}  # {' '.join(note.split())}"


def with_rate(text: str, method: str, rate: float, note: str) -> str:
    """Return a preset's text with a method's rate, and a note as a comment, in place of earlier.

    A comment of the user's own stays behind the note. Raise ValueError, with the reason, if
    this file cannot be edited.
    """
    content = _loaded(text)
    rates = content.get(RATE) or {}
    if not isinstance(rates, dict) or any(isinstance(value, dict) for value in rates.values()):
        raise ValueError(f"it has a {RATE} by other keys, and keeps its numbers")
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.removesuffix(newline).split(newline) + ([] if RATE in content else [f"{RATE}:"])
    head = re.compile(rf"{RATE}:( {{}})?( +#.*)?")
    start = next((number for number, line in enumerate(lines, 1) if head.fullmatch(line)), 0)
    lines[start - 1] = lines[start - 1].replace(" {}", "", 1)
    after = (n for n, line in enumerate(lines) if n >= start and line[:1] not in ("", " ", "#"))
    end = next(after, len(lines))
    earlier = f"# tune of {method}: "  # the notes of version 0.2 are lines of their own
    block = [line for line in lines[start:end] if not line.lstrip().startswith(earlier)]
    entries = (re.match("( +)[^ #]", line) for line in block)
    indent = next((entry[1] for entry in entries if entry), "  ")
    own = re.compile(
        rf"{indent}{re.escape(method)}: [^#]*?( +# tune: .*?(?P<after>  #.*)?|(?P<alone> +#.*))?"
    )
    found = {n: match for n, line in enumerate(block) if (match := own.fullmatch(line))}
    problem = f"it writes its {RATE} in a way that no edit of one line can change"
    if not start or len(found) != (method in rates):
        raise ValueError(problem)
    row, match = next(iter(found.items()), (0, None))
    comment = (match["after"] or match["alone"] or "").strip() if match else ""
    block[row : row + len(found)] = [
        indent + _line(method, rate, note).strip() + f"  {comment}" * bool(comment)
    ]
    edited = newline.join([*lines[:start], *block, *lines[end:], ""])
    try:
        if _loaded(edited) == content | {RATE: rates | {method: rate}}:
            return edited
    except ValueError:  # the edited text is not valid YAML
        pass
    raise ValueError(problem)


def as_written(rate: float) -> str:
    """Return a rate as YAML reads it: 3.0e-3, since YAML reads 3e-3 as a string."""
    digits = next(n for n in range(1, 18) if float(f"{rate:.{n}e}") == rate)
    return f"{rate:.{digits}e}".replace("e-0", "e-").replace("e+0", "e+")


def _loaded(text: str) -> dict[str, Any]:
    """Return the text's YAML mapping; raise ValueError if it is not a mapping."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML any more ({error})") from None
    if not isinstance(content, dict):
        raise ValueError("it is no mapping any more")
    return content
