"""A client's work on a PEFT model: load, select, train, collect, restore."""

import copy
import io
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn

from ravan_flwr import RavanConfig
from ravan_flwr.strategies import choose, collect_arrays, load_arrays, restore

BASE = "base_model.model"
HEADS = 4


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(12, 16), nn.Linear(16, 12)
        self.norm, self.classifier = nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x):
        return self.classifier(self.norm(self.value(torch.tanh(self.query(x)))))


def ravan(**settings):
    torch.manual_seed(0)
    config = RavanConfig(
        r=3, num_heads=HEADS, target_modules=["query", "value"],
        modules_to_save=["classifier", "norm"], **settings,
    )  # fmt: skip
    return get_peft_model(Small(), config)


def lora(r=4, alpha=8):
    torch.manual_seed(0)
    config = LoraConfig(r=r, lora_alpha=alpha, target_modules=["query", "value"])
    return get_peft_model(Small(), config)


def layers_of(model):
    return {f"{BASE}.{x}": getattr(model.base_model.model, x) for x in ("query", "value")}


def unchanged(model, before):
    return all(torch.equal(tensor, before[k]) for k, tensor in model.state_dict().items())


def assert_refused(model, arrays, message):
    """Check that these arrays are refused before anything is changed."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        load_arrays(model, ArrayRecord(arrays))
    assert unchanged(model, before)


def arrays_of(model, seed=1):
    random = torch.Generator().manual_seed(seed)
    arrays = {}
    for name, tensor in get_peft_model_state_dict(model).items():
        drawn = torch.randn(tensor.shape, generator=random).to(tensor.dtype)
        arrays[name] = drawn.abs() if "running_var" in name else drawn
    return ArrayRecord(arrays)


def by_name(record):
    return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}


def backward(model, seed=0):
    random = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 12, generator=random), torch.arange(8) % 3
    nn.functional.cross_entropy(model(x), y).backward()


def train(model, steps=3, **options):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **{"lr": 0.05, "weight_decay": 0.5} | options)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return optimizer


def test_loaded_arrays_are_in_the_model_and_collected_again():
    model = ravan()
    sent = arrays_of(model)
    load_arrays(model, sent)
    state = get_peft_model_state_dict(model)
    for name, tensor in by_name(sent).items():
        torch.testing.assert_close(state[name], tensor)
    back, sent = by_name(collect_arrays(model)), by_name(sent)
    for name in layers_of(model):
        product = sent.pop(f"{name}.ravan_s")[:, None, None] * sent.pop(f"{name}.ravan_H")
        torch.testing.assert_close(back.pop(f"{name}.ravan_H"), product)
        assert back.pop(f"{name}.ravan_heads").tolist() == [0, 1, 2, 3]
    assert back.keys() == sent.keys()  # with the complete modules to save
    for name, tensor in sent.items():
        torch.testing.assert_close(back[name], tensor)
    without_scales = {k: a for k, a in arrays_of(model, 2).items() if not k.endswith("ravan_s")}
    load_arrays(model, ArrayRecord(without_scales))
    assert all((layer.ravan_s["default"] == 1).all() for layer in layers_of(model).values())


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("init", ["normal", "gram-schmidt"])
def test_saved_bases_are_loaded_with_the_other_arrays(init, heads):
    """So the client computes what the server does, whose bases may be of another seed."""
    targets = ["query", "value"]
    server, client = (
        get_peft_model(Small(), RavanConfig(
            r=3, num_heads=heads, target_modules=targets, init=init, base_seed=seed, save_bases=True
        ))
        for seed in (1, 2)
    )  # fmt: skip
    sent = arrays_of(server)
    load_arrays(client, sent)
    arrays, x = by_name(sent), torch.randn(5, 12)
    H, s, B, A = (arrays[f"{BASE}.query.ravan_{part}"] for part in "HsBA")
    expected = x @ (s[:, None, None] * (B @ H @ A)).sum(0).mT
    query = client.get_submodule(f"{BASE}.query")
    torch.testing.assert_close(
        query(x) - query.get_submodule("base_layer")(x), expected, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("score", ["random", "weight", "gradient"])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.8, 1])
def test_unselected_heads_do_not_change_and_have_no_gradient(fraction, score):
    model = ravan()
    load_arrays(model, arrays_of(model))
    layers = layers_of(model)
    before = {name: layer.ravan_H["default"].detach().clone() for name, layer in layers.items()}
    scales = {name: layer.ravan_s["default"].detach().clone() for name, layer in layers.items()}
    model.eval()
    x = torch.randn(5, 12)
    y = model(x)
    chosen = choose(model, fraction, score, backward=lambda: backward(model))
    torch.testing.assert_close(model(x), y)
    model.train()
    number = max(1, int(fraction * HEADS))
    assert {name: len(heads) for name, heads in chosen.items()} == dict.fromkeys(layers, number)
    trained = [p for n, p in model.named_parameters() if "ravan_H" in n and p.requires_grad]
    assert [tuple(p.shape) for p in trained] == [(number, 3, 3)] * 2
    assert all(p.grad is None for p in trained)
    optimizer = train(model)
    moment_shapes = [s["exp_avg"].shape for p, s in optimizer.state.items() if p.ndim == 3]
    assert moment_shapes == [(number, 3, 3)] * 2
    reply = by_name(collect_arrays(model))
    for name, layer in layers.items():
        H, s = layer.ravan_H["default"], layer.ravan_s["default"]
        heads = reply[f"{name}.ravan_heads"].tolist()
        assert heads == chosen[name]
        product = torch.stack([s[head] * H[head] for head in heads])
        torch.testing.assert_close(reply[f"{name}.ravan_H"], product)
        for now, then in ((H, before[name]), (s, scales[name])):
            moved = [bool((now[i] != then[i]).any()) for i in range(HEADS)]
            assert moved == [i in heads for i in range(HEADS)]
        assert f"{name}.ravan_s" not in reply
    y = model.eval()(x)
    restore(model)
    torch.testing.assert_close(model(x), y)
    all_heads = [p for n, p in model.named_parameters() if "ravan_H" in n]
    assert [tuple(p.shape) for p in all_heads] == [(HEADS, 3, 3)] * 2
    backward(model.train())
    assert all(p.grad.shape == p.shape for p in all_heads)
    load_arrays(model, arrays_of(ravan()))


def test_weight_and_gradient_scores_choose_the_largest():
    model = ravan()
    arrays = by_name(arrays_of(model))
    for layer, order in (("query", [3, 1, 0, 2]), ("value", [0, 2, 1, 3])):
        for size, head in enumerate(reversed(order), start=1):
            arrays[f"{BASE}.{layer}.ravan_H"][head] *= 10.0**size
            arrays[f"{BASE}.{layer}.ravan_s"][head] = 1.0
    load_arrays(model, ArrayRecord(arrays))
    expected = {f"{BASE}.query": [1, 3], f"{BASE}.value": [0, 2]}
    assert choose(model, 0.5, "weight") == expected
    arrays |= {name: t * 10.0 ** (6 * torch.arange(HEADS)) for name, t in arrays.items()
               if name.endswith("ravan_s")}  # fmt: skip
    load_arrays(model, ArrayRecord(arrays))  # trained scales count, as a head adds s H
    assert choose(model, 0.5, "weight") == {name: [2, 3] for name in expected}
    restore(model)
    load_arrays(model, arrays_of(model))
    model.zero_grad()
    backward(model)
    norms = {x: of.ravan_H["default"].grad.norm(dim=(1, 2)) for x, of in layers_of(model).items()}
    model.zero_grad()
    chosen = choose(model, 0.5, "gradient", backward=lambda: backward(model))
    assert chosen == {name: sorted(norm.topk(2).indices.tolist()) for name, norm in norms.items()}


def test_random_scores_depend_on_the_generator():
    model = ravan()
    draws = [choose(model, 0.25, generator=torch.Generator().manual_seed(s)) for s in range(20)]
    again = choose(model, 0.25, generator=torch.Generator().manual_seed(7))
    assert again == draws[7]
    assert {heads[0] for draw in draws for heads in draw.values()} == {0, 1, 2, 3}


def test_a_global_selection_may_select_no_head_of_a_layer():
    model = ravan()
    arrays = by_name(arrays_of(model))
    arrays[f"{BASE}.query.ravan_H"] *= 1000
    load_arrays(model, ArrayRecord(arrays))
    chosen = choose(model, 0.5, "weight", selection="global")
    assert chosen == {f"{BASE}.query": [0, 1, 2, 3], f"{BASE}.value": []}
    train(model)
    reply = by_name(collect_arrays(model))
    assert reply[f"{BASE}.value.ravan_H"].shape == (0, 3, 3)
    assert reply[f"{BASE}.value.ravan_heads"].tolist() == []


def test_constant_scales_stay_one():
    model = ravan(trainable_scales=False)
    sent = {k: a for k, a in arrays_of(model).items() if not k.endswith("ravan_s")}
    load_arrays(model, ArrayRecord(sent))
    choose(model, 0.5)
    train(model)
    restore(model)
    for layer in layers_of(model).values():
        assert (layer.ravan_s["default"] == 1).all()
        assert not layer.ravan_s["default"].requires_grad


@pytest.mark.parametrize(("fraction", "rank"), [(0.25, 1), (0.5, 2), (1.0, 4)])
def test_a_lora_is_trained_in_its_first_ranks(fraction, rank):
    """It equals a LoRA of that rank that was given these ranks alone."""
    model, small = lora(), lora(r=rank, alpha=2 * rank)
    sent = by_name(arrays_of(model))
    load_arrays(model, ArrayRecord(sent))
    cut = {k: t[:rank] if "lora_A" in k else t[:, :rank].contiguous() for k, t in sent.items()}
    load_arrays(small, ArrayRecord(cut))
    chosen = choose(model, fraction)
    assert chosen == {f"{BASE}.{x}": list(range(rank)) for x in ("query", "value")}
    train(model)
    train(small)
    got, expected = by_name(collect_arrays(model)), by_name(collect_arrays(small))
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6)
    restore(model)
    assert model.base_model.model.query.lora_A["default"].weight.shape == (4, 12)


def test_a_factor_that_is_frozen_is_not_sent():
    model = lora()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and "lora_A" not in name)
    assert sorted(collect_arrays(model)) == [
        f"{BASE}.{x}.lora_B.weight" for x in ("query", "value")
    ]


@pytest.mark.parametrize("dense", [True, False])
def test_the_fedex_lora_residual_is_applied_until_restore(dense):
    model = lora(alpha=8)  # its scaling is 2
    weight = model.base_model.model.query.get_base_layer().weight
    before, x = weight.detach().clone(), torch.randn(3, 12)
    sent = by_name(arrays_of(model))
    load_arrays(model, ArrayRecord(sent))
    plain = model.base_model.model.query(x)
    U, V = torch.randn(16, 2), torch.randn(2, 12)
    rank = 9 if dense else 2  # of 12 x 16: from 7 on the matrix is smaller
    parts = [U @ V, torch.zeros(12, 16)] if dense else [U, V, torch.zeros(12 + 16, 2)]
    residual = torch.cat([part.flatten() for part in parts])
    more = {"residual": residual, "residual-rank": torch.tensor([rank])}
    for _ in range(2):  # loading twice has no further effect
        load_arrays(model, ArrayRecord({**sent, **more}))
        torch.testing.assert_close(model.base_model.model.query(x) - plain, 2 * x @ (U @ V).mT)
    assert not any("residual" in name for name in collect_arrays(model))
    added_to = weight.detach().clone()
    choose(model, 1.0)
    assert torch.equal(weight, added_to)
    restore(model)
    assert torch.equal(weight, before)


def test_a_model_that_was_cast_since_gets_its_weight_back_in_its_dtype():
    """As one that was moved to a GPU gets it there."""
    model = lora()
    weight = model.base_model.model.query.get_base_layer().weight
    before = weight.detach().clone()
    residual = {"residual": torch.ones(16 + 12 + 12 + 16), "residual-rank": torch.tensor([1])}
    load_arrays(model, ArrayRecord({**by_name(arrays_of(model)), **residual}))
    model.bfloat16()
    restore(model)
    assert torch.equal(weight, before.bfloat16())
    assert model(torch.ones(2, 12, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns of itself
@pytest.mark.parametrize("used_before", [False, True])
def test_a_compiled_model_keeps_its_running_statistics(used_before):
    """torch.compile leaves out hooks that are registered after the first call."""
    torch._dynamo.reset()
    model, x = lora(), torch.randn(8, 12)
    norm, arrays = model.base_model.model.norm, arrays_of(model)
    model.compile(backend="eager")
    if used_before:
        model.train()(x)
    before = {name: tensor.clone() for name, tensor in norm.named_buffers()}
    for _ in range(2):
        load_arrays(model, arrays)
        model.train()(x)
        assert all(torch.equal(tensor, before[name]) for name, tensor in norm.named_buffers())
        restore(model)
    model.train()(x)
    assert norm.num_batches_tracked == before["num_batches_tracked"] + 1


@pytest.mark.parametrize("trained", [False, True])
def test_a_copy_of_a_loaded_model_is_restored_by_itself(trained):
    """A copy, or a file of torch.save, keeps its statistics, and has the earlier mode again."""
    model = lora().train(trained)
    load_arrays(model, arrays_of(model))
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        norm = other.base_model.model.norm
        other.train()(torch.randn(8, 12))
        assert norm.num_batches_tracked == 0
        restore(other.train(trained))
        assert norm.training is trained
        other.train()(torch.randn(8, 12))
        assert norm.num_batches_tracked == 1
    model.train()(torch.randn(8, 12))
    assert model.base_model.model.norm.num_batches_tracked == 0
    restore(model.eval())  # evaluated since
    assert not model.base_model.model.norm.training


def test_unselected_ranks_are_restored():
    model = lora()
    load_arrays(model, arrays_of(model))
    before = copy.deepcopy(model.state_dict())
    choose(model, 0.5)
    choose(model, 0.25)
    restore(model)
    assert unchanged(model, before)


@pytest.mark.parametrize("name", ["residual", "residual-rank"])
def test_a_residual_without_its_rank_changes_nothing(name):
    model = lora()
    arrays = {**by_name(arrays_of(model)), name: torch.tensor([1])}
    assert_refused(model, arrays, "array 'residual.*' is missing, expected both of")


@pytest.mark.parametrize(("number", "rank"), [(1, 2), (2 * 16 * 12, 2), (2 * 2 * 28, 3)])
def test_a_residual_of_another_size_changes_nothing(number, rank):
    model = lora()
    more = {"residual": torch.ones(number), "residual-rank": torch.tensor([rank])}
    arrays = {**by_name(arrays_of(model)), **more}
    assert_refused(model, arrays, f"got {number} numbers that FedEx-LoRA adds")


def test_incompatible_arrays_are_refused_and_change_nothing():
    model, name = ravan(), f"{BASE}.query.ravan_H"
    sent = by_name(arrays_of(model))
    fewer = sent | {name: torch.zeros(2, 3, 3)}
    assert_refused(model, fewer, r"got shape \(2, 3, 3\), .* expects shape \(4, 3, 3\)")
    more = sent | {"other": torch.zeros(1)}
    assert_refused(model, more, r"'other': got shape \(1,\), the model expects none")
    del sent[name]
    assert_refused(model, sent, rf"{name}': got none, the model expects")


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_a_targeted_head_needs_no_embeddings_from_the_server():
    """PEFT's state dict has the head's pretrained weight, unless an argument leaves it out."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    decoder = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_attention_heads=2, **sizes))
    model = get_peft_model(decoder, RavanConfig(r=2, target_modules=["q_proj", "lm_head"]))
    advice = r"base_layer.weight': .* expects none; .*\(model, save_embedding_layers=False\)"
    assert_refused(model, get_peft_model_state_dict(model), advice)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    load_arrays(model, ArrayRecord({name: torch.ones_like(t) for name, t in state.items()}))
    assert collect_arrays(model)[f"{BASE}.lm_head.ravan_H"].numpy().all()


def test_a_quantised_weight_is_refused_before_anything_is_changed():
    model = lora()
    base = model.base_model.model.value.get_base_layer()
    base.weight.requires_grad_(False)
    base.weight.data = base.weight.data.to(torch.int8)
    more = {"residual": torch.ones(2 * 16 * 12), "residual-rank": torch.tensor([9])}
    arrays = {**by_name(arrays_of(model)), **more}
    assert_refused(model, arrays, "a weight of torch.int8, expected floating point")


class Experts(nn.Module):
    """Sum the outputs of experts whose weights are one parameter."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 12, 8))

    def forward(self, x):
        return torch.einsum("bi,eio->bo", x, self.weights)


def test_ranks_of_experts_are_not_chosen():
    """PEFT orders A's rows by expert, and B's columns by rank: the first of both do not match."""
    config = LoraConfig(r=4, target_modules=[], target_parameters=["experts.weights"])
    model = get_peft_model(nn.Sequential(OrderedDict(experts=Experts())), config)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"of the parameter 'weights', .* leave choose and"):
        choose(model, 0.5)
    assert unchanged(model, before)
    load_arrays(model, arrays_of(model))
    assert collect_arrays(model).keys() == arrays_of(model).keys()


def test_a_residual_for_an_attention_is_refused_before_anything_is_changed():
    """PEFT's LoRA of it has two factors for the three matrices of queries, keys and values."""
    network = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    model = get_peft_model(network, LoraConfig(r=1, target_modules=["attention"]))
    residual = torch.ones((24 + 8) + (8 + 8))
    more = {"residual": residual, "residual-rank": torch.tensor([1])}
    arrays = {**by_name(arrays_of(model)), **more}
    assert_refused(model, arrays, "and a MultiheadAttention, expected floating point, of a linear")


def test_a_lora_beside_a_layer_without_a_weight_is_loaded():
    network = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    model = get_peft_model(network, LoraConfig(r=2, target_modules=["attention"]))
    arrays = {name: torch.ones_like(t) for name, t in get_peft_model_state_dict(model).items()}
    load_arrays(model, ArrayRecord(arrays))
    assert all((t == 1).all() for t in get_peft_model_state_dict(model).values())


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan"), "half", None])
def test_a_budget_fraction_out_of_range_is_an_error(fraction):
    with pytest.raises(ValueError, match=r"fraction = .*: expected a number above 0"):
        choose(ravan(), fraction)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_budget_fraction_of_any_type_affords_its_nominal_heads(kind):
    """The float32 next to 0.7 is 0.699999988."""
    assert choose(ravan(), kind(0.75), "weight") == choose(ravan(), 0.75, "weight")
    config = RavanConfig(r=1, num_heads=10, target_modules=["query", "value"])
    fraction: Any = np.float32(0.7)
    heads = choose(get_peft_model(Small(), config), fraction)
    assert [len(chosen) for chosen in heads.values()] == [7, 7]


def test_other_mistakes_raise_errors_with_advice():
    other = get_peft_model(Small(), IA3Config(target_modules=["query"], feedforward_modules=[]))
    compiled: Any = torch.compile(ravan(), backend="eager")
    for call, message in (
        (lambda: choose(ravan(), 0.5, "size"), "expected one of random, weight, grad"),
        (lambda: choose(ravan(), 0.5, selection="all"), "expected one of layer, global"),
        (lambda: choose(ravan(), 0.5, "gradient"), "backward = None: .* pass backward=lambda"),
        (
            lambda: choose(ravan(), 0.5, "gradient", backward=lambda: None),
            "the heads of .* have no gradient .* pass backward=",
        ),
        (lambda: choose(other, 0.5), "neither heads nor a LoRA"),
        (lambda: collect_arrays(Small()), "got a Small .* make it with get_peft_model"),
        (lambda: collect_arrays(compiled), r"what torch.compile returns.* by model.compile\(\)"),
        (
            lambda: load_arrays(Small(), ArrayRecord({"a": Array(np.zeros(1))})),
            "make it with get_peft_model",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("make", [ravan, lora])
def test_a_model_is_saved_completely_while_selected_heads_are_trained(make, tmp_path):
    """`Trainer` saves so at each of its checkpoints."""
    model = make().eval()
    load_arrays(model, arrays_of(model))
    choose(model, 0.5, "weight")
    train(model)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(5))
    model.save_pretrained(tmp_path)
    saved = copy.deepcopy(model.state_dict())
    restore(model)
    assert list(saved) == list(model.state_dict())
    assert unchanged(model, saved)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(Small(), tmp_path)
    assert torch.equal(loaded.eval()(x), model(x))


@pytest.mark.parametrize("make", [ravan, lora])
def test_a_checkpoint_is_loaded_while_selected_heads_are_trained(make):
    """`Trainer` loads the best of them so."""
    model = make()
    load_arrays(model, arrays_of(model))
    choose(model, 0.5, "weight")
    before = copy.deepcopy(model.state_dict())
    train(model)
    assert not unchanged(model, before)
    model.load_state_dict(before)
    assert unchanged(model, before)
    train(model)  # the same heads are trained
    restore(model)
    for name, layer in model.named_modules():
        if hasattr(layer, "ravan_H"):
            then = before[f"{name}.ravan_H.default"]
            pairs = zip(layer.ravan_H["default"], then, strict=True)
            assert sum(not torch.equal(*pair) for pair in pairs) == HEADS // 2


class WithLoss(Small):
    """Take a batch as a dict and return the loss, as `Trainer` requires."""

    def forward(self, x, labels=None):
        logits = super().forward(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def test_trainer_trains_the_selected_heads(tmp_path):
    from transformers import Trainer, TrainingArguments

    config = RavanConfig(r=3, num_heads=HEADS, target_modules=["query", "value"])
    model = get_peft_model(WithLoss(), config)
    load_arrays(model, arrays_of(model))
    before = by_name(collect_arrays(model))
    chosen = choose(model, 0.5)
    random = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(12, generator=random), "labels": i % 3} for i in range(16)]
    training_arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=8, use_cpu=True,
        report_to="none", save_strategy="no", learning_rate=0.01, disable_tqdm=True,
        remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    Trainer(model, training_arguments, train_dataset=data).train()
    after = by_name(collect_arrays(model))
    restore(model)
    all_arrays = by_name(collect_arrays(model))
    for name, heads in chosen.items():
        assert after[f"{name}.ravan_heads"].tolist() == heads
        for head in range(HEADS):
            same = torch.equal(all_arrays[f"{name}.ravan_H"][head], before[f"{name}.ravan_H"][head])
            assert same == (head not in heads)
