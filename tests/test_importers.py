"""What other programs wrote of a team becomes episodes, whole or counted, and never a traceback."""

from __future__ import annotations

import copy
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import import_files as made
from coa.errors import CoaError, ConfigError, RecordError, UsageError
from coa.recording.episode import SYSTEM, USER, Episode, Message, ToolUse, load_episodes
from coa.recording.importers import FORMATS, formats_of, import_episodes
from coa.recording.importers.reading import Notes, documents, opening

Json = dict[str, Any]


def imported(path: Path, format: str = "auto", **more: Any) -> tuple[list[Episode], list[str]]:
    """The episodes of a file, and the lines that a person is told."""
    out = path.parent / "made" / f"{path.name}.episodes.jsonl"
    for old in (out, out.with_name(f"{out.name}.manifest.json")):
        old.unlink(missing_ok=True)
    report = import_episodes(path, out, format, **more)
    return load_episodes(out), report.lines()


def one(path: Path, format: str = "auto") -> tuple[Episode, str]:
    """The only episode, and what is told as one text."""
    (episode,), lines = imported(path, format)
    return episode, "\n".join(lines)


def uses(episode: Episode) -> list[tuple[str, str, Any, str]]:
    return [
        (use.agent, use.tool, json.loads(use.argument), use.result)
        for use in episode.events
        if isinstance(use, ToolUse)
    ]


def said(episode: Episode) -> list[tuple[str, str, str]]:
    return [(m.agent, m.to, m.text) for m in episode.events if isinstance(m, Message)]


def seconds(folder: Path) -> float:
    """What stands in the timings beside the episodes of a file."""
    (beside,) = (folder / "made").glob("*.timings.jsonl")
    assert beside.stat().st_mode & 0o777 == 0o600
    return float(json.loads(beside.read_text())["total"])


# -- each format ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", made.ALL)
def test_a_file_is_told_by_its_shape_and_by_nothing_else(name: str, tmp_path: Path) -> None:
    for number, indent in enumerate((None, 2)):
        path = made.write(tmp_path / f"{number}.txt", made.ALL[name](), indent=indent)
        assert [each.name for each in formats_of(path)] == [name]
    lines = made.write(tmp_path / "lines", made.ALL[name](), made.ALL[name]())
    assert [each.name for each in formats_of(lines)] == [name]


def test_atif_is_a_team_with_the_work_of_its_sub_agent_inside(tmp_path: Path) -> None:
    episode, told = one(made.write(tmp_path / "run.json", made.atif_team()))
    assert said(episode) == [
        (USER, "manager", made.QUESTION),
        ("manager", "researcher", made.JOB),
        ("researcher", SYSTEM, ""),
        ("researcher", "manager", "The depth is 7."),
        ("manager", SYSTEM, ""),
        ("manager", USER, "42"),
    ]
    assert uses(episode) == [
        ("researcher", "search", {"query": "depth"}, "7 m"),
        ("manager", "multiply", {"a": 7, "b": 6}, "42"),
    ]
    assert (episode.answer, episode.error, seconds(tmp_path)) == ("42", None, 90)
    assert [(agent.name, agent.system) for agent in episode.agents] == [
        ("manager", "You lead."),
        ("researcher", "You research."),
    ]
    assert [tool.name for tool in episode.tools] == ["multiply", "search"]
    calls = [message.call for _, message in episode.model_calls()]
    assert [(c and c.model, c and c.prompt_tokens, c and c.cached_tokens) for c in calls] == [
        ("large", 50, None),
        ("small", 30, 10),
        ("small", None, None),
        ("large", 70, None),
        ("large", None, None),
    ]
    assert episode.meta == {"source": "atif", "gaps": {"usage_unknown": 2}}
    thinking = next(m for _, m in episode.model_calls() if m.agent == "researcher")
    assert thinking.thought == "Lakes have depths.\nI look."
    assert "not known: usage unknown 2" in told


def test_what_a_sub_agent_was_given_is_what_its_own_trajectory_says(tmp_path: Path) -> None:
    episode, _ = one(made.write(tmp_path / "run.json", made.atif_team()))
    place = next(at for at, m in episode.model_calls() if m.agent == "researcher")
    assert [text for _, text in episode.messages_of(place)] == ["You research.", made.FRAMED]


def test_a_sub_agent_in_a_file_beside_is_part_of_the_one_that_names_it(tmp_path: Path) -> None:
    team = made.atif_team({"trajectory_path": "sub/r.json"})
    team.pop("subagent_trajectories")
    made.write(tmp_path / "run" / "a.json", team)
    made.write(tmp_path / "run" / "sub" / "r.json", made.atif_searcher())
    alone, _ = one(tmp_path / "run" / "a.json")
    (together,), _ = imported(tmp_path / "run")
    assert len(said(alone)) == len(said(together)) == 6


def test_files_that_only_refer_to_each_other_are_not_lost(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        team = made.atif_team({"trajectory_path": f"{other}.json"})
        team.pop("subagent_trajectories")
        made.write(tmp_path / "run" / f"{name}.json", team)
    found, lines = imported(tmp_path / "run")
    assert found and "files that only refer to each other: 1" in "\n".join(lines)


@pytest.mark.parametrize("minor", range(9))
def test_every_version_of_atif_is_read_with_what_it_had(minor: int, tmp_path: Path) -> None:
    path = made.write(tmp_path / "run.json", made.atif_since(minor))
    if minor < 7:
        searcher = made.atif_searcher(schema_version=f"ATIF-v1.{minor}")
        del searcher["trajectory_id"]
        made.write(tmp_path / "sub" / "r.json", searcher)
    episode, told = one(path)
    assert uses(episode) == [
        ("researcher", "search", {"query": "depth"}, "7 m"),
        ("manager", "multiply", {"a": 7, "b": 6}, "42"),
    ]
    assert ("manager", "researcher", made.JOB) in said(episode)
    assert ((SYSTEM, "manager", "The door is open.") in said(episode)) is (minor >= 2)
    multiply = next(tool for tool in episode.tools if tool.name == "multiply")
    assert bool(multiply.schema) is (minor >= 5)
    assert (episode.answer, episode.task_id) == ("42", "run-1")
    media = {"not_text": (minor >= 6) + (minor >= 8)} if minor >= 6 else {}
    assert episode.meta["gaps"] == {"usage_unknown": 2, **media}
    lines = told.splitlines()[1:-1]
    assert [line.partition(":")[0] for line in lines] == ["parts that are no text left out"] * (
        minor >= 6
    )


@pytest.mark.parametrize("version", ["ATIF-v1.9", "ATIF-v2.0", "ATIF-CTX-v1.1", 1.8])
def test_a_version_of_atif_that_is_not_known_is_read_as_the_newest(
    version: Any, tmp_path: Path
) -> None:
    team = made.atif_since(8) | {"schema_version": version}
    episode, told = one(made.write(tmp_path / "run.json", team))
    assert re.search(r"trajectories of (an unknown|no) version, read as ATIF 1\.8: 1 ", told), told
    assert len(said(episode)) == 7 and episode.answer == "42"


@pytest.mark.parametrize("where", ["in the document", "in the sub-agent", "in files"])
def test_a_sub_agent_of_a_sub_agent_is_spliced_in_where_it_was_asked(
    where: str, tmp_path: Path
) -> None:
    """A path in a file is from that file on, not from the one that is read."""
    expert, path = made.atif_expert(), tmp_path / "run" / "a.json"
    if where == "in files":
        chief = made.atif_chief({"trajectory_path": "e.json"})
        team = made.atif_team({"trajectory_path": "sub/r.json"})
        del team["subagent_trajectories"]
        made.write(tmp_path / "run" / "sub" / "r.json", chief)
        made.write(tmp_path / "run" / "sub" / "e.json", expert)
    else:
        chief, team = made.atif_chief({"trajectory_id": "expert-1"}), made.atif_team()
        team["subagent_trajectories"] = [chief]
        (team if where == "in the document" else chief)["subagent_trajectories"] = (
            [chief, expert] if where == "in the document" else [expert]
        )
    made.write(path, team)
    for source in (tmp_path / "run", path):
        (episode,), lines = imported(source)
        assert said(episode) == [
            (USER, "manager", made.QUESTION),
            ("manager", "researcher", made.JOB),
            ("researcher", "expert", "How deep are lakes?"),
            ("expert", "researcher", "7 m, most of them."),
            ("researcher", "manager", "The depth is 7."),
            ("manager", SYSTEM, ""),
            ("manager", USER, "42"),
        ]
        assert [use[1] for use in uses(episode)] == ["multiply"]
        assert lines[1:] == ["not known: usage unknown 3"]


@pytest.mark.parametrize("ref", [{"trajectory_id": "run-1"}, {"trajectory_path": "a.json"}])
def test_a_sub_agent_that_refers_to_whoever_asked_it_is_no_endless_work(
    ref: Json, tmp_path: Path
) -> None:
    team = made.atif_team(trajectory_id="run-1")
    team["subagent_trajectories"] = [made.atif_chief(ref)]
    episode, told = one(made.write(tmp_path / "a.json", team))
    assert "references to a sub-agent that is there already: 1" in told
    assert "agent runs missing 1" in told
    assert (episode.answer, len(episode.calls)) == ("42", 5)


@pytest.mark.parametrize("second", ["a.json", "b.json", "c.json"])
def test_continuations_in_a_circle_end(second: str, tmp_path: Path) -> None:
    """a goes on in b, and b in a, in itself, or in c, which goes on in b."""
    team = made.atif_team(continued_trajectory_ref="b.json")
    last = made.atif_step(6, "agent", "Once more: 42")
    rest = {"agent": team["agent"], "schema_version": "ATIF-v1.8"}
    made.write(tmp_path / "b.json", rest | {"steps": [last], "continued_trajectory_ref": second})
    made.write(tmp_path / "c.json", rest | {"steps": [], "continued_trajectory_ref": "b.json"})
    episode, told = one(made.write(tmp_path / "a.json", team))
    assert "continuations that go round in a circle: 1" in told
    assert (episode.answer, episode.error) == ("Once more: 42", None)


def test_a_continuation_brings_its_own_sub_agents(tmp_path: Path) -> None:
    team = made.atif_team(continued_trajectory_ref="b.json")
    rest = {**team, "steps": team["steps"][2:], "subagent_trajectories": [made.atif_searcher()]}
    del team["steps"][2:], rest["continued_trajectory_ref"], team["subagent_trajectories"]
    made.write(tmp_path / "b.json", rest)
    episode, told = one(made.write(tmp_path / "a.json", team))
    assert ("researcher", "search", {"query": "depth"}, "7 m") in uses(episode)
    assert "sub-agent" not in told and episode.answer == "42"


@pytest.mark.parametrize("name", ["a\0b.json", "x" * 5000, "s3://bucket/r.json", "", "."])
def test_a_path_that_no_file_can_have_is_a_reference_to_nothing(name: str, tmp_path: Path) -> None:
    team = made.atif_team({"trajectory_path": name}, continued_trajectory_ref=name)
    del team["subagent_trajectories"]
    for source in (made.write(tmp_path / "run" / "a.json", team), tmp_path / "run"):
        made.write(tmp_path / "run" / "b.json", {"nothing": 1})
        (episode,), lines = imported(source)
        assert "references to a sub-agent that is not here: 1" in "\n".join(lines)
        assert episode.meta["gaps"]["agent_runs_missing"] == 1


def test_a_reference_never_leads_out_of_its_folder(tmp_path: Path) -> None:
    made.write(tmp_path / "secret.json", made.atif_searcher())
    team = made.atif_team({"trajectory_path": "../secret.json"})
    team.pop("subagent_trajectories")
    episode, told = one(made.write(tmp_path / "run" / "a.json", team))
    assert "references to a sub-agent that is not here: 1" in told
    assert "You research." not in json.dumps(episode.to_json())


def test_copied_context_is_given_and_not_said_again(tmp_path: Path) -> None:
    team = made.atif_team()
    copied = {"is_copied_context": True}
    team["steps"][2:2] = [made.atif_step(9, "agent", "I said this before.", **copied)]
    for number, step in enumerate(team["steps"], start=1):
        step["step_id"] = number
    episode, told = one(made.write(tmp_path / "run.json", team))
    assert "copied steps taken as context: 1" in told
    assert "I said this before." not in [text for *_, text in said(episode)]
    place = next(at for at, _ in episode.model_calls())
    assert "I said this before." in [text for _, text in episode.messages_of(place)]


def test_a_continuation_is_the_same_run(tmp_path: Path) -> None:
    team = made.atif_team(continued_trajectory_ref="b.json")
    rest = {**team, "steps": [{**step, "is_copied_context": True} for step in team["steps"][:4]]}
    rest["steps"].append(team["steps"].pop())
    rest.pop("continued_trajectory_ref")
    made.write(tmp_path / "run" / "b.json", rest)
    made.write(tmp_path / "run" / "a.json", team)
    (episode,), _ = imported(tmp_path / "run")
    assert episode.answer == "42" and len(said(episode)) == 6
    (tmp_path / "run" / "b.json").unlink()
    cut, told = one(tmp_path / "run" / "a.json")
    assert cut.error == "the trajectory goes on in a file that is not here"
    assert "continuations that are not here: 1" in told


def test_a_step_without_a_model_call_is_no_message_of_a_model(tmp_path: Path) -> None:
    team = made.atif_team()
    seen = {"results": [{"content": "The door is open."}]}
    team["steps"].insert(2, made.atif_step(3, "agent", "", llm_call_count=0, observation=seen))
    for number, step in enumerate(team["steps"], start=1):
        step["step_id"] = number
    episode, _ = one(made.write(tmp_path / "run.json", team))
    assert (SYSTEM, "manager", "The door is open.") in said(episode)
    assert len(episode.calls) == 5


def test_adp_from_before_atif_is_read(tmp_path: Path) -> None:
    episode, _ = one(made.write(tmp_path / "adp.json", made.adp()))
    assert uses(episode) == [
        ("agent", "search", {"query": "depth"}, "7 m"),
        ("agent", "python", {"code": "print(6*7)"}, "42"),
    ]
    assert (episode.task_id, episode.answer, episode.question) == ("adp-1", "42", made.QUESTION)


def test_messages_of_langgraph_are_a_team(tmp_path: Path) -> None:
    episode, told = one(made.write(tmp_path / "state.json", made.langgraph_state()))
    assert said(episode) == [
        (USER, "researcher", made.QUESTION),
        ("researcher", SYSTEM, ""),
        ("researcher", "solver", "The depth of the lake is 7 metres."),
        ("solver", SYSTEM, ""),
        ("solver", USER, "42"),
    ]
    assert uses(episode) == [
        ("researcher", "search", {"query": "depth"}, "7 m"),
        ("solver", "multiply", {"a": 7, "b": 6}, "42"),
    ]
    first = next(m.call for _, m in episode.model_calls())
    assert first and (first.prompt_tokens, first.cached_tokens, first.model) == (20, 5, "small")
    assert "calls are taken to have seen all messages before: 1" in told


def test_the_history_of_a_state_is_one_run(tmp_path: Path) -> None:
    states = [{"values": {"messages": made.messages()[:end]}} for end in (8, 5, 2)]
    episode, told = one(made.write(tmp_path / "history.json", states))
    assert episode.answer == "42" and "states that another one goes on from left out: 2" in told


def test_interleaved_traces_of_langsmith_are_two_sessions(tmp_path: Path) -> None:
    pairs = zip(made.langsmith_runs("t1"), made.langsmith_runs("t2"), strict=True)
    mixed = [run for pair in pairs for run in pair][::-1]  # and out of order
    found, _ = imported(made.write(tmp_path / "runs.jsonl", *mixed))
    assert sorted(e.task_id for e in found) == ["t1", "t2"]
    for episode in found:
        assert episode.answer == "42" and len(episode.calls) == 2
        assert uses(episode) == [("solver", "search", {"query": "depth"}, "7 m")]


def test_runs_without_their_parent_are_read_and_counted(tmp_path: Path) -> None:
    runs = made.langsmith_runs()[1:]
    episode, told = one(made.write(tmp_path / "runs.jsonl", *runs))
    assert "runs whose parent is not there: 2" in told and "root is not there: 1" in told
    assert episode.meta["cut"] == "the recording was cut"


def test_memory_of_smolagents_is_a_team(tmp_path: Path) -> None:
    episode, _ = one(made.write(tmp_path / "memory.json", made.smolagents_team()))
    assert said(episode)[1:] == [
        ("manager", "researcher", made.JOB),
        ("researcher", SYSTEM, ""),
        ("researcher", "manager", "The depth is 7."),
        ("manager", SYSTEM, ""),
        ("manager", USER, "42"),
    ]
    assert uses(episode) == [
        ("researcher", "search", {"query": "depth"}, "7 m"),
        ("manager", "multiply", {"a": 7, "b": 6}, "42"),
    ]
    assert [tool.name for tool in episode.tools] == ["multiply", "search"]
    assert json.loads(episode.tools[0].schema)["required"] == ["a"]
    assert episode.answer == "42"


def test_a_managed_agent_whose_memory_is_gone_is_still_an_agent(tmp_path: Path) -> None:
    team = made.smolagents_team()
    team["managed_agents"] = {}
    episode, told = one(made.write(tmp_path / "memory.json", team))
    assert (SYSTEM, "researcher", made.JOB) in said(episode)
    assert [use[1] for use in uses(episode)] == ["multiply"]
    assert [agent.name for agent in episode.agents] == ["manager", "researcher"]
    assert "agent runs missing 1" in told


def test_the_paper_s_teacher_has_its_jobs_plans_and_reflections(tmp_path: Path) -> None:
    episode, told = one(made.write(tmp_path / "results.jsonl", made.oagents_row()))
    assert [(m.agent, m.to, m.facts.get("part")) for m in episode.events if isinstance(m, Message)
    ] == [
        (USER, "manager", None),
        ("manager", SYSTEM, None),
        ("manager", SYSTEM, "plan"),
        ("manager", "search_agent", None),
        ("search_agent", SYSTEM, None),
        ("search_agent", SYSTEM, None),
        ("search_agent", "manager", None),
        ("reflector", "manager", "alarm"),
        ("manager", SYSTEM, None),
        ("reflector", "manager", "approval"),
        ("manager", USER, None),
    ]  # fmt: skip
    assert (SYSTEM, "42") not in [(a, t) for a, _, t in said(episode)]
    assert [use.tool for use in episode.events if isinstance(use, ToolUse)] == [
        "wiki", "crawl", "python",
    ]  # fmt: skip
    assert (episode.answer, episode.task_id, seconds(tmp_path)) == ("42", "gaia-1", 120)
    assert "SECRET GOLD" not in json.dumps(episode.to_json())
    assert "true answers left out" in told


def test_the_same_job_twice_has_its_work_once(tmp_path: Path) -> None:
    row = made.oagents_row()
    row["intermediate_steps"].insert(3, copy.deepcopy(row["intermediate_steps"][2]))
    episode, told = one(made.write(tmp_path / "results.jsonl", row))
    assert "jobs given twice, whose first work was overwritten: 1" in told
    assert episode.meta["gaps"]["agent_runs_missing"] == 1
    assert [use[1] for use in uses_of_tools(episode)].count("wiki") == 1


def uses_of_tools(episode: Episode) -> Iterator[tuple[str, str]]:
    return ((e.agent, e.tool) for e in episode.events if isinstance(e, ToolUse))


def test_work_on_several_sub_plans_in_one_step_is_told_apart(tmp_path: Path) -> None:
    row = made.oagents_sub_plans()
    episode, told = one(made.write(tmp_path / "r.jsonl", row))
    leader = [(m.to, m.text, m.thought) for _, m in episode.model_calls() if m.agent == "manager"]
    assert leader == [
        (SYSTEM, "", "A lake."),
        (SYSTEM, row["intermediate_steps"][1]["plan"], ""),
        ("search_agent", made.JOB, "next."),
        (SYSTEM, "", "next."),
        (USER, "42", "next."),
    ]
    programs = [use for use in episode.events if isinstance(use, ToolUse) and use.tool == "python"]
    assert [use.argument for use in programs] == ['print("it\'s", 7 * 6)']
    assert "it's 42" in programs[0].result and "The depth" not in programs[0].result
    judged = [m.facts for m in episode.events if isinstance(m, Message) and m.agent == "reflector"]
    assert judged == [{"score": 8.0, "part": "approval"}]
    both = row["intermediate_steps"][2]
    assert "cannot be told apart" not in told
    for broken in ({"observations": "observation_list: ['one']"}, {"model_output": "model_output_"
        "list: [f(x)]"}, {"action_output": 7}):  # fmt: skip
        row["intermediate_steps"][2] = both | broken
        episode, told = one(made.write(tmp_path / "r.jsonl", row))
        assert "steps on several sub-plans that cannot be told apart: 1" in told
        assert episode.answer == "42"


def test_work_on_sub_plans_ends_with_the_last_program_alone(tmp_path: Path) -> None:
    row = made.oagents_sub_plans()
    both = row["intermediate_steps"][2]
    both["tool_calls"][0]["function"]["arguments"] = "final_answer(7)"
    both["action_output"] = [7, None]
    episode, _ = one(made.write(tmp_path / "r.jsonl", row))
    assert [text for _, to, text in said(episode) if to == USER] == ["42"]
    both["tool_calls"][1]["function"]["arguments"] = "final_answer(42)"
    both["action_output"] = [7, 42]
    del row["intermediate_steps"][3]
    episode, _ = one(made.write(tmp_path / "r.jsonl", row))
    assert [text for _, to, text in said(episode) if to == USER] == ["42"]


def test_costs_of_a_whole_run_are_counted_and_given_to_no_call(tmp_path: Path) -> None:
    model = {"model_id": "gpt-4.1", "total_prompt_tokens": 900, "total_completion_tokens": 80}
    costs = {"manager_agent_model_cost": model, "grand_total_task_cost": 0.0123}
    row = made.oagents_row(cost_summary=costs)
    episode, told = one(made.write(tmp_path / "r.jsonl", row))
    plain, _ = one(made.write(tmp_path / "plain.jsonl", made.oagents_row()))
    assert "costs of whole runs left out (they are not told by call): 1" in told
    assert episode.events == plain.events and episode.meta == plain.meta
    assert {m.call and m.call.cost for _, m in episode.model_calls()} == {None}


def test_a_reformulated_answer_is_said_by_whoever_said_it(tmp_path: Path) -> None:
    row = made.oagents_row(prediction="forty-two")
    episode, _ = one(made.write(tmp_path / "results.jsonl", row))
    assert said(episode)[-2:] == [
        ("manager", USER, "42"),
        ("reformulator", USER, "forty-two"),
    ]
    assert episode.answer == "forty-two"


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", made.ALL)
def test_a_cut_file_is_one_line(name: str, tmp_path: Path) -> None:
    path = made.write(tmp_path / "run.json", made.ALL[name](), indent=1)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(RecordError, match=r"run.json: not JSON .*; it is cut or not a file"):
        imported(path)


@pytest.mark.parametrize("name", made.ALL)
def test_lines_that_are_cut_or_no_json_or_not_utf8_cost_themselves(
    name: str, tmp_path: Path
) -> None:
    whole = json.dumps(made.ALL[name]()).encode()
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"\n".join([whole, b'{"\xff": 1}', b"{oops}", whole, whole[:-40]]))
    found, lines = imported(path)
    assert len(found) == 2
    told = "\n".join(lines)
    assert "lines that are not UTF-8 left out: 1 (first: runs.jsonl: line 2)" in told
    assert "lines that are no JSON left out: 1 (first: runs.jsonl: line 3)" in told
    assert "a last line that is cut left out: 1 (first: runs.jsonl: line 5)" in told


@pytest.mark.parametrize("name", made.ALL)
def test_a_gzip_file_that_is_cut_is_as_the_text_that_is_in_it(name: str, tmp_path: Path) -> None:
    whole = json.dumps(made.ALL[name]())
    padded = [f'{{"pad": "{number}", {whole[1:]}' for number in range(40)]
    path = tmp_path / "runs.jsonl.gz"
    packed = gzip.compress("\n".join(padded).encode(), mtime=0)
    path.write_bytes(packed[:-120])
    found, lines = imported(path)
    assert 0 < len(found) < 40
    assert "gzip files that are cut, read up to there: 1 (first: runs.jsonl.gz)" in lines
    assert any(line.startswith("a last line that is cut left out: 1") for line in lines)
    path.write_bytes(packed[:12])
    with pytest.raises(CoaError, match=r"runs.jsonl.gz: (not a whole gzip file|is of no format)"):
        imported(path)


def test_a_file_of_a_folder_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    made.write(tmp_path / "all" / "a.json", made.atif_team())
    (tmp_path / "all" / "b.json.gz").write_bytes(b"\x1f\x8b\x08\x00cut")
    found, lines = imported(tmp_path / "all")
    assert len(found) == 1
    assert "files that cannot be read left out: 1 (first: b.json.gz)" in lines


def test_a_list_that_is_damaged_says_which_element_and_what_stands_after_one_is_counted(
    tmp_path: Path,
) -> None:
    three = [made.oagents_row(task_id=f"t{number}") for number in range(3)]
    path = made.write(tmp_path / "rows.json", three, indent=1)
    text = path.read_text()
    at = text.index('"t1"')
    path.write_text(text[:at] + text[at + 4 :])
    with pytest.raises(RecordError, match=r"rows.json: element 2 is not JSON \(Expecting value\)"):
        imported(path)
    path.write_text(text + text)
    found, lines = imported(path)
    assert len(found) == 3
    assert "texts after the end of a list left out: 1 (first: rows.json)" in lines


def test_a_file_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(json.dumps(made.atif_team(), indent=1).encode("utf-16"))
    with pytest.raises(UsageError, match=r"is of no format that is known\. Looked for atif: ATIF"):
        imported(path)
    with pytest.raises(RecordError, match=r"run.json: not UTF-8"):
        imported(path, "atif")


def test_a_list_that_is_cut_gives_what_came_before(tmp_path: Path) -> None:
    path = made.write(tmp_path / "runs.json", [made.atif_team(), made.atif_team()])
    path.write_bytes(path.read_bytes()[:-100])
    found, lines = imported(path)
    assert len(found) == 1 and "a list that is cut, its last element left out: 1" in "\n".join(
        lines
    )


Change = Callable[[Json], None]
BROKEN: list[tuple[str, Change, str]] = []


def broken(what: str, told: str) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        BROKEN.append((what, change, told))
        return change

    return add


@broken("an unknown version", "trajectories of an unknown version, read as ATIF 1.8: 1")
def _version(team: Json) -> None:
    team["schema_version"] = "ATIF-v3.0"


@broken("no version", "trajectories of no version, read as ATIF 1.8: 1")
def _no_version(team: Json) -> None:
    del team["schema_version"]


@broken("a reference to nothing", "references to a sub-agent that is not here: 1")
def _dangling(team: Json) -> None:
    del team["subagent_trajectories"]


@broken("a session_id is no key", "references to a sub-agent that is not here: 1")
def _by_session(team: Json) -> None:
    ref = team["steps"][2]["observation"]["results"][0]["subagent_trajectory_ref"][0]
    ref["session_id"] = ref.pop("trajectory_id")


@broken("steps out of order", "trajectories whose steps are out of order, sorted: 1")
def _order(team: Json) -> None:
    team["steps"].reverse()


@broken("a step twice", "steps that stand there twice left out: 1")
def _twice(team: Json) -> None:
    team["steps"].insert(3, copy.deepcopy(team["steps"][3]))


@broken("a number twice", "steps that share their step_id: 1")
def _shared(team: Json) -> None:
    team["steps"][4]["step_id"] = 4


@broken("two sub-agents of one id", "trajectory_ids that repeat, the first taken: 1")
def _ids(team: Json) -> None:
    team["subagent_trajectories"].append(made.atif_searcher())


@broken("steps missing", "trajectories with holes in their step_ids: 1")
def _holes(team: Json) -> None:
    team["steps"][4]["step_id"] = 9


@broken("calls of one id", "calls that share their tool_call_id: 1")
def _calls(team: Json) -> None:
    team["steps"][3]["tool_calls"] *= 2


@broken("arguments as a text", "arguments is a text, expected an object: 1")
def _arguments(team: Json) -> None:
    team["steps"][3]["tool_calls"][0]["arguments"] = '{"b": 6, "a": 7}'


@broken("texts left out", "not known: usage unknown 2, text not captured 1")
def _silent(team: Json) -> None:
    team["steps"][4]["message"] = None


@broken("a number that no float holds", "cost_usd is a number, expected a finite number: 1")
def _long(team: Json) -> None:
    team["steps"][2]["metrics"]["cost_usd"] = 10**400


@broken("a result of no call", "results of a call that is not in their step: 1")
def _stray(team: Json) -> None:
    team["steps"][3]["observation"]["results"][0]["source_call_id"] = "nobody"


@broken("a sub-agent that nobody asked", "sub-agents that no step refers to left out: 1")
def _unasked(team: Json) -> None:
    team["subagent_trajectories"].append(made.atif_searcher(trajectory_id="other"))


@broken("content missing", "result missing 1")
def _no_content(team: Json) -> None:
    team["steps"][3].pop("observation")


@broken("an unknown source", "steps of an unknown source, read as the agent's: 1")
def _source(team: Json) -> None:
    team["steps"][4]["source"] = "robot"


@broken("a wrong type", "metrics is a text, expected an object: 1")
def _metrics(team: Json) -> None:
    team["steps"][3]["metrics"] = "many"


@broken("an image", "parts that are no text left out: 1")
def _image(team: Json) -> None:
    team["steps"][4]["message"] = [{"type": "text", "text": "42"}, {"type": "image", "source": {}}]


@pytest.mark.parametrize(("what", "change", "told"), BROKEN, ids=[each[0] for each in BROKEN])
def test_what_is_wrong_in_atif_is_counted_and_the_rest_is_read(
    what: str, change: Any, told: str, tmp_path: Path
) -> None:
    team = made.atif_team()
    change(team)
    episode, lines = one(made.write(tmp_path / "run.json", team))
    assert told in lines, lines
    assert episode.question == made.QUESTION and episode.events


def test_of_two_calls_with_one_id_each_has_its_own_result_or_none(tmp_path: Path) -> None:
    team = made.atif_team()
    step = team["steps"][3]
    step["tool_calls"] *= 2
    path = tmp_path / "run.json"
    for results, expected in (
        (["42"], ["7 m", "42", ""]),
        (["42", "43"], ["7 m", "42", "43"]),
        (["42", "43", "late"], ["7 m", "42", "43"]),
    ):
        held = [{"source_call_id": "m2", "content": each} for each in results]
        step["observation"] = {"results": held}
        episode, told = one(made.write(path, team))
        assert [use[3] for use in uses(episode)] == expected
        assert ("result missing 1" in told) is (len(results) == 1)
    assert (SYSTEM, "manager", "late") in said(episode)


def test_arguments_that_are_the_text_of_an_object_are_one(tmp_path: Path) -> None:
    team = made.atif_team()
    _arguments(team)
    episode, _ = one(made.write(tmp_path / "run.json", team))
    assert uses(episode)[1] == ("manager", "multiply", {"a": 7, "b": 6}, "42")


def test_an_agent_that_says_nothing_gives_no_answer(tmp_path: Path) -> None:
    team = made.atif_team()
    _silent(team)
    episode, told = one(made.write(tmp_path / "run.json", team))
    assert episode.answer is None
    assert episode.error == "the trajectory ends without an answer of its agent"
    assert ", 0 with an answer" in told
    row = made.oagents_row(prediction=" ")
    episode, _ = one(made.write(tmp_path / "r.jsonl", row))
    assert (episode.answer, episode.error) == (None, "the run ended without an answer")
    assert all(agent.name != "reformulator" for agent in episode.agents)


def test_an_old_reference_that_is_no_list_is_followed(tmp_path: Path) -> None:
    team = made.atif_team()
    result = team["steps"][2]["observation"]["results"][0]
    result["subagent_trajectory_ref"] = result["subagent_trajectory_ref"][0]
    episode, _ = one(made.write(tmp_path / "run.json", team))
    assert len(said(episode)) == 6


def test_a_trajectory_without_steps_is_counted_and_alone_an_error(tmp_path: Path) -> None:
    empty = made.atif_team(steps=[])
    found, lines = imported(made.write(tmp_path / "runs.jsonl", empty, made.atif_team()))
    assert len(found) == 1
    assert "trajectories without a question or a step left out: 1" in "\n".join(lines)
    with pytest.raises(RecordError, match="holds no episode: trajectories without a question"):
        imported(made.write(tmp_path / "empty.json", empty))


LISTS = [
    ("results of no call that is there: 1", {"type": "tool", "data": {"content": "x"}}),
    ("messages of an unknown role left out: 1", {"type": "robot", "data": {"content": "x"}}),
    ("messages that only remove others left out: 1", {"type": "remove", "data": {"content": ""}}),
    ("messages that stand there twice left out: 1", made.messages()[1]),
    ("messages that share their id: 1", {"type": "human", "data": {"content": "y", "id": "h"}}),
    ("messages holds a number, expected an object: 1", 7),
    (
        "messages of an unknown version of dumpd, read as version 1: 1",
        {"lc": 9, "id": ["HumanMessage"], "kwargs": {"content": "x"}},
    ),
    (
        "parts that are no text left out: 1",
        {"type": "human", "data": {"content": [{"type": "image"}]}},
    ),
]


@pytest.mark.parametrize(("told", "message"), LISTS)
def test_what_is_wrong_in_messages_is_counted(told: str, message: Any, tmp_path: Path) -> None:
    held = made.messages()
    held.insert(2, message)
    episode, lines = one(made.write(tmp_path / "state.json", {"messages": held}))
    assert told in lines, lines
    assert len(episode.calls) == 4


def test_messages_that_end_before_an_answer_have_none(tmp_path: Path) -> None:
    state = {"messages": made.messages()[:4]}
    episode, _ = one(made.write(tmp_path / "state.json", state))
    assert episode.answer is None and episode.error == "no final answer was recorded"


def test_a_handoff_to_nobody_is_a_gap(tmp_path: Path) -> None:
    held = made.messages()
    held[5]["data"]["tool_calls"][0]["name"] = "transfer_to_critic"
    del held[6:]
    _, told = one(made.write(tmp_path / "state.json", {"messages": held}))
    assert "result missing 1" in told


def test_runs_that_do_not_name_their_trace_are_of_that_of_their_parents(tmp_path: Path) -> None:
    """`session_id` of LangSmith is the project, which all runs share."""
    pairs = zip(made.langsmith_runs("t1"), made.langsmith_runs("t2"), strict=True)
    mixed = [{**run, "session_id": "project"} for pair in pairs for run in pair][::-1]
    for run in mixed:
        del run["trace_id"]
    path = tmp_path / "runs.jsonl"
    found, lines = imported(made.write(path, *mixed))
    assert sorted(e.task_id for e in found) == ["t1-0", "t2-0"]
    assert [len(e.calls) for e in found] == [2, 2]
    assert not any("parent" in line for line in lines)
    found, _ = imported(made.write(path, *(run for run in mixed if run["run_type"] == "llm")))
    assert sorted(e.task_id for e in found) == ["t1-0", "t2-0"]


def test_runs_that_share_their_id_are_one_that_ended(tmp_path: Path) -> None:
    runs = made.langsmith_runs()
    begun = {**runs[1], "end_time": None, "outputs": None}
    episode, told = one(made.write(tmp_path / "runs.jsonl", runs[0], begun, *runs[1:]))
    assert "runs that share their id, the first that ended taken: 1" in told
    assert uses(episode) == [("solver", "search", {"query": "depth"}, "7 m")]


def test_runs_whose_inputs_and_outputs_were_hidden_say_what_hid_them(tmp_path: Path) -> None:
    hidden = [{**run, "inputs": {}, "outputs": {}} for run in made.langsmith_runs("t1")]
    path = tmp_path / "runs.jsonl"
    message = r"runs.jsonl: 2 model calls and no text of any\. .*LANGSMITH_HIDE_INPUTS"
    with pytest.raises(RecordError, match=message):
        imported(made.write(path, *hidden))
    shown = made.langsmith_runs("t1")
    episode, told = one(made.write(path, *hidden[:2], shown[2]))
    assert "text not captured 1" in told and episode.answer == "42"


def test_what_has_no_time_has_no_seconds(tmp_path: Path) -> None:
    """The order of calls is no measure of how long they took."""

    def written(path: Path, value: Any) -> str:
        _, lines = imported(made.write(path, *(value if isinstance(value, list) else [value])))
        beside = tmp_path / "made" / f"{path.name}.episodes.jsonl.timings.jsonl"
        return beside.read_text() + "\n".join(lines)

    assert '"total"' not in written(tmp_path / "state.json", made.langgraph_state())
    runs = made.langsmith_runs()
    assert '"total":1.5,"model":1.0' in written(tmp_path / "runs.jsonl", runs)
    del runs[2]["start_time"]
    told = written(tmp_path / "runs.jsonl", runs)
    assert '"total"' not in told
    assert "traces whose runs have no time, in the order of the file: 1" in told
    team = made.smolagents_team()
    told = written(tmp_path / "memory.json", team)
    assert '"total":14.0' in told and '"model"' not in told, "a step's time is also its tools'"
    team["steps"][1]["timing"] = None
    told = written(tmp_path / "memory.json", team)
    assert '"total"' not in told
    assert "teams whose steps have no time, put in the order of their jobs: 1" in told


def test_states_of_several_runs_are_told_apart_by_their_names(tmp_path: Path) -> None:
    held = made.messages()
    states = [{"thread_id": each, "messages": held[:end]} for each, end in (("a", 8), ("b", 5))]
    found, _ = imported(made.write(tmp_path / "s.json", states))
    assert [e.task_id for e in found] == ["a", "b"]
    states[1]["thread_id"] = "a"
    episode, told = one(made.write(tmp_path / "s.json", states))
    assert "states that another one goes on from left out: 1" in told and episode.answer == "42"


def test_steps_of_smolagents_that_are_out_of_order_are_sorted(tmp_path: Path) -> None:
    team = made.smolagents_team()
    whole, _ = one(made.write(tmp_path / "memory.json", team))
    team["steps"][1:3] = team["steps"][2:0:-1]
    episode, told = one(made.write(tmp_path / "memory.json", team))
    assert "memories whose steps are out of order, sorted by time: 1" in told
    assert uses(episode) == uses(whole) and episode.answer == "42"


def test_calls_of_smolagents_that_share_their_id_have_no_result_of_another(tmp_path: Path) -> None:
    team = made.smolagents_team()
    team["managed_agents"]["researcher"]["steps"][1]["tool_calls"][0]["id"] = "m2"
    episode, told = one(made.write(tmp_path / "memory.json", team))
    assert "results of calls that share their id left out: 1" in told
    found = {use.tool: use.result for use in episode.events if isinstance(use, ToolUse)}
    assert found["multiply"] in ("42", "") and found["search"] in ("7 m", "")


def test_managed_agents_that_nobody_asked_are_at_work_all_the_same(tmp_path: Path) -> None:
    team = made.smolagents_team()
    del team["steps"][1]
    episode, _ = one(made.write(tmp_path / "memory.json", team))
    assert ("researcher", "search") in [use[:2] for use in uses(episode)]
    assert len(episode.calls) == 4 and episode.answer == "42"


def test_steps_without_what_a_model_said_are_counted(tmp_path: Path) -> None:
    team, row = made.smolagents_team(), made.oagents_row()
    silent: Json = {"model_output": None, "model_output_message": None, "tool_calls": []}
    for held, name in ((team["steps"], "memory.json"), (row["intermediate_steps"], "r.jsonl")):
        held[2] = {**held[2], **silent, "observations": None}
        _, told = one(made.write(tmp_path / name, team if name == "memory.json" else row))
        assert "steps in which the model said nothing left out: 1" in told
    for at in (1, 2, 3):
        team["steps"][at] = {**team["steps"][at], **silent, "action_output": None}
    team["managed_agents"] = {}
    with pytest.raises(RecordError, match=r"holds no episode: .*memories without a task or a step"):
        imported(made.write(tmp_path / "memory.json", team))


def test_results_that_are_out_of_order_or_share_their_task_are_counted(tmp_path: Path) -> None:
    row = made.oagents_row()
    row["intermediate_steps"][2:4] = row["intermediate_steps"][3:1:-1]
    found, lines = imported(made.write(tmp_path / "r.jsonl", row, made.oagents_row()))
    told = "\n".join(lines)
    assert len(found) == 2
    assert "results whose steps are out of order, taken as they stand: 1" in told
    assert "episodes that share their task id: 1" in told


def test_steps_of_an_unknown_kind_and_missing_calls_are_counted(tmp_path: Path) -> None:
    team = made.smolagents_team()
    team["steps"] += [{"dance": 1}, 7]
    team["steps"][2] = {**team["steps"][2], "observations": None}
    _, told = one(made.write(tmp_path / "memory.json", team))
    assert "steps of an unknown kind left out: 1" in told
    assert "steps holds a number, expected an object: 1" in told
    assert "result missing 1" in told


def test_steps_of_oagents_of_an_unknown_kind_are_counted(tmp_path: Path) -> None:
    """OAgents itself writes `unknown` for what is no action, task or plan."""
    row = made.oagents_row()
    row["intermediate_steps"][2:2] = [
        {"step_type": "unknown", "system_prompt": "You lead."},
        {"step_type": "dance"},
    ]
    episode, told = one(made.write(tmp_path / "r.jsonl", row))
    assert "steps of an unknown kind left out: 2 (first: r.jsonl: intermediate_steps 3)" in told
    whole, _ = one(made.write(tmp_path / "whole.jsonl", made.oagents_row()))
    assert episode.events == whole.events


@pytest.mark.parametrize("version", [(1, 8), (1, 12), (1, 17)])
def test_memory_of_older_versions_of_smolagents_is_read(
    version: tuple[int, int], tmp_path: Path
) -> None:
    memory = made.smolagents_before(version)
    episode, told = one(made.write(tmp_path / "memory.json", memory))
    known = ["A lake."] if version < (1, 12) else []
    plans = [m.call.text for _, m in episode.model_calls() if m.call][: len(known) + 1]
    assert plans == ["I know a lake."] * len(known) + ["1. multiply"]
    assert uses(episode) == [("agent", "multiply", {"a": 7, "b": 6}, "42")]
    assert (episode.answer, episode.question) == ("42", made.QUESTION)
    assert (
        "steps with fields" not in told and f"plans whose prompt is not known: {len(plans)}" in told
    )
    del memory[1]
    imported(made.write(tmp_path / "memory.json", memory))
    assert seconds(tmp_path) == 3, "a step has its times itself"


def test_memory_of_an_unknown_version_of_smolagents_is_counted_or_an_error(tmp_path: Path) -> None:
    team = made.smolagents_team()
    team["steps"][2]["calls"] = team["steps"][2].pop("tool_calls")  # a name that none has had
    episode, told = one(made.write(tmp_path / "memory.json", team))
    first = "memory.json: steps 3"
    assert f"steps with fields of a version that is not known: 1 (first: {first})" in told
    assert episode.answer == "42"
    steps = [{"kind": "task", "text": made.QUESTION}, {"kind": "action", "said": "42"}]
    path = made.write(tmp_path / "memory.json", {**team, "steps": steps, "managed_agents": {}})
    with pytest.raises(UsageError, match="is of no format that is known"):
        imported(path)
    message = r"holds no episode: steps of an unknown kind left out: 2 .*; memories without a task"
    with pytest.raises(RecordError, match=message):
        imported(path, "smolagents")


def test_results_of_calls_at_once_are_told_apart_by_their_lines_or_not_at_all(
    tmp_path: Path,
) -> None:
    team = made.smolagents_team()
    both = [("b", "multiply", {"a": 1}), ("c", "search", {"q": "x"})]
    team["steps"][2] = made.action(2, 21, 22, both, "one\ntwo")
    episode, _ = one(made.write(tmp_path / "memory.json", team))
    assert [use[3] for use in uses(episode)][1:] == ["one", "two"]
    team["steps"][2] = made.action(2, 21, 22, both, "one\ntwo\nthree")
    episode, told = one(made.write(tmp_path / "memory.json", team))
    assert [use[3] for use in uses(episode)][1:] == ["", ""] and "results joined 2" in told


def test_work_of_the_search_agent_that_nobody_asked_for_is_counted(tmp_path: Path) -> None:
    row = made.oagents_row()
    row["search_agent_actions"]["Something else"] = {"answer": "x", "tool_calls": []}
    _, told = one(made.write(tmp_path / "r.jsonl", row))
    assert "jobs of the search agent that no step asks for: 1" in told
    row["search_agent_actions"] = {}
    _, told = one(made.write(tmp_path / "r.jsonl", row))
    assert "jobs whose work is not in the file: 1" in told


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    row = made.oagents_row(prediction=None, intermediate_steps=[], agent_error="no key")
    episode, _ = one(made.write(tmp_path / "r.jsonl", row))
    assert (episode.answer, episode.error) == (None, "no key")


@st.composite
def damaged(draw: st.DrawFn, value: Any) -> Any:
    """A value with something else at one to three of its places."""
    value = copy.deepcopy(value)
    junk: st.SearchStrategy[Any] = st.sampled_from(
        [
            None,
            True,
            -1,
            1.5,
            float("inf"),
            "",
            "x",
            [],
            {},
            [[]],
            [{}],
            {"": {}},
            ["\ud800"],
            10**30,
            10**400,
        ]
    )
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        holder, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["replace", "drop", "repeat", "swap"]))
        if how == "replace":
            holder[key] = copy.deepcopy(draw(junk))  # it is put into others, and may be drawn again
        elif how == "drop":
            del holder[key]
        elif isinstance(holder, list) and how == "repeat":
            holder.insert(key, copy.deepcopy(holder[key]))
        elif isinstance(holder, list):
            other = draw(st.integers(0, len(holder) - 1))
            holder[key], holder[other] = holder[other], holder[key]
        else:
            holder[draw(st.sampled_from(["id", "name", "type", "x"]))] = holder[key]
        if not list(_places(value)):
            return value
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list) and value[key]:
            yield from _places(value[key])


WHOLE: dict[str, Callable[[], Any]] = {
    **made.ALL,
    "adp": made.adp,
    "langsmith": made.langsmith_runs,
    "atif-1.8": lambda: made.atif_since(8),
    "smolagents-1.8": lambda: made.smolagents_before((1, 8)),
    "oagents-sub-plans": made.oagents_sub_plans,
}


@pytest.mark.parametrize("name", WHOLE)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(given=st.data())
def test_whatever_stands_where_something_else_should_is_no_traceback(
    name: str, given: Any, tmp_path: Path
) -> None:
    value = given.draw(damaged(WHOLE[name]()))
    path = tmp_path / "run.json"
    path.write_text(json.dumps(value))
    format = {"adp": "atif", "langsmith": "langgraph"}.get(name, name.partition("-")[0])
    try:
        found, _ = imported(path, format)
    except RecordError as error:
        assert re.match(rf"{re.escape(str(path))}: ", str(error)), error
        return
    for episode in found:
        assert Episode.from_json(json.loads(json.dumps(episode.to_json()))).events == episode.events


@pytest.mark.parametrize("name", made.ALL)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(given=st.data())
def test_bytes_that_are_cut_or_spoiled_are_one_line(name: str, given: Any, tmp_path: Path) -> None:
    lined = given.draw(st.booleans())
    text = json.dumps(made.ALL[name](), indent=None if lined else 1)
    content = bytearray((f"{text}\n{text}\n" if lined else text).encode())
    for _ in range(given.draw(st.integers(1, 3))):
        at = given.draw(st.integers(0, len(content) - 1))
        content[at] = given.draw(st.sampled_from(b'\xff\x00{}[]",:\n9\\'))
    del content[given.draw(st.integers(1, len(content))) :]
    path = tmp_path / "run.json"
    path.write_bytes(content)
    for format in ("auto", name):
        try:
            imported(path, format)
        except (RecordError, UsageError) as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)


@pytest.mark.parametrize("name", made.ALL)
def test_however_deep_a_value_is_nested_there_is_an_episode_or_a_line(
    name: str, tmp_path: Path
) -> None:
    text = json.dumps(made.ALL[name]())
    assert '{"query": "depth"}' in text or name == "oagents"
    old = '{"query": "depth"}' if name != "oagents" else '{"query": "lake"}'
    path = tmp_path / "run.json"
    for depth in (50, 200, *range(700, 1000, 20), 3000):
        path.write_text(text.replace(old, '{"query": ' * depth + "1" + "}" * depth))
        try:
            imported(path)
        except CoaError as error:
            assert str(error).startswith(f"{path}: ") and depth > 200, (depth, error)


def test_a_model_call_is_never_lost_silently(tmp_path: Path) -> None:
    """Every step of an agent is a message, or there is a note."""
    for field in ("message", "tool_calls", "observation", "metrics", "source", "step_id"):
        for at in range(2, 5):
            team = made.atif_team()
            team["steps"][at].pop(field, None)
            episode, told = one(made.write(tmp_path / "run.json", team))
            assert len(episode.calls) == 5 or ":" in told.partition("\n")[2], (field, at, told)


# -- the command ---------------------------------------------------------------------------------


def test_a_folder_is_read_as_its_files_are(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    for name, value in made.ALL.items():
        made.write(folder / f"{name}.json", value())
    made.write(folder / "notes.json", {"nothing": 1})
    (folder / "README.md").write_text("# what this is")
    found, lines = imported(folder)
    assert Counter(e.meta["source"] for e in found) == Counter(list(made.ALL))
    assert "files of no known format left out: 2 (first: README.md)" in lines
    only, _ = imported(folder, "oagents")
    assert [e.meta["source"] for e in only] == ["oagents"]


def test_an_unknown_format_and_a_tie_are_refused_with_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made.write(tmp_path / "x.json", {"nothing": 1})
    looked = "Looked for .*".join(["is of no format that is known. ", "; langgraph: messages"])
    with pytest.raises(UsageError, match=looked):
        imported(path)
    with pytest.raises(UsageError, match=r"--format 'atiff' is none\. Did you mean 'atif'\?"):
        imported(path, "atiff")
    two = (FORMATS[0], FORMATS[0]._replace(name="other"))
    monkeypatch.setattr("coa.recording.importers.FORMATS", two)
    with pytest.raises(UsageError, match="may be atif or other; choose with --format"):
        imported(made.write(tmp_path / "run.json", made.atif_team()))


def test_only_the_owner_may_read_what_was_imported_and_a_second_time_it_is_the_same(
    tmp_path: Path,
) -> None:
    path, out = made.write(tmp_path / "run.json", made.atif_team()), tmp_path / "e.jsonl"
    import_episodes(path, out)
    assert out.stat().st_mode & 0o777 == 0o600
    before = out.read_bytes()
    import_episodes(path, out)
    assert out.read_bytes() == before
    other = made.write(tmp_path / "other.json", made.oagents_row())
    with pytest.raises(ConfigError, match="this was started with import"):
        import_episodes(other, out)
    made.write(path, made.atif_team(session_id="another run"))
    with pytest.raises(ConfigError, match=r"files"):  # of the same name
        import_episodes(path, out)
    assert out.read_bytes() == before
    manifest = (tmp_path / "e.jsonl.manifest.json").read_text()
    assert made.QUESTION not in manifest and "42" not in json.loads(manifest).values()


def test_a_file_of_somebody_else_is_not_written_over(tmp_path: Path) -> None:
    path, out = made.write(tmp_path / "run.json", made.atif_team()), tmp_path / "e.jsonl"
    out.write_text('{"mine": 1}\n')
    with pytest.raises(UsageError, match="holds something else, expected a new file"):
        import_episodes(path, out)
    assert out.read_text() == '{"mine": 1}\n'
    with pytest.raises(UsageError, match="is the file to read"):
        import_episodes(path, path)


def test_nothing_is_left_where_nothing_could_be_read(tmp_path: Path) -> None:
    path = made.write(tmp_path / "run.json", made.atif_team(steps=[]))
    with pytest.raises(CoaError):
        import_episodes(path, tmp_path / "out" / "e.jsonl")
    left = [each.name for each in (tmp_path / "out").iterdir()]
    assert all(name.endswith(".lock") for name in left), left


def test_episodes_get_the_ids_of_their_tasks_and_never_the_gold(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    task = {"id": "t-7", "question": made.QUESTION, "answers": ["42"], "meta": {"hops": 2}}
    made.write(tasks, task)
    rows = [made.oagents_row(), made.oagents_row(question="What else?", task_id="x")]
    found, lines = imported(made.write(tmp_path / "r.jsonl", *rows), tasks=tasks)
    assert [e.task_id for e in found] == ["t-7", "x"]
    assert [e.meta.get("hops") for e in found] == [2, None]
    assert "episodes about none of the tasks: 1" in lines
    for name in ("langgraph", "smolagents"):
        path = made.write(tmp_path / f"{name}.json", made.ALL[name]())
        ((episode,), _) = imported(path, tasks=tasks)
        assert (episode.task_id, episode.question) == ("t-7", made.QUESTION)
        assert episode.meta["hops"] == 2 and "42" not in json.dumps(episode.meta)


def test_a_question_that_several_tasks_have_decides_for_none(tmp_path: Path) -> None:
    both = [{"id": each, "question": made.QUESTION, "answers": [each]} for each in "ab"]
    tasks = made.write(tmp_path / "tasks.jsonl", *both)
    path = made.write(tmp_path / "state.json", made.langgraph_state())
    (episode,), lines = imported(path, tasks=tasks)
    assert episode.task_id == "state.json"
    assert "episodes about several of the tasks: 1" in lines
    made.write(path, {"task_id": "b", **made.langgraph_state()})
    (episode,), _ = imported(path, tasks=tasks)
    assert episode.task_id == "b"


def test_the_command_reads_teams_and_the_published_files(tmp_path: Path) -> None:
    team = made.write(tmp_path / "team.json", made.atif_team())
    out = tmp_path / "e.jsonl"
    done = command("import", team, "--out", out)
    assert done.exit_code == 0 and "1 episodes in" in done.stdout, done.output
    assert "not known: usage unknown 2" in done.stderr
    done = command("import", team, "--out", out, "--json")
    assert json.loads(done.stdout)["gaps"] == {"usage_unknown": 2}
    task = {"extra_info": {"question": "Where?"}, "reward_model": {"ground_truth": "Lima"}}
    rows = made.write(tmp_path / "rl.jsonl", task)
    for words in ((rows,), ("afm-rl", rows), (rows, "--format", "afm")):
        done = command("import", *words, "--out", tmp_path / "tasks.jsonl")
        assert "1 rows in" in done.stdout and "tasks, not episodes" in done.stdout, done.output
    done = command("import", team, rows, "--out", out)
    assert isinstance(done.exception, UsageError) or done.exit_code == 2
    done = command("import", team, "--out", out, "--format", "afm")
    assert done.exit_code != 0


def test_the_documentation_shows_what_is_told(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "import.md").read_text(encoding="utf-8")

    def shown(name: str) -> str:
        found = re.search(r"```\w*\n(.*?)```", page[page.index(f"<!-- {name} -->") :], re.DOTALL)
        assert found, name
        return found[1]

    path = tmp_path / "run.json"
    path.write_text(shown("trajectory"))
    episode, told = one(path)
    events = [
        f"{e.agent} -> {e.to}: {e.text}" if isinstance(e, Message)
        else f"{e.agent} uses {e.tool} {e.argument}: {e.result}"
        for e in episode.events
    ]  # fmt: skip
    assert "\n".join(events) == shown("events").strip()
    assert told.partition("\n")[2] == shown("told").strip()
    table = page[page.index("| format |") :].partition("\n\n")[0]
    named = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert {each.name for each in FORMATS} <= set(named)


def command(*words: object) -> Any:
    from typer.testing import CliRunner

    from coa.cli import app

    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_opening_of_a_file_is_read_however_it_is_cut() -> None:
    text = json.dumps(made.atif_team(), indent=1)
    for end in range(0, len(text), 97):
        held = opening(text[:end].encode())
        assert held is None or json.loads(json.dumps(held)) == held
    assert opening(text.encode()) == made.atif_team()
    assert opening(b'[{"a": tru') == [{}] and opening(b"no json") is None
    assert opening(b'{"a": ' + 5000 * b"1") == {}
    assert opening(b'[{"a": "b"}' + 20_000 * b"[") is not None


def test_a_large_list_and_a_packed_file_are_read(tmp_path: Path) -> None:
    many = [made.atif_team(session_id=str(n), notes="x" * 70_000) for n in range(40)]
    path = tmp_path / "many.json.gz"
    path.write_bytes(gzip.compress(json.dumps(many).encode()))
    notes = Notes()
    assert len(list(documents(path, notes, spread=True))) == 40 and not notes.counts
    found, _ = imported(path)
    assert len(found) == 40


@pytest.mark.parametrize("ends", ["", "\n"])
def test_a_large_list_on_one_line_is_never_held_whole(ends: str, tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "many.json"
    each = json.dumps({"notes": "x" * 400_000})
    path.write_text(f"[{', '.join([each] * 100)}]{ends}")
    tracemalloc.start()
    try:
        assert sum(1 for _ in documents(path, Notes(), spread=True)) == 100
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 3
    finally:
        tracemalloc.stop()
