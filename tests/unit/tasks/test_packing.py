"""Packed rows give the same results as separate texts, without padding."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.tasks.causal import Causal
from ravan_flwr.tasks.token_loss import check_packing, hidden_states
from tests.support.tiny import SPEAKERS, save_speaker
from tests.unit.tasks.test_causal import (
    MESSAGES,
    TALKS,
    TEXTS,
    assert_same,
    by_trl,
    conversation,
    loss_and_gradients,
    network_of,
    talks,
    task,
)

# A long one beside short ones.
TALK = [conversation(TEXTS[n : n + 2]) for n in range(0, 24, 2)] + MESSAGES[:1]
# Architectures with changes of their configurations, such as windows shorter than the texts.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in SPEAKERS},
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "gemma2 with a window": ("gemma2", {"sliding_window": 5}),
    "phi3 with a window": ("phi3", {"sliding_window": 5}),
    "qwen2 with a window": (
        "qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1,
                  "layer_types": ["full_attention", "sliding_attention"]}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    paths: dict[str, object] = {}

    def of(name):
        kind, changes = KINDS[name]
        if name not in paths:
            where = tmp_path_factory.mktemp("models")
            paths[name] = save_speaker(kind, where, TEXTS, initializer_range=0.3, **changes)
        return paths[name]

    return of


def made(where):
    return task(TALKS, where, 128), network_of(where)


@pytest.mark.parametrize("name", KINDS)
def test_loss_and_gradients_equal_those_of_separate_texts(name, folder):
    one, network = made(folder(name))
    one.adjust(network)
    check_packing(network)
    encoded = one.encode(talks(TALK))
    everything = np.arange(len(encoded))
    batch = one.packed(encoded.take(everything))
    assert batch["input_ids"].shape[0] < len(encoded)
    assert batch["input_ids"].shape[1] == int(one.lengths(encoded).max())
    found = loss_and_gradients(one, network, batch)
    alone = [one.collate(encoded.take(np.array([row]))) for row in everything]  # a plain loop
    padded = one.collate(encoded.take(everything))
    for batches in (alone, [padded]):
        expected = loss_and_gradients(one, network, *batches)
        assert_same(found, expected, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("form", ["messages", "all tokens"])
def test_packing_equals_trls(form, folder, tmp_path):
    where = folder("llama")
    data = dataclasses.replace(TALKS, loss_on="all" if form == "all tokens" else "answers")
    options = {"assistant_only_loss": True} if form == "messages" else {}
    theirs, loss, grads = by_trl(where, talks(TALK), tmp_path, packing=True, **options)
    assert theirs["position_ids"].shape[0] == 1  # one row of all texts
    one, network = task(data, where), network_of(where)
    encoded = one.encode(talks(TALK))
    batch = one.packed(encoded.take(np.arange(len(encoded))))
    assert one.size(batch) == int((theirs["labels"] != -100).sum())
    assert_same(loss_and_gradients(one, network, batch), (loss, grads))


def test_packed_texts_are_independent(folder):
    """Changing the tokens of all texts but one changes no bit of that text's outputs."""
    one, network = made(folder("llama"))
    encoded = one.encode(talks(TALK))
    batch = one.packed(encoded.take(np.arange(len(encoded))))
    ids, positions = batch["input_ids"], batch["position_ids"]
    text = (positions == 0).cumsum(1)  # the texts' numbers in each row
    in_text = text == 2
    others = torch.where(in_text, ids, (ids + 7) % 300)
    with torch.inference_mode():
        before, after = (
            hidden_states(network, tokens, position_ids=positions)[in_text]
            for tokens in (ids, others)
        )
    assert torch.equal(before, after)
    assert in_text.any()


def test_texts_of_equal_length_are_not_packed(folder):
    """Packing would gain nothing there, and attention without a mask is faster."""
    one, _ = made(folder("llama"))
    encoded = one.encode(talks([TALK[0]] * 3))
    rows = encoded.take(np.arange(3))
    found, expected = one.packed(rows), one.collate(rows)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=30)


@given(LENGTHS)
def test_every_token_is_packed_once(lengths):
    counts = np.array(lengths)
    length = int(counts.max())
    within = torch.arange(length) < torch.from_numpy(counts)[:, None]
    ids = torch.where(within, torch.arange(1, 1 + within.numel()).view(within.shape), 0)
    learned = within & (torch.arange(length) % 3 != 1)
    one = Causal(TALKS, length, lambda: None)
    rows = {"input_ids": ids, "learned": learned, "length": torch.from_numpy(counts)}
    batch, plain = one.packed(rows), one.collate(rows)
    tokens = batch["input_ids"].flatten()
    assert sorted(tokens[tokens > 0].tolist()) == sorted(ids[within].tolist())
    assert batch["input_ids"].shape[1] == length
    assert len(batch["input_ids"]) <= len(lengths)
    # Each learned position is followed by its target, in the same order.
    assert torch.equal(batch["targets"], plain["targets"])
    assert torch.equal(tokens[batch["positions"] + 1], batch["targets"])
    if "position_ids" in batch:
        assert len(batch["input_ids"]) < len(lengths)
        starts = tokens[(batch["position_ids"].flatten() == 0) & (tokens > 0)]
        assert sorted(starts.tolist()) == sorted(ids[:, 0].tolist())


# Weights as large as trained ones make state that is carried along a row visible.
_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.5,
}  # fmt: skip
CARRYING = {
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(**_SIZES, state_size=4)
    ),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaForCausalLM(
        transformers.RecurrentGemmaConfig(
            **_SIZES, intermediate_size=24, num_attention_heads=2, lru_width=16
        )
    ),
    "lfm2": lambda: transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(
            **_SIZES, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
            layer_types=["conv", "full_attention"],
        )
    ),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(**_SIZES, n_head=2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CARRYING)
def test_a_network_that_carries_state_along_a_row_is_refused(kind):
    network = CARRYING[kind]().eval()
    with pytest.raises(ValueError, match=f"batching = 'packed': in {type(network).__name__} texts"):
        check_packing(network)


def test_a_network_whose_outputs_depend_on_other_texts_is_refused(folder):
    network = network_of(folder("llama"))
    forward = network.base_model.forward

    def leaking(input_ids, position_ids=None, **options):
        out = forward(input_ids=input_ids, position_ids=position_ids, **options)
        out.last_hidden_state = out.last_hidden_state.cumsum(1)
        return out

    network.base_model.forward = leaking
    with pytest.raises(ValueError, match="batching = 'packed': in LlamaForCausalLM texts"):
        check_packing(network)
