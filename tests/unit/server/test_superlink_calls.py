"""A SuperLink that fails temporarily: its calls are repeated, and no node is rejected for it."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesRequest, GetNodesResponse
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid

from ravan_flwr.server import client_registry as recruiting
from ravan_flwr.server.superlink_calls import find_failures, retry_failed_calls
from tests.hand_made import Nodes, fake_clock, run

__all__ = ["fake_clock"]

ALL = {"rounds": 2, "clients_per_round": 4, "evaluate_fn": lambda *_: None}


def answer(status):
    request = httpx.Request("POST", "http://superlink/")
    return httpx.HTTPStatusError(
        "the database is locked", request=request, response=httpx.Response(status, request=request)
    )


FAILURES = [lambda: answer(500), lambda: answer(503), lambda: httpx.ReadTimeout("no answer")]
NOT_STORED = lambda: ObjectPushError("fe68", 1, "58662800")  # noqa: E731


class Failing(Nodes):
    """The SuperLink fails the first calls for each message, of one kind or of all."""

    in_process = False

    def __init__(self, failure, times=1, call="", kind=""):
        super().__init__()
        self.failure, self.times, self.call, self.kind = failure, times, call, kind
        self.tried: dict[object, int] = {}

    def fail(self, call, about, kind=""):
        if self.call not in ("", call) or (kind and self.kind not in ("", kind)):
            return
        self.tried[call, about] = self.tried.get((call, about), 0) + 1
        if self.tried[call, about] <= self.times:
            raise self.failure()

    def push_messages(self, messages):
        about = [(m.metadata.dst_node_id, m.metadata.message_type) for m in messages]
        self.fail("push", tuple(about))
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        if message_id in self._waiting:
            self.fail("pull", message_id, self._waiting[message_id].metadata.message_type)
        return super().pull_messages(message_ids)

    def get_nodes(self):
        self.fail("nodes", len(self.tried) // 2)
        return super().get_nodes()


@pytest.mark.parametrize(
    ("call", "failure"),
    [*((c, f) for c in ("push", "pull", "nodes", "") for f in FAILURES), ("push", NOT_STORED)],
)
def test_a_temporary_failure_affects_no_reply(failure, call, monkeypatch):
    monkeypatch.setattr(recruiting, "QUERY_TIMEOUT", 1800.0)
    honest, _, _ = run(Nodes(), **ALL)
    notes, strategy, _ = run(Failing(failure, 3, call), **ALL)
    assert [len(record["clients"]) for record in notes.records] == [4, 4]
    assert all(record["rejected"] == [] for record in notes.records)
    for state, alone in zip(notes.states, honest.states, strict=True):
        assert all(torch.equal(state[name], alone[name]) for name in alone)
    assert all(node.failures == 0 for node in strategy.federation.registry.nodes.values())


def test_calls_are_repeated_until_the_deadline():
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"fails \(HTTP 500\) for round-timeout = 60 s"):
        run(Failing(FAILURES[0], 10**9, "push"), timeout=60.0, **ALL)
    assert 60 <= time.monotonic() - began < 70


def test_a_refused_call_raises():
    with pytest.raises(RuntimeError, match=r"the SuperLink refuses a call \(HTTP 412\)"):
        run(Failing(lambda: answer(412), 1, "push"), **ALL)


class Lost(Failing):
    """In the first two rounds the SuperLink never returns the replies of some partitions."""

    def __init__(self, *partitions):
        super().__init__(FAILURES[0], 10**9, "pull", "train")
        self.partitions = partitions

    def fail(self, call, about, kind=""):
        if call == "pull" and kind == "train":
            message = self._waiting[about]
            node = self.registered[message.metadata.dst_node_id]
            number = int(str(message.content.config_records["config"]["round"]))
            if node.partition_id in self.partitions and number < 3:
                super().fail(call, about, kind)


def test_a_reply_lost_by_the_superlink_does_not_count_as_missed():
    notes, strategy, _ = run(Lost(1, 2), timeout=60.0, **ALL | {"rounds": 3})
    reason = "no reply within 60 s, since the SuperLink failed (HTTP 500)"
    for record in notes.records[:2]:
        assert [client["partition-id"] for client in record["clients"]] == [0, 3]
        assert {entry["client"] for entry in record["rejected"]} == {"partition 1", "partition 2"}
        assert {entry["reason"] for entry in record["rejected"]} == {reason}
    assert len(notes.records[2]["clients"]) == 4
    assert all(node.failures == 0 for node in strategy.federation.registry.nodes.values())
    with pytest.raises(RuntimeError, match=r"got no valid reply.*SuperLink failed \(HTTP 500\)"):
        run(Lost(0, 1, 2, 3), timeout=60.0, **ALL)


# Flower's own grid, and a server that fails.


class Server(ThreadingHTTPServer):
    """Act as a SuperLink with one node that first answers 500 a number of times."""

    def __init__(self, failures):
        self.failures, self.calls = failures, 0
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.calls += 1
        fails = self.server.calls <= self.server.failures
        body = b"" if fails else GetNodesResponse(nodes=[NodeInfo(node_id=7)]).SerializeToString()
        self.send_response(500 if fails else 200)
        self.send_header("Content-Type", "application/protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def superlink():
    server = Server(3)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def grid_to(server):
    grid = HttpGrid(f"127.0.0.1:{server.server_port}", insecure=True, token="any")
    grid.set_run(Run.create_empty(1))
    return grid


def test_flowers_grid_repeats_a_call_over_http(superlink):
    """A pull consists of several calls, and repeating all of them would return nothing."""
    grid = grid_to(superlink)
    with pytest.raises(httpx.HTTPStatusError):
        grid.get_node_ids()
    grid = grid_to(superlink)
    retry_failed_calls(grid, 600.0)
    client = grid._runtime_client
    assert [node.node_id for node in client.GetNodes(GetNodesRequest()).nodes] == [7]
    assert (superlink.calls, find_failures(grid).count) == (4, 2)
    grid.close()
