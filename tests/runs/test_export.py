"""Exports compute the same as the run's model, in PEFT and in transformers."""

import json
import shutil

import pytest
import torch

from ravan_flwr import RavanConfig, export_run
from ravan_flwr.cli import main
from ravan_flwr.config.run_config import recorded_config
from ravan_flwr.methods import METHODS
from ravan_flwr.peft import RavanLinear
from ravan_flwr.results.evaluation import result_of
from ravan_flwr.tasks import MACRO_F1
from tests import short_runs
from tests.commands import error_of
from tests.runs.in_use import OF_WEIGHTS, check_logits, examples_and_logits

METHODS_OF_HEADS = {"ravan", "fed-sb", "fedrpca"}  # also exported as heads


def run_of(folder, clients=3, **settings):
    return short_runs.run(folder, clients, lora_scale=0.5, **settings)


@pytest.fixture(scope="module", params=[n for n, m in METHODS.items() if not m.mixes])
def run(request, tmp_path_factory):
    return run_of(tmp_path_factory.mktemp(request.param), method=request.param)


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
    forms = ["merged"] + ["peft"] * (method not in OF_WEIGHTS)
    forms += ["ravan"] * (method in METHODS_OF_HEADS)
    folders = {form: folder / form for form in forms}
    for form, path in folders.items():
        main(["export", str(run.run_dir), "--as", form, str(path), *client_words(run)])
    return folders


def model_files(folder):
    """Weights and configuration, without the card."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".md"}


@pytest.mark.slow(kept=2)
def test_the_exports_give_the_logits_of_the_run(run, exported):
    with result_of(run.run_dir, client_of(run)) as loaded:
        expected = examples_and_logits(loaded)
        means = loaded.evaluate()
    if client_of(run) is None:
        final = run.summary["metrics"]["final"]
        assert means == pytest.approx({k: final[k] for k in final if k != MACRO_F1})

    networks = {form: check_logits(path, loaded, expected) for form, path in exported.items()}
    assert networks["merged"].config.id2label[7] == "7"

    of_weights = run.summary["method"] in OF_WEIGHTS
    folder, form = ("merged", "merged") if of_weights else ("adapter", "peft")
    own_result = run.run_dir / folder
    assert own_result.is_dir() == (client_of(run) is None)
    if own_result.is_dir():  # equal to the byte, so that it computes the same
        assert model_files(own_result) == model_files(exported[form])


INITS = [
    {}, {"init": "normal", "heads": 2}, {"init": "constant", "scaling": "constant"},
    {"init": "shared-subspace"}, {"init": "data-aware"}, {"init": "first-round"},
]  # fmt: skip


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("options", INITS, ids=lambda options: options.get("init", "default"))
def test_an_exported_adapter_has_the_runs_bases_and_can_be_trained(options, tmp_path):
    """Bases are made from the seed as the run's, or saved where they do not follow from it."""
    run_dir = run_of(tmp_path / "runs", seed=5, **options).run_dir
    export_run(run_dir, "ravan", tmp_path / "adapter")
    config = RavanConfig.from_pretrained(tmp_path / "adapter")
    assert config.save_bases == (options.get("init") in ("data-aware", "first-round"))
    assert config.trainable_scales == ("scaling" not in options)
    assert config.base_seed == 5
    with result_of(run_dir) as loaded:
        examples, _ = expected = examples_and_logits(loaded)
        loaded_model = check_logits(tmp_path / "adapter", loaded, expected, 1e-5, is_trainable=True)
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


def test_a_merged_export_of_grey_images_is_the_model_of_another_run(tmp_path):
    """Its processor's images have the one channel that the model takes; pixels are rounded."""
    finished = run_of(tmp_path / "first", local_steps=10)
    export_run(finished.run_dir, "merged", tmp_path / "model")
    evaluated = run_of(
        tmp_path / "second", model=str(tmp_path / "model"), method="none", classifier="frozen"
    )
    expected, actual = (run.summary["metrics"]["final"] for run in (finished, evaluated))
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-2)


def test_a_form_that_the_method_lacks_is_refused(run, tmp_path, capsys):
    method, words = run.summary["method"], [*client_words(run), tmp_path / "x"]
    if method in OF_WEIGHTS:
        error = error_of(capsys, "export", run.run_dir, "--as", "peft", *words)
        assert "changes pretrained weights, which no adapter holds" in error
    if method not in METHODS_OF_HEADS:
        error = error_of(capsys, "export", run.run_dir, "--as", "ravan", *words)
        assert f"method '{method}' trains no heads between frozen bases" in error
        assert ("or --as peft; use that" in error) == (method not in OF_WEIGHTS)
    assert not (tmp_path / "x").exists()


def test_a_card_describes_the_run(run, exported):
    card = (exported["merged"] / "README.md").read_text()
    info = METHODS[run.summary["method"]]
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"| method | {run.summary['method']}" in card
    assert (", 4 heads |" in card) == info.has_heads
    assert f"{run.summary['trainable-parameters']:,}" in card
    assert f"accuracy {run.summary['metrics']['final']['accuracy']:.4f}" in card
    assert f"2, {1 if info.pools else 3} clients a round" in card
    assert ("the model of one client" in card) == bool(client_words(run))
    assert ("on the examples of all" in card) == info.pools


def test_a_recorded_config_is_read_unchanged(run):
    content = json.loads((run.run_dir / "config.json").read_text())
    assert recorded_config(content, "here").as_dict() == content
    del content["heads"]
    with pytest.raises(ValueError, match=r"here: its config.json lacks, .*\['hea"):
        recorded_config(content, "here")


@pytest.mark.slow
def test_mistakes_of_an_export_are_errors(tmp_path, capsys):
    full, stopped = tmp_path / "full", tmp_path / "stopped"
    full.mkdir()
    (full / "x").write_text("")
    run_dir = run_of(tmp_path / "runs", clients=2, num_rounds=1).run_dir
    shutil.copytree(run_dir, stopped)
    (stopped / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"form 'lora' is unknown.* one of: peft, ravan, merged"):
        export_run(run_dir, "lora", tmp_path / "x")
    for folder, target, message in (
        (stopped, tmp_path / "z", "summary.json is not there"),
        (tmp_path, tmp_path / "y", "found no config.json there"),
        (run_dir, full, "is not empty"),
        (run_dir, full / "x", "is a file"),
    ):
        assert message in error_of(capsys, "export", folder, "--as", "peft", target)
