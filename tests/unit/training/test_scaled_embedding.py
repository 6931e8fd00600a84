"""Gemma multiplies what it looks up by the root of its width: kept in 16 bits, too."""

import math

import pytest
import torch
import transformers

from ravan_flwr.adapters.stored import StoredScaledEmbedding
from ravan_flwr.specs import DataSpec, ModelSpec
from ravan_flwr.tasks.causal import Causal
from ravan_flwr.training.network import build_network, build_skeleton
from testing.tiny import save_speaker

TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module", params=[("gemma", 16), ("gemma", 24), ("gemma2", 24)])
def networks(request, tmp_path_factory):
    """One saved in bfloat16 and kept in float32 and in bfloat16, and transformers' own."""
    kind, width = request.param
    folder = tmp_path_factory.mktemp("models") / "model"
    save_speaker(kind, folder, hidden_size=width, initializer_range=0.3)
    read = transformers.AutoModelForCausalLM.from_pretrained
    read(folder, dtype=torch.bfloat16).save_pretrained(folder)
    settings = read(folder).config.to_dict()
    data = DataSpec("hub", "talks", columns=(("messages", "messages"),), target_length=8)
    task = Causal(data, 32, lambda: folder, lambda: settings)
    spec = ModelSpec("hub", str(folder))
    whole, stored = (
        build_network(spec, task, 0, dtype).network for dtype in (torch.float32, torch.bfloat16)
    )
    planned = build_skeleton(spec, task, torch.bfloat16).network
    return whole, stored, read(folder, dtype=torch.bfloat16), planned


def test_it_computes_the_bits_of_float32(networks):
    whole, stored, *_ = networks
    assert torch.equal(whole(TOKENS).logits, stored(TOKENS).logits)
    grads = []
    for network in (whole, stored):
        last = network.model.layers[0].input_layernorm.weight.requires_grad_(True)
        network(TOKENS).logits.logsumexp(-1).sum().backward()
        grads.append(last.grad)
    assert torch.equal(*grads)


def test_the_embedding_and_its_twin_are_in_16_bits_and_counted_so(networks):
    whole, stored, _, planned = networks
    for network in (stored, planned):
        embedding = network.get_input_embeddings()
        assert isinstance(embedding, StoredScaledEmbedding)
        assert embedding.weight.dtype == torch.bfloat16
        assert network.lm_head.weight is embedding.weight
    assert whole.get_input_embeddings().weight.dtype == torch.float32


def test_it_is_transformers_own_in_that_dtype_but_for_the_rounded_root(networks):
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
