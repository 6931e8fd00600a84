"""The example of the documentation runs as a program."""

import re

import pytest

from tests import ROOT


@pytest.mark.slow
def test_the_example_runs(tmp_path, python):
    script = ROOT / "examples" / "compare_methods.py"
    words = [str(tmp_path), "num-rounds=2", "local-steps=2", "num-clients=4", "report=false"]
    ended = python.run([str(script), *words])
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "report" / "index.html").is_file()
    assert (tmp_path / "spectra" / "spectrum.csv").is_file()
    assert (tmp_path / "model" / "config.json").is_file()
    # The model from the run's directory has the run's final accuracy.
    final = re.findall(r"'accuracy': ([\d.]+)", ended.stdout)
    assert float(final[0]) == pytest.approx(float(final[2]))
