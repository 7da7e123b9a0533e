"""`gym-code`: problems of reasoning-gym's generators, solved with programs and judged by the
generators' own verifiers.
"""

from __future__ import annotations

from coa.environment import Environment, Terms
from coa.tasks import Task, TaskSet
from coa.tools.sources import sandbox_tools
from coa.trajectory import Trajectory

TERMS = Terms("Questions of `gym-code` are made by reasoning-gym (Apache-2.0).")
GROUPS = ("family", "level")
SPLITS = {"train": "train", "test": "heldout_seed"}


def verified(task: Task, trajectory: Trajectory) -> float | None:
    """What the verifier of the task's own generator says; other tasks it cannot judge."""
    from coa.environments.gym.tasks import score

    return score(task, trajectory.answer)


verified.__name__ = "gym"  # what it is called in runs


def gym(
    name: str, grammar: str = "", n: int = 200, seed: int = 0, families: str = ""
) -> Environment:
    """Problems for programs. `n`, `seed` and `families` say which tasks it makes."""

    def tasks(split: str) -> TaskSet:
        from coa.environments import make_tasks

        chosen = [each.strip() for each in families.split(",") if each.strip()] or None
        return make_tasks(name, SPLITS.get(split, split), n, seed, families=chosen)

    return Environment(
        name,
        tools=[sandbox_tools()],
        grammar=grammar or "code",
        tasks=tasks,
        reward=verified,
        teacher="experts",
        groups=GROUPS,
        terms=TERMS,
        settings={"grammar": grammar},
    )
