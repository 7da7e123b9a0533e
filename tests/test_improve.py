"""`coa improve`: which attempts are kept, what rounds write, resume, measure and refuse."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

import coa.train.improve as stage
from coa import api
from coa.cli import app
from coa.environment import Environment
from coa.errors import CoaError, ConfigError
from coa.grammar import load_grammar
from coa.io.runs import read_jsonl
from coa.models.references import trained_on
from coa.statistics import SAME
from coa.tasks import TaskSet
from coa.train.improve import (
    ALWAYS,
    FEW_CALLS,
    LONGER,
    MALFORMED,
    NEVER,
    OUTSIDE,
    SAME_TEXT,
    SOLVED,
    SOMETIMES,
    UNJUDGED,
    WRONG,
    AttemptVerdict,
    ImproveResult,
    NothingToLearn,
    account,
    not_to_imitate,
    shortest,
    sift,
    solved,
    written,
)
from coa.train.rl_stage import among, read_improve_recipe
from coa.train.settings import ImproveRecipe, ImproveSettings
from coa.trajectory import Author, StopReason, Trajectory, Usage, load_trajectories
from improve_worker import ENV, Speaker, improve, questions, settings
from rl_parts import CALL, WHOLE, group_of, made
from toy_tools import GRAMMAR, imitate, make_toy_model, toy_tasks, toy_toolbox

WORKER = Path(__file__).with_name("improve_worker.py")


def said(thought: str, answer: str = "1", sample: int = 0) -> Trajectory:
    text = f"<think>{thought}</think><answer>{answer}</answer>"
    return replace(made(text), sample=sample, answer=answer)


def played(*turns: str, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    """A chain of these turns, each but the last with an observation after it."""
    grammar = load_grammar("search_r1")
    chain = made(*turns, stop=stop)
    for before, segment in pairwise(chain.segments):
        if segment.author is Author.ENV:
            segment.text = grammar.render_observation("seen", before.text)
    calls = sum("<search>" in turn for turn in turns)
    return replace(chain, answer="1", usage=replace(chain.usage, tool_calls=calls))


# -- which attempts are kept -----------------------------------------------------------------


def test_of_a_task_solved_sometimes_the_shortest_right_attempt_is_kept() -> None:
    long, short, wrong = said("a longer thought"), said("t", sample=1), said("x", "0", sample=2)
    group = group_of((long, 1.0), (short, 1.0), (wrong, 0.0))
    verdicts = [verdict for _, verdict in sift(group, ImproveSettings())]
    assert [verdict.dropped for verdict in verdicts] == [LONGER, "", WRONG]
    assert verdicts[1] == AttemptVerdict("t0", 1, 1.0, short.usage.sampled_tokens)
    both = [verdict.dropped for _, verdict in sift(group, ImproveSettings(keep=2))]
    assert both == ["", "", WRONG]


def test_the_same_words_are_kept_once() -> None:
    group = group_of((said("t"), 1.0), (said("t", sample=1), 1.0), (said("t", "0"), 0.0))
    verdicts = [verdict.dropped for _, verdict in sift(group, ImproveSettings(keep=3))]
    assert verdicts == ["", SAME_TEXT, WRONG]


def test_what_is_always_or_never_solved_teaches_nothing() -> None:
    right, wrong = said("t"), said("t", "0")
    always = [v.dropped for _, v in sift(group_of((right, 1.0), (right, 1.0)), ImproveSettings())]
    never = [v.dropped for _, v in sift(group_of((wrong, 0.0), (wrong, 0.0)), ImproveSettings())]
    assert (always, never) == ([SOLVED, SOLVED], [WRONG, WRONG])


def test_what_nobody_could_judge_and_what_the_world_ended_is_in_no_pass_rate() -> None:
    broken = made(CALL, stop=StopReason.TOOL_FAILED)
    unknown, right = said("u"), said("t")
    group = group_of((broken, 0.0), (unknown, None), (right, 1.0))
    assert [v.dropped for _, v in sift(group, ImproveSettings())] == [OUTSIDE, UNJUDGED, SOLVED]
    found = account([v for _, v in sift(group, ImproveSettings())], ImproveSettings())
    assert found["pass_rate"] == 1.0 and found["solved"][ALWAYS] == 1


CASES = [
    (played(WHOLE.format("1")), ""),
    (played(CALL, WHOLE.format("1")), ""),
    (played(CALL, CALL, WHOLE.format("1")), "redundant tool call"),
    (played(WHOLE.format("1"), stop=StopReason.RELEASED), "did not end with an answer"),
    (played("<think></think><answer>1</answer>"), "empty block"),
    (played("no tags <answer>1</answer>"), "breaks the protocol"),
    (replace(played(WHOLE.format("1")), usage=Usage(malformed=1)), MALFORMED),
]


@pytest.mark.parametrize(("trajectory", "reason"), CASES, ids=[case[1] or "good" for case in CASES])
def test_a_right_attempt_with_a_fault_is_not_imitated(trajectory: Any, reason: str) -> None:
    found = not_to_imitate(trajectory, ImproveSettings())
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_a_right_answer_without_looking_may_be_left_out() -> None:
    guess, looked = played(WHOLE.format("1")), played(CALL, WHOLE.format("1"))
    group = group_of((guess, 1.0), (looked, 1.0), (said("x", "0"), 0.0))
    chosen = [v.dropped for _, v in sift(group, ImproveSettings(min_tool_calls=1))]
    assert chosen == [FEW_CALLS, "", WRONG]


def test_whatever_attempts_are_like_the_rules_hold() -> None:
    """Groups made at random: each attempt has one verdict, and what is kept is what may be."""
    draw = random.Random(0)
    for _ in range(300):
        settings = ImproveSettings(keep=draw.randint(1, 3), right=draw.choice([1.0, 0.5]))
        members = []
        for at in range(draw.randint(1, 8)):
            text = draw.choice([WHOLE.format("1"), f"<think>{'so ' * at}</think>", "<answer>1"])
            turns = [CALL] * draw.randrange(3) + [text]
            stop = draw.choice([StopReason.ANSWERED, StopReason.ANSWERED, StopReason.TOOL_FAILED])
            trajectory = replace(played(*turns, stop=stop), sample=at)
            members.append((trajectory, draw.choice([None, 0.0, 0.5, 1.0, 1.0 - SAME / 2])))
        group = group_of(*members)
        sifted = sift(group, settings)
        assert [t for t, _ in sifted] == [t for t, _ in members]
        kept = [t for t, verdict in sifted if not verdict.dropped]
        assert len(kept) <= settings.keep and len({*map(written, kept)}) == len(kept)
        if solved(group.scores, settings.right) != SOMETIMES:
            assert kept == []
        good = []
        for trajectory, verdict in sifted:
            right = verdict.score is not None and verdict.score >= settings.right - SAME
            if verdict.dropped in ("", LONGER, SAME_TEXT):
                assert right and not not_to_imitate(trajectory, settings)
                good.append(trajectory)
        assert bool(kept) == bool(good)
        lengths = [t.usage.sampled_tokens for t in good if written(t) not in {*map(written, kept)}]
        assert all(t.usage.sampled_tokens <= other for t in kept for other in lengths)
        found = account([v for _, v in sifted], settings)
        assert found["kept"] + sum(found["dropped"].values()) == found["attempts"] == len(members)
        assert sum(found["solved"].values()) == found["tasks"] == 1


def test_the_shortest_come_first_and_of_equals_the_first() -> None:
    some = [said("bb", sample=0), said("aa", sample=1), said("c", sample=2)]
    assert [t.sample for t in shortest(some, 2)] == [2, 0]


# -- a run -----------------------------------------------------------------------------------


def lines(out: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_jsonl(out / "metrics.jsonl")]


def files(out: Path) -> dict[str, bytes]:
    """Everything that a run leaves but what depends on the clock."""
    left_out = ("timings.jsonl", ".lock", "manifest.json")
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
        and (path.name not in left_out or path.parent.name == "adapter")
        and "checkpoints" not in path.parts
    }


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("improve") / "run"
    assert improve(tiny_model, out).trained
    return out


def test_every_round_has_a_line_that_says_what_became_of_every_attempt(finished: Path) -> None:
    start, *rounds = lines(finished)
    assert start["round"] == 0 and start["eval_n"] == 20 and "attempts" not in start
    assert [record["round"] for record in rounds] == [1, 2]
    for record in rounds:
        assert (record["tasks"], record["attempts"]) == (8, 32)
        assert record["kept"] + sum(record["dropped"].values()) == 32
        assert record["solved"][ALWAYS] >= 1 and record["solved"][NEVER] >= 1
        assert record["kept"] == record["solved"][SOMETIMES] > 0
        assert record["eval_low"] <= record["eval_accuracy"] <= record["eval_high"]
        folder = finished / f"round-{record['round']}"
        attempts = load_trajectories(folder / "attempts")
        sampled = sum(attempt.usage.sampled_tokens for attempt in attempts)
        assert record["sampled_tokens"] == sampled and record["attempts"] == len(attempts)
        rows = load_trajectories(folder / "dataset")
        assert record["rows"] == len(rows) and record["updates"] == -(-len(rows) // 2)
        written_here = sum(len(s.ids or ()) for t in rows for s in t.segments if s.logprobs)
        assert record["trained_tokens"] == written_here, "tokens trained are the tokens sampled"
        for other in ("against_start", "against_before"):
            low, high = record[other]["difference_ci95"]
            assert low <= record[other]["difference"] <= high
    assert rounds[0]["against_start"] == rounds[0]["against_before"]
    assert rounds[1]["pass_rate"] > rounds[0]["pass_rate"]  # the engine is told to be better


def test_attempts_of_two_rounds_are_different_draws(finished: Path) -> None:
    first, second = (load_trajectories(finished / f"round-{n}" / "attempts") for n in (1, 2))
    assert {t.sample for t in first} == {0, 1, 2, 3} and {t.sample for t in second} == {4, 5, 6, 7}
    assert {t.weights for t in first} == {"start"}
    assert all(t.weights.startswith("round-1-") for t in second)


def test_every_round_trains_the_start_on_all_that_was_kept(finished: Path) -> None:
    first, second = (load_trajectories(finished / f"round-{n}" / "dataset") for n in (1, 2))
    assert {t.task_id for t in first} <= {t.task_id for t in second}
    by_task = {t.task_id: t for t in second}
    assert len(by_task) == len(second)
    for trajectory in first:
        chosen = by_task[trajectory.task_id]
        assert chosen.usage.sampled_tokens <= trajectory.usage.sampled_tokens
    newer = {
        t.task_id: t
        for t, (_, verdict) in zip(
            load_trajectories(finished / "round-2" / "attempts"),
            read_jsonl(finished / "round-2" / "verdicts.jsonl"),
            strict=True,
        )
        if not verdict["dropped"]
    }
    old = {t.task_id: t.usage.sampled_tokens for t in first}
    for task_id, trajectory in newer.items():  # of equals the newest
        length = trajectory.usage.sampled_tokens
        stays = length <= old.get(task_id, length)
        assert (by_task[task_id].sample == trajectory.sample) == stays
    models = [
        json.loads((finished / f"round-{n}" / "sft" / "manifest.json").read_text())["recipe"]
        for n in (1, 2)
    ]
    assert models[0]["model"] == models[1]["model"]


def test_or_it_goes_on_from_the_round_before_on_what_this_one_kept(
    tiny_model: Path, tmp_path: Path
) -> None:
    improve(tiny_model, tmp_path / "run", "improve.train_from=last", "check.keep=last")
    recipe = json.loads((tmp_path / "run/round-2/sft/manifest.json").read_text())["recipe"]
    assert recipe["model"].endswith(str(Path("round-1", "sft", "adapter")))
    second = load_trajectories(tmp_path / "run" / "round-2" / "dataset")
    assert {t.weights.partition("-")[0] for t in second} == {"round"}
    assert len(second) == lines(tmp_path / "run")[2]["kept"]
    manifest = json.loads((tmp_path / "run" / "adapter" / "manifest.json").read_text())
    assert (manifest["stage"], manifest["round"]) == ("improve", 2)
    assert manifest["settings"]["model"] == f"hf:{tiny_model}"


def test_the_best_by_check_tasks_is_the_result_and_the_line_says_what_was_gained(
    finished: Path, tiny_model: Path
) -> None:
    result = improve(tiny_model, finished)
    assert not result.trained
    measured = [record["eval_accuracy"] for record in lines(finished)]
    assert result.round == measured.index(max(measured)) > 0
    best = finished / f"round-{result.round}" / "sft" / "adapter"
    for path in best.glob("*.safetensors"):
        assert (finished / "adapter" / path.name).read_bytes() == path.read_bytes()
    gained = lines(finished)[result.round]["against_start"]
    again = api.compare(finished / "round-0/check", finished / f"round-{result.round}/check")
    assert {name: again["runs"][1][name] for name in gained} == gained
    assert f"{100 * gained['difference']:+.1f} points [" in result.line
    assert "on check tasks, n = 20" in result.line and "\n" not in result.line
    known = trained_on(f"hf:{tiny_model}+{finished / 'adapter'}")
    assert (known["grammar"], known["prompt"]) == ("search_r1", "compact")
    assert known["environments"] == ["told"]


def test_where_no_round_is_better_the_start_is_the_result(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forget(self: Speaker, adapter: Any, version: str) -> None:
        self.weights, self.skill = version, 0

    monkeypatch.setattr(Speaker, "load", forget)
    result = improve(tiny_model, tmp_path / "run")
    assert result.round == 0 and "since no round did better" in result.line
    assert "the start" in result.line
    records = lines(tmp_path / "run")
    assert [record["round"] for record in records] == [0, 1, 2]
    assert records[2]["kept"] == 0 and "rows" not in records[2]  # nothing was right any more
    from coa.train.policy import Policy

    made_of = Policy(f"hf:{tiny_model}+{result.adapter}")
    assert all(not p.any() for n, p in made_of.model.named_parameters() if "lora_B" in n)


def test_without_check_tasks_the_last_is_kept_and_nothing_is_claimed(
    tiny_model: Path, tmp_path: Path
) -> None:
    result = improve(tiny_model, tmp_path / "run", "check.tasks=")
    assert result.round == 2 and "not measured (check.tasks is not set)" in result.line
    assert "eval_accuracy" not in lines(tmp_path / "run")[2]


def test_a_round_may_take_a_part_of_the_tasks_and_goes_on_behind_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    improve(tiny_model, tmp_path / "run", "improve.tasks_per_round=4", "check.tasks=")
    seen = [
        {t.task_id for t in load_trajectories(tmp_path / f"run/round-{n}/attempts")} for n in (1, 2)
    ]
    assert len(seen[0]) == len(seen[1]) == 4 and not seen[0] & seen[1]


@pytest.mark.parametrize("concurrency", [4, 16])
def test_tokens_are_not_passed_and_which_tasks_fit_does_not_depend_on_speed(
    tiny_model: Path, tmp_path: Path, concurrency: int
) -> None:
    out, more = tmp_path / "run", (f"rollout.concurrency={concurrency}", "check.tasks=")
    improve(tiny_model, out, "improve.tokens=1100", *more)
    rounds = lines(out)[1:]
    spent = [record["sampled_tokens"] for record in rounds]
    assert 0 < spent[0] <= 550 and 550 < sum(spent) <= 1100
    assert all(record["tasks"] < 8 for record in rounds)
    other = tmp_path / "other"
    improve(tiny_model, other, "improve.tokens=1100", "check.tasks=")
    assert (out / "round-1/verdicts.jsonl").read_bytes() == (
        other / "round-1/verdicts.jsonl"
    ).read_bytes()


def test_tokens_that_one_task_does_not_fit_into_are_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(NothingToLearn, match=r"improve\.tokens has no room"):
        improve(tiny_model, tmp_path / "run", "improve.tokens=10")


def test_it_says_what_it_does(tiny_model: Path, tmp_path: Path) -> None:
    heard: list[str] = []
    improve(tiny_model, tmp_path / "run", note=heard.append)
    assert heard[0].startswith("2 rounds of 8 tasks x 4 attempts; each measured on 20 check tasks")
    stages = [line for line in heard if line.startswith("== ")]
    expected = ["0: check", "1: attempt", "1: train", "1: check", "2: attempt", "2: train"]
    assert stages == [f"== round {each}" for each in [*expected, "2: check"]]
    assert any(
        line.startswith("   8 tasks: solved ") and "kept; dropped: " in line for line in heard
    )
    assert any("for what is left" in line for line in heard)


def test_a_dry_run_tries_a_few_tasks_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    plan = improve(tiny_model, tmp_path / "run", dry=True)
    assert plan.tried["tasks"] == 2 and plan.tried["attempts"] == 8  # as many as run at once
    assert (plan.rounds, plan.attempts) == (2, 64) and plan.seconds > 0
    first, second = plan.lines()
    assert first.startswith("tried 2 tasks: solved ") and "nothing was written" in second
    assert not (tmp_path / "run").exists()


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found", "advice"),
    [("Easy 0?", "solved 1 always", "Take harder"), ("Hard 1?", "solved 1 never", "Take easier")],
)
def test_nothing_to_learn_is_one_line_with_the_pass_rates(
    tiny_model: Path, tmp_path: Path, name: str, found: str, advice: str
) -> None:
    tasks = questions(tmp_path / "one.jsonl", [name])
    for _ in range(2):  # the second time from what is there
        with pytest.raises(NothingToLearn) as raised:
            improve(tiny_model, tmp_path / "run", f"tasks={tasks}")
        assert found in str(raised.value) and advice in str(raised.value)
        assert "% right" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["improve.samples=1"], r"improve\.samples: found 1, expected at least 2"),
        (["improve.rounds=0"], r"improve\.rounds: found 0, expected at least 1"),
        (["improve.keep=0"], r"improve\.keep: found 0, expected at least 1"),
        (["improve.right=0"], r"improve\.right: found 0"),
        (["improve.tokens=-1"], r"improve\.tokens: found -1, expected 0 or more"),
        (["improve.train_from=best"], r"improve\.train_from"),
        (["sft.full=true"], r"sft\.full: every round makes an adapter"),
        (["sft.max_length=100"], r"sft\.max_length: found 100 with rollout\.context 2048"),
        (["check.every=3"], r"check\.every: every round is measured"),
        (["rollout.engine=openai:m@u", "sft.deterministic=true"], r"sft\.deterministic: a server"),
        (["improve.round=3"], r"improve\.round is not a setting.*rounds"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(overrides: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as raised:
        read_improve_recipe(None, overrides)
    assert "\n" not in str(raised.value)


def test_a_server_that_takes_no_adapters_is_refused_before_anything_is_sampled(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import coa.train.rl_stage as rl

    class Text(Speaker):
        takes_adapters = False

    monkeypatch.setattr(rl, "load_engine", lambda reference, **options: Text(None))
    more = ("rollout.engine=openai:m@http://127.0.0.1:9/v1", "sft.deterministic=false")
    recipe = read_improve_recipe(None, settings(tiny_model, tmp_path / "run", *more))
    with pytest.raises(ConfigError, match=r"rollout\.engine: .* takes no new weights"):
        stage.run_improve(recipe, env=ENV, quiet=True)


def test_check_tasks_are_not_those_that_are_trained_on(tiny_model: Path, tmp_path: Path) -> None:
    tasks = questions(tmp_path / "both.jsonl", ["Question 0?", "Question 1?"])
    with pytest.raises(ConfigError, match="Measure with tasks that are not trained on"):
        improve(tiny_model, tmp_path / "run", f"check.tasks={tasks}")


def test_several_processes_are_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coa.train.processes import Processes

    monkeypatch.setattr(Processes, "open", classmethod(lambda cls: cls(0, 2)))
    with pytest.raises(ConfigError, match="coa improve is one process"):
        improve(tiny_model, tmp_path / "run")


def test_another_recipe_does_not_continue_it(finished: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"improve\.keep"):
        improve(tiny_model, finished, "improve.keep=2")
    assert not improve(tiny_model, finished, "rollout.concurrency=3", "sft.threads=2").trained


# -- killed ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("train_from", ["start", "last"])
def test_killed_again_and_again_it_writes_what_it_writes_undisturbed(
    tiny_model: Path, tmp_path: Path, seed: int, train_from: str
) -> None:
    more = (f"improve.train_from={train_from}", "improve.tokens=1600")
    # One place for both: the name of a round's adapter is part of what the next one starts from.
    out, whole = tmp_path / "run", tmp_path / "whole"
    improve(tiny_model, out, *more)
    out.rename(whole)
    paths = os.pathsep.join([str(WORKER.parent), os.environ.get("PYTHONPATH", "")])
    worker = subprocess.run(
        [sys.executable, str(WORKER), "--killed", str(seed), str(tiny_model), str(out), *more],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )
    assert worker.returncode == 0, worker.stderr
    assert int(worker.stdout) >= 3, "too few kills to mean anything"
    assert files(out) == files(whole)
    left = [path.name for path in out.rglob(".*") if path.name != ".lock"]
    assert left == []


# -- the command and the function ------------------------------------------------------------


def test_the_command_prints_the_adapter_and_what_was_gained(
    finished: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = improve(tiny_model, finished)
    monkeypatch.setattr(stage, "run_improve", lambda recipe, note: result)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'tasks = "{finished.parent / "tasks.jsonl"}"\n')
    done = CliRunner().invoke(app, ["improve", str(recipe)])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(finished / "adapter")
    assert done.stderr.splitlines()[-1] == result.line
    told = json.loads(CliRunner().invoke(app, ["improve", str(recipe), "--json"]).stdout)
    assert told["round"] == result.round and told["rounds"] == lines(finished)


def test_a_recipe_without_tasks_is_a_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[improve]\nrounds = 1\n")
    done = CliRunner().invoke(app, ["improve", str(recipe)])
    assert isinstance(done.exception, CoaError)
    assert "neither env nor tasks is set" in str(done.exception)


def test_as_a_function_it_takes_an_environment_and_a_start(
    tiny_model: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, asked = improve(tiny_model, finished), list[Any]()

    def run(recipe: ImproveRecipe, *, env: Any, note: Any) -> ImproveResult:
        asked.append((recipe, env))
        return result  # type: ignore[no-any-return]

    monkeypatch.setattr(stage, "run_improve", run)
    env = Environment("own", tools=[], grammar="search_r1")
    heard: list[str] = []
    found = api.improve(
        env,
        out=finished,
        model=f"hf:{tiny_model}",
        note=heard.append,
        rounds=2,
        check__split="test",
    )
    ((recipe, given),) = asked
    assert given is env and recipe.sft.model == f"hf:{tiny_model}"
    assert (recipe.improve.rounds, recipe.check.split) == (2, "test")
    assert found.model == f"hf:{tiny_model}+{finished / 'adapter'}"
    assert heard == [result.line]


# -- it learns -------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_which_tool_to_call(tmp_path: Path) -> None:
    """Everything but the world is real: the engine samples, the trainer trains, in three rounds."""
    model = make_toy_model(tmp_path / "model")
    start = f"hf:{model}+{imitate(model, tmp_path / 'sft', count=4000)}"
    toy = Environment(
        "toy", tools=lambda task: [*toy_toolbox(task).values()], grammar=GRAMMAR, reward="exact"
    )
    tasks, others = toy_tasks(96), toy_tasks(300, "test")
    seen = {task.id for task in among(others, tasks)}
    TaskSet(tuple(tasks), "train").save(tmp_path / "train.jsonl")
    held = tuple(task for task in others if task.id not in seen)
    TaskSet(held, "test").save(tmp_path / "test.jsonl")
    recipe = read_improve_recipe(
        None,
        [
            f"tasks={tmp_path / 'train.jsonl'}",
            f"check.tasks={tmp_path / 'test.jsonl'}",
            f"out={tmp_path / 'run'}",
            f"sft.model={start}",
            "improve.min_tool_calls=1",
            "check.temperature=1.0",  # the likeliest tool is the right one from the start
            "sft.lr=2e-3",
            "sft.epochs=2",
            "sft.dtype=float32",
            "sft.threads=1",
            "sft.max_length=192",
            "rollout.turns=4",
            "rollout.turn_tokens=24",
            "rollout.tokens=64",
            "rollout.context=192",
        ],
    )
    result = stage.run_improve(recipe, env=toy, quiet=True)
    best = lines(tmp_path / "run")[result.round]
    assert result.round and best["against_start"]["difference_ci95"][0] > 0.05, result.line
