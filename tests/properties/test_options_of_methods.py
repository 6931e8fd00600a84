"""Every method with every option that acts on sums is supported, or refused by name.

Small budgets, and parallel clients, are tested in whole runs (test_simulation.py,
test_side_by_side.py); quantised backbones in test_quantize.py.
"""

import dataclasses

import pytest
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS, MethodInfo
from tests.hand_made import Nodes, run

# key -> (values to try, the method's flag, the reason in a refusal)
OPTIONS = {
    "weighting": (
        ["median", "trimmed-mean", "krum", "multi-krum"],
        "averages",
        "does not compute its next state",
    ),
    "server-optimizer": (["momentum:1:0.9", "adam:0.01:0.9"], "averages", "does not compute"),
    "backbone-dtype": (["bfloat16", "8bit", "4bit"], "frozen_backbone", "changes pretrained"),
    "aggregation": (["async"], "asynchronous", "expected one of"),
}
CASES = [(name, key, value) for name in METHODS for key in OPTIONS for value in OPTIONS[key][0]]


def test_every_flag_of_a_method_is_tested():
    """A new flag of a method needs a line here, or a reason."""
    flags = {field.name for field in dataclasses.fields(MethodInfo) if field.type in (bool, "bool")}
    of_options = {flag for _, flag, _ in OPTIONS.values()}
    # Evaluation, sampling, heads and privacy: test_personal.py, test_ravan.py, test_private.py.
    others = {"personalised", "all_clients", "pools", "has_heads", "sums_changes", "by_example"}
    others |= {"serves"}  # evaluation: test_feddpa.py, test_fedalt.py
    others |= {"mixes"}  # delivery: below; export: test_feddpa.py
    others |= {"sparse_down", "sparse_up"}  # messages: test_sparsity.py
    assert flags - of_options == others


@pytest.mark.parametrize(("name", "key", "value"), CASES)
def test_an_option_is_accepted_or_refused_with_the_methods_name(name, key, value):
    _, mark, reason = OPTIONS[key]
    settings = {"method": name, key: value, "clients-per-round": 5}
    if getattr(METHODS[name], mark):
        assert read_config(settings).as_dict()[key] == value
        return
    with pytest.raises(ValueError, match=f"{key} = '{value}': got method .*'{name}', .*{reason}"):
        read_config(settings)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.mixes])
def test_mixed_adapters_are_not_delivered(name):
    with pytest.raises(ValueError, match="mix two adapters depending on the input"):
        read_config({"method": name, "deliver": True})


# With a frozen classifier `none` has nothing to change: test_no_adapter.py.
AVERAGED = [name for name, row in METHODS.items() if row.averages and name != "none"]


@pytest.mark.parametrize("name", AVERAGED)
@pytest.mark.parametrize("weighting", ["uniform", *OPTIONS["weighting"][0]])
@pytest.mark.parametrize("optimizer", ["none", *OPTIONS["server-optimizer"][0]])
def test_compatible_options_give_rounds_that_change_the_state(name, weighting, optimizer):
    number = 5 if "krum" in weighting else 4
    nodes = Nodes(number, method=name)
    start = nodes.method.initial_state(nodes.adapters)
    notes, *_ = run(
        nodes, rounds=3, clients_per_round=number, weighting=weighting, server_optimizer=optimizer,
        evaluate_fn=lambda *_: None,
    )  # fmt: skip
    records = [record for record in notes.records if record["round"]]
    assert [len(record["clients"]) for record in records] == [number] * 3
    assert not any(record["rejected"] or "refused" in record for record in records)
    for place, (before, after) in enumerate(
        zip([start, *notes.states], notes.states, strict=False)
    ):
        assert before.keys() == after.keys()
        # FedDPA sends in every other round.
        sends = bool(nodes.method.in_round(place + 1).upload_shapes(1.0))
        assert any(not torch.equal(before[key], after[key]) for key in after) == sends
