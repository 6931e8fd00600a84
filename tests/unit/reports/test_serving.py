"""The dashboard's server: loopback, one page, GET and HEAD, and clear errors."""

import http.client
import socket
import threading
import time

import pytest

from ravan_flwr.cli import main
from ravan_flwr.reports.dashboard import make_server
from testing.deployment import TIMEOUT
from tests.followed import run_in


@pytest.fixture
def served(tmp_path):
    with make_server(run_in(tmp_path / "run"), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server, method="GET", path="/", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=TIMEOUT)
    connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
    for name, value in headers.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_the_page_is_served_with_a_strict_policy(served):
    code, headers, body = ask(served)
    assert code == 200
    assert b"ravan on digits-vit" in body
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert b"://" not in body  # no external resources
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Content-Length"] == str(len(body))
    assert "Python" not in headers["Server"]


@pytest.mark.usefixtures("without_charts")
def test_head_is_get_without_the_page(served):
    code, headers, body = ask(served, "HEAD")
    assert (code, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_other_methods_are_refused(served, method):
    code, headers, body = ask(served, method)
    assert code == 405
    assert headers["Allow"] == "GET, HEAD"
    assert "Content-Security-Policy" in headers
    assert body == b"GET or HEAD.\n"


@pytest.mark.parametrize(
    "path",
    ["/config.json", "/../config.json", "/..%2fconfig.json", "/%2e%2e/", "//evil.example/", "/x",
     "/index.html", "*", "/\\..\\config.json", "/etc/passwd", "/;x"],
)  # fmt: skip
def test_there_is_one_page(served, path):
    code, headers, body = ask(served, path=path)
    assert code == 404
    assert body == b"There is one page: /\n"
    assert headers["Content-Type"] == "text/plain; charset=utf-8"


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize(
    ("host", "code"),
    [("127.0.0.1", 200), ("localhost:9000", 200), ("[::1]:8642", 200), ("127.0.0.1:8642", 200),
     ("evil.example", 421), ("127.0.0.1.evil.example", 421), ("localhost.evil.example", 421),
     ("0.0.0.0", 421), ("192.0.2.1", 421), ("", 421), ("[", 421), ("evil@localhost:1:2", 421),
     (None, 421)],
)  # fmt: skip
def test_only_requests_with_a_loopback_host_are_answered(served, host, code):
    """Otherwise a site could point its own name at 127.0.0.1 and read the page (DNS rebinding)."""
    assert ask(served, Host=host)[0] == code


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b" 421 "),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", b" 404 "),
        (b"GET /\r\n\r\n", b"This page is for this machine alone."),  # HTTP 0.9 names no host
    ],
)
def test_odd_requests_get_no_page(served, request_, code):
    with socket.create_connection(("127.0.0.1", served.server_port)) as connection:
        connection.sendall(request_)
        assert code in connection.recv(2000)


@pytest.mark.usefixtures("without_charts")
def test_the_page_is_sent_again_only_after_a_change(served, tmp_path):
    version = served.page.version()
    assert ask(served, path=f"/?seen={version}")[0] == 204
    with (tmp_path / "run" / "log.txt").open("a") as file:
        file.write("another line\n")
    code, _, body = ask(served, path=f"/?seen={version}")
    assert code == 200
    assert b"another line" in body
    assert ask(served, path="/?seen=%00&seen=x")[0] == 200


@pytest.mark.usefixtures("without_charts")
def test_invalid_and_idle_connections_do_not_block_others(served):
    address = ("127.0.0.1", served.server_port)
    idle = [socket.create_connection(address) for _ in range(20)]
    for data in (b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"/" * 70_000 + b"\r\n",
                 b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n"):  # fmt: skip
        with socket.create_connection(address) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert b"ravan on" not in connection.recv(65536)
    assert ask(served)[0] == 200
    for connection in idle:
        connection.close()


def test_it_listens_on_loopback_alone(served):
    assert served.server_address[0] == "127.0.0.1"


def test_a_port_in_use_is_reported(served, tmp_path, capsys):
    port = str(served.server_port)
    with pytest.raises(SystemExit) as end:
        main(["report", "--live", str(tmp_path / "run"), "--port", port])
    assert end.value.code == 2
    output = capsys.readouterr().err
    assert f"--port {port}: Address already in use" in output
    assert "--port 0 for any that is free" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--live", "NOWHERE"], "found no config.json there, expected a run directory"),
        (["--live", "run", "--port", "70000"], "--port 70000: expected a number from 0"),
        (["--live", "run", "--port=-1"], "--port -1: expected a number from 0"),
        (["run", "--port", "0"], "--port: got no --live beside it"),
        (["--live", "run", "run"], "--live: got more than one run, --output or --spectrum"),
        (["--live", "run", "--output", "out"], "expected one run and nothing to write"),
    ],
)
def test_errors_of_serving_are_reported(tmp_path, capsys, monkeypatch, words, message):
    run_in(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["report", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_many_readers_at_once_are_served(served):
    codes: list[int] = []

    def read():
        codes.append(ask(served)[0])

    readers = [threading.Thread(target=read) for _ in range(20)]
    began = time.process_time()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert codes == [200] * 20
    assert time.process_time() - began < 30
