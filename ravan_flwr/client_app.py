"""Serve as Flower's ClientApp: hand each message to who answers it; import nothing heavy before.

Flower's deployment runtime starts a process for every message. This module is what such a
process loads first: it asks the warm worker, if the node has one, and imports torch if not.
"""

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ravan_flwr.client.replay_guard import answer_once, enforce_run_scope
from ravan_flwr.config.node_config import read_node, use_cache
from ravan_flwr.importing import importing
from ravan_flwr.secure import LIGHT

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say who this node is, what it has, and what it can afford."""
    return _answer("query", message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take a round of local steps from the server's broadcast."""
    return _answer("train", message, context)


@app.train("calibrate")
def calibrate(message: Message, context: Context) -> Message:
    """Compute what the method needs of this node's data before the first round."""
    return _answer("calibrate", message, context)


@app.train("keys")
def keys(message: Message, context: Context) -> Message:
    """Make fresh keys for a secure round, and sign them."""
    return _answer("keys", message, context)


@app.train("shares")
def shares(message: Message, context: Context) -> Message:
    """Check who takes part in a secure round, and share this node's secrets with them."""
    return _answer("shares", message, context)


@app.train("masked")
def masked(message: Message, context: Context) -> Message:
    """Train as `train` does, and mask what is sent."""
    return _answer("masked", message, context)


@app.train("agree")
def agree(message: Message, context: Context) -> Message:
    """Sign who has sent masked numbers."""
    return _answer("agree", message, context)


@app.train("unmask")
def unmask(message: Message, context: Context) -> Message:
    """Tell the shares by which the sum is unmasked, once."""
    return _answer("unmask", message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the global model on the examples that this node holds back."""
    return _answer("evaluate", message, context)


@app.query("deliver")
def deliver(message: Message, context: Context) -> Message:
    """Keep the run's result in a folder of this node."""
    return _answer("deliver", message, context)


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
