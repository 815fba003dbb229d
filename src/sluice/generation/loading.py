"""Loading a model of the engine's own from disk, with everything that can be refused before the first request.

The engine never shares a model with the trainer: trainers rebind `model.forward`, and a shared model would follow every optimiser step
in the middle of a generation.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from sluice.config.models import LoraConfig
from sluice.errors import ConfigError
from sluice.generation.precision import DTYPES, Precision, round_to_int8
from sluice.generation.tokenizer import load_tokenizer
from sluice.generation.weights import Weights


def load_net(path: str | Path, *, precision: Precision | torch.dtype, lora: LoraConfig | None) -> tuple[Any, Weights]:
    """A fresh model in eval mode, and the tensors that a publish replaces.

    Raises `ConfigError` for a wrong path or adapter, a folder that cannot be read, and weights that are not all there. Torch's random state
    is left as it was.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        state = "has no config.json" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        raise ConfigError(
            f"model.path must be a local folder written by transformers' save_pretrained, but {folder} {state} - correct the path, or "
            f"save the model there first"
        )
    with torch.random.fork_rng(devices=[]):
        net = _read(folder, DTYPES[precision] if isinstance(precision, str) else precision)
        net.requires_grad_(False)
        names = round_to_int8(net) if precision == "int8" else set()
        if lora is None:
            return net.eval(), Weights(net, net.state_dict(), rounded_names=names)
        net, weights = _with_adapter(net, lora)
        return net.eval(), weights


def _read(folder: Path, dtype: torch.dtype) -> Any:
    try:
        with _no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
    except Exception as error:  # torch, safetensors, transformers and the operating system each have their own
        raise ConfigError(
            f"model.path must hold a causal language model that transformers can load, but loading {folder} failed with "
            f"{type(error).__name__}: {error} - save it again with model.save_pretrained(path)"
        ) from error
    net, info = loaded
    absent = sorted(info["missing_keys"])
    if absent:
        raise ConfigError(
            f"model.path must hold all weights of {type(net).__name__}, but in {folder} {len(absent)} are missing, for example "
            f"{absent[0]} - they would be random numbers: save the whole model with model.save_pretrained(path)"
        )
    return net


def _with_adapter(net: Any, lora: LoraConfig) -> tuple[Any, Weights]:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model, get_peft_model_state_dict

    alpha: Any = lora.alpha  # peft says int and takes any number
    settings = PeftLoraConfig(
        r=lora.r, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=list(lora.target_modules), task_type="CAUSAL_LM"
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft's, not the user's
            wrapped = get_peft_model(net, settings)
    except ValueError as error:
        raise ConfigError(
            f"model.lora.target_modules must name layers of {type(net).__name__}, got {lora.target_modules} ({error}) - see the names "
            f"that model.named_modules() gives"
        ) from error
    wrapped.requires_grad_(False)
    return net, Weights(net, get_peft_model_state_dict(wrapped, save_embedding_layers=False))


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    logging: Any = transformers_logging
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def check_architecture(net: Any, max_length: int) -> None:
    """Refuse what its configuration alone rules out: windows shorter than max_length, and sequences beyond the model's positions.

    Raises `ConfigError` for both.
    """
    config = net.config.get_text_config()
    kind = type(net).__name__
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if window is not None and getattr(config, "use_sliding_window", True):
        kinds.add("sliding_attention")
    others = sorted(kinds - {"full_attention"})
    if others == ["sliding_attention"] and window is not None and max_length <= window:
        others = []  # no sequence is longer than the window, so that it hides nothing
    if others:
        size = f" (window {window})" if window is not None else ""
        raise ConfigError(
            f"model.path must hold a model with full attention in every layer, which the slot engine needs, but {kind} has "
            f"{', '.join(others)}{size} - use a model with plain attention (Llama, Qwen2, ...), or keep prompt and response within "
            f"the window"
        )
    implementation = net.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ConfigError(
            f"model.path must hold a model with the sdpa or eager attention of transformers, which the slot engine needs, but {kind} "
            f"was saved with {implementation} - remove _attn_implementation from its config.json"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ConfigError(
            f"prompt_length + response_length must fit into the model's {positions} positions (max_position_embeddings), got "
            f"{max_length} - shorten one of them (in an agentic run: sequence_length)"
        )


def stop_tokens(net: Any, path: str | Path, extra: Sequence[int], vocab_size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which tokens end a response: the end tokens of generation config, model and tokenizer (where there is one), and extra ones. [V]

    Raises `ConfigError` for an id outside the vocabulary, or when there is none at all.
    """
    ids: set[Any] = set(extra)
    for found in (net.generation_config.eos_token_id, net.config.get_text_config().eos_token_id):
        ids.update([found] if isinstance(found, int) else found or [])
    if (Path(path) / "tokenizer_config.json").is_file():
        end = load_tokenizer(path).eos_token_id
        ids.update([] if end is None else [end])
    outside = sorted((i for i in ids if not (isinstance(i, int) and 0 <= i < vocab_size)), key=str)
    if outside:
        raise ConfigError(
            f"model.path: end tokens must be ids of the model's {vocab_size} tokens, got {outside} - correct eos_token_id in "
            f"generation_config.json or the tokenizer, or stop_token_ids"
        )
    if not ids:
        raise ConfigError(
            f"model.path: the model in {path} must have an end token, but neither its configuration nor its tokenizer names one - set "
            f"eos_token_id in generation_config.json, or pass stop_token_ids"
        )
    table = np.zeros(vocab_size, dtype=np.bool_)
    table[sorted(ids)] = True
    return table
