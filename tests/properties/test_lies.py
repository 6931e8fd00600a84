"""Lies within the limits: accepted replies never fail a round, and honest ones are accepted."""

import math

import pytest
import torch

from ravan_flwr.methods import METHODS
from ravan_flwr.methods.extensions import norm_limits
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.update_norm_check import UpdateNormCheck, measure_changes
from tests.methods import build, train_client

STEPS = [0.01, 1.0, 100.0]  # learning rate times local steps
HONEST = 0.8  # of a step: the largest change of a number by honest clients, as measured


def first_number(name, change, others):
    change[0] = 1.0


def first_half(name, change, others):
    change[: max(1, len(change) // 2)] = 1.0


def all_numbers(name, change, others):
    change[:] = 1.0


def cancelling_ranks(name, change, others):
    """Make B's columns u and -u in turn, and A's rows alike: large ranks whose product is zero."""
    change[:] = 1.0
    if name == "B":
        change[1::2] = -1.0


def opposite(name, change, others):
    """Cancel almost all of the mean of replies, with B as far away as permitted."""
    if name == "B":
        change[0] = 1.0
    else:
        change[:] = others * (0.4 / max(1e-9, float(others.norm())) - 1)


def last_rank(name, change, others):
    """Change only the last layer's last rank, which smaller budget fractions do not have."""
    change[-1] = 1.0


LIES = [first_number, first_half, all_numbers, cancelling_ranks, opposite, last_rank]


class Federation:
    """A run with three honest clients of a small budget fraction, and a liar of a full one."""

    def __init__(self, name, step, **changes):
        self.method, self.adapters = build(name, rank=4 if name != "ravan" else 2, **changes)
        self.limit, self.step = UpdateNormCheck(None, step), step
        self.state = self.method.initial_state(self.adapters)

    def fraction(self, fraction):
        """Return that budget fraction if the method can be trained with it, else 1."""
        return fraction if self.method.can_train(fraction) else 1.0

    def start(self, upload, fraction):
        return norm_limits(self.method).find_start(
            upload, self.method.broadcast(self.state, fraction)
        )

    def honest(self, seed):
        """Return a reply that moves as far as Adam moves, and its budget fraction."""
        upload, fraction = train_client(self.method, self.adapters, self.state, 0.25, seed), 0.25
        fraction = self.fraction(fraction)
        for name, start in self.start(upload, fraction).items():
            movement = upload[name] - start
            largest = max(1e-9, float(movement.abs().max()))
            upload[name] = start + HONEST * self.step * movement / largest
        return upload, fraction

    def unchanged(self, fraction):
        """Return a reply without any change."""
        self.method.load(self.adapters, self.method.broadcast(self.state, fraction))
        self.method.choose(self.adapters, fraction, torch.Generator(), lambda: None)
        return self.method.upload(self.adapters)

    def lie(self, kind, others=(), fraction=1.0, only=None):
        """Return the largest accepted reply in the direction of that lie, and its budget fraction.

        With `only` it lies in the tensor of that number alone.
        """
        fraction = self.fraction(fraction)
        unchanged = self.unchanged(fraction)
        start = self.start(unchanged, fraction)
        sent = [upload for upload, its in others if its == fraction]
        largest_change = {}
        for place, (name, change) in enumerate(measure_changes(unchanged, start).items()):
            direction = torch.zeros(change.numbers)
            if only is not None and place % 2 != only:
                largest_change[name] = torch.zeros_like(start[name])
                continue
            moved = [(upload[name] - start[name]).flatten() for upload in sent]
            replies = sum(moved) + start[name].flatten() * (1 + len(sent)) if sent else direction
            kind(name, direction, replies)
            most = 0.999 * self.limit.max_size(change) * math.sqrt(change.numbers)
            if kind is opposite and name != "B":
                most = min(most, float(direction.norm()))
            largest_change[name] = (direction * most / max(1e-9, float(direction.norm()))).view_as(
                start[name]
            )

        def scaled(part):
            return unchanged | {
                name: start[name] + part * change for name, change in largest_change.items()
            }

        return largest(scaled, lambda upload: self.is_accepted(upload, fraction)), fraction

    def is_accepted(self, upload, fraction):
        """Return whether such a reply is accepted by itself."""
        try:
            Aggregate(self.method, self.state, self.limit).check_and_add(upload, fraction)
        except ValueError:
            return False
        return True

    def run_round(self, *offered):
        """Run a round of these replies; ValueError if a reply or the whole round is refused."""
        sums = Aggregate(self.method, self.state, self.limit)
        for upload, fraction in offered:
            sums.check_and_add(upload, fraction)
        self.state = sums.close()


def largest(scaled, is_accepted):
    """Return the lie scaled by the largest accepted factor, to a thousandth."""
    if is_accepted(scaled(1.0)):
        return scaled(1.0)
    low, high = 0.0, 1.0
    assert is_accepted(scaled(low))
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if is_accepted(scaled(middle)) else (low, middle)
    return scaled(low)


def alone(kind):
    return lambda federation, others, number: [federation.lie(kind, others)]


def of_all_budgets(kind):
    """Return a lie of all budget fractions together, each the largest, in one direction."""
    fractions = (0.25, 0.5, 0.75, 1.0)
    return lambda federation, others, number: [
        federation.lie(kind, fraction=fraction) for fraction in fractions
    ]


def meeting_in_a_product(federation, others, number):
    """Lie in B alone and in A alone: no product of one reply's changes is large."""
    return [federation.lie(all_numbers, only=tensor) for tensor in (0, 1)] if number else []


LIARS = {
    **{kind.__name__: alone(kind) for kind in LIES},
    **{f"{kind.__name__}-together": of_all_budgets(kind) for kind in (last_rank, all_numbers)},
    "two that meet in a product of means": meeting_in_a_product,
    "none": lambda *_: [],  # honest replies are accepted from the first round on
}


@pytest.mark.parametrize("liars", LIARS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", METHODS)
def test_the_largest_accepted_lies_fail_no_round(name, step, liars):
    federation = Federation(name, step)
    for number in range(4):
        honest = 2 if liars.endswith("together") else 3
        others = [federation.honest(10 * number + seed) for seed in range(honest)]
        federation.run_round(*others, *LIARS[liars](federation, others, number))
