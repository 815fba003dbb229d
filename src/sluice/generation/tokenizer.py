"""Load the tokenizer of a model folder, as the folder describes it.

transformers' AutoTokenizer (5.x) replaces a tokenizer saved by `PreTrainedTokenizerFast` by the class registered for some model types,
qwen2 among them: a tokenizer of one's own then splits text into other tokens, without a word. A folder that declares the general class
gets it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from sluice.errors import ConfigError

GENERAL_CLASSES: Final = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})  # both are tokenizer.json and no more


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer saved in `path` (by save_pretrained), never from a network. Raises `ConfigError` when there is none that loads."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path must be a local folder with model and tokenizer as save_pretrained writes them, there is none at {folder} - check "
            "the path; a model of a hub has to be downloaded into a folder first"
        )
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        is_general = settings.get("tokenizer_class") in GENERAL_CLASSES and (folder / "tokenizer.json").is_file()
        loader: Any = PreTrainedTokenizerFast if is_general else AutoTokenizer
        return loader.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigError(
            f"model.path must be a folder with a tokenizer as save_pretrained writes it (tokenizer.json, tokenizer_config.json), got "
            f"{folder}: {type(error).__name__}: {error} - save the tokenizer beside the model"
        ) from error
