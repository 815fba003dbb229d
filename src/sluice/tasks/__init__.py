"""What to sample next: data sets become tokenised tasks, and a task list hands them out, each exactly once per epoch.

base.py           a raw row, and the protocols: `Source` (gives rows), `TaskSource` (what the scheduler draws from), `Tokenizer`
reasoning_gym.py  rows made by the reasoning-gym package
jsonl.py          rows of a file with one JSON object a line
huggingface.py    rows of local Hugging Face data: a folder of save_to_disk, or parquet and JSON files; never the network
sources.py        the table from `type` to source, names and default seeds
checks.py         `check_task_settings`: what can be refused before a tokenizer or a row is there
labels.py         which reward domain a row belongs to
templates.py      `PromptWriter`: a row becomes the text that the policy sees, and its tokens
dataset_filter.py which rows `dataset_filter` lets through
build.py          `build_tasks`: all of the above, in order
report.py         where every row went
task_list.py      `TaskList`: epochs, order, put-back, state
domain_tasks.py   `DomainTasks`: one task list for each domain, drawn from by domain
episodes.py       `EpisodeTasks`: episodes of environment groups, without end

Another source: a file with a class that has `problems()` and `rows()`, its line in sources.py, and its name and keys in sluice.config
(`TaskSourceConfig.type`, and the table of keys in checks.py).
"""

from __future__ import annotations

from sluice.tasks.base import TaskSource, Tokenizer
from sluice.tasks.build import LoadedTasks, build_tasks
from sluice.tasks.checks import check_task_settings, task_problems
from sluice.tasks.domain_tasks import DomainTasks
from sluice.tasks.episodes import EpisodeTasks, held_out_episodes
from sluice.tasks.report import LoadReport, SourceReport
from sluice.tasks.task_list import TaskList

__all__ = [
    "DomainTasks",
    "EpisodeTasks",
    "LoadReport",
    "LoadedTasks",
    "SourceReport",
    "TaskList",
    "TaskSource",
    "Tokenizer",
    "build_tasks",
    "check_task_settings",
    "held_out_episodes",
    "task_problems",
]
