"""Check the data of a preset: columns, splits, labels and prompts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import Field

from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.yaml_file import Part, check_fields, free_fields
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks import TASKS, TaskInfo

Name = Annotated[str, Field(min_length=1)]


class Splits(Part):
    """The split that is partitioned among clients, and the server's test splits."""

    train: Name = Field(description="the name of a split")
    test: Name | Annotated[dict[str, Name], Field(min_length=1)] = Field(
        description="the name of a split, or several by name"
    )


class Data(Part):
    """The field `data` of a preset."""

    source: Literal["hub", "sklearn-digits"] = "hub"
    name: str = ""
    subset: str = ""
    revision: str = ""
    columns: Any = None
    splits: Any = None
    labels: list[str] | None = Field(
        None,
        description="the names of the classes, as texts in quotation marks; or leave labels out, "
        "to take them from the data",
    )
    test_share: float = Field(
        DataSpec.test_share, gt=0, lt=1, description="a number above 0 and below 1, such as 0.2"
    )
    partition_by: str = "label"
    glue_tasks: Any = None
    # Fields of some tasks only.
    max_length: int | None = Field(
        None, ge=1, le=int(KEYS["max-length"].high), description=KEYS["max-length"].allowed
    )
    target_length: int | None = Field(
        None, ge=1, le=65_536, description="a whole number at least 1 and at most 65536"
    )
    prompt: Name | Annotated[list[Name], Field(min_length=1)] | None = Field(
        None, description="a text, or several as a list; write them in quotation marks"
    )
    chat_template: str = ""
    overlong: Literal["cut", "drop"] = "cut"
    loss_on: Literal["answers", "all"] = "answers"
    beta: float = Field(DataSpec.beta, gt=0, le=100, description="a number above 0 and at most 100")


def read_data(
    content: Any, task_info: TaskInfo, folder: Path
) -> tuple[DataSpec, dict[str, DataSpec], int]:
    """Return the data, those of each GLUE task if there are several, and the tokens of a text."""
    data = Data.read("data.", content)
    length = task_info.max_length if data.max_length is None else data.max_length
    if data.glue_tasks is None:
        return _read("data.", data, task_info, folder), {}, length
    names = set(KEYS["glue-task"].choices)
    tasks = {}
    for name, fields in check_fields("data.glue-tasks.", data.glue_tasks, names).items():
        where = f"data.glue-tasks.{name}."
        task = Data.read(where, content | free_fields(where, fields))
        tasks[name] = _read(where, task, task_info, folder)
    return next(iter(tasks.values())), tasks, length


def _read(where: str, data: Data, task_info: TaskInfo, folder: Path) -> DataSpec:
    """Return the data; raise ValueError if fields contradict each other or the task."""
    for field in data.model_fields_set:
        tasks = [name for name, task in TASKS.items() if field in task.data_fields]
        if tasks and field not in task_info.data_fields:
            name = field.replace("_", "-")
            raise ValueError(f"{where}{name}: only task {' or '.join(tasks)} has it; leave it out")
    if not data.name and data.source == "hub":
        raise ValueError(f"{where}name is missing; expected an id of the hub, or a folder")
    default = {"train": "train", "test": "test"}
    splits = Splits.read(f"{where}splits.", default if data.splits is None else data.splits)
    tests = splits.test if isinstance(splits.test, dict) else {"test": splits.test}
    columns = _columns(where, data, task_info)
    labels = data.labels or []
    if data.labels is not None and bool(labels) != ("label" in columns):
        expected = Data.model_fields["labels"].description
        raise ValueError(f"{where}labels = {labels!r}: expected {expected}")
    if splits.train in tests.values():
        raise ValueError(
            f"{where}splits: got {splits.train!r} to train on and as a test, expected another "
            "split as the test; give the name of another split, or leave splits out"
        )
    names = [name.strip() for name in labels]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"{where}labels: got {', '.join(repeated)} twice; expected each class once"
        )
    return DataSpec(
        source=data.source,
        name=resolve_name(data.name, folder),
        subset=data.subset,
        revision=data.revision,
        train=splits.train,
        tests=tuple(tests.items()),
        test_share=data.test_share,
        columns=tuple(columns.items()),
        partition_by=data.partition_by or "label",
        labels=tuple(labels),
        prompt="" if task_info.is_causal_lm else _prompt(data, task_info),
        target_length=data.target_length or task_info.target_length,
        prompts=_prompts(data, columns, task_info) if task_info.is_causal_lm else (),
        chat_template=data.chat_template,
        overlong=data.overlong,
        loss_on=data.loss_on,
        beta=data.beta,
    )


def resolve_name(name: str, folder: Path) -> str:
    """Return an id of the hub unchanged, and a path, relative to `folder`, as an absolute path."""
    if name.startswith("~"):
        return str(Path(name).expanduser())
    is_path = name.startswith(".") or (bool(name) and (folder / name).exists())
    return str((folder / name).resolve()) if is_path else name


def _columns(where: str, data: Data, task_info: TaskInfo) -> dict[str, str]:
    """Return the columns by role; a language model has messages, or any columns with an answer."""
    columns = {role: role for role in task_info.roles} if data.columns is None else data.columns
    needed, options = set(task_info.roles), set(task_info.optional)
    conversations = "messages" in task_info.roles and "messages" in columns
    if task_info.is_causal_lm and isinstance(columns, dict) and not conversations:
        if not set(task_info.answers) <= set(columns):
            either = (
                "messages, a column of conversations, or " if "messages" in task_info.roles else ""
            )
            example = ", ".join(f"{role}: COLUMN" for role in ("prompt", *task_info.answers))
            raise ValueError(
                f"{where}columns = {columns}: expected {either}a prompt with "
                f"{' and '.join(task_info.answers)}; write {{{example}}}"
            )
        needed, options = set(task_info.answers), set(map(str, columns))
    columns = check_fields(f"{where}columns.", columns, needed, options)
    for role, column in columns.items():
        if not isinstance(column, str):
            raise ValueError(
                f"{where}columns.{role} = {column!r}: expected a text; write it in quotes"
            )
    if len(set(columns.values())) < len(columns):
        raise ValueError(
            f"{where}columns = {columns}: expected a column of its own for each role; rename one"
        )
    return columns


def _prompt(data: Data, task_info: TaskInfo) -> str:
    """Return the prompt, which may contain the names of columns in braces."""
    if data.prompt is None:
        return task_info.prompt
    if not isinstance(data.prompt, str):
        raise ValueError(f"data.prompt = {data.prompt!r}: expected a text; write it in quotes")
    _check_braces(
        data.prompt, [role for role in task_info.roles if role not in ("label", "answers")]
    )
    return data.prompt


def _check_braces(prompt: str, roles: Sequence[str]) -> None:
    """Raise ValueError unless a prompt's braces hold columns only, and at least one."""
    try:
        fields = _in_braces(prompt)
        if fields <= set(roles):
            prompt.format(**dict.fromkeys(roles, ""))
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        fields = {str(error)}
    if not fields or fields - set(roles):
        names = ", ".join(f"{{{role}}}" for role in roles)
        raise ValueError(
            f"data.prompt = {prompt!r}: got {', '.join(sorted(fields)) or 'no column'}, expected "
            f"braces around {names} alone, and around one at least; write others twice"
        )


def _in_braces(*prompts: str) -> set[str]:
    """Return the names in braces."""
    return {role for prompt in prompts for _, role, *_ in Formatter().parse(prompt) if role}


def _prompts(data: Data, columns: Mapping[str, str], task_info: TaskInfo) -> tuple[str, ...]:
    """Return the prompts; an example uses the first whose columns it all has.

    There are none if the columns have whole conversations.
    """
    roles = [role for role in columns if role not in task_info.answers]
    pairs = len(task_info.answers) > 1  # they are conversations if there is no other column
    if not roles if pairs else "messages" in columns:
        if data.prompt is not None:
            has = " and ".join(roles or task_info.answers)
            raise ValueError(
                f"data.prompt: conversations (data.columns has {has}) are written by the chat "
                "template; leave it out, or name a column for a prompt"
            )
        return ()
    if data.chat_template and not pairs:
        raise ValueError(
            "data.chat-template: it writes the column messages, which data.columns has not; leave "
            "it out"
        )
    if not roles:
        raise ValueError(
            f"data.columns = {dict(columns)}: expected a column for a prompt beside that for the "
            "completion; add it, as prompt: COLUMN"
        )
    given = data.prompt or "{prompt}"
    prompts = (given,) if isinstance(given, str) else tuple(given)
    for prompt in prompts:
        _check_braces(prompt, roles)
    if unused := [role for role in roles if role not in _in_braces(*prompts)]:
        raise ValueError(
            f"data.columns: {', '.join(unused)} is in no prompt; expected {{{unused[0]}}} in a "
            "prompt, or another name for the column prompt"
        )
    return prompts
