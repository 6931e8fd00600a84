"""Fill the page of runs: one file that needs no other, light or dark like its reader.

The page of a run under way, served by `dashboard.py`, has one script of its own.
"""

import base64
import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ravan_flwr.reports.run_charts import comparison_charts, run_charts
from ravan_flwr.reports.run_view import picture_of, view_of
from ravan_flwr.reports.snapshot import FollowedRun
from ravan_flwr.reports.template import CSS, PAGE, SCRIPT
from ravan_flwr.runs.console import megabytes, minutes
from ravan_flwr.runs.history import RecordedRun, group_runs

# Reasons, devices and versions come from clients, who may lie: all is escaped that is not marked as
# HTML here.
_ENVIRONMENT = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.globals |= {"minutes": minutes, "megabytes": megabytes}
_TEMPLATE = _ENVIRONMENT.from_string(PAGE)


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Nothing from elsewhere, and of what is here the one script and the one style.
POLICY = (
    f"default-src 'none'; script-src {_hash_of(SCRIPT)}; style-src {_hash_of(CSS)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def render(
    runs: Sequence[Mapping[str, Any]], title: str, *, comparison: Mapping[str, Any] | None = None,
    version: str = "", problem: str = "", now: float = 0.0,
) -> bytes:  # fmt: skip
    """Fill the page; with a `version` it is one that renews itself."""
    page = _TEMPLATE.render(
        runs=runs, title=title, comparison=comparison, version=version, problem=problem, now=now,
        style=Markup(CSS), script=Markup(SCRIPT),  # noqa: S704 (constants)
    )  # fmt: skip
    # JSON can hold halves of characters, which are no text in UTF-8.
    return page.lstrip().encode(errors="backslashreplace")


class LivePage:
    """Keep the page of a run as it is now; it is made anew when something has changed.

    Pictures cost more than all else: they are drawn during a tenth of the time at most, so that a
    training beside them keeps its cores.
    """

    def __init__(self, path: Path) -> None:
        self._run = FollowedRun(path)
        self._one_at_a_time = threading.Lock()
        self._version, self._made, self._page = "", 0.0, b""
        self._pictures: list[dict[str, Any]] = []
        self._drawn: object = None  # what is in the pictures
        self._stale, self._rest_until = False, 0.0

    def version(self) -> str:
        """Return a text that is another one as soon as the page would be."""
        due = self._stale and time.time() >= self._rest_until
        return self._version_of(self._run.version() + " due" * due)

    @staticmethod
    def _version_of(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def get(self) -> bytes:
        """Return the page as it is now."""
        with self._one_at_a_time:
            files, now = self._run.version(), time.time()
            # Without the script, times on the page are those of the moment at which it was made.
            if self.version() != self._version or now - self._made > 1:
                self._version, self._made = self._version_of(files), now
                self._page = self._write(now)
            return self._page

    def _write(self, now: float) -> bytes:
        try:
            seen = self._run.read()
            self._draw(seen.run, now)
            view = view_of(seen, self._pictures)
        except Exception as error:  # noqa: BLE001 (a damaged file ends no page: it may be mended)
            told = f"{type(error).__name__}: {error}"
            told = str(error) if isinstance(error, ValueError) else told
            name = self._run.path.name
            problem = told or "its files are damaged"
            return render([], name, version=self._version, problem=problem)
        return render([view], view["title"], version=self._version, now=now)

    def _draw(self, run: RecordedRun, now: float) -> None:
        """Draw the pictures anew, if there is something new in them and it is time."""
        content = (run.rounds[-1:], run.summary)
        self._stale = content != self._drawn
        if not self._stale or now < self._rest_until:
            return
        began, charts = time.monotonic(), []
        if run.rounds and run.config:
            charts = [*comparison_charts(group_runs([run])), *run_charts(run)]
        self._pictures = [picture_of(chart) for chart in charts]
        self._drawn, self._stale = content, False
        self._rest_until = now + 10 * (time.monotonic() - began)
