"""A run rejects the replies of a client that multiplies its uploads."""

import pytest

from ravan_flwr import simulate
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar

SMALL: dict[str, Scalar] = {
    "num-rounds": 2, "local-steps": 3, "batch-size": 8, "report": False, "tracking": "none",
    "clients-per-round": 4,
}  # fmt: skip


class Attacking(InProcessGrid):
    """Nodes of which node 1 multiplies its uploads."""

    factor = 1e5

    def _deliver(self, message):
        reply = super()._deliver(message)
        if message.metadata.dst_node_id == 1 and message.metadata.message_type == "train":
            tensors = from_record(reply.content.array_records["arrays"])
            multiplied = {
                k: v * self.factor if v.is_floating_point() else v for k, v in tensors.items()
            }
            reply.content["arrays"] = to_record(multiplied)
        return reply


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("method", METHODS)
def test_a_multiplied_reply_is_rejected_from_the_first_round(method, tmp_path, monkeypatch):
    monkeypatch.setattr("ravan_flwr.launch.in_process.InProcessGrid", Attacking)
    settings = SMALL | {"method": method, "output-dir": str(tmp_path)}
    if METHODS[method].pools:  # the round's only reply is rejected
        with pytest.raises(RuntimeError, match="round 1: got no valid reply, .*upload changes"):
            simulate(settings, 1)
        return
    run = simulate(settings, 4)
    # `local` has no uploads, and FedDPA none in the second half of its rounds.
    assert run.summary["rejected"] == {"local": 0, "feddpa": 1}.get(method, 2)
    assert run.summary["rounds"] == 2
    assert run.summary["metrics"]["final"]["loss"] < 3
