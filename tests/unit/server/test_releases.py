"""Releases and transports are registered by name; a new one needs a class and a row."""

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
