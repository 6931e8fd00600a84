"""Every preset runs from its YAML to its metric, with a small model and small data."""

import itertools
import json
import re

import numpy as np
import pytest
import yaml

from ravan_flwr import simulate
from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.presets import conf_folder, preset_names, read_preset
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.training.cost import adapter_parameters
from ravan_flwr.training.model_and_data import get_model_and_data
from ravan_flwr.training.plan import describe
from testing.tiny import (
    ARCHITECTURES,
    DATA,
    FLOWERTUNE,
    OF_DECODERS,
    SOURCES,
    save_data,
    save_model,
    save_speaker,
)

PUBLIC = {
    "digits-vit", "cifar100-vit-b16", "svhn-vit-b16", "newsgroups-t5", "mrqa-t5", "glue-llama",
    *OF_DECODERS, *(OURS := {"fashion-vit", "packages-minilm", "wordnet-minilm", "wordnet-mpnet"}),
}  # fmt: skip
REAL = sorted(PUBLIC - {"digits-vit"})
SMALLER = sorted(set(REAL) - set(OF_DECODERS))
OF_THE_PAPER = sorted(set(SMALLER) - OURS)


# Settings that this small a model needs, and a length for FlowerTune's prompt.
DECODER_CHANGES = {
    "backbone-dtype": "float32", "max-length": 96, "learning-rate": 1e-2,
    "learning-rate-schedule": "constant",  # a cosine over two rounds trains in one only
}  # fmt: skip


def _model(preset, kind, folder):
    return save_speaker(kind, folder) if preset in OF_DECODERS else save_model(kind, folder)


@pytest.fixture(scope="module")
def small_settings(tmp_path_factory):
    """Return a function: (preset, GLUE task) -> settings with a small model and small data."""
    settings_by_preset = {}

    def settings(preset, glue_task=""):
        if (preset, glue_task) not in settings_by_preset:
            folder = tmp_path_factory.mktemp(f"{preset}-{glue_task}")
            kind, scheme = ARCHITECTURES[preset], read_config({"preset": preset}).partition_scheme
            settings_by_preset[preset, glue_task] = {
                "preset": preset,
                "model": str(_model(preset, kind, folder / "model")),
                "data": str(save_data(preset, folder / "data", glue_task)),
                **({"glue-task": glue_task} if glue_task else {}),
                **({"max-length": 24} if kind != "vit" else {}),
                **(DECODER_CHANGES if preset in OF_DECODERS else {}),
                "lora-rank": 2, "num-rounds": 2, "local-steps": 2, "batch-size": 8, "eval-every": 1,
                "partition": scheme if scheme == "iid" else f"{scheme}:1",
                "report": False, "tracking": "none",
            }  # fmt: skip
        return settings_by_preset[preset, glue_task]

    return settings


def test_every_file_in_conf_is_a_preset_or_a_study():
    assert set(preset_names()) == PUBLIC
    parsed = {read_preset(name).path for name in PUBLIC}
    studies = sorted((conf_folder() / "studies").glob("*.yaml"))
    for path in studies:  # test_study.py reads them
        parsed.add(path)
    assert parsed == {path for path in conf_folder().rglob("*") if path.is_file()}


METRICS = {"mrqa-t5": "f1", **dict.fromkeys(FLOWERTUNE, "perplexity")}
# Every preset and GLUE task, with three methods in turn; RAVAN on every task.
IN_TURN = itertools.cycle(["ravan", "full", "fedit"])
RUNS = [
    *((*data, method) for data, method in zip(DATA, IN_TURN, strict=False)),
    ("newsgroups-t5", "", "ravan"), ("glue-llama", "rte", "ravan"),
]  # fmt: skip


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("preset", "glue_task", "method"), RUNS)
def test_a_preset_runs_from_yaml_to_metric(preset, glue_task, method, small_settings, tmp_path):
    run = simulate(
        small_settings(preset, glue_task) | {"method": method, "output-dir": str(tmp_path)}, 4
    )
    first, last = map(json.loads, (run.run_dir / "rounds.jsonl").read_text().splitlines())
    assert not first["rejected"] + last["rejected"]
    assert len(last["clients"]) == min(4, read_config({"preset": preset}).clients_per_round)
    metric = METRICS.get(preset, "accuracy")
    assert run.summary["metric"] == metric
    assert 0 <= last["metrics"][metric] <= (1 if metric != "perplexity" else np.inf)
    assert np.isfinite(last["metrics"]["loss"])
    assert last["metrics"]["loss"] != first["metrics"]["loss"]
    assert sum(client["examples"] for client in last["clients"]) < 120
    if glue_task == "mnli":
        accuracies = [last["metrics"][f"accuracy-{name}"] for name in ("matched", "mismatched")]
        assert last["metrics"]["accuracy"] == pytest.approx(
            np.mean(accuracies)
        )  # both sets have the same size


@pytest.mark.slow
def test_a_text_to_text_model_learns(small_settings, tmp_path):
    """Loss and F1 improve: the trained model generates the answers."""
    settings = small_settings("mrqa-t5") | {
        "method": "full", "learning-rate": 3e-3, "num-rounds": 3, "local-steps": 80,
        "batch-size": 32, "partition": "iid", "output-dir": str(tmp_path),
    }  # fmt: skip
    run = simulate(settings, 2)
    rounds = [json.loads(line) for line in (run.run_dir / "rounds.jsonl").read_text().splitlines()]
    assert rounds[-1]["train-loss"] < 0.8 * rounds[0]["train-loss"]
    assert run.summary["metrics"]["final"]["f1"] > 0.05


def test_mrqas_clients_differ_in_their_sources(small_settings):
    loaded = get_model_and_data(
        read_config(small_settings("mrqa-t5") | {"partition": "dirichlet-by-client:0.1"})
    )
    sources = np.array(loaded.splits["train"]["subset"][:])
    assert set(sources) == set(SOURCES)
    fractions = []
    for client in range(3):
        of_client = sources[loaded.partition(client, 3).train.rows]
        fractions.append(max(np.mean(of_client == source) for source in SOURCES))
    assert max(fractions) > 2 / 6


# Trained parameters without the classifier, computed from configurations alone.
VIT, T5 = 24, 48  # adapted matrices of 768 x 768
COUNTS = {
    ("cifar100-vit-b16", "lower"): {
        "ravan": VIT * 4 * (110**2 + 1), "fedit": VIT * 32 * 2 * 768, "ffa-lora": VIT * 64 * 768,
        "fed-sb": VIT * 221**2,
    },
    ("svhn-vit-b16", "higher"): {
        "ravan": VIT * 4 * (156**2 + 1), "fedit": VIT * 64 * 2 * 768, "ffa-lora": VIT * 128 * 768,
        "fed-sb": VIT * 313**2,
    },
    ("newsgroups-t5", "lower"): {
        "ravan": T5 * 4 * (110**2 + 1), "fedit": T5 * 32 * 2 * 768, "ffa-lora": T5 * 64 * 768,
        "fed-sb": T5 * 221**2,
    },
    ("mrqa-t5", "higher"): {
        "ravan": T5 * 4 * (156**2 + 1), "fedit": T5 * 64 * 2 * 768, "ffa-lora": T5 * 128 * 768,
        "fed-sb": T5 * 313**2,
    },
    ("glue-llama", "lower"): {
        "ravan": 32 * 4 * (181**2 + 1),
        "fedit": 16 * 32 * (2048 + 2048 + 2048 + 512),
        "ffa-lora": 16 * 64 * (2048 + 512),
        "fed-sb": 32 * 362**2,
    },
    ("glue-llama", "higher"): {
        "ravan": 32 * 4 * (256**2 + 1),
        "fedit": 16 * 64 * (2048 + 2048 + 2048 + 512),
        "ffa-lora": 16 * 128 * (2048 + 512),
        "fed-sb": 32 * 512**2,
    },
}  # fmt: skip


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("preset", "budget"), COUNTS)
def test_parameters_are_those_of_the_paper(preset, budget):
    expected = COUNTS[preset, budget]
    expected |= dict.fromkeys(("fedex-lora", "hetlora", "flexlora"), expected["fedit"])
    for method, count in expected.items():
        config = read_config({"preset": preset, "parameter-budget": budget, "method": method})
        assert adapter_parameters(config) == count, method


@pytest.mark.slow
def test_the_rounded_parameter_counts_are_those_of_the_paper():
    def millions(preset, method):
        return adapter_parameters(read_config({"preset": preset, "method": method})) / 1e6

    assert millions("cifar100-vit-b16", "fedit") == pytest.approx(1.180, abs=5e-4)
    assert millions("cifar100-vit-b16", "ravan") == pytest.approx(1.162, abs=5e-4)
    assert millions("mrqa-t5", "fedit") == pytest.approx(2.4, abs=0.05)
    assert [millions("glue-llama", m) for m in ("fedit", "ffa-lora", "ravan")] == pytest.approx(
        [3.41, 2.62, 4.19], abs=5e-3
    )


# Every method and every preset; `test_parameters_are_those_of_the_paper` counts for all pairs.
PLANS = [*zip(METHODS, itertools.cycle(SMALLER), strict=False)]


@pytest.mark.usefixtures("untimed")
@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("method", "preset"), PLANS[: len(SMALLER)])
def test_every_presets_plan_needs_neither_weights_nor_a_connection(preset, method):
    plan = describe(read_config({"preset": preset, "method": method}))
    adapted = {"cifar100-vit-b16": 24, "svhn-vit-b16": 24, "glue-llama": 32, "fashion-vit": 8}
    adapted |= {"packages-minilm": 12, "wordnet-minilm": 12, "wordnet-mpnet": 24}
    assert f"adapted         {adapted.get(preset, 48)} matrices" in plan


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("method", "preset"), PLANS[len(SMALLER) :])
def test_every_methods_plan_needs_neither_weights_nor_a_connection(preset, method, two_blocks):
    plan = describe(read_config({"preset": preset, "method": method}))
    assert f"adapted         {8 if preset.endswith('t5') else 4} matrices" in plan


# Learning rates of the appendix: (iid, dirichlet) of the lower budget, then of the higher.
RATES = {
    ("cifar100-vit-b16", "fed-sb"): (1e-3, 5e-4, 1e-3, 5e-4),
    ("cifar100-vit-b16", "fedit"): (5e-3, 5e-3, 5e-3, 5e-3),
    ("svhn-vit-b16", "fedex-lora"): (1e-3, 1e-3, 1e-3, 5e-4),
    ("svhn-vit-b16", "fed-sb"): (5e-3, 5e-3, 1e-3, 1e-3),
    ("newsgroups-t5", "ravan"): (5e-4, 5e-4, 1e-4, 1e-4),
    ("newsgroups-t5", "fed-sb"): (5e-3, 1e-3, 5e-3, 1e-3),
    ("mrqa-t5", "ffa-lora"): (5e-3, 5e-3, 1e-2, 5e-3),
    ("mrqa-t5", "fed-sb"): (1e-3, 5e-4, 5e-4, 5e-4),
    ("mrqa-t5", "fedit"): (1e-3, 1e-3, 5e-4, 5e-4),
    ("glue-llama", "ravan"): (5e-5, 5e-5, 5e-5, 5e-5),
}


@pytest.mark.parametrize(("preset", "method"), RATES)
def test_learning_rates_are_those_of_the_paper(preset, method):
    actual = [
        read_config(
            {"preset": preset, "method": method, "parameter-budget": budget, "partition": partition}
        ).learning_rate
        for budget in ("lower", "higher")
        for partition in ("iid", "dirichlet")
    ]
    assert tuple(actual) == RATES[preset, method]


def test_other_heads_or_budgets_replace_the_papers_ranks():
    def rank(**settings):
        config = {key.replace("_", "-"): value for key, value in settings.items()}
        return read_config({"preset": "cifar100-vit-b16"} | config).rank

    assert rank() == 110
    assert rank(heads=4) == 110
    assert rank(heads=8) is None  # then the rank follows from the budget
    assert rank(lora_rank=16) is None
    assert rank(rank=7) == 7
    assert rank(parameter_budget="higher", method="ffa-lora") == 128


@pytest.mark.parametrize("preset", OF_THE_PAPER)
def test_rounds_batches_and_lengths_are_those_of_the_paper(preset):
    config = read_config({"preset": preset})
    rounds = {"newsgroups-t5": 100, "mrqa-t5": 20, "glue-llama": 20}.get(preset, 50)
    batch = 16 if preset == "glue-llama" else 32
    length = {"newsgroups-t5": 256, "mrqa-t5": 256, "glue-llama": 128}.get(preset, 0)
    assert (config.num_rounds, config.batch_size, config.max_length) == (rounds, batch, length)
    assert (config.local_steps, config.clients_per_round, config.num_clients) == (50, 3, 20)
    assert config.classifier == "frozen"
    assert re.fullmatch(r"[0-9a-f]{40}", config.model.revision)


def preset_with(tmp_path, monkeypatch, preset="glue-llama", **changes):
    """Write the preset with other fields into another folder."""
    content = yaml.safe_load((conf_folder() / f"{preset}.yaml").read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        part = content
        for name in parents:
            part = part[name.replace("_", "-")]
        part[last.replace("_", "-")] = value
    (tmp_path / f"{preset}.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr("ravan_flwr.config.presets.conf_folder", lambda: tmp_path)
    return {"preset": preset}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "x"}, "task 'x' is unknown. Expected one of: vision, text"),
        ({"data__max_length": 0}, "max-length = 0: expected a whole number at least 1"),
        ({"data__glue_tasks__x": {}}, "data.glue-tasks.x is unknown"),
        ({"data__glue_tasks__rte__labels": []}, r"rte.labels = \[\]: expected the names"),
        ({"data__glue_tasks__rte__columns": {"text": "a"}}, "rte.columns.label is missing"),
        ({"parameter_budgets__lower__ravan": 0}, "rank = 0: expected a whole number"),
        ({"parameter_budgets__lower__x": 1}, "parameter-budgets.lower.x is unknown"),
        ({"learning_rate__ravan": {"x": 1.0}}, "expected a number, or numbers by the values of"),
        ({"model__shape": {"hidden_size": 1}}, "model.shape.model_type is missing"),
    ],
)
def test_an_error_names_the_damaged_preset(changes, message, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"glue-llama.yaml: .*{message}"):
        read_config(preset_with(tmp_path, monkeypatch, **changes))


def test_keys_that_do_not_fit_the_preset_are_errors(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="glue-task = 'rte': .* has no GLUE tasks"):
        read_config({"glue-task": "rte"})
    with pytest.raises(ValueError, match=r"max-length = 9: .* has no texts"):
        read_config({"max-length": 9})
    with pytest.raises(ValueError, match=r"data = './here': found no such folder"):
        read_config({"data": "./here"})
    data = read_config({"data": "org/name"}).data  # with the preset's columns and labels
    assert (data.source, data.name, data.labels[-1]) == ("hub", "org/name", "9")
    with pytest.raises(ValueError, match=r"model = './here': found no such folder"):
        read_config({"model": "./here"})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("text,label\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"data = 'data/train.csv': got a file, expected a folder"):
        read_config({"data": "data/train.csv"})
    with pytest.raises(ValueError, match=r"targets = 'q,': expected ends"):
        read_config({"targets": "q,"})
    assert read_config({"model": "org/name@abc"}).model.revision == "abc"
    assert set(KEYS["glue-task"].choices) == set(read_preset("glue-llama").glue_tasks)
