"""Run several methods one after the other in one of Flower's simulations.

Ray and its actors start once, instead of once a run. The apps are ours; what stands around them
gives each run its settings: a run config travels with each message to the clients.

    python -m tests.flower.methods_in_turn FOLDER METHOD,METHOD,... SETTINGS-AS-JSON
"""

import json
import sys
from typing import Any, cast

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from ravan_flwr import client_app, server_app
from ravan_flwr.config.keys import KEYS

SETTINGS = "run-config"
NODES = 3

clients = ClientApp()


def _answer(message, context):
    """Answer as our ClientApp does in a run with the settings that came with the message."""
    settings = dict(message.content.config_records.pop(SETTINGS))
    own = Context(context.run_id, context.node_id, context.node_config, context.state, settings)
    return client_app.app(message, own)


clients.query()(_answer)
clients.train()(_answer)
clients.train("calibrate")(_answer)
clients.evaluate()(_answer)


class _WithSettings:
    """Flower's Grid, whose messages carry the settings of a run."""

    def __init__(self, grid, settings):
        self._grid, self._settings = grid, settings

    def __getattr__(self, name):
        return getattr(self._grid, name)

    def push_messages(self, messages):
        for message in messages:
            message.content[SETTINGS] = ConfigRecord(self._settings)
        return self._grid.push_messages(messages)


def main(folder, methods, settings):
    """Run each method; its run directory then lies in FOLDER/METHOD."""
    server = ServerApp()
    defaults = {key: spec.default for key, spec in KEYS.items()} | settings

    @server.main()
    def _run_all(grid, context):
        for method in methods:
            own = defaults | {"method": method, "output-dir": f"{folder}/{method}"}
            state = RecordDict()
            run = Context(context.run_id, context.node_id, context.node_config, state, own)
            server_app.app(cast(Grid, _WithSettings(grid, own)), run)

    one_actor: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 1},
    }
    run_simulation(server, clients, NODES, backend_config=one_actor)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), json.loads(sys.argv[3]))
