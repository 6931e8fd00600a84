"""Collect the parts of Flower that are used beyond flwr.app, flwr.clientapp and flwr.serverapp.

Any release of Flower may move or change them. tests/unit/test_flower_private.py has a test for each
part, and `make compat` runs it with the oldest and the newest Flower.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import InflatableObject
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, inflate_object_from_contents
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity

__all__ = [
    "NodeInfo", "ObjectPushError", "Run", "RunNotRunningException", "TaskIdentity", "TaskType",
    "check_before_inflating", "find_retry_invoker", "flower_home", "parse_node_config",
    "set_message_id",
]  # fmt: skip


def check_before_inflating(check: Callable[[dict[str, bytes]], None]) -> None:
    """Make Flower's grid call `check` on every reply's objects before it inflates them.

    The grid's module takes half a second to import, and a run in process does not need it.
    """
    from flwr.superlink.grid import http_grid  # noqa: PLC0415

    def checked(object_id: str, contents: dict[str, bytes], **options: Any) -> InflatableObject:
        check(contents)
        return inflate_object_from_contents(object_id, contents, **options)

    http_grid.inflate_object_from_contents = checked  # type: ignore[assignment, attr-defined]


def flower_home() -> Path:
    """Return Flower's folder, by a module that takes a quarter of a second to import."""
    from flwr.supercore.utils import get_flwr_home  # noqa: PLC0415

    return get_flwr_home()


def find_retry_invoker(grid: object) -> Any:
    """Return the retry invoker of Flower's grid over HTTP; None for other grids."""
    return getattr(grid, "_retry_invoker", None)


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message its id, as Flower's own grids do."""
    message.metadata.__dict__["_message_id"] = message_id


def parse_node_config(text: str) -> dict[str, Any]:
    """Return a node config, read as by `flower-supernode --node-config`, or raise ValueError."""
    from click import ClickException  # noqa: PLC0415
    from flwr.common.config import parse_config_args  # noqa: PLC0415

    try:
        return dict(parse_config_args([text]))
    except (ClickException, OSError) as error:  # it reads a text that ends with .toml as a file
        raise ValueError(
            f"node config: got {text!r}, expected KEY=VALUE pairs, with texts in quotation marks, "
            "such as 'partition-id=0 data-path=\"/srv/data\"'; write it so"
        ) from error
