"""What a team's episodes are worth and what they took, as an evaluation counts it.

Episodes go in, one after another; out comes for each a score, or why nobody can say, and the work
it took. What a server did not say is None and never 0: figures that need it are not known then.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from coa.environment import SPLITS, Environment, OpenEnvironment, open_environments
from coa.errors import RecordError, UsageError
from coa.evaluation.compare import SCORES
from coa.evaluation.spending import ModelPrices
from coa.io.files import first_record
from coa.io.runs import Json, json_lines, read_jsonl
from coa.recording.episode import Episode, Message, Tokens, ToolUse
from coa.rewards import RewardSettings
from coa.tasks import Task
from coa.trajectory import StopReason, Trajectory

EPISODES = "episodes.jsonl"
MEASURES = {
    "tokens_uncached": "tokens",
    "tokens": "tokens with a cache",
    "model_calls": "model calls",
    "tool_calls": "tool calls",
    "seconds": "seconds",
    "money": "money",
}
"""What work is measured in -> as a person reads it. With a cache a token of a prompt counts only
where it is read anew; as in an evaluation, `tokens` are these."""


# -- the file ----------------------------------------------------------------------------------


def find_episodes(path: Path) -> Path | None:
    """The episodes file that a path names or a folder holds; None where it is something else.

    A folder with an environment is that environment, and a run that run, whatever else is there.
    """
    if path.is_file() and path.suffix == ".jsonl":
        return path
    others = ("environment.toml", "environment.py", SCORES)
    if not path.is_dir() or any((path / name).is_file() for name in others):
        return None
    if (path / EPISODES).is_file():
        return path / EPISODES
    found = [each for each in sorted(path.glob("*.jsonl")) if _holds_episodes(each)]
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise UsageError(f"{path}: holds several files of episodes, {names}. Name one of them.")
    return found[0] if found else None


def _holds_episodes(path: Path) -> bool:
    first = first_record(path)
    return first is not None and "events" in first and "agents" in first


def read_lines(path: Path) -> Iterator[tuple[int, Episode | RecordError]]:
    """(line, episode), or what is wrong with the line. Unlike `read_episodes` it goes on after a
    line that is no JSON at all, since whoever looks at a file wants to know of every such line."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                for _, record in json_lines(path, (line,), start=number):
                    yield number, Episode.from_json(record)
            except RecordError as wrong:
                yield number, wrong


def is_cut(episode: Episode) -> bool:
    """Whether its recording ended before it did: that is nobody's failure, and no result."""
    return bool(episode.meta.get("cut"))


def seconds_of(path: Path) -> dict[str, float]:
    """Seconds of each task, a mean over its episodes, from the timings beside an episodes file;
    empty where there are none."""
    beside = path.with_name(f"{path.name}.timings.jsonl")
    if not beside.is_file():
        return {}
    found: dict[str, list[float]] = defaultdict(list)
    for _, record in read_jsonl(beside, growing=True):
        total = record.get("total")
        if isinstance(total, int | float) and math.isfinite(total):
            found[str(record.get("task_id", ""))].append(float(total))
    return {name: fmean(own) for name, own in found.items()}


# -- the work ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TeamWork:
    """What an episode took."""

    model_calls: int
    tool_calls: int
    uncounted: int
    """Model calls whose tokens no server counted."""
    tokens: Tokens | None
    """As servers counted them; None: not all of them did."""
    cache_known: bool
    """Whether servers also said what they had in a cache."""
    money: float | None

    @classmethod
    def of(cls, episode: Episode, prices: ModelPrices | None = None) -> TeamWork:
        """Add up the model calls and the tool uses of an episode."""
        prompt = cached = sampled = made = uncounted = 0
        money: float | None = 0.0
        cache_known = True
        for _, said in episode.model_calls():
            made += 1
            call = said.call
            if call is None or not call.prompt_tokens or call.sampled_tokens is None:
                uncounted += 1
                money = None if prices or call is None else _plus(money, call.cost)
                continue
            prompt += call.prompt_tokens
            sampled += call.sampled_tokens
            cache_known = cache_known and call.cached_tokens is not None
            cached += call.cached_tokens or 0
            if prices:
                counts = call.prompt_tokens, call.cached_tokens or 0, call.sampled_tokens
                price = prices.of(call.model)
                money = _plus(money, price.of(*counts) if price else None)
            else:
                money = _plus(money, call.cost)
        whole = made > 0 and uncounted == 0
        return cls(
            model_calls=made,
            tool_calls=sum(isinstance(event, ToolUse) for event in episode.events),
            uncounted=uncounted,
            tokens=Tokens(prompt, cached, sampled) if whole else None,
            cache_known=whole and cache_known,
            money=money if made else None,
        )

    def measures(self, seconds: float | None = None) -> dict[str, float | None]:
        """By the names of MEASURES; what is not known is None."""
        counted = self.tokens
        return {
            "tokens_uncached": counted.total if counted else None,
            "tokens": counted.total_cached if counted and self.cache_known else None,
            "model_calls": self.model_calls,
            "tool_calls": self.tool_calls,
            "seconds": seconds,
            "money": self.money,
        }


def _plus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def counted_by(episode: Episode, count: Callable[[str], int]) -> Tokens:
    """The tokens of an episode by one's own count of its texts, with a perfect cache of each
    agent's context. Schemas of tools and marks of chat formats are not in it, so it is low."""
    events = [
        replace(event, call=replace(event.call, prompt_tokens=0, cached_tokens=0, sampled_tokens=0))
        if isinstance(event, Message) and event.call
        else event
        for event in episode.events
    ]
    return replace(episode, events=events).count_tokens(count)


def with_cache(counted: Tokens, by_text: Tokens) -> Tokens:
    """Tokens as a server counted them, and what of them a perfect cache would have had, by the
    share of the same texts."""
    share = by_text.cached / by_text.prompt if by_text.prompt else 0.0
    return counted._replace(cached=round(share * counted.prompt))


# -- the answer --------------------------------------------------------------------------------


class AnswerVerdict(NamedTuple):
    """What the answer of an episode is worth."""

    score: float | None
    """None: nobody can say."""
    by: str = ""
    """reward, or record: its `meta` says so; empty: nobody judged."""
    why: str = ""
    """Why nobody can say."""


NO_GOLD, NO_TASK = "nobody verified it", "its task is not among those with gold"
OTHER_QUESTION = "its question is not its task's"
NEEDS_STATE = "the reward judges with the state of a rollout, which a record does not have"


def stated_success(meta: Mapping[str, object]) -> float | None:
    """What the record itself says of its answer, where that is a number from 0 to 1."""
    found = meta.get("success")
    if isinstance(found, bool | int | float) and 0 <= found <= 1:
        return float(found)
    return None


def as_answered(episode: Episode) -> Trajectory:
    """A trajectory that is the answer of an episode and nothing else, for a reward."""
    return Trajectory(
        episode.task_id,
        episode.question,
        "",
        answer=episode.answer,
        stop=None if episode.answer is None else StopReason.ANSWERED,
    )


class TeamJudge:
    """Judges episodes by the reward and the gold of tasks; see `open_judge`."""

    def __init__(self, opened: OpenEnvironment, tasks: Iterable[Task]) -> None:
        self.opened = opened
        self.tasks = {task.id: task for task in tasks}

    @property
    def reward(self) -> str:
        return self.opened.reward_name

    async def verdict(self, episode: Episode) -> AnswerVerdict:
        """What its task's reward says of an episode."""
        task = self.tasks.get(episode.task_id)
        if task is None:
            return AnswerVerdict(None, why=NO_TASK)
        if not task.is_asked_by(episode.question):
            return AnswerVerdict(None, why=OTHER_QUESTION)
        if self.opened.takes_state(task):
            return AnswerVerdict(None, why=NEEDS_STATE)
        scored = await self.opened.score(task, as_answered(episode))
        if scored.score is None:
            return AnswerVerdict(None, why=scored.reason)
        return AnswerVerdict(scored.score, "reward")


@asynccontextmanager
async def open_judge(
    environments: Sequence[Environment],
    tasks: Sequence[Task],
    reward: RewardSettings | None = None,
) -> AsyncIterator[TeamJudge]:
    """Open the rewards of environments for tasks; no tool is started."""
    async with open_environments(environments, dry=True) as opened:
        await opened.open_rewards(reward or RewardSettings(), tasks)
        yield TeamJudge(opened, tasks)


def all_tasks(environments: Sequence[Environment]) -> list[Task]:
    """The tasks of every split: a team may have been recorded on any."""
    found: list[Task] = []
    for env in environments:
        if env.tasks is None:
            continue
        own, wrong = list[Task](), list[UsageError]()
        for split in env.tasks if isinstance(env.tasks, Mapping) else SPLITS:
            try:
                own += env.load_tasks(split)
            except UsageError as error:  # none of a short list falls into one of the splits
                wrong.append(error)
        if wrong and not own:
            raise wrong[0]
        if len(environments) > 1:
            own = [replace(e, meta={**e.meta, "environment": env.name}) for e in own]
        found += own
    return found


def own_gold(tasks: Iterable[Task]) -> int:
    """Tasks whose gold is what a team answered: those that `coa init --from` writes say whether
    somebody verified it, and of what the team got wrong there is none."""
    return sum("verified" in task.meta for task in tasks)


def figures(found: Mapping[str, float | None], digits: int = 6) -> Json:
    """Measures for JSON, to so many significant digits."""
    return {
        name: None if value is None else float(f"{value:.{digits}g}")
        for name, value in found.items()
    }
