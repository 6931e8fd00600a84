"""Read a YAML file that a person wrote: what two lines say twice is an error, not the second."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"  # `<<`


class _Loader(yaml.SafeLoader):
    """Refuse a key that stands twice in one mapping.

    In Python: libyaml's loader ends the process where a file is nested too deeply.
    """


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Hashable] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:
            continue
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, Hashable) and key in seen:
            raise yaml.constructor.ConstructorError(
                problem=f"{key!r} stands there twice", problem_mark=key_node.start_mark
            )
        if isinstance(key, Hashable):
            seen.add(key)
    read: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return read


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> Any:
    """Read a file; ValueError, which says where, if it is no YAML or no text."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 (it is safe)
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
