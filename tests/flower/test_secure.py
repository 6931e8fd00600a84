"""Secure rounds on Flower's deployment runtime: devices are killed in each phase.

Eight SuperNodes have keys of `ravan-flwr keys`. In round 1 one is killed in the phase "keys" and
one in "masked", in round 2 one in "shares" and one in "unmask". The remaining clients reach the
threshold of two thirds, so both rounds close. tests/runs/test_secure.py tests invalid signatures,
and too many failures, in process.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from ravan_flwr.cli import main
from tests.flower import NEEDS_PROC, dying_client
from tests.flower.at_start import at_start

pytestmark = [pytest.mark.slow, NEEDS_PROC]

NODES = 8
PLAN = {7: (1, "keys"), 6: (1, "masked"), 5: (2, "shares"), 4: (2, "unmask")}
SHORT = (
    "num-rounds=2 local-steps=2 clients-per-round=8 tracking='none' eval-every=2 "
    # A killed device ends no phase by these: the SuperLink reports it after 30 to 60 seconds. A
    # living one may need longer than that for a message on a busy machine.
    "secure-aggregation=true straggler-grace=600.0 round-timeout=900.0"
)


def make_keys(folder):
    """Make each device's keys, and copy its public key to all others."""
    for number in range(NODES):
        main(["keys", str(folder / f"node-{number}"), "--partition-id", str(number)])
    for path in list(folder.glob("*/*.pub")):
        for number in range(NODES):
            target = folder / f"node-{number}" / path.name
            if target != path:
                shutil.copy(path, target)
    return folder


@pytest.fixture(scope="module")
def run(deployment):
    secrets = make_keys(deployment.folder / "secrets")
    install = dying_client.INSTALL.format(plan=PLAN)
    path = at_start(deployment.folder / "dying", "flwr-clientapp", install)

    def settings(number):
        warm = " warm-worker=true" * (number == 0)
        return f'secure-keys="{secrets}/node-{number}"{warm}'

    deployment.start_nodes(settings, PYTHONPATH=path)
    run = deployment.run(SHORT)
    assert run.wait() == "finished:completed", run.log[-3000:]
    return run


def test_both_rounds_close_with_the_remaining_clients(run):
    first, second = run.rounds
    assert [c["partition-id"] for c in first["clients"]] == [0, 1, 2, 3, 4, 5]
    assert first["secure"]["dropped"] == [6]
    assert [c["partition-id"] for c in second["clients"]] == [0, 1, 2, 3, 4]
    for record in run.rounds:
        assert "refused" not in record
        assert record["secure"]["untrained"] == 0
    for partition, (number, _) in PLAN.items():
        rejected = [reply["client"] for reply in run.rounds[number - 1]["rejected"]]
        assert f"partition {partition}" in rejected, (partition, number)
    paths = sorted((run.directory / "checkpoints").glob("round-*.safetensors"))
    first, second = (load_file(path)["H"] for path in paths)
    assert first.any()
    assert not torch.equal(first, second)
