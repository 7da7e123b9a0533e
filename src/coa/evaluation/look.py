"""`coa check EPISODES`: what is in a file of episodes, before a token is trained on it.

Labels that nobody verified, tools that changed under one name and gaps in what was captured cost
more than any setting of a training, and are found in a minute. The file is read once, line by line,
and each `Aspect` counts what it is about. Nothing is written and no tool is called; of models only
the judge is asked, where a reward has one. Of a long file are kept: counts, a digest of each
question, and `SAMPLE` episodes, chosen by a hash of their lines, which are converted and replayed.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from coa.distillation.dataset import Conversion, Gold, conclude, convert_by_record, gold_of
from coa.distillation.derive import derive_grammar
from coa.distillation.filters import FilterSettings
from coa.environment import Environment, environment_name, environments_for
from coa.errors import ModelError, RecordError, UsageError
from coa.evaluation.contents import (
    Aspect,
    Drift,
    Episodes,
    Gaps,
    NameTally,
    Remark,
    Repeats,
    TeamTally,
    amiss,
    count_of,
    digest_of,
    fine,
    unknown,
)
from coa.evaluation.spending import ModelPrices
from coa.evaluation.team import (
    MEASURES,
    NEEDS_STATE,
    NO_GOLD,
    NO_TASK,
    OTHER_QUESTION,
    AnswerVerdict,
    TeamJudge,
    TeamWork,
    all_tasks,
    counted_by,
    figures,
    is_cut,
    open_judge,
    own_gold,
    read_lines,
    seconds_of,
    stated_success,
)
from coa.grammar import Grammar
from coa.io.progress import Progress, duration
from coa.io.runs import Json
from coa.io.workers import shortened
from coa.models.bases import BASE
from coa.models.codec import codec_of
from coa.models.references import is_here, resolve
from coa.recording.episode import Episode
from coa.rollouts import check_shipped, choose_environments
from coa.statistics import RIGHT, Estimate, estimate, wilson
from coa.tasks import Task, TaskSet
from coa.train.rows import build_row
from coa.train.settings import TOKENS_PER_SECOND, SftSettings
from coa.trajectory import Trajectory
from coa.view.terminal import harmless, percent

SAMPLE = 1_000
"""Episodes that are converted."""
BYTES_PER_TOKEN = 4
"""Where no tokenizer is at hand."""
MANY = 10_000
"""Tasks from which Wilson's interval stands for a bootstrap, which would take minutes."""


@dataclass(frozen=True)
class Looking:
    """What is looked at, and by what it is judged."""

    episodes: Path
    env: Sequence[str] = ()
    tasks: Path | None = None
    """With gold; else the environment's own tasks of every split."""
    grammar: str = ""
    """Of the chains; empty: the environment's, or one derived from the episodes."""
    model: str = BASE
    """The student, whose tokenizer counts."""
    prices: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    sample: int = SAMPLE


@dataclass(frozen=True)
class Findings:
    """All that was found in a file."""

    path: Path
    aspects: Sequence[Aspect]

    def findings(self) -> Iterator[Remark]:
        for aspect in self.aspects:
            yield from aspect.findings()

    def to_json(self) -> Json:
        record: Json = {"episodes_file": str(self.path)}
        record |= {aspect.name: aspect.to_json() for aspect in self.aspects}
        return record | {"findings": [each._asdict() for each in self.findings()]}

    def lines(self) -> Iterator[str]:
        for mark, name, found, advice in self.findings():
            yield harmless(f"{mark}  {name:<10} {found}")
            if advice:
                yield harmless(f"    {'':<10} -> {advice}")


def look_at(asked: Looking) -> Findings:
    """Look at a file of episodes."""
    return asyncio.run(_look_at(asked))


async def _look_at(asked: Looking) -> Findings:
    counter = _counter(asked.model)
    dataset = Dataset(asked, counter)
    first, success = Episodes(asked.episodes), Success()
    aspects: list[Aspect] = [
        first,
        TeamTally(),
        success,
        TeamCost(asked, counter, dataset),
        Gaps(),
        Drift(),
        Repeats(),
        dataset,
    ]
    async with AsyncExitStack() as stack:
        judge = None
        if asked.env or asked.tasks:
            judge = await stack.enter_async_context(_judge(asked))
            success.own_gold = own_gold(judge.tasks.values())
        with Progress("check") as progress:
            for line, found in read_lines(asked.episodes):
                progress.advance()
                if isinstance(found, RecordError):
                    first.refuse(line, found)
                    continue
                verdict = await _verdict(judge, found)
                for aspect in aspects:
                    aspect.add(found, verdict)
    if not first.count:
        raise UsageError(f"{asked.episodes}: holds no episode. {first.stranger}".rstrip())
    await dataset.convert()
    return Findings(asked.episodes, aspects)


def _judge(asked: Looking) -> Any:
    """What judges the answers: the environment's reward, or that which suits the task file."""
    if asked.tasks is None:
        environments = environments_for(asked.env, **asked.settings)
        tasks: Sequence[Task] = all_tasks(environments)
    else:
        environments, tasks = choose_environments(
            asked.env, asked.tasks, settings=dict(asked.settings)
        )
    return open_judge(environments, tasks)


async def _verdict(judge: TeamJudge | None, episode: Episode) -> AnswerVerdict:
    """By the reward where there is gold, else what the record says of itself. No answer is not
    right, whoever judges; of a task that is not among those with gold it counts for nothing."""
    verdict = await judge.verdict(episode) if judge else AnswerVerdict(None, why=NO_GOLD)
    if verdict.score is not None:
        return verdict
    stated = stated_success(episode.meta)
    if stated is not None and verdict.why in (NO_GOLD, NO_TASK, NEEDS_STATE):
        return AnswerVerdict(stated, "record")
    if episode.answer is None and verdict.why not in (NO_TASK, OTHER_QUESTION):
        return AnswerVerdict(0.0)
    return verdict


class Counted(NamedTuple):
    """What counts tokens, and how that is said."""

    name: str
    count: Callable[[str], int]
    row: Callable[[Trajectory], int]


def _counter(model: str) -> Counted:
    """The student's tokenizer where it is here; nothing is downloaded to look at a file."""
    source = resolve(model)
    if source.kind != "local":
        raise ModelError(f"--model {model!r} cannot be fine-tuned; expected {BASE} or hf:FOLDER.")
    if not is_here(source):
        name = f"an estimate, {BYTES_PER_TOKEN} bytes a token: {model} is not here"
        return Counted(name, _by_bytes, lambda made: _by_bytes(_whole(made)))
    codec = codec_of(model)
    return Counted(
        f"the tokenizer of {model}",
        lambda text: len(codec.encode(text)),
        lambda made: len(build_row(made, codec).ids),
    )


def _by_bytes(text: str) -> int:
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def _whole(trajectory: Trajectory) -> str:
    return trajectory.question + "".join(segment.text for segment in trajectory.segments)


# -- success and cost ------------------------------------------------------------------------


class Success:
    """How often the team is right, by whom that was verified, and for how many it was not."""

    name = "success"

    def __init__(self) -> None:
        self.by, self.why = NameTally(), NameTally()
        self.unverified = self.unanswered = self.disagreed = self.odd = 0
        self.own_gold = 0
        """Tasks whose gold is what this team, or another, answered."""
        self.sums: dict[str, float] = {}
        self.counts = Counter[str]()

    def add(self, episode: Episode, verdict: AnswerVerdict) -> None:
        if is_cut(episode):  # nobody knows what would have come of it
            return
        stated = stated_success(episode.meta)
        self.odd += stated is None and episode.meta.get("success") is not None
        if verdict.by:
            self.by.note(verdict.by)
        elif episode.answer is None:
            self.unanswered += 1
        else:
            self.unverified += 1
            self.why.note(shortened(verdict.why or NO_GOLD, 120))
        if verdict.score is None:
            return
        if verdict.by == "reward" and stated is not None:
            self.disagreed += (stated >= RIGHT) != (verdict.score >= RIGHT)
        self.sums[episode.task_id] = self.sums.get(episode.task_id, 0.0) + verdict.score
        self.counts[episode.task_id] += 1

    def estimate(self) -> Estimate | None:
        """Over tasks; None where no answer was verified."""
        if not self.by:
            return None
        means = [total / self.counts[name] for name, total in self.sums.items()]
        return estimate(means) if len(means) <= MANY else wilson(sum(means), len(means))

    def findings(self) -> Iterator[Remark]:
        found = self.estimate()
        if found is None:
            yield amiss(
                "success",
                f"not known: {count_of(self.unverified, 'answer')} that nobody verified",
                "give --env or --tasks with gold answers, or `coa distill` keeps wrong answers",
            )
        else:
            by = {"reward": "by the reward", "record": "as the record says"}
            said = " and ".join(f"{self.by[name]:,} {by[name]}" for name in self.by)
            tasks = count_of(found.n, "task")
            yield fine("success", f"{percent(found.value, found[1:3]).strip()} of {tasks}; {said}")
            if self.unverified:
                reasons = NameTally({why: n for why, n in self.why.items() if why != NO_GOLD})
                told = f"; {reasons.told(3)}" if reasons else ""
                yield amiss(
                    "labels",
                    f"{count_of(self.unverified, 'answer')} that nobody verified{told}",
                    self._advice(),
                )
        if self.disagreed:
            times = count_of(self.disagreed, "episode")
            yield amiss(
                "labels",
                f"of {times} the record says another success than the reward",
                "read some: coa view EPISODES --html PAGE; the reward decides here and in distill",
            )
        if self.own_gold:
            yield amiss(
                "labels",
                f"{count_of(self.own_gold, 'task has', 'tasks have')} for gold what a team "
                "answered, and of those it got wrong there may be none: success says little",
                "give your own answers: --tasks, or `tasks` in environment.toml",
            )
        if self.odd:
            yield amiss(
                "labels",
                f"of {count_of(self.odd, 'episode')} meta.success is no number from 0 to 1",
                "it is not used; write 0, 1 or a share",
            )

    def _advice(self) -> str:
        if OTHER_QUESTION in self.why:
            return "the ids mean other tasks: record with the task file that judges"
        if NEEDS_STATE in self.why:
            return "let `coa record --env` judge while the state is there"
        return "add their tasks to the file of gold, or filter.keep_unjudged=false drops them"

    def to_json(self) -> Json:
        found = self.estimate()
        return {
            "verified_by": dict(self.by),
            "unverified": self.unverified,
            "unanswered": self.unanswered,
            "gold_of_a_team": self.own_gold,
            "why": dict(self.why.most_common()),
            "record_disagrees": self.disagreed,
            "tasks": found.n if found else 0,
            **(found.rounded("accuracy") if found else {"accuracy": None, "ci95": None}),
        }


class TeamCost:
    """What the team takes for a task, and for a solved one."""

    name = "cost"

    def __init__(self, asked: Looking, counter: Counted, dataset: Dataset) -> None:
        self.prices, self.counter, self.dataset = ModelPrices(asked.prices), counter, dataset
        self.seconds = seconds_of(asked.episodes)
        self.episodes = self.uncounted = self.calls = 0
        self.known = Counter[str]()
        """Episodes of which a measure is known."""
        self.sums: dict[str, float] = dict.fromkeys(MEASURES, 0.0)
        self.judged: dict[str, list[float]] = {name: [0.0, 0.0] for name in MEASURES}
        """Of episodes that count for the success: what was spent, and what was solved."""

    def add(self, episode: Episode, verdict: AnswerVerdict) -> None:
        if is_cut(episode):
            return
        work = TeamWork.of(episode, self.prices)
        self.episodes += 1
        self.uncounted += work.uncounted
        self.calls += work.model_calls
        for name, value in work.measures(self.seconds.get(episode.task_id)).items():
            if value is None:
                continue
            self.known[name] += 1
            self.sums[name] += value
            if verdict.score is not None:
                self.judged[name][0] += value
                self.judged[name][1] += verdict.score

    def per_task(self) -> dict[str, float | None]:
        return {n: self.sums[n] / self.known[n] if self.known[n] else None for n in MEASURES}

    def per_solved(self) -> dict[str, float | None]:
        return {n: spent / solved if solved else None for n, (spent, solved) in self.judged.items()}

    def by_text(self) -> dict[str, float]:
        """Tokens of an episode by one's own count, over the sample, where no server counted."""
        whole = [each for each in self.dataset.sample if not is_cut(each)]
        if self.known["tokens_uncached"] or not whole:
            return {}
        counted = [counted_by(each, self.counter.count) for each in whole]
        return {
            "tokens_uncached": sum(each.total for each in counted) / len(counted),
            "tokens": sum(each.total_cached for each in counted) / len(counted),
        }

    def findings(self) -> Iterator[Remark]:
        yield fine("cost", f"of a task: {self._told(self.per_task())}")
        if any(self.per_solved().values()):
            yield fine("", f"of a solved task: {self._told(self.per_solved())}")
        if counted := self.by_text():
            shown = self._told({**dict.fromkeys(MEASURES), **counted})
            yield unknown(
                "",
                f"no server counted all calls of an episode; by {self.counter.name}: {shown}",
                "let the program ask for usage (chat completions, streaming: "
                "stream_options.include_usage)",
            )
        elif (known := self.known["tokens_uncached"]) < self.episodes:
            yield amiss(
                "",
                f"tokens are of the {count_of(known, 'episode')} of which all calls were counted; "
                f"{count_of(self.uncounted, 'model call')} of {self.calls:,} were not",
                "let the program ask for usage (chat completions, streaming: "
                "stream_options.include_usage)",
            )
        if not self.known["money"]:
            yield unknown("", "money is not known", "give --prices FILE.toml, or 1,0.1,5 a million")
        others = (name for name in MEASURES if name != "tokens_uncached")
        if some := [name for name in others if 0 < self.known[name] < self.episodes]:
            told = ", ".join(f"{MEASURES[name]} over {self.known[name]:,}" for name in some)
            yield unknown("", f"means over fewer than {self.episodes:,} episodes: {told}")

    def _told(self, found: Mapping[str, float | None]) -> str:
        parts = []
        for name, value in found.items():
            if value is None:
                continue
            unit = MEASURES[name]
            if name == "money":
                parts.append(f"{value:.4g} {self.prices.currency or 'in money'}")
            else:
                parts.append(f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}")
        return ", ".join(parts)

    def to_json(self) -> Json:
        return {
            "per_task": figures(self.per_task()),
            "per_solved": figures(self.per_solved()),
            "known": {name: self.known[name] for name in MEASURES},
            "model_calls": self.calls,
            "model_calls_uncounted": self.uncounted,
            "by_text": {**figures(self.by_text()), "counted_by": self.counter.name},
            "currency": self.prices.currency,
        }


# -- what it amounts to ------------------------------------------------------------------------


class Dataset:
    """How many chains a distillation would make of it, and how long training on them takes."""

    name = "dataset"

    def __init__(self, asked: Looking, counter: Counted) -> None:
        self.asked, self.counter = asked, counter
        self.count = 0
        self._drawn: list[tuple[int, int, Episode, AnswerVerdict]] = []
        """A heap of those with the smallest hashes of their places, negated."""
        self.sample: list[Episode] = []
        self.grammar = self.trouble = self.other_ids = ""
        self.converted = self.kept = self.too_long = 0
        self.reasons: dict[str, int] = {}
        self.lengths: list[int] = []

    def add(self, episode: Episode, verdict: AnswerVerdict) -> None:
        self.count += 1
        drawn = -int(digest_of(str(self.count)), 16), self.count, episode, verdict
        if len(self._drawn) < self.asked.sample:
            heapq.heappush(self._drawn, drawn)
        elif drawn[0] > self._drawn[0][0]:
            heapq.heapreplace(self._drawn, drawn)

    async def convert(self) -> None:
        """Convert the sample, and filter it as a distillation does by default."""
        drawn = sorted(self._drawn, key=lambda each: each[1])
        self.sample = [episode for _, _, episode, _ in drawn]
        try:
            environments, self.grammar = _grammars(self.asked, self.sample)
            gold = _gold(self.asked, self.sample)
        except UsageError as wrong:  # nobody answered, say: there is no grammar, and no chain
            self.trouble = str(wrong)
            return
        made = await convert_by_record(self.sample, environments)
        judged = [
            replace(conversion, score=verdict.score)
            if gold is None or not (why := gold.lacks(conversion.task_id))
            else Conversion(conversion.key, conversion.task_id, reason=why)
            for conversion, (_, _, _, verdict) in zip(made, drawn, strict=True)
        ]
        self.other_ids = gold.other_ids(self.sample) if gold is not None else ""
        distilled = conclude(judged, FilterSettings())
        self.converted = sum(each.trajectory is not None and not each.replay for each in made)
        self.kept = len(distilled.kept)
        self.reasons = distilled.funnel["rejected"]
        self.lengths = [self.counter.row(each) for each in distilled.kept]
        self.too_long = sum(length > SftSettings().max_length for length in self.lengths)

    @property
    def whole(self) -> bool:
        """Whether every episode was tried."""
        return self.count == len(self.sample)

    def expected(self) -> Estimate:
        """Chains of the whole file."""
        share = wilson(self.kept, len(self.sample))
        if self.whole:
            return Estimate(self.kept, self.kept, self.kept, self.count)
        value, low, high = (self.count * each for each in share[:3])
        return Estimate(value, low, high, self.count)

    @property
    def tokens(self) -> float:
        """Of all rows of the whole file."""
        mean = sum(self.lengths) / len(self.lengths) if self.lengths else 0.0
        return mean * self.expected().value

    @property
    def seconds(self) -> float:
        """Of an epoch."""
        return self.tokens / TOKENS_PER_SECOND

    def findings(self) -> Iterator[Remark]:
        if self.trouble:
            yield amiss("dataset", f"no chain: {self.trouble}", "see what episodes lack above")
            return
        tried = f"of {count_of(len(self.sample), 'episode')}"
        tried += "" if self.whole else f" that were tried, of {self.count:,},"
        found = f"{self.converted:,} {tried} become chains under {self.grammar}"
        reasons = NameTally(self.reasons).told(4)
        if self.reasons:
            found += f"; {self.kept:,} are left by the usual filters: without {reasons}"
        enough = self.converted >= 0.95 * len(self.sample)
        yield Remark(
            "ok" if enough and self.kept else "!!",
            "dataset",
            found,
            self.other_ids
            or ("coa distill says of each why: rejected.jsonl" if self.reasons else ""),
        )
        if not self.whole:
            expected = self.expected()
            bounds = f"[{expected.low:,.0f}, {expected.high:,.0f}]"
            yield fine("", f"of the whole file about {expected.value:,.0f} {bounds}")
        if self.lengths:
            typical = f"{median(self.lengths):,.0f} in the median chain, by {self.counter.name}"
            yield fine(
                "training",
                f"about {duration(self.seconds)} an epoch, {self.tokens:,.0f} tokens ({typical}), "
                f"if a 135M model learns {TOKENS_PER_SECOND} a second, as on two cores",
                "an estimate; coa sft --dry-run measures this machine",
            )
        if self.too_long:
            limit = SftSettings().max_length
            yield amiss(
                "training",
                f"{count_of(self.too_long, 'chain is', 'chains are')} longer than {limit:,} tokens",
                "they lose their end: raise sft.max_length, or shorten what tools return",
            )

    def to_json(self) -> Json:
        expected = self.expected()
        return {
            "grammar": self.grammar or None,
            "trouble": self.trouble,
            "tried": len(self.sample),
            "converted": self.converted,
            "kept": self.kept,
            "rejected": self.reasons,
            "expected": {
                "chains": round(expected.value),
                "ci95": [round(expected.low), round(expected.high)],
            },
            "tokens": round(self.tokens),
            "tokens_of_a_chain": round(median(self.lengths)) if self.lengths else None,
            "counted_by": self.counter.name,
            "longer_than_max_length": self.too_long,
            "seconds_of_an_epoch": round(self.seconds),
            "tokens_per_second": TOKENS_PER_SECOND,
        }


def _gold(asked: Looking, episodes: Sequence[Episode]) -> Gold | None:
    """The tasks whose episodes a distillation takes; None: of any."""
    environments = () if asked.tasks else environments_for(asked.env, **asked.settings)
    return gold_of(asked.tasks, environments, "train", episodes, lambda line: None)


def _grammars(asked: Looking, episodes: Sequence[Episode]) -> tuple[tuple[Environment, ...], str]:
    """The environments in whose grammars the episodes are converted, and how that is said."""
    if asked.env:
        environments = environments_for(asked.env, **asked.settings)
        if asked.grammar:
            environments = tuple(env.with_grammar(asked.grammar) for env in environments)
    elif asked.grammar:
        environments = (Environment("recorded", grammar=asked.grammar),)
    elif _are_shipped(episodes):
        public = [replace(each.task, id=str(at)) for at, each in enumerate(episodes)]
        environments, found = choose_environments((), TaskSet(tuple(public)))
        for each, task in zip(episodes, found, strict=True):
            each.meta = dict(task.meta)
    else:
        try:
            grammar: Grammar | str = derive_grammar(episodes).grammar
        except UsageError:  # none of them has an answer, or can be a chain: that is said as such
            return (Environment("recorded", grammar="react"),), "the preset react"
        return (Environment("recorded", grammar=grammar),), "the grammar derived from them"
    names = list(dict.fromkeys(env.value().name for env in environments))
    return environments, f"the grammar {', '.join(names)}"


def _are_shipped(episodes: Sequence[Episode]) -> bool:
    """Whether all are of environments of this package, whose grammars are known."""
    names = [environment_name(Task("?", meta=each.meta)) for each in episodes]
    if not all(names):
        return False
    try:
        check_shipped(names)
    except UsageError:
        return False
    return True
