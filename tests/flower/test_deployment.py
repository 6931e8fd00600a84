"""Two runs over TLS with three authenticated SuperNodes, one of which dies on the way.

Nodes have folders and budgets of their own, and warm workers but for the one that dies. In the run
of RAVAN node 1 is killed while it works on round 2: the run goes on without it, the record says so,
and the node is refused while the SuperLink takes it for online, but joins the run of FedIT later.
FedIT is trained whole or not at all, so node 2 with half a budget is left out there. Node 3 has
keys, but nobody registered them.

Both runs deliver their results, also to node 2; node 1 gets that of the first run when it is back.
"""

import json
import re
from pathlib import Path

import datasets
import peft
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from ravan_flwr.reports.evaluation import result_of
from ravan_flwr.training.network import build_network
from testing.deployment import Deployment, wait_for

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes in /proc"
)

BUDGETS = ("1", "0.75", "0.5")  # the first is a whole number on purpose
DIES = 1  # works without a warm worker before, with one when it comes back
REFUSED = "Failed to activate SuperNode"
SHORT = "num-rounds=3 local-steps=10 clients-per-round=3 report=false tracking='none' deliver=true"


def write_parquet(folder, images, labels):
    folder.mkdir()
    table = {"image": images.tolist(), "label": labels.tolist()}
    datasets.Dataset.from_dict(table).to_parquet(folder / "digits.parquet")


def write_pictures(folder, images, labels):
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255).astype("uint8")).save(path)


def place_of(deployment, number):
    return deployment.folder / f"results {number}"


def kept_by(deployment, run, *numbers):
    """The folders of some nodes with that run's result, which give the logits of the server."""
    folders = [place_of(deployment, n) / run.directory.name / "adapter" for n in numbers]
    with result_of(run.directory) as loaded:
        (encoded,) = loaded.test_sets.values()
        pixels = encoded.take(encoded.rows)["pixel_values"]
        with torch.inference_mode():
            ours = loaded.model.network.eval()(pixel_values=pixels).logits
        config, task = loaded.config, loaded.task
    for folder in folders:
        backbone = build_network(config.model, task, seed=99).network
        theirs = peft.PeftModel.from_pretrained(backbone, folder).eval()
        with torch.inference_mode():
            logits = theirs(pixel_values=pixels).logits
        torch.testing.assert_close(logits, ours, rtol=1e-4, atol=1e-4)
    return folders


def having(*partitions):
    return [{"partition-id": number, "folder": "adapter"} for number in partitions]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, python):
    with Deployment(
        tmp_path_factory.mktemp("deployment"), nodes=4, scripts=python.scripts
    ) as running:
        yield running
    assert running.left_running == []


@pytest.fixture(scope="module")
def node_configs(deployment):
    """What each registered node is started with; the SuperNodes are up, and node 3 was tried."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16
    configs = []
    for number, write in enumerate((write_parquet, write_parquet, write_pictures)):
        folder = deployment.folder / f"data {number}"  # paths have spaces
        rows = slice(100 * number, 100 * (number + 2 + number))
        write(folder, images[rows], labels[rows])
        configs.append(
            f'partition-id={number} num-partitions=3 data-path="{folder}" budget={BUDGETS[number]} '
            f'result-path="{place_of(deployment, number)}"' + " warm-worker=true" * (number != DIES)
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
    wait_for(lambda: "ROUND 2" in deployment.log("node-1"), "node 1 to work on round 2")
    deployment.kill_node(1)
    assert len(run.rounds) == 1
    deployment.start_node(1, node_configs[1])
    assert not deployment.wait_for_node(1)  # the SuperLink does not know yet that it is dead
    assert REFUSED in deployment.log("node-1")
    assert run.wait() == "finished:completed"

    first, second, third = run.rounds
    assert [c["partition-id"] for c in first["clients"]] == [0, 1, 2]
    assert [c["budget-fraction"] for c in first["clients"]] == [1.0, 0.75, 0.5]
    assert [c["heads"] for c in first["clients"]] == [4, 3, 2]
    assert [c["examples"] for c in first["clients"]] == [200, 300, 400]
    assert (first["rejected"], third["rejected"]) == ([], [])
    (lost,) = second["rejected"]
    assert lost["client"] == "partition 1"
    assert "failed with code 5" in lost["reason"]
    for record in (second, third):
        assert [c["partition-id"] for c in record["clients"]] == [0, 2]
        assert record["partitions"] == 3
    summary = json.loads((run.directory / "summary.json").read_text())
    assert (summary["rounds"], summary["rejected"], summary["num-clients"]) == (3, 1, 3)
    assert summary["metrics"]["final"]["accuracy"] > 0.6
    assert "node 3" not in run.log
    # Node 2 trained two heads of four, and has all.
    assert summary["delivered"] == having(0, 2)
    (missed,) = summary["not-delivered"]
    assert missed["client"] == "partition 1"
    assert missed["reason"] == "it was not connected when the result was delivered"
    kept_by(deployment, run, 0, 2)
    assert not place_of(deployment, 1).exists()


def test_a_dead_node_comes_back_and_small_budgets_are_left_out(deployment, node_configs):
    wait_for(
        lambda: sorted(deployment.listed_nodes().values()) == ["offline", "online", "online"],
        "node 1 to be taken for offline",
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
    assert len(deployment.listed_nodes()) == 3  # node 3 never came in
    summary = json.loads((run.directory / "summary.json").read_text())
    assert (summary["delivered"], summary["not-delivered"]) == (having(0, 1, 2), [])
    kept_by(deployment, run, 0, 1, 2)  # also by whom the run left out


def test_who_was_away_gets_the_result_later(deployment, node_configs):
    """Of the first run; it has that of the second already, which stays beside it."""
    run, second = deployment.runs
    before = json.loads((run.directory / "summary.json").read_text())
    there = {
        path: path.stat().st_ino
        for number in range(3)
        for path in place_of(deployment, number).rglob("*")
    }
    told = deployment.deliver(run.directory)
    for number in range(3):
        assert f"partition {number} has the result, in adapter/" in told
    after = json.loads((run.directory / "summary.json").read_text())
    assert (after["delivered"], after["not-delivered"]) == (having(0, 1, 2), [])
    assert after == before | {"delivered": after["delivered"], "not-delivered": []}
    kept_by(deployment, run, 0, 1, 2)
    kept_by(deployment, second, 0, 1, 2)
    assert {path: path.stat().st_ino for path in there} == there
    with pytest.raises(RuntimeError, match="found no config.json there"):
        deployment.deliver(run.folder)


def test_a_revoked_node_ends_and_stays_out(deployment, node_configs):
    (node_id,) = [
        int(found) for found in re.findall(r"SuperNode ID: (\d+)", deployment.log("node-2"))
    ]
    deployment.unregister(node_id)
    wait_for(lambda: not deployment.is_running(2), "node 2 to end")
    deployment.start_node(2, node_configs[2])
    assert not deployment.wait_for_node(2)
    with pytest.raises(RuntimeError, match="node 2 was not registered"):
        deployment.register(2)
