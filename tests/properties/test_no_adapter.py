"""Without adapters the method is a linear probe, or trains nothing at all."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.results.evaluation import result_of
from tests.methods import build, build_with_network
from tests.short_runs import records_of, run

PROBE = {"method": "none", "batch-size": 16, "device": "cpu"}


def test_it_has_nothing_to_train_and_sends_nothing():
    method, adapters, network = build_with_network("none")
    method.load(adapters, {})
    assert method.parameters(adapters) == []
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert (method.upload(adapters), method.upload_bytes(1.0)) == ({}, 0)
    assert method.trainable_parameters() == build("none", rank=4)[0].trainable_parameters() == 0
    with pytest.raises(ValueError, match="expected"):
        method.check({"B": torch.zeros(3)}, 1.0)


def test_only_the_classifier_is_trained(tmp_path):
    found = run(tmp_path, settings=PROBE, classifier="trained")
    assert found.summary["adapter-parameters"] == 0
    assert found.summary["trainable-parameters"] == 970  # 96 x 10 and 10
    clients = [client for record in records_of(found) for client in record["clients"]]
    assert {client["bytes-up"] for client in clients} == {3880}
    with result_of(found.run_dir) as loaded:
        state = loaded.model.initial_state()
        assert list(state) == [CLASSIFIER]
        now = torch.cat([p.detach().flatten() for p in loaded.model.classifier])
        assert not torch.equal(now, state[CLASSIFIER])


def test_with_a_frozen_classifier_a_run_evaluates_without_training(tmp_path):
    frozen = PROBE | {"classifier": "frozen"}
    one = run(tmp_path, settings=frozen)
    other = run(tmp_path, settings=frozen, learning_rate=1.0, num_rounds=1)
    assert one.summary["metrics"]["final"] == other.summary["metrics"]["final"]
    assert one.summary["bytes-up"] < 1000
    assert (one.summary["steps"], one.summary["trainable-parameters"]) == (0, 0)


@pytest.mark.slow
def test_it_approaches_a_logistic_regression_on_the_same_features(tmp_path):
    """scikit-learn's, on the pretrained network's features of all training examples."""
    found = run(
        tmp_path, settings=PROBE, classifier="trained", partition="iid", num_rounds=4,
        local_steps=30, learning_rate=3e-2, eval_every=4,
    )  # fmt: skip
    with result_of(found.run_dir) as loaded:
        features, labels = {}, {}
        (test,) = loaded.test_sets.values()
        for name, encoded in (("train", loaded.pooled(3)), ("test", test)):
            examples = encoded.take(encoded.rows)
            with torch.inference_mode():
                network = loaded.model.network.eval()
                out = network(pixel_values=examples["pixel_values"], output_hidden_states=True)
            features[name] = network.vit.layernorm(out.hidden_states[-1])[:, 0]
            labels[name] = examples["labels"]
    theirs = LogisticRegression(max_iter=2000).fit(features["train"], labels["train"])
    accuracy = theirs.score(features["test"], labels["test"])
    assert abs(found.summary["metrics"]["final"]["accuracy"] - accuracy) < 0.06
