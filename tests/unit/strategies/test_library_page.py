"""The examples of docs/library.md run unchanged."""

import re
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig
from transformers.utils import logging

from ravan_flwr import RavanConfig
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.strategies import RavanStrategy, collect_arrays, load_arrays
from tests import ROOT
from tests.own_models import make_bert
from tests.unit.strategies.test_client import Small
from tests.unit.strategies.test_client import train as some_steps

_, PAGE = (ROOT / "docs" / "library.md").read_text().split("## Strategies for a Flower app")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class Classifier(Small):
    """The small network, called as a classifier of transformers is by PEFT."""

    config = PretrainedConfig()

    def forward(self, input_ids, **_):  # type: ignore[override]
        return super().forward(input_ids)


def test_the_server_and_the_client_of_the_page_work_together(caplog):
    server, client = BLOCKS[:2]

    def train_locally(model: nn.Module) -> int:
        some_steps(model)
        return 8

    def make_network() -> nn.Module:
        network = Classifier()
        network.query, network.value = nn.Linear(12, 32), nn.Linear(32, 12)
        return network

    names: dict[str, Any] = {"make_network": make_network, "train_locally": train_locally}
    exec(server, names)
    exec(client, names)
    context = Context(1, 0, {}, RecordDict(), {})

    class Grid(InProcessGrid):
        def _deliver(self, message):
            return names["client_app"](message, context)

    with caplog.at_level("INFO", "flwr"):
        names["server_app"](Grid({}, 3), context)
    assert caplog.text.count("aggregate_train: Received 3 results and 0 failures") == 3
    assert "rejected" not in caplog.text


def test_the_pages_model_is_loaded_once_and_its_head_is_sent(tmp_path, monkeypatch, capfd, caplog):
    """A head that is not sent would be another random one in each process."""
    (config,) = re.findall(r"^config = .*", PAGE, re.MULTILINE)
    (block,) = (x for x in BLOCKS if "lru_cache" in x)
    make_bert(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    names: dict[str, Any] = {"get_peft_model": get_peft_model, "RavanConfig": RavanConfig}
    level = logging.get_verbosity()
    try:
        exec(f"{config}\n{block}", names)
        model = names["load_model"]()
        assert names["load_model"]() is model
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
    assert "".join(capfd.readouterr()) == caplog.text == ""
    assert any("classifier" in name for name in get_peft_model_state_dict(model))


def test_the_pages_run_saves_stops_early_and_resumes(tmp_path, monkeypatch):
    """Three rounds, of which the third is not needed; then the rounds after the seventh."""
    (config,) = re.findall(r"^config = .*", PAGE, re.MULTILINE)
    run_, resume = (next(x for x in BLOCKS if part in x) for part in ("class Enough", "def resume"))
    monkeypatch.chdir(tmp_path)
    accuracy = iter([0.5, 0.95, 0.5, 0.6, 0.7])

    def make_network() -> nn.Module:
        torch.manual_seed(0)
        network = Classifier()
        network.query, network.value = nn.Linear(12, 32), nn.Linear(32, 12)
        return network

    names: dict[str, Any] = {
        "get_peft_model": get_peft_model, "RavanConfig": RavanConfig, "make_network": make_network,
        "RavanStrategy": RavanStrategy, "ArrayRecord": ArrayRecord,
        "get_peft_model_state_dict": get_peft_model_state_dict,
        "measure": lambda model: next(accuracy),
    }  # fmt: skip
    exec(f"{config}\n{run_}\n{resume}", names)
    asked: list[int] = []

    class Grid(InProcessGrid):
        def _deliver(self, message):
            config = message.content["config"]
            asked.append(config["server-round"] + config.get("rounds-before", 0))
            model = get_peft_model(make_network(), names["config"])
            load_arrays(model, message.content["arrays"])
            some_steps(model)
            metrics = MetricRecord({"num-examples": 1})
            content = RecordDict({"arrays": collect_arrays(model), "metrics": metrics})
            return Message(content, reply_to=message)

    model = get_peft_model(make_network(), names["config"])
    arrays = ArrayRecord(get_peft_model_state_dict(model))
    names["run"](Grid({}, 2), arrays, model, 3)
    assert asked == [1, 1, 2, 2]
    saved = tmp_path / "adapters"
    assert sorted(path.name for path in saved.iterdir()) == ["round-1", "round-2"]
    (saved / "round-2").rename(saved / "round-7")
    asked.clear()
    names["resume"](Grid({}, 2))
    assert asked == [8, 8, 9, 9, 10, 10]
    first, last = (load_file(saved / f"round-{n}" / "adapter_model.safetensors") for n in (7, 3))
    assert first.keys() == last.keys()
    assert any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")  # no GPU here
def test_the_pages_training_loop_answers_a_message_with_a_trained_adapter(tmp_path, monkeypatch):
    """A round is the 20 steps that the page says; every H, zero at first, has moved."""
    (block,) = (x for x in BLOCKS if "federated(make_trainer)" in x)
    (config,) = re.findall(r"^config = .*", PAGE, re.MULTILINE)
    make_bert(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    # The pretend accelerator of another test, if this process ran it, pins no memory.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)

    def make_network() -> Any:
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_pretrained("model", num_labels=2)

    asked: list[int] = []

    def load_examples(partition: int) -> list[dict[str, Any]]:
        asked.append(partition)
        return [{"input_ids": torch.tensor([n, 1]), "labels": n % 2} for n in range(8)]

    names: dict[str, Any] = {
        "get_peft_model": get_peft_model, "RavanConfig": RavanConfig, "make_network": make_network,
        "load_examples": load_examples,
    }  # fmt: skip
    exec(f"{config}\n{block}", names)
    start = get_peft_model_state_dict(get_peft_model(make_network(), names["config"]))
    content = RecordDict(
        {"arrays": ArrayRecord(start), "config": ConfigRecord({"server-round": 1})}
    )
    context = Context(1, 0, {"partition-id": 2, "num-partitions": 3}, RecordDict(), {})
    reply = names["app"](Message(content, 0, "train"), context)
    assert asked == [2]
    assert reply.content.metric_records["metrics"]["steps"] == 20
    arrays = reply.content.array_records["arrays"].to_torch_state_dict()
    heads = [tensor for name, tensor in arrays.items() if name.endswith("ravan_H")]
    assert heads
    assert all(tensor.abs().sum() > 0 for tensor in heads)
