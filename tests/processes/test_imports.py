"""Modules that load no library that they can do without: each import costs seconds."""

import subprocess
import sys

from tests import ROOT


def test_without_a_gpu_the_command_imports_no_torch(tmp_path):
    script = (
        "import sys; from ravan_flwr.launch.sharing import share_gpus; share_gpus({}, 20); "
        "assert 'torch' not in sys.modules and 'flwr' not in sys.modules"
    )
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_a_device_imports_nothing_that_draws():
    """A SuperNode starts a process for every message: each second of imports counts there."""
    code = (
        "import sys, ravan_flwr.client.answers; "
        "print([n for n in ('flwr_datasets', 'seaborn', 'matplotlib', 'ray') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


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


def test_a_run_in_process_imports_no_database_and_nothing_that_draws_before_it_needs_them():
    """Flower's own grid brings the SuperLink's database; the report draws at the end."""
    code = (
        "import sys, ravan_flwr.launch.in_process; "
        "print([n for n in ('sqlalchemy', 'alembic', 'matplotlib') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
