"""A folder without a tokenizer, and no folder at all, are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.errors import ConfigError
from sluice.generation.tokenizer import load_tokenizer


def test_a_folder_that_is_not_there_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"there is none at .*some-org/some-model - check the path; a model of a hub has to be downloaded"
    ):
        load_tokenizer(tmp_path / "some-org" / "some-model")
    with pytest.raises(ConfigError, match="with a tokenizer as save_pretrained writes it .* save the tokenizer beside the model"):
        load_tokenizer(tmp_path)
