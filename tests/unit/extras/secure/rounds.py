"""Run a secure round with clients and server in one process, where some clients drop out."""

from typing import Any

import numpy as np

from ravan_flwr.extras.secure.client import SecureClient
from ravan_flwr.extras.secure.fixed_point import LEVELS, to_steps
from ravan_flwr.extras.secure.node_keys import NodeKeys
from ravan_flwr.extras.secure.schedule import Part, make_schedule
from ravan_flwr.extras.secure.server import SecureServer, read_announcement

RUN, ROUND = 7, 3
PHASES = ("keys", "shares", "masked", "agree", "unmask")
PARTS = (Part("H", 6, 40, 0.5), Part("classifier", 1, 30, 0.1))


def step_of(bound):
    """Return the size of a quantisation step, which bounds the rounding error of a value."""
    return bound / (LEVELS // 2)


class SecureRound:
    """A secure round; `fails` maps a client to the phase in which it drops out."""

    def __init__(self, folder, number, rows=None, fails=None, minimum=3, seed=0):
        self.random = np.random.default_rng(seed)
        rows = np.ones((number, 7), bool) if rows is None else rows
        self.rows, self.fails, self.minimum = rows, fails or {}, minimum
        self.clients = {
            partition: SecureClient({}, RUN, partition, NodeKeys(folder, partition))
            for partition in range(number)
        }
        self.changes: dict[int, list[Any]] = {}  # None for rows that the client does not train
        self.sent: dict[int, bytes] = {}

    def remaining(self, phase):
        """Return the clients that have not dropped out before the end of a phase."""
        at = PHASES.index(phase)
        failed = {p: PHASES.index(phase) for p, phase in self.fails.items()}
        return [p for p in self.clients if failed.get(p, len(PHASES)) > at]

    def meet(self):
        self.announcements = {
            p: read_announcement(RUN, ROUND, p, self.clients[p].make_keys(ROUND))
            for p in self.remaining("keys")
        }
        trained_rows = {p: self.rows[p] for p in self.announcements}
        schedule = make_schedule(RUN, ROUND, self.minimum, PARTS, trained_rows)
        self.server = SecureServer(schedule, self.announcements)

    def share(self, change=lambda partition, sent: sent):
        """Let clients deal shares; `change` replaces what a partition sends."""
        for p in self.remaining("shares"):
            sent = self.clients[p].share_secrets(ROUND, self.server.announce())
            self.server.take_shares_sent(p, change(p, sent))
        self.server.close_sharing()

    def mask(self):
        for p in self.remaining("shares"):
            schedule, rows = self.clients[p].take_shares(ROUND, self.server.to_mask(p))
            bounds = [part.bound for part in schedule.parts for _ in range(part.rows)]
            numbers = []
            self.changes[p] = []
            for row, size, bound in zip(rows, schedule.sizes, bounds, strict=True):
                change = self.random.uniform(-bound, bound, int(size)) if row else None
                self.changes[p].append(change)
                if change is not None:
                    numbers.append(to_steps(change, bound, self.random)[0])
            self.sent[p] = self.clients[p].mask(ROUND, np.concatenate(numbers))
            if p in self.remaining("masked"):
                self.server.take_masked(p, self.sent[p])

    def agree(self):
        masked = self.server.close_masked()
        for p in self.remaining("agree"):
            self.server.take_signature(p, self.clients[p].agree(ROUND, masked))

    def unmask(self):
        signed = self.server.close_list()
        for p in self.remaining("unmask"):
            self.server.take_shares(p, self.clients[p].unmask(ROUND, signed))

    def run(self):
        self.meet()
        self.share()
        return self.finish()

    def finish(self):
        """Continue after the shares, to the end."""
        self.mask()
        self.agree()
        self.unmask()
        return self.server.open()

    def true_means(self, row):
        """Return the plain mean over clients whose upload arrived, and their number."""
        alive = self.remaining("masked")
        found = [self.changes[p][row] for p in alive if self.changes[p][row] is not None]
        return (np.mean(found, axis=0) if found else None), len(found)
