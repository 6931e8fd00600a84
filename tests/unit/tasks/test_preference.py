"""Losses, accuracies and margins of preferences equal TRL's; invalid examples are counted."""

import dataclasses
import logging
import math
import warnings
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import torch
import transformers

from ravan_flwr.adapters import LoRALinear, attach, find_layers
from ravan_flwr.data.examples import by_role
from ravan_flwr.data.rows import UnreadableError
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks import token_loss
from ravan_flwr.tasks.extensions import ByExample, Packs, task_with
from ravan_flwr.tasks.preference import Preference
from tests.support.tiny import CHAT, WORDS, save_speaker
from tests.unit.tasks.test_causal import (
    TEXTS,
    assert_same,
    loss_and_gradients,
    network_of,
    whole_batch,
)

TRIPLE = tuple((role, role) for role in ("prompt", "chosen", "rejected"))
PLAIN = DataSpec("hub", "p", columns=TRIPLE, prompts=("{prompt}",), target_length=8)
TALKS = DataSpec("hub", "p", columns=TRIPLE[1:], target_length=8)


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    return save_speaker("llama", folder, TEXTS, initializer_range=0.3)


def task(data, where, length=96, beta=0.1, **changes):
    settings = transformers.AutoConfig.from_pretrained(where).to_dict()
    data = dataclasses.replace(data, beta=beta, **changes)
    return Preference(data, length, lambda: where, lambda: settings)


def say(role, content):
    return {"role": role, "content": content}


def rows(form):
    prompts, good, bad = TEXTS[:6], TEXTS[6:12], TEXTS[12:18]
    if form == "texts":
        return {"prompt": prompts, "chosen": [f" {x}" for x in good], "rejected": bad}
    before = [
        [say("user", a), say("assistant", b), say("user", c)]
        for a, b, c in zip(prompts, TEXTS[18:], reversed(prompts), strict=True)
    ]
    answers = [[[say("assistant", x)] for x in of] for of in (good, bad)]
    if form == "a prompt of messages":
        return {"prompt": before, "chosen": answers[0], "rejected": answers[1]}
    pairs = ([a + b for a, b in zip(before, of, strict=True)] for of in answers)
    return dict(zip(("chosen", "rejected"), pairs, strict=True))


FORMS = {"texts": PLAIN, "a prompt of messages": PLAIN, "whole conversations": TALKS}


def adapted(where):
    """Return the network with a non-zero LoRA, and the factors by layer."""
    network, random = network_of(where).requires_grad_(False), torch.Generator().manual_seed(0)
    layers, factors = find_layers(network, ["q_proj", "v_proj"]), {}

    def adapt(layer, linear):
        B, A = (
            torch.randn(shape, generator=random)
            for shape in ((layer.out_features, 3), (3, layer.in_features))
        )
        factors[layer.name] = B, A
        return LoRALinear(linear, B, A)

    attach(network, layers, adapt)
    return network, factors


def by_trl(where, factors, examples, beta, folder):
    """Return TRL's batch of all examples with that LoRA, its loss, its metrics, and its layers."""
    trl = pytest.importorskip("trl", reason="TRL is what is compared with: pip install .[dev]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = trl.DPOConfig(
            output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, max_length=96,
            per_device_train_batch_size=len(examples), gradient_checkpointing=False,
            disable_tqdm=True, beta=beta,
        )  # fmt: skip
        reader = transformers.AutoTokenizer.from_pretrained(where)
        lora = peft.LoraConfig(
            r=3, lora_alpha=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        trainer = trl.DPOTrainer(
            network_of(where), args=settings, train_dataset=examples, processing_class=reader,
            peft_config=lora,
        )  # fmt: skip
        layers = layers_of(trainer, factors)
        for layer, (B, A) in zip(layers, factors.values(), strict=True):
            layer.lora_A["default"].weight.data.copy_(A)
            layer.lora_B["default"].weight.data.copy_(B)
        batch = next(iter(torch.utils.data.DataLoader(
            trainer.train_dataset, len(examples), collate_fn=trainer.data_collator
        )))  # fmt: skip
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return batch, float(loss.detach()), metrics, layers


def layers_of(trainer, names):
    return [trainer.model.base_model.model.get_submodule(name) for name in names]


@pytest.mark.parametrize(("form", "beta"), [*zip(FORMS, (0.1, 0.5, 0.02), strict=True)])
def test_tokens_loss_metrics_and_gradients_equal_trls(form, beta, where, tmp_path):
    network, factors = adapted(where)
    examples = datasets.Dataset.from_dict(rows(form))
    expected, loss, metrics, layers = by_trl(where, factors, examples, beta, tmp_path)
    given = 0.0 if beta == 0.1 else beta
    preference = task(FORMS[form], where, beta=given)
    batch = whole_batch(preference, preference.encode(examples))
    pairs = len(examples)
    order = torch.arange(2 * pairs).view(2, pairs).T.flatten()  # TRL has all chosen ones first
    ids, mask = (expected[k][order] for k in ("input_ids", "attention_mask"))
    assert torch.equal(batch["input_ids"] * mask, ids * mask)
    learned = torch.zeros(ids.shape, dtype=torch.bool)
    learned.flatten()[batch["positions"] + 1] = True
    assert torch.equal(learned, expected["completion_mask"][order].bool())

    with torch.no_grad():
        measured = preference.measure(network, batch, [])
        chosen, rejected = preference.rewards(network, batch).mean(0).tolist()
    means = {
        "accuracies": measured["accuracy"] / pairs, "margins": measured["margin"] / pairs,
        "chosen": chosen, "rejected": rejected,
    }  # fmt: skip
    assert measured["loss"] / pairs == pytest.approx(loss, abs=1e-5)
    assert means == pytest.approx({k: metrics[f"rewards/{k}"] for k in means}, abs=1e-5)
    assert 0 < measured["accuracy"] < pairs
    found = preference.loss(network, batch)
    found.backward()
    assert float(found.detach()) == pytest.approx(loss, abs=1e-5)
    for name, layer in zip(factors, layers, strict=True):
        here: Any = network.get_submodule(name)
        for one, other in ((here.A, layer.lora_A), (here.B, layer.lora_B)):
            torch.testing.assert_close(one.grad, other["default"].weight.grad, rtol=1e-3, atol=1e-6)


def test_blocks_of_logits_change_neither_loss_nor_gradients(where, monkeypatch):
    preference, found = task(PLAIN, where), []
    batch = whole_batch(preference, preference.encode(datasets.Dataset.from_dict(rows("texts"))))
    for block in (token_loss.BLOCK, 5 * 4 * 384):
        monkeypatch.setattr(token_loss, "BLOCK", block)
        network, _ = adapted(where)
        found.append(loss_and_gradients(preference, network, batch))
    assert_same(found[1], found[0], loss=1e-6, rtol=1e-4, atol=1e-7)


def test_the_reference_is_the_untrained_network_and_adapters_are_restored(where):
    network, factors = adapted(where)
    before = [network.get_submodule(name) for name in factors]
    preference = task(PLAIN, where)
    batch = whole_batch(preference, preference.encode(datasets.Dataset.from_dict(rows("texts"))))
    rewards = preference.rewards(network, batch)
    plain = token_loss.losses_of_texts(network_of(where), **batch)
    policy = token_loss.losses_of_texts(network, **batch)
    torch.testing.assert_close(rewards.flatten(), 0.1 * (plain - policy))
    assert [network.get_submodule(name) for name in factors] == before
    for layer in before:
        torch.nn.init.zeros_(layer.B)
    assert float(preference.loss(network, batch).detach()) == pytest.approx(math.log(2), abs=1e-6)


def test_an_error_in_the_reference_pass_restores_the_adapters(where):
    network, factors = adapted(where)
    batch = {"input_ids": torch.tensor([[10**6], [0]]), "positions": torch.tensor([0, 1]),
             "targets": torch.tensor([0, 0])}  # fmt: skip
    with pytest.raises(IndexError):
        task(PLAIN, where).loss(network, batch)
    assert all(isinstance(network.get_submodule(name), LoRALinear) for name in factors)


def test_dropout_is_disabled(where):
    network = network_of(where)
    network.model.layers[0].self_attn.attention_dropout = 0.5
    network.model.layers[0].mlp.extra = torch.nn.Dropout(0.5)
    task(PLAIN, where).adjust(network)
    drops = [m.p for m in network.modules() if isinstance(m, torch.nn.Dropout)]
    assert drops == [0.0]
    assert network.model.layers[0].self_attn.attention_dropout == 0


def test_a_step_computes_twice_the_longer_text_of_each_pair(where):
    preference = task(PLAIN, where)
    encoded = preference.encode(datasets.Dataset.from_dict(rows("texts")))
    for number, tokens in enumerate(preference.lengths(encoded)):
        alone = preference.collate(encoded.take(np.array([number])))
        assert alone["input_ids"].numel() == tokens
        assert preference.size(alone) == 1


# Examples that cannot be learned.


def check_excluded(spec, where, columns, rows, caplog, messages):
    """Check that five of these rows are left, and that the log has each of these messages."""
    examples = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
    with caplog.at_level(logging.WARNING):
        encoded = task(spec, where).encode(datasets.Dataset.from_dict(examples))
    assert len(encoded) == len(rows) - 5
    assert f"5 of {len(rows)} are left out" in caplog.text
    for text in messages:
        assert text in caplog.text


def test_invalid_rows_are_counted_and_excluded(where, caplog):
    good = ("ka", "lo", "mi")
    triples = [
        good, ("ka", "", "mi"), ("ka", "lo", None), ("ka", "lo", "lo"), (" ", "lo", "mi"),
        ("ka", " ".join(WORDS * 9), "mi"), good,
    ]  # fmt: skip
    messages = (
        "examples: 5 of 7 are left out", "1: its chosen is missing (example 2)",
        "its rejected is missing (example 3)",
        "its chosen and rejected answers are the same (example 4)",
        "its prompt is missing (example 5)",
        "its longer answer leaves no room for a prompt within max-length (example 6)",
    )  # fmt: skip
    check_excluded(PLAIN, where, ("prompt", "chosen", "rejected"), triples, caplog, messages)


def test_invalid_conversations_are_counted_and_excluded(where, caplog):
    ask, answer, other = say("user", "ka"), say("assistant", "lo"), say("assistant", "mi")
    pairs = [
        ([ask, answer], [ask, other]),
        ([ask, answer], [say("user", "ne"), other]),
        ([ask, answer], [ask, say("assistant", "")]),
        ([ask, answer], [ask, say("user", "ne")]),
        ([answer], [other]),
        ([], [ask, other]),
    ]
    messages = (
        "its conversations differ before their last answers (example 2)",
        "its rejected answer is empty (example 3)",
        "its rejected is not one message of the assistant after the rest (example 4)",
        "its conversation asks for nothing (example 5)",
        "its messages are no list of role and content (example 6)",
    )  # fmt: skip
    check_excluded(TALKS, where, ("chosen", "rejected"), pairs, caplog, messages)


def test_a_too_long_prompt_is_cut_at_its_front_in_both_texts(where, caplog):
    long = " ".join(WORDS)
    columns = {"prompt": [long, "ka"], "chosen": [" lo", " lo"], "rejected": [" mi ra", " ra"]}
    examples = datasets.Dataset.from_dict(columns)
    preference = task(PLAIN, where, 20)
    with caplog.at_level(logging.WARNING):
        encoded = preference.encode(examples)
        assert len(task(PLAIN, where, 20, overlong="drop").encode(examples)) == 1
    assert "1 of 2 have more tokens than max-length = 20 and are cut" in caplog.text
    batch = encoded.take(np.array([0]))
    pairs = zip(batch["input_ids"][0], batch["length"][0].tolist(), strict=True)
    one, other = (preference.reader.decode(ids[:n]) for ids, n in pairs)
    left = one.removesuffix(" lo<|endoftext|>")
    assert left == other.removesuffix(" mi ra<|endoftext|>")
    assert left
    assert long.endswith(left)
    assert int(batch["length"].max()) == 20


def test_conversations_need_a_chat_template(where, tmp_path):
    plain = save_speaker("llama", tmp_path / "plain", TEXTS, template=None)
    with pytest.raises(ValueError, match="tokenizer has no chat template; expected one"):
        task(TALKS, plain).check()
    task(PLAIN, plain).check()  # plain texts need no template
    listed = datasets.Dataset.from_dict(rows("a prompt of messages"))
    with pytest.raises(ValueError, match="tokenizer has no chat template; expected one"):
        task(PLAIN, plain).encode(listed)
    assert len(task(PLAIN, plain, chat_template=CHAT).encode(listed)) == 6


def test_a_missing_column_is_named():
    examples = datasets.Dataset.from_dict({"prompt": ["a"], "chosen": ["b"]})
    with pytest.raises(ValueError, match="expected 'rejected' among them; rename one"):
        by_role(examples, PLAIN, "data here")


def test_answers_depend_on_the_prompt_alone(where):
    preference, network = task(PLAIN, where), network_of(where)
    assert preference.input_roles == ["prompt"]
    assert task(TALKS, where).input_roles == ["chosen"]
    with pytest.raises(UnreadableError, match="its chosen is missing"):
        task(TALKS, where).checked("chosen", None)
    inputs = {n: torch.from_numpy(a) for n, a in preference.inputs({"prompt": TEXTS[:2]}).items()}
    assert len(preference.predict(network, preference.collate(inputs))) == 2
    conversations = rows("whole conversations")
    talked = task(TALKS, where).inputs({"chosen": conversations["chosen"][:1]})
    prompt = preference.reader.apply_chat_template(
        conversations["chosen"][0][:-1], add_generation_prompt=True, return_dict=False
    )
    assert talked["input_ids"][0, : talked["length"][0]].tolist() == prompt


@pytest.mark.parametrize(("kind", "key"), [(Packs, "batching=packed"), (ByExample, "privacy")])
def test_options_that_need_separate_texts_are_refused(kind, key, where):
    with pytest.raises(ValueError, match=f"{key}: got task Preference, which is no"):
        task_with(kind, task(PLAIN, where), key)
