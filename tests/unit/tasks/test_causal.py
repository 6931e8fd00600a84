"""Loss, gradients and answers of language models equal TRL's and transformers' own."""

import dataclasses
import importlib
import itertools
import logging
import math
import warnings
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers

from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks import token_loss
from ravan_flwr.tasks.causal import Causal
from ravan_flwr.tasks.prompts import MAX_MESSAGES, check_messages, render
from ravan_flwr.tasks.token_loss import check_logits
from ravan_flwr.training.local_steps import sum_metrics
from tests.support.tiny import CHAT, SPEAKERS, WORDS, save_speaker, texts

TALKS = DataSpec("hub", "talks", columns=(("messages", "messages"),), target_length=8)
COMPLETES = DataSpec(
    "hub", "completes", columns=(("prompt", "prompt"), ("completion", "completion")),
    prompts=("{prompt}",), target_length=8,
)  # fmt: skip
TEXTS = texts(24)


def conversation(texts_of):
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": next(roles), "content": one} for one in texts_of]


MESSAGES = [conversation(TEXTS[n : n + 4]) for n in range(0, 24, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    paths: dict[str, object] = {}

    def of(kind):
        if kind not in paths:
            paths[kind] = save_speaker(kind, tmp_path_factory.mktemp("models") / kind, TEXTS)
        return paths[kind]

    return of


def task(data, where, length=96, **changes):
    settings = transformers.AutoConfig.from_pretrained(where).to_dict()
    return Causal(dataclasses.replace(data, **changes), length, lambda: where, lambda: settings)


def network_of(where):
    return transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()


def talks(messages=MESSAGES):
    return datasets.Dataset.from_dict({"messages": messages})


def completes():
    return datasets.Dataset.from_dict({"prompt": TEXTS[:6], "completion": TEXTS[6:12]})


def whole_batch(one, encoded):
    return one.collate(encoded.take(np.arange(len(encoded))))


def loss_and_gradients(one, network, *batches):
    """Return the mean over all learned parts of these batches, and its gradients."""
    network.zero_grad()
    number = sum(one.size(batch) for batch in batches)
    losses = [one.loss(network, batch) * (one.size(batch) / number) for batch in batches]
    torch.stack(losses).sum().backward()
    return float(sum(losses).detach()), gradients(network)


def assert_same(found, expected, loss=1e-5, **tolerances):
    assert found[0] == pytest.approx(expected[0], rel=loss)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, **tolerances)


def gradients(network):
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def by_trl(where, examples, folder, **options):
    """Return TRL's tokens, loss and gradients of all examples as one batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl: Any = importlib.import_module("trl")
        settings = trl.SFTConfig(
            output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, max_length=96,
            per_device_train_batch_size=len(examples), gradient_checkpointing=False,
            disable_tqdm=True, **options,
        )  # fmt: skip
        reader = transformers.AutoTokenizer.from_pretrained(where)
        trainer = trl.SFTTrainer(
            network_of(where), settings, train_dataset=examples, processing_class=reader
        )
        batch = next(iter(torch.utils.data.DataLoader(
            trainer.train_dataset, len(examples), collate_fn=trainer.data_collator
        )))  # fmt: skip
        loss = trainer.compute_loss(trainer.model.eval(), dict(batch))
        loss.backward()
    return batch, float(loss.detach()), gradients(trainer.model)


@pytest.mark.parametrize("form", ["messages", "prompt and completion", "all tokens"])
def test_tokens_loss_and_gradients_equal_trls(form, folder, tmp_path):
    where = folder("llama")
    options = {"messages": {"assistant_only_loss": True}, "all tokens": {}}.get(form, {})
    data = COMPLETES if form == "prompt and completion" else TALKS
    data = dataclasses.replace(data, loss_on="all" if form == "all tokens" else "answers")
    examples = completes() if data.prompts else talks()
    theirs, expected, grads = by_trl(where, examples, tmp_path, **options)
    causal = task(data, where)
    batch = whole_batch(causal, causal.encode(examples))
    labels = torch.full(batch["input_ids"].shape, -100)
    labels.flatten()[batch["positions"] + 1] = batch["targets"]
    padded = theirs["attention_mask"] == 0
    assert torch.equal(
        batch["input_ids"].masked_fill(padded, 0), theirs["input_ids"].masked_fill(padded, 0)
    )
    first = theirs["labels"].clone()
    first[:, 0] = -100  # the first token has no prediction
    assert torch.equal(labels, first)
    found = loss_and_gradients(causal, network_of(where), batch)
    assert_same(found, (expected, grads), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", SPEAKERS)
def test_the_loss_equals_that_of_the_networks_own_logits(kind, folder):
    """For every architecture, with its own transformation of logits."""
    where = folder(kind)
    causal, network = task(TALKS, where), network_of(where)
    causal.adjust(network)
    batch = whole_batch(causal, causal.encode(talks()))
    logits = network(input_ids=batch["input_ids"]).logits.flatten(0, 1)[batch["positions"]]
    expected = torch.nn.functional.cross_entropy(logits, batch["targets"])
    loss = causal.loss(network, batch)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_a_network_with_other_logits_is_refused(folder):
    network = network_of(folder("gemma2"))
    check_logits(network)
    own = network.forward

    def scaled(**given):
        out = own(**given)
        out.logits = out.logits * 2
        return out

    network.forward = scaled
    with pytest.raises(ValueError, match="logits of Gemma2ForCausalLM do not follow"):
        check_logits(network)


@pytest.mark.parametrize("rows", [1, 7])
def test_blocks_change_neither_loss_nor_gradients(rows, folder, monkeypatch):
    where = folder("llama")
    causal = task(TALKS, where)
    batch = whole_batch(causal, causal.encode(talks()))
    found = []
    for block in (token_loss.BLOCK, rows * 4 * network_of(where).config.vocab_size):
        monkeypatch.setattr(token_loss, "BLOCK", block)
        network = network_of(where)
        found.append(loss_and_gradients(causal, network, batch))
        with torch.inference_mode():
            alone = float(causal.loss(network, batch))
        assert alone == pytest.approx(found[-1][0], rel=1e-6)
    assert_same(found[1], found[0], loss=1e-6, rtol=1e-4, atol=1e-7)


def test_perplexity_is_by_token_for_any_batches(folder):
    """The mean over tokens is not that of batches or examples, which differ in length."""
    where = folder("llama")
    causal, network = task(TALKS, where), network_of(where)
    encoded = causal.encode(talks())

    model: Any = SimpleNamespace(
        device=torch.device("cpu"), evaluation_graphs=None, network=network
    )
    network.requires_grad_(False)
    alone = [causal.collate(encoded.take(np.array([n]))) for n in range(6)]
    by_hand = [causal.measure(network, batch, []) for batch in alone]
    total = sum(part["loss"] for part in by_hand) / sum(part["tokens"] for part in by_hand)
    for size in (1, 4, 256):
        with torch.no_grad():
            sums = sum_metrics(model, causal, encoded, size)
        found = causal.measures.means(sums, len(encoded))
        assert found["loss"] == pytest.approx(total, rel=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(total), rel=1e-5)
    of_examples = np.mean([part["loss"] / part["tokens"] for part in by_hand])
    assert found["loss"] != pytest.approx(of_examples, rel=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
def test_answers_equal_those_of_each_prompt_alone(kind, folder):
    """Neither padding on the left nor the folder's generation settings change the answers."""
    where = folder(kind)
    causal, network = task(TALKS, where, target_length=6), network_of(where)
    network.generation_config.do_sample, network.generation_config.temperature = True, 9.0
    prompts = [{"role": "user", "content": text} for text in (TEXTS[0], TEXTS[1] * 3, "ka")]
    columns = {"messages": [[prompt] for prompt in prompts]}
    inputs = {name: torch.from_numpy(a) for name, a in causal.inputs(columns).items()}
    found = [text for (text,) in causal.predict(network, causal.collate(inputs))]
    for one, got in zip(prompts, found, strict=True):
        ids = causal.reader.apply_chat_template(
            [one], add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        for _ in range(6):  # greedily, without a cache
            ids = torch.cat([ids, network(ids).logits[:, -1:].argmax(-1)], 1)
            if int(ids[0, -1]) in (0, 2):
                break
        new = ids[0, -6:] if int(ids[0, -1]) not in (0, 2) else ids[0]
        assert causal.reader.decode(new, skip_special_tokens=True).endswith(got)


def test_an_answer_ends_with_the_templates_end(folder):
    causal = task(TALKS, folder("llama"))
    ends = causal._ends(network_of(folder("llama")))
    assert ends == [0, 2]  # <|endoftext|>, and ChatML's <|im_end|>


# Examples that cannot be learned.


def talk(*roles, text="ka"):
    return [{"role": role, "content": text} for role in roles]


def test_examples_that_cannot_be_learned_are_counted_and_excluded(folder, caplog):
    examples = talks(
        [talk("user", "assistant"), talk("user"), talk("user", "assistant", text=""), [],
         talk("user", "assistant", text=" ".join(WORDS * 9)), talk("user", "assistant")]
    )  # fmt: skip
    causal = task(TALKS, folder("llama"))
    with caplog.at_level(logging.WARNING):
        encoded = causal.encode(examples)
    assert len(encoded) == 2
    for text in (
        "4 of 6 are left out", "no message of the assistant (example 2)", "missing (example 3)",
        "no list of role and content (example 4)", "more tokens than max-length (example 5)",
    ):  # fmt: skip
        assert text in caplog.text
    batch = whole_batch(causal, encoded)
    assert torch.isfinite(causal.loss(network_of(folder("llama")), batch))
    with pytest.raises(ValueError, match="examples: none of 2 can be learned: 2: its conversation"):
        causal.encode(talks([talk("user")] * 2))


def test_a_conversation_of_too_many_messages_is_excluded_and_counted(folder, caplog):
    short = talk("user", "assistant")
    most = short * (MAX_MESSAGES // 2)
    causal, examples = task(TALKS, folder("llama")), [short, [*most, most[0]], short * 50_000]
    with caplog.at_level(logging.WARNING):
        assert len(causal.encode(talks(examples))) == 1
    assert "2 of 3 are left out: 2: its conversation has more than 1,000 messages" in caplog.text
    assert len(check_messages(most)) == MAX_MESSAGES
    assert render(causal.reader, short * 1000).count("<|im_end|>") == 2000


def test_too_long_texts_are_cut_or_dropped_as_configured(folder, caplog):
    long = [{"role": "user", "content": " ".join(WORDS)}, {"role": "assistant", "content": "ka"}]
    examples = talks([long, talk("user", "assistant")])
    with caplog.at_level(logging.WARNING):
        assert len(task(TALKS, folder("llama"), 24).encode(examples)) == 2
        assert len(task(TALKS, folder("llama"), 24, overlong="drop").encode(examples)) == 1
    assert "examples: 1 of 2 have more tokens than max-length = 24 and are cut" in caplog.text
    assert "1: it has more tokens than max-length (example 1)" in caplog.text


def test_missing_columns_are_refused_and_alpaca_has_two_prompts(folder):
    data = DataSpec(
        "hub", "alpaca", target_length=8,
        columns=(("instruction", "a"), ("input", "b"), ("completion", "c")),
        prompts=("{instruction} {input}:", "{instruction}:"),
    )  # fmt: skip
    columns = {
        "instruction": ["ka", "ka", None, "ka", "ka"], "input": ["ne", "", "ne", None, "ne"],
        "completion": ["lo", "lo", "lo", "lo", " "],
    }  # fmt: skip
    causal = task(data, folder("llama"))

    def decoded(rows):
        pairs = zip(rows["input_ids"], rows["length"], strict=True)
        return [causal.reader.decode(row[:n]) for row, n in pairs]

    encoded = causal.encode(datasets.Dataset.from_dict(columns))
    learned = ["ka ne:lo<|endoftext|>", "ka:lo<|endoftext|>", "ka:lo<|endoftext|>"]
    assert decoded(encoded.take(np.arange(3))) == learned
    columns = {"instruction": ["ka"], "input": [causal.checked("input", None)]}
    assert decoded(causal.inputs(columns)) == ["ka:"]


def test_a_tokenizer_without_a_template_or_with_too_many_tokens_is_refused(folder, tmp_path):
    plain = save_speaker("llama", tmp_path / "plain", TEXTS, template=None)
    with pytest.raises(ValueError, match="tokenizer has no chat template; expected one"):
        task(TALKS, plain).check()
    task(TALKS, plain, chat_template=CHAT).check()
    assert len(task(TALKS, plain, chat_template=CHAT).encode(talks())) == 6
    with pytest.raises(ValueError, match="chat template: line 1"):
        task(TALKS, plain, chat_template="{% if %}").check()
    small = save_speaker("llama", tmp_path / "small", TEXTS, vocab_size=50)
    with pytest.raises(ValueError, match="but the model has vocab_size = 50"):
        task(TALKS, small).check()
    with pytest.raises(ValueError, match="max-length = 1: expected 2 at least"):
        task(TALKS, plain, 1).check_sizes()


def test_a_prompt_of_messages_is_formatted_as_a_conversation(folder):
    """The conversation is the input; its last answer is the target."""
    where = folder("llama")
    columns = {"prompt": [talk[:-1] for talk in MESSAGES], "completion": [t[-1:] for t in MESSAGES]}
    one, other = task(COMPLETES, where), task(TALKS, where)
    batch = whole_batch(one, one.encode(datasets.Dataset.from_dict(columns)))
    whole_conversation = whole_batch(other, other.encode(talks()))
    assert torch.equal(batch["input_ids"], whole_conversation["input_ids"])
    learned = [set(found["positions"].tolist()) for found in (batch, whole_conversation)]
    assert learned[0] < learned[1]
