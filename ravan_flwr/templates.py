"""Fill templates of files that are no HTML, such as Markdown and YAML."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined


def filled(template: Path, filters: dict[str, Callable[[Any], str]], **values: Any) -> str:
    """Fill a template; what comes from outside must go through one of the filters."""
    environment = Environment(
        autoescape=False,  # noqa: S701 (that would escape for HTML)
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    return environment.from_string(template.read_text(encoding="utf-8")).render(**values)
