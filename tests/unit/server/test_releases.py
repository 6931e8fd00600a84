"""Releases and transports are registered by name; a new one needs a class and a row."""

import math
import re
import subprocess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from ravan_flwr import optional
from ravan_flwr.server import releases, transports
from scripts.draw_layers import PACKAGE, imported
from tests.hand_made import Nodes, fake_clock, run

__all__ = ["fake_clock"]

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


def test_the_server_app_imports_no_optional_module(python):
    core = [*(PACKAGE / "server").glob("*.py"), PACKAGE / "server_app.py"]
    assert not [p for p in core for name in imported(p) if name.startswith("ravan_flwr.extras")]
    code = "import sys, ravan_flwr.server_app; print(*sys.modules)"
    loaded = subprocess.check_output([python.executable, "-c", code], text=True).split()
    assert "ravan_flwr.server.round" in loaded
    assert not [name for name in loaded if name.startswith("ravan_flwr.extras")]


ROWS: list[tuple[str, type]] = [(place, releases.Release) for place in optional.RELEASES.values()]
ROWS += [(place, transports.Transport) for place in optional.TRANSPORTS.values()]


@pytest.mark.parametrize(("place", "base"), ROWS)
def test_each_row_names_an_existing_class(place, base):
    assert issubclass(resolve_name(place), base)


def test_the_release_of_the_documentation_works(monkeypatch):
    """Two of four clients send the negative of the other changes: the round has no effect."""
    *_, code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    monkeypatch.setattr(releases, "Agreed", names["Agreed"], raising=False)
    monkeypatch.setitem(optional.RELEASES, "mean", "ravan_flwr.server.releases:Agreed")

    class Shifted(Nodes):
        """Clients whose B is 0.1, or -0.1 for the opposed half."""

        opposed = False

        def reply(self, message, upload, number):
            sign = -1 if self.opposed and self.trained[-1][1] % 2 else 1
            shifted = {"B": torch.full_like(upload["B"], 0.1 * sign)}
            return super().reply(message, upload | shifted, number)

    refused = []
    for opposed in (False, True):
        nodes = Shifted(method="ffa-lora")
        nodes.opposed = opposed
        settings = {"method": "ffa-lora", "clients_per_round": 4}
        notes, used, _ = run(nodes, rounds=1, evaluate_fn=lambda *_: None, **settings)
        refused.append(notes.records[0].get("refused", ""))
    assert refused[0] == ""
    assert "cancel each other" in refused[1]
    assert not used.federation.state.tensors["B"].any()


def code_of(name):
    """Return the names that the page's code with this class defines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if f"\nclass {name}(Release)" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.fixture
def clipped(monkeypatch):
    monkeypatch.setattr(releases, "Clipped", code_of("Clipped")["Clipped"], raising=False)
    monkeypatch.setitem(optional.RELEASES, "mean", "ravan_flwr.server.releases:Clipped")


# The clipped changes are (0.6, 0.2), which has a norm below 1, then (0.8, 0.6) and (0, 1).
@pytest.mark.parametrize(
    ("weighting", "expected"), [("uniform", [1.4 / 3, 1.8 / 3]), ("median", [0.6, 0.6])]
)
def test_the_clipped_release_of_the_documentation_by_hand(clipped, weighting, expected):
    """Clients change the first two numbers of B; the fourth sends no number and is rejected."""
    sent = torch.tensor([[0.6, 0.2], [4.0, 3.0], [0.0, 5.0], [math.nan, 0.0]])

    class Changed(Nodes):
        def reply(self, message, upload, number):
            B = torch.zeros_like(upload["B"])
            B.view(-1)[:2] = sent[self.trained[-1][1]]
            return super().reply(message, upload | {"B": B}, number)

    settings = {"method": "ffa-lora", "clients_per_round": 4, "weighting": weighting}
    notes, _, state = run(Changed(method="ffa-lora"), 1, lambda *_: None, **settings)
    assert state["B"].view(-1)[:2].tolist() == pytest.approx(expected)
    assert not state["B"].view(-1)[2:].any()
    (record,) = notes.records
    assert [client["partition-id"] for client in record["clients"]] == [0, 1, 2]
    (rejected,) = record["rejected"]
    assert rejected["client"] == "partition 3"
    assert "not finite" in rejected["reason"]


def test_the_clipped_release_of_the_documentation_clips_heads(clipped):
    """A client with half of the heads moves the state by a norm of one; its other heads stay."""

    class Far(Nodes):
        def reply(self, message, upload, number):
            assert len(upload["H"]) < len(
                self.method.initial_state(self.adapters)["H"].flatten(0, 1)
            )
            return super().reply(message, upload | {"H": upload["H"] + 3.0}, number)

    nodes = Far(1, budget_fraction=0.5)
    before = nodes.method.initial_state(nodes.adapters)["H"]
    *_, state = run(nodes, 1, lambda *_: None, clients_per_round=1)
    assert float((state["H"] - before).norm()) == pytest.approx(1.0, rel=1e-5)
    moved = (state["H"] != before).flatten(2).any(-1)
    assert 0 < moved.sum() < moved.numel()
