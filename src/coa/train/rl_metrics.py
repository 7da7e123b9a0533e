"""What one update of RL did, as one flat record for metrics.jsonl. Nothing here reads a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import get_args

from coa.protocol import parse
from coa.rewards import mean_parts
from coa.runs import Json
from coa.train.experience import Experience
from coa.train.groups import Drawn, LeftOut
from coa.train.learner import Step
from coa.train.losses import PolicyMetrics
from coa.trajectory import Author, StopReason, Trajectory


def rollout_record(drawn: Drawn) -> Json:
    """Of all rollouts that were drawn, used or not: every one counts."""
    pairs = [
        pair
        for group in drawn.all
        for pair in zip(group.trajectories, group.scores, group.scored, strict=True)
    ]
    trajectories = [trajectory for trajectory, _, _ in pairs]
    judged = [score for _, score, _ in pairs if score is not None]
    n = max(1, len(pairs))
    lengths = [t.usage.sampled_tokens for t in trajectories] or [0]
    record: Json = {
        "reward": fmean(judged) if judged else None,
        "pass_rate": fmean(score >= 1.0 for score in judged) if judged else None,
        "environment_rate": sum(t.failed_outside for t in trajectories) / n,
        **drawn.account(),
        "length_mean": fmean(lengths),
        "length_max": max(lengths),
        "turns": sum(t.usage.turns for t in trajectories) / n,
        "tool_calls": sum(t.usage.tool_calls for t in trajectories) / n,
        "answered_rate": sum(t.stop is StopReason.ANSWERED for t in trajectories) / n,
        "malformed_rate": sum(t.usage.malformed > 0 for t in trajectories) / n,
        "truncated_rate": sum(t.truncated for t in trajectories) / n,
        "agents": agent_shares(trajectories),
    }
    if len(parts := mean_parts([scored for _, _, scored in pairs])) > 1:
        record["parts"] = {name: part["mean"] for name, part in parts.items()}
    return record


def learning_record(
    experience: Experience, steps: Sequence[Step], metrics: Sequence[PolicyMetrics]
) -> Json:
    """Of the rows that were trained on; without any step only their number."""
    rows = [sample.row for sample in experience.samples]
    record: Json = {
        "rows": len(rows),
        "tokens": sum(len(row.ids) for row in rows),
        "trained_tokens": sum(row.trained for row in rows),
        "left_out": {reason: experience.left_out[reason] for reason in get_args(LeftOut)},
    }
    if steps and metrics:
        record |= {"loss": fmean(step.loss for step in steps)}
        record |= {"grad_norm": max(step.grad_norm for step in steps), "lr": steps[-1].lr}
        record |= PolicyMetrics.join(metrics).record()
        del record["weight"]  # trained_tokens, once for every pass
    return record


def agent_shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The share of sampled tokens that each role wrote, its tags included; `none` is outside.

    Tokens of a turn are shared out by characters.
    """
    tokens: Counter[str] = Counter()
    for trajectory in trajectories:
        bound = trajectory.protocol
        for segment in trajectory.segments:
            if segment.author is not Author.MODEL or not segment.text:
                continue
            each = len(segment.ids or ()) / len(segment.text)
            inside = 0
            for block in parse(bound, segment.text).blocks:
                size = block.end - block.start
                tokens[block.role] += each * size  # type: ignore[assignment]
                inside += size
            tokens["none"] += each * (len(segment.text) - inside)  # type: ignore[assignment]
    total = sum(tokens.values()) or 1.0
    return {role: round(count / total, 4) for role, count in sorted(tokens.items())}
