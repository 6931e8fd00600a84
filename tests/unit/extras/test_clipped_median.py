"""The median of clipped updates, by hand; a bad reply is rejected."""

import pytest
import torch

from tests.hand_made import Nodes, fake_clock, run

__all__ = ["fake_clock"]


class Shifted(Nodes):
    """Clients whose first two numbers of B are given, and the others zero."""

    # norms 0.63, 5 (clipped to 0.8, 0.6), 5 (clipped to 0, 1), and no number
    changes = ((0.6, 0.2), (4.0, 3.0), (0.0, 5.0), (float("nan"), 0.0))

    def reply(self, message, upload, number):
        B = torch.zeros_like(upload["B"])
        B.view(-1)[:2] = torch.tensor(self.changes[self.trained[-1][1]])
        return super().reply(message, upload | {"B": B}, number)


def test_median_of_clipped_updates_by_hand():
    settings = {"method": "ffa-lora", "clients_per_round": 4, "median_of_clipped": 1.0}
    notes, _, state = run(Shifted(method="ffa-lora"), 1, lambda *_: None, **settings)
    # The medians of 0.6, 0.8, 0 and of 0.2, 0.6, 1; without clipping the second would be 3.
    assert state["B"].view(-1)[:2].tolist() == pytest.approx([0.6, 0.6])
    assert not state["B"].view(-1)[2:].any()
    (record,) = notes.records
    assert [client["partition-id"] for client in record["clients"]] == [0, 1, 2]
    (rejected,) = record["rejected"]
    assert rejected["client"] == "partition 3"
    assert "not finite" in rejected["reason"]
