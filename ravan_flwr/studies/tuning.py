"""Plan how a learning rate is chosen: by successive halving, on examples that clients hold back.

Rates around the method's default begin with a quarter of the rounds and one seed. The better half
of them gets half of the rounds, the best two get all rounds and three seeds. The test examples take
no part. Where the best of a rung is the largest or smallest rate of all, the next is tried, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ravan_flwr.config.key_values import as_key_values
from ravan_flwr.config.keys import check_key
from ravan_flwr.config.presets import own_preset, preset_file
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.specs import Scalar
from ravan_flwr.studies.clock import Work
from ravan_flwr.studies.rates import EXTENSIONS, grid_around
from ravan_flwr.studies.spec import HELD_BACK, PlannedRun
from ravan_flwr.training.clients import number_of_clients

SEED, SEEDS = 100, 3  # the first seed, and how many the last rung has, unless some are given
# What a tuning sets itself, in every run, or what is the folder's that it writes to.
OWN = ("learning-rate", "evaluate-on", "eval-every", "resume", "output-dir", "report", "tracking")


@dataclass(frozen=True)
class Rung:
    """Say how long, and with which seeds, so many rates are run."""

    rates: int
    rounds: int
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        return f"{_many(self.rates, 'rate')}, {self.length}, seed {' '.join(map(str, self.seeds))}"

    @property
    def length(self) -> str:
        """Write how long its runs are."""
        return _many(self.rounds, "round")

    @property
    def work(self) -> Work:
        """Count its runs, and their rounds."""
        number = self.rates * len(self.seeds)
        return Work(number, number * self.rounds)


@dataclass(frozen=True)
class Tuning:
    """Hold what is tuned: the settings of every run, and the rungs."""

    given: dict[str, Scalar]  # what the person gave
    preset: Path  # its file
    settings: dict[str, Scalar]  # of every run
    config: Config  # as the settings resolve
    num_clients: int
    rates: tuple[float, ...]
    extensions: int  # how many rates may be added to them
    rungs: tuple[Rung, ...]

    def runs(self, rung: Rung, rate: float) -> list[PlannedRun]:
        """List the runs that measure how good a rate is, one a seed."""
        more: dict[str, Scalar] = {
            "learning-rate": rate,
            "num-rounds": rung.rounds,
            "eval-every": rung.rounds,
        }
        return [
            PlannedRun(tuple((self.settings | more | {"seed": seed}).items()), self.num_clients)
            for seed in rung.seeds
        ]

    def describe(self) -> str:
        """Tell a person what will be run."""
        config, share = self.config, 100 * self.config.validation_share
        more = "; more where the best is the largest or smallest" if self.extensions else ""
        work = sum((rung.work for rung in self.rungs), start=Work())
        return "\n".join(
            [
                f"learning rate of {config.method} in preset {config.preset}, "
                f"{_many(self.num_clients, 'client')}, on the {share:g} % of their examples that "
                "clients hold back",
                f"rates: {' '.join(f'{rate:g}' for rate in self.rates)}{more}",
                *(f"  {rung}" for rung in self.rungs),
                f"{_many(work.runs, 'run')}, {_many(work.rounds, 'round')} in all",
            ]
        )


def plan_tuning(
    given: Mapping[str, Scalar],
    num_clients: int | None = None,
    rates: Sequence[float] = (),
    seeds: Sequence[int] = (),
) -> Tuning:
    """Check the settings, and plan the tuning: around the default rate, or of these rates alone."""
    _check_given(given)
    held_back: dict[str, Scalar] = {"evaluate-on": "clients", "validation-share": HELD_BACK}
    settings = own_preset({"preset": "digits-vit", "method": "ravan", **held_back, **given})
    if seeds and "seed" in settings:
        raise ValueError(
            f"--seeds: got seed={settings['seed']} beside it, expected one of them; leave one out"
        )
    if seeds and len(set(seeds)) < max(2, len(seeds)):
        raise ValueError(f"--seeds: got {list(seeds)}, expected at least two different ones")
    first = int(check_key("seed", settings.pop("seed", SEED)))
    chosen = tuple(seeds) or tuple(range(first, first + SEEDS))
    for seed in chosen:
        check_key("seed", seed)
    for rate in rates:
        check_key("learning-rate", rate)
    if rates and len(set(rates)) < 2:
        raise ValueError(f"--rates: got {list(rates)}, expected at least two different ones")
    config = read_config(settings | ({"learning-rate": rates[0]} if rates else {}))
    begin = tuple(sorted(set(rates))) or tuple(grid_around(config.learning_rate))
    return Tuning(
        given=dict(given),
        preset=preset_file(cast(str, settings["preset"])),
        settings=settings,
        config=config,
        num_clients=number_of_clients(config, num_clients),
        rates=begin,
        extensions=0 if rates else EXTENSIONS,
        rungs=_rungs(len(begin), config.num_rounds, chosen),
    )


def _check_given(given: Mapping[str, Scalar]) -> None:
    for key in OWN:
        if key in given:
            (word,) = as_key_values({key: given[key]})
            instead = {
                "learning-rate": "leave it out, or name those to try with --rates",
                "output-dir": "leave it out, or name a folder with --output",
            }
            raise ValueError(
                f"tune: got {word}, expected settings other than {', '.join(OWN)}, which it sets "
                f"itself; {instead.get(key, 'leave it out')}"
            )


def _rungs(rates: int, rounds: int, seeds: tuple[int, ...]) -> tuple[Rung, ...]:
    """Plan a quarter of the rounds, half, and all; equal lengths count once."""
    last = Rung(min(rates, 2), rounds, seeds)
    before: dict[int, Rung] = {}
    for part in (4, 2):
        length, number = math.ceil(rounds / part), rates if not before else math.ceil(rates / 2)
        if length < rounds and number > last.rates and length not in before:
            before[length] = Rung(number, length, seeds[:1])
    # Of a single round no part can be run: then all rates get it, with every seed.
    return (*before.values(), last if before else Rung(rates, rounds, last.seeds))


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
