"""Small runs on real examples, digits and docstrings of the standard library, and their results."""

import importlib
import inspect
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from ravan_flwr import simulate
from ravan_flwr.specs import Scalar
from ravan_flwr.training.network import build_network
from tests.short_runs import SHORT
from tests.support.tiny import save_model

QUICK: dict[str, Scalar] = SHORT | {
    "num-rounds": 1, "local-steps": 10, "batch-size": 16, "lora-rank": 2, "eval-every": 1,
    "partition": "iid",
}  # fmt: skip
MODULES = (
    "ast", "csv", "inspect", "json", "os", "random", "re", "shutil", "statistics", "tarfile",
    "textwrap", "zipfile",
)  # fmt: skip
LABELS = ("negative", "positive")
# Methods that change pretrained weights.
OF_WEIGHTS = {"full", "fedex-lora", "flora", "fedmomentum", "frlora", "florist"}


def digit_images(side, mode):
    """Return handwritten digits as images of one size, and their labels."""
    bunch = load_digits()
    shades = (bunch.images / 16 * 255).round().astype(np.uint8)
    images = [Image.fromarray(shade).resize((side, side)).convert(mode) for shade in shades[:240]]
    return images, bunch.target[:240].astype(str).tolist()


def save_digits(folder, side, mode):
    """Save digits as the subset of SVHN: a folder for each split, in it one for each label."""
    images, labels = digit_images(side, mode)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        split = "test" if number % 4 == 0 else "train"
        path = folder / "cropped_digits" / split / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return folder


def docstrings():
    """Return first paragraphs of docstrings, labelled by whether they contain "return"."""
    found = {}
    for name in MODULES:
        for _, function in inspect.getmembers(importlib.import_module(name), inspect.isroutine):
            text = (inspect.getdoc(function) or "").split("\n\n")[0]
            if len(text) > 10:
                found[text] = LABELS["return" in text.lower()]
    return sorted(found.items())


def save_docstrings(folder):
    """Save JSON lines with the columns and labels of SST-2."""
    for split, start in (("train", 1), ("validation", 0), ("test", 0)):
        rows = [row for n, row in enumerate(docstrings()) if (n % 4 == 0) == (start == 0)]
        lines = [json.dumps({"sentence": text, "label": label}) for text, label in rows]
        path = folder / "sst2" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return folder


def save_bert(folder):
    """Save a BERT of two small layers, with the docstrings' words as its vocabulary."""
    counts = Counter(re.findall(r"\w+", " ".join(text for text, _ in docstrings()).lower()))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(w for w, _ in counts.most_common(600))]
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, initializer_range=0.2,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def run_of_digits(folder: Path):
    """Run the default preset, whose backbone takes 8 x 8 pixels of one channel."""
    return simulate(QUICK | {"num-rounds": 2, "output-dir": str(folder / "runs")}, 2)


def run_of_images(folder: Path, *, processor: bool):
    """Run a model with three channels, with or without an image processor."""
    model = save_model("vit", folder / "model")
    if not processor:
        (model / "preprocessor_config.json").unlink()
    data = save_digits(folder / "data", 16, "RGB")
    settings: dict[str, Scalar] = {
        "preset": "svhn-vit-b16", "model": str(model), "data": str(data), "learning-rate": 1e-2,
        "classifier": "trained", "output-dir": str(folder / "runs"),
    }  # fmt: skip
    return simulate(QUICK | settings, 2)


def run_of_texts(folder: Path, **changes: Scalar):
    """Run a small BERT on docstrings, most of which are longer than `max-length`."""
    settings: dict[str, Scalar] = {
        "preset": "glue-llama", "glue-task": "sst2", "model": str(save_bert(folder / "model")),
        "data": str(save_docstrings(folder / "data")), "learning-rate": 1e-2, "max-length": 12,
        "classifier": "trained", "output-dir": str(folder / "runs"), "num-rounds": 3,
        "local-steps": 40,
    }  # fmt: skip
    return simulate(QUICK | settings | changes, 2)


def logits_of(network, examples):
    with torch.inference_mode():
        return network.eval()(pixel_values=examples["pixel_values"]).logits


def examples_and_logits(loaded):
    """Return examples and the logits that a run's model gives them."""
    (encoded,) = loaded.test_sets.values()
    examples = encoded.take(encoded.rows[:32])
    return examples, logits_of(loaded.model.network, examples)


def check_logits(folder, loaded, expected, tolerance=1e-4, **more):
    """Check that a folder, loaded as its README describes, gives the logits of the run's model."""
    examples, logits = expected
    if (folder / "config.json").is_file():
        network = transformers.AutoModelForImageClassification.from_pretrained(folder)
    else:  # an adapter, onto the run's backbone with another classifier
        backbone = build_network(loaded.config.model, loaded.task, seed=99).network
        network = peft.PeftModel.from_pretrained(backbone, folder, **more)
    actual = logits_of(network, examples)
    torch.testing.assert_close(actual, logits, rtol=tolerance, atol=tolerance)
    return network
