"""Reading a node config imports little, and sets the cache."""

import os
import subprocess
import sys


def test_the_nodes_cache_folder_is_used(tmp_path, python_without_hub):
    program = (
        "from ravan_flwr.config.node_config import use_cache; use_cache({!r});"
        "import datasets, huggingface_hub;"
        "print(huggingface_hub.constants.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE)"
    )
    folder = tmp_path / "cache"
    done = python_without_hub.run(
        ["-c", program.format(str(folder))],
        environment=os.environ | {"HF_HUB_CACHE": "/elsewhere"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(folder / "hub"), str(folder / "datasets")]


def test_a_node_config_is_read_without_a_preset():
    """It is read for every message, so its imports must be few."""
    program = (
        "import sys; from ravan_flwr.config.node_config import read_node;"
        "read_node({'partition-id': 0, 'num-partitions': 2, 'device': 'cuda:1'});"
        "print([name for name in ('yaml', 'torch', 'flwr') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
