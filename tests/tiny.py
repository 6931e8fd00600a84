"""Small models with random weights and small data sets, with the files and schemas of the real."""

import json
import random
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from datasets import ClassLabel, Features, Image, List, Value
from PIL import Image as Picture
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from ravan_flwr.preset import Preset

SIDES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
PIXELS: dict[str, Any] = {**SIDES, "intermediate_size": 24, "image_size": 16, "patch_size": 8}
TOKENS: dict[str, Any] = {**SIDES, "intermediate_size": 24, "vocab_size": 300}
DECODER: dict[str, Any] = {**TOKENS, "num_key_value_heads": 1}

START: dict[str, Any] = {"decoder_start_token_id": 0}  # of T5, by its config.json

# architecture -> (what is saved, as a checkpoint without a head for the task, its configuration)
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


def save_model(kind, folder, **changes):
    """A folder as on the hub: configuration, weights, and what reads examples."""
    made, config = MODELS[kind]
    config = type(config).from_dict(config.to_dict() | changes)
    torch.manual_seed(0)
    made(config).save_pretrained(folder)
    if kind in OF_IMAGES:
        reader = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True, "size": {"height": 16, "width": 16}, "resample": 2,
            "do_rescale": True, "rescale_factor": 1 / 255,
            "do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2],
        }  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(reader))
    else:
        save_tokenizer(kind, folder)
    return folder


def save_tokenizer(kind, folder):
    """Words of the small data sets, whole or in pieces."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special)
    tokenizer.train_from_iterator([" ".join(WORDS), *_labels("newsgroups-t5")], trainer)
    end = "$A </s>", "$A </s> $B </s>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=end[0], pair=end[1], special_tokens=[("</s>", 2)]
    )
    from tokenizers.decoders import Metaspace

    tokenizer.decoder = Metaspace()
    decoder = kind in {"llama", "qwen2"}  # whose tokenizers have no token for padding
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token=None if decoder else "<pad>",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)


WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "tu") for b in ("ne", "ra", "so", "vi", "pe")]


def texts(number, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, 12))) for _ in range(number)]


def _labels(preset):
    return Preset.read(preset).data.labels


def pictures(labels, seed=0):
    """Noise around a grey that tells the label."""
    draw = np.random.default_rng(seed)
    shades = (
        draw.integers(0, 60, (len(labels), 20, 20, 3))
        + 4 * np.asarray(labels)[:, None, None, None] % 190
    )
    return [Picture.fromarray(shade.astype(np.uint8)) for shade in shades]


def cifar100(number, seed):
    names = list(_labels("cifar100-vit-b16"))
    fine = [i % 6 * 15 for i in range(number)]
    features = Features(
        {
            "img": Image(),
            "fine_label": ClassLabel(names=names),
            "coarse_label": ClassLabel(num_classes=20),
        }
    )
    columns = {"img": pictures(fine, seed), "fine_label": fine, "coarse_label": [0] * number}
    return datasets.Dataset.from_dict(columns, features=features)


def svhn(number, seed):
    labels = [i % 10 for i in range(number)]
    names = [str(digit) for digit in range(10)]
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    columns = {"image": pictures(labels, seed), "label": labels}
    return datasets.Dataset.from_dict(columns, features=features)


def newsgroups(number, seed):
    labels = [i % 20 for i in range(number)]
    names = _labels("newsgroups-t5")
    return datasets.Dataset.from_dict(
        {
            "text": [f"{{{text}}}" for text in texts(number, seed)],  # braces are text, too
            "label": labels,
            "label_text": [names[label] for label in labels],
        }
    )


SOURCES = ("SQuAD", "NewsQA", "TriviaQA-web", "SearchQA", "HotpotQA", "NaturalQuestionsShort")


def mrqa(number, seed):
    spans = Features({"start": List(Value("int32")), "end": List(Value("int32"))})
    features = Features(
        {
            "subset": Value("string"),
            "context": Value("string"),
            "context_tokens": {"tokens": List(Value("string")), "offsets": List(Value("int32"))},
            "qid": Value("string"),
            "question": Value("string"),
            "question_tokens": {"tokens": List(Value("string")), "offsets": List(Value("int32"))},
            "detected_answers": {
                "text": List(Value("string")),
                "char_spans": List(spans),
                "token_spans": List(spans),
            },
            "answers": List(Value("string")),
        }
    )
    contexts = texts(number, seed)
    nothing: dict[str, list[str]] = {"tokens": [], "offsets": []}
    detected: dict[str, list[str]] = {"text": [], "char_spans": [], "token_spans": []}
    return datasets.Dataset.from_list(
        [
            {
                "subset": SOURCES[i % len(SOURCES)],
                "context": context,
                "context_tokens": nothing,
                "qid": str(i),
                "question": "what is first",
                "question_tokens": nothing,
                "detected_answers": detected,
                "answers": [context.split()[0], context.split()[1]],
            }
            for i, context in enumerate(contexts)
        ],
        features=features,
    )


def glue(task):
    spec = Preset.read("glue-llama").glue_tasks[task]
    columns = [spec.column(role) for role in ("text", "text-pair") if spec.column(role)]

    def make(number, seed):
        labels = [i % len(spec.labels) for i in range(number)]
        features = {column: Value("string") for column in columns}
        features |= {"label": ClassLabel(names=list(spec.labels)), "idx": Value("int32")}
        content = {column: texts(number, seed + i) for i, column in enumerate(columns)}
        content |= {"label": labels, "idx": list(range(number))}
        return datasets.Dataset.from_dict(content, features=Features(features))

    return make


# preset, GLUE task -> (who makes its examples, the subset, its splits beside train)
DATA = {
    ("cifar100-vit-b16", ""): (cifar100, "", ["test"]),
    ("svhn-vit-b16", ""): (svhn, "cropped_digits", ["test", "extra"]),
    ("newsgroups-t5", ""): (newsgroups, "", ["test"]),
    ("mrqa-t5", ""): (mrqa, "", ["validation", "test"]),
    ("glue-llama", "sst2"): (glue("sst2"), "sst2", ["validation"]),
    ("glue-llama", "mnli"): (
        glue("mnli"), "mnli", ["validation_matched", "validation_mismatched"],
    ),
    ("glue-llama", "qnli"): (glue("qnli"), "qnli", ["validation"]),
    ("glue-llama", "qqp"): (glue("qqp"), "qqp", ["validation"]),
    ("glue-llama", "rte"): (glue("rte"), "rte", ["validation"]),
}  # fmt: skip
ARCHITECTURES = {
    "cifar100-vit-b16": "vit", "svhn-vit-b16": "vit", "newsgroups-t5": "t5", "mrqa-t5": "t5",
    "glue-llama": "llama",
}  # fmt: skip


def save_data(preset, folder, glue_task="", train=120, test=40):
    """A copy of the data set's repository: parquet files, and README.md to say which is which."""
    make, subset, others = DATA[preset, glue_task]
    files = []
    for number, split in enumerate(["train", *others]):
        path = folder / (subset or "data") / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        make(train if split == "train" else test, 100 * number).to_parquet(path)
        files.append((split, path.relative_to(folder)))
    lines = [f"  - split: {split}\n    path: {path}" for split, path in files]
    (folder / "README.md").write_text(
        "\n".join(
            ["---", "configs:", f"- config_name: {subset or 'default'}", "  data_files:", *lines,
             "---", ""]
        )
    )  # fmt: skip
    return folder
