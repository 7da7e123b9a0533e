"""Distil: episodes in, trajectories out, each rejection with its reason.

An episode is kept when it converts, when its answer is right (needs the tasks' gold), and when it
replays: the student's own loop, fed the same model turns, must meet the same observations and end
with the same answer. Replaying also proves that the runtime accepts every block.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coa.collect import OnDone
from coa.distill.convert import NotConvertible, convert
from coa.engines.scripted import ScriptedEngine
from coa.protocol import Grammar
from coa.protocol.prompt import PromptKind
from coa.rewards import Scorer, auto
from coa.runs import Json, dumps, write_atomic
from coa.runtime import Budget, run
from coa.tasks.task import Task
from coa.teachers.episode import Episode
from coa.tools.base import Toolbox
from coa.trajectory import Trajectory, save_trajectories

_GENEROUS = Budget(turns=64, tokens=1 << 20, turn_tokens=1 << 20, context=1 << 22)


@dataclass(frozen=True)
class Distilled:
    """What was kept, what was not and why."""

    kept: list[Trajectory]
    rejected: list[Json]
    funnel: Json


async def distill(
    episodes: Sequence[Episode],
    grammar: Grammar,
    toolbox_of: Callable[[Task], Toolbox],
    tasks: Mapping[str, Task] | None = None,
    *,
    prompt: PromptKind = "compact",
    scorer: Scorer = auto,
    on_done: OnDone | None = None,
) -> Distilled:
    """Convert and check each episode. Without `tasks` the answers cannot be judged and are kept."""
    kept: list[Trajectory] = []
    rejected: list[Json] = []
    for count, episode in enumerate(episodes, start=1):
        public = Task(episode.question, id=episode.task_id, meta=episode.meta)
        toolbox = toolbox_of(public)
        bound = toolbox.bind(grammar)
        try:
            trajectory = convert(episode, bound, prompt)
            if tasks is not None:
                _judge(trajectory, tasks, scorer)
            await _replay(trajectory, public, bound, toolbox)
        except NotConvertible as reason:
            rejected.append({"task_id": episode.task_id, "reason": str(reason)})
        else:
            kept.append(trajectory)
        if on_done:
            on_done(count, len(episodes))
    return Distilled(kept, rejected, _funnel(len(episodes), kept, rejected))


def _judge(trajectory: Trajectory, tasks: Mapping[str, Task], scorer: Scorer) -> None:
    task = tasks.get(trajectory.task_id)
    if task is None:
        raise NotConvertible("its task is not in the task file")
    if scorer(task, trajectory) != 1.0:
        raise NotConvertible("wrong answer")


async def _replay(trajectory: Trajectory, task: Task, grammar: Grammar, toolbox: Toolbox) -> None:
    """Run the student's loop over the same turns; it must arrive at the same text."""
    turns = [step.model.text for step in trajectory.steps]
    again = await run(task, ScriptedEngine(turns), grammar, toolbox, budget=_GENEROUS)
    if again.answer != trajectory.answer or again.text != trajectory.text:
        ended = f"{again.stop}: {again.error}" if again.error else str(again.stop)
        raise NotConvertible(f"does not replay ({ended})")


def _funnel(count: int, kept: list[Trajectory], rejected: list[Json]) -> Json:
    reasons = Counter(record["reason"] for record in rejected)
    corrected = sum(any(s.errs for s in t.segments) for t in kept)
    return {
        "episodes": count,
        "kept": len(kept),
        "kept_with_corrected_error": corrected,
        "rejected": dict(reasons.most_common()),
    }


def save_distilled(directory: Path, distilled: Distilled) -> None:
    """Write trajectories.jsonl, rejected.jsonl and funnel.json."""
    save_trajectories(directory / "trajectories.jsonl", distilled.kept)
    write_atomic(directory / "rejected.jsonl", "".join(dumps(r) + "\n" for r in distilled.rejected))
    write_atomic(directory / "funnel.json", json.dumps(distilled.funnel, indent=2) + "\n")
