"""The code of `docs/extending.md` works unchanged: a file and a row for each extension."""

import json
import os
import re
import shutil

import datasets
import numpy as np
import pyarrow.csv
import pytest
import torch
import yaml
from transformers import ASTConfig, ASTForAudioClassification

from tests import ROOT
from tests.support.tiny import save_model

pytestmark = pytest.mark.slow


@pytest.fixture
def run(python, tmp_path):
    for name in ("ravan_flwr", "conf", "tests", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)

    def run_module(*words):
        # Without CI, properties run with fewer examples.
        ended = python.run(["-m", *words], folder=tmp_path, environment=os.environ | {"CI": ""})
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended

    return run_module


def add_example(folder, subpackage, name, title, table):
    """Write the page's file under that title, and add its row to the table."""
    text = (ROOT / "docs" / "extending.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    file, row = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(file.splitlines()) < 60
    (folder / "ravan_flwr" / subpackage / f"{name}.py").write_text(file)
    table_file = folder / "ravan_flwr" / subpackage / "__init__.py"
    table_file.write_text(table_file.read_text().replace(f"{table} = {{\n", f"{table} = {{\n{row}"))


def simulate(run, folder, *settings):
    """Run a simulation; return its directory, records and summary."""
    run("ravan_flwr", "simulate", *settings, "num-clients=3", "output-dir=out")
    (directory,) = (folder / "out").iterdir()
    rounds = (directory / "rounds.jsonl").read_text().splitlines()
    summary = json.loads((directory / "summary.json").read_text())
    return directory, [json.loads(line) for line in rounds], summary


def test_the_pages_method_is_a_file_and_a_row(run, tmp_path):
    add_example(tmp_path, "methods", "lora_xs", "A method", "METHODS")
    ended = run("pytest", "tests/properties/test_methods.py", "-k", "lora-xs")
    assert int(re.findall(r"(\d+) passed", ended.stdout)[0]) > 20

    settings = ["method=lora-xs", "learning-rate=1e-2", "classifier=frozen"]
    assert "trained         5,832 parameters" in run("ravan_flwr", "plan", *settings).stdout
    short = ["num-rounds=2", "local-steps=10"]
    _, (first, last), summary = simulate(run, tmp_path, *settings, *short)
    assert (summary["method"], summary["adapter-parameters"]) == ("lora-xs", 8 * 27**2)
    assert last["train-loss"] < first["train-loss"]


def write_task(folder, task, columns, num_train, model=None, **more):
    """Write examples of a new task, and a preset; return settings."""
    (folder / "data").mkdir()
    examples = datasets.Dataset.from_dict(columns)
    examples.select(range(num_train)).to_parquet(folder / "data" / "train.parquet")
    rest = examples.select(range(num_train, len(examples)))
    rest.to_parquet(folder / "data" / "test.parquet")
    data = {"name": str(folder / "data"), "columns": {name: name for name in columns}}
    preset = {"task": task, "model": model or str(folder / "model"), "data": data, **more}
    (folder / "preset.yaml").write_text(yaml.safe_dump(preset))
    learning = ["learning-rate=1e-3", "method=full", "num-rounds=4", "local-steps=20"]
    return ["preset=preset.yaml", *learning]


def test_the_pages_task_is_a_file_and_a_row(run, tmp_path):
    add_example(tmp_path, "tasks", "audio", "A task", "TASKS")
    random = np.random.default_rng(0)
    labels = np.arange(120) % 2  # low and high sounds
    spectrograms = random.normal(size=(120, 16, 8)).astype("float32")
    spectrograms[labels == 1, :, 4:] += 2
    columns = {"spectrogram": spectrograms.tolist(), "label": [["low", "high"][n] for n in labels]}
    config = ASTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        patch_size=4, frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8,
    )  # fmt: skip
    torch.manual_seed(0)
    ASTForAudioClassification(config).save_pretrained(tmp_path / "model")
    model = {"name": str(tmp_path / "model"), "targets": "q_proj,v_proj"}
    settings = write_task(tmp_path, "audio", columns, 80, model)
    plan = run("ravan_flwr", "plan", *settings, "num-clients=3").stdout
    assert "a round         3 of 3 clients" in plan
    directory, _, summary = simulate(run, tmp_path, *settings)
    accuracy = summary["metrics"]["final"]["accuracy"]
    assert accuracy > 0.9
    predicted = ["--data", "data/test.parquet", "--output", "predicted.csv"]
    run("ravan_flwr", "predict", str(directory), *predicted)
    table = pyarrow.csv.read_csv(tmp_path / "predicted.csv").to_pydict()
    right = sum(a == b for a, b in zip(table["label"], columns["label"][80:], strict=True))
    assert right / 40 == pytest.approx(accuracy)


REGRESSION = """
import datasets
import numpy as np
import torch

from ravan_flwr.tasks import text
from ravan_flwr.tasks.base import Task, encoded_as_it_is, mapped


class Regression(Task):
    metric, classifies, outputs = "mean-absolute-error", False, 1
    auto_class, pipeline = "AutoModelForSequenceClassification", ""

    def load_reader(self, folder):
        return text.load_tokenizer(folder)

    def encode(self, examples):
        features = text.fixed_length(self.reader.model_input_names, self.max_length)
        features |= {"numbers": datasets.Value("float32")}

        def encoded(columns):
            inputs = text.tokenize(self.reader, self.max_length, columns["text"])
            return inputs | {"numbers": np.asarray(columns["number"], np.float32)}

        return encoded_as_it_is(mapped(examples, encoded, features, {"length": self.max_length}))

    def shapes(self, config, batch_size):
        length = self.max_length
        return {
            "input_ids": ((batch_size, length), torch.int64),
            "attention_mask": ((batch_size, 1, length, length), torch.bool),
            "numbers": ((batch_size,), torch.float32),
        }

    def apart(self, network, batch):
        inputs = {name: tensor for name, tensor in batch.items() if name != "numbers"}
        return network(**inputs).logits.float()[:, 0] - batch["numbers"]

    def loss(self, network, batch):
        return (self.apart(network, batch) ** 2).mean()

    def measure(self, network, batch, answers, tally=None):
        apart = self.apart(network, batch)
        return {"loss": float((apart**2).sum()), self.metric: float(apart.abs().sum())}


TASK = Regression
"""


def test_a_new_task_may_have_a_metric_that_is_better_when_lower(run, tmp_path):
    (tmp_path / "ravan_flwr/tasks/regression.py").write_text(REGRESSION)
    table_file = tmp_path / "ravan_flwr/tasks/__init__.py"
    row = '"regression": TaskInfo(("text", "number"), lower_is_better=("mean-absolute-error",)),'
    table_file.write_text(
        table_file.read_text().replace("TASKS = {\n", "TASKS = {\n    " + row + "\n")
    )
    save_model("bert", tmp_path / "model")
    numbers = np.random.default_rng(0).integers(0, 2, 90)
    words = [("good " * 5 if number else "bad " * 5) + str(n) for n, number in enumerate(numbers)]
    columns = {"text": words, "number": numbers.astype(float).tolist()}
    settings = write_task(tmp_path, "regression", columns, 60, run={"partition": "iid"})
    _, rounds, summary = simulate(run, tmp_path, *settings, "until-metric=0.3")
    errors = [record["metrics"]["mean-absolute-error"] for record in rounds]
    assert summary["metrics"]["best"]["mean-absolute-error"] == min(errors)
    # It stopped at the first value of at most 0.3.
    assert errors[-1] <= 0.3 < min(errors[:-1], default=1)
    assert summary["reached"] == len(errors)
