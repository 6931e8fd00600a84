"""Say what a run does now: it goes on, has ended, has failed, or nothing is heard of it."""

from dataclasses import dataclass

from ravan_flwr.reports.following import RunSnapshot
from ravan_flwr.runs.console import remaining


@dataclass(frozen=True)
class Now:
    """Hold the state in a word and a sentence, which may end in how long that has been so."""

    word: str  # running, finished, failed, stopped
    text: str
    since: float | None = None  # in seconds since 1970
    advice: str = ""
    done: float = 0.0  # the share of the rounds


def rounds_of(seen: RunSnapshot) -> int:
    """Return how many rounds there will be; 0 if that is not known yet."""
    if seen.status and seen.status["rounds"]:
        return seen.status["rounds"]
    planned = seen.config.get("num-rounds")
    return planned if type(planned) is int else 0


def seconds_left(seen: RunSnapshot) -> float | None:
    """Estimate the time to the last round; None if the run does not go on."""
    if not is_going_on(seen) or not seen.rounds or not rounds_of(seen):
        return None
    return remaining(
        [r["seconds"] for r in seen.rounds], rounds_of(seen) - seen.rounds[-1]["round"]
    )


def is_going_on(seen: RunSnapshot) -> bool:
    """Return whether a process works on the run, as far as one can tell."""
    if seen.holder == "unknown":
        return seen.summary is None and seen.failure is None
    return seen.holder == "a process"


def now_of(seen: RunSnapshot) -> Now:
    """Say what the run does."""
    last = seen.rounds[-1]["round"] if seen.rounds else 0
    done = min(1.0, last / rounds_of(seen)) if rounds_of(seen) else 0.0
    if is_going_on(seen):
        return _going_on(seen, done)
    after = f"after {last} round{'' if last == 1 else 's'}"
    advice = f"To go on: resume={seen.path} (flwr run needs the same settings beside it)"
    if seen.failure is not None:
        return Now("failed", f"It failed {after}: {seen.failure}", None, advice, done)
    if seen.summary is not None:
        return Now("finished", f"It ended {after}.", None, "", 1.0)
    if not last:
        advice = "No round has finished, so that there is nothing to go on from; start a new run."
    how = "Its process is gone" if seen.holder == "a dead process" else "It was stopped"
    text = f"{how} {after}, without a result. Nothing has been heard of it for"
    return Now("stopped", text, seen.heard, advice, done)


def _going_on(seen: RunSnapshot, done: float) -> Now:
    """Say which step of which round it is in, and for how long."""
    status, advice = seen.status, ""
    if not any(record["round"] for record in seen.rounds):
        advice = "No round has finished yet; the pictures come with the first."
    if seen.holder == "unknown":
        advice = f"Its process is not of this machine: whether it lives cannot be seen. {advice}"
    if status is None:
        text = "It is being prepared" if not seen.rounds else "It goes on"
        return Now("running", f"{text}. Nothing was written for", seen.heard, advice, done)
    asked, number = len(status["asked"]), status["round"]
    answers = f", {len(status['answered'])} of {asked} clients have answered" if asked else ""
    here = status.get("members", len(status["nodes"]))
    text = {
        "recruiting": f"Waiting for clients, {here} {'is' if here == 1 else 'are'} here",
        "calibrating": f"Calibrating before the first round{answers}",
    }.get(status["doing"], f"Round {number} of {rounds_of(seen)}: {status['doing']}{answers}")
    return Now("running", f"{text}, for", status["since"], advice, done)
