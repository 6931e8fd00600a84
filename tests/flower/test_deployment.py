"""Two runs over TLS with three authenticated SuperNodes, one of which is killed in the first run.

Each node has its own folder and budget fraction, and a warm worker except the one that is killed.
In the run of RAVAN node 1 is killed during round 2: the run continues without it, and the record
lists the rejection. The SuperLink refuses the node as long as it lists it as online; it takes part
in the later run of FedIT. FedIT needs the full budget, so node 2 with half a budget is not eligible
there. Node 3 has keys that are not registered.

Both runs deliver their results, also to node 2; node 1 gets the first run's later.
"""

import json
import re

import datasets
import peft
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from ravan_flwr.results.evaluation import result_of
from ravan_flwr.training.network import build_network
from tests.flower import NEEDS_PROC
from tests.support.deployment import ROUNDS_TIMEOUT, wait_for

pytestmark = NEEDS_PROC

NODES = 4
BUDGETS = ("1", "0.75", "0.5")  # the first is a whole number on purpose
KILLED = 1  # without a warm worker at first, with one after the restart
REFUSED = "Failed to activate SuperNode"
SHORT = "num-rounds=3 local-steps=10 clients-per-round=3 tracking='none' deliver=true"


def write_parquet(folder, images, labels):
    folder.mkdir()
    table = {"image": images.tolist(), "label": labels.tolist()}
    datasets.Dataset.from_dict(table).to_parquet(folder / "digits.parquet")


def write_pictures(folder, images, labels):
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255).astype("uint8")).save(path)


def result_folder(deployment, number):
    return deployment.folder / f"results {number}"


def delivered_to(deployment, run, *numbers):
    """Return nodes' folders with the run's result; check that they give the server's logits."""
    folders = [result_folder(deployment, n) / run.directory.name / "adapter" for n in numbers]
    with result_of(run.directory) as loaded:
        (encoded,) = loaded.test_sets.values()
        pixels = encoded.take(encoded.rows)["pixel_values"]
        with torch.inference_mode():
            server_logits = loaded.model.network.eval()(pixel_values=pixels).logits
        config, task = loaded.config, loaded.task
    for folder in folders:
        backbone = build_network(config.model, task, seed=99).network
        client_model = peft.PeftModel.from_pretrained(backbone, folder).eval()
        with torch.inference_mode():
            logits = client_model(pixel_values=pixels).logits
        torch.testing.assert_close(logits, server_logits, rtol=1e-4, atol=1e-4)
    return folders


def delivered_adapters(*partitions):
    return [{"partition-id": number, "folder": "adapter"} for number in partitions]


@pytest.fixture(scope="module")
def node_configs(deployment):
    """Start the SuperNodes, also the unregistered node 3; return the node configs."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16
    configs = []
    for number, write in enumerate((write_parquet, write_parquet, write_pictures)):
        folder = deployment.folder / f"data {number}"  # paths have spaces
        rows = slice(100 * number, 100 * (number + 2 + number))
        write(folder, images[rows], labels[rows])
        warm = " warm-worker=true" * (number != KILLED)
        configs.append(
            f'partition-id={number} num-partitions=3 data-path="{folder}" budget={BUDGETS[number]} '
            f'result-path="{result_folder(deployment, number)}"{warm}'
        )
        deployment.register(number)
        deployment.start_node(number, configs[-1])
    deployment.start_node(3, "partition-id=3 num-partitions=4")
    return configs


def test_only_registered_nodes_connect(deployment, node_configs):
    assert [deployment.wait_for_node(number) for number in range(4)] == [True, True, True, False]
    assert REFUSED in deployment.log("node-3")
    assert sorted(deployment.listed_nodes().values()) == ["online"] * 3
    assert deployment.health() == 0


def test_a_run_survives_the_death_of_a_node(deployment, node_configs):
    run = deployment.run(f"method='ravan' {SHORT}")
    run.wait_for(lambda: "ROUND 2" in deployment.log("node-1"), "round 2", ROUNDS_TIMEOUT)
    deployment.kill_node(1)
    assert len(run.rounds) == 1
    deployment.start_node(1, node_configs[1])
    assert not deployment.wait_for_node(1)  # the SuperLink still lists it as online
    assert REFUSED in deployment.log("node-1")
    assert run.wait() == "finished:completed"

    first, second, third = run.rounds
    assert [c["partition-id"] for c in first["clients"]] == [0, 1, 2]
    assert [c["budget-fraction"] for c in first["clients"]] == [1.0, 0.75, 0.5]
    assert [c["heads"] for c in first["clients"]] == [4, 3, 2]
    assert [c["examples"] for c in first["clients"]] == [200, 300, 400]
    assert (first["rejected"], third["rejected"]) == ([], [])
    (rejection,) = second["rejected"]
    assert rejection["client"] == "partition 1"
    assert "failed with code 5" in rejection["reason"]
    for record in (second, third):
        assert [c["partition-id"] for c in record["clients"]] == [0, 2]
        assert record["partitions"] == 3
    summary = json.loads((run.directory / "summary.json").read_text())
    assert (summary["rounds"], summary["rejected"], summary["num-clients"]) == (3, 1, 3)
    assert summary["metrics"]["final"]["accuracy"] > 0.6
    assert "node 3" not in run.log
    # Node 2 trained two heads of four, and gets all.
    assert summary["delivered"] == delivered_adapters(0, 2)
    (missed,) = summary["not-delivered"]
    assert missed["client"] == "partition 1"
    assert missed["reason"] == "it was not connected when the result was delivered"
    delivered_to(deployment, run, 0, 2)
    assert not result_folder(deployment, 1).exists()


@pytest.mark.slow
def test_a_killed_node_reconnects_and_small_budgets_are_not_eligible(deployment, node_configs):
    wait_for(
        lambda: sorted(deployment.listed_nodes().values()) == ["offline", "online", "online"],
        "node 1 to be taken for offline",
        timeout=ROUNDS_TIMEOUT,
        pause=6.0,  # each look is a `flwr` command
    )
    changed = node_configs[1].replace("budget=0.75", "budget=1.0 warm-worker=true")
    deployment.start_node(1, changed)
    assert deployment.wait_for_node(1)
    run = deployment.run(f"method='fedit' {SHORT}")
    assert run.wait() == "finished:completed"
    for record in run.rounds:
        assert [c["partition-id"] for c in record["clients"]] == [0, 1]
        assert (record["not-eligible"], record["rejected"], record["partitions"]) == ([2], [], 3)
    assert len(run.rounds) == 3
    assert len(deployment.listed_nodes()) == 3  # without node 3
    summary = json.loads((run.directory / "summary.json").read_text())
    assert (summary["delivered"], summary["not-delivered"]) == (delivered_adapters(0, 1, 2), [])
    delivered_to(deployment, run, 0, 1, 2)  # also to node 2, which was not eligible


@pytest.mark.slow
def test_a_node_that_was_offline_gets_the_result_later(deployment, node_configs):
    """Node 1 gets the first run's result; the second run's is not touched."""
    run, second = deployment.runs
    before = json.loads((run.directory / "summary.json").read_text())
    inodes = {
        path: path.stat().st_ino
        for number in range(3)
        for path in result_folder(deployment, number).rglob("*")
    }
    output = deployment.deliver(run.directory)
    for number in range(3):
        assert f"partition {number} has the result, in adapter/" in output
    after = json.loads((run.directory / "summary.json").read_text())
    assert (after["delivered"], after["not-delivered"]) == (delivered_adapters(0, 1, 2), [])
    assert after == before | {"delivered": after["delivered"], "not-delivered": []}
    delivered_to(deployment, run, 0, 1, 2)
    delivered_to(deployment, second, 0, 1, 2)
    assert {path: path.stat().st_ino for path in inodes} == inodes
    with pytest.raises(RuntimeError, match="found no config.json there"):
        deployment.deliver(run.folder)


@pytest.mark.slow
def test_a_revoked_node_ends_and_cannot_reconnect(deployment, node_configs):
    (node_id,) = re.findall(r"SuperNode ID: (\d+)", deployment.log("node-2"))
    deployment.unregister(int(node_id))
    wait_for(lambda: not deployment.is_running(2), "node 2 to end")
    deployment.start_node(2, node_configs[2])
    assert not deployment.wait_for_node(2)
    with pytest.raises(RuntimeError, match="node 2 was not registered"):
        deployment.register(2)
