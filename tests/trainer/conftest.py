from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from tests.trainer.tiny import save_tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A saved tiny model. While it is in use, one thread, no progress bars, and a garbage collector that skips what the imports made:
    every training run collects once, which would take longer than the run.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    gc.collect()
    gc.freeze()
    yield save_tiny_model(tmp_path_factory.mktemp("tiny_model"))
    gc.unfreeze()
    logging.enable_progress_bar()
    torch.set_num_threads(threads)
