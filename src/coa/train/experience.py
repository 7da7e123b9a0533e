"""The rollouts of an update as training samples: rows, rewards, advantages and old logprobs.

The order is: rows and rewards of every group; then, where the loss needs them, what the policy, its
reference and the value head say before the update; then advantages. What is left out on the way
is counted by reason. All processes hold the same samples and compute the same advantages; only the
forward passes are shared out.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coa.errors import TrainingError
from coa.train.groups import Group, LeftOut
from coa.train.losses import PolicyTokens, Totals, gae, kl_estimate, whiten
from coa.train.optimizer import Predictions, balanced_share, micro_batches
from coa.train.policy import Policy, ValueHead
from coa.train.processes import Processes
from coa.train.rows import Row
from coa.train.settings import Baseline, RlLossSettings, RlSettings, RolloutSettings, Scale
from coa.trajectory import StopReason, Trajectory


def group_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    baseline: Baseline = "group",
    scale: Scale = "group",
    epsilon: float = 1e-6,
) -> list[float | None]:
    """reward - baseline, over the standard deviation (of a sample, n - 1) + epsilon.

    None stays None. So does, where the rewards of a group are compared, one that is alone in its
    group, and with the scale `batch` one that is alone in the batch.
    """
    assert len(rewards) == len(groups), (len(rewards), len(groups))
    assert baseline != "value", "advantages over a value head are gae()"
    members: dict[Hashable, list[float]] = {key: [] for key in groups}
    for at, (reward, key) in enumerate(zip(rewards, groups, strict=True)):
        if reward is None:
            continue
        if not math.isfinite(reward):
            raise TrainingError(
                f"Reward {at} (group {key!r}) is {reward}; expected a finite number, or None where "
                "it cannot be judged."
            )
        members[key].append(float(reward))
    judged = [reward for found in members.values() for reward in found]
    if not judged:
        raise TrainingError(
            f"None of {len(rewards)} rewards could be judged; there is nothing to learn from. "
            "Look at the reward, or at its judge."
        )
    compared = baseline in ("group", "leave_one_out") or scale == "group"
    deviations = {key: _deviation(found) for key, found in members.items()}
    batch_deviation = _deviation(judged)

    def advantage(reward: float | None, key: Hashable) -> float | None:
        found = members[key]
        alone = (compared and len(found) < 2) or (scale == "batch" and len(judged) < 2)
        if reward is None or alone:
            return None
        if baseline == "group":
            centred = _minus_mean(reward, found)
        elif baseline == "leave_one_out":
            centred = _minus_mean(reward, found) * len(found) / (len(found) - 1)
        else:
            centred = _minus_mean(reward, judged) if baseline == "batch" else reward
        if scale == "none" or centred == 0.0:
            return centred
        return centred / ((deviations[key] if scale == "group" else batch_deviation) + epsilon)

    return [advantage(reward, key) for reward, key in zip(rewards, groups, strict=True)]


def _minus_mean(reward: float, found: Sequence[float]) -> float:
    """Exactly 0 where all are the same: dividing by epsilon would show rounding."""
    return 0.0 if max(found) == min(found) else reward - statistics.fmean(found)


def _deviation(found: Sequence[float]) -> float:
    return statistics.stdev(found) if len(found) > 1 else 0.0


def overlong_penalty(length: int, limit: int, buffer: float, penalty: float = 1.0) -> float:
    """What is added to the reward of an answer that comes near to its limit: 0 or negative.

    0 up to (1 - buffer) of the limit, then linear, -penalty at the limit and beyond (DAPO,
    equation 13). `buffer` is a share: DAPO's own is 0.2, that of the paper's code agent 0.125.
    """
    assert limit > 0 and 0 <= buffer < 1, (limit, buffer)
    room = limit * buffer
    if room == 0:
        return 0.0
    return -penalty * min(1.0, max(0.0, (length - (limit - room)) / room))


def length_penalty(
    trajectory: Trajectory, length: int, loss: RlLossSettings, limits: RolloutSettings
) -> float:
    """The overlong penalty of a chain of so many tokens, by the limit that it is nearest to.

    Where the context cut it, it is at that limit, also if an observation did not fit and so is not
    there. Turns are no length, and a turn that was too long says nothing about the chain's.
    """
    cut_by = trajectory.meta.get("cut_by", trajectory.stop)
    whole = limits.context if cut_by == StopReason.CONTEXT else length
    sampled = trajectory.usage.sampled_tokens
    buffer, most = loss.overlong_buffer, loss.overlong_penalty
    return min(
        overlong_penalty(sampled, limits.tokens, buffer, most),
        overlong_penalty(whole, limits.context, buffer, most),
    )


@dataclass(slots=True, eq=False)
class TrainingSample:
    """One rollout to learn from. Tensors hold a number for each trained token of the row."""

    number: int
    """Tells its sequence from the others of the batch."""
    group: int
    """Tells its group from the others of the batch."""
    row: Row
    trajectory: Trajectory
    reward: float
    old: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    """The value head's, before the update."""
    advantages: Tensor | None = None
    """None: left out."""
    returns: Tensor | None = None
    trained: list[int] = field(init=False)
    """Places in the row of the tokens that count, found once."""

    def __post_init__(self) -> None:
        self.trained = self.row.places

    @property
    def ids(self) -> list[int]:
        return self.row.ids


@dataclass(slots=True)
class Experience:
    """The samples of one update, and how many rollouts are left out of it, by reason."""

    samples: list[TrainingSample]
    left_out: Counter[LeftOut] = field(default_factory=Counter)

    def leave_out(self, reason: LeftOut, samples: Sequence[TrainingSample]) -> None:
        self.left_out[reason] += len(samples)
        gone = {sample.number for sample in samples}
        self.samples = [sample for sample in self.samples if sample.number not in gone]


def experience_of(
    groups: Sequence[Group],
    make_row: Callable[[Trajectory], Row],
    settings: RlSettings,
    limits: RolloutSettings,
) -> Experience:
    """Rows and rewards of all rollouts; overlong shaping needs to know their limits."""
    found = Experience([])
    number = 0
    for place, group in enumerate(groups):
        for rollout in group.rollouts:
            number += 1
            reason, trajectory = group.left_out(rollout), rollout.trajectory
            if reason is not None:
                found.left_out[reason] += 1
                continue
            assert rollout.score is not None
            row = make_row(trajectory)
            reward = rollout.score + length_penalty(trajectory, len(row.ids), settings.loss, limits)
            found.samples.append(TrainingSample(number, place, row, trajectory, reward))
    return found


def check_judged(groups: Sequence[Group], where: str) -> None:
    """Raise when not one rollout of an update, used or not, has a score: a model that fails is
    recorded, an environment or a judge that fails has to be repaired."""
    pairs = [rollout for group in groups for rollout in group.rollouts]
    if not pairs or any(rollout.score is not None for rollout in pairs):
        return
    outside = [trajectory for trajectory, _ in pairs if trajectory.ended_outside]
    if len(outside) == len(pairs):
        why = (outside[0].error or str(outside[0].stop)).rstrip(".")
        raise TrainingError(
            f"{where}: all {len(pairs)} rollouts were ended by the environment, the first by: "
            f"{why}. Put it right and give the same command again."
        )
    why = next(s.reason for t, s in pairs if s.score is None and not t.ended_outside)
    cut = f", and the environment ended {len(outside)}" if outside else ""
    raise TrainingError(
        f"{where}: none of {len(pairs)} rollouts could be judged{cut} "
        f"({(why or 'no reason given')[:300]}). "
        "They are kept: put the reward or its judge right and give the same command again."
    )


@torch.no_grad()
def compute_before_update(
    experience: Experience,
    policy: Policy,
    value_head: ValueHead | None,
    settings: RlSettings,
    temperature: float,
    processes: Processes,
) -> None:
    """Fill in what is known only before the first step: old logprobs, values, the reference's."""

    def logprobs(hidden: Tensor, targets: Tensor) -> Tensor:
        return policy.logprobs(hidden, targets, temperature)

    wanted: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    if settings.steps_per_update > 1 and settings.loss.old == "trainer":
        wanted["old"] = logprobs
    if value_head is not None:
        wanted["values"] = lambda hidden, targets: value_head.values(hidden)
    if not wanted and not settings.loss.kl:
        return
    own = balanced_share(experience.samples, processes)
    seen: dict[int, dict[str, Tensor]] = {sample.number: {} for sample in own}
    parts = micro_batches(own, settings.micro_tokens, policy.shares_prefixes)
    # All compute equally often: where weights are sharded, a forward is a conversation of all.
    idle = max(processes.gather(len(parts))) - len(parts)

    def compute(figures: Mapping[str, Callable[[Tensor, Tensor], Tensor]]) -> None:
        for part in parts:
            states = Predictions.of(policy, [sample.row for sample in part])
            sizes = [len(sample.trained) for sample in part]
            for name, figure in figures.items():
                values = states.for_each(figure(states.hidden, states.targets))
                pieces = values.float().cpu().split(sizes)
                for sample, piece in zip(part, pieces, strict=True):
                    seen[sample.number][name] = piece
        for _ in range(idle):
            policy.idle()

    if wanted:
        compute(wanted)
    if settings.loss.kl:
        with policy.reference():
            compute({"reference": logprobs})
    everywhere = {n: found for share in processes.gather(seen) for n, found in share.items()}
    for sample in experience.samples:
        for name, values in everywhere[sample.number].items():
            setattr(sample, name, values)


def assign_advantages(experience: Experience, settings: RlSettings) -> None:
    """Give every sample its advantages; leave out those that have nobody to be compared with."""
    if not experience.samples:
        return
    if settings.loss.baseline == "value":
        _advantages_by_value(experience.samples, settings)
    else:
        _advantages_by_group(experience, settings)


def _advantages_by_group(experience: Experience, settings: RlSettings) -> None:
    loss, samples = settings.loss, experience.samples
    rewards = [sample.reward for sample in samples]
    if loss.kl > 0 and loss.kl_place == "reward":
        rewards = [s.reward - float(_kl_penalty(s, loss).sum()) for s in samples]
    found = group_advantages(
        rewards, [s.group for s in samples], loss.baseline, loss.scale, loss.std_epsilon
    )
    for sample, value in zip(samples, found, strict=True):
        if value is not None:
            sample.advantages = torch.full((len(sample.trained),), value)
    experience.leave_out("lonely", [s for s in samples if s.advantages is None])


def _advantages_by_value(samples: Sequence[TrainingSample], settings: RlSettings) -> None:
    loss = settings.loss
    sizes = [len(sample.trained) for sample in samples]
    weights, sequence = torch.ones(sum(sizes)), _by_token(samples, lambda s: s.number)
    rewards = torch.zeros(sum(sizes))  # of a sample on its last token
    rewards[torch.tensor(sizes).cumsum(0) - 1] = torch.tensor([s.reward for s in samples])
    if loss.kl > 0 and loss.kl_place == "reward":
        rewards -= torch.cat([_kl_penalty(sample, loss) for sample in samples])
    values = torch.cat([_known(sample.values) for sample in samples])
    found = gae(rewards, values, weights, sequence, loss.gamma, loss.lam)
    advantages = whiten(found.advantages, weights) if loss.scale == "batch" else found.advantages
    pieces = zip(advantages.split(sizes), found.returns.split(sizes), strict=True)
    for sample, (advantage, returns) in zip(samples, pieces, strict=True):
        sample.advantages, sample.returns = advantage, returns


def _kl_penalty(sample: TrainingSample, loss: RlLossSettings) -> Tensor:
    """What the divergence from the reference takes from the reward of each token. Here k1 is right:
    no gradient passes through, and its mean is the KL."""
    new = sampled_logprobs(sample) if sample.old is None else sample.old
    return loss.kl * kl_estimate(new, _known(sample.reference), loss.kl_estimator)


def sampled_logprobs(sample: TrainingSample) -> Tensor:
    """What the engine computed when it wrote the tokens."""
    assert sample.row.logprobs is not None, f"{sample.row.task_id}: no logprobs of the sampler"
    return torch.tensor([sample.row.logprobs[at] for at in sample.trained])


def _known(values: Tensor | None) -> Tensor:
    assert values is not None, "compute_before_update() or assign_advantages() fills this in"
    return values


def _by_token(samples: Sequence[TrainingSample], of: Callable[[TrainingSample], int]) -> Tensor:
    """A number of each sample, repeated for its trained tokens."""
    return torch.cat([torch.full((len(s.trained),), of(s)) for s in samples])


def policy_tokens(samples: Sequence[TrainingSample], device: torch.device) -> PolicyTokens:
    """What the policy loss must know of the samples' trained tokens, in their order."""
    first = samples[0]
    return PolicyTokens(
        **{name: values.to(device) for name, values in _places(samples).items()},
        advantages=joined(samples, "advantages", device),
        old=None if first.old is None else joined(samples, "old", device),
        sampled=torch.cat([sampled_logprobs(sample) for sample in samples]).to(device),
        reference=None if first.reference is None else joined(samples, "reference", device),
    )


def joined(samples: Sequence[TrainingSample], name: str, device: torch.device) -> Tensor:
    """A tensor of all samples, one after the other."""
    return torch.cat([_known(getattr(sample, name)) for sample in samples]).to(device)


def totals_of(samples: Sequence[TrainingSample]) -> Totals:
    """What the loss of the whole batch is divided by."""
    return Totals.of(**_places(samples))


def _places(samples: Sequence[TrainingSample]) -> dict[str, Tensor]:
    return {
        "weights": torch.tensor([s.row.weights[at] for s in samples for at in s.trained]),
        "sequence": _by_token(samples, lambda s: s.number),
        "group": _by_token(samples, lambda s: s.group),
    }
