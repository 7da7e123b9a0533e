"""Gold answers score 1.0 on every task set, in every accepted wording; wrong ones do not."""

from __future__ import annotations

import pytest

from coa.environment import open_environments
from coa.environments import GYM, make_tasks
from coa.environments.atlas.catalogues import CATALOGUES
from coa.environments.atlas.tasks import SPLITS as ATLAS_SPLITS
from coa.environments.atlas.tasks import families_of
from coa.environments.gym.tasks import GENERATORS
from coa.environments.gym.tasks import SPLITS as GYM_SPLITS
from coa.rewards import RewardSettings
from coa.rollouts import choose_environments
from coa.tasks import Task, TaskSet
from coa.trajectory import Trajectory

SPLITS = [
    (name, split)
    for name, catalogue in CATALOGUES.items()
    for split in ATLAS_SPLITS
    if families_of(split, catalogue)
]


def answered(task: Task, answer: str | None) -> tuple[Task, Trajectory]:
    return task, Trajectory(task.id, task.question, "mhqa", answer=answer)


async def check(tasks: TaskSet, reward: str) -> None:
    given = [answered(task, answer) for task in tasks for answer in task.answers]
    assert len(given) >= len(tasks)
    environments, tasks = choose_environments((), tasks)
    how = RewardSettings()
    async with open_environments(environments, tasks, reward=how, dry=True) as opened:
        assert opened.reward_name == reward
        found = await opened.score_all(given)
        wrong = [
            (task, trajectory.answer)
            for (task, trajectory), each in zip(given, found, strict=True)
            if each.score != 1.0
        ]
        assert not wrong, wrong[:3]
        blank = await opened.score_all(answered(task, None) for task in tasks)
        assert {each.score for each in blank} == {0.0}
        other = await opened.score_all(answered(task, "no such thing") for task in tasks)
        assert all(each.score is not None and each.score < 1.0 for each in other)


@pytest.mark.parametrize(("name", "split"), SPLITS)
@pytest.mark.parametrize("world", [0, 7])
async def test_gold_scores_1_on_the_atlas(name: str, split: str, world: int) -> None:
    await check(make_tasks(name, split, 150, seed=11, world_seed=world), "exact")


@pytest.mark.parametrize("split", GYM_SPLITS)
async def test_gold_scores_1_on_every_generator_of_the_gym(split: str) -> None:
    pytest.importorskip("reasoning_gym")
    wanted = {name for name, each in GENERATORS.items()}
    wanted = {n for n in wanted if GENERATORS[n].held_out == (split == "heldout_generator")}
    tasks = make_tasks(GYM, split, 5 * len(wanted), seed=11)
    assert {task.meta["family"] for task in tasks} == wanted
    await check(tasks, "gym")
