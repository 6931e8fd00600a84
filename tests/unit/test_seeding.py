"""Randomness is a function of its purpose; the values are fixed, since runs are resumed."""

import hashlib

from ravan_flwr.seeding import ClientRound, derive, generator


def test_a_seed_is_the_prefix_of_a_hash():
    # sha256("5", unit separator, "heads", unit separator, "3", unit separator, "7")
    digest = hashlib.sha256(b"5\x1fheads\x1f3\x1f7").digest()
    assert derive(5, "heads", 3, 7) == int.from_bytes(digest[:8], "big") // 2


def test_a_clients_seed_depends_on_seed_round_and_partition():
    work = ClientRound(seed=5, round=3, partition_id=7)
    assert work == (5, 3, 7)
    assert work.derive("heads") == derive(5, "heads", 3, 7)
    assert work.generator("heads").initial_seed() == generator(5, "heads", 3, 7).initial_seed()
    others = {ClientRound(*other).derive("heads") for other in ((6, 3, 7), (5, 7, 3), (5, 3, 8))}
    assert len({work.derive("heads"), work.derive("batches"), *others}) == 5
