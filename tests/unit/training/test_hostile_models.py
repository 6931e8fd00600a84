"""Malicious model folders: their files are checked before a model is built."""

import json
import os
import time
import tracemalloc

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
from PIL import Image

from ravan_flwr.config.run_config import read_config
from ravan_flwr.data.model_folder import model_folder
from ravan_flwr.specs import ModelSpec
from ravan_flwr.tasks import get_task
from ravan_flwr.training.network import build_network, build_skeleton
from tests.support.tiny import MODELS, OF_IMAGES, save_model


def spec(folder):
    return ModelSpec("hub", str(folder))


def task(kind, folder):
    preset = "cifar100-vit-b16" if kind in OF_IMAGES else "glue-llama"
    preset = "newsgroups-t5" if kind == "t5" else preset
    config = read_config({"preset": preset} | ({"glue-task": "rte"} if "glue" in preset else {}))
    return get_task(config.task)(config.data, 16, lambda: model_folder(spec(folder)))


def build(kind, folder):
    return build_network(spec(folder), task(kind, folder), 0)


def changed(folder, name="config.json", **changes):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


ABSURD = [
    ("bert", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1,000,000,000, expected 1,024"),
    ("bert", {"vocab_size": 10**12}, "vocab_size = 1,000,000,000,000, expected 16,777,216"),
    ("bert", {"hidden_size": 2**30}, "hidden_size = 1,073,741,824, expected"),
    ("llama", {"max_position_embeddings": 10**15}, "max_position_embeddings = 1,000,"),
    ("vit", {"num_hidden_layers": -(10**9)}, "num_hidden_layers = -1,000,000,000, expected"),
    ("swin", {"depths": [1, 10**9]}, "depths = 1,000,000,000, expected 1,024"),
    ("bert", {"text_config": {"num_layers": 10**9}}, "num_layers = 1,000,000,000, expected"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), ABSURD)
def test_absurd_sizes_are_refused_before_anything_is_built(kind, changes, message, tmp_path):
    """Transformers and the tokenizer's loader make a list of a billion layers."""
    changed(folder := save_model(kind, tmp_path / "model"), **changes)
    tracemalloc.start()
    start = time.process_time()
    for use in (
        lambda: build(kind, folder),
        lambda: build_skeleton(spec(folder), task(kind, folder)),
        lambda: task(kind, folder).reader,
    ):
        with pytest.raises(ValueError, match=f"its config.json cannot be used .*{message}"):
            use()
    assert time.process_time() - start < 60  # a second; a billion layers would take hours
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


# Possible sizes that differ from those of the files.
LARGER = [
    ("bert", {"num_hidden_layers": 1000}),
    ("bert", {"vocab_size": 2**24}),
    ("bert", {"hidden_size": 2**15, "intermediate_size": 2**15}),
    ("roberta", {"max_position_embeddings": 2**23}),
    ("llama", {"intermediate_size": 2**22}),
    ("t5", {"d_ff": 2**22}),
    ("vit", {"image_size": 2**13, "patch_size": 1}),
    ("bert", {"id2label": {str(n): str(n) for n in range(20)}, "hidden_size": 2**14}),
]


@pytest.mark.parametrize(("kind", "changes"), LARGER)
def test_a_network_is_no_larger_than_its_weights(kind, changes, tmp_path, monkeypatch):
    """Each would take gigabytes, since missing weights are drawn before they are reported."""
    changed(folder := save_model(kind, tmp_path / "model"), **changes)

    def load(*_, **__):
        raise AssertionError("weights are made")

    monkeypatch.setattr(transformers.modeling_utils.PreTrainedModel, "_load_pretrained_model", load)
    start = time.process_time()
    with pytest.raises(ValueError, match="describes a larger network than the weights are"):
        build(kind, folder)
    assert time.process_time() - start < 60  # a thousand layers without weights take 4 seconds


@pytest.mark.parametrize("kind", MODELS)
def test_every_architecture_fits_its_own_weights(kind, tmp_path):
    folder = save_model(kind, tmp_path / "model")
    assert build(kind, folder).size > 0
    torch.nn.Embedding(2**13, 2**13, device="meta")  # no limit stays in effect


CODE = [
    {"attn_implementation": "kernels-community/flash-attn"},
    {"_attn_implementation": "somebody/kernel:attend"},
    {"attn_implementation": {"": "somebody/kernel"}},
    {"_attn_implementation": "flash_attention_2"},
]


@pytest.mark.parametrize("changes", CODE)
def test_a_model_does_not_choose_the_code_of_its_attention(changes, tmp_path, monkeypatch):
    """Transformers would fetch that code from the hub, and run it."""
    fetched = []
    monkeypatch.setattr(
        transformers.modeling_utils,
        "lazy_import_flash_attention",
        lambda name, **_: fetched.append(name),
    )
    changed(folder := save_model("bert", tmp_path / "model"), **changes)
    for use in (lambda: build("bert", folder),
                lambda: build_skeleton(spec(folder), task("bert", folder))):  # fmt: skip
        assert use().network.config._attn_implementation == "sdpa"
    assert not fetched


def test_a_models_required_attention_is_kept(tmp_path):
    changed(folder := save_model("bert", tmp_path / "model"), attn_implementation="eager")
    assert build("bert", folder).network.config._attn_implementation == "eager"


def test_only_the_weight_files_are_loaded(tmp_path):
    folder = save_model("bert", tmp_path / "model")
    before = build("bert", folder).network.bert.embeddings.word_embeddings.weight
    state = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(
        {name: tensor + 1 for name, tensor in state.items()}, folder / "other.safetensors",
        {"format": "pt"},
    )  # fmt: skip
    changed(folder, transformers_weights="other.safetensors")
    assert torch.equal(build("bert", folder).network.bert.embeddings.word_embeddings.weight, before)


def test_quantised_weights_are_refused(tmp_path):
    """The model chooses the code that unpacks them, which may be fetched as well."""
    folder = save_model("bert", tmp_path / "model")
    changed(folder, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ValueError, match="quantization_config: its weights are quantized"):
        build("bert", folder)


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    folder = save_model("bert", tmp_path / "model")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    with pytest.raises(ValueError, match="has an adapter_config.json, expected a model without"):
        model_folder(spec(folder))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "added.txt"])
def test_files_of_a_model_must_be_regular_files(name, tmp_path):
    folder = save_model("bert", tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=f"its {name} cannot be used .*is a pipe or a device"):
        _ = task("bert", folder).reader


def test_the_size_of_a_models_files_is_limited(tmp_path):
    folder = save_model("bert", tmp_path / "model")
    with (folder / "config.json").open("ab") as file:
        file.truncate(2**36)  # a sparse file
    with pytest.raises(ValueError, match=r"config.json has 68,719,476,736 bytes, expected"):
        build("bert", folder)


@pytest.mark.parametrize(
    "size", [{"height": 10**6, "width": 10**6}, {"shortest_edge": 10**6}, [16, 10**6], 10**6]
)
def test_an_image_processor_with_huge_images_is_refused(size, tmp_path):
    folder = save_model("vit", tmp_path / "model")
    changed(folder, "preprocessor_config.json", size=size)
    with pytest.raises(ValueError, match=r"size = 1,000,000, expected 4,096 at most"):
        task("vit", folder).inputs({"image": [Image.fromarray(np.zeros((8, 8), np.uint8))]})
