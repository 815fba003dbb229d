"""What the policies have in common from which recipes start: a small Qwen2 model, and a tokenizer of whole words.

For the scripts `warm_start.py` beside each recipe. What stands here decides their weights to the last bit: a change asks for new ones.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, UNK = "<pad>", "<unk>"


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Three layers with two heads of 64: few layers and wide heads pay on a CPU. As many positions as the tokenizer says."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=tokenizer.model_max_length,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def pretrained(tokenizer: Tokenizer, *, end: str, positions: int) -> PreTrainedTokenizerFast:
    """The tokenizer as models take it.

    Args:
        tokenizer: it has PAD, UNK and `end` in its vocabulary.
        end: the token that ends what is sampled.
        positions: the longest sequence, in tokens.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=end,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=positions,
    )


def build_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """For supervised steps."""
    return torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.98), weight_decay=0.01)


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step along the gradients, clipped to norm 1, and forget them."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
