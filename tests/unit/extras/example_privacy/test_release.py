"""Rounds with example-level privacy over hand-made nodes: sampled clients and the account."""

import json
import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict

from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras.example_privacy import release as example_privacy
from ravan_flwr.extras.example_privacy.release import ExampleBudget
from ravan_flwr.messages.arrays import from_record
from ravan_flwr.privacy.account import find_epsilon, multiplier_for
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.server.privacy_budget import NAME
from ravan_flwr.server.resume import ResumePoint
from tests.hand_made import (
    CLIENT,
    ROUND,
    Nodes,
    Notes,
    fake_clock,
    initial,
    settings_from,
    strategy_of,
)

__all__ = ["fake_clock"]

STEPS = 5
SETTINGS: dict[str, Any] = {
    "privacy": "example", "epsilon": 8.0, "local-steps": STEPS, "batch-size": 5,
}  # fmt: skip


class Devices(Nodes):
    """Four clients of 10, 20, 30 and 40 examples, or of others, that reply as private clients."""

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
        message_ = super().reply(message, upload, number)
        metrics = message_.content.metric_records["metrics"]
        del metrics["train-loss"]
        metrics["recounted"] = int(self.now in self.recounted)
        return message_


def refuse_training(partitions, from_round=1):
    def behave(partition, message):
        if message.metadata.message_type != "train" or partition not in partitions:
            return None
        number = message.content["config"]["round"]
        if number < from_round:
            return None
        refused = ConfigRecord({"round": number, "reason": "nothing is\nleft"})
        return Message(RecordDict({"refused": refused}), reply_to=message)

    return behave


def run_rounds(nodes, rounds=2, before=None, write=None, evaluate_fn=lambda *_: None, **settings):
    defaults: dict[str, Any] = {
        "privacy": "example", "noise_multiplier": 2.0, "clients_per_round": 4,
        "local_steps": STEPS, "batch_size": 5, "max_update_norm": 1e12, "num_rounds": rounds,
        "round_timeout": 5.0,
    }  # fmt: skip
    config = read_config(settings_from(defaults | settings))
    notes, files = Notes(), []

    def note(account):
        files.append((len(nodes.asked), json.loads(json.dumps(account))))

    budget = ExampleBudget(config, write or note, before)
    strategy = strategy_of(nodes, config, callbacks=[notes], privacy=budget)
    result = strategy.start(
        nodes, initial(nodes), num_rounds=rounds, timeout=5, evaluate_fn=evaluate_fn
    )
    return notes, budget, files, from_record(result.arrays)


def epsilon(examples, rounds, z=2.0):
    return find_epsilon(z, min(1.0, 5 / examples), 1e-5, rounds * STEPS)


def test_sampled_clients_are_written_to_disk_before_messages_are_sent():
    """The largest epsilon is that of the fewest examples, as all clients train."""
    nodes = Devices()
    notes, budget, files, _ = run_rounds(nodes, rounds=3)
    assert [messages for messages, _ in files] == [0, 4, 8]
    rates = (5 / 10, 5 / 20, 5 / 30, 5 / 40)
    for number, ((_, account), record) in enumerate(zip(files, notes.records, strict=True), 1):
        assert account["asked"] == {str(p): [rate, number] for p, rate in enumerate(rates)}
        assert account["unit"] == "example"
        spent = record["privacy"]
        assert spent["epsilon"] == pytest.approx(epsilon(10, number))
        assert (spent["unit"], spent["clip-norm"]) == ("example", 1.0)
        assert "train-loss" not in record
    assert budget.as_record()["epsilon"] == notes.records[-1]["privacy"]["epsilon"]


def test_if_the_account_cannot_be_written_no_client_is_asked():
    nodes = Devices()

    def full(_):
        raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        run_rounds(nodes, write=full)
    assert not nodes.asked


def test_epsilon_is_the_largest_over_clients_by_their_own_rounds():
    nodes = Devices()
    _, budget, _, _ = run_rounds(nodes, rounds=6, clients_per_round=1, seed=3)
    rounds = {p: sum(one == p for _, one, _ in nodes.asked) for p in range(4)}
    assert len(set(rounds.values())) > 1
    spent = max(epsilon(10 * (1 + p), number) for p, number in rounds.items() if number)
    assert budget.epsilon == pytest.approx(spent)


def test_a_message_has_the_clients_earlier_rounds_and_the_noise():
    nodes = Devices()
    run_rounds(nodes, rounds=3, clients_per_round=2)
    earlier: dict[int, int] = {}
    assert len(nodes.asked) == 6
    for _, partition, settings in nodes.asked:
        assert settings["earlier-rounds"] == earlier.get(partition, 0)
        assert settings["noise-multiplier"] == 2.0
        earlier[partition] = earlier.get(partition, 0) + 1


@pytest.mark.slow
def test_noise_follows_from_epsilon_the_rounds_and_the_fewest_examples():
    notes, budget, files, _ = run_rounds(Devices(), rounds=4, noise_multiplier="auto", epsilon=8.0)
    assert 7.9 < budget.epsilon <= 8.0
    assert epsilon(10, 4, budget.multiplier) == pytest.approx(budget.epsilon)
    assert len(notes.records) == 4
    more, after, _, _ = run_rounds(
        Devices(), rounds=1, before=files[1][1], noise_multiplier="auto", epsilon=8.0
    )
    assert after.multiplier == budget.multiplier
    assert more.records[0]["privacy"]["epsilon"] == pytest.approx(epsilon(10, 3, budget.multiplier))


@pytest.mark.slow
def test_clients_out_of_privacy_budget_are_skipped_until_too_few_remain():
    """The smallest client can train two rounds, the others more; in the end no client can."""
    limit = (epsilon(10, 2) + epsilon(10, 3)) / 2
    examples = (10, 12, 14, 16)
    limits = [next(n for n in range(9) if epsilon(some, n + 1) > limit) for some in examples]
    assert limits == sorted(limits)
    assert limits[0] == 2 < limits[-1]
    nodes = Devices(examples=examples)
    notes, budget, _, result = run_rounds(nodes, rounds=99, epsilon=limit)
    for p, number in enumerate(limits):
        assert sum(one == p for _, one, _ in nodes.asked) == number
    assert notes.records[1].get("out-of-budget") is None
    assert notes.records[2]["out-of-budget"] == [
        p for p, number in enumerate(limits) if number == 2
    ]
    assert len(notes.records) == max(limits)
    assert budget.ends_after(0)
    assert budget.epsilon <= limit
    assert torch.equal(result["H"], notes.states[-1]["H"])


@pytest.mark.parametrize("examples", [6, 60])
def test_a_client_that_cannot_train_neither_prolongs_the_run_nor_sets_its_noise(examples):
    """The budget of partition 0 does not allow the whole of FedIT, so that it is never asked."""
    nodes = Devices(method="fedit", examples=(examples, 20, 20, 20))
    for node_id, node in nodes.registered.items():
        if node.partition_id == 0:
            nodes.registered[node_id] = replace(node, budget_fraction=0.5)
    settings = {"method": "fedit", "epsilon": (epsilon(20, 2) + epsilon(20, 3)) / 2}
    notes, *_ = run_rounds(nodes, rounds=9, **settings)
    assert [len(record["clients"]) for record in notes.records] == [3, 3]
    _, budget, *_ = run_rounds(nodes, rounds=2, noise_multiplier="auto", **settings)
    assert budget.multiplier == pytest.approx(
        multiplier_for(settings["epsilon"], 5 / 20, 1e-5, 2 * STEPS)
    )


def test_a_run_needs_min_replies_clients_within_the_privacy_budget(monkeypatch):
    """Where all clients are sampled, the last round is known before it ends."""
    values, ends_after = [], ExampleBudget.ends_after

    def recorded(self, rounds):
        ends = ends_after(self, rounds)
        if rounds == 1:
            values.append(ends)
        return ends

    monkeypatch.setattr(ExampleBudget, "ends_after", recorded)
    limit = (epsilon(10, 2) + epsilon(10, 3)) / 2
    notes, *_ = run_rounds(Devices(), rounds=99, epsilon=limit, min_replies=4)
    assert len(notes.records) == 2
    assert values == [False, True]
    with pytest.raises(ValueError, match=r"epsilon = 0.01: one round takes .* room for one"):
        run_rounds(Devices(), epsilon=0.01, min_replies=4)


@pytest.mark.parametrize("seed", range(3))
def test_the_last_round_is_evaluated_where_clients_are_sampled(seed):
    """Which clients the last rounds draw is not known: each that may be the last is evaluated."""
    notes, *_ = run_rounds(
        Devices(examples=[20] * 4), rounds=99, clients_per_round=2, min_replies=2, seed=seed,
        epsilon=(epsilon(20, 3) + epsilon(20, 4)) / 2, eval_every=100,
        evaluate_fn=lambda *_: MetricRecord({"accuracy": 0.5}),
    )  # fmt: skip
    assert 4 < len(notes.records) <= 6
    assert notes.records[-1]["metrics"] == {"accuracy": 0.5}
    assert not any(record["metrics"] for record in notes.records[:3])


def test_a_round_after_which_no_device_takes_part_is_evaluated():
    """The devices' own limits of epsilon are lower than the run's, which the server cannot know."""
    notes, *_ = run_rounds(
        Devices(behave=refuse_training({0, 1, 2, 3}, from_round=3)), rounds=9, eval_every=100,
        evaluate_fn=lambda *_: MetricRecord({"accuracy": 0.5}),
    )  # fmt: skip
    assert [record["metrics"] for record in notes.records] == [{}, {}, {"accuracy": 0.5}]


def test_a_refusal_is_recorded_and_its_client_is_not_sampled_again():
    nodes = Devices(behave=refuse_training({1}, from_round=2))
    nodes.recounted = {2}
    notes, *_ = run_rounds(nodes, rounds=4)
    assert notes.records[0]["recounted"] == [2]  # which had to rebuild its account
    reason = "it trains no further: nothing is\\nleft"
    assert notes.records[1]["rejected"] == [{"client": "partition 1", "reason": reason}]
    assert [record["rejected"] for record in notes.records[2:]] == [[], []]
    assert notes.records[2]["out-of-budget"] == [1]
    assert [len(record["clients"]) for record in notes.records] == [4, 3, 3, 3]


def test_a_round_of_refusals_alone_changes_nothing_and_ends_the_run():
    nodes = Devices(behave=refuse_training({0, 1, 2, 3}, from_round=2))
    notes, _, _, result = run_rounds(nodes, rounds=9)
    assert len(notes.records) == 2
    assert len(notes.records[1]["rejected"]) == 4
    assert torch.equal(notes.states[0]["H"], notes.states[1]["H"])
    assert torch.equal(result["H"], notes.states[0]["H"])


def test_clients_that_fail_do_not_end_a_run_while_others_have_budget():
    """Each client that is asked in their place is counted, before it is asked."""

    def fail(partition, message):
        if message.metadata.message_type == "train" and partition < 2:
            return Message(Error(2, "no memory"), reply_to=message)
        return None

    nodes = Devices(behave=fail, examples=[30] * 4)
    limit = (epsilon(30, 6) + epsilon(30, 7)) / 2  # both are within budget in six rounds
    settings = {"epsilon": limit, "clients_per_round": 2, "min_replies": 2}
    notes, _, files, _ = run_rounds(nodes, rounds=6, **settings)
    for record in notes.records:
        assert [client["partition-id"] for client in record["clients"]] == [2, 3]
        assert "out-of-budget" not in record
    failed, unused = (
        sum(len(record[key]) for record in notes.records) for key in ("rejected", "unused")
    )
    counted = {int(p): rounds for p, (_, rounds) in files[-1][1]["asked"].items()}
    assert counted[2] == counted[3] == 6
    assert sum(counted.values()) == 6 * 2 + failed + unused
    assert failed > 0


@pytest.mark.parametrize("min_replies", [1, 2])
def test_a_run_ends_where_only_disconnected_clients_have_budget(min_replies):
    nodes = Devices(examples=[20] * 4)

    def leave(number, _):
        for node_id, node in [*nodes.registered.items()]:
            if node.partition_id >= 4 - min_replies:
                del nodes.registered[node_id]
        return MetricRecord({"accuracy": 0.5})

    limit = (epsilon(20, 3) + epsilon(20, 4)) / 2
    notes, *_ = run_rounds(
        nodes, rounds=9, min_replies=min_replies, epsilon=limit, evaluate_fn=leave
    )
    trained = [[c["partition-id"] for c in record["clients"]] for record in notes.records]
    here = [*range(4 - min_replies)]
    assert trained == [[0, 1, 2, 3], here, here, []]
    assert notes.records[-1]["out-of-budget"] == here
    assert torch.equal(notes.states[-1]["H"], notes.states[-2]["H"])


def test_a_refusal_of_another_round_is_a_bad_reply():
    def behave(_, message):
        if message.metadata.message_type != "train":
            return None
        refused = ConfigRecord({"round": 7, "reason": "mine"})
        return Message(RecordDict({"refused": refused}), reply_to=message)

    with pytest.raises(RuntimeError, match="reply is of round 7"):
        run_rounds(Devices(behave=behave))


def test_few_epsilons_are_computed_for_any_number_of_clients(monkeypatch):
    config = read_config({"privacy": "example", "noise-multiplier": 2.0})
    budget = ExampleBudget(config, lambda _: None)
    budget.multiplier = 2.0
    for p in range(1000):
        budget.counts[p] = example_privacy.TimesAsked(0.01 + 0.0005 * p, 1 + p % 3)
    count = mock.Mock(return_value=1.0)
    monkeypatch.setattr(example_privacy, "find_epsilon", count)
    assert budget.epsilon == 1.0
    assert count.call_count <= 3


ACCOUNT = {
    "unit": "example", "noise-multiplier": 2.0, "delta": 1e-5, "asked": {"3": [0.5, 2]},
    "epsilon": find_epsilon(2.0, 0.5, 1e-5, 2 * STEPS),
}  # fmt: skip


def record_of(number):
    """Return a round's record, in which partition 3 trained with ten examples."""
    epsilon = find_epsilon(2.0, 0.5, 1e-5, number * STEPS)
    privacy = {"noise-multiplier": 2.0, "delta": 1e-5, "epsilon": epsilon}
    return ROUND | {"round": number, "privacy": privacy, "clients": [CLIENT | {"partition-id": 3}]}


def write_files(folder, rounds, changes):
    lines = (json.dumps(record_of(number)) + "\n" for number in range(1, rounds + 1))
    (folder / "rounds.jsonl").write_text("".join(lines))
    (folder / NAME).write_text(json.dumps(ACCOUNT | changes))


def spending(rate, rounds, z=2.0):
    return {
        "noise-multiplier": z, "asked": {"3": [rate, rounds]},
        "epsilon": find_epsilon(z, rate, 1e-5, rounds * STEPS),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": "client"}, "unit: got 'client'"),
        ({"delta": 1e-6}, "delta = 1e-06"),
        ({"noise-multiplier": math.inf}, "noise-multiplier: got inf"),
        ({"noise-multiplier": "two"}, "noise-multiplier: got 'two'"),
        ({"asked": [1]}, r"asked: got \[1\]"),
        ({"asked": {"a": [0.5, 2]}}, "asked.a.* got 'a'"),
        ({"asked": {"3": [0.5, 2.5]}}, r"asked.3.* got 2.5"),
        ({"asked": {"3": [1.5, 2]}}, r"asked.3.* got 1.5"),
        ({"asked": {"3": "no"}}, "asked.3: got 'no'"),
        ({"epsilon": 0.01}, "epsilon = 0.01, and its counts spend"),
        (spending(0.5, 2, z=100.0), "noise-multiplier = 100.0, and round 1 has another"),
        (spending(0.5, 1), r"epsilon = .*, and round 2 has more"),
        (spending(0.1, 99), r"asked has \[0.1, 99\] of partition 3, and the records \[0.5, 2\]"),
        ({"asked": {}, "epsilon": 0.0}, r"epsilon = 0.0, and round 1 has more"),
        ({"asked": {"3": [0.5, 10**12]}}, "privacy.json: asked.3.* got 1000000000000"),
    ],
)
def test_an_invalid_account_is_refused(changes, message, tmp_path):
    config = read_config(SETTINGS)
    directory, start = RunDirectory(tmp_path), ResumePoint({}, last_round=2)
    write_files(tmp_path, 2, changes)
    with pytest.raises(ValueError, match=message):
        ExampleBudget.of(config, directory, start)
    (tmp_path / NAME).write_text(json.dumps(ACCOUNT))
    budget = ExampleBudget.of(config, directory, start)
    assert budget is not None
    assert budget.counts == {3: (0.5, 2)}
    assert ExampleBudget.of(read_config({}), directory, start) is None
    other = read_config(SETTINGS | {"noise-multiplier": 1.0})
    with pytest.raises(ValueError, match=r"noise-multiplier = 2.0, and the run has 1.0"):
        ExampleBudget.of(other, directory, start)


def test_counts_that_the_records_exclude_are_refused_before_epsilon_is_computed(
    tmp_path, monkeypatch
):
    write_files(tmp_path, 1, {"asked": {"3": [0.5, 10**6]}})
    monkeypatch.setattr(example_privacy, "find_epsilon", None)
    with pytest.raises(ValueError, match="it counts 1,000,000 rounds, and the records have 1"):
        ExampleBudget.of(
            read_config(SETTINGS), RunDirectory(tmp_path), ResumePoint({}, last_round=1)
        )


def test_a_resumed_run_needs_its_account(tmp_path):
    config = read_config({"privacy": "example", "noise-multiplier": 2.0})
    with pytest.raises(ValueError, match=f"{NAME}: it is missing, expected the account"):
        ExampleBudget.of(config, RunDirectory(tmp_path), ResumePoint({}, last_round=1))
