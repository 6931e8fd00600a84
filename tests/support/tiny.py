"""Make small models with random weights and small data sets, with files and schemas of real ones.

Nothing here is read from conf/, so that tests find its mistakes.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
import yaml
from datasets import ClassLabel, Features, Image, List, Value
from PIL import Image as Picture
from PIL.Image import Image as PictureFile
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ravan_flwr.specs import Scalar

Columns = dict[str, Any]  # name -> values

SIDES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
PIXELS: dict[str, Any] = {**SIDES, "intermediate_size": 24, "image_size": 16, "patch_size": 8}
TOKENS: dict[str, Any] = {**SIDES, "intermediate_size": 24, "vocab_size": 300}
DECODER: dict[str, Any] = {**TOKENS, "num_key_value_heads": 1}

START: dict[str, Any] = {"decoder_start_token_id": 0}  # of T5, by its config.json

# architecture -> (class of the saved checkpoint, without a task's head; configuration)
MODELS: dict[str, tuple[Any, Any]] = {
    "vit": (transformers.ViTModel, transformers.ViTConfig(**PIXELS)),
    "deit": (transformers.DeiTModel, transformers.DeiTConfig(**PIXELS)),
    "swin": (
        transformers.SwinModel,
        transformers.SwinConfig(
            embed_dim=8, depths=[1, 1], num_heads=[2, 2], image_size=16, patch_size=4, window_size=2
        ),
    ),
    "bert": (transformers.BertModel, transformers.BertConfig(**TOKENS)),
    "roberta": (transformers.RobertaModel, transformers.RobertaConfig(**TOKENS)),
    "distilbert": (
        transformers.DistilBertModel,
        transformers.DistilBertConfig(vocab_size=300, dim=16, n_layers=2, n_heads=2, hidden_dim=24),
    ),
    "mpnet": (transformers.MPNetModel, transformers.MPNetConfig(**TOKENS)),
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**DECODER, bos_token_id=1, eos_token_id=2),
    ),
    "qwen2": (
        transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config(**DECODER, bos_token_id=1, eos_token_id=2),
    ),
    "phi3": (  # queries, keys and values in one matrix
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config(**DECODER, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    ),
    "t5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(
            d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=300, **START
        ),
    ),
}  # fmt: skip
OF_IMAGES = ("vit", "deit", "swin")


def save_model(kind: str, folder: Path, **changes: Any) -> Path:
    """Save a folder as on the hub: configuration, weights, and tokenizer or image processor."""
    made, config = MODELS[kind]
    config = type(config).from_dict(config.to_dict() | changes)
    torch.manual_seed(0)
    made(config).save_pretrained(folder)
    if kind in OF_IMAGES:
        reader = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True, "resample": 2,
            "size": {"height": config.image_size, "width": config.image_size},
            "do_rescale": True, "rescale_factor": 1 / 255,
            "do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2],
        }  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(reader))
    else:
        save_tokenizer(kind, folder)
    return folder


def save_tokenizer(kind: str, folder: Path) -> None:
    """Train a tokenizer on the words of the small data sets, and save it."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special)
    labels = published("newsgroups")["names"]["label_text"]["texts"]
    tokenizer.train_from_iterator([" ".join(WORDS), *labels], trainer)
    end = "$A </s>", "$A </s> $B </s>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=end[0], pair=end[1], special_tokens=[("</s>", 2)]
    )
    tokenizer.decoder = decoders.Metaspace()
    decoder = kind in {"llama", "qwen2"}  # their tokenizers have no padding token
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token=None if decoder else "<pad>",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)


# ChatML, as Qwen and SmolLM have it; `{% generation %}` marks the answers for other libraries.
CHAT = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{%- if message['role'] == 'assistant' %}\
{%- generation %}{{ message['content'] + '<|im_end|>\\n' }}{%- endgeneration %}\
{%- else %}{{ message['content'] + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_SMALL: dict[str, Any] = {
    **SIDES, "intermediate_size": 32, "num_key_value_heads": 1, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
# Decoders that generate text, by the architecture's `model_type`.
SPEAKERS: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**_SMALL)),
    "mistral": (
        transformers.MistralForCausalLM, transformers.MistralConfig(**_SMALL, sliding_window=None)
    ),
    "qwen2": (
        transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config(**_SMALL, tie_word_embeddings=True),
    ),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**_SMALL, head_dim=8)),
    "gemma": (transformers.GemmaForCausalLM, transformers.GemmaConfig(**_SMALL, head_dim=8)),
    "gemma2": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config(**_SMALL, head_dim=8, final_logit_softcapping=3.0),
    ),
    "phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config(**_SMALL)),
}  # fmt: skip


def save_speaker(
    kind: str,
    folder: Path,
    texts_of: Sequence[str] = (),
    template: str | None = CHAT,
    **changes: Any,
) -> Path:
    """Save a decoder with a tokenizer by bytes, trained on the texts, and a chat template."""
    reader = save_bytes_tokenizer(folder, texts_of or [" ".join(WORDS)], template)
    made, config = SPEAKERS[kind]
    sizes = {"vocab_size": len(reader), **changes}
    torch.manual_seed(0)
    made(type(config).from_dict(config.to_dict() | sizes)).save_pretrained(folder)
    return folder


def save_bytes_tokenizer(
    folder: Path, texts_of: Sequence[str], template: str | None = CHAT, size: int = 384
) -> Any:
    """Train a byte-level tokenizer on texts, as GPT-2, LLaMA 3 and Qwen have, and save it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts_of, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    reader = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], chat_template=template,
        additional_special_tokens=SPECIAL[1:], model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    reader.save_pretrained(folder)
    return reader


WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "tu") for b in ("ne", "ra", "so", "vi", "pe")]
MOST_WORDS = 12  # of a text


def texts(number: int, seed: int = 0) -> list[str]:
    """Draw texts of two words or more."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, MOST_WORDS))) for _ in range(number)]


def pictures(labels: Sequence[int], seed: int = 0) -> list[PictureFile]:
    """Draw a picture for each label: noise around a grey that depends on the label."""
    draw = np.random.default_rng(seed)
    shades = (
        draw.integers(0, 60, (len(labels), 20, 20, 3))
        + 4 * np.asarray(labels)[:, None, None, None] % 190
    )
    return [Picture.fromarray(shade.astype(np.uint8)) for shade in shades]


# The small data sets have the columns, types and names of published/, nothing of conf/.

PUBLISHED = Path(__file__).resolve().parent / "published"


def published(name: str) -> Any:
    """Read the facts of a public data set from tests/support/published."""
    return yaml.safe_load((PUBLISHED / f"{name}.yaml").read_text(encoding="utf-8"))


def feature(kind: Any) -> Any:
    """Translate a type of tests/support/published into that of `datasets`."""
    if isinstance(kind, list):
        return List(feature(kind[0]))
    if isinstance(kind, dict):
        if "classes" in kind:
            return ClassLabel(names=kind["classes"])
        return {name: feature(part) for name, part in kind.items()}
    return Image() if kind == "image" else Value(kind)


def features(name: str, subset: str) -> Features:
    """Return the types of a subset's columns."""
    columns = published(name)["subsets"][subset]["features"]
    return Features({column: feature(kind) for column, kind in columns.items()})


def examples(name: str, subset: str, split: str, number: int, seed: int) -> datasets.Dataset:
    """Generate examples of a split: labels in turn, texts and pictures at random."""
    of = features(name, subset)
    columns = {column: _fill(kind, number, seed + i) for i, (column, kind) in enumerate(of.items())}
    columns |= ALIKE[name](columns, published(name), split) if name in ALIKE else {}
    if split in published(name).get("unlabelled", ()):
        columns["label"] = [-1] * number
    return datasets.Dataset.from_dict(columns, features=of)


def _fill(kind: Any, number: int, seed: int) -> list[Any]:
    if isinstance(kind, ClassLabel):
        # Few labels, so that several clients have each; 26 of 100 is among them.
        return [i % 6 * 13 % kind.num_classes for i in range(number)]
    if isinstance(kind, Image):
        return pictures([i % 6 * 13 for i in range(number)], seed)
    if isinstance(kind, Value):
        return texts(number, seed) if kind.dtype == "string" else list(range(number))
    return [{name: [] for name in kind} if isinstance(kind, dict) else []] * number


def _of_newsgroups(columns: Columns, facts: Any, _: str) -> Columns:
    names = facts["names"]["label_text"]["texts"]
    labels = [i % len(names) for i in columns["label"]]
    return {
        "text": [f"{{{text}}}" for text in columns["text"]],  # braces must stay text
        "label": labels,
        "label_text": [names[label] for label in labels],
    }


def _of_mrqa(columns: Columns, facts: Any, split: str) -> Columns:
    sources = facts["values"][split]["subset"]
    return {
        "subset": [sources[i % len(sources)] for i in range(len(columns["qid"]))],
        "question": ["what is first"] * len(columns["qid"]),
        "answers": [context.split()[:2] for context in columns["context"]],
    }


def _of_alpaca(columns: Columns, *_: Any) -> Columns:
    return {"input": [text if place % 2 else "" for place, text in enumerate(columns["input"])]}


def _of_ultrafeedback(columns: Columns, *_: Any) -> Columns:
    def talks(answers: Sequence[str]) -> list[list[dict[str, str]]]:
        return [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            for prompt, answer in zip(columns["prompt"], answers, strict=True)
        ]

    number = len(columns["prompt"])
    return {"chosen": talks(texts(number, 1)), "rejected": talks(texts(number, 2))}


ALIKE = {
    "newsgroups": _of_newsgroups, "mrqa": _of_mrqa, "alpaca-gpt4": _of_alpaca,
    "code-alpaca": _of_alpaca, "ultrafeedback": _of_ultrafeedback,
}  # fmt: skip


def newsgroups(number: int, seed: int) -> datasets.Dataset:
    """Generate examples of 20 Newsgroups."""
    return examples("newsgroups", "default", "train", number, seed)


# preset, GLUE task -> data set of tests/support/published, subset
DATA = {
    ("cifar100-vit-b16", ""): ("cifar100", "cifar100"),
    ("svhn-vit-b16", ""): ("svhn", "cropped_digits"),
    ("fashion-vit", ""): ("fashion_mnist", "fashion_mnist"),
    ("newsgroups-t5", ""): ("newsgroups", "default"),
    ("mrqa-t5", ""): ("mrqa", "plain_text"),
    **{("glue-llama", task): ("glue", task) for task in ("sst2", "mnli", "qnli", "qqp", "rte")},
    ("general-nlp", ""): ("alpaca-gpt4", "default"),
    ("finance", ""): ("fingpt-sentiment", "default"),
    ("medical", ""): ("medical-flashcards", "default"),
    ("code", ""): ("code-alpaca", "default"),
    ("preference", ""): ("ultrafeedback", "default"),
}
FLOWERTUNE = ("general-nlp", "finance", "medical", "code")
OF_DECODERS = (*FLOWERTUNE, "preference")  # presets of models that generate answers
SOURCES = published("mrqa")["values"]["train"]["subset"]
ARCHITECTURES = {
    "cifar100-vit-b16": "vit", "svhn-vit-b16": "vit", "newsgroups-t5": "t5", "mrqa-t5": "t5",
    "glue-llama": "llama", "fashion-vit": "vit", **dict.fromkeys(OF_DECODERS, "mistral"),
}  # fmt: skip


def save_data(
    preset: str, folder: Path, glue_task: str = "", train: int = 120, test: int = 40
) -> Path:
    """Save a data set's repository: its files, and README.md, which lists them."""
    name, subset = DATA[preset, glue_task]
    facts = published(name)
    kind = facts["format"]
    made = []
    for number, split in enumerate(facts["subsets"][subset]["splits"]):
        few = examples(
            name, subset, split, train if split.startswith("train") else test, 100 * number
        )
        files = {"parquet": f"{subset}/{split}-00000-of-00001.parquet", "json": f"{split}.jsonl"}
        path = folder / files[kind]
        path.parent.mkdir(parents=True, exist_ok=True)
        {"parquet": few.to_parquet, "json": few.to_json}[kind](path)
        made.append(f"  - split: {split}\n    path: {path.relative_to(folder)}")
    lines = ["---", "configs:", f"- config_name: {subset}", "  data_files:", *made, "---", ""]
    card = "" if kind == "json" else "\n".join(lines)  # files of such names need no card
    (folder / "README.md").write_text(card)
    return folder


def small_decoder(folder: Path) -> dict[str, Scalar]:
    """Save a decoder large enough for quantization, and its data; return settings for both."""
    save_model("llama", folder / "model", hidden_size=64, intermediate_size=128)
    save_data("glue-llama", folder / "data", "rte")
    return {
        "preset": "glue-llama", "glue-task": "rte", "model": str(folder / "model"),
        "data": str(folder / "data"), "lora-rank": 4, "max-length": 16, "batch-size": 8,
        "learning-rate": 1e-2,
    }  # fmt: skip
