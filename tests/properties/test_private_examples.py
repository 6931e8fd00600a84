"""Private steps: the noise, the clipped examples, and an adversary's knowledge of one example.

The audit inserts an example with the largest possible gradient. An adversary with all other
knowledge decides from the step's gradient whether it was there: no better than the account permits
for a correct mechanism, and much better for a broken one.
"""

import math
from types import SimpleNamespace
from typing import Any

import dp_accounting
import pytest
import torch
from scipy.stats import kstest

from ravan_flwr.extras.example_privacy import gradients as example_gradients
from ravan_flwr.extras.example_privacy.gradients import ClippedExamples, StepNoise, joint_norms
from ravan_flwr.privacy.account import Releases, find_epsilon, find_total_epsilon
from ravan_flwr.privacy.mechanism import subsample
from ravan_flwr.seeding import generator
from tests.properties.test_privacy import lower_bound, seeded_noise

SHAPES = [(4, 3), (2,)]


def gradients_of(number, scale=1.0, seed=0):
    random = generator(seed, "gradients")
    return [scale * torch.randn(number, *shape, generator=random) for shape in SHAPES]


def empty(noise):
    return ClippedExamples([torch.zeros(shape) for shape in SHAPES], noise)


def test_each_example_is_clipped_over_all_parameters_together():
    gradients = gradients_of(6)
    gradients[0][2] = gradients[1][2] = 1e-4  # within the norm
    for one in range(6):
        clipped = empty(StepNoise(1.0, 0.5))
        expected = [each[one : one + 1] for each in gradients]
        clipped.add(expected)
        norm = float(joint_norms([total[None] for total in clipped.sums]))
        assert norm <= 0.5
        assert norm == pytest.approx(min(0.5, float(joint_norms(expected))), rel=1e-6)


def test_an_example_without_a_gradient_adds_nothing():
    clipped = empty(StepNoise(1.0, 0.5))
    clipped.add([torch.zeros_like(each) for each in gradients_of(2)])
    assert not any(total.any() for total in clipped.sums)


def test_gradients_of_other_parameters_raise_and_add_nothing():
    clipped = empty(StepNoise(1.0, 0.5))
    with pytest.raises(ValueError, match="zip"):
        clipped.add(gradients_of(2)[:1])
    assert not any(total.any() for total in clipped.sums)


@pytest.mark.parametrize(("device", "of_sums"), [("meta", "meta"), ("mps", "cpu")])
def test_sums_are_on_the_parameters_device_if_it_has_float64(device, of_sums):
    parameter: Any = SimpleNamespace(shape=(2,), device=torch.device(device))
    (total,) = ClippedExamples([parameter], StepNoise(1.0, 0.5)).sums
    assert total.device.type == of_sums


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_an_example_whose_gradient_is_not_finite_counts_as_zero(value):
    gradients = gradients_of(3)
    gradients[0][1] = value
    clipped, others = empty(StepNoise(1.0, 0.5)), empty(StepNoise(1.0, 0.5))
    clipped.add(gradients)
    others.add([torch.cat([each[:1], each[2:]]) for each in gradients])
    pairs = zip(clipped.sums, others.sums, strict=True)
    moved = float(joint_norms([(a - b)[None] for a, b in pairs]))
    assert moved == 0 if not math.isfinite(value) else moved <= 0.5
    assert all(total.isfinite().all() for total in clipped.sums)


def test_a_step_has_the_noise_of_the_multiplier_by_the_expected_examples():
    clipped = ClippedExamples([torch.zeros(200, 300)], StepNoise(1.5, 0.4))
    (released,) = clipped.noised_mean(expected=20.0)
    assert released.dtype == torch.float32
    scale = 1.5 * 0.4 / 20
    assert float(released.std()) == pytest.approx(scale, rel=0.02)
    assert kstest((released.flatten().double() / scale).numpy(), "norm").pvalue > 1e-6


def test_a_step_is_the_sum_plus_noise_by_the_expected_examples(monkeypatch):
    random = generator(3, "noise")
    drawn = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]
    asked = []

    def known(shape, scale):
        asked.append((tuple(shape), scale))
        return scale * drawn[len(asked) - 1]

    monkeypatch.setattr(example_gradients, "gaussian", known)
    clipped, gradients = empty(StepNoise(1.5, 40.0)), gradients_of(2)
    clipped.add(gradients)
    for each, noise, released in zip(gradients, drawn, clipped.noised_mean(4.0), strict=True):
        torch.testing.assert_close(released, ((each.double().sum(0) + 60.0 * noise) / 4).float())
    assert asked == [(shape, 60.0) for shape in SHAPES]


def test_the_sum_is_divided_by_the_expected_number_of_examples():
    gradients = [torch.ones(7, *shape) for shape in SHAPES]
    for rows in (0, 1, 7):
        clipped = empty(StepNoise(1e-12, 1e6))
        clipped.add([each[:rows] for each in gradients])
        released = clipped.noised_mean(expected=4.0)
        assert all(torch.allclose(r, torch.full_like(r, rows / 4), atol=1e-4) for r in released)
        assert not any(total.any() for total in clipped.sums)


def test_noise_does_not_depend_on_the_seed():
    drawn_noise = []
    for _ in range(3):
        torch.manual_seed(0)
        drawn_noise.append(empty(StepNoise(1.0, 1.0)).noised_mean(1.0)[0])
    assert not any(torch.equal(drawn_noise[i], drawn_noise[j]) for i in range(3) for j in range(i))


def test_examples_are_drawn_independently_with_the_rate():
    assert subsample(50, 1.0).tolist() == list(range(50))
    assert not len(subsample(50, 0.0))
    times = torch.zeros(40)
    sizes = []
    for _ in range(1000):
        rows = subsample(40, 0.2)
        times[rows] += 1
        sizes.append(float(len(rows)))
    assert float(times.mean()) == pytest.approx(200, rel=0.05)
    assert 130 < float(times.min()) <= float(times.max()) < 280
    # Independent draws have the variance of a binomial distribution.
    assert float(torch.tensor(sizes).var()) == pytest.approx(40 * 0.2 * 0.8, rel=0.2)


@pytest.mark.slow
def test_the_account_of_several_kinds_equals_the_librarys():
    kinds = (Releases(1.2, 0.4, 30), Releases(2.0, 0.5, 10), Releases(1.0, 0.1, 0))
    account = dp_accounting.pld.PLDAccountant()
    for one in kinds[:2]:
        gaussian = dp_accounting.GaussianDpEvent(one.multiplier)
        account.compose(dp_accounting.PoissonSampledDpEvent(one.rate, gaussian), one.number)
    assert find_total_epsilon(kinds, 1e-5) == pytest.approx(account.get_epsilon(1e-5), rel=2e-3)
    assert find_total_epsilon(kinds[:1], 1e-5) == find_epsilon(1.2, 0.4, 1e-5, 30)


# The audit: one step on all examples, so that the noise is an adversary's only uncertainty.

Z, DELTA, NUMBERS = 3.0, 1e-5, 300
CLAIMED = find_epsilon(Z, 1.0, DELTA, 1)


def along(place, size):
    gradient = torch.zeros(1, NUMBERS)
    gradient[0, place] = size
    return {"gradient": gradient}


OTHERS, CANARY = [along(0, 0.9)] * 3, along(1, 30.0)


def step(examples, norm=1.0, expected=4.0, noise=1.0):
    clipped = ClippedExamples([torch.zeros(NUMBERS)], StepNoise(Z, norm))
    clipped.add([torch.cat([example["gradient"] for example in examples])])
    clipped.noise = StepNoise(Z, noise)
    return {"gradient": clipped.noised_mean(expected)[0]}


def unclipped(examples):
    return step(examples, norm=1e6)


def divided_by_drawn(examples):
    return step(examples, expected=float(len(examples)))


def statistic(new):
    """Return the adversary's statistic: a value that the canary alone changes."""
    return float(new["gradient"][1])


def steadiness(new):
    """Return another statistic: a larger batch would have less noise."""
    return -float(new["gradient"].norm())


@pytest.mark.slow
@pytest.mark.parametrize("look", [statistic, steadiness])
def test_an_adversary_learns_no_more_than_the_account_permits(look):
    assert 1.0 < CLAIMED < 2.0
    assert lower_bound(step, look, OTHERS, CANARY) < CLAIMED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "look"), [(unclipped, statistic), (divided_by_drawn, steadiness)]
)
def test_a_broken_step_is_detected(broken, look):
    assert lower_bound(broken, look, OTHERS, CANARY) > CLAIMED


def test_seeded_noise_is_detected(monkeypatch):
    monkeypatch.setattr(example_gradients, "gaussian", seeded_noise)
    noise = step(OTHERS)
    found = lower_bound(step, lambda new: statistic(new) - statistic(noise), OTHERS, CANARY)
    assert found > CLAIMED
