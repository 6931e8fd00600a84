"""Make a SuperNode send each reply a second time, under another id.

A node runs `INSTALL` at its start (at_start.py).
"""

from collections.abc import Callable
from typing import Any

from flwr.app import Message
from flwr.supernode import start_client_internal as supernode

INSTALL = "from tests.flower import doubling_node; doubling_node.install()"


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
