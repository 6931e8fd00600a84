"""Make a SuperNode send each reply a second time, under another id.

As in faulty_client.py: a node with `write`'s folder in PYTHONPATH runs this module at its start.
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
    """Write a folder whose `sitecustomize` installs the change."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_CUSTOMIZE)


def install() -> None:
    """Replace this SuperNode's function for sending replies."""
    push = supernode._push_messages

    def push_twice(send: Callable[..., Any], **options: Any) -> None:
        def send_twice(message: Message, tree: Any, seconds: float) -> Any:
            result = send(message, tree, seconds)
            metadata = message.metadata.__dict__
            own_id, second_id = metadata["_message_id"], "0" * 64
            try:
                metadata["_message_id"] = tree.object_id = second_id
                send(message, tree, seconds)
            finally:
                metadata["_message_id"] = tree.object_id = own_id
            return result

        push(send=send_twice, **options)

    supernode._push_messages = push_twice  # type: ignore[assignment]
