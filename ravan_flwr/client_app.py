"""Define Flower's ClientApp: it dispatches each message, and imports nothing heavy before.

Flower's deployment runtime starts a process for every message, which loads this module first. The
module asks the node's warm worker. It imports torch if the node has none.

    query      the node's description: its data, budget fraction and software
    train      a round of local steps from the server's broadcast
    calibrate  the method's calibration on this node's data, before the first round
    evaluate   the global model's metrics on this node's validation split
    deliver    the run's result, to be kept in a folder of this node
    keys       fresh keys for a secure round, signed
    shares     a check of a secure round's clients, and shares of this node's secrets for them
    masked     as `train`, with a masked upload
    agree      this node's signature of the list of clients that sent masked numbers
    unmask     the shares by which the sum is unmasked, revealed once
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
