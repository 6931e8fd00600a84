"""Define a preset: a task with its model, data and settings; check its file.

`task`, `model` and `data` are required. All other defaults are those of the keys (`preset=` in
keys.py) and of the fields here; docs/reference.md lists them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ravan_flwr.config.key import AUTO, check_choice
from ravan_flwr.config.keys import KEYS, RUN, check_key
from ravan_flwr.config.preset_data import read_data, resolve_name
from ravan_flwr.config.yaml_file import Part, check_fields, free_fields
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import DataSpec, ModelSpec, Scalar, join_list, read_targets
from ravan_flwr.tasks import TASKS, TaskInfo

RATES_BY = ("lora-rank", "partition", "classifier")  # keys of learning rates
LORA_RANK = {"lower": 8, "higher": 16}  # by parameter budget


class _Model(Part):
    name: str
    source: Literal["hub", "bundled"] = "hub"
    revision: str = ""
    shape: Any = None
    targets: Annotated[str, BeforeValidator(join_list)] = Field(
        "", description="ends of layers' names, as a list or a text with commas between"
    )


@dataclass(frozen=True, eq=False)
class Preset:
    """A preset's file, checked, with a default for each field that it omits."""

    path: Path
    task: str
    model: ModelSpec
    other_models: dict[str, ModelSpec]  # that the key `model` may name
    data: DataSpec
    glue_tasks: dict[str, DataSpec]  # empty but in glue-llama; the first is `data`
    max_length: int  # tokens of a text; 0 without texts
    run: dict[str, Any]
    lora_rank: dict[str, int]  # by parameter budget
    ranks: dict[str, dict[str, int]]  # parameter budget -> method -> rank
    rates: dict[str, Any]  # method -> a number, or a mapping by the values of `RATES_BY`

    @classmethod
    def read(cls, path: Path, content: Any) -> "Preset":
        """Return the preset in a file's content; raise ValueError if it is not valid."""
        needed = {"task", "model", "data"}
        options = {"run", "parameter-budgets", "learning-rate", "other-models"}
        file: dict[str, Any] = dict.fromkeys(options) | check_fields("", content, needed, options)
        check_choice("task", str(file["task"]), TASKS)
        task_info, folder = TASKS[file["task"]], path.parent
        other_models = free_fields("other-models.", file["other-models"])
        rates = check_fields("learning-rate.", file["learning-rate"], set(), METHODS.keys())
        _check_rates(rates)
        lora_rank, ranks = _read_budgets(file["parameter-budgets"])
        data, glue_tasks, max_length = read_data(_expanded(file["data"]), task_info, folder)
        return cls(
            path=path,
            task=file["task"],
            model=_read_model("model.", file["model"], folder),
            other_models={
                name: _read_model(f"other-models.{name}.", model, folder)
                for name, model in other_models.items()
            },
            data=data,
            glue_tasks=glue_tasks,
            max_length=max_length,
            run=_read_run(file["run"], task_info),
            lora_rank=lora_rank,
            ranks=ranks,
            rates=rates,
        )

    @property
    def name(self) -> str:
        """Return the file's name without its ending."""
        return self.path.stem

    def choose_data(self, glue_task: str) -> DataSpec:
        """Return the data, or those of a GLUE task where the preset has several."""
        if glue_task == AUTO:
            return self.data
        if not self.glue_tasks:
            raise ValueError(
                f"glue-task = {glue_task!r}: {self.path} has no GLUE tasks, expected 'auto'; leave "
                "it out, or set preset=glue-llama"
            )
        return self.glue_tasks[glue_task]

    def learning_rate(self, method: str, values: Mapping[str, Any]) -> float:
        """Return the learning rate of a method, which may depend on other keys' values."""
        rate = self.rates.get(method, METHODS[method].learning_rate)
        for key in RATES_BY:
            if isinstance(rate, dict):
                word = values[key].partition(":")[0] if KEYS[key].variants else values[key]
                if key == "partition" and word not in ("iid", *rate):
                    word = "dirichlet-by-client"  # stands for all other non-IID partitions
                rate = rate.get(word, rate)
        if isinstance(rate, dict):
            settings = "".join(f", {key} {values[key]!r}" for key in RATES_BY)
            raise ValueError(
                f"{self.path} has no learning rate for method {method!r}{settings}; give one with "
                "learning-rate=..."
            )
        return float(rate)


def run_defaults(task_info: TaskInfo) -> dict[str, Scalar]:
    """Return the settings of a task's run where the preset sets none."""
    by_task: dict[str, Scalar] = {} if "label" in task_info.roles else {"partition": "iid"}
    if task_info.target_length:  # the pretrained head answers: there is no classifier to train
        by_task["classifier"] = "frozen"
    return RUN | by_task


def _expanded(content: Any) -> Any:
    """Return the mapping that `model: NAME` or `data: NAME` abbreviates."""
    return {"name": content} if isinstance(content, str) else content


def _read_run(run: Any, task_info: TaskInfo) -> dict[str, Any]:
    run = check_fields("run.", run, set(), RUN.keys())
    settings = {key: value for key, value in run.items() if value != AUTO}
    values = run_defaults(task_info) | settings
    if str(values["partition"]).startswith("natural"):  # the data determine the number
        values["num-clients"] = settings.get("num-clients")
    clients = values.pop("num-clients")
    if clients is not None and (type(clients) is not int or clients < 1):
        raise ValueError(f"run.num-clients = {clients!r}: expected a whole number at least 1")
    return {key: check_key(key, value) for key, value in values.items()} | {"num-clients": clients}


def _read_budgets(budgets: Any) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Return each budget's LoRA rank, by default in the ratio 1:2, and its ranks by method."""
    budgets = check_fields("parameter-budgets.", budgets, set(), LORA_RANK.keys())
    for name, ranks in budgets.items():
        check_fields(f"parameter-budgets.{name}.", ranks, {"lora-rank"}, METHODS.keys() - {"full"})
        for rank in ranks.values():
            check_key("rank", rank)
    lora_ranks = {name: ranks["lora-rank"] for name, ranks in budgets.items()}
    default = max(1, lora_ranks["higher"] // 2) if "higher" in lora_ranks else LORA_RANK["lower"]
    lower = lora_ranks.get("lower", default)
    return {"lower": lower, "higher": lora_ranks.get("higher", 2 * lower)}, {
        name: {k: v for k, v in budgets.get(name, {}).items() if k != "lora-rank"}
        for name in LORA_RANK
    }


def _check_rates(rates: dict[str, Any], by: Sequence[str] = RATES_BY) -> None:
    """Raise ValueError unless each rate is a number, or a mapping by values of `RATES_BY`."""
    for rate in rates.values():
        if not isinstance(rate, dict):
            check_key("learning-rate", rate)
            continue
        matching = [key for key in by if {*rate} <= {*KEYS[key].choices, *KEYS[key].variants}]
        if not (rate and matching):
            raise ValueError(
                f"learning-rate: got {rate}, expected a number, or numbers by the values of "
                f"{', '.join(RATES_BY)}, of several in this order"
            )
        _check_rates(rate, by[by.index(matching[0]) + 1 :])


def _read_model(where: str, content: Any, folder: Path) -> ModelSpec:
    model = _Model.read(where, _expanded(content))
    shape = free_fields(f"{where}shape.", model.shape, {"model_type"})
    if not isinstance(shape.get("model_type", ""), str):
        raise ValueError(f"{where}shape.model_type = {shape['model_type']!r}: expected a text")
    if not model.name:
        raise ValueError(f"{where}name is missing; expected an id of the hub, or a folder")
    return ModelSpec(
        model.source,
        resolve_name(model.name, folder),
        model.revision,
        tuple(shape.items()),
        read_targets(model.targets) if model.targets else (),
    )
