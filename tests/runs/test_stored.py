"""A backbone stored in 16 bits: the same bits as from 32, in half the memory."""

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from ravan_flwr import result_of, simulate
from ravan_flwr.adapters.stored import StoredEmbedding, StoredLinear, store_in
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.results.export import merged_network
from ravan_flwr.seeding import ClientRound
from ravan_flwr.training.cost import step_memory
from ravan_flwr.training.local_steps import ClientWork, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.network import backbone_dtype, stored_dtype
from ravan_flwr.training.step import TrainingSettings
from tests.runs.small_models import small_settings
from tests.short_runs import same_bits
from tests.support.tiny import MODELS, save_model

KINDS = ["llama", "phi3", "bert", "t5", "vit"]


def save_in_16_bits(kind, folder):
    """Save a small model as a checkpoint without a classifier, with weights in bfloat16."""
    save_model(kind, folder)
    model_class, _ = MODELS[kind]
    model_class.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")

    def settings_of(kind):
        return small_settings(folder, kind, "rte", save_in_16_bits) | {"device": "cpu"}

    return settings_of


def load_both(settings, **more):
    return [
        ModelAndData(read_config(settings | more | {"backbone-dtype": dtype}))
        for dtype in ("float32", "bfloat16")
    ]


def upload_of(loaded):
    steps = TrainingSettings(2, 8, 1e-2, loaded.config.precision)
    examples, state = loaded.partition(0, 4).train, loaded.model.initial_state()
    work = ClientWork(examples, state, 1.0, steps, ClientRound(0, 1, 0))
    return train_locally(loaded.model, loaded.task, work).upload


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_backbone_in_16_bits_computes_the_same_bits(kind, precision, settings):
    full_precision, stored = load_both(settings(kind), precision=precision)
    assert same_bits(upload_of(full_precision), upload_of(stored))
    assert full_precision.evaluate() == stored.evaluate()


class FrozenCasts(TorchDispatchMode):
    """Count the casts of frozen tensors of the network to 16 bits."""

    def __init__(self, network):
        super().__init__()
        tensors = [*network.parameters(), *network.buffers()]
        self.frozen = {t.data_ptr(): t for t in tensors if not t.requires_grad and t.dim() == 2}
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        copies = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype")
        self.number += copies == torch.bfloat16 and args[0].data_ptr() in self.frozen
        return func(*args, **(kwargs or {}))


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("kind", ["vit", "t5"])
@pytest.mark.parametrize("method", ["ravan", "fedit"])
def test_frozen_weights_are_cast_once_and_not_in_every_step(kind, method, settings, monkeypatch):
    run_settings = settings(kind) | {"precision": "bfloat16", "method": method, "seed": 2}
    cached = ModelAndData(read_config(run_settings))
    assert upload_of(cached)
    with FrozenCasts(cached.model.network) as casts:
        actual = upload_of(cached)
    measured = cached.evaluate()
    # Without the cache, every step casts the weights.
    monkeypatch.setattr("ravan_flwr.training.model_and_data.keep_casts", lambda *_, **__: None)
    plain = ModelAndData(read_config(run_settings))
    with FrozenCasts(plain.model.network) as casts_before:
        expected = upload_of(plain)
    assert same_bits(actual, expected)
    assert measured == plain.evaluate()
    assert casts.number == 0
    assert casts_before.number > 8


def test_a_cached_cast_follows_its_weight(settings):
    run_settings = settings("vit") | {"precision": "bfloat16", "seed": 3}
    loaded = ModelAndData(read_config(run_settings))
    loaded.evaluate()
    linear = next(m for m in loaded.model.network.modules() if isinstance(m, StoredLinear))
    x = torch.randn(2, linear.in_features)
    with torch.no_grad():
        linear.weight.mul_(2)
        with torch.autocast("cpu", torch.bfloat16):
            expected = torch.nn.functional.linear(x, linear.weight, linear.bias)
            assert torch.equal(linear(x), expected)
        assert linear(x).dtype == torch.float32
    # No cache with checkpointing, which saves memory, in float32, and of trained weights.
    for changes in ({"gradient-checkpointing": True}, {"precision": "float32"}, {"method": "full"}):
        network = ModelAndData(read_config(run_settings | changes)).model.network
        assert not any(hasattr(p, "kept_cast") for p in network.parameters())


FROZEN = [name for name, method in METHODS.items() if method.frozen_backbone]


@pytest.mark.parametrize(
    ("method", "form"), [("ravan", "merged"), *((name, "factored") for name in FROZEN)]
)
@pytest.mark.parametrize("kind", ["llama", "vit"])  # a ViT's layers have a bias
def test_each_method_uploads_the_same_bits(kind, method, form, settings):
    full_precision, stored = load_both(settings(kind), method=method, scoring="weight")
    for adapter in (*full_precision.model.adapters, *stored.model.adapters):
        adapter.form = form
    assert same_bits(upload_of(full_precision), upload_of(stored))


def test_linear_layers_and_embeddings_are_in_16_bits_and_all_others_in_32(settings):
    network = load_both(settings("llama"))[1].model.network
    kinds = {type(m): m.weight.dtype for m in network.modules() if hasattr(m, "weight")}
    assert kinds.pop(StoredLinear) == kinds.pop(StoredEmbedding) == torch.bfloat16
    assert set(kinds.values()) == {torch.float32}
    assert network.get_parameter("score.weight").dtype == torch.float32  # the classifier


def test_a_weight_shared_by_two_modules_stays_shared():
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    network = transformers.LlamaForCausalLM(config)
    network.tie_weights()
    store_in(network, torch.bfloat16, [])
    head, embedding = network.lm_head, network.get_input_embeddings()
    assert isinstance(head, StoredLinear)
    assert head.weight is embedding.weight
    assert head.weight.dtype == torch.bfloat16
    tokens = torch.arange(12).view(2, 6)
    assert network(tokens, labels=tokens).loss.dtype == torch.float32


def test_neither_32_bit_copies_nor_autocasts_of_weights_are_saved_for_the_backward_pass(settings):
    def memory(dtype, precision):
        more = {"backbone-dtype": dtype, "precision": precision}
        return step_memory(read_config(settings("llama") | more), 1.0)

    network = load_both(settings("llama"))[1].model.network
    num_16_bit = sum(p.numel() for p in network.parameters() if p.dtype == torch.bfloat16)
    first, second = (memory(dtype, "float32") for dtype in ("float32", "bfloat16"))
    assert first.weights - second.weights == 2 * num_16_bit
    assert first.activations == second.activations
    first, second = (memory(dtype, "bfloat16") for dtype in ("float32", "bfloat16"))
    copies = sum(m.weight.numel() for m in network.modules() if isinstance(m, StoredLinear))
    assert first.activations - second.activations == 2 * copies


def test_auto_is_the_checkpoints_dtype_on_a_gpu_and_float32_on_a_cpu(settings):
    config = read_config(settings("llama"))
    assert backbone_dtype(config, "cpu") == torch.float32
    assert backbone_dtype(config, "cuda") == stored_dtype(config.model) == torch.bfloat16
    for changes in ({"method": "fedex-lora"}, {"init": "first-round"}):
        changing = read_config(settings("llama") | changes)
        assert backbone_dtype(changing, "cuda") == torch.float32


def test_a_merged_export_rounds_once(settings, tmp_path):
    run_settings = settings("llama") | {"output-dir": str(tmp_path), "backbone-dtype": "bfloat16"}
    with result_of(simulate(run_settings | {"processes": 1}, 2).run_dir) as loaded:
        assert loaded.config.backbone_dtype == "bfloat16"
        name = f"{loaded.model.layers[0].name}.weight"
        merged = merged_network(loaded).get_parameter(name)
        source = transformers.AutoModelForCausalLM.from_pretrained(
            str(run_settings["model"]), dtype=torch.float32
        )
        (delta, *_) = loaded.model.method.delta_weights(loaded.model.adapters)
        expected = source.get_parameter(name) + delta
    assert merged.dtype == torch.float32
    np.testing.assert_array_equal(merged.detach().numpy(), expected.detach().numpy())
