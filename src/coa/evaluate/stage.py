"""The evaluation stage: settings in, a run directory out."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from coa.attempts import Grammars, attempt_all, choose_grammars, choose_prompt
from coa.config import to_json
from coa.distill.chain import GrammarOf
from coa.engines import load_engine, rollouts_at_once, slots_for
from coa.engines.base import Engine
from coa.engines.store import identity, resolve_default
from coa.errors import ConfigError, ModelError, UsageError
from coa.evaluate.rating import check_chooser, rate_all
from coa.evaluate.run import save_summary, summarise
from coa.evaluate.samples import OWN_CHECK
from coa.evaluate.spending import LATENCY, find_tariff, latency
from coa.progress import Mode, counted
from coa.protocol import Grammar, PromptKind
from coa.protocol.bound import bound_to
from coa.rewards import (
    JudgeSettings,
    ProgramSettings,
    RewardSettings,
    Scored,
    choose_reward,
    lacking,
    open_reward,
)
from coa.runs import Json, Run, write_atomic
from coa.runtime import Budget, Decoding
from coa.tasks.task import TaskSet
from coa.tools.kits import KitSettings, atlas_by_default, open_kit
from coa.tools.search import PASSAGES
from coa.trajectory import Trajectory

VERDICTS, RATINGS = "verdicts.db", "ratings.db"


@dataclass(frozen=True)
class EvalSettings:
    """What an evaluation depends on; the run directory refuses to mix two of them."""

    model: str = "auto"
    tasks: str = ""
    grammar: str = "auto"
    """auto: what the model's adapter was trained on, else what suits the tasks."""
    k: int = 1
    observations: str = "real"
    """real; withheld, wrong and closed_book are the controls."""
    prompt: str = "auto"
    """full, compact, or auto: compact for a model with an adapter, full for one without."""
    temperature: float = 0.0
    constrain: bool = False
    """Sample only what the grammar allows."""
    reward: str = "auto"
    """auto: what suits the tasks; or an expression, see docs/rewards.md."""
    judge: str = ""
    """openai:NAME@URL, for a reward or a choice (`best_of`) that asks a judge."""
    best_of: str = OWN_CHECK
    """What chooses between the samples of a task, without gold: double_check, judge, or a function
    of one's own (module:attribute) of the public task and a trajectory."""
    prices: str = ""
    """A table of prices (.toml), or three numbers for a million tokens read, read from a cache and
    written; empty: money is not counted."""
    passages: int = PASSAGES
    corpus: str = ""
    """A corpus directory; empty: the Atlas of each task's world."""
    tool_cache: str = ""
    """The file of recorded answers of tools; empty: none."""
    tool_mode: str = "live"
    """live, record or replay."""
    tool_expire: float | None = None
    """Recording, answers older than so many days are asked for again."""
    code_session: bool = False
    """The programs of one rollout share their variables."""
    unsafe_code: bool = False
    """Run programs without a sandbox."""
    turns: int = 12
    tokens: int = 0
    """Sampled over all turns; 0: as many as the context has room for."""
    turn_tokens: int = 512
    malformed: int = 2
    context: int = 3072
    concurrency: int = 96
    memory_gb: float | None = None
    """Most for keys and values of a model in this process; None: a quarter of the machine's."""
    deterministic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("k", "passages", "turns", "turn_tokens", "context", "concurrency"):
            if (found := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {found!r}, expected at least 1.")
        if self.tokens < 0:
            raise ConfigError(f"tokens is {self.tokens!r}, expected 0 or more.")
        Decoding(temperature=self.temperature)  # refuses what cannot be sampled at
        self.kit()
        check_chooser(self.best_of, JudgeSettings(self.judge))
        if self.k > 1 and self.temperature == 0:
            raise ConfigError(
                f"k is {self.k} at temperature 0: all rollouts of a task would be the same. "
                "Set a temperature, 1.0 for instance."
            )

    def kit(self) -> KitSettings:
        """What the tools depend on."""
        return KitSettings(
            observations=self.observations,
            passages=self.passages,
            corpus=self.corpus,
            cache=self.tool_cache,
            mode=self.tool_mode,
            expire_days=self.tool_expire,
            code_session=self.code_session,
            unsafe_code=self.unsafe_code,
        )

    def rewards(self, expression: str, directory: Path) -> RewardSettings:
        """The reward; verdicts are kept in the run, so that continuing it pays nothing twice."""
        judge = JudgeSettings(self.judge, cache=str(directory / VERDICTS))
        return RewardSettings(
            expression, judge=judge, tests=ProgramSettings(unsafe=self.unsafe_code)
        )

    @property
    def chooser(self) -> str:
        """Who chooses between samples; one leaves nothing to choose, so nobody has to be asked."""
        return self.best_of if self.k > 1 else OWN_CHECK

    def budget(self) -> Budget:
        """What one rollout may spend; the clock is left out, since it is the machine's."""
        return Budget(
            turns=self.turns,
            tokens=self.tokens or self.context,
            turn_tokens=self.turn_tokens,
            context=self.context,
            malformed=self.malformed,
            seconds=24 * 3600.0,
        )


@dataclass(frozen=True)
class EvalPart:
    """How the rollouts of several measurements are made: greedily, within these limits."""

    turns: int = 8
    turn_tokens: int = 192
    malformed: int = 1
    context: int = 1536
    """Prompt, written and observed together: the budget of a rollout, the same for all models."""
    concurrency: int = 96
    deterministic: bool = False
    seed: int = 1

    def settings(self, model: str, tasks: Path, **more: Any) -> EvalSettings:
        """Those of one measurement."""
        limits = {name: getattr(self, name) for name in EvalPart.__dataclass_fields__}
        return EvalSettings(model=model, tasks=str(tasks), **limits, **more)

    def budget(self) -> Budget:
        return self.settings("", Path()).budget()

    @contextmanager
    def loaded(self, model: str) -> Iterator[Engine]:
        """One engine for several measurements: a model is loaded once."""
        engine = load_engine(
            model,
            slots=slots_for(self.concurrency),
            context=self.context,
            deterministic=self.deterministic,
        )
        try:
            yield engine
        finally:
            asyncio.run(engine.close())


def run_eval(
    settings: EvalSettings, directory: Path, *, engine: Engine | None = None, quiet: bool = False
) -> Json:
    """Evaluate, or continue an evaluation; returns the summary that `summary.json` holds.

    An `engine` that is given is used and left open; otherwise the model is loaded and closed.
    """
    tasks = TaskSet.load(Path(settings.tasks))
    model = resolve_default(settings.model)
    grammars = choose_grammars(settings.grammar, model, tasks)
    prompt = choose_prompt(settings.prompt, model)
    reward = choose_reward(settings.reward, tasks)
    rewards = settings.rewards(reward, directory)
    tariff = find_tariff(settings.prices, model)
    _check_gold(tasks, settings, rewards)
    recipe = _recipe(settings) | {"model": model, "grammar": grammars.names}
    recipe |= {"prompt": prompt, "reward": reward}
    inputs = {"tasks": tasks.fingerprint(), "grammar": grammars.fingerprint()}
    inputs |= _weights(model, engine) | settings.kit().identity()
    if len(rewards.identity(tasks)) > 1:  # more than the expression, which the recipe has
        recipe["rewards"] = rewards.identity(tasks)
    grammar_of = _grammar_of(grammars)
    with Run.open(directory, "eval", recipe, inputs, settings.seed) as run:
        made, scored, ratings = asyncio.run(
            _measured(
                settings,
                tasks,
                rewards,
                lambda: _attempt(
                    settings, tasks, engine, model, grammars, prompt, directory, quiet
                ),
                grammar_of,
                directory,
            )
        )
        summary, records = summarise(
            tasks,
            made,
            scored,
            ratings=ratings,
            chosen_by=settings.chooser,
            tariff=tariff,
            grammar_of=grammar_of,
        )
        summary = {"model": model, "tasks": settings.tasks, "reward": reward, **summary}
        solved = sum(record["score"] for record in records)
        seconds = latency(directory, solved, settings.concurrency)
        write_atomic(directory / LATENCY, json.dumps(seconds, indent=2) + "\n")
        save_summary(directory, summary, records)
        run.timing({"event": "finished"})
        return summary


def _grammar_of(grammars: Grammars) -> GrammarOf:
    """What a trajectory of this evaluation was written under; the file of one's own grammar is
    known here, and nowhere later."""

    @cache
    def bound(name: str, tools: tuple[str, ...]) -> Grammar:
        return bound_to(grammars.named(name), tools)

    return lambda trajectory: bound(trajectory.grammar, tuple(trajectory.tools))


async def _measured(
    settings: EvalSettings,
    tasks: TaskSet,
    rewards: RewardSettings,
    attempt: Callable[[], Awaitable[list[Trajectory]]],
    grammar_of: GrammarOf,
    directory: Path,
) -> tuple[list[Trajectory], list[Scored], list[float | None]]:
    """All rollouts, their scores, and how they are rated without gold.

    The reward is opened first, for the same reason as the tools.
    """
    by_id = {task.id: task for task in tasks}
    async with open_reward(rewards, tasks=tasks) as reward:
        made = await attempt()
        scored = await reward.score_all((by_id[each.task_id], each) for each in made)
    rater = JudgeSettings(settings.judge, cache=str(directory / RATINGS))
    return made, scored, await rate_all(settings.chooser, tasks, made, rater, grammar_of)


async def _attempt(
    settings: EvalSettings,
    tasks: TaskSet,
    engine: Engine | None,
    model: str,
    grammars: Grammars,
    prompt: PromptKind,
    directory: Path,
    quiet: bool,
) -> list[Trajectory]:
    """All rollouts; the tools are opened first, since what is wrong with them is found sooner."""
    mode: Mode = "silent" if quiet else "auto"
    decoding = Decoding(
        temperature=settings.temperature,
        seed=settings.seed,
        prompt=prompt,
        constrain=settings.constrain,
    )
    if not quiet and (line := atlas_by_default(tasks, settings.kit(), grammars.single)):
        print(line, file=sys.stderr)
    async with (
        open_kit(tasks, settings.kit(), grammars.single) as toolbox_of,
        AsyncExitStack() as stack,
    ):
        if engine is None:
            engine = load_engine(
                model,
                deterministic=settings.deterministic,
                slots=slots_for(settings.concurrency),
                context=settings.context,
                memory_gb=settings.memory_gb,
            )
            stack.push_async_callback(engine.close)
        with counted("evaluate", len(tasks) * settings.k, mode) as on_done:
            return await attempt_all(
                tasks,
                engine,
                grammars,
                toolbox_of,
                directory,
                k=settings.k,
                budget=settings.budget(),
                decoding=decoding,
                concurrency=rollouts_at_once(engine, settings.concurrency),
                on_done=on_done,
            )


def _recipe(settings: EvalSettings) -> Json:
    """What rollouts depend on; the rest is speed, or is worked out of them at the end, and a
    fingerprint stands for the tasks."""
    recipe = to_json(settings)
    tools = ("corpus", "tool_cache", "tool_mode", "tool_expire", "code_session", "unsafe_code")
    # Kit and reward have identities of their own.
    for name in ("tasks", "concurrency", "memory_gb", "judge", "best_of", "prices", *tools):
        del recipe[name]
    if not settings.constrain:  # as in records from before there was a choice
        del recipe["constrain"]
    return recipe


def _check_gold(tasks: TaskSet, settings: EvalSettings, rewards: RewardSettings) -> None:
    """Say that a task cannot be judged before hours of rollouts, not after."""
    for reward in rewards.needs():
        for task in tasks:
            if missing := lacking(reward, task):
                raise UsageError(
                    f"{settings.tasks}: task {task.id} has no {missing}, so {reward!r} cannot "
                    "judge it. Evaluation needs gold answers for every task."
                )


def _weights(model: str, engine: Engine | None) -> dict[str, str]:
    """What identifies the weights: hashes, or the word of a caller's own engine."""
    try:
        return identity(model)
    except ModelError:
        if engine is None:
            raise
        return {"weights": engine.weights}
