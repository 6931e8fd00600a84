"""Secure rounds with client and server: exact sums, and no party learns or forges more."""

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ravan_flwr.extras.secure import schedule as rows_and_masks
from ravan_flwr.extras.secure import shamir
from ravan_flwr.extras.secure.agreement import SIGNATURE, pair_key, shared_secret, signed_keys
from ravan_flwr.extras.secure.client import DistrustError, SecureClient
from ravan_flwr.extras.secure.fixed_point import LEVELS, decode_mean, from_bytes, to_steps
from ravan_flwr.extras.secure.node_keys import NodeKeys, make_keys
from ravan_flwr.extras.secure.schedule import (
    Vector,
    compute_threshold,
    make_schedule,
    make_stream,
    pack,
)
from ravan_flwr.extras.secure.server import DealerError, SecureServer, read_announcement
from tests.unit.extras.secure.rounds import PARTS, PHASES, ROUND, RUN, SecureRound, step_of

N = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("secure")
    for partition in range(20):
        make_keys(path, partition)
    return path


def check_sums(round_, opened):
    """Every opened row is the plain mean up to rounding; the others stay masked."""
    schedule = round_.server.schedule
    for place, (part, row) in enumerate(schedule.row_ids):
        name = PARTS[part].name
        mean, number = round_.true_means(place)
        count = int(opened.counts[name][row])
        assert count in (0, number)
        if count:
            assert count >= round_.minimum
            error = np.abs(opened.means[name][row] - mean).max()
            assert error <= step_of(PARTS[part].bound)
        else:
            assert number < round_.minimum
            assert not opened.means[name][row].any()


@pytest.mark.parametrize("number", [3, 4, 7, 20])
def test_the_sum_is_the_plain_sum_up_to_rounding(folder, number):
    round_ = SecureRound(folder, number)
    opened = round_.run()
    check_sums(round_, opened)
    assert (opened.counts["H"] == number).all()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dropped", [(0,), (6,), (2, 5)])
def test_clients_may_drop_out_in_any_phase(folder, phase, dropped):
    round_ = SecureRound(folder, N, fails=dict.fromkeys(dropped, phase))
    opened = round_.run()
    check_sums(round_, opened)
    left = N - len(dropped) * (phase in PHASES[:3])
    assert (opened.counts["H"] == left).all()


def test_clients_may_drop_out_in_different_phases(folder):
    round_ = SecureRound(folder, 12, fails={0: "shares", 3: "masked", 5: "agree", 9: "unmask"})
    check_sums(round_, round_.run())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fails", [{}, {1: "masked"}, {0: "shares", 4: "masked"}])
def test_masks_of_a_head_are_among_the_clients_that_train_it(folder, seed, fails):
    random = np.random.default_rng(seed)
    rows = random.random((8, 7)) < 0.5
    rows[:, 6] = True
    round_ = SecureRound(folder, 8, rows, fails, seed=seed)
    opened = round_.run()
    check_sums(round_, opened)
    sizes = round_.server.schedule.sizes
    for partition, sent in round_.sent.items():  # no larger than the trained rows
        assert len(sent) <= 3 * int(sizes[rows[partition]].sum())


def test_a_head_that_loses_its_trainers_stays_masked(folder):
    """Four clients train it. If one drops out after masking, it is opened; if two do, it is not."""
    rows = np.ones((9, 7), bool)
    rows[4:, 0] = False
    for dropped, count in (({3: "masked"}, 3), ({2: "masked", 3: "masked"}, 0)):
        round_ = SecureRound(folder, 9, rows, dropped)
        opened = round_.run()
        assert opened.counts["H"][0] == count
        assert (opened.counts["H"][1:] == 9 - len(dropped)).all()
        check_sums(round_, opened)
        # The server does not have the shares that it would need.
        group = round_.server.schedule.row_groups[0]
        shares = round_.server._shares
        index = 1 + round_.server.schedule.trained_groups(0).index(group)
        assert ((0, index) in shares) == bool(count)


@pytest.mark.parametrize("phase", PHASES)
def test_too_few_clients_end_the_round(folder, phase):
    dropped = N - compute_threshold(N) + 1
    round_ = SecureRound(folder, N, fails=dict.fromkeys(range(dropped), phase))
    if phase == "keys":  # a client without keys is not part of the round
        assert (round_.run().counts["H"] == N - dropped).all()
        return
    with pytest.raises(ValueError, match=r"expected at least 5"):
        round_.run()


def test_the_server_alone_cannot_unmask(folder):
    """It has all messages, less one share of the threshold, and the sum before unmasking."""
    round_ = until(folder, "agree")
    signed = round_.server.close_list()
    for partition in range(compute_threshold(N) - 1):
        round_.server.take_shares(partition, round_.clients[partition].unmask(ROUND, signed))
    with pytest.raises(ValueError, match="masks of partition 0 cannot be recovered: got 4 shares"):
        round_.server.open()
    # The masked sum is independent of the changes: any value is equally likely.
    assert round_.server._total is not None
    total = round_.server._total.numbers
    assert stats.kstest(total / 2**24, "uniform").pvalue > 1e-3


class SeededBytes:
    """Random-looking bytes from a seed, in place of the system's."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def __call__(self, number=32):
        return self.random.bytes(number)


def test_masked_uploads_are_uniform_and_cancel(folder, monkeypatch):
    """All bytes of all uploads, for equal changes and fixed secrets."""
    fixed = SeededBytes(5)
    monkeypatch.setattr("ravan_flwr.extras.secure.agreement.new_key", fixed)
    monkeypatch.setattr("ravan_flwr.extras.secure.client.secrets.token_bytes", fixed)
    monkeypatch.setattr(
        "tests.unit.extras.secure.rounds.to_steps",
        lambda values, *_: (np.full(len(values), LEVELS, np.uint32), 0),
    )
    round_ = SecureRound(folder, N)
    round_.run()
    for sent in round_.sent.values():
        data = np.frombuffer(sent, np.uint8)
        counts = np.bincount(data >> 4, minlength=16)
        assert stats.chisquare(counts).pvalue > 1e-4
    data = np.frombuffer(b"".join(round_.sent.values()), np.uint8)
    assert stats.chisquare(np.bincount(data, minlength=256)).pvalue > 1e-3
    # Without the clients' own masks, pairwise masks cancel, and exactly the sum is left.
    assert round_.server._total is not None
    assert (round_.server._total.numbers == N * LEVELS).all()
    # Unmasked, the same bytes are far from uniform.
    plain = np.tile(np.frombuffer(LEVELS.to_bytes(3, "little"), np.uint8), 100)
    assert stats.chisquare(np.bincount(plain, minlength=256)).pvalue < 1e-10


def test_no_stream_is_used_twice(folder, monkeypatch):
    places, streams = [], []

    def recording(key, place, size, make=make_stream):
        streams.append(make(key, place, size).tobytes())
        places.append((key, place))
        return make(key, place, size)

    monkeypatch.setattr(rows_and_masks, "make_stream", recording)
    until(folder, "masked")
    # Both clients of a pair make its streams; all others are different.
    pairs, own = N * (N - 1) // 2 * 7, N * 7
    assert len(set(places)) == len(set(streams)) == pairs + own
    assert len(places) == 2 * pairs + own


def test_a_long_stream_is_made_in_pieces(monkeypatch):
    expected = make_stream(bytes(32), (1, 2), 1000)
    monkeypatch.setattr(rows_and_masks, "_BLOCK", 64)
    assert make_stream(bytes(32), (1, 2), 1000).tolist() == expected.tolist()
    assert (make_stream(bytes(32), (2, 1), 1000) != expected).any()


def test_two_rounds_with_the_same_changes_have_other_masks(folder):
    first, second = SecureRound(folder, 4), SecureRound(folder, 4)
    for round_ in (first, second):
        round_.run()
    assert first.sent[0] != second.sent[0]
    assert np.array_equal(first.changes[0][0], second.changes[0][0])


# What a client refuses.


def until(folder, phase, **given):
    round_ = SecureRound(folder, N, **given)
    steps = (round_.meet, round_.share, round_.mask, round_.agree)
    for step in steps[: 1 + PHASES.index(phase)]:
        step()
    return round_


def test_a_client_answers_each_phase_once_and_in_order(folder):
    client = until(folder, "keys").clients[0]
    for phase in (client.take_shares, client.agree, client.unmask):
        with pytest.raises(ValueError, match="answers each phase once"):
            phase(ROUND, {})
    with pytest.raises(ValueError, match="answers each phase once"):
        client.mask(ROUND, np.zeros(3, np.uint32))
    round_ = until(folder, "agree")
    signed = round_.server.close_list()
    client = round_.clients[0]
    assert client.unmask(ROUND, signed)["shares"]
    assert client.state == {"round": ROUND, "phase": "done"}  # all other state is deleted
    with pytest.raises(ValueError, match="answers each phase once"):
        client.unmask(ROUND, signed)


def test_a_client_deletes_its_secrets_also_when_it_refuses(folder):
    client = until(folder, "agree").clients[0]
    with pytest.raises(ValueError, match="got 0 signatures, expected 5"):
        client.unmask(ROUND, {"signers": pack(np.zeros(N, bool)), "signatures": b""})
    assert client.state == {"round": ROUND, "phase": "done"}


def test_a_client_signs_one_list(folder):
    """No client can be alive for one client and dropped for another."""
    client, alive = until(folder, "masked").clients[0], np.ones(N, bool)
    client.agree(ROUND, {"alive": pack(alive)})
    alive[3] = False
    with pytest.raises(ValueError, match="answers each phase once"):
        client.agree(ROUND, {"alive": pack(alive)})


def test_a_client_unmasks_only_a_list_signed_by_a_threshold(folder):
    """The server claims to partition 0 that 3 dropped out, and to the others that it did not."""
    round_ = until(folder, "masked")
    masked = round_.server.close_masked()
    for partition in range(1, N):
        round_.server.take_signature(partition, round_.clients[partition].agree(ROUND, masked))
    alive = round_.server.alive.copy()
    alive[3] = False
    round_.clients[0].agree(ROUND, {"alive": pack(alive)})
    signers = np.array([p in round_.server.signatures and p != 3 for p in range(N)])
    signatures = b"".join(round_.server.signatures[p] for p in np.flatnonzero(signers))
    with pytest.raises(ValueError, match="partition 1: its signature is not by"):
        round_.clients[0].unmask(ROUND, {"signers": pack(signers), "signatures": signatures})


@pytest.mark.parametrize(
    ("fails", "missing", "message"),
    [
        ({}, [0, 1, 2], "got a list of 4 clients, expected 5 at least"),
        ({}, [0], "got a list without this client"),
        ({6: "shares"}, [], "have shared nothing"),
    ],
)
def test_a_list_of_too_few_or_of_other_clients_is_not_signed(folder, fails, missing, message):
    alive = np.ones(N, bool)
    alive[missing] = False
    with pytest.raises(ValueError, match=message):
        until(folder, "masked", fails=fails).clients[0].agree(ROUND, {"alive": pack(alive)})


def test_an_earlier_round_is_not_repeated(folder):
    round_ = until(folder, "agree")
    for number in (1, ROUND):
        with pytest.raises(ValueError, match=f"expected one after {ROUND}"):
            round_.clients[0].make_keys(number)
    round_.clients[0].make_keys(ROUND + 1)
    with pytest.raises(ValueError, match="asked to continue in round 3 after phase 'agreed'"):
        round_.clients[0].unmask(ROUND, round_.server.close_list())


def test_clients_with_unknown_keys_are_refused(folder, tmp_path):
    """The server uses its own keys under the name of a client."""
    round_ = SecureRound(folder, N)
    for partition in (5, 6):
        make_keys(tmp_path, partition)
        keys = NodeKeys(tmp_path, partition)
        round_.clients[partition] = SecureClient({}, RUN, partition, keys)
    round_.meet()
    with pytest.raises(DistrustError, match="partition 5: its signature is not by") as caught:
        round_.share()
    assert caught.value.partitions == (5, 6)


def test_a_client_without_a_key_file_is_refused(folder, tmp_path):
    make_keys(tmp_path, 0)
    for partition in range(1, N - 1):
        name = f"partition-{partition}.pub"
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    round_ = SecureRound(folder, N)
    round_.clients[0] = SecureClient({}, RUN, 0, NodeKeys(tmp_path, 0))
    round_.meet()
    with pytest.raises(DistrustError, match=r"partition-6\.pub: it cannot be read"):
        round_.share()


def test_signatures_of_another_run_round_or_client_are_refused(folder):
    client = SecureClient({}, RUN, 2, NodeKeys(folder, 2))
    parts = client.make_keys(ROUND)
    assert read_announcement(RUN, ROUND, 2, parts).node == NodeKeys(folder, 2).public()
    for place in ((RUN + 1, ROUND, 2), (RUN, ROUND + 1, 2), (RUN, ROUND, 3)):
        with pytest.raises(ValueError, match="not signed by the key that it names"):
            read_announcement(*place, parts)
    with pytest.raises(ValueError, match="got 35 bytes, expected 160"):
        read_announcement(RUN, ROUND, 2, parts | {"keys": b"abc"})


def test_invalid_keys_exclude_their_client(folder):
    """Keys of low order, or one key for both purposes, are refused despite a valid signature."""
    keys = NodeKeys(folder, 2)
    good = SecureClient({}, RUN, 2, keys).make_keys(ROUND)["keys"][:32]
    for public, error in ((good + bytes(32), "low order"), (good + good, "are one, expected two")):
        signature = keys.sign(signed_keys(RUN, ROUND, 2, public))
        with pytest.raises(ValueError, match=error):
            read_announcement(RUN, ROUND, 2, {"keys": public + signature, "node": keys.public()})


def announced(secure_round, **changes):
    """Announce a schedule that differs from the correct one."""
    arguments: dict[str, Any] = {
        "run": RUN, "round_": ROUND, "minimum": 3, "parts": PARTS,
        "rows": {p: secure_round.server.schedule.trained[p] for p in range(N)},
    }  # fmt: skip
    return SecureServer(
        make_schedule(**(arguments | changes)), secure_round.announcements
    ).announce()


def without_the_client(round_):
    return announced(round_, rows={p: round_.server.schedule.trained[p] for p in range(1, N)})


def a_head_of_two_clients(round_):
    schedule = round_.server.schedule
    trained = schedule.trained.copy()
    trained[2:, 0] = False
    packed = tuple(pack(row).hex() for row in trained)
    changed = schedule.model_copy(update={"packed": packed})
    return round_.server.announce() | {"schedule": changed.to_bytes()}


def other_keys_of_the_client(round_):
    later = SecureClient({}, RUN, 0, round_.clients[0].keys)
    round_.announcements[0] = read_announcement(RUN, ROUND, 0, later.make_keys(ROUND))
    return SecureServer(round_.server.schedule, round_.announcements).announce()


@pytest.mark.parametrize(
    ("announce", "message"),
    [
        (lambda round_: announced(round_, run=RUN + 1), f"expected {RUN}, {ROUND}"),
        (lambda round_: announced(round_, round_=ROUND + 1), f"expected {RUN}, {ROUND}"),
        (without_the_client, "without partition 0"),
        (a_head_of_two_clients, "got a part that 2 clients train, expected 3"),
        (other_keys_of_the_client, "other keys of this client"),
    ],
)
def test_a_false_announcement_is_refused(folder, announce, message):
    round_ = until(folder, "keys")
    with pytest.raises(ValueError, match=message):
        round_.clients[0].share_secrets(ROUND, announce(round_))


def test_clients_of_different_schedules_cannot_open_each_others_shares(folder):
    """Partition 0 gets another bound than the others, so that it cannot open their shares."""
    round_ = until(folder, "keys")
    client, share_secrets = round_.clients[0], round_.clients[0].share_secrets
    other = announced(round_, parts=(PARTS[0], PARTS[1].__class__("classifier", 1, 30, 0.2)))
    client.share_secrets = lambda number, _: share_secrets(number, other)
    round_.share()
    client.take_shares(ROUND, round_.server.to_mask(0))
    assert [bool(text) for text in client.state["held"]] == [True] + 6 * [False]


def test_a_short_list_of_present_clients_is_refused(folder):
    round_ = until(folder, "shares")
    here = pack(np.arange(N) < 3)
    with pytest.raises(ValueError, match="got a list of 3 clients, expected 5 at least"):
        round_.clients[0].take_shares(ROUND, round_.server.to_mask(0) | {"here": here})


# Faults of a client.


def test_a_false_share_invalidates_its_own_answer_alone(folder):
    round_ = until(folder, "agree", fails={6: "masked"})
    signed = round_.server.close_list()
    for partition in range(6):
        shares = round_.clients[partition].unmask(ROUND, signed)
        if partition == 1:
            first = shares["shares"][:-1] + bytes([shares["shares"][-1] ^ 1])
            with pytest.raises(ValueError, match="is not the one that it was given"):
                round_.server.take_shares(partition, {"shares": first})
        else:
            round_.server.take_shares(partition, shares)
    check_sums(round_, round_.server.open())


def test_a_dealer_of_false_shares_is_named(folder):
    """The marks fit to shares of another secret, which is detected when the secret is needed."""
    round_ = until(folder, "keys", fails={2: "masked"})
    dealer = round_.clients[2]
    true, dealer.state["pairs"] = dealer.state["pairs"], dealer.state["sealing"]
    dealer._check_key_list = lambda *_: None
    round_.share()
    dealer.state["pairs"] = true
    with pytest.raises(ValueError, match="partition 2 has shared something else"):
        round_.finish()


@pytest.mark.parametrize("constant", [shamir.PRIME - 1, None])
def test_a_dealer_of_shares_of_no_valid_secret_is_named(folder, monkeypatch, constant):
    """Marks fit, but the secret is above the range, or shares are not below the prime."""

    def none(secret, threshold, number):
        if constant is None:
            return [b"\xfe" * shamir.SHARE] * number
        return [shamir.value_at([constant], x + 1).to_bytes(shamir.SHARE) for x in range(number)]

    round_ = until(folder, "keys")
    dealer, share_secrets = round_.clients[2], round_.clients[2].share_secrets

    def share_none(*asked):
        with monkeypatch.context() as patch:
            patch.setattr(shamir, "split", none)
            return share_secrets(*asked)

    dealer.share_secrets = share_none
    round_.share()
    with pytest.raises(DealerError, match="partition 2"):
        round_.finish()


def test_a_dealer_of_unreadable_shares_is_named(folder):
    round_ = until(folder, "keys")
    round_.share(lambda p, sent: sent | ({"sealed": bytes(len(sent["sealed"]))} if p == 2 else {}))
    with pytest.raises(DealerError, match="partition 2") as caught:
        round_.finish()
    assert caught.value.partition == 2


@pytest.mark.parametrize("answers", [5, 4])
def test_a_denier_is_named_beside_the_dealer_if_its_share_would_have_been_enough(folder, answers):
    """Two or three clients do not answer, and one of the others denies its share."""
    round_ = until(folder, "agree")
    signed = round_.server.close_list()
    for partition in range(answers):
        shares = round_.clients[partition].unmask(ROUND, signed)["shares"]
        if partition == 1:
            shares = shamir.NO_SHARE * (len(shares) // shamir.SHARE)
        round_.server.take_shares(partition, {"shares": shares})
    with pytest.raises(ValueError, match=f"got {answers - 1} shares, expected") as caught:
        round_.server.open()
    if answers == 4:
        assert not isinstance(caught.value, DealerError)
        return
    assert isinstance(caught.value, DealerError)
    assert (caught.value.partition, caught.value.deniers) == (0, (1,))
    assert round_.server.denied == {(dealer, 1) for dealer in (0, 2, 3, 4, 5, 6)}


@pytest.mark.parametrize(("part", "length"), [("sealed", 20), ("marks", 16)])
def test_an_unreadable_share_is_skipped_and_others_are_used(folder, part, length):
    """A client does not send a share whose mark is false, since the server would refuse it."""

    def spoiled(partition, sent):  # partition 2 spoils its share for client 0
        return sent | ({part: bytes(length) + sent[part][length:]} if partition == 2 else {})

    round_ = until(folder, "keys")
    round_.share(spoiled)
    round_.mask()
    round_.agree()
    assert round_.clients[0].state["held"][2] == b""
    round_.unmask()
    check_sums(round_, round_.server.open())


def test_an_upload_with_wrong_masks_is_detected(folder):
    round_ = until(folder, "masked", fails={4: "masked"})
    round_.fails = {}
    round_.server.take_masked(4, np.random.default_rng(1).bytes(len(round_.sent[4])))
    round_.agree()
    round_.unmask()
    with pytest.raises(ValueError, match="a client sent what is not masked as agreed"):
        round_.server.open()


@pytest.mark.parametrize("length", [0, 1, 10_000])
def test_messages_of_other_lengths_are_refused(folder, length):
    round_ = until(folder, "keys")
    nothing = {"sealed": bytes(length), "marks": b"", "seeds": b""}
    with pytest.raises(ValueError, match=r"got \d+ bytes, expected \d+"):
        round_.server.take_shares_sent(0, nothing)
    assert not round_.server.shares_sent
    round_ = until(folder, "shares")
    with pytest.raises(ValueError, match=r"bytes of masked numbers, expected"):
        round_.server.check_masked(0, bytes(length))
    assert not round_.server.alive.any()


def test_a_signature_of_another_list_is_refused(folder):
    round_ = until(folder, "masked")
    round_.server.close_masked()
    with pytest.raises(ValueError, match="not of the list"):
        round_.server.take_signature(0, {"signature": bytes(SIGNATURE)})
    with pytest.raises(ValueError, match="got 1 bytes, expected 64"):
        round_.server.take_signature(0, {"signature": b"x"})


def test_a_late_upload_stays_masked(folder):
    """The server has the pairwise key of a client that dropped out, and its upload arrives late."""
    round_ = SecureRound(folder, N, fails={3: "masked"})
    opened = round_.run()
    check_sums(round_, opened)
    late = from_bytes(round_.sent[3])
    rows = np.ones(7, bool)
    vector = Vector(round_.server.schedule, rows, late.copy())
    private = shamir.join(round_.server._shares[3, 0], round_.server.schedule.threshold)
    for other in range(N):
        if other != 3:
            secret = shared_secret(private, round_.announcements[other].keys[1])
            key = pair_key(secret, round_.server.statement, 3, other)
            vector.mask(key, rows, add=other < 3)
    assert stats.kstest(vector.numbers / 2**24, "uniform").pvalue > 1e-3
    assert not any(dealer == 3 and index for dealer, index in round_.server._shares)


# Fixed-point numbers.


def test_rounding_is_unbiased_and_zero_is_exact():
    random = np.random.default_rng(0)
    values = np.full(200_000, 0.3 * step_of(1.0))
    steps, beyond = to_steps(values, 1.0, random)
    assert set(steps.tolist()) == {LEVELS // 2, LEVELS // 2 + 1}
    assert abs(float((steps > LEVELS // 2).mean()) - 0.3) < 0.005
    assert beyond == 0
    assert (to_steps(np.zeros(9), 0.7, random)[0] == LEVELS // 2).all()


def test_values_beyond_the_bound_are_clipped_and_nan_becomes_zero():
    random = np.random.default_rng(0)
    values = np.array([-np.inf, -2.0, -1.0, 1.0, 1.5, np.inf, np.nan])
    steps, beyond = to_steps(values, 1.0, random)
    assert steps.tolist() == [0, 0, 0, LEVELS, LEVELS, LEVELS, LEVELS // 2]
    assert beyond == 5


def test_a_sum_of_256_clients_does_not_overflow():
    total = np.array([256 * LEVELS], np.uint32)
    assert 256 * LEVELS < 2**24
    assert decode_mean(total, 256, 0.5).tolist() == [0.5]
    with pytest.raises(ValueError, match="a sum of 255 clients"):
        decode_mean(total, 255, 0.5)


def test_the_number_of_groups_is_minimal():
    """If all clients train all rows, there is one group; a head of few clients is its own group."""
    everything = {p: np.ones(7, bool) for p in range(12)}
    assert set(make_schedule(RUN, ROUND, 3, PARTS, everything).row_groups) == {0}
    few = {p: np.array([p < 5] + [True] * 6) for p in range(12)}
    schedule = make_schedule(RUN, ROUND, 3, PARTS, few)
    assert schedule.row_groups.tolist() == [0] + [1] * 6
    for dropped in itertools.combinations(range(12), 4):
        alive = np.array([p not in dropped for p in range(12)])
        opened = schedule.opened(np.ones(12, bool), alive)
        assert opened == ({0, 1} if alive[:5].sum() >= 3 else {1})
