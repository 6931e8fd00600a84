"""A Trainer made federated trains to the numbers of the app's own client: same data, same seed.

The app runs in this process, and the batches that its clients train on are noted. A Trainer of
transformers then trains on them, with a model of PEFT, in Flower's own loop.
"""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict
from transformers import Trainer, ViTConfig, ViTForImageClassification

from ravan_flwr import RavanConfig, simulate, strategies
from ravan_flwr.strategies import RavanStrategy, federated
from ravan_flwr.training.bundled import bundled_file, read_backbone
from ravan_flwr.training.local_steps import TrainingLoop
from tests.unit.strategies.test_federated import Grid, arguments, train_only

NODES, STEPS, BATCH, RATE, SEED = 2, 3, 16, 3e-3, 5
TARGETS, SAVED = ["q_proj", "v_proj"], ["classifier"]
PARTS = {"ravan_H": "H", "lora_A": "A", "lora_B": "B"}
METHODS = {
    "ravan": (RavanStrategy, "uniform"),
    "fedit": (FedAvg, "full"),
    "ffa-lora": (strategies.FFALoraStrategy, "full"),
}


class App:
    """Note the batches of the app's clients, and its states: before the rounds, after the last."""

    def __init__(self, monkeypatch):
        self.batches: dict[tuple[int, ...], list[dict[str, torch.Tensor]]] = {}
        self.first: dict[str, torch.Tensor] = {}
        self.last: dict[str, torch.Tensor] = {}
        self.budgets: dict[Any, float] = {}
        start, read = TrainingLoop.__init__, TrainingLoop._next_micro_batches

        def noted_start(loop, model, task, work):
            start(loop, model, task, work)
            if not self.first:
                self.first = {name: t.clone() for name, t in model.initial_state().items()}
                if "B" in self.first:  # FFA-LoRA's A is in no state, since it is not trained
                    self.first["A"] = torch.cat([a.A.detach().flatten() for a in model.adapters])
            self.taken = self.batches.setdefault(tuple(work.client_round[1:]), [])

        def noted_read(loop):
            self.taken.extend(parts := read(loop))
            return parts

        monkeypatch.setattr(TrainingLoop, "__init__", noted_start)
        monkeypatch.setattr(TrainingLoop, "_next_micro_batches", noted_read)

    def on_round_end(self, record, state):
        self.last = {name: tensor.clone() for name, tensor in state.items()}
        self.budgets = {c["partition-id"]: c["budget-fraction"] for c in record["clients"]}


def make_model(config):
    network_config, weights = read_backbone(bundled_file("digits-vit"))
    network = ViTForImageClassification(ViTConfig(**network_config | {"num_labels": 10}))
    network.load_state_dict(weights, strict=False)
    return get_peft_model(network, config)


def by_name(state, like):
    """Cut the app's flat tensors into arrays with PEFT's names and shapes, in the order of both."""
    flat, arrays = {name: tensor.flatten() for name, tensor in state.items()}, {}
    for name, tensor in like.items():
        if not name.endswith("ravan_s"):  # the app's state has the products s H
            part = next((PARTS[end] for end in PARTS if end in name), "classifier")
            arrays[name] = flat[part][: tensor.numel()].view(tensor.shape)
            flat[part] = flat[part][tensor.numel() :]
    assert not any(map(len, flat.values()))
    return arrays


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_ends_with_the_apps_adapter(method, monkeypatch, tmp_path):
    app = App(monkeypatch)
    strategy, budgets = METHODS[method]
    simulate(
        {
            "preset": "digits-vit", "method": method, "seed": SEED, "num-rounds": 2,
            "clients-per-round": NODES, "local-steps": STEPS, "batch-size": BATCH,
            "learning-rate": RATE, "budgets": budgets, "output-dir": str(tmp_path),
            "tracking": "none", "processes": 1, "clients-per-pass": 1, "device": "cpu",
        },
        NODES,
        callbacks=[app],
    )  # fmt: skip
    common: dict[str, Any] = {"target_modules": TARGETS, "modules_to_save": SAVED}
    if method == "ravan":
        _, heads, rank, _ = app.first["H"].shape
        config: PeftConfig = RavanConfig(r=rank, num_heads=heads, base_seed=SEED, **common)
    else:
        rank = len(app.first["A"]) // (8 * 96)  # of eight layers, each (96, 96)
        config = LoraConfig(r=rank, lora_alpha=rank, **common)
    like = get_peft_model_state_dict(make_model(config))
    first, expected = by_name(app.first, like), by_name(app.first | app.last, like)
    asked = {node: iter((1, 2)) for node in range(NODES)}

    def build(context):
        node = context.node_config["partition-id"]
        batches = app.batches[next(asked[node]), node]
        assert len(batches) == STEPS
        examples = [
            {"pixel_values": x, "labels": int(y)}
            for batch in batches
            for x, y in zip(batch["pixel_values"], batch["labels"], strict=True)
        ]
        model = make_model(config)
        if method == "ffa-lora":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and "lora_A" not in name)
        options = arguments(
            tmp_path, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=RATE,
            seed=SEED, train_sampling_strategy="sequential",
        )  # fmt: skip
        return Trainer(model, options, train_dataset=examples)

    clients = federated(build, budget=lambda c: app.budgets[c.node_config["partition-id"]])
    start = {name: t.clone() for name, t in like.items()} | first
    result = train_only(strategy).start(Grid([clients] * NODES), ArrayRecord(start), num_rounds=2)
    assert set(app.budgets.values()) == ({1.0} if budgets == "full" else {0.5, 1.0})
    for name, tensor in expected.items():
        got = result.arrays[name].numpy()
        np.testing.assert_allclose(got, tensor.numpy(), rtol=0, atol=1e-5, err_msg=name)
    moved = max((expected[name] - first[name]).abs().max() for name in expected)
    assert moved > 1e-3
