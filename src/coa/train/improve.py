"""Rejection sampling in rounds: attempt, keep what is right, fine-tune on it, measure, repeat.

A round attempts every task `samples` times with the present weights. Of a task that was solved
sometimes, and not always, the shortest right attempts are kept that have nothing in them which is
not to be imitated: no malformed turn, no repeated call. What is kept is fine-tuned on, and the
result measured on tasks that are not trained on, paired with the start and the round before. At the
end the weights that did best become the result; the start is among them.

By default every round trains the start again, on what all rounds have kept (STaR, arXiv 2203.14465;
ReST-EM, 2312.06585): weights that went through fewer updates on their own words have forgotten
less. Tasks that are always solved by now stay in that dataset by what an earlier round kept of
them. `train_from = "last"` goes on from the round before on what this one kept (RAFT, 2304.06767).

    DIR/metrics.jsonl                a line for each round; 0 is the start
    DIR/round-N/attempts/            every attempt, as a trajectory
    DIR/round-N/verdicts.jsonl       a line for each: its score, and why it is not trained on
    DIR/round-N/dataset/             what this round trains on
    DIR/round-N/sft/                 the run of fine-tuning
    DIR/round-N/check/               rollouts and scores of the measurement
    DIR/adapter/                     the best weights

A killed run continues where it was: a stage is done when its last file is there, attempts and
measurements take over the rollouts in their files, fine-tuning its checkpoints. `metrics.jsonl` is
worked out of these files, so it says what they say. Engine and trainer follow one another and are
never both in memory.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from coa.distillation.filters import FilterSettings, fault_of
from coa.engines import rollouts_at_once
from coa.environment import OpenEnvironment, open_environments
from coa.errors import ConfigError, MissingExtra, TrainingError, boundary
from coa.io.files import sweep, sweep_folder, whole_folder
from coa.io.progress import Mode, counted, duration
from coa.io.runs import METRICS, Json, Run, read_jsonl, read_object, read_records, write_jsonl
from coa.io.settings import to_json
from coa.loop import Decoding
from coa.models.references import ModelSource, model_folder, resolve
from coa.models.weights import MANIFEST, adapter_hash, base_hash, read_adapter, write_json
from coa.rollouts import References, choose_prompt

try:
    from coa.train.experience import check_judged
    from coa.train.groups import Group, Sampler, TaskStream
    from coa.train.policy import make_policy
    from coa.train.processes import Processes
    from coa.train.rows import total_tokens
    from coa.train.sft import choose, protocol_of, rehearse, set_up_torch, train_on
except ImportError as exc:
    raise MissingExtra("Training", "train") from exc
from coa.statistics import SAME, estimate, interval, paired
from coa.tasks import TaskSet
from coa.train.rl_stage import (
    Note,
    check_has_tasks,
    evaluate_policy,
    load_sampler,
    load_tasks,
    open_run,
    read_improve_recipe,
)
from coa.train.settings import ImproveRecipe, ImproveSettings
from coa.trajectory import Author, Chain, Trajectory, load_trajectories, save_trajectories
from coa.view.terminal import percent, significance

ADAPTER, ATTEMPTS, CHECK, DATASET, SFT = "adapter", "attempts", "check", "dataset", "sft"
CHAINS, SCORES, VERDICTS = "trajectories.jsonl", "scores.jsonl", "verdicts.jsonl"
SOMETIMES, ALWAYS, NEVER, UNJUDGED = "sometimes", "always", "never", "not judged"
WRONG, SOLVED, OUTSIDE = "wrong answer", "always solved", "ended by the environment"
MALFORMED, FEW_CALLS = "malformed turn", "too few tool calls"
SAME_TEXT, LONGER = "same as a kept one", "longer than those kept"


class NothingToLearn(TrainingError):
    """No attempt of the first round can be trained on."""


# -- which attempts are kept -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttemptVerdict:
    """A line of verdicts.jsonl: an attempt, what it earned, and why it is not trained on."""

    task_id: str
    sample: int
    score: float | None
    tokens: int
    """That the model wrote."""
    dropped: str = ""
    """The reason; empty: it is kept."""

    @classmethod
    def from_json(cls, record: Json) -> AttemptVerdict:
        return cls(**{name: record[name] for name in cls.__slots__})


def solved(scores: Iterable[float | None], right: float) -> str:
    """How often a task was solved, by the attempts that could be judged."""
    judged = {score >= right - SAME for score in scores if score is not None}
    if len(judged) == 2:
        return SOMETIMES
    return UNJUDGED if not judged else ALWAYS if judged.pop() else NEVER


def sift(group: Group, settings: ImproveSettings) -> list[tuple[Trajectory, AttemptVerdict]]:
    """Every attempt of a task with its verdict, in the order of the attempts."""
    how_often = solved(group.scores, settings.right)
    reasons: dict[int, str] = {}
    for at, rollout in enumerate(group.rollouts):
        if rollout.trajectory.ended_outside:
            reasons[at] = OUTSIDE
        elif rollout.score is None:
            reasons[at] = UNJUDGED
        elif rollout.score < settings.right - SAME:
            reasons[at] = WRONG
        elif how_often == ALWAYS:
            reasons[at] = SOLVED
        elif fault := not_to_imitate(rollout.trajectory, settings):
            reasons[at] = fault
    attempts = [rollout.trajectory for rollout in group.rollouts]
    good = [at for at in range(len(attempts)) if at not in reasons]
    kept = shortest([attempts[at] for at in good], settings.keep)
    texts = {written(trajectory) for trajectory in kept}
    for at in good:
        if not any(attempts[at] is trajectory for trajectory in kept):
            reasons[at] = SAME_TEXT if written(attempts[at]) in texts else LONGER
    return [
        (
            t,
            AttemptVerdict(
                t.task_id, t.sample, r.score, t.usage.sampled_tokens, reasons.get(at, "")
            ),
        )
        for at, (t, r) in enumerate(zip(attempts, group.rollouts, strict=True))
    ]


def not_to_imitate(trajectory: Trajectory, settings: ImproveSettings) -> str:
    """What is wrong with a right attempt, by the rules for chains of a team; empty: nothing."""
    if trajectory.usage.malformed:
        return MALFORMED
    if trajectory.usage.tool_calls < settings.min_tool_calls:
        return FEW_CALLS
    fault = fault_of(Chain.read(trajectory), FilterSettings())
    return fault[0] if fault else ""


def shortest(trajectories: Iterable[Trajectory], count: int) -> list[Trajectory]:
    """So many of the shortest, no two with the same words; the first of equals."""
    found: dict[str, Trajectory] = {}
    for trajectory in sorted(trajectories, key=lambda each: each.usage.sampled_tokens):
        if len(found) < count:
            found.setdefault(written(trajectory), trajectory)
    return list(found.values())


def written(trajectory: Trajectory) -> str:
    return "\n".join(s.text for s in trajectory.segments if s.author is Author.MODEL)


def account(verdicts: Sequence[AttemptVerdict], settings: ImproveSettings) -> Json:
    """What the attempts of a round came to: every one is kept, or dropped for one reason."""
    scores: dict[str, list[float | None]] = {}
    for verdict in verdicts:
        scores.setdefault(verdict.task_id, []).append(verdict.score)
    tasks = Counter(solved(found, settings.right) for found in scores.values())
    judged = [v.score >= settings.right - SAME for v in verdicts if v.score is not None]
    dropped = Counter(verdict.dropped for verdict in verdicts if verdict.dropped)
    return {
        "tasks": len(scores),
        "solved": {name: tasks[name] for name in (ALWAYS, SOMETIMES, NEVER, UNJUDGED)},
        "attempts": len(verdicts),
        "pass_rate": round(fmean(judged), 4) if judged else None,
        "kept": sum(not verdict.dropped for verdict in verdicts),
        "dropped": dict(sorted(dropped.items())),
        "sampled_tokens": sum(verdict.tokens for verdict in verdicts),
    }


def account_line(record: Json) -> str:
    """'40 tasks: solved 12 always, 28 never; 320 attempts: 30.0% right, 0 kept; dropped: ...'"""
    counts = [f"{n} {name}" for name, n in record["solved"].items() if n]
    dropped = (f"{n} {reason}" for reason, n in record["dropped"].items())
    rate = "none judged" if record["pass_rate"] is None else f"{record['pass_rate']:.1%} right"
    return (
        f"{record['tasks']} tasks: solved {', '.join(counts)}; {record['attempts']} attempts: "
        f"{rate}, {record['kept']} kept; dropped: {', '.join(dropped) or 'none'}"
    )


# -- the stage -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImproveResult:
    adapter: Path
    round: int
    """Whose weights they are; 0: the start's, for no round did better."""
    records: list[Json]
    """Lines of metrics.jsonl."""
    trained: bool = True
    """False when an earlier call had finished the run already."""

    @property
    def line(self) -> str:
        """What was gained, in a line."""
        best = next(record for record in self.records if record["round"] == self.round)
        sampled = sum(record.get("sampled_tokens", 0) for record in self.records)
        trained = sum(record.get("trained_tokens", 0) for record in self.records)
        spent = f"{sampled:,} tokens sampled, {trained:,} trained on"
        whose = f"round {self.round}" if self.round else "the start"
        if "eval_accuracy" not in best:
            return f"kept: {whose}, not measured (check.tasks is not set); {spent}"
        line = f"kept: {whose}, {accuracy(best)}, n = {best['eval_n']}"
        if self.round:
            line += f", {against(best['against_start'])} against the start"
        else:
            line += ", since no round did better"
        return f"{line}; {spent}"


def in_rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def accuracy(record: Json) -> str:
    bounds = [record["eval_low"], record["eval_high"]]
    return f"{percent(record['eval_accuracy'], bounds).strip()} on check tasks"


def against(gain: Json) -> str:
    bounds = interval([100 * bound for bound in gain["difference_ci95"]], "+.1f")
    return (
        f"{100 * gain['difference']:+.1f} points {bounds}, wins {gain['wins']}, losses "
        f"{gain['losses']}, {significance(gain['p_value'])}"
    )


def improve_from_recipe(path: Path, overrides: Sequence[str], note: Note) -> ImproveResult:
    recipe = read_improve_recipe(path, overrides)
    check_has_tasks(recipe, path)
    return run_improve(recipe, note=note)


def run_improve(
    recipe: ImproveRecipe,
    *,
    env: References = (),
    note: Note = lambda line: None,
    quiet: bool = False,
) -> ImproveResult:
    """Improve in the recipe's run directory; the same call continues an interrupted run. `env` are
    environments as values, instead of the recipe's references."""
    if Processes.open().count > 1:
        raise ConfigError(
            "coa improve is one process. Sample with a server (rollout.engine), or use coa rl, "
            "which several processes share."
        )
    return asyncio.run(_run(recipe, env, note, "silent" if quiet else "auto"))


@dataclass(frozen=True, slots=True)
class ImprovePlan:
    """What a run would take, by the attempts of a few tasks."""

    tried: Json
    """What these came to, as a line of metrics.jsonl has it."""
    rounds: int
    attempts: int
    """Of all rounds."""
    seconds: float
    """Of all rounds: attempts, training and measuring."""

    def lines(self) -> Iterator[str]:
        yield f"tried {account_line(self.tried)}"
        yield (
            f"{in_rounds(self.rounds)} with {self.attempts:,} attempts would take about "
            f"{duration(self.seconds)}; nothing was written"
        )


def plan_from_recipe(path: Path, overrides: Sequence[str], note: Note) -> ImprovePlan:
    recipe = read_improve_recipe(path, overrides)
    check_has_tasks(recipe, path)
    return plan_improve(recipe, note=note)


def plan_improve(
    recipe: ImproveRecipe, *, env: References = (), note: Note = lambda line: None
) -> ImprovePlan:
    """What a run would take, by trying a few tasks of its first round; nothing stays of it."""
    settings = recipe.improve
    few = max(1, recipe.rollout.concurrency // settings.samples)
    with TemporaryDirectory() as place:
        tried = replace(settings, rounds=1, tasks_per_round=few, tokens=0)
        asked = replace(recipe, improve=tried, out=str(Path(place) / "run"))

        async def go() -> ImprovePlan:
            async with _opened(asked, env, note, "auto") as rounds:
                found, attempt, train = await rounds.rehearse()
                tasks = rounds.tasks_of(settings)
                held = len(rounds.check_tasks or ()) * recipe.check.samples
            attempts = settings.rounds * tasks * settings.samples
            rollouts = attempts + (settings.rounds + 1) * held
            seconds = rollouts * attempt + settings.rounds * tasks * train
            return ImprovePlan(found, settings.rounds, attempts, round(seconds, 1))

        return asyncio.run(go())


async def _run(recipe: ImproveRecipe, env: References, note: Note, mode: Mode) -> ImproveResult:
    root = Path(recipe.out)
    async with _opened(recipe, env, note, mode) as rounds:
        if (root / ADAPTER / MANIFEST).is_file():
            note(f"{root / ADAPTER} is finished already")
            records = [record for _, record in read_jsonl(root / METRICS)]
            return ImproveResult(root / ADAPTER, best_round(records, recipe), records, False)
        for place in (root / ADAPTER, *root.glob(f"round-*/{SFT}/{ADAPTER}")):
            sweep_folder(place)
        for folder in root.glob("round-*/**/"):
            sweep(folder)
        return await rounds.execute()


@asynccontextmanager
async def _opened(
    recipe: ImproveRecipe, env: References, note: Note, mode: Mode
) -> AsyncIterator[Rounds]:
    """The rounds of a recipe, in its run directory."""
    environments, tasks, check_tasks = load_tasks(recipe, env, note)
    source = resolve(recipe.sft.model)
    prompt = choose_prompt(recipe.prompt, recipe.sft.model)
    set_up_torch(recipe.sft)
    both = [*tasks, *(check_tasks or ())]
    async with open_environments(environments, both, recipe.tools, recipe.reward) as opened:
        made: Json = {"grammar": opened.grammar_names, "prompt": prompt}
        base, rollout = base_hash(model_folder(source)), recipe.rollout
        decoding = Decoding(
            temperature=rollout.temperature,
            seed=recipe.sft.seed,
            prompt=prompt,
            seeded=rollout.seeded or not rollout.engine,
        )
        with open_run("improve", recipe, made, opened, tasks, check_tasks, base) as run:
            what = (recipe, source, base, opened, tasks, check_tasks)
            yield Rounds(*what, run, decoding, note, mode)


def best_round(records: Sequence[Json], recipe: ImproveRecipe) -> int:
    """Which round's weights are the result: the best measured, the first of equals, or the last."""
    made = [record for record in records if not record["round"] or "rows" in record]
    if recipe.check.keep == "last" or "eval_accuracy" not in made[0]:
        return int(made[-1]["round"])
    return int(max(made, key=lambda record: float(record["eval_accuracy"]))["round"])


Lazy = Callable[[], Awaitable[Sampler]]
"""Loads the weights of a round for whoever is the first to need them."""


@dataclass(slots=True)
class Rounds:
    """The rounds of a run, with everything they need opened."""

    recipe: ImproveRecipe
    source: ModelSource
    base: str
    opened: OpenEnvironment
    tasks: TaskSet
    check_tasks: TaskSet | None
    run: Run
    decoding: Decoding
    note: Note
    mode: Mode
    records: list[Json] = field(default_factory=list)
    position: int = 0
    """In the stream of tasks."""
    spent: int = 0
    """Tokens sampled by the rounds so far."""
    _begun: float | None = None
    """When the round began, if it was in this call."""

    async def execute(self) -> ImproveResult:
        """Go through the rounds; what an earlier call did is only read."""
        self.run.keep_metrics(lambda record: False)  # they are worked out again
        last = self.recipe.improve.rounds
        self._say_plan()
        for number in range(last + 1):
            if number:
                self._train(number)
            async with self._weights_of(number) as sampler:
                await self._measure(number, sampler)
                if number == last:
                    break
                verdicts = await self._attempt(number + 1, sampler)
            if not any(not verdict.dropped for verdict in verdicts):
                self._end_early(number + 1, verdicts)
                break
        return self._finish()

    async def rehearse(self) -> tuple[Json, float, float]:
        """Attempt as many tasks as run at once: what that came to, seconds of an attempt, and of
        training on what is kept of a task."""
        async with self._weights_of(0) as sampler:
            await sampler()  # loading is done once
            begun = time.monotonic()
            verdicts = await self._attempt(1, sampler)
            attempt = (time.monotonic() - begun) / max(1, len(verdicts))
        found, train = account(verdicts, self.recipe.improve), 0.0
        if kept := load_trajectories(self.folder(1) / DATASET):
            sft, policy = self.recipe.sft, make_policy(self.recipe.sft)
            rows = choose(kept, sft, policy.codec).rows
            per_token, per_step = rehearse(sft, rows, policy)
            tokens = total_tokens(rows) * per_token + len(rows) / sft.batch_size * per_step
            train = sft.epochs * tokens / found["tasks"]
        return found, attempt, train

    def _say_plan(self) -> None:
        settings, held = self.recipe.improve, len(self.check_tasks or ())
        tasks = self.tasks_of(settings)
        measured = f"each measured on {held} check tasks" if held else "nothing is measured"
        limit = f", at most {settings.tokens:,} sampled tokens" if settings.tokens else ""
        self.note(
            f"{in_rounds(settings.rounds)} of {tasks} tasks x {settings.samples} attempts{limit}; "
            f"{measured}; start: {self.recipe.sft.model}"
        )

    def tasks_of(self, settings: ImproveSettings) -> int:
        """How many tasks a round has, where no tokens limit it."""
        return min(settings.tasks_per_round or len(self.tasks), len(self.tasks))

    def folder(self, number: int) -> Path:
        return self.run.root / f"round-{number}"

    def adapter(self, number: int) -> Path | None:
        """The weights that a round made; of round 0 those of the start, if it has any."""
        return self.folder(number) / SFT / ADAPTER if number else self.source.adapter

    @asynccontextmanager
    async def _weights_of(self, number: int) -> AsyncIterator[Lazy]:
        async with AsyncExitStack() as stack:
            held: list[Sampler] = []

            async def sampler() -> Sampler:
                if not held:
                    held.append(await self._load(number, stack))
                return held[0]

            yield sampler
        gc.collect()

    async def _load(self, number: int, stack: AsyncExitStack) -> Sampler:
        engine = load_sampler(self.recipe, self.source)
        stack.push_async_callback(engine.close)
        if folder := self.adapter(number):
            version = f"round-{number}-{adapter_hash(folder)[:8]}"
            await engine.load(read_adapter(folder, self.base), version)
        rollout, settings = self.recipe.rollout, self.recipe.improve
        return Sampler(
            TaskStream(self.tasks, self.recipe.sft.seed),
            engine,
            self.opened,
            rollout.budget(),
            self.decoding,
            self.folder(number + 1) / ATTEMPTS,
            settings.samples,
            concurrency=rollouts_at_once(engine, rollout.concurrency),
        )

    @contextmanager
    def _timed(self, number: int, what: str) -> Iterator[None]:
        self.note(f"== round {number}: {what}")
        begun = time.monotonic()
        yield
        seconds = round(time.monotonic() - begun, 1)
        self.run.timing({"round": number, "stage": what, "seconds": seconds})

    # -- attempts ------------------------------------------------------------------------------

    async def _attempt(self, number: int, sampler: Lazy) -> list[AttemptVerdict]:
        """Attempt the tasks of a round and choose; the verdicts are written last."""
        folder, settings = self.folder(number), self.recipe.improve
        self._begun = None
        if not (folder / VERDICTS).is_file():
            self._begun = time.monotonic()
            with self._timed(number, "attempt"):
                groups = await self._draw(number, await sampler())
            if groups:
                check_judged(groups, f"Round {number}")
            sifted = [pair for group in groups for pair in sift(group, settings)]
            homes = {task.id: self.opened.of(task).name for task in self.tasks}
            kept = [
                replace(t, meta={**t.meta, "environment": homes[t.task_id]})  # the adapter's home
                for t, verdict in sifted
                if not verdict.dropped
            ]
            save_trajectories(folder / DATASET / CHAINS, self._with_earlier(number, kept))
            for place in (ATTEMPTS, DATASET):
                self.opened.grammars.save(folder / place)
            write_jsonl(folder / VERDICTS, (asdict(verdict) for _, verdict in sifted))
        verdicts = read_records(folder / VERDICTS, AttemptVerdict.from_json)
        self.position += len(verdicts) // settings.samples
        self.spent += sum(verdict.tokens for verdict in verdicts)
        self.note(f"   {account_line(account(verdicts, settings))}")
        return verdicts

    async def _draw(self, number: int, sampler: Sampler) -> list[Group]:
        """The attempts of a round, by task. Where tokens are limited they are drawn in parts, until
        the round's share is spent; which tasks fit into it does not depend on the parts."""
        settings = self.recipe.improve
        wanted = self.tasks_of(settings)
        drawn = sampler.stream.take(self.position, wanted)
        at_once, most = wanted, float("inf")
        if settings.tokens:
            at_once = max(1, sampler.concurrency // settings.samples)
            most = settings.tokens * number / settings.rounds - self.spent
        groups: list[Group] = []
        used = 0
        while len(groups) < wanted and used < most:
            part = drawn[len(groups) : len(groups) + at_once]
            name = CHAINS.removesuffix(".jsonl")
            name += f"-{len(groups):06d}" if at_once < wanted else ""
            with counted("attempt", len(part) * settings.samples, self.mode) as on_rollout:
                sampler.on_rollout = on_rollout
                groups += await sampler.roll_out(name, part)
            used = sum(map(sampled_tokens, groups))
        fitting: dict[str, Group] = {}
        used = 0
        for group in groups:
            used += sampled_tokens(group)
            if used > most:
                break
            fitting.setdefault(group.task.id, Group(group.task, [])).rollouts.extend(group.rollouts)
        return list(fitting.values())

    def _with_earlier(self, number: int, kept: Sequence[Trajectory]) -> list[Trajectory]:
        """What a round trains on: where each begins at the start, also what earlier ones kept. Of
        equally short attempts the newest stays: better weights wrote it."""
        settings = self.recipe.improve
        if settings.train_from == "last" or number == 1 or not kept:
            return list(kept)
        by_task: dict[str, list[Trajectory]] = {}
        for trajectory in (*kept, *load_trajectories(self.folder(number - 1) / DATASET)):
            by_task.setdefault(trajectory.task_id, []).append(trajectory)
        return [each for own in by_task.values() for each in shortest(own, settings.keep)]

    def _end_early(self, number: int, verdicts: Sequence[AttemptVerdict]) -> None:
        """Say why a round has nothing to train on: an error in the first, else the end."""
        found = account(verdicts, self.recipe.improve)
        if not verdicts:
            why = "improve.tokens has no room for the attempts of one more task"
            advice = "Raise it."
        else:
            why = f"nothing to learn from: {account_line(found)}"
            advice = _advice(found)
        if number == 1:
            raise NothingToLearn(f"Round 1: {why}. {advice}")
        record = {"round": number, **found}
        self.records.append(record)
        self.run.metrics(record)
        self.note(f"   round {number} is not trained: {why}")

    # -- training and measuring ----------------------------------------------------------------

    def _train(self, number: int) -> None:
        folder, sft = self.folder(number), self.recipe.sft
        if (folder / SFT / ADAPTER / MANIFEST).is_file():
            return
        if self.recipe.improve.train_from == "last" and number > 1:
            sft = replace(sft, model=f"{self.source.base}+{self.adapter(number - 1)}")
        with self._timed(number, "train"):
            train_on(load_trajectories(folder / DATASET), sft, folder / SFT, self.note)
        gc.collect()  # a policy is full of cycles, and an engine is loaded next

    async def _measure(self, number: int, sampler: Lazy) -> None:
        """The line of a round in metrics.jsonl, once its weights are measured."""
        folder = self.folder(number)
        record: Json = {"round": number}
        if number:
            verdicts = read_records(folder / VERDICTS, AttemptVerdict.from_json)
            record |= account(verdicts, self.recipe.improve) | trained(folder)
        if self.check_tasks is not None:
            if not (folder / CHECK / SCORES).is_file():
                self.opened.grammars.save(folder / CHECK)  # first: the scores say that all is done
                with (
                    self._timed(number, "check"),
                    counted("check", self._rollouts_of_check, self.mode) as on_rollout,
                ):
                    how = (self.recipe, self.check_tasks, await sampler(), folder / CHECK)
                    await evaluate_policy(*how, on_rollout)
            record |= self._compared(number)
        self.records.append(record)
        self.run.metrics(record)
        self._say_measured(number, record)

    @property
    def _rollouts_of_check(self) -> int:
        return len(self.check_tasks or ()) * self.recipe.check.samples

    def _compared(self, number: int) -> Json:
        """The accuracy of a round, and its difference to the start and to the round before."""
        scores = self._scores(number)
        value = estimate(scores)
        record: Json = {
            "eval_accuracy": round(value.value, 4),
            "eval_low": round(value.low, 4),
            "eval_high": round(value.high, 4),
            "eval_n": value.n,
        }
        if number:
            record["against_start"] = gain(self._scores(0), scores)
            record["against_before"] = gain(self._scores(number - 1), scores)
        return record

    def _scores(self, number: int) -> list[float]:
        """The mean score of every check task, in their order."""
        found: dict[str, list[float]] = {}
        for _, record in read_jsonl(self.folder(number) / CHECK / SCORES):
            found.setdefault(record["task_id"], []).append(float(record["score"]))
        return [fmean(scores) for scores in found.values()]

    def _say_measured(self, number: int, record: Json) -> None:
        line = f"   {accuracy(record)}" if "eval_accuracy" in record else ""
        if "against_start" in record:
            line += f", {against(record['against_start'])} against the start"
        if line:
            self.note(line)
        left = self.recipe.improve.rounds - number
        if self._begun is not None and number and left:
            seconds = (time.monotonic() - self._begun) * left
            self.note(f"   about {duration(seconds)} for what is left")

    def _finish(self) -> ImproveResult:
        """Write `adapter`: a copy of the best round's, or the start as an adapter."""
        target, best = self.run.root / ADAPTER, best_round(self.records, self.recipe)
        made: dict[str, Any] = {"stage": "improve", "settings": to_json(self.recipe.sft)}
        made["round"] = best
        with boundary(TrainingError, f"{target}: writing the result"):
            if best:
                with whole_folder(target, replaces=True) as copy:
                    shutil.copytree(self.folder(best) / SFT / ADAPTER, copy, dirs_exist_ok=True)
                    write_json(copy / MANIFEST, read_object(copy / MANIFEST) | made)
            else:
                known = protocol_of(load_trajectories(self.folder(1) / DATASET), self.source.ref)
                make_policy(self.recipe.sft).save(target, updates=0, **known, **made)
        self.run.timing({"event": "finished"})
        return ImproveResult(target, best, self.records)


def sampled_tokens(group: Group) -> int:
    return sum(trajectory.usage.sampled_tokens for trajectory, _ in group.rollouts)


def trained(folder: Path) -> Json:
    """What a round was fine-tuned on, each row as often as it was."""
    updates = [record for _, record in read_jsonl(folder / SFT / METRICS)]
    return {
        "rows": sum(1 for _ in read_jsonl(folder / DATASET / CHAINS)),
        "tokens": sum(int(record["tokens"]) for record in updates),
        "trained_tokens": sum(int(record["trained_tokens"]) for record in updates),
        "updates": len(updates),
    }


def gain(before: Sequence[float], after: Sequence[float]) -> Json:
    """The difference of two measurements of the same tasks, as `coa compare` tells it."""
    pair = paired(before, after)
    low, high = round(pair.difference.low, 4), round(pair.difference.high, 4)
    return {
        "difference": round(pair.difference.value, 4),
        "difference_ci95": [low, high],
        "wins": pair.wins,
        "losses": pair.losses,
        "p_value": round(pair.p_value, 5),
    }


def _advice(found: Json) -> str:
    """What to do when nothing was kept."""
    if found["solved"][SOMETIMES]:
        return "The right attempts have faults that are not to be imitated; see verdicts.jsonl."
    if found["solved"][ALWAYS] >= found["solved"][NEVER]:
        return "Take harder tasks."
    return "Take easier tasks, raise improve.samples, or train longer with coa sft first."
