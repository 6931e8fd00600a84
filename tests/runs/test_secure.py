"""Secure rounds as messages between server and clients, in process: sums, faults, hostile nodes."""

import functools
import re
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Error, Message

from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras.secure import agreement, shamir
from ravan_flwr.extras.secure import changes as masked_changes
from ravan_flwr.extras.secure import release as masked_round
from ravan_flwr.extras.secure import train as masked_training
from ravan_flwr.extras.secure.agreement import signed_keys
from ravan_flwr.extras.secure.node_keys import NodeKeys, make_keys
from ravan_flwr.extras.secure.schedule import Schedule, pack
from ravan_flwr.extras.secure.server import DealerError
from ravan_flwr.launch import in_process_grid, worker_process
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.messages.records import DISTRUSTS, to_pieces
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.results.report import describe_run
from ravan_flwr.runs.history import RecordedRun
from ravan_flwr.server.client_registry import Node
from ravan_flwr.server.user_messages import check_simulation
from ravan_flwr.specs import Scalar
from ravan_flwr.training.local_steps import train_locally
from ravan_flwr.training.plan import plan_of
from tests import short_runs
from tests.short_runs import SHORT, records_of, same_bits, saved, state_of
from tests.unit.extras.secure.rounds import step_of

QUICK: dict[str, Scalar] = SHORT | {
    "lora-rank": 2, "local-steps": 1, "num-rounds": 1, "eval-every": 1, "clients-per-round": 6,
    "processes": 1, "secure-aggregation": True,
}  # fmt: skip
run = functools.partial(short_runs.run, clients=6, settings=QUICK)
PHASES = ["keys", "shares", "masked", "agree", "unmask"]


def changed(schedule, **changes):
    """Return a schedule with other values of some fields."""
    fields = {name: getattr(schedule, name) for name in Schedule.model_fields}
    return Schedule(**(fields | changes))


@pytest.fixture
def uploads(monkeypatch):
    """Record the unmasked uploads: round -> list of (state sent, upload, schedule)."""
    by_round = defaultdict(list)

    def record_upload(
        method, sent, upload, schedule, rows, random, original=masked_changes.to_numbers
    ):
        sent_tensors = {k: v for k, v in sent.items() if k != CLASSIFIER}
        trained = {k: v for k, v in upload.items() if k != CLASSIFIER}
        expanded = method.expand_upload(trained, sent_tensors) | {CLASSIFIER: upload[CLASSIFIER]}
        by_round[schedule.round].append((sent, expanded, schedule))
        return original(method, sent, upload, schedule, rows, random)

    monkeypatch.setattr(masked_training, "to_numbers", record_upload)
    return by_round


def misbehave(monkeypatch, behave):
    """Let `behave(partition, round, phase, message, honest)` make the clients' replies.

    `honest` takes changes of the client's settings: of its run's, or its own.
    """

    def reply(message, context, compute_reply=worker_process.compute_reply):
        def honest(**changes):
            settings = {name: dict(getattr(context, name)) | changes[name] for name in changes}
            return compute_reply(message, replace(context, **settings))

        kind = message.metadata.message_type.partition(".")[2]
        number = message.content["config"]["round"] if kind else 0
        partition = int(context.node_config["partition-id"])
        return behave(partition, number, kind, message, honest)

    monkeypatch.setattr(in_process_grid, "compute_reply", reply)


def fail_in(*faults):
    """Make clients fail, by (partition, round, phase), as if their processes had ended."""

    def behave(partition, number, kind, message, honest):
        if (partition, number, kind) in faults:
            return Message(Error(2, "on fire"), reply_to=message)
        return honest()

    return behave


def check_against_plain(uploads, state, used, head_mean="trained"):
    """Check that each tensor of the state is the plain mean of the used uploads, or unchanged.

    With `head_mean` "all", clients that did not train a head count with its old value.
    """
    sent, _, schedule = uploads[0]
    bounds = {part.name: part.bound for part in schedule.parts}
    for name, old in sent.items():
        rows = max(1, next(part.rows for part in schedule.parts if part.name == name))
        tensors = [uploads[i][1][name].double().reshape(rows, -1) for i in used]
        stacked, old_rows = torch.stack(tensors), old.double().reshape(rows, -1)
        trained = ~stacked.isnan().any(2)
        for row in range(rows):
            chosen = stacked[trained[:, row], row]
            if head_mean == "all" and name == "H" and len(chosen):
                unchanged = [old_rows[row]] * (len(stacked) - len(chosen))
                mean_of_all = torch.stack([*chosen, *unchanged]).mean(0)
            else:
                mean_of_all = chosen.mean(0)
            mean = mean_of_all if len(chosen) >= 4 else old_rows[row]
            actual = state[name].double().reshape(rows, -1)[row]
            error = float((actual - mean).abs().max())
            rounding = 1e-7 * float(mean.abs().max())  # of float32
            assert error <= step_of(bounds[name]) + rounding, (name, row)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "ravan"},
        {"method": "ravan", "budgets": "uniform"},
        {"method": "ravan", "budgets": "skewed-right", "scoring": "weight"},
        {"method": "ravan", "budgets": "uniform", "selection": "global", "scaling": "constant"},
        {"method": "ravan", "budgets": "uniform", "head-mean": "all"},
        {"method": "ravan", "budgets": "uniform", "limits": "max-share=0.5"},
        {"method": "full"},
        {"method": "fedit"},
        {"method": "ffa-lora"},
    ],
)
def test_the_next_state_equals_the_plain_mean_up_to_rounding(tmp_path, uploads, settings):
    simulation = run(tmp_path, clients=8, num_rounds=2, **settings)
    for record in records_of(simulation):
        assert "refused" not in record
        assert record["rejected"] == []
        assert record["secure"]["cut-off"] == 0
        assert "train-loss" not in record
        assert not any("train-loss" in client for client in record["clients"])
        number = record["round"]
        assert len(record["clients"]) == len(uploads[number]) == 6
        head_mean = settings.get("head-mean", "trained")
        check_against_plain(uploads[number], state_of(simulation, number), range(6), head_mean)


@pytest.mark.slow
def test_with_full_budgets_a_secure_run_equals_a_plain_run_up_to_rounding(tmp_path):
    """Clients, heads and batches are the same: only the rounding differs."""
    masked_run, plain_run = (run(tmp_path, secure_aggregation=secure) for secure in (True, False))
    for name in ("H", CLASSIFIER):
        plain = state_of(plain_run, 1)[name]
        torch.testing.assert_close(state_of(masked_run, 1)[name], plain, rtol=0, atol=1e-5)
        assert plain.any()


@pytest.mark.parametrize(
    ("phase", "head_mean"), [*((phase, "trained") for phase in PHASES), ("masked", "all")]
)
def test_a_failed_client_alone_is_rejected(tmp_path, monkeypatch, uploads, phase, head_mean):
    misbehave(monkeypatch, fail_in((1, 1, phase), (4, 1, phase)))
    simulation = run(tmp_path, budgets="uniform", head_mean=head_mean)
    (record,) = records_of(simulation)
    assert "refused" not in record
    rejected = [rejection["client"] for rejection in record["rejected"]]
    assert rejected == ["partition 1", "partition 4"]
    assert "on fire" in record["rejected"][0]["reason"]
    sent = phase in ("agree", "unmask")
    remaining = [0, 1, 2, 3, 4, 5] if sent else [0, 2, 3, 5]
    assert [client["partition-id"] for client in record["clients"]] == remaining
    assert record["secure"]["dropped"] == ([] if sent else [1, 4] if phase == "masked" else [])
    # A client that fails in `masked` records no upload, so all recorded uploads are used.
    used = range(len(remaining))
    check_against_plain(uploads[1], state_of(simulation, 1), used, head_mean)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("phase", ["shares", "masked", "agree", "unmask"])
def test_too_many_failures_affect_no_state_and_no_later_round(tmp_path, monkeypatch, phase):
    misbehave(monkeypatch, fail_in(*((p, 1, phase) for p in (0, 2, 5))))
    simulation = run(tmp_path, num_rounds=2)
    first, second = records_of(simulation)
    assert re.search(r"3 of 6 clients|got 3 shares", first["refused"])
    assert "refused" not in second
    assert not state_of(simulation, 1)["H"].any()
    assert state_of(simulation, 2)["H"].any()
    assert simulation.summary["without-effect"] == [1]


def test_the_server_refuses_a_round_with_too_few_clients(tmp_path, monkeypatch):
    """The clients would refuse it, so the server refuses it before they train."""
    misbehave(monkeypatch, fail_in(*((p, 1, "keys") for p in (0, 2))))
    (record,) = records_of(run(tmp_path, clients=5, clients_per_round=5))
    assert "got a round of 3 clients, expected 4 to 5" in record["refused"]


def test_the_server_does_not_wait_if_too_few_clients_are_eligible(tmp_path, monkeypatch):
    """Two of eight are eligible, and in process no other clients can register."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    settings = {"budgets": "uniform", "method": "full", "round_timeout": 120.0}
    (record,) = records_of(run(tmp_path, clients=8, **settings))
    assert sum(slept) < 60
    assert "got a round of 2 clients, expected 4 to 6" in record["refused"]


@pytest.mark.slow
def test_a_secure_run_resumes_to_the_same_bits(tmp_path):
    uninterrupted = run(tmp_path, budgets="uniform", num_rounds=2)
    first = run(tmp_path, budgets="uniform")
    resumed = run(tmp_path, budgets="uniform", num_rounds=2, resume=str(first.run_dir))
    assert same_bits(saved(uninterrupted), saved(resumed))


# Hostile nodes.

INVALID = {
    "keys": {"keys": bytes(128), "node": bytes([1]) * 32},
    "shares": {"sealed": b"", "marks": b"", "seeds": b""},
    "masked": {"masked": b"abc"},
    "agree": {"signature": bytes(64)},
    "unmask": {"shares": bytes(33)},
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", ["false", "names", "types", "nothing", "distrusts", "round"])
def test_a_client_with_a_hostile_reply_alone_is_rejected(tmp_path, monkeypatch, phase, fault):
    def behave(partition, _, kind, message, honest):
        reply = honest()
        if (partition, kind) != (3, phase):
            return reply
        content = reply.content
        if fault == "false":
            content["arrays"] = to_pieces(INVALID[phase])
        elif fault == "names":
            content["arrays"] = to_pieces({"/etc/passwd": b"", "\x1b[2K": b""})
        elif fault == "types":
            for array in content["arrays"].values():
                array.stype = "numpy.ndarray"
        elif fault == "nothing":
            del content["arrays"]
        elif fault == "distrusts":
            content["arrays"] = to_pieces({DISTRUSTS: b""})
        else:
            content["metrics"]["round"] = 99
        return reply

    misbehave(monkeypatch, behave)
    simulation = run(tmp_path)
    (record,) = records_of(simulation)
    assert "refused" not in record
    (rejected,) = record["rejected"]
    assert rejected["client"] == "partition 3"
    assert rejected["reason"].isprintable()
    assert state_of(simulation, 1)["H"].any()


def test_a_client_with_another_state_sends_no_masked_numbers(tmp_path, monkeypatch):
    """Else a server could isolate an update by sending the other clients a fixed point."""

    def behave(partition, number, kind, message, honest):
        if kind == "masked" and partition != 3:
            sent = from_record(message.content["arrays"])
            message.content["arrays"] = to_record({k: t + 1 for k, t in sent.items()})
        return honest()

    misbehave(monkeypatch, behave)
    (record,) = records_of(run(tmp_path))
    assert "1 of 6 clients have sent their numbers" in record["refused"]
    assert [client["partition-id"] for client in record["clients"]] == [3]
    for rejected in record["rejected"]:
        assert "not those of the schedule" in rejected["reason"]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("changes", [{"learning-rate": 1e-9}, {"seed": 1}, {"num-rounds": 9}])
def test_a_client_with_other_settings_sends_no_masked_numbers(tmp_path, monkeypatch, changes):
    def behave(partition, _, kind, message, honest):
        return honest(run_config=changes if (partition, kind) == (3, "masked") else {})

    misbehave(monkeypatch, behave)
    (record,) = records_of(run(tmp_path))
    assert "refused" not in record
    (rejected,) = record["rejected"]
    assert rejected["client"] == "partition 3"
    assert "not those of the schedule" in rejected["reason"]


class Hostile(masked_round.Masked):
    """A server without its own checks, which changes each schedule before clients get it."""

    clients: int | None = None  # number in a round; None: all sampled clients

    def _share_secrets(self, cohort):
        return super()._share_secrets(cohort[: self.clients])

    def _schedule(self, clients):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(masked_round, "check_cohort", lambda *_: None, raising=False)
            return self.change_schedule(super()._schedule(clients))

    def change_schedule(self, schedule):
        return schedule


def signs(schedule):
    """Set bounds so low that only signs are left: a sum of equal signs reveals each of them."""
    return changed(schedule, parts=tuple(part._replace(bound=1e-30) for part in schedule.parts))


def one_bound(schedule):
    """Set a bound for one tensor only, slightly below the allowed one."""
    first, *others = schedule.parts
    return changed(schedule, parts=(first._replace(bound=0.99 * first.bound), *others))


def other_heads(schedule):
    """Give each client the right number of heads, but choose which."""
    trained = schedule.trained.copy()
    (rows,) = (rows for part, rows in schedule.spans() if part.name == "H")
    trained[:, rows] = trained[:, rows][:, ::-1]
    return changed(schedule, packed=tuple(pack(row).hex() for row in trained))


def lower_minimum(schedule):
    return changed(schedule, minimum=4)


@pytest.mark.parametrize(
    ("change", "clients", "message"),
    [
        (signs, 12, "a bound of 1e-30 for /cut-off, expected 1 at least|of 1e-30 for H, expected"),
        (one_bound, 12, r"a bound of \S+ for H, expected \S+ at least"),
        (other_heads, 12, "other heads than the seed and its budget give this client"),
        (lower_minimum, 12, "sums of 4 clients, expected the run's own secure-minimum = 5"),
        (lambda schedule: schedule, 4, "got a round of 4 clients, expected 8 to 12"),
    ],
)
def test_clients_check_the_schedule(tmp_path, monkeypatch, change, clients, message):
    """Else a sum could reveal signs, or be over clients that the server chose to isolate one."""
    monkeypatch.setattr(Hostile, "change_schedule", lambda _, schedule: change(schedule))
    monkeypatch.setattr(Hostile, "clients", clients)
    monkeypatch.setattr("ravan_flwr.extras.secure.release.Masked", Hostile)
    settings = {"clients_per_round": 12, "budgets": "uniform"}
    settings["secure_minimum"] = 5 if change is lower_minimum else 3
    (record,) = records_of(run(tmp_path, clients=12, **settings))
    assert "clients have sent their numbers, expected at least" in record["refused"]
    if change is not other_heads:  # which clients with a full budget cannot notice
        assert record["refused"].startswith(f"0 of {clients} ")
        assert len(record["rejected"]) == clients
    for rejected in record["rejected"]:
        assert re.search(message, rejected["reason"])


@pytest.mark.slow
def test_clients_refuse_rounds_after_the_last(tmp_path, monkeypatch):
    """Each further round would reveal another sum of their data."""

    class MoreRounds(Hostile):
        def change_schedule(self, schedule):
            config = replace(self.config, num_rounds=1)
            return changed(schedule, given=masked_changes.round_digest(config, self.state))

    monkeypatch.setattr("ravan_flwr.extras.secure.release.Masked", MoreRounds)
    misbehave(monkeypatch, lambda *given: given[-1](run_config={"num-rounds": 1}))
    first, second = records_of(run(tmp_path, num_rounds=2))
    assert "refused" not in first
    assert "clients have sent their numbers" in second["refused"]
    assert "got round 2, expected 1 to 1 (num-rounds)" in second["rejected"][0]["reason"]


@pytest.mark.slow
def test_a_client_with_nan_is_not_singled_out(tmp_path, monkeypatch, uploads):
    """A failure because of NaN would reveal information about the client's examples."""

    def trained(*arguments, train=train_locally, **more):
        result = train(*arguments, **more)
        if arguments[2].client_round.partition_id == 3:
            result.upload["H"][0] = torch.nan
            result.upload["H"][1, 0, 0] = torch.inf
        return result

    monkeypatch.setattr(masked_training, "train_locally", trained)
    (record,) = records_of(simulation := run(tmp_path))
    assert record["rejected"] == []
    assert [client["partition-id"] for client in record["clients"]] == list(range(6))
    sent, _, schedule = uploads[1][0]
    changes = [upload["H"].double() - sent["H"] for _, upload, _ in uploads[1]]
    changes[3][0, 0] = 0.0  # unchanged
    bound = next(part.bound for part in schedule.parts if part.name == "H")
    mean = torch.stack(changes).clamp(-bound, bound).mean(0)
    error = (state_of(simulation, 1)["H"] - sent["H"] - mean).abs().max()
    assert float(error) <= step_of(bound) + 1e-7
    assert record["secure"]["cut-off"] > 0


def test_a_state_that_overflows_rejects_no_client(tmp_path, monkeypatch):
    class Huge(Hostile):
        def _share_secrets(self, cohort):
            tensors = self.state
            self.state = tensors | {"H": torch.full_like(tensors["H"], 3e38)}
            self.before = tensors
            return super()._share_secrets(cohort)

        def close(self):
            mean = super().close()
            return mean | self.before  # so that the state can be evaluated

    monkeypatch.setattr("ravan_flwr.extras.secure.release.Masked", Huge)
    (record,) = records_of(run(tmp_path))
    assert record["rejected"] == []
    assert len(record["clients"]) == 6


@pytest.mark.slow
def test_two_rounds_from_one_state_reveal_a_change_of_all_rows(tmp_path, monkeypatch, uploads):
    """Masks do not prevent this: docs/privacy.md."""

    class Repeating(Hostile):
        """A server that sends the same state twice, the second time without one client."""

        def _share_secrets(self, cohort):
            tensors = self.state
            self.state = {k: torch.zeros_like(v) for k, v in tensors.items()}
            first = self.round.number == 1
            return super()._share_secrets([m for m in cohort if first or m.partition_id != 3])

    monkeypatch.setattr("ravan_flwr.extras.secure.release.Masked", Repeating)
    similarity = {}
    for size in (8, 1000):  # a few examples, or all of a client
        simulation = run(tmp_path, batch_size=size, num_rounds=2)
        first, second = (state_of(simulation, number)[CLASSIFIER].double() for number in (1, 2))
        change = uploads[1][3][1][CLASSIFIER].double()
        similarity[size] = float(torch.cosine_similarity(6 * first - 5 * second, change, dim=0))
        uploads.clear()
    assert similarity[1000] > 0.999
    assert similarity[8] < 0.9


def test_two_clients_with_the_same_key_are_rejected(tmp_path, monkeypatch):
    """Without a rejection the other clients would refuse the round."""
    sealing = agreement.derive_public_key(agreement.new_key())

    def reply(message, context, honest=worker_process.compute_reply):
        answer, partition = honest(message, context), int(context.node_config["partition-id"])
        if message.metadata.message_type == "train.keys" and partition in (2, 4):
            keys = NodeKeys(Path(str(context.node_config["secure-keys"])), partition)
            public = sealing + agreement.derive_public_key(agreement.new_key())
            signature = keys.sign(signed_keys(context.run_id, 1, partition, public))
            pieces = {"keys": public + signature, "node": keys.public()}
            answer.content["arrays"] = to_pieces(pieces)
        return answer

    monkeypatch.setattr(in_process_grid, "compute_reply", reply)
    (record,) = records_of(run(tmp_path))
    assert "refused" not in record
    assert "its keys of the round are another client's" in record["rejected"][0]["reason"]


def deals_zeros(partition, number, kind, message, honest, holders=range(6)):
    """Replace the shares that client 3 has sealed for some clients by zeros."""
    reply = honest()
    if (partition, kind) == (3, "shares"):
        sent = {name: a.data for name, a in reply.content["arrays"].items()}
        each = len(sent["sealed"]) // 6
        sealed = bytearray(sent["sealed"])
        for holder in holders:
            sealed[each * holder : each * (holder + 1)] = bytes(each)
        reply.content["arrays"] = to_pieces(sent | {"sealed": bytes(sealed)})
    return reply


def spoils_a_third_and_drops_out(partition, number, kind, message, honest):
    """At most a third report that they have no share, since that many may collude."""
    if (partition, kind) == (3, "masked"):
        return Message(Error(2, "gone"), reply_to=message)
    return deals_zeros(partition, number, kind, message, honest, holders=(0, 1))


def denies_all(partition, number, kind, message, honest):
    """Two drop out, so that one further missing client is below the threshold."""
    if partition in (4, 5) and (number, kind) == (1, "masked"):
        return Message(Error(2, "gone"), reply_to=message)
    reply = honest()
    if (partition, number, kind) == (2, 1, "unmask"):
        shares = next(iter(reply.content["arrays"].values())).data
        reply.content["arrays"] = to_pieces({"shares": shamir.NO_SHARE * (len(shares) // 33)})
    return reply


def sends_random_numbers(partition, number, kind, message, honest):
    reply = honest()
    if (partition, number, kind) == (3, 1, "masked"):
        data = next(iter(reply.content["arrays"].values())).data
        random = np.random.default_rng(0).bytes(len(data))
        reply.content["arrays"] = to_pieces({"masked": random})
    return reply


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behave", "rounds", "refusal", "skipped"),
    [
        (deals_zeros, 2, "partition 3 has shared something else than its secrets; skipped", [3]),
        (
            spoils_a_third_and_drops_out,
            5,
            "got 3 shares, expected at least 4.*no share: 0, 1; skipped from now on: partition 3",
            [3],
        ),
        (denies_all, 2, "3 shares", [2]),
        (sends_random_numbers, 2, "a client sent what is not masked as agreed", []),
    ],
)
def test_a_faulty_client_costs_one_round(tmp_path, monkeypatch, behave, rounds, refusal, skipped):
    """One that can be named is skipped from then on."""
    misbehave(monkeypatch, behave)
    first, *others = records_of(run(tmp_path, num_rounds=rounds))
    assert re.search(refusal, first["refused"])
    for record in others:
        assert "refused" not in record
        assert record["skipped"] == skipped


@pytest.mark.slow
def test_a_client_with_an_unknown_key_is_skipped(tmp_path, monkeypatch):
    """The others have another key of it: they report that, and the server skips the client."""

    def give_keys(grid, keys, original=InProcessGrid.give_keys):
        original(grid, keys)
        make_keys(tmp_path / "own", 2)
        for path in keys.glob("*.pub"):
            if path.name != "partition-2.pub":
                (tmp_path / "own" / path.name).write_bytes(path.read_bytes())
        grid._contexts[3].node_config["secure-keys"] = str(tmp_path / "own")

    monkeypatch.setattr(InProcessGrid, "give_keys", give_keys)
    records = records_of(run(tmp_path / "run", num_rounds=3))
    assert "clients have shared their secrets" in records[0]["refused"]
    assert len(records[0]["rejected"]) == 5
    assert "does not know the keys of others" in records[0]["rejected"][0]["reason"]
    effective = [r for r in records if "refused" not in r]
    assert effective
    assert all(2 not in [c["partition-id"] for c in r["clients"]] for r in effective)


@pytest.mark.parametrize(
    ("rounds", "skipped"),
    [
        # (dealer, denier) of each dispute, by round; clients that are skipped after the last.
        ([{(0, 4)}], [0, 4]),  # it cannot be decided which of the two is faulty
        ([{(0, 4), (0, 5)}], [0]),
        ([{(0, 4), (1, 4), (2, 4)}], [4]),
        ([{(0, 4)}, {(0, 5)}], [0]),  # client 0 had an earlier dispute
        ([{(1, 4)}, {(0, 4)}], [4]),
        ([{(1, 4)}, {(0, 4), (0, 5)}], [0, 4]),
        ([{(0, 4)}, {(0, 4)}], [0, 4]),  # the same dispute counts once
    ],
)
def test_of_two_disputing_clients_the_one_with_more_disputes_is_skipped(rounds, skipped):
    clients = [SimpleNamespace(partition_id=partition) for partition in range(6)]
    nodes = {10 + m.partition_id: Node(10 + m.partition_id, client=cast(Any, m)) for m in clients}
    for denied in rounds:
        round_: Any = object.__new__(masked_round.Masked)
        round_.federation = SimpleNamespace(registry=SimpleNamespace(nodes=nodes))
        round_.secure = SimpleNamespace(denied=denied)
        deniers = sorted(denier for dealer, denier in denied if dealer == min(denied)[0])
        found = round_._blamed(DealerError(min(denied)[0], "too few", deniers))
    assert found == skipped


@pytest.mark.slow
def test_accusations_of_one_client_exclude_only_itself(tmp_path, monkeypatch):
    def behave(partition, _, kind, message, honest):
        reply = honest()
        if (partition, kind) == (5, "shares"):
            reply.content["arrays"] = to_pieces({DISTRUSTS: b"[0, 1, 2]"})
        return reply

    misbehave(monkeypatch, behave)
    for record in records_of(run(tmp_path, num_rounds=2)):
        assert "refused" not in record
        assert [c["partition-id"] for c in record["clients"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("data", [b"{", b"[true]", b'"x"', b"[" * 100_000])
def test_accusations_that_are_no_list_are_invalid(data):
    with pytest.raises(ValueError, match="its list of clients"):
        masked_round._partitions(data)


# Plans, logs and reports.


def bytes_in(plan):
    """Return a plan's bytes up and down for a round of all six clients."""
    found = re.search(r"6 of 6 clients: at most ([\d,]+) bytes up,\s+([\d,]+) down", plan)
    assert found is not None
    return [int(number.replace(",", "")) for number in found.groups()]


@pytest.mark.slow
def test_a_plan_counts_the_bytes(tmp_path):
    """For a round without failures; run ids and bounds differ by a few digits."""
    (record,) = records_of(run(tmp_path))
    up, down = bytes_in(plan_of(QUICK, 6))
    assert record["bytes-up"] == up
    assert 0 <= down - record["bytes-down"] < 6 * 100
    (record,) = records_of(run(tmp_path, budgets="uniform"))
    assert record["bytes-up"] <= bytes_in(plan_of(QUICK | {"budgets": "uniform"}, 6))[0]


@pytest.mark.slow
@pytest.mark.usefixtures("without_charts")
def test_log_card_and_pages_state_that_uploads_were_masked(tmp_path):
    run_dir = run(tmp_path, tracking="tensorboard").run_dir
    masked = "the server sees sums over at least 4 clients, head by head"
    assert f"secure-aggregation: {masked}" in (run_dir / "log.txt").read_text()
    (card,) = run_dir.glob("*/README.md")
    page = (run_dir / "report" / "index.html").read_text()
    assert f"masked: {masked}" in card.read_text()
    assert f"masked: {masked}" in page
    assert "Training loss by round" not in page
    assert describe_run(RecordedRun.read(run_dir))["facts"]["uploads"] == f"masked: {masked}"
    assert list((run_dir / "tensorboard").iterdir())


def test_flowers_simulation_is_refused_as_its_nodes_have_no_keys():
    config = read_config(QUICK | {"processes": "auto"})
    grid = cast(Any, SimpleNamespace(get_node_ids=lambda: [1, 2, 3]))
    loaded = cast(Any, SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu"))))
    with pytest.raises(ValueError, match=r"whose nodes have no secure-keys, expected devices"):
        check_simulation(grid, loaded, config)


def test_a_device_that_requires_privacy_refuses_other_runs(tmp_path, monkeypatch, caplog):
    """Only the device itself is rejected, and the log has the reason."""
    required = {5: {"require-secure-aggregation": True}, 4: {"max-epsilon": 8}}

    def behave(partition, number, kind, message, honest):
        return honest(node_config=required.get(partition, {}))

    misbehave(monkeypatch, behave)
    (record,) = records_of(run(tmp_path, secure_aggregation=False))
    assert [client["partition-id"] for client in record["clients"]] == [0, 1, 2, 3]
    assert "require-secure-aggregation = true: got a run with" in caplog.text
    assert "max-epsilon = 8: got a run with privacy = 'none'" in caplog.text
