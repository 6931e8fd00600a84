"""Read presets: the files of `conf/`, each a task with its model, data and settings."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ravan_flwr.config.keys import AUTO, FROM_PRESET, KEYS, check_choice, check_key
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import DataSpec, ModelSpec, Scalar
from ravan_flwr.tasks import TASKS

# Two ways of dealing out to non-IID clients: what is chosen for the one serves for the other.
_SAME_RATES = {"dirichlet": "dirichlet-by-client"}
PARAMETER_BUDGETS = KEYS["parameter-budget"].choices


def conf_folder() -> Path:
    """Find `conf/` of a checkout or an app bundle, or inside the package of an installed wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "conf", package / "conf"):
        if folder.is_dir():
            return folder
    raise ValueError(
        f"presets: found no folder conf/ beside or in {package}; expected the presets that "
        "came with ravan-flwr; install it again"
    )


def preset_names() -> list[str]:
    """List all presets."""
    return sorted(path.stem for path in conf_folder().glob("*.yaml"))


_FIELDS = {"task", "model", "data", "run", "parameter-budgets", "learning-rate"}
_MODEL = {"source", "name"}
_DATA = {"source", "columns", "labels"}
_DATA_OPTIONS = {
    "name",
    "subset",
    "revision",
    "splits",
    "partition-by",
    "prompt",
    "max-length",
    "target-length",
    "glue-tasks",
}
_GLUE_TASK = {"subset", "columns", "labels", "splits"}


@dataclass(frozen=True)
class Preset:
    """Hold a file of `conf/`, checked."""

    task: str
    model: ModelSpec
    data: DataSpec
    glue_tasks: dict[str, DataSpec]  # none but in glue-llama, whose `data` is not used
    max_length: int  # tokens of a text; 0 where there is none
    run: dict[str, Any]
    lora_rank: dict[str, int]  # by parameter budget
    ranks: dict[str, dict[str, int]]  # parameter budget -> method -> rank
    rates: dict[str, Any]  # method -> a number, or a mapping by the values of `rates_by`
    rates_by: tuple[str, ...]
    path: Path

    @classmethod
    def read(cls, name: str) -> "Preset":
        """Read and check the preset of that name."""
        check_choice("preset", name, preset_names())
        path = conf_folder() / f"{name}.yaml"
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        try:
            return _checked(path, content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def data_of(self, glue_task: str) -> DataSpec:
        """Return the data; of one GLUE task, where the preset has several."""
        if not self.glue_tasks:
            if glue_task != AUTO:
                raise ValueError(
                    f"glue-task = {glue_task!r}: {self.path} has no GLUE tasks, expected 'auto'; "
                    "leave it out, or set preset=glue-llama"
                )
            return self.data
        return self.glue_tasks[next(iter(self.glue_tasks)) if glue_task == AUTO else glue_task]

    def learning_rate(self, method: str, values: Mapping[str, Any]) -> float:
        """Return the learning rate of a method, which may depend on other keys' values."""
        found = self.rates.get(method)
        for key in self.rates_by:
            if isinstance(found, dict):
                found = found.get(values[key], found.get(_SAME_RATES.get(values[key]), found))
        if isinstance(found, dict):
            found = None
        if found is None:
            what = "".join(f", {key} {values[key]!r}" for key in self.rates_by)
            raise ValueError(
                f"{self.path} has no learning rate for method {method!r}{what}; give one with "
                "learning-rate=..."
            )
        return float(found)


def _checked(path: Path, content: Any) -> Preset:
    _check_fields("", content, _FIELDS)
    if content["task"] not in TASKS:
        raise ValueError(f"task = {content['task']!r}: expected one of {', '.join(TASKS)}")
    run = content["run"]
    _check_fields("run.", run, FROM_PRESET | {"num-clients"})
    clients = run["num-clients"]
    if type(clients) is not int or clients < 1:
        raise ValueError(f"run.num-clients = {clients!r}: expected a whole number at least 1")
    budgets = content["parameter-budgets"]
    _check_fields("parameter-budgets.", budgets, set(PARAMETER_BUDGETS))
    for name, ranks in budgets.items():
        _check_fields(f"parameter-budgets.{name}.", ranks, {"lora-rank"}, set(METHODS) - {"full"})
        for rank in ranks.values():
            check_key("rank", rank)
    rates = dict(content["learning-rate"])
    by = tuple(rates.pop("by", ()))
    for key in by:
        check_choice("learning-rate.by", key, [key for key, spec in KEYS.items() if spec.choices])
    _check_fields("learning-rate.", rates, set(), set(METHODS))
    for rate in _leaves(rates, by):
        check_key("learning-rate", rate)
    data, glue_tasks = _read_data(content["data"], content["task"])
    return Preset(
        task=content["task"],
        model=_read_model(content["model"]),
        data=data,
        glue_tasks=glue_tasks,
        max_length=_max_length(content["data"]),
        run={key: check_key(key, run[key]) for key in FROM_PRESET} | {"num-clients": clients},
        lora_rank={name: ranks["lora-rank"] for name, ranks in budgets.items()},
        ranks={
            name: {method: rank for method, rank in ranks.items() if method != "lora-rank"}
            for name, ranks in budgets.items()
        },
        rates=rates,
        rates_by=by,
        path=path,
    )


def _max_length(data: Mapping[str, Any]) -> int:
    return int(check_key("max-length", data["max-length"])) if "max-length" in data else 0


def _leaves(rates: Mapping[str, Any], by: tuple[str, ...]) -> Iterator[Scalar]:
    """Yield the numbers of nested mappings, each level by the values of one of the keys `by`."""
    for found in rates.values():
        if not isinstance(found, dict):
            yield found
            continue
        key = next((key for key in by if set(found) <= set(KEYS[key].choices)), None)
        if key is None:
            raise ValueError(
                f"learning-rate: got {found}, expected a number, or numbers by the values of "
                f"{' or '.join(by) or 'keys that `by` names'}"
            )
        yield from _leaves(found, tuple(other for other in by if other != key))


def _read_model(content: Any) -> ModelSpec:
    _check_fields("model.", content, _MODEL, {"revision", "shape"})
    shape = content.get("shape", {})
    _check_fields("model.shape.", shape, {"model_type"} if shape else set(), set(shape))
    return ModelSpec(
        content["source"], content["name"], content.get("revision", ""), tuple(shape.items())
    )


def _read_data(content: Any, task: str) -> tuple[DataSpec, dict[str, DataSpec]]:
    several = isinstance(content, dict) and "glue-tasks" in content
    _check_fields(
        "data.", content, {"source"} if several else _DATA, _DATA_OPTIONS | {"columns", "labels"}
    )
    common = DataSpec(
        source=content["source"],
        name=content.get("name", ""),
        revision=content.get("revision", ""),
        prompt=content.get("prompt", ""),
        target_length=content.get("target-length", 0),
    )
    if not several:
        return _with_columns(common, content, task, "data."), {}
    tasks = content["glue-tasks"]
    _check_fields("data.glue-tasks.", tasks, set(KEYS["glue-task"].choices))
    for name, what in tasks.items():
        _check_fields(f"data.glue-tasks.{name}.", what, _GLUE_TASK)
    return common, {
        name: _with_columns(common, what, task, f"data.glue-tasks.{name}.")
        for name, what in tasks.items()
    }


def _with_columns(spec: DataSpec, content: Mapping[str, Any], task: str, where: str) -> DataSpec:
    kind, columns = TASKS[task], content["columns"]
    _check_fields(f"{where}columns.", columns, set(kind.roles), set(kind.optional))
    splits = content.get("splits", {"train": "train", "test": "test"})
    _check_fields(f"{where}splits.", splits, {"train", "test"})
    test = splits["test"]
    labels = content["labels"]
    if ("label" in columns) != bool(labels) or not all(isinstance(x, str) for x in labels):
        raise ValueError(f"{where}labels = {labels!r}: expected the names of the classes, as texts")
    return replace(
        spec,
        subset=content.get("subset", ""),
        train=splits["train"],
        tests=tuple(test.items()) if isinstance(test, dict) else (("test", test),),
        columns=tuple(columns.items()),
        partition_by=content.get("partition-by", "label"),
        labels=tuple(labels),
    )


def _check_fields(
    where: str, content: Any, expected: Set[str], options: Set[str] = frozenset()
) -> None:
    known = sorted(expected | options)
    if not isinstance(content, dict):
        raise ValueError(f"{where or 'the file'} is no mapping, expected one with {known}")
    for field in sorted((set(content) - expected - options) | (expected - set(content)), key=str):
        state = "unknown" if field in content else "missing"
        raise ValueError(f"{where}{field} is {state}; expected the fields {known}")
