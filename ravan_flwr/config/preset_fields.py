"""Check what a preset's file says, and fill in what it does not say.

`task`, `model` and `data` must be there. The defaults of everything else are here, and
docs/your-own-task.md lists them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ravan_flwr.config.checks import check_steps
from ravan_flwr.config.fields import check_fields, text_field, whole_field
from ravan_flwr.config.keys import AUTO, FROM_PRESET, KEYS, check_choice, check_key
from ravan_flwr.config.places import targets_of
from ravan_flwr.config.preset import Preset
from ravan_flwr.config.prompt_fields import (
    OF_LANGUAGE_MODELS,
    language_columns,
    language_of,
    prompt_of,
)
from ravan_flwr.config.question_fields import questions_of
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import DataSpec, ModelSpec, Scalar
from ravan_flwr.tasks import TASKS, TaskInfo

# What a run is, as far as the preset does not say it.
RUN: dict[str, Scalar] = {
    "num-clients": 10,
    "num-rounds": 20,
    "clients-per-round": 3,
    "local-steps": 50,
    "local-epochs": AUTO,  # none, unless it is said
    "batch-size": 32,
    "partition": "dirichlet-by-client",
    "partition-alpha": 0.3,
    "classes-per-client": 2,
    "shards-per-client": 2,
    "heads": 4,
    "init": "gram-schmidt",
    "classifier": "trained",
    "eval-every": 1,
    "learning-rate-schedule": "constant",
    "final-learning-rate": AUTO,  # a fiftieth of learning-rate
    "precision": "float32",
    "gradient-checkpointing": False,
    "quantize": "none",
    "lora-scale": 1.0,
    "max-bytes": AUTO,  # any
}
LORA_RANK = {"lower": 8, "higher": 16}  # by parameter budget

_OPTIONS = {"run", "parameter-budgets", "learning-rate", "other-models"}
_DATA = {
    "source",
    "name",
    "subset",
    "revision",
    "splits",
    "test-share",
    "columns",
    "labels",
    "partition-by",
    "prompt",
    "max-length",
    "target-length",
    "glue-tasks",
    *OF_LANGUAGE_MODELS,
}
_GLUE_TASK = {"subset", "columns", "labels", "splits"}


def checked_preset(path: Path, content: Any) -> Preset:
    """Check the content of a preset's file."""
    check_fields("", content, {"task", "model", "data"}, _OPTIONS)
    check_choice("task", str(content["task"]), TASKS)
    kind, run = TASKS[content["task"]], _part(content, "run")
    data, glue_tasks = _read_data(_place(content["data"]), kind, path.parent)
    budgets, rates = _part(content, "parameter-budgets"), _part(content, "learning-rate")
    by = _read_by(rates)
    return Preset(
        path=path,
        task=content["task"],
        model=_read_model(_place(content["model"]), path.parent),
        other_models=_read_others(_part(content, "other-models"), path.parent),
        data=data,
        glue_tasks=glue_tasks,
        max_length=_max_length(_place(content["data"]), kind),
        run=_read_run(run, kind),
        lora_rank=_read_budgets(budgets),
        ranks={name: _ranks_of(budgets.get(name) or {}) for name in LORA_RANK},
        rates=_read_rates(rates, by),
        rates_by=by,
    )


def _part(content: Mapping[str, Any], field: str) -> Any:
    """Return a part that may be left out, or left empty."""
    part = content.get(field)
    return {} if part is None else part


def _place(content: Any) -> Any:
    """Read `model: NAME` and `data: NAME` as what they are short for."""
    return {"name": content} if isinstance(content, str) else content


def run_defaults(kind: TaskInfo) -> dict[str, Scalar]:
    """Return what a run of such a task is, as far as the preset does not say it."""
    unlike: dict[str, Scalar] = {} if "label" in kind.roles else {"partition": "iid"}
    if kind.target_length:  # it answers by its pretrained head: there is no classifier to train
        unlike["classifier"] = "frozen"
    return RUN | unlike


def _read_run(run: Any, kind: TaskInfo) -> dict[str, Any]:
    check_fields("run.", run, set(), FROM_PRESET | {"num-clients"})
    said = {key: value for key, value in run.items() if value != AUTO}
    values = run_defaults(kind) | said
    if "local-epochs" in said and "local-steps" not in said:
        values["local-steps"] = AUTO
    if values["partition"] == "natural":  # the data tell how many, unless the preset does
        values["num-clients"] = said.get("num-clients")
    clients = values["num-clients"]
    if clients is not None and (type(clients) is not int or clients < 1):
        raise ValueError(f"run.num-clients = {clients!r}: expected a whole number at least 1")
    check_steps(values, "run.")
    return {key: check_key(key, values[key]) for key in FROM_PRESET} | {"num-clients": clients}


def _read_budgets(budgets: Any) -> dict[str, int]:
    """Read the rank of a LoRA of each parameter budget; others are twice or half of one that is."""
    check_fields("parameter-budgets.", budgets, set(), set(LORA_RANK))
    said: dict[str, int] = {}
    for name, ranks in budgets.items():
        where = f"parameter-budgets.{name}."
        check_fields(where, ranks, {"lora-rank"}, set(METHODS) - {"full"})
        for rank in ranks.values():
            check_key("rank", rank)
        said[name] = ranks["lora-rank"]
    half = max(1, said["higher"] // 2) if "higher" in said else LORA_RANK["lower"]
    lower = said.get("lower", half)
    return {"lower": lower, "higher": said.get("higher", 2 * lower)}


def _ranks_of(ranks: Mapping[str, int]) -> dict[str, int]:
    return {method: rank for method, rank in ranks.items() if method != "lora-rank"}


def _read_by(rates: Any) -> tuple[str, ...]:
    by = rates.get("by", []) if isinstance(rates, dict) else []
    if not isinstance(by, list):
        raise ValueError(f"learning-rate.by = {by!r}: expected a list of keys, such as [partition]")
    for key in by:
        check_choice(
            "learning-rate.by", str(key), [key for key, spec in KEYS.items() if spec.choices]
        )
    return tuple(by)


def _read_rates(rates: Any, by: tuple[str, ...]) -> dict[str, Any]:
    check_fields("learning-rate.", rates, set(), {*METHODS, "by"})
    by_method = {method: rate for method, rate in rates.items() if method != "by"}
    for rate in _leaves(by_method, by):
        check_key("learning-rate", rate)
    return by_method


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


def _read_model(content: Any, folder: Path, where: str = "model.") -> ModelSpec:
    check_fields(where, content, {"name"}, {"source", "revision", "shape", "targets"})
    shape = _part(content, "shape")
    known = {str(name) for name in shape} if isinstance(shape, dict) else set()
    check_fields(f"{where}shape.", shape, {"model_type"} if known else set(), known)
    if shape:
        text_field(f"{where}shape.", shape, "model_type")
    source = _source(where, content, ("bundled", "hub"))
    return ModelSpec(
        source,
        _name(where, content, folder, source),
        text_field(where, content, "revision"),
        tuple(shape.items()),
        targets_of(targets) if (targets := text_field(where, content, "targets")) else (),
    )


def _read_others(content: Any, folder: Path) -> dict[str, ModelSpec]:
    """Read the models that the key `model` may name in place of the preset's."""
    known = {str(name) for name in content} if isinstance(content, dict) else set()
    check_fields("other-models.", content, set(), known)
    return {
        name: _read_model(_place(one), folder, f"other-models.{name}.")
        for name, one in content.items()
    }


def _read_data(content: Any, kind: TaskInfo, folder: Path) -> tuple[DataSpec, dict[str, DataSpec]]:
    check_fields("data.", content, set(), _DATA)
    source = _source("data.", content, ("hub", "sklearn-digits"))
    common = DataSpec(
        source=source,
        name=_name("data.", content, folder, source),
        revision=text_field("data.", content, "revision"),
        prompt="" if kind.is_causal_lm else prompt_of(content, kind),
        target_length=_target_length(content, kind),
        test_share=_share(content.get("test-share", DataSpec.test_share)),
        **language_of(content, kind),
        questions=questions_of(content.get("questions"), folder),
    )
    if "glue-tasks" not in content:
        return _with_columns(common, content, kind, "data."), {}
    tasks = content["glue-tasks"]
    check_fields("data.glue-tasks.", tasks, set(KEYS["glue-task"].choices))
    for name, what in tasks.items():
        check_fields(f"data.glue-tasks.{name}.", what, _GLUE_TASK)
    return common, {
        name: _with_columns(common, what, kind, f"data.glue-tasks.{name}.")
        for name, what in tasks.items()
    }


def _with_columns(
    spec: DataSpec, content: Mapping[str, Any], kind: TaskInfo, where: str
) -> DataSpec:
    columns = _part(content, "columns") or {role: role for role in kind.roles}
    needed, more = set(kind.roles), set(kind.optional)
    if kind.is_causal_lm:
        needed, more = language_columns(columns)
    check_fields(f"{where}columns.", columns, needed, more)
    names = [text_field(f"{where}columns.", columns, role) for role in columns]
    if len(set(names)) < len(names):
        raise ValueError(f"{where}columns = {columns}: expected a column of its own for each role")
    splits = _part(content, "splits") or {"train": "train", "test": "test"}
    check_fields(f"{where}splits.", splits, {"train", "test"})
    test = splits["test"]
    tests = test if isinstance(test, dict) else {"test": test}
    if not tests or not all(isinstance(split, str) and split for split in tests.values()):
        raise ValueError(
            f"{where}splits.test = {test!r}: expected the name of a split, or several by name"
        )
    return replace(
        spec,
        subset=text_field(where, content, "subset"),
        train=text_field(f"{where}splits.", splits, "train"),
        tests=tuple((str(name), split) for name, split in tests.items()),
        columns=tuple(columns.items()),
        partition_by=text_field(where, content, "partition-by") or "label",
        labels=_labels(content.get("labels"), where, labelled="label" in columns),
    )


def _labels(labels: Any, where: str, *, labelled: bool) -> tuple[str, ...]:
    """Read the classes; none where there are no labels, or where the data tell them."""
    if labels is None or (labels == [] and not labelled):
        return ()
    texts = isinstance(labels, list) and all(isinstance(name, str) for name in labels)
    if not texts or not labels or not labelled:
        raise ValueError(
            f"{where}labels = {labels!r}: expected the names of the classes, as texts in quotation "
            "marks; or leave labels out, and the data tell them"
        )
    if twice := sorted({name for name in labels if labels.count(name) > 1}):
        raise ValueError(f"{where}labels: got {', '.join(twice)} twice; expected each class once")
    return tuple(labels)


def _target_length(content: Mapping[str, Any], kind: TaskInfo) -> int:
    """Read how many tokens an answer has, where the model writes one."""
    length = whole_field("data.", content, "target-length", kind.target_length)
    if bool(length) != bool(kind.target_length):
        expected = "1 at least" if kind.target_length else "none, since the model writes nothing"
        raise ValueError(f"data.target-length = {length}: expected {expected}; change it")
    return length


def _max_length(content: Mapping[str, Any], kind: TaskInfo) -> int:
    if "max-length" not in content:
        return kind.max_length
    if not kind.max_length:
        raise ValueError("data.max-length: the task has no texts; leave it out")
    return int(check_key("max-length", content["max-length"]))


def _source(where: str, content: Mapping[str, Any], known: tuple[str, ...]) -> str:
    source = text_field(where, content, "source") or "hub"
    check_choice(f"{where}source", source, known)
    return source


def _name(where: str, content: Mapping[str, Any], folder: Path, source: str) -> str:
    """Read an id of the hub, or the path of a folder, which may begin at the preset's own."""
    name = text_field(where, content, "name")
    if not name and source == "hub":
        raise ValueError(f"{where}name is missing; expected an id of the hub, or a folder")
    if name.startswith("~"):
        return str(Path(name).expanduser())
    here = name.startswith(".") or (bool(name) and (folder / name).is_dir())
    return str((folder / name).resolve()) if here else name


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(
            f"data.test-share = {value!r}: expected a number above 0 and below 1, such as 0.2"
        )
    return float(value)
