"""What the app trains: a tiny decoder, made here, on sums in words."""

import datasets
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ravan_flwr import RavanConfig

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WORDS = ["<pad>", "<end>", "plus", "is", *NUMBERS]
datasets.disable_progress_bars()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each word."""
    tokens = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}))
    tokens.pre_tokenizer = Whitespace()
    special = {"pad_token": WORDS[0], "eos_token": WORDS[1]}
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **special)


def make_model(method: str) -> PeftModel:
    """Make the decoder with its adapter, the same everywhere."""
    layers, saved = ["q_proj", "v_proj", "up_proj", "down_proj"], ["lm_head"]
    config: PeftConfig = LoraConfig(
        r=8, target_modules=layers, modules_to_save=saved, task_type="CAUSAL_LM"
    )
    if method == "ravan":
        config = RavanConfig(
            r=8, num_heads=4, target_modules=layers, modules_to_save=saved, task_type="CAUSAL_LM"
        )
    sizes = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(LlamaForCausalLM(sizes), config)
    if method == "ffa-lora":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and "lora_A" not in name)
    assert isinstance(model, PeftModel)
    return model


def load_texts(part: int, parts: int) -> datasets.Dataset:
    """Load a client's part of all sums up to ten."""
    pairs = [(a, b) for a in range(11) for b in range(11 - a)]
    texts = [f"{NUMBERS[a]} plus {NUMBERS[b]} is {NUMBERS[a + b]}" for a, b in pairs]
    return datasets.Dataset.from_dict({"text": texts[part::parts]})
