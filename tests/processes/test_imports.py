"""Modules that load no library that they can do without: each import costs seconds."""

import json
import subprocess
import sys

import pytest

from tests import ROOT


def test_without_a_gpu_the_command_imports_no_torch(tmp_path):
    script = (
        "import sys; from ravan_flwr.launch import sharing, start; "
        "begin = start.read_start({}); sharing.share_gpus(begin.config, begin.num_clients); "
        "assert 'torch' not in sys.modules and 'flwr' not in sys.modules"
    )
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_phases_of_a_secure_round_without_training_import_no_torch():
    """Each of the four is a process of its own on a device."""
    code = (
        "import sys, ravan_flwr.client_app, ravan_flwr.client.secure_part\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'datasets')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


IMPORTS = """
import json, sys
import ravan_flwr.client.answers
print(json.dumps(list(sys.modules)))
import ravan_flwr.launch.in_process
print(json.dumps(list(sys.modules)))
"""


@pytest.fixture(scope="module")
def imported():
    """What a new process has imported for a client's answers, and then for a whole run as well."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True
    )
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_device_imports_nothing_that_draws(imported):
    """A SuperNode starts a process for every message: each second of imports counts there."""
    assert "torch" in imported[0]
    assert not {"flwr_datasets", "seaborn", "matplotlib", "ray"} & imported[0]


def test_a_run_in_process_imports_no_database_and_nothing_that_draws_before_it_needs_them(imported):
    """Flower's own grid brings the SuperLink's database; the report draws at the end."""
    assert not {"sqlalchemy", "alembic", "matplotlib"} & imported[1]


def test_help_is_quick_because_it_loads_no_torch():
    code = (
        "import sys; from ravan_flwr.cli import main\n"
        "try: main(['simulate', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'flwr', 'transformers', 'datasets')))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "learning-rate=auto" in ended.stdout
