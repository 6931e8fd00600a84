"""List who takes part in a run: what each client is, what it has done, and what it does now."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ravan_flwr.reports.following import RunSnapshot
from ravan_flwr.reports.state import is_going_on
from ravan_flwr.runs.console import megabytes
from ravan_flwr.runs.status import LARGEST

MOST = 300  # clients that are listed
AT_WORK = "at work"


@dataclass
class Person:
    """Hold what the page says of one client."""

    partition: int
    device: str = ""
    budget: str = ""
    examples: str = ""
    rounds: int = 0  # in which its reply was used
    last_round: int | None = None
    heads: str = ""
    seconds: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    heard: float | None = None  # in seconds since 1970
    now: str = ""
    rejected: int = 0
    reason: str = ""  # of the last rejection

    @property
    def up(self) -> str:
        return megabytes(self.bytes_up)

    @property
    def down(self) -> str:
        return megabytes(self.bytes_down)


def people_of(seen: RunSnapshot) -> dict[str, Any]:
    """List the clients by partition; where there are too many, those that do or did something."""
    people: dict[int, Person] = {}
    _add_nodes(people, seen)
    _add_rounds(people, seen)
    _add_now(people, seen)
    chosen = sorted(people.values(), key=_by_interest)[:MOST]
    known = max(len(people), seen.status.get("members", 0) if seen.status else 0)
    return {
        "listed": sorted(chosen, key=lambda person: person.partition),
        "more": known - len(chosen),
        "missing": max(0, _parts(seen) - known),
        "known": seen.status is not None,
    }


def _by_interest(person: Person) -> tuple[bool, bool, int, int]:
    """Sort who is at work first, then who does or has something else, then who was the last."""
    other = not person.now and not person.rejected
    return person.now != AT_WORK, other, -(person.last_round or 0), person.partition


def _parts(seen: RunSnapshot) -> int:
    if seen.status is not None:
        return seen.status["partitions"] if seen.status["nodes"] else 0
    return max((record["partitions"] for record in seen.rounds), default=0)


def _add_nodes(people: dict[int, Person], seen: RunSnapshot) -> None:
    """Add what the nodes said of themselves."""
    for node in seen.status["nodes"] if seen.status else []:
        person = people.setdefault(node["partition-id"], Person(node["partition-id"]))
        person.device, person.budget = node["device"], f"{node['share']:g}"
        own = " of its own" if node["own-data"] else ""
        person.examples = f"{node['examples']:,}{own}"
        person.heard = node["heard"] or None


def _add_rounds(people: dict[int, Person], seen: RunSnapshot) -> None:
    """Add what the records say: work, bytes, rejections."""
    rejected: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for record in seen.rounds:
        for client in record["clients"]:
            number = client["partition-id"]
            if type(number) is int:
                _add_reply(people.setdefault(number, Person(number)), record["round"], client)
        for one in record["rejected"]:
            name = str(one["client"])
            rejected[name] += 1
            reasons[name] = f"round {record['round']}: {one['reason']}"
    for person in people.values():
        name = f"partition {person.partition}"
        person.rejected, person.reason = rejected[name], reasons.get(name, "")


def _add_reply(person: Person, number: int, client: Mapping[str, Any]) -> None:
    person.rounds += 1
    person.last_round = number
    person.bytes_up += int(_number(client, "bytes-up"))
    person.bytes_down += int(_number(client, "bytes-down"))
    person.heads = f"{_number(client, 'heads'):g}"
    person.seconds = f"{_number(client, 'seconds'):.1f}" if "seconds" in client else ""
    person.budget = person.budget or f"{_number(client, 'share'):g}"
    person.examples = person.examples or f"{_number(client, 'examples'):,.0f}"


def _number(client: Mapping[str, Any], key: str) -> float:
    """Read a number of a client's record; 0 where it is none."""
    value = client.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return value if abs(value) < LARGEST else 0.0


def _add_now(people: dict[int, Person], seen: RunSnapshot) -> None:
    """Add what each is doing, in a run that goes on."""
    if not is_going_on(seen):
        return
    if seen.rounds:
        last: Mapping[str, Any] = seen.rounds[-1]
        for key, word in (
            ("resting", "rests, since it was silent"),
            ("left-out", "cannot afford it"),
        ):
            for number in last.get(key, []):
                if number in people:
                    people[number].now = word
    if seen.status is not None:
        answered = set(seen.status["answered"])
        for number in set(seen.status["asked"]) & people.keys():
            people[number].now = "has answered" if number in answered else AT_WORK
