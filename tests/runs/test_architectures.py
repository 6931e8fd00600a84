"""Models of transformers, by architecture: adapted, trained, exported."""

import copy
import functools
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers

import ravan_flwr.peft  # noqa: F401 (PEFT then reads adapters of RAVAN)
from ravan_flwr import result_of, simulate
from ravan_flwr.adapters.attach import TARGETS, find_layers
from ravan_flwr.cli import main
from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras.example_privacy.gradients import ExampleGradients, check_trained
from ravan_flwr.extras.example_privacy.steps import check_examples_independent
from ravan_flwr.methods import METHODS
from ravan_flwr.results.export import merged_network
from ravan_flwr.tasks.extensions import ByExample, task_with
from ravan_flwr.training.local_steps import evaluate_all
from ravan_flwr.training.model_and_data import ModelAndData, make_task
from ravan_flwr.training.network import build_network, default_targets
from tests.runs.in_use import OF_WEIGHTS
from tests.runs.small_models import small_settings
from tests.short_runs import records_of, same_bits
from tests.support.tiny import MODELS, PIXELS, TOKENS, save_model

# The number of each small model's query and value projections, if it is not 4.
MATRICES = {"t5": 8, "phi3": 2}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Return a function: architecture -> settings of a run with a small model and data."""
    return functools.partial(small_settings, tmp_path_factory.mktemp("models"))


def loaded_with(settings, **more):
    """Load model and data; `more` are settings with Python names."""
    changes = {key.replace("_", "-"): value for key, value in more.items()}
    return ModelAndData(read_config(settings | changes))


def batch_of(loaded, number=8):
    (first, *_) = loaded.test_sets.values()
    return loaded.task.collate(first.take(np.arange(number)))


def loss_of(network, loaded):
    with torch.inference_mode():
        return loaded.task.loss(network.eval(), batch_of(loaded))


# Personalised methods have the layers of fedit (tests/runs/test_personal.py).
OF_ADAPTERS = [
    name for name, listed in METHODS.items() if name not in OF_WEIGHTS and not listed.personalised
]
# Every architecture with an adapter, the methods in turn; some with methods that change weights.
PAIRS = [
    *zip(MODELS, itertools.cycle(OF_ADAPTERS), strict=False),
    ("swin", "full"), ("llama", "full"), ("t5", "full"), ("phi3", "fedex-lora"),
]  # fmt: skip


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("kind", "method"), PAIRS)
def test_an_architecture_trains_and_exports_give_the_runs_loss(kind, method, settings, tmp_path):
    run = simulate(settings(kind) | {"method": method, "output-dir": str(tmp_path)}, 3)
    assert (run.summary["rejected"], run.summary["rounds"]) == (0, 1)
    with result_of(run.run_dir) as loaded:
        assert len(loaded.model.layers) == MATRICES.get(kind, 4)
        deltas = loaded.model.method.delta_weights(loaded.model.adapters)
        assert all(delta.abs().max() > 0 for delta in deltas)
        merged = merged_network(loaded)
        expected, actual = loss_of(loaded.model.network, loaded), loss_of(merged, loaded)
        torch.testing.assert_close(expected, actual, rtol=1e-4, atol=1e-4)
        if method in OF_WEIGHTS:
            return
        built = build_network(loaded.config.model, loaded.task, seed=99)  # another classifier
        base: Any = copy.deepcopy(built.network)
        reloaded: Any = peft.PeftModel.from_pretrained(base, run.run_dir / "adapter")
        # The base model, as in training: PEFT's wrapper lacks its other methods.
        actual = loss_of(reloaded.base_model.model, loaded)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_clients_leave_the_statistics_of_batch_normalisations(settings, tmp_path):
    """They never travel, so that a reloaded result has those of the pretrained model."""
    torch.manual_seed(0)
    config = transformers.MobileViTConfig(
        image_size=32, hidden_sizes=[8] * 3, neck_hidden_sizes=[8] * 7, num_attention_heads=2,
        initializer_range=0.5,
    )  # fmt: skip
    transformers.MobileViTModel(config).save_pretrained(tmp_path / "model")
    model = {"model": str(tmp_path / "model"), "output-dir": str(tmp_path / "runs")}
    run = simulate(settings("vit") | model, 3)
    with result_of(run.run_dir) as loaded:
        measured = loaded.evaluate()
    assert measured["loss"] == pytest.approx(run.summary["metrics"]["final"]["loss"], rel=1e-4)


def test_a_model_that_names_no_size_of_images_takes_its_processors(settings, tmp_path):
    """CvT's config.json has none; without a processor it is refused."""
    config = transformers.CvtConfig(
        embed_dim=[8] * 3, num_heads=[1] * 3, depth=[1, 2, 3], drop_path_rate=[0.0] * 3
    )
    transformers.CvtModel(config).save_pretrained(tmp_path)
    own = settings("vit") | {"model": str(tmp_path)}
    with pytest.raises(ValueError, match=r"no image_size, .* preprocessor_config\.json"):
        _ = loaded_with(own).task.reader
    transformers.ViTImageProcessor(size={"height": 48, "width": 32}).save_pretrained(tmp_path)
    task = make_task(read_config(own))
    assert task.shapes(config, 4)["pixel_values"][0] == (4, 3, 48, 32)


@pytest.mark.parametrize(("kind", "tokens"), [("bert", 12), ("roberta", 10), ("mpnet", 10)])
def test_a_text_has_at_most_as_many_tokens_as_the_model_takes(kind, tokens, settings, tmp_path):
    """RoBERTa and MPNet count positions from 2 on: `max_position_embeddings` is 2 too many."""
    model = str(save_model(kind, tmp_path / kind, max_position_embeddings=12))
    longest = loaded_with(settings("llama"), model=model, max_length=tokens)
    longest.task.check_sizes()
    longest.model.network(input_ids=torch.full((1, tokens), 5))
    with pytest.raises(ValueError, match=f"set max-length={tokens},"):
        loaded_with(settings("llama"), model=model, max_length=tokens + 1).task.check_sizes()


def private(settings, method):
    """Load a model for private examples, with a trained classifier if it has one."""
    trained = {} if settings["preset"] == "newsgroups-t5" else {"classifier": "trained"}
    return loaded_with(settings | trained, privacy="example", epsilon=8.0, method=method)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_by_example_equal_those_of_single_examples(kind, settings):
    """Also with windows, a decoder, or several linear layers in the classifier."""
    loaded = private(settings(kind), "fedit")
    (examples, *_) = loaded.test_sets.values()
    with loaded.model.holding(loaded.model.initial_state()):
        network, parameters = loaded.model.network.eval(), loaded.model.parameters()
        check_trained(network, parameters)
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(0.1)
        by_example = ExampleGradients(network, parameters)

        def gradients(rows):
            batch = loaded.task.collate(examples.take(np.array(rows)))
            sizes = task_with(ByExample, loaded.task, "privacy=example").sizes(batch)
            return by_example.of(lambda: loaded.task.loss(network, batch), sizes)

        together = gradients([0, 1, 2])
        for row in range(3):
            for batched, single in zip(together, gradients([row]), strict=True):
                torch.testing.assert_close(batched[row], single[0], rtol=1e-3, atol=1e-5)
            network.zero_grad()
            batch = loaded.task.collate(examples.take(np.array([row])))
            loaded.task.loss(network, batch).backward()
            for parameter, batched in zip(parameters, together, strict=True):
                plain = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(batched[row], plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["ravan", "fedit"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_mixes_examples_is_found_by_random_examples(kind, method, settings):
    """The check runs before training, near the initial state, whose zeros would hide gradients."""
    check_mixing_is_found(private(settings(kind), method))


def check_mixing_is_found(loaded):
    """Check that mixing of a batch is found exactly if a hook on the first layer causes it."""
    check_examples_independent(loaded.model, loaded.task)
    assert loaded.model.examples_are_independent
    loaded.model.examples_are_independent = False
    encoder = getattr(loaded.model.network, "encoder", loaded.model.network)  # T5's
    hook = encoder.get_input_embeddings().register_forward_hook(_mixed)
    with pytest.raises(ValueError, match="depends on the other examples of its batch"):
        check_examples_independent(loaded.model, loaded.task)
    hook.remove()
    assert all(parameter.grad is None for parameter in loaded.model.network.parameters())


def _mixed(_, __, output):
    if isinstance(output, tuple):  # Swin returns its height and width as well
        return (output[0] - output[0].mean(0, keepdim=True), *output[1:])
    return output - output.mean(0, keepdim=True)


@pytest.mark.slow
def test_a_merged_export_can_be_the_model_of_another_run(settings, tmp_path):
    """It has its tokenizer, and its classifier is loaded, not initialised."""
    given = settings("bert") | {"classifier": "trained", "method": "fedit"}
    run = simulate(given | {"output-dir": str(tmp_path)}, 3)
    main(["export", str(run.run_dir), "--as", "merged", str(tmp_path / "merged")])
    with result_of(run.run_dir) as loaded:
        expected = loss_of(loaded.model.network, loaded)
    again = given | {"model": str(tmp_path / "merged"), "seed": 5}
    reloaded = loaded_with(again)
    actual = loss_of(reloaded.model.network, reloaded)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    # With other labels the classifier is initialised, also with the same size.
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    config["id2label"]["0"] = "other"
    (tmp_path / "merged" / "config.json").write_text(json.dumps(config))
    relabelled = loaded_with(again)
    assert loss_of(relabelled.model.network, relabelled) != pytest.approx(float(expected), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["peft", "ravan"])
def test_an_adapter_of_a_backbone_without_a_pooler_has_the_new_one(form, settings, tmp_path):
    """As in a folder of BertForMaskedLM; the adapted layers are beside it in the same module."""
    folder = save_model("bert", tmp_path / "model")
    transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).save_pretrained(folder)
    given = settings("bert") | {"model": str(folder), "output-dir": str(tmp_path / "runs")}
    run = simulate(given, 3)
    main(["export", str(run.run_dir), "--as", form, str(tmp_path / form)])
    with result_of(run.run_dir) as loaded:
        expected = loss_of(loaded.model.network, loaded)
    backbone = build_network(loaded.config.model, loaded.task, seed=99).network
    saved = peft.PeftModel.from_pretrained(backbone, tmp_path / form)
    torch.testing.assert_close(loss_of(saved, loaded), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_an_export_has_the_checkpoints_dtype(settings, tmp_path):
    """The delta-weight is added in float32, and the sum is rounded to the checkpoint's dtype."""
    folder = save_model("llama", tmp_path / "model", dtype="bfloat16")
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    network.save_pretrained(folder)
    run = simulate(settings("llama") | {"model": str(folder), "output-dir": str(tmp_path)}, 3)
    main(["export", str(run.run_dir), "--as", "merged", str(tmp_path / "merged")])
    with result_of(run.run_dir) as loaded:
        exact = dict(merged_network(loaded).named_parameters())
    saved = safetensors.torch.load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    for name, tensor in saved.items():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16))
    card = (run.run_dir / "adapter" / "README.md").read_text()
    assert f'AutoModelForSequenceClassification.from_pretrained("{folder}", num_labels=3)' in card


@pytest.mark.slow
def test_the_classifier_has_no_pretrained_weights_and_is_a_function_of_the_seed(settings):
    def built(kind, seed):
        config = read_config(settings(kind) | {"seed": seed})
        return build_network(config.model, make_task(config), seed)

    for kind, names in {
        "roberta": {"classifier.dense", "classifier.out_proj"},
        "distilbert": {"pre_classifier", "classifier"},
        "llama": {"score"},
        "vit": {"classifier"},
        "t5": set(),
    }.items():
        first, second, other = built(kind, 1), built(kind, 1), built(kind, 2)
        by_id = {id(p): name.rpartition(".")[0] for name, p in first.network.named_parameters()}
        assert {by_id[id(p)] for p in first.classifier} == names
        for a, b, c in zip(first.classifier, second.classifier, other.classifier, strict=True):
            assert torch.equal(a, b)
            assert a.ndim == 1 or not torch.equal(a, c)


def test_targets_can_be_set(settings):
    given = settings("llama")
    layers = loaded_with(given, targets="self_attn.o_proj, mlp.up_proj").model.layers
    ends = "self_attn.o_proj", "mlp.up_proj"
    assert [layer.name for layer in layers] == [
        f"model.layers.{i}.{end}" for i in (0, 1) for end in ends
    ]
    with pytest.raises(ValueError, match=r"got targets \['mlp.up_prj'\]"):
        _ = loaded_with(given, targets="q_proj,mlp.up_prj").model
    with pytest.raises(ValueError, match=r"got targets \['nothing'\].*o_proj") as error:
        _ = loaded_with(given, targets="nothing").model
    assert "layers.1" not in str(error.value)  # each end of the names is listed once
    assert str(error.value).count("mlp.up_proj") == 1


# Architectures that are not in the table: class, configuration, ends of the adapted layers' names.
SIDES_OF_GPT: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 300}
OTHERS: list[tuple[str, Any, list[str]]] = [
    ("MPNetForSequenceClassification", {**TOKENS}, ["attn.q", "attn.v"]),
    ("AlbertForSequenceClassification", {**TOKENS, "embedding_size": 8},
     ["attention.query", "attention.value"]),
    ("ModernBertForSequenceClassification", {**TOKENS, "pad_token_id": 0}, ["attn.Wqkv"]),
    ("FalconForCausalLM", {**TOKENS}, ["self_attention.query_key_value"]),
    ("DebertaForSequenceClassification", {**TOKENS}, ["self.in_proj"]),
    ("GPTBigCodeForCausalLM", SIDES_OF_GPT, ["attn.c_attn"]),
    ("CTRLForSequenceClassification", {**SIDES_OF_GPT, "dff": 24},
     ["multi_head_attention.Wq", "multi_head_attention.Wv"]),
    ("HieraForImageClassification", {}, ["attn.qkv"]),
    # No attention with such layers: all linear layers but the head.
    ("FNetForSequenceClassification",
     {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 300},
     ["embeddings.projection", "intermediate.dense", "output.dense"]),
    ("MambaForCausalLM", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 300},
     ["mixer.in_proj", "mixer.x_proj", "mixer.dt_proj", "mixer.out_proj"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "ends"), OTHERS)
def test_layers_of_architectures_outside_the_table_are_found_by_their_names(name, shape, ends):
    made = getattr(transformers, name)
    with torch.device("meta"):
        network = made(made.config_class(**shape))
    assert network.config.model_type not in TARGETS
    found = [layer.name for layer in find_layers(network, default_targets("org/a", network))]
    assert found == [layer.name for layer in find_layers(network, ends)]


@pytest.mark.parametrize("kind", ["vit", "swin", "bert", "distilbert", "llama", "phi3"])
def test_names_lead_to_the_layers_of_the_table(kind, monkeypatch):
    made, config = MODELS[kind]
    with torch.device("meta"):
        network = made(config)
    expected = find_layers(network, TARGETS[kind])
    monkeypatch.delitem(TARGETS, kind)
    assert find_layers(network, default_targets("org/a", network)) == expected


def test_a_run_logs_once_that_all_linears_are_adapted(settings, tmp_path, caplog, monkeypatch):
    """XLNet has no linear layers in its attention."""
    shape = transformers.XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=24, vocab_size=300)
    monkeypatch.setitem(MODELS, "xlnet", (transformers.XLNetModel, shape))
    model = save_model("xlnet", tmp_path / "xlnet")
    caplog.set_level("INFO", "ravan_flwr")
    for _ in range(2):
        assert len(loaded_with(settings("bert"), model=str(model)).model.layers) == 4
    (line,) = [text for text in caplog.messages if "all-linear" in text]
    for fact in ("'xlnet'", "4 linear layers", "targets=", "ff.layer_1, ff.layer_2"):
        assert fact in line
    assert "\n" not in line
    assert "summary" not in line  # the head


def test_a_model_without_linear_layers_is_refused():
    with torch.device("meta"):
        network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIDES_OF_GPT))
    with pytest.raises(ValueError, match=r"model org/a: expected linear layers.*'gpt2' has none"):
        default_targets("org/a", network)


def test_a_network_without_a_separate_backbone_is_refused(settings, tmp_path, monkeypatch):
    """All its layers would be drawn from the seed, as a classifier."""
    part = {**PIXELS, "projection_dim": 16}
    shape = transformers.CLIPConfig(vision_config=part, text_config={**TOKENS})
    monkeypatch.setitem(MODELS, "clip", (transformers.CLIPModel, shape))
    save_model("clip", tmp_path / "clip")
    shutil.copy(Path(settings("vit")["model"]) / "preprocessor_config.json", tmp_path / "clip")
    with pytest.raises(ValueError, match="architecture 'clip'.*cannot be told from the head"):
        _ = loaded_with(settings("vit"), model=str(tmp_path / "clip")).model


NO_TOKENIZER = {"tokenizer.json": None, "tokenizer_config.json": None}
DEEPER = {"config.json": lambda text: json.dumps(json.loads(text) | {"num_hidden_layers": 3})}


@pytest.mark.parametrize(
    ("kind", "files", "message"),
    [
        ("vit", {"config.json": None}, "has no config.json"),
        ("vit", {"model.safetensors": None}, "has no model.safetensors"),
        ("vit", DEEPER, r"its weights lack vit.layers.2.* which only pretraining"),
        ("bert", NO_TOKENIZER, "it has no tokenizer, expected tokenizer.json"),
    ],
)
def test_folders_of_models_without_a_file_are_errors(kind, files, message, settings, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(settings(kind)["model"], folder)
    for name, change in files.items():
        path = folder / name
        path.write_text(change(path.read_text())) if change else path.unlink()
    with pytest.raises(ValueError, match=message):
        _ = loaded_with(settings(kind), model=str(folder)).model


def test_models_that_do_not_fit_are_errors(settings):
    with pytest.raises(ValueError, match=r"data are images, but this model reads texts .*'t5'"):
        _ = loaded_with(settings("vit"), model=settings("t5")["model"]).model
    with pytest.raises(ValueError, match="classifier = 'trained'"):
        _ = loaded_with(settings("t5"), classifier="trained").model
    config = read_config(settings("vit"))
    shape = (("model_type", "vit"), ("hidden_size", 768))
    spec = type(config.model)("hub", config.model.name, shape=shape)
    with pytest.raises(ValueError, match="hidden_size = 16, but the preset's shape 768"):
        build_network(spec, make_task(config), 0)


@pytest.mark.slow
def test_padding_does_not_change_the_loss(settings):
    """A batch's loss is the mean of the losses of its single texts."""
    for kind in ("bert", "llama", "t5"):
        loaded = loaded_with(settings(kind), max_length=48)
        (first, *_) = loaded.test_sets.values()
        network = loaded.model.network.eval()
        rows = [first.take(np.array([row])) for row in range(8)]
        with torch.inference_mode():
            alone = [loaded.task.loss(network, loaded.task.collate(row)) for row in rows]
            together = loaded.task.loss(network, batch_of(loaded))
        assert len({int(row["attention_mask"].sum()) for row in rows}) > 1
        torch.testing.assert_close(torch.stack(alone).mean(), together, rtol=1e-4, atol=1e-5)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("kind", ["bert", "llama", "t5"])
def test_an_evaluation_by_length_equals_one_in_order(kind, settings, monkeypatch):
    loaded = loaded_with(settings(kind), max_length=48)
    (test, *_) = loaded.test_sets.values()
    masks = test.take(np.arange(len(test)))["attention_mask"]
    counts = np.asarray(loaded.task.lengths(test))
    assert counts.tolist() == masks.sum(1).tolist()
    assert len(set(counts)) > 1
    selected = loaded.task.lengths(test.select(np.array([3, 1])))
    assert np.array_equal(np.asarray(selected), counts[[3, 1]])
    by_length = evaluate_all(loaded.model, loaded.task, {"test": test}, 8)
    monkeypatch.setattr(type(loaded.task), "lengths", lambda *_: None)
    in_order = evaluate_all(loaded.model, loaded.task, {"test": test}, 8)
    assert by_length == pytest.approx(in_order, rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_training_by_length_and_dropout_are_a_function_of_the_seed(settings, tmp_path):
    """BERT has dropout. The losses differ from those of random batches."""
    losses = []
    for number, batching in enumerate(("random", "length", "length")):
        torch.manual_seed(number)
        given = settings("bert") | {"max-length": 48, "batching": batching, "local-steps": 4}
        run = simulate(given | {"output-dir": str(tmp_path / str(number))}, 3)
        losses.append(records_of(run)[0]["train-loss"])
    assert losses[1] == losses[2] != losses[0]


def test_pixel_values_are_those_of_the_models_own_processor(settings):
    loaded = ModelAndData(read_config(settings("vit")))
    processor, test = loaded.task.reader, loaded.splits["test"]
    opened = test.cast_column("image", datasets.Image())["image"][:8]  # decoded by `datasets`
    images = [image.convert("RGB") for image in opened]
    expected = processor(images=images, return_tensors="pt")["pixel_values"]
    inputs = {}
    network = loaded.model.network.eval()
    network.register_forward_pre_hook(lambda *given: inputs.update(given[2]), with_kwargs=True)
    loaded.task.loss(network, batch_of(loaded))
    torch.testing.assert_close(inputs["pixel_values"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["vit", "bert", "t5", "llama"])
def test_examples_read_from_their_file_are_the_same(kind, settings, monkeypatch):
    batches, lengths = [], []
    for limit in (2**28, 0):
        monkeypatch.setattr("ravan_flwr.tasks.base.IN_MEMORY", limit)
        monkeypatch.setattr("ravan_flwr.tasks.text._AT_A_TIME", 7)
        loaded = loaded_with(settings(kind))
        batches.append(batch_of(loaded))
        train = loaded.partition(1, 3).train
        assert isinstance(train.table, dict) == (limit > 0)
        lengths.append(None if kind == "vit" else [*loaded.task.lengths(train)])
    assert same_bits(*batches)
    assert all(tensor.dtype == batches[1][name].dtype for name, tensor in batches[0].items())
    assert lengths[0] == lengths[1]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("kind", ["vit", "bert", "t5", "llama"])
def test_gradient_checkpointing_changes_nothing_but_memory(kind, settings, tmp_path):
    losses = []
    for enabled in (False, True):
        folder = str(tmp_path / str(enabled))
        given = settings(kind) | {"gradient-checkpointing": enabled, "output-dir": folder}
        losses.append(simulate(given, 2).summary["metrics"]["final"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
