"""The RL loop on a tiny model: what it writes, resumes, measures, and refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from coa.engines.base import Completion  # noqa: E402
from coa.engines.local import LocalEngine  # noqa: E402
from coa.environment import Environment  # noqa: E402
from coa.errors import ConfigError, TrainingError  # noqa: E402
from coa.grammar import load_grammar  # noqa: E402
from coa.grammar.load import GrammarBook  # noqa: E402
from coa.io.runs import read_jsonl  # noqa: E402
from coa.models.references import trained_on  # noqa: E402
from coa.models.weights import Adapter  # noqa: E402
from coa.tasks import Task, TaskSet  # noqa: E402
from coa.tools.base import Tool  # noqa: E402
from coa.train.policy import Policy  # noqa: E402
from coa.train.rl import RlResult, digest  # noqa: E402
from coa.train.rl_stage import read_rl_recipe, run_rl  # noqa: E402
from coa.trajectory import StopReason, Trajectory, load_trajectories  # noqa: E402
from coa.view.page import write_page  # noqa: E402
from playing import hang  # noqa: E402
from rl_worker import settings, tiny_tasks, vowels  # noqa: E402

NAMED_BY_THE_ISSUE = (
    *("reward", "pass_rate", "length_mean", "entropy", "kl_old", "kl_reference", "clip_low"),
    *("clip_high", "sampler_gap", "tool_calls", "malformed_rate", "truncated_rate", "agents"),
)


def train(model: Path, out: Path, *more: str) -> RlResult:
    return run_rl(read_rl_recipe(None, settings(model, out, *more)), quiet=True)


def lines(out: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [record for _, record in read_jsonl(out / name)]


def files(out: Path) -> dict[str, bytes]:
    """Everything that a run leaves but what depends on the clock, and checkpoints but the last."""
    older = sorted(out.glob("checkpoints/*"))[:-1]
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
        and path.name not in ("timings.jsonl", ".lock", "manifest.json")
        and not any(path.is_relative_to(folder) for folder in older)
    }


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rl") / "run"
    assert train(tiny_model, out).trained
    return out


def test_every_update_has_the_metrics_that_tell_how_it_goes(finished: Path) -> None:
    records = lines(finished)
    assert [record["update"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert not [name for name in NAMED_BY_THE_ISSUE if name not in record]
        used = record["rows"] + sum(record["left_out"].values())
        assert record["rollouts"] == used + 4 * (record["groups"] - record["groups_used"])
        assert sum(record["agents"].values()) == pytest.approx(1.0, abs=1e-3)
        assert record["sampler_gap_max"] < 1e-4
    timings = [line for line in lines(finished, "timings.jsonl") if "update" in line]
    for line in timings:
        assert {"seconds", "rollout_s", "train_s", "load_s", "tokens_per_s"} <= line.keys()


def test_it_gets_better_at_what_is_rewarded(finished: Path) -> None:
    rewards = [record["reward"] for record in lines(finished)]
    assert rewards[-1] > rewards[0] + 0.2, rewards


def test_every_trajectory_is_kept_with_the_version_of_its_weights(finished: Path) -> None:
    kept = {path.name: load_trajectories(path) for path in (finished / "rollouts").iterdir()}
    for record in lines(finished):
        own = [
            t
            for name, ts in kept.items()
            if name.startswith(f"{record['update']:07d}-")
            for t in ts
        ]
        assert len(own) == record["rollouts"]
        versions = {trajectory.weights for trajectory in own}
        assert len(versions) == 1 and versions.pop().startswith(f"update-{record['update'] - 1}-")


def test_a_run_that_starts_from_a_checkpoint_knows_what_it_was_trained_on(
    tiny_model: Path, finished: Path
) -> None:
    for folder in [finished / "adapter", *finished.glob("checkpoints/*/adapter")]:
        found = trained_on(f"hf:{tiny_model}+{folder}")
        assert GrammarBook.from_json(found.pop("grammars")).names == ["search_r1"]
        home = {"environments": ["search"]}
        assert found == {"grammar": "search_r1", "prompt": "compact"} | home


def test_a_deterministic_run_gives_the_same_files_twice(
    tiny_model: Path, finished: Path, tmp_path: Path
) -> None:
    train(tiny_model, tmp_path / "run")
    assert files(tmp_path / "run") == files(finished)


def test_a_finished_run_says_so_and_trains_nothing(tiny_model: Path, finished: Path) -> None:
    before = files(finished)
    said: list[str] = []
    recipe = read_rl_recipe(None, settings(tiny_model, finished))
    result = run_rl(recipe, note=said.append, quiet=True)
    assert not result.trained and result.updates == 4 and "is finished already" in said[0]
    assert files(finished) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("rl.lr=0.02", r"rl\.lr 0\.01, and it is 0\.02 here"),
        ("rl.preset=grpo", r"rl\.preset 'dapo', and it is 'grpo' here"),
        ("rollout.temperature=0.5", r"rollout\.temperature 1\.0"),
        ("reward.expression=exact", r"reward\.expression"),
        ("tools.passages=5", r"tools\.passages not set, and it is 5 here"),
    ],
)
def test_another_recipe_is_refused_by_the_name_of_the_setting(
    tiny_model: Path, finished: Path, change: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=f"this was started with {named}"):
        train(tiny_model, finished, change)


def test_settings_of_speed_may_change(tiny_model: Path, finished: Path) -> None:
    more = ("rollout.concurrency=3", "rl.checkpoint_every=2", "rl.keep_rollouts=false")
    assert not train(tiny_model, finished, *more).trained


def test_an_older_manifest_that_names_what_is_free_now_is_no_other_run(
    tiny_model: Path, tmp_path: Path
) -> None:
    short = ("rl.updates=1", "rl.deterministic=false", "rl.dtype=float32")
    train(tiny_model, tmp_path / "run", *short)
    manifest = tmp_path / "run" / "manifest.json"
    held = json.loads(manifest.read_text())
    held["recipe"]["rl"] |= {"micro_tokens": 4096, "checkpointing": False}
    manifest.write_text(json.dumps(held))
    less = ("rl.micro_tokens=99", "rl.checkpointing=true")
    assert not train(tiny_model, tmp_path / "run", *short, *less).trained


def test_other_tasks_are_refused(tiny_model: Path, finished: Path, tmp_path: Path) -> None:
    other = tiny_tasks(tmp_path / "other.jsonl", 6)
    with pytest.raises(ConfigError, match="this was started with input tasks"):
        train(tiny_model, finished, f"tasks={other}")


def test_a_batch_in_which_all_earn_the_same_is_recorded_without_a_step(
    tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(tiny_model, out, "reward.expression=test_rl:nothing", "rl.updates=2", "rl.refills=1")
    for record in lines(out):
        assert record["groups_used"] == record["rows"] == 0 and record["groups_flat"] == 6
        assert "loss" not in record and record["reward"] == 0.0
    start = Policy(f"hf:{tiny_model}", rank=4).adapter()
    assert digest(start) == digest(Policy(f"hf:{tiny_model}+{out / 'adapter'}").adapter())


def nothing(task: Any, trajectory: Any) -> float:
    return 0.0


def e_or_nothing(task: Any, trajectory: Trajectory) -> float:
    """Nothing for whoever called: a negative example, if it counted."""
    return 0.0 if trajectory.usage.tool_calls else vowels(task, trajectory)


class CallsAtTimes(LocalEngine):
    """Writes a call instead of what it would in every other rollout."""

    async def generate(self, prompt_ids: Any, sampling: Any, on_text: Any = None) -> Completion:
        if sampling.key % 2:
            return await super().generate(prompt_ids, sampling, on_text)
        ids = self.encode("<think>t</think><search>it</search>")
        return Completion(ids, [-6.0] * len(ids), "stop")


def test_a_tool_that_hangs_past_the_clock_makes_no_negative_example(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as the environment's doing, and the other rollouts train."""
    monkeypatch.setattr("coa.engines.local.LocalEngine", CallsAtTimes)
    tool = Tool("wiki_search", hang, about="Does not come back", pure=True)
    env = Environment("hanging", tools=[tool], grammar=load_grammar("search_r1"))
    out = tmp_path / "run"
    more = ("reward.expression=test_rl:e_or_nothing", "rl.updates=1", "rollout.seconds=1")
    recipe = read_rl_recipe(None, settings(tiny_model, out, *more, "rl.refills=0", "grammar=auto"))
    run_rl(recipe, env=env, quiet=True)
    made = load_trajectories(out / "rollouts" / "0000001-0.jsonl")
    late = [t for t in made if t.stop is StopReason.TIME]
    assert late and {t.task_id for t in made if t.usage.tool_calls} == {t.task_id for t in late}
    (record,) = lines(out)
    assert record["left_out"]["environment"] == len(late)
    assert record["environment_rate"] == len(late) / 12
    assert record["rows"] + sum(record["left_out"].values()) == 12 and record["rows"] > 1
    others = [e_or_nothing(None, t) for t in made if t not in late]
    assert record["reward"] == pytest.approx(sum(others) / len(others)) and record["reward"] > 0


class Judge:
    """A reward that can be out of order."""

    works = True
    asked = 0


def sometimes(task: Any, trajectory: Any) -> float | None:
    Judge.asked += 1
    return len(trajectory.text) % 7 / 7 if Judge.works else None


@pytest.mark.parametrize("refills", [0, 2])
def test_a_judge_that_fails_ends_the_run_and_loses_nothing(
    tiny_model: Path, tmp_path: Path, refills: int
) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    more = ("reward.expression=test_rl:sometimes", f"rl.refills={refills}", "rl.updates=2")
    Judge.works = True
    train(tiny_model, whole, *more)
    Judge.works = False
    with pytest.raises(TrainingError, match=r"Update 1: none of \d+ rollouts could be judged"):
        train(tiny_model, out, *more)
    held = load_trajectories(out / "rollouts" / "0000001-0.jsonl")
    Judge.works = True
    train(tiny_model, out, *more)
    assert load_trajectories(out / "rollouts" / "0000001-0.jsonl") == held
    assert lines(out) == lines(whole)


def test_rollouts_are_thrown_away_only_when_their_update_is_safe(
    tiny_model: Path, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(tiny_model, out, "rl.keep_rollouts=false", "rl.checkpoint_every=3")
    assert list((out / "rollouts").iterdir()) == []
    assert lines(out) == lines(finished)


def test_rollouts_of_the_next_update_are_not_thrown_away(tiny_model: Path, tmp_path: Path) -> None:
    """Another process may be at them while this one still writes a checkpoint."""
    out = tmp_path / "run"
    more = ("reward.expression=test_rl:nothing", "rl.keep_rollouts=false", "rl.updates=1")
    with pytest.raises(TrainingError, match="there is no group to learn from"):
        train(tiny_model, out, *more, "alarms.barren=1")
    following = out / "rollouts" / "0000002-0.1-of-2.jsonl"
    following.touch()
    train(tiny_model, out, *more, "alarms.barren=0")
    assert list(following.parent.iterdir()) == [following]


def checked(tmp_path: Path, *more: str) -> list[str]:
    path = tmp_path / "check.jsonl"
    if not path.is_file():
        tiny_tasks(path, 4, first=50)
    return [f"check.tasks={path}", "check.every=2", *more]


def test_the_best_weights_that_were_measured_are_the_result(
    tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(tiny_model, out, *checked(tmp_path), "check.samples=2", "check.temperature=1.0")
    found = {r["update"]: r["eval_accuracy"] for r in lines(out) if "eval_accuracy" in r}
    assert sorted(found) == [0, 2, 4]
    best = max(found, key=lambda update: (found[update], -update))
    made = json.loads((out / "adapter" / "manifest.json").read_text())
    assert made["updates"] == best and made["eval_accuracy"] == found[best]
    assert files(out / "best") == files(out / "adapter")
    measured = out / "checks" / "update-0000002"
    scores = lines(measured, "scores.jsonl")
    pairs = [(line["task_id"], line["sample"]) for line in scores]
    assert pairs == [(f"t{task}", sample) for task in range(50, 54) for sample in (0, 1)]
    assert write_page(measured, tmp_path / "page.html").total == 8
    mean = sum(line["score"] for line in scores) / 8
    assert found[2] == pytest.approx(mean, abs=1e-4)
    order = [(record["update"], "eval_accuracy" in record) for record in lines(out)]
    assert order == [
        (0, True),
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (4, False),
        (4, True),
    ]


def worse(task: Any, trajectory: Any) -> float:
    """Trained for one thing and measured by its opposite: the start stays the best."""
    text = trajectory.text
    share = text.count("e") / max(1, len(text))
    return share if int(task.id[1:]) < 50 else 1.0 - share


def test_when_it_gets_worse_the_start_is_the_result_unless_the_last_is_wanted(
    tiny_model: Path, tmp_path: Path
) -> None:
    more = [*checked(tmp_path), "reward.expression=test_rl:worse"]
    train(tiny_model, tmp_path / "best", *more)
    made = json.loads((tmp_path / "best" / "adapter" / "manifest.json").read_text())
    assert made["updates"] == 0
    train(tiny_model, tmp_path / "last", *more, "check.keep=last")
    made = json.loads((tmp_path / "last" / "adapter" / "manifest.json").read_text())
    assert made["updates"] == 4


def unjudged_checks(task: Any, trajectory: Any) -> float | None:
    return None if task.id == "t51" else len(trajectory.text) % 7 / 7


def test_an_evaluation_that_cannot_be_judged_is_no_zero(tiny_model: Path, tmp_path: Path) -> None:
    more = [*checked(tmp_path), "reward.expression=test_rl:unjudged_checks"]
    with pytest.raises(TrainingError, match=r"update-0000000: task t51 could not be judged"):
        train(tiny_model, tmp_path / "run", *more)


def full_marks(task: Any, trajectory: Any) -> float:
    return 1.0


def test_a_run_with_nothing_left_to_learn_is_finished_and_stays_so(
    tiny_model: Path, tmp_path: Path
) -> None:
    more = ["reward.expression=test_rl:full_marks", "rl.refills=0", "alarms.barren=2"]
    first = train(tiny_model, tmp_path / "run", *more)
    assert (first.updates, first.trained) == (2, True)
    again = train(tiny_model, tmp_path / "run", *more)
    assert (again.updates, again.trained) == (2, False)
    shutil.rmtree(first.adapter)  # as if it had been killed before this was written
    before = lines(tmp_path / "run")
    resumed = train(tiny_model, tmp_path / "run", *more)
    assert (resumed.updates, resumed.trained) == (2, True)
    assert lines(tmp_path / "run") == before


def test_one_rollout_of_a_task_is_not_taken_for_nothing_to_learn(
    tiny_model: Path, tmp_path: Path
) -> None:
    more = ("rl.preset=ppo", "rl.group_size=1", "rl.updates=3", "alarms.barren=2")
    assert train(tiny_model, tmp_path / "run", *more).updates == 3
    assert all(line["groups_flat"] == 3 and line["rows"] == 3 for line in lines(tmp_path / "run"))


def test_tasks_that_are_trained_on_are_no_measure(tiny_model: Path, tmp_path: Path) -> None:
    both = tiny_tasks(tmp_path / "both.jsonl", 4, first=3)
    with pytest.raises(
        ConfigError, match=r"both\.jsonl: task t3 is in .*tasks\.jsonl, too, and so are 2 of 4"
    ):
        train(tiny_model, tmp_path / "run", f"check.tasks={both}")
    spelled = tmp_path / "spelled.jsonl"
    TaskSet((Task("What is 1 and 1?", ("two", "2"), id="other"),), "spelled").save(spelled)
    with pytest.raises(ConfigError, match=r"task other is in .*tasks\.jsonl, too"):
        train(tiny_model, tmp_path / "run", f"check.tasks={spelled}")


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "gspo", "cispo", "ppo"])
def test_every_preset_runs(tiny_model: Path, tmp_path: Path, preset: str) -> None:
    out = tmp_path / "run"
    train(tiny_model, out, f"rl.preset={preset}", "rl.updates=2", "rl.passes=2", "rl.minibatches=2")
    assert all(0 < record["grad_norm"] < 100 for record in lines(out))
    assert all(record["ratio_max"] > 1 for record in lines(out))


def test_the_learning_rate_rises_and_falls_over_all_steps(tiny_model: Path, tmp_path: Path) -> None:
    more = ("rl.schedule=linear", "rl.warmup=0.5", "rl.minibatches=2", "rl.updates=4")
    train(tiny_model, tmp_path / "run", *more)
    rates = [record["lr"] / 1e-2 for record in lines(tmp_path / "run")]
    assert rates == pytest.approx([0.5, 1.0, 0.75, 0.25])


def test_all_weights_can_be_trained(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(tiny_model, out, "rl.full=true", "rl.lr=1e-3", "rl.updates=2")
    assert all(record["sampler_gap_max"] < 1e-4 for record in lines(out))
    assert (out / "adapter" / "model.safetensors").is_file()


def test_the_version_of_weights_tells_any_from_any() -> None:
    down, up = torch.zeros(2, 3), torch.zeros(3, 2)
    versions = {
        digest(Adapter(1.0, {"a": (down, up)})),
        digest(Adapter(2.0, {"a": (down, up)})),
        digest(Adapter(1.0, {"b": (down, up)})),
        digest(Adapter(1.0, {"a": (down + 1e-7, up)})),
        digest(Adapter(1.0, {}, {"a": down})),
        digest(Adapter(1.0, {}, {"a": (down + 1e-7).bfloat16()})),
    }
    assert len(versions) == 6
