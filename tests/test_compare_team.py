"""`coa compare EPISODES RUN`: figures by hand, what may be claimed, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coa.cli import main
from coa.errors import CoaError
from coa.evaluation.beside import Beside, claim, compare_with_team, lines
from coa.evaluation.compare import compare
from coa.evaluation.team import counted_by, with_cache
from coa.io.runs import Json
from coa.recording.episode import Message, Tokens
from coa.statistics import few_differ
from coa.tasks import Task, TaskSet
from coa.view.terminal import print_comparison
from made_runs import AT_ONCE, attempt, evaluated
from owing_team import cut, episode, episodes, question, timings


@pytest.fixture(autouse=True)
def no_model_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COA_CACHE", str(tmp_path / "cache"))


def task(number: int) -> Task:
    return Task(question(number), ("10",), f"t{number}")


def run_of(folder: Path, n: int, right: Callable[[int], bool] = lambda at: True) -> Path:
    """A finished evaluation of n tasks, each of 100 + 50 tokens, two turns and one tool call."""
    given = TaskSet(tuple(map(task, range(n))))
    made = []
    for at, each in enumerate(given):
        chain = attempt(each, AT_ONCE)
        chain.answer = "10" if right(at) else "12"
        made.append(chain)
    return evaluated(folder, given, made, model="smollm2-135m")


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """A team that is right on 7 of 8 tasks; a student on 6 of them, and on a ninth."""
    made = [episode(n, "10" if n else "11") for n in range(8)]
    path = episodes(tmp_path / "episodes.jsonl", [*made, episode(40)])
    return path, run_of(tmp_path / "run", 9, right=lambda at: at not in (3, 4))


def row_of(path: Path, *runs: Path, **asked: Any) -> Json:
    found: Json = compare_with_team(Beside(path, runs, **asked))["runs"][0]
    return found


def refused(path: Path, *runs: Path, **asked: Any) -> str:
    with pytest.raises(CoaError) as error:
        compare_with_team(Beside(path, runs, **asked))
    assert "\n" not in str(error.value)
    return str(error.value)


# -- figures ---------------------------------------------------------------------------------


def test_the_figures_by_hand(both: tuple[Path, Path]) -> None:
    row = row_of(*both, prices="10,1,100")
    assert (row["n"], row["reward"], row["team_models"]) == (8, "exact", ["big-model"])
    success = row["success"]
    assert (success["team"]["accuracy"], success["student"]["accuracy"]) == (0.875, 0.75)
    assert (success["difference"], success["wins"], success["losses"]) == (-0.125, 1, 2)
    tokens = row["measures"]["tokens_uncached"]
    assert (tokens["team"], tokens["student"]) == (440.0, 150.0)
    assert tokens["difference"] == {"value": -290.0, "ci95": [-290.0, -290.0]}
    assert tokens["reduction"]["value"] == round(1 - 150 / 440, 6)
    assert tokens["per_solved"]["team"] == float(f"{440 * 8 / 7:.6g}")
    assert tokens["per_solved"]["student"] == 200.0
    by_text = counted_by(episode(1), len)
    cached = round(400 * by_text.cached / by_text.prompt)
    assert row["measures"]["tokens"]["team"] == 440 - cached
    assert row["measures"]["model_calls"]["team"] == 4.0
    assert row["measures"]["tool_calls"]["reduction"]["value"] == 0.0
    money = row["measures"]["money"]
    assert money["team"] == 4 * (60 * 10 + 40 * 1 + 10 * 100) / 1e6
    assert money["student"] == (100 * 10 + 50 * 100) / 1e6
    assert row["left_out"] == {
        "episodes of tasks that the run does not have": 1,
        "tasks of the run that have no episode": 1,
    }


def test_the_table_says_what_is_known(both: tuple[Path, Path]) -> None:
    path, run = both
    timings(path, {f"t{n}": 3.0 for n in range(8)})
    (run / "timings.jsonl").write_text(
        "".join(f'{{"task_id": "t{n}", "sample": 0, "total": 0.5}}\n' for n in range(9))
    )
    (run / "latency.json").write_text('{"concurrency": 96, "machine": "2 cores, 8 GB"}')
    text = "\n".join(lines(compare_with_team(Beside(path, [run]))))
    assert "run (smollm2-135m) beside the team of " in text and "(big-model)" in text
    assert "8 tasks, judged by exact        team                    student" in text
    assert "  tokens                        440                     150" in text
    assert "65.9% fewer [65.9, 65.9]" in text and "  tool calls                    1" in text
    assert "  seconds                       3                       0.5" in text
    assert "with up to 96 rollouts at once on 2 cores, 8 GB, the team's as it was recorded" in text
    assert (
        "  1 episode is of questions that the run was not tested on, as those that train." in text
    )
    assert "  left out: 1 tasks of the run that have no episode." in text
    assert "money: give --prices FILE.toml" in text
    assert "a cache is a perfect one of the task on both sides" in text


def test_what_a_few_tasks_took_has_no_bounds(both: tuple[Path, Path]) -> None:
    path, run = both
    episodes(path, [episode(n) for n in range(5)])
    row = row_of(path, run)
    tokens = row["measures"]["tokens_uncached"]
    assert tokens["difference"] == {"value": -290.0, "ci95": [None, None]}
    assert tokens["reduction"]["ci95"] == tokens["per_solved"]["reduction"]["ci95"] == [None, None]
    assert row["claim"]["sentence"].startswith("not clearly fewer tokens; ")
    text = "\n".join(lines(compare_with_team(Beside(path, [run]))))
    assert "65.9% fewer [no bound, no bound]" in text
    episodes(path, [episode(n) for n in range(6)])
    assert row_of(path, run)["claim"]["fewer_tokens"]


def test_what_is_equal_on_average_has_an_interval(both: tuple[Path, Path]) -> None:
    path, run = both
    timings(path, {f"t{n}": 1.0 + n % 2 for n in range(8)})
    (run / "timings.jsonl").write_text(
        "".join(f'{{"task_id": "t{n}", "sample": 0, "total": {2 - n % 2}}}\n' for n in range(9))
    )
    text = "\n".join(lines(compare_with_team(Beside(path, [run]))))
    seconds = next(line for line in text.splitlines() if line.startswith("  seconds"))
    assert "0.0% less [-" in seconds and "the same" not in seconds
    assert "0.0% fewer [0.0, 0.0]" in text  # tool calls: one on either side in every task


def test_a_bound_of_nothing_is_written_without_a_sign(both: tuple[Path, Path]) -> None:
    row = row_of(*both)
    row["measures"]["tool_calls"]["reduction"] = {"value": -0.125, "ci95": [-0.429, 0.0]}
    row["success"] |= {"difference": -0.0, "difference_ci95": [-0.0, 0.02]}
    text = "\n".join(lines({"team": "e.jsonl", "runs": [row]}))
    assert "12.5% more [0.0, 42.9]" in text and "+0.0 points [+0.0, +2.0]" in text
    assert "between +0.00 and" in claim(row["success"], row["measures"], 2.0)["sentence"]


def test_no_more_rollouts_than_there_were_ran_at_once(both: tuple[Path, Path]) -> None:
    path, run = both
    timings(path, {f"t{n}": 3.0 for n in range(8)})
    seconds = [f'{{"task_id": "t{n}", "sample": 0, "total": 0.5}}\n' for n in range(9)]
    (run / "timings.jsonl").write_text("".join(seconds))
    (run / "latency.json").write_text('{"n": 9, "concurrency": 96, "machine": "2 cores"}')
    assert any("with up to 9 rollouts at once on 2 cores" in n for n in row_of(path, run)["notes"])


def test_several_runs_stand_beside_the_team(both: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = both
    (tmp_path / "more").mkdir()
    other = run_of(tmp_path / "more" / "run", 4)
    found = compare_with_team(Beside(path, [run, other]))
    assert [row["n"] for row in found["runs"]] == [8, 4]
    assert found["runs"][1]["success"]["team"]["accuracy"] == 0.75


def test_several_attempts_at_a_task_are_one_pair(both: tuple[Path, Path]) -> None:
    path, run = both
    episodes(path, [episode(1), episode(1, "11"), episode(2)])
    timed = [("t1", 3.0), ("t1", 5.0), ("t2", 1.0)]
    path.with_name(f"{path.name}.timings.jsonl").write_text(
        "".join(f'{{"task_id": "{name}", "total": {total}}}\n' for name, total in timed)
    )
    row = row_of(path, run)
    assert (row["n"], row["success"]["team"]["accuracy"]) == (2, 0.75)
    assert row["measures"]["seconds"]["team"] == 2.5


def test_an_episode_without_an_answer_counts_and_a_cut_one_does_not(
    both: tuple[Path, Path],
) -> None:
    path, run = both
    episodes(path, [episode(1), replace(episode(2, None), error="lost"), cut(3)])
    row = row_of(path, run)
    assert (row["n"], row["success"]["team"]["accuracy"]) == (2, 0.5)
    assert row["left_out"]["episodes that were cut before the end"] == 1


def test_a_task_with_another_question_is_left_out_and_shown(both: tuple[Path, Path]) -> None:
    path, run = both
    other = replace(episode(2), question="Who is it?")
    asked = replace(episode(3), question=f"Please answer: {question(3)}")
    episodes(path, [episode(1), other, asked])
    row = row_of(path, run)
    why = "episodes whose question is not that of the task with their id"
    assert (row["n"], row["left_out"][why]) == (2, 1)
    assert row["first_left_out"][why] == ("The first: 'Who is it?', 'What does customer 2 owe?'")
    episodes(path, [other])
    assert "have no task in common: 1 episodes whose question is not" in refused(path, run)


# -- money -----------------------------------------------------------------------------------


def test_a_team_whose_cache_nobody_knows_pays_for_none_and_it_is_said(
    both: tuple[Path, Path],
) -> None:
    path, run = both
    told = "money: of the team with only what its servers say they had in a cache, of the student "
    told += "with a perfect one"
    known = told.replace("only what its servers say they had", "what its servers had")
    assert known in row_of(path, run, prices="10,1,100")["notes"]
    silent = {"prompt_tokens": 100, "sampled_tokens": 10}
    episodes(path, [episode(n, counted=silent) for n in range(8)])
    row = row_of(path, run, prices="10,1,100")
    assert row["measures"]["money"]["team"] == 4 * (100 * 10 + 10 * 100) / 1e6
    assert told in row["notes"] and known not in row["notes"]
    assert not any(note.startswith("money: of") for note in row_of(path, run)["notes"])


def test_a_table_has_the_price_of_the_student_without_its_adapter(
    both: tuple[Path, Path], tmp_path: Path
) -> None:
    path, run = both
    summary = json.loads((run / "summary.json").read_text())
    summary["model"] = "smollm2-135m+runs/rl/adapter"
    (run / "summary.json").write_text(json.dumps(summary))
    prices = tmp_path / "prices.toml"
    rows = ("big-model", 10, 1, 100), ("smollm2-135m", 1, 0, 2)
    prices.write_text(
        "".join(
            f'[models."{name}"]\ninput = {read}\ncached = {held}\noutput = {written}\n'
            for name, read, held, written in rows
        )
    )
    money = row_of(path, run, prices=str(prices))["measures"]["money"]
    assert money["student"] == (100 * 1 + 50 * 2) / 1e6


def test_a_model_that_the_record_does_not_name_has_no_known_price(
    both: tuple[Path, Path], tmp_path: Path
) -> None:
    path, run = both
    prices = tmp_path / "prices.toml"
    prices.write_text('[models."smollm2-135m"]\ninput = 1\noutput = 2\n')
    nameless = [episode(n) for n in range(8)]
    for each in nameless:
        each.events = [
            replace(e, call=replace(e.call, model="")) if isinstance(e, Message) and e.call else e
            for e in each.events
        ]
    episodes(path, nameless)
    money = row_of(path, run, prices=str(prices))["measures"]["money"]
    assert money["team"] is None and money["student"] == (100 * 1 + 50 * 2) / 1e6


# -- tokens that a server did not count ------------------------------------------------------


def test_what_a_cache_would_have_follows_from_the_texts() -> None:
    counted = {"prompt_tokens": 100, "cached_tokens": 40, "sampled_tokens": 10}
    by_text = counted_by(episode(1, counted=counted), len)
    assert by_text == counted_by(episode(1, counted={}), len)
    assert with_cache(Tokens(400, 0, 40), by_text).cached == round(
        400 * by_text.cached / by_text.prompt
    )


def test_without_a_tokenizer_tokens_are_not_known(both: tuple[Path, Path]) -> None:
    path, run = both
    episodes(path, [episode(1), episode(2, counted={})])
    row = row_of(path, run)
    assert row["measures"]["tokens_uncached"]["team"] is None
    assert row["claim"]["sentence"].startswith("tokens are not known; these tasks")
    assert not row["claim"]["fewer_tokens_at_the_same_success"]
    assert any("the student's tokenizer is not here" in note for note in row["notes"])


def test_all_of_a_team_is_counted_in_one_way(both: tuple[Path, Path], tiny_model: Path) -> None:
    path, run = both
    episodes(path, [episode(1), episode(2, counted={})])
    summary = json.loads((run / "summary.json").read_text())
    summary["model"] = f"hf:{tiny_model}"
    (run / "summary.json").write_text(json.dumps(summary))
    row = row_of(path, run)
    tokens = row["measures"]["tokens_uncached"]["team"]
    assert tokens is not None and tokens != 440.0
    assert any("its texts are counted by the student's tokenizer" in n for n in row["notes"])


# -- what may be claimed ---------------------------------------------------------------------


def claimed(low: float, high: float, tokens: tuple[float, float], margin: float = 2.0) -> Json:
    """A claim from bounds in points, and bounds of the difference in tokens."""
    known: Json = {"difference": {"value": 0.0, "ci95": list(tokens)}}
    success = {"difference_ci95": [low / 100, high / 100]}
    return claim(success, {"tokens_uncached": known, "tokens": {"difference": None}}, margin)


def test_fewer_tokens_at_the_same_success_is_said_only_where_it_is_sure() -> None:
    fewer, unsure, more = (-90.0, -10.0), (-90.0, 10.0), (10.0, 90.0)
    said = {
        "fewer tokens at the same success": claimed(-1.9, 1.0, fewer),
        "fewer tokens at higher success": claimed(0.1, 5.0, fewer),
        "fewer tokens at lower success": claimed(-9.0, -3.0, fewer),
        "fewer tokens; these tasks do not say whether at the same success": claimed(
            -2.1, 4.0, fewer
        ),
        "not clearly fewer tokens; these tasks do not say whether at the same success": claimed(
            -2.1, 4.0, unsure
        ),
        "not clearly fewer tokens, at the same success": claimed(-1.0, 1.0, unsure),
        "more tokens at the same success": claimed(-1.0, 1.0, more),
    }
    for sentence, found in said.items():
        assert found["sentence"].startswith(f"{sentence}: between "), found["sentence"]
    made = [name for name, each in said.items() if each["fewer_tokens_at_the_same_success"]]
    assert made == ["fewer tokens at the same success", "fewer tokens at higher success"]
    assert claimed(-4.0, 1.0, fewer, margin=5)["fewer_tokens_at_the_same_success"]
    assert claimed(-1.9, 1.0, fewer)["sentence"].endswith(
        "between -1.90 and +1.00 points of success at 95%; the same would be above -2"
    )
    assert claimed(-1.96, 1.0, fewer)["sentence"].endswith(
        "between -1.96 and +1.00 points of success at 95%; the same would be above -2"
    )  # -2.0 is not above -2.0
    assert claimed(-1.2, 1.0, fewer, margin=1.25)["sentence"].endswith("above -1.25")


def test_tokens_are_fewer_only_where_every_count_says_so() -> None:
    fewer: Json = {"difference": {"value": -5.0, "ci95": [-6.0, -4.0]}}
    more: Json = {"difference": {"value": 5.0, "ci95": [4.0, 6.0]}}
    success = {"difference_ci95": [-0.01, 0.01]}
    found = claim(success, {"tokens_uncached": fewer, "tokens": more}, 2.0)
    assert not found["fewer_tokens"]
    assert found["sentence"].startswith("fewer tokens only without a cache, at the same success")
    assert claim(success, {"tokens_uncached": fewer, "tokens": fewer}, 2.0)["fewer_tokens"]


def test_few_tasks_show_nothing_though_no_task_differs(tmp_path: Path) -> None:
    few = episodes(tmp_path / "few.jsonl", [episode(n) for n in range(40)])
    row = row_of(few, run_of(tmp_path / "run", 40))
    assert row["success"]["difference"] == 0.0
    assert not row["claim"]["same_success"]
    low, _ = few_differ(0, 0, 200)
    assert low > -0.02  # of 200 tasks that all agree it is shown
    (tmp_path / "many").mkdir()
    many = episodes(tmp_path / "many.jsonl", [episode(n) for n in range(200)])
    row = row_of(many, run_of(tmp_path / "many" / "run", 200))
    assert row["claim"]["fewer_tokens_at_the_same_success"]
    assert row["claim"]["sentence"].startswith("fewer tokens at the same success: between -1.88 ")


# -- the same gold and the same reward for both ------------------------------------------------


def test_other_gold_is_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = both
    other = TaskSet((replace(task(1), answers=("11",)), *map(task, range(2, 9))))
    other.save(tmp_path / "other.jsonl")
    said = refused(path, run, tasks=tmp_path / "other.jsonl")
    assert "holds other tasks, or other gold, than" in said
    said = refused(path, run, tasks=tmp_path / "nowhere.jsonl")
    assert "nowhere.jsonl: " in said and "Name the file with --tasks" not in said
    other.save(run.parent / "tasks.jsonl")
    assert "are not there or have changed. Name the file with --tasks." in refused(path, run)


def test_a_file_with_more_tasks_than_the_run_had_is_accepted(
    both: tuple[Path, Path], tmp_path: Path
) -> None:
    path, run = both
    whole = tmp_path / "whole.jsonl"
    rest = [task(n) for n in range(20, 24)]
    TaskSet((*rest, *map(task, reversed(range(9))))).save(whole)
    assert row_of(path, run, tasks=whole) == row_of(path, run)
    TaskSet((*rest, *(replace(task(n), meta={"set": "new"}) for n in range(9)))).save(whole)
    assert row_of(path, run, tasks=whole) == row_of(path, run)
    (run.parent / "tasks.jsonl").unlink()
    assert "or what else a task holds has changed" in refused(path, run, tasks=whole)
    TaskSet((*rest, *map(task, range(9)))).save(whole)
    assert row_of(path, run, tasks=whole)["n"] == 8


def test_what_differs_in_a_file_of_tasks_is_said(both: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = both
    whole = tmp_path / "whole.jsonl"
    TaskSet(tuple(map(task, range(7)))).save(whole)
    said = refused(path, run, tasks=whole)
    assert "the task 't7' is not in it, nor are 1 others of the run" in said
    for changed, told in {
        "answers": "the answer of the task 't8' was '10' and is '11'",
        "question": f"the question of the task 't8' was {question(8)!r} and is 'Which?'",
        "gold": "the gold of the task 't8' was '{}' and is \"{'tests': 2}\"",
    }.items():
        value: Any = {"answers": ("11",), "question": "Which?", "gold": {"tests": 2}}[changed]
        TaskSet((*map(task, range(8)), replace(task(8), **{changed: value}))).save(whole)
        assert told in refused(path, run, tasks=whole)


def test_gold_that_is_the_teams_own_answer_is_said(both: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = both
    given = TaskSet(tuple(replace(task(n), meta={"verified": n > 4}) for n in range(9)))
    given.save(run.parent / "tasks.jsonl")
    manifest(run, inputs={"tasks": given.fingerprint()})
    assert any(
        "the gold of 8 of these tasks is what the team answered" in note
        for note in row_of(path, run)["notes"]
    )


def manifest(run: Path, **changes: Any) -> None:
    held = json.loads((run / "manifest.json").read_text())
    for name, value in changes.items():
        held[name] |= value
    (run / "manifest.json").write_text(json.dumps(held))


def judged_by(run: Path, reward: str) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"reward": reward}))


def test_another_reward_is_refused(both: tuple[Path, Path]) -> None:
    path, run = both
    judged_by(run, "mine")
    assert "was judged by the reward 'mine', which is not one of this package. Name it" in (
        refused(path, run)
    )
    assert "by 'mine', and the team would be judged by 'exact'" in refused(
        path, run, reward="exact"
    )
    judged_by(run, "0.9*exact + 0.1*format")
    assert "judges by 'format' how a chain is written, and a team writes none" in refused(path, run)
    judged_by(run, "judge")
    assert "reward 'judge' needs a model" in refused(path, run)
    judged_by(run, "exact")
    manifest(run, recipe={"rewards": {"expression": "exact", "judge": {"model": "x"}}})
    assert "with other settings than these (expression: exact and now not set)" in (
        refused(path, run)
    )


def office(folder: Path, gold: str) -> Path:
    """An environment whose reward is a function."""
    folder.mkdir(exist_ok=True)
    (folder / "environment.toml").write_text('reward = "own:right"\n')
    (folder / "own.py").write_text(
        f"def right(task, trajectory):\n    return float(trajectory.answer == {gold!r})\n"
    )
    return folder


def test_the_team_is_judged_by_the_environment_of_the_run(
    both: tuple[Path, Path], tmp_path: Path
) -> None:
    from coa.environment import load_environment

    path, run = both
    folder = office(tmp_path / "office", "11")
    env = load_environment(folder)
    identity = json.dumps(env.identity(), sort_keys=True, default=str)
    judged_by(run, "right")
    manifest(run, inputs={"environment office": identity})
    said = refused(path, run)
    assert "was judged by 'right' in the environment office, which is not one of this" in said
    row = row_of(path, run, env=(str(folder),))
    assert (row["reward"], row["success"]["team"]["accuracy"]) == ("right", 0.125)
    office(folder, "10")
    said = refused(path, run, env=(str(folder),))
    assert "the files of the environment 'office' have changed since" in said


def test_a_reward_with_state_cannot_judge_a_record(both: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = both
    folder = office(tmp_path / "office", "10")
    (folder / "own.py").write_text(
        "def setup(task):\n    return {}\ndef right(task, trajectory, state):\n    return 1.0\n"
    )
    (folder / "environment.toml").write_text('reward = "own:right"\nsetup = "own:setup"\n')
    judged_by(run, "right")
    said = refused(path, run, env=(str(folder),))
    assert "the reward judges with the state of a rollout, which a record does not have" in said


def test_what_is_no_comparison_is_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = both
    (run / "trajectories.jsonl").rename(tmp_path / "elsewhere")
    assert "no trajectories.jsonl, so nobody knows what its tasks took" in refused(path, run)
    (tmp_path / "elsewhere").rename(run / "trajectories.jsonl")
    assert "--margin 200: expected points, from 0 to 100" in refused(path, run, margin=200)
    episodes(path, [episode(50)])
    assert "have no task in common: 1 episodes of tasks that the run does not" in refused(path, run)
    prices = tmp_path / "prices.toml"
    prices.write_text("[models.other]\ninput = 1.0\noutput = 2.0\n")
    assert "has no price of the model 'smollm2-135m'" in refused(path, run, prices=str(prices))


# -- the command -----------------------------------------------------------------------------


def test_the_command_tells_a_team_from_a_run(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = both

    def coa(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["coa", "compare", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return said.err if ended.value.code else said.out

    assert json.loads(coa(str(path), str(run), "--json"))["runs"][0]["n"] == 8
    assert "student against team" in coa(str(path), str(run))
    assert "against" in coa(str(run), str(run))
    assert "compare needs at least two" in coa(str(path))
    assert "--chains is for runs: coa view EPISODES" in coa(str(path), str(run), "--chains", "1")
    assert "holds no episodes; --env, --tasks" in coa(str(run), str(run), "--prices", "1,0,1")


# -- runs that differ in more than the model ---------------------------------------------------


def test_runs_with_other_tools_are_compared_and_it_is_said(tmp_path: Path) -> None:
    import io

    from rich.console import Console

    first, other = run_of(tmp_path / "first", 4), run_of(tmp_path / "other", 4)
    assert "other" not in compare([first, other])["runs"][1]
    manifest(first, inputs={"binding": "a", "grammar": "g"})
    assert "other" not in compare([first, other])["runs"][1]  # of old runs nobody knows
    manifest(other, inputs={"binding": "b", "grammar": "g", "answers": "c"})
    result = compare([first, other])
    assert result["runs"][1]["other"] == ["tools", "corpus"]
    out = io.StringIO()
    print_comparison(Console(file=out, soft_wrap=True), result)
    assert "not of the models alone, since these are others, too: tools, corpus" in out.getvalue()
