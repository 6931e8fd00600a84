"""A worker pool answers in order, and computes ahead by one reply for each worker."""

import socket
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from ravan_flwr.launch import workers
from ravan_flwr.launch.worker_process import identify
from ravan_flwr.launch.workers import Job, WorkerLink, WorkerPool


class Threads:
    """Workers that are threads; each adds one to what its client keeps."""

    def __init__(self, behave=lambda _: None):
        self.behave, self.begun, self.started = behave, [], 0

    def start(self):
        self.started += 1
        ours, theirs = socket.socketpair()
        connection = Connection(theirs.detach())
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        return WorkerLink(Connection(ours.detach()))

    def _serve(self, connection):
        with suppress(EOFError, OSError):
            while True:
                _, _, _, context = connection.recv()
                node_id, state = context.node_id, context.state
                self.begun.append(node_id)
                if self.behave(node_id) == "die":
                    connection.close()
                    return
                counter = state.config_records.get("kept", ConfigRecord({"times": []}))
                state["kept"] = ConfigRecord({"times": [*cast(list[int], counter["times"]), 1]})
                reply = RecordDict({"config": ConfigRecord({"of": node_id})})
                connection.send((reply, state, []))


@pytest.fixture
def pool_of():
    """Make a pool of so many workers of this kind; close it at the end."""
    with ExitStack() as stack:

        def made(starter, number=2):
            pool = WorkerPool(number, starter.start, starter.start)
            stack.callback(pool.close)
            return pool

        yield made


def array(number):
    return ArrayRecord({"a": Array(np.full(4, number, np.float32))})


@pytest.fixture
def jobs():
    identify()
    sent = array(1)
    result = []
    for node_id in range(1, 21):
        content = RecordDict({"arrays": sent, "config": ConfigRecord({"round": 1})})
        message = Message(content, node_id, "train", group_id="1")
        message.metadata.__dict__["_message_id"] = str(node_id)
        state = RecordDict({"fixed": array(2)}) if node_id == 1 else RecordDict()
        context = Context(1, node_id, {}, state, {})
        result.append(Job(message, context, time.monotonic() + 60))
    return result


def node_of(message):
    return message.content["config"]["of"]


def test_replies_come_in_the_order_they_are_asked_for(jobs, pool_of):
    starter = Threads(lambda node_id: time.sleep(0.02 * (node_id % 3)))
    pool = pool_of(starter, 3)
    assert node_of(pool.answer(jobs[3])) == 4  # is not expected, and answered
    starter.begun.clear()
    pool.expect(jobs)
    assert [node_of(pool.answer(job)) for job in jobs] == list(range(1, 21))
    assert sorted(starter.begun) == list(range(1, 21))


def test_workers_compute_ahead_by_one_reply_each(jobs, pool_of):
    starter = Threads()
    pool = pool_of(starter)
    pool.expect(jobs)
    pool.answer(jobs[0])
    time.sleep(0.2)
    pool.answer(jobs[1])
    time.sleep(0.2)
    assert len(starter.begun) <= 2 + 4
    # The last is computed although the reserve of replies is full.
    assert node_of(pool.answer(jobs[-1])) == 20


def test_an_unused_reply_changes_no_state(jobs, pool_of):
    """It is a reply in reserve, of a round that had enough."""
    starter = Threads()
    pool = pool_of(starter)
    pool.expect(jobs)
    pool.answer(jobs[0])
    time.sleep(0.1)
    assert jobs[0].context.state["kept"]["times"] == [1]
    assert "kept" not in jobs[1].context.state
    pool.expect(jobs[5:7])
    assert node_of(pool.answer(jobs[5])) == 6
    assert node_of(pool.answer(jobs[6])) == 7
    pool.expect([jobs[1]])
    assert node_of(pool.answer(jobs[1])) == 2
    assert jobs[1].context.state["kept"]["times"] == [1]


def test_arrays_in_a_clients_state_stay_the_same_objects(jobs, pool_of):
    starter = Threads()
    pool = pool_of(starter, 1)
    fixed = jobs[0].context.state["fixed"]
    for _ in range(2):
        pool.expect(jobs[:3])
        for job in jobs[:3]:
            pool.answer(job)
    assert jobs[0].context.state["fixed"] is fixed
    assert jobs[0].context.state["kept"]["times"] == [1, 1]


def test_a_worker_that_ends_loses_one_reply_and_is_replaced(jobs, pool_of):
    starter = Threads(lambda node_id: "die" if node_id == 2 else None)
    pool = pool_of(starter)
    pool.expect(jobs)
    replies: list[Any] = [pool.answer(job) for job in jobs]
    assert [reply.has_error() for reply in replies] == [False, True] + 18 * [False]
    assert "ended before it answered" in replies[1].error.reason
    assert (len(pool), starter.started) == (2, 3)


def test_a_worker_that_hangs_is_awaited_until_the_deadline(jobs, pool_of, monkeypatch):
    now, over = [0.0], threading.Event()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def hang_or_end_the_round(node_id):
        if node_id == 1:
            over.wait()
        elif node_id == 3:  # asked after 2 has answered
            now[0] = 2.0

    starter = Threads(hang_or_end_the_round)
    pool = pool_of(starter)
    jobs_with_deadline = [Job(job.message, job.context, 1.0) for job in jobs[:3]]
    pool.expect(jobs_with_deadline)
    assert pool.answer(jobs_with_deadline[0]) is None
    assert node_of(pool.answer(jobs_with_deadline[1])) == 2  # its reply had arrived by then
    assert len(pool) == 2
    over.set()


def test_without_any_worker_clients_compute_in_this_process(jobs, pool_of, caplog, monkeypatch):
    class Once(Threads):
        def start(self):
            if self.started:
                raise OSError("no memory")
            return super().start()

    monkeypatch.setattr(workers, "compute_reply", lambda message, _: message)
    starter = Once(lambda _: "die")
    pool = pool_of(starter, 3)
    assert (len(pool), pool.processes) == (1, 1)
    ended = pool.answer(jobs[0])
    assert ended is not None
    assert ended.has_error()
    assert "no other can be started: no memory" in caplog.text
    assert pool.answer(jobs[1]) is jobs[1].message
    assert pool.answer(Job(jobs[2].message, jobs[2].context, 0.0)) is None  # it is too late
