"""Write the code of a model card: the lines of transformers that use what a folder holds."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ravan_flwr.tasks import get_task

HERE = '"this folder"'
ANSWERS = "text-generation"  # the pipeline


@dataclass(frozen=True)
class Code:
    """Hold lines, and the imports that they need: whole ones, and names of transformers."""

    imports: tuple[str, ...]
    lines: tuple[str, ...]

    def __add__(self, other: "Code") -> "Code":
        return Code((*self.imports, *other.imports), (*self.lines, *other.lines))

    def __str__(self) -> str:
        names = sorted(name for name in self.imports if " " not in name)
        whole = {name for name in self.imports if " " in name}
        standard = sorted(whole & _STANDARD, reverse=True)
        others = sorted({*whole - _STANDARD, f"from transformers import {', '.join(names)}"})
        between = [""] if standard else []
        return "\n".join([*standard, *between, *others, "", *self.lines])


_STANDARD = {"import json", "from pathlib import Path"}


def code_of(config: Mapping[str, Any], form: str, *, one_channel: bool) -> Code:
    """Write the code that uses a run's result, for a form of export."""
    task = get_task(config["task"])
    model = Code((), ())
    if form != "merged":
        model = _labels(config) + _backbone(config, task.auto_class) + _adapter(_has_labels(config))
    if form == "ravan":
        model += Code(("from ravan_flwr import RavanConfig  # PEFT loads it by this",), ())
    if task.pipeline == ANSWERS:
        return model + _answering(config["data"], form)
    if not task.pipeline:
        if form == "merged":
            model = Code(
                (task.auto_class,), (f"model = {task.auto_class}.from_pretrained({HERE})",)
            )
        return model + _generating(config["data"])
    return model + _pipeline(task.pipeline, form) + _example(config, one_channel)


def _backbone(config: Mapping[str, Any], auto_class: str) -> Code:
    """Load the network that an adapter goes onto, with as many labels."""
    spec = config["model"]
    if spec["source"] == "bundled":
        name, kind = _literal(spec["name"]), _literal(config["task"])
        return Code(
            (
                "from ravan_flwr.specs import DataSpec, ModelSpec",
                "from ravan_flwr.tasks import get_task",
                "from ravan_flwr.training.network import build_network",
            ),
            (
                'data = DataSpec("bundled", labels=tuple(labels))',
                f"task = get_task({kind})(data, 0, lambda: None)",
                f'backbone = build_network(ModelSpec("bundled", {name}), task, seed=0).network',
            ),
        )
    told = _literal(spec["name"])
    if spec["revision"]:
        told += f", revision={_literal(spec['revision'])}"
    if config["data"]["labels"] and _has_labels(config):
        told += f", num_labels={len(config['data']['labels'])}"
    return Code((auto_class,), (f"backbone = {auto_class}.from_pretrained({told})",))


def _labels(config: Mapping[str, Any]) -> Code:
    """Read the names of the classes, where there are some: a PEFT folder has no place for them."""
    if not _has_labels(config):
        return Code((), ())
    read = f'Path({HERE}, "labels.json").read_text(encoding="utf-8")'
    return Code(("import json", "from pathlib import Path"), (f"labels = json.loads({read})",))


def _has_labels(config: Mapping[str, Any]) -> bool:
    """Tell whether a pipeline is to know the names of classes."""
    task = get_task(config["task"])
    return bool(task.pipeline) and task.classifies


def _adapter(labelled: bool) -> Code:
    """Put the adapter onto the backbone, and the names of the classes into its configuration."""
    lines = [f"model = PeftModel.from_pretrained(backbone, {HERE}).merge_and_unload()"]
    if labelled:
        lines.append("model.config.id2label = dict(enumerate(labels))")
    return Code(("from peft import PeftModel",), tuple(lines))


def _pipeline(pipeline: str, form: str) -> Code:
    """Make the pipeline; an adapter's reader is named, since the model comes from elsewhere."""
    told = HERE
    if form != "merged":
        told = f"model, {_READERS[pipeline]}={HERE}"
    if pipeline == "text-classification":
        told += ", truncation=True"
    lines = [f'classify = pipeline("{pipeline}", {told})']
    if pipeline == "text-classification" and form != "merged":  # a decoder reads its last token
        lines.append("model.config.pad_token_id = classify.tokenizer.pad_token_id")
    return Code(("pipeline",), tuple(lines))


_READERS = {"image-classification": "image_processor", "text-classification": "tokenizer"}


def _example(config: Mapping[str, Any], one_channel: bool) -> Code:
    """Classify one example."""
    roles = dict(config["data"].get("columns", ()))
    if one_channel:  # a pipeline makes every image file one of three channels
        return Code(
            ("import numpy", "from PIL import Image"),
            (
                'image = Image.open("image.png").convert("L")',
                "found = classify(numpy.asarray(image)[..., None])",
            ),
        )
    if config["task"] == "vision":
        told = '"image.png"'
    elif "text-pair" in roles:
        told = '{"text": "a text", "text_pair": "another text"}'
    else:
        told = '"a text"'
    return Code((), (f"found = classify({told})",))


def _answering(data: Mapping[str, Any], form: str) -> Code:
    """Let a language model go on, as the run did: with a conversation, or with a prompt."""
    told = HERE if form == "merged" else f"model, tokenizer={HERE}"
    lines = [f'answer = pipeline("{ANSWERS}", {told})']
    if data["prompts"]:
        prompt = data["prompts"][0]
        lines.append(f"asked = {_literal(prompt)}.format({_values(data, prompt)})")
    else:
        lines.append('asked = [{"role": "user", "content": "a question"}]')
    options = f"max_new_tokens={data['target-length']}, do_sample=False, return_full_text=False"
    return Code(("pipeline",), (*lines, f"found = answer(asked, {options})"))


def _values(data: Mapping[str, Any], prompt: str) -> str:
    """Give each column in a prompt something to stand for."""
    asked = [role for role, _ in data["columns"] if f"{{{role}}}" in prompt]
    return ", ".join(f'{role}="a {role}"' for role in asked)


def _generating(data: Mapping[str, Any]) -> Code:
    """Write an answer to one prompt, as the run did."""
    values = _values(data, data["prompt"])
    options = f"max_new_tokens={data['target-length']}, do_sample=False, num_beams=1"
    return Code(
        ("AutoTokenizer",),
        (
            f"tokenizer = AutoTokenizer.from_pretrained({HERE})",
            f"prompt = {_literal(data['prompt'])}.format({values})",
            'tokens = tokenizer(prompt, truncation=True, return_tensors="pt")',
            f"written = model.generate(**tokens, {options})",
            "found = tokenizer.decode(written[0], skip_special_tokens=True)",
        ),
    )


def about(config: Mapping[str, Any], form: str, *, one_channel: bool) -> str:
    """Say in a sentence or two what the code does with an example."""
    pipeline = get_task(config["task"]).pipeline
    onto = "An adapter goes onto the backbone that it was trained on. " if form != "merged" else ""
    if one_channel:
        return onto + (
            "The model takes images of one channel, but a pipeline makes every image file one of "
            "three. So give it arrays of bytes, (height, width, 1), as here; "
            "`preprocessor_config.json` has the size, and how bytes become numbers."
        )
    if pipeline == "image-classification":
        return onto + (
            "The pipeline brings an image to the model's size, and scales it as the run did "
            "(`preprocessor_config.json`)."
        )
    if pipeline == ANSWERS:
        return onto + (
            "The pipeline goes on with a conversation, by the tokenizer's chat template, or with a "
            "text, which is to be written as the run's examples were."
        )
    if pipeline:
        return onto + (
            "The pipeline cuts a text off where the run did (`model_max_length` in "
            "`tokenizer_config.json`)."
        )
    return onto + "The model writes a text; transformers 5 has no pipeline for that."


def _literal(value: object) -> str:
    """Write a text as one of Python, which a JSON text is."""
    return json.dumps(value, ensure_ascii=False)
