"""Settings that contradict each other are refused; their neighbours, which do not, are accepted."""

import pytest

from ravan_flwr.config.run_config import read_config

ASYNC = {"aggregation": "async", "concurrency": 5, "buffer-size": 2}
FALLING = {"learning-rate": 0.01, "learning-rate-schedule": "cosine:0.02"}
FEW_BITS = {"backbone-dtype": "8bit", "init": "first-round"}


@pytest.mark.parametrize(
    ("key", "refused", "accepted"),
    [
        ("weighting", {"weighting": "median", "clients-per-round": 2}, {"clients-per-round": 3}),
        ("weighting", {"weighting": "median", "clients-per-round": 2}, {"weighting": "uniform"}),
        ("weighting", ASYNC | {"weighting": "median"}, {"buffer-size": 3}),
        ("weighting", {"weighting": "median", "head-mean": "all"}, {"head-mean": "trained"}),
        ("weighting", {"weighting": "median", "head-mean": "all"}, {"method": "fedit"}),
        ("weighting", {"weighting": "krum", "clients-per-round": 4}, {"clients-per-round": 5}),
        ("weighting", ASYNC | {"weighting": "krum", "clients-per-round": 5}, {"buffer-size": 5}),
        # The three clients of `clients-per-round` do not limit a buffer.
        ("weighting", ASYNC | {"weighting": "krum"}, {"buffer-size": 5}),
        ("min-replies", ASYNC | {"limits": "min-replies=4"}, {"buffer-size": 4}),
        ("sparsity", {"weighting": "median", "sparsity": "1:0.5"}, {"sparsity": "0.5:1"}),
        ("sparsity", {"weighting": "median", "sparsity": "1:0.5"}, {"weighting": "uniform"}),
        ("sparsity", {"sparsity": "1:0"}, {"sparsity": "1:0.1"}),
        ("sparsity", {"sparsity": "1:1.5"}, {"sparsity": "1:1"}),
        ("min-replies", {"limits": "min-replies=4"}, {"clients-per-round": 4}),
        ("min-replies", ASYNC | {"limits": "min-replies=3"}, {"buffer-size": 3}),
        ("buffer-size", ASYNC | {"buffer-size": 6}, {"buffer-size": 5}),
        # Of five updates under way two close a round: the fifth is two rounds old.
        ("max-staleness", ASYNC | {"max-staleness": 1}, {"max-staleness": 2}),
        ("max-staleness", ASYNC | {"max-staleness": 1}, {"max-staleness": "auto"}),
        ("max-staleness", ASYNC | {"max-staleness": 1}, {"concurrency": 4}),
        ("budgets", {"budgets": "by-speed"}, {"devices": "edge-gpus"}),
        ("micro-batch-size", {"micro-batch-size": 9, "batch-size": 8}, {"batch-size": 9}),
        ("learning-rate-schedule", FALLING, {"learning-rate": 0.02}),
        ("backbone-dtype", FEW_BITS, {"init": "gram-schmidt"}),
        ("backbone-dtype", FEW_BITS, {"backbone-dtype": "float32"}),
        ("backbone-dtype", {"backbone-dtype": "8bit", "method": "full"}, {"method": "ravan"}),
    ],
)
def test_contradictions_are_refused_and_the_advised_settings_are_accepted(key, refused, accepted):
    with pytest.raises(ValueError, match=rf"^{key} = .*: got .*, expected ") as error:
        read_config(refused)
    remedy = str(error.value).partition("; ")[2]
    assert remedy
    read_config(refused | accepted)
