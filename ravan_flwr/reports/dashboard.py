"""Serve the dashboard: the page of one run, on this machine's loopback interface.

Other pages in the user's browser can send requests to this server, too. It therefore answers only
GET and HEAD requests whose Host is a name of loopback; else any site could resolve its own name to
this machine and read the answers (DNS rebinding). Its headers forbid other pages to embed it.
"""

import hashlib
import re
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ravan_flwr.reports import PORT
from ravan_flwr.reports.report import POLICY, render
from ravan_flwr.reports.run_charts import comparison_charts, run_charts
from ravan_flwr.reports.run_view import RunSnapshot, picture_of, version_of, view_of
from ravan_flwr.runs.console import write_stdout
from ravan_flwr.runs.directory import RoundsFile
from ravan_flwr.runs.history import RecordedRun, group_runs, open_run

HOST = "127.0.0.1"
REQUEST_TIMEOUT = 10.0  # seconds to wait for a request

# Host headers that name this machine, with any port, such as that of a tunnel.
_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.ASCII | re.IGNORECASE)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class DashboardPage:
    """The page of a run, which is rendered again when something has changed.

    Drawing pictures is the largest cost. It takes a tenth of the time at most, so that a training
    on the same machine keeps its cores.
    """

    def __init__(self, path: Path) -> None:
        self._path = open_run(path).path
        self._rounds_file = RoundsFile(path)
        self._lock = threading.Lock()
        self._version, self._rendered_at, self._page = "", 0.0, b""
        self._pictures: list[dict[str, Any]] = []
        self._content: object = None  # the data of the pictures
        self._stale, self._draw_after = False, 0.0

    def version(self) -> str:
        """Return a text that changes whenever the page would change."""
        due = self._stale and time.time() >= self._draw_after
        return hashlib.sha256(version_of(self._path).encode()).hexdigest()[:16] + "-due" * due

    def get(self) -> bytes:
        """Return the page as it is now."""
        with self._lock:
            version, now = self.version(), time.time()
            # Without the script, the page shows times as of its rendering.
            if version != self._version or now - self._rendered_at > 1:
                self._version, self._rendered_at = version.removesuffix("-due"), now
                self._page = self._write(now)
            return self._page

    def _write(self, now: float) -> bytes:
        try:
            snapshot = RunSnapshot.read(self._path, self._rounds_file)
            self._draw(snapshot.run, now)
            view = view_of(snapshot, self._pictures)
        except Exception as error:  # noqa: BLE001 (a damaged file may be repaired)
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            problem = f"{kind}{error}" or "its files are damaged"
            return render([], self._path.name, version=self._version, problem=problem)
        return render([view], view["title"], version=self._version, now=now)

    def _draw(self, run: RecordedRun, now: float) -> None:
        """Draw the pictures again if their data has changed and the pause is over."""
        content = (run.rounds[-1:], run.summary)
        self._stale = content != self._content
        if not self._stale or now < self._draw_after:
            return
        began, charts = time.monotonic(), []
        if run.rounds and run.config:
            charts = [*comparison_charts(group_runs([run])), *run_charts(run)]
        self._pictures = [picture_of(chart) for chart in charts]
        self._content, self._stale = content, False
        self._draw_after = now + 10 * (time.monotonic() - began)


class _Server(ThreadingHTTPServer):
    """Serve one page; each request is answered in a thread."""

    daemon_threads = True

    def __init__(self, port: int, page: DashboardPage) -> None:
        self.page = page
        super().__init__((HOST, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Answer one request."""

    server: _Server
    server_version, sys_version = "ravan-flwr", ""
    timeout = REQUEST_TIMEOUT

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _LOOPBACK.fullmatch(hosts[0]):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "This page is for this machine alone.\n")
            return
        parts = urlsplit(self.path) if self.path.startswith("/") else None
        if parts is None or parts.netloc or parts.path != "/":
            self._answer(HTTPStatus.NOT_FOUND, "There is one page: /\n")
            return
        if parse_qs(parts.query).get("seen") == [self.server.page.version()]:
            self._answer(HTTPStatus.NO_CONTENT, "")
            return
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page.get())

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request, or one that is not GET or HEAD, with an error."""
        del explain
        if code == HTTPStatus.NOT_IMPLEMENTED:  # the library's code for other methods
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD."
        self.close_connection = True
        self._answer(HTTPStatus(code), f"{message or HTTPStatus(code).phrase}\n")

    def _answer(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", text.encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status != HTTPStatus.NO_CONTENT:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: a browser sends a request every two seconds."""


def make_server(run: Path | str, port: int = PORT) -> _Server:
    """Return the server of a run's page; raise ValueError for no run, or a port that is taken."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port {port}: expected a number from 0 (any free port) to 65535")
    page = DashboardPage(Path(run).absolute())
    try:
        return _Server(port, page)
    except OSError as error:
        raise ValueError(
            f"--port {port}: {error.strerror}; expected a free one; give another, or --port 0 for "
            "any that is free"
        ) from None


def watch_run(run: Path | str, port: int = PORT) -> None:
    """Serve the page of a run, under way or ended, until Ctrl-C."""
    with make_server(run, port) as server:
        write_stdout(f"dashboard: http://{HOST}:{server.server_port}/ (Ctrl-C ends it)\n")
        server.serve_forever(poll_interval=0.2)
