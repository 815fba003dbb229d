"""Writes down what a run decided, measured and left behind, so that it can be read during the run, after it and after its death.

- `run_folder.py`: the folder of a run, its parts and its lock
- `rundb.py`: run.db, the record itself, and the journal that writes it without holding anyone up
- `sinks.py`: metrics as JSONL and for TensorBoard, and the fan-out that survives a broken sink
- `rollouts.py`: recorded rollouts, the input of the offline tools; `rollout_parts.py`: their Parquet files; `rollout_reader.py`: reads them
- `checkpoints.py`: what a run is resumed from: state beside the trainer's files, proved whole by a manifest
- `summary.py`: a run in figures, read from run.db, and the lines that are printed at its end
- `status.py`: how a run is doing, or was doing when it died
- `gate_lines.py`: what its gate did, for both of them

To add a sink: a class with `write` and `close` in `sinks.py` (its package imported inside `__init__`), a switch in `RecordsConfig`, a line
in `build_sinks`. To record something new: a table in `rundb.py` (raise SCHEMA_VERSION) and a method of `Journal`.
"""

from sluice.records.checkpoints import Checkpoints
from sluice.records.rollout_reader import RecordedGroup, Recording, read_rollouts
from sluice.records.rollouts import RolloutRecorder, rollback_rollouts
from sluice.records.run_folder import RunFolder
from sluice.records.rundb import SCHEDULER, BatchRecord, Journal, open_for_reading, read_facts, rollback
from sluice.records.sinks import JsonlSink, MetricSink, Sinks, TensorBoardSink, build_sinks, read_metrics
from sluice.records.status import RunStatusReport, read_status, status_lines
from sluice.records.summary import ENGINE_TOKENS, MAX_STEPS, RunSummary, over_all, read_summary, summary_lines

__all__ = [
    "ENGINE_TOKENS",
    "MAX_STEPS",
    "SCHEDULER",
    "BatchRecord",
    "Checkpoints",
    "Journal",
    "JsonlSink",
    "MetricSink",
    "RecordedGroup",
    "Recording",
    "RolloutRecorder",
    "RunFolder",
    "RunStatusReport",
    "RunSummary",
    "Sinks",
    "TensorBoardSink",
    "build_sinks",
    "open_for_reading",
    "over_all",
    "read_facts",
    "read_metrics",
    "read_rollouts",
    "read_status",
    "read_summary",
    "rollback",
    "rollback_rollouts",
    "status_lines",
    "summary_lines",
]
