"""Rounds with privacy of examples over hand-made nodes: whom the server asks, what it counts."""

import json
import math
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras import example_privacy
from ravan_flwr.extras.example_privacy import ExampleBudget
from ravan_flwr.messages.arrays import from_record
from ravan_flwr.privacy.account import epsilon_of
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.server.privacy_budget import NAME
from ravan_flwr.server.resume import ResumePoint
from tests.hand_made import (
    CLIENT,
    ROUND,
    Nodes,
    Notes,
    impatient,
    initial,
    settings_from,
    strategy_of,
)

__all__ = ["impatient"]

STEPS = 5


class Devices(Nodes):
    """Four clients of 10, 20, 30 and 40 examples, or of others; they reply as private ones do."""

    def __init__(self, behave=None, examples=(10, 20, 30, 40), **changes):
        super().__init__(behave=behave, **changes)
        for node_id, node in self.registered.items():
            more = {**vars(node), "examples": examples[node.partition_id]}
            self.registered[node_id] = type(node)(**more)
        self.asked: list[tuple[int, int, dict[str, Any]]] = []
        self.recounted: set[int] = set()

    def answer(self, node, message):
        if message.metadata.message_type == "train":
            settings = dict(message.content["config"])
            self.asked.append((settings["round"], node.partition_id, settings))
            self.now = node.partition_id
        return super().answer(node, message)

    def reply(self, message, upload, number):
        made = super().reply(message, upload, number)
        metrics = made.content.metric_records["metrics"]
        del metrics["train-loss"]
        metrics["recounted"] = int(self.now in self.recounted)
        return made


def refuses(partitions, from_round=1):
    def behave(partition, message):
        if message.metadata.message_type != "train" or partition not in partitions:
            return None
        number = message.content["config"]["round"]
        if number < from_round:
            return None
        refused = ConfigRecord({"round": number, "reason": "nothing is\nleft"})
        return Message(RecordDict({"refused": refused}), reply_to=message)

    return behave


def hold(nodes, rounds=2, before=None, write=None, **settings):
    """Run rounds; the notes, the budget, and what the account's file said each time."""
    given: dict[str, Any] = {
        "privacy": "example", "noise_multiplier": 2.0, "clients_per_round": 4,
        "local_steps": STEPS, "batch_size": 5, "max_update_norm": 1e12, "num_rounds": rounds,
        "round_timeout": 5.0,
    }  # fmt: skip
    config = read_config(settings_from(given | settings))
    notes, files = Notes(), []

    def note(told):
        files.append((len(nodes.asked), json.loads(json.dumps(told))))

    budget = ExampleBudget(config, write or note, before)
    strategy = strategy_of(nodes, config, callbacks=[notes], privacy=budget)
    result = strategy.start(
        nodes, initial(nodes), num_rounds=rounds, timeout=5, evaluate_fn=lambda *_: None
    )
    return notes, budget, files, from_record(result.arrays)


def epsilon(examples, rounds, z=2.0):
    return epsilon_of(z, min(1.0, 5 / examples), 1e-5, rounds * STEPS)


def test_whoever_is_asked_is_on_disk_before_the_messages_leave():
    nodes = Devices()
    _, _, files, _ = hold(nodes, rounds=2)
    assert [asked for asked, _ in files] == [0, 4]
    for number, (_, told) in enumerate(files, start=1):
        assert told["asked"] == {
            str(p): [min(1.0, 5 / (10 * (1 + p))), number] for p in range(4)
        }  # fmt: skip
        assert told["unit"] == "example"


def test_an_account_that_cannot_be_written_asks_nobody():
    nodes = Devices()

    def full(_):
        raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        hold(nodes, write=full)
    assert not nodes.asked


def test_the_largest_epsilon_is_that_of_the_fewest_examples_where_all_train():
    notes, budget, _, _ = hold(Devices(), rounds=3)
    for number, record in enumerate(notes.records, start=1):
        spent = record["privacy"]
        assert spent["epsilon"] == pytest.approx(epsilon(10, number))
        assert (spent["unit"], spent["clip-norm"]) == ("example", 1.0)
        assert "train-loss" not in record
    assert budget.as_record()["epsilon"] == notes.records[-1]["privacy"]["epsilon"]


def test_it_is_the_largest_over_clients_that_trained_as_often_as_they_did():
    nodes = Devices()
    _, budget, _, _ = hold(nodes, rounds=6, clients_per_round=1, seed=3)
    rounds = {p: sum(one == p for _, one, _ in nodes.asked) for p in range(4)}
    assert len(set(rounds.values())) > 1
    spent = max(epsilon(10 * (1 + p), number) for p, number in rounds.items() if number)
    assert budget.epsilon == pytest.approx(spent)


def test_a_message_says_how_often_a_client_was_asked_and_the_noise():
    nodes = Devices()
    hold(nodes, rounds=3, clients_per_round=2)
    seen: dict[int, int] = {}
    for _, partition, settings in nodes.asked:
        assert settings["earlier-rounds"] == seen.get(partition, 0)
        assert settings["noise-multiplier"] == 2.0
        seen[partition] = seen.get(partition, 0) + 1


def test_noise_follows_from_epsilon_the_rounds_and_the_fewest_examples():
    notes, budget, files, _ = hold(Devices(), rounds=4, noise_multiplier="auto", epsilon=8.0)
    assert 7.9 < budget.epsilon <= 8.0
    assert epsilon(10, 4, budget.multiplier) == pytest.approx(budget.epsilon)
    assert len(notes.records) == 4
    more, after, _, _ = hold(
        Devices(), rounds=1, before=files[1][1], noise_multiplier="auto", epsilon=8.0
    )
    assert after.multiplier == budget.multiplier
    assert more.records[0]["privacy"]["epsilon"] == pytest.approx(epsilon(10, 3, budget.multiplier))


def test_clients_with_nothing_left_are_left_alone_until_too_few_have():
    """The smallest has room for two rounds, the others for more; in the end nobody has."""
    limit = (epsilon(10, 2) + epsilon(10, 3)) / 2
    examples = (10, 12, 14, 16)
    rooms = [next(n for n in range(9) if epsilon(some, n + 1) > limit) for some in examples]
    assert rooms == sorted(rooms)
    assert rooms[0] == 2 < rooms[-1]
    nodes = Devices(examples=examples)
    notes, budget, _, result = hold(nodes, rounds=99, epsilon=limit)
    for p, room in enumerate(rooms):
        assert sum(one == p for _, one, _ in nodes.asked) == room
    assert notes.records[1].get("out-of-budget") is None
    assert notes.records[2]["out-of-budget"] == [p for p, room in enumerate(rooms) if room == 2]
    assert len(notes.records) == max(rooms)
    assert budget.is_exhausted
    assert budget.epsilon <= limit
    assert torch.equal(result["H"], notes.states[-1]["H"])


def test_a_run_needs_as_many_with_room_as_replies():
    limit = (epsilon(10, 2) + epsilon(10, 3)) / 2
    notes, *_ = hold(Devices(), rounds=99, epsilon=limit, min_replies=4)
    assert len(notes.records) == 2
    with pytest.raises(ValueError, match=r"epsilon = 0.01: one round takes .* at 4 clients"):
        hold(Devices(), epsilon=0.01, min_replies=4)


def test_the_last_round_is_known_where_all_are_asked():
    limit = (epsilon(10, 2) + epsilon(10, 3)) / 2
    nodes = Devices()
    seen = []
    real = ExampleBudget.is_last.fget  # type: ignore[attr-defined]

    def noted(self):
        seen.append(real(self))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExampleBudget, "is_last", property(noted))
        hold(nodes, rounds=99, epsilon=limit, min_replies=4)
    assert seen == [False, True]


def test_a_client_that_refuses_is_rejected_with_its_reason_and_not_asked_again():
    nodes = Devices(behave=refuses({1}, from_round=2))
    notes, *_ = hold(nodes, rounds=4)
    rejected = notes.records[1]["rejected"]
    assert rejected == [
        {"client": "partition 1", "reason": "it trains no further: nothing is\\nleft"}
    ]
    assert [record["rejected"] for record in notes.records[2:]] == [[], []]
    assert notes.records[2]["out-of-budget"] == [1]
    assert [len(record["clients"]) for record in notes.records] == [4, 3, 3, 3]


def test_a_round_in_which_all_refuse_changes_nothing_and_ends_the_run():
    notes, _, _, result = hold(Devices(behave=refuses({0, 1, 2, 3}, from_round=2)), rounds=9)
    assert len(notes.records) == 2
    assert len(notes.records[1]["rejected"]) == 4
    assert torch.equal(notes.states[0]["H"], notes.states[1]["H"])
    assert torch.equal(result["H"], notes.states[0]["H"])


def test_a_refusal_of_another_round_is_a_bad_reply():
    def behave(_, message):
        if message.metadata.message_type != "train":
            return None
        refused = ConfigRecord({"round": 7, "reason": "mine"})
        return Message(RecordDict({"refused": refused}), reply_to=message)

    with pytest.raises(RuntimeError, match="reply is of round 7"):
        hold(Devices(behave=behave))


def test_clients_that_had_lost_their_account_are_in_the_record():
    nodes = Devices()
    nodes.recounted = {2}
    notes, *_ = hold(nodes, rounds=1)
    assert notes.records[0]["recounted"] == [2]


def test_few_accounts_are_worked_out_however_many_clients_there_are(monkeypatch):
    config = read_config({"privacy": "example", "noise-multiplier": 2.0})
    budget = ExampleBudget(config, lambda _: None)
    budget.multiplier = 2.0
    for p in range(1000):
        budget.counts[p] = example_privacy.TimesAsked(0.01 + 0.0005 * p, 1 + p % 3)
    counted = []

    def noted(*of):
        counted.append(of)
        return 1.0

    monkeypatch.setattr(example_privacy, "epsilon_of", noted)
    assert budget.epsilon == 1.0
    assert len(counted) <= 3


ACCOUNT = {
    "unit": "example", "noise-multiplier": 2.0, "delta": 1e-5, "asked": {"3": [0.5, 2]},
    "epsilon": epsilon_of(2.0, 0.5, 1e-5, 2 * STEPS),
}  # fmt: skip


def record_of(number):
    """A round's record, in which partition 3 trained with ten examples."""
    epsilon = epsilon_of(2.0, 0.5, 1e-5, number * STEPS)
    told = {"noise-multiplier": 2.0, "delta": 1e-5, "epsilon": epsilon}
    return ROUND | {"round": number, "privacy": told, "clients": [CLIENT | {"partition-id": 3}]}


def spending(rate, rounds, z=2.0):
    return {
        "noise-multiplier": z, "asked": {"3": [rate, rounds]},
        "epsilon": epsilon_of(z, rate, 1e-5, rounds * STEPS),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"unit": "client"}, "unit = 'client'"),
        ({"delta": 1e-6}, "delta = 1e-06"),
        ({"noise-multiplier": math.inf}, "noise-multiplier = inf"),
        ({"noise-multiplier": "2"}, "noise-multiplier = '2'"),
        ({"asked": [1]}, r"asked = \[1\]"),
        ({"asked": {"a": [0.5, 2]}}, "of partition 'a'"),
        ({"asked": {"3": [0.5, 2.5]}}, r"has \[0.5, 2.5\] of partition '3'"),
        ({"asked": {"3": [1.5, 2]}}, r"has \[1.5, 2\]"),
        ({"asked": {"3": "no"}}, "has 'no'"),
        ({"epsilon": 0.01}, "epsilon = 0.01, and the counted rounds spend"),
        (spending(0.5, 2, z=100.0), "noise-multiplier = 100.0, and round 1 has 2.0"),
        (spending(0.5, 1), r"asked has \[0.5, 1\] of partition 3, and the records \[0.5, 2\]"),
        (spending(0.1, 9), r"asked has \[0.1, 9\] of partition 3, and the records \[0.5, 2\]"),
        ({"asked": {}, "epsilon": 0.0}, r"asked has \[0.0, 0\] of partition 3, and the records"),
        ({"asked": {"3": [0.5, 10**12]}}, "privacy.json: asked has .* of partition '3'"),
    ],
)
def test_an_account_that_is_not_as_a_run_writes_it_is_refused(changes, told, tmp_path):
    settings: dict[str, Any] = {
        "privacy": "example",
        "epsilon": 8.0,
        "local-steps": STEPS,
        "batch-size": 5,
    }
    config = read_config(settings)
    directory, start = RunDirectory(tmp_path), ResumePoint({}, last_round=2)
    lines = (json.dumps(record_of(number)) + "\n" for number in (1, 2))
    (tmp_path / "rounds.jsonl").write_text("".join(lines))
    (tmp_path / NAME).write_text(json.dumps(ACCOUNT | changes))
    with pytest.raises(ValueError, match=told):
        ExampleBudget.of(config, directory, start)
    (tmp_path / NAME).write_text(json.dumps(ACCOUNT))
    budget = ExampleBudget.of(config, directory, start)
    assert budget is not None
    assert budget.counts == {3: (0.5, 2)}
    assert ExampleBudget.of(read_config({}), directory, start) is None
    other = read_config(settings | {"noise-multiplier": 1.0})
    with pytest.raises(ValueError, match=r"noise-multiplier = 2.0, and the run has 1.0"):
        ExampleBudget.of(other, directory, start)


def test_a_run_that_goes_on_needs_its_account(tmp_path):
    config = read_config({"privacy": "example", "noise-multiplier": 2.0})
    with pytest.raises(ValueError, match=f"{NAME}: it is missing, expected the account"):
        ExampleBudget.of(config, RunDirectory(tmp_path), ResumePoint({}, last_round=1))
