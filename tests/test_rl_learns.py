"""RL with the real trainer learns: from a model that takes either tool to one that takes the right.

Everything but the world is what `coa rl` uses: rollouts through the local engine, groups, rows made
of sampled ids, the loss of a preset, optimiser steps, new weights for the engine.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from coa.engines import load_engine
from coa.environment import Environment
from coa.grammar import check, parse
from coa.io.runs import Run
from coa.loop import Decoding
from coa.rewards import RewardSettings
from coa.rollouts import roll_out_all
from coa.train.groups import Sampler, TaskStream
from coa.train.monitors import open_monitors
from coa.train.policy import make_policy
from coa.train.rl import RlLoop, RlResult, RlUpdater
from coa.train.rl_stage import load_sampler
from coa.train.settings import RlRecipe, RlSettings, RolloutSettings, preset
from toy_tools import (
    GRAMMAR,
    demonstrations,
    imitate,
    make_toy_model,
    mean_reward,
    toy_tasks,
    toy_toolbox,
)

TOY = Environment(
    "toy", tools=lambda task: [*toy_toolbox(task).values()], grammar=GRAMMAR, reward="exact"
)
ROLLOUT = RolloutSettings(turns=4, turn_tokens=24, tokens=64, context=192)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that makes legal calls and takes a tool at random."""
    folder = tmp_path_factory.mktemp("toy")
    model = make_toy_model(folder / "model")
    return f"hf:{model}+{imitate(model, folder / 'sft')}"


def measure(model: str, root: Path, name: str = "test") -> float:
    """Mean reward on tasks that are not trained on, sampled as in training."""
    tasks = toy_tasks(200, name)
    engine = load_engine(model, dtype="float32", slots=64, threads=1)
    decoding = Decoding(temperature=1.0, seed=9)

    async def go() -> float:
        async with TOY.open() as opened:
            found = await roll_out_all(
                tasks, engine, opened, root, budget=ROLLOUT.budget(), decoding=decoding
            )
        await engine.close()
        return mean_reward(found, tasks)

    return asyncio.run(go())


def train(start: str, root: Path, name: str, **settings: Any) -> RlResult:
    """The loop of `coa rl`, with tools that no recipe can name."""
    loss = preset(name, **({"constant_length": ROLLOUT.tokens} if name == "dr_grpo" else {}))
    chosen: dict[str, Any] = {
        "model": start,
        "preset": name,
        "loss": loss,
        "tasks_per_update": 16,
        "group_size": 8,
        "updates": 20,
        "minibatches": 2,
        "lr": 1e-3,
        "dtype": "float32",
        "threads": 1,
        "checkpoint_every": 1000,
    }
    recipe = RlRecipe(out=str(root), rl=RlSettings(**chosen | settings), rollout=ROLLOUT)
    tasks = toy_tasks(640)

    async def go() -> RlResult:
        policy = make_policy(recipe.rl, recipe.rollout.context)
        engine = load_sampler(recipe, policy)
        async with TOY.open(tasks, reward=RewardSettings()) as opened:
            sampler = Sampler(
                TaskStream(tasks, recipe.rl.seed),
                engine,
                opened,
                ROLLOUT.budget(),
                Decoding(temperature=ROLLOUT.temperature, seed=recipe.rl.seed),
                root / "rollouts",
                recipe.rl.group_size,
            )
            updater = RlUpdater(policy, recipe.rl, ROLLOUT.temperature)
            with (
                Run.open(root, "rl", {}, {}, 0, base=policy.base_sha256) as run,
                open_monitors(recipe, root, quiet=True) as monitors,
            ):
                loop = RlLoop(recipe, sampler, updater, run, monitors)
                result = await loop.execute()
        await engine.close()
        return result

    return asyncio.run(go())


def rewards(root: Path) -> list[float]:
    lines = (root / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["reward"] for line in lines]


def test_demonstrations_are_legal_and_mostly_wrong() -> None:
    chains = demonstrations(400)
    faults = [check(GRAMMAR, parse(GRAMMAR, chain.text, env=True)) for chain in chains]
    assert not any(faults)
    assert 0.2 < mean_reward(chains, toy_tasks(400, "shown-0")) < 0.5


@pytest.mark.slow
def test_the_start_makes_legal_calls_and_is_often_wrong(start: str, tmp_path: Path) -> None:
    assert 0.15 < measure(start, tmp_path) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"), [("dapo", 0.9), ("dr_grpo", 0.8), ("rloo", 0.8), ("ppo", 0.8)]
)
def test_rl_learns_which_tool_to_call(name: str, least: float, start: str, tmp_path: Path) -> None:
    result = train(start, tmp_path / "rl", name)
    seen = rewards(tmp_path / "rl")
    base = start.partition("+")[0]
    reached = measure(f"{base}+{result.adapter}", tmp_path / "measured")
    assert sum(seen[:3]) / 3 < 0.5 and reached > least, (reached, seen)
