"""Dropout is a function of the client's work, and leaves the global generator unchanged."""

import itertools

import torch

from ravan_flwr.seeding import ClientRound
from ravan_flwr.training.local_steps import dropout_from

CPU = torch.device("cpu")


def test_dropout_equals_that_of_pytorchs_own_seed():
    work = ClientRound(3, 2, 1)
    with dropout_from(work.derive("dropout"), CPU):
        drawn = torch.rand(5)
    with torch.random.fork_rng([]):
        torch.manual_seed(work.derive("dropout") % 2**63)
        assert torch.equal(torch.rand(5), drawn)


def test_dropout_depends_on_the_work_and_restores_the_generator():
    before = torch.get_rng_state()
    found = []
    for work in (ClientRound(0, 1, 1), ClientRound(0, 1, 2), ClientRound(0, 2, 1)):
        with dropout_from(work.derive("dropout"), CPU):
            found.append(torch.rand(5))
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(found))
    assert torch.equal(torch.get_rng_state(), before)
