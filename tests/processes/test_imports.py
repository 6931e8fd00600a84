"""Modules import no library that they do not need: each import takes seconds."""

import json
import subprocess
import sys

import pytest

from tests import ROOT

HEAVY = {"torch", "transformers", "datasets"}
# What a process does -> the libraries that it must not import.
IMPORTS = {
    "import ravan_flwr.cli": {"pydantic", "yaml", "numpy"},  # whose --help checks nothing
    # Flower's own grid imports the SuperLink's database; the report draws charts at the end. And a
    # SuperNode starts a process for every message, so imports delay each reply.
    "import ravan_flwr.client.answers, ravan_flwr.launch.in_process": {
        "flwr_datasets", "seaborn", "matplotlib", "ray", "sqlalchemy", "alembic",
    },
    "from ravan_flwr.cli import main\n"
    "try: main(['simulate', '--help'])\n"
    "except SystemExit: pass": HEAVY | {"flwr"},
    # Without a GPU, as there is no program at all.
    "from ravan_flwr.launch import sharing, start\n"
    "begin = start.read_start({})\n"
    "sharing.share_gpus(begin.config, begin.num_clients)": {"torch", "flwr"},
    # It is read for every message.
    "from ravan_flwr.config.node_config import read_node\n"
    "read_node({'partition-id': 0, 'num-partitions': 2, 'device': 'cuda:1'})":
        {"yaml", "torch", "flwr"},
    # Each phase of a secure round without training is a separate process on a device.
    "import ravan_flwr.client_app, ravan_flwr.extras.secure.phases": HEAVY,
    "import ravan_flwr.client_app, ravan_flwr.client.warm_worker": HEAVY,  # where a worker answers
}  # fmt: skip


@pytest.mark.slow(kept=5)
@pytest.mark.parametrize("code", IMPORTS)
def test_a_process_imports_no_library_that_it_does_not_need(code, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps([*sys.modules]))"],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    modules = set(json.loads(ended.stdout.splitlines()[-1]))
    assert "ravan_flwr" in modules
    assert not IMPORTS[code] & modules
