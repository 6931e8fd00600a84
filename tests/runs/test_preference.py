"""Runs of the task `preference`: learned, evaluated, exported, and with another run's result."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from ravan_flwr import evaluate, predict, result_of, simulate
from ravan_flwr.cli import main
from ravan_flwr.config.presets import PresetPath, with_preset_path
from ravan_flwr.config.run_config import read_config
from ravan_flwr.training.cost import step_memory, step_operations
from ravan_flwr.training.model_and_data import ModelAndData
from tests.docstrings import QUICK, lines
from tests.memory import saved_bytes
from tests.short_runs import records_of
from tests.support.tiny import WORDS, save_speaker, texts

KIND, RUDE = ("ne", "ra"), ("pe",)  # endings of the words of chosen and rejected answers


def rows(number=160):
    """Generate preferences: chosen and rejected answers differ in the endings of their words."""
    draw, prompts = random.Random(0), texts(number, 1)

    def answer(ends):
        words = [word for word in WORDS if word.endswith(ends)]
        return " ".join(draw.choices(words, k=draw.randint(2, 6)))

    return [{"prompt": a + " ", "chosen": answer(KIND), "rejected": answer(RUDE)} for a in prompts]


def as_conversations(row):
    prompt = {"role": "user", "content": row["prompt"]}
    answers = ({"role": "assistant", "content": row[role]} for role in ("chosen", "rejected"))
    return dict(zip(("chosen", "rejected"), ([prompt, answer] for answer in answers), strict=True))


def preset(folder, form=None, **options: Any) -> dict[str, Any]:
    """Write data, model and preset."""
    examples = rows()
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text(lines(map(form, examples) if form else examples))
    answers = [row[role] for row in examples for role in row]
    save_speaker("llama", folder / "model", answers, initializer_range=0.3)
    columns = ["chosen", "rejected"] if form else ["prompt", "chosen", "rejected"]
    (folder / "p.yaml").write_text(
        f"task: preference\nmodel: {folder}/model\ndata:\n  name: {folder}/data\n"
        "  max-length: 64\n  target-length: 8\n  beta: 0.5\n"
        f"  columns: {json.dumps({name: name for name in columns})}\n"
    )
    return {
        "preset": str(folder / "p.yaml"), "output-dir": str(folder / "runs"), **QUICK,
        **options,
    }  # fmt: skip


@pytest.fixture(scope="module")
def preference_run(tmp_path_factory):
    """Return a run of RAVAN on preferences, its settings and its folder."""
    folder = tmp_path_factory.mktemp("preferred")
    settings = preset(folder, tracking="tensorboard")
    return simulate(settings, 3), settings, folder


def loaded_of(settings, **more):
    return ModelAndData(read_config(with_preset_path(settings | more)))


def check_learned(run):
    records = records_of(run)
    metrics = records[-1]["metrics"]
    assert run.summary["metric"] == "accuracy"
    assert metrics["accuracy"] > 0.9
    assert metrics["margin"] > 0
    assert metrics["loss"] < 0.5  # ln 2 before training
    assert not any(record["rejected"] for record in records)
    return metrics


@pytest.mark.slow
def test_preferences_are_learned_evaluated_and_planned(preference_run, tmp_path, capsys):
    run, settings, _ = preference_run
    metrics = check_learned(run)
    page = (run.run_dir / "report" / "index.html").read_text()
    assert "accuracy, highest" in page
    (tmp_path / "more.jsonl").write_text(lines(rows(200)[160:]))
    evaluated = evaluate(run.run_dir, tmp_path / "more.jsonl")
    assert set(evaluated["metrics"]) == set(metrics) == {"loss", "accuracy", "margin"}
    assert evaluated["metrics"]["accuracy"] > 0.9
    main(["plan", f"preset={settings['preset']}"])
    assert "memory of a step" in capsys.readouterr().out


def test_metrics_before_training_are_those_of_equal_models(preference_run):
    loaded = loaded_of(preference_run[1])
    with loaded.model.holding(loaded.model.initial_state()):
        metrics = loaded.evaluate()
    assert metrics["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert metrics["accuracy"] == 0
    assert metrics["margin"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "form", "rounds"),
    [("fedit", as_conversations, 2), ("ffa-lora", None, 2), ("feddpa", None, 4)],
)
def test_other_adapters_learn_preferences(method, form, rounds, tmp_path):
    options = {"method": method, "learning-rate": 5e-2, "num-rounds": rounds}
    check_learned(simulate(preset(tmp_path, form, **options), 3))


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    "options",
    [
        {"privacy": "client", "epsilon": 8.0, "noise-cohort": 1000, "clip-norm": 1.0},
        {"secure-aggregation": True, "clients-per-round": 4},
        {"sparsity": "1:1/4"},
    ],
)
def test_preferences_are_learned_with_noise_masks_or_sparse_updates(options, tmp_path):
    run = simulate(preset(tmp_path, **options, **{"num-rounds": 2, "local-steps": 4}), 6)
    assert run.summary["rejected"] == 0
    metrics = run.summary["metrics"]["final"]
    assert metrics["loss"] < 0.6  # ln 2 before training
    assert metrics["accuracy"] > 0.7


@pytest.mark.slow
def test_a_result_answers_and_is_the_reference_of_another_run(preference_run, tmp_path):
    """With `model=` of an export, another run starts from it, and it is the run's reference."""
    run, settings, _ = preference_run
    (tmp_path / "q.jsonl").write_text(lines([{"prompt": "kane lora "}]))
    result = predict(run.run_dir, tmp_path / "q.jsonl", tmp_path / "a.jsonl")
    assert (result.rows, result.unreadable) == (1, 0)
    card = (run.run_dir / "adapter" / "README.md").read_text()
    assert "text-generation" in card
    main(["export", str(run.run_dir), "--as", "merged", str(tmp_path / "merged")])
    tokens = torch.tensor([[5, 6, 7]])
    with result_of(run.run_dir) as loaded, torch.inference_mode():
        expected = loaded.model.network(tokens).logits
    next_run = loaded_of(settings, model=str(tmp_path / "merged"), method="fedit")
    with next_run.model.holding(next_run.model.initial_state()), torch.inference_mode():
        logits = next_run.model.network.eval()(tokens).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert next_run.evaluate()["loss"] == pytest.approx(np.log(2), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [4, 2])
def test_memory_and_operations_of_a_step_are_those_of_four_forwards(micro_batch, preference_run):
    """For pairs of maximal length; only the policy's tensors are saved, for both texts."""
    _, settings, folder = preference_run
    loaded = loaded_of(settings, **{"micro-batch-size": micro_batch, "batch-size": 4})
    ids = torch.full((2 * micro_batch, 64), 5)
    positions = torch.arange(ids.numel()).view_as(ids)[:, :-1].flatten()
    batch = {"input_ids": ids, "positions": positions, "targets": torch.full_like(positions, 5)}
    measured, _ = saved_bytes(loaded, batch)
    counted = step_memory(loaded.config, 1.0).activations
    assert measured <= counted < 1.1 * measured
    # Compared with a step on as many texts of `causal`, which has no forward of the reference.
    path, text = folder / "sft.yaml", (folder / "p.yaml").read_text()
    for old, new in (
        ("task: preference", "task: causal"), ("  beta: 0.5\n", ""),
        ('"chosen": "chosen", "rejected": "rejected"', '"completion": "chosen"'),
    ):  # fmt: skip
        text = text.replace(old, new)
    path.write_text(text)
    pairs = settings | {"method": "fedit", "micro-batch-size": micro_batch, "batch-size": 4}
    plain = settings | {"method": "fedit", "preset": PresetPath(path), "batch-size": 8}
    (forward, step), (pairs_forward, pairs_step) = (
        step_operations(read_config(with_preset_path(given)), 1.0) for given in (plain, pairs)
    )
    # The reference has no adapters. For adapters A x is counted, but not B's product in place.
    adapter_operations = (
        2 * (8 * 64) * settings["lora-rank"] * sum(x.in_features for x in loaded.model.layers)
    )
    assert pairs_forward == 2 * forward - adapter_operations
    assert pairs_step - step == pairs_forward - forward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"method": name}, f"method = '{name}': it changes pretrained weights")
          for name in ("full", "fedex-lora", "slora")),
        ({"init": "first-round"}, "init = 'first-round': it changes .* expected another init"),
        ({"batching": "packed"}, "has task 'preference', expected 'causal'"),
        ({"beta": 0.3}, "unknown key 'beta': .* data.beta"),
        ({"privacy": "example", "epsilon": 8.0, "num-rounds": 1}, "got task 'preference', whose"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_task_are_refused(options, message, preference_run):
    _, settings, _ = preference_run
    with pytest.raises(ValueError, match=message):
        simulate(settings | options, 3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("beta: 0.5", "beta: 0", "data.beta = 0: expected a number above 0"),
        ("beta: 0.5", "beta: 101", "data.beta = 101: expected .* at most 100"),
        ("task: preference", "task: causal", "data.beta: only task preference has it"),
    ],
)
def test_beta_is_positive_and_of_this_task_only(old, new, message, preference_run, tmp_path):
    path = tmp_path / "p.yaml"
    given = preference_run[2] / "p.yaml"
    assert read_config({"preset": PresetPath(given)}).data.beta == 0.5
    text = given.read_text().replace(old, new)
    if "causal" in new:
        text = text.replace('"chosen": "chosen", "rejected": "rejected"', '"completion": "chosen"')
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config({"preset": PresetPath(path)})
