"""Serve as Flower's ClientApp: hand each message to who answers it; import nothing heavy before.

Flower's deployment runtime starts a process for every message. This module is what such a
process loads first: it asks the warm worker, if the node has one, and imports torch if not.

    query      who this node is, what it has, and what it can afford
    train      a round of local steps from the server's broadcast
    calibrate  what the method needs of this node's data before the first round
    evaluate   the global model's metrics on the examples that this node holds back
    deliver    the run's result, to be kept in a folder of this node
    keys       fresh keys for a secure round, signed
    shares     a check of who takes part in a secure round, and this node's secrets shared with them
    masked     as `train`, and what is sent is masked
    agree      this node's signature of who has sent masked numbers
    unmask     the shares by which the sum is unmasked, told once
"""

from functools import partial

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ravan_flwr.client.replay_guard import answer_once, enforce_run_scope
from ravan_flwr.config.node_config import read_node, use_cache
from ravan_flwr.importing import importing
from ravan_flwr.secure import LIGHT, PHASES

app = ClientApp()


def _answer(kind: str, message: Message, context: Context) -> Message:
    enforce_run_scope(message, context)
    node = read_node(context.node_config)
    content = message.content if message.has_content() else RecordDict()
    answer_once(kind, content, context, node.partition_id)
    if kind in LIGHT:
        from ravan_flwr.client.secure_part import answer_phase  # noqa: PLC0415

        return Message(answer_phase(kind, content, context, node), reply_to=message)
    if node.warm_worker:
        from ravan_flwr.client import worker  # noqa: PLC0415 (POSIX alone has what it needs)

        return Message(worker.ask(kind, content, context), reply_to=message)
    use_cache(node.cache_dir)
    with importing():
        from ravan_flwr.client import answers  # noqa: PLC0415
    return Message(answers.answer(kind, content, context), reply_to=message)


app.query()(partial(_answer, "query"))
app.train()(partial(_answer, "train"))
app.evaluate()(partial(_answer, "evaluate"))
app.query("deliver")(partial(_answer, "deliver"))
for _kind in ("calibrate", *PHASES):
    app.train(_kind)(partial(_answer, _kind))
