"""A backbone kept in 16 bits: the same bits come out as from 32, in half the memory."""

import json

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from ravan_flwr import result_of, simulate
from ravan_flwr.adapters.stored import StoredEmbedding, StoredLinear, store_in
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.reports.export import merged_network
from ravan_flwr.seeding import ClientRound
from ravan_flwr.training.cost import step_memory
from ravan_flwr.training.local_steps import LocalSteps, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.network import backbone_dtype, stored_dtype
from testing.tiny import MODELS, OF_IMAGES, save_data, save_model

KINDS = ["llama", "phi3", "bert", "t5", "vit"]


def save_in_16_bits(kind, folder):
    """Save a small model as its checkpoint is: its classifier left out, its weights in bfloat16."""
    save_model(kind, folder)
    made, _ = MODELS[kind]
    made.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")

    def of(kind):
        preset = {"t5": "newsgroups-t5", "vit": "svhn-vit-b16"}.get(kind, "glue-llama")
        task = "rte" if preset == "glue-llama" else ""
        if not (folder / kind).is_dir():
            save_in_16_bits(kind, folder / kind)
        if not (folder / preset).is_dir():
            save_data(preset, folder / preset, task)
        return {
            "preset": preset, "model": str(folder / kind), "data": str(folder / preset),
            "lora-rank": 2, "num-rounds": 1, "local-steps": 2, "batch-size": 8, "device": "cpu",
            "partition": "iid", "report": False, "tracking": "none", "learning-rate": 1e-2,
            **({"glue-task": task} if task else {}),
            **({} if kind in OF_IMAGES else {"max-length": 16}),
        }  # fmt: skip

    return of


def benches(settings, **more):
    return [
        ModelAndData(read_config(settings | more | {"backbone-dtype": dtype}))
        for dtype in ("float32", "bfloat16")
    ]


def upload_of(loaded):
    config = loaded.config
    steps = LocalSteps(2, 8, 1e-2, config.precision)
    work = ClientRound(0, 1, 0)
    examples = loaded.partition(0, 4).train
    state = loaded.model.initial_state()
    result = train_locally(loaded.model, loaded.task, examples, state, 1.0, steps, work)
    return result.upload


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_kept_in_the_files_own_bits_computes_the_same_bits(kind, precision, settings):
    whole, stored = benches(settings(kind), precision=precision)
    first, second = upload_of(whole), upload_of(stored)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert whole.evaluate() == stored.evaluate()


class FrozenCasts(TorchDispatchMode):
    """Count how often a frozen tensor of the network is brought to 16 bits."""

    def __init__(self, network):
        super().__init__()
        tensors = [*network.parameters(), *network.buffers()]
        self.there = {t.data_ptr(): t for t in tensors if not t.requires_grad and t.dim() == 2}
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        copies = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype")
        self.number += copies == torch.bfloat16 and args[0].data_ptr() in self.there
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["vit", "t5"])
@pytest.mark.parametrize("method", ["ravan", "fedit"])
def test_frozen_weights_are_cast_once_and_not_in_every_step(kind, method, settings, monkeypatch):
    given = settings(kind) | {"precision": "bfloat16", "method": method, "seed": 2}
    keeping = ModelAndData(read_config(given))
    assert upload_of(keeping)
    with FrozenCasts(keeping.model.network) as casts:
        got = upload_of(keeping)
    measured = keeping.evaluate()
    # What another client leaves, and what is changed in place, is cast anew.
    monkeypatch.setattr("ravan_flwr.training.model_and_data.keep_casts", lambda _: None)
    plain = ModelAndData(read_config(given))
    with FrozenCasts(plain.model.network) as before:
        expected = upload_of(plain)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert measured == plain.evaluate()
    assert casts.number == 0
    assert before.number > 8


def test_a_kept_cast_follows_its_weight(settings):
    given = settings("vit") | {"precision": "bfloat16", "seed": 3}
    loaded = ModelAndData(read_config(given))
    loaded.evaluate()
    linear = next(m for m in loaded.model.network.modules() if isinstance(m, StoredLinear))
    x = torch.randn(2, linear.in_features)
    with torch.no_grad():
        linear.weight.mul_(2)
        with torch.autocast("cpu", torch.bfloat16):
            expected = torch.nn.functional.linear(x, linear.weight, linear.bias)
            assert torch.equal(linear(x), expected)
        assert linear(x).dtype == torch.float32
    # Where blocks are computed twice, copies of all at a time are not wanted; nor of what changes.
    for more in ({"gradient-checkpointing": True}, {"precision": "float32"}, {"method": "full"}):
        network = ModelAndData(read_config(given | more)).model.network
        assert not any(hasattr(p, "kept_cast") for p in network.parameters())


FROZEN = [name for name, method in METHODS.items() if method.frozen_backbone]


@pytest.mark.parametrize(
    ("method", "form"), [("ravan", "merged"), *((name, "factored") for name in FROZEN)]
)
@pytest.mark.parametrize("kind", ["llama", "vit"])  # a ViT's layers have a bias
def test_each_method_uploads_the_same_bits(kind, method, form, settings):
    whole, stored = benches(settings(kind), method=method, scoring="weight")
    for adapter in (*whole.model.adapters, *stored.model.adapters):
        adapter.form = form
    first, second = upload_of(whole), upload_of(stored)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_linear_layers_and_embeddings_are_in_16_bits_and_all_else_in_32(settings):
    network = benches(settings("llama"))[1].model.network
    kinds = {type(m): m.weight.dtype for m in network.modules() if hasattr(m, "weight")}
    assert kinds.pop(StoredLinear) == kinds.pop(StoredEmbedding) == torch.bfloat16
    assert set(kinds.values()) == {torch.float32}
    assert network.get_parameter("score.weight").dtype == torch.float32  # the classifier


def test_a_weight_that_two_modules_share_stays_one():
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


def test_nothing_is_kept_in_32_bits_for_the_backward_pass(settings):
    memory = [
        step_memory(read_config(settings("llama") | {"backbone-dtype": dtype}), 1.0)
        for dtype in ("float32", "bfloat16")
    ]
    network = benches(settings("llama"))[1].model.network
    small = sum(p.numel() for p in network.parameters() if p.dtype == torch.bfloat16)
    assert memory[0].weights - memory[1].weights == 2 * small
    assert memory[0].activations == memory[1].activations


def test_autocast_makes_no_copies_of_what_is_in_its_own_bits(settings):
    def activations(**more):
        given = settings("llama") | {"precision": "bfloat16"} | more
        return step_memory(read_config(given), 1.0).activations

    stored = activations(**{"backbone-dtype": "bfloat16"})
    network = benches(settings("llama"))[1].model.network
    copies = sum(m.weight.numel() for m in network.modules() if isinstance(m, StoredLinear))
    assert activations(**{"backbone-dtype": "float32"}) - stored == 2 * copies


def test_auto_is_the_checkpoints_own_on_a_gpu_and_whole_on_a_cpu(settings):
    config = read_config(settings("llama"))
    assert backbone_dtype(config, "cpu") == torch.float32
    assert backbone_dtype(config, "cuda") == stored_dtype(config.model) == torch.bfloat16
    for changes in ({"method": "fedex-lora"}, {"init": "first-round"}):
        changing = read_config(settings("llama") | changes)
        assert backbone_dtype(changing, "cuda") == torch.float32


@pytest.mark.parametrize("method", ["full", "fedex-lora", "fed-sb", "flora"])
def test_methods_that_change_the_backbone_are_refused(method, settings):
    told = f"backbone-dtype = 'bfloat16': got method '{method}', which changes pretrained weights"
    with pytest.raises(ValueError, match=told):
        read_config(settings("llama") | {"method": method, "backbone-dtype": "bfloat16"})


def test_a_merged_export_rounds_once(settings, tmp_path):
    given = settings("llama") | {"output-dir": str(tmp_path), "backbone-dtype": "bfloat16"}
    given |= {"processes": 1}
    run = simulate(given, 2).run_dir
    assert json.loads((run / "config.json").read_text())["backbone-dtype"] == "bfloat16"
    with result_of(run) as loaded:
        name = f"{loaded.model.layers[0].name}.weight"
        merged = merged_network(loaded).get_parameter(name)
        source = transformers.AutoModelForCausalLM.from_pretrained(
            str(given["model"]), dtype=torch.float32
        )
        (delta, *_) = loaded.model.method.delta_weights(loaded.model.adapters)
        expected = source.get_parameter(name) + delta
    assert merged.dtype == torch.float32
    np.testing.assert_array_equal(merged.detach().numpy(), expected.detach().numpy())
