"""The evaluation stage: settings in, a run directory out."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from coa.engines import load_engine, rollouts_at_once, slots_for
from coa.engines.base import Engine
from coa.environment import OpenEnvironment, open_environments, remarks
from coa.errors import ConfigError, ModelError, RecordError
from coa.evaluation.compare import SCORES, SUMMARY, brief, count_outcomes
from coa.evaluation.samples import (
    OWN_CHECK,
    Sample,
    check_chooser,
    own_check,
    rate_all,
    sample_figures,
)
from coa.evaluation.spending import LATENCY, Tariff, calls_by_agent, find_tariff, latency, money
from coa.io.progress import Mode, counted
from coa.io.runs import Json, Run, write_atomic, write_jsonl
from coa.io.settings import Option, check_ranges
from coa.loop import Budget, Decoding
from coa.models.references import identity, resolve_default
from coa.rewards import JudgeSettings, ProgramSettings, RewardSettings, Scored, f1, mean_parts
from coa.rollouts import AgentSettings, Note, choose_environments, roll_out_all
from coa.statistics import estimate
from coa.tasks import Task, TaskSet
from coa.trajectory import Chain, StopReason, Trajectory

TASKS = "tasks.jsonl"
GroupsOf = Callable[[Task], Mapping[str, str]]
"""What the results of a task are grouped by, as its environment declares it."""


def summarise(
    tasks: Sequence[Task],
    trajectories: Sequence[Trajectory],
    scored: Sequence[Scored],
    *,
    ratings: Sequence[float | None] | None = None,
    chosen_by: str = OWN_CHECK,
    tariff: Tariff | None = None,
    groups_of: GroupsOf = lambda task: {},
) -> tuple[Json, list[Json]]:
    """The evaluation object and one score record per trajectory, given what the reward said.

    Every task counts. With several samples a task's accuracy is the mean over them. `ratings` are
    what `best_of` goes by and `chosen_by` names them; without, the models' own checks.
    """
    _check_judged(trajectories, scored)
    by_id = {task.id: task for task in tasks}
    samples: dict[str, list[Sample]] = {task.id: [] for task in tasks}
    records: list[Json] = []
    if ratings is None:
        ratings = [own_check(Chain.read(trajectory)) for trajectory in trajectories]
    for trajectory, found, rating in zip(trajectories, scored, ratings, strict=True):
        assert found.score is not None, trajectory.task_id
        sample = Sample(trajectory, found.score, rating)
        samples[trajectory.task_id].append(sample)
        task = by_id[trajectory.task_id]
        records.append(_record(task, sample, found, groups_of(task)))
    means = {name: sum(s.score for s in own) / max(1, len(own)) for name, own in samples.items()}
    overall = estimate(list(means.values()))
    solved = sum(record["score"] for record in records)
    summary: Json = {
        "n": len(tasks),
        "k": max(map(len, samples.values())),
        **overall.rounded("accuracy"),
        "outcomes": count_outcomes((record["score"], record["answer"]) for record in records),
        **sample_figures(tasks, samples, chosen_by),
        **_overlap(by_id, trajectories),
        **_spent(trajectories, solved),
    }
    if tariff is not None:
        summary["money"] = money(trajectories, solved, tariff)
    if len(parts := mean_parts(scored)) > 1:
        summary["parts"] = parts
    for column, groups in _grouped(tasks, means, groups_of).items():
        summary[f"by_{column}"] = groups
    return summary, records


def _overlap(by_id: Mapping[str, Task], trajectories: Sequence[Trajectory]) -> Json:
    """Token F1 over the tasks that have gold answers; of tests and calls there is none."""
    judged = [f1(by_id[trajectory.task_id], trajectory) for trajectory in trajectories]
    found = [score for score in judged if score is not None]
    return {"f1": round(sum(found) / len(found), 4)} if found else {}


def _record(task: Task, sample: Sample, found: Scored, groups: Mapping[str, str]) -> Json:
    """A line of scores.jsonl."""
    trajectory = sample.trajectory
    record: Json = {"task_id": task.id, "sample": trajectory.sample, "score": sample.score}
    record |= {"answer": trajectory.answer, "stop": trajectory.stop}
    if sample.rating is not None:
        record["rating"] = sample.rating
    if groups:
        record["groups"] = dict(groups)
    if len(found.parts) > 1 or found.reason:  # otherwise they say nothing new
        record["parts"] = found.to_json()["parts"]
    return record


def _spent(trajectories: Sequence[Trajectory], solved: float) -> Json:
    """What rollouts took and how they ended; `tokens` count with a perfect cache."""
    n = max(1, len(trajectories))
    tokens = sum(t.usage.total_tokens for t in trajectories)
    uncached = sum(t.usage.prompt_tokens + t.usage.sampled_tokens for t in trajectories)
    stops = Counter(str(t.stop) for t in trajectories)
    return {
        "tokens_per_task": round(tokens / n, 1),
        "tokens_per_task_uncached": round(uncached / n, 1),
        "tokens_per_solved": round(tokens / solved, 1) if solved else None,
        "sampled_tokens_per_task": round(sum(t.usage.sampled_tokens for t in trajectories) / n, 1),
        "tool_calls_per_task": round(sum(t.usage.tool_calls for t in trajectories) / n, 2),
        "tool_calls_by_agent": calls_by_agent(trajectories),
        "malformed_per_task": round(sum(t.usage.malformed for t in trajectories) / n, 3),
        "stop_reasons": dict(sorted(stops.items())),
        "truncated": sum(t.truncated for t in trajectories),
        "malformed": stops[StopReason.MALFORMED.value],
        "environment": sum(t.failed_outside for t in trajectories),
    }


def _check_judged(trajectories: Sequence[Trajectory], scored: Sequence[Scored]) -> None:
    """What nobody could judge is no 0, and leaving it out would change the denominator."""
    unknown = [t for t, found in zip(trajectories, scored, strict=True) if found.score is None]
    if unknown:
        why = next(found.reason for found in scored if found.score is None)
        raise RecordError(
            f"task {unknown[0].task_id}: the reward cannot judge it ({why or 'no gold answer?'}), "
            f"and so it is with {len(unknown)} of {len(scored)} rollouts. They are kept: where "
            "what failed works again (a judge, a sandbox), the same command asks it once more. "
            "Other gold or another reward needs another --out."
        )


def _grouped(tasks: Iterable[Task], means: dict[str, float], groups_of: GroupsOf) -> Json:
    """Estimates by field and group, in the order in which fields first appear."""
    values: dict[str, dict[str, list[float]]] = {}
    for task in tasks:
        for column, name in groups_of(task).items():
            values.setdefault(column, defaultdict(list))[name].append(means[task.id])
    return {
        column: {name: brief(estimate(scores)) for name, scores in sorted(groups.items())}
        for column, groups in values.items()
    }


def save_summary(directory: Path, summary: Json, records: Sequence[Json]) -> None:
    """The summary comes last: where it is, the evaluation is finished."""
    write_jsonl(directory / SCORES, records)
    write_atomic(directory / SUMMARY, json.dumps(summary, indent=2) + "\n")


VERDICTS, RATINGS = "verdicts.db", "ratings.db"


@dataclass(frozen=True)
class EvalSettings(AgentSettings):
    """What an evaluation depends on; the run directory refuses to mix two of them."""

    split: Annotated[str, Option("Of the environment's own tasks.")] = "test"
    tasks: Annotated[
        str, Option("Task file with gold answers; else the environment's own tasks.")
    ] = ""
    k: Annotated[int, Option("Rollouts per task.")] = 1
    reward: Annotated[str, Option("An expression, as judge*format; auto: the environment's.")] = (
        "auto"
    )
    judge: Annotated[str, Option("openai:NAME@URL, for the reward or the choice 'judge'.")] = ""
    best_of: Annotated[
        str, Option("Chooses between samples: double_check, judge or module:attribute.")
    ] = OWN_CHECK
    """A function of one's own gets the public task and a trajectory."""
    prices: Annotated[
        str, Option("A price table (.toml), or prices per million tokens as 1,0.1,5.")
    ] = ""
    """Tokens read, read from a cache and written; empty: money is not counted."""
    turns: Annotated[int, Option("Most turns of a rollout.")] = 12
    tokens: Annotated[
        int, Option("Most tokens sampled in all; 0: what the context has room for.")
    ] = 0
    turn_tokens: Annotated[int, Option("Most tokens sampled in a turn.")] = 512
    malformed: Annotated[int, Option("Malformed turns that are forgiven.")] = 2
    context: Annotated[int, Option("Most tokens of a whole rollout.")] = 3072
    concurrency: Annotated[int, Option("Rollouts at once.")] = 96
    memory_gb: Annotated[float | None, Option("Most GB for keys and values.", "--memory")] = None
    """Of a model in this process; None: a quarter of the machine's."""
    deterministic: Annotated[bool, Option("fp32, fixed batch shapes.")] = False
    weights: Annotated[str, Option("full, or int8 as `coa ask` has them.")] = "full"
    """Figures must not depend on what a machine can do, so there is no auto here."""

    def __post_init__(self) -> None:
        ranges = {"at least 1": "k turns turn_tokens context concurrency", "0 or more": "tokens"}
        check_ranges(self, "", ranges)
        Decoding(temperature=self.temperature)  # refuses what cannot be sampled at
        if self.weights not in ("full", "int8"):
            raise ConfigError(f"weights: found {self.weights!r}, expected 'full' or 'int8'.")
        check_chooser(self.best_of, JudgeSettings(self.judge))
        if self.k > 1 and self.temperature == 0:
            raise ConfigError(
                f"k is {self.k} at temperature 0: all rollouts of a task would be the same. "
                "Set a temperature, 1.0 for instance."
            )

    def rewards(self, expression: str, directory: Path) -> RewardSettings:
        """The reward; verdicts are kept in the run, so that continuing it pays nothing twice."""
        judge = JudgeSettings(self.judge, cache=str(directory / VERDICTS))
        return RewardSettings(
            expression, judge=judge, tests=ProgramSettings(unsafe=self.tools.unsafe_code)
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


def run_eval(
    settings: EvalSettings,
    directory: Path,
    *,
    engine: Engine | None = None,
    quiet: bool = False,
) -> Json:
    """Evaluate, or continue an evaluation; returns the summary that `summary.json` holds.

    An `engine` that is given is used and left open; otherwise the model is loaded and closed.
    """
    return asyncio.run(_run(settings, directory, engine, quiet))


async def _run(settings: EvalSettings, directory: Path, engine: Engine | None, quiet: bool) -> Json:
    model = resolve_default(settings.model)
    say: Note = (lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr))
    held = TaskSet.load(Path(settings.tasks)) if settings.tasks else None
    environments, tasks = choose_environments(
        settings.env,
        held or "",
        split=settings.split,
        tools=settings.tools,
        settings=settings.settings,
        grammar=settings.grammar,
        model=model,
        note=say,
    )
    environments = settings.spoken_by(environments)
    for line in remarks(environments, tasks, settings.tools):
        say(line)
    decoding = settings.decoding(model)
    tariff = find_tariff(settings.prices, model)
    rewards = settings.rewards(settings.reward, directory)
    say(f"opening {', '.join(env.name for env in environments)} for {len(tasks)} tasks")
    async with open_environments(environments, tasks, settings.tools, rewards) as opened:
        reward = opened.reward_name
        recipe = _recipe(settings) | {"model": model, "prompt": decoding.prompt, "reward": reward}
        recipe["grammar"] = opened.grammar_names
        if details := opened.reward_details():
            recipe["rewards"] = details
        # NOTE: of the file as it is: tasks of several environments were told theirs.
        inputs = {"tasks": (held or tasks).fingerprint(), **opened.inputs()}
        inputs |= _weights(model, engine)
        with Run.open(directory, "eval", recipe, inputs, settings.seed) as run:
            if engine is None:
                say(f"loading {model}")
            made = await _roll_out(
                settings, tasks, opened, engine, model, decoding, directory, quiet
            )
            by_id = {task.id: task for task in tasks}
            scored = await opened.score_all((by_id[each.task_id], each) for each in made)
            rater = JudgeSettings(settings.judge, cache=str(directory / RATINGS))
            ratings = await rate_all(settings.chooser, tasks, made, rater)
            summary, records = summarise(
                tasks,
                made,
                scored,
                ratings=ratings,
                chosen_by=settings.chooser,
                tariff=tariff,
                groups_of=opened.groups_of,
            )
            named = settings.tasks or f"{tasks.name} ({settings.split})"
            summary = {"model": model, "tasks": named, "reward": reward, **summary}
            solved = sum(record["score"] for record in records)
            seconds = latency(directory, solved, settings.concurrency)
            write_atomic(directory / LATENCY, json.dumps(seconds, indent=2) + "\n")
            if not settings.tasks:  # they are in no file that a report could find
                tasks.save(directory / TASKS)
            save_summary(directory, summary, records)
            run.timing({"event": "finished"})
            return summary


async def _roll_out(
    settings: EvalSettings,
    tasks: TaskSet,
    opened: OpenEnvironment,
    engine: Engine | None,
    model: str,
    decoding: Decoding,
    directory: Path,
    quiet: bool,
) -> list[Trajectory]:
    """All rollouts; the tools are open already, since what is wrong with them is found sooner."""
    mode: Mode = "silent" if quiet else "auto"
    async with AsyncExitStack() as stack:
        if engine is None:
            engine = load_engine(
                model,
                dialect=settings.spoken,
                deterministic=settings.deterministic,
                slots=slots_for(settings.concurrency),
                context=settings.context,
                memory_gb=settings.memory_gb,
                weights=settings.weights,
                threads=settings.threads,
            )
            stack.push_async_callback(engine.close)
        with counted("evaluate", len(tasks) * settings.k, mode) as on_done:
            return await roll_out_all(
                tasks,
                engine,
                opened,
                directory,
                k=settings.k,
                budget=settings.budget(),
                decoding=decoding,
                concurrency=rollouts_at_once(engine, settings.concurrency),
                on_done=on_done,
            )


_ROLLED_OUT_WITH = (
    *("k", "temperature", "turns", "tokens", "turn_tokens", "malformed", "context"),
    *("deterministic", "seed"),
)


def _recipe(settings: EvalSettings) -> Json:
    """What rollouts depend on. The rest is speed, is worked out of them at the end, or has a
    fingerprint: tasks, tools and reward."""
    recipe = {name: getattr(settings, name) for name in _ROLLED_OUT_WITH}
    recipe["observations"] = settings.tools.observations
    if settings.constrain:  # as in records from before there was a choice
        recipe["constrain"] = True
    if settings.weights != "full":
        recipe["weights"] = settings.weights
    if settings.dialect != "blocks":
        recipe["dialect"] = settings.dialect
    return recipe


def _weights(model: str, engine: Engine | None) -> dict[str, str]:
    """What identifies the weights: hashes, or the word of a caller's own engine."""
    try:
        return identity(model)
    except ModelError:
        if engine is None:
            raise
        return {"weights": engine.weights}
