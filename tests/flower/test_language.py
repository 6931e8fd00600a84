"""Two devices fine-tune a 4-bit language model on local conversations, under Flower.

Each has `chat.jsonl`, a budget fraction by its free memory, a warm worker, and a result folder.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ravan_flwr.launch.superlink import list_processes
from tests.docstrings import as_messages, docstrings, lines
from tests.flower import NEEDS_PROC
from tests.support.tiny import save_speaker

pytestmark = [pytest.mark.slow, NEEDS_PROC]

NODES = 2
SECRET = "xylophonist"  # a word that only one device has
SETTINGS = (
    "preset='talk' num-rounds=3 local-steps=8 clients-per-round=2 batch-size=8 lora-rank=4 "
    "learning-rate=2e-2 targets='q_proj,v_proj,o_proj,down_proj' backbone-dtype='4bit' "
    "batching='packed' deliver=true tracking='none'"
)


def prepare(deployment):
    """Write model, server's examples and preset; start the devices; return their example counts."""
    folder, rows = deployment.folder, [row for row in docstrings() if len(row[1]) < 90]
    save_speaker("llama", folder / "model", [text for _, text in rows], hidden_size=64,
                 intermediate_size=128, initializer_range=0.3)  # fmt: skip
    (folder / "server").mkdir()
    (folder / "server" / "train.jsonl").write_text(lines(as_messages(*row) for row in rows[::5]))
    (deployment.app / "conf" / "talk.yaml").write_text(
        f"task: causal\nmodel: '{folder}/model'\ndata:\n  name: '{folder}/server'\n"
        "  max-length: 96\n  target-length: 12\n  columns: {messages: messages}\n"
    )
    for number in range(2):
        device_folder = folder / f"texts of {number}"
        device_folder.mkdir()
        device_rows = [as_messages(*row) for row in rows[1 + number :: 5]]
        if number:
            device_rows[0] = as_messages("secret", f"It is {SECRET}.")
        (device_folder / "chat.jsonl").write_text(lines(device_rows))
    deployment.start_nodes(
        lambda number: (
            f'data-path="{folder}/texts of {number}" budget="auto" '
            f'result-path="{folder}/results {number}" warm-worker=true'
        )
    )
    return [len(rows[1 + number :: 5]) for number in range(2)]


def test_devices_train_on_local_conversations_and_get_the_result(deployment):
    examples = prepare(deployment)
    run = deployment.run(SETTINGS)
    assert run.wait() == "finished:completed"
    for record in run.rounds:
        assert record["rejected"] == []
        assert [client["examples"] for client in record["clients"]] == examples
        assert [client["budget-fraction"] for client in record["clients"]] == [1.0, 1.0]
    first, *_, last = (record["metrics"]["perplexity"] for record in run.rounds)
    assert last < first
    commands = (Path(f"/proc/{pid}/cmdline") for pid in list_processes(deployment.folder))
    workers = [path for path in commands if b"ravan_flwr.client.warm_worker" in path.read_bytes()]
    assert len(workers) == 2

    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["delivered"] == [{"partition-id": n, "folder": "adapter"} for n in range(2)]
    expected = load_file(run.directory / "adapter" / "adapter_model.safetensors")
    for number in range(2):
        delivered = deployment.folder / f"results {number}" / run.directory.name / "adapter"
        found = load_file(delivered / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        assert all(found[name].equal(tensor) for name, tensor in expected.items())
        tokenizer = AutoTokenizer.from_pretrained(delivered)
        prompt: Any = tokenizer.apply_chat_template(
            as_messages("os.getcwd", "")["messages"][:1], add_generation_prompt=True,
            return_tensors="pt", return_dict=False,
        )  # fmt: skip
        # transformers finds the adapter
        model: Any = AutoModelForCausalLM.from_pretrained(delivered)
        assert model.generate(prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt.shape[1]

    # No example of a device reaches the server.
    contents = [path.read_bytes() for path in run.directory.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in content for content in (*contents, run.log.encode()))
