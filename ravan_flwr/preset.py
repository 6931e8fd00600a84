"""Presets: the files of `conf/`, each a task with its model, data and settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ravan_flwr.keys import AUTO, KEYS, check_choice, check_key
from ravan_flwr.tasks import TASKS

# The keys that are a preset's to say when they are "auto".
_NOT_THERE = {
    "learning-rate", "calibration-learning-rate", "server-learning-rate", "rank", "device",
    "output-dir",
}  # fmt: skip
FROM_PRESET = {key for key, spec in KEYS.items() if spec.default == AUTO} - _NOT_THERE


@dataclass(frozen=True)
class ModelSpec:
    """Where the backbone comes from."""

    source: str  # "bundled": a file of ravan_flwr/backbones
    name: str


@dataclass(frozen=True)
class DataSpec:
    """Where the examples come from, and what their columns are called."""

    source: str  # "sklearn-digits"
    label_column: str


def conf_folder() -> Path:
    """`conf/` of a checkout or an app bundle, or inside the package of an installed wheel."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "conf", package / "conf"):
        if folder.is_dir():
            return folder
    raise ValueError(
        f"presets: found no folder conf/ beside or in {package}; expected the presets that "
        "came with ravan-flwr; install it again"
    )


_PRESET_FIELDS = {"task", "model", "data", "run", "learning-rate"}


@dataclass(frozen=True)
class Preset:
    """A file of `conf/`, checked."""

    task: str
    model: ModelSpec
    data: DataSpec
    run: dict[str, Any]
    learning_rate: dict[str, dict[str, float]]  # method -> classifier -> value
    path: Path

    @classmethod
    def read(cls, name: str) -> "Preset":
        """The preset of that name."""
        folder = conf_folder()
        check_choice("preset", name, sorted(path.stem for path in folder.glob("*.yaml")))
        path = folder / f"{name}.yaml"
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        _check_fields(path, "", content, _PRESET_FIELDS)
        _check_fields(path, "model.", content["model"], {"source", "name"})
        _check_fields(path, "data.", content["data"], {"source", "label-column"})
        _check_fields(path, "run.", content["run"], FROM_PRESET | {"num-clients"})
        if content["task"] not in TASKS:
            raise ValueError(
                f"{path}: task = {content['task']!r}: expected one of {', '.join(TASKS)}; change it"
            )
        clients = content["run"]["num-clients"]
        if not isinstance(clients, int) or clients < 1:
            raise ValueError(
                f"{path}: run.num-clients = {clients!r}: expected a whole number at least 1; "
                "change it"
            )
        try:
            run = {k: check_key(k, content["run"][k]) for k in FROM_PRESET}
            for by_classifier in content["learning-rate"].values():
                for rate in by_classifier.values():
                    check_key("learning-rate", rate)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls(
            task=content["task"],
            model=ModelSpec(**content["model"]),
            data=DataSpec(**{k.replace("-", "_"): v for k, v in content["data"].items()}),
            run=run | {"num-clients": clients},
            learning_rate=content["learning-rate"],
            path=path,
        )

    def default_learning_rate(self, method: str, classifier: str) -> float:
        """The rate for a method, which depends on whether the classifier trains."""
        try:
            return self.learning_rate[method][classifier]
        except KeyError:
            raise ValueError(
                f"{self.path} has no learning rate for method {method!r} with classifier "
                f"{classifier!r}; give one with learning-rate=..."
            ) from None


def _check_fields(path: Path, prefix: str, content: Any, expected: set[str]) -> None:
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: {prefix or 'the file'} is no mapping, expected one with {sorted(expected)}"
        )
    for field in sorted(set(content) ^ expected):
        state = "unknown" if field in content else "missing"
        raise ValueError(
            f"{path}: {prefix}{field} is {state}; expected the fields {sorted(expected)}"
        )
