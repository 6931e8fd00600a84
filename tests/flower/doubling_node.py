"""Let a SuperNode send each reply a second time, under another id.

As faulty_client.py: a node whose PYTHONPATH has `write`'s folder runs this module when it starts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.supernode import start_client_internal as supernode

_CUSTOMIZE = """
import sys
if any("flower-supernode" in word for word in sys.orig_argv):
    from tests.flower import doubling_node
    doubling_node.install()
"""


def write(folder: Path) -> None:
    """Make the folder."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_CUSTOMIZE)


def install() -> None:
    """Change what this SuperNode sends."""
    push = supernode._push_messages

    def push_twice(send: Callable[..., Any], **others: Any) -> None:
        def send_twice(message: Message, tree: Any, seconds: float) -> Any:
            told = send(message, tree, seconds)
            metadata = message.metadata.__dict__
            before, other = metadata["_message_id"], "0" * 64
            try:
                metadata["_message_id"] = tree.object_id = other
                send(message, tree, seconds)
            finally:
                metadata["_message_id"] = tree.object_id = before
            return told

        push(send=send_twice, **others)

    supernode._push_messages = push_twice  # type: ignore[assignment]
