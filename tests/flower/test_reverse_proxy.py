"""deploy/reverse-proxy.conf before a real SuperLink: it admits a run's calls, and no others.

Flower 1.41 does not authenticate operators: any process that reaches the SuperLink's port can act
as the operator. The tests compare a device's requests with the SuperLink's access log.
"""

import json
import os
import re
import socket
import sqlite3
import ssl
import subprocess
import sys
import time
from contextlib import closing

import pytest
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from tests import ROOT
from tests.flower import NEEDS_PROC
from tests.flower.at_start import at_start
from tests.support.deployment import NAME, NGINX, ROUNDS_TIMEOUT, SCRIPTS

pytestmark = [
    pytest.mark.slow,
    NEEDS_PROC,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]

PROXY, NODES = True, 3
SHORT = "local-steps=3 clients-per-round=2 tracking='none'"
ALLOWED = {
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages",
    "get-run", "get-fab", "push-object", "pull-object", "confirm-message-received",
}  # fmt: skip
DENIED = "/v1/control/list-runs"
REFUSED = '"POST /v1/fleet/activate-node HTTP/1.1" 401'
PROTOBUF = {"Content-Type": "application/protobuf", "Accept": "application/protobuf"}


def start_node(deployment, number, scripts):
    """Start one of two nodes with Flower's commands of that folder."""
    deployment.start_node(
        number, f"partition-id={number} num-partitions=2 warm-worker=true",
        PATH=os.pathsep.join([str(scripts), os.environ["PATH"]]),
    )  # fmt: skip


def calls_of(deployment):
    """Return all calls in the SuperLink's access log as (client's port, path).

    The port is 0 for calls that the reverse proxy forwards.
    """
    calls = re.findall(r'127.0.0.1:(\d+) - "[A-Z]+ (\S+) HTTP/', deployment.log("superlink"))
    assert calls
    return [(int(port), path) for port, path in calls]


def test_a_run_goes_through_the_proxy(deployment, python):
    # Node 0 and its processes are Flower's commands, not forks.
    for number, scripts in enumerate((SCRIPTS, python.scripts)):
        deployment.register(number)
        start_node(deployment, number, scripts)
    assert [deployment.wait_for_node(number) for number in range(2)] == [True, True]
    run = deployment.run(f"num-rounds=2 {SHORT}")
    assert run.wait() == "finished:completed"
    assert [[c["partition-id"] for c in r["clients"]] for r in run.rounds] == [[0, 1]] * 2
    assert all(record["rejected"] == [] for record in run.rounds)
    # A SuperNode calls it when it is stopped, later.
    needed = {f"/v1/fleet/{name}" for name in ALLOWED - {"deactivate-node"}}
    assert {path for port, path in calls_of(deployment) if port == 0} == needed
    assert not {path for port, path in calls_of(deployment) if port} & needed
    deployment.stop_node(0)  # its processes are no forks, and import the libraries for each message
    start_node(deployment, 0, python.scripts)
    assert deployment.wait_for_node(0)


def test_ca_crt_is_enough_to_be_the_operator_without_the_proxy_alone(deployment, tmp_path):
    """Without the proxy no key and no password is needed; the certificate is no secret."""
    key = tmp_path / "own"
    make_key = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key]
    subprocess.run(make_key, check=True)
    words = ["supernode", "register", f"{key}.pub", NAME, "--format", "json"]
    before, nodes = len(calls_of(deployment)), deployment.listed_nodes()
    deployment.write_config("device", deployment.address)
    result = subprocess.run(
        ["flwr", *words], env=deployment._environment("device"), capture_output=True, text=True
    )
    assert "404" in result.stdout + result.stderr
    assert deployment.listed_nodes() == nodes
    calls_since = [path for _, path in calls_of(deployment)[before:] if "control" in path]
    assert calls_since == ["/v1/control/list-nodes"] * 2  # the operator's own
    deployment.write_config("device", deployment.superlink_address)
    node = json.loads(deployment.flwr(*words, machine="device"))["node-id"]
    assert int(node) in deployment.listed_nodes()
    deployment.unregister(int(node))


def every_other_call():
    """Return Flower's calls except those of a SuperNode with a key, and the SuperLink's pages."""
    paths = {path for _, path in PROTOBUF_REQUEST_TYPES} - {f"/v1/fleet/{n}" for n in ALLOWED}
    assert len(paths) > 60
    return sorted(paths | {"/", "/docs", "/openapi.json", "/v1/runtime/responses", "/v1/fleet/"})


def spellings():
    """Yield spellings that may be read as another path."""
    allowed = "/v1/fleet/pull-messages"
    yield from (
        f"/{DENIED}", DENIED.upper(), DENIED + "/", f"{DENIED}?x", f"{DENIED};x", f"{DENIED}%00",
        DENIED.replace("/", "//"), DENIED.replace("control", "%63ontrol"),
        DENIED.replace("/", "%2f"), DENIED.replace("/", "\\"), DENIED.replace("/", "/./"),
        f"{allowed}/../../control/list-runs", f"{allowed}/..%2f..%2fcontrol/list-runs",
        f"{allowed}%2f..%2f..%2fcontrol%2flist-runs", f"{allowed}/%2e%2e/%2e%2e/control/list-runs",
        f"{allowed}%0d%0aX: y", f"{allowed}%0a", f"{allowed}?/../../control/list-runs",
        f"{allowed}#/../../control/list-runs", f"{allowed};/../../control/list-runs",
        allowed.upper(), allowed.replace("fleet", "Fleet"), f"/{allowed}", f"{allowed}/",
        f"{DENIED}/../../fleet/pull-messages", "/v1/fleet/../fleet/pull-messages",
        allowed.replace("pull", "%70ull"), f"{allowed}?", f"https://localhost{DENIED}",
    )  # fmt: skip


def send_raw(deployment, request: bytes, protocols=()) -> tuple[bytes, str | None]:
    """Send bytes to the proxy over TLS; return its answer, until it closes, and the protocol."""
    context = ssl.create_default_context(cafile=deployment.keys / "authority" / "ca.crt")
    if protocols:
        context.set_alpn_protocols(list(protocols))
    host, port = deployment.address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=120) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(request)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received, connection.selected_alpn_protocol()


def request_of(method: str, target: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-enc")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in PROTOBUF.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def test_no_other_call_passes_in_any_spelling(deployment):
    before = len(calls_of(deployment))
    targets = [*every_other_call(), *spellings()]
    for target in targets:
        answer, _ = send_raw(deployment, request_of("POST", target))
        assert statuses(answer) in ([404], [400]), target
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "post"):
        for target in ("/v1/fleet/pull-messages", DENIED):
            answer, _ = send_raw(deployment, request_of(method, target))
            assert statuses(answer) in ([404], [400], [405]), method
    assert_only_supernodes_called(deployment, before)
    prefix = "access forbidden by rule, client: 127.0.0.1, server: , request: "
    assert f'{prefix}"POST {DENIED} HTTP/1.1"' in deployment.log("proxy")


def assert_only_supernodes_called(deployment, before):
    """Check the SuperLink's access log after the first `before` calls; no run may be active."""
    calls_since = calls_of(deployment)[before:]
    assert {path for port, path in calls_since if port == 0} <= {
        f"/v1/fleet/{name}" for name in ALLOWED
    }
    superexec_calls = {"/v1/runtime/acquire-task"}  # of the SuperExec for ServerApps
    assert {path for port, path in calls_since if port} <= superexec_calls


def test_a_call_hidden_in_another_does_not_pass(deployment):
    before = len(calls_of(deployment))
    hidden = request_of("POST", DENIED)
    allowed = "/v1/fleet/pull-messages"
    for attempt in (
        # Two lengths, or both kinds of length: a body for one parser, a call for another.
        request_of("POST", allowed, hidden, "Content-Length: 0", f"Content-Length: {len(hidden)}"),
        request_of("POST", allowed, b"0\r\n\r\n" + hidden, "Content-Length: 5",
                   "Transfer-Encoding: chunked"),
        request_of("POST", allowed, b"0\r\n\r\n" + hidden, "Transfer-Encoding: xchunked"),
        request_of("POST", allowed, b"0\r\n\r\n" + hidden, "Transfer-Encoding : chunked"),
        request_of("POST", allowed, hidden),
        # Two requests on one connection.
        request_of("POST", allowed).replace(b"Connection: close\r\n", b"") + hidden,
        # Paths in headers, and another protocol.
        request_of("POST", allowed, b"", f"X-Original-URL: {DENIED}", f"X-Rewrite-URL: {DENIED}"),
        request_of("POST", allowed, b"", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings",
                   "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"),
        request_of("POST", allowed).replace(b"Host: localhost", b"Host: a/v1/control/list-runs?"),
        f"POST {DENIED}\r\n".encode(),
        f"POST {DENIED} HTTP/1.0\r\n\r\n".encode(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):  # fmt: skip
        answer, _ = send_raw(deployment, attempt)
        assert 200 not in statuses(answer), attempt
        assert b"101" not in answer.split(b"\r\n")[0]
    assert_only_supernodes_called(deployment, before)


def test_the_proxy_supports_http_1_1_only_and_limits_a_request_to_16_mib(deployment):
    _, chosen = send_raw(deployment, request_of("POST", DENIED), ("h2", "http/1.1"))
    assert chosen != "h2"
    length = f"Content-Length: {17 * 2**20}"
    answer, _ = send_raw(deployment, request_of("POST", "/v1/fleet/push-object", b"", length))
    assert statuses(answer) == [413]


def test_only_get_health_is_answered(deployment):
    for method, status in (("GET", 200), ("POST", 403), ("DELETE", 403)):
        answer, _ = send_raw(deployment, request_of(method, "/health"))
        assert statuses(answer) == [status]
        assert len(answer.partition(b"\r\n\r\n")[2]) < 200


ANNOUNCES = """
import hashlib, pathlib
from flwr.supernode.fleet_http_client import FleetHttpClient
push = FleetHttpClient.PushMessages
def announce(self, request):
    if pathlib.Path({attacked!r}).exists():
        for number in range(20_000):
            child = request.message_object_trees[0].children.add()
            child.object_id = hashlib.sha256(str(number).encode()).hexdigest()
        pathlib.Path({announced!r}).write_text(str(request.ByteSize()))
    return push(self, request)
FleetHttpClient.PushMessages = announce
"""


def test_a_reply_that_announces_20000_objects_does_not_pass(deployment, tmp_path, python):
    """Flower locks its database while it stores them: every other call would fail meanwhile."""
    attacked, announced = tmp_path / "attacked", tmp_path / "announced"
    announces = ANNOUNCES.format(attacked=str(attacked), announced=str(announced))
    path = at_start(tmp_path, "flower-supernode", announces)
    deployment.stop_node(1)
    node_config = "partition-id=1 num-partitions=2 warm-worker=true"
    deployment.start_node(1, node_config, PYTHONPATH=path)
    assert deployment.wait_for_node(1)
    run = deployment.run(f"num-rounds=3 straggler-grace=30 {SHORT}")
    run.wait_for(lambda: len(run.rounds) >= 1, "a round", ROUNDS_TIMEOUT)
    attacked.touch()
    assert run.wait() == "finished:completed"
    assert int(announced.read_text()) > 1_000_000
    assert all(0 in [c["partition-id"] for c in record["clients"]] for record in run.rounds)
    rejected = [rejection["client"] for record in run.rounds for rejection in record["rejected"]]
    assert set(rejected) == {"partition 1"}
    assert "client intended to send too large body" in deployment.log("proxy")
    assert " 500" not in deployment.log("superlink")
    deployment.stop_node(1)
    start_node(deployment, 1, python.scripts)
    assert deployment.wait_for_node(1)


def test_a_locked_superlink_database_loses_no_reply(deployment):
    run = deployment.run(f"num-rounds=4 {SHORT}")
    run.wait_for(lambda: len(run.rounds) >= 1, "a round", ROUNDS_TIMEOUT)
    state = deployment.folder / "superlink" / "state.db"
    # A SuperExec and a SuperNode end at their first failed call: docs/troubleshooting.md.
    with deployment.only_apps_call(), closing(sqlite3.connect(state)) as database:
        database.execute("BEGIN IMMEDIATE")
        run.wait_for(lambda: " 500" in deployment.log("superlink"), "a call that fails")
        database.rollback()
    assert run.wait() == "finished:completed"
    assert all(record["rejected"] == [] for record in run.rounds)
    log = (run.directory / "log.txt").read_text()
    assert re.search(
        r"the SuperLink fails \((HTTP 500|an object is not stored)\), and is asked again", log
    )


CLOCK = """
import datetime
from flwr.supernode import node_auth_http_interceptor as signatures
now = signatures.now
signatures.now = lambda: now() + datetime.timedelta(seconds={ahead})
"""


def test_a_node_with_another_key_or_a_wrong_clock_is_refused(deployment, tmp_path):
    """Flower's window is from 5 s ahead to 305 s behind: docs/deploy.md, deploy/health.py."""
    node_config = "partition-id=2 num-partitions=3"
    deployment.start_node(2, node_config)  # its key is not registered
    assert not deployment.wait_for_node(2)
    assert "Failed to activate SuperNode" in deployment.log("node-2")
    deployment.register(2)
    for ahead, admitted in ((60, False), (0, True), (-400, False), (-200, True)):
        before = deployment.log("superlink").count(REFUSED)
        path = at_start(tmp_path, "flower-supernode", CLOCK.format(ahead=ahead))
        deployment.start_node(2, node_config, PYTHONPATH=path)
        assert deployment.wait_for_node(2) == admitted, ahead
        if not admitted:
            assert deployment.log("superlink").count(REFUSED) > before
            assert deployment._supernodes[2].returncode == 0  # so that it needs Restart=always
        else:  # again, once its clock is right
            deployment.stop_node(2)


@pytest.mark.parametrize(
    ("ahead", "direction"), [(0, ""), (-200, ""), (60, "ahead"), (-400, "behind")]
)
def test_the_health_check_compares_the_clocks(deployment, ahead, direction):
    program = (
        "import runpy, time; now = time.time; "
        f"time.time = lambda: now() + {ahead}; "
        "runpy.run_path('deploy/health.py', run_name='__main__')"
    )
    health_settings = {
        "HEALTH_URL": f"https://{deployment.address}/health",
        "HEALTH_CA": str(deployment.keys / "authority" / "ca.crt"),
    }
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | health_settings, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == bool(direction), result.stderr
    if direction:
        (seconds,) = re.findall(rf"this machine's clock is (\d+) s {direction}", result.stderr)
        assert abs(int(seconds) - abs(ahead)) <= 2 + time.monotonic() - began


def test_the_superlink_survives_an_out_of_memory_kill_of_a_serverapp(deployment):
    """SIGKILL, as the kernel sends it to the largest process when a unit's memory is exhausted."""
    run = deployment.run(f"num-rounds=50 {SHORT}")
    checkpoints = "*/checkpoints/round-*.safetensors"
    run.wait_for(lambda: any(run.folder.glob(checkpoints)), "a checkpoint", ROUNDS_TIMEOUT)
    deployment.kill_serverapp("serverapps")
    assert run.wait() == "finished:failed"
    assert sorted(deployment.listed_nodes().values()).count("online") == 2
    resumed = deployment.run(f"num-rounds={len(run.rounds) + 1} {SHORT} resume='{run.directory}'")
    assert resumed.wait() == "finished:completed"
