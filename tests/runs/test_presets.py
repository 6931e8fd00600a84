"""Every preset runs from its YAML to its metric, with a small model and small data."""

import functools
import itertools
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
from tests.short_runs import records_of
from tests.support.tiny import (
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
    *OF_DECODERS, *(OURS := {
        "fashion-vit", "packages-minilm", "wordnet-minilm", "wordnet-mpnet", "wordnet-smollm2",
    }),
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
                "tracking": "none",
            }  # fmt: skip
        return settings_by_preset[preset, glue_task]

    return settings


def test_every_file_in_conf_is_a_preset_or_a_study():
    assert set(preset_names()) == PUBLIC
    parsed = {read_preset(name).path for name in PUBLIC}
    parsed |= {*(conf_folder() / "studies").glob("*.yaml")}  # test_study.py reads them
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
    first, last = records_of(run)
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
        # Both sets have the same size.
        assert last["metrics"]["accuracy"] == pytest.approx(np.mean(accuracies))


@pytest.mark.slow
def test_a_text_to_text_model_learns(small_settings, tmp_path):
    """Loss and F1 improve: the trained model generates the answers."""
    settings = small_settings("mrqa-t5") | {
        "method": "full", "learning-rate": 3e-3, "num-rounds": 3, "local-steps": 80,
        "batch-size": 32, "partition": "iid", "output-dir": str(tmp_path),
    }  # fmt: skip
    run = simulate(settings, 2)
    rounds = records_of(run)
    assert rounds[-1]["train-loss"] < 0.8 * rounds[0]["train-loss"]
    assert run.summary["metrics"]["final"]["f1"] > 0.05


def test_mrqas_clients_differ_in_their_sources(small_settings):
    settings = small_settings("mrqa-t5") | {"partition": "dirichlet-by-client:0.1"}
    loaded = get_model_and_data(read_config(settings))
    sources = np.array(loaded.splits["train"]["subset"][:])
    assert set(sources) == set(SOURCES)
    fractions = []
    for client in range(3):
        of_client = sources[loaded.partition(client, 3).train.rows]
        fractions.append(max(np.mean(of_client == source) for source in SOURCES))
    assert max(fractions) > 2 / 6


# Trained parameters without the classifier, computed from configurations alone. The paper prints
# 1.180 and 1.162 million (CIFAR-100: FedIT, RAVAN), 2.4 (MRQA, FedIT), and of GLUE with the lower
# budget 3.41, 2.62 and 4.19 (FedIT, FFA-LoRA, RAVAN).
LOWER, HIGHER = (110, 32, 221), (156, 64, 313)  # ranks of RAVAN, of LoRA, of FedSB


def counts_of(matrices, ravan, lora, fed_sb):
    """Return each method's parameters for so many matrices of 768 x 768."""
    return {
        "ravan": matrices * 4 * (ravan**2 + 1), "fedit": matrices * lora * 2 * 768,
        "ffa-lora": matrices * 2 * lora * 768, "fed-sb": matrices * fed_sb**2,
    }  # fmt: skip


def counts_of_llama(ravan, lora, fed_sb):
    """Return them for 16 layers' queries of 2048 x 2048 and values of 2048 x 512."""
    return {
        "ravan": 32 * 4 * (ravan**2 + 1), "fedit": 16 * lora * (2048 + 2048 + 2048 + 512),
        "ffa-lora": 16 * 2 * lora * (2048 + 512), "fed-sb": 32 * fed_sb**2,
    }  # fmt: skip


COUNTS = {
    ("cifar100-vit-b16", "lower"): counts_of(24, *LOWER),
    ("svhn-vit-b16", "higher"): counts_of(24, *HIGHER),
    ("newsgroups-t5", "lower"): counts_of(48, *LOWER),
    ("mrqa-t5", "higher"): counts_of(48, *HIGHER),
    ("glue-llama", "lower"): counts_of_llama(181, 32, 362),
    ("glue-llama", "higher"): counts_of_llama(256, 64, 512),
}


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("preset", "budget"), COUNTS)
def test_parameters_are_those_of_the_paper(preset, budget):
    expected = COUNTS[preset, budget]
    expected |= dict.fromkeys(("fedex-lora", "hetlora", "flexlora"), expected["fedit"])
    for method, count in expected.items():
        config = read_config({"preset": preset, "lora-rank": budget, "method": method})
        assert adapter_parameters(config) == count, method


# Every method and every preset; `test_parameters_are_those_of_the_paper` counts for all pairs.
PLANS = [*zip(METHODS, itertools.cycle(SMALLER), strict=False)]


@pytest.mark.usefixtures("untimed")
@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("method", "preset"), PLANS[: len(SMALLER)])
def test_every_presets_plan_needs_neither_weights_nor_a_connection(preset, method):
    plan = describe(read_config({"preset": preset, "method": method}))
    adapted = {"cifar100-vit-b16": 24, "svhn-vit-b16": 24, "glue-llama": 32, "fashion-vit": 8}
    adapted |= {"packages-minilm": 12, "wordnet-minilm": 12, "wordnet-mpnet": 24}
    adapted |= {"wordnet-smollm2": 60}  # queries and values of 30 layers
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
            {"preset": preset, "method": method, "lora-rank": budget, "partition": partition}
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
    for other in ({"heads": 8}, {"lora_rank": 16}, {"model": "org/swin"}, {"targets": "dense"}):
        assert rank(**other) is None  # the rank follows from the budget
    assert rank(model="org/swin", rank=7) == 7
    assert rank(lora_rank="higher", method="ffa-lora") == 128


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


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("task", "x", "task 'x' is unknown"),
        ("data/glue-tasks/x", {}, "data.glue-tasks.x is unknown"),
        ("data/glue-tasks/rte/labels", [], r"rte.labels = \[\]"),
        ("data/glue-tasks/rte/columns", {"text": "a"}, "rte.columns.label is missing"),
        ("parameter-budgets/lower/ravan", 0, "rank = 0"),
        ("parameter-budgets/lower/x", 1, "parameter-budgets.lower.x is unknown"),
        ("learning-rate/ravan", {"x": 1.0}, "expected a number, or numbers by the values of"),
    ],
)
def test_an_error_names_the_damaged_preset(place, value, message, tmp_path, monkeypatch):
    content = yaml.safe_load((conf_folder() / "glue-llama.yaml").read_text())
    *parents, last = place.split("/")
    functools.reduce(dict.__getitem__, parents, content)[last] = value
    (tmp_path / "glue-llama.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr("ravan_flwr.config.presets.conf_folder", lambda: tmp_path)
    with pytest.raises(ValueError, match=f"glue-llama.yaml: .*{message}"):
        read_config({"preset": "glue-llama"})


def test_other_data_have_the_presets_columns_and_labels():
    data = read_config({"data": "org/name"}).data
    assert (data.source, data.name, data.labels[-1]) == ("hub", "org/name", "9")
    assert read_config({"model": "org/name@abc"}).model.revision == "abc"
    assert set(KEYS["glue-task"].choices) == set(read_preset("glue-llama").glue_tasks)
