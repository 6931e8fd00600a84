"""Gemma's scaled embedding, also stored in 16 bits."""

import math

import pytest
import torch
import transformers

from ravan_flwr.adapters.stored import StoredScaledEmbedding
from ravan_flwr.specs import DataSpec, ModelSpec
from ravan_flwr.tasks.causal import Causal
from ravan_flwr.training.network import build_network, build_skeleton
from tests.support.tiny import save_speaker

TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module", params=[("gemma", 16), ("gemma", 24), ("gemma2", 24)])
def networks(request, tmp_path_factory):
    """Make one model saved in bfloat16, kept in float32 and in bfloat16, and transformers' own."""
    kind, width = request.param
    folder = tmp_path_factory.mktemp("models") / "model"
    save_speaker(kind, folder, hidden_size=width, initializer_range=0.3)
    read = transformers.AutoModelForCausalLM.from_pretrained
    read(folder, dtype=torch.bfloat16).save_pretrained(folder)
    settings = read(folder).config.to_dict()
    data = DataSpec("hub", "talks", columns=(("messages", "messages"),), target_length=8)
    task = Causal(data, 32, lambda: folder, lambda: settings)
    spec = ModelSpec("hub", str(folder))
    float32, stored = (
        build_network(spec, task, 0, dtype).network for dtype in (torch.float32, torch.bfloat16)
    )
    planned = build_skeleton(spec, task, torch.bfloat16).network
    return float32, stored, read(folder, dtype=torch.bfloat16), planned


def test_it_equals_float32_to_the_bit(networks):
    float32, stored, *_ = networks
    assert torch.equal(float32(TOKENS).logits, stored(TOKENS).logits)
    grads = []
    for network in (float32, stored):
        last = network.model.layers[0].input_layernorm.weight.requires_grad_(True)
        network(TOKENS).logits.logsumexp(-1).sum().backward()
        grads.append(last.grad)
    assert torch.equal(*grads)


def test_embedding_and_tied_head_are_stored_and_counted_in_16_bits(networks):
    float32, stored, _, planned = networks
    for network in (stored, planned):
        embedding = network.get_input_embeddings()
        assert isinstance(embedding, StoredScaledEmbedding)
        assert embedding.weight.dtype == torch.bfloat16
        assert network.lm_head.weight is embedding.weight
    assert float32.get_input_embeddings().weight.dtype == torch.float32


def test_it_equals_transformers_except_for_the_rounded_scale(networks):
    _, stored, theirs, _ = networks
    root = math.sqrt(stored.config.hidden_size)
    rounded = float(torch.tensor(root, dtype=torch.bfloat16))
    found = stored.get_input_embeddings()(TOKENS)
    expected = theirs.get_input_embeddings()(TOKENS)
    assert found.dtype == torch.float32
    assert torch.equal((found * (rounded / root)).bfloat16(), expected)
    with torch.no_grad():
        logits, others = stored(TOKENS).logits, theirs(TOKENS).logits
    near = 0.05 * float(logits.abs().max())
    torch.testing.assert_close(others.float(), logits, rtol=0, atol=near)
