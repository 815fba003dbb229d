"""Questions about an agentic recipe: does its environment play, do its filters build, can the policy and the environment talk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import ValidationError

from sluice.cli.doctor import Check, ok, problem, short, warning
from sluice.cli.environment import package_checks
from sluice.cli.reporting import extra_packages
from sluice.config import AgenticConfig, EnvironmentConfig, EnvManagerConfig
from sluice.config.gate import FutilityConfig, GateConfig
from sluice.environments import ENVIRONMENTS, EnvFault, EnvironmentHost, EnvReset, EnvStep, check_environment, episode_seed
from sluice.environments.base import Call

_NO_FILTER: Final = "none, every whole group is kept"
_SIGNS_OF_FUTILITY: Final = {
    "steps": "{} steps without a new observation",
    "loops": "one action {} times after one observation",
    "invalid_actions": "{} actions in a row that are not admissible",
    "progress_steps": "{} steps without progress",
}
_WHERE: Final = {"inline": "inline", "thread": "in a thread", "process": "in a process"}

PATIENCE_S: Final = 120.0  # for a call without a limit of its own: a run may wait for ever, a doctor may not


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTurn:
    """One episode begun and one action made in it."""

    wait_s: float  # until the environment was there, its process started
    reset: EnvReset | EnvFault
    action: str = ""
    step: EnvStep | EnvFault | None = None  # None: there was no episode to act in


class AgenticQuestions:
    """What one asks about an agentic recipe, in order: the dialogue is judged by what the environment said."""

    def __init__(self, config: AgenticConfig) -> None:
        """Nothing is asked yet."""
        self.config = config
        self._first: EnvReset | None = None  # of training; None: it has not said anything

    def environment(self) -> Iterator[Check]:
        """The environment of training: what it needs is there, and one turn can be played."""
        yield from self._environment("environment", "environment", self.config.environment, self.config.seed)

    def evaluation(self) -> Iterator[Check]:
        """The environment of the evaluation, where it is another one."""
        if self.config.val_env_manager is not None and self.config.val_environment is not None:
            from sluice.pipeline.agentic import HELD_OUT_SEED

            yield from self._environment("evaluation", "val_environment", self.config.val_environment, HELD_OUT_SEED)

    def group_filters(self) -> Iterator[Check]:
        """The filters on groups of trajectories."""
        config = self.config
        yield ok("group filter", f"training: {self._filter('train', config.train_env_manager)}")
        if config.val_env_manager is not None:
            what = {"record": "recorded only", "apply": "left out of the mean"}[config.validation.filtering]
            told = self._filter("val", config.val_env_manager)
            yield ok("group filter", f"evaluation: {told}" + (f", what it drops is {what}" if told != _NO_FILTER else ""))

    def gate(self) -> Iterator[Check]:
        """What decides on running groups and on single trajectories, where there is such a thing."""
        gate = self.config.gate
        if gate is None:
            return
        from sluice.pipeline.gate import build_gate, horizon_of

        built = build_gate(self.config)
        assert built is not None
        if gate.cuts_groups:
            yield self._gate_of_groups(gate, horizon_of(self.config), getattr(built.groups, "inputs", ()))
        if gate.futility is not None:
            learned = getattr(getattr(built.members, "rule", None), "rule", None)
            yield from self._futility(gate, gate.futility, getattr(learned, "inputs", ()))

    def _gate_of_groups(self, gate: GateConfig, horizon: int | None, inputs: Collection[str]) -> Check:
        """inputs: what a learned rule must be told at every step."""
        at = "after several environment steps" if gate.k is None else f"after {gate.k} environment step{'s' if gate.k != 1 else ''}"
        rule = f"{gate.signal} < {gate.threshold:g}" if gate.rule is None else str(gate.rule["type"])
        rule = rule if gate.model is None else f"the learned rule {gate.model.name}, floor {gate.floor:g}"
        then = "nothing is cut (shadow)" if gate.shadow else f"a cut group is {'replaced' if gate.on_cut == 'replace' else 'left out'}"
        audits = "" if gate.shadow else f", {gate.audit_rate:.0%} of them run on and tell"
        held = "" if gate.hold_precision is None else f", precision held above {gate.hold_precision:g}"
        of = "" if horizon is None else f" of at most {horizon}"
        waits = ", where members wait for it" if gate.barrier else ""
        told = f"groups are looked at {at}{of}{waits}: {rule}; {then}{audits}{held}"
        if horizon is None:
            told += "\nhow many steps a trajectory may take is not known, so that savings are not counted: set dialogue.max_turns"
        if remedy := self._unsaid(inputs):
            return problem("gate", told, remedy)
        is_published = gate.model is None and gate.rule is None and "threshold" not in gate.model_fields_set
        if is_published and gate.hold_precision is None and not gate.shadow:
            remedy = "set gate.shadow first and see gate/precision, or set gate.hold_precision"
            return warning("gate", f"{told}\nthe threshold was fitted to another model and environment", remedy)
        return ok("gate", told)

    def _unsaid(self, inputs: Collection[str]) -> str | None:
        """What to do about inputs of a learned rule that the environment does not say; None: there are none, or nobody knows."""
        info = None if self._first is None else self._first.info
        says = {} if info is None else {"is_admissible": info.admissible_commands, "progress": info.progress}
        missing = [name for name, value in says.items() if name in inputs and value is None]
        return f"it was fitted with {', '.join(missing)}, which this environment does not say: fit it without" if missing else None

    def _futility(self, gate: GateConfig, futility: FutilityConfig, inputs: Collection[str]) -> Iterator[Check]:
        """inputs: what a learned rule must be told at every step."""
        audits = "nobody is stopped (shadow)" if gate.shadow else f"{futility.audit_rate:.0%} of them run on and tell"
        signs = [words.format(value) for name, words in _SIGNS_OF_FUTILITY.items() if (value := getattr(futility, name)) is not None]
        by = (
            f"after {', or '.join(signs)}"
            if futility.model is None
            else f"by the learned rule {futility.model.name}, floor {futility.floor:g}"
        )
        told = f"trajectories are stopped {by}; {audits}"
        info = None if self._first is None else self._first.info
        if remedy := self._unsaid(inputs):
            yield problem("gate", told, remedy)
        elif info is not None and info.progress is None and futility.progress_steps is not None:
            yield problem("gate", told, "progress_steps needs an environment that tells its progress, and this one does not: leave it out")
        elif info is not None and info.admissible_commands is None and futility.invalid_actions is not None:
            yield warning("gate", told, "invalid_actions needs an environment that tells its admissible commands: leave it out")
        else:
            yield ok("gate", told)

    def dialogue(self, tokenizer: Any) -> Iterator[Check]:
        """Text to tokens and back: whether stop texts are tokens, and how much of a sequence the first observation takes."""
        from sluice.execution.dialogue import build_dialogue_format

        config = self.config.dialogue
        format_ = build_dialogue_format(config, tokenizer)
        ends = ", ".join(short(str(tokenizer.decode([token]))) for token in format_.stop_token_ids) or "the model's own end token"
        told = f"{config.style}, a turn ends at {ends} or after {config.max_tokens_per_turn} tokens"
        if self._first is None:
            yield ok("dialogue", told)
            return
        opening = format_.opening(self._first.observation, self._first.info, config.max_turns)
        most = self.config.sequence_length
        told += f"; the first observation takes {len(opening)} of {most} tokens (sequence_length)\n{short(str(tokenizer.decode(opening)))}"
        if len(opening) >= most:
            yield problem("dialogue", told, "it leaves none for a turn: raise sequence_length, or shorten the templates")
        elif len(opening) + config.max_tokens_per_turn > most:
            yield warning("dialogue", told, "it leaves no room for one whole turn: raise sequence_length")
        else:
            yield ok("dialogue", told)

    def _environment(self, name: str, where: str, environment: EnvironmentConfig, seed: int) -> Iterator[Check]:
        packages = list(self._packages(environment))
        yield from packages
        if any(check.status == "problem" for check in packages):
            return
        check_environment(environment, where)
        turn = asyncio.run(first_turn(environment, episode_seed(seed, 0, 0)))
        if where == "environment" and isinstance(turn.reset, EnvReset):
            self._first = turn.reset
        yield self._told(name, where, environment, turn)
        if isinstance(turn.reset, EnvReset) and turn.reset.info.admissible_commands is None:
            dialogue = self.config.dialogue
            for key in ("first_template", "turn_template"):
                if "{admissible_commands}" in (getattr(dialogue, key) or ""):
                    yield warning(name, f"dialogue.{key} names {{admissible_commands}}, and this environment tells none", "leave it out")

    def _packages(self, environment: EnvironmentConfig) -> Iterator[Check]:
        """The packages of the extra that this environment needs."""
        needed = needed_modules(environment)
        wanted = {package: bounds for package, bounds in extra_packages("agentic").items() if package in needed}
        if wanted:
            yield from package_checks("agentic", wanted, purpose=f", which the environment {environment.type} needs")

    def _told(self, name: str, where: str, environment: EnvironmentConfig, turn: FirstTurn) -> Check:
        remedy = f"see {where}.args, and sluice.environments.Environment for what it must answer"
        if isinstance(turn.reset, EnvFault):
            return problem(name, f"{turn.reset.kind}: {turn.reset.detail}", remedy)
        assert turn.step is not None
        lines = [f"observation  {short(turn.reset.observation)}", f"action       {short(turn.action)}"]
        if isinstance(turn.step, EnvFault):
            return problem(name, "\n".join([f"{turn.step.kind}: {turn.step.detail}", *lines]), remedy)
        lines.append(f"reply        {short(turn.step.observation)}, reward {turn.step.reward:g}")
        seconds = f"reset {turn.reset.seconds:.3f} s, step {turn.step.seconds:.4f} s, ready after {turn.wait_s:.2f} s"
        task_type = turn.reset.info.task_type
        what = environment.type if task_type in (None, environment.type) else f"{environment.type} ({task_type})"
        return ok(name, "\n".join([f"{what} {_WHERE[environment.run_in]}: {seconds}", *lines]))

    def _filter(self, mode: Literal["train", "val"], manager: EnvManagerConfig) -> str:
        from sluice.pipeline.agentic import agentic_group_filter

        agentic_group_filter(self.config, mode)
        if manager.group_filter_cls is not None:
            return manager.group_filter_cls
        return _NO_FILTER if manager.group_filter_config is None else manager.group_filter_config.type


def needed_modules(environment: EnvironmentConfig) -> tuple[str, ...]:
    """Modules that an environment by its own name needs; none where its settings are wrong, or it is a class of the user's."""
    settings = ENVIRONMENTS.get(environment.type)
    if settings is None:
        return ()
    try:
        return settings(**environment.args).needed()
    except ValidationError:
        return ()


async def first_turn(environment: EnvironmentConfig, seed: int) -> FirstTurn:
    """Begin an episode and make one action: the first admissible one, where the environment tells which these are."""
    async with EnvironmentHost(environment.model_copy(update={"workers": 1})) as host:
        runner = host.runner()
        started = time.monotonic()
        try:
            async with asyncio.timeout(_patience_s(environment, "reset")):
                reset = await runner.reset(seed)
        except TimeoutError:
            return FirstTurn(wait_s=PATIENCE_S, reset=_no_answer(environment, "reset"))
        wait_s = max(0.0, time.monotonic() - started - reset.seconds)
        if isinstance(reset, EnvFault):
            return FirstTurn(wait_s=wait_s, reset=reset)
        action = (reset.info.admissible_commands or ("",))[0]
        step: EnvStep | EnvFault
        try:
            async with asyncio.timeout(_patience_s(environment, "step")):
                step = await runner.step(action)
        except TimeoutError:
            step = _no_answer(environment, "step")
        return FirstTurn(wait_s=wait_s, reset=reset, action=action, step=step)


def _patience_s(environment: EnvironmentConfig, call: Call) -> float | None:
    """How long to wait for a call from outside; None: it has a limit of its own."""
    return PATIENCE_S if environment.limit_s(call) is None else None


def _no_answer(environment: EnvironmentConfig, call: Call) -> EnvFault:
    detail = f"environment {environment.type}, {call}: no answer within {PATIENCE_S:g} s, and {call}_timeout_s gives no limit"
    return EnvFault(kind="env_timeout", detail=detail, call=call, seconds=PATIENCE_S)
