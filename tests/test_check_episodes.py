"""`coa check EPISODES`: each thing that is looked at, what is said of it, and strangers' files."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.cli import main
from coa.errors import CoaError, UsageError
from coa.evaluation.contents import Drift, NameTally, Repeats
from coa.evaluation.look import Findings, Looking, look_at
from coa.evaluation.team import AnswerVerdict, find_episodes, read_lines
from coa.io.runs import Json
from coa.recording.episode import Episode, ToolUse
from coa.tasks import Task, TaskSet
from owing_team import LOOKUP, cut, episode, episodes, question, timings


@pytest.fixture(autouse=True)
def no_model_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are counted, so that figures are the same wherever the tests run."""
    monkeypatch.setenv("COA_CACHE", str(tmp_path / "cache"))


def look(tmp_path: Path, made: Sequence[Episode], **asked: Any) -> Findings:
    return look_at(Looking(episodes(tmp_path / "episodes.jsonl", made), **asked))


def said(found: Findings, name: str) -> list[str]:
    """Lines of that name, each with its mark and its advice."""
    lines, current = [], ""
    for mark, called, text, advice in found.findings():
        current = called or current
        if current == name:
            lines.append(f"{mark} {text}{f' -> {advice}' if advice else ''}")
    return lines


def tasks(tmp_path: Path, *numbers: int, answer: str = "10") -> Path:
    path = tmp_path / "tasks.jsonl"
    TaskSet(tuple(Task(question(n), (answer,), f"t{n}") for n in numbers)).save(path)
    return path


# -- which of the two things is meant --------------------------------------------------------


def test_episodes_and_environments_are_told_apart(tmp_path: Path) -> None:
    path = episodes(tmp_path / "runs" / "episodes.jsonl", [episode(1)])
    assert find_episodes(path) == find_episodes(path.parent) == path
    other = path.rename(path.with_name("team.jsonl"))
    (path.parent / "tasks.jsonl").write_text('{"question": "a"}\n')
    assert find_episodes(path.parent) == other
    episodes(path.with_name("more.jsonl"), [episode(2)])
    with pytest.raises(UsageError, match=r"several files of episodes, more\.jsonl, team\.jsonl\."):
        find_episodes(path.parent)
    (path.parent / "environment.toml").write_text("")
    assert find_episodes(path.parent) is None
    assert find_episodes(Path("atlas-mhqa")) is None
    assert find_episodes(tmp_path / "nothing.toml") is None


def test_the_command_takes_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["coa", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return said.err if ended.value.code else said.out

    path, shop = episodes(tmp_path / "episodes.jsonl", [episode(1, success=1)]), tmp_path / "shop"
    assert json.loads(run("check", str(path), "--json"))["success"]["verified_by"] == {"record": 1}
    assert run("check", str(tmp_path)).startswith("ok  episodes   1 in ")
    run("init", str(shop))
    assert "environment  shop" in run("check", str(shop))
    assert "shop: is no file of episodes; --env, --tasks" in run(
        "check", str(shop), "--prices", "1"
    )


# -- what is in the file ---------------------------------------------------------------------


def test_a_sound_file_needs_nothing(tmp_path: Path) -> None:
    found = look(tmp_path, [episode(n, success=1) for n in range(30)], prices="1,0.1,5")
    assert [each.name for each in found.findings() if each.mark == "!!"] == []
    assert said(found, "episodes")[0].endswith("30 with an answer; recorded by 30 proxy")
    assert said(found, "success") == ["ok 100.0% [88.6, 100.0] of 30 tasks; 30 as the record says"]
    assert said(found, "duplicates") == ["ok none: 30 different questions"]
    assert said(found, "schemas") == ["ok 2 tools, the same throughout"]
    assert said(found, "dataset")[0].startswith("ok 30 of 30 episodes become chains under ")


def test_how_episodes_ended_is_counted(tmp_path: Path) -> None:
    path = episodes(tmp_path / "episodes.jsonl", [episode(1), cut(2)])
    failed = replace(episode(3, None), error="the budget is spent")
    with path.open("a") as file:
        file.write(json.dumps(failed.to_json()) + "\n")
        file.write('{"question": "no episode"}\nnot JSON\n{"schema": 3, "task_')
    found = look_at(Looking(path))
    lines = said(found, "episodes")
    assert lines[0].startswith("ok 3 in ") and "1 with an answer" in lines[0]
    assert lines[1].startswith("!! 3 lines are no episodes. Line 4: found episode schema None")
    assert lines[2] == (
        "!! 1 episode was cut before the end -> record them again: with tasks the same "
        "`coa record` does it"
    )
    assert lines[3].startswith("!! 1 without an answer: 1 the budget is spent -> they count as not")
    assert found.to_json()["episodes"]["not_episodes"] == 3
    assert [line for line, _ in read_lines(path)] == [1, 2, 3, 4, 5, 6]


def test_a_file_without_an_episode_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "a"}\n')
    with pytest.raises(UsageError, match=r"holds no episode\. Line 1: found episode schema None"):
        look_at(Looking(path))
    path.write_text("")
    with pytest.raises(UsageError, match=r"tasks\.jsonl: holds no episode\.$"):
        look_at(Looking(path))


def test_agents_and_tools_are_counted_with_their_failures(tmp_path: Path) -> None:
    made = [episode(1), episode(2, failure="mistake"), episode(3, failure="timeout")]
    found = look(tmp_path, made)
    assert said(found, "agent") == [
        "ok lead: 6 model calls and 0 tool calls, in 100% of the episodes",
        "ok scout: 6 model calls and 3 tool calls, in 100% of the episodes; "
        "failed: 1 mistake, 1 timeout",
    ]
    assert said(found, "tool") == [
        "!! lookup: 3 calls, in 100% of the episodes; failed: 1 mistake, 1 timeout -> `failed` and "
        "`timeout` are the world's fault: such an episode becomes no chain"
    ]
    assert said(found, "tools")[0].startswith("-- offered and never called: convert -> a student")
    tool = found.to_json()["team"]["tools"]["lookup"]
    assert tool == {"calls": 3, "episodes": 3, "failures": {"mistake": 1, "timeout": 1}}


# -- success and cost ------------------------------------------------------------------------


def test_answers_that_nobody_verified_are_said(tmp_path: Path) -> None:
    found = look(tmp_path, [episode(1), episode(2), episode(3, None)])
    assert said(found, "success") == [
        "!! not known: 2 answers that nobody verified -> give --env or --tasks with gold answers, "
        "or `coa distill` keeps wrong answers"
    ]
    assert found.to_json()["success"]["accuracy"] is None
    some = look(tmp_path, [episode(1, success=True), episode(2), episode(3, None)])
    assert said(some, "success") == ["ok 50.0% [9.5, 90.5] of 2 tasks; 1 as the record says"]
    assert said(some, "labels")[0].startswith("!! 1 answer that nobody verified -> add their tasks")


def test_an_episode_without_an_answer_counts_where_its_task_is_judged(tmp_path: Path) -> None:
    made = [episode(1), episode(2), episode(3, None), *(episode(n, None) for n in (11, 12, 13))]
    found = look(tmp_path, made, tasks=tasks(tmp_path, 1, 2, 3))
    assert said(found, "success") == ["ok 66.7% [20.8, 93.9] of 3 tasks; 3 by the reward"]
    assert found.to_json()["success"]["unanswered"] == 3


def test_a_solved_task_costs_what_the_unsolved_ones_took(tmp_path: Path) -> None:
    made = [episode(1, success=1), episode(2, None), episode(3)]  # the last one nobody judged
    cost = look(tmp_path, made).to_json()["cost"]
    assert cost["per_task"]["tokens"] == 280.0 and cost["per_solved"]["tokens"] == 560.0


def test_the_reward_decides_where_there_is_gold(tmp_path: Path) -> None:
    given = tasks(tmp_path, 1, 2, 3)
    made = [episode(1, success=0), episode(2, "11"), episode(3, success="yes"), episode(4)]
    other = replace(episode(3), question="What is the capital of Peru?")
    found = look(tmp_path, [*made, other, cut(2)], tasks=given)
    assert said(found, "success") == ["ok 66.7% [20.8, 93.9] of 3 tasks; 3 by the reward"]
    unverified, disagreed, odd = said(found, "labels")
    assert "2 answers that nobody verified; 1 its task is not among those with gold, 1 its" in (
        unverified
    )
    assert unverified.endswith("-> the ids mean other tasks: record with the task file that judges")
    assert disagreed.startswith("!! of 1 episode the record says another success than the reward")
    assert odd.startswith("!! of 1 episode meta.success is no number from 0 to 1")


def test_gold_that_is_a_teams_own_answer_is_said(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    TaskSet((Task(question(1), ("10",), "t1", {"verified": True}),)).save(path)
    found = look(tmp_path, [episode(1)], tasks=path)
    assert said(found, "labels")[0].startswith("!! 1 task has for gold what a team answered, and")


def test_an_environment_judges_by_its_own_reward(tmp_path: Path) -> None:
    folder = tmp_path / "office"
    folder.mkdir()
    (folder / "environment.toml").write_text(
        'tasks = "questions.csv"\ntools = ["own:lookup"]\nreward = "own:right"\n'
    )
    (folder / "own.py").write_text(
        "def lookup(customer: str, year: int = 0) -> str:\n"
        '    """Look up what a customer owes."""\n    raise AssertionError("a tool was called")\n'
        "def right(task, trajectory):\n    return float(trajectory.answer == '11')\n"
    )
    rows = (f"t{n},{question(n)},10" for n in range(20))
    (folder / "questions.csv").write_text("\n".join(["id,question,answer", *rows]) + "\n")
    made = [episode(1, "11"), episode(2, "10"), episode(3, "11"), episode(4, "11")]
    found = look(tmp_path, made, env=(str(folder),))
    assert found.to_json()["success"]["accuracy"] == 0.75
    assert found.to_json()["success"]["verified_by"] == {"reward": 4}
    dataset = found.to_json()["dataset"]
    assert (dataset["converted"], dataset["kept"]) == (4, 1)
    assert dataset["rejected"] == {"its task is kept for the test": 2, "wrong answer": 1}
    stranger = replace(episode(5, "11"), task_id="t500")
    dataset = look(tmp_path, [*made, stranger], env=(str(folder),)).to_json()["dataset"]
    assert dataset["rejected"]["its task is not in the task file"] == 1


def test_tasks_with_other_ids_than_the_episodes_are_said(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    TaskSet(tuple(Task(question(n), ("10",)) for n in range(3))).save(path)
    found = look(tmp_path, [episode(1), episode(2)], tasks=path)
    assert (
        "the ids differ, the questions are the same: of 2 of 2 episodes"
        in (said(found, "dataset")[0])
    )
    assert (
        "ids differ"
        not in said(look(tmp_path, [episode(1)], tasks=tasks(tmp_path, 2)), "dataset")[0]
    )


def test_cost_is_what_servers_counted(tmp_path: Path) -> None:
    path = episodes(tmp_path / "episodes.jsonl", [episode(1, success=1), episode(2, success=0)])
    timings(path, {"t1": 2.0, "t2": 4.0})
    cost = look_at(Looking(path)).to_json()["cost"]
    assert cost["per_task"] == {
        "tokens_uncached": 440.0,
        "tokens": 280.0,
        "model_calls": 4.0,
        "tool_calls": 1.0,
        "seconds": 3.0,
        "money": 0.008,
    }
    assert cost["per_solved"]["tokens"] == 560.0 and cost["per_solved"]["seconds"] == 6.0
    priced = look_at(Looking(path, prices="10,0,100")).to_json()["cost"]["per_task"]["money"]
    assert priced == (4 * 60 * 10 + 4 * 10 * 100) / 1e6


def test_what_no_server_counted_is_not_made_up(tmp_path: Path) -> None:
    some = look(tmp_path, [episode(1), episode(2, counted={})])
    assert some.to_json()["cost"]["per_task"]["tokens_uncached"] == 440.0
    assert said(some, "cost")[1].startswith(
        "!! tokens are of the 1 episode of which all calls were counted; 4 model calls of 8 were "
        "not -> let the program ask for usage"
    )
    none = look(tmp_path, [episode(1, counted={}), episode(2, counted={})])
    cost = none.to_json()["cost"]
    assert cost["per_task"]["tokens_uncached"] is cost["per_task"]["money"] is None
    assert 0 < cost["by_text"]["tokens"] < cost["by_text"]["tokens_uncached"]
    assert "by an estimate, 4 bytes a token: smollm2-135m is not here" in said(none, "cost")[1]
    assert said(none, "cost")[2].startswith("-- money is not known")
    assert said(some, "cost")[2] == (
        "-- means over fewer than 2 episodes: tokens with a cache over 1, money over 1"
    )
    with_cut = look(tmp_path, [episode(1, counted={}), episode(2, counted={}), cut(3)])
    assert with_cut.to_json()["cost"]["by_text"] == cost["by_text"]


# -- gaps, drift, duplicates -----------------------------------------------------------------


def test_gaps_are_counted_with_what_to_do(tmp_path: Path) -> None:
    gaps = {"result_missing": 2, "odd": "x", "usage_unknown": 3, "none": 0}
    found = look(tmp_path, [episode(1, gaps=gaps), episode(2, gaps={"odd": True}), episode(3)])
    lines = said(found, "gaps")
    assert lines[0].startswith("!! result missing: 2 in 1 episode -> no result of a tool came")
    assert lines[1].startswith("!! odd: 2 in 2 episodes -> look at some: coa view")
    assert len(lines) == 2  # tokens that nobody counted stand with the cost
    assert found.to_json()["gaps"]["usage_unknown"] == {"times": 3, "episodes": 1}


def test_a_tool_of_two_forms_is_shown_where_they_differ(tmp_path: Path) -> None:
    schema = json.loads(LOOKUP.schema)
    same = replace(LOOKUP, schema=json.dumps(schema, sort_keys=True, indent=1))
    text = copy.deepcopy(schema)
    text["properties"]["year"]["type"] = "string"
    made = [episode(n) for n in range(3)] + [episode(3, tool=same)]
    assert said(look(tmp_path, made), "schemas") == ["ok 2 tools, the same throughout"]
    other = replace(LOOKUP, schema=json.dumps(text))
    found = look(tmp_path, [*made, episode(4, tool=other)])
    assert said(found, "schemas") == [
        "!! lookup has 2 forms (in 4 and 1 episodes). schema: properties.year.type: "
        '"integer" and "string" -> one name must mean one tool: record again with one version, or '
        "distil each by itself"
    ]
    del text["properties"]["year"]
    fewer = replace(LOOKUP, schema=json.dumps(text))
    drift = Drift()
    for each in (episode(1), episode(2, tool=fewer)):
        drift.add(each, AnswerVerdict(None))
    assert "only one has properties.year" in drift.to_json()["drifted"]["lookup"]["difference"]
    described = replace(LOOKUP, about="Look up what a customer has paid")
    lines = said(look(tmp_path, [episode(1), episode(2, tool=described)]), "schemas")
    assert (
        "description: '...up what a customer owes' and '...up what a customer has paid'" in lines[0]
    )


def test_tools_that_nobody_noted_are_said(tmp_path: Path) -> None:
    lines = said(look(tmp_path, [replace(episode(1), tools=[])]), "schemas")
    assert lines[0].startswith("!! which tools there were is not noted in 1 episode that used some")


def test_questions_asked_again_are_counted(tmp_path: Path) -> None:
    again = replace(episode(1, "11"), question="what does CUSTOMER 1 owe")
    found = look(tmp_path, [episode(1), again, episode(1), episode(2)])
    assert said(found, "duplicates")[0].startswith(
        "!! 2 episodes ask what an earlier one asked, 1 of them answered in another way; "
        "2 different questions -> "
    )
    long = "Of all the customers in the south who ordered more than 10 crates of fruit in the " * 4
    repeats = Repeats()
    for text in (f"{long}, who owes most?", f"{long}, who owes least?"):
        repeats.add(replace(episode(1), question=text), AnswerVerdict(None))
    assert repeats.to_json()["nearly_the_same"] == 1
    assert "1 question almost as another asks: " in [*repeats.findings()][-1].found


def test_what_is_kept_of_names_does_not_grow_with_the_file() -> None:
    tally = NameTally()
    for number in range(5000):
        tally.note(f"agent-{number}")
    assert len(tally) == 1001 and tally.total() == 5000 and tally["(others)"] == 4000


# -- what it amounts to ----------------------------------------------------------------------


def test_the_dataset_is_what_a_distillation_would_keep(tmp_path: Path) -> None:
    wrong = [episode(n, success=0) for n in range(20, 23)]
    broken = [episode(n, failure="failed", success=1) for n in range(30, 32)]
    made = [*(episode(n, success=1) for n in range(15)), *wrong, *broken]
    dataset = look(tmp_path, made).to_json()["dataset"]
    assert (dataset["tried"], dataset["converted"], dataset["kept"]) == (20, 18, 15)
    assert dataset["rejected"] == {"wrong answer": 3, "the environment failed": 2}
    assert dataset["expected"] == {"chains": 15, "ci95": [15, 15]}
    assert dataset["seconds_of_an_epoch"] == round(dataset["tokens"] / 370)


def test_of_a_long_file_some_are_tried(tmp_path: Path) -> None:
    made = [episode(n, success=n % 2) for n in range(60)]
    found = look(tmp_path, made, sample=20)
    dataset = found.to_json()["dataset"]
    low, high = dataset["expected"]["ci95"]
    assert dataset["tried"] == 20 and low < dataset["expected"]["chains"] < high <= 60
    assert "of 20 episodes that were tried, of 60, become chains" in said(found, "dataset")[0]
    assert said(found, "dataset")[1].startswith("ok of the whole file about ")
    assert look(tmp_path, made, sample=20).to_json() == found.to_json()


def test_chains_too_long_to_train_on_are_said(tmp_path: Path) -> None:
    long = episode(1, success=1)
    long.events = [
        replace(each, result="It owes 10. " * 900) if isinstance(each, ToolUse) else each
        for each in long.events
    ]
    lines = said(look(tmp_path, [long]), "training")
    assert "an estimate; coa sft --dry-run measures this machine" in lines[0]
    assert lines[1].startswith("!! 1 chain is longer than 2,048 tokens -> they lose their end")


def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CoaError, match="--model 'openai:m@http://x' cannot be fine-tuned"):
        look(tmp_path, [episode(1)], model="openai:m@http://x")


# -- files of strangers ----------------------------------------------------------------------

ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside a record."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, each in inner:
        found.append((*at, key))
        if isinstance(each, dict | list):
            found += places(each, (*at, key))
    return found


def changed(record: Json, place: tuple[Any, ...], value: Any) -> Json:
    made = copy.deepcopy(record)
    inside: Any = made
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return made


SOUND = episode(1, success=1, gaps={"reply_cut": 1}).to_json()


@settings(max_examples=40, deadline=None)
@given(place=st.sampled_from(places(SOUND)), value=ODD)
def test_any_record_is_looked_at_or_named(
    place: tuple[Any, ...], value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    odd = changed(SOUND, place, value)
    path = tmp_path_factory.mktemp("odd") / "episodes.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for record in (SOUND, odd):
            file.write(json.dumps(record) + "\n")
    found = look_at(Looking(path))
    counted = found.to_json()["episodes"]
    assert counted["n"] + counted["not_episodes"] == 2
    json.dumps(found.to_json())
    assert all("\x1b" not in line for line in found.lines())
