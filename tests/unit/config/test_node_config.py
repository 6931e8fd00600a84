"""The node config is checked before anything is loaded."""

import sys

import pytest

from ravan_flwr.config.node_config import Node, read_node, use_cache
from ravan_flwr.specs import Scalar

OWN: dict[str, Scalar] = {"partition-id": 0, "num-partitions": 2}


def test_a_node_config_is_read():
    assert read_node(OWN) == Node(0, 2)
    given = OWN | {
        "data-path": "/data", "budget": 1, "device": "cuda:1", "cache-dir": "/cache",
        "warm-worker": True, "sensor": "left", "result-path": "/results", "result-form": "merged",
        "secure-keys": "/secrets", "max-epsilon": 8, "max-delta": 1e-6,
    }  # fmt: skip
    assert read_node(given) == Node(
        0, 2, "/data", 1.0, "cuda:1", "/cache", warm_worker=True, result_path="/results",
        result_form="merged", secure_keys="/secrets", max_epsilon=8.0, max_delta=1e-6,
    )  # fmt: skip
    assert read_node(OWN | {"budget": "auto"}).budget == "auto"
    assert read_node(OWN | {"require-secure-aggregation": True}).require_secure_aggregation


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"partition-id": "0"}, "partition-id = '0': expected a whole number"),
        ({"num-partitions": True}, "num-partitions = True: expected a whole number"),
        ({"partition-id": 2}, r"partition-id = 2: expected 0 to 1 \(num-partitions - 1\)"),
        ({"budget": 0}, 'budget = 0: .* above 0 and at most 1, or "auto"; .* the node config'),
        ({"budget": "half"}, "budget = 'half': expected a number"),
        ({"device": "gpu"}, "device = 'gpu': expected auto, cpu, cuda"),
        ({"data-path": 3}, "data-path = 3: expected the path of a folder as text"),
        ({"cache-dir": "here"}, "cache-dir = 'here': expected the absolute path of a folder"),
        ({"warm-worker": "true"}, "warm-worker = 'true': expected true or false.*without quot"),
        ({"warm-worker": "maybe"}, "warm-worker = 'maybe': expected true or false"),
        ({"result-path": "results"}, "result-path = 'results': expected the absolute path of a"),
        ({"result-path": True}, "result-path = True: expected the absolute path of a folder"),
        ({"result-form": "peft"}, "result-form 'peft' is unknown. Expected one of: adapter, m"),
        ({"secure-keys": "keys"}, "secure-keys = 'keys': expected the absolute path of a folder"),
        ({"require-secure-aggregation": 1}, "require-secure-aggregation = 1: expected true or"),
        ({"require-secure-agregation": True}, "expected require-secure-aggregation perhaps"),
        ({"max-epsilon": 0}, "max-epsilon = 0: expected a number above 0.*the node config"),
        ({"max-epsilon": "8"}, "max-epsilon = '8': expected a number above 0"),
        ({"max-epsilon": True}, "max-epsilon = True: expected a number above 0"),
        ({"max-epsilon": float("nan")}, "max-epsilon = nan: expected a number above 0"),
        ({"max-epsilon": 10**400}, "max-epsilon = 1000.*: expected a number above 0"),
        ({"max-epsilon": float("inf")}, "max-epsilon = inf: expected a number above 0"),
        ({"require-secure-aggregation": True, "max-epsilon": 8}, "no run is masked and private"),
        ({"max-delta": 1e-6}, "max-delta = 1e-06: got it without max-epsilon, expected both"),
        ({"MAX-EPSILON": 8}, "got MAX-EPSILON, expected max-epsilon perhaps"),
        ({"require-secure": True}, "got require-secure, expected require-secure-aggregation perh"),
        ({"max-delta": 1.0}, "max-delta = 1.0: expected a number above 0 and below 1"),
        ({"secure_keys": "/keys"}, "got secure_keys, expected secure-keys perhaps"),
        ({"results-path": "/results"}, "got results-path, expected result-path perhaps"),
        ({"buget": 0.5}, "got buget, expected budget perhaps"),
        ({"data_path": "/data"}, "got data_path, expected data-path perhaps"),
    ],
)
def test_an_invalid_node_config_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_node(OWN | changes)


def test_a_cache_folder_that_is_set_too_late_or_cannot_be_made_is_refused(tmp_path, monkeypatch):
    use_cache(None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", sys)
    with pytest.raises(ValueError, match="this process has another cache already"):
        use_cache(str(tmp_path))
    monkeypatch.delitem(sys.modules, "huggingface_hub")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be made"):
        use_cache(str(tmp_path / "file" / "cache"))
