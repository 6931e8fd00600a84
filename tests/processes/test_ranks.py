"""Several processes in one client: the numbers of one process, and ranks that fail."""

import os
import re
import signal
import sys
from functools import partial
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from peft import get_peft_model_state_dict
from transformers import TrainerCallback

from ravan_flwr.strategies import RavanStrategy, federated
from ravan_flwr.strategies.federated import TrainerLoop
from ravan_flwr.strategies.ranks import answer_in_ranks
from tests.unit.strategies.test_federated import (
    BATCH,
    Grid,
    assert_close,
    data_of,
    lora,
    make_model,
    make_trainer,
    numbers,
    ravan,
    run,
    train_only,
)

RANKS = 2
EVALUATED = 16  # two batches of the Trainer's eight: one for each rank


def build(context, *, folder, config, batch=BATCH // RANKS, callbacks=()):
    return make_trainer(
        folder, make_model(config), callbacks=callbacks, evaluated=data_of(1, EVALUATED),
        per_device_train_batch_size=batch,
    )  # fmt: skip


def answer(app, kind, config):
    """Return a node's answer to one message."""
    grid = Grid([app])
    arrays = ArrayRecord(get_peft_model_state_dict(make_model(config)))
    (reply,) = grid.send_and_receive([Message(RecordDict({"arrays": arrays}), 1, kind)])
    return reply


class Fail(TrainerCallback):
    """Fail in rank 1, while rank 0 waits for its gradients."""

    def __init__(self, how):
        self.how = how

    def on_step_end(self, *_, **__):
        if os.environ["RANK"] == "1":
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no\nmemory")


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # Heads are chosen by the gradient of both halves of a batch.
    "ravan": (RavanStrategy, ravan, {"budget": 0.5, "score": "gradient"}),
    # The node's state, with Adam's moments, outlives the processes of a round.
    "fedit": (FedAvg, lora, {"keep_optimizer": True}),
}  # fmt: skip


def apps(config, folder, **options):
    """Return an app of one process, and one of two that share its batches."""
    work = partial(build, folder=folder, config=config)
    return [
        federated(partial(work, batch=BATCH // each), processes=each, **options)
        for each in (1, RANKS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", CASES)
def test_two_processes_equal_one_with_their_batches_together(method, tmp_path):
    strategy, config, options = CASES[method]
    one, two = (
        run(train_only(strategy), [app], make_model(config))
        for app in apps(config, tmp_path, **options)
    )
    assert_close(numbers(two), numbers(one))
    for number in (1, 2):
        expected = dict(one.train_metrics_clientapp[number])
        assert two.train_metrics_clientapp[number] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_two_processes_evaluate_as_one(tmp_path):
    one, two = (answer(app, "evaluate", ravan).content["metrics"] for app in apps(ravan, tmp_path))
    assert two == pytest.approx(dict(one), abs=1e-5)
    assert one["num-examples"] == EVALUATED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [("raises", "rank 1: ValueError: no\\nmemory"), ("killed", "rank 1: .* signal SIGKILL")],
)
def test_a_rank_that_fails_ends_the_others_and_the_round(how, reason, tmp_path):
    """A process group would wait half an hour for it."""
    work = partial(build, folder=tmp_path, config=lora, callbacks=[Fail(how)])
    reply = answer(federated(work, processes=RANKS), "train", lora)
    assert re.search(reason, reply.error.reason), reply.error.reason


@pytest.mark.slow
def test_a_rank_0_that_ends_without_a_reply_is_an_error():
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(RuntimeError, match="rank 0: it ended with exit code 0 and without a reply"):
        answer_in_ranks(leave, 1, RecordDict(), context)


def leave(*_):
    sys.exit(0)


def test_what_other_processes_cannot_do_is_refused(tmp_path):
    context = Context(1, 1, {}, RecordDict(), {})
    work = partial(build, folder=tmp_path, config=lora)
    with pytest.raises(ValueError, match="found 1, expected as many; without GPUs pass use_cpu"):
        TrainerLoop(work, context, RANKS, keep_optimizer=False)
    with pytest.raises(ValueError, match="got a trainer, expected a function .* pass build"):
        federated(work(context), processes=RANKS)
    with pytest.raises(ValueError, match="got a function that trains, expected a function of"):
        federated(work, make_model(), processes=RANKS)
    with pytest.raises(ValueError, match="processes = 0: expected a whole number above 0"):
        federated(work, processes=0)
    local = federated(lambda _: None, processes=RANKS)
    reason = answer(local, "train", lora).error.reason
    assert re.search("other processes cannot import .* at the top of a module", reason), reason
