"""Exports compute the same as the run's model, in PEFT and in transformers."""

import json
import re
import shutil
from typing import Any

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification

from ravan_flwr import RavanConfig, export_run, simulate
from ravan_flwr.cli import main
from ravan_flwr.config.run_config import recorded_config
from ravan_flwr.methods import METHODS
from ravan_flwr.peft import RavanLinear
from ravan_flwr.reports.evaluation import result_of
from ravan_flwr.specs import Scalar
from ravan_flwr.training.network import build_network

SHORT: dict[str, Scalar] = {
    "num-rounds": 2, "local-steps": 2, "batch-size": 8, "report": False, "tracking": "none",
    "lora-scale": 0.5,
}  # fmt: skip
METHODS_OF_HEADS = {"ravan", "fed-sb", "fedrpca"}  # also exported as heads
METHODS_OF_WEIGHTS = {"full", "fedex-lora", "flora"}  # methods that change pretrained weights


@pytest.fixture(scope="module", params=[n for n, m in METHODS.items() if not m.mixes])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return simulate(SHORT | {"method": request.param, "output-dir": str(folder)}, 3)


def client_of(run):
    """Return the client whose model is exported; None if all have one."""
    return 0 if METHODS[run.summary["method"]].personalised else None


def client_words(run):
    return [] if client_of(run) is None else ["--client", "0"]


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """Return form -> folder of the run's export."""
    folder = tmp_path_factory.mktemp("exported")
    method = run.summary["method"]
    forms = ["merged"]
    forms += ["peft"] * (method not in METHODS_OF_WEIGHTS) + ["ravan"] * (
        method in METHODS_OF_HEADS
    )
    folders = {form: folder / form for form in forms}
    for form, path in folders.items():
        main(["export", str(run.run_dir), "--as", form, str(path), *client_words(run)])
    return folders


def logits_of(network, examples):
    with torch.inference_mode():
        return network.eval()(pixel_values=examples["pixel_values"]).logits


RESULTS = {
    True: ("merged", "merged"),
    False: ("adapter", "peft"),
}  # changes weights -> (folder of the run's result, form)


def model_files(folder):
    """Weights and configuration, without the card."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".md"}


@pytest.mark.slow(kept=2)
def test_the_exports_give_the_logits_of_the_run(run, exported):
    method = run.summary["method"]
    with result_of(run.run_dir, client_of(run)) as loaded:
        (encoded,) = loaded.test_sets.values()
        examples = encoded.take(encoded.rows[:32])
        expected = logits_of(loaded.model.network, examples)
        means = loaded.evaluate()
    if client_of(run) is None:
        assert means == pytest.approx(run.summary["metrics"]["final"])

    merged = AutoModelForImageClassification.from_pretrained(exported["merged"])
    torch.testing.assert_close(logits_of(merged, examples), expected, rtol=1e-4, atol=1e-4)
    assert merged.config.id2label[7] == "7"

    folder, form = RESULTS[method in METHODS_OF_WEIGHTS]
    own_result = run.run_dir / folder
    assert own_result.is_dir() == (client_of(run) is None)
    if own_result.is_dir():  # equal to the byte, so that it computes the same
        assert model_files(own_result) == model_files(exported[form])
    for form in exported.keys() - {"merged"}:  # with another classifier
        backbone = build_network(loaded.config.model, loaded.task, seed=99).network
        loaded_model = peft.PeftModel.from_pretrained(backbone, exported[form])
        torch.testing.assert_close(
            logits_of(loaded_model, examples), expected, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("method", sorted(METHODS_OF_WEIGHTS))
def test_a_method_that_changes_weights_has_no_adapter(method, tmp_path, capsys):
    settings = {"method": method, "num-rounds": 1, "output-dir": str(tmp_path / "runs")}
    run = simulate(SHORT | settings, 2)
    with pytest.raises(SystemExit) as end:
        main(["export", str(run.run_dir), "--as", "peft", str(tmp_path / "x")])
    assert end.value.code == 2
    assert "changes pretrained weights, which no adapter holds" in capsys.readouterr().err


INITS = [
    {}, {"init": "normal", "heads": 2}, {"init": "constant", "scaling": "constant"},
    {"init": "shared-subspace"}, {"init": "data-aware"}, {"init": "first-round"},
]  # fmt: skip


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("options", INITS, ids=lambda options: options.get("init", "default"))
def test_an_exported_adapter_has_the_runs_bases_and_can_be_trained(options, tmp_path):
    """Bases are made from the seed as the run's, or saved where they do not follow from it."""
    settings: dict[str, Scalar] = {"output-dir": str(tmp_path / "runs"), "seed": 5, **options}
    run = simulate(SHORT | settings, 3)
    export_run(run.run_dir, "ravan", tmp_path / "adapter")
    config = RavanConfig.from_pretrained(tmp_path / "adapter")
    assert config.save_bases == (options.get("init") in ("data-aware", "first-round"))
    assert config.trainable_scales == ("scaling" not in options)
    assert config.base_seed == 5
    with result_of(run.run_dir) as loaded:
        (encoded,) = loaded.test_sets.values()
        examples = encoded.take(encoded.rows[:32])
        expected = logits_of(loaded.model.network, examples)
        backbone = build_network(loaded.config.model, loaded.task, seed=99).network
        loaded_model = peft.PeftModel.from_pretrained(
            backbone, tmp_path / "adapter", is_trainable=True
        )
        torch.testing.assert_close(
            logits_of(loaded_model, examples), expected, rtol=1e-5, atol=1e-5
        )
        layers = [module for module in loaded_model.modules() if isinstance(module, RavanLinear)]
        for layer, adapter in zip(layers, loaded.model.adapters, strict=True):
            assert torch.equal(layer.ravan_B["default"], adapter.B)
            assert torch.equal(layer.ravan_A["default"], adapter.A)
    before = [layer.ravan_H["default"].detach().clone() for layer in layers]
    optimizer = torch.optim.Adam([p for p in loaded_model.parameters() if p.requires_grad], lr=0.01)
    loaded_model.train()(pixel_values=examples["pixel_values"]).logits.square().mean().backward()
    optimizer.step()
    for layer, old in zip(layers, before, strict=True):
        assert not torch.equal(layer.ravan_H["default"], old)


@pytest.mark.slow
def test_a_method_without_heads_is_not_exported_as_ravan(tmp_path, capsys):
    run = simulate(SHORT | {"method": "ffa-lora", "num-rounds": 1, "output-dir": str(tmp_path)}, 2)
    with pytest.raises(SystemExit):
        main(["export", str(run.run_dir), "--as", "ravan", str(tmp_path / "x")])
    message = capsys.readouterr().err
    assert "method 'ffa-lora' trains no heads between frozen bases" in message
    assert "or --as peft; use that" in message
    assert not (tmp_path / "x").exists()


def test_a_card_describes_the_run(run, exported):
    card = (exported["merged"] / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"| method | {run.summary['method']}" in card
    assert (", 4 heads |" in card) == METHODS[run.summary["method"]].has_heads
    assert f"{run.summary['trainable-parameters']:,}" in card
    assert f"accuracy {run.summary['metrics']['final']['accuracy']:.4f}" in card
    pools = METHODS[run.summary["method"]].pools
    assert f"2, {1 if pools else 3} clients a round" in card
    assert ("the model of one client" in card) == bool(client_words(run))
    assert ("on the examples of all" in card) == pools


def test_a_cards_code_loads_the_export(run, exported, tmp_path, monkeypatch):
    """The code runs unchanged beside an image."""
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    for folder in exported.values():
        (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
        found: dict[str, Any] = {}
        exec(code.replace('"."', f'"{folder}"'), found)
        with result_of(run.run_dir, client_of(run)) as loaded:
            (encoded,) = loaded.test_sets.values()
            examples = encoded.take(encoded.rows[:16])
            expected = logits_of(loaded.model.network, examples)
        actual = logits_of(found["classify"].model, examples)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_recorded_config_is_read_unchanged(run):
    content = json.loads((run.run_dir / "config.json").read_text())
    assert recorded_config(content, "here").as_dict() == content
    del content["heads"]
    with pytest.raises(ValueError, match=r"here: its config.json lacks, or has in excess, \['hea"):
        recorded_config(content, "here")


@pytest.mark.slow
def test_mistakes_of_an_export_are_errors(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    run = simulate(SHORT | {"num-rounds": 1, "output-dir": str(tmp_path / "runs")}, 2)
    stopped = tmp_path / "stopped"
    shutil.copytree(run.run_dir, stopped)
    (stopped / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"form 'lora' is unknown.* one of: peft, ravan, merged"):
        export_run(run.run_dir, "lora", tmp_path / "x")
    for words, message in (
        (
            [str(stopped), "--as", "peft", str(tmp_path / "z")],
            "summary.json is not there, expected",
        ),
        ([str(tmp_path), "--as", "peft", str(tmp_path / "y")], "found no config.json there"),
        ([str(run.run_dir), "--as", "peft", str(tmp_path / "full")], "is not empty, expected a"),
        ([str(run.run_dir), "--as", "peft", str(tmp_path / "full" / "x")], "is a file, expected a"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["export", *words])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
