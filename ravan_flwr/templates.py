"""Fill Jinja templates of files other than HTML, such as Markdown and YAML."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template


def fill_template(template: Path, filters: dict[str, Callable[[Any], str]], **values: Any) -> str:
    """Return a filled template; it must pass untrusted values through one of the filters."""
    return _compiled(template, *filters.items()).render(**values)


@lru_cache
def _compiled(template: Path, *filters: tuple[str, Callable[[Any], str]]) -> Template:
    environment = Environment(
        autoescape=False,  # noqa: S701 (that would escape for HTML)
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= dict(filters)
    return environment.from_string(template.read_text(encoding="utf-8"))
