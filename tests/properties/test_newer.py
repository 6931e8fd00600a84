"""The methods of 2024 to 2026 against the equations of their papers, by float64 loops."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ravan_flwr.adapters.lora import ProductSum
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.budgets import affordable
from ravan_flwr.methods.fedrot_lora import nearest_rotation, partial_rotation
from ravan_flwr.methods.lora_fair import correction
from ravan_flwr.server.aggregation import MOMENTS, Aggregate, ServerOptimizer, ServerState
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from tests.methods import (
    LAYERS,
    aggregate,
    assert_close,
    build,
    build_mid_run,
    build_with_network,
    deltas,
    some_state,
    train_client,
)
from tests.reference import best_of_rank, weighted_mean

SHARES = st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0])
CLIENTS = st.lists(st.tuples(SHARES, st.integers(0, 99)), min_size=1, max_size=5)
FULL = st.lists(st.tuples(st.just(1.0), st.integers(0, 99)), min_size=1, max_size=5)
TIGHT = {"rtol": 1e-4, "atol": 1e-4}


def matrices(flat, rank, first):
    """Return the float64 matrices of all layers in a flat tensor; `first`: shape (side, rank)."""
    flat, found = flat.double(), []
    for layer in LAYERS:
        side = layer.out_features if first else layer.in_features
        part, flat = flat[: side * rank], flat[side * rank :]
        found.append(part.view(side, rank) if first else part.view(rank, side))
    assert not len(flat)
    return found


def loop_product(B, A):
    """Compute B A element by element."""
    result = torch.zeros(len(B), A.shape[1], dtype=torch.float64)
    for i in range(len(B)):
        for j in range(A.shape[1]):
            for k in range(len(A)):
                result[i, j] += B[i, k] * A[k, j]
    return result


def factors(tensors, rank):
    """Return the float64 factors (B, A) of every layer."""
    first, second = matrices(tensors["B"], rank, True), matrices(tensors["A"], rank, False)
    return list(zip(first, second, strict=True))


def replies(method, adapters, state, clients):
    """Return uploads by (fraction, seed), with their budget fractions and weights from 1 to 3."""
    able = [(share if method.can_train(share) else 1.0, seed) for share, seed in clients]
    return [
        (train_client(method, adapters, state, share, seed), share, 1.0 + seed % 3)
        for share, seed in able
    ]


def round_of(name, clients, **changes):
    """Return a method during a run, its adapters, the state, and replies by (fraction, seed)."""
    method, adapters, state = build_mid_run(name, **changes)
    return method, adapters, state, replies(method, adapters, state, clients)


def layer_means(sent, rank, layer):
    """Return a layer's mean B, mean A and mean product, by the replies' weights."""
    pairs = [factors(upload, affordable(share, rank))[layer] for upload, share, _ in sent]
    products = [loop_product(B, A) for B, A in pairs]
    weights = [weight for *_, weight in sent]
    return [weighted_mean(some, weights) for some in (*zip(*pairs, strict=True), products)]


# FedSVD


@given(FULL)
def test_fedsvd_decomposes_the_mean_of_b_times_the_a_that_clients_had(clients):
    method, _, state, sent = round_of("fedsvd", clients, rank=3)
    new = aggregate(method, state, sent)
    old_As = matrices(state["A"], 3, False)
    for layer, (B_new, A_new) in enumerate(factors(new, 3)):
        each = [matrices(upload["B"], 3, True)[layer] for upload, *_ in sent]
        mean = weighted_mean(each, [weight for *_, weight in sent])
        product = loop_product(mean, old_As[layer])
        U, S, Vh = torch.linalg.svd(product)
        assert_close([loop_product(B_new, A_new)], [product], **TIGHT)
        assert_close([A_new @ A_new.T], [torch.eye(3)], **TIGHT)
        assert_close([B_new.T @ B_new], [(S[:3] ** 2).diag()], rtol=1e-3, atol=1e-3)
        for rank in range(3):  # up to their sign, for distinct singular values
            if S[rank] - S[rank + 1] > 0.1 and (rank == 0 or S[rank - 1] - S[rank] > 0.1):
                assert abs(float(A_new[rank] @ Vh[rank])) > 1 - 1e-3
                assert abs(float(B_new[:, rank] @ U[:, rank])) > (1 - 1e-3) * float(S[rank])


@pytest.mark.parametrize(("name", "received"), [("ffa-lora", {"B"}), ("fedsvd", {"B", "A"})])
def test_methods_with_a_fixed_a_train_and_send_b_alone(name, received):
    method, adapters = build(name, rank=None, lora_rank=1)
    assert method.rank == 22 // 10  # sum(out + in) over sum(out)
    state = some_state(method, adapters)
    method.load(adapters, state)
    before = [adapter.A.clone() for adapter in adapters]
    upload = train_client(method, adapters, state, 1.0, 0)
    assert (set(upload), set(method.broadcast(state, 1.0))) == ({"B"}, received)
    assert all(torch.equal(a.A, A) for a, A in zip(adapters, before, strict=True))
    if "A" in received:
        assert_close(before, matrices(state["A"], 2, False))
    assert [p.shape for p in method.parameters(adapters)] == [(6, 2), (4, 2)]


def test_fedsvd_keeps_the_state_if_all_clients_send_zero():
    method, adapters, state = build_mid_run("fedsvd")
    zero = {"B": torch.zeros_like(state["B"])}
    new = aggregate(method, state, [(zero, 1.0)])
    assert all(not delta.any() for delta in deltas(method, adapters, new))
    for A in matrices(new["A"], 2, False):
        assert_close([A @ A.T], [torch.eye(2)])


# LoRA-FAIR


def fair_cost(B, A, product, D):
    """Compute the paper's objective: 1 - cos(product, (B + D) A) + lambda |D|^2."""
    result = (B + D) @ A
    cosine = (result * product).sum() / (result.norm() * product.norm())
    return 1 - cosine + 0.01 * (D * D).sum()


def descend(B, A, product):
    """Minimise D from zero by a thousand steps of gradient descent, as the public code does.

    By M = (B + D) A, the cosine of M and P has the gradient (P - M <M, P> / |M|^2) / (|M| |P|).
    """
    D, unit = torch.zeros_like(B), product / product.norm()
    for _ in range(1000):
        result = (B + D) @ A
        size = result.norm()
        towards = (unit - result * ((result * unit).sum() / size**2)) / size
        D = D - 1e-2 * (0.02 * D - towards @ A.T)
    return D


@settings(max_examples=6)
@given(FULL, st.sampled_from([0.02, 1.0]))
def test_lora_fairs_correction_is_the_minimum_of_the_papers_objective(clients, movement):
    method, _, state, sent = round_of("lora-fair", clients)
    for upload, *_ in sent:  # changes as small as honest ones, or large
        for name, tensor in upload.items():
            tensor.copy_(state[name] + movement * (tensor - state[name]))
    new = factors(aggregate(method, state, sent), 2)
    for layer, old in enumerate(matrices(state["B"], 2, True)):
        B, A, product = layer_means(sent, 2, layer)
        assert_close([new[layer][1]], [A], **TIGHT)
        D = new[layer][0] - B
        if D.norm() > 0.999 * (B - old).norm():
            continue  # the correction was reduced: see below
        expected_D = descend(B, A, product)
        assert fair_cost(B, A, product, D) <= fair_cost(B, A, product, expected_D) + 1e-6
        D.requires_grad_()
        fair_cost(B, A, product, D).backward()
        assert D.grad.norm() < 1e-4


@given(FULL)
def test_lora_fair_is_inexact_and_no_farther_from_the_mean_and_no_longer_than_fedit(clients):
    """The penalty bounds the length: of all of one direction, the nearest to B is the best."""
    method, adapters, state, sent = round_of("lora-fair", clients)
    new = aggregate(method, state, sent)
    for layer, got in enumerate(deltas(method, adapters, new)):
        B, A, product = layer_means(sent, 2, layer)
        fair, fedit = (
            float((result * product).sum() / (result.norm() * product.norm()))
            for result in (got, B @ A)
        )
        assert fair >= fedit - 1e-6
        assert matrices(new["B"], 2, True)[layer].norm() <= B.norm() * (1 + 1e-6)
        if len(set(clients)) > 1:
            assert (got - product).norm() > 0.01 * product.norm()


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_holds_also_for_contradictory_clients(seed):
    """Independent factors, and a penalty that is tiny beside the cosine."""
    random = torch.Generator().manual_seed(seed)
    B, A = (torch.randn(5, *shape, generator=random) for shape in ((7, 3), (3, 3)))
    B = 1e-3 * B.double()
    A = A.double()
    mean_B, mean_A = B.mean(0), A.mean(0)
    moment = ProductSum(7, 3)
    for one, other in zip(B - mean_B, A - mean_A, strict=True):
        moment.add(one, other, 1.0)
    corrected = mean_B + correction(mean_B, mean_A, moment, 5.0)
    assert corrected.norm() <= mean_B.norm() * (1 + 1e-9)
    product = (B @ A).mean(0)
    cosines = [
        float((result @ mean_A * product).sum() / (result @ mean_A).norm() / product.norm())
        for result in (corrected, mean_B)
    ]
    assert cosines[0] >= cosines[1]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_lora_fair_has_no_correction_without_a_cosine(sign):
    """Replies that cancel each other: the mean of B, or also that of A, is zero."""
    method, adapters, state = build_mid_run("lora-fair")
    sent = train_client(method, adapters, state, 1.0, 0)
    opposite = {"B": -sent["B"], "A": sign * sent["A"]}
    new = aggregate(method, state, [(sent, 1.0), (opposite, 1.0)])
    assert not new["B"].any()
    assert torch.equal(new["A"], sent["A"] if sign > 0 else torch.zeros_like(sent["A"]))


def test_lora_fairs_correction_is_no_larger_than_the_rounds_own_change():
    """A reply whose B and A are far off, each within its limit, adds no more than that to B."""
    method, _, state = build_mid_run("lora-fair")
    still = {name: tensor.clone() for name, tensor in state.items()}
    far = {name: tensor + 100.0 for name, tensor in state.items()}
    new = aggregate(method, state, [(still, 1.0), (still, 1.0), (far, 1.0)])
    for old, now in zip(*(matrices(s["B"], 2, True) for s in (state, new)), strict=True):
        assert (now - old).norm() <= 2 * 100 / 3 * old.numel() ** 0.5 * (1 + 1e-5)


# raFLoRA


@given(CLIENTS)
def test_raflora_averages_every_rank_over_the_clients_that_have_it(clients):
    method, adapters, state, sent = round_of("raflora", clients, rank=4)
    new = aggregate(method, state, sent)
    for layer, got in enumerate(deltas(method, adapters, new)):
        total = torch.zeros(got.shape, dtype=torch.float64)
        for rank in range(4):
            having = [(up, affordable(f, 4), w) for up, f, w in sent if rank < affordable(f, 4)]
            having = having or [(state, 4, 1.0)]  # trained by no client: unchanged
            pairs = [factors(tensors, own)[layer] for tensors, own, _ in having]
            parts = [torch.outer(B[:, rank], A[rank]) for B, A in pairs]
            total += weighted_mean(parts, [weight for *_, weight in having])
        assert_close([got], [best_of_rank(total, 4)], **TIGHT)


@pytest.mark.parametrize(
    ("name", "other", "tolerance"),
    [
        ("raflora", "flexlora", TIGHT),
        *((name, "fedit", {"rtol": 1e-6, "atol": 1e-7}) for name in ("fed-plora", "fslora")),
    ],
)
def test_with_full_budgets_a_method_equals_a_simpler_one(name, other, tolerance):
    states = []
    for method_name in (name, other):
        method, _, state, sent = round_of(method_name, [(1.0, seed) for seed in range(4)])
        states.append(aggregate(method, state, sent))
    assert states[0].keys() == states[1].keys()
    for key in ("B", "A"):
        assert_close([states[0][key]], [states[1][key]], **tolerance)


def test_norms_of_cancelling_ranks_in_a_raflora_reply_are_measured_separately(monkeypatch):
    """The whole product is zero; if others have the first rank only, the second rank is not."""
    method, _, state = build_mid_run("raflora")
    bad = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for B, A in zip(*method.split(bad), strict=True):
        B[0], A[:, 0] = torch.tensor([300.0, -300.0]), 300.0
    sums = Aggregate(method, state, UpdateNormCheck(2000.0))
    norms: list[tuple[str, float]] = []
    monkeypatch.setattr(
        sums.limit, "check_growth", lambda name, _, norm, *__: norms.append((name, norm))
    )
    sums.check_and_add(bad, 1.0)
    ((name, norm),) = norms
    assert name == "B"
    assert norm == pytest.approx(2**0.5 * 300.0**2)


# FLoRA and FedEx-LoRA


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("name", ["fedex-lora", "flora"])
@given(st.lists(CLIENTS, min_size=1, max_size=4), st.sampled_from([1.0, 0.25]))
def test_what_the_factors_do_not_hold_is_added_to_the_weight(name, rounds, scale):
    """The papers' equations, over several rounds: FLoRA has clients of any rank, and restarts."""
    method, adapters, network = build_with_network(name, rank=4, lora_scale=scale)
    W = [network.get_submodule(layer.name).base.weight.double().clone() for layer in LAYERS]
    state, begun = method.initial_state(adapters), []
    for clients in rounds:
        method.load(adapters, state)
        assert name != "flora" or not any(adapter.B.any() for adapter in adapters)
        begun.append(torch.cat([adapter.A.detach().flatten() for adapter in adapters]))
        sent = replies(method, adapters, state, clients)
        for layer in range(len(LAYERS)):
            if name == "flora":
                products = [
                    loop_product(*factors(upload, affordable(fraction, 4))[layer])
                    for upload, fraction, _ in sent
                ]
                added = weighted_mean(products, [weight for *_, weight in sent])
            else:
                B, A, product = layer_means(sent, 4, layer)
                added = product - B @ A
            W[layer] = W[layer] + scale * added
        state = aggregate(method, state, sent)
        method.load(adapters, state)
        weights_now = [network.get_submodule(layer.name).base.weight for layer in LAYERS]
        assert_close(weights_now, W, **(TIGHT if name == "flora" else {}))
    restarted = [not torch.allclose(a, b) for a, b in itertools.pairwise(begun)]
    assert name != "flora" or all(restarted)


def test_floras_clients_of_a_round_start_equal_for_any_rank():
    method, adapters, state = build_mid_run("flora", rank=4)
    for fraction in (0.25, 0.5, 1.0):
        method.load(adapters, method.broadcast(state, fraction))
        method.choose(adapters, fraction, torch.Generator(), lambda: None)
        still = method.upload(adapters)
        start = method.find_start(still, method.broadcast(state, fraction))
        assert all(torch.equal(still[name], start[name]) for name in ("B", "A"))
        for A, first in zip(method.split(still)[1], method.first_A(state), strict=True):
            assert torch.equal(A, first[: affordable(fraction, 4)])


def test_a_flora_round_without_replies_reinitialises():
    method, adapters, state = build_mid_run("flora")
    assert state["rounds"].tolist() == [1]
    assert aggregate(method, state, [])["rounds"].tolist() == [1]
    with pytest.raises(ValueError, match=r"got tensors .*expected 'rounds' among them"):
        method.load(adapters, {k: v for k, v in state.items() if k != "rounds"})


@pytest.mark.parametrize("name", METHODS)
def test_rounds_repeat_after_the_period(name):
    method, _ = build(name)

    def plain(number):
        values = vars(method.in_round(number)).items()
        return {key: value for key, value in values if isinstance(value, str | tuple)}

    for number in (1, 2):
        assert plain(number) == plain(number + len(method.different_rounds()))


# FedRot-LoRA


def loop_rotation(correlation, part):
    """Return the rotation of a 2 x 2 Procrustes problem by its angle, and that part of it."""
    (a, b), (c, d) = correlation.tolist()
    angle = math.atan2(c - b, a + d)
    cosine = 1 - part + part * math.cos(angle)
    soft = math.atan2(part * math.sin(angle), cosine)
    turn = [[math.cos(soft), -math.sin(soft)], [math.sin(soft), math.cos(soft)]]
    return torch.tensor(turn, dtype=torch.float64)


@given(FULL, st.integers(1, 4))
def test_fedrot_lora_rotates_the_factors_and_averages_them(clients, number):
    base, adapters = build("fedrot-lora")
    method = base.in_round(number)
    state = some_state(method, adapters)
    sent = replies(method, adapters, state, clients)
    new = factors(aggregate(method, state, sent), 2)
    for layer, (old_B, old_A) in enumerate(factors(state, 2)):
        turned = []
        for upload, *_ in sent:
            B, A = factors(upload, 2)[layer]
            R = loop_rotation(A @ old_A.T if number % 2 else B.T @ old_B, 0.5)
            turned.append((loop_product(B, R), loop_product(R.T, A)))
        for got, each in zip(new[layer], zip(*turned, strict=True), strict=True):
            expected = weighted_mean(each, [weight for *_, weight in sent])
            assert_close([got], [expected], **TIGHT)


def test_a_rotation_is_used_also_where_a_reflection_fits_better():
    mirror = torch.diag(torch.tensor([1.0, 1.0, -0.5], dtype=torch.float64))
    assert_close([nearest_rotation(mirror)], [torch.eye(3)])
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        R = partial_rotation(torch.randn(4, 4, generator=random, dtype=torch.float64), 0.5)
        assert_close([R @ R.T], [torch.eye(4)], rtol=1e-9, atol=1e-9)
        assert torch.linalg.det(R) > 0
    assert_close([partial_rotation(torch.zeros(3, 3).double(), 0.5)], [torch.eye(3)])
    half = torch.zeros(3, 3, dtype=torch.float64)
    half[0, 0] = 2.0  # the others are free, and unchanged
    assert_close([partial_rotation(half, 0.5)], [torch.eye(3)])


# Fed-PLoRA


@given(CLIENTS)
def test_fed_plora_averages_every_module_over_the_clients_that_trained_it(clients):
    method, _, state, sent = round_of("fed-plora", clients, rank=4)
    new = aggregate(method, state, sent)
    trained = []  # of each client
    for upload, fraction, _ in sent:
        trained.append([j for j in range(4) if int(upload["modules"][0]) >> j & 1])
        assert len(trained[-1]) == affordable(fraction, 4)
    for layer, name, module in itertools.product(range(len(LAYERS)), ("B", "A"), range(4)):

        def row(tensors, modules, place, name=name, layer=layer):
            found = matrices(tensors[name], modules, name == "B")[layer]
            return found[:, place] if name == "B" else found[place]

        having = [(*one, own) for one, own in zip(sent, trained, strict=True) if module in own]
        parts = [row(upload, len(own), own.index(module)) for upload, _, _, own in having]
        weights = [weight for _, _, weight, _ in having]
        expected = weighted_mean(parts, weights) if parts else row(state, 4, module)
        assert_close([row(new, 4, module)], [expected], **TIGHT)


@given(st.integers(0, 99), st.sampled_from([0.25, 0.5, 1.0]))
def test_a_fed_plora_client_starts_at_the_servers_model_for_any_modules(seed, fraction):
    method, adapters, network = build_with_network("fed-plora", rank=4, lora_scale=0.5)
    state = some_state(method, adapters)
    method.load(adapters, state)
    random = torch.Generator().manual_seed(seed)
    x = [torch.randn(3, layer.in_features, generator=random) for layer in LAYERS]
    modules = [network.get_submodule(layer.name) for layer in LAYERS]
    outputs = [module(one).detach() for module, one in zip(modules, x, strict=True)]
    expected = [delta.clone() for delta in method.delta_weights(adapters)]
    method.choose(adapters, fraction, random, lambda: None)
    assert_close([module(one) for module, one in zip(modules, x, strict=True)], outputs)
    assert_close(method.delta_weights(adapters), expected)
    numbers = sum(p.numel() for p in method.parameters(adapters))
    assert numbers * 4 == method.trainable_parameters() * affordable(fraction, 4)


def test_fed_ploras_modules_are_resampled_and_all_occur():
    method, adapters, state = build_mid_run("fed-plora", rank=4)
    drawn, again = (
        [int(train_client(method, adapters, state, 0.5, n)["modules"]) for n in range(40)]
        for _ in range(2)
    )
    assert len(set(drawn)) == 6  # two of four
    assert drawn == again


@pytest.mark.parametrize("modules", [[0b0001], [0b0111], [0b110000], [0b10010001]])
def test_a_reply_with_other_modules_than_its_budget_affords_is_refused(modules):
    method, adapters, state = build_mid_run("fed-plora", rank=4)
    upload = train_client(method, adapters, state, 0.5, 1)
    bad = upload | {"modules": torch.tensor(modules, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"modules marks \[.*\], expected 2 of the first 4"):
        method.check(bad, 0.5)


# RoLoRA


@given(st.lists(FULL, min_size=1, max_size=4), st.sampled_from([1.0, 0.5]))
def test_rolora_averages_b_and_a_in_turn_and_both_are_exact(rounds, scale):
    base, adapters = build("rolora", lora_scale=scale)
    state = base.initial_state(adapters)
    for number, clients in enumerate(rounds, start=1):
        method = base.in_round(number)
        turn, other = ("B", "A") if number % 2 else ("A", "B")
        sent, each = [], []
        for client in clients:
            sent += replies(method, adapters, state, [client])
            each.append([delta.double() for delta in method.delta_weights(adapters)])
        weights = [weight for *_, weight in sent]
        assert all(set(upload) == {turn} for upload, *_ in sent)
        new = aggregate(method, state, sent)
        assert torch.equal(new[other], state[other])
        mean = weighted_mean([upload[turn] for upload, *_ in sent], weights)
        assert_close([new[turn]], [mean], **TIGHT)
        state = new
        for got, layer in zip(deltas(base, adapters, state), zip(*each, strict=True), strict=True):
            assert_close([got], [weighted_mean(layer, weights)], **TIGHT)


def test_rolora_trains_as_many_parameters_as_fedit_in_two_rounds():
    method, adapters = build("rolora", rank=None, lora_rank=2)
    assert method.rank == build("fedit", rank=None, lora_rank=2)[0].rank == 2
    method.load(adapters, method.initial_state(adapters))
    trained, sent = [], []
    for number in (1, 2):
        method.load(adapters, method.initial_state(adapters))
        half = method.in_round(number)
        half.choose(adapters, 1.0, torch.Generator(), lambda: None)
        trained.append(sum(p.numel() for p in half.parameters(adapters)))
        sent.append(half.upload_bytes(1.0))
    assert trained == [2 * (6 + 4), 2 * (5 + 7)]
    assert sum(trained) == method.trainable_parameters()
    assert sent == [4 * number for number in trained]


@pytest.mark.parametrize("robust", ["median", "trimmed-mean"])
def test_a_robust_rolora_round_leaves_the_other_factor_unchanged(robust):
    base, adapters, state = build_mid_run("rolora")
    for number, turn, other in ((1, "B", "A"), (2, "A", "B")):
        method = base.in_round(number)
        sums = Aggregate(method, state, UpdateNormCheck(1e9), robust)
        for seed in range(5):
            sums.check_and_add(train_client(method, adapters, state, 1.0, seed), 1.0)
        new = sums.close()
        assert torch.equal(new[other], state[other])
        assert not torch.equal(new[turn], state[turn])


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_the_server_optimiser_moves_the_current_factor_alone(kind):
    """Its moments of the last turn are kept, as if there were no rounds between."""
    base, adapters = build("rolora")
    config = read_config(
        {"method": "rolora", "server-optimizer": f"{kind}:0.5",
         "limits": "max-update-norm=1e9"}
    )  # fmt: skip
    start = some_state(base, adapters)
    server = ServerState(config, [], start, {})
    moved: dict[str, list[torch.Tensor]] = {"B": [], "A": []}
    for number in range(1, 5):
        method = base.in_round(number)
        turn, other = ("B", "A") if number % 2 else ("A", "B")
        before, sums = server.tensors, server.open_sums(method)
        for seed in range(3):
            sums.check_and_add(train_client(method, adapters, before, 1.0, seed + 10 * number), 1.0)
        moved[turn].append(sums._rounds[0].close()[turn])
        server.step(sums.close(), method.frozen_tensors)
        assert torch.equal(server.tensors[other], before[other])
    optimizer = ServerOptimizer(kind, 0.5, 0.9)
    for name, means in moved.items():
        moments: dict[str, torch.Tensor] = {}
        state = {name: start[name]}
        for mean in means:
            state, moments = optimizer.step(state, {name: mean}, moments)
        assert torch.equal(state[name], server.tensors[name])
        assert all(torch.equal(server.memory[f"{MOMENTS}{k}"], v) for k, v in moments.items())
