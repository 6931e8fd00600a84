"""Answer the server's messages: query, training, calibration, evaluation, delivery of the result.

Each function turns records into records, in any process. `training/` does the computation.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import flwr
import torch
import transformers
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict

from ravan_flwr.client.client_request import ClientRequest, find_personal, store_personal
from ravan_flwr.messages.arrays import to_record
from ravan_flwr.messages.changes import take_change
from ravan_flwr.messages.fingerprint import code_fingerprint
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.messages.sparsity import WHOLE, sparsify
from ravan_flwr.messages.wire import encode
from ravan_flwr.optional import (
    CHECK_KEYS,
    CHECK_PRIVATE,
    OPTIONAL_ANSWERS,
    TRAIN_PRIVATE,
    TRAINING_PHASE,
    load,
)
from ravan_flwr.training.device import free_memory
from ravan_flwr.training.local_steps import (
    ClientWork,
    LocalResult,
    calibrate_locally,
    sum_metrics,
    train_locally,
)
from ravan_flwr.training.model_and_data import ModelAndData, get_model_and_data
from ravan_flwr.training.step import TrainingSettings
from ravan_flwr.training.together import train_together


def answer(message_type: str, content: RecordDict, context: Context) -> RecordDict:
    """Answer a message: `query`, `train`, `masked`, `calibrate`, `evaluate` or `deliver`."""
    client = ClientRequest(content, context)
    # Refuse messages that a run of these settings does not send: they could ask for too much.
    allowed, setting = ["train", "calibrate", "evaluate"], "secure-aggregation = false"
    if client.config.secure_aggregation:
        setting, allowed = "secure-aggregation = true", [TRAINING_PHASE]
    elif client.config.privacy == "example":
        setting, allowed = "privacy = 'example'", ["train"]
    if message_type not in ("query", "deliver", *allowed):
        raise ValueError(
            f"{setting}: got a message that asks to {message_type!r}, expected "
            f"{' or '.join(allowed)}; the server does not follow the run's settings"
        )
    answer_to = _ANSWERS.get(message_type) or load(OPTIONAL_ANSWERS[message_type])
    reply: RecordDict = answer_to(client)
    return reply


def forget() -> None:
    """Drop the cached model and examples: the next message reads them again."""
    get_model_and_data.cache_clear()


def _query(client: ClientRequest) -> RecordDict:
    loaded, node = client.loaded, client.node
    # Raise errors of the setup here, before a round.
    if client.config.secure_aggregation:
        load(CHECK_KEYS)(node)
    if client.config.privacy == "example":
        load(CHECK_PRIVATE)(client)
    # Before the examples are loaded: budget = auto depends on free memory, and they take some.
    fraction = client.budget_fraction
    registered = RegisteredClient(
        node_id=client.context.node_id,
        partition_id=node.partition_id,
        num_partitions=node.num_partitions,
        own_data=node.data_path is not None,
        examples=len(client.examples.train),
        budget_fraction=fraction,
        device=str(loaded.model.device),
        # With privacy=example the server must not learn how much memory the examples take.
        free_memory=0 if client.config.privacy == "example" else free_memory(loaded.model.device),
        versions=f"flwr {flwr.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        code=code_fingerprint(),
        backbone=loaded.backbone_fingerprint,
        fingerprint=tuple(loaded.model.seed_fingerprint),
        keeps_result=node.result_path is not None,
    )
    return RecordDict({"client": ConfigRecord(registered.as_config())})


def train_ahead(
    jobs: Sequence[tuple[RecordDict, Context]], earlier: Sequence[RecordDict] = ()
) -> None:
    """Train the clients of several `train` messages in one pass, before these are answered.

    The answer to each message then finds its result. Clients with other settings, such as another
    number of steps, have a pass of their own. A client that fits none trains when its message is
    answered, as if this function had not been called. Of results that wait, those of the messages
    `earlier` are kept.
    """
    loaded: ModelAndData | None = None
    by_settings = dict[TrainingSettings, list[tuple[RecordDict, ClientWork]]]()
    for content, context in jobs:
        with suppress(ValueError):  # raised again by the answer to the message
            client = ClientRequest(content, context)
            client.load_fixed_tensors()
            loaded, work = client.loaded, client.work
            by_settings.setdefault(work.settings, []).append((content, work))
    if loaded is None:
        return
    kept = {id(content) for content in earlier}
    loaded.trained_ahead = [pair for pair in loaded.trained_ahead if id(pair[0]) in kept]
    for clients in by_settings.values():
        if len(clients) > 1:
            results = train_together(loaded.model, loaded.task, [work for _, work in clients])
            loaded.trained_ahead += [
                (content, result)
                for (content, _), result in zip(clients, results, strict=True)
                if result is not None
            ]


def _train(client: ClientRequest) -> RecordDict:
    client.load_fixed_tensors()
    if client.config.privacy == "example":
        private: RecordDict = load(TRAIN_PRIVATE)(client)
        return private
    loaded = client.loaded
    for place, (content, ahead) in enumerate(loaded.trained_ahead):
        if content is client.content:
            del loaded.trained_ahead[place]
            return make_reply(client, ahead)
    work = client.work
    result = train_locally(loaded.model, loaded.task, work)
    reply = make_reply(client, result)
    if result.personal:
        store_personal(client.context.state, result.personal)
        reply.metric_records["metrics"]["began-anew"] = int(work.personal is None)
    return reply


def _calibrate(client: ClientRequest) -> RecordDict:
    loaded, work = client.loaded, client.work
    rate = client.config.calibration_learning_rate
    work = replace(work, settings=replace(work.settings, learning_rate=rate))
    return make_reply(client, calibrate_locally(loaded.model, loaded.task, work))


def make_reply(client: ClientRequest, result: LocalResult) -> RecordDict:
    """Return the reply to a training message: the encoded upload, and its metrics."""
    sparse = result.upload
    if client.sparsity != WHOLE:  # upload the largest changes, not the trained values
        method = client.loaded.model.method.in_round(client.round)
        change = take_change(method, result.upload, client.broadcast)
        sparse = sparsify(change, client.sparsity[1], change.keys())
    upload = encode(sparse, client.wire, client.client_round.generator("wire up"))
    values = client.upload_metrics
    if "seconds" in values:
        values["seconds"] += result.seconds
    if client.config.privacy == "none":
        values |= {"train-loss": result.train_loss, "num-examples": len(client.trained_on)}
        values |= {"skipped-steps": result.skipped} if result.skipped else {}
    metrics = MetricRecord(values)
    return RecordDict({"arrays": to_record(upload), "metrics": metrics})


def _evaluate(client: ClientRequest) -> RecordDict:
    loaded, examples = client.loaded, client.examples.validation
    if not len(examples):
        raise ValueError(
            f"partition {client.node.partition_id} has no validation part: got validation-share = "
            f"{client.config.validation_share}, expected above 0; set it"
        )
    client.load_fixed_tensors()
    personal = find_personal(client.context.state, loaded.model)
    with loaded.model.holding(client.broadcast, personal):
        size, precision = loaded.task.evaluation_batch, client.config.precision
        sums = sum_metrics(loaded.model, loaded.task, examples, size, precision)
    measures = loaded.task.measures
    means, unit = measures.means(sums, len(examples)), measures.unit
    reported: dict[str, float] = {name: means[name] for name in measures.names}
    reported |= {f"num-{unit}": sums[unit]} if unit in sums else {}
    metrics = MetricRecord({"round": client.round, "num-examples": len(examples), **reported})
    return RecordDict({"metrics": metrics})


_ANSWERS: dict[str, Callable[[ClientRequest], RecordDict]] = {
    "query": _query,
    "train": _train,
    "calibrate": _calibrate,
    "evaluate": _evaluate,
}
