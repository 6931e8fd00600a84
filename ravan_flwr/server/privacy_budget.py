"""Keep a private run's account of its privacy budget on disk, written before each release.

`privacy.json` has what a run has spent. A run that is stopped between writing and releasing has
counted a release that did not happen; the opposite cannot occur. A resumed run continues the
count. So does a run that goes back to an earlier round, since past releases stay released.

With `privacy=client` the account counts releases. The sampling rate is fixed when the run begins,
from the number of clients at that time. The account of `privacy=example` is in
extras/example_privacy/release.py.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from logging import getLogger
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.run_config import Config
from ravan_flwr.config.yaml_file import KEBAB
from ravan_flwr.files import first_error
from ravan_flwr.methods.base import Tensors
from ravan_flwr.privacy.account import find_epsilon, multiplier_for
from ravan_flwr.privacy.mechanism import FIRST_NORM, Noise
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.resume import ResumePoint

log = getLogger(__name__)

NAME = "privacy.json"
CLIP_NORM = "privacy/clip-norm"  # in the server's memory
MIN_NORM, MAX_NORM = 1e-100, 1e100  # clip norms with which no deviation is 0 or infinite
CLOSE = 1e-6  # relative difference of two accounts of the same releases, on different machines
# Rounds that are repeated, as after going back, are counted again. Still, no account has more than
# this times the recorded rounds, of which UNRECORDED may be missing: computing it takes minutes.
REPEATED, UNRECORDED = 10, 100
Rounds = Annotated[int, Field(ge=1, le=KEYS["num-rounds"].high)]
Rate = Annotated[float, Field(gt=0, le=1)]


class Account(BaseModel):
    """The content of `privacy.json`, of which each budget has further fields."""

    model_config: ClassVar = KEBAB | {"strict": False}  # JSON has no tuples, and no whole keys
    epsilon: float
    delta: float
    noise_multiplier: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PrivacyBudget(ABC):
    """A run's account: its spent epsilon, and whether a further round is within the limit.

    `before` is the file's content when a run is resumed. `write` writes the file.
    """

    privacy: ClassVar[str]  # the value of the key `privacy`
    account: ClassVar[type[Account]]  # the content of its file

    def __init__(
        self,
        config: Config,
        write: Callable[[dict[str, Any]], None],
        before: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self._write = config, write
        self.delta, self._limit = config.delta, config.epsilon
        self.multiplier = float(before["noise-multiplier"]) if before else 0.0
        self._open(before or {})

    @abstractmethod
    def _open(self, before: Mapping[str, Any]) -> None:
        """Take the checked content of the account's file; empty for a new run."""

    @classmethod
    def of(cls, config: Config, directory: RunDirectory, start: ResumePoint) -> Self | None:
        """Return a run's account; None if the run has none.

        Raise ValueError if a resumed run's account is wrong. It is compared with all records, also
        with those of rounds that are discarded when the run goes back.
        """
        if config.privacy != cls.privacy:
            return None
        write = partial(directory.write_json, NAME)
        if start.last_round is None:
            return cls(config, write)
        wrong, content = "it is missing", {}
        if (directory.path / NAME).is_file():
            try:
                account = cls.account.model_validate(directory.read_json(NAME))
                content = account.model_dump(by_alias=True)
                wrong = next(cls._problems(content, directory.read_rounds(), config), "")
            except ValidationError as error:
                wrong = first_error(error)
        if wrong:
            raise ValueError(
                f"{directory.path / NAME}: {wrong}, expected the account of the run; "
                "restore the file, since without it what was spent is unknown"
            )
        return cls(config, write, content)

    @classmethod
    def _problems(
        cls, content: Mapping[str, Any], records: list[RoundRecord], config: Config
    ) -> Iterator[str]:
        """Yield conflicts of a file with the settings, with its own counts, and with the records.

        The spent epsilon follows from the other values, and no round has spent more. It is computed
        last: for counts and noise that are not the run's that could take minutes and gigabytes.
        """
        multiplier = content["noise-multiplier"]
        for key, of_run in (("delta", config.delta), ("noise-multiplier", config.noise_multiplier)):
            if of_run not in (None, content[key]):
                yield f"{key} = {content[key]!r}, and the run has {of_run!r}"
        budgets: list[Mapping[str, Any]] = [record.get("privacy", {}) for record in records]
        for record, privacy in zip(records, budgets, strict=True):
            if not math.isclose(privacy.get("noise-multiplier", 0.0), multiplier, rel_tol=CLOSE):
                yield f"noise-multiplier = {multiplier!r}, and round {record['round']} has another"
        account = cls(config, lambda _: None, content)
        if account.rounds > REPEATED * (len(records) + UNRECORDED):
            yield f"it counts {account.rounds:,} rounds, and the records have {len(records):,}"
        spent = account.epsilon
        if not math.isclose(content["epsilon"], spent, rel_tol=CLOSE):
            yield f"epsilon = {content['epsilon']!r}, and its counts spend {spent!r}"
        for record, privacy in zip(records, budgets, strict=True):
            if privacy.get("epsilon", math.inf) > spent * (1 + CLOSE):
                yield f"epsilon = {spent!r}, and round {record['round']} has more"

    @abstractmethod
    def begin(
        self, registry: ClientRegistry, can_train: Callable[[float], bool], rounds: int
    ) -> None:
        """Fix a new run's noise multiplier; log what the run will spend in `rounds` more rounds.

        `can_train` returns whether clients with a budget fraction can train.
        """

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Return how many rounds are counted, of the client that was counted most often."""

    @property
    @abstractmethod
    def epsilon(self) -> float:
        """Return the epsilon spent so far."""

    @abstractmethod
    def ends_after(self, rounds: int) -> bool:
        """Return whether no round is within the limit after `rounds` further rounds."""

    def restore(self, memory: Mapping[str, Tensor]) -> None:  # noqa: B027 (`ExampleBudget` needs none)
        """Restore values from a resumed run's checkpoint."""

    @property
    def memory(self) -> Tensors:
        """Return the tensors for a checkpoint."""
        return {}

    def as_record(self) -> dict[str, Any]:
        """Return what was spent, with the keys of the records and the summary."""
        cohort = self.config.noise_cohort
        return {
            "epsilon": self.epsilon, "delta": self.delta, "noise-multiplier": self.multiplier,
            **({} if cohort is None else {"noise-cohort": cohort}),
        }  # fmt: skip

    def exceeds(self, epsilon: float) -> bool:
        """Return whether that epsilon is above the limit; False if there is no limit."""
        return self._limit is not None and epsilon > self._limit

    def calibrate(self, rate: float, releases: int) -> None:
        """Set the noise multiplier if it is 0: from the config, or from epsilon and `releases`."""
        self.multiplier = (
            self.multiplier
            or self.config.noise_multiplier
            or multiplier_for(self._limit or 0.0, rate, self.delta, releases)
        )

    def warn_of_delta(self, number: int, subject: str) -> None:
        """Warn if delta is 1 / `number` or more: one of them may be revealed entirely."""
        if self.delta * number >= 1:
            log.warning(
                "delta=%g with %s may be revealed entirely; set it below %.1g",
                *(self.delta, subject, 1 / number),
            )

    def epsilon_too_small(self, takes: float) -> ValueError:
        """Return the error of a run in which even one round exceeds epsilon."""
        return ValueError(
            f"epsilon = {self._limit:g}: one round takes {takes:.4g} with noise-multiplier = "
            f"{self.multiplier:g}, expected room for one; raise epsilon or noise-multiplier"
        )


class ClientAccount(Account):
    """The account of `privacy=client`."""

    releases: Rounds
    sampling_rate: Rate


class ClientBudget(PrivacyBudget):
    """The account of `privacy=client`: count releases, and keep the clip norm, which may adapt."""

    privacy, account = "client", ClientAccount

    def _open(self, before: Mapping[str, Any]) -> None:
        self.releases = int(before.get("releases", 0))
        self.rate = float(before.get("sampling-rate", 0.0))  # 0: not known yet
        self.norm = self.config.clip_norm or FIRST_NORM

    def restore(self, memory: Mapping[str, Tensor]) -> None:
        # The account is of noise in proportion to the norm, so that it holds for any norm.
        norm = memory.get(CLIP_NORM)
        if self.config.clip_norm or (norm is None and not self.releases):
            return
        self.norm = float(norm) if norm is not None and norm.numel() == 1 else math.nan
        if not MIN_NORM <= self.norm <= MAX_NORM:
            raise ValueError(
                f"checkpoint: {CLIP_NORM} is {'missing' if norm is None else norm.tolist()}, "
                f"expected one number from {MIN_NORM:g} to {MAX_NORM:g}; restore the "
                "checkpoint, or go back with resume=RUN@N"
            )

    @property
    def memory(self) -> Tensors:
        return {CLIP_NORM: torch.tensor([self.norm], dtype=torch.float64)}

    def begin(
        self,
        registry: ClientRegistry,
        can_train: Callable[[float], bool],  # noqa: ARG002 (clients that cannot count as well)
        rounds: int,
    ) -> None:
        clients = max(registry.partitions, len(registry.clients))
        self.rate = self.rate or min(1.0, self.config.clients_per_round / clients)
        self.calibrate(self.rate, rounds)
        if self.ends_after(0) and not self.releases:
            raise self.epsilon_too_small(self._epsilon(1))
        log.info(
            "privacy=client: noise multiplier %.4g, each of %d clients in a round with probability "
            "%.4g; epsilon %.3f so far, %.3f after %d more rounds, delta %g",
            *(self.multiplier, clients, self.rate, self.epsilon),
            *(self._epsilon(self.releases + rounds), rounds, self.delta),
        )
        self.warn_of_delta(clients, f"{clients} clients: one of them")
        if self.config.noise_cohort is not None:
            log.warning(
                "noise-cohort=%d: a study; epsilon is what a federation with as many clients a "
                "round would have, and the clients of this run are not protected by it",
                self.config.noise_cohort,
            )

    @property
    def rounds(self) -> int:
        return self.releases

    @property
    def epsilon(self) -> float:
        return self._epsilon(self.releases)

    def ends_after(self, rounds: int) -> bool:
        return self.exceeds(self._epsilon(self.releases + rounds + 1))

    def noise(self, clients: int) -> Noise:
        """Return the noise of a round that draws from so many clients."""
        adaptive, cohort = self.config.clip_norm is None, self.config.noise_cohort
        return Noise(self.multiplier, self.rate * clients, adaptive, cohort)

    def spend(self) -> None:
        """Count one more release; it is on disk when this returns."""
        self.releases += 1
        self._write(self.as_record() | {"releases": self.releases, "sampling-rate": self.rate})

    def _epsilon(self, releases: int) -> float:
        return find_epsilon(self.multiplier, self.rate, self.delta, releases)

    @classmethod
    def _problems(
        cls, content: Mapping[str, Any], records: list[RoundRecord], config: Config
    ) -> Iterator[str]:
        """Yield also a sampling rate that is not that of the first round."""
        yield from super()._problems(content, records, config)
        z, rate = content["noise-multiplier"], content["sampling-rate"]
        first = find_epsilon(z, rate, config.delta, 1)
        if records and not math.isclose(records[0]["privacy"]["epsilon"], first, rel_tol=CLOSE):
            yield f"sampling-rate = {rate}, by which round 1 spends {first!r}, and it spent another"
