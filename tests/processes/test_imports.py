"""Modules import no library that they do not need: each import takes seconds."""

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


@pytest.mark.slow
def test_phases_of_a_secure_round_without_training_import_no_torch():
    """Each of the four phases is a separate process on a device."""
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
    """Return a new process's modules: for a client's replies, and then for a run in process."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True
    )
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_device_imports_no_plotting_library(imported):
    """A SuperNode starts a process for every message, so imports delay each reply."""
    assert "torch" in imported[0]
    assert not {"flwr_datasets", "seaborn", "matplotlib", "ray"} & imported[0]


def test_a_run_in_process_imports_database_and_plotting_libraries_only_when_needed(imported):
    """Flower's own grid imports the SuperLink's database; the report draws charts at the end."""
    assert not {"sqlalchemy", "alembic", "matplotlib"} & imported[1]


def test_help_imports_no_torch():
    code = (
        "import sys; from ravan_flwr.cli import main\n"
        "try: main(['simulate', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'flwr', 'transformers', 'datasets')))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "learning-rate=auto" in ended.stdout
