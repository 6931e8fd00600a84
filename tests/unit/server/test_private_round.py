"""Private rounds over hand-made nodes: cohorts, the account on disk, and values not recorded."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from flwr.app import Error, Message

from ravan_flwr.config.run_config import read_config
from ravan_flwr.flower_private import NodeInfo
from ravan_flwr.messages.arrays import from_record
from ravan_flwr.methods import METHODS
from ravan_flwr.privacy import mechanism
from ravan_flwr.privacy.account import find_epsilon
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.server import noised
from ravan_flwr.server.privacy_budget import CLIP_NORM, NAME, ClientBudget
from ravan_flwr.server.resume import ResumePoint
from ravan_flwr.server.strategy import FederatedTuning
from tests.hand_made import (
    ROUND,
    Nodes,
    Notes,
    Unresponsive,
    fake_clock,
    initial,
    loaded_of,
    settings_from,
    strategy_of,
)
from tests.methods import build

__all__ = ["fake_clock"]


def run_rounds(nodes, rounds=1, memory=None, before=None, **settings):
    """Run rounds; return notes, budget, and the contents of the account's file."""
    defaults: dict[str, Any] = {
        "privacy": "client", "noise_multiplier": 1.0, "clip_norm": 0.5, "clients_per_round": 2,
        "round_timeout": 5.0,
    }  # fmt: skip
    config = read_config(settings_from(defaults | {"num_rounds": rounds} | settings))
    notes, files = Notes(), []
    budget = ClientBudget(
        config, lambda account: files.append((len(notes.states), account)), before
    )
    strategy = strategy_of(nodes, config, memory=memory, callbacks=[notes], privacy=budget)
    result = strategy.start(
        nodes, initial(nodes), num_rounds=rounds, timeout=5.0, evaluate_fn=lambda *_: None
    )
    assert all(dict(account) == {} for account in result.train_metrics_clientapp.values())
    notes.memory = strategy.memory
    return notes, budget, files, from_record(result.arrays)


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr(mechanism, "gaussian", lambda shape, _: torch.zeros(shape).double())


@pytest.fixture
def everyone(monkeypatch):
    monkeypatch.setattr(noised, "subsample", lambda number, _: range(number))


def test_the_account_is_on_disk_before_each_release():
    notes, budget, files, _ = run_rounds(Nodes(), rounds=3)
    assert [(done, account["releases"]) for done, account in files] == [(0, 1), (1, 2), (2, 3)]
    for number, record in enumerate(notes.records, start=1):
        spent = find_epsilon(1.0, 0.5, 1e-5, number)
        assert record["privacy"]["epsilon"] == files[number - 1][1]["epsilon"] == spent
        assert record["privacy"]["clip-norm"] == 0.5
        assert "noise-cohort" not in record["privacy"]
    assert budget.rate == 0.5


def test_an_account_that_cannot_be_written_releases_nothing():
    nodes, notes = Nodes(), Notes()

    def full(_):
        raise OSError(28, "no space")

    budget = ClientBudget(OF_NOISE, full)
    strategy = strategy_of(nodes, OF_NOISE, callbacks=[notes], privacy=budget)
    with pytest.raises(OSError, match="no space"):
        strategy.start(nodes, initial(nodes), num_rounds=1)
    assert not notes.states
    assert not strategy.federation.state.tensors["H"].any()


def test_losses_and_numbers_of_examples_are_not_recorded():
    notes, *_ = run_rounds(Nodes(), clients_per_round=4)
    (record,) = notes.records
    assert "train-loss" not in record
    assert len(record["clients"]) == 4
    assert not any("train-loss" in client for client in record["clients"])


@pytest.mark.slow
def test_cohorts_are_resampled_and_an_empty_cohort_adds_noise_alone(monkeypatch):
    sizes = [len(r["clients"]) for r in run_rounds(Nodes(), rounds=24)[0].records]
    assert len(set(sizes)) > 1
    monkeypatch.setattr(noised, "subsample", lambda *_: range(0))
    notes, *_ = run_rounds(Nodes(), rounds=2)
    assert [record["clients"] for record in notes.records] == [[], []]
    assert (notes.states[0]["H"] != 0).all()


@pytest.mark.slow
def test_the_sampled_cohort_does_not_depend_on_the_seed():
    nodes = [Nodes(), Nodes()]
    for one in nodes:
        run_rounds(one, rounds=40, seed=0)
    assert sorted(nodes[0].trained) != sorted(nodes[1].trained)


@pytest.mark.usefixtures("without_noise", "everyone")
def test_replies_that_are_missing_count_as_zero():
    """Two of four replies are expected; the sum is divided by two, for any number of replies."""
    complete = run_rounds(Nodes())[0].states[0]["H"]
    each = []
    for partial in range(4):

        def fail(partition, message, partial=partial):
            if message.metadata.message_type == "train" and partition != partial:
                return Message(Error(2, "it failed"), reply_to=message)
            return None

        notes, *_ = run_rounds(Nodes(behave=fail))
        assert len(notes.records[0]["rejected"]) == 3
        each.append(notes.states[0]["H"])
        assert float(each[-1].norm()) == pytest.approx(0.5 / 2, rel=1e-5)
    torch.testing.assert_close(sum(each), complete)


@pytest.mark.usefixtures("without_noise", "everyone")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_change_affects_no_state(value):
    class Broken(Nodes):
        def reply(self, message, upload, number):
            if self.trained[-1] == (1, 2):
                upload = upload | {"H": torch.full_like(upload["H"], value)}
            return super().reply(message, upload, number)

    notes, *_ = run_rounds(Broken())
    (rejected,) = notes.records[0]["rejected"]
    assert rejected["client"] == "partition 2"
    assert "not finite" in rejected["reason"]
    without, *_ = run_rounds(Unresponsive(2))  # it excludes no other
    assert [client["partition-id"] for client in without.records[0]["clients"]] == [0, 1, 3]
    assert torch.equal(notes.states[0]["H"], without.states[0]["H"])


@pytest.mark.usefixtures("everyone")
class Replaced(Nodes):
    """Nodes that reconnect with another version of the app after the first round."""

    since = "then"

    def get_nodes(self):
        return [NodeInfo(node_id=n, last_activated_at=self.since) for n in self.get_node_ids()]

    def replace_all(self, *_):
        self.since = "later"
        for node_id, client in self.registered.items():
            self.registered[node_id] = replace(client, code="of another version")


@pytest.mark.parametrize("clip_norm", [0.5, "auto"])
def test_a_run_whose_nodes_are_all_refused_spends_nothing_more(clip_norm):
    nodes, notes, files = Replaced(), Notes(), list[dict[str, Any]]()
    config = read_config(settings_from({
        "privacy": "client", "noise_multiplier": 1.0, "clip_norm": clip_norm,
        "clients_per_round": 2, "num_rounds": 3, "round_timeout": 5.0,
    }))  # fmt: skip
    budget = ClientBudget(config, files.append)
    strategy = strategy_of(nodes, config, callbacks=[notes], privacy=budget)
    with pytest.raises(RuntimeError, match="all 4 were refused: its ravan_flwr has fingerprint"):
        strategy.start(nodes, initial(nodes), num_rounds=3, evaluate_fn=nodes.replace_all)
    assert len(files) == len(notes.records) == 1


def test_the_run_ends_before_the_next_round_would_exceed_epsilon():
    limit = find_epsilon(1.0, 0.5, 1e-5, 3) + 1e-6
    notes, budget, _, result = run_rounds(Nodes(), rounds=9, epsilon=limit)
    assert [record["round"] for record in notes.records] == [1, 2, 3]
    assert budget.epsilon <= limit < find_epsilon(1.0, 0.5, 1e-5, 4)
    assert budget.ends_after(0)
    assert torch.equal(result["H"], notes.states[-1]["H"])
    with pytest.raises(ValueError, match=r"epsilon = 0.1: one round takes .* room for one"):
        run_rounds(Nodes(), rounds=9, epsilon=0.1)


@pytest.mark.slow
def test_the_noise_multiplier_is_derived_from_epsilon_and_the_rounds():
    _, budget, _, _ = run_rounds(Nodes(), rounds=4, epsilon=8.0, noise_multiplier="auto")
    assert 7.9 < budget.epsilon <= 8.0
    assert budget.releases == 4


def test_a_simulated_noise_cohort_is_recorded_in_every_round():
    notes, budget, files, _ = run_rounds(Nodes(), rounds=2, noise_cohort=500)
    assert [record["privacy"]["noise-cohort"] for record in notes.records] == [500, 500]
    assert files[-1][1]["noise-cohort"] == budget.as_record()["noise-cohort"] == 500


def test_an_adaptive_clip_norm_is_kept_for_a_resumed_run_which_needs_it():
    """Without it the run would go on with the norm of the first round."""
    notes, budget, files, _ = run_rounds(Nodes(), rounds=2, clip_norm="auto")
    norms = [record["privacy"]["clip-norm"] for record in notes.records]
    assert norms[0] == 0.1
    assert norms[1] != 0.1
    last_norm = float(notes.memory[CLIP_NORM])
    before = files[-1][1]
    more, after, _, _ = run_rounds(Nodes(), memory=notes.memory, before=before, clip_norm="auto")
    assert more.records[0]["privacy"]["clip-norm"] == last_norm != norms[1]
    assert (budget.releases, after.releases) == (2, 3)
    assert after.multiplier == budget.multiplier
    del notes.memory[CLIP_NORM]
    with pytest.raises(ValueError, match=r"checkpoint: privacy/clip-norm is missing, expected"):
        run_rounds(Nodes(), memory=notes.memory, before=before, clip_norm="auto")
    before = before | {"releases": 0}
    run_rounds(Nodes(), memory=notes.memory, before=before, clip_norm="auto")


def test_the_account_does_not_depend_on_the_clip_norm_of_the_checkpoint():
    """Noise and sensitivity are both proportional to the norm, so that epsilon is without it."""
    before = run_rounds(Nodes(), rounds=2)[2][-1][1]
    accounts = []
    for memory in ({}, {CLIP_NORM: torch.tensor([0.25])}):
        _, budget, files, _ = run_rounds(Nodes(), memory=memory, before=before)
        accounts.append((budget.epsilon, budget.as_record(), files))
    assert accounts[0] == accounts[1]
    assert accounts[0][0] == find_epsilon(1.0, 0.5, 1e-5, 3)


def test_the_log_has_the_epsilon_of_the_rounds_to_come_after_going_back(caplog):
    """Nine rounds were released, then the run went back to round 5: of 10, five are to come."""
    caplog.set_level("INFO")
    config = read_config({"privacy": "client", "noise-multiplier": 1.0, "clip-norm": 0.5})
    before = {"noise-multiplier": 1.0, "sampling-rate": 0.5, "releases": 9}
    budget, nodes = ClientBudget(config, lambda _: None, before), Nodes()
    start = ResumePoint(nodes.method.initial_state(nodes.adapters), last_round=5)
    strategy = FederatedTuning(config, loaded_of(nodes.method), start, privacy=budget)
    strategy.start(nodes, initial(nodes), num_rounds=10, evaluate_fn=lambda *_: None)
    assert budget.releases == 9 + 5
    after = find_epsilon(1.0, 0.5, 1e-5, 9 + 5)
    assert f"{after:.3f} after 5 more rounds" in caplog.text


ACCOUNT = {
    "noise-multiplier": 1.0, "sampling-rate": 0.5, "delta": 1e-5, "releases": 5,
    "epsilon": find_epsilon(1.0, 0.5, 1e-5, 5),
}  # fmt: skip


def record_of(number, spent=None, **changes):
    """Return a round's record; the run went back once, so that one more update was released."""
    releases = number + (number > 1)
    noise = {"noise-multiplier": 1.0, "epsilon": find_epsilon(1.0, 0.5, 1e-5, releases)}
    privacy = {"delta": 1e-5} | noise | (spent or {})
    return ROUND | {"round": number, "privacy": privacy} | changes


OF_NOISE = read_config({"privacy": "client", "noise-multiplier": 1.0})
OF_EPSILON = read_config({"privacy": "client", "epsilon": 8.0})


def budget_of(folder, records, account, config=OF_NOISE):
    """Read a budget beside records of rounds, of a run that is resumed after its third round."""
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / NAME).write_text(json.dumps(account))
    return ClientBudget.of(config, RunDirectory(folder), ResumePoint({}, last_round=3))


def spending(**changes):
    """Return changes of an account with the epsilon that results from them."""
    account = {**ACCOUNT, **{k.replace("_", "-"): v for k, v in changes.items()}}
    z, rate, releases = (account[k] for k in ("noise-multiplier", "sampling-rate", "releases"))
    return account | {"epsilon": find_epsilon(z, rate, 1e-5, releases)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (spending(releases=2), r"epsilon = .*, and round 2 has more"),
        (spending(releases=3), r"epsilon = .*, and round 3 has more"),
        (spending(noise_multiplier=100.0), "noise-multiplier = 100.0, and the run has 1.0"),
        (spending(sampling_rate=0.05, releases=500), "sampling-rate = 0.05, by which round 1"),
        ({"epsilon": 0.059}, "epsilon = 0.059, and its counts spend"),
        ({"epsilon": None}, "epsilon: got None"),
        ({"releases": 5.5}, "releases: got 5.5"),
        ({"releases": True}, r"epsilon = .*, and its counts spend"),
        ({"releases": 10**12}, "privacy.json: releases: got 1000000000000"),
        ({"releases": 10**30}, "privacy.json is damaged"),
        ({"noise-multiplier": math.inf}, "noise-multiplier: got inf"),
        ({"noise-multiplier": "one"}, "noise-multiplier: got 'one'"),
        ({"sampling-rate": 1.5}, "sampling-rate: got 1.5"),
        ({"delta": 1e-6}, "delta = 1e-06"),
    ],
)
def test_an_invalid_account_is_refused(changes, message, tmp_path):
    rounds = [*map(record_of, (1, 2, 3))]
    with pytest.raises(ValueError, match=message):
        budget_of(tmp_path, rounds, ACCOUNT | changes)
    assert budget_of(tmp_path, rounds, ACCOUNT).releases == 5


@pytest.mark.parametrize(
    ("spent", "message"),
    [
        ({"epsilon": 8.39}, "epsilon = .*, and round 4 has more"),
        ({"noise-multiplier": 0.5}, "noise-multiplier = 100.0, and round 1 has another"),
    ],
)
def test_an_account_with_derived_noise_must_match_the_records(spent, message, tmp_path):
    """Updates released after the resumed round count as well."""
    rounds = [*map(record_of, (1, 2, 3))]
    account = ACCOUNT if "epsilon" in spent else spending(noise_multiplier=100.0)
    with pytest.raises(ValueError, match=message):
        budget_of(tmp_path, [*rounds, record_of(4, spent)], account, OF_EPSILON)
    assert budget_of(tmp_path, [*rounds, record_of(4)], ACCOUNT, OF_EPSILON) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"releases": 10**6}, "it counts 1,000,000 rounds, and the records have 3"),
        ({"releases": 10**6, "epsilon": 2e5}, "it counts 1,000,000 rounds"),
        ({"noise-multiplier": 1e-3}, r"noise-multiplier = 0\.001, and round 1 has another"),
    ],
)
def test_counts_that_the_records_exclude_are_refused_before_epsilon_is_computed(
    changes, message, tmp_path, monkeypatch
):
    """With a million releases, or so little noise, epsilon takes a minute and gigabytes."""
    rounds = [*map(record_of, (1, 2, 3))]
    monkeypatch.setattr("ravan_flwr.server.privacy_budget.find_epsilon", None)
    with pytest.raises(ValueError, match=message):
        budget_of(tmp_path, rounds, ACCOUNT | changes, OF_EPSILON)


def test_rounds_that_were_repeated_are_within_the_account(tmp_path):
    """A run that went back from round 900 to round 3, and had no room there, is resumed."""
    rounds = [*map(record_of, (1, 2, 3))]
    assert budget_of(tmp_path, rounds, spending(releases=900)).releases == 900


@pytest.mark.parametrize("norm", [-0.1, 0.0, math.nan, math.inf, 1e-200, [0.1, 0.2], []])
def test_an_invalid_clip_norm_of_a_checkpoint_is_refused(norm):
    memory = {CLIP_NORM: torch.tensor(norm, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"checkpoint: privacy/clip-norm is .*, expected one numb"):
        run_rounds(Nodes(), memory=memory, clip_norm="auto")


def test_a_resumed_run_needs_its_account(tmp_path):
    directory, start = RunDirectory(tmp_path), ResumePoint({}, last_round=1)
    with pytest.raises(ValueError, match=f"{NAME}: it is missing, expected the account"):
        ClientBudget.of(OF_NOISE, directory, start)
    (tmp_path / NAME).write_text("{")
    with pytest.raises(ValueError, match=f"{NAME} is damaged"):
        ClientBudget.of(OF_NOISE, directory, start)
    assert ClientBudget.of(read_config({}), directory, start) is None


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.sums_changes])
def test_a_method_that_sums_changes_may_be_private(name):
    noised.Noised.check_model(cast(Any, SimpleNamespace(method=build(name)[0])))


def test_a_method_without_sums_is_refused_before_any_release():
    model = cast(Any, SimpleNamespace(method=build("rolora")[0]))
    with pytest.raises(ValueError, match="does not sum clients' changes, .* derive it from"):
        noised.Noised.check_model(model)
