"""The cache that a node config names is that of the whole process."""

import os
import subprocess
import sys


def test_the_cache_is_the_nodes(tmp_path):
    program = (
        "from ravan_flwr.config.node_config import use_cache; use_cache({!r});"
        "import datasets, huggingface_hub;"
        "print(huggingface_hub.constants.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE)"
    )
    folder = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-c", program.format(str(folder))],
        env=os.environ | {"HF_HUB_CACHE": "/elsewhere"}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(folder / "hub"), str(folder / "datasets")]
