"""Robust sums equal plain loops, and some false replies have little effect."""

import statistics

import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.serverapp.strategy.multikrum import select_multikrum
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ravan_flwr.config.keys import KEYS, KRUM
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.robust import STATISTICS, RobustRound, rank_by_krum
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from tests.methods import build, build_mid_run, some_state, train_client

NUMBERS = st.one_of(st.none(), st.integers(-50, 50))
HOW = KEYS["weighting"].choices[2:]
BY_COORDINATE = [how for how in HOW if how not in KRUM]
ABLE = [name for name, listed in METHODS.items() if listed.averages]


def robust_by_loop(values, old, how):
    """Aggregate one coordinate; None is a client that did not train it."""
    present = sorted(value for value in values if value is not None)
    if len(present) < 3:
        return old
    if how == "median":
        return statistics.median(present)
    cut = max(1, int(0.2 * len(present)))
    return statistics.mean(present[cut : len(present) - cut])


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=12))
def test_robust_sums_equal_a_plain_loop(rows):
    replies = [torch.tensor([float("nan") if v is None else float(v) for v in r]) for r in rows]
    old = torch.tensor([7.0, 8.0, 9.0])
    for how in BY_COORDINATE:
        expected = [robust_by_loop([row[i] for row in rows], float(old[i]), how) for i in range(3)]
        torch.testing.assert_close(
            STATISTICS[how]({"x": old}, {"x": replies})["x"],
            torch.tensor(expected, dtype=torch.float32),
        )


class Largest(TorchDispatchMode):
    """Note the largest number of float64 numbers in a tensor that is computed."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
            self.numbers = max(self.numbers, made.numel())
        return made


@pytest.mark.parametrize("how", HOW)
def test_replies_are_compared_in_blocks_of_a_bounded_size(how):
    """The replies are kept in float32; 2^18 of their numbers, 2 MB, are in float64 at a time."""
    replies = {"x": [torch.zeros(400_000) for _ in range(5)]}
    with Largest() as largest:
        STATISTICS[how]({"x": torch.ones(400_000)}, replies)
    assert 2**17 < largest.numbers <= 2**18


def test_an_unknown_statistic_is_refused():
    expected = "expected median, trimmed-mean, krum, multi-krum"
    with pytest.raises(ValueError, match=f"statistic = 'mode': {expected}"):
        RobustRound({"x": torch.zeros(2)}, "mode")


def accumulate(method, state, uploads, robust):
    sums = Aggregate(method, state, UpdateNormCheck(1e9), robust=robust)
    for upload, fraction in uploads:
        sums.check_and_add(upload, fraction)
    return sums.close()


@pytest.mark.parametrize("weighting", HOW)
@pytest.mark.parametrize("name", ABLE)
def test_one_false_reply_of_five_has_little_effect(name, weighting):
    method, adapters, state = build_mid_run(name)
    state[CLASSIFIER] = torch.zeros(4)
    honest = train_client(method, adapters, state, 1.0, 5) | {CLASSIFIER: torch.ones(4)}
    false = {
        key: value if value.dtype == torch.uint8 else torch.full_like(value, 1e6)
        for key, value in honest.items()
    }
    plain, robust = (
        accumulate(method, state, [(honest, 1.0)] * 4 + [(false, 1.0)], kind)
        for kind in ("none", weighting)
    )
    alone = accumulate(method, state, [(honest, 1.0)], "none")
    averaged = [key for key in plain if key not in method.frozen_tensors]
    assert all((plain[key] - alone[key]).abs().max() > 1e4 for key in averaged)
    for key, tensor in alone.items():
        torch.testing.assert_close(robust[key], tensor)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ABLE)
def test_identical_replies_and_their_order_change_nothing(name, how):
    method, adapters, state = build_mid_run(name)
    uploads = [(train_client(method, adapters, state, 1.0, seed), 1.0) for seed in range(5)]
    forth, back = (accumulate(method, state, order, how) for order in (uploads, uploads[::-1]))
    assert all(torch.equal(forth[key], back[key]) for key in forth)
    same = accumulate(method, state, uploads[:1] * 5, how)
    alone = accumulate(method, state, uploads[:1], "none")
    for key, tensor in alone.items():
        torch.testing.assert_close(same[key], tensor)


@pytest.mark.parametrize("how", BY_COORDINATE)
def test_a_head_is_aggregated_over_the_clients_that_trained_it(how):
    method, adapters, state = build_mid_run("ravan")
    uploads = [(train_client(method, adapters, state, 1 / 3, seed), 1 / 3) for seed in range(6)]
    got = accumulate(method, state, uploads, how)["H"].flatten(0, 1)
    old = state["H"].flatten(0, 1)
    trained: dict[int, list[torch.Tensor]] = {}
    for upload, _ in uploads:
        heads = [3 * i + h for i, row in enumerate(method.heads_in(upload)) for h in row]
        for place, head in enumerate(heads):
            trained.setdefault(head, []).append(upload["H"][place])
    assert 0 < len(trained) <= len(old)
    for head in range(len(old)):
        values = [tensor.flatten().tolist() for tensor in trained.get(head, [])]
        for i, number in enumerate(got[head].flatten().tolist()):
            expected = robust_by_loop(
                [row[i] for row in values], float(old[head].flatten()[i]), how
            )
            assert number == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_two_replies_do_not_change_the_state():
    """A node that claims more heads than the others is alone, or nearly, on some of them."""
    method, adapters, state = build_mid_run("ravan")
    small = [(train_client(method, adapters, state, 1 / 3, seed), 1 / 3) for seed in range(3)]
    lies = []
    for seed in (7, 8):
        upload = train_client(method, adapters, state, 1.0, seed)
        lies.append(({"H": upload["H"] + 1e4, "heads": upload["heads"]}, 1.0))
    count = torch.zeros(2, 3)
    for upload, _ in small + lies[:1]:
        for row, heads in zip(count, method.heads_in(upload), strict=True):
            row[heads] += 1
    assert (count < 3).any()
    for how in BY_COORDINATE:
        got = accumulate(method, state, small + lies[:1], how)["H"]
        assert torch.equal(got[count < 3], state["H"][count < 3])
        assert (got - state["H"]).abs().max() < 100
        assert not torch.equal(got, state["H"]) or not (count >= 3).any()
        alone = accumulate(method, state, lies, how)["H"]
        assert torch.equal(alone, state["H"])


# Krum.


def krum_by_definition(vectors, false):
    """Return the numbers of the vectors by rising score (Blanchard et al., 2017, section 4)."""
    scores = []
    for i, vector in enumerate(vectors):
        distances = sorted(
            sum((x - y) ** 2 for x, y in zip(vector, other, strict=True))
            for j, other in enumerate(vectors)
            if j != i
        )
        scores.append(sum(distances[: len(vectors) - false - 2]))
    return sorted(range(len(vectors)), key=lambda i: scores[i])


def largest_number_of_liars(number):
    return max(f for f in range(number) if number >= 2 * f + 3)


@pytest.mark.parametrize("number", range(5, 14))
@pytest.mark.parametrize("size", [1, 7, 90_000])
def test_krum_takes_the_replies_of_the_definition_and_of_flower(number, size):
    """90,000 numbers are several blocks. Flower's function has squared distances by x x - 2 x y."""
    random = torch.Generator().manual_seed(number)
    vectors = torch.randn(number, size, generator=random)
    false = largest_number_of_liars(number)
    tensors = {
        "x": [v[: size // 2] for v in vectors],
        "y": [v[size // 2 :].view(-1, 1) for v in vectors],
    }
    state = {name: torch.zeros_like(values[0]) for name, values in tensors.items()}
    ranks = rank_by_krum(tensors.values(), number, false)
    contents = [
        RecordDict({"arrays": ArrayRecord({"x": Array(vector.double().numpy())})})
        for vector in vectors
    ]
    for how, kept in (("krum", 1), ("multi-krum", number - false)):
        if size < 100:
            assert ranks[:kept] == krum_by_definition(vectors.double().tolist(), false)[:kept]
        flowers = select_multikrum(contents, false, kept)
        places = [[content is one for one in contents].index(True) for content in flowers]
        assert ranks[:kept] == places
        taken = torch.cat([x.flatten() for x in STATISTICS[how](state, tensors).values()])
        torch.testing.assert_close(taken, vectors[places].double().mean(0).float())


@given(
    st.lists(st.lists(st.integers(-50, 50), min_size=3, max_size=3), min_size=5, max_size=11),
    st.data(),
)
def test_colluding_replies_far_away_do_not_change_krum(rows, data):
    """Replacing f replies by others far away leaves an honest choice, and for multi-Krum the mean
    of all honest replies."""
    false = largest_number_of_liars(len(rows))
    liars = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=false, unique=True))
    lies = data.draw(st.lists(st.integers(1000, 10**9), min_size=false, max_size=false))
    if data.draw(st.booleans()):  # they agree
        lies = lies[:1] * false
    honest = [row for number, row in enumerate(rows) if number not in liars]
    sent = list(rows)
    for number, lie in zip(liars, lies, strict=False):
        sent[number] = [lie, lie, lie]
    state = {"x": torch.full((2,), 7.0), "y": torch.full((1,), 7.0)}
    results = {}
    for how in KRUM:
        sums = RobustRound(state, how)
        for row in sent:
            sums.add({"x": torch.tensor(row[:2]).float(), "y": torch.tensor(row[2:]).float()}, 1.0)
        results[how] = torch.cat(list(sums.close().values()))
    assert results["krum"].tolist() in honest
    if len(liars) == false:
        expected = torch.tensor(honest).double().mean(0).float()
        torch.testing.assert_close(results["multi-krum"], expected)
    low, high = torch.tensor(honest).min(0).values, torch.tensor(honest).max(0).values
    assert (results["multi-krum"] >= low).all()
    assert (results["multi-krum"] <= high).all()


def test_krum_takes_one_reply_for_all_tensors_and_a_median_does_not():
    """The replies that agree in one tensor differ in the other, so a choice by tensor differs."""
    method, adapters = build("fedit")
    state = some_state(method, adapters) | {CLASSIFIER: torch.zeros(4)}
    uploads = [
        train_client(method, adapters, state, 1.0, seed)
        | {CLASSIFIER: torch.full((4,), 9.0 * seed)}
        for seed in range(6)
    ]
    new = accumulate(method, state, [(upload, 1.0) for upload in uploads], "krum")
    (taken,) = [upload for upload in uploads if torch.equal(upload[CLASSIFIER], new[CLASSIFIER])]
    assert all(torch.equal(taken[name], new[name]) for name in new)
    median = accumulate(method, state, [(upload, 1.0) for upload in uploads], "median")
    assert not any(torch.equal(median["B"], upload["B"]) for upload in uploads)


@pytest.mark.parametrize("how", KRUM)
def test_four_replies_outvote_no_false_one_by_krum(how):
    method, adapters, state = build_mid_run("fedit")
    uploads = [(train_client(method, adapters, state, 1.0, seed), 1.0) for seed in range(4)]
    assert accumulate(method, state, uploads, how).keys() == state.keys()
    new = accumulate(method, state, uploads, how)
    assert all(torch.equal(new[name], state[name]) for name in state)


@pytest.mark.parametrize("how", KRUM)
@pytest.mark.parametrize(
    "partial", [{"budgets": "skewed-right"}, {"limits": "max-share=0.5"}], ids=str
)
def test_krum_is_refused_where_clients_train_different_parts(how, partial):
    with pytest.raises(ValueError, match=f"weighting = '{how}': got .* compares whole updates"):
        read_config({"weighting": how, "clients-per-round": 5} | partial)
    # A mean over all clients is the mean over those that trained, since all train everything.
    read_config({"weighting": how, "clients-per-round": 5, "head-mean": "all"})
