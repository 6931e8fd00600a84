"""Read the settings of a run, once, before PyTorch is imported."""

from collections.abc import Mapping
from dataclasses import dataclass

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.presets import absolute_paths, with_preset_path
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.runs.directory import with_recorded_settings
from ravan_flwr.specs import Scalar, join_list
from ravan_flwr.training.clients import number_of_clients


@dataclass(frozen=True)
class Start:
    """A run's settings, as given and as checked, and its number of clients."""

    run_config: Mapping[str, Scalar]  # with absolute paths
    config: Config
    num_clients: int


def read_start(
    user_settings: Mapping[str, Scalar | list[str]], num_clients: int | None = None
) -> Start:
    """Return the checked settings, with those of a resumed run, and the number of clients."""
    given = {key: join_list(value) for key, value in user_settings.items()}
    settings, num_clients = with_recorded_settings(with_preset_path(given), num_clients)
    if settings.get("output-dir", AUTO) == AUTO:
        settings["output-dir"] = "runs"
    run_config = absolute_paths(settings)
    config = read_config(run_config)
    number = number_of_clients(config, num_clients)
    return Start(run_config, config, number)
