"""Write the code of a model card: the lines of transformers that use what a folder holds."""

import json
from collections.abc import Mapping
from typing import Any

from ravan_flwr.tasks import get_task
from ravan_flwr.templates import filled

ANSWERS = "text-generation"  # the pipeline


def code_of(config: Mapping[str, Any], form: str, *, one_channel: bool) -> str:
    """Write the code that uses a run's result, for a form of export."""
    task, data, spec = get_task(config["task"]), config["data"], config["model"]
    adapter, bundled = form != "merged", spec["source"] == "bundled"
    labelled = adapter and bool(task.pipeline) and task.classifies  # a PEFT folder has no names
    names = {"pipeline" if task.pipeline else "AutoTokenizer"}
    if (adapter and not bundled) or not (adapter or task.pipeline):
        names.add(task.auto_class)
    prompt = data["prompts"][0] if data.get("prompts") else data.get("prompt", "")
    columns = dict(data.get("columns", ()))
    values = [f'{role}="a {role}"' for role in columns if f"{{{role}}}" in prompt]
    return filled(
        CODE,
        {"literal": _literal},
        form=form,
        adapter=adapter,
        bundled=bundled,
        labelled=labelled,
        names=", ".join(sorted(names)),
        task=config["task"],
        pipeline=task.pipeline,
        auto_class=task.auto_class,
        spec=spec,
        classes=len(data["labels"]) if labelled else 0,
        conversation=not data.get("prompts"),
        prompt=prompt,
        values=", ".join(values),
        target_length=data.get("target-length"),
        pairs="text-pair" in columns,
        one_channel=one_channel and bool(task.pipeline),
    ).rstrip()


CODE = """\
{% set here = '"this folder"' %}
{% if labelled %}
import json
from pathlib import Path

{% endif %}
{% if one_channel %}
import numpy
{% endif %}
{% if adapter %}
from peft import PeftModel
{% endif %}
{% if one_channel %}
from PIL import Image
{% endif %}
{% if form == "ravan" %}
from ravan_flwr import RavanConfig  # PEFT loads it by this
{% endif %}
{% if adapter and bundled %}
from ravan_flwr.specs import DataSpec, ModelSpec
from ravan_flwr.tasks import get_task
from ravan_flwr.training.network import build_network
{% endif %}
from transformers import {{ names }}

{% if labelled %}
labels = json.loads(Path({{ here }}, "labels.json").read_text(encoding="utf-8"))
{% endif %}
{% if adapter and bundled %}
data = DataSpec("bundled", labels=tuple(labels))
task = get_task({{ task | literal }})(data, 0, lambda: None)
backbone = build_network(ModelSpec("bundled", {{ spec.name | literal }}), task, seed=0).network
{% elif adapter %}
backbone = {{ auto_class }}.from_pretrained({{ spec.name | literal }}
{%- if spec.revision %}, revision={{ spec.revision | literal }}{% endif %}
{%- if classes %}, num_labels={{ classes }}{% endif %})
{% elif not pipeline %}
model = {{ auto_class }}.from_pretrained({{ here }})
{% endif %}
{% if adapter %}
model = PeftModel.from_pretrained(backbone, {{ here }}).merge_and_unload()
{% endif %}
{% if labelled %}
model.config.id2label = dict(enumerate(labels))
{% endif %}
{% if not pipeline and prompt %}
tokenizer = AutoTokenizer.from_pretrained({{ here }})
prompt = {{ prompt | literal }}.format({{ values }})
tokens = tokenizer(prompt, truncation=True, return_tensors="pt")
written = model.generate(**tokens, max_new_tokens={{ target_length }}, do_sample=False, num_beams=1)
found = tokenizer.decode(written[0], skip_special_tokens=True)
{% elif pipeline == "text-generation" %}
answer = pipeline("text-generation", {% if adapter %}model, tokenizer={% endif %}{{ here }})
{% if conversation %}
asked = [{"role": "user", "content": "a question"}]
{% else %}
asked = {{ prompt | literal }}.format({{ values }})
{% endif %}
found = answer(asked, max_new_tokens={{ target_length }}, do_sample=False, return_full_text=False)
{% elif pipeline == "image-classification" %}
classify = pipeline("{{ pipeline }}", {% if adapter %}model, image_processor={% endif %}{{ here }})
{% if one_channel %}
image = Image.open("image.png").convert("L")
found = classify(numpy.asarray(image)[..., None])
{% else %}
found = classify("image.png")
{% endif %}
{% else %}
classify = pipeline(
    "{{ pipeline }}", {% if adapter %}model, tokenizer={% endif %}{{ here }}, truncation=True
)
{% if adapter %}
model.config.pad_token_id = classify.tokenizer.pad_token_id
{% endif %}
found = classify({{ '{"text": "a text", "text_pair": "another text"}' if pairs else '"a text"' }})
{% endif %}
"""


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
            "The pipeline continues a conversation, by the tokenizer's chat template, or a text, "
            "which is to be written as the run's examples were."
        )
    if pipeline:
        return onto + (
            "The pipeline cuts a text off where the run did (`model_max_length` in "
            "`tokenizer_config.json`)."
        )
    if config["data"]["prompt"]:
        return onto + "The model writes a text; transformers 5 has no pipeline for that."
    return onto + "transformers 5 has no pipeline for what the model reads."


def _literal(value: object) -> str:
    """Write a text as one of Python, which a JSON text is."""
    return json.dumps(value, ensure_ascii=False)
