"""What RL trains is what was sampled: every row of an update of 200 rollouts with observations.

The start is fine-tuned just enough to call its tools; its rollouts are hot, so that many are odd.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coa.distillation.convert import convert  # noqa: E402
from coa.engines.base import Completion, OnText, Sampling  # noqa: E402
from coa.engines.local import LocalEngine  # noqa: E402
from coa.environment import Environment, load_environment, open_environments  # noqa: E402
from coa.environments import make_tasks  # noqa: E402
from coa.grammar import load_grammar  # noqa: E402
from coa.loop import Budget, Decoding  # noqa: E402
from coa.rewards import RewardSettings  # noqa: E402
from coa.tasks import Task  # noqa: E402
from coa.train.experience import compute_before_update, experience_of, sampled_logprobs  # noqa: E402
from coa.train.groups import Drawn, Sampler, TaskStream  # noqa: E402
from coa.train.policy import Policy, make_policy  # noqa: E402
from coa.train.processes import Processes  # noqa: E402
from coa.train.rl import RlUpdater  # noqa: E402
from coa.train.rows import build_row  # noqa: E402
from coa.train.settings import RlSettings, RolloutSettings, SftSettings  # noqa: E402
from coa.train.sft import run_sft  # noqa: E402
from coa.trajectory import Author  # noqa: E402
from scripts import TOOLBOX_OF, episodes_of  # noqa: E402
from toy_tools import GRAMMAR, imitate, make_toy_model, toy_tasks, toy_toolbox  # noqa: E402

TEMPERATURE = 1.0
FAMILIES = ("country_capital", "country_currency", "city_country")
SETTINGS = RlSettings(group_size=4, tasks_per_update=50, passes=2, updates=1)
ROLLOUT = RolloutSettings(tokens=64)


class Recording(LocalEngine):
    """Notes what it was asked and what it returned: the truth that rows are compared with."""

    def note(self, prompt: list[int], completion: Completion) -> None:
        self.__dict__.setdefault("turns", []).append((prompt, completion))

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        prompt = list(prompt_ids)
        found = await super().generate(prompt_ids, sampling, on_text)
        self.note(prompt, found)
        return found


def check_rows(drawn: Drawn, engine: Recording, policy: Policy) -> dict[str, float]:
    """Check every row of the update against what the engine did; what was met on the way."""
    experience = experience_of(
        drawn.all,
        partial(build_row, codec=policy.codec, max_length=2048),
        SETTINGS,
        RolloutSettings(),
    )
    compute_before_update(experience, policy, None, SETTINGS, TEMPERATURE, Processes())
    rollouts = [t for group in drawn.all for t, _ in group.rollouts]
    assert len(experience.samples) + sum(experience.left_out.values()) == len(rollouts)
    by_prompt: dict[Any, list[Completion]] = {}  # rollouts of a group may write the same
    for prompt, completion in engine.turns:
        by_prompt.setdefault((tuple(prompt), tuple(completion.ids)), []).append(completion)
    widest, observed = 0.0, 0
    for sample in experience.samples:
        row, whole = sample.row, sample.trajectory
        sampled: list[int] = []
        place = 0
        for segment in whole.segments:
            ids = segment.ids or []
            own = row.weights[place : place + len(ids)]
            assert row.ids[place : place + len(ids)] == ids
            if segment.author is Author.MODEL:
                assert own == [1.0] * len(ids)
                said = by_prompt[tuple(row.ids[:place]), tuple(ids)]
                assert any(segment.logprobs == pytest.approx(c.logprobs, abs=1e-6) for c in said)
                sampled += range(place, place + len(ids))
            else:
                assert own == [0.0] * len(ids)
                observed += segment.author is Author.ENV
            place += len(ids)
        assert place == len(row.ids) and sample.trained == sampled and not row.cut
        assert sample.old is not None
        gaps = (sample.old - sampled_logprobs(sample)).abs()
        widest = max(widest, float(gaps.max()))
    return {"widest": widest, "observed": observed, "rows": len(experience.samples)}


async def draw(
    engine: Recording,
    policy: Policy,
    tasks: list[Task],
    root: Path,
    env: Environment,
    budget: Budget,
) -> Drawn:
    await engine.load(policy.adapter(), "update-0")
    async with open_environments((env,), tasks, reward=RewardSettings("exact")) as opened:
        sampler = Sampler(
            TaskStream(tasks, 0),
            engine,
            opened,
            budget,
            Decoding(temperature=TEMPERATURE, seed=1),
            directory=root,
            group_size=4,
        )
        drawn = await sampler.draw(1, 0, 50, refills=0)
    await engine.close()
    return drawn


def test_every_row_of_an_update_of_200_rollouts_is_what_the_engine_sampled(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    model = make_toy_model(tmp_path / "model")
    adapter = imitate(model, tmp_path / "sft", count=1600)
    policy = Policy(f"hf:{model}+{adapter}", max_length=256)
    engine = Recording(f"hf:{model}", dtype="float32", slots=64, context=192, threads=1)
    budget = Budget(turns=4, turn_tokens=24, tokens=64, context=192)
    env = Environment("toy", tools=lambda task: [*toy_toolbox(task).values()], grammar=GRAMMAR)
    drawn = asyncio.run(draw(engine, policy, toy_tasks(50), tmp_path / "rollouts", env, budget))
    found = check_rows(drawn, engine, policy)
    assert found["rows"] == 200 and found["widest"] < 1e-4
    assert found["observed"] > 200, "most rollouts have observations, some several"
    lively = any(not group.flat for group in drawn.all)
    experience = experience_of(drawn.all, partial(build_row, codec=policy.codec), SETTINGS, ROLLOUT)
    steps, metrics = RlUpdater(policy, SETTINGS, TEMPERATURE).update(experience, 0)
    assert lively and len(steps) == 2
    assert metrics[0]["sampler_gap_max"] < 1e-4 and metrics[0]["ratio_max"] < 1 + 1e-3


@pytest.mark.slow
def test_the_same_with_the_real_model_and_the_atlas(tmp_path: Path) -> None:
    adapter = taught(tmp_path / "sft")
    policy = Policy(f"smollm2-135m+{adapter}", max_length=1024)
    engine = Recording("smollm2-135m", dtype="float32", slots=64, context=1024)
    tasks = list(make_tasks("atlas-mhqa", "train", 50, 2, families=FAMILIES))
    budget = Budget(turns=4, turn_tokens=96, tokens=224, context=1024)
    env = load_environment("atlas-mhqa")
    drawn = asyncio.run(draw(engine, policy, tasks, tmp_path / "rollouts", env, budget))
    found = check_rows(drawn, engine, policy)
    assert found["rows"] == 200 and found["observed"] > 100, found
    assert found["widest"] < 1e-4, found


def taught(root: Path) -> Path:
    """The real model, fine-tuned for two minutes on what the experts do: it calls its tools."""
    settings = SftSettings(rank=16, lr=1e-3, batch_size=4, max_length=1024, checkpoint_every=1000)
    policy = make_policy(settings)
    tasks = make_tasks("atlas-mhqa", "train", 128, 1, families=FAMILIES)
    bound = TOOLBOX_OF(Task("any")).bind(load_grammar("mhqa"))
    chains = [convert(episode, bound) for episode in episodes_of(tasks)]
    rows = list(map(partial(build_row, codec=policy.codec, max_length=1024), chains))
    return run_sft(settings, rows, root, policy=policy).adapter
