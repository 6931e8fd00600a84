"""Small models with random weights, saved by transformers and tokenizers."""

import inspect
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
SIDES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip


def make_bert(folder: Path) -> Path:
    """Save a small BERT, and a WordPiece tokenizer trained on English docstrings."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words = [inspect.getdoc(thing) or "" for thing in vars(logging).values()]
    trainer = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=[*SPECIAL.values()])
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{kind}_token": token for kind, token in SPECIAL.items()}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **names
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SIDES, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=64
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def make_vit(folder: Path) -> Path:
    """Save a ViT for images of 16 x 16 in colour, with its processor."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SIDES, image_size=16, patch_size=4)
    transformers.ViTModel(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder
