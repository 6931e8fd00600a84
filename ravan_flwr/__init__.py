"""Federated fine-tuning with multi-head low-rank adapters (RAVAN), as a Flower app.

For scripts and notebooks (docs/python.md):

    simulate(settings, num_clients)     run the app in this process -> run_dir, summary
    plan_of(settings, num_clients)      what a run will train, send and need, as text
    result_of(run)                      a finished run's model, method and data
    write_report(runs, folder)          a page and pictures
    write_spectra(runs, folder, top)    singular values of what runs added
    export_run(run, form, folder)       a PEFT or transformers folder
    run_study(file, folder, jobs)       a grid of runs, and its tables
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ravan_flwr.export import export_run
    from ravan_flwr.plan import plan_of
    from ravan_flwr.report import write_report
    from ravan_flwr.result import result_of
    from ravan_flwr.simulation import Simulation, simulate
    from ravan_flwr.spectrum import write_spectra
    from ravan_flwr.studies.running import run_study

# Imported when first used: most of them bring torch and Flower.
_HOMES = {
    "Simulation": "ravan_flwr.simulation",
    "export_run": "ravan_flwr.export",
    "plan_of": "ravan_flwr.plan",
    "result_of": "ravan_flwr.result",
    "run_study": "ravan_flwr.studies.running",
    "simulate": "ravan_flwr.simulation",
    "write_report": "ravan_flwr.report",
    "write_spectra": "ravan_flwr.spectrum",
}

__all__ = [
    "Simulation", "export_run", "plan_of", "result_of", "run_study", "simulate",
    "write_report", "write_spectra",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """One of the names above."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
