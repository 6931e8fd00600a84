"""Write the live page of a run: one that needs no other, and runs one script of its own."""

import base64
import hashlib
import threading
import time
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ravan_flwr.reports.following import FollowedRun
from ravan_flwr.reports.live_template import CSS, PAGE, SCRIPT
from ravan_flwr.reports.live_view import view_of
from ravan_flwr.reports.template import CSS as REPORT_CSS
from ravan_flwr.runs.console import minutes

STYLE = REPORT_CSS + CSS

# Reasons, devices and versions come from clients, who may lie: all is escaped that is not marked as
# HTML here.
_ENVIRONMENT = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.globals["minutes"] = minutes


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Nothing from elsewhere, and of what is here the one script and the one style.
POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src {_hash_of(SCRIPT)}",
        f"style-src {_hash_of(STYLE)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)


class LivePage:
    """Keep the page of a run as it is now; it is made anew when something has changed."""

    def __init__(self, path: Path) -> None:
        self._run = FollowedRun(path)
        self._template = _ENVIRONMENT.from_string(PAGE)
        self._one_at_a_time = threading.Lock()
        self._version, self._made, self._page = "", 0.0, b""

    def version(self) -> str:
        """Return a text that is another one as soon as the page would be."""
        return hashlib.sha256(self._run.version().encode()).hexdigest()[:16]

    def get(self) -> bytes:
        """Return the page as it is now."""
        with self._one_at_a_time:
            version, now = self.version(), time.time()
            # Without the script, times on the page are those of the moment at which it was made.
            if version != self._version or now - self._made > 1:
                self._page = self._write(version, now)
                self._version, self._made = version, now
            return self._page

    def _write(self, version: str, now: float) -> bytes:
        name = self._run.path.name
        shown: dict[str, object]
        try:
            view = view_of(self._run.read())
            shown = {"problem": "", "heading": f"{view['now'].word}: {view['title']}", **view}
        except Exception as error:  # noqa: BLE001 (a damaged file ends no page: it may be mended)
            told = (
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
            shown = {"problem": told or "its files are damaged", "name": name, "heading": name}
        page = self._template.render(
            shown, version=version, at_now=now,
            style=Markup(STYLE), script=Markup(SCRIPT),  # noqa: S704 (constants)
        )  # fmt: skip
        return page.lstrip().encode(errors="backslashreplace")
