"""Distil: episodes in, trajectories out, and of every other one the reason.

An episode is first converted, judged (which needs the tasks' gold) and replayed: the student's own
loop, fed the same model turns, must meet the same observations and end with the same answer.
Replaying also proves that the runtime accepts every block. What this gives is a `Conversion`, which
depends on nothing but its episode; the filters then look at all of them together.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from coa.crew.channel import shortened
from coa.distill.card import COPY, Making, dataset_card
from coa.distill.convert import NotConvertible, convert
from coa.distill.filters import Candidate, Filtered, FilterSettings, apply_filters
from coa.distill.funnel import plot, stage_record, table
from coa.engines.scripted import ScriptedEngine
from coa.environment import OpenEnvironment
from coa.errors import CoaError, MissingExtra, Unavailable
from coa.protocol.book import GrammarBook
from coa.protocol.prompt import PromptKind
from coa.runs import Json, write_atomic, write_jsonl
from coa.runtime import Budget
from coa.tasks.task import Task
from coa.teachers.episode import Episode
from coa.trajectory import Author, Trajectory, save_trajectories

AT_ONCE = 8
"""Episodes in work at a time: while one waits for a tool, the others go on."""
_GENEROUS = Budget(turns=64, tokens=1 << 20, turn_tokens=1 << 20, context=1 << 22)


@dataclass(frozen=True)
class Conversion:
    """What became of one episode: a chain with its score, or the reason why there is none."""

    key: str
    """The task's id; several episodes of one task are numbered."""
    task_id: str
    trajectory: Trajectory | None = None
    score: float | None = None
    """Of the episode's answer by the task's reward; None: nobody could judge."""
    replay: str = ""
    """Why the chain does not replay; empty: it does."""
    reason: str = ""
    detail: str = ""

    def to_json(self) -> Json:
        chain = self.trajectory.to_json() if self.trajectory else None
        return {**vars(self), "trajectory": chain}

    @classmethod
    def from_json(cls, record: Json, book: GrammarBook | None = None) -> Conversion:
        chain = record["trajectory"]
        return cls(**{**record, "trajectory": chain and Trajectory.from_json(chain, book)})


@dataclass(frozen=True)
class Distilled:
    """What was kept, what was not and why."""

    kept: list[Trajectory]
    rejected: list[Json]
    """One record for each that was dropped or repeated: task_id, stage, reason and detail."""
    funnel: Json
    unjudged: int = 0
    """Kept chains whose answer nobody could judge."""

    def to_json(self) -> Json:
        return self.funnel

    def lines(self) -> list[str]:
        """The funnel as a table, and what it comes to."""
        funnel, copies = self.funnel, sum(COPY in each.meta for each in self.kept)
        kept = f"{len(self.kept)} trajectories of {funnel['episodes']} episodes"
        kept += f", {copies} of them copies" if copies else ""
        said = [*table(funnel["stages"]), "", kept]
        if right := funnel["right"]:
            share = 100 * funnel["right_converted"] / right
            said.append(f"{right} episodes are right, {share:.1f}% of them converted")
        return said


async def convert_one(
    key: str,
    episode: Episode,
    opened: OpenEnvironment,
    task: Task | None = None,
    *,
    prompt: PromptKind = "compact",
) -> Conversion:
    """Convert, judge and replay one episode. Without `task` the answer cannot be judged."""
    public = Task(episode.question, id=episode.task_id, meta=episode.meta)
    if task is not None and not task.is_asked_by(episode.question):  # its gold is another's
        found = f"{shortened(episode.question)!r}; the task: {shortened(task.question)!r}"
        return Conversion(key, task.id, reason=OTHER_QUESTION, detail=found)
    if task is not None and "environment" in episode.meta:  # a file of tasks may not name it
        task = replace(task, meta={**task.meta, "environment": episode.meta["environment"]})
    judging = replace(task, question=public.question) if task is not None else None

    async def judged(trajectory: Trajectory) -> float | None:
        return None if task is None else (await opened.score(task, trajectory)).score

    try:
        with _odd("its tools do not fit into the grammar"):
            bound = await opened.bound(public)
        with _odd("the record cannot be converted"):
            trajectory = convert(episode, bound, prompt)
            trajectory.book = opened.grammars
        with _odd("the chain cannot be replayed"):
            again, replay = await _replay(trajectory, judging or public, opened)
    except NotConvertible as cause:  # whether its answer is right is counted all the same
        score = None
        if episode.answer is not None and not opened.takes_state(public):
            given = Trajectory(public.id, public.question, "", answer=episode.answer)
            score = await judged(given)
        return Conversion(
            key, episode.task_id, None, score, reason=cause.reason, detail=cause.detail
        )
    trajectory.scored = again.scored
    return Conversion(key, episode.task_id, trajectory, await judged(trajectory), replay)


@contextmanager
def _odd(reason: str) -> Iterator[None]:
    """Whatever a record of somebody else leads to is its own end, not that of all the others. What
    is missing or failing here is not its fault, and ends the run, which can be continued."""
    try:
        yield
    except (NotConvertible, MissingExtra, Unavailable, OSError):
        raise
    except Exception as cause:
        own = isinstance(cause, CoaError)  # it is a sentence already
        detail = str(cause) if own else f"{type(cause).__name__}: {cause}"
        raise NotConvertible(reason, detail) from cause


async def _replay(
    trajectory: Trajectory, task: Task, opened: OpenEnvironment
) -> tuple[Trajectory, str]:
    """Run the student's loop over the same turns; what it made, and why that is another text.

    What went wrong once may have been the world (a sandbox was killed), so it is tried again.
    """
    again, fault = await _replay_once(trajectory, task, opened)
    return await _replay_once(trajectory, task, opened) if fault else (again, fault)


async def _replay_once(
    trajectory: Trajectory, task: Task, opened: OpenEnvironment
) -> tuple[Trajectory, str]:
    turns = [step.model.text for step in trajectory.steps]
    again = await opened.play(task, ScriptedEngine(turns), budget=_GENEROUS)
    if again.answer == trajectory.answer and again.text == trajectory.text:
        return again, ""
    pairs = zip(trajectory.segments, again.segments, strict=False)
    seen = ((was, now) for was, now in pairs if was.author is Author.ENV)
    for number, (was, now) in enumerate(seen, start=1):
        if was.text != now.text:
            shown = f"{shortened(was.text)!r}; now {shortened(now.text)!r}"
            return again, f"call {number} is answered in another way: {shown}"
    return again, f"{again.stop}: {again.error}" if again.error else f"it ends as {again.stop}"


NO_TASK = "its task is not in the task file"
OTHER_QUESTION = "its question is not its task's"


def keys_of(task_ids: Sequence[str]) -> list[str]:
    """A name for each episode: its task's id, numbered when the task has several."""
    taken, seen = set(task_ids), Counter[str]()
    keys = []
    for task_id in task_ids:
        seen[task_id] += 1
        key = task_id
        while seen[task_id] > 1 and (key := f"{task_id}#{seen[task_id]}") in taken:
            seen[task_id] += 1  # another task has that name
        keys.append(key)
    return keys


def conclude(
    conversions: Sequence[Conversion],
    filters: FilterSettings,
    against: Mapping[str, Sequence[Task]] | None = None,
    *,
    judged: bool = True,
) -> Distilled:
    """Filter what was converted, and count."""
    candidates = [
        Candidate(each.trajectory, each.score, each.replay)
        for each in conversions
        if each.trajectory is not None
    ]
    failed = [
        {"task_id": each.task_id, "stage": "convert", "reason": each.reason, "detail": each.detail}
        for each in conversions
        if each.trajectory is None
    ]
    filtered = apply_filters(candidates, filters, against, judged=judged)
    funnel = _funnel(conversions, filtered, failed)
    return Distilled(filtered.kept, failed + filtered.notes, funnel, filtered.unjudged)


def _funnel(conversions: Sequence[Conversion], filtered: Filtered, failed: Sequence[Json]) -> Json:
    right = [each for each in conversions if each.score == 1.0]
    dropped = [note for note in [*failed, *filtered.notes] if not note.get("copies")]
    return {
        "episodes": len(conversions),
        "right": len(right),
        "right_converted": sum(each.trajectory is not None for each in right),
        "kept": len(filtered.kept),
        "kept_with_corrected_error": sum(any(s.errs for s in t.segments) for t in filtered.kept),
        "rejected": dict(Counter(note["reason"] for note in dropped).most_common()),
        "stages": [stage_record("convert", len(conversions), failed), *filtered.stages],
    }


def save_distilled(directory: Path, distilled: Distilled, making: Making | None = None) -> None:
    """Write the dataset: trajectories.jsonl, rejected.jsonl, the funnel, and the card."""
    stages = distilled.funnel["stages"]
    making = replace(making or Making(), plot="funnel.svg", unjudged=distilled.unjudged)
    save_trajectories(directory / "trajectories.jsonl", distilled.kept)
    write_jsonl(directory / "rejected.jsonl", distilled.rejected)
    write_atomic(directory / "funnel.json", json.dumps(distilled.funnel, indent=2) + "\n")
    write_atomic(directory / making.plot, plot(stages))
    write_atomic(directory / "README.md", dataset_card(distilled.kept, stages, making))
