"""The evaluation stage: settings in, a run directory out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from coa.attempts import attempt_all, choose_grammar, choose_prompt
from coa.config import to_json
from coa.engines import load_engine, rollouts_at_once, slots_for
from coa.engines.base import Engine
from coa.engines.store import identity, resolve_default
from coa.errors import ConfigError, ModelError, UsageError
from coa.evaluate.run import save_summary, summarise
from coa.progress import Mode, counted
from coa.protocol import Grammar, PromptKind
from coa.rewards import (
    JudgeSettings,
    ProgramSettings,
    RewardSettings,
    Scored,
    choose_reward,
    lacking,
    open_reward,
)
from coa.runs import Json, Run
from coa.runtime import Budget, Decoding
from coa.tasks.task import TaskSet
from coa.tools.kits import KitSettings, open_kit
from coa.tools.search import PASSAGES
from coa.trajectory import Trajectory

VERDICTS = "verdicts.db"


@dataclass(frozen=True)
class EvalSettings:
    """What an evaluation depends on; the run directory refuses to mix two of them."""

    model: str = "auto"
    tasks: str = ""
    grammar: str = "auto"
    """auto: what the model's adapter was trained on, else what suits the tasks."""
    k: int = 1
    observations: str = "real"
    """real; withheld and wrong are the controls."""
    prompt: str = "auto"
    """full, compact, or auto: compact for a model with an adapter, full for one without."""
    temperature: float = 0.0
    constrain: bool = False
    """Sample only what the grammar allows."""
    reward: str = "auto"
    """auto: what suits the tasks; or an expression, see docs/rewards.md."""
    judge: str = ""
    """openai:NAME@URL, for a reward that asks a judge."""
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
    turn_tokens: int = 320
    malformed: int = 2
    context: int = 2048
    concurrency: int = 96
    memory_gb: float | None = None
    """Most for keys and values of a model in this process; None: a quarter of the machine's."""
    deterministic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("k", "passages", "turns", "turn_tokens", "context", "concurrency"):
            if (found := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {found!r}, expected at least 1.")
        Decoding(temperature=self.temperature)  # refuses what cannot be sampled at
        self.kit()
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

    def budget(self) -> Budget:
        """What one rollout may spend; the clock is left out, since it is the machine's."""
        return Budget(
            turns=self.turns,
            turn_tokens=self.turn_tokens,
            context=self.context,
            malformed=self.malformed,
            seconds=24 * 3600.0,
        )


def run_eval(
    settings: EvalSettings, directory: Path, *, engine: Engine | None = None, quiet: bool = False
) -> Json:
    """Evaluate, or continue an evaluation; returns the summary that `summary.json` holds.

    An `engine` that is given is used and left open; otherwise the model is loaded and closed.
    """
    tasks = TaskSet.load(Path(settings.tasks))
    model = resolve_default(settings.model)
    grammar = choose_grammar(settings.grammar, model, tasks)
    prompt = choose_prompt(settings.prompt, model)
    reward = choose_reward(settings.reward, tasks)
    rewards = settings.rewards(reward, directory)
    _check_gold(tasks, settings, rewards)
    recipe = _recipe(settings) | {"model": model, "grammar": grammar.name}
    recipe |= {"prompt": prompt, "reward": reward}
    inputs = {"tasks": tasks.fingerprint(), "grammar": grammar.fingerprint()}
    inputs |= _weights(model, engine) | settings.kit().identity()
    if len(rewards.identity(tasks)) > 1:  # more than the expression, which the recipe has
        recipe["rewards"] = rewards.identity(tasks)
    with Run.open(directory, "eval", recipe, inputs, settings.seed) as run:
        trajectories, scored = asyncio.run(
            _judged(
                tasks,
                rewards,
                lambda: _attempt(settings, tasks, engine, model, grammar, prompt, directory, quiet),
            )
        )
        summary, records = summarise(tasks, trajectories, scored)
        summary = {"model": model, "tasks": settings.tasks, "reward": reward, **summary}
        save_summary(directory, summary, records)
        run.timing({"event": "finished"})
        return summary


async def _judged(
    tasks: TaskSet, rewards: RewardSettings, attempt: Callable[[], Awaitable[list[Trajectory]]]
) -> tuple[list[Trajectory], list[Scored]]:
    """All rollouts with their scores; the reward is opened first, for the same reason as tools."""
    by_id = {task.id: task for task in tasks}
    async with open_reward(rewards, tasks=tasks) as reward:
        trajectories = await attempt()
        pairs = ((by_id[trajectory.task_id], trajectory) for trajectory in trajectories)
        return trajectories, await reward.score_all(pairs)


async def _attempt(
    settings: EvalSettings,
    tasks: TaskSet,
    engine: Engine | None,
    model: str,
    grammar: Grammar,
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
    async with open_kit(tasks, settings.kit(), grammar) as toolbox_of, AsyncExitStack() as stack:
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
                grammar,
                toolbox_of,
                directory,
                k=settings.k,
                budget=settings.budget(),
                decoding=decoding,
                concurrency=rollouts_at_once(engine, settings.concurrency),
                on_done=on_done,
            )


def _recipe(settings: EvalSettings) -> Json:
    """What results depend on; the rest is speed, and a fingerprint stands for the tasks."""
    recipe = to_json(settings)
    tools = ("corpus", "tool_cache", "tool_mode", "tool_expire", "code_session", "unsafe_code")
    # Kit and reward have identities of their own.
    for name in ("tasks", "concurrency", "memory_gb", "judge", *tools):
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
