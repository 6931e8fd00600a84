"""Noise in shares: norms hold after rounding, sums have room and all noise, accounts are right."""

import json
import math

import dp_accounting
import dp_accounting.pld
import numpy as np
import pytest
from scipy import stats

from ravan_flwr.privacy.account import chance_to_decide, epsilon_of, epsilon_seen, most_rounds
from ravan_flwr.privacy.mechanism import gaussian
from ravan_flwr.secure.fixed_point import (
    MASK,
    MODULUS,
    ROOM,
    NoiseShares,
    round_within,
    signed,
    to_numbers,
)
from ravan_flwr.secure.node_keys import make_keys
from ravan_flwr.secure.schedule import Part, make_schedule, read_schedule, threshold_of
from ravan_flwr.secure.server import SecureServer, read_announcement
from tests.unit.secure.rounds import PHASES, ROUND, RUN, Held

C = 0.5


@pytest.mark.parametrize("size", [1, 2, 50, 5000])
@pytest.mark.parametrize("most", [3.0, 100.5, 2e4])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.999, 1.0])
def test_rounding_takes_no_norm_beyond_what_it_may_have(size, most, part):
    """Also where a number is all of the norm, or where rounding alone would be more than that."""
    random = np.random.default_rng(size)
    for seed in range(20):
        direction = np.random.default_rng(seed).normal(size=size)
        direction = np.eye(size)[0] if seed == 0 else direction / np.linalg.norm(direction)
        steps = round_within(direction * most * part * (1 - 2**-40), most, random)
        assert steps.dtype == np.int64
        assert int(np.dot(steps, steps)) <= most * most
        if part == 0:
            assert int(np.abs(steps).max()) == 0


def test_rounding_is_right_in_the_mean():
    values = np.random.default_rng(0).uniform(-3, 3, 200)
    random = np.random.default_rng(1)
    mean = np.mean([round_within(values, 1e4, random) for _ in range(4000)], axis=0)
    assert np.abs(mean - values).max() < 5 * 0.5 / math.sqrt(4000)


@pytest.mark.parametrize("clients", [3, 50, 256])
@pytest.mark.parametrize("multiplier", [0.1, 1.0, 1155.0])
def test_a_sum_has_room_for_all_changes_and_all_noise(clients, multiplier):
    """The worst case: all clients move one number, the same way, as far as they may."""
    noise = NoiseShares(C, multiplier)
    step = noise.step
    most = int(C / step)
    far = ROOM * math.sqrt(clients) * noise.deviation(clients)
    assert clients * most + far + clients / 2 < MODULUS / 2
    for way in (1, -1):
        each = [np.array([way * most]) for _ in range(clients)]
        each[0] = each[0] + way * int(far)
        total = np.sum([to_numbers(one).astype(np.int64) for one in each], axis=0)
        told = signed((total & int(MASK)).astype(np.uint32))
        assert told[0] == way * (clients * most + int(far))
    # The proof wants more than four steps of noise from each, so that rounding it is nothing.
    assert noise.deviation(clients) > 40
    assert noise.deviation(clients) * step * math.sqrt(clients) == pytest.approx(multiplier * C)


@pytest.mark.parametrize("clients", [3, 20, 256])
@pytest.mark.parametrize(("z", "bits"), [(1.0, 1.0), (0.5, 2.5), (2.0, 12.8)])
def test_a_bit_beside_the_changes_is_one_mechanism_with_them(clients, z, bits):
    """A vector of changes and bit has, by the deviation of the noise, a norm of 1 / z at most."""
    z1 = 1 / math.sqrt(1 / z**2 - 1 / (2 * bits) ** 2)
    noise = NoiseShares(C, z1, bits)
    assert noise.whole == pytest.approx(z)
    norm = math.hypot(C / noise.step, noise.bit)
    whole = noise.deviation(clients) * math.sqrt(clients)
    assert norm / whole <= 1 / z * (1 + 1e-9)
    assert norm / whole == pytest.approx(1 / z, rel=1e-2)  # the bit is rounded down


def test_what_the_server_sees_is_accounted_for_as_the_library_says():
    """Rounds without a draw, each with the noise that is left if a third drop out."""
    account = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    seen = 0.0
    for clients, rounds in ((6, 2), (50, 3)):
        left = NoiseShares(C, 4.0).left(clients, threshold_of(clients))
        assert left == pytest.approx(4.0 * math.sqrt(threshold_of(clients) / clients))
        account.compose(dp_accounting.GaussianDpEvent(left), rounds)
        seen += rounds / left**2
    assert epsilon_seen(seen, 1e-5) == pytest.approx(account.get_epsilon(1e-5), rel=2e-3)
    assert epsilon_seen(seen, 1e-5) > epsilon_of(4.0, 0.5, 1e-5, 5)  # hidden by a draw: less
    assert epsilon_seen(0, 1e-5) == 0


@pytest.mark.parametrize("z", [0.05, 0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-12])
def test_what_no_draw_hides_is_known_exactly(z, delta):
    """The library rounds its distributions up; where they would be too large, it is bounded."""
    told = epsilon_seen(1 / z**2, delta)
    if z >= 0.5:
        library = epsilon_of(z, 1.0, delta, 1)
        assert library - 2e-3 <= told <= library + 1e-9
    bound = 1 / (2 * z * z) + math.sqrt(2 * math.log(1 / delta)) / z  # of zCDP
    assert 0 <= told <= bound
    assert told > bound / 4 or z > 3


@pytest.mark.parametrize("sum_", [1e-12, 1e-3, 1e3, 1e6])
def test_very_much_and_very_little_are_counted_as_well(sum_):
    assert 0 <= epsilon_seen(sum_, 1e-5) < sum_ / 2 + math.sqrt(2 * sum_ * math.log(1e5)) + 1e-9


@pytest.mark.parametrize("others", [2, 9, 60])
@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_who_decides_whether_a_sum_is_opened(others, rate):
    chance = chance_to_decide(others, rate, 3, 40)
    draws = stats.binom(others, rate)
    assert chance == pytest.approx(rate * (draws.pmf(2) + draws.pmf(40)))
    assert chance_to_decide(others, 1.0, 3, 40) == 0


@pytest.mark.parametrize("likely", [0.5, 1 - 1e-5, 1 - 1e-9])
@pytest.mark.parametrize(
    ("clients", "rate", "rounds"), [(1000, 0.05, 100), (6, 1.0, 3), (200, 0.5, 50), (9, 0.1, 1)]
)
def test_in_how_many_rounds_the_client_is_that_is_drawn_most_often(clients, rate, rounds, likely):
    number = most_rounds(clients, rate, rounds, likely)
    draws = stats.binom(rounds, rate)

    def all_within(most):
        return clients * np.log1p(-min(draws.sf(most), 1 - 1e-12))

    assert all_within(number) >= math.log(likely)
    assert number == 0 or all_within(number - 1) < math.log(likely)


@pytest.mark.parametrize(
    "noise",
    [
        [C, 0.01, 0.0], [C, 1e9, 0.0], [0.0, 1.0, 0.0], [-1.0, 1.0, 0.0], [C, 1.0, -1.0],
        [math.inf, 1.0, 0.0], [C, math.nan, 0.0], [C, 1.0, 1e-3], [C, 1.0, 5e-324],
        [1e308, 1.0, 0.0], [5e-324, 1.0, 0.0], [C, 1.0, math.inf], [C, 1.0], [C, "1", 0.0],
        [C, True, 0.0], "noise", {}, 3,
    ],
)  # fmt: skip
def test_noise_that_is_none_is_refused(noise):
    rows = dict.fromkeys(range(4), np.ones(2, bool))
    good = make_schedule(1, 1, 3, [Part("H", 2, 5, C)], rows, "", NoiseShares(C, 1.0))
    assert read_schedule(good.to_bytes()).noise == NoiseShares(C, 1.0)
    told = json.loads(good.to_bytes()) | {"noise": noise}
    with pytest.raises(ValueError, match="got "):
        read_schedule(json.dumps(told).encode())


def test_a_row_that_some_do_not_send_would_have_less_noise_and_is_refused():
    rows = {p: np.array([True, p < 3]) for p in range(4)}
    schedule = make_schedule(1, 1, 3, [Part("H", 2, 5, C)], rows, "", NoiseShares(C, 1.0))
    with pytest.raises(ValueError, match="expected noise of all in each"):
        read_schedule(schedule.to_bytes())


class Noised(Held):
    """A round in which clients add noise to changes of norm C."""

    def meet(self):
        self.announcements = {
            p: read_announcement(RUN, ROUND, p, self.clients[p].make_keys(ROUND))
            for p in self.there("keys")
        }
        parts, rows = [Part("H", 4, 1500, C)], np.ones(4, bool)
        wanted = dict.fromkeys(self.announcements, rows)
        self.noise = NoiseShares(C, 1.0)
        schedule = make_schedule(RUN, ROUND, 3, parts, wanted, "", self.noise)
        self.server = SecureServer(schedule, self.announcements)

    def mask(self, late=()):
        for p in self.there("shares"):
            schedule, rows = self.clients[p].take_shares(ROUND, self.server.to_mask(p))
            number = len(schedule.partitions)
            change = self.random.normal(size=int(schedule.sizes[rows].sum()))
            change *= C / np.linalg.norm(change) / self.noise.step
            steps = round_within(change, C / self.noise.step, self.random)
            noise = gaussian([len(steps)], self.noise.deviation(number)).numpy()
            self.changes[p] = [steps * self.noise.step]
            numbers = to_numbers(steps + np.rint(noise).astype(np.int64))
            self.sent[p] = self.clients[p].mask(ROUND, numbers)
            if p in self.there("masked"):
                self.server.take_masked(p, self.sent[p])


@pytest.mark.parametrize("phase", PHASES)
def test_whoever_drops_out_the_sum_has_the_noise_that_is_accounted_for(tmp_path, phase):
    for partition in range(9):
        make_keys(tmp_path, partition)
    held = Noised(tmp_path, 9, fails={2: phase, 5: phase, 6: phase})
    opened = held.hold()
    alive, number = held.there("masked"), held.server.number
    noise = opened.means["H"].reshape(-1) - np.sum([held.changes[p][0] for p in alive], axis=0)
    variance = float(np.var(noise))
    share = len(alive) / number
    assert share >= threshold_of(number) / number
    expected = share * C**2
    deviations = math.sqrt(2 / noise.size)
    assert abs(variance / expected - 1) < 5 * deviations
    least = held.noise.left(number, threshold_of(number)) * C
    assert variance > least**2 * (1 - 5 * deviations)
    assert stats.kstest(noise / math.sqrt(expected), "norm").pvalue > 1e-6
