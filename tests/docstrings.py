"""Questions and answers from the docstrings of the standard library."""

import importlib
import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ravan_flwr.specs import Scalar
from tests.support.tiny import save_speaker

MODULES = ("csv", "inspect", "json", "os", "random", "shutil", "statistics", "tarfile", "zipfile")
QUICK: dict[str, Scalar] = {
    "num-rounds": 2, "local-steps": 12, "batch-size": 8, "lora-rank": 4, "learning-rate": 2e-2,
    "targets": "q_proj,v_proj,o_proj,down_proj", "tracking": "none",
}  # fmt: skip


def docstrings() -> list[tuple[str, str]]:
    """List names of functions with the first paragraphs of their docstrings."""
    found = {}
    for module in MODULES:
        for name, routine in inspect.getmembers(importlib.import_module(module), inspect.isroutine):
            text = (inspect.getdoc(routine) or "").split("\n\n")[0]
            if len(text) > 10:
                found[text] = f"{module}.{name}"
    return [(name, text) for text, name in sorted(found.items())]


def lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Write JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_messages(name: str, text: str) -> dict[str, Any]:
    question = {"role": "user", "content": f"What does {name} do?"}
    return {"messages": [question, {"role": "assistant", "content": text}]}


def as_completion(name: str, text: str) -> dict[str, Any]:
    return {"prompt": f"{name}: ", "completion": text}


def preset(
    folder: Path, form: Any = as_completion, data: Any = "", **options: Any
) -> dict[str, Any]:
    """Write data, model and preset; the model's weights are large enough for varied output."""
    rows = docstrings()
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "train.jsonl").write_text(lines(form(*row) for row in rows))
    if not (folder / "model").is_dir():
        save_speaker("llama", folder / "model", [text for _, text in rows], initializer_range=0.3)
    columns = (
        {"messages": "messages"}
        if form is as_messages
        else {"prompt": "prompt", "completion": "completion"}
    )
    (folder / "p.yaml").write_text(
        f"task: causal\nmodel: {folder}/model\ndata:\n  name: {folder}/data\n  max-length: 96\n"
        f"  target-length: 12\n  columns: {json.dumps(columns)}\n{data}"
    )
    return {
        "preset": str(folder / "p.yaml"),
        "output-dir": str(folder / "runs"),
        **QUICK,
        **options,
    }
