"""The backbone of `fashion-vit`: making its folder, and the errors when it is missing."""

import json

import pytest
import torch

from ravan_flwr.config import presets
from ravan_flwr.config.run_config import read_config
from ravan_flwr.data.model_folder import model_folder, pretrained_folder
from ravan_flwr.training.model_and_data import make_task
from ravan_flwr.training.network import build_network, build_skeleton
from scripts import abstract_images, pretrain_fashion_vit, pretraining
from scripts.abstract_images import PATTERNS, Drawing, outlines


@pytest.fixture(autouse=True)
def few_outlines(monkeypatch):
    """Use three letters and four shapes."""
    monkeypatch.setattr(abstract_images, "LETTERS", ["A", "Α", "x"])  # the second is an Alpha
    monkeypatch.setattr(abstract_images, "SIGNS", [])
    monkeypatch.setattr(abstract_images, "SHAPES", 4)
    monkeypatch.setattr(pretrain_fashion_vit, "SHAPES", 4)
    monkeypatch.setattr(pretraining, "EVERY", 2)


def pretrain(monkeypatch, folder, *options):
    words = ["pretrain", "--batch-size", "4", "--output", str(folder), *map(str, options)]
    monkeypatch.setattr("sys.argv", words)
    pretrain_fashion_vit.main()


def same(one, other):
    """Return whether the backbones of two folders have the same bits."""
    networks = [backbone(folder).network.vit for folder in (one, other)]
    pairs = zip(*(network.parameters() for network in networks), strict=True)
    return all(torch.equal(mine, its) for mine, its in pairs)


def backbone(folder):
    config = read_config({"preset": "fashion-vit", "model": str(folder)})
    return build_network(config.model, make_task(config), seed=0)


def test_similar_signs_are_one_class_and_other_fonts_are_held_out():
    training, held_out, letters = outlines()
    assert abstract_images.letter_classes() == ["AΑ", "x"]
    assert letters == 2
    assert {label for label, _ in training} == set(range(2 + 4))
    assert {label for label, _ in held_out} == {0, 1}
    drawing = Drawing(torch.Generator().manual_seed(0))
    images, patterns = drawing.images(pretraining.stacked(training)[0])
    assert images.shape == (len(training), 1, 28, 28)
    assert 0 <= images.min() < images.max() <= 1
    assert 0 <= patterns.min() <= patterns.max() < PATTERNS


def test_the_preset_reads_the_folder(monkeypatch, tmp_path):
    folder = tmp_path / "made"
    pretrain(monkeypatch, folder, "--steps", 2)
    assert json.loads((folder / "origin.json").read_text())["steps"] == 2
    assert not (folder / "training.pt").exists()
    saved = backbone(folder)
    assert saved.size < 400_000
    preset = read_config({"preset": "fashion-vit"})
    planned = build_skeleton(preset.model, make_task(preset))
    assert saved.size == planned.size  # the preset's shape equals that of the script
    # The images are a function of the seed.
    pretrain(monkeypatch, tmp_path / "again", "--steps", 2)
    assert same(folder, tmp_path / "again")
    with pytest.raises(SystemExit, match="is there already; .*--output"):
        pretrain(monkeypatch, folder, "--steps", 2)


@pytest.mark.slow
def test_an_interrupted_training_resumes_to_the_same_bits(monkeypatch, tmp_path):
    pretrain(monkeypatch, tmp_path / "whole", "--steps", 4)
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return clip(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("torch.nn.utils.clip_grad_norm_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pretrain(monkeypatch, tmp_path / "parts", "--steps", 4)
    assert (tmp_path / "parts" / "training.pt").is_file()
    pretrain(monkeypatch, tmp_path / "parts", "--steps", 4)
    assert same(tmp_path / "whole", tmp_path / "parts")


def test_a_checkpoint_with_other_options_is_not_resumed(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(pretrain_fashion_vit, "save", lambda *_: None)
        patch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
        pretrain(monkeypatch, tmp_path / "made", "--steps", 2)
    with pytest.raises(SystemExit, match="training.pt was begun with other options.*remove it"):
        pretrain(monkeypatch, tmp_path / "made", "--steps", 4)


@pytest.fixture
def home(monkeypatch, tmp_path):
    """Use another home directory, for which presets are read again."""
    monkeypatch.setenv("HOME", str(tmp_path))
    presets._read.cache_clear()
    yield tmp_path
    presets._read.cache_clear()


@pytest.mark.usefixtures("home")
def test_without_the_folder_the_error_names_the_page():
    config = read_config({"preset": "fashion-vit"})
    assert config.model.name == str(pretrained_folder("fashion-vit"))
    with pytest.raises(ValueError, match="found no such folder.*as docs/reference.md says"):
        model_folder(config.model)
    pretrained_folder("fashion-vit").mkdir(parents=True)  # by an interrupted training
    with pytest.raises(ValueError, match="has no config.json.*as docs/reference.md says"):
        model_folder(config.model)


def test_another_missing_folder_is_reported(tmp_path):
    config = read_config({"preset": "svhn-vit-b16", "model": str(tmp_path)})
    tmp_path.rmdir()
    with pytest.raises(ValueError, match=r"found no such folder.*model=/path.*save_pretrained"):
        model_folder(config.model)
