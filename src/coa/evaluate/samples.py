"""What several samples of a task are worth together: pass@k, the mean, a vote, the best of them.

All of it is decided from the samples of an evaluation, once they are judged. Nobody who chooses
between samples sees gold: a vote counts answers, and `best_of` goes by ratings that were given
without it. The reward has judged the sample that is chosen, so nothing is judged twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coa.distill.chain import Chain
from coa.estimates import Estimate, estimate
from coa.protocol import alternatives, parse_score
from coa.rewards import normalise, reward_for
from coa.runs import Json
from coa.tasks.task import Task
from coa.trajectory import Trajectory

OWN_CHECK = "double_check"
"""What `best_of` goes by unless something else is asked for."""
RIGHT = 1.0 - 1e-9
"""The score from which a sample counts as solved: all of it, whatever sums of weights round to."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout of a task with what the reward says of it."""

    trajectory: Trajectory
    score: float
    rating: float | None = None
    """What whoever chooses between samples says of it, without gold; None: nothing."""

    @property
    def answered(self) -> bool:
        return bool((self.trajectory.answer or "").strip())


def pass_at(n: int, right: int, k: int) -> float:
    """The chance that k of n samples, of which so many are right, hold a right one."""
    assert 0 <= right <= n and 1 <= k <= n, (n, right, k)
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def depths(n: int) -> list[int]:
    """The k of pass@k for n samples: 1, 2, 4, ... and n itself."""
    return sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})


def majority(task: Task, samples: Sequence[Sample]) -> Sample:
    """The first sample that gives the most frequent answer; of equally frequent ones the first.

    Samples without an answer do not vote; when nobody does, it is the first sample.
    """
    ballots = [(_ballot(task, sample), sample) for sample in samples if sample.answered]
    votes = Counter(ballot for ballot, _ in ballots)
    return max(ballots, key=lambda each: votes[each[0]], default=((), samples[0]))[1]


def _ballot(task: Task, sample: Sample) -> tuple[str, ...]:
    """The answer as it is counted: alternatives in any order; a program as it stands."""
    answer = (sample.trajectory.answer or "").strip()
    if reward_for(task) == "tests":
        return (answer,)
    return tuple(sorted({normalise(part) or part for part in alternatives(answer)})) or (answer,)


def best_of(samples: Sequence[Sample]) -> Sample:
    """The sample that is rated highest among those with an answer; of equals the first."""
    answered = [sample for sample in samples if sample.answered] or samples
    return max(answered, key=lambda sample: -math.inf if (r := sample.rating) is None else r)


def own_check(chain: Chain) -> int | None:
    """The score that the model's own check gave to its last suggestion; None if it was not checked,
    or where the grammar has no checks."""
    score = None
    for block in chain.blocks:
        kind = chain.kind(block)
        if kind == "suggestion":
            score = None
        elif kind == "check":
            score = parse_score(block.body)
    return score


def sample_figures(
    tasks: Sequence[Task], samples: Mapping[str, Sequence[Sample]], chosen_by: str
) -> Json:
    """pass_at, avg_at_k, majority and best_of over all tasks; one that was never tried has 0."""
    most = max(map(len, samples.values()), default=0)
    tried = [(task, samples[task.id]) for task in tasks]

    def passed(own: Sequence[Sample], k: int) -> float:
        right = sum(sample.score >= RIGHT for sample in own)
        return pass_at(len(own), right, min(k, len(own))) if own else 0.0

    rated = any(sample.rating is not None for own in samples.values() for sample in own)
    mean = estimate([sum(s.score for s in own) / max(1, len(own)) for _, own in tried])
    voted = estimate([majority(task, own).score if own else 0.0 for task, own in tried])
    best = estimate([best_of(own).score if own else 0.0 for _, own in tried])
    return {
        "pass_at": {
            str(k): shown(estimate([passed(own, k) for _, own in tried])) for k in depths(most)
        },
        "avg_at_k": shown(mean),
        "majority": shown(voted),
        "best_of": {"by": chosen_by if rated else "first", **shown(best)},
    }


def shown(found: Estimate) -> Json:
    """A proportion as files have it."""
    return {"value": round(found.value, 4), "ci95": [round(found.low, 4), round(found.high, 4)]}
