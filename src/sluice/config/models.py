"""The configuration of a run, as pydantic models. Extra keys are errors; every default is stated here and nowhere else.

Names that users of ROLL know keep their meaning: `rewards.<domain>.query_filter_config`, `response_filter_config`, `dataset_filter`,
`rollout_batch_size` (in groups), `num_return_sequences_in_group`, `prompt_length`, `response_length`, `async_generation_ratio`,
`is_use_additional_prompts`, `max_additional_running_prompts`, `group_size_redundancy`, `domain_interleave_probs`,
`user_defined_rollout_loop_cls`, `train_infer_correction`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, Field

from sluice.config.correction import TrainInferCorrectionConfig
from sluice.config.section import Section as Section  # noqa: PLC0414 - for whoever looks for it here

# Upper limits. Each lies far above what any run needs: a number beyond it is a slip of the finger, which would otherwise show as a machine
# without memory, or as a run that never ends, after the model has been loaded.
MOST_GROUPS: Final = 65_536  # of one batch: a thousand times a usual one
MOST_GROUPS_LAUNCHED: Final = 10_000_000  # for one batch: every group is a record in run.db
LARGEST_GROUP: Final = 4_096  # members, all of which are in memory until the last one ends
MOST_ROUNDS: Final = 10_000  # of replacing; below 65,536, the room that an attempt's seed has for them
MOST_TOKENS: Final = 10_000_000  # of a prompt or a response: more than any model's positions
MOST_ROWS: Final = 100_000_000  # that are made in memory
MOST_STEPS: Final = 10_000_000  # the trainer holds a placeholder for each
MOST_SLOTS: Final = 65_536  # the engine keeps keys and values of each
MOST_MICRO_BATCH_ROWS: Final = 1_048_576
MOST_REPEATS: Final = 10_000  # of every held-out item
MOST_THREADS: Final = 1_024  # more than one machine has processors
MOST_WORKERS: Final = 1_024  # processes, each with a Python of its own
LONGEST_REWARD_S: Final = 86_400.0  # a day for one response
COLDEST: Final = 1e-4  # temperature: logits are divided by it, and below it they lose the digits that tell tokens apart
HOTTEST: Final = 100.0  # temperature: above it every token is as likely as any other
LONGEST_NAME: Final = 100  # characters: it becomes part of a folder's name, which may have 255 bytes
MOST_STEPS_AHEAD: Final = 64.0  # that groups may start before the step that trains them: beyond it nothing trained is near on-policy
LONGEST_GROUP_S: Final = 604_800.0  # a week for one group
LARGEST_REWARD: Final = (2 - 2**-23) * 2.0**127  # the largest float32, in which rewards are trained on

P = TypeVar("P", str, Path)


def _without_nul(path: P) -> P:
    if "\0" in str(path):
        raise ValueError(f"expected a path without NUL characters, which no file can have, got {str(path)!r} - delete them")
    return path


def greedy_or_warm(temperature: float) -> float:
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise ValueError(
            f"expected 0 (greedy) or a number >= {COLDEST} and <= {HOTTEST}, got {temperature:g} - 0 takes the likeliest token"
        )
    return temperature


def _import_path(name: str) -> str:
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"expected an import path package.module.Class, got {name!r} - write the module, a dot, and the name of the class")
    return name


ImportPath = Annotated[str, AfterValidator(_import_path)]
FilePath = Annotated[Path, Field(strict=False), AfterValidator(_without_nul)]  # text is taken for a path; all else keeps its YAML type


class ModelConfig(Section):
    """The policy."""

    path: Annotated[str, AfterValidator(_without_nul)] = Field(
        min_length=1
    )  # local folder as written by transformers' save_pretrained (model and tokenizer)
    lora: LoraConfig | None = None  # None: all weights train


class LoraConfig(Section):
    """Low-rank adapters through peft."""

    r: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: list[str] = Field(default=["q_proj", "v_proj"], min_length=1)


class TaskSourceConfig(Section):
    """One data set. `type` decides which of the other keys apply; a key that does not apply is refused."""

    type: Literal["reasoning_gym", "jsonl", "huggingface"]
    domain: str | None = None  # reward domain of all its rows; None: read from each row (field `domain`, or `tag` through tag_included)
    name: str | None = None  # reasoning_gym: data set name
    size: int | None = Field(default=None, ge=1, le=MOST_ROWS)  # reasoning_gym: rows to make
    seed: int | None = None  # reasoning_gym: data seed
    params: dict[str, Any] = Field(default_factory=dict)  # reasoning_gym: parameters of the data set
    path: FilePath | None = None  # jsonl: file; huggingface: folder made by save_to_disk, or of parquet/json files
    split: str | None = None  # huggingface: split, when the folder holds several
    prompt_field: str = "prompt"  # jsonl, huggingface: text, or a list of chat messages
    answer_field: str = "answer"
    source_name: str | None = None  # the `source` that dataset_filter selects by; default: `name`, or the stem of `path`


class TasksConfig(Section):
    """Where prompts come from and how they are written."""

    train: list[TaskSourceConfig] = Field(min_length=1)
    validation: list[TaskSourceConfig] = Field(default_factory=list)
    prompt_template: str = "{question}"  # str.format over the row's fields; {question} is the prompt text
    use_chat_template: bool = False  # wrap the prompt with the tokenizer's chat template
    system_prompt: str | None = None  # with use_chat_template only
    epochs: int | None = Field(default=None, ge=1)  # passes over the data; None: no limit
    shuffle: bool = True
    exclude_train_from_validation: bool = True  # validation prompts that also occur in train are left out and counted


class FilterConfig(Section):
    """A filter: its type, its arguments, and the metric it reads."""

    type: str  # a built-in name or an import path "package.module.name"
    filter_args: dict[str, Any] = Field(default_factory=dict)
    metric: str | None = None  # None: the raw task reward; else a named metric of the verifier, never a silent substitute


class VerifierConfig(Section):
    """How a response earns its reward."""

    type: str  # exact, numeric, math_verify, reasoning_gym, regex, or an import path
    args: dict[str, Any] = Field(default_factory=dict)


class RewardConfig(Section):
    """One reward domain."""

    verifier: VerifierConfig
    query_filter_config: FilterConfig = FilterConfig(type="no_filter")
    response_filter_config: FilterConfig | None = None
    tag_included: list[str] = Field(default_factory=list)  # labels in the data that belong to this domain, besides its own name
    reward_timeout_s: float = Field(default=10.0, gt=0, le=LONGEST_REWARD_S)
    on_reward_timeout: Literal["missing", "value"] = "missing"
    timeout_value: float | None = Field(default=None, ge=-LARGEST_REWARD, le=LARGEST_REWARD)  # with on_reward_timeout: value
    reward_key: str | None = None  # for verifiers that answer with a mapping: which entry is the reward
    max_staleness: int | None = Field(default=None, ge=0, le=MOST_STEPS)  # of this domain's groups; None: as resampling.max_staleness


class RewardPoolConfig(Section):
    """The worker processes that run verifiers."""

    workers: int = Field(
        default=1, ge=0, le=MOST_WORKERS
    )  # 0: in the shell's own process, without time limits (refused when reward_timeout_s matters)


class DatasetFilterConfig(Section):
    """Selects rows before anything is generated; dropped rows never enter a quota."""

    source: list[str] = Field(default_factory=list)  # names of the sources to keep; empty: all
    min_difficulty: float | None = None  # inclusive
    max_difficulty: float | None = None  # inclusive
    num_samples: int = Field(default=0, ge=0)  # keep the first n of what passes; 0: all


class ResamplingConfig(Section):
    """How a batch is filled, and where every loop ends."""

    fill: Literal["refill", "shrink"] = "refill"  # refill: exactly the batch; shrink: draw exactly that many, train on what is kept
    max_resample_rounds: int = Field(default=10, ge=1, le=MOST_ROUNDS)  # round 1 is the groups asked for
    max_groups_per_batch: int | None = Field(default=None, ge=1, le=MOST_GROUPS_LAUNCHED)  # launched for one batch; None: no such bound
    max_response_rounds: int = Field(default=5, ge=1, le=MOST_ROUNDS)  # first generation plus rounds of replacing rejected or lost members
    on_exhausted: Literal["raise", "shrink", "keep_low_information"] = "raise"
    min_members: int | None = Field(default=None, ge=1)  # survivors that still make a group at the bound; None: all of them
    truncated: Literal["mask", "keep", "invalid", "drop_group"] = "mask"
    collect: Literal["as_finished", "in_order"] = "as_finished"  # the first to finish (fast, favours short ones), or the first launched
    surplus: Literal["carry", "discard"] | None = None  # accepted groups beyond the batch; None: discard when synchronous, else carry
    max_staleness: int | None = Field(default=None, ge=0, le=MOST_STEPS)  # oldest age of a trained group, in steps; None: ceil(async ratio)
    on_member_failure: Literal["replace", "judge"] | None = None  # a member that delivered without a reward: try again, or let filters
    # judge; None: replace, but judge where a `group_filter_cls` does
    group_timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_GROUP_S)  # launch to verdict, retries and scoring included
    requeue: bool = True  # the prompt of a group that expired or was lost to infrastructure is drawn once more
    quarantine_after: int | None = Field(default=3, ge=1)  # lost groups of one prompt, after which it is not drawn again; None: never
    stall_warning_s: float | None = Field(default=600.0, gt=0)  # without any progress: say what the batch waits for; None: never
    absent_after_batches: int = Field(default=10, ge=1)  # batches in a row without a group of some domain, after which it is said


class GuardConfig(Section):
    """Bounds the share of judged groups that filters may drop."""

    max_filter_ratio: (
        Annotated[float, Field(ge=0, le=1)]
        | Annotated[dict[Literal["invalid", "low_information"], Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)]
    ) = 0.5  # filtered / judged; or one limit per category, each on its own count, a category left out being without limit
    scope: Literal["cumulative", "window"] = "cumulative"
    window: int = Field(default=100, ge=1, le=MOST_GROUPS_LAUNCHED)  # judged groups that scope: window looks back on
    policy: Literal["keep", "wait", "shrink", "raise"] = "keep"  # what becomes of a group that may not be dropped


class EngineConfig(Section):
    """The in-process slot engine."""

    type: Literal["slot"] = "slot"
    temperature: float = Field(default=1.0, ge=COLDEST, le=HOTTEST)  # of sampling and of the trainer's log-probs: one key feeds both
    max_slots: int = Field(default=256, ge=1, le=MOST_SLOTS)  # requests in one forward pass; further ones wait
    torch_threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)  # None: torch's own choice
    precision: Literal["float32", "bfloat16", "int8"] = "float32"  # of the weights it samples with; the trainer keeps float32


class AdvantageConfig(Section):
    """How rewards become advantages."""

    type: Literal["group_relative", "leave_one_out"] = "group_relative"
    scale: Literal["std", "none"] = "std"  # group_relative only
    eps: float = Field(default=1e-8, ge=0)


class TrainerConfig(Section):
    """TRL's GRPOTrainer."""

    max_steps: int = Field(ge=1, le=MOST_STEPS)
    learning_rate: float = Field(gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant_with_warmup"
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    micro_batch_size: int = Field(default=64, ge=1, le=MOST_MICRO_BATCH_ROWS)  # rows in one forward and backward pass
    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo"] = "dapo"
    beta: float = Field(default=0.0, ge=0)  # weight of the KL term against the starting policy
    bf16: bool = False
    torch_threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)
    advantage: AdvantageConfig = AdvantageConfig()
    logprob_tolerance: float | None = Field(default=1e-4, gt=0)  # float32: largest |old - inference log-prob| of a trained batch; None:
    # it is recorded only, as it must be where the engine has another precision than the trainer
    save_every_steps: int | None = Field(default=50, ge=1)  # checkpoints, from which a run can be resumed; None: none
    keep_checkpoints: int = Field(default=2, ge=1)  # older ones are deleted
    stale_tokens: Literal["train", "mask"] = "train"  # tokens sampled by older weights in a response that an update cut through


class ValidationConfig(Section):
    """Held-out evaluation: every item, no filter, no refill."""

    every_steps: int | None = Field(default=None, ge=1)  # None: before and after the run only
    temperature: Annotated[float, AfterValidator(greedy_or_warm)] = 0.0  # 0: greedy
    repeats: int = Field(default=1, ge=1, le=MOST_REPEATS)
    max_items: int | None = Field(default=None, ge=1)


class RecordsConfig(Section):
    """What is written and where."""

    root: FilePath = Path("runs")  # a run folder is made in it; relative to the current folder
    jsonl: bool = True
    tensorboard: bool = True
    rollouts: bool = False  # every judged group with all its members, as Parquet files for the offline tools


class RunConfig(Section):
    """What every run has, whatever it samples."""

    exp_name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=LONGEST_NAME,
        description=f"at most {LONGEST_NAME} letters, digits, '.', '_' and '-', a letter or digit first",
    )
    seed: int = Field(default=42, ge=0, lt=2**32)  # of everything that is drawn: data order, sampling, initialisation
    model: ModelConfig
    async_generation_ratio: float = Field(default=0.0, ge=0, le=MOST_STEPS_AHEAD)  # steps that groups start ahead of; 0 is synchronous
    on_weight_update: Literal["finish", "restart", "continue"] = "finish"  # a response under way when new weights come
    resampling: ResamplingConfig = ResamplingConfig()
    guard: GuardConfig | None = None  # None: filters may drop as many groups as they like
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig
    train_infer_correction: TrainInferCorrectionConfig | None = None  # None: every sampled token trains with weight 1
    records: RecordsConfig = RecordsConfig()

    @property
    def on_member_failure(self) -> Literal["replace", "judge"]:
        """What becomes of a member that delivered without a reward."""
        return self.resampling.on_member_failure or "replace"


class RlvrConfig(RunConfig):
    """A whole RLVR run."""

    pipeline: Literal["rlvr"] = "rlvr"
    tasks: TasksConfig
    rewards: dict[str, RewardConfig] = Field(min_length=1)
    reward_pool: RewardPoolConfig = RewardPoolConfig()
    dataset_filter: DatasetFilterConfig = DatasetFilterConfig()
    rollout_batch_size: int = Field(ge=1, le=MOST_GROUPS)  # groups per optimiser step
    num_return_sequences_in_group: int = Field(ge=1, le=LARGEST_GROUP)  # group_size
    prompt_length: int = Field(ge=1, le=MOST_TOKENS)  # tokens; a prompt with more is dropped before generation
    response_length: int = Field(ge=1, le=MOST_TOKENS)  # tokens; a response that reaches it without an end token is truncated
    group_size_redundancy: int = Field(default=0, ge=0, le=LARGEST_GROUP)  # members beyond group_size; the first group_size to finish count
    is_use_additional_prompts: bool = False
    max_additional_running_prompts: int = Field(default=16, ge=0, le=MOST_GROUPS)
    domain_interleave_probs: dict[str, Annotated[float, Field(gt=0)]] | None = Field(default=None, min_length=1)  # share of each domain
    mix_on: Literal["kept", "drawn"] = "kept"  # whether the shares are of the groups that train, or of the prompts drawn
    user_defined_rollout_loop_cls: ImportPath | None = None  # a rollout loop of your own; None: one prompt, one response
    is_num_return_sequences_expand: bool = False  # a ROLL-style loop asks for each response of a group by a request of its own
    validation: ValidationConfig = ValidationConfig()

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest prompt with its response."""
        return self.prompt_length + self.response_length


ModelConfig.model_rebuild()
