"""`docs/add-a-method.md` works as it stands: a file, a row, and the method is there."""

import json
import os
import re
import shutil

from tests import ROOT


def test_the_example_is_a_file_and_a_row(python, tmp_path):
    def run(*words):
        # A law that is tried a few times is enough to see that it is tried.
        ended = python.run(["-m", *words], folder=tmp_path, environment=os.environ | {"CI": ""})
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended

    for name in ("ravan_flwr", "conf", "tests", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    text = (ROOT / "docs" / "add-a-method.md").read_text()
    method, row = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(method.splitlines()) < 60
    (tmp_path / "ravan_flwr/methods/lora_xs.py").write_text(method)
    listing = tmp_path / "ravan_flwr/methods/__init__.py"
    listing.write_text(listing.read_text().replace("METHODS = {\n", "METHODS = {\n" + row))

    laws = run("pytest", "tests/properties/test_methods.py", "-k", "lora-xs")
    assert int(re.findall(r"(\d+) passed", laws.stdout)[0]) > 20

    settings = ["method=lora-xs", "learning-rate=1e-2", "classifier=frozen", "num-clients=3"]
    plan = run("ravan_flwr", "plan", *settings).stdout
    assert "trained         5,832 parameters" in plan
    short = ["num-rounds=2", "local-steps=10", "output-dir=out"]
    run("ravan_flwr", "simulate", *settings, *short)
    (directory,) = (tmp_path / "out").iterdir()
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["method"], summary["adapter-parameters"]) == ("lora-xs", 8 * 27**2)
    first, last = map(json.loads, (directory / "rounds.jsonl").read_text().splitlines())
    assert last["train-loss"] < first["train-loss"]
