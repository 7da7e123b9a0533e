"""The team of language models, against a scripted chat server on loopback.

Its replies come from what the rule-based experts say about the same questions, so that episodes
are right, convert and replay for real; malformed and wrong replies are put among them.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chat_server import (
    Answer,
    ChatServer,
    Oracle,
    answer,
    approval,
    call,
    contents,
    objection,
    plan,
    program,
    report,
    step,
    who,
)
from chat_server import check as checked
from coa.distillation.dataset import convert_one
from coa.environment import OpenEnvironment, open_environments
from coa.environments import SETS, make_tasks
from coa.environments.experts import Experts
from coa.errors import UsageError
from coa.grammar import ChatMessage, check, parse
from coa.io.runs import Json, dumps, manifest_beside, read_jsonl
from coa.recording.chat import in_turns
from coa.recording.episode import SYSTEM, Episode, Message, ToolUse, load_episodes
from coa.recording.llm import LLMSettings, LLMTeacher
from coa.recording.record import Recording, run_recording
from coa.rewards import RewardSettings
from coa.rollouts import choose_environments
from coa.tasks import Task, TaskSet
from coa.tools import Tool, Toolbox, tool
from coa.trajectory import Trajectory
from scripts import TOOLBOX_OF

KNOWN = [name for name in SETS if name != "toolbox"]
"""The sets whose experts the scripted models can speak for: those of `toolbox` need no words."""
SPARING = [
    pytest.param(name, marks=pytest.mark.slow) if name == "atlas-code" else name for name in KNOWN
]
"""The set with the longest episodes only in the slow tests."""
CAREFUL = Experts(0.0, 0.0, 0.0)


async def expert_episodes(tasks: TaskSet, opened: OpenEnvironment) -> list[Episode]:
    public = [task.public() for task in tasks]
    return [await CAREFUL.record(task, await opened.toolbox(task)) for task in public]


def settings(server: ChatServer, **options: Any) -> LLMSettings:
    return LLMSettings(server.ref, **{"backoff_s": 0.01, "temperature": 0.0, **options})


async def record(server: ChatServer, tasks: TaskSet, out: Path, **options: Any) -> list[Episode]:
    """What `coa record --teacher llm` writes."""
    given = {"model": server.ref, "backoff_s": 0.01, "temperature": 0.0, **options}
    recording = Recording(tasks=tasks, teacher="llm", options=given)
    await asyncio.to_thread(run_recording, recording, out)
    return load_episodes(out)


Spoil = Callable[[Json, str, int], str | Answer]
"""(request, what the oracle says, how many requests this agent made for this question) -> reply."""


class Played:
    """A task set, what a team recorded for it, and what the server saw."""

    def __init__(self, tasks: TaskSet, episodes: list[Episode], server: ChatServer) -> None:
        self.tasks, self.episodes, self.server = tasks, episodes, server
        self.chains: list[Trajectory] = []

    def said(self, part: str) -> list[Message]:
        """Every message that is a `part`."""
        events = [event for episode in self.episodes for event in episode.events]
        return [e for e in events if isinstance(e, Message) and e.facts.get("part") == part]


async def play(
    name: str,
    out: Path,
    count: int = 8,
    spoil: Spoil | None = None,
    **options: Any,
) -> Played:
    """Record tasks of a set and convert what is right; `spoil` may change what the oracle says."""
    tasks = make_tasks(name, "train", 2 * count, seed=5)
    environments, _ = choose_environments((), tasks)
    async with open_environments(environments, tasks, reward=RewardSettings()) as opened:
        known = [e for e in await expert_episodes(tasks, opened) if e.answer is not None][:count]
        oracle, ids = Oracle(known), {episode.task_id for episode in known}
        tasks = TaskSet(tuple(task for task in tasks if task.id in ids))

        asked: Counter[tuple[str, str]] = Counter()

        def reply(body: Json) -> str | Answer:
            key = (who(body), oracle.question(body))
            asked[key] += 1
            return spoil(body, oracle(body), asked[key]) if spoil else oracle(body)

        with ChatServer(reply) as server:
            episodes = await record(server, tasks, out, **options)
            played = Played(tasks, episodes, server)
        for task, episode in zip(tasks, episodes, strict=True):
            if episode.answer is not None:
                played.chains.append(await chain(task, episode, opened))
    return played


async def chain(task: Task, episode: Episode, opened: OpenEnvironment) -> Trajectory:
    """The episode as one chain, which is legal, right, and replays to the same text."""
    made = await convert_one(task.id, episode, opened, task)
    assert made.trajectory is not None and made.replay == "", made
    assert made.score == 1.0, (task.question, made.trajectory.answer)
    grammar = made.trajectory.protocol
    assert grammar == await opened.bound(task.public())
    assert check(grammar, parse(grammar, made.trajectory.text, env=True)) is None
    return made.trajectory


@pytest.mark.parametrize("name", KNOWN)
async def test_a_team_that_knows_what_experts_know_is_right_and_records_what_it_was_given(
    name: str, tmp_path: Path
) -> None:
    """Right, legal, replayed; and the record says exactly what every request held."""
    out = tmp_path / "episodes.jsonl"
    played = await play(name, out, 8)
    assert len(played.chains) == 8
    sent = sorted(dumps({"m": body["messages"]}) for body in played.server.bodies)
    assert sent == sorted(derived(load_episodes(out)))
    timings = [line for _, line in read_jsonl(out.with_name(f"{out.name}.timings.jsonl"))]
    assert {line.pop("task_id") for line in timings} == {e.task_id for e in played.episodes}
    for seconds in timings:
        assert seconds.keys() == {"total", "model", "tools"} and min(seconds.values()) > 0
    for episode in played.episodes:
        assert episode.cost is None
        for place in episode.calls:
            said = episode.events[place]
            assert isinstance(said, Message) and said.call is not None
            given = in_turns(episode.messages_of(place))
            assert said.call.prompt_tokens == sum(len(m.text.split()) for m in given)
            assert said.call.sampled_tokens == max(1, len(said.call.text.split()))
            assert given[0].role == "system" and given[-1].role == "user"
            roles = [message.role for message in given[1:]]
            assert all(a != b for a, b in pairwise(roles)), roles


def derived(episodes: list[Episode]) -> list[str]:
    """What was sent for every model call, from the record alone."""
    calls = [(episode, place) for episode in episodes for place in episode.calls]
    found = []
    for episode, place in calls:
        turns = in_turns(episode.messages_of(place))
        found.append(dumps({"m": [{"role": m.role, "content": m.text} for m in turns]}))
    return found


async def test_steps_that_do_not_need_each_other_are_worked_on_at_the_same_time() -> None:
    """Neither searcher is answered before both have asked."""
    both = threading.Barrier(2, timeout=20)

    def reply(body: Json) -> str:
        if who(body) == "planner":
            both_first = ("", "the population of both", [1, 2])
            return plan("the capital of Peru", "the capital of Chile", both_first)
        number = step(contents(body)) if who(body) in ("searcher", "reader") else 0
        if who(body) == "searcher":
            if number < 3:
                both.wait()
            return call(f"capital {number}")
        if who(body) == "reader":
            return report(f"Found {number}.")
        return approval(body) if who(body) == "reflector" else answer_or_check(body, "yes")

    with ChatServer(reply) as server:
        teacher = LLMTeacher(settings(server))
        episode = await teacher.record(Task("Which?"), TOOLBOX_OF(Task("Which?")))
    assert episode.error is None and episode.answer == "yes"
    uses = [
        (event.branch, event.argument) for event in episode.events if isinstance(event, ToolUse)
    ]
    assert uses == [("1", "capital 1"), ("2", "capital 2"), ("", "capital 3")]
    third = next(b for b in server.bodies if who(b) == "searcher" and step(contents(b)) == 3)
    told = "\n".join(contents(third))
    assert "- Found 1." in told and "- Found 2." in told
    for body in server.bodies:  # what happens at the same time elsewhere is not seen
        if who(body) in ("searcher", "reader") and step(contents(body)) == 1:
            assert "capital 2" not in "\n".join(contents(body))


def answer_or_check(body: Json, text: str, score: int = 4) -> str:
    told = "\n".join(contents(body)[1:])
    suggests = told.rfind("Give the answer.") > told.rfind("Check this answer")
    return answer(text) if suggests else checked(score)


# -- replies that cannot be read -----------------------------------------------------------------

NONSENSE = ["", "Sure! I can help.\n\nLet me think for a moment.", '{"steps": "\u4f60\u597d"}']


@pytest.mark.parametrize("name", SPARING)
async def test_replies_that_cannot_be_read_are_kept_and_asked_for_again(
    name: str, tmp_path: Path
) -> None:
    """Every agent's first reply to every question is nonsense; the chains show nothing of it, and
    the second reply is sampled hotter."""
    heat: dict[bool, set[float]] = {True: set(), False: set()}

    def spoil(body: Json, said: str, count: int) -> str:
        heat[count == 2].add(body["temperature"])
        return NONSENSE[len(said) % 3] if count == 1 else said

    played = await play(name, tmp_path / "spoilt.jsonl", 4, spoil)
    clean = await play(name, tmp_path / "clean.jsonl", 4)
    assert len(played.chains) == 4
    assert [c.text for c in played.chains] == [c.text for c in clean.chains]
    malformed = played.said("malformed")
    agents = {agent.name for agent in played.episodes[0].agents}
    assert heat == {True: {0.4}, False: {0.0}}
    assert len(malformed) == 4 * len(agents) and {say.agent for say in malformed} == agents
    assert all(say.erred and say.to == SYSTEM and say.call for say in malformed)
    assert sum(e.meta["malformed_replies"] for e in played.episodes) == len(malformed)
    for episode in played.episodes:
        for place in episode.calls:
            said = episode.events[place]
            if isinstance(said, Message) and said.facts.get("part") == "malformed":
                told = episode.events[place + 1]
                assert isinstance(told, Message) and (told.agent, told.to) == (SYSTEM, said.agent)
                assert told.text == said.facts["complaint"]


async def test_an_agent_that_never_replies_properly_ends_its_episode_only(tmp_path: Path) -> None:
    def spoil(body: Json, said: str, count: int) -> str | Answer:
        lost = "capital" in contents(body)[1] and who(body) == "searcher"
        return Answer("No\nidea", finish="length") if lost else said

    played = await play("atlas-mhqa", tmp_path / "episodes.jsonl", 12, spoil, attempts=2)
    lost = [episode for episode in played.episodes if episode.error]
    assert 0 < len(lost) < 12 == len(lost) + len(played.chains)
    assert {episode.error for episode in lost} == {
        "the searcher's reply could not be read 2 times: Your reply was cut because it is too "
        "long. Write a shorter one."
    }
    assert all(episode.meta["malformed_replies"] >= 2 for episode in lost)


async def test_a_reply_that_was_cut_is_read_only_where_it_is_whole(tmp_path: Path) -> None:
    def spoil(body: Json, said: str, count: int) -> str | Answer:
        if who(body) == "reader" and count == 1:
            return Answer(said[: len(said) // 2], finish="length")
        if who(body) == "searcher":
            return Answer(f"{said}\n\n", finish="length")
        return said

    played = await play("atlas-mhqa", tmp_path / "episodes.jsonl", 3, spoil)
    assert len(played.chains) == 3
    malformed = played.said("malformed")
    assert [say.agent for say in malformed] == ["reader"] * 3
    assert {say.facts["complaint"] for say in malformed} == {
        "Your reply was cut because it is too long. Write a shorter one."
    }


# -- objections ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SPARING if name != "gym-code"])
async def test_a_search_that_missed_is_made_again_in_other_words(name: str, tmp_path: Path) -> None:
    """The reader finds nothing and the critic objects; in a rated team the planner plans again."""

    def spoil(body: Json, said: str, count: int) -> str:
        agent = who(body)
        if agent == "searcher" and count == 1:
            return call("something else entirely")
        if agent == "reader" and count == 1:
            return report("what the step asks for", found=False)
        if agent == "reflector" and count == 1:
            return objection(body, "poor", "search again", "The search missed.")
        if agent == "planner" and count > 1:
            return plan("look for it in other words", thought="It missed.")
        return said

    played = await play(name, tmp_path / "episodes.jsonl", 6, spoil, slots=1)
    assert len(played.chains) == 6
    assert len(played.said("alarm")) == 6
    assert len(played.said("plan")) == (6 if played.chains[0].grammar == "mhqa" else 12)
    for made in played.chains:
        assert made.text.count("The search missed.</reflection>") == 1
        assert "something else entirely" in made.text


@pytest.mark.parametrize("name", SPARING)
async def test_work_that_the_critic_objects_to_is_done_again(name: str, tmp_path: Path) -> None:
    def spoil(body: Json, said: str, count: int) -> str:
        agent = who(body)
        if agent == "coder" and count == 1:
            return program("print(17)")
        if agent in ("reflector", "critic") and count == 1:
            verdict = "write again" if agent == "critic" else "read again"
            return objection(body, "average", verdict, "It is not so.")
        return said

    played = await play(name, tmp_path / "episodes.jsonl", 4, spoil, slots=1)
    assert len(played.chains) == 4 == len(played.said("alarm"))
    assert all("It is not so.</reflection>" in made.text for made in played.chains)


@pytest.mark.parametrize("name", SPARING)
async def test_two_objections_in_a_row_become_one_reflection_and_a_thought(
    name: str, tmp_path: Path
) -> None:
    def spoil(body: Json, said: str, count: int) -> str:
        agent = who(body)
        if agent == "coder" and count <= 2:
            return program(f"print({count})")
        if agent in ("reflector", "critic") and count <= 2:
            verdict = "write again" if agent == "critic" else "read again"
            return objection(body, "average", verdict, f"It is wrong {count} times.")
        if agent == "searcher" and count == 2:
            return call("the same in other words")
        return said

    played = await play(name, tmp_path / "episodes.jsonl", 3, spoil, slots=1, rounds=4)
    assert len(played.chains) == 3 and len(played.said("alarm")) == 6
    assert all("It is wrong 2 times." in made.text for made in played.chains)


@pytest.mark.parametrize("name", SPARING)
async def test_an_answer_that_fails_its_check_goes_back_to_the_planner(
    name: str, tmp_path: Path
) -> None:
    def spoil(body: Json, said: str, count: int) -> str:
        if who(body) == "verifier" and count == 1:
            return answer("no")
        if who(body) == "verifier" and count == 2:
            return checked(1, "The reports do not say so.")
        if who(body) == "planner" and count > 1:
            assert "The answer was: no\n" in contents(body)[-1]
            return plan(combine="combine the reports once more", thought="The check failed.")
        return said

    played = await play(name, tmp_path / "episodes.jsonl", 4, spoil, slots=1)
    assert len(played.chains) == 4
    assert [say.facts["score"] for say in played.said("check")] == [1, 4] * 4
    for made in played.chains:
        failed = made.text.index("The reports do not say so.")
        assert ("<double_check>" in made.text) == ("Score: 1" in made.text)
        assert "1. combine" not in made.text  # one step is no list
        assert failed < made.text.index("combine the reports once more") < len(made.text)


IMPOSSIBLE = plan(thought="I do not know.", combine="")


async def test_a_team_that_never_agrees_stops(tmp_path: Path) -> None:
    def doubt(body: Json, said: str, count: int) -> str:
        if who(body) == "planner" and count > 1:
            return plan(combine="try once more")
        checks = who(body) == "verifier" and count % 2 == 0
        return checked(2, "No.") if checks else said

    def object_always(body: Json, said: str, count: int) -> str:
        if who(body) == "searcher":
            return call(f"words {count}")
        return objection(body, "", "search again", "No.") if who(body) == "reflector" else said

    played = await play("atlas-mhqa", tmp_path / "a.jsonl", 1, doubt, replans=1)
    assert played.episodes[0].error == "no answer passed the check in 2 tries"
    played = await play("atlas-mhqa", tmp_path / "b.jsonl", 1, object_always, rounds=2)
    assert played.episodes[0].error == "step 1 brought no report that was approved"
    assert len(played.said("alarm")) == 2
    impossible = lambda body, said, count: IMPOSSIBLE  # noqa: E731
    played = await play("atlas-mhqa", tmp_path / "c.jsonl", 1, impossible)
    assert played.episodes[0].error == "the planner could not plan"
    assert played.said("failure")[0].text == "I do not know."


# -- what agents see -----------------------------------------------------------------------------


async def test_gold_is_in_no_request_and_in_no_file(tmp_path: Path) -> None:
    task = Task(
        "What is the capital of Peru?",
        ("gold-0451",),
        meta={"world": 0},
        gold={"hops": ["gold-0451"]},
    )

    def reply(body: Json) -> str:
        said = {"planner": plan("the capital of Peru"), "searcher": call("capital of Peru")}
        said |= {"reader": report("It is Lima."), "reflector": approval(body)}
        return said.get(who(body)) or answer_or_check(body, "Lima")

    out = tmp_path / "episodes.jsonl"
    with ChatServer(reply) as server:
        (episode,) = await record(server, TaskSet((task,)), out)
        alone = await LLMTeacher(settings(server)).record(task, TOOLBOX_OF(task))
        assert alone.answer == "Lima"
    assert episode.answer == "Lima"
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "capital of Peru" in written and "0451" not in written + dumps({"b": server.bodies})


async def test_a_tool_of_ones_own_is_called_by_a_worker(tmp_path: Path) -> None:
    @tool
    async def weather(city: str, days: int = 1) -> str:
        """Forecast the weather of a city."""
        return f"{city}: rain for {days} days"

    def reply(body: Json) -> str:
        system = contents(body)[0]
        if who(body) == "worker":
            assert "- weather: Forecast the weather of a city" in system and "wiki" not in system
            return call({"city": "Lima", "days": 2})
        if who(body) == "planner":
            return plan("the weather in Lima")
        if who(body) == "reader":
            return report("It rains for 2 days.")
        return approval(body) if who(body) == "reflector" else answer_or_check(body, "rain")

    task = Task("Rain?", history=(ChatMessage("system", "Be brief."),))
    with ChatServer(reply) as server:
        episode = await LLMTeacher(settings(server)).record(task, Toolbox([weather]))
    assert episode.answer == "rain" and episode.history == task.history
    told = {who(body): contents(body)[1] for body in server.bodies}
    assert all("\nsystem: Be brief." in told[who] for who in ("planner", "verifier"))
    used = [event for event in episode.events if isinstance(event, ToolUse)]
    assert [(u.tool, u.result, u.failure) for u in used] == [
        ("weather", "Lima: rain for 2 days", None)
    ]
    with pytest.raises(UsageError, match="needs at least one tool"):
        await LLMTeacher(settings(server)).record(Task("Rain?"), Toolbox())


async def test_a_call_that_was_made_before_is_not_made_again(tmp_path: Path) -> None:
    def spoil(body: Json, said: str, count: int) -> str:
        if who(body) == "reflector" and count == 1:
            return objection(body, "", "search again", "The search missed.")
        if who(body) == "searcher" and count == 3:
            assert "This call was made before" in contents(body)[-1]
            return call("the capital city")
        if who(body) == "searcher" and count == 2:  # the same in another order
            return call(" ".join(reversed(json.loads(said)["input"].upper().split())))
        return said

    played = await play("atlas-mhqa", tmp_path / "episodes.jsonl", 1, spoil)
    assert len(played.chains) == 1 and len(played.said("malformed")) == 1
    used = [event.argument for event in played.episodes[0].events if isinstance(event, ToolUse)]
    assert len(used) == len(set(used)) == 2


async def test_tasks_of_several_environments_share_the_team_and_its_journal(tmp_path: Path) -> None:
    sets = ("atlas-mhqa", "atlas-web")
    tasks = [task for name in sets for task in make_tasks(name, "train", 1, seed=5)]
    with ChatServer(lambda body: IMPOSSIBLE) as server:
        episodes = await record(server, TaskSet(tuple(tasks)), tmp_path / "episodes.jsonl")
    assert [episode.task_id for episode in episodes] == [task.id for task in tasks]
    assert len(server.bodies) == 2


# -- rules and schemas ---------------------------------------------------------------------------


async def test_rules_are_said_to_whoever_breaks_them(tmp_path: Path) -> None:
    """A report that is only the query, and an answer that stands nowhere, are asked for again."""

    made: list[str] = []

    def spoil(body: Json, said: str, count: int) -> str:
        if who(body) == "reader" and count == 1:
            return report(f"{made[-1].upper()}!")
        if who(body) == "searcher":
            made.append(json.loads(said)["input"])
        if who(body) == "verifier" and count == 1:
            return answer("Atlantis")
        return said

    played = await play("atlas-mhqa", tmp_path / "episodes.jsonl", 2, spoil, slots=1)
    complaints = {say.agent: say.facts["complaint"] for say in played.said("malformed")}
    assert complaints == {
        "reader": "Your report only repeats what was searched for. Report what a passage states.",
        "verifier": "'Atlantis' stands in nothing that a tool returned. Copy the answer from there,"
        " word for word.",
    }
    critics = [body for body in played.server.bodies if who(body) == "reflector"]
    assert all("Searched for: " in "\n".join(contents(body)) for body in critics)


async def test_an_answer_that_is_a_query_is_pointed_out_to_who_checks_it(tmp_path: Path) -> None:
    query = "capital of Peru"

    def reply(body: Json) -> str:
        said = {"planner": plan("the capital of Peru"), "searcher": call(query)}
        said |= {"reader": report("Lima is the capital of Peru."), "reflector": approval(body)}
        if who(body) in said:
            return said[who(body)]
        pointed = "word for word what was searched for" in contents(body)[-1]
        return checked(1, "It is the query.") if pointed else answer_or_check(body, query)

    async def search(text: str) -> str:
        return "Lima is the capital of Peru."

    with ChatServer(reply) as server:
        teacher = LLMTeacher(settings(server, replans=0))
        episode = await teacher.record(Task("Which?"), Toolbox([Tool("wiki_search", search)]))
    assert episode.error == "no answer passed the check in 1 tries"


@pytest.mark.parametrize(
    ("schemas", "probes", "said"),
    [
        ("json_schema", 1, "replies follow a JSON schema (response_format)"),
        ("json_object", 2, "replies follow a JSON schema (json_object)"),
        ("none", 2, "the server follows no JSON schema; replies are asked for in words and check"),
    ],
)
async def test_a_server_is_asked_once_whether_it_follows_schemas(
    schemas: str, probes: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = TaskSet((Task("Why?"), Task("Who?")))
    out = tmp_path / "episodes.jsonl"
    with ChatServer(lambda body: IMPOSSIBLE, schemas) as server:
        await record(server, tasks, out)
        assert len(server.probes) == probes
        forms = [body.get("response_format") for body in server.bodies]
        assert [bool(form) for form in forms] == [schemas != "none"] * 2
        for form in filter(None, forms):
            schema = form.get("schema") or form["json_schema"]["schema"]
            assert set(schema["properties"]) == {"thought", "steps", "combine"}
        out.unlink()
        manifest_beside(out).unlink()
        await record(server, tasks, out)  # all of it stands in the journal
        assert len(server.probes) == probes and len(server.bodies) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "schema" in line]
    assert len(lines) == 1 and said in lines[0]
