"""Every preset learns: a policy of two tokens, and an observation between them, as a table.

The reward is 1 for the pair (2, 0). The second choice sees the first. Sampling, advantages, several
updates of a batch in parts, and, for PPO, a value for each state: the order in which a trainer
calls these functions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from coa.train.experience import group_advantages  # noqa: E402
from coa.train.losses import (  # noqa: E402
    PolicyTokens,
    Totals,
    gae,
    policy_loss,
    value_loss,
    whiten,
)
from coa.train.settings import PRESETS, preset  # noqa: E402

CHOICES, ROLLOUTS, GROUP, UPDATES = 3, 64, 8, 60
START = CHOICES
"""The state before the first token; those after it are its choices."""
SEQUENCE = torch.arange(ROLLOUTS).repeat_interleave(3)
WEIGHTS = torch.tensor([1.0, 0.0, 1.0]).repeat(ROLLOUTS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_learns(name: str) -> None:
    make = torch.Generator().manual_seed(0)
    settings = preset(name)
    if settings.normalise == "constant":
        settings = replace(settings, constant_length=2)
    table = torch.zeros(START + 1, CHOICES, requires_grad=True)
    values = torch.zeros(START + 1, requires_grad=True)
    frozen = torch.full((CHOICES,), -torch.log(torch.tensor(float(CHOICES))))
    optimizer = torch.optim.Adam([table, values], lr=0.1)
    passed = []
    for _ in range(UPDATES):
        chances = torch.softmax(table.detach(), dim=-1)
        first = torch.multinomial(chances[START].expand(ROLLOUTS, -1), 1, generator=make)[:, 0]
        second = torch.multinomial(chances[first], 1, generator=make)[:, 0]
        rewards = ((first == 2) & (second == 0)).float()
        passed.append(float(rewards.mean()))
        states = torch.stack([torch.full_like(first, START), first, first], dim=1).flatten()
        ids = torch.stack([first, torch.zeros_like(first), second], dim=1).flatten()
        old_values = values.detach()[states]
        if settings.baseline == "value":
            placed = torch.zeros(len(SEQUENCE))
            placed[2::3] = rewards
            seen = gae(placed, old_values, WEIGHTS, SEQUENCE, settings.gamma, settings.lam)
            returns, advantages = seen.returns, whiten(seen.advantages, WEIGHTS)
        else:
            groups = [at // GROUP for at in range(ROLLOUTS)]
            given = group_advantages(rewards.tolist(), groups, settings.baseline, settings.scale)
            advantages = torch.tensor([value or 0.0 for value in given])[SEQUENCE]
        logs = torch.log_softmax(table.detach(), dim=-1)[states, ids]
        tokens = PolicyTokens(
            WEIGHTS, SEQUENCE, advantages, old=logs, sampled=logs, reference=frozen[ids]
        )
        totals = Totals.of(WEIGHTS, SEQUENCE)
        for _ in range(2):
            optimizer.zero_grad()
            for part in (SEQUENCE < 20, SEQUENCE >= 20):
                fields = ("weights", "sequence", "advantages", "old", "sampled", "reference")
                taken = PolicyTokens(**{f: getattr(tokens, f)[part] for f in fields})
                new = torch.log_softmax(table, dim=-1)[states[part], ids[part]]
                policy_loss(new, taken, settings, totals).loss.backward()
                if settings.baseline == "value":
                    new_values, old = values[states[part]], old_values[part]
                    learnt = value_loss(new_values, returns[part], old, taken, settings, totals)
                    (settings.value_weight * learnt).backward()
            optimizer.step()
    assert sum(passed[:3]) / 3 < 0.3 and sum(passed[-3:]) / 3 > 0.9, passed
