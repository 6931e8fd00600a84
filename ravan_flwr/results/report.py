"""Write the report of one run, or of several in the same charts: a page and a PNG of each picture.

The page is one file that needs no other and no script, light or dark as its reader's browser.
"""

import html
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ravan_flwr.files import write_atomically
from ravan_flwr.results.run_charts import comparison_charts, run_charts
from ravan_flwr.results.run_view import comparison_of, picture_of, title_of, view_of
from ravan_flwr.runs.console import megabytes
from ravan_flwr.runs.history import NoRoundError, RecordedRun, group_runs

log = logging.getLogger(__name__)

# Reasons, devices and versions come from clients, which are not trusted: everything is escaped that
# is not marked as HTML here.
_ENVIRONMENT = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.globals["megabytes"] = megabytes
_STYLE, _PAGE = (
    yaml.safe_load(Path(__file__).with_name("page.yaml").read_text(encoding="utf-8"))[part]
    for part in ("style", "page")
)
_TEMPLATE = _ENVIRONMENT.from_string(_PAGE)


def render(
    runs: Sequence[Mapping[str, Any]], title: str, *, comparison: Mapping[str, Any] | None = None,
    files: Sequence[str] = (),
) -> bytes:  # fmt: skip
    """Return the HTML page, which names the files beside it."""
    page = _TEMPLATE.render(
        runs=runs, title=title, comparison=comparison, files=files,
        style=Markup(_STYLE),  # noqa: S704 (a constant)
    )  # fmt: skip
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    return page.lstrip().encode(errors="backslashreplace")


def write_report(
    paths: Sequence[Path | str] | Path | str, folder: Path | str, *, spectrum: bool = False
) -> Path:
    """Write `index.html` and a PNG file for each picture; return the page's path.

    Pictures of an earlier report in the folder are removed. With `spectrum` the page also has the
    singular values of the runs' delta-weights.
    """
    folder, paths = Path(folder), [paths] if isinstance(paths, str | Path) else paths
    runs = _runs_with_rounds([Path(path) for path in paths])
    groups = group_runs(runs)
    several = len(runs) > 1
    compared = comparison_charts(groups)
    if spectrum:
        from ravan_flwr.results.spectrum import charts_of_runs  # noqa: PLC0415 (it imports torch)

        compared += charts_of_runs([run.path for run in runs])
    charts = [run_charts(run, f"run{n}-" if several else "") for n, run in enumerate(runs, start=1)]
    rows = {run.path: row for row, members in groups.items() for run in members}
    views = [view_of(run, row=rows[run.path]) for run in runs]  # before anything is drawn
    page = folder / "index.html"
    earlier = _files_beside(page)
    written = [path for chart in chain(compared, *charts) for path in chart.write(folder)]
    for path in earlier.difference(written):
        path.unlink(missing_ok=True)
    for view, group in zip(views, charts, strict=True):
        view["pictures"] = [*map(picture_of, group if several else [*compared, *group])]
    title = ", ".join(dict.fromkeys(title_of(run.config) for run in runs))
    comparison = None
    if several:
        comparison = comparison_of(groups) | {"pictures": [*map(picture_of, compared)]}
    files = [path.name for path in written]
    write_atomically(page, render(views, title, comparison=comparison, files=files))
    return page


def _files_beside(page: Path) -> set[Path]:
    """Return the pictures and tables that an earlier report wrote beside its page."""
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    found = re.search(r'<meta name="files" content="([^"]*)">', text)
    names = html.unescape(found[1]).split("/") if found else []
    return {page.with_name(name) for name in names if name.endswith((".png", ".csv"))}


def _runs_with_rounds(paths: Sequence[Path]) -> list[RecordedRun]:
    """Read the runs; of several, skip reports, and by name those without a finished round."""
    runs = []
    for path in paths:
        is_report = (path / "index.html").is_file() and not (path / "config.json").is_file()
        if is_report and len(paths) > 1:  # of an earlier `report runs/*` with its output in runs/
            continue
        try:
            runs.append(RecordedRun.read(path))
        except NoRoundError as error:
            if len(paths) == 1:
                raise
            log.warning("skipped: %s", error)
    if not runs:
        raise NoRoundError(
            f"report: none of {len(paths)} runs has a finished round, expected at least one; run "
            "one of them longer"
        )
    return runs
