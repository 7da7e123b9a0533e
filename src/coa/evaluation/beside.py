"""`coa compare EPISODES RUN`: the student beside the team it was made from, task by task.

A team's episodes and a finished evaluation go in. Both are judged by the same reward and the same
gold, which is the run's: what a record says of itself is not used here. Only tasks that both worked
on are paired, and what is left out is counted. Intervals are bootstraps over tasks.

`fewer tokens at the same success` is said only where the data say it: at 95% the student spends
less, however tokens are counted, and its success is below the team's by less than a margin that was
named beforehand. That no difference was found is no such finding.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from coa.environment import Environment, environments_for
from coa.errors import ConfigError, ModelError, UsageError
from coa.evaluation.compare import CHAINS, Resamples, brief, load_measured
from coa.evaluation.run import TASKS
from coa.evaluation.spending import LATENCY, ModelPrices, at_once, name_in_prices
from coa.evaluation.team import (
    MEASURES,
    NEEDS_STATE,
    OTHER_QUESTION,
    TeamJudge,
    TeamWork,
    counted_by,
    is_cut,
    open_judge,
    own_gold,
    read_lines,
    seconds_of,
    with_cache,
)
from coa.io.runs import MANIFEST, TIMINGS, Json, read_jsonl, read_object, read_records
from coa.io.workers import shortened
from coa.models.codec import codec_of
from coa.models.references import is_here, resolve
from coa.recording.episode import Episode
from coa.rewards import REWARDS, JudgeSettings, RewardSettings, parse_expression
from coa.rewards.reward import names_in
from coa.rollouts import choose_environments
from coa.statistics import RESAMPLES, Estimate, bootstrap, estimate, interval, paired
from coa.tasks import Task, TaskSet
from coa.trajectory import Usage
from coa.view.terminal import harmless, percent, significance

MARGIN = 2.0
"""Points of success by which the student may be below and still be called the same."""
TOKENS = ("tokens_uncached", "tokens")
FEWEST = 6
"""Tasks from which what was spent has bounds: five that all agree are no evidence by the sign test,
though a bootstrap of them is as narrow as they are alike."""
Count = Callable[[str], int]


@dataclass(frozen=True)
class Beside:
    """What is compared, and by what both sides are judged."""

    episodes: Path
    runs: Sequence[Path]
    env: Sequence[str] = ()
    """Whose reward the runs had, where that is a function."""
    tasks: Path | None = None
    """The task file of the runs, where it is not where it was."""
    reward: str = ""
    """That of `coa eval --reward`, where it is a reference to code."""
    judge: str = ""
    prices: str = ""
    margin: float = MARGIN
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.margin <= 100:
            raise ConfigError(f"--margin {self.margin:g}: expected points, from 0 to 100.")


def compare_with_team(asked: Beside) -> Json:
    """Each run beside the team, on the tasks that both worked on."""
    prices = ModelPrices(asked.prices)
    found = [asyncio.run(_beside(asked, Student.read(run, prices), prices)) for run in asked.runs]
    return {"team": str(asked.episodes), "margin": asked.margin, "runs": found}


# -- the student -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Student:
    """A finished evaluation: what each task was worth and took, a mean over its samples."""

    run: Path
    model: str
    reward: str
    judged_by: Json
    """What its reward depends on beyond the name."""
    fingerprint: str
    """Of its tasks with gold."""
    tasks_named: str
    scores: Mapping[str, float]
    work: Mapping[str, Mapping[str, float | None]]
    concurrency: int
    machine: str
    inputs: Json

    @classmethod
    def read(cls, run: Path, prices: ModelPrices) -> Student:
        measured = load_measured(run)
        if not (run / CHAINS).is_file():
            raise UsageError(f"{run}: no {CHAINS}, so nobody knows what its tasks took.")
        manifest = read_object(run / MANIFEST) if (run / MANIFEST).is_file() else {}
        summary = read_object(run / "summary.json") if (run / "summary.json").is_file() else {}
        recipe = manifest.get("recipe") or {}
        model = str(summary.get("model") or recipe.get("model") or "")
        latency = read_object(run / LATENCY) if (run / LATENCY).is_file() else {}
        inputs = manifest.get("inputs") or {}
        return cls(
            run,
            model,
            measured.reward,
            recipe.get("rewards") or {},
            str(inputs.get("tasks", "")),
            str(summary.get("tasks", "")),
            {name: measured.mean(name) for name in measured.scores},
            _work_of(run, model, prices),
            at_once(latency),
            str(latency.get("machine") or ""),
            inputs,
        )

    def tasks(self, given: Path | None) -> TaskSet:
        """The tasks that it was judged by, from where the run, or the caller, says they are."""
        if given:
            return self._given(given)
        if (own := self._own_tasks()) is not None:
            return own
        raise UsageError(
            f"{self.run}: its tasks with gold, {self.tasks_named!r}, are not there or have "
            "changed. Name the file with --tasks."
        )

    def _own_tasks(self) -> TaskSet | None:
        """The very tasks that it was judged by, where they still are where the run says."""
        named = Path(self.tasks_named)
        for path in (self.run / TASKS, named, self.run.parent / named.name):
            if path.name and path.is_file():
                tasks = TaskSet.load(path)
                if self.fingerprint in ("", tasks.fingerprint()):
                    return tasks
        return None

    def _given(self, path: Path) -> TaskSet:
        """The tasks of a file that the caller names, which may hold more than were evaluated: an
        environment keeps a part of its file for the test."""
        tasks = TaskSet.load(path)
        if self.fingerprint in ("", tasks.fingerprint()):
            return tasks
        by_id = {task.id: task for task in tasks}
        evaluated = TaskSet(tuple(by_id[name] for name in self.scores if name in by_id), tasks.name)
        if evaluated.fingerprint() == self.fingerprint:
            return evaluated
        own = self._own_tasks()
        missing = [name for name in self.scores if name not in by_id]
        if missing:
            differs = f"the task {missing[0]!r} is not in it"
            if len(missing) > 1:
                differs += f", nor are {len(missing) - 1:,} others of the run"
        elif own is None:
            differs = "a question, an answer or what else a task holds has changed"
        else:
            found = (_difference(task, by_id[task.id]) for task in own if task.id in by_id)
            differs = next(filter(None, found), "")
            if not differs:
                return own  # with the meta that it had then, so that both are judged as it was
        raise UsageError(
            f"{path}: holds other tasks, or other gold, than {self.run} was judged by: {differs}. "
            "The team and the student have to be judged by the same."
        )


def _difference(was: Task, now: Task) -> str:
    """What is another in the same task of two files; empty: nothing that it is judged by."""
    pairs = {
        "question": (was.question, now.question),
        "answer": (" | ".join(was.answers), " | ".join(now.answers)),
        "gold": (dict(was.gold), dict(now.gold)),
    }
    for what, (one, other) in pairs.items():
        if one != other:
            one, other = shortened(str(one), 60), shortened(str(other), 60)
            return f"the {what} of the task {was.id!r} was {one!r} and is {other!r}"
    return ""


def _work_of(run: Path, model: str, prices: ModelPrices) -> dict[str, dict[str, float | None]]:
    seconds: dict[tuple[str, int], float] = {}
    if (run / TIMINGS).is_file():
        for _, record in read_jsonl(run / TIMINGS, growing=True):
            if "total" in record and "task_id" in record:
                seconds[record["task_id"], record["sample"]] = float(record["total"])
    price = prices.of(name_in_prices(model))
    samples: dict[str, list[dict[str, float | None]]] = defaultdict(list)

    def add(record: Json) -> None:
        used = Usage(**record["usage"])
        spent = used.prompt_tokens, used.cached_tokens, used.sampled_tokens
        samples[record["task_id"]].append(
            {
                "tokens_uncached": used.prompt_tokens + used.sampled_tokens,
                "tokens": used.total_tokens,
                "model_calls": used.turns,
                "tool_calls": used.tool_calls,
                "seconds": seconds.get((record["task_id"], record["sample"])),
                "money": price.of(*spent) if price else None,
            }
        )

    read_records(run / CHAINS, add)
    return {name: _mean_of(own) for name, own in samples.items()}


def _mean_of(samples: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The mean of each measure; None where one of the samples does not know it."""
    found: dict[str, float | None] = {}
    for name in MEASURES:
        values = [sample[name] for sample in samples]
        known = [value for value in values if value is not None]
        found[name] = math.fsum(known) / len(known) if known and len(known) == len(values) else None
    return found


# -- the team ----------------------------------------------------------------------------------


class Attempted(NamedTuple):
    """One episode of the team."""

    line: int
    """Of the file."""
    score: float
    work: TeamWork


@dataclass
class TeamSide:
    """The team on the tasks of a run, and what of its record is left out."""

    samples: dict[str, list[Attempted]] = field(default_factory=lambda: defaultdict(list))
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """An example of what is left out."""
    models: Counter[str] = field(default_factory=Counter)
    """Model calls by the name of the model."""

    @property
    def works(self) -> list[TeamWork]:
        return [each.work for own in self.samples.values() for each in own]


OTHER_TASK = "episodes of tasks that the run does not have"
CUT = "episodes that were cut before the end"
ASKED_OTHERWISE = "episodes whose question is not that of the task with their id"
UNJUDGED = "episodes that the reward cannot judge"
NOT_EPISODES = "lines that are no episode"
NOT_RECORDED = "tasks of the run that have no episode"


async def _beside(asked: Beside, student: Student, prices: ModelPrices) -> Json:
    tasks = student.tasks(asked.tasks)
    environments, tasks, reward = _judged_by(asked, student, tasks)
    async with open_judge(environments, tasks, reward) as judge:
        _check_same_reward(judge, student)
        team = await _team_side(asked.episodes, judge, student, prices)
    team.left_out[NOT_RECORDED] = len(student.scores.keys() - team.samples.keys())
    if not team.samples:
        why = ", ".join(f"{count:,} {what}" for what, count in (+team.left_out).items())
        example = next(iter(team.first.values()), "")
        raise UsageError(
            f"{asked.episodes} and {student.run} have no task in common: {why}. {example}".rstrip()
        )
    notes = list[str]()
    if count := own_gold(task for task in tasks if task.id in team.samples):
        notes.append(
            f"the gold of {count} of these tasks is what the team answered, and tasks that it got "
            "wrong may not be there: its success here is no measurement. Evaluate the student on "
            "tasks with answers of your own"
        )
    if prices:
        known = all(work.cache_known for work in team.works)  # asked before they are recounted
        its = "what its servers had" if known else "only what its servers say they had"
        notes.append(f"money: of the team with {its} in a cache, of the student with a perfect one")
    works = _team_work(asked.episodes, team, student, notes)
    return _compared(asked, student, team, works, judge.reward, notes, prices)


def _judged_by(
    asked: Beside, student: Student, tasks: TaskSet
) -> tuple[tuple[Environment, ...], TaskSet, RewardSettings]:
    """What judged the run. Code is only loaded where the user names it."""
    if form := [name for name in ("format", "calls") if name in re.findall(r"\w+", student.reward)]:
        raise UsageError(
            f"{student.run}: its reward {student.reward!r} judges by {form[0]!r} how a chain is "
            "written, and a team writes none. Evaluate the student by its answers, with coa eval "
            "--reward exact into another --out."
        )
    judge = JudgeSettings(asked.judge)
    if asked.env:
        environments = environments_for(asked.env, **asked.settings)
        return environments, tasks, RewardSettings(asked.reward or "auto", judge=judge)
    if own := [name for name in student.inputs if name.startswith("environment ")]:
        raise UsageError(
            f"{student.run}: was judged by {student.reward!r} in the {own[0]}, which is not one of "
            "this package. Name it with --env, so that the team is judged by the same."
        )
    environments, known = choose_environments((), tasks)
    if not asked.reward:
        _check_named(student)
    return environments, known, RewardSettings(asked.reward or student.reward, judge=judge)


def _check_named(student: Student) -> None:
    """Refuse the reference of a reward that only the run names."""
    try:
        own = [name for name in names_in(parse_expression(student.reward, REWARDS)) if ":" in name]
    except ConfigError:
        own = [student.reward]
    if own:
        raise UsageError(
            f"{student.run}: was judged by the reward {own[0]!r}, which is not one of this "
            "package. Name it with --reward, or its environment with --env, so that the team is "
            "judged by the same."
        )


def _check_same_reward(judge: TeamJudge, student: Student) -> None:
    if judge.reward != student.reward:
        raise UsageError(
            f"{student.run}: was judged by {student.reward!r}, and the team would be judged by "
            f"{judge.reward!r}. Name the environment, or the reward, of the run."
        )
    if (now := judge.opened.reward_details()) != student.judged_by:
        raise UsageError(
            f"{student.run}: was judged by {student.reward!r} with other settings than these "
            f"({_first_difference(student.judged_by, now)}); give the same --judge and --reward."
        )
    for env in judge.opened.environments:
        name = f"environment {env.name}"
        held, now_code = student.inputs.get(name), env.code()
        own = not isinstance(env.reward, str | RewardSettings)
        if own and held and now_code not in held:
            raise UsageError(
                f"{student.run}: the files of the environment {env.name!r} have changed since, and "
                "its reward with them. Evaluate the student again, or bring them back."
            )


def _first_difference(was: Json, now: Json) -> str:
    for name in [*was, *now]:
        if was.get(name) != now.get(name):
            shown = (shortened(str(each.get(name, "not set")), 40) for each in (was, now))
            return f"{name}: {' and now '.join(shown)}"
    return "nothing in particular"


async def _team_side(
    path: Path, judge: TeamJudge, student: Student, prices: ModelPrices
) -> TeamSide:
    """Judge the episodes of the run's tasks, one after another."""
    side = TeamSide()

    def leave_out(why: str, example: str = "") -> None:
        side.left_out[why] += 1
        if example:
            side.first.setdefault(why, f"The first: {example}")

    for line, found in read_lines(path):
        if not isinstance(found, Episode):
            leave_out(NOT_EPISODES, str(found))
        elif found.task_id not in student.scores:
            leave_out(OTHER_TASK, f"line {line}, {found.task_id!r}")
        elif is_cut(found):
            leave_out(CUT)
        else:
            verdict = await judge.verdict(found)
            if verdict.why == NEEDS_STATE:
                raise UsageError(f"{student.run}: {NEEDS_STATE}, so the team cannot be judged.")
            if verdict.why == OTHER_QUESTION:
                now = judge.tasks[found.task_id].question
                leave_out(ASKED_OTHERWISE, f"{shortened(found.question)!r}, {shortened(now)!r}")
            elif verdict.score is None:
                leave_out(UNJUDGED, verdict.why)
            else:
                work = TeamWork.of(found, prices)
                side.models.update(e.call.model for _, e in found.model_calls() if e.call)
                side.samples[found.task_id].append(Attempted(line, verdict.score, work))
    return side


def _team_work(
    path: Path, team: TeamSide, student: Student, notes: list[str]
) -> dict[str, dict[str, float | None]]:
    """What each task took the team. All tokens are counted in one way: by its servers, where these
    counted every call, else by the student's tokenizer."""
    by_servers = all(work.tokens for work in team.works)
    count = _tokenizer(student.model)
    if by_servers:
        _recounted(path, team, count or len, by_servers)
        notes.append(
            "tokens are what each side counts, the team's servers and the student's tokenizer; a "
            "cache is a perfect one of the task on both sides, the team's by the share of its texts"
        )
    elif count:
        _recounted(path, team, count, by_servers)
        notes.append(
            "no server counted all calls of the team: its texts are counted by the student's "
            "tokenizer, without schemas of tools and marks of chat formats, so it took rather more"
        )
    else:
        notes.append(
            "no server counted all calls of the team, and the student's tokenizer is not here: "
            "tokens of the team are not known"
        )
    unknown = {} if by_servers or count else dict.fromkeys(TOKENS)
    seconds = seconds_of(path)
    return {
        name: _mean_of([each.work.measures(seconds.get(name)) for each in own]) | unknown
        for name, own in team.samples.items()
    }


def _tokenizer(model: str) -> Count | None:
    """Counts as the student does; None where its tokenizer is not on this machine."""
    try:
        source = resolve(model)
        if source.kind != "local" or not is_here(source):
            return None
        codec = codec_of(model)
    except ModelError:
        return None
    return lambda text: len(codec.encode(text))


def _recounted(path: Path, team: TeamSide, count: Count, by_servers: bool) -> None:
    """Count the tokens of the team from its texts, or only what of them a cache would have had."""
    own = {each.line: (name, at) for name, e in team.samples.items() for at, each in enumerate(e)}
    for line, episode in read_lines(path):
        if line not in own or not isinstance(episode, Episode):
            continue
        name, at = own[line]
        held = team.samples[name][at]
        tokens = counted_by(episode, count)
        if by_servers:
            assert held.work.tokens is not None, line
            tokens = with_cache(held.work.tokens, tokens)
        work = replace(held.work, tokens=tokens, cache_known=True)
        team.samples[name][at] = held._replace(work=work)


# -- both ---------------------------------------------------------------------------------------


def _compared(
    asked: Beside,
    student: Student,
    team: TeamSide,
    works: Mapping[str, Mapping[str, float | None]],
    reward: str,
    notes: list[str],
    prices: ModelPrices,
) -> Json:
    order = [name for name in student.scores if name in team.samples]
    ours = {name: math.fsum(e.score for e in own) / len(own) for name, own in team.samples.items()}
    theirs = student.scores
    pair = paired([ours[name] for name in order], [theirs[name] for name in order])
    measures: Json = {}
    for name in MEASURES:
        one = [works[task][name] for task in order]
        other = [student.work[task][name] for task in order]
        measures[name] = _measured(one, other, [ours[i] for i in order], [theirs[i] for i in order])
    low, high = pair.difference[1:3]
    row: Json = {
        "run": str(student.run),
        "model": student.model,
        "team_models": [name for name, _ in team.models.most_common(10)],
        "reward": reward,
        "n": len(order),
        "left_out": {what: count for what, count in team.left_out.items() if count},
        "first_left_out": team.first,
        "success": {
            "team": brief(estimate([ours[name] for name in order])),
            "student": brief(estimate([theirs[name] for name in order])),
            "difference": round(pair.difference.value, 4),
            "difference_ci95": [round(low, 4), round(high, 4)],
            **{"wins": pair.wins, "losses": pair.losses, "ties": pair.ties},
            "p_value": round(pair.p_value, 5),
        },
        "measures": measures,
        "currency": prices.currency,
    }
    row["claim"] = claim(row["success"], measures, asked.margin)
    if not prices:
        notes.append("money: give --prices FILE.toml, or 1,0.1,5 for a million tokens")
    if measures["seconds"]["team"] and measures["seconds"]["student"]:
        notes.append(_about_seconds(student, asked.episodes))
    return row | {"notes": notes}


def _measured(
    team: Sequence[float | None],
    student: Sequence[float | None],
    solved: Sequence[float],
    also_solved: Sequence[float],
) -> Json:
    """A measure of both sides, over all tasks and for a solved one; what one side does not know of
    one task is not known of it."""
    one = [value for value in team if value is not None]
    other = [value for value in student if value is not None]
    knows = len(one) == len(team), len(other) == len(student)
    found: Json = {
        "team": _short(math.fsum(one) / len(one)) if knows[0] else None,
        "student": _short(math.fsum(other) / len(other)) if knows[1] else None,
        "difference": None,
        "reduction": None,
        "per_solved": None,
    }
    if not all(knows):
        return found
    drawn = bootstrap([b - a for a, b in zip(one, other, strict=True)])
    found["difference"] = _bounded(drawn).figures()
    columns = {"team": one, "student": other, "solved": solved, "also solved": also_solved}
    if sum(one):
        columns |= {"tasks": [1.0] * len(one)}
        sums = Resamples(columns, resamples=RESAMPLES)
        reduction = sums.reduction(("team", "tasks"), ("student", "tasks"))
        found["reduction"] = _bounded(reduction).figures()
        if sum(solved) and sum(also_solved):
            pairs = ("team", "solved"), ("student", "also solved")
            found["per_solved"] = {
                "team": _short(sum(one) / sum(solved)),
                "student": _short(sum(other) / sum(also_solved)),
                "reduction": _bounded(sums.reduction(*pairs)).figures(),
            }
    return found


def _bounded(found: Estimate) -> Estimate:
    """An interval of so few tasks has no bounds."""
    return found if found.n >= FEWEST else found._replace(low=-math.inf, high=math.inf)


def claim(success: Json, measures: Json, margin: float) -> Json:
    """What may be said of tokens and success together, in one sentence.

    Tokens are fewer where that is sure however they are counted. Success is the same where it is
    sure that the student's is below the team's by less than `margin` points.
    """
    spent = {name: measures[name]["difference"] for name in TOKENS if measures[name]["difference"]}
    low, high = (100 * side + 0.0 for side in success["difference_ci95"])  # no -0
    same, less = low > -margin, [name for name, e in spent.items() if (e["ci95"][1] or 0.0) < 0]
    more = [name for name, e in spent.items() if (e["ci95"][0] or 0.0) > 0]
    fewer = bool(spent) and len(less) == len(spent)
    if not spent:
        tokens = "tokens are not known"
    elif fewer or len(more) == len(spent):
        tokens = "fewer tokens" if fewer else "more tokens"
    elif less:
        tokens = f"fewer tokens only {'with' if less == ['tokens'] else 'without'} a cache"
    else:
        tokens = "not clearly fewer tokens"
    joined = " " if tokens in ("fewer tokens", "more tokens") else ", "
    if low > 0:
        told = "at higher success"
    elif same:
        told = "at the same success"
    elif high < 0:
        told = "at lower success"
    else:
        joined, told = "; ", "these tasks do not say whether at the same success"
    bounds = f"between {low:+.2f} and {high:+.2f} points of success"  # all digits that decide
    rule = f"the same would be above {f'{-margin:+g}' if margin else 0}"
    return {
        "fewer_tokens": fewer,
        "same_success": same,
        "fewer_tokens_at_the_same_success": fewer and same,
        "margin": margin,
        "sentence": f"{tokens}{joined}{told}: {bounds} at 95%; {rule}",
    }


def _about_seconds(student: Student, episodes: Path) -> str:
    beside = f"with up to {student.concurrency} rollouts at once" if student.concurrency else ""
    here = f"on {student.machine}" if student.machine else "on a machine that nobody noted"
    return (
        f"seconds: the student's {f'{beside} {here}'.strip()}, the team's as it was recorded, "
        "perhaps on another machine and with other work beside it"
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")


# -- for people --------------------------------------------------------------------------------


_WIDE, _SIDE = 32, 24
"""Columns of the table."""


def lines(result: Json) -> Iterator[str]:
    """The comparison as a person reads it."""
    for row in result["runs"]:
        yield from map(harmless, _lines_of(row, result["team"]))


def _lines_of(row: Json, team: str) -> Iterator[str]:
    success = row["success"]
    models = f" ({', '.join(row['team_models'])})" if row["team_models"] else ""
    yield f"{row['run']} ({row['model']}) beside the team of {team}{models}"
    told = f"{row['n']:,} tasks, judged by {row['reward']}"
    yield f"{told:<{_WIDE}}{'team':<{_SIDE}}{'student':<{_SIDE}}student against team"
    low, high = (100 * side + 0.0 for side in success["difference_ci95"])
    one, other = (percent(e["accuracy"], e["ci95"]) for e in (success["team"], success["student"]))
    won = f"wins {success['wins']} losses {success['losses']} {significance(success['p_value'])}"
    yield (
        f"{'  success':<{_WIDE}}{one.strip():<{_SIDE}}{other.strip():<{_SIDE}}"
        f"{100 * success['difference'] + 0.0:+.1f} points [{low:+.1f}, {high:+.1f}], {won}"
    )
    for name, title in MEASURES.items():
        found = row["measures"][name]
        unit = row["currency"] or title if name == "money" else title
        if found["team"] is None and found["student"] is None:
            continue
        yield _row(unit, found["team"], found["student"], found["reduction"])
    for name in (*TOKENS, "money"):
        if found := row["measures"][name]["per_solved"]:
            unit = row["currency"] or "money" if name == "money" else MEASURES[name]
            yield _row(f"{unit}, solved", found["team"], found["student"], found["reduction"])
    yield f"  {row['claim']['sentence']}"
    for what, count in row["left_out"].items():
        example = f" {row['first_left_out'][what]}" if what in row["first_left_out"] else ""
        if what == OTHER_TASK:  # no fault: the questions that train are such, where a file is split
            be = "is" if count == 1 else "are"
            of = f"{count:,} episode{'s' * (count != 1)} {be} of questions"
            yield f"  {of} that the run was not tested on, as those that train.{example}"
        else:
            yield f"  left out: {count:,} {what}.{example}"
    for note in row["notes"]:
        yield f"  {note}"


def _row(title: str, team: float | None, student: float | None, reduction: Json | None) -> str:
    told = ""
    if reduction is not None:
        value = reduction["value"]
        bounds = [None if each is None else 100 * each for each in reduction["ci95"]]
        if value < 0:
            bounds = [None if each is None else -each for each in reversed(bounds)]
        word = (
            "more" if value < 0 else "fewer" if title[:5] in ("token", "model", "tool ") else "less"
        )
        told = f"{100 * abs(value):.1f}% {word} {interval(bounds, 'z.1f')}"
    sides = f"{_figure(team):<{_SIDE}}{_figure(student):<{_SIDE}}"
    return f"{f'  {title}':<{_WIDE}}{sides}{told}".rstrip()


def _figure(value: float | None) -> str:
    if value is None:
        return "not known"
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
