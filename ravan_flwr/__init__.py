"""Federated fine-tuning with multi-head low-rank adapters (RAVAN), as a Flower app.

For scripts and notebooks (docs/library.md):

    simulate(settings, num_clients)     run the app in this process -> run_dir, summary
    Callback                            hooks into a run: simulate(..., callbacks=[...])
    plan_of(settings, num_clients)      a run's trained parameters, bytes and memory, as text
    result_of(run)                      a finished run's model, method and data
    write_report(runs, folder)          a page and pictures
    write_spectra(runs, folder, top)    singular values of the runs' delta-weights
    evaluate(run, data)                 metrics of a run's result on labelled examples, by class
    predict(run, data, output)          a run's answers for a table or a folder of images
    export_run(run, form, folder)       a PEFT or transformers folder
    run_study(file, folder, jobs)       a grid of runs, and its tables

As a library (docs/library.md):

    RavanConfig(r, num_heads, ...)      RAVAN for PEFT's get_peft_model; importing it registers it
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ravan_flwr.lab.running import run_study
    from ravan_flwr.launch.in_process import Simulation, simulate
    from ravan_flwr.peft import RavanConfig
    from ravan_flwr.results.evaluation import evaluate, result_of
    from ravan_flwr.results.export import export_run
    from ravan_flwr.results.prediction import predict
    from ravan_flwr.results.report import write_report
    from ravan_flwr.results.spectrum import write_spectra
    from ravan_flwr.runs.callback import Callback
    from ravan_flwr.training.plan import plan_of

# Imported on first use, since most of them import torch and Flower.
_MODULES = {
    "Callback": "ravan_flwr.runs.callback",
    "RavanConfig": "ravan_flwr.peft",
    "Simulation": "ravan_flwr.launch.in_process",
    "evaluate": "ravan_flwr.results.evaluation",
    "export_run": "ravan_flwr.results.export",
    "plan_of": "ravan_flwr.training.plan",
    "predict": "ravan_flwr.results.prediction",
    "result_of": "ravan_flwr.results.evaluation",
    "run_study": "ravan_flwr.lab.running",
    "simulate": "ravan_flwr.launch.in_process",
    "write_report": "ravan_flwr.results.report",
    "write_spectra": "ravan_flwr.results.spectrum",
}

__all__ = [
    "Callback", "RavanConfig", "Simulation", "evaluate", "export_run", "plan_of", "predict",
    "result_of", "run_study", "simulate", "write_report", "write_spectra",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return a public name of the package, imported on first use."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
