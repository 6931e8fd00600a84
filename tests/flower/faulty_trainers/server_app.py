"""Run the example's rounds, and say at the end whose replies were rejected."""

import json
import sys

from flwr.serverapp import ServerApp
from own_trainer import server_app

from ravan_flwr.strategies import RavanStrategy

app = ServerApp()


@app.main()
def main(grid, context):
    """Run the example's ServerApp with a strategy that is kept."""
    strategies = []

    def make(**options):
        strategies.append(RavanStrategy(**options))
        return strategies[0]

    server_app.STRATEGIES["ravan"] = make
    server_app.app(grid, context)
    for number, reasons in strategies[0].rejected.items():
        sys.stderr.write(f"REJECTED {number} {json.dumps([*reasons.values()])}\n")
