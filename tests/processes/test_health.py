"""The health check of a container reports a fault in one line."""

import http.server
import os
import ssl
import subprocess
import sys
import threading
import time

import pytest

from ravan_flwr.launch.credentials import make_credentials
from tests import ROOT


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"HEALTH_URL": "http://127.0.0.1:9/health"}, "http://127.0.0.1:9/health: "),
        ({"HEALTH_URL": "https://nowhere.invalid/health"}, "https://nowhere.invalid/health: "),
        ({"HEALTH_URL": "nonsense"}, "nonsense: "),
        ({"HEALTH_CA": "/nowhere/ca.crt"}, "HEALTH_CA=/nowhere/ca.crt: "),
    ],
)
def test_an_unreachable_server_is_reported_in_one_line(setting, expected):
    ended = subprocess.run(
        [sys.executable, ROOT / "deploy" / "health.py"],
        env=os.environ | setting, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.startswith(expected)
    assert ended.stderr.count("\n") == 1


SUPERNODE = """
import http.server, socket, ssl, sys, threading
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
server.RequestHandlerClass.do_GET = lambda self: (self.send_response(200), self.end_headers())
if sys.argv[1] == "connected":
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("state", "connected"), [("connected", True), ("gave up", False)])
def test_a_supernode_without_a_connection_is_ended_if_the_server_answers(
    tmp_path, state, connected
):
    make_credentials(tmp_path / "keys", ["127.0.0.1"], 1)
    secrets = tmp_path / "keys" / "superlink"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secrets / "superlink.crt", secrets / "superlink.key")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    plain = server.socket  # the fake SuperNode connects without a TLS handshake
    server.socket = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    supernode = subprocess.Popen(
        [sys.executable, "-c", SUPERNODE, state, str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert supernode.stdout is not None
        health_port = supernode.stdout.readline().strip()
        check = (
            "import sys; sys.path.insert(0, 'deploy'); import health; health.WITHOUT = 4.0; "
            "health.main()"
        )
        health_settings = {
            "HEALTH_URL": f"http://127.0.0.1:{health_port}/health",
            "HEALTH_SUPERLINK": f"127.0.0.1:{port}",
            "HEALTH_CA": str(secrets / "ca.crt"),
        }

        def run_check():
            return subprocess.run(
                [sys.executable, "-c", check], cwd=ROOT, env=os.environ | health_settings,
                capture_output=True, text=True,
            )  # fmt: skip

        ended = run_check()
        if connected:
            assert (ended.returncode, ended.stderr) == (0, "")
            assert supernode.poll() is None
            return
        assert "had no connection" in ended.stderr
        assert supernode.wait(300) is not None
    finally:
        supernode.kill()
        supernode.wait()
        if supernode.stdout:
            supernode.stdout.close()
        server.shutdown()
        server.server_close()


def test_a_supernode_is_not_ended_while_the_server_does_not_answer(tmp_path):
    supernode = subprocess.Popen(
        [sys.executable, "-c", SUPERNODE, "gave up", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert supernode.stdout is not None
        health_port = supernode.stdout.readline().strip()
        health_settings = {
            "HEALTH_URL": f"http://127.0.0.1:{health_port}/health",
            "HEALTH_SUPERLINK": "127.0.0.1:9",
        }
        ended = subprocess.run(
            [sys.executable, ROOT / "deploy" / "health.py"], env=os.environ | health_settings,
            capture_output=True, text=True,
        )  # fmt: skip
        assert ended.stderr.startswith("https://127.0.0.1:9/health: ")
        time.sleep(0.5)
        assert supernode.poll() is None
    finally:
        supernode.kill()
        supernode.wait()
        if supernode.stdout:
            supernode.stdout.close()
