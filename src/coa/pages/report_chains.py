"""Which chains a report shows: some of every outcome, and of the same tasks in all runs.

A report with every chain of every run would be too large to send, and nobody would read it. Each
turn takes, of every run and outcome, the next task that is not chosen yet, with the chains that all
runs have of it, so that two of them can be read side by side. The page says how many there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from coa.distill.chain import Chain
from coa.pages.chains import draw_chain, looks_of, record_of
from coa.pages.report_evaluation import Evaluation
from coa.pages.view import shown
from coa.runs import Json
from coa.trajectory import Author, StopReason

OUTCOMES = {
    "right at once": "scored 1, without going back",
    "recovered": "scored 1 after a reflection, a low check or a malformed turn led to another try",
    "partly right": "scored more than 0 and less than 1",
    "wrong": "answered, and scored 0",
    "cut": "a budget ended it, and it scored 0",
    "malformed": "broke the grammar too often, and scored 0",
    "failed outside": "a tool or the engine ended it, not the model",
    "not scored": "answered, and no score of it is here",
}
"""How a chain can end -> what that means."""
LONGEST, _END = 6_000, 200
"""Characters of an observation that are shown, and how many of them are its last ones."""
MOST_TEXT = 6_000_000
"""Characters of all chains together: about a tenth of it is left in the file."""
_LOW_CHECK = 2
_RIGHT = 1.0 - 1e-9


@dataclass
class Selection:
    """The chains of a page, and of how many they were chosen."""

    entries: list[Json] = field(default_factory=list)
    """One for each chain, for the list: task, run, question, answers, outcome."""
    records: list[Json] = field(default_factory=list)
    looks: dict[str, Json] = field(default_factory=dict)
    counts: list[dict[str, int]] = field(default_factory=list)
    """For each run: outcome -> how many rollouts ended so, shown or not."""

    @property
    def total(self) -> int:
        return sum(sum(each.values()) for each in self.counts)


def outcome_of(chain: Chain, score: float | None) -> str:
    """How a chain ended, in one of `OUTCOMES`; without a score only what its stop says."""
    trajectory = chain.trajectory
    if trajectory.failed_outside:
        return "failed outside"
    if score is not None and score >= _RIGHT:
        went_back = chain.turning_point(_LOW_CHECK) or trajectory.usage.malformed
        return "recovered" if went_back else "right at once"
    if score:
        return "partly right"
    if trajectory.stop is StopReason.MALFORMED:
        return "malformed"
    if trajectory.truncated:
        return "cut"
    return "wrong" if score is not None else "not scored"


def select(runs: Sequence[Evaluation], most: int) -> Selection:
    """Choose at most `most` chains."""
    made = Selection()
    outcomes = [_outcomes(run) for run in runs]
    for run, ended in zip(runs, outcomes, strict=True):
        count: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        for chain in run.chains:
            count[ended[_key(chain)]] += 1
        made.counts.append({name: total for name, total in count.items() if total})
    written = 0
    for task_id in _tasks_in_turn(runs, outcomes):
        chosen = [
            (at, run.by_task[task_id]) for at, run in enumerate(runs) if task_id in run.by_task
        ]
        written += sum(_length(chain) for _, chain in chosen)
        if len(made.entries) + len(chosen) > most or (made.entries and written > MOST_TEXT):
            break
        for at, chain in chosen:
            _add(made, runs[at], at, chain, outcomes[at][_key(chain)])
    return made


def _key(chain: Chain) -> tuple[str, int]:
    return chain.trajectory.task_id, chain.trajectory.sample


def _outcomes(run: Evaluation) -> dict[tuple[str, int], str]:
    return {_key(each): outcome_of(each, run.scores.get(_key(each))) for each in run.chains}


def _tasks_in_turn(
    runs: Sequence[Evaluation], outcomes: Sequence[Mapping[tuple[str, int], str]]
) -> Iterator[str]:
    """Each task once: one of every run and outcome, then the next of each."""
    queues: dict[tuple[str, int], list[str]] = defaultdict(list)
    for at, run in enumerate(runs):
        for task_id, chain in run.by_task.items():
            queues[outcomes[at][_key(chain)], at].append(task_id)
    order = {name: place for place, name in enumerate(OUTCOMES)}
    ordered = [queues[key] for key in sorted(queues, key=lambda key: (order[key[0]], -key[1]))]
    seen = set[str]()
    for turn in zip_longest(*ordered):
        for task_id in turn:
            if task_id is not None and task_id not in seen:
                seen.add(task_id)
                yield task_id


def _shortened(text: str) -> str:
    """Without its middle, if it is very long: beginning and end have the tags."""
    if (more := len(text) - LONGEST) <= _END:
        return text
    return f"{text[: LONGEST - _END]} ... ({more:,} characters left out) ... {text[-_END:]}"


def _length(chain: Chain) -> int:
    texts = (
        min(len(segment.text), LONGEST) if segment.author is Author.ENV else len(segment.text)
        for segment in chain.trajectory.segments
    )
    return sum(texts)


def _add(made: Selection, run: Evaluation, at: int, chain: Chain, outcome: str) -> None:
    trajectory = chain.trajectory
    for segment in trajectory.segments:
        if segment.author is Author.ENV:
            segment.text = _shortened(segment.text)
    task = run.tasks.get(trajectory.task_id)
    meta = {**(task.meta if task else {}), **trajectory.meta}
    score = run.scores.get(_key(chain))
    drawn = draw_chain(trajectory)
    made.looks |= looks_of(drawn.grammar)
    made.records.append(record_of(drawn, score))
    made.entries.append(
        {
            "task": trajectory.task_id,
            "run": at,
            "question": trajectory.question,
            "answer": trajectory.answer,
            "gold": list(task.answers) if task else None,
            "score": score,
            "outcome": outcome,
            "family": shown(meta.get("family", meta.get("kind", ""))),
            "tokens": trajectory.usage.total_tokens,
            "calls": trajectory.usage.tool_calls,
        }
    )
