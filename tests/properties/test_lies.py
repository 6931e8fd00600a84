"""Lies within the limits: a reply that is taken costs no round, and no honest reply is refused."""

import math

import pytest
import torch

from ravan_flwr.methods import METHODS
from ravan_flwr.methods.extensions import norm_limits
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.update_norm_check import UpdateNormCheck, changes_of
from tests.methods import build, train_client

STEPS = [0.01, 1.0, 100.0]  # learning rate times local steps
HONEST = 0.8  # of a step: how far honest clients were seen to move a number


def first_number(name, change, others):
    change[0] = 1.0


def first_half(name, change, others):
    change[: max(1, len(change) // 2)] = 1.0


def all_numbers(name, change, others):
    change[:] = 1.0


def cancelling_ranks(name, change, others):
    """B's columns in turn u and -u, and A's rows alike: each rank is large, the product zero."""
    change[:] = 1.0
    if name == "B":
        change[1::2] = -1.0


def opposite(name, change, others):
    """What leaves next to nothing of the mean of all replies, and B as far off as may be."""
    if name == "B":
        change[0] = 1.0
    else:
        change[:] = others * (0.4 / max(1e-9, float(others.norm())) - 1)


def last_rank(name, change, others):
    """All in the last layer's last rank, which no smaller budget has."""
    change[-1] = 1.0


LIES = [first_number, first_half, all_numbers, cancelling_ranks, opposite, last_rank]


class Game:
    """A run of a method with three honest clients of a small budget, and a liar of a whole one."""

    def __init__(self, name, step, **changes):
        self.method, self.adapters = build(name, rank=4 if name != "ravan" else 2, **changes)
        self.limit, self.step = UpdateNormCheck(None, step), step
        self.state = self.method.initial_state(self.adapters)

    def fraction(self, fraction):
        """A share with which a client can train the method, that one if possible."""
        return fraction if self.method.can_train(fraction) else 1.0

    def start(self, upload, fraction):
        return norm_limits(self.method).start_of(
            upload, self.method.broadcast(self.state, fraction)
        )

    def honest(self, seed):
        """A reply that moves as far as Adam moves, and its share."""
        upload, fraction = train_client(self.method, self.adapters, self.state, 0.25, seed), 0.25
        fraction = self.fraction(fraction)
        for name, start in self.start(upload, fraction).items():
            away = upload[name] - start
            largest = max(1e-9, float(away.abs().max()))
            upload[name] = start + HONEST * self.step * away / largest
        return upload, fraction

    def still(self, fraction):
        """A reply that changes nothing."""
        self.method.load(self.adapters, self.method.broadcast(self.state, fraction))
        self.method.choose(self.adapters, fraction, torch.Generator(), lambda: None)
        return self.method.upload(self.adapters)

    def lie(self, kind, others=(), fraction=1.0, only=None):
        """The largest reply in the direction of that lie which is taken, and its share.

        With `only` it lies in the tensor of that number, and is honest in the others.
        """
        fraction = self.fraction(fraction)
        still = self.still(fraction)
        start = self.start(still, fraction)
        sent = [upload for upload, its in others if its == fraction]
        whole = {}
        for place, (name, change) in enumerate(changes_of(still, start).items()):
            direction = torch.zeros(change.numbers)
            if only is not None and place % 2 != only:
                whole[name] = torch.zeros_like(start[name])
                continue
            moved = [(upload[name] - start[name]).flatten() for upload in sent]
            told = sum(moved) + start[name].flatten() * (1 + len(sent)) if sent else direction
            kind(name, direction, told)
            most = 0.999 * self.limit.most(change) * math.sqrt(change.numbers)
            if kind is opposite and name != "B":
                most = min(most, float(direction.norm()))
            whole[name] = (direction * most / max(1e-9, float(direction.norm()))).view_as(
                start[name]
            )

        def told_by(part):
            return still | {name: start[name] + part * change for name, change in whole.items()}

        return largest(told_by, lambda upload: self.taken(upload, fraction)), fraction

    def taken(self, upload, fraction):
        """Whether such a reply is taken, if it is alone."""
        try:
            Aggregate(self.method, self.state, self.limit).offer(upload, fraction)
        except ValueError:
            return False
        return True

    def play(self, *offered):
        """A round of these replies; ValueError if one is refused, or all of the round."""
        pot = Aggregate(self.method, self.state, self.limit)
        for upload, fraction in offered:
            pot.offer(upload, fraction)
        self.state = pot.close()


def largest(told_by, taken):
    """The lie of the largest part of its whole that is taken, to a thousandth."""
    if taken(told_by(1.0)):
        return told_by(1.0)
    low, high = 0.0, 1.0
    assert taken(told_by(low))
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if taken(told_by(middle)) else (low, middle)
    return told_by(low)


@pytest.mark.parametrize("kind", LIES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", METHODS)
def test_the_largest_lie_that_is_taken_costs_no_round(name, step, kind):
    game = Game(name, step)
    for number in range(4):
        others = [game.honest(10 * number + seed) for seed in range(3)]
        game.play(*others, game.lie(kind, others))


@pytest.mark.parametrize("kind", [last_rank, all_numbers], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", METHODS)
def test_liars_of_all_budgets_together_cost_no_round(name, step, kind):
    """Each the largest that is taken, and in the same direction."""
    game = Game(name, step)
    for number in range(3):
        others = [game.honest(10 * number + seed) for seed in range(2)]
        liars = [game.lie(kind, fraction=fraction) for fraction in (0.25, 0.5, 0.75, 1.0)]
        game.play(*others, *liars)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", METHODS)
def test_two_liars_whose_lies_meet_in_a_product_of_means_cost_no_round(name, step):
    """One lies in B alone and one in A alone: no product of one reply's changes shows it."""
    game = Game(name, step)
    for number in range(4):
        others = [game.honest(10 * number + seed) for seed in range(3)]
        liars = [game.lie(all_numbers, only=tensor) for tensor in (0, 1)] if number else []
        game.play(*others, *liars)


@pytest.mark.parametrize("step", [0.01, 1.0])
@pytest.mark.parametrize("name", METHODS)
def test_honest_replies_are_taken_from_the_first_a_on(name, step):
    game = Game(name, step)
    for number in range(3):
        game.play(*(game.honest(10 * number + seed) for seed in range(3)))
