"""Episodes that others wrote: one odd record has its reason, and the rest is distilled.

Also what an episode says of its own task: the names of its tools, and its grammar.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from coa.distillation.convert import convert
from coa.distillation.dataset import Distilling, DistillSettings, recorded_tools, run_distillation
from coa.distillation.filters import FilterSettings
from coa.errors import RecordError
from coa.grammar import load_grammar
from coa.io.runs import Json, dumps
from coa.recording.episode import Episode, ToolSpec, load_episodes
from coa.tools.functions import NOTED
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


def with_agents(*names: str) -> Json:
    return a_record(agents=[{"name": name, "part": "", "system": ""} for name in names])


def with_critic(place: int, **facts: Any) -> Json:
    """Somebody judges before an event."""
    record = a_record()
    said = {"kind": "say", "agent": "lead", "to": "lead", "text": "Hm.", "facts": facts}
    record["events"].insert(place, said)
    return record


def distilled(tmp_path: Path, *records: Json, **options: Any) -> tuple[list[str], dict[str, str]]:
    """(kept, rejected with their reasons), the same when the same command is given again."""
    path = tmp_path / "e.jsonl"
    path.write_text("".join(dumps(record) + "\n" for record in records))
    options = {"recipe": RECORDED, **options}
    done = run_distillation(Distilling(path, **options), tmp_path / "d")
    again = run_distillation(Distilling(path, **options), tmp_path / "d")
    assert again.kept == done.kept and again.rejected == done.rejected
    notes = {note["task_id"]: f"{note['reason']}: {note['detail']}" for note in done.rejected}
    return [chain.task_id for chain in done.kept], notes


GOOD = a_record(task_id="good", question="In which year did Nauru found its capital?")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (with_event(1, result=None), "event 2: has no result"),
        (with_event(1, argument={"q": "x"}), "event 2: argument: found {'q': 'x'}, expected a"),
        (with_event(0, facts="plan"), "event 1: facts: found 'plan', expected an object"),
        (with_event(0, call={"model": "m", "text": 3}), "event 1: call: text: found 3"),
        (
            with_event(0, call={"model": "m", "text": "", "given": ["hi"]}),
            "expected a role and a text",
        ),
        (a_record(events=["hi"]), "event 1 has the kind None, expected say or use"),
        (a_record(agents=["lead"]), "agents: found 'lead', expected an object"),
        (a_record(tools=["look"]), "tools: found 'look', expected an object"),
        (a_record(tools=[{"about": "Finds."}]), "tools: has no name"),
        (a_record(answer=42), "the episode: answer: found 42, expected a text"),
        (a_record(question=" "), "the question is empty"),
        (a_record(teacher=None), "the episode: has no teacher"),
        (a_record(meta=[1]), "the episode: meta: found [1], expected an object"),
        (with_event(1, failure="oops"), "event 2: failure: found 'oops', expected null or one of "),
        (with_event(1, failure=True), "event 2: failure: found True, expected a text"),
        (with_event(0, to="lad"), "event 1: to: found 'lad', expected a name from agents. Did you"),
        (
            with_event(1, agent="scout"),
            "event 2: agent: found 'scout', expected a name from agents",
        ),
        (with_event(0, to=""), "found '', expected a name from agents. Known: lead, system, user."),
        (with_agents("lead", "lead"), "agents: found 'lead' twice, expected each agent once."),
        (
            with_agents("lead", "user"),
            "agents: found 'user', which is no agent; expected another name.",
        ),
        (with_agents("lead", "system"), "agents: found 'system', which is no agent"),
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
        (
            with_event(3, facts={"part": "check", "score": "4"}),
            "of a check is no number: event 4 (lead): ",
        ),
        (with_event(3, facts={"part": "check", "score": None}), "score of a check is no number"),
        (with_event(3, text="Ok.", facts={"part": "check"}), "illegal under 'web': "),
        (
            with_critic(2, part="alarm", ratings={"Speed": "poor"}),
            "rates by an unknown criterion: event 3 (lead): 'Speed', expected "
            "Information Conflict, Tool Effectiveness, Trajectory Monitoring",
        ),
        (
            with_critic(2, part="approval", ratings={"Tool Effectiveness": "bad"}),
            "an unknown rating: event 3 (lead): Tool Effectiveness is 'bad', expected good, aver",
        ),
        (
            with_critic(2, part="alarm", ratings=["poor"]),
            "the ratings of a critic are no object: event 3 (lead): found \"['poor']\", expected a",
        ),
        (
            with_event(0, facts={"part": "oops"}),
            "unknown part: event 1 (lead): 'oops'. Known: alarm, approval, check, delegation, "
            "failure, finding, malformed, plan, query, suggestion, verdict.",
        ),
        (
            with_event(2, thought="Not </plan> but <answer>."),
            "a tag of the grammar: event 3 (lead): <think> holds </plan>",
        ),
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
    kept, notes = distilled(tmp_path, good, *records, recipe=called)
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
        ("think", "call_think"),
        ("answer", "call_answer"),
        ("reflection", "call_reflection"),
        ("suggested_answer", "call_suggested_answer"),
        ("double_check", "call_double_check"),
        ("observation", "call_observation"),
        ("tool", "call_tool"),
        ("Web_Search", "call_web_search"),
        ("Visit.Page", "call_visit_page"),
        ("\u691c\u7d22", "call_1"),
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
    declared = {"name": "plan", "description": "", "parameters": {"type": "object"}}
    called = DistillSettings(grammar="mhqa", filter=FilterSettings(min_tool_calls=0))
    good = {**GOOD, "events": GOOD["events"][:1]}
    kept, notes = distilled(tmp_path, good, a_record(meta={"tools": [declared]}), recipe=called)
    assert kept == ["good"] and notes["odd"].startswith("its tools do not fit into the grammar: ")
    assert "grammar 'mhqa': role 'plan' is" in notes["odd"] and "rename the tool" in notes["odd"]


def test_a_record_offers_all_tools_that_the_team_had(tmp_path: Path) -> None:
    had = [{"name": "ask_map", "about": "where a place is"}]
    settings = DistillSettings(grammar="web", tools="recorded", prompt="full")
    records = [GOOD, a_record(tools=had)]
    assert distilled(tmp_path, *records, recipe=settings) == (["good", "odd"], {})
    for chain in load_trajectories(tmp_path / "d" / "trajectories.jsonl"):
        assert sorted(chain.tools) == ["ask_map", "visit_page"]
        assert "where a place is" in chain.segments[0].text


def test_a_declared_tool_that_no_block_can_be_called_gets_a_block_of_another_name(
    tmp_path: Path,
) -> None:
    declared = {"name": "tool", "description": "", "parameters": {"type": "object"}}
    used = {"tool": "tool", "argument": "{}", "result": NOTED}
    record = with_event(1, **used) | {"meta": {"tools": [declared]}}
    assert distilled(tmp_path, record, recipe=DistillSettings(grammar="web")) == (["odd"], {})
    (chain,) = load_trajectories(tmp_path / "d" / "trajectories.jsonl")
    assert chain.tools == ["call_tool"] and "<call_tool> {}</call_tool>" in chain.text


def test_a_task_is_distilled_in_the_grammar_that_it_names(tmp_path: Path) -> None:
    own = resources.files("coa.grammar").joinpath("presets/code.toml").read_text("utf-8")
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
    kept, notes = distilled(tmp_path, *records, recipe=DistillSettings())
    assert kept == ["code", "mine"] and "'cod' is not a grammar. Did you mean" in notes["none"]
    chains = load_trajectories(tmp_path / "d" / "trajectories.jsonl")
    assert [(chain.grammar, chain.tools) for chain in chains] == [
        ("code", ["code"]),
        ("mine", ["code"]),
    ]


def test_a_task_of_a_set_is_distilled_in_the_grammar_that_it_names(tmp_path: Path) -> None:
    named = {"set": "atlas-web", "grammar": "react"}
    settings = DistillSettings(tools="recorded")
    assert distilled(tmp_path, a_record(meta=named), recipe=settings) == (["odd"], {})
    (chain,) = load_trajectories(tmp_path / "d" / "trajectories.jsonl")
    assert (chain.grammar, chain.protocol.name) == ("react", "react")


def test_a_grammar_that_is_chosen_stands_in_for_what_a_task_names(tmp_path: Path) -> None:
    named = a_record(meta={"set": "math500", "grammar": "cod"})
    kept, notes = distilled(tmp_path, GOOD, named)
    assert (kept, notes) == (["good", "odd"], {})
    chains = load_trajectories(tmp_path / "d" / "trajectories.jsonl")
    assert [chain.grammar for chain in chains] == ["web", "web"]


def test_what_each_of_two_episodes_of_a_task_says_of_itself_is_kept_apart(tmp_path: Path) -> None:
    settings = DistillSettings(tools="recorded", filter=FilterSettings(duplicate_similarity=0))
    records = [
        a_record(meta={"set": "math500", "grammar": name, "alarms": number})
        for number, name in enumerate(("web", "mhqa"), 1)
    ]
    assert distilled(tmp_path, *records, recipe=settings)[1] == {}
    chains = load_trajectories(tmp_path / "d" / "trajectories.jsonl")
    assert [(chain.grammar, chain.meta["alarms"]) for chain in chains] == [("web", 1), ("mhqa", 2)]


def test_consent_with_ratings_is_rated_and_goes_where_it_may_not_stand(tmp_path: Path) -> None:
    ratings = {"Tool Effectiveness": "average"}
    rated = with_critic(2, part="approval", ratings=ratings)
    unrated = with_critic(2, part="approval") | {"task_id": "plain"}
    early = with_critic(1, part="approval", ratings=ratings) | {"task_id": "early"}
    again = FilterSettings(duplicate_similarity=0)
    settings = DistillSettings(grammar="web", tools="recorded", filter=again)
    assert distilled(tmp_path, rated, unrated, early, recipe=settings)[1] == {}
    chain, *others = load_trajectories(tmp_path / "d" / "trajectories.jsonl")
    said = "Information Conflict: good. Tool Effectiveness: average. Trajectory Monitoring: good."
    assert f"<reflection> {said} Hm.</reflection>" in chain.text
    assert not any("<reflection>" in other.text for other in others)


def test_a_mistake_marks_a_message_with_its_thought_and_of_a_wish_nothing() -> None:
    wish = {"kind": "say", "agent": "lead", "to": "system", "text": "x", "facts": {"part": "query"}}
    record = with_event(1, erred=True)
    record["events"].insert(1, {**wish, "thought": "I look.", "erred": True})
    record["events"].insert(3, {**wish, "facts": {"part": "finding"}, "erred": True})
    record["events"][4] |= {"erred": True}
    episode = Episode.from_json(record)
    grammar = load_grammar("web")
    chain = convert(
        episode, recorded_tools(episode, grammar, [ToolSpec("visit_page")]).bind(grammar)
    )
    marked = [each.text[start:end] for each in chain.segments for start, end in each.errs]
    assert marked == [
        "<visit_page> yaren.nr</visit_page>",
        "<think> x Hm.</think>",
        "<suggested_answer> 1968</suggested_answer>",
    ]


def test_a_line_that_is_no_json_object_ends_it_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    for line, said in (("[1]", "found a list, expected a JSON object"), ("{", "is not JSON")):
        path.write_text(f"{dumps(GOOD)}\n{line}\n")
        with pytest.raises(RecordError, match=rf"e\.jsonl:2: .*{said}"):
            run_distillation(Distilling(path, recipe=RECORDED), tmp_path / "d")
    assert [each.name for each in tmp_path.iterdir()] == ["e.jsonl"]


def test_a_rejection_names_the_event_by_its_place_in_the_record(tmp_path: Path) -> None:
    record = a_record()
    for event, branch in zip(record["events"][1:], ("2", "1", "1"), strict=True):
        event["branch"] = branch
    _, notes = distilled(tmp_path, GOOD, record)
    assert notes["odd"] == (
        "illegal under 'web': event 2 (lead): <visit_page> may not come here; write <answer>."
    )
