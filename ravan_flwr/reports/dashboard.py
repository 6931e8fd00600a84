"""Serve the page of a run under way on this machine's loopback, and nothing else.

A browser's other pages could ask this server, too: it answers only who calls it by a name of
loopback (else any site could lead its own name here and read the answers), to GET and HEAD alone,
and tells browsers to show the page nowhere else.
"""

import errno
import re
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ravan_flwr.reports import PORT
from ravan_flwr.reports.page import POLICY, LivePage
from ravan_flwr.runs.console import say

HOST = "127.0.0.1"
SLOWEST = 10.0  # seconds for a request to come

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


class _Server(ThreadingHTTPServer):
    """Serve one page; a second server on the same port is an error, as on every system."""

    daemon_threads = True

    def __init__(self, port: int, page: LivePage) -> None:
        self.page = page
        super().__init__((HOST, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Answer one request."""

    server: _Server
    server_version, sys_version = "ravan-flwr", ""
    timeout = SLOWEST

    def do_GET(self) -> None:
        if not _is_loopback(self.headers.get_all("Host") or []):
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
        """Refuse what is no GET or HEAD, or no request at all."""
        del explain
        if code == HTTPStatus.NOT_IMPLEMENTED:  # how the library answers every other method
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
        """Say nothing: a browser asks every two seconds."""


def _is_loopback(hosts: list[str]) -> bool:
    """Tell whether a request names this machine by loopback, at whatever port a tunnel has."""
    return len(hosts) == 1 and _LOOPBACK.fullmatch(hosts[0]) is not None


def make_server(run: Path | str, port: int = PORT) -> _Server:
    """Make the server of a run's page; ValueError if it is no run, or the port is not free."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port {port}: expected a number from 0 (any free port) to 65535")
    page = LivePage(Path(run).absolute())
    try:
        return _Server(port, page)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "another program has it, perhaps another dashboard"
        elif error.errno == errno.EACCES:
            why = "the system does not let you have it"
        else:
            raise
        raise ValueError(
            f"--port {port}: {why}; expected a free one; give another, or --port 0 for any that "
            "is free"
        ) from None


def watch_run(run: Path | str, port: int = PORT) -> None:
    """Serve a run's page until Ctrl-C; a run under way, or one that has ended."""
    with make_server(run, port) as server:
        say(f"dashboard: http://{HOST}:{server.server_port}/ (Ctrl-C ends it)\n")
        server.serve_forever(poll_interval=0.2)
