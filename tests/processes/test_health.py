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

# The check, which waits for a connection for four seconds.
QUICK = (
    "import sys; sys.path.insert(0, 'deploy'); import health; health.WITHOUT = 4.0; health.main()"
)


def check(settings, *words):
    command = [sys.executable, *(words or ["deploy/health.py"])]
    environment = os.environ | settings
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


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
    ended = check(setting)
    assert ended.returncode == 1
    assert ended.stderr.startswith(expected)
    assert ended.stderr.count("\n") == 1


SUPERNODE = """
import http.server, socket, sys
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
server.RequestHandlerClass.do_GET = lambda self: (self.send_response(200), self.end_headers())
if sys.argv[1] == "connected":
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@pytest.fixture
def supernode():
    """Start a fake SuperNode; return the process, and the check's setting with its address."""
    processes = []

    def start(state, port):
        command = [sys.executable, "-c", SUPERNODE, state, str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process, {
            "HEALTH_URL": f"http://127.0.0.1:{process.stdout.readline().strip()}/health"
        }

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def superlink(tmp_path):
    """Start a fake SuperLink with TLS; return its port, and the check's settings for it."""
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
    address, ca = f"127.0.0.1:{port}", str(secrets / "ca.crt")
    yield port, {"HEALTH_SUPERLINK": address, "HEALTH_CA": ca}
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_supernode_without_a_connection_is_ended_if_the_server_answers(supernode, superlink):
    port, settings = superlink
    process, url = supernode("connected", port)
    ended = check(settings | url, "-c", QUICK)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert process.poll() is None
    process, url = supernode("gave up", port)
    assert "had no connection" in check(settings | url, "-c", QUICK).stderr
    assert process.wait(300) is not None


def test_a_supernode_is_not_ended_while_the_server_does_not_answer(supernode):
    process, url = supernode("gave up", 0)
    ended = check(url | {"HEALTH_SUPERLINK": "127.0.0.1:9"})
    assert ended.stderr.startswith("https://127.0.0.1:9/health: ")
    time.sleep(0.5)
    assert process.poll() is None
