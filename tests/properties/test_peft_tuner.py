"""Properties of RAVAN as a PEFT tuner, for several architectures."""

import copy
import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from peft import PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from ravan_flwr import RavanConfig
from ravan_flwr.adapters import MultiHeadLinear, make_bases
from ravan_flwr.adapters.multihead import merges
from ravan_flwr.peft import RavanLinear
from tests.reference import multihead_delta, multihead_forward

TEXT: dict[str, Any] = {"vocab_size": 60}
SIDES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TOKENS: dict[str, torch.Tensor] = {"input_ids": torch.arange(24).view(2, 12)}
INITS = ["gram-schmidt", "normal", "constant", "shared-subspace"]
# name -> (class, configuration, targets, other modules to train, inputs)
ARCHITECTURES: dict[str, Any] = {
    "bert": (
        transformers.BertForSequenceClassification,
        transformers.BertConfig(**SIDES, **TEXT, initializer_range=0.3),
        ["query", "value"], ["classifier"], TOKENS,
    ),
    "vit": (
        transformers.ViTForImageClassification,
        transformers.ViTConfig(**SIDES, image_size=16, patch_size=8),
        r".*attention\.(q_proj|v_proj|query|value)", ["classifier"],
        {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)},
    ),
    "t5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, **TEXT),
        ["q", "v", "wo"], ["final_layer_norm"],
        TOKENS | {"decoder_input_ids": TOKENS["input_ids"][:, :4]},
    ),
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SIDES, **TEXT, num_key_value_heads=1),
        "all-linear", ["lm_head"], TOKENS,
    ),
    "gpt2": (  # its layers are Conv1D
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, **TEXT),
        ["c_attn", "c_proj"], None, TOKENS,
    ),
}  # fmt: skip


@pytest.fixture(params=ARCHITECTURES)
def kind(request):
    return request.param


def build(kind):
    """Return a network with fixed random weights, without dropout."""
    model_class, config, *_ = ARCHITECTURES[kind]
    torch.manual_seed(0)
    network = model_class(copy.deepcopy(config)).eval()
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return network


def config_of(kind, **changes):
    arguments: dict[str, Any] = {
        "r": 3,
        "num_heads": 4,
        "init": "normal",
        "target_modules": ARCHITECTURES[kind][2],
    }
    return RavanConfig(**arguments | changes)


def adapted(kind, **changes):
    return get_peft_model(build(kind), config_of(kind, **changes)).eval()


def layers_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, RavanLinear)}


def shake(model, seed=1):
    """Give all trained parameters large random values."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=random))
    return model


def logits(model, kind):
    with torch.no_grad():
        return model(**ARCHITECTURES[kind][4]).logits


def differ(a, b):
    return float((a - b).abs().max()) > 1e-3


def test_a_new_adapter_changes_nothing(kind):
    assert torch.equal(logits(adapted(kind), kind), logits(build(kind), kind))


@pytest.mark.parametrize("saved", [False, True])
def test_every_layer_adds_the_loop_over_its_heads(kind, saved):
    """The bases are those of the app's own function, by the layer's name in the network."""
    model = shake(adapted(kind, base_seed=7, save_bases=saved))
    for name, layer in layers_of(model).items():
        base = layer.base_layer
        weight = base.weight.T if isinstance(base, Conv1D) else base.weight
        B, A = make_bases(
            "normal", heads=4, rank=3, out_features=weight.shape[0], in_features=weight.shape[1],
            seed=7, layer=name.removeprefix("base_model.model."),
        )  # fmt: skip
        assert torch.equal(layer.ravan_B["default"], B)
        assert torch.equal(layer.ravan_A["default"], A)
        H, s = layer.ravan_H["default"], layer.ravan_s["default"]
        x = torch.randn(2, 5, weight.shape[1])
        expected = multihead_forward(x, weight, base.bias, B, H, A, s)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
        delta = multihead_delta(B, H, A, s)
        got = layer.get_delta_weight("default")
        torch.testing.assert_close(got.T if isinstance(base, Conv1D) else got, delta)


@pytest.mark.parametrize("tokens", [1, 4096])
def test_a_layer_equals_the_apps_layer_to_the_bit(tokens):
    """Both choose the same form: factored for one token, merged for many."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(24, 16))
    B, A = make_bases(
        "gram-schmidt", heads=3, rank=4, out_features=16, in_features=24, seed=0, layer="0"
    )
    base = copy.deepcopy(network[0])
    assert isinstance(base, nn.Linear)
    ours = MultiHeadLinear(base, B, A)
    theirs = get_peft_model(network, RavanConfig(r=4, num_heads=3, target_modules=["0"]))
    (layer,) = layers_of(theirs).values()
    with torch.no_grad():
        ours.H.normal_()
        ours.s.normal_()
        layer.ravan_H["default"].copy_(ours.H)
        layer.ravan_s["default"].copy_(ours.s)
    x = torch.randn(tokens, 24)
    assert merges(x, ours.base.weight, ours.base.bias, ours._heads(), ours.form) == (tokens > 1)
    got, expected = layer(x), ours(x)
    assert torch.equal(got, expected)
    got.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in {"H": ours.H, "s": ours.s}.items():
        gradient = getattr(layer, f"ravan_{name}")["default"].grad
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_only_heads_scales_and_modules_to_save_have_gradients(kind):
    modules = ARCHITECTURES[kind][3]
    model = shake(adapted(kind, modules_to_save=modules)).train()
    model(**ARCHITECTURES[kind][4]).logits.square().sum().backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    expected = {f"{n}.{part}.default" for n in layers_of(model) for part in ("ravan_H", "ravan_s")}
    saved = {name for name in with_gradient if ".modules_to_save.default." in name}
    assert bool(saved) == bool(modules)
    assert with_gradient == trained(model) == expected | saved


def trained_parts(model):
    return {name.split(".")[-2] for name in trained(model)}


def test_scales_may_be_constant(kind):
    model = adapted(kind, trainable_scales=False)
    assert trained_parts(model) == {"ravan_H"}
    model.add_adapter("other", config_of(kind))
    model.set_adapter("other")
    assert trained_parts(model) == {"ravan_H", "ravan_s"}
    model.set_adapter("default")
    model.set_requires_grad("default")
    assert trained_parts(model) == {"ravan_H"}


def test_trained_scales_stay_where_scales_are_constant(tmp_path):
    model = shake(adapted("bert"))
    model.save_pretrained(tmp_path)
    constant = config_of("bert", trainable_scales=False)
    loaded = PeftModel.from_pretrained(build("bert"), tmp_path, config=constant, is_trainable=True)
    assert torch.equal(logits(loaded.eval(), "bert"), logits(model, "bert"))
    assert trained_parts(loaded) == {"ravan_H"}


@pytest.mark.parametrize(("bias", "ends"), [("all", "bias"), ("ravan_only", "base_layer.bias")])
def test_biases_may_be_trained(bias, ends):
    model = shake(adapted("bert", bias=bias))
    biases = {name for name in trained(model) if "ravan" not in name}
    assert biases == {n for n, _ in model.named_parameters() if n.endswith(ends)}
    model(input_ids=torch.zeros(40, 100, dtype=torch.long)).logits.sum().backward()
    inner = [n for n in biases if n.endswith("value.base_layer.bias")]
    parameters = dict(model.named_parameters())
    assert len(inner) == 2
    assert all(parameters[name].grad.abs().sum() > 0 for name in inner)


def test_merged_equals_unmerged_and_unmerging_restores_every_bit(kind):
    model = shake(adapted(kind))
    before, weights = logits(model, kind), copy.deepcopy(model.state_dict())
    assert differ(before, logits(build(kind), kind))
    model.merge_adapter(safe_merge=True)
    merged = logits(model, kind)
    torch.testing.assert_close(merged, before, rtol=1e-4, atol=1e-3)
    name, layer = next(iter(layers_of(model).items()))
    assert not torch.equal(layer.weight, weights[f"{name}.base_layer.weight"])
    model.unmerge_adapter()
    assert torch.equal(logits(model, kind), before)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model, kind), logits(build(kind), kind))


def test_a_network_that_is_cast_while_merged_is_unmerged_in_its_dtype(kind):
    model, expected = shake(adapted(kind)), shake(adapted(kind)).bfloat16()
    model.merge_adapter()
    model.bfloat16().unmerge_adapter()
    assert torch.equal(logits(model, kind), logits(expected, kind))
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in expected.state_dict().items())


def test_merge_and_unload_gives_a_network_without_adapters(kind):
    model = shake(adapted(kind))
    before = logits(model, kind)
    merged = model.merge_and_unload()
    assert type(merged) is ARCHITECTURES[kind][0]
    assert not layers_of(merged)
    assert {n for n, _ in merged.named_parameters()} == {
        n for n, _ in build(kind).named_parameters()
    }
    torch.testing.assert_close(logits(merged, kind), before, rtol=1e-4, atol=1e-3)
    back = shake(adapted(kind)).unload()
    assert torch.equal(logits(back, kind), logits(build(kind), kind))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("init", INITS)
def test_the_forward_pass_copies_no_bases(init, heads):
    """A step would hold a copy of every layer's A until its backward pass."""
    config = RavanConfig(r=2, num_heads=heads, target_modules=["0"], init=init)
    model: Any = get_peft_model(nn.Sequential(nn.Linear(6, 8)), config)
    layer = model.base_model.model[0]
    B, A, *_ = layer.heads("default")
    for stack, bases in ((B, layer.ravan_B), (A, layer.ravan_A)):
        assert stack.data_ptr() == bases["default"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_merging_what_changes_nothing_keeps_every_bit_of_the_weight(dtype):
    layer = nn.Linear(6, 4, dtype=dtype)
    before = layer.weight.detach().clone()
    model: Any = get_peft_model(nn.Sequential(layer), RavanConfig(r=2, target_modules=["0"]))
    assert torch.equal(model.merge_and_unload()[0].weight, before)


def test_unknown_adapters_and_a_batch_for_several_are_refused():
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), RavanConfig(r=2, target_modules=["0"]))
    model.add_adapter("second", RavanConfig(r=2, target_modules=["0"]))
    x = torch.ones(2, 4)
    assert torch.equal(model(x), model(x))
    with pytest.raises(ValueError, match="adapter_names: .* call set_adapter"):
        model(x, adapter_names=["default", "second"])
    (layer,) = layers_of(model).values()
    with pytest.raises(ValueError, match="adapter 'x': expected one of default"):
        layer.get_delta_weight("x")


def test_an_adapter_that_is_not_finite_is_not_merged():
    model = adapted("bert")
    (layer, *_) = layers_of(model).values()
    before = layer.weight.clone()
    with torch.no_grad():
        layer.ravan_H["default"][0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="merged weight has values that are not finite"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layer.weight, before)
    assert not layer.merged


LOAD = """
import sys, torch
from peft import PeftModel
from ravan_flwr import RavanConfig
base, inputs = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    torch.save(PeftModel.from_pretrained(base, sys.argv[2]).eval()(**inputs).logits, sys.argv[3])
"""


@pytest.mark.parametrize("saved", [False, True])
def test_a_new_process_loads_a_saved_adapter_and_computes_the_same(kind, saved, tmp_path, python):
    modules = ARCHITECTURES[kind][3]
    model = shake(adapted(kind, save_bases=saved, modules_to_save=modules))
    model.save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    layers = [name.removeprefix("base_model.model.") for name in layers_of(model)]
    parts = ("H", "s", "B", "A") if saved else ("H", "s")
    heads = {f"base_model.model.{name}.ravan_{part}" for name in layers for part in parts}
    assert {name for name in tensors if "ravan_" in name} == heads
    assert bool(set(tensors) - heads) == bool(modules)

    torch.save((build(kind), ARCHITECTURES[kind][4]), tmp_path / "base.pt")
    files = [str(tmp_path / name) for name in ("base.pt", "adapter", "logits.pt")]
    subprocess.run([python.executable, "-c", LOAD, *files], check=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(model, kind))


@pytest.mark.parametrize("low_memory", [False, True])
def test_two_adapters_switch(kind, tmp_path, low_memory):
    first, second = shake(adapted(kind)), shake(adapted(kind, r=2, save_bases=True), seed=2)
    for name, model in (("first", first), ("second", second)):
        model.save_pretrained(tmp_path / name)
    both = PeftModel.from_pretrained(build(kind), tmp_path / "first", adapter_name="first").eval()
    both.load_adapter(tmp_path / "second", "second", low_cpu_mem_usage=low_memory)
    assert torch.equal(logits(both, kind), logits(first, kind))
    both.set_adapter("second")
    assert torch.equal(logits(both, kind), logits(second, kind))
    assert {name.rsplit(".", 1)[1] for name in trained(both)} == {"second"}
    with both.disable_adapter():
        assert torch.equal(logits(both, kind), logits(build(kind), kind))
    assert torch.equal(logits(both, kind), logits(second, kind))

    # Both together are the sum, in either form.
    tuner: Any = both.base_model
    tuner.set_adapter(["first", "second"])
    together = logits(both, kind)
    assert differ(together, logits(first, kind))
    both.merge_adapter()
    torch.testing.assert_close(logits(both, kind), together, rtol=1e-3, atol=1e-2)
    both.unmerge_adapter()

    both.set_adapter("first")
    both.delete_adapter("second")
    assert torch.equal(logits(both, kind), logits(first, kind))
    assert not any("second" in name for name in both.state_dict())
    for layer in layers_of(both).values():
        assert layer._all_available_adapter_names() == ["first"]


def test_an_adapter_of_other_layers_is_added(tmp_path):
    model = shake(adapted("bert", target_modules=["query"]))
    before = logits(model, "bert")
    model.add_adapter("key", config_of("bert", target_modules=["key"]))
    assert torch.equal(logits(model, "bert"), before)
    assert {name.rsplit(".", 1)[1] for name in trained(model)} == {"default"}
    model.set_adapter("key")
    assert torch.equal(logits(model, "bert"), logits(build("bert"), "bert"))


def test_which_layers_are_adapted():
    """The options are PEFT's own."""

    def names(**changes):
        config = RavanConfig(r=2, **changes)
        return [
            name.removeprefix("base_model.model.bert.encoder.layer.").split(".attention.")
            for name in layers_of(get_peft_model(build("bert"), config))
        ]

    query, value = "self.query", "self.value"
    assert names() == [["0", query], ["0", value], ["1", query], ["1", value]]
    assert names(target_modules=["query"], layers_to_transform=1) == [["1", query]]
    assert names(target_modules=["query"], layers_to_transform=[0], layers_pattern="layer") == [
        ["0", query]
    ]
    assert names(target_modules=["query", "value"], exclude_modules=["value"]) == [
        ["0", query], ["1", query]
    ]  # fmt: skip
    assert names(target_modules=r".*\.0\..*value") == [["0", value]]
    assert len(names(target_modules="all-linear", task_type="SEQ_CLS")) == 2 * 6 + 1  # the pooler


@pytest.mark.parametrize("init", INITS)
def test_a_configuration_round_trips_through_its_file(init, tmp_path):
    model = adapted("bert", init=init, base_seed=3, trainable_scales=False)
    model.save_pretrained(tmp_path)
    loaded = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, RavanConfig)
    assert (loaded.init, loaded.base_seed, loaded.trainable_scales) == (init, 3, False)
    assert loaded.base_layers is not None
    assert loaded.base_layers["sizes"] == {"16 x 16": 4}
    again = PeftModel.from_pretrained(build("bert"), tmp_path)
    for ours, theirs in zip(layers_of(model).values(), layers_of(again).values(), strict=True):
        assert torch.equal(ours.ravan_B["default"], theirs.ravan_B["default"])


def test_transformers_loads_an_adapter_by_itself(tmp_path):
    base = tmp_path / "base"
    build("bert").save_pretrained(base)
    network = transformers.BertForSequenceClassification.from_pretrained(base).eval()
    model = shake(get_peft_model(network, config_of("bert")))
    model.save_pretrained(tmp_path / "adapter")
    pipeline: Any = transformers.pipeline
    for loaded in (
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapter"),
        pipeline("text-classification", str(tmp_path / "adapter"), tokenizer=no_tokens).model,
    ):
        assert layers_of(loaded)
        torch.testing.assert_close(logits(loaded.eval(), "bert"), logits(model, "bert"))


def no_tokens(text):
    return text


def test_low_precision_computes_heads_in_float32(kind):
    inputs = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in ARCHITECTURES[kind][4].items()
    }
    model = shake(get_peft_model(build(kind).bfloat16(), config_of(kind)))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}

    def computed():
        with torch.no_grad():
            return model(**inputs).logits

    found = [computed()]
    assert found[0].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        found.append(logits(shake(adapted(kind)), kind))
    model.merge_adapter()
    found.append(computed())
    model.unmerge_adapter()
    assert torch.equal(computed(), found[0])
    expected = logits(shake(adapted(kind)), kind)
    for got in found:
        assert float((got - expected).norm() / expected.norm()) < 0.1


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(kind, reentrant):
    def gradients(checkpointing):
        model = shake(adapted(kind)).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(0)
        model(**ARCHITECTURES[kind][4]).logits.square().mean().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    plain, saved = gradients(False), gradients(True)
    assert all(g is not None and g.abs().sum() > 0 for g in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(saved[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns of itself
def test_a_compiled_model_computes_the_same():
    torch._dynamo.reset()
    model = shake(adapted("llama")).train()
    compiled = torch.compile(model, backend="aot_eager")
    inputs = TOKENS | {"labels": TOKENS["input_ids"]}
    model(**inputs).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    compiled(**inputs).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


def test_hooks_of_a_frozen_layer_are_called():
    """For example accelerate's hooks, which fetch offloaded weights."""
    (layer, *_) = layers_of(shake(adapted("bert"))).values()
    calls = []
    x = torch.randn(4096, 16)
    expected = layer(x)
    handle = layer.base_layer.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert calls
    handle.remove()
    layer(x)
    assert len(calls) == 1  # merged, the layer's weight is enough


# Invalid input.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 17}, r"r = 17: layer bert\.enc.* is 16 x 16, expected at most 16; lower r"),
        ({"r": 8, "num_heads": 5}, r"num_heads = 5: .*layer bert.*, expected at most 4; lower num"),
        ({"target_modules": ["q_proj"]}, "Target modules {'q_proj'} not found"),
        ({"target_modules": ["key"], "exclude_modules": "bert.*"}, "No modules were targeted"),
        ({"target_modules": ["key"], "layers_to_transform": 7}, "'layers_to_transform': 7"),
        ({"target_modules": ["word_embeddings"]}, "embeddings: got a Embedding, expected a Linear"),
        ({"fan_in_fan_out": True}, "got a Linear with fan_in_fan_out=True"),
    ],
)
def test_layers_that_cannot_be_adapted_are_reported(changes, message):
    with pytest.raises(ValueError, match=message):
        adapted("bert", **changes)


def test_fan_in_fan_out_is_accepted_for_conv1d():
    assert layers_of(adapted("gpt2", fan_in_fan_out=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r = 0: expected a whole number at least 1"),
        ({"r": 2.5}, "r = 2.5: expected a whole number"),
        ({"num_heads": True}, "num_heads = True: expected a whole number"),
        ({"base_seed": "a"}, "base_seed = 'a': expected a whole number"),
        ({"trainable_scales": "no"}, "trainable_scales = 'no': expected one of True, False"),
        ({"save_bases": 1}, "save_bases = 1: expected one of True, False"),
        ({"target_modules": 7}, "target_modules = 7: expected a list"),
        ({"exclude_modules": {"a": 1}}, "exclude_modules = {'a': 1}: expected a list"),
        ({"target_modules": "*.query"}, "target_modules = '*.query': got no regular expression"),
        ({"exclude_modules": "*.query"}, "exclude_modules = '*.query': got no regular expression"),
        ({"init": "svd"}, "init = 'svd': expected one of normal, gram-schmidt, constant, shared"),
        ({"bias": "lora_only"}, "bias = 'lora_only': expected one of none, all, ravan_only"),
        ({"target_modules": ".*q", "layers_to_transform": 0}, "expected target_modules as a list"),
    ],
)
def test_an_invalid_setting_is_reported(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RavanConfig(**changes)


@pytest.mark.parametrize(
    ("model_class", "changes", "got", "expected"),
    [
        ("BertForSequenceClassification", {"num_hidden_layers": 3}, "6 layers of 16", "4 layers"),
        ("BertForSequenceClassification", {"hidden_size": 32}, "4 layers of 32", "4 layers of 1"),
        ("BertModel", {}, "them encoder.layer.0", "them bert.encoder.layer.0"),
    ],
)
def test_an_adapter_of_another_model_is_refused(model_class, changes, got, expected, tmp_path):
    shake(adapted("bert")).save_pretrained(tmp_path)
    config = transformers.BertConfig(**ARCHITECTURES["bert"][1].to_dict() | changes)
    other = getattr(transformers, model_class)(config)
    with pytest.raises(ValueError, match=f"got a {model_class} .*{got}.*expected .*{expected}"):
        PeftModel.from_pretrained(other, tmp_path)


def test_bases_that_differ_under_another_torch_are_refused(tmp_path):
    model = shake(adapted("bert", save_bases=True))
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_layers"]["sums"][0] += 0.1
    path.write_text(json.dumps(config))
    loaded = PeftModel.from_pretrained(build("bert"), tmp_path).eval()  # the saved bases are used
    assert torch.equal(logits(loaded, "bert"), logits(model, "bert"))
    path.write_text(json.dumps(config | {"save_bases": False}))
    with pytest.raises(ValueError, match="torch .* makes bases that sum up to .*save_bases=True"):
        PeftModel.from_pretrained(build("bert"), tmp_path)


def test_an_import_without_peft_names_the_missing_extra():
    code = (
        "import sys; sys.modules['peft'] = None\n"
        "import ravan_flwr\n"
        "try: ravan_flwr.RavanConfig\n"
        "except ImportError as error: sys.exit(str(error))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'peft>=0.19,<0.22'" in done.stderr
