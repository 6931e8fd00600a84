"""Client-level privacy: the influence of one client, the noise, and the account.

The audit inserts a client with the largest possible change. An adversary with all other knowledge
decides from the release whether the client took part: no better than the account permits for a
correct mechanism, and much better for a broken one.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable

import dp_accounting
import pytest
import torch
from dp_accounting import rdp
from scipy.optimize import brentq
from scipy.stats import beta, kstest
from scipy.stats import norm as normal

from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER, expand_to_state
from ravan_flwr.privacy import account, mechanism
from ravan_flwr.privacy.account import find_epsilon, multiplier_for
from ravan_flwr.privacy.mechanism import ClippedSum, Noise, expected_clients, gaussian
from ravan_flwr.seeding import generator
from ravan_flwr.server.noised import check_finite
from tests.methods import aggregate, build, build_mid_run, some_state, train_client

PRIVATE = [
    name for name, method in METHODS.items() if method.sums_changes and not method.all_clients
]
SHARES = (1.0, 0.4, 0.7, 1.0, 0.34)
NOISELESS = 1e-30


def uploads_of(method, adapters, state, fractions=SHARES):
    """Return the clients' uploads after large updates, with the classifier."""
    found = []
    able = (fraction if method.can_train(fraction) else 1.0 for fraction in fractions)
    for number, fraction in enumerate(able):
        upload = train_client(method, adapters, state, fraction, 100 + number)
        random = generator(number, "classifier")
        found.append((upload | {CLASSIFIER: torch.randn(7, generator=random)}, fraction))
    return found


def sums_of(method, state, uploads, norm):
    sums = ClippedSum(state, norm)
    for upload, _ in uploads:
        sums.add(expand_to_state(method, state, upload))
    return sums


def next_state(method, state, uploads, norm, noise):
    """Return the next state from these uploads, for a cohort that contains all of them."""
    fractions = Counter(fraction for _, fraction in uploads)
    expected = expected_clients(method, state, fractions, 1.0)
    return sums_of(method, state, uploads, norm).noised_mean(noise, expected)


@pytest.mark.parametrize("changes", [{}, {"scoring": "weight"}, {"selection": "global"}], ids=str)
@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("norm", [1e-3, 0.5, 40.0])
def test_no_client_changes_the_sum_by_more_than_the_clip_norm(name, norm, changes):
    method, adapters = build(name, **changes if METHODS[name].has_heads else {})
    state = some_state(method, adapters) | {CLASSIFIER: torch.ones(7)}
    uploads = uploads_of(method, adapters, state)
    complete = sums_of(method, state, uploads, norm).sum
    for one in range(len(uploads)):
        without = sums_of(method, state, uploads[:one] + uploads[one + 1 :], norm).sum
        moved = math.hypot(*(float((complete[k] - without[k]).norm()) for k in complete))
        assert 0 < moved <= norm * (1 + 1e-9)


FULL: tuple[dict[str, str], tuple[float, ...]] = {}, (1.0, 1.0, 1.0)
PLAIN = [(name, *FULL) for name in PRIVATE]
SMALL_BUDGETS = ("ravan", {"head_mean": "all"}, (1.0, 0.7, 0.4, 0.4))


@pytest.mark.parametrize(("name", "changes", "fractions"), [*PLAIN, SMALL_BUDGETS])
def test_without_noise_and_clipping_the_result_is_the_plain_mean(name, changes, fractions):
    method, adapters, state = build_mid_run(name, **changes)
    uploads = [
        ({k: v for k, v in upload.items() if k != CLASSIFIER}, fraction)
        for upload, fraction in uploads_of(method, adapters, state, fractions)
    ]
    got = next_state(method, state, uploads, 1e9, Noise(NOISELESS, len(fractions)))
    expected = aggregate(method, state, uploads)
    for key in expected:
        torch.testing.assert_close(got[key], expected[key])


@pytest.mark.parametrize("scoring", ["random", "weight"])
def test_heads_are_trained_as_often_as_expected(scoring):
    method, adapters, state = build_mid_run("ravan", scoring=scoring)
    if scoring == "weight":
        state["H"][0, 1] = state["H"][0, 2]  # a tie, which is broken at random
    number, counts = 400, torch.zeros(2, 3)
    for seed in range(number):
        method.load(adapters, state)
        method.choose(adapters, 0.4, generator(seed, "choose"), lambda: None)
        for row, adapter in zip(counts, adapters, strict=True):
            row[adapter.trained_heads()] += 1
    expected = method.coverage(state, 0.4)["H"].flatten(1)
    assert torch.allclose(counts / number, expected.float(), atol=0.1)
    assert expected.sum(1).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("head_mean", ["trained", "all"])
def test_heads_without_clients_are_unchanged_and_all_others_get_noise(head_mean):
    method, adapters = build("ravan", scoring="weight", head_mean=head_mean)
    state = some_state(method, adapters) | {CLASSIFIER: torch.ones(7)}
    uploads = uploads_of(method, adapters, state, (0.4,))
    new = next_state(method, state, uploads, 1.0, Noise(1.0, 1))
    state.pop(CLASSIFIER)
    moved = (new["H"] != state["H"]).flatten(2).all(2)
    assert torch.equal(moved, method.coverage(state, 0.4)["H"].flatten(1) > 0)
    method, adapters = build("ravan")
    state = method.initial_state(adapters)
    expected = expected_clients(method, state, {0.4: 1}, 0.1)
    assert (ClippedSum(state, 1.0).noised_mean(Noise(1.0, 0.1), expected)["H"] != 0).all()


def test_a_change_that_is_not_finite_is_refused():
    method, adapters = build("ravan")
    state = method.initial_state(adapters)
    upload = train_client(method, adapters, state, 1.0, 1)
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            check_finite(upload | {"H": torch.full_like(upload["H"], value)})


# Noise.


def test_noise_is_normal_with_the_configured_deviation():
    drawn = gaussian([200, 300], 2.5).flatten()
    assert drawn.dtype == torch.float64
    assert float(drawn.std()) == pytest.approx(2.5, rel=0.02)
    assert kstest((drawn / 2.5).numpy(), "norm").pvalue > 1e-6
    assert gaussian([3], 1.0).shape == (3,)
    assert abs(float(drawn[:-1] @ drawn[1:]) / float(drawn @ drawn)) < 0.03


@pytest.mark.parametrize(("cohort", "scale"), [(None, 1.0), (500, 0.1)])
def test_a_release_has_the_noise_of_the_multiplier(cohort, scale):
    state = {"H": torch.zeros(20_000)}
    sums = ClippedSum(state, 0.25)
    sums.add({"H": torch.full([20_000], torch.nan)})
    new = sums.noised_mean(Noise(2.0, 50, cohort=cohort), {"H": torch.full([1], 50.0)})
    assert float(new["H"].std()) == pytest.approx(scale * 2.0 * 0.25 / 50, rel=0.03)


def test_noise_does_not_depend_on_the_seed():
    state, drawn = {"H": torch.zeros(4)}, []
    for _ in range(3):
        torch.manual_seed(0)
        drawn.append(ClippedSum(state, 1.0).noised_mean(Noise(1.0, 1), {"H": torch.ones(1)})["H"])
    assert not any(torch.equal(drawn[i], drawn[j]) for i in range(3) for j in range(i))


# A clip norm that adapts.


@pytest.mark.parametrize("clients", [3.0, 1000.0])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 8.0])
def test_bits_and_changes_together_are_one_mechanism_of_the_multiplier(clients, multiplier):
    noise = Noise(multiplier, clients, adaptive=True)
    together = noise.of_changes**-2 + (2 * noise.of_bits) ** -2
    assert together == pytest.approx(multiplier**-2)
    assert multiplier <= noise.of_changes <= 1.2 * multiplier


def test_the_adaptive_clip_norm_moves_towards_the_median_change():
    norm, state = 0.1, {"H": torch.zeros(4)}
    for number in range(60):
        sums = ClippedSum(state, norm)
        for size in (1.0, 2.0, 3.0, 4.0) * 25:
            sums.add({"H": torch.tensor([size, 0.0, 0.0, 0.0])})
        norm = sums.next_norm(Noise(0.5, 100, adaptive=True))
        # Below all changes, the norm grows at its full rate.
        if norm < 1.0:
            most = 0.1 * math.exp(0.1 * (number + 1))  # by 10.5 % a round
            assert 0.7 * most <= norm <= most * (1 + 1e-9)
    assert 1.5 < norm < 3.5
    assert ClippedSum(state, norm).next_norm(Noise(0.5, 100)) == norm


# The account.


@pytest.mark.parametrize(("z", "q", "n"), [(1.0, 0.15, 10), (0.7, 0.05, 200), (5.0, 1.0, 20)])
def test_the_account_equals_the_librarys(z, q, n):
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
    direct = dp_accounting.pld.PLDAccountant().compose(event, n).get_epsilon(1e-5)
    renyi = rdp.RdpAccountant().compose(event, n).get_epsilon(1e-5)
    got = find_epsilon(z, q, 1e-5, n)
    assert direct <= got * (1 + 1e-9)
    assert got == pytest.approx(direct, rel=2e-3)
    assert got <= renyi


def test_amplification_by_sampling_agrees_with_the_literature():
    """Abadi et al. (2016): q = 0.01, noise 4, 10,000 steps, delta 1e-5 is epsilon 1.26 or less."""
    assert 0.8 < find_epsilon(4.0, 0.01, 1e-5, 10_000) <= 1.26
    assert find_epsilon(1.0, 0.15, 1e-5, 0) == 0.0


@pytest.mark.slow
def test_noise_is_calibrated_to_just_within_epsilon():
    z = multiplier_for(2.0, 0.1, 1e-5, 30)
    assert 1.98 < find_epsilon(z, 0.1, 1e-5, 30) <= 2.0
    with pytest.raises(ValueError, match=r"epsilon = 1e-09: 5 releases .* even with a noise"):
        multiplier_for(1e-9, 0.5, 1e-5, 5)
    assert multiplier_for(1000.0, 1.0, 1e-5, 1) == 0.1


@pytest.mark.parametrize(("epsilon", "number"), [(1.0, 1), (2.0, 4), (0.5, 30)])
def test_the_multiplier_without_sampling_equals_the_exact_one(epsilon, number):
    """That many releases are one with noise z / sqrt(number); its delta is Balle and Wang's."""

    def excess_delta(z):
        larger, smaller = normal.cdf([0.5 / z - epsilon * z, -0.5 / z - epsilon * z])
        return larger - math.exp(epsilon) * smaller - 1e-5

    exact = math.sqrt(number) * brentq(excess_delta, 0.1, 100.0)
    assert exact <= multiplier_for(epsilon, 1.0, 1e-5, number) <= exact * (1 + 2e-4)


@pytest.mark.parametrize("z", [0.1, 10.0, 1000.0])
def test_the_smallest_multiplier_within_epsilon_is_returned(z, monkeypatch):
    """The least one, the first that is tried, and the largest, with an account by hand."""
    monkeypatch.setattr(account, "find_epsilon", lambda noise, rate, delta, number: number / noise)
    assert multiplier_for(3 / z, 1.0, 1e-5, 3) == z
    less = math.nextafter(3 / z, 0.0)
    if z == 1000.0:
        with pytest.raises(ValueError, match="even with a noise multiplier of 1000; raise"):
            multiplier_for(less, 1.0, 1e-5, 3)
    else:
        assert z < multiplier_for(less, 1.0, 1e-5, 3) <= z * (1 + 1e-4)


# The audit.

TRIALS, Z, DELTA = 400, 3.0, 1e-5
State = dict[str, torch.Tensor]
Mechanism = Callable[[list[State]], State]
OLD = {"H": torch.zeros(2, 3)}  # two heads
OTHERS = [{"H": torch.tensor([[0.9, 0.0, 0.0], [math.nan] * 3])} for _ in range(3)]
CANARY = {"H": torch.tensor([[math.nan] * 3, [30.0, 0.0, 0.0]])}


def released(clients, norm=1.0, counts=None):
    sums = ClippedSum(OLD, norm)
    for client in clients:
        sums.add(client)
    expected = torch.tensor([[3.0], [1.0]]) if counts is None else counts
    return sums.noised_mean(Noise(Z, 4), {"H": expected})


def unclipped(clients):
    sums = ClippedSum(OLD, 1e6)
    for client in clients:
        sums.add(client)
    sums.norm = 1.0  # the norm that the noise is for
    return sums.noised_mean(Noise(Z, 4), {"H": torch.tensor([[3.0], [1.0]])})


def with_realised_counts(clients):
    counts = sum((~torch.isnan(client["H"][:, :1])).double() for client in clients)
    return released(clients, counts=counts)


def statistic(new):
    """Return the adversary's statistic: a value that the canary alone changes."""
    return float(new["H"][1, 0])


def lower_bound(
    mechanism: Mechanism,
    statistic_of: Callable[[State], float] = statistic,
    others: list[State] = OTHERS,
    canary: State = CANARY,
) -> float:
    """Return a lower bound of one release's epsilon, by thresholds found on separate trials."""
    with_it, without = (
        torch.tensor([statistic_of(mechanism(clients)) for _ in range(2 * TRIALS)])
        for clients in ([*others, canary], others)
    )
    best = 0.0
    middle = sorted({*with_it[:TRIALS].quantile(torch.linspace(0, 1, 9)).tolist(), 1e-9})
    scores = {}
    for threshold in middle:
        hits, false = (int((x[:TRIALS] > threshold).sum()) for x in (with_it, without))
        scores[threshold] = hits / (false + 3)
    threshold = max(scores, key=lambda key: scores[key])
    hits, false = (int((x[TRIALS:] > threshold).sum()) for x in (with_it, without))
    lowest_rate = beta.ppf(0.001, hits, TRIALS - hits + 1) if hits else 0.0
    highest_rate = beta.ppf(0.999, false + 1, TRIALS - false) if false < TRIALS else 1.0
    if lowest_rate > DELTA:
        best = max(0.0, math.log((lowest_rate - DELTA) / highest_rate))
    return best


CLAIMED = find_epsilon(Z, 1.0, DELTA, 1)


def test_an_adversary_learns_no_more_than_the_account_permits():
    assert 1.0 < CLAIMED < 2.0
    assert lower_bound(released) < CLAIMED


@pytest.mark.parametrize("broken", [unclipped, with_realised_counts])
def test_a_broken_mechanism_is_detected(broken):
    assert lower_bound(broken) > CLAIMED


def seeded_noise(shape, scale):
    return scale * torch.randn(shape, generator=generator(0, "noise"), dtype=torch.float64)


def test_seeded_noise_is_detected(monkeypatch):
    monkeypatch.setattr(mechanism, "gaussian", seeded_noise)
    noise = released([])
    assert lower_bound(released, lambda new: statistic(new) - statistic(noise)) > CLAIMED


def test_without_dp_accounting_an_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ValueError, match="is not installed; pip install dp-accounting"):
        find_epsilon(1.0, 0.123, 1e-5, 1)
