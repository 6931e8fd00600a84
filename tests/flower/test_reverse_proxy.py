"""deploy/reverse-proxy.conf before a real SuperLink: a run passes it, and nothing else does.

Flower 1.41 has no login for its operators, so who reaches the SuperLink's port is the operator.
What a device sends here is compared with what the SuperLink says that it was asked.
"""

import http.client
import json
import os
import re
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from ravan_flwr.launch.superlink import processes_of
from testing.deployment import NAME, NGINX, PATIENCE, SCRIPTS, Deployment, wait_for
from tests import ROOT

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]

SHORT = "local-steps=3 clients-per-round=2 report=false tracking='none'"
LET_IN = {
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages",
    "get-run", "get-fab", "push-object", "pull-object", "confirm-message-received",
}  # fmt: skip
INNER = "/v1/control/list-runs"
PROTOBUF = {"Content-Type": "application/protobuf", "Accept": "application/protobuf"}


def start_node(deployment, number, scripts):
    """Start one of two nodes with Flower's commands of that folder."""
    deployment.start_node(
        number, f"partition-id={number} num-partitions=2 warm-worker=true",
        PATH=os.pathsep.join([str(scripts), os.environ["PATH"]]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, python):
    folder = tmp_path_factory.mktemp("proxy")
    with Deployment(folder, nodes=3, behind_proxy=True, scripts=python.scripts) as running:
        # For the first run node 0 and all that it starts are Flower's commands, and no forks.
        for number, scripts in enumerate((SCRIPTS, python.scripts)):
            running.register(number)
            start_node(running, number, scripts)
        running.write_config("device", running.address)  # a device that wants to be the operator
        yield running
    assert running.left_running == []


def asked(deployment):
    """All that the SuperLink was asked: the port of who asked, and the path as it received it.

    The port is 0 where the reverse proxy says for whom it asks.
    """
    calls = re.findall(r'127.0.0.1:(\d+) - "[A-Z]+ (\S+) HTTP/', deployment.log("superlink"))
    assert calls
    return [(int(port), path) for port, path in calls]


def test_a_run_goes_through_the_proxy(deployment, python):
    assert [deployment.wait_for_node(number) for number in range(2)] == [True, True]
    run = deployment.run(f"num-rounds=2 {SHORT}")
    assert run.wait() == "finished:completed"
    assert [[c["partition-id"] for c in r["clients"]] for r in run.rounds] == [[0, 1]] * 2
    assert all(record["rejected"] == [] for record in run.rounds)
    # A SuperNode that is stopped signs off, later.
    needed = {f"/v1/fleet/{name}" for name in LET_IN - {"deactivate-node"}}
    assert {path for port, path in asked(deployment) if port == 0} == needed
    assert not {path for port, path in asked(deployment) if port} & needed
    deployment.stop_node(0)  # which would import everything for each of the next runs' messages
    start_node(deployment, 0, python.scripts)
    assert deployment.wait_for_node(0)


def test_without_the_proxy_ca_crt_is_enough_to_be_the_operator(deployment, tmp_path):
    """The danger without the proxy: no key, no password; the certificate is no secret."""
    deployment.write_config("intruder", deployment.inside)
    key = tmp_path / "own"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key], check=True
    )
    told = deployment.flwr(
        "supernode", "register", f"{key}.pub", NAME, "--format", "json", machine="intruder"
    )
    node = json.loads(told)["node-id"]
    assert int(node) in deployment.listed_nodes()
    deployment.unregister(int(node))


@pytest.fixture(scope="module")
def nodes(deployment):
    """All nodes, before a device tries to be the operator."""
    return deployment.listed_nodes()


@pytest.mark.parametrize(
    "words",
    [
        ("supernode", "register", "{key}", NAME),
        ("supernode", "list", NAME),
        ("ls", NAME),
        ("stop", "1", NAME),
        ("log", "1", NAME),
        ("run", "{app}", NAME),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_flwr_does_nothing_through_the_proxy(deployment, nodes, words):
    before = len(asked(deployment))
    key = str(deployment.keys / "node-2" / "node.pub")
    ended = subprocess.run(
        ["flwr", *(word.format(key=key, app=deployment.app) for word in words)],
        env=deployment._environment("device"), capture_output=True, text=True,
    )  # fmt: skip
    assert "404" in ended.stdout + ended.stderr
    assert deployment.listed_nodes() == nodes
    since = asked(deployment)[before:]
    assert {path for _, path in since if "control" in path} == {"/v1/control/list-nodes"}
    assert sum("control" in path for _, path in since) == 1  # the operator's, after it


def every_other_call():
    """All of Flower's calls but those of a SuperNode with a key; other pages of the SuperLink."""
    paths = {path for _, path in PROTOBUF_REQUEST_TYPES} - {f"/v1/fleet/{n}" for n in LET_IN}
    assert len(paths) > 60
    return sorted(paths | {"/", "/docs", "/openapi.json", "/v1/runtime/responses", "/v1/fleet/"})


def spellings():
    """Ways to say one path and mean another."""
    allowed = "/v1/fleet/pull-messages"
    yield from (
        f"/{INNER}", INNER.upper(), INNER + "/", f"{INNER}?x", f"{INNER};x", f"{INNER}%00",
        INNER.replace("/", "//"), INNER.replace("control", "%63ontrol"), INNER.replace("/", "%2f"),
        INNER.replace("/", "\\"), INNER.replace("/", "/./"),
        f"{allowed}/../../control/list-runs", f"{allowed}/..%2f..%2fcontrol/list-runs",
        f"{allowed}%2f..%2f..%2fcontrol%2flist-runs", f"{allowed}/%2e%2e/%2e%2e/control/list-runs",
        f"{allowed}%0d%0aX: y", f"{allowed}%0a", f"{allowed}?/../../control/list-runs",
        f"{allowed}#/../../control/list-runs", f"{allowed};/../../control/list-runs",
        allowed.upper(), allowed.replace("fleet", "Fleet"), f"/{allowed}", f"{allowed}/",
        f"{INNER}/../../fleet/pull-messages", "/v1/fleet/../fleet/pull-messages",
        allowed.replace("pull", "%70ull"), f"{allowed}?", f"https://localhost{INNER}",
    )  # fmt: skip


def say(deployment, request: bytes, protocols=()) -> tuple[bytes, str | None]:
    """Send bytes to the proxy over TLS; what comes back until it closes, and the protocol."""
    context = ssl.create_default_context(cafile=deployment.keys / "authority" / "ca.crt")
    if protocols:
        context.set_alpn_protocols(list(protocols))
    host, port = deployment.address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE) as plain,
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


def test_no_other_call_passes_however_it_is_spelt(deployment):
    before = len(asked(deployment))
    targets = [*every_other_call(), *spellings()]
    for target in targets:
        answer, _ = say(deployment, request_of("POST", target))
        assert statuses(answer) in ([404], [400]), target
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "post"):
        for target in ("/v1/fleet/pull-messages", INNER):
            answer, _ = say(deployment, request_of(method, target))
            assert statuses(answer) in ([404], [400], [405]), method
    assert_only_supernodes_asked(deployment, before)
    told = "access forbidden by rule, client: 127.0.0.1, server: , request: "
    assert f'{told}"POST {INNER} HTTP/1.1"' in deployment.log("proxy")


def assert_only_supernodes_asked(deployment, before):
    """Since then, as the SuperLink has it, while no run is going on."""
    since = asked(deployment)[before:]
    assert {path for port, path in since if port == 0} <= {f"/v1/fleet/{name}" for name in LET_IN}
    own = {"/v1/runtime/acquire-task"}  # of what starts the ServerApps
    assert {path for port, path in since if port} <= own


def test_a_call_hidden_in_another_does_not_pass(deployment):
    before = len(asked(deployment))
    hidden = request_of("POST", INNER)
    allowed = "/v1/fleet/pull-messages"
    for attempt in (
        # Two lengths, both kinds of length: a body to one reader, a call to another.
        request_of("POST", allowed, hidden, "Content-Length: 0", f"Content-Length: {len(hidden)}"),
        request_of("POST", allowed, b"0\r\n\r\n" + hidden, "Content-Length: 5",
                   "Transfer-Encoding: chunked"),
        request_of("POST", allowed, b"0\r\n\r\n" + hidden, "Transfer-Encoding: xchunked"),
        request_of("POST", allowed, b"0\r\n\r\n" + hidden, "Transfer-Encoding : chunked"),
        request_of("POST", allowed, hidden),
        # One after the other on a connection.
        request_of("POST", allowed).replace(b"Connection: close\r\n", b"") + hidden,
        # Names of paths in headers, and another protocol.
        request_of("POST", allowed, b"", f"X-Original-URL: {INNER}", f"X-Rewrite-URL: {INNER}"),
        request_of("POST", allowed, b"", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings",
                   "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"),
        request_of("POST", allowed).replace(b"Host: localhost", b"Host: a/v1/control/list-runs?"),
        f"POST {INNER}\r\n".encode(),
        f"POST {INNER} HTTP/1.0\r\n\r\n".encode(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):  # fmt: skip
        answer, _ = say(deployment, attempt)
        assert 200 not in statuses(answer), attempt
        assert b"101" not in answer.split(b"\r\n")[0]
    assert_only_supernodes_asked(deployment, before)


def test_the_proxy_speaks_http_1_1_only_and_takes_no_more_than_a_piece(deployment):
    _, chosen = say(deployment, request_of("POST", INNER), ("h2", "http/1.1"))
    assert chosen != "h2"
    length = f"Content-Length: {17 * 2**20}"
    answer, _ = say(deployment, request_of("POST", "/v1/fleet/push-object", b"", length))
    assert statuses(answer) == [413]


def test_health_is_all_that_it_says(deployment):
    context = ssl.create_default_context(cafile=deployment.keys / "authority" / "ca.crt")
    host, port = deployment.address.split(":")
    for method, status in (("GET", 200), ("POST", 403), ("DELETE", 403)):
        connection = http.client.HTTPSConnection(host, int(port), timeout=PATIENCE, context=context)
        connection.request(method, "/health")
        reply = connection.getresponse()
        assert reply.status == status
        assert len(reply.read()) < 200
        connection.close()


def test_a_node_without_a_registered_key_is_refused_by_the_superlink(deployment):
    deployment.start_node(2, "partition-id=2 num-partitions=3")
    assert not deployment.wait_for_node(2)
    assert "Failed to activate SuperNode" in deployment.log("node-2")


ANNOUNCES = """
import sys
if any("flower-supernode" in word for word in sys.orig_argv):
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
    """Flower's database is locked while it notes them: every other call would fail meanwhile."""
    attacked, announced = tmp_path / "attacked", tmp_path / "announced"
    (tmp_path / "sitecustomize.py").write_text(
        ANNOUNCES.format(attacked=str(attacked), announced=str(announced))
    )
    deployment.stop_node(1)
    deployment.start_node(
        1, "partition-id=1 num-partitions=2 warm-worker=true",
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]),
    )  # fmt: skip
    assert deployment.wait_for_node(1)
    run = deployment.run(f"num-rounds=3 straggler-grace=10 {SHORT}")
    wait_for(lambda: len(run.rounds) >= 1, "a round")
    attacked.touch()
    assert run.wait() == "finished:completed"
    assert int(announced.read_text()) > 1_000_000
    assert all(0 in [c["partition-id"] for c in record["clients"]] for record in run.rounds)
    rejected = [one["client"] for record in run.rounds for one in record["rejected"]]
    assert set(rejected) == {"partition 1"}
    assert "client intended to send too large body" in deployment.log("proxy")
    assert " 500" not in deployment.log("superlink")
    deployment.stop_node(1)
    start_node(deployment, 1, python.scripts)
    assert deployment.wait_for_node(1)


def test_a_superlink_whose_database_is_locked_costs_no_reply(deployment):
    run = deployment.run(f"num-rounds=4 {SHORT}")
    wait_for(lambda: len(run.rounds) >= 1, "a round")
    state = deployment.folder / "superlink" / "state.db"
    # A SuperExec and a SuperNode end with their first call that fails: docs/reliability.md.
    with deployment.only_apps_call(), closing(sqlite3.connect(state)) as database:
        database.execute("BEGIN IMMEDIATE")
        wait_for(lambda: " 500" in deployment.log("superlink"), "a call that fails")
        database.rollback()
    assert run.wait() == "finished:completed"
    assert all(record["rejected"] == [] for record in run.rounds)
    log = (run.directory / "log.txt").read_text()
    assert re.search(
        r"the SuperLink fails \((HTTP 500|an object is not stored)\), and is asked again", log
    )


CLOCK = """
import datetime, sys
if any("flower-supernode" in word for word in sys.orig_argv):
    from flwr.supernode import node_auth_http_interceptor as signatures
    now = signatures.now
    signatures.now = lambda: now() + datetime.timedelta(seconds={ahead})
"""


@pytest.mark.parametrize(("ahead", "let_in"), [(60, False), (-400, False), (-200, True)])
def test_a_device_with_a_wrong_clock_is_refused(deployment, ahead, let_in):
    """Flower's window is from 5 s ahead to 305 s behind: docs/deploy.md, deploy/health.py."""
    if ahead == 60:
        deployment.register(2)
    folder = deployment.folder / f"clock {ahead}"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CLOCK.format(ahead=ahead))
    paths = os.pathsep.join([str(folder), str(ROOT)])
    deployment.start_node(2, "partition-id=2 num-partitions=3", PYTHONPATH=paths)
    assert deployment.wait_for_node(2) == let_in
    if let_in:
        deployment.stop_node(2)
    else:
        assert '"POST /v1/fleet/activate-node HTTP/1.1" 401' in deployment.log("superlink")


@pytest.mark.parametrize(("ahead", "told"), [(0, ""), (-200, ""), (60, "ahead"), (-400, "behind")])
def test_the_health_check_compares_the_clocks(deployment, ahead, told):
    program = (
        "import runpy, time; now = time.time; "
        f"time.time = lambda: now() + {ahead}; "
        "runpy.run_path('deploy/health.py', run_name='__main__')"
    )
    asked_for = {
        "HEALTH_URL": f"https://{deployment.address}/health",
        "HEALTH_CA": str(deployment.keys / "authority" / "ca.crt"),
    }
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | asked_for, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == bool(told), ended.stderr
    if told:
        (seconds,) = re.findall(rf"this machine's clock is (\d+) s {told}", ended.stderr)
        assert abs(int(seconds) - abs(ahead)) <= 10  # a busy machine asks, and is answered, later


def test_the_superlink_outlives_a_serverapp_that_memory_killed(deployment):
    """What the kernel does to the largest process when a unit's memory is used up."""
    run = deployment.run(f"num-rounds=50 {SHORT}")
    wait_for(lambda: any(run.folder.glob("*/checkpoints/round-*.safetensors")), "a checkpoint")
    apps = [
        pid
        for pid in processes_of(deployment.folder / "serverapps")
        if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert apps
    for pid in apps:
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == "finished:failed"
    assert sorted(deployment.listed_nodes().values()).count("online") == 2
    again = deployment.run(f"num-rounds={len(run.rounds) + 1} {SHORT} resume='{run.directory}'")
    assert again.wait() == "finished:completed"
