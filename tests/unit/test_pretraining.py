"""The backbone of `fashion-vit`: how its folder is made, and what is told where it is not there."""

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
    """Three letters and four shapes."""
    monkeypatch.setattr(abstract_images, "LETTERS", ["A", "Α", "x"])  # the second is an Alpha
    monkeypatch.setattr(abstract_images, "SIGNS", [])
    monkeypatch.setattr(abstract_images, "SHAPES", 4)
    monkeypatch.setattr(pretrain_fashion_vit, "SHAPES", 4)
    monkeypatch.setattr(pretraining, "EVERY", 2)


def pretrain(monkeypatch, folder, *options):
    words = ["pretrain", "--batch-size", "4", "--output", str(folder), *map(str, options)]
    monkeypatch.setattr("sys.argv", words)
    pretrain_fashion_vit.main()


def backbone(folder):
    config = read_config({"preset": "fashion-vit", "model": str(folder)})
    return build_network(config.model, make_task(config), seed=0)


def test_what_looks_alike_is_one_class_and_other_fonts_are_held_out():
    seen, unseen, letters = outlines()
    assert abstract_images.letter_classes() == ["AΑ", "x"]
    assert letters == 2
    assert {label for label, _ in seen} == set(range(2 + 4))
    assert {label for label, _ in unseen} == {0, 1}
    images, patterns = Drawing(torch.Generator().manual_seed(0)).images(
        pretraining.stacked(seen)[0]
    )
    assert images.shape == (len(seen), 1, 28, 28)
    assert 0 <= images.min() < images.max() <= 1
    assert 0 <= patterns.min() <= patterns.max() < PATTERNS


def test_the_folder_is_one_that_the_preset_reads(monkeypatch, tmp_path):
    folder = tmp_path / "made"
    pretrain(monkeypatch, folder, "--steps", 2)
    assert json.loads((folder / "origin.json").read_text())["steps"] == 2
    assert not (folder / "training.pt").exists()
    made = backbone(folder)
    assert made.size < 400_000
    preset = read_config({"preset": "fashion-vit"})
    planned = build_skeleton(preset.model, make_task(preset))
    assert made.size == planned.size  # the preset's shape is that of what the script makes
    # As many images are drawn alike from a seed as often as one likes.
    pretrain(monkeypatch, tmp_path / "again", "--steps", 2)
    for mine, other in zip(
        made.network.parameters(), backbone(tmp_path / "again").network.parameters(), strict=True
    ):
        assert torch.equal(mine, other)
    with pytest.raises(SystemExit, match="is there already; .*--output"):
        pretrain(monkeypatch, folder, "--steps", 2)


def test_an_interrupted_training_goes_on_to_the_same_bits(monkeypatch, tmp_path):
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
    for whole, part in zip(
        backbone(tmp_path / "whole").network.vit.parameters(),
        backbone(tmp_path / "parts").network.vit.parameters(),
        strict=True,
    ):
        assert torch.equal(whole, part)


def test_a_checkpoint_of_other_options_is_not_gone_on_with(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(pretrain_fashion_vit, "save", lambda *_: None)
        patch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
        pretrain(monkeypatch, tmp_path / "made", "--steps", 2)
    with pytest.raises(SystemExit, match="training.pt was begun with other options.*remove it"):
        pretrain(monkeypatch, tmp_path / "made", "--steps", 4)


@pytest.fixture
def home(monkeypatch, tmp_path):
    """Another home directory, for which presets are read anew."""
    monkeypatch.setenv("HOME", str(tmp_path))
    presets._read.cache_clear()
    yield tmp_path
    presets._read.cache_clear()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("there", [False, True])
def test_a_run_without_the_folder_says_the_command(there):
    config = read_config({"preset": "fashion-vit"})
    assert config.model.name == str(pretrained_folder("fashion-vit"))
    told = "found no such folder.*python -m scripts.pretrain_fashion_vit`.*copy the folder"
    if there:  # a training has begun
        pretrained_folder("fashion-vit").mkdir(parents=True)
        told = "has no config.json.*python -m scripts.pretrain_fashion_vit`"
    with pytest.raises(ValueError, match=told):
        model_folder(config.model)


def test_another_folder_that_is_not_there_is_told(tmp_path):
    config = read_config({"preset": "svhn-vit-b16", "model": str(tmp_path)})
    tmp_path.rmdir()
    with pytest.raises(ValueError, match=r"found no such folder.*save_pretrained.*model=/path"):
        model_folder(config.model)
