"""The adapted model is restored after each client; backbone files are validated."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.methods.tensors import checksum
from ravan_flwr.seeding import ClientRound
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from ravan_flwr.specs import ModelSpec
from ravan_flwr.training.bundled import read_backbone, read_backbone_config
from ravan_flwr.training.device import pick_device
from ravan_flwr.training.local_steps import (
    ClientWork,
    calibrate_locally,
    evaluate_all,
    train_locally,
)
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.network import backbone_fingerprint, build_network
from ravan_flwr.training.step import TrainingSettings, pull_back
from scripts.pretrain_digits_vit import encode_backbone
from tests.short_runs import same_bits
from tests.support.tiny import save_model


def loaded(**settings):
    return ModelAndData(read_config({k.replace("_", "-"): v for k, v in settings.items()}))


@pytest.fixture(scope="module")
def shared():
    return loaded(seed=5)


def snapshot(model):
    return {k: v.detach().clone() for k, v in model.network.state_dict().items()}


def train(shared, fraction=1.0, round_number=1, client=0, steps=2, state=None, **changes):
    settings = {"num_steps": steps, "batch_size": 8, "learning_rate": 0.01, "precision": "float32"}
    work = ClientWork(
        shared.partition(client, 4).train,
        state or shared.model.initial_state(),
        fraction,
        TrainingSettings(**settings | changes),
        ClientRound(5, round_number, client),
    )
    return train_locally(shared.model, shared.task, work)


def test_the_batch_for_scoring_heads_is_no_training_step(monkeypatch):
    """From the network's actual losses: four batches are read, of which three are steps."""
    loaded_with_scores = loaded(seed=5, scoring="gradient")
    losses = []
    original_loss = loaded_with_scores.task.loss

    def recording(network, batch):
        losses.append(original_loss(network, batch))
        return losses[-1]

    monkeypatch.setattr(loaded_with_scores.task, "loss", recording)
    result = train(loaded_with_scores, fraction=0.5, steps=3)
    assert len(losses) == 4
    assert result.train_loss == pytest.approx(sum(float(x.detach()) for x in losses[1:]) / 3)
    assert result.train_loss != pytest.approx(sum(float(x.detach()) for x in losses) / 4)


def test_a_clients_upload_does_not_depend_on_earlier_clients(shared):
    """With some of the heads; below with all, for every method."""
    before, alone = snapshot(shared.model), train(shared, 0.25)
    train(shared, 0.25, client=1)
    again = train(shared, 0.25)
    assert same_bits(before, snapshot(shared.model))
    assert same_bits(alone.upload, again.upload)
    assert alone.train_loss == again.train_loss
    assert all(p.grad is None for p in shared.model.network.parameters())


def spoil(model):
    """Act as a client that fails after it has changed all that it can."""
    with model.holding(model.initial_state()):
        for parameter in model.parameters():
            parameter.data.fill_(3.0)
        raise ZeroDivisionError


# Every method with a trained classifier; without one, one method of each kind.
KINDS = ["ravan", "full", "fedit", "fedex-lora", "fed-sb", "fedsa-lora"]


@pytest.mark.parametrize(
    ("method", "classifier"),
    [*((name, "trained") for name in METHODS), *((name, "frozen") for name in KINDS)],
)
def test_all_parameters_are_restored_after_a_client(method, classifier):
    """Pretrained weights, adapters and classifier are restored to the bit, also after an error."""
    shared = loaded(seed=5, method=method, classifier=classifier)
    before, alone = snapshot(shared.model), train(shared)
    state = shared.model.initial_state()
    for client in (1, 2):  # a state in the middle of a run, where W may have changed
        sums = Aggregate(shared.model.method, state, UpdateNormCheck(1e9))
        for upload in [train(shared, client=client, round_number=r, state=state) for r in (1, 3)]:
            sums.check_and_add(upload.upload, 1.0)
        state = sums.close()
    stateless = method == "local" or (method, classifier) == ("none", "frozen")
    assert same_bits(state, shared.model.initial_state()) == stateless
    # Training does not change the state that was sent.
    one, two = (train(shared, client=1, state=state) for _ in range(2))
    assert same_bits(one.upload, two.upload)
    with pytest.raises(ZeroDivisionError):
        spoil(shared.model)
    assert same_bits(before, snapshot(shared.model))
    if shared.model.method.calibration is not None:
        settings = TrainingSettings(2, 8, 0.01, "float32")
        examples, state = shared.partition(0, 4).train, shared.model.initial_state()
        work = ClientWork(examples, state, 1.0, settings, ClientRound(5, 0, 0))
        calibrate_locally(shared.model, shared.task, work)
        assert same_bits(before, snapshot(shared.model))
    again = train(shared)
    assert same_bits(alone.upload, again.upload)
    assert alone.train_loss == again.train_loss


def test_fixed_tensors_of_another_hash_are_refused():
    model = loaded(method="fed-sb", seed=5).model
    size = model.method.calibration.bytes_down // 4
    sides = [(layer.out_features, layer.in_features) for layer in model.layers]
    B = torch.ones(size * sum(out for out, _ in sides) // sum(map(sum, sides)))
    fixed = {"B": B, "A": torch.ones(size - len(B))}
    with pytest.raises(ValueError, match="fixed tensors have hash [0-9a-f]{16}, expected 0; the"):
        model.load_fixed(fixed, "0")
    assert model.fingerprint == model.seed_fingerprint
    model.load_fixed(fixed)
    assert (back := model.fingerprint) != model.seed_fingerprint
    model.load_fixed(fixed, checksum(fixed))
    assert model.fingerprint is back  # it has these tensors: nothing is recomputed


def test_the_proximal_gradient_equals_that_of_its_loss(shared):
    """Compare with the loss written out: mu / 2 |w - w0|^2."""
    weights = [torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.nn.Parameter(torch.zeros(1))]
    anchors = [torch.tensor([0.5, 4.0]), torch.zeros(1)]
    torch.cat([*weights]).sin().sum().backward()
    pull_back(weights, anchors, 0.3)
    for weight, anchor in zip(weights, anchors, strict=True):
        written = weight.sin().sum() + 0.15 * (weight - anchor).square().sum()
        (expected,) = torch.autograd.grad(written, weight)
        torch.testing.assert_close(weight.grad, expected)


def test_only_adapters_and_classifier_are_trained(shared):
    frozen = loaded(classifier="frozen", seed=5).model
    names = [
        {n for n, p in model.network.named_parameters() if p.requires_grad}
        for model in (shared.model, frozen)
    ]
    assert names[0] - names[1] == {"classifier.weight", "classifier.bias"}
    assert {name.rsplit(".", 1)[-1] for name in names[1]} == {"H", "s"}
    assert CLASSIFIER not in frozen.initial_state()


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_local_steps_change_the_selected_heads_alone(shared, fraction):
    upload = train(shared, fraction).upload
    heads = shared.model.method.heads_in(upload)
    assert {len(row) for row in heads} == {int(4 * fraction)}
    assert upload["H"].abs().sum(dim=(1, 2)).min() > 0
    assert upload[CLASSIFIER].shape == (96 * 10 + 10,)


def test_rounds_and_clients_have_different_batches(shared):
    losses = {train(shared, 1.0, r, 0, steps=1).train_loss for r in (1, 2, 3)}
    assert len(losses) == 3


def test_training_lowers_the_loss(shared):
    assert train(shared, steps=30).train_loss < 0.8 * train(shared, steps=1).train_loss


def test_evaluation_is_the_mean_for_any_batch_size(shared):
    (encoded,) = shared.test_sets.values()
    examples = encoded.take(np.arange(len(encoded)))
    logits, labels = shared.model.network(examples["pixel_values"]).logits, examples["labels"]
    right = (logits.argmax(-1) == labels).double().mean().item()
    expected = {"accuracy": right, "loss": cross_entropy(logits, labels).item()}
    for size in (7, 360):
        found = evaluate_all(shared.model, shared.task, {"all": encoded}, size)
        assert found == pytest.approx(expected, rel=1e-5)


def test_bfloat16_trains_and_float16_needs_an_accelerator(shared):
    low, full = train(shared, precision="bfloat16"), train(shared)
    assert low.upload["H"].dtype == torch.float32
    assert low.train_loss == pytest.approx(full.train_loss, rel=0.05)
    with pytest.raises(ValueError, match="precision = 'float16': got a CPU"):
        train(shared, precision="float16")


def test_the_classifier_depends_on_the_seed_and_so_does_the_fingerprint():
    one, two, other = loaded(seed=1).model, loaded(seed=1).model, loaded(seed=2).model
    assert one.seed_fingerprint == two.seed_fingerprint
    assert one.seed_fingerprint != pytest.approx(other.seed_fingerprint, rel=1e-3)


def test_a_changed_weight_changes_the_backbones_fingerprint(tmp_path):
    one, other = (save_model("vit", tmp_path / name) for name in ("one", "other"))
    specs = [ModelSpec("hub", str(folder)) for folder in (one, other)]
    assert backbone_fingerprint(specs[0]) == backbone_fingerprint(specs[1])
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    assert backbone_fingerprint(specs[0]) != backbone_fingerprint(specs[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_device_is_refused():
    with pytest.raises(ValueError, match="device = 'cuda:1' is not there"):
        pick_device("cuda:1")
    assert pick_device("auto").type in {"cpu", "mps"}


def test_an_unknown_bundled_model_lists_the_bundled_ones():
    with pytest.raises(ValueError, match="model 'x' is not bundled; expected one of: digits-vit"):
        build_network(ModelSpec("bundled", "x"), loaded().task, 0)


def test_the_backbone_is_unpacked_once(monkeypatch):
    read = []

    def read_and_note(path):
        read.append(path)
        return read_backbone(path)

    monkeypatch.setattr("ravan_flwr.training.network.read_backbone", read_and_note)
    workbench = loaded()
    assert workbench.model.network.config.model_type == workbench.task.model_config["model_type"]
    assert len(read) == 1


def test_backbone_files_round_trip_and_are_checked(tmp_path):
    path = tmp_path / "x.json"
    weights = {"w": torch.tensor([[1.5, -2.25]])}
    path.write_text(encode_backbone({"model_type": "vit"}, weights, {"seed": 0}))
    config, read = read_backbone(path)
    assert config == {"model_type": "vit"}
    assert same_bits(read, weights)
    assert read_backbone_config(path) == config

    content = json.loads(path.read_text())
    for changes, message in (
        ({"sha256": "0" * 64}, r"got checksum .* the file is damaged"),
        ({"safetensors": content["safetensors"][:-7]}, "the file is damaged"),
        ({"safetensors": 'no base85: \\ "'}, "the file is damaged"),
        ({"safetensors": ""}, "the file is damaged"),
        ({"safetensors": "abcde"}, "the file is damaged"),
        ({"format": "other/1"}, "got format 'other/1', expected"),
    ):
        path.write_text(json.dumps(content | changes))
        with pytest.raises(ValueError, match=message):
            read_backbone(path)
