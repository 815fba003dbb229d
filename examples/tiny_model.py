"""A model small enough to train on a laptop while you watch: digits and a few signs, one layer, random weights."""

from __future__ import annotations

import tempfile

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TOKENS = ["<pad>", "<end>", *"0123456789", ">", "+", "-"]


def tiny_model(seed: int = 0) -> str:
    """Write model and tokenizer into a temporary folder, as `save_pretrained` does, and return its path."""
    folder = tempfile.mkdtemp(prefix="tiny-model-")
    raw = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
