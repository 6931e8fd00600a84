"""Read a YAML file that a user wrote, and check its parts.

A repeated key is an error; YAML loaders usually keep the second value. A part is a pydantic model.
Its errors give a field's description as the expected value.
"""

import re
from collections.abc import Hashable, Set
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ravan_flwr.config.key import check_choice, did_you_mean
from ravan_flwr.files import read_file

_MAX_SIZE = 2**20  # bytes of a file
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE = "tag:yaml.org,2002:merge"  # `<<`


class _Loader(yaml.SafeLoader):
    """A loader that rejects repeated keys in a mapping.

    It is a loader in Python: libyaml's ends the process if a file is nested too deeply.
    """


def _yaml_error(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[Hashable] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:
            continue
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, Hashable) and key in keys:
            raise _yaml_error(key_node, f"the key {key!r} is repeated")
        if isinstance(key, Hashable):
            keys.add(key)
    read: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return read


def _scalar(loader: Any, node: yaml.ScalarNode, tag: str) -> Any:
    """Return a value of that tag; raise a YAML error where PyYAML raises various others."""
    try:
        return yaml.SafeLoader.yaml_constructors[tag](loader, node)
    except (ValueError, LookupError, AttributeError, OverflowError):
        type_name = tag.rpartition(":")[2]
        raise _yaml_error(node, f"{str(node.value)[:40]!r} is no {type_name} of YAML") from None


# YAML 1.1 takes 3e-3, which has no point, for a text.
_Loader.add_implicit_resolver(_NUMBERS[1], re.compile(r"[-+]?\d+[eE][-+]?\d+$"), [*"-+0123456789"])
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
for _tag in (*_NUMBERS, "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp"):
    _Loader.add_constructor(_tag, partial(_scalar, tag=_tag))


def read_yaml(path: Path) -> Any:
    """Return a file's content; raise ValueError, with the line, if it is no YAML or no text."""
    try:
        return yaml.load(read_file(path, _MAX_SIZE).decode(), Loader=_Loader)  # noqa: S506 (safe)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        message = " ".join((error.problem or str(error)).split())
        raise ValueError(f"{path}{where}: {message}; expected YAML; correct the file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{path}: {message}; expected YAML in UTF-8; correct the file") from None
    except RecursionError:
        raise ValueError(
            f"{path}: it is nested too deeply, expected a few levels; correct the file"
        ) from None


TEXT = "a text; write it in quotation marks"
# For models with kebab-case names in a file, and without conversion of types.
KEBAB = ConfigDict(
    strict=True, populate_by_name=True, alias_generator=lambda name: name.replace("_", "-")
)


class Part(BaseModel):
    """The checked fields of a part of a file; an empty field has its default."""

    model_config: ClassVar = KEBAB | ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, where: str, content: Any) -> Self:
        """Return the checked content at `where`; raise ValueError that names the wrong field."""
        fields = {field.alias or "": field for field in cls.model_fields.values()}
        content = check_names(where, content, cls)
        try:
            return cls.model_validate(
                {k: v for k, v in content.items() if v is not None or fields[k].is_required()}
            )
        except ValidationError as error:
            first = error.errors()[0]
        name, field = f"{where}{first['loc'][0]}", fields[str(first["loc"][0])]
        if first["type"] == "literal_error":
            check_choice(name, first["input"], get_args(field.annotation))
        value = content[first["loc"][0]]
        raise ValueError(f"{name} = {value!r}: expected {field.description or TEXT}")


def check_names(where: str, content: Any, model: type[BaseModel]) -> dict[str, Any]:
    """Return a mapping with a model's fields; raise ValueError for missing or unknown ones."""
    fields = {field.alias or "": field.is_required() for field in model.model_fields.values()}
    return check_fields(where, content, {name for name in fields if fields[name]}, fields.keys())


def check_fields(
    where: str, content: Any, expected: Set[str], options: Set[str] = frozenset()
) -> dict[str, Any]:
    """Return a mapping, empty for None; raise ValueError for missing or unknown fields."""
    content = {} if content is None and not expected else content
    fields = sorted(expected | options)
    if not isinstance(content, dict):
        name = where.rstrip(".: ") or "the file"
        raise ValueError(f"{name} is no mapping, expected one with {fields}")
    for field in sorted(set(content) - expected - options, key=str):
        raise ValueError(
            f"{where}{field} is unknown{did_you_mean(field, fields)} Expected the fields {fields}"
        )
    for field in sorted(expected - set(content)):
        raise ValueError(f"{where}{field} is missing; expected the fields {fields}")
    return dict(content)


def free_fields(where: str, content: Any, expected: Set[str] = frozenset()) -> dict[str, Any]:
    """Return a mapping with any names, some of them required; empty for None."""
    names = {str(name) for name in content} if isinstance(content, dict) else set()
    return check_fields(where, content, expected if names else set(), names)
