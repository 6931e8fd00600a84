"""Read a YAML file that a person wrote, and check its parts.

What two lines say twice is an error, not the second. A file is small, with all that its aliases and
merge keys stand for. A part is a pydantic model, whose errors say what to do: a field's description
says what it is expected to hold.
"""

import itertools
from collections.abc import Hashable, Set
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ravan_flwr.config.key import check_choice, did_you_mean
from ravan_flwr.files import read_file

_MOST = 2**20  # bytes of a file; characters, and parts, of what its aliases make of it
_DIGITS = 100  # of a number: the time to read one in YAML's base 60 is the square of its length
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE = "tag:yaml.org,2002:merge"  # `<<`


class _Loader(yaml.SafeLoader):
    """Refuse a key that stands twice in one mapping, and what expands to far more than it is.

    In Python: libyaml's loader ends the process where a file is nested too deeply.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _expanded(node, {})
        return node


def _expanded(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Count the characters and parts of a node with all aliases written out."""
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = _MOST  # if an alias within it stands for the whole
    size = 1
    if isinstance(node, yaml.ScalarNode):
        size += len(node.value)
        if node.tag in _NUMBERS and len(node.value) > _DIGITS:
            raise _wrong(node, f"a number of {len(node.value):,} characters")
    else:
        pairs = isinstance(node, yaml.MappingNode)
        for part in itertools.chain.from_iterable(node.value) if pairs else node.value:
            size += _expanded(part, sizes)
    if size > _MOST:
        raise _wrong(node, f"its aliases make it larger than {_MOST:,} characters")
    sizes[id(node)] = size
    return size


def _wrong(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[Hashable] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:
            continue
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, Hashable) and key in keys:
            raise _wrong(key_node, f"{key!r} stands there twice")
        if isinstance(key, Hashable):
            keys.add(key)
    read: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return read


def _scalar(loader: Any, node: yaml.ScalarNode, tag: str) -> Any:
    """Read a value of that tag; PyYAML fails in its own ways at one that is not written so."""
    try:
        return yaml.SafeLoader.yaml_constructors[tag](loader, node)
    except (ValueError, LookupError, AttributeError, OverflowError):
        named = tag.rpartition(":")[2]
        raise _wrong(node, f"{str(node.value)[:40]!r} is no {named} of YAML") from None


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
for _tag in (*_NUMBERS, "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp"):
    _Loader.add_constructor(_tag, partial(_scalar, tag=_tag))


def read_yaml(path: Path) -> Any:
    """Read a file; ValueError, which says where, if it is no YAML or no text."""
    try:
        return yaml.load(read_file(path, _MOST).decode(), Loader=_Loader)  # noqa: S506 (it is safe)
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
# Of models whose fields are in kebab-case in a file, and of the type that they say.
KEBAB = ConfigDict(
    strict=True, populate_by_name=True, alias_generator=lambda name: name.replace("_", "-")
)


class Part(BaseModel):
    """Hold the fields of a part of a file, checked; a field that is left empty has its default."""

    model_config: ClassVar = KEBAB | ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, where: str, content: Any) -> Self:
        """Check the content, which is found at `where`; ValueError that names a field."""
        fields = {field.alias or "": field for field in cls.model_fields.values()}
        required = {name for name, field in fields.items() if field.is_required()}
        content = check_fields(where, content, required, fields.keys())
        try:
            return cls.model_validate(
                {k: v for k, v in content.items() if v is not None or k in required}
            )
        except ValidationError as error:
            first = error.errors()[0]
        name, field = f"{where}{first['loc'][0]}", fields[str(first["loc"][0])]
        if first["type"] == "literal_error":
            check_choice(name, first["input"], get_args(field.annotation))
        value = content[first["loc"][0]]
        raise ValueError(f"{name} = {value!r}: expected {field.description or TEXT}")


def check_fields(
    where: str, content: Any, expected: Set[str], options: Set[str] = frozenset()
) -> dict[str, Any]:
    """Return a mapping; ValueError unless it has these fields, and no others; None is empty."""
    content = {} if content is None and not expected else content
    fields = sorted(expected | options)
    if not isinstance(content, dict):
        what = where.removesuffix(".") or "the file"
        raise ValueError(f"{what} is no mapping, expected one with {fields}")
    for field in sorted(set(content) - expected - options, key=str):
        raise ValueError(
            f"{where}{field} is unknown{did_you_mean(field, fields)} Expected the fields {fields}"
        )
    for field in sorted(expected - set(content)):
        raise ValueError(f"{where}{field} is missing; expected the fields {fields}")
    return dict(content)


def free_fields(where: str, content: Any, expected: Set[str] = frozenset()) -> dict[str, Any]:
    """Return a mapping with names of any kind, of which some must be there; empty for None."""
    names = {str(name) for name in content} if isinstance(content, dict) else set()
    return check_fields(where, content, expected if names else set(), names)
