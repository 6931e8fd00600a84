"""Language models in whole runs: real text is learned, results answer, devices bring their own."""

import json
import logging
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from ravan_flwr import evaluate, predict, result_of, simulate
from ravan_flwr.cli import main
from ravan_flwr.config.presets import with_preset_path
from ravan_flwr.config.run_config import read_config
from ravan_flwr.privacy.account import StepNoise
from ravan_flwr.privacy.example_gradients import ExampleGradients
from ravan_flwr.reports.report import write_report
from ravan_flwr.seeding import ClientRound
from ravan_flwr.tasks.extensions import ByExample, task_with
from ravan_flwr.training.cost import step_memory
from ravan_flwr.training.footprint import footprint
from ravan_flwr.training.local_steps import steps_of, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.plan import plan_of
from ravan_flwr.training.private_steps import train_privately
from testing.tiny import save_speaker
from tests.docstrings import as_completion, as_messages, docstrings, lines, preset
from tests.memory import saved_for_backward
from tests.runs.test_architectures import check_mixing_is_found


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A run of RAVAN on conversations, with its settings."""
    folder = tmp_path_factory.mktemp("spoken")
    settings = preset(folder, as_messages)
    return simulate(settings | {"report": True}, 2), settings, folder


def before(settings):
    loaded = ModelAndData(read_config(with_preset_path(settings)))
    with loaded.model.holding(loaded.model.initial_state()):
        return loaded.evaluate()


@pytest.mark.parametrize("method", ["ravan", "fedit", "ffa-lora"])
def test_real_text_is_learned(method, tmp_path):
    settings = preset(tmp_path, method=method)
    run = simulate(settings, 2)
    found = run.summary["metrics"]
    start = before(settings)
    assert run.summary["metric"] == "perplexity"
    assert found["final"]["perplexity"] < 0.8 * start["perplexity"]
    assert found["best"]["perplexity"] <= found["final"]["perplexity"]


def test_the_result_answers_in_a_pipeline(spoken, tmp_path):
    run, *_ = spoken
    asked = [as_messages(*docstrings()[3])["messages"][0]]
    told = predict(
        run.run_dir, _file(tmp_path / "q.jsonl", [{"messages": asked}]), tmp_path / "a.jsonl"
    )
    assert (told.rows, told.unreadable) == (1, 0)
    mine = json.loads((tmp_path / "a.jsonl").read_text())["text"]
    adapter = run.run_dir / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    model = peft.AutoPeftModelForCausalLM.from_pretrained(adapter)
    main(["export", str(run.run_dir), "--as", "merged", str(tmp_path / "merged")])
    for made in (adapter, tmp_path / "merged"):
        answer: Any = transformers.pipeline("text-generation", str(made))
        # A base model knows no end of a turn; a run's answer ends where the template's turn does.
        stop = [0, answer.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        out = answer(
            asked, max_new_tokens=12, do_sample=False, return_full_text=False, eos_token_id=stop
        )
        assert out[0]["generated_text"] == mine
    with result_of(run.run_dir) as loaded, torch.inference_mode():
        tokens = torch.tensor([[5, 6, 7]])
        expected = loaded.model.network(tokens).logits
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    card = (adapter / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("this folder", str(adapter))
    scope: dict[str, object] = {}
    exec(code, scope)  # the card's own lines
    assert scope["found"]


def _file(path, rows):
    path.write_text(lines(rows))
    return path


def test_rows_that_cannot_be_answered_say_why(spoken, tmp_path):
    run, *_ = spoken
    alone, silent = {"role": "assistant", "content": "x"}, {"role": "user", "content": None}
    rows = [as_messages("a", "b"), *({"messages": m} for m in ([], [alone], [silent])), {"x": 1}]
    told = predict(run.run_dir, _file(tmp_path / "q.jsonl", rows), tmp_path / "a.csv")
    assert told.unreadable == 4
    assert "row 3: its conversation asks for nothing" in told.problems
    assert "row 4: its message of user is missing" in told.problems


@pytest.mark.usefixtures("undrawn")
def test_it_is_evaluated_planned_and_reported(spoken, tmp_path, capsys, caplog):
    run, settings, _ = spoken
    rows = [as_messages(*row) for row in docstrings()[:7]] + [{"messages": []}]
    with caplog.at_level(logging.WARNING):
        found = evaluate(run.run_dir, _file(tmp_path / "e.jsonl", rows))
    assert found["examples"] == 7
    assert set(found["metrics"]) == {"loss", "perplexity"}
    assert "1 of 8 are left out" in capsys.readouterr().out + caplog.text
    page = (run.run_dir / "report" / "index.html").read_text()
    assert "perplexity, lowest" in page
    write_report([run.run_dir, run.run_dir], tmp_path / "report")
    plan = plan_of(settings)
    assert "memory of a step" in plan
    config = read_config(with_preset_path(settings))
    assert footprint(config).server > 0


def test_the_logits_of_a_step_are_counted(spoken, monkeypatch):
    """A block of them, and no more than that."""
    _, settings, _ = spoken
    whole = step_memory(read_config(with_preset_path(settings)), 1.0).activations
    monkeypatch.setattr("ravan_flwr.tasks.token_loss.BLOCK", 2**14)
    step_memory.cache_clear()
    blocks = step_memory(read_config(with_preset_path(settings)), 1.0).activations
    step_memory.cache_clear()
    vocabulary = 384
    assert whole - blocks > 0.8 * 8 * 95 * vocabulary * 4


@pytest.mark.parametrize(("batching", "at_a_time"), [("random", 8), ("packed", 8), ("random", 3)])
def test_what_a_step_keeps_is_what_the_plan_counts(batching, at_a_time, tmp_path):
    """Of texts that are all as long as they may be, every token of which is learned."""
    rows = [(name, " ".join([told] * 40)) for name, told in docstrings()]
    parts = {"batching": batching, "micro-batch-size": at_a_time}
    settings = preset(tmp_path, data="  loss-on: all\n", **parts)
    (tmp_path / "data" / "train.jsonl").write_text(lines(as_completion(*row) for row in rows))
    loaded = ModelAndData(read_config(with_preset_path(settings)))
    examples = loaded.partition(0, 1).train
    one, model = loaded.task, loaded.model
    batch = one.collate(examples.take(np.arange(at_a_time)))
    assert batch["input_ids"].shape == (at_a_time, 96)
    with model.holding(model.initial_state()):
        model.method.choose(model.adapters, 1.0, torch.Generator(), lambda: None)
        model.network.train()
        with saved_for_backward(model.network) as kept:
            loss = one.loss(model.network, batch)
        measured = sum(size for size, _ in kept.values())
        del loss
    counted = step_memory(loaded.config, 1.0).activations
    # The plan counts keys as often as queries; packing has a mask on top.
    assert measured <= counted < (1.5 if batching == "packed" else 1.1) * measured


def noted(one, method):
    """Note which examples a task lays out by that method, and in what shape."""
    seen: list[int] = []
    shapes: list[tuple[int, ...]] = []
    made = getattr(one, method)

    def laid(batch):
        seen.extend(batch["input_ids"].sum(1).tolist())
        out = made(batch)
        shapes.append(tuple(out["input_ids"].shape))
        return out

    setattr(one, method, laid)
    return seen, shapes


@pytest.mark.parametrize(
    "options",
    [
        {"batching": "packed"},
        {"micro-batch-size": 2},
        {"batching": "packed", "micro-batch-size": 5},
    ],
)
def test_packing_and_parts_train_the_same_examples_to_the_same_end(options, tmp_path):
    """A step has as many examples as before; what a client sends differs by rounding alone."""
    settings, results = preset(tmp_path) | {"learning-rate": 1e-3}, []
    for given in (settings, settings | options):
        config = read_config(with_preset_path(given))
        loaded = ModelAndData(config)
        seen, shapes = noted(loaded.task, "packed" if config.packing else "collate")
        examples, state = loaded.partition(0, 2).train, loaded.model.initial_state()
        steps, work = steps_of(config, 1, len(examples)), ClientRound(0, 1, 0)
        found = train_locally(loaded.model, loaded.task, examples, state, 1.0, steps, work)
        results.append((found, sorted(seen), shapes))
    (first, expected, plain), (second, trained, laid_out) = results
    assert trained == expected
    if "batching" in options:
        assert sum(r * w for r, w in laid_out) < sum(r * w for r, w in plain)
    assert second.train_loss == pytest.approx(first.train_loss, rel=1e-4)
    for name, tensor in first.upload.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(second.upload[name], tensor, rtol=2e-2, atol=2e-4)
    assert max(rows for rows, _ in laid_out) <= (config.micro_batch_size or config.batch_size)


@pytest.mark.parametrize("block", [2**27, 2**14])
def test_gradients_of_single_texts_are_by_their_own_tokens(block, tmp_path, monkeypatch):
    """However long the others of the batch are, and in however many blocks logits are computed."""
    monkeypatch.setattr("ravan_flwr.tasks.token_loss.BLOCK", block)
    loaded = ModelAndData(read_config(with_preset_path(preset(tmp_path))))
    task = task_with(ByExample, loaded.task, "privacy=example")
    examples = loaded.partition(0, 1).train
    with loaded.model.holding(loaded.model.initial_state()):
        network, parameters = loaded.model.network.train(), loaded.model.parameters()
        by_example = ExampleGradients(network, parameters)

        def gradients(rows):
            batch = task.collate(examples.take(np.array(rows)))
            sizes = task.sizes(batch)
            assert float(sizes.sum()) == task.size(batch)
            return sizes, by_example.of(lambda: task.loss(network, batch), sizes)

        sizes, together = gradients([0, 1, 2, 3])
        assert len(set(sizes.tolist())) > 1
        for row in range(4):
            network.zero_grad()
            task.loss(network, task.collate(examples.take(np.array([row])))).backward()
            for parameter, whole in zip(parameters, together, strict=True):
                torch.testing.assert_close(whole[row], parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_private_client_trains_on_texts_in_parts(tmp_path):
    settings = preset(tmp_path) | {"micro-batch-size": 2, "privacy": "example", "epsilon": 8.0}
    config = read_config(with_preset_path(settings))
    loaded = ModelAndData(config)
    seen, shapes = noted(loaded.task, "collate")
    examples, state = loaded.partition(0, 2).train, loaded.model.initial_state()
    steps, work = steps_of(config, 1, len(examples)), ClientRound(0, 1, 0)
    noise = StepNoise(1.0, 1.0)
    found = train_privately(loaded.model, loaded.task, examples, state, 1.0, steps, work, noise)
    check_mixing_is_found(loaded)
    assert all(tensor.float().isfinite().all() for tensor in found.upload.values())
    assert seen
    assert max(rows for rows, _ in shapes) <= 2


def test_clients_evaluate_by_token(tmp_path):
    """The mean over clients is that over all their tokens, and follows from the loss."""
    settings = preset(
        tmp_path, **{"evaluate-on": "clients", "validation-share": 0.3, "num-rounds": 1}
    )
    run = simulate(settings, 3)
    found = run.summary["metrics"]["final"]
    with result_of(run.run_dir) as loaded:
        parts = [loaded.partition(n, 3).validation for n in range(3)]
        whole = loaded.evaluate(sets={str(n): part for n, part in enumerate(parts)})
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(whole["perplexity"], rel=1e-5)


def test_examples_that_teach_nothing_are_in_nobodys_share(tmp_path, capsys):
    settings = preset(tmp_path, weighting="examples", **{"num-rounds": 1})
    with (tmp_path / "data" / "train.jsonl").open("a") as file:
        file.write(lines([{"prompt": "x", "completion": ""}] * 40))
    run = simulate(settings, 2)
    (record,) = map(json.loads, (run.run_dir / "rounds.jsonl").read_text().splitlines())
    assert not record["rejected"]
    assert "its completion is missing" in capsys.readouterr().out
    assert sum(client["examples"] for client in record["clients"]) < len(docstrings()) + 8


def test_a_device_brings_its_own_conversations(tmp_path):
    preset(tmp_path, as_messages)
    own = tmp_path / "own"
    own.mkdir()
    (own / "chat.jsonl").write_text(lines(as_messages(*row) for row in docstrings()[:7]))
    loaded = ModelAndData(read_config(with_preset_path({"preset": str(tmp_path / "p.yaml")})))
    assert len(loaded.device_examples(str(own), 0).train) == 7


@pytest.mark.parametrize(
    "options",
    [{"batching": "length"}, {"backbone-dtype": "4bit"}, {"gradient-checkpointing": True},
     {"precision": "bfloat16"}, {"init": "data-aware"},
     {"batching": "packed", "init": "data-aware"},
     {"batching": "packed", "gradient-checkpointing": True, "precision": "bfloat16"}],
)  # fmt: skip
def test_it_goes_with_everything_there_is(options, tmp_path):
    if "backbone-dtype" in options:
        rows = [told for _, told in docstrings()]
        save_speaker("llama", tmp_path / "model", rows, hidden_size=64, intermediate_size=128)
    run = simulate(preset(tmp_path, **options) | {"num-rounds": 1, "local-steps": 2}, 2)
    assert run.summary["metrics"]["final"]["perplexity"] > 1
