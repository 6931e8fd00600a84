"""Two devices with conversations of their own tune a language model under Flower, in 4 bits.

Each has `chat.jsonl`, a budget by its free memory, a warm worker, and a place for the result.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ravan_flwr.launch.superlink import processes_of
from testing.deployment import Deployment
from testing.tiny import save_speaker
from tests.docstrings import as_messages, docstrings, lines

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes in /proc"
)

SECRET = "xylophonist"  # a word of one device alone
SETTINGS = (
    "preset='talk' num-rounds=3 local-steps=8 clients-per-round=2 batch-size=8 lora-rank=4 "
    "learning-rate=2e-2 targets='q_proj,v_proj,o_proj,down_proj' backbone-dtype='4bit' "
    "batching='packed' deliver=true report=false tracking='none'"
)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, python):
    folder = tmp_path_factory.mktemp("language")
    with Deployment(folder, nodes=2, scripts=python.scripts) as running:
        yield running
    assert running.left_running == []


def prepare(deployment):
    """Write the model, the server's examples and the preset; start devices with their own."""
    folder, rows = deployment.folder, [row for row in docstrings() if len(row[1]) < 90]
    save_speaker("llama", folder / "model", [told for _, told in rows], hidden_size=64,
                 intermediate_size=128, initializer_range=0.3)  # fmt: skip
    (folder / "server").mkdir()
    (folder / "server" / "train.jsonl").write_text(lines(as_messages(*row) for row in rows[::5]))
    (deployment.app / "conf" / "talk.yaml").write_text(
        f"task: causal\nmodel: '{folder}/model'\ndata:\n  name: '{folder}/server'\n"
        "  max-length: 96\n  target-length: 12\n  columns: {messages: messages}\n"
    )
    for number in range(2):
        own = folder / f"texts of {number}"
        own.mkdir()
        mine = [as_messages(*row) for row in rows[1 + number :: 5]]
        if number:
            mine[0] = as_messages("secret", f"It is {SECRET}.")
        (own / "chat.jsonl").write_text(lines(mine))
        deployment.register(number)
        deployment.start_node(
            number,
            f'partition-id={number} num-partitions=2 data-path="{own}" budget="auto" '
            f'result-path="{folder}/results {number}" warm-worker=true',
        )
        assert deployment.wait_for_node(number)
    return [len(rows[1 + number :: 5]) for number in range(2)]


def test_devices_with_texts_of_their_own_train_and_get_the_result(deployment):
    examples = prepare(deployment)
    run = deployment.run(SETTINGS)
    assert run.wait() == "finished:completed"
    for record in run.rounds:
        assert record["rejected"] == []
        assert [client["examples"] for client in record["clients"]] == examples
        assert [client["budget-fraction"] for client in record["clients"]] == [1.0, 1.0]
    first, *_, last = (record["metrics"]["perplexity"] for record in run.rounds)
    assert last < first
    commands = (Path(f"/proc/{pid}/cmdline") for pid in processes_of(deployment.folder))
    workers = [path for path in commands if b"ravan_flwr.client.worker" in path.read_bytes()]
    assert len(workers) == 2

    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["delivered"] == [{"partition-id": n, "folder": "adapter"} for n in range(2)]
    expected = load_file(run.directory / "adapter" / "adapter_model.safetensors")
    for number in range(2):
        kept = deployment.folder / f"results {number}" / run.directory.name / "adapter"
        found = load_file(kept / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        assert all(found[name].equal(tensor) for name, tensor in expected.items())
        reader = AutoTokenizer.from_pretrained(kept)
        asked: Any = reader.apply_chat_template(
            as_messages("os.getcwd", "")["messages"][:1], add_generation_prompt=True,
            return_tensors="pt", return_dict=False,
        )  # fmt: skip
        # transformers finds the adapter
        answers: Any = AutoModelForCausalLM.from_pretrained(kept)
        assert answers.generate(asked, max_new_tokens=4, do_sample=False).shape[1] > asked.shape[1]

    # What a device has stays there.
    told = [path.read_bytes() for path in run.directory.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in one for one in (*told, run.log.encode()))
