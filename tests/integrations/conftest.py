from __future__ import annotations

from tests.trainer.conftest import model_folder

__all__ = ["model_folder"]
