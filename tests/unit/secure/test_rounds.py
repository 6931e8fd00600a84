"""A whole secure round of both halves: sums are exact, and nobody learns or forges more."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ravan_flwr.secure import schedule as rows_and_masks
from ravan_flwr.secure import shamir
from ravan_flwr.secure.agreement import SIGNATURE, pair_key, signed_keys
from ravan_flwr.secure.client import DistrustError, SecureClient
from ravan_flwr.secure.fixed_point import LEVELS, from_bytes, to_steps
from ravan_flwr.secure.node_keys import NodeKeys, make_keys
from ravan_flwr.secure.schedule import Vector, make_schedule, pack, stream_of, threshold_of
from ravan_flwr.secure.server import DealerError, SecureServer, read_announcement
from tests.unit.secure.rounds import PARTS, PHASES, ROUND, RUN, Held, step_of

N = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("secure")
    for partition in range(20):
        make_keys(path, partition)
    return path


def check_sums(held, opened):
    """Every row that is opened is the plain mean to the rounding; the others are left alone."""
    schedule = held.server.schedule
    for place, (part, row) in enumerate(schedule.row_ids):
        name = PARTS[part].name
        mean, number = held.true_means(place)
        count = int(opened.counts[name][row])
        assert count in (0, number)
        if count:
            assert count >= held.minimum
            error = np.abs(opened.means[name][row] - mean).max()
            assert error <= step_of(PARTS[part].bound)
        else:
            assert number < held.minimum
            assert not opened.means[name][row].any()


@pytest.mark.parametrize("number", [3, 4, 7, 20])
def test_the_sum_is_the_plain_one_to_the_rounding(folder, number):
    held = Held(folder, number)
    opened = held.hold()
    check_sums(held, opened)
    assert (opened.counts["H"] == number).all()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("gone", [(0,), (6,), (2, 5)])
def test_clients_may_fail_in_any_phase(folder, phase, gone):
    held = Held(folder, N, fails=dict.fromkeys(gone, phase))
    opened = held.hold()
    check_sums(held, opened)
    left = N - len(gone) * (phase in PHASES[:3])
    assert (opened.counts["H"] == left).all()


def test_clients_may_fail_in_different_phases(folder):
    held = Held(folder, 12, fails={0: "shares", 3: "masked", 5: "agree", 9: "unmask"})
    check_sums(held, held.hold())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fails", [{}, {1: "masked"}, {0: "shares", 4: "masked"}])
def test_masks_are_by_head_among_those_who_train_it(folder, seed, fails):
    random = np.random.default_rng(seed)
    rows = random.random((8, 7)) < 0.5
    rows[:, 6] = True
    held = Held(folder, 8, rows, fails, seed=seed)
    opened = held.hold()
    check_sums(held, opened)
    sizes = held.server.schedule.sizes
    for partition, sent in held.sent.items():  # no larger than what is trained
        assert len(sent) <= 3 * int(sizes[rows[partition]].sum())


def test_a_head_that_loses_its_trainers_stays_masked(folder):
    """Four train it, one fails after masking: three are opened. Two fail: it is left alone."""
    rows = np.ones((9, 7), bool)
    rows[4:, 0] = False
    for gone, count in (({3: "masked"}, 3), ({2: "masked", 3: "masked"}, 0)):
        held = Held(folder, 9, rows, gone)
        opened = held.hold()
        assert opened.counts["H"][0] == count
        assert (opened.counts["H"][1:] == 9 - len(gone)).all()
        check_sums(held, opened)
        # The server has not even the shares by which it could.
        group = held.server.schedule.group_of[0]
        shares = held.server._shares
        index = 1 + held.server.schedule.groups_of(0).index(group)
        assert ((0, index) in shares) == bool(count)


@pytest.mark.parametrize("phase", PHASES)
def test_too_few_clients_end_the_round(folder, phase):
    gone = N - threshold_of(N) + 1
    held = Held(folder, N, fails=dict.fromkeys(range(gone), phase))
    if phase == "keys":  # who never comes belongs to no round
        assert (held.hold().counts["H"] == N - gone).all()
        return
    with pytest.raises(ValueError, match=r"expected at least 5"):
        held.hold()


def test_the_server_alone_cannot_unmask(folder):
    """All that it has, less one share of the threshold, and the sum before it is unmasked."""
    held = Held(folder, N)
    held.meet()
    held.share()
    held.mask()
    held.agree()
    told = held.server.close_list()
    for partition in range(threshold_of(N) - 1):
        held.server.take_shares(partition, held.clients[partition].unmask(ROUND, told))
    with pytest.raises(ValueError, match="masks of partition 0 cannot be recovered: got 4 shares"):
        held.server.open()
    # The sum as it is has nothing of the changes: any number is as likely.
    assert held.server._total is not None
    total = held.server._total.numbers
    assert stats.kstest(total / 2**24, "uniform").pvalue > 1e-3


class Counted:
    """Bytes that look random and follow from a seed, in place of the system's."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def __call__(self, number=32):
        return self.random.bytes(number)


def test_masked_uploads_are_uniform_and_cancel(folder, monkeypatch):
    """Whole bytes of all uploads, of changes that are all the same, by fixed secrets."""
    fixed = Counted(5)
    monkeypatch.setattr("ravan_flwr.secure.agreement.new_key", fixed)
    monkeypatch.setattr("ravan_flwr.secure.client.secrets.token_bytes", fixed)
    monkeypatch.setattr(
        "tests.unit.secure.rounds.to_steps",
        lambda values, *_: (np.full(len(values), LEVELS, np.uint32), 0),
    )
    held = Held(folder, N)
    held.hold()
    for sent in held.sent.values():
        data = np.frombuffer(sent, np.uint8)
        counts = np.bincount(data >> 4, minlength=16)
        assert stats.chisquare(counts).pvalue > 1e-4
    data = np.frombuffer(b"".join(held.sent.values()), np.uint8)
    assert stats.chisquare(np.bincount(data, minlength=256)).pvalue > 1e-3
    # Without the clients' own masks, those of pairs cancel: what is left is exactly the sum.
    assert held.server._total is not None
    assert (held.server._total.numbers == N * LEVELS).all()
    # Unmasked, the same bytes are far from uniform.
    plain = np.tile(np.frombuffer(LEVELS.to_bytes(3, "little"), np.uint8), 100)
    assert stats.chisquare(np.bincount(plain, minlength=256)).pvalue < 1e-10


def test_no_stream_is_used_twice(folder, monkeypatch):
    seen, streams = [], []

    def noted(key, place, size, make=stream_of):
        streams.append(make(key, place, size).tobytes())
        seen.append((key, place))
        return make(key, place, size)

    monkeypatch.setattr(rows_and_masks, "stream_of", noted)
    held = Held(folder, 4)
    held.meet()
    held.share()
    held.mask()
    # A pair's streams are made by either; apart from that each is another.
    pairs, own = 4 * 3 // 2 * 7, 4 * 7
    assert len(set(seen)) == len(set(streams)) == pairs + own
    assert len(seen) == 2 * pairs + own


def test_a_long_stream_is_made_in_pieces(monkeypatch):
    whole = stream_of(bytes(32), (1, 2), 1000)
    monkeypatch.setattr(rows_and_masks, "_BLOCK", 64)
    assert stream_of(bytes(32), (1, 2), 1000).tolist() == whole.tolist()
    assert (stream_of(bytes(32), (2, 1), 1000) != whole).any()


def test_two_rounds_with_the_same_changes_have_other_masks(folder):
    first, second = Held(folder, 4), Held(folder, 4)
    for held in (first, second):
        held.hold()
    assert first.sent[0] != second.sent[0]
    assert np.array_equal(first.changes[0][0], second.changes[0][0])


# What a client refuses.


def until(folder, phase, **given):
    held = Held(folder, N, **given)
    steps = {"keys": held.meet, "shares": held.share, "masked": held.mask, "agree": held.agree}
    for name, step in steps.items():
        step()
        if name == phase:
            break
    return held


def test_a_client_unmasks_once(folder):
    held = until(folder, "agree")
    told = held.server.close_list()
    client = held.clients[0]
    assert client.unmask(ROUND, told)["shares"]
    assert client.state == {"round": ROUND, "phase": "done"}  # nothing else is left
    with pytest.raises(ValueError, match="answers each phase once"):
        client.unmask(ROUND, told)


def test_a_client_forgets_its_secrets_also_where_it_refuses(folder):
    held = until(folder, "agree")
    client = held.clients[0]
    with pytest.raises(ValueError, match="got 0 signatures, expected 5"):
        client.unmask(ROUND, {"signers": pack(np.zeros(N, bool)), "signatures": b""})
    assert client.state == {"round": ROUND, "phase": "done"}


def test_a_client_signs_one_list(folder):
    """So nobody can be alive to one client and dropped to another, or both at once."""
    held = until(folder, "masked")
    client, alive = held.clients[0], np.ones(N, bool)
    client.agree(ROUND, {"alive": pack(alive)})
    alive[3] = False
    with pytest.raises(ValueError, match="answers each phase once"):
        client.agree(ROUND, {"alive": pack(alive)})


def test_a_client_unmasks_only_what_a_threshold_has_signed(folder):
    """The server tells partition 0 that 3 is dropped, and the others that it is not."""
    held = until(folder, "masked")
    told = held.server.close_masked()
    for partition in range(1, N):
        held.server.take_signature(partition, held.clients[partition].agree(ROUND, told))
    alive = held.server.alive.copy()
    alive[3] = False
    held.clients[0].agree(ROUND, {"alive": pack(alive)})
    signers = np.array([p in held.server.signatures and p != 3 for p in range(N)])
    signatures = b"".join(held.server.signatures[p] for p in np.flatnonzero(signers))
    with pytest.raises(ValueError, match="partition 1: its signature is not by"):
        held.clients[0].unmask(ROUND, {"signers": pack(signers), "signatures": signatures})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda alive: alive[:3].fill(False), "got a list of 4 clients, expected 5 at least"),
        (lambda alive: alive[:1].fill(False), "got a list without this client"),
    ],
)
def test_a_list_that_is_too_short_is_not_signed(folder, change, told):
    held = until(folder, "masked")
    alive = np.ones(N, bool)
    change(alive)
    with pytest.raises(ValueError, match=told):
        held.clients[0].agree(ROUND, {"alive": pack(alive)})


def test_who_has_shared_nothing_cannot_be_alive(folder):
    held = until(folder, "masked", fails={6: "shares"})
    with pytest.raises(ValueError, match="have shared nothing"):
        held.clients[0].agree(ROUND, {"alive": pack(np.ones(N, bool))})


def test_a_round_that_was_is_not_begun_again(folder):
    held = until(folder, "agree")
    for number in (1, ROUND):
        with pytest.raises(ValueError, match=f"expected one after {ROUND}"):
            held.clients[0].make_keys(number)
    held.clients[0].make_keys(ROUND + 1)
    with pytest.raises(ValueError, match="asked to continue in round 3 after phase 'agreed'"):
        held.clients[0].unmask(ROUND, held.server.close_list())


def test_phases_come_in_order(folder):
    held = until(folder, "keys")
    client = held.clients[0]
    for phase in (client.take_shares, client.agree, client.unmask):
        with pytest.raises(ValueError, match="answers each phase once"):
            phase(ROUND, {})
    with pytest.raises(ValueError, match="answers each phase once"):
        client.mask(ROUND, np.zeros(3, np.uint32))


def test_invented_clients_are_not_known(folder, tmp_path):
    """The server's own keys under the name of a client."""
    for partition in (5, 6):
        make_keys(tmp_path, partition)
    held = Held(folder, N)
    for partition in (5, 6):
        keys = NodeKeys(tmp_path, partition)
        held.clients[partition] = SecureClient({}, RUN, partition, keys)
    held.meet()
    with pytest.raises(DistrustError, match="partition 5: its signature is not by") as caught:
        held.clients[0].share_secrets(ROUND, held.server.announce())
    assert caught.value.partitions == (5, 6)


def test_a_client_without_a_file_is_not_known(folder, tmp_path):
    make_keys(tmp_path, 0)
    for partition in range(1, N - 1):
        name = f"partition-{partition}.pub"
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    held = Held(folder, N)
    held.clients[0] = SecureClient({}, RUN, 0, NodeKeys(tmp_path, 0))
    held.meet()
    with pytest.raises(DistrustError, match=r"partition-6\.pub: it cannot be read \(No such file"):
        held.clients[0].share_secrets(ROUND, held.server.announce())


def test_signatures_of_another_run_round_or_client_are_false(folder):
    client = SecureClient({}, RUN, 2, NodeKeys(folder, 2))
    parts = client.make_keys(ROUND)
    assert read_announcement(RUN, ROUND, 2, parts).node == NodeKeys(folder, 2).public()
    for place in ((RUN + 1, ROUND, 2), (RUN, ROUND + 1, 2), (RUN, ROUND, 3)):
        with pytest.raises(ValueError, match="not signed by the key that it names"):
            read_announcement(*place, parts)
    with pytest.raises(ValueError, match="keys has 3 bytes, expected 128"):
        read_announcement(RUN, ROUND, 2, parts | {"keys": b"abc"})


def test_keys_that_the_others_would_refuse_cost_their_client(folder):
    """Of low order, or one for both purposes: signed as it should be, and refused at once."""
    keys = NodeKeys(folder, 2)
    good = SecureClient({}, RUN, 2, keys).make_keys(ROUND)["keys"][:32]
    for public, told in ((good + bytes(32), "low order"), (good + good, "are one, expected two")):
        signature = keys.sign(signed_keys(RUN, ROUND, 2, public))
        with pytest.raises(ValueError, match=told):
            read_announcement(RUN, ROUND, 2, {"keys": public + signature, "node": keys.public()})


def announced(held, **changes):
    """A schedule that differs from what the server should have said."""
    schedule = held.server.schedule
    given: dict[str, Any] = {
        "run": RUN, "round_": ROUND, "minimum": 3, "parts": PARTS,
        "rows": {p: schedule.trained[p] for p in range(N)},
    }  # fmt: skip
    other = make_schedule(**(given | changes))
    return SecureServer(other, held.announcements).announce()


def test_a_schedule_of_another_round_is_refused(folder):
    held = until(folder, "keys")
    for changes in ({"run": RUN + 1}, {"round_": ROUND + 1}):
        other = Held(folder, N)
        other.meet()
        with pytest.raises(ValueError, match=f"expected {RUN}, {ROUND}"):
            other.clients[0].share_secrets(ROUND, announced(other, **changes))
    rows = {p: held.server.schedule.trained[p] for p in range(1, N)}
    with pytest.raises(ValueError, match="without partition 0"):
        held.clients[0].share_secrets(ROUND, announced(held, rows=rows))


def test_a_head_for_few_is_refused_by_who_would_train_it(folder):
    """A server that lets one client train a head alone."""
    held = until(folder, "keys")
    told = held.server.announce()
    schedule = copy.copy(held.server.schedule)
    trained = schedule.trained.copy()
    trained[2:, 0] = False
    object.__setattr__(schedule, "trained", trained)
    told["schedule"] = schedule.to_bytes()
    with pytest.raises(ValueError, match="got a part that 2 clients train, expected 3"):
        held.clients[0].share_secrets(ROUND, told)


def test_keys_that_are_not_its_own_are_refused(folder):
    held = until(folder, "keys")
    later = SecureClient({}, RUN, 0, NodeKeys(folder, 0))
    held.announcements[0] = read_announcement(RUN, ROUND, 0, later.make_keys(ROUND))
    server = SecureServer(held.server.schedule, held.announcements)
    with pytest.raises(ValueError, match="other keys of this client"):
        held.clients[0].share_secrets(ROUND, server.announce())


def test_clients_of_different_schedules_cannot_open_each_others_shares(folder):
    """The server tells partition 0 another bound than the others: it has no share of theirs."""
    held = until(folder, "keys")
    other = announced(held, parts=(PARTS[0], PARTS[1].__class__("classifier", 1, 30, 0.2)))
    for partition in range(N):
        told = other if partition == 0 else held.server.announce()
        held.server.take_shares_sent(partition, held.clients[partition].share_secrets(ROUND, told))
    held.server.close_sharing()
    held.clients[0].take_shares(ROUND, held.server.to_mask(0))
    assert [bool(text) for text in held.clients[0].state["held"]] == [True] + 6 * [False]


def test_a_short_list_of_who_is_here_is_refused(folder):
    held = until(folder, "shares")
    told = held.server.to_mask(0)
    here = np.zeros(N, bool)
    here[:3] = True
    with pytest.raises(ValueError, match="got a list of 3 clients, expected 5 at least"):
        held.clients[0].take_shares(ROUND, told | {"here": pack(here)})


# What a client does wrong.


def test_a_false_share_costs_its_own_answer(folder):
    held = until(folder, "agree", fails={6: "masked"})
    told = held.server.close_list()
    for partition in range(6):
        shares = held.clients[partition].unmask(ROUND, told)
        if partition == 1:
            first = shares["shares"][:-1] + bytes([shares["shares"][-1] ^ 1])
            with pytest.raises(ValueError, match="is not the one that it was given"):
                held.server.take_shares(partition, {"shares": first})
        else:
            held.server.take_shares(partition, shares)
    check_sums(held, held.server.open())


def test_who_deals_false_shares_is_named(folder):
    """Marks that fit to shares of something else: found out when it counts."""
    held = until(folder, "keys")
    for partition in range(N):
        client = held.clients[partition]
        if partition == 2:
            true, client.state["pairs"] = client.state["pairs"], client.state["sealing"]
            client._check_key_list = lambda *_: None
        held.server.take_shares_sent(partition, client.share_secrets(ROUND, held.server.announce()))
        if partition == 2:
            client.state["pairs"] = true
    held.server.close_sharing()
    held.fails = {2: "masked"}
    held.mask()
    held.agree()
    held.unmask()
    with pytest.raises(ValueError, match="partition 2 has shared something else"):
        held.server.open()


@pytest.mark.parametrize("constant", [shamir.PRIME - 1, None])
def test_who_deals_shares_of_no_secret_is_named(folder, monkeypatch, constant):
    """As marked, but of a number above all secrets; or no numbers below the prime at all."""

    def none(secret, threshold, number):
        if constant is None:
            return [b"\xfe" * shamir.SHARE] * number
        return [shamir.value_at([constant], x + 1).to_bytes(shamir.SHARE) for x in range(number)]

    held = until(folder, "keys")
    for partition in range(N):
        with monkeypatch.context() as patch:
            if partition == 2:
                patch.setattr(shamir, "split", none)
            dealt = held.clients[partition].share_secrets(ROUND, held.server.announce())
        held.server.take_shares_sent(partition, dealt)
    held.server.close_sharing()
    held.mask()
    held.agree()
    held.unmask()
    with pytest.raises(DealerError, match="partition 2"):
        held.server.open()


def test_who_gives_most_of_the_others_nonsense_is_named(folder):
    held = until(folder, "keys")
    for partition in range(N):
        dealt = held.clients[partition].share_secrets(ROUND, held.server.announce())
        if partition == 2:
            dealt["sealed"] = bytes(len(dealt["sealed"]))
        held.server.take_shares_sent(partition, dealt)
    held.server.close_sharing()
    held.mask()
    held.agree()
    held.unmask()
    with pytest.raises(DealerError, match="partition 2") as caught:
        held.server.open()
    assert caught.value.partition == 2


def test_who_says_that_it_was_given_nothing_is_named_beside_who_gave_it(folder):
    """With two gone, one that tells no share is one too few, and no dealer's fault for sure."""
    held = until(folder, "agree")
    told = held.server.close_list()
    for partition in range(5):
        shares = held.clients[partition].unmask(ROUND, told)["shares"]
        if partition == 1:
            shares = shamir.NO_SHARE * (len(shares) // shamir.SHARE)
        held.server.take_shares(partition, {"shares": shares})
    with pytest.raises(DealerError, match="cannot be recovered: got 4 shares, expected") as caught:
        held.server.open()
    assert (caught.value.partition, caught.value.deniers) == (0, (1,))
    assert held.server.denied == {(dealer, 1) for dealer in (0, 2, 3, 4, 5, 6)}


def test_who_is_silent_makes_no_dealer_suspect(folder):
    """One denies, and two do not answer: with its share there were still too few."""
    held = until(folder, "agree")
    told = held.server.close_list()
    for partition in range(4):
        shares = held.clients[partition].unmask(ROUND, told)["shares"]
        if partition == 1:
            shares = shamir.NO_SHARE * (len(shares) // shamir.SHARE)
        held.server.take_shares(partition, {"shares": shares})
    with pytest.raises(ValueError, match="got 3 shares, expected at least 5") as caught:
        held.server.open()
    assert not isinstance(caught.value, DealerError)


@pytest.mark.parametrize(("part", "length"), [("sealed", 20), ("marks", 16)])
def test_nonsense_in_place_of_a_share_is_left_out_and_others_have_theirs(folder, part, length):
    """Of a share that is marked falsely its holder tells none: one not as marked is refused."""
    held = until(folder, "keys")
    for partition in range(N):
        dealt = held.clients[partition].share_secrets(ROUND, held.server.announce())
        if partition == 2:  # spoils what it gives to 0
            dealt[part] = bytes(length) + dealt[part][length:]
        held.server.take_shares_sent(partition, dealt)
    held.server.close_sharing()
    held.mask()
    held.agree()
    assert held.clients[0].state["held"][2] == b""
    held.unmask()
    check_sums(held, held.server.open())


def test_numbers_that_are_not_masked_as_agreed_are_found_out(folder):
    held = until(folder, "shares")
    held.fails = {4: "masked"}
    held.mask()
    held.fails = {}
    held.server.take_masked(4, np.random.default_rng(1).bytes(len(held.sent[4])))
    held.agree()
    held.unmask()
    with pytest.raises(ValueError, match="a client sent what is not masked as agreed"):
        held.server.open()


@pytest.mark.parametrize("length", [0, 1, 10_000])
def test_messages_of_other_lengths_are_refused(folder, length):
    held = until(folder, "keys")
    nothing = {"sealed": bytes(length), "marks": b"", "seeds": b""}
    with pytest.raises(ValueError, match=r"got \d+ bytes, expected \d+"):
        held.server.take_shares_sent(0, nothing)
    assert not held.server.shares_sent
    held = until(folder, "shares")
    with pytest.raises(ValueError, match=r"bytes of masked numbers, expected"):
        held.server.take_masked(0, bytes(length))
    assert not held.server.alive.any()


def test_a_signature_of_another_list_is_refused(folder):
    held = until(folder, "masked")
    held.server.close_masked()
    with pytest.raises(ValueError, match="not of the list"):
        held.server.take_signature(0, {"signature": bytes(SIGNATURE)})
    with pytest.raises(ValueError, match="signature has 1 bytes"):
        held.server.take_signature(0, {"signature": b"x"})


def test_a_late_upload_stays_masked(folder):
    """Of a client that was given up the server has the key of pairs, and its numbers come then."""
    held = Held(folder, N, fails={3: "masked"})
    opened = held.hold()
    check_sums(held, opened)
    late = from_bytes(held.sent[3])
    rows = np.ones(7, bool)
    vector = Vector(held.server.schedule, rows, late.copy())
    private = shamir.join(held.server._shares[3, 0], held.server.schedule.threshold)
    for other in range(N):
        if other != 3:
            secret = masks_secret(private, held.announcements[other].keys[1])
            key = pair_key(secret, held.server.statement, 3, other)
            vector.mask(key, rows, add=other < 3)
    assert stats.kstest(vector.numbers / 2**24, "uniform").pvalue > 1e-3
    assert not any(dealer == 3 and index for dealer, index in held.server._shares)


def masks_secret(private, public):
    from ravan_flwr.secure.agreement import shared_secret

    return shared_secret(private, public)


# Fixed point.


def test_rounding_is_unbiased_and_zero_is_exact():
    random = np.random.default_rng(0)
    values = np.full(200_000, 0.3 * step_of(1.0))
    steps, beyond = to_steps(values, 1.0, random)
    assert set(steps.tolist()) == {LEVELS // 2, LEVELS // 2 + 1}
    assert abs(float((steps > LEVELS // 2).mean()) - 0.3) < 0.005
    assert beyond == 0
    assert (to_steps(np.zeros(9), 0.7, random)[0] == LEVELS // 2).all()


def test_what_is_beyond_the_bound_is_cut_off_and_what_is_none_is_zero():
    random = np.random.default_rng(0)
    values = np.array([-np.inf, -2.0, -1.0, 1.0, 1.5, np.inf, np.nan])
    steps, beyond = to_steps(values, 1.0, random)
    assert steps.tolist() == [0, 0, 0, LEVELS, LEVELS, LEVELS, LEVELS // 2]
    assert beyond == 5


def test_256_clients_have_room():
    total = np.array([256 * LEVELS], np.uint32)
    assert 256 * LEVELS < 2**24
    from ravan_flwr.secure.fixed_point import mean_of

    assert mean_of(total, 256, 0.5).tolist() == [0.5]
    with pytest.raises(ValueError, match="a sum of 255 clients"):
        mean_of(total, 255, 0.5)


def test_groups_are_as_few_as_safety_allows(folder):
    """All train all: one. A head for few of many is one by itself."""
    del folder
    everything = {p: np.ones(7, bool) for p in range(12)}
    assert set(make_schedule(RUN, ROUND, 3, PARTS, everything).group_of) == {0}
    few = {p: np.array([p < 5] + [True] * 6) for p in range(12)}
    schedule = make_schedule(RUN, ROUND, 3, PARTS, few)
    assert schedule.group_of.tolist() == [0] + [1] * 6
    for gone in itertools.combinations(range(12), 4):
        alive = np.array([p not in gone for p in range(12)])
        opened = schedule.opened(np.ones(12, bool), alive)
        assert opened == ({0, 1} if alive[:5].sum() >= 3 else {1})
