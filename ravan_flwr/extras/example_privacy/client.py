"""Train on a device with `privacy=example`, within its privacy budget."""

from dataclasses import replace
from logging import getLogger

from flwr.app import ConfigRecord, RecordDict

from ravan_flwr.client.answers import make_reply
from ravan_flwr.client.client_request import ClientRequest, run_hash
from ravan_flwr.client.on_device import is_on_a_device
from ravan_flwr.config.node_config import epsilon_limit
from ravan_flwr.extras.example_privacy.account import (
    OutOfBudgetError,
    check_account_is_kept,
    count_round,
)
from ravan_flwr.extras.example_privacy.steps import (
    check_examples_independent,
    sampling_rate,
    train_privately,
)

log = getLogger(__name__)


def check_client(client: ClientRequest) -> None:
    """Raise ValueError, before a round, if this device could not keep its examples private."""
    check_account_is_kept(client.node)
    check_examples_independent(client.loaded.model, client.loaded.task)


def train_within_budget(client: ClientRequest) -> RecordDict:
    """Account for private steps, then train by them; reply `refused` if out of privacy budget."""
    check_account_is_kept(client.node)
    message = client.content.config_records["config"]
    limited = replace(client.config, epsilon=epsilon_limit(client.node, client.config.epsilon))
    rate = sampling_rate(client.config.batch_size, len(client.trained_on))
    try:
        noise, recounted = count_round(
            client.context.state, run_hash(client.config, client.context.run_id), limited, rate,
            message, client.node.partition_id,
        )  # fmt: skip
    except OutOfBudgetError as error:
        log.info("this client trains no further: %s", error)
        refused = ConfigRecord({"round": client.round, "reason": str(error)})
        return RecordDict({"refused": refused})
    with client.hiding_reasons():
        loaded, work = client.loaded, client.work
        if is_on_a_device():
            # In a larger micro-batch the rounding of an example's gradient depends on other
            # examples, and a hostile state can amplify that. With batches of one, no gradient
            # depends on another example, whatever the state.
            work = replace(work, settings=replace(work.settings, micro_batch_size=1))
        result = train_privately(loaded.model, loaded.task, work, noise)
        reply = make_reply(client, result)
    reply.metric_records["metrics"]["recounted"] = int(recounted)
    return reply
