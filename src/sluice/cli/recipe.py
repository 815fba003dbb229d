"""Questions about one recipe: does everything it names exist and fit together, and does one group get through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.cli.doctor import Check, Question, ask, ok, problem, short, warning
from sluice.cli.environment import missing_packages
from sluice.cli.reporting import DISTRIBUTION
from sluice.config import AgenticConfig, AnyConfig, RlvrConfig, load_config
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from sluice.pipeline.train import DryRun


def read_recipe(recipe: Path, overrides: Sequence[str]) -> tuple[AnyConfig | None, Check]:
    """The configuration, or the problem with it."""
    try:
        config = load_config(recipe, overrides)
    except ConfigError as err:
        return None, problem("recipe", str(err))
    return config, ok("recipe", f"{recipe}: {config.exp_name}, {config.trainer.max_steps} steps of {_size(config)}")


def _size(config: AnyConfig) -> str:
    if isinstance(config, RlvrConfig):
        return f"{config.rollout_batch_size} groups of {config.num_return_sequences_in_group}"
    manager = config.train_env_manager
    return f"{config.groups_per_batch} groups of {manager.group_size} trajectories, {manager.num_env_groups} environment groups"


def recipe_checks(config: AnyConfig) -> Iterator[Check]:
    """Everything that a run of this configuration would stumble over, cheapest first; at last a dry run of one group."""
    missing = missing_packages("train")
    if missing:
        yield problem("[train]", f"a run needs {', '.join(missing)}", f"pip install '{DISTRIBUTION}[train]'")
        return
    stumbled = False
    for name, question in _agentic_questions(config) if isinstance(config, AgenticConfig) else _rlvr_questions(config):
        if stumbled and name == "dry run":
            yield warning(name, "left out", "solve the problems above first")
            return
        for check in ask(name, question):
            stumbled = stumbled or check.status == "problem"
            yield check


def _rlvr_questions(config: RlvrConfig) -> Iterator[tuple[str, Question]]:
    yield "filters", lambda: _check_filters(config)
    yield "verifiers", lambda: _check_verifiers(config)
    yield "correction", lambda: _check_correction(config)
    yield "model", lambda: _check_model(config)
    yield "tasks", lambda: _check_tasks(config)
    yield "dry run", lambda: _check_dry_run(config)


def _agentic_questions(config: AgenticConfig) -> Iterator[tuple[str, Question]]:
    from sluice.cli.agentic import AgenticQuestions

    agentic = AgenticQuestions(config)
    yield "environment", agentic.environment
    yield "evaluation", agentic.evaluation
    yield "group filter", agentic.group_filters
    yield "gate", agentic.gate
    yield "correction", lambda: _check_correction(config)
    yield "model", lambda: _check_model(config)
    yield "dialogue", lambda: agentic.dialogue(_tokenizer(config))
    yield "dry run", lambda: _check_agentic_dry_run(config)


def _check_filters(config: RlvrConfig) -> Iterator[Check]:
    from sluice.filters import build_domain_filters

    build_domain_filters(config.rewards, config.num_return_sequences_in_group, min_members=config.resampling.min_members)
    for domain, reward in config.rewards.items():
        response = reward.response_filter_config
        yield ok("filters", f"{domain}: {reward.query_filter_config.type}" + (f", responses by {response.type}" if response else ""))


def _check_verifiers(config: RlvrConfig) -> Iterator[Check]:
    from sluice.rewards import check_rewards

    check_rewards(config.rewards)
    workers = config.reward_pool.workers
    for domain, reward in config.rewards.items():
        limit = (
            f"at most {reward.reward_timeout_s:g} s a response, {workers} worker{'' if workers == 1 else 's'}"
            if workers
            else "without time limit"
        )
        yield ok("verifiers", f"{domain}: {reward.verifier.type}, {limit}")


def _check_correction(config: AnyConfig) -> Iterator[Check]:
    correction = config.train_infer_correction
    if correction is None:
        return
    weight = [f"weight by {correction.weight.weight_type}"] if correction.weight.enabled else []
    filters = [f"filter by {chosen.agg_type}" for chosen in correction.enabled_filters]
    yield ok("correction", ", ".join(weight + filters) or "only measures, nothing is enabled")
    parts = {"is_weight": correction.is_weight} | {f"filters.{index}": chosen for index, chosen in enumerate(correction.filters)}
    for name, part in parts.items():
        if part.model_fields_set and "enabled" not in part.model_fields_set:
            yield warning(
                "correction",
                f"train_infer_correction.{name} has settings and does nothing, since it is not enabled",
                "write enabled: true, or enabled: false to keep it for later",
            )


def _check_model(config: AnyConfig) -> Iterator[Check]:
    from sluice.generation.loading import check_architecture, load_net

    net, _ = load_net(config.model.path, precision=config.engine.precision, lora=config.model.lora)
    check_architecture(net, _longest(config))
    tokenizer = _tokenizer(config)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    yield ok("model", f"{type(net).__name__}, {parameters / 1e6:.2f} million parameters, {len(tokenizer)} tokens in the vocabulary")
    if len(tokenizer) > net.get_input_embeddings().num_embeddings:
        yield problem(
            "model",
            f"the tokenizer has {len(tokenizer)} tokens, the model only {net.get_input_embeddings().num_embeddings}",
            "save model and tokenizer that belong together",
        )
    if isinstance(config, RlvrConfig) and config.tasks.use_chat_template and not tokenizer.chat_template:
        yield problem(
            "model", "tasks.use_chat_template is true, the tokenizer has no chat template", "save one with it, or set it to false"
        )


def _longest(config: AnyConfig) -> int:
    """Tokens of the longest sequence that the model sees."""
    return config.sequence_length if isinstance(config, AgenticConfig) else config.prompt_length + config.response_length


def _check_tasks(config: RlvrConfig) -> Iterator[Check]:
    from sluice.tasks import build_tasks

    report = build_tasks(config, _tokenizer(config)).report
    for source in report.sources:
        yield ok("tasks", source.line())
    for text in report.warnings:
        yield Check(name="tasks", status="warning", detail=text)
    if report.kept("train") < config.rollout_batch_size:
        yield warning(
            "tasks",
            f"{report.kept('train')} prompts are fewer than rollout_batch_size ({config.rollout_batch_size}): a batch repeats prompts",
            "add data, or lower rollout_batch_size",
        )


def _check_dry_run(config: RlvrConfig) -> Iterator[Check]:
    from sluice.pipeline.train import dry_run

    for group in dry_run(config):
        yield _shown_group(group)


def _check_agentic_dry_run(config: AgenticConfig) -> Iterator[Check]:
    from sluice.pipeline.dry_run_agentic import dry_run_agentic

    yield _shown_group(dry_run_agentic(config))


def _shown_group(group: DryRun) -> Check:
    verdict = group.verdict
    how = "kept" if verdict.keep else f"dropped as {verdict.category} / {verdict.reason}"
    lines = [f"task {group.task_id} ({group.domain}): {how} by {verdict.source or 'no filter'}"]
    lines.append(f"prompt    {short(group.prompt)}")
    for response, reward in zip(group.responses, group.rewards, strict=True):
        lines.append(f"{'no reward' if reward is None else f'{reward:<9.4g}'} {short(response)}")
    lines.append(", ".join(f"{part} {seconds:.2f} s" for part, seconds in group.seconds.items()))
    lines += group.failures
    text = "\n".join(lines)
    if all(reward is None for reward in group.rewards):
        return problem("dry run", text, "no response has a reward: see the verifier")
    if any(reward is None for reward in group.rewards):
        return warning("dry run", text, "some responses have no reward: see the verifier and reward_timeout_s")
    if not any(group.responses):
        return warning("dry run", text, "every response is empty: see the prompt template and the model")
    return ok("dry run", text)


def _tokenizer(config: AnyConfig) -> Any:
    from sluice.generation.tokenizer import load_tokenizer

    return load_tokenizer(config.model.path)
