"""RAVAN as a tuner of PEFT in other libraries: Trainer, trl, bitsandbytes, an old PEFT."""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from typing import Any

import peft
import pytest
import torch
import transformers
from datasets import Dataset
from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch.nn import functional as F

from ravan_flwr import RavanConfig
from ravan_flwr.adapters.stored import dense_weight
from ravan_flwr.peft import RavanLinear
from tests.support import ROOT
from tests.support.tiny import SIDES, WORDS, save_model, save_speaker

SMALL = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
TOKENS = torch.arange(40).view(2, 20)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, RavanLinear)]


def small_bert():
    return transformers.BertConfig(**SIDES, vocab_size=60, intermediate_size=24)


def of_image(index):
    """Return a dark or light grey picture, with its label."""
    shade = 0.2 + 0.6 * (index % 2)
    random = torch.Generator().manual_seed(index)
    pixels = shade + 0.1 * torch.randn(3, 16, 16, generator=random)
    return {"pixel_values": pixels, "labels": index % 2}


def arguments(folder, kind=transformers.TrainingArguments, **changes):
    return kind(
        str(folder), report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=8, learning_rate=0.05, seed=0, **changes,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_transformers_trainer_trains_and_resumes_from_its_checkpoint(tmp_path, checkpointing):
    torch.manual_seed(0)
    sides = SIDES | {"intermediate_size": 24, "image_size": 16, "patch_size": 8}

    def network():
        torch.manual_seed(0)
        return transformers.ViTForImageClassification(transformers.ViTConfig(**sides))

    config = RavanConfig(r=4, num_heads=3, modules_to_save=["classifier"])
    examples = [of_image(index) for index in range(64)]

    def trainer(epochs):
        return transformers.Trainer(
            get_peft_model(network(), config),
            arguments(
                tmp_path, num_train_epochs=epochs, gradient_checkpointing=checkpointing,
                save_strategy="epoch",
            ),
            train_dataset=examples,
        )  # fmt: skip

    first = trainer(3)
    before = first.evaluate(examples)["eval_loss"]
    first.train()
    after = first.evaluate(examples)["eval_loss"]
    assert after < 0.85 * before
    assert all(layer.ravan_H["default"].abs().max() > 1e-3 for layer in layers_of(first.model))

    loaded = PeftModel.from_pretrained(network(), tmp_path / "checkpoint-24")
    pixels = torch.stack([example["pixel_values"] for example in examples])
    with torch.no_grad():
        expected = first.model.eval()(pixel_values=pixels).logits
        torch.testing.assert_close(loaded.eval()(pixel_values=pixels).logits, expected)
    continued = trainer(4)
    continued.train(resume_from_checkpoint=str(tmp_path / "checkpoint-24"))
    assert continued.state.global_step == 32
    assert continued.evaluate(examples)["eval_loss"] < after


RELOAD = """
import sys, torch, transformers
from peft import PeftModel
from ravan_flwr import RavanConfig

transformers.logging.set_verbosity_error()
backbone = transformers.AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
model = PeftModel.from_pretrained(backbone, sys.argv[2]).eval()
print(model(torch.arange(24).view(2, 12)).logits.tolist())
"""


@pytest.mark.slow(kept=1)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("backbone", "settings", "kept"),
    [
        (transformers.BertModel, {}, False),  # the head stays as it was drawn
        (transformers.BertModel, {"task_type": "SEQ_CLS"}, True),
        (transformers.BertModel, {"modules_to_save": ["classifier"]}, True),
        (transformers.BertForSequenceClassification, {}, True),  # the head is in its folder
    ],
)
def test_saving_warns_if_another_head_would_be_loaded(backbone, settings, kept, tmp_path, python):
    backbone(small_bert()).save_pretrained(tmp_path / "backbone")
    network = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "backbone")
    model = get_peft_model(network, RavanConfig(r=4, target_modules=["query", "value"], **settings))
    examples = [{"input_ids": row, "labels": number % 2} for number, row in enumerate(TOKENS)]
    Trainer = transformers.Trainer
    Trainer(model, arguments(tmp_path, save_strategy="no"), train_dataset=examples).train()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.save_pretrained(tmp_path / "adapter")
    texts = [str(w.message) for w in warned if "modules_to_save" in str(w.message)]
    assert len(texts) == (not kept)
    assert kept or all(word in texts[0] for word in ("classifier.weight", 'task_type="SEQ_CLS"'))

    done = python.run(["-c", RELOAD, str(tmp_path / "backbone"), str(tmp_path / "adapter")])
    assert not done.returncode, done.stderr
    with torch.no_grad():
        expected = model.eval()(torch.arange(24).view(2, 12)).logits
    assert torch.allclose(torch.tensor(json.loads(done.stdout)), expected, atol=1e-6) == kept


def test_saving_warns_of_a_head_that_was_unfrozen_by_hand(tmp_path):
    def save(**settings):
        network = transformers.BertForSequenceClassification(small_bert())
        model = get_peft_model(network, RavanConfig(r=4, target_modules=["query"], **settings))
        model.classifier.requires_grad_(True)
        model.save_pretrained(tmp_path)

    with pytest.warns(UserWarning, match=r"classifier\.weight.*modules_to_save=\['classifier'\]"):
        save()
    save(modules_to_save=["classifier"])  # warnings are errors


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of trl
def test_trls_trainer_trains_with_the_configuration(tmp_path):
    trl = pytest.importorskip("trl")
    save_speaker("llama", tmp_path / "model", WORDS, initializer_range=0.3)
    texts = Dataset.from_dict({"prompt": ["ka lo mi "] * 32, "completion": ["tu ne ra"] * 32})
    trainer = trl.SFTTrainer(
        str(tmp_path / "model"),
        arguments(tmp_path / "out", trl.SFTConfig, max_steps=12, gradient_checkpointing=True),
        train_dataset=texts,
        peft_config=RavanConfig(r=4, num_heads=4, target_modules="all-linear", init="normal"),
    )
    names = {n.split(".")[-2] for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert names == {"ravan_H", "ravan_s"}
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    trainer.save_model(str(tmp_path / "adapter"))
    assert layers_of(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"))


QUANTIZED: dict[str, dict[str, Any]] = {
    "8bit": {"load_in_8bit": True},
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "4bit twice": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True,
    },
}  # fmt: skip
# Relative error of a merged weight, by rounding.
TOLERANCE = {"8bit": 0.02, "4bit": 0.15, "4bit twice": 0.25}


@pytest.mark.slow(kept=1)
@pytest.mark.filterwarnings("ignore")  # bitsandbytes and transformers warn on a CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_quantized_backbone_is_adapted_trained_and_merged(quantization, dtype, tmp_path):
    pytest.importorskip("bitsandbytes")
    save_model("llama", tmp_path, **SMALL)
    bits = transformers.BitsAndBytesConfig(
        **QUANTIZED[quantization], bnb_4bit_compute_dtype=dtype, llm_int8_threshold=0.0
    )

    def network():
        return transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=bits, dtype=dtype, device_map="cpu"
        ).eval()

    def logits(model):
        with torch.no_grad():
            return model(TOKENS).logits

    backbone = network()
    start = logits(backbone)
    config = RavanConfig(r=8, num_heads=3, target_modules="all-linear", init="normal")
    model = get_peft_model(backbone, config).eval()
    assert torch.equal(logits(model), start)
    assert {type(layer.base_layer).__name__[:7] for layer in layers_of(model)} == {
        "Linear" + quantization[0]
    }

    trained = [p for p in model.parameters() if p.requires_grad]
    prepared = get_peft_model(prepare_model_for_kbit_training(network()), config).train()
    loss = prepared(TOKENS, labels=TOKENS).loss
    loss.backward()
    gradients = {n: p.grad for n, p in prepared.named_parameters() if p.grad is not None}
    assert len(gradients) == len(trained)
    assert all(g.abs().sum() > 0 for n, g in gradients.items() if "ravan_H" in n)

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trained:
            parameter.normal_()
    expected = logits(model)
    assert float((expected - start).norm() / start.norm()) > 0.2
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(network(), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), expected)

    expected_weights = [
        dense_weight(m.base_layer) + m.get_delta_weight("default") for m in layers_of(model)
    ]
    expected = logits(model)  # bitsandbytes rounds when it packs weights, also for saving
    model.merge_adapter()
    for layer, weight in zip(layers_of(model), expected_weights, strict=True):
        difference = dense_weight(layer.base_layer).float() - weight.float()
        assert float(difference.norm() / weight.norm()) < TOLERANCE[quantization]
    assert not torch.equal(logits(model), expected)
    model.unmerge_adapter()
    assert torch.equal(logits(model), expected)  # to the bit

    with torch.no_grad():
        states = model(TOKENS, output_hidden_states=True).hidden_states[-1].float()
        merged_model = model.merge_and_unload()
        merged = merged_model(TOKENS, output_hidden_states=True).hidden_states[-1].float()
    assert not layers_of(merged_model)
    assert float(F.cosine_similarity(states, merged, dim=-1).mean()) > 0.85


# The oldest admitted PEFT, installed from the package index or pip's cache.
OLDEST = "0.19.0"
SCRIPT = """
import sys, torch, transformers
import peft
from ravan_flwr import RavanConfig
from ravan_flwr.peft import RavanLinear

assert peft.__version__ == sys.argv[1], peft.__version__
sides = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)

def network():
    torch.manual_seed(0)
    config = transformers.BertConfig(**sides, vocab_size=60, initializer_range=0.3)
    return transformers.BertForSequenceClassification(config).eval()

def logits(model):
    with torch.no_grad():
        return model(torch.arange(24).view(2, 12)).logits

assert peft.PeftType("RAVAN") is peft.PeftType.RAVAN and "RAVAN" in list(peft.PeftType)
config = RavanConfig(r=3, modules_to_save=["classifier"])
model = peft.get_peft_model(network(), config).eval()
assert torch.equal(logits(model), logits(network()))
for parameter in model.parameters():
    if parameter.requires_grad:
        torch.nn.init.normal_(parameter.data)
expected = logits(model)
model.save_pretrained(sys.argv[2])
loaded = peft.PeftModel.from_pretrained(network(), sys.argv[2], adapter_name="x").eval()
assert torch.equal(logits(loaded), expected)
loaded.add_adapter("y", RavanConfig(r=2))
loaded.set_adapter("y")
torch.testing.assert_close(logits(loaded) - logits(loaded), 0 * expected)
loaded.set_adapter("x")
loaded.delete_adapter("y")
loaded.merge_adapter()
torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-3)
loaded.unmerge_adapter()
assert torch.equal(logits(loaded), expected)
whole = loaded.merge_and_unload()
assert not any(isinstance(module, RavanLinear) for module in whole.modules())
for wrong, words in ((dict(target_modules=["no"]), "not found"), (dict(r=99), "r = 99: layer")):
    try:
        peft.get_peft_model(network(), RavanConfig(**wrong))
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(wrong)
"""


@pytest.fixture(scope="module")
def oldest():
    """Install the oldest PEFT into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "0", "--no-deps"]
        command += ["--target", folder, f"peft=={OLDEST}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot install peft {OLDEST}: {done.stderr[-200:]}")
        yield folder


@pytest.mark.slow
def test_the_script_runs_with_the_oldest_admitted_peft(oldest, tmp_path, python_without_hub):
    environment = os.environ | {"PYTHONPATH": oldest}
    done = python_without_hub.run(["-c", SCRIPT, OLDEST, str(tmp_path)], environment=environment)
    assert not done.returncode, done.stderr


@pytest.mark.slow
def test_the_script_runs_with_the_installed_peft(tmp_path, python):
    done = python.run(["-c", SCRIPT, peft.__version__, str(tmp_path)])
    assert not done.returncode, done.stderr


@pytest.mark.parametrize(
    "change",
    [
        "peft.utils.register_peft_method = lambda **_: None.x",
        "peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING['RAVAN'] = object",  # as if PEFT had its own
        "peft.PeftType._member_names_ = ()",
    ],
)
def test_an_error_names_the_version_of_a_peft_that_cannot_be_extended(change, python):
    code = f"import peft, peft.utils, peft.mapping; {change}\nimport ravan_flwr.peft"
    done = python.run(["-c", code])
    assert f"PEFT {peft.__version__} does not take RAVAN" in done.stderr
    assert "expected a release from 0.19.0 to" in done.stderr


@pytest.mark.slow
def test_the_package_is_imported_quickly_and_its_tuner_without_flower():
    code = (
        "import sys, time; began = time.process_time(); import ravan_flwr\n"
        "assert time.process_time() - began < 0.1\n"
        "assert not {'torch', 'peft', 'flwr'} & set(sys.modules)\n"
        "from ravan_flwr import RavanConfig\n"
        "assert 'flwr' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr
