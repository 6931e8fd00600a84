"""Check what a preset says of its data: columns, splits, labels, prompts and questions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from pydantic import Field

from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.yaml_file import Part, check_fields
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks import TASKS, TaskInfo


class GlueTask(Part):
    """Say where the examples are, and what their columns are for."""

    subset: str = ""
    columns: Any = None
    labels: list[str] | None = Field(
        None,
        description="the names of the classes, as texts in quotation marks; or leave labels out, "
        "and the data tell them",
    )
    splits: Any = None


class Data(GlueTask):
    """Hold `data` of a preset."""

    source: Literal["hub", "sklearn-digits"] = "hub"
    name: str = ""
    revision: str = ""
    test_share: float = Field(
        DataSpec.test_share, gt=0, lt=1, description="a number above 0 and below 1, such as 0.2"
    )
    partition_by: str = "label"
    prompt: str | list[str] = Field(
        "", description="a text, or several as a list; write them in quotation marks"
    )
    max_length: Any = None
    target_length: int | None = Field(
        None, ge=0, le=65_536, description="a whole number of at most 65536"
    )
    glue_tasks: Any = None
    # Of a language model.
    chat_template: str = ""
    overlong: Literal["cut", "drop"] = "cut"
    loss_on: Literal["answers", "all"] = "answers"


def read_data(
    content: Any, kind: TaskInfo, folder: Path
) -> tuple[DataSpec, dict[str, DataSpec], int]:
    """Return the data, those of each GLUE task where there are several, and a text's tokens."""
    data = Data.read("data.", content)
    columns = _columns("data.", data, kind)
    for field in {field for other in TASKS.values() for field in other.fields} - {*kind.fields}:
        if field in content:
            having = " or ".join(name for name, other in TASKS.items() if field in other.fields)
            raise ValueError(f"data.{field}: only task {having} has it; leave it out")
    common = DataSpec(
        source=data.source,
        name=place_beside(data.name, folder),
        revision=data.revision,
        prompt="" if kind.is_causal_lm else _prompt(data, kind),
        target_length=_target_length(data, kind),
        test_share=data.test_share,
        prompts=_prompts(data, columns, kind) if kind.is_causal_lm else (),
        chat_template=data.chat_template,
        overlong=data.overlong,
        loss_on=data.loss_on,
    )
    if not data.name and data.source == "hub":
        raise ValueError("data.name is missing; expected an id of the hub, or a folder")
    if data.glue_tasks is None:
        spec = _with_columns(common, data, columns, "data.")
        return replace(spec, partition_by=data.partition_by or "label"), {}, _tokens(data, kind)
    check_fields("data.glue-tasks.", data.glue_tasks, set(KEYS["glue-task"].choices))
    tasks = {}
    for name, what in data.glue_tasks.items():
        where = f"data.glue-tasks.{name}."
        task = GlueTask.read(where, what)
        tasks[name] = _with_columns(common, task, _columns(where, task, kind), where)
    return common, tasks, _tokens(data, kind)


def place_beside(name: str, folder: Path) -> str:
    """Return an id of the hub as it is, and the path of what lies beside the preset whole."""
    if name.startswith("~"):
        return str(Path(name).expanduser())
    here = name.startswith(".") or (bool(name) and (folder / name).exists())
    return str((folder / name).resolve()) if here else name


def _tokens(data: Data, kind: TaskInfo) -> int:
    if data.max_length is None:
        return kind.max_length
    if not kind.max_length:
        raise ValueError("data.max-length: the task has no texts; leave it out")
    return int(KEYS["max-length"].checked("data.max-length", data.max_length))


def _target_length(data: Data, kind: TaskInfo) -> int:
    """Read how many tokens an answer has, where the model writes one."""
    length = kind.target_length if data.target_length is None else data.target_length
    if bool(length) != bool(kind.target_length):
        expected = "1 at least" if kind.target_length else "none, since the model writes nothing"
        raise ValueError(f"data.target-length = {length}: expected {expected}; change it")
    return length


def _columns(where: str, part: GlueTask, kind: TaskInfo) -> dict[str, str]:
    """Read the columns by role; those of a language model are messages, or any with an answer."""
    columns = {role: role for role in kind.roles} if part.columns is None else part.columns
    needed, more = set(kind.roles), set(kind.optional)
    talks = "messages" in kind.roles and "messages" in columns
    if kind.is_causal_lm and isinstance(columns, dict) and not talks:
        if not set(kind.answers) <= set(columns):
            written = ", ".join(f"{role}: COLUMN" for role in ("prompt", *kind.answers))
            raise ValueError(
                f"data.columns = {columns}: "
                + (
                    "expected messages, a column of conversations, or a prompt with the completion "
                    "that is learned; write {messages: COLUMN}, or "
                    if "messages" in kind.roles
                    else f"expected {' and '.join(kind.answers)}, beside a prompt, or alone as "
                    "whole conversations; write "
                )
                + f"{{{written}}}"
            )
        needed, more = set(kind.answers), set(map(str, columns))
    check_fields(f"{where}columns.", columns, needed, more)
    for role, column in columns.items():
        if not isinstance(column, str):
            raise ValueError(
                f"{where}columns.{role} = {column!r}: expected a text; write it in quotes"
            )
    if len(set(columns.values())) < len(columns):
        raise ValueError(
            f"{where}columns = {columns}: expected a column of its own for each role; correct it"
        )
    return dict(columns)


def _with_columns(
    spec: DataSpec, part: GlueTask, columns: Mapping[str, str], where: str
) -> DataSpec:
    splits = {"train": "train", "test": "test"} if part.splits is None else part.splits
    check_fields(f"{where}splits.", splits, {"train", "test"})
    test = splits["test"]
    tests = test if isinstance(test, dict) else {"test": test}
    if not tests or not all(isinstance(name, str) and name for name in tests.values()):
        raise ValueError(
            f"{where}splits.test = {test!r}: expected the name of a split, or several by name"
        )
    if not isinstance(splits["train"], str):
        raise ValueError(f"{where}splits.train = {splits['train']!r}: expected the name of a split")
    return replace(
        spec,
        subset=part.subset,
        train=splits["train"],
        tests=tuple((str(name), split) for name, split in tests.items()),
        columns=tuple(columns.items()),
        labels=_labels(part, where, labelled="label" in columns),
    )


def _labels(part: GlueTask, where: str, *, labelled: bool) -> tuple[str, ...]:
    """Read the classes; none where there are no labels, or where the data tell them."""
    labels = part.labels
    if labels is None or (labels == [] and not labelled):
        return ()
    if not labels or not labelled:
        expected = GlueTask.model_fields["labels"].description
        raise ValueError(f"{where}labels = {labels!r}: expected {expected}")
    if twice := sorted({name for name in labels if labels.count(name) > 1}):
        raise ValueError(f"{where}labels: got {', '.join(twice)} twice; expected each class once")
    return tuple(labels)


def _prompt(data: Data, kind: TaskInfo) -> str:
    """Read the prompt, in which the names of columns may stand in braces."""
    if not isinstance(data.prompt, str):
        raise ValueError(f"data.prompt = {data.prompt!r}: expected a text; write it in quotes")
    if data.prompt and not kind.prompt:
        raise ValueError("data.prompt: the model of this task takes no prompt; leave it out")
    given = [role for role in kind.roles if role not in ("label", "answers")]
    if data.prompt:
        _check_braces(data.prompt, given)
    return data.prompt or kind.prompt


def _check_braces(prompt: str, given: Sequence[str], field: str = "data.prompt") -> None:
    """Refuse a prompt with other things in braces than columns, or with none at all."""
    try:
        prompt.format(**dict.fromkeys(given, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        known = ", ".join(f"{{{role}}}" for role in given)
        raise ValueError(
            f"{field} = {prompt!r}: {type(error).__name__}: {error}; expected braces around "
            f"{known} alone; write others twice"
        ) from None
    if not _used(prompt) & set(given):
        raise ValueError(
            f"{field} = {prompt!r}: it has no example in it, expected {{{given[0]}}} somewhere"
        )


def _used(*prompts: str) -> set[str]:
    """List what stands in braces."""
    return {role for prompt in prompts for _, role, *_ in Formatter().parse(prompt) if role}


def _prompts(data: Data, columns: Mapping[str, str], kind: TaskInfo) -> tuple[str, ...]:
    """Read one prompt, or several, of which the first serves that an example has all columns of.

    There is none where the columns have whole conversations.
    """
    given = [role for role in columns if role not in kind.answers]
    pairs = len(kind.answers) > 1  # which are conversations if there is no other column
    if not given if pairs else "messages" in columns:
        if "prompt" in data.model_fields_set:
            has = " and ".join(given or kind.answers)
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
    told = data.prompt if "prompt" in data.model_fields_set else "{prompt}"
    prompts = told if isinstance(told, list) else [told]
    if not prompts or not all(prompts):
        expected = Data.model_fields["prompt"].description
        raise ValueError(f"data.prompt = {told!r}: expected {expected}")
    if not given:
        raise ValueError(
            f"data.columns = {dict(columns)}: expected a column for a prompt beside that for the "
            "completion; name one, as prompt: COLUMN"
        )
    for prompt in prompts:
        _check_braces(prompt, given)
    if idle := [role for role in given if role not in _used(*prompts)]:
        raise ValueError(
            f"data.columns: {', '.join(idle)} stands in no prompt; expected {{{idle[0]}}} in one, "
            "or another name for the column prompt; correct it"
        )
    return tuple(prompts)
