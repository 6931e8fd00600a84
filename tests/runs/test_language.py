"""Runs of language models: training on real text, answers of results, data of devices."""

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
from ravan_flwr.extras.example_privacy.gradients import ExampleGradients, StepNoise
from ravan_flwr.extras.example_privacy.steps import train_privately
from ravan_flwr.results.report import write_report
from ravan_flwr.seeding import ClientRound
from ravan_flwr.tasks.extensions import ByExample, task_with
from ravan_flwr.training.cost import footprint, step_memory
from ravan_flwr.training.local_steps import ClientWork, make_training_settings, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.plan import plan_of
from tests.docstrings import as_completion, as_messages, docstrings, lines, preset
from tests.memory import saved_bytes
from tests.runs.test_architectures import check_mixing_is_found
from tests.short_runs import records_of
from tests.support.tiny import save_speaker


@pytest.fixture(scope="module")
def conversation_run(tmp_path_factory):
    """Return a run of RAVAN on conversations, its settings and its folder."""
    folder = tmp_path_factory.mktemp("spoken")
    settings = preset(folder, as_messages)
    return simulate(settings | {"tracking": "tensorboard"}, 2), settings, folder


def config_of(settings, **more):
    return read_config(with_preset_path(settings | more))


def loaded_of(settings, **more):
    return ModelAndData(config_of(settings, **more))


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("method", ["ravan", "fedit", "ffa-lora"])
def test_perplexity_falls_on_real_text(method, tmp_path):
    settings = preset(tmp_path, method=method)
    run = simulate(settings, 2)
    metrics = run.summary["metrics"]
    loaded = loaded_of(settings)
    with loaded.model.holding(loaded.model.initial_state()):
        start = loaded.evaluate()
    assert run.summary["metric"] == "perplexity"
    assert metrics["final"]["perplexity"] < 0.8 * start["perplexity"]
    assert metrics["best"]["perplexity"] <= metrics["final"]["perplexity"]


@pytest.mark.slow
def test_adapter_and_merged_export_answer_in_a_pipeline(conversation_run, tmp_path):
    run, *_ = conversation_run
    question = [as_messages(*docstrings()[3])["messages"][0]]
    answered = predict(
        run.run_dir, _file(tmp_path / "q.jsonl", [{"messages": question}]), tmp_path / "a.jsonl"
    )
    assert (answered.rows, answered.unreadable) == (1, 0)
    expected_text = json.loads((tmp_path / "a.jsonl").read_text())["text"]
    adapter = run.run_dir / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    model = peft.AutoPeftModelForCausalLM.from_pretrained(adapter)
    main(["export", str(run.run_dir), "--as", "merged", str(tmp_path / "merged")])
    for folder in (adapter, tmp_path / "merged"):
        answer: Any = transformers.pipeline("text-generation", str(folder))
        # A base model has no end of a turn; a run's answer ends with the template's turn.
        stop = [0, answer.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        out = answer(
            question, max_new_tokens=12, do_sample=False, return_full_text=False, eos_token_id=stop
        )
        assert out[0]["generated_text"] == expected_text
    with result_of(run.run_dir) as loaded, torch.inference_mode():
        tokens = torch.tensor([[5, 6, 7]])
        expected = loaded.model.network(tokens).logits
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    card = (adapter / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace('"."', f'"{adapter}"')
    scope: dict[str, object] = {}
    exec(code, scope)  # the card's code
    assert scope["found"]


def _file(path, rows):
    path.write_text(lines(rows))
    return path


def test_rows_that_cannot_be_answered_have_a_reason(conversation_run, tmp_path):
    run, *_ = conversation_run
    invalid: tuple[Any, ...] = (
        [],
        [{"role": "assistant", "content": "x"}],
        [{"role": "user", "content": None}],
    )
    rows = [as_messages("a", "b"), *({"messages": messages} for messages in invalid), {"x": 1}]
    answered = predict(run.run_dir, _file(tmp_path / "q.jsonl", rows), tmp_path / "a.csv")
    assert answered.unreadable == 4
    assert "row 3: its conversation asks for nothing" in answered.problems
    assert "row 4: its message of user is missing" in answered.problems


@pytest.mark.slow
@pytest.mark.usefixtures("without_charts")
def test_a_language_run_is_evaluated_and_reported(conversation_run, tmp_path, capsys, caplog):
    run, settings, _ = conversation_run
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
    assert footprint(config_of(settings)).server > 0


@pytest.mark.slow
def test_the_plan_counts_one_block_of_logits(conversation_run, monkeypatch):
    """Not all logits are counted, since the loss computes them block by block."""
    _, settings, _ = conversation_run
    unblocked = step_memory(config_of(settings), 1.0).activations
    monkeypatch.setattr("ravan_flwr.tasks.token_loss.BLOCK", 2**14)
    step_memory.cache_clear()
    blocked = step_memory(config_of(settings), 1.0).activations
    step_memory.cache_clear()
    vocabulary = 384
    assert unblocked - blocked > 0.8 * 8 * 95 * vocabulary * 4


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("batching", "micro_batch"), [("random", 8), ("packed", 8), ("random", 3)])
def test_the_plan_counts_the_saved_tensors_of_a_step(batching, micro_batch, tmp_path):
    """All texts have the maximal length, and the loss is on every token."""
    rows = [(name, " ".join([text] * 40)) for name, text in docstrings()]
    parts = {"batching": batching, "micro-batch-size": micro_batch}
    settings = preset(tmp_path, data="  loss-on: all\n", **parts)
    (tmp_path / "data" / "train.jsonl").write_text(lines(as_completion(*row) for row in rows))
    loaded = loaded_of(settings)
    examples = loaded.partition(0, 1).train
    batch = loaded.task.collate(examples.take(np.arange(micro_batch)))
    assert batch["input_ids"].shape == (micro_batch, 96)
    measured, _ = saved_bytes(loaded, batch)
    counted = step_memory(loaded.config, 1.0).activations
    # The plan counts keys as often as queries, and for packing a mask as well.
    assert measured <= counted < (1.5 if batching == "packed" else 1.1) * measured


def trained(loaded, train, *more):
    """Return what a client's training gives."""
    examples, state = loaded.partition(0, 2).train, loaded.model.initial_state()
    steps = make_training_settings(loaded.config, 1, len(examples))
    work = ClientWork(examples, state, 1.0, steps, ClientRound(0, 1, 0))
    return train(loaded.model, loaded.task, work, *more)


def record_batches(task, method):
    """Record the token sums of examples that a task's method gets, and the shapes it returns."""
    example_sums: list[int] = []
    shapes: list[tuple[int, ...]] = []
    original = getattr(task, method)

    def recorded(batch):
        example_sums.extend(batch["input_ids"].sum(1).tolist())
        batch_out = original(batch)
        shapes.append(tuple(batch_out["input_ids"].shape))
        return batch_out

    setattr(task, method, recorded)
    return example_sums, shapes


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    "options",
    [
        {"batching": "packed"},
        {"micro-batch-size": 2},
        {"batching": "packed", "micro-batch-size": 5},
    ],
)
def test_packing_and_micro_batches_give_the_same_upload(options, tmp_path):
    """A step has the same examples; the upload differs only by rounding."""
    settings, results = preset(tmp_path) | {"learning-rate": 1e-3}, []
    each: tuple[dict[str, Any], ...] = ({}, options)
    for changes in each:
        loaded = loaded_of(settings, **changes)
        config = loaded.config
        token_sums, shapes = record_batches(loaded.task, "packed" if config.packing else "collate")
        results.append((trained(loaded, train_locally), sorted(token_sums), shapes))
    (first, expected, plain), (second, examples, laid_out) = results
    assert examples == expected
    if "batching" in options:
        assert sum(r * w for r, w in laid_out) < sum(r * w for r, w in plain)
    assert second.train_loss == pytest.approx(first.train_loss, rel=1e-4)
    for name, tensor in first.upload.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(second.upload[name], tensor, rtol=2e-2, atol=2e-4)
    assert max(rows for rows, _ in laid_out) <= (config.micro_batch_size or config.batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("block", [2**27, 2**14])
def test_gradients_of_single_texts_depend_on_their_own_tokens_only(block, tmp_path, monkeypatch):
    """They do not depend on the batch's other texts, nor on the number of blocks of logits."""
    monkeypatch.setattr("ravan_flwr.tasks.token_loss.BLOCK", block)
    loaded = loaded_of(preset(tmp_path))
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

        sizes, batched_gradients = gradients([0, 1, 2, 3])
        assert len(set(sizes.tolist())) > 1
        for row in range(4):
            network.zero_grad()
            task.loss(network, task.collate(examples.take(np.array([row])))).backward()
            for parameter, batched in zip(parameters, batched_gradients, strict=True):
                torch.testing.assert_close(batched[row], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_private_client_trains_in_micro_batches(tmp_path):
    private = {"micro-batch-size": 2, "privacy": "example", "epsilon": 8.0}
    loaded = loaded_of(preset(tmp_path), **private)
    token_sums, shapes = record_batches(loaded.task, "collate")
    found = trained(loaded, train_privately, StepNoise(1.0, 1.0))
    check_mixing_is_found(loaded)
    assert all(tensor.float().isfinite().all() for tensor in found.upload.values())
    assert token_sums
    assert max(rows for rows, _ in shapes) <= 2


@pytest.mark.slow
def test_client_metrics_are_averaged_by_token(tmp_path):
    """The mean over clients is over all their tokens; the perplexity follows from the loss."""
    of_clients = {"evaluate-on": "clients", "validation-share": 0.3, "num-rounds": 1}
    run = simulate(preset(tmp_path, **of_clients), 3)
    found = run.summary["metrics"]["final"]
    with result_of(run.run_dir) as loaded:
        parts = [loaded.partition(n, 3).validation for n in range(3)]
        pooled = loaded.evaluate(sets={str(n): part for n, part in enumerate(parts)})
    assert found["loss"] == pytest.approx(pooled["loss"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(pooled["perplexity"], rel=1e-5)


@pytest.mark.slow
def test_examples_without_a_target_belong_to_no_partition(tmp_path, capsys):
    settings = preset(tmp_path, weighting="examples", **{"num-rounds": 1})
    with (tmp_path / "data" / "train.jsonl").open("a") as file:
        file.write(lines([{"prompt": "x", "completion": ""}] * 40))
    run = simulate(settings, 2)
    (record,) = records_of(run)
    assert not record["rejected"]
    assert "its completion is missing" in capsys.readouterr().out
    assert sum(client["examples"] for client in record["clients"]) < len(docstrings()) + 8


def test_a_device_reads_its_own_conversations(tmp_path):
    preset(tmp_path, as_messages)
    device_folder = tmp_path / "own"
    device_folder.mkdir()
    (device_folder / "chat.jsonl").write_text(lines(as_messages(*row) for row in docstrings()[:7]))
    loaded = loaded_of({"preset": str(tmp_path / "p.yaml")})
    assert len(loaded.device_examples(str(device_folder), 0).train) == 7


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    "options",
    [{"batching": "length"}, {"backbone-dtype": "4bit"}, {"gradient-checkpointing": True},
     {"precision": "bfloat16"}, {"init": "data-aware"},
     {"batching": "packed", "init": "data-aware"},
     {"batching": "packed", "gradient-checkpointing": True, "precision": "bfloat16"}],
)  # fmt: skip
def test_language_models_train_with_every_option(options, tmp_path):
    if "backbone-dtype" in options:
        rows = [text for _, text in docstrings()]
        save_speaker("llama", tmp_path / "model", rows, hidden_size=64, intermediate_size=128)
    run = simulate(preset(tmp_path, **options) | {"num-rounds": 1, "local-steps": 2}, 2)
    assert run.summary["metrics"]["final"]["perplexity"] > 1
