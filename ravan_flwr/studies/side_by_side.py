"""Check that the rows of a table can stand beside each other: equal parameters, equal examples."""

import math
from collections.abc import Mapping

from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.studies.spec import Row

TOLERANCE = 0.05  # numbers of parameters that differ by no more are called equal


def check_measured_alike(where: str, rows: Mapping[str, Row], *, spectra: bool) -> None:
    """Raise ValueError where a row of a personalised method cannot stand beside the others."""
    configs = {
        name: read_config(own_preset({"learning-rate": 1.0, **row.settings}))
        for name, row in rows.items()
    }
    personal = [name for name, config in configs.items() if METHODS[config.method].personalised]
    if not personal:
        return
    if spectra:
        raise ValueError(
            f"{where}: spectra: rows {personal} have another update for each client, expected rows "
            "with one model for all; take spectra away"
        )
    if len({(config.evaluate_on, config.validation_share) for config in configs.values()}) > 1:
        told = ", ".join(
            f"{name} evaluate-on={config.evaluate_on} validation-share={config.validation_share:g}"
            for name, config in configs.items()
        )
        raise ValueError(
            f"{where}: its rows are measured on different examples ({told}), expected the same for "
            "all; set evaluate-on: clients and validation-share: 0.2 in the study's settings"
        )


def check_equal(where: str, rows: Mapping[str, Row]) -> None:
    """Raise ValueError unless the rows train the same number of parameters, to 5 %."""
    from ravan_flwr.training.cost import adapter_parameters  # noqa: PLC0415 (imports torch)

    if len(rows) < 2:
        raise ValueError(f"{where}: equal-parameters has rows {list(rows)}, expected at least two")
    numbers = {
        name: adapter_parameters(read_config(own_preset({"learning-rate": 1.0, **row.settings})))
        for name, row in rows.items()
    }
    apart = 1 - min(numbers.values()) / max(numbers.values())
    if apart > TOLERANCE:
        listed = ", ".join(f"{name} {number:,}" for name, number in numbers.items())
        raise ValueError(
            f"{where} calls its rows equal, but the parameters that they train differ by "
            f"{100 * apart:.1f} % ({listed}), expected at most {100 * TOLERANCE:.0f} %; change "
            "lora-rank, heads or rank, name references, or take equal-parameters away"
        )


def check_last(where: str, last: int, rows: Mapping[str, Row]) -> None:
    """Raise ValueError unless there are rows that are evaluated so often."""
    configs = [
        read_config(own_preset({"learning-rate": 1.0, **one.settings})) for one in rows.values()
    ]
    most = max(math.ceil(config.num_rounds / config.eval_every) for config in configs)
    if not 2 <= last <= most:
        raise ValueError(
            f"{where}: compare-last = {last}, expected 2 evaluations or more, and no more than the "
            f"{most} of a row's run; correct it, or eval-every"
        )
