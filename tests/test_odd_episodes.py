"""Episodes that others wrote: one odd record has its reason, and the rest is distilled.

Also what an episode says of its own task: the names of its tools, and its grammar.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from coa.distill.filters import FilterSettings
from coa.distill.stage import DistillSettings, run_distillation
from coa.errors import RecordError
from coa.runs import Json, dumps
from coa.teachers.episode import Episode, load_episodes
from coa.trajectory import load_trajectories

RECORDED = DistillSettings(grammar="web", tools="recorded")


def a_record(**changed: Any) -> Json:
    """A team of one, that looks once, as another program may write it."""
    said = {"kind": "say", "agent": "lead", "to": "system", "thought": "Hm."}
    plan = {**said, "text": "1. look it up", "facts": {"part": "plan"}}
    used = {"kind": "use", "agent": "lead", "tool": "visit_page"}
    call = {**used, "argument": "yaren.nr", "result": "Yaren: founded in 1968"}
    guess = {**said, "text": "1968", "facts": {"part": "suggestion"}}
    check = {**said, "text": "It is stated.", "facts": {"part": "check", "score": 4}}
    record: Json = {
        **{"schema": 2, "task_id": "odd", "question": "When was Yaren founded?", "seed": 0},
        **{"teacher": "other", "answer": "1968", "error": None, "meta": {}},
        "agents": [{"name": "lead", "part": "planner", "system": "You lead."}],
        "events": [plan, call, guess, check],
    }
    return {**record, **changed}


def with_event(place: int, **changed: Any) -> Json:
    record = a_record()
    record["events"][place] |= changed
    return record


def distilled(tmp_path: Path, *records: Json, **options: Any) -> tuple[list[str], dict[str, str]]:
    """(kept, rejected with their reasons), the same when the same command is given again."""
    path = tmp_path / "e.jsonl"
    path.write_text("".join(dumps(record) + "\n" for record in records))
    options = {"settings": RECORDED, **options}
    done = run_distillation(path, tmp_path / "d", **options)
    again = run_distillation(path, tmp_path / "d", **options)
    assert again.kept == done.kept and again.rejected == done.rejected
    notes = {note["task_id"]: f"{note['reason']}: {note['detail']}" for note in done.rejected}
    return [chain.task_id for chain in done.kept], notes


GOOD = a_record(task_id="good", question="In which year did Nauru found its capital?")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (with_event(1, result=None), "event 2: has no result"),
        (with_event(1, argument={"q": "x"}), "event 2: argument: found \"{'q': 'x'}\", expected a"),
        (with_event(0, facts="plan"), "event 1: facts: found 'plan', expected an object"),
        (with_event(0, call={"model": "m", "text": 3}), "event 1: call: text: found '3'"),
        (
            with_event(0, call={"model": "m", "text": "", "given": ["hi"]}),
            "expected a role and a text",
        ),
        (a_record(events=["hi"]), "event 1 has the kind None, expected say or use"),
        (a_record(agents=["lead"]), "agents: found 'lead', expected an object"),
        (a_record(answer=42), "the episode: answer: found '42', expected a text"),
        (a_record(question=" "), "the question is empty"),
        (a_record(teacher=None), "the episode: has no teacher"),
        (a_record(meta=[1]), "the episode: meta: found '[1]', expected an object"),
    ],
)
def test_a_record_of_another_shape_is_no_episode_and_the_rest_goes_on(
    record: Json, said: str, tmp_path: Path
) -> None:
    kept, notes = distilled(tmp_path, GOOD, record)
    assert kept == ["good"] and list(notes) == ["line 2"]
    assert notes["line 2"].startswith("not an episode: ") and said in notes["line 2"]
    with pytest.raises(RecordError, match=r"e\.jsonl:2: "):
        load_episodes(tmp_path / "e.jsonl")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (with_event(3, facts={"part": "check", "score": "4"}), "score of a check is no number: le"),
        (with_event(3, facts={"part": "check", "score": None}), "score of a check is no number"),
        (with_event(3, text="Ok.", facts={"part": "check"}), "illegal under 'web': "),
        (a_record(question="Half \ud800 a question?"), "cannot be replayed: UnicodeEncodeError: "),
        (a_record(question="Half \ud800 a question?", task_id=""), "is not text in UTF-8"),
    ],
)
def test_an_episode_that_cannot_be_converted_ends_no_run(
    record: Json, said: str, tmp_path: Path
) -> None:
    kept, notes = distilled(tmp_path, GOOD, record)
    assert kept == ["good"] and said in notes[record["task_id"]]


def test_a_world_or_tools_that_are_none_are_the_trouble_of_one_episode(tmp_path: Path) -> None:
    called = DistillSettings(grammar="mhqa", filter=FilterSettings(min_tool_calls=0))
    good = {**GOOD, "events": GOOD["events"][:1]}
    records = [a_record(task_id="w", meta={"world": "no"}), a_record(meta={"tools": 7})]
    kept, notes = distilled(tmp_path, good, *records, settings=called)
    assert kept == ["good"]
    assert "world is 'no'" in notes["w"] and "tools is a int" in notes["odd"]


def test_half_of_a_character_in_a_message_does_no_harm(tmp_path: Path) -> None:
    record = with_event(0, text="half \ud83d of one")
    kept, notes = distilled(tmp_path, GOOD, record)
    assert "good" in kept and set(kept) | set(notes) == {"good", "odd"}


def test_null_is_the_default_of_a_field(tmp_path: Path) -> None:
    record = with_event(0, thought=None, erred=None, call=None, branch=None)
    record |= {"meta": None, "seed": None}
    episode = Episode.from_json(record)
    assert (episode.meta, episode.seed, episode.error) == ({}, 0, None)
    assert episode.events[0] == Episode.from_json(with_event(0, thought="")).events[0]
    assert distilled(tmp_path, record) == (["odd"], {})


@pytest.mark.parametrize("judged", [True, False])
def test_an_id_that_is_a_number_is_the_task_of_that_number(judged: bool, tmp_path: Path) -> None:
    tasks = tmp_path / "t.jsonl"
    tasks.write_text('{"id": 7, "question": "When was Yaren founded?", "answer": 1968}\n')
    given = {"tasks": tasks} if judged else {}
    assert distilled(tmp_path, a_record(task_id=7), **given) == (["7"], {})


@pytest.mark.parametrize(
    ("tool", "block"),
    [
        ("WikipediaSearch", "wikipediasearch"),
        ("visit-webpage", "visit_webpage"),
        ("plan", "call_plan"),
        ("observation", "call_observation"),
        ("tool", "call_tool"),
        ("Web_Search", "call_web_search"),
        ("Visit.Page", "call_visit_page"),
        ("\u691c\u7d22", "call_"),
        ("web_search", "web_search"),
    ],
)
def test_a_recorded_tool_may_have_any_name(tool: str, block: str, tmp_path: Path) -> None:
    record = a_record()
    record["events"].insert(1, {**record["events"][1], "tool": tool, "argument": "Yaren"})
    assert distilled(tmp_path, record) == (["odd"], {})
    (chain,) = load_trajectories(tmp_path / "d" / "trajectories.jsonl")
    assert sorted(chain.tools) == sorted([block, "visit_page"])
    assert f"<{block}> Yaren</{block}>" in chain.text


def test_declared_tools_that_no_block_can_be_called_are_the_trouble_of_one_episode(
    tmp_path: Path,
) -> None:
    declared = {"name": "tool", "description": "", "parameters": {"type": "object"}}
    called = DistillSettings(grammar="mhqa", filter=FilterSettings(min_tool_calls=0))
    good = {**GOOD, "events": GOOD["events"][:1]}
    kept, notes = distilled(tmp_path, good, a_record(meta={"tools": [declared]}), settings=called)
    assert (
        kept == ["good"]
        and "do not fit into the grammar: grammar 'mhqa': role 'tool' is" in (notes["odd"])
    )


def test_a_task_is_distilled_in_the_grammar_that_it_names(tmp_path: Path) -> None:
    own = resources.files("coa.protocol").joinpath("presets/code.toml").read_text("utf-8")
    file = tmp_path / "own.toml"
    file.write_text(own.replace('name = "code"', 'name = "mine"'))
    program = {"tool": "code", "argument": "```py\nprint(6 * 7)\n```", "result": "42"}
    approved = {**GOOD["events"][0], "text": "It ran.", "facts": {"part": "approval"}}
    events = [GOOD["events"][0], {**GOOD["events"][1], **program}, approved]
    records = [
        a_record(
            task_id=name,
            question=question,
            answer="42",
            events=events,
            meta={"set": "math500", "grammar": grammar},
        )
        for name, question, grammar in (
            ("code", "What is six times seven?", "code"),
            ("mine", "Which number do you get if you add seven six times over?", str(file)),
            ("none", "How much would it be in the end?", "cod"),
        )
    ]
    kept, notes = distilled(tmp_path, *records, settings=DistillSettings())
    assert kept == ["code", "mine"] and "'cod' is not a grammar. Did you mean" in notes["none"]
    chains = load_trajectories(tmp_path / "d" / "trajectories.jsonl")
    assert [(chain.grammar, chain.tools) for chain in chains] == [
        ("code", ["code"]),
        ("mine", ["code"]),
    ]
