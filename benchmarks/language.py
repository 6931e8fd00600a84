"""Measure the effect of packing and of a 16-bit backbone on steps of a language model.

    python -m benchmarks.language                             # five minutes of a core
    python -m benchmarks.language --shape 1b --device cuda    # the same on a GPU

The texts are docstrings of Python's standard library, each after a line with its length in words,
of which the first 512 tokens are read; only answers are learned. The network is a LLaMA with
random weights, saved in bfloat16: a small one, or one of the shape of LLaMA-3.2-1B, with RAVAN's
adapters. The rows of a table take turns in one process; seconds (on a CPU, of a processor) are
medians of a step, and ratios medians over the turns. Memory is the frozen model's, and on a GPU
the peak of a turn.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.lengths import docstrings
from ravan_flwr.config.presets import with_preset_path
from ravan_flwr.config.run_config import read_config
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import Scalar
from ravan_flwr.tasks.base import Batch
from ravan_flwr.tasks.extensions import Packs, task_with
from ravan_flwr.training.batching import training_batches
from ravan_flwr.training.local_steps import ClientWork, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.step import TrainingSettings

LENGTH, END = 512, "<|endoftext|>"
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 768, "vocab_size": 8000,
    },
    "1b": {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128_256,
    },
}  # fmt: skip
# Compared with the first of each table: backbone-dtype, precision, layout of steps.
Way = tuple[str, str, dict[str, Any]]
LAYOUTS: dict[str, Way] = {
    "a row a text": ("float32", "float32", {}),
    "batching=packed": ("float32", "float32", {"packing": True}),
}
DTYPES: dict[str, Way] = {
    "float32": ("float32", "float32", {}),
    "backbone-dtype=bfloat16": ("bfloat16", "float32", {}),
    "precision=bfloat16": ("float32", "bfloat16", {}),
    "both": ("bfloat16", "bfloat16", {}),
}


@dataclass
class Row:
    """Hold the measurements of one way to train."""

    name: str
    model: int  # bytes of frozen weights
    seconds: list[float]
    most: int = 0  # bytes allocated on a GPU


def main(arguments: list[str]) -> int:
    """Measure, and print a table for packing and one for the dtype of the backbone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16, help="texts of a step")
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder, options.shape)
        layouts = measured(folder, LAYOUTS, options)
        show(
            layouts, token_counts(loaded_of(folder, "float32", "float32", options.device), options)
        )
        dtypes = measured(folder, DTYPES, options)
        show(dtypes, "")
    if options.json:
        tables = [[vars(row) for row in rows] for rows in (layouts, dtypes)]
        options.json.write_text(json.dumps(tables, indent=2) + "\n")
    return 0


def save(folder: Path, shape: str) -> None:
    """Save model, tokenizer, texts and preset."""
    texts = docstrings()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(
        folder / "model"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SHAPES[shape], max_position_embeddings=2048, bos_token_id=0, eos_token_id=0,
        dtype=torch.bfloat16, tie_word_embeddings=True,
    )  # fmt: skip
    network: Any = transformers.LlamaForCausalLM(config)
    network.to(torch.bfloat16).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rows = [{"prompt": f"In {len(text.split())} words:\n", "completion": text} for text in texts]
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "preset.yaml").write_text(
        "task: causal\nmodel: ./model\ndata:\n  name: ./data\n"
        f"  max-length: {LENGTH}\n  columns: {{prompt: prompt, completion: completion}}\n"
    )


def loaded_of(folder: Path, kept_in: str, precision: str, device: str) -> ModelAndData:
    """Load the files as a run does."""
    settings: dict[str, Scalar] = {
        "preset": str(folder / "preset.yaml"), "backbone-dtype": kept_in, "precision": precision,
        "lora-rank": 16, "learning-rate": 1e-4, "device": device,
    }  # fmt: skip
    loaded = ModelAndData(read_config(with_preset_path(settings)))
    loaded.model  # noqa: B018 (built before timing)
    return loaded


def measured(folder: Path, table: dict[str, Way], options: argparse.Namespace) -> list[Row]:
    """Time the rows of a table in turn, after a warm-up turn."""
    rows, works = [], []
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    for name, (kept_in, precision, layout) in table.items():
        loaded = loaded_of(folder, kept_in, precision, options.device)
        steps = TrainingSettings(options.steps, options.batch, 1e-4, precision, **layout)
        rows.append(Row(name, frozen_bytes(loaded), []))
        works.append(work_of(loaded, steps))
    for turn in range(options.repetitions + 1):
        for row, work in zip(rows, works, strict=True):
            if options.device == "cuda":
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            began = clock()
            work()
            if options.device == "cuda":
                torch.cuda.synchronize()
                row.most = max(row.most, torch.cuda.max_memory_allocated() - before)
            if turn:
                row.seconds.append((clock() - began) / options.steps)
    return rows


def work_of(loaded: ModelAndData, steps: TrainingSettings) -> Callable[[], object]:
    """Return a function that trains one client, from the same state on the same examples."""
    examples, state = loaded.partition(0, 1).train, loaded.model.initial_state()
    work = ClientWork(examples, state, 1.0, steps, ClientRound(0, 1, 0))
    return lambda: train_locally(loaded.model, loaded.task, work)


def frozen_bytes(loaded: ModelAndData) -> int:
    """Count the bytes of the frozen weights, shared ones once."""
    tensors = {p.data_ptr(): p for p in loaded.model.network.parameters() if not p.requires_grad}
    return sum(p.numel() * p.element_size() for p in tensors.values())


def token_counts(loaded: ModelAndData, options: argparse.Namespace) -> str:
    """Return the numbers of tokens with each layout, and the fractions without padding."""
    examples = loaded.partition(0, 1).train
    order = training_batches(
        len(examples), options.batch, ClientRound(0, 1, 0).generator("batches")
    )
    taken = [examples.take(next(order)) for _ in range(options.steps)]
    total = sum(int(batch["length"].sum()) for batch in taken)

    def through(lay_out: Callable[[Batch], Batch]) -> int:
        return sum(lay_out(batch)["input_ids"].numel() for batch in taken)

    separate, packed = (
        through(loaded.task.collate),
        through(task_with(Packs, loaded.task, "packing").packed),
    )
    return f"tokens of a turn: {separate:,}, {packed:,} with packing, {total:,} without padding\n"


def show(rows: list[Row], tokens: str) -> None:
    """Print a table."""
    first = rows[0].seconds
    lines = [
        "| | seconds a step | of the first | frozen model, MB | GPU, MB beyond what was there |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratios = [one / other for one, other in zip(row.seconds, first, strict=True)]
        lines.append(
            f"| {row.name} | {statistics.median(row.seconds):.3f} "
            f"| **{statistics.median(ratios):.2f}** | {row.model / 1e6:.1f} "
            f"| {f'{row.most / 1e6:.1f}' if row.most else ''} |"
        )
    sys.stdout.write("\n".join(lines) + "\n" + tokens + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
