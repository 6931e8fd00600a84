"""Tests of Flower's runtime and of deployments."""

from pathlib import Path

import pytest

NEEDS_PROC = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes in /proc"
)
