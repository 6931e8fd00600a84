"""Whole private runs whose clients mask their changes and add the noise in shares."""

import dataclasses
import json
import math

import dp_accounting
import dp_accounting.pld
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras import masked as masked_round
from ravan_flwr.launch import parallel_clients, worker_process
from ravan_flwr.messages.records import to_pieces
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.privacy import mechanism
from ravan_flwr.privacy.account import epsilon_of, epsilon_seen
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.secure.fixed_point import NoiseShares, signed, to_numbers
from ravan_flwr.secure.schedule import make_schedule, threshold_of
from ravan_flwr.server.privacy_budget import ClientBudget
from ravan_flwr.server.resume import ResumePoint
from ravan_flwr.training import masked
from ravan_flwr.training.plan import plan_of
from tests.hand_made import CLIENT, ROUND
from tests.methods import build, some_state
from tests.runs.test_secure import QUICK, failing, misbehave, records_of, state_of
from tests.unit.secure.rounds import PARTS

Z, C = 8.0, 0.05
NOISED = QUICK | {"privacy": "client", "noise-multiplier": Z, "clip-norm": C, "budgets": "uniform"}


@pytest.fixture
def without_noise(monkeypatch):
    for module in (mechanism, masked, masked_round):
        monkeypatch.setattr(module, "gaussian", lambda shape, _: torch.zeros(*shape).double())


@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize(("method", "budgets"), [("ravan", "uniform"), ("ffa-lora", "full")])
def test_without_noise_it_is_the_plain_private_round_to_the_rounding(tmp_path, method, budgets):
    """The same clip, the same expected counts, whoever trains which heads; here all are drawn."""
    states = []
    for secure in (True, False):
        folder = str(tmp_path / str(secure))
        settings = NOISED | {"method": method, "budgets": budgets, "output-dir": folder}
        run = simulate(settings | {"secure-aggregation": secure}, 6)
        states.append(state_of(run, 1))
    step = NoiseShares(C, Z).step
    for name, plain in states[1].items():
        if plain.dtype == torch.float32:
            error = float((states[0][name] - plain).abs().max())
            assert error <= 6 * step + 1e-7
    assert float(states[1][CLASSIFIER].norm()) > 100 * step  # it began at zero


def noise_of(run, number):
    """The noise on a sum, in deviations: where its changes are small beside it."""
    moved = state_of(run, number)[CLASSIFIER] - state_of(run, number - 1)[CLASSIFIER]
    return moved.double().numpy() * 6 / (Z * C)  # all six are drawn, and all train it


def test_what_is_released_has_the_noise_of_a_private_round_whoever_drops_out(tmp_path, monkeypatch):
    """Two of six fail before, or after, they have added their share: the server adds it."""
    faults = [(1, 2, "shares"), (4, 2, "shares"), (0, 3, "masked"), (5, 3, "masked")]
    misbehave(monkeypatch, failing(*faults))
    run = simulate(NOISED | {"output-dir": str(tmp_path), "num-rounds": 3}, 6)
    for record in records_of(run)[1:]:
        assert "refused" not in record
        noise = noise_of(run, record["round"])
        tolerance = 5 * math.sqrt(2 / noise.size)
        assert abs(np.var(noise) - 1) < tolerance + 6 / (Z * math.sqrt(noise.size))
        # The H of heads is noised alike, trained by few or many.
        assert (state_of(run, record["round"])["H"] != 0).all()
    check_accounts(run, faults)


def check_accounts(run, faults):
    """The records tell both, each as the library has it; the file was there before."""
    kept = json.loads((run.run_dir / "privacy.json").read_text())
    assert kept["releases"] == 3
    of_server = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    for record in records_of(run):
        spent, number = record["privacy"], record["round"]
        assert spent["epsilon"] == epsilon_of(Z, 1.0, 1e-5, number)
        of_server.compose(dp_accounting.GaussianDpEvent(Z * math.sqrt(4 / 6)), 1)
        told = of_server.get_epsilon(1e-5)
        assert spent["epsilon-to-server"] == pytest.approx(told, rel=1e-2)
        assert spent["clip-norm"] == C
        assert record["secure"]["threshold"] == threshold_of(6)
    away = {partition for partition, _, phase in faults if phase == "shares"}
    rounds = {int(p): round(sum_ * (Z * Z * 4 / 6)) for p, sum_ in kept["to-server"].items()}
    assert rounds == {p: 3 - (p in away) for p in range(6)}
    assert run.summary["epsilon-to-server"] == kept["epsilon-to-server"]


def test_a_clip_norm_that_adapts_goes_on_where_it_was(tmp_path):
    settings = NOISED | {"clip-norm": "auto", "noise-multiplier": 0.2, "output-dir": str(tmp_path)}
    run = simulate(settings, 6)
    again = simulate(settings | {"num-rounds": 2, "resume": str(run.run_dir)}, 6)
    first, second = records_of(again)
    assert first["privacy"]["clip-norm"] == 0.1 != second["privacy"]["clip-norm"]
    assert first["privacy"]["clip-norm"] * math.exp(0.11) > second["privacy"]["clip-norm"]
    assert second["privacy"]["epsilon-to-server"] > first["privacy"]["epsilon-to-server"]


def test_a_round_that_cannot_be_unmasked_is_counted_and_the_next_goes_on(tmp_path, monkeypatch):
    def behave(partition, number, kind, message, honest):
        reply = honest()
        if (partition, number, kind) == (3, 1, "masked"):
            data = next(iter(reply.content["arrays"].values())).data
            reply.content["arrays"] = to_pieces(
                {"masked": np.random.default_rng(0).bytes(len(data))}
            )
        return reply

    misbehave(monkeypatch, behave)
    run = simulate(NOISED | {"output-dir": str(tmp_path), "num-rounds": 2}, 6)
    first, second = records_of(run)
    assert "a client sent what is not masked or clipped as agreed" in first["refused"]
    assert "refused" not in second
    assert second["privacy"]["epsilon"] == epsilon_of(Z, 1.0, 1e-5, 2)
    assert not state_of(run, 1)["H"].any()


# What a client rounds, and what it refuses.


def schedule_of(parts, noise, clients=7):
    rows = np.ones(sum(part.rows for part in parts), bool)
    return make_schedule(1, 1, 3, parts, dict.fromkeys(range(clients), rows), "", noise)


def change_of(method, adapters, size, seed):
    """A state that was sent, and an upload that is so far from it."""
    state = some_state(method, adapters)
    random = torch.Generator().manual_seed(seed)
    bits = torch.full((-(-state["H"].shape[0] * state["H"].shape[1] // 8),), 255, dtype=torch.uint8)
    moved = state["H"] + size * torch.randn(state["H"].shape, generator=random)
    return state, {"H": moved.flatten(0, 1), "heads": bits}


@pytest.mark.parametrize("bits", [0.0, 1.5])
@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 1e30, math.inf, math.nan])
def test_two_cohorts_that_differ_in_one_client_differ_by_the_clip_norm_at_most(size, bits):
    """After rounding: what a client adds has no larger norm, whatever it has trained."""
    method, adapters = build()
    shares = NoiseShares(C, 1.0, bits)
    state, upload = change_of(method, adapters, size, 3)
    parts = masked.noised_parts(method, state, shares)
    schedule = schedule_of(parts, shares)
    for seed in range(10):
        random = np.random.default_rng(seed)
        steps = masked.clipped_steps(method, state, upload, schedule, random)
        changes = steps[:-1] if bits else steps
        assert np.linalg.norm(changes) * shares.step <= C * (1 + 1e-12)
        assert len(changes) == state["H"].numel()
        if bits:
            assert abs(int(steps[-1])) == shares.bit
    if size in (1.0, 1e30):
        assert np.linalg.norm(changes) * shares.step > 0.99 * C
        assert not bits or steps[-1] < 0


def test_what_is_released_does_not_tell_how_many_were_drawn():
    """Where nobody drops out it is a number of whole steps: of one size, whoever takes part."""
    method, adapters = build()
    shares = NoiseShares(C, 1.0, 1.5)
    state, upload = change_of(method, adapters, 1.0, 3)
    parts = masked.noised_parts(method, state, shares)
    made = []
    for clients in (3, 7, 250):
        schedule, random = schedule_of(parts, shares, clients), np.random.default_rng(0)
        made.append(masked.clipped_steps(method, state, upload, schedule, random))
        read = signed(to_numbers(made[-1])) * schedule.noise.step
        assert np.allclose(read / shares.step, made[0], rtol=1e-12, atol=0)
    assert all((steps == made[0]).all() for steps in made)


@pytest.mark.parametrize(
    ("noise", "told"),
    [
        (None, "a schedule without noise"),
        (NoiseShares(C, 4.0), "noise of multiplier 4, expected 8"),
        (NoiseShares(1.0, 8.0), r"a norm of 1.0, and 0.0 on bits, expected clip-norm = 0.05"),
        (NoiseShares(C, 9.0, 9.0), r"9.0 on bits, expected clip-norm = 0.05"),
    ],
)
def test_a_client_takes_part_with_the_noise_of_the_settings_alone(noise, told):
    config = read_config(NOISED)
    with pytest.raises(ValueError, match=told):
        masked.noise_in(config, schedule_of(PARTS, noise))
    assert masked.noise_in(config, schedule_of(PARTS, NoiseShares(C, Z)))
    auto = dataclasses.replace(config, clip_norm=None)
    assert masked.noise_in(auto, schedule_of(PARTS, NoiseShares(2.0, 9.0, 9.0)))


def test_cohorts_that_are_at_times_too_few_are_refused_at_the_start(tmp_path):
    with pytest.raises((ValueError, RuntimeError), match=r"one client would decide whether all"):
        simulate(NOISED | {"clients-per-round": 4, "output-dir": str(tmp_path)}, 8)
    budget = ClientBudget(read_config(NOISED | {"num-rounds": 100}), lambda _: None)
    for rate, members, may in ((0.05, 1000, True), (0.05, 200, False), (0.24, 1000, False),
                               (1.0, 3, True), (0.9, 8, False)):  # fmt: skip
        budget.rate = rate
        assert (budget.why_not_masked(members) == "") == may


@pytest.mark.parametrize(
    "seen",
    [
        None, [], {"a": 1.0}, {"1": "2"}, {"1": -1.0}, {"1": math.nan}, {"1": math.inf},
        {"1": 0.5}, {"3": 0.9 / Z**2}, {"3": 0.4}, {"3": 0.4, "4": 0.6},
    ],
)  # fmt: skip
def test_what_the_server_has_seen_is_not_forgotten(tmp_path, seen):
    """A run that goes on without it would begin to count anew."""
    config = read_config(NOISED)
    account = {
        "noise-multiplier": Z, "sampling-rate": 1.0, "delta": 1e-5, "releases": 1,
        "epsilon": epsilon_of(Z, 1.0, 1e-5, 1), "epsilon-to-server": epsilon_seen(0.5, 1e-5),
    }  # fmt: skip
    spent = {key: account[key] for key in account if key not in ("sampling-rate", "releases")}
    record = ROUND | {"privacy": spent, "clients": [CLIENT | {"partition-id": 3}]}
    (tmp_path / "rounds.jsonl").write_text(json.dumps(record) + "\n")
    directory, start = RunDirectory(tmp_path), ResumePoint({}, done=1)
    (tmp_path / "privacy.json").write_text(json.dumps(account | {"to-server": seen}))
    with pytest.raises(ValueError, match=r"to-server .*, expected the account of the run"):
        ClientBudget.of(config, directory, start)
    (tmp_path / "privacy.json").write_text(json.dumps(account | {"to-server": {"3": 0.5}}))
    budget = ClientBudget.of(config, directory, start)
    assert budget is not None
    assert budget.told()["epsilon-to-server"] == epsilon_seen(0.5, 1e-5)
    budget.spend([3, 4], shown=0.25)
    assert json.loads((tmp_path / "privacy.json").read_text())["to-server"] == {
        "3": 0.75,
        "4": 0.25,
    }


def test_a_plan_tells_what_is_sent_and_what_the_server_sees(tmp_path):
    run = simulate(NOISED | {"output-dir": str(tmp_path)}, 6)
    up = [client["bytes-up"] for client in records_of(run)[0]["clients"]]
    state = load_file(run.run_dir / "checkpoints" / "round-000001.safetensors")
    numbers = state["H"].numel() + state[CLASSIFIER].numel()
    assert set(up) == {3 * numbers}  # whatever their budgets are
    told = plan_of(NOISED, 6)
    assert "for the server, which knows the cohort" in told
    with pytest.raises(ValueError, match="expected clients-per-round = 7, all of them$"):
        plan_of(NOISED, 7)
    with pytest.raises(ValueError, match=r"clients-per-round = 90, all of them or 40 to 140"):
        plan_of(NOISED, 90)


def test_a_plan_tells_what_the_server_sees_of_the_client_that_is_drawn_most_often():
    """Its account is what a run tells as epsilon-to-server."""
    told = plan_of(NOISED | {"clients-per-round": 50, "num-rounds": 20, "delta": 1e-4}, 500)
    each = 50 / (34 * Z * Z)
    assert f"epsilon {epsilon_seen(2 * each, 1e-4):.3f} of a client in 2 rounds" in told
    assert f"{epsilon_seen(7 * each, 1e-4):.3f} of the client that is drawn most often" in told


# What a device insists on.


def test_a_device_that_insists_takes_no_part_in_other_runs(tmp_path, monkeypatch, caplog):
    """Its refusal costs itself, and the log says why."""
    insist(monkeypatch, {5: {"require-secure-aggregation": True}, 4: {"max-epsilon": 8}})
    settings = QUICK | {"secure-aggregation": False, "output-dir": str(tmp_path)}
    run = simulate(settings, 6)
    (record,) = records_of(run)
    assert [client["partition-id"] for client in record["clients"]] == [0, 1, 2, 3]
    assert "require-secure-aggregation = true: got a run with" in caplog.text
    assert "max-epsilon = 8: got a run with privacy = 'none'" in caplog.text


def test_a_device_leaves_a_run_before_the_server_has_seen_more_than_it_allows(
    tmp_path, monkeypatch
):
    """Its own account, whatever the server counts; the rounds go on without it."""
    insist(monkeypatch, {2: {"max-epsilon": 0.65, "require-secure-aggregation": True}})
    run = simulate(NOISED | {"output-dir": str(tmp_path), "num-rounds": 3}, 6)
    records = records_of(run)
    trained = [[c["partition-id"] for c in record["clients"]] for record in records]
    assert [2 in there for there in trained] == [True, False, False]
    assert all(len(there) >= 5 for there in trained)
    for record in records[1:]:
        assert "refused" not in record
        (rejected,) = record["rejected"]
        assert "it takes part no further" in rejected["reason"]


def test_a_run_that_goes_on_is_a_new_one_to_a_device_and_counts_as_the_same(tmp_path, monkeypatch):
    """The server says what it has seen before. One round takes 0.65, as above; two take 0.95."""
    settings = NOISED | {"output-dir": str(tmp_path), "num-rounds": 1}
    run = simulate(settings, 6)
    insist(monkeypatch, {2: {"max-epsilon": 0.65}, 3: {"max-epsilon": 2.0}})
    again = simulate(settings | {"num-rounds": 2, "resume": str(run.run_dir)}, 6)
    first, second = records_of(again)
    assert [client["partition-id"] for client in first["clients"]] == [0, 1, 2, 3, 4, 5]
    assert [client["partition-id"] for client in second["clients"]] == [0, 1, 3, 4, 5]
    (rejected,) = second["rejected"]
    told = first["privacy"]["epsilon-to-server"]
    assert f"the server has seen {told:.4g} of this device" in rejected["reason"]


def insist(monkeypatch, wanted):
    """Give devices a node config of their own, by partition."""

    def reply(message, context, honest=worker_process.reply_of):
        more = wanted.get(int(context.node_config["partition-id"]), {})
        before = dict(context.node_config)
        context.node_config.update(more)
        try:
            return honest(message, context)
        finally:
            context.node_config.clear()
            context.node_config.update(before)

    monkeypatch.setattr(parallel_clients, "reply_of", reply)
