"""RAVAN's sizes and choices to the number, for two layers of 6 x 5 and 4 x 7 and three heads."""

import pytest
import torch

from tests.methods import build


@pytest.mark.parametrize(
    ("settings", "rank", "parameters"),
    [
        # A LoRA of rank 2 has 2 x (6 + 5) + 2 x (4 + 7) = 44 parameters; a head has r^2 and s.
        ({"heads": 1}, 4, 34),
        ({"heads": 3}, 2, 30),
        ({"heads": 3, "scaling": "constant"}, 2, 24),
        ({"heads": 11}, 1, 44),
        ({"heads": 3, "lora_rank": 1}, 1, 12),
    ],
)
def test_the_rank_is_the_largest_within_the_budget(settings, rank, parameters):
    method, _ = build(rank=None, **settings)
    assert (method.rank, method.trainable_parameters()) == (rank, parameters)


def test_a_budget_without_room_for_a_number_a_head_is_refused():
    with pytest.raises(ValueError, match=r"heads = 12: .* has room for 1.83 a head, expected"):
        build(rank=None, heads=12)


def test_an_upload_has_the_chosen_heads_and_a_bit_for_each():
    method, adapters = build(heads=3)
    assert method.upload_shapes(1.0) == {"H": (6, 2, 2)}
    assert method.upload_shapes(2 / 3) == {"H": (4, 2, 2)}
    assert method.upload_bytes(2 / 3) == 4 * 16 + 1
    method.load(adapters, method.initial_state(adapters))
    method.choose(adapters, 2 / 3, torch.Generator().manual_seed(0), lambda: None)
    upload = method.upload(adapters)
    assert {name: (t.numel(), t.element_size()) for name, t in upload.items()} == {
        "H": (16, 4), "heads": (1, 1),
    }  # fmt: skip
    assert method.rows({}) == {"H": 6}
    nine, _ = build(heads=9, rank=1)
    assert nine.upload_bytes(1.0) == 4 * 18 + 3  # 18 bits are three bytes


def test_a_client_that_trains_all_heads_computes_no_scores():
    method, adapters = build(scoring="gradient")
    method.load(adapters, method.initial_state(adapters))
    unused = torch.Generator().manual_seed(0)
    method.choose(adapters, 1.0, unused, lambda *_: pytest.fail("a gradient was computed"))
    assert [adapter.trained_heads() for adapter in adapters] == [[0, 1, 2]] * 2
    assert torch.equal(unused.get_state(), torch.Generator().manual_seed(0).get_state())
    with pytest.raises(pytest.fail.Exception, match="a gradient was computed"):
        method.choose(adapters, 2 / 3, unused, lambda *_: pytest.fail("a gradient was computed"))


def state_of(norms):
    """Return a state whose heads have these norms, by layer."""
    return {"H": torch.tensor(norms)[:, :, None, None].expand(2, 3, 2, 2) / 2}


NORMS = [[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]]


def test_heads_are_covered_by_chance_or_by_their_norms():
    by_chance, _ = build(scoring="random")
    assert by_chance.coverage(state_of(NORMS), 2 / 3)["H"].flatten().tolist() == pytest.approx(
        [2 / 3] * 6
    )
    by_norm, _ = build(scoring="weight")
    # One number a head is negative, and no row of its core alone has the order of the norms.
    state = {"H": torch.tensor([1.0, -2.0, 2.0, 4.0]).view(2, 2) * state_of(NORMS)["H"]}
    assert by_norm.coverage(state, 2 / 3)["H"].flatten().tolist() == [0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("scoring", ["random", "weight"])
def test_a_server_that_chooses_trains_as_many_heads_as_the_budget_allows(scoring):
    method, _ = build(scoring=scoring)
    random = torch.Generator().manual_seed(3)
    state = state_of(NORMS)
    assert method.rows_trained(state, 1.0, random)["H"].tolist() == [True] * 6
    drawn = [method.rows_trained(state, 2 / 3, random)["H"].view(2, 3) for _ in range(9)]
    assert all(rows.sum(1).tolist() == [2, 2] for rows in drawn)
    if scoring == "weight":
        assert all(
            rows.flatten().tolist() == [False, True, True, True, False, True] for rows in drawn
        )
    else:
        assert len({tuple(rows.flatten().tolist()) for rows in drawn}) > 1


@pytest.mark.parametrize("scaling", ["trained", "constant"])
def test_asked_for_heads_a_client_trains_them_and_no_other(scaling):
    method, adapters = build(scaling=scaling)
    method.load(adapters, state_of(NORMS))
    rows = {"H": torch.tensor([True, True, True, False, True, False])}
    method.train_rows(adapters, rows, 1.0)
    assert [adapter.trained_heads() for adapter in adapters] == [[0, 1, 2], [1]]
    trained = method.parameters(adapters)
    assert sum(p.numel() for p in trained) == 4 * 4 + 4 * (scaling == "trained")
    with pytest.raises(ValueError, match="asked to train 4 heads, expected 2 at most"):
        method.train_rows(adapters, rows, 1 / 3)


def test_the_norm_of_a_head_is_that_of_its_delta_weight():
    method, adapters = build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for adapter in adapters:
            adapter.H.copy_(torch.randn(adapter.H.shape, generator=generator))
            adapter.s.copy_(torch.tensor([0.5, -2.0, 0.1]))
    for adapter, norms in zip(adapters, method.head_norms(adapters), strict=True):
        for head, norm in enumerate(norms):
            delta = adapter.B[head] @ (adapter.s[head] * adapter.H[head]) @ adapter.A[head]
            assert norm == pytest.approx(float(delta.detach().norm()), rel=1e-4)
