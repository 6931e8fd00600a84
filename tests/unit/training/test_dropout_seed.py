"""Dropout is a function of the client's work, and nothing outside of it notices."""

import itertools

import torch

from ravan_flwr.seeding import ClientRound
from ravan_flwr.training.local_steps import dropout_from

CPU = torch.device("cpu")


def test_it_draws_what_pytorchs_own_seed_would_give():
    work = ClientRound(3, 2, 1)
    with dropout_from(work.derive("dropout"), CPU):
        drawn = torch.rand(5)
    with torch.random.fork_rng([]):
        torch.manual_seed(work.derive("dropout") % 2**63)
        assert torch.equal(torch.rand(5), drawn)


def test_it_depends_on_the_work_and_changes_nothing_outside():
    before = torch.get_rng_state()
    found = []
    for work in (ClientRound(0, 1, 1), ClientRound(0, 1, 2), ClientRound(0, 2, 1)):
        with dropout_from(work.derive("dropout"), CPU):
            found.append(torch.rand(5))
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(found))
    assert torch.equal(torch.get_rng_state(), before)
