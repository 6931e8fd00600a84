"""The examples of docs/library.md run unchanged."""

import re
from typing import Any

from flwr.app import Context, RecordDict
from torch import nn

from ravan_flwr.launch.in_process_grid import InProcessGrid
from tests import ROOT
from tests.unit.strategies.test_client import Small
from tests.unit.strategies.test_client import train as some_steps


def test_the_server_and_the_client_of_the_page_work_together(caplog):
    _, page = (ROOT / "docs" / "library.md").read_text().split("## Strategies for a Flower app")
    server, client = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]

    def train_locally(model: nn.Module) -> int:
        some_steps(model)
        return 8

    def make_network() -> nn.Module:
        network = Small()
        network.query, network.value = nn.Linear(12, 32), nn.Linear(32, 12)
        return network

    names: dict[str, Any] = {"make_network": make_network, "train_locally": train_locally}
    exec(server, names)
    exec(client, names)
    context = Context(1, 0, {}, RecordDict(), {})

    class Grid(InProcessGrid):
        def _deliver(self, message):
            return names["client_app"](message, context)

    with caplog.at_level("INFO", "flwr"):
        names["server_app"](Grid({}, 3), context)
    assert caplog.text.count("aggregate_train: Received 3 results and 0 failures") == 3
    assert "rejected" not in caplog.text
