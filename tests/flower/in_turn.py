"""Run an app several times, one run after the other, in one of Flower's simulations.

Ray and its actors start once, instead of once a run. The apps are unchanged; wrappers give each run
its settings: each message to the clients carries a run config.

    python -m tests.flower.in_turn PACKAGE NODES RUN-CONFIGS-AS-JSON
"""

import importlib
import json
import sys
from typing import Any, cast

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

SETTINGS = "run-config"
BEGINS = "THE NEXT RUN BEGINS"  # a line in stderr before each run


class _WithSettings:
    """Flower's Grid, whose messages carry the settings of a run."""

    def __init__(self, grid, settings):
        self._grid, self._settings = grid, settings

    def __getattr__(self, name):
        return getattr(self._grid, name)

    def _marked(self, messages):
        messages = list(messages)
        for message in messages:
            message.content[SETTINGS] = ConfigRecord(self._settings)
        return messages

    def push_messages(self, messages):
        return self._grid.push_messages(self._marked(messages))

    def send_and_receive(self, messages, **options):
        return self._grid.send_and_receive(self._marked(messages), **options)


def main(package, nodes, configs):
    """Run the ServerApp and the ClientApp of a package with each run config."""
    clients, server = ClientApp(), ServerApp()

    def answer(message, context):
        """Call the ClientApp with the run config that the message carries."""
        settings = dict(message.content.config_records.pop(SETTINGS))
        if dict(context.state.config_records.get(SETTINGS, {})) != settings:
            context.state.clear()  # each run of Flower begins with an empty state
            context.state[SETTINGS] = ConfigRecord(settings)
        run_context = Context(
            context.run_id, context.node_id, context.node_config, context.state, settings
        )
        return importlib.import_module(f"{package}.client_app").app(message, run_context)

    for kind in (clients.query(), clients.train(), clients.train("calibrate"), clients.evaluate()):
        kind(answer)

    @server.main()
    def _run_all(grid, context):
        app = importlib.import_module(f"{package}.server_app").app
        for config in configs:
            sys.stderr.write(f"{BEGINS}\n")
            run = Context(
                context.run_id, context.node_id, context.node_config, RecordDict(), config
            )
            app(cast(Grid, _WithSettings(grid, config)), run)

    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 1},
    }
    run_simulation(server, clients, nodes, backend_config=backend)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
