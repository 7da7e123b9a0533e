"""The RL stage: a recipe in, a run directory with an adapter out. What rejection sampling
(`coa.train.improve`) does in the same way it does by these functions, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar, cast

from coa.engines import load_engine, rollouts_at_once, slots_for
from coa.environment import Environment, OpenEnvironment, open_environments
from coa.errors import ConfigError, MissingExtra, TrainingError
from coa.grammar import PromptKind
from coa.io.runs import METRICS, Json, Run, read_jsonl, write_jsonl
from coa.io.settings import load_recipe, to_json, without_speed
from coa.loop import Decoding
from coa.models.references import ModelSource, identity
from coa.models.weights import MANIFEST
from coa.rollouts import References, choose_environments, choose_prompt
from coa.statistics import estimate
from coa.tasks import Task, TaskSet
from coa.train.selection import select
from coa.train.settings import (
    ImproveRecipe,
    RlRecipe,
    TaskRecipe,
    advice,
    ignored,
    preset_defaults,
    with_length,
)

if TYPE_CHECKING:
    from coa.train.groups import OnRollout, Sampler
    from coa.train.policy import Policy
    from coa.train.processes import Processes
    from coa.train.rl import Loadable, RlResult


Note = Callable[[str], None]
R = TypeVar("R", bound=TaskRecipe)
TOLERATED = 0.1
"""Share of the rollouts of an evaluation that the environment may end; they count as failed."""


def read_rl_recipe(path: Path | None, overrides: Sequence[str]) -> RlRecipe:
    """The recipe, with what its loss preset says where the recipe says nothing."""
    recipe = load_recipe(path, overrides, RlRecipe, preset_defaults(path, overrides))
    given = {override.partition("=")[0].strip() for override in overrides}
    if "env" in given:  # the tasks of a recipe are for the environment that it was written for
        recipe = with_own_tasks(recipe, given)
    return replace(recipe, rl=with_length(recipe.rl, recipe.rollout))


def read_improve_recipe(path: Path | None, overrides: Sequence[str]) -> ImproveRecipe:
    recipe = load_recipe(path, overrides, ImproveRecipe)
    given = {override.partition("=")[0].strip() for override in overrides}
    return with_own_tasks(recipe, given) if "env" in given else recipe


def with_own_tasks(recipe: R, given: Collection[str]) -> R:
    """The recipe with the tasks of its environments instead of those that it names itself, unless
    they were `given` with it."""
    check = recipe.check
    if check.tasks and "check.tasks" not in given:
        check = replace(check, tasks="", split=check.split or "test")
    tasks = recipe.tasks if "tasks" in given else ""
    return replace(recipe, tasks=tasks, check=check)


def rl_from_recipe(path: Path, overrides: Sequence[str], note: Note) -> Path:
    """Train by recipe; returns the adapter's folder."""
    recipe = read_rl_recipe(path, overrides)
    check_has_tasks(recipe, path)
    return run_rl(recipe, note=note).adapter


def check_has_tasks(recipe: TaskRecipe, path: Path) -> None:
    if not recipe.tasks and not recipe.env:
        raise ConfigError(
            f"{path}: neither env nor tasks is set; name an environment, or a task file with gold "
            "answers."
        )


def run_rl(
    recipe: RlRecipe,
    *,
    env: References = (),
    note: Note = lambda line: None,
    quiet: bool = False,
) -> RlResult:
    """Train in the recipe's run directory; the same call continues an interrupted run. `env` are
    environments as values, instead of the recipe's references."""
    try:
        from coa.train.monitors import check_tracker
        from coa.train.processes import Processes
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc
    processes = Processes.open()
    if not processes.main:
        note, quiet = (lambda line: None), True
    for line in (*ignored(recipe), *advice(recipe)):
        note(line)
    check_tracker(recipe.rl.log)
    return asyncio.run(_run(recipe, env, processes, note, quiet))


async def _run(
    recipe: RlRecipe, env: References, processes: Processes, note: Note, quiet: bool
) -> RlResult:
    from coa.train.groups import TaskStream
    from coa.train.monitors import open_monitors
    from coa.train.policy import make_policy
    from coa.train.rl import ADAPTER, RlLoop, RlResult, RlUpdater
    from coa.train.sft import known_by, set_up_torch

    settings, rollout, root = recipe.rl, recipe.rollout, Path(recipe.out)
    environments, tasks, check_tasks = load_tasks(recipe, env, note)
    both = [*tasks, *(check_tasks or ())]
    prompt = choose_prompt(recipe.prompt, settings.model)
    set_up_torch(settings)
    async with AsyncExitStack() as stack:
        opening = open_environments(environments, both, recipe.tools, recipe.reward)
        opened = await stack.enter_async_context(opening)
        policy = make_policy(settings, rollout.context)
        made: Json = {"grammar": opened.grammar_names, "prompt": prompt}
        run = processes.by_main(
            lambda: open_run("rl", recipe, made, opened, tasks, check_tasks, policy.base_sha256)
        )
        if run is not None:
            stack.enter_context(run)
            opened.grammars.save(root)
        if (root / ADAPTER / MANIFEST).is_file():
            note(f"{root / ADAPTER} is finished already")
            records = read_jsonl(root / METRICS)
            done = max((record["update"] for _, record in records), default=0)
            return RlResult(root / ADAPTER, done, trained=False)
        engine = load_sampler(recipe, policy)
        stack.push_async_callback(engine.close)
        if recipe.select.on:  # by the model that is trained: its adapter, if it starts from one
            await engine.load(policy.adapter(), "start")
        sampler = _make_sampler(recipe, tasks, engine, opened, prompt, processes)
        selected = await select(tasks, recipe.select, sampler, root, "silent" if quiet else "auto")
        note(selected.line)
        sampler.stream = TaskStream(selected.tasks, settings.seed)
        monitors = stack.enter_context(open_monitors(recipe, root, quiet))
        sampler.on_rollout = partial(monitors.phase, "rollout")
        check = partial(evaluate_policy, recipe, check_tasks, sampler) if check_tasks else None
        updater = RlUpdater(policy, settings, rollout.temperature, processes)
        homes = [env.name for env in opened.environments]
        known = known_by(settings.model, opened.grammars.names, homes, opened.grammars)
        known = made | known | {"settings": to_json(settings)}
        loop = RlLoop(recipe, sampler, updater, run, monitors, check, known)
        result = await loop.execute(note)
        if monitors.solved:
            note(monitors.solved)
        if run is not None and (line := nothing_learnt(root)):
            note(line)
        return result


def nothing_learnt(root: Path) -> str:
    """What to say of a run in which no update took a step; empty where one did."""
    records = [record for _, record in read_jsonl(root / METRICS)]
    if not records or any("loss" in record for record in records):
        return ""
    return (
        f"nothing was learnt: in none of {len(records)} updates was there a row to learn from, as "
        "when every task is always or never solved; the weights are those of the start. Take other "
        "tasks, a higher temperature or larger groups."
    )


def _make_sampler(
    recipe: RlRecipe,
    tasks: TaskSet,
    engine: Loadable,
    opened: OpenEnvironment,
    prompt: PromptKind,
    processes: Processes,
) -> Sampler:
    from coa.train.groups import Sampler, TaskStream
    from coa.train.rl import ROLLOUTS

    settings, rollout = recipe.rl, recipe.rollout
    decoding = Decoding(
        temperature=rollout.temperature,
        seed=settings.seed,
        prompt=prompt,
        seeded=rollout.seeded or not rollout.engine,
    )
    return Sampler(
        TaskStream(tasks, settings.seed),
        engine,
        opened,
        rollout.budget(),
        decoding,
        Path(recipe.out) / ROLLOUTS,
        settings.group_size,
        settings.without,
        rollouts_at_once(engine, rollout.concurrency),
        processes,
    )


def open_run(
    stage: str,
    recipe: TaskRecipe,
    made: Json,
    opened: OpenEnvironment,
    tasks: TaskSet,
    check_tasks: TaskSet | None,
    base: str,
) -> Run:
    """The run directory, with what its results depend on; the rest of a recipe is speed, or is
    said by a fingerprint."""
    inputs = {"tasks": tasks.fingerprint(), **opened.inputs()}
    inputs |= {"check": check_tasks.fingerprint()} if check_tasks else {}
    inputs |= {
        name: value for name, value in identity(recipe.training.model).items() if name != "base"
    }
    asked = without_speed(to_json(recipe))
    for name in ("tasks", "out", "reward", "tools", "env", "settings"):
        del asked[name]
    del asked["check"]["tasks"]
    if recipe.tools.passages:  # by its name: a fingerprint of answers does not tell what changed
        asked["tools"] = {"passages": recipe.tools.passages}
    if not recipe.check.split:  # as in records from before there was a choice
        del asked["check"]["split"]
    if isinstance(recipe, RlRecipe) and recipe.rl.loss.old == "trainer":  # likewise
        del asked["rl"]["loss"]["old"]
    asked |= made | {"reward": opened.reward_details() or {"expression": opened.reward_name}}
    root, seed = Path(recipe.out), recipe.training.seed
    return Run.open(root, stage, asked, inputs, seed, base=base, counting=without_speed)


def load_sampler(recipe: TaskRecipe, policy: Policy | ModelSource) -> Loadable:
    """The engine that samples: the policy's base in this process, or a server that takes weights.

    Whose ids are not exactly what the model wrote cannot be trained on, and is refused.
    """
    settings, rollout = recipe.training, recipe.rollout
    if not rollout.engine:
        from coa.engines.local import LocalEngine

        return LocalEngine(
            policy.base,
            dtype=settings.dtype,
            deterministic=settings.deterministic,
            slots=slots_for(rollout.concurrency),
            context=rollout.context,
            threads=settings.threads,
            memory_gb=rollout.memory_gb,
        )
    engine = load_engine(rollout.engine, slots=slots_for(rollout.concurrency))
    wrong = None
    if not getattr(engine, "exact", False):
        wrong = "does not exchange token ids"
    elif not getattr(engine, "takes_adapters", hasattr(engine, "load")):
        wrong = "takes no new weights while it runs"
    if wrong:
        raise ConfigError(
            f"rollout.engine: {rollout.engine!r} {wrong}. Expected a vLLM server "
            "(docs/engines.md), or nothing for this process."
        )
    if rollout.temperature != 1 and not getattr(engine, "tempered", False):
        raise ConfigError(
            f"rollout.temperature: found {rollout.temperature}, and {rollout.engine!r} gives "
            "logprobs before temperature, which are not those sampled from. Expected 1, or a vLLM "
            "server started with --logprobs-mode processed_logprobs."
        )
    return cast("Loadable", engine)


def load_tasks(
    recipe: TaskRecipe, env: References, note: Note
) -> tuple[tuple[Environment, ...], TaskSet, TaskSet | None]:
    """The environments, tasks to train on and to measure with, which are not the same ones."""
    how: Any = {"tools": recipe.tools, "settings": recipe.settings, "grammar": recipe.grammar}
    how |= {"model": recipe.training.model, "note": note}
    environments, tasks = choose_environments(env or recipe.env, recipe.tasks, split="train", **how)
    check = recipe.check
    if not check.tasks and not check.split:
        return environments, tasks, None
    others, check_tasks = choose_environments(
        env or recipe.env, check.tasks, split=check.split or "test", **how
    )
    if both := among(check_tasks, tasks):
        raise ConfigError(
            f"{check.tasks or check.split}: task {both[0].id} is in {recipe.tasks or 'train'}, "
            f"too, and so are {len(both)} of {len(check_tasks)}. Measure with tasks that are not "
            "trained on."
        )
    names = {env.name for env in environments}
    together = (*environments, *(o for o in others if o.name not in names))
    if len(together) > 1:
        tasks, check_tasks = _named(tasks, environments), _named(check_tasks, others)
    return together, tasks, check_tasks


def _named(tasks: TaskSet, environments: Sequence[Environment]) -> TaskSet:
    """Tasks that say which environment they belong to, also where theirs was the only one."""
    if len(environments) > 1:
        return tasks
    home = {"environment": environments[0].name}
    return TaskSet(tuple(replace(task, meta={**task.meta, **home}) for task in tasks), tasks.name)


def among(tasks: Iterable[Task], trained: Iterable[Task]) -> list[Task]:
    """Those that are trained on: other spellings of an answer make no other task, another answer
    to the same question does, as in another world."""
    asked: dict[str, list[Task]] = {}
    for task in trained:
        asked.setdefault(task.question, []).append(task)
    return [
        task
        for task in tasks
        if any(
            not task.answers or not set(task.answers).isdisjoint(other.answers)
            for other in asked.get(task.question, ())
        )
    ]


async def evaluate_policy(
    recipe: TaskRecipe,
    tasks: TaskSet,
    sampler: Sampler,
    directory: Path,
    on_rollout: OnRollout | None = None,
) -> Json:
    """Evaluate the engine's present weights on tasks that are not trained on."""
    part, processes = recipe.check, sampler.processes
    how: Json = {"temperature": part.temperature, "seed": recipe.training.seed + 1, "seeded": True}
    decoding = replace(sampler.decoding, **how)
    pairs = [(task, at) for task in processes.share(tasks) for at in range(part.samples)]
    path = directory / f"{processes.named('trajectories')}.jsonl"
    found = await sampler.attempt(pairs, path, decoding, on_rollout)
    failed = [t.error or str(t.stop) for t, _ in found if t.ended_outside]
    reasons = list(chain.from_iterable(processes.gather(failed)))
    n = part.samples * len(tasks)
    if len(reasons) > min(n - 1, max(1, TOLERATED * n)):  # it would measure the environment
        raise TrainingError(
            f"Evaluation in {directory}: the environment ended {len(reasons)} of {n} rollouts, the "
            f"first by: {reasons[0].rstrip('.')}. Put it right and give the same command again."
        )
    own = [
        (t.task_id, t.sample, 0.0 if t.failed_outside else one.score, one.reason)
        for t, one in found
    ]
    scores: dict[str, dict[int, float]] = {task.id: {} for task in tasks}
    for task_id, sample, score, reason in chain.from_iterable(processes.gather(own)):
        if score is None:  # no 0; and without it the evaluations were not of the same tasks
            raise TrainingError(
                f"Evaluation in {directory}: task {task_id} could not be judged "
                f"({reason or 'no reason given'}). The rollouts are kept: put the reward "
                "or its judge right and give the same command again."
            )
        scores[task_id][sample] = score
    if processes.main:
        records = (
            {"task_id": task_id, "sample": sample, "score": score}
            for task_id, samples in scores.items()
            for sample, score in sorted(samples.items())
        )
        write_jsonl(directory / "scores.jsonl", records)
    value = estimate([fmean(samples.values()) for samples in scores.values()])
    return {
        "eval_accuracy": round(value.value, 4),
        "eval_low": round(value.low, 4),
        "eval_high": round(value.high, 4),
        "eval_n": value.n,
        "eval_environment": round(len(reasons) / n, 4),
    }
