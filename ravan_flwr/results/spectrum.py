"""Draw the singular values of the delta-weights of runs (the paper's figure 1).

The paper compares full fine-tuning: centralised, federated over IID clients, and federated over
non-IID clients. The more the clients differ, the flatter the spectrum, and the higher the rank
that an adapter needs. The effective rank of a matrix with singular values sigma is
exp(-sum p log p) with p = sigma / sum sigma (Roy and Vetterli, 2007): r for r equal values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from ravan_flwr.methods import METHODS
from ravan_flwr.results.charts import Caption, Chart, Series, boxes, lines
from ravan_flwr.results.evaluation import result_of
from ravan_flwr.runs.history import RecordedRun, group_runs


@dataclass(frozen=True)
class Spectra:
    """The singular values of every layer's delta-weight in one run, in descending order."""

    run: RecordedRun
    values: dict[str, Tensor]

    @classmethod
    def of(cls, path: Path) -> "Spectra":
        """Compute them from the run's last checkpoint."""
        run = RecordedRun.read(path)
        listed = METHODS.get(run.config["method"])
        if listed is not None and listed.personalised:
            raise ValueError(
                f"report --spectrum: {path} is a run of method {run.config['method']!r}, with "
                "which each client has delta-weights of its own, expected one with a model for "
                "all; leave it out"
            )
        with result_of(path) as loaded:
            deltas = loaded.model.method.delta_weights(loaded.model.adapters)
            names = [layer.name for layer in loaded.model.layers]
            values = [torch.linalg.svdvals(delta.cpu().double()) for delta in deltas]
        return cls(run, dict(zip(names, values, strict=True)))

    def mean_spectrum(self, top: int) -> Tensor:
        """Average the `top` largest values over the layers, each layer's divided by its largest."""
        rows = [values[:top] / values[0].clamp(min=1e-30) for values in self.values.values()]
        shortest = min(map(len, rows))
        return torch.stack([row[:shortest] for row in rows]).mean(0)


def effective_rank(values: Tensor) -> float:
    """Return exp of the entropy of the singular values; 0 for a matrix of zeros."""
    if not values.sum() > 0:
        return 0.0
    fractions = values / values.sum()
    return float(torch.special.entr(fractions).sum().exp())


def write_spectra(paths: Sequence[Path | str], folder: Path | str, top: int = 64) -> list[Path]:
    """Write the pictures and a CSV file, and return their paths."""
    pictures = charts_of_runs([Path(path) for path in paths], top)
    return [path for chart in pictures for path in chart.write(Path(folder))]


def charts_of_runs(paths: Sequence[Path], top: int = 64) -> list[Chart]:
    """Draw the spectra of runs; those that differ only in the seed are one line."""
    if top < 1:
        raise ValueError(f"top = {top}: expected a whole number at least 1, such as 64")
    spectra = {path: Spectra.of(path) for path in paths}
    groups = group_runs([spectra_of_run.run for spectra_of_run in spectra.values()])
    return charts({name: [spectra[r.path] for r in runs] for name, runs in groups.items()}, top)


def charts(groups: dict[str, list[Spectra]], top: int) -> list[Chart]:
    """Draw the spectra as lines, and the effective ranks of the layers as boxes."""
    means = {name: [spectra.mean_spectrum(top) for spectra in x] for name, x in groups.items()}
    series = [
        Series(name, [(range(1, len(mean) + 1), mean.tolist()) for mean in group])
        for name, group in means.items()
    ]
    ranks = {
        name: [effective_rank(values) for spectra in group for values in spectra.values.values()]
        for name, group in groups.items()
    }
    spectrum = Caption(
        "spectrum",
        "Singular values of the update",
        "The singular values of each layer's delta-weight, divided by the largest; mean over the "
        "layers, with a band over the seeds.",
    )
    rank = Caption(
        "effective-rank",
        "Effective rank of the update",
        "The number of directions of a layer's delta-weight, weighted by their size; over layers "
        "and seeds.",
    )
    chart = lines(spectrum, series, "index", "value / largest value")
    return [replace(chart, numbers=_csv(groups).encode()), boxes(rank, ranks, "effective rank")]


def _csv(groups: dict[str, list[Spectra]]) -> str:
    rows = [
        {
            "group": name,
            "seed": spectra.run.config["seed"],
            "layer": layer,
            "effective-rank": f"{effective_rank(values):.4f}",
            "norm": f"{float(values.norm()):.6g}",
            "singular-values": " ".join(f"{value:.6g}" for value in values.tolist()),
        }
        for name, group in groups.items()
        for spectra in group
        for layer, values in spectra.values.items()
    ]
    return str(pd.DataFrame(rows).to_csv(index=False))
