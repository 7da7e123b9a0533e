"""The RL stage: a recipe in, a run directory with an adapter out."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from coa.engines import load_engine, rollouts_at_once, slots_for
from coa.environment import Environment, OpenEnvironment, open_environments
from coa.errors import ConfigError, MissingExtra, TrainingError
from coa.io.runs import METRICS, Json, Run, read_jsonl, write_jsonl
from coa.io.settings import load_recipe, to_json, without_speed
from coa.loop import Decoding
from coa.models.references import identity
from coa.models.weights import MANIFEST
from coa.rewards import Scored
from coa.rollouts import References, choose_environments, choose_prompt, known_grammars, remembered
from coa.statistics import estimate
from coa.tasks import Task, TaskSet
from coa.train.monitors import check_tracker, open_watch
from coa.train.rl_settings import RlRecipe, ignored, preset_defaults, with_length
from coa.train.selection import select

if TYPE_CHECKING:
    from coa.train.groups import Sampler
    from coa.train.policy import Policy
    from coa.train.processes import Processes
    from coa.train.rl import Check, Loadable, RlResult


Note = Callable[[str], None]
TOLERATED = 0.1
"""Share of the rollouts of an evaluation that the environment may end; they count as failed."""


def read_rl_recipe(path: Path | None, overrides: Sequence[str]) -> RlRecipe:
    """The recipe, with what its loss preset says where the recipe says nothing."""
    recipe = load_recipe(path, overrides, RlRecipe, preset_defaults(path, overrides))
    given = {override.partition("=")[0].strip() for override in overrides}
    if "env" in given:  # the tasks of a recipe are for the environment that it was written for
        recipe = with_own_tasks(recipe, given)
    return dataclasses.replace(recipe, rl=with_length(recipe.rl, recipe.rollout))


def with_own_tasks(recipe: RlRecipe, given: Collection[str]) -> RlRecipe:
    """The recipe with the tasks of its environments instead of those that it names itself, unless
    they were `given` with it."""
    check = recipe.check
    if check.tasks and "check.tasks" not in given:
        check = dataclasses.replace(check, tasks="", split=check.split or "test")
    tasks = recipe.tasks if "tasks" in given else ""
    return dataclasses.replace(recipe, tasks=tasks, check=check)


def rl_from_recipe(path: Path, overrides: Sequence[str], note: Note) -> Path:
    """Train by recipe; returns the adapter's folder."""
    recipe = read_rl_recipe(path, overrides)
    if not recipe.tasks and not recipe.env:
        raise ConfigError(
            f"{path}: neither env nor tasks is set; name an environment, or a task file with gold "
            "answers."
        )
    return run_rl(recipe, note=note).adapter


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
        from coa.train.processes import Processes
    except ImportError as exc:
        raise MissingExtra("Training", "train") from exc
    processes = Processes.open()
    if not processes.main:
        note, quiet = (lambda line: None), True
    return asyncio.run(_run(recipe, env, processes, note, quiet))


async def _run(
    recipe: RlRecipe, env: References, processes: Processes, note: Note, quiet: bool
) -> RlResult:
    from coa.train.rl import ADAPTER, RlResult
    from coa.train.sft import set_up_torch

    settings, root = recipe.rl, Path(recipe.out)
    for line in ignored(recipe):
        note(line)
    environments, tasks, check_tasks = _load_tasks(recipe, env, note)
    both = [*tasks, *(check_tasks or ())]
    prompt = choose_prompt(recipe.prompt, settings.model)
    check_tracker(settings.log)
    set_up_torch(settings)
    async with open_environments(environments, both, recipe.tools, recipe.reward) as opened:
        policy = make_policy(recipe)
        made: Json = {"grammar": opened.grammar_names, "prompt": prompt}
        inputs = {"tasks": tasks.fingerprint(), **opened.inputs()}
        inputs |= {"check": check_tasks.fingerprint()} if check_tasks else {}
        inputs |= _start(settings.model)
        with ExitStack() as held:
            judged = opened.reward_details() or {"expression": opened.reward_name}
            asked = _recipe(recipe) | made | {"reward": judged}
            base, seed = policy.base_sha256, settings.seed
            run = processes.by_main(
                lambda: Run.open(root, "rl", asked, inputs, seed, base=base, counting=without_speed)
            )
            if run is not None:
                held.enter_context(run)
                opened.grammars.save(root)
            if (root / ADAPTER / MANIFEST).is_file():
                note(f"{root / ADAPTER} is finished already")
                records = read_jsonl(root / METRICS)
                done = max((record["update"] for _, record in records), default=0)
                return RlResult(root / ADAPTER, done, trained=False)
            return await _train(
                recipe, tasks, check_tasks, policy, opened, made, run, processes, note, quiet
            )


async def _train(
    recipe: RlRecipe,
    tasks: TaskSet,
    check_tasks: TaskSet | None,
    policy: Policy,
    opened: OpenEnvironment,
    made: Json,
    run: Run | None,
    processes: Processes,
    note: Note,
    quiet: bool,
) -> RlResult:
    """Open what a run needs, choose its tasks, and go."""
    from coa.train.groups import Sampler, TaskStream
    from coa.train.rl import ROLLOUTS, Improver, RlLoop

    settings, rollout, root = recipe.rl, recipe.rollout, Path(recipe.out)
    budget = rollout.budget()
    decoding = Decoding(temperature=rollout.temperature, seed=settings.seed, prompt=made["prompt"])
    async with AsyncExitStack() as stack:
        engine = load_sampler(recipe, policy)
        stack.push_async_callback(engine.close)
        concurrency = rollouts_at_once(engine, rollout.concurrency)
        if recipe.select.on:  # by the model that is trained: its adapter, if it starts from one
            await engine.load(policy.adapter(), "start")
        selected = await select(
            tasks,
            recipe.select,
            engine,
            opened,
            budget,
            decoding,
            root,
            concurrency=concurrency,
            processes=processes,
            mode="silent" if quiet else "auto",
        )
        note(selected.line)
        watch = stack.enter_context(open_watch(recipe, root, quiet))
        sampler = Sampler(
            TaskStream(selected.tasks, settings.seed),
            engine,
            opened,
            budget,
            decoding,
            root / ROLLOUTS,
            settings.group_size,
            concurrency,
            processes,
            lambda done, total: watch.phase("rollout", done, total),
        )
        check = None
        if check_tasks:
            check = _checker(recipe, check_tasks, sampler)
        known = made | _knows(settings.model, opened) | {"settings": to_json(settings)}
        loop = RlLoop(
            recipe,
            policy,
            engine,
            sampler,
            Improver(policy, settings, rollout.temperature, processes),
            run,
            root,
            watch,
            check,
            known,
            processes,
        )
        result = await loop.execute()
        if watch.solved:
            note(watch.solved)
        return result


def make_policy(recipe: RlRecipe) -> Policy:
    """The policy that the recipe trains; with a divergence from its start, that is kept, too."""
    from coa.train.forward import computing_dtype
    from coa.train.policy import Policy

    settings = recipe.rl
    return Policy(
        settings.model,
        rank=settings.rank,
        alpha=settings.alpha,
        dtype=computing_dtype(settings.dtype, settings.deterministic),
        seed=settings.seed,
        max_length=recipe.rollout.context,
        full=settings.full,
        checkpointing=settings.checkpointing,
        keep_reference=settings.loss.kl > 0,
    )


def load_sampler(recipe: RlRecipe, policy: Policy) -> Loadable:
    """The engine that samples: the policy's base in this process, or a server that takes weights.

    Whose ids are not exactly what the model wrote cannot be trained on, and is refused.
    """
    settings, rollout = recipe.rl, recipe.rollout
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


def _load_tasks(
    recipe: RlRecipe, env: References, note: Note
) -> tuple[tuple[Environment, ...], TaskSet, TaskSet | None]:
    """The environments, tasks to train on and to measure with, which are not the same ones."""
    how: Any = {"tools": recipe.tools, "settings": recipe.settings, "grammar": recipe.grammar}
    how |= {"model": recipe.rl.model, "note": note}
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


def _checker(recipe: RlRecipe, tasks: TaskSet, sampler: Sampler) -> Check:
    """Evaluates the engine's present weights on tasks that are not trained on."""

    part, processes = recipe.check, sampler.processes
    decoding = dataclasses.replace(
        sampler.decoding, temperature=part.temperature, seed=recipe.rl.seed + 1
    )

    async def check(directory: Path) -> Json:
        pairs = [(task, at) for task in processes.share(tasks) for at in range(part.samples)]
        path = directory / f"{processes.named('trajectories')}.jsonl"
        found, scored = await sampler.attempt(pairs, path, decoding)
        own = [
            (t.task_id, t.sample, Scored(0.0) if t.failed_outside else one)
            for t, one in zip(found, scored, strict=True)
        ]
        failed = [t.error or str(t.stop) for t in found if t.failed_outside]
        outside = _check_environment(processes.gather(failed), part.samples * len(tasks), directory)
        scores: dict[str, dict[int, float]] = {task.id: {} for task in tasks}
        for task_id, sample, one in chain.from_iterable(processes.gather(own)):
            if one.score is None:  # no 0; and without it the evaluations were not of the same tasks
                raise TrainingError(
                    f"Evaluation in {directory}: task {task_id} could not be judged "
                    f"({one.reason or 'no reason given'}). The rollouts are kept: put the reward "
                    "or its judge right and give the same command again."
                )
            scores[task_id][sample] = one.score
        ordered = [fmean(samples.values()) for samples in scores.values()]
        if processes.main:
            records = (
                {"task_id": task_id, "sample": sample, "score": score}
                for task_id, samples in scores.items()
                for sample, score in sorted(samples.items())
            )
            write_jsonl(directory / "scores.jsonl", records)
        value = estimate(ordered)
        return {
            "eval_accuracy": round(value.value, 4),
            "eval_low": round(value.low, 4),
            "eval_high": round(value.high, 4),
            "eval_n": value.n,
            "eval_environment": round(outside, 4),
        }

    return check


def _check_environment(failed: Sequence[Sequence[str]], n: int, directory: Path) -> float:
    """The share of rollouts that the environment ended, by the reasons that each process found;
    when they are many, the evaluation measures the environment."""
    reasons = list(chain.from_iterable(failed))
    if len(reasons) > min(n - 1, max(1, TOLERATED * n)):
        raise TrainingError(
            f"Evaluation in {directory}: the environment ended {len(reasons)} of {n} rollouts, the "
            f"first by: {reasons[0].rstrip('.')}. Put it right and give the same command again."
        )
    return len(reasons) / n


def _recipe(recipe: RlRecipe) -> Json:
    """What results depend on; the rest is speed, or is said by a fingerprint."""
    made = without_speed(to_json(recipe))
    for name in ("tasks", "out", "reward", "tools", "env", "settings"):
        del made[name]
    del made["check"]["tasks"]
    if recipe.tools.passages:  # by its name: a fingerprint of answers does not tell what changed
        made["tools"] = {"passages": recipe.tools.passages}
    if not made["check"]["split"]:  # as in records from before there was a choice
        del made["check"]["split"]
    return made


def _knows(model: str, opened: OpenEnvironment) -> Json:
    """The grammars that the adapter can be asked in, and the environments that it is at home in:
    those of this run, and those that its start was trained on. Practice in one of them does not
    make it forget that it knows others."""
    names = {*remembered("grammar", model), *opened.grammars.names}
    homes = {*remembered("environments", model), *(env.name for env in opened.environments)}
    return {
        "grammar": sorted(names) if len(names) > 1 else opened.grammar_names,
        "environments": sorted(homes),
        "grammars": known_grammars(model) | opened.grammars.to_json(),
    }


def _start(model: str) -> dict[str, str]:
    """What the run starts from, beside the base: an adapter."""
    return {name: value for name, value in identity(model).items() if name != "base"}
