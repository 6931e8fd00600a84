"""Read a YAML file that a person wrote: what two lines say twice is an error, not the second.

A file is small, with all that its aliases and merge keys stand for.
"""

import itertools
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

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
    seen: set[Hashable] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:
            continue
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, Hashable) and key in seen:
            raise _wrong(key_node, f"{key!r} stands there twice")
        if isinstance(key, Hashable):
            seen.add(key)
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
        told = " ".join((error.problem or str(error)).split())
        raise ValueError(f"{path}{where}: {told}; expected YAML; correct the file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        told = " ".join(str(error).split())
        raise ValueError(f"{path}: {told}; expected YAML in UTF-8; correct the file") from None
    except RecursionError:
        raise ValueError(
            f"{path}: it is nested too deeply, expected a few levels; correct the file"
        ) from None
