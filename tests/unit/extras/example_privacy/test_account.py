"""A client's account of its examples: written before training, never below the server's count."""

import copy

import dp_accounting
import pytest
from flwr.app import Array, ConfigRecord, Context, RecordDict

from ravan_flwr.client import answers
from ravan_flwr.client.client_request import run_hash
from ravan_flwr.client.replay_guard import ACCOUNT
from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras.example_privacy import client as on_client
from ravan_flwr.extras.example_privacy.account import (
    ExampleAccount,
    OutOfBudgetError,
    count_round,
    open_account,
)
from ravan_flwr.messages.arrays import to_record
from ravan_flwr.privacy.account import Releases, find_epsilon
from ravan_flwr.specs import Scalar
from ravan_flwr.training.model_and_data import get_model_and_data

PRIVATE: dict[str, Scalar] = {
    "privacy": "example", "noise-multiplier": 2.0, "local-steps": 5, "tracking": "none",
    "partition": "iid",
}  # fmt: skip
EACH = Releases(2.0, 0.4, 5)


def take(state, earlier=0, rate=0.4, mark="m", **settings):
    config = PRIVATE | {k.replace("_", "-"): v for k, v in settings.items()}
    message = {"noise-multiplier": 2.0, "earlier-rounds": earlier}
    return count_round(state, mark, read_config(config), rate, message, 0)


def found(state, mark="m"):
    with open_account(state, mark, 0) as book:
        return ExampleAccount.of(book)


def test_each_round_counts_its_steps_by_the_rate_of_its_examples():
    state = RecordDict()
    for number in (1, 2, 3):
        noise, missing = take(state, earlier=number - 1)
        assert (noise.multiplier, noise.norm, missing) == (2.0, 1.0, False)
        assert found(state) == ExampleAccount(number, (EACH._replace(number=5 * number),))
    take(state, earlier=3, rate=0.5)
    take(state, earlier=4)
    assert found(state).releases == (EACH._replace(number=20), Releases(2.0, 0.5, 5))


def test_a_round_that_would_exceed_epsilon_is_refused_and_not_counted():
    """The third round does; the account equals that of a direct call of the library."""
    event = dp_accounting.PoissonSampledDpEvent(0.4, dp_accounting.GaussianDpEvent(2.0))
    two, three = (
        dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
        .compose(event, 5 * rounds)
        .get_epsilon(1e-5)
        for rounds in (2, 3)
    )
    limit, state = (two + three) / 2, RecordDict()
    take(state, epsilon=limit)
    take(state, epsilon=limit, earlier=1)
    with pytest.raises(OutOfBudgetError, match=f"spent {two:.4g}, and one more .* to {three:.4g}"):
        take(state, epsilon=limit, earlier=2)
    assert found(state).rounds == 2


@pytest.mark.parametrize(
    "lost",
    [
        lambda state: state.pop(ACCOUNT),
        lambda state: state.update({ACCOUNT: ConfigRecord({"run": "another", "rounds": 9})}),
        lambda state: state[ACCOUNT].update({"rounds": -1}),
        lambda state: state[ACCOUNT].update({"rates": [0.4, 0.4]}),
        lambda state: state[ACCOUNT].update({"rates": ["a"]}),
        lambda state: state[ACCOUNT].pop("numbers"),
        lambda state: state.update({ACCOUNT: to_record({})}),
    ],
)
def test_a_lost_or_damaged_account_is_rebuilt_from_the_servers_record(lost):
    state = RecordDict()
    take(state)
    take(state, earlier=1)
    lost(state)
    _, missing = take(state, earlier=2)
    assert missing
    assert found(state) == ExampleAccount(3, (EACH._replace(number=15),))


def test_a_servers_count_below_the_clients_own_is_ignored():
    state = RecordDict()
    for _ in range(4):
        _, missing = take(state, earlier=0)
        assert not missing
    assert found(state).rounds == 4
    take(state, earlier=7)  # a larger count is used, as where a round's account was not stored
    assert found(state).rounds == 8


@pytest.mark.parametrize(
    ("message", "error_text"),
    [
        ({"noise-multiplier": 2.0}, "earlier-rounds = None"),
        ({"noise-multiplier": 2.0, "earlier-rounds": -1}, "earlier-rounds = -1"),
        ({"noise-multiplier": 2.0, "earlier-rounds": 10**7}, "a number of rounds, 1000000 at most"),
        ({"earlier-rounds": 0}, "noise-multiplier = None"),
        ({"noise-multiplier": 0.0, "earlier-rounds": 0}, "noise-multiplier = 0.0 .* 0.1 or more"),
        ({"noise-multiplier": float("nan"), "earlier-rounds": 0}, "noise-multiplier = nan"),
    ],
)
def test_messages_with_invalid_privacy_fields_are_refused(message, error_text):
    config = read_config(PRIVATE | {"noise-multiplier": "auto", "epsilon": 8.0})
    state = RecordDict()
    with pytest.raises(ValueError, match=error_text):
        count_round(state, "m", config, 0.4, message, 0)
    assert ACCOUNT not in state


def test_the_server_cannot_override_a_configured_noise_multiplier():
    message = {"noise-multiplier": 0.2, "earlier-rounds": 0}
    noise, _ = count_round(RecordDict(), "m", read_config(PRIVATE), 0.4, message, 0)
    assert noise.multiplier == 2.0


@pytest.mark.slow
def test_a_round_whose_state_is_lost_stays_in_the_account(on_a_device):
    """Its noise multiplier stays as well."""
    del on_a_device
    config = read_config(PRIVATE | {"noise-multiplier": "auto", "epsilon": 8.0})
    state = RecordDict()
    few, all_ = (find_epsilon(1.5, 0.4, 1e-5, 5 * rounds) for rounds in (3, 10))
    assert few < 8.0 < all_

    def ask(number):
        nonlocal state
        little, after = number % 2 == 0, copy.deepcopy(state)
        message = {"noise-multiplier": 1.5 if little else 1000.0, "earlier-rounds": number}
        count_round(after, "m", config, 0.4, message, 0)
        state = state if little else after

    for number in range(6):
        ask(number)
    with pytest.raises(OutOfBudgetError, match="and one more would take that to"):
        list(map(ask, range(6, 20)))


# Whole messages.


@pytest.fixture
def send_request():
    """Ask a client of the digits to train, in the way that a message does."""
    run_config = PRIVATE | {"epsilon": 8.0, "local-steps": 2, "lora-rank": 1}
    loaded = get_model_and_data(read_config(run_config))
    context = Context(
        run_id=1, node_id=1, node_config={"partition-id": 0, "num-partitions": 20},
        state=RecordDict(), run_config=run_config,
    )  # fmt: skip

    def ask(earlier=0):
        settings = {
            "round": 1, "budget-fraction": 1.0, "noise-multiplier": 2.0, "earlier-rounds": earlier
        }  # fmt: skip
        arrays = to_record(loaded.model.initial_state())
        content = RecordDict({"arrays": arrays, "config": ConfigRecord(settings)})
        return answers.answer("train", content, context)

    return ask, context, loaded


def rounds_in(context):
    mark = run_hash(read_config(context.run_config), context.run_id)
    return found(context.state, mark).rounds


def test_a_round_is_in_the_nodes_state_before_its_training_begins(send_request, monkeypatch):
    send, context, _ = send_request

    def fails(*_):
        assert rounds_in(context) == 1
        raise RuntimeError("no memory")

    monkeypatch.setattr(on_client, "train_privately", fails)
    with pytest.raises(RuntimeError, match="could not work on its examples; its own log"):
        send()
    assert rounds_in(context) == 1


def test_a_reply_has_no_loss_and_no_number_of_examples(send_request):
    ask, context, loaded = send_request
    reply = ask()
    assert set(reply.metric_records["metrics"]) == {"round", "fingerprint", "recounted"}
    assert set(reply.array_records["arrays"]) == set(loaded.model.upload(loaded.model.method))
    assert all(isinstance(array, Array) for array in reply.array_records["arrays"].values())
    assert rounds_in(context) == 1
    assert ask(earlier=4).metric_records["metrics"]["recounted"] == 1
    assert rounds_in(context) == 5


def test_a_client_without_privacy_budget_sends_a_refusal(send_request):
    ask, _, _ = send_request
    assert find_epsilon(2.0, 32 / 72, 1e-5, 2 * 40) > 8.0
    reply = ask(earlier=200)
    assert not reply.array_records
    refused = reply.config_records["refused"]
    assert refused["round"] == 1
    assert "epsilon = 8: after 200 rounds its examples have spent" in str(refused["reason"])
