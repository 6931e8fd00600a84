"""Settings are found again in what a run recorded of them, so that they can travel once more."""

import shutil

import pytest

from ravan_flwr.config import presets
from ravan_flwr.config.keys import FREE_ON_RESUME
from ravan_flwr.config.presets import conf_folder
from ravan_flwr.config.run_config import WAITING, read_config, settings_of
from ravan_flwr.methods import METHODS


def kept(config):
    return {k: v for k, v in config.items() if k in WAITING or k not in FREE_ON_RESUME}


@pytest.mark.parametrize("path", sorted(conf_folder().glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("method", METHODS)
def test_the_settings_of_a_preset_are_found_again(path, method):
    if path.stem == "preference" and not METHODS[method].frozen_backbone:
        with pytest.raises(
            ValueError, match="but task 'preference' compares with the pretrained network"
        ):
            read_config({"preset": path.stem, "method": method})
        return
    recorded = read_config({"preset": path.stem, "method": method, "seed": 3}).as_dict()
    assert settings_of(recorded, "x").keys() <= {"preset", "method", "seed", "glue-task"}
    assert kept(read_config(settings_of(recorded, "x")).as_dict()) == kept(recorded)


@pytest.mark.parametrize(
    "settings",
    [
        {"heads": 8, "rank": 7, "lora-rank": 3, "init": "data-aware", "learning-rate": 0.5},
        {"preset": "glue-llama", "glue-task": "rte", "max-length": 17, "wire": "int8"},
        {"preset": "cifar100-vit-b16", "targets": "q_proj,v_proj", "parameter-budget": "higher"},
        {
            "preset": "svhn-vit-b16",
            "model": "google/x@abc",
            "data": "some/one",
            "weighting": "median",
        },
        {"local-epochs": 0.5, "batch-size": 10},
        {"preset": "code", "model": "small"},
        {"preset": "code", "backbone-dtype": "float32", "precision": "float32", "max-bytes": 1e6},
        {"preset": "code", "learning-rate-schedule": "constant", "lora-scale": 1.0},
        {"preset": "code", "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "evaluate-samples": 3},
        {"partition": "natural:user"},
        {"partition": "pathological:3:user", "data": "some/one"},
        {"device": "cpu", "straggler-grace": 3.0, "round-timeout": 9, "limits": "max-examples=4"},
        {"deliver": True, "num-rounds": 9, "tracking": "none", "output-dir": "/x", "resume": "/y"},
    ],
)
def test_settings_that_a_person_gave_are_found_again(settings):
    recorded = read_config(settings).as_dict()
    found = settings_of(recorded, "x")
    assert kept(read_config(found).as_dict()) == kept(recorded)
    assert not found.keys() & {"deliver", "num-rounds", "tracking", "output-dir", "resume"}


def test_a_rank_that_the_model_told_is_given():
    recorded = read_config({"model": "some/model", "preset": "svhn-vit-b16"}).as_dict()
    assert recorded["rank"] is None
    assert settings_of(recorded | {"rank": 21}, "x")["rank"] == 21


def test_a_preset_that_is_another_today_is_told():
    with pytest.raises(ValueError, match=r"runs/x: its config.json has other values of \['task'\]"):
        settings_of(read_config({}).as_dict() | {"task": "text"}, "runs/x")


def test_how_many_clients_there_were_is_no_setting():
    recorded = read_config({}).as_dict()
    assert settings_of(recorded | {"num-clients": 7}, "x") == settings_of(recorded, "x")


def test_labels_that_the_data_told_are_told_once_more(tmp_path, monkeypatch):
    shutil.copy(conf_folder() / "digits-vit.yaml", tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "task: text\nmodel: some/model\n"
        "data: {name: some/texts, columns: {text: text, label: label}}\n"
    )
    monkeypatch.setattr(presets, "conf_folder", lambda: tmp_path)
    recorded = read_config({"preset": "mine"}).as_dict()
    assert recorded["data"]["labels"] == []
    resolved = recorded | {"data": recorded["data"] | {"labels": ["left", "right"]}}
    assert settings_of(resolved, "x") == {"preset": "mine"}
