"""Define Flower's ClientApp: it dispatches each message, and imports nothing heavy before.

Flower's deployment runtime starts a process for every message, which loads this module first. The
module asks the node's warm worker. It imports torch if the node has none.

    query      the node's description: its data, budget fraction and software; or its partition, and
               why it cannot take part
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
from logging import getLogger

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ravan_flwr.client.on_device import is_on_a_device
from ravan_flwr.client.replay_guard import answer_once, enforce_run_scope
from ravan_flwr.config.node_config import Node, read_node, use_cache
from ravan_flwr.importing import importing
from ravan_flwr.optional import ANSWER_PHASE, PHASES, PHASES_WITHOUT_TORCH, load

app = ClientApp()
log = getLogger(__name__)


def _answer(message_type: str, message: Message, context: Context) -> Message:
    """Return the reply to a message.

    A query that fails is answered with partition and reason, so that the server can name the client
    that it does without.
    """
    enforce_run_scope(message, context)
    node = read_node(context.node_config)
    content = message.content if message.has_content() else RecordDict()
    try:
        reply = _dispatch(message_type, content, context, node)
    except Exception as error:
        if message_type != "query":
            raise
        if is_on_a_device():  # elsewhere the server's log has it
            log.exception("this device cannot take part")
        sentence = isinstance(error, ValueError | RuntimeError)
        reason = str(error) if sentence else f"{type(error).__name__}: {error}"
        refused = ConfigRecord({"partition-id": node.partition_id, "reason": reason})
        reply = RecordDict({"refused": refused})
    return Message(reply, reply_to=message)


def _dispatch(message_type: str, content: RecordDict, context: Context, node: Node) -> RecordDict:
    answer_once(message_type, content, context, node.partition_id)
    if message_type in PHASES_WITHOUT_TORCH:
        reply: RecordDict = load(ANSWER_PHASE)(message_type, content, context, node)
        return reply
    if node.warm_worker:
        from ravan_flwr.client import warm_worker  # noqa: PLC0415 (POSIX alone has what it needs)

        return warm_worker.ask(message_type, content, context)
    use_cache(node.cache_dir)
    with importing():
        from ravan_flwr.client import answers  # noqa: PLC0415
    return answers.answer(message_type, content, context)


app.query()(partial(_answer, "query"))
app.train()(partial(_answer, "train"))
app.evaluate()(partial(_answer, "evaluate"))
app.query("deliver")(partial(_answer, "deliver"))
for _action in ("calibrate", *PHASES):
    app.train(_action)(partial(_answer, _action))
