"""The presets of FlowerTune: its published settings, and its evaluation of an adapter."""

import json
import math
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ravan_flwr import result_of, simulate
from ravan_flwr.cli import main
from ravan_flwr.config.run_config import read_config
from ravan_flwr.tasks.prompts import PromptFormat
from ravan_flwr.training.cost import adapter_parameters
from ravan_flwr.training.local_steps import learning_rate_in_round
from tests.support.tiny import FLOWERTUNE, save_data, save_speaker

# From examples/flowertune-llm-*/pyproject.toml and README.md of flwrlabs/flower (77068b84):
# data set, number of SuperNodes, fraction-train.
CHALLENGES = {
    "general-nlp": ("flwrlabs/alpaca-gpt4", 20, 0.1),
    "finance": ("flwrlabs/fingpt-sentiment-train", 50, 0.1),
    "medical": ("flwrlabs/medical-meadow-medical-flashcards", 20, 0.1),
    "code": ("flwrlabs/code-alpaca-20k", 10, 0.2),
}
# layers, inputs, outputs of queries, outputs of values
SHAPES = {"auto": (32, 4096, 4096, 1024), "small": (30, 576, 576, 192)}


@pytest.mark.parametrize("preset", FLOWERTUNE)
def test_the_settings_are_those_that_flower_publishes(preset):
    data, clients, fraction = CHALLENGES[preset]
    config = read_config({"preset": preset, "method": "fedit"})
    assert (config.data.name, config.num_clients) == (data, clients)
    assert config.clients_per_round == fraction * clients
    assert config.partition == "iid"
    assert (config.model.name, config.quantize) == ("mistralai/Mistral-7B-v0.3", "4bit")
    assert (config.lora_rank, config.lora_rank * config.lora_scale) == (32, 64)
    assert (config.local_steps, config.batch_size, config.max_length) == (10, 16, 512)
    assert (config.num_rounds, config.max_bytes) == (200, 200e9)
    assert config.gradient_checkpointing
    for t in range(1, 201):
        expected = 1e-6 + 0.5 * (5e-5 - 1e-6) * (1 + math.cos(math.pi * t / 200))
        assert learning_rate_in_round(config, t) == pytest.approx(expected)


@pytest.mark.parametrize("preset", FLOWERTUNE)
def test_prompts_are_those_of_flowertunes_apps(preset):
    """`formatting_prompts_func` after `reformat`, up to the response."""
    row = {"instruction": "Do it.", "input": "This.", "output": "Done."}
    instruction = {"general-nlp": "Do it.", "medical": "This."}.get(preset, "Do it. This.")
    data = read_config({"preset": preset}).data
    form = PromptFormat(None, data.prompts, "messages")
    roles = {role: row[column] for role, column in data.columns}

    def prompt_of(instruction):
        return (
            "Below is an instruction that describes a task. Write a response that appropriately "
            f"completes the request.\n### Instruction:\n{instruction}\n### Response: Done."
        )

    assert form.answered(roles, "completion").text == prompt_of(instruction)
    if preset == "code":
        assert form.answered(roles | {"input": ""}, "completion").text == prompt_of("Do it. ")


@pytest.mark.slow
@pytest.mark.parametrize("model", SHAPES)
def test_ravan_has_as_many_parameters_as_flowertunes_lora(model):
    layers, width, queries, values = SHAPES[model]
    fedit, ravan = (
        adapter_parameters(read_config({"preset": "code", "method": method, "model": model}))
        for method in ("fedit", "ravan")
    )
    assert fedit == layers * 32 * (2 * width + queries + values)
    assert 0.98 < ravan / fedit <= 1


def test_quantization_is_for_methods_with_a_frozen_backbone():
    assert read_config({"preset": "code", "method": "full"}).quantize == "none"
    assert read_config({"preset": "code", "backbone-dtype": "float32"}).quantize == "none"
    assert read_config({"preset": "code", "max-bytes": 1e9}).max_bytes == 1e9


@pytest.mark.usefixtures("untimed")
@pytest.mark.slow
@pytest.mark.parametrize("model", SHAPES)
def test_a_plan_needs_no_hub_and_a_run_names_the_missing_model(model, capsys):
    main(["plan", "preset=general-nlp", f"model={model}"])
    output = capsys.readouterr().out
    assert "max-bytes       200,000,000,000: enough for all rounds" in output
    assert "preset general-nlp, method ravan, classifier frozen" in output
    name = "mistralai/Mistral-7B-v0.3" if model == "auto" else "HuggingFaceTB/SmolLM2-135M-Instruct"
    with pytest.raises(ValueError, match=f"hf download {name}"):
        simulate({"preset": "general-nlp", "model": model, "backbone-dtype": "float32"}, 2)


@pytest.fixture(scope="module", params=["ravan", "fedit"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flowertune")
    settings = {
        "preset": "finance", "method": request.param, "learning-rate": 1e-2,
        "backbone-dtype": "float32",
        "model": str(save_speaker("mistral", folder / "model", initializer_range=0.3)),
        "data": str(save_data("finance", folder / "data")), "lora-rank": 2, "max-length": 128,
        "num-rounds": 1, "local-steps": 3, "eval-every": 1, "batch-size": 4,
        "tracking": "none", "output-dir": str(folder / "runs"),
    }  # fmt: skip
    return simulate(settings, 3).run_dir, folder / "model"


@pytest.mark.slow
def test_flowertunes_evaluation_loads_the_adapter_unchanged(run):
    """As evaluation/general-nlp/eval.py and evaluation/finance/eval.py load it, without 4 bits."""
    run_dir, base = run
    adapter = str(run_dir / "adapter")
    backbone = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(backbone, adapter, torch_dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    question = "<|im_start|>question\nIs it good?<|im_end|>\n<|im_start|>answer\n"
    ids = tokenizer.encode(question, return_tensors="pt")
    with result_of(run_dir) as loaded, torch.inference_mode():
        expected = loaded.model.network(ids).logits
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    out = model.generate(inputs=ids, max_new_tokens=2, do_sample=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    model.resize_token_embeddings(len(tokenizer))
    padded = tokenizer(["Is it good?", question], return_tensors="pt", padding=True)
    assert model.generate(**padded, max_length=128).shape[0] == 2
    assert out.shape[1] == ids.shape[1] + 2
    config = json.loads((run_dir / "adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["peft_type"]) == ("CAUSAL_LM", "LORA")
    assert config["base_model_name_or_path"] == str(base)
