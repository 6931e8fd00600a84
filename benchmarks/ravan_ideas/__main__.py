"""Run `ravan-flwr` with the ideas among its methods, also in the processes of a study's runs."""

import sys
from pathlib import Path
from unittest.mock import patch

from ravan_flwr.methods import METHODS, MethodInfo

IDEAS = ("scales", "anew")
for idea in IDEAS:
    METHODS[f"ravan-{idea}"] = MethodInfo(
        3e-3, has_heads=True, module=f"benchmarks.ravan_ideas.{idea}"
    )

from ravan_flwr.cli import main  # noqa: E402 (it makes a list of the methods)
from ravan_flwr.studies.spec import PlannedRun  # noqa: E402

_command = PlannedRun.command


def _with_ideas(run: PlannedRun, folder: Path, engine: str) -> list[str]:
    return ["benchmarks.ravan_ideas" if word == "ravan_flwr" else word
            for word in _command(run, folder, engine)]  # fmt: skip


if __name__ == "__main__":
    with patch.object(PlannedRun, "command", _with_ideas):
        main(sys.argv[1:])
