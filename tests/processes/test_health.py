"""The health check of a container says in a line what is wrong."""

import os
import subprocess
import sys

import pytest

from tests import ROOT


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"HEALTH_URL": "http://127.0.0.1:9/health"}, "http://127.0.0.1:9/health: "),
        ({"HEALTH_URL": "https://nowhere.invalid/health"}, "https://nowhere.invalid/health: "),
        ({"HEALTH_URL": "nonsense"}, "nonsense: "),
        ({"HEALTH_CA": "/nowhere/ca.crt"}, "HEALTH_CA=/nowhere/ca.crt: "),
    ],
)
def test_a_server_that_does_not_answer_is_told_in_a_line(setting, told):
    ended = subprocess.run(
        [sys.executable, ROOT / "deploy" / "health.py"],
        env=os.environ | setting, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.startswith(told)
    assert ended.stderr.count("\n") == 1
