"""Models that produce tokens: a request goes in, sampled tokens with their log-probs come out.

- base.py        what every engine offers
- dialogues.py   requests that continue one another, and what is refused
- null.py        an engine without a model, for tests and benchmarks
- tokenizer.py   the tokenizer of a model folder, as the folder describes it
- slot.py        the in-process engine: its thread, queue, cancels and publishes
  - checks.py    what a request must be like
  - seats.py     who gets which slot, and who must make room
  - handle.py    an open request, and how its outcome reaches the event loop
  - rows.py      the table of sequences in slots: at rest, waiting or ready
  - planning.py  who is computed next, whether yet, and how
  - model.py     a transformers model with slots: tokens in, next-token logits out
  - cache.py     keys and values of all slots
  - sampling.py  how a token is drawn, and its log-prob
  - loading.py   the engine's own model from disk, and what is refused
  - precision.py in which numbers it computes: float32, bfloat16, int8
  - weights.py   published weights, checked and copied; older ones for as long as somebody needs them

To add an engine: write one file with a class that follows `base.Engine`, export it here, and let the pipeline build it from
`engine.type`. docs/engines.md says in words what it must keep, of dialogues above all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice.generation.base import Engine, Generation, GenerationHandle, GenerationRequest, OnWeightUpdate, Purpose
from sluice.generation.null import Answer, NullEngine, answers

if TYPE_CHECKING:
    from sluice.generation.slot import SlotEngine

__all__ = [
    "Answer",
    "Engine",
    "Generation",
    "GenerationHandle",
    "GenerationRequest",
    "NullEngine",
    "OnWeightUpdate",
    "Purpose",
    "SlotEngine",
    "answers",
]


def __getattr__(name: str) -> Any:
    if name == "SlotEngine":  # imports torch and transformers
        from sluice.generation.slot import SlotEngine

        return SlotEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
