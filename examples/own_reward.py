"""Rewards of your own: `coa eval --reward "own_reward:short_and_right*format" ...` here."""

from coa import Task, Trajectory
from coa.rewards import exact


def short_and_right(task: Task, trajectory: Trajectory) -> float | None:
    """Right answers count less the more tools they needed; None means that it cannot judge."""
    right = exact(task, trajectory)
    if right is None:
        return None
    return right / max(1, trajectory.usage.tool_calls)


async def unhurried(task: Task, trajectory: Trajectory) -> float:
    """A coroutine may wait for something, a server of yours for instance, while others go on."""
    return float(trajectory.usage.turns > 0)


if __name__ == "__main__":
    task = Task("What is the capital of Peru?", answers=("Lima",))
    done = Trajectory(task.id, task.question, "mhqa", answer="Lima")
    done.usage.tool_calls = 2
    print(short_and_right(task, done))
