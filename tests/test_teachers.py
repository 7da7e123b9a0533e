"""The rule-based teacher: it is right, errs when told to, sees no gold, and survives a kill."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coa.distillation.convert import convert
from coa.environment import Environment
from coa.environments import make_tasks
from coa.environments.atlas.pages import pages
from coa.environments.atlas.tasks import families_of
from coa.environments.atlas.world import load_world
from coa.environments.experts import Experts
from coa.errors import ConfigError, RecordError, UsageError
from coa.grammar import load_grammar
from coa.io.runs import dumps
from coa.recording import load_teacher
from coa.recording.episode import (
    AgentSpec,
    Episode,
    Message,
    Tokens,
    ToolUse,
    load_episodes,
)
from coa.rewards import exact_match
from coa.tasks import Task, TaskSet
from coa.tools import Tool, Toolbox
from scripts import TOOLBOX_OF, episodes_of, record_into, texts_of

RATE = {"error_rate": 0.3}
ERRING = Experts(**RATE)
WORLDS = (0, 7)


def tasks_of(split: str, each: int, world: int = 0) -> TaskSet:
    """So many tasks of every family of a split."""
    return make_tasks("atlas-mhqa", split, each * len(families_of(split)), seed=3, world_seed=world)


@pytest.fixture(scope="module")
def tasks() -> TaskSet:
    return tasks_of("train", 4)


@pytest.fixture(scope="module")
def erring(tasks: TaskSet) -> list[Episode]:
    return episodes_of(tasks, ERRING)


def right(episode: Episode, task: Task) -> bool:
    return episode.answer is not None and exact_match(episode.answer, task.answers) == 1.0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("split", ["train", "heldout_entity", "heldout_family"])
def test_careful_experts_solve_every_family(split: str, world: int) -> None:
    chosen = tasks_of(split, 3, world)
    assert {task.meta["family"] for task in chosen} == set(families_of(split))
    for task, episode in zip(chosen, episodes_of(chosen), strict=True):
        assert right(episode, task), (task.question, task.answers, episode.answer, episode.error)
        assert episode.meta == task.meta and episode.error is None


def test_experts_err_and_mostly_notice_and_it_is_counted(
    tasks: TaskSet, erring: list[Episode]
) -> None:
    counts: Counter[str] = Counter()
    for episode in erring:
        for name in ("careless_queries", "misreadings", "missed_mistakes", "alarms"):
            counts[name] += episode.meta.get(name, 0)
        marked = [event for event in episode.events if event.erred]
        queries = [event for event in marked if isinstance(event, ToolUse)]
        readings = [e for e in marked if isinstance(e, Message) and e.facts["part"] == "finding"]
        alarms = [
            e for e in episode.events if isinstance(e, Message) and e.facts.get("part") == "alarm"
        ]
        assert len(queries) == episode.meta.get("careless_queries", 0)
        assert len(readings) == episode.meta.get("misreadings", 0)
        assert len(alarms) == episode.meta.get("alarms", 0)
    assert all(counts.values()), counts
    assert counts["missed_mistakes"] < counts["misreadings"] < counts["alarms"]
    wrong = [e for e, task in zip(erring, tasks, strict=True) if not right(e, task)]
    assert 0 < len(wrong) < len(tasks) / 5
    for episode in wrong:
        missed = episode.meta.get("missed_mistakes", 0) > 0
        assert missed or episode.error == "a look-up brought no report", episode.meta


def test_a_sound_report_is_sometimes_doubted(tasks: TaskSet) -> None:
    wary = episodes_of(tasks, Experts(error_rate=0.0, false_alarm_rate=0.3))
    assert sum(episode.meta.get("false_alarms", 0) for episode in wary) > 0
    assert not any(event.erred for episode in wary for event in episode.events)
    solved = sum(right(episode, task) for episode, task in zip(wary, tasks, strict=True))
    assert solved > 0.8 * len(tasks)


def test_the_rates_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"a rate of the experts is 1\.5, expected 0 to 1"):
        load_teacher("experts", error_rate=1.5)


# -- what an agent sees ----------------------------------------------------------------------


def test_an_agent_sees_what_was_said_to_it_and_nothing_else() -> None:
    episode = Episode(
        "t", "q?", "mine", [AgentSpec("a", "planner", "A."), AgentSpec("b", "", "B.")]
    )
    episode.events = [
        Message("user", "a", "q?"),
        Message("a", "b", "find it", thought="hm"),
        ToolUse("b", "look", "it", "page"),
        ToolUse("a", "look", "other", "leaf"),
        Message("system", "b", "carried", facts={"secret": "x"}),
        Message("b", "user", "seen", erred=True),
        Message("a", "user", "done"),
    ]
    assert texts_of(episode, 1) == ["A.", "q?"]
    assert texts_of(episode, 5) == ["B.", "find it", "page", "carried"]
    assert texts_of(episode, 6) == ["A.", "q?", "hm find it", "leaf"]


def test_experts_speak_of_nothing_that_was_not_said_to_them(erring: list[Episode]) -> None:
    names = {agent.name for agent in erring[0].agents}
    seen = Counter[str]()
    for episode in erring:
        for index, event in enumerate(episode.events):
            if not isinstance(event, Message) or event.agent not in names:
                continue
            context = texts_of(episode, index)
            given = "\n".join(context)
            part = event.facts["part"]
            if part == "plan":
                assert context[1:] == [episode.question]
            elif part == "query":
                assert all(word in given for word in event.text.split() if word[0].isupper())
            elif part == "finding":
                assert all(value in given for value in event.facts.get("values", ()))
            elif part == "verdict":
                assert event.text in given or event.thought.endswith(f", so {event.text}.")
            seen[part] += 1
    assert set(seen) == {"plan", "query", "finding", "alarm", "approval", "verdict"}


def test_replacing_gold_by_garbage_leaves_episodes_byte_identical(
    tasks: TaskSet, tmp_path: Path
) -> None:
    chosen = tasks[:40]
    spoilt = [replace(t, answers=("garbage",), gold={"hops": [{"garbage": 1}]}) for t in chosen]
    shown: list[Task] = []

    def tools(task: Task) -> list[Tool]:
        shown.append(task)
        return [*TOOLBOX_OF(task).values()]

    env = Environment("spied", tools=tools, grammar="mhqa", teacher=ERRING)
    for name, these in (("true", chosen), ("spoilt", spoilt)):
        assert len(record_into(tmp_path / name, these, env=env)) == 40
    assert (tmp_path / "true").read_bytes() == (tmp_path / "spoilt").read_bytes()
    assert len(shown) >= 80 and not any(task.answers or task.gold for task in shown)


def shelf(seed: int = 0) -> Toolbox:
    """An encyclopedia without an index: it returns the pages whose titles the query holds."""
    written = {page.title: page for page in pages(load_world(seed))}

    async def find(query: str) -> str:
        names = {" ".join(query.split()[a:b]) for a in range(9) for b in range(a + 1, 10)}
        found = [written[name].text for name in sorted(names & written.keys())]
        return "\n".join(found).replace("\n\n", "\n")

    return Toolbox([Tool("wiki_search", find)])


async def test_the_first_team_records_what_it_always_recorded() -> None:
    """Published recipes record episodes again, so these may not change by a byte."""
    box, digest = shelf(), hashlib.sha256()
    grammar = box.bind(load_grammar("mhqa"))
    for task in make_tasks("atlas-mhqa", "train", 69, 2):
        episode = await ERRING.record(task.public(), box, seed=4)
        record = episode.to_json() | {"schema": 2}
        assert record.pop("tools") == []  # whoever records notes them; the team does not
        digest.update(dumps(record).encode())
        if episode.answer is not None:
            digest.update(convert(episode, grammar).text.encode())
    assert digest.hexdigest()[:16] == FIRST_TEAM


FIRST_TEAM = "f7c961e9d4a6a093"


# -- cost ------------------------------------------------------------------------------------


def words(text: str) -> int:
    return len(text.split())


def test_tokens_are_counted_call_by_call_with_and_without_a_cache() -> None:
    agents = [AgentSpec("a", "planner", "sys tem"), AgentSpec("b", "reader", "other")]
    episode = Episode("t", "q", "mine", agents)
    episode.events = [
        Message("user", "a", "q1 q2"),
        Message("a", "b", "p1 p2 p3", thought="t1"),  # in: 2 + 2, out: 4
        ToolUse("a", "look", "x", "r1 r2"),
        Message("system", "b", "m1"),  # no model wrote this
        Message("b", "a", "f1"),  # in: 1 + 3 + 1, out: 1
        Message("a", "user", "end"),  # in: 2 + 2 + 4 + 2 + 1, of them 4 + 4 known, out: 1
    ]
    tokens = episode.count_tokens(words)
    assert tokens == Tokens(prompt=4 + 5 + 11, cached=8, sampled=4 + 1 + 1)
    assert (tokens.total, tokens.total_cached) == (26, 18)


def test_the_cost_of_real_episodes_can_be_counted(erring: list[Episode]) -> None:
    for episode in erring:
        tokens = episode.count_tokens(words)
        prompts = {agent.name: words(agent.system) for agent in episode.agents}
        calls = [e for e in episode.events if isinstance(e, Message) and e.agent in prompts]
        assert tokens.prompt > sum(prompts[call.agent] for call in calls)
        assert 0 < tokens.sampled < tokens.total_cached <= tokens.total
        assert (tokens.cached > 0) == (len(calls) > len({call.agent for call in calls}))


# -- files -----------------------------------------------------------------------------------


def test_episodes_come_back_from_json_as_they_were(erring: list[Episode], tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text("".join(dumps(episode.to_json()) + "\n" for episode in erring))
    again = load_episodes(path)
    assert again == erring
    assert [dumps(e.to_json()) for e in again] == [dumps(e.to_json()) for e in erring]


def test_a_file_that_holds_no_episodes_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text('{"schema": 7}\n')
    with pytest.raises(RecordError, match=r"e\.jsonl:1: found episode schema 7, expected 4"):
        load_episodes(path)
    path.write_text('{"schema": 1, "events": []}\n')
    with pytest.raises(RecordError, match=r"e\.jsonl:1: the episode has no field 'task_id'"):
        load_episodes(path)


RECORD_UNTIL_STUCK = """
import asyncio, sys
from pathlib import Path
from coa.environments.experts import Experts
from coa.recording.record import Recording, run_recording

class Stuck(Experts):
    left = 20

    async def record(self, task, toolbox, seed=0):
        if not self.left:
            print("stuck", flush=True)
            await asyncio.Event().wait()
        self.left -= 1
        return await super().record(task, toolbox, seed)

import coa.environments.experts
coa.environments.experts.Experts = Stuck
how = {"options": {"error_rate": 0.3}, "workers": 1}
run_recording(Recording(tasks=Path(sys.argv[1]), **how), Path(sys.argv[2]))
"""


def record(tasks: Sequence[Task], path: Path, seed: int = 0) -> bytes:
    record_into(path, tasks, options=RATE, seed=seed)
    return path.read_bytes()


def test_a_killed_recording_continues_and_ends_with_the_same_file(
    tasks: TaskSet, tmp_path: Path
) -> None:
    chosen = TaskSet(tasks[:30])
    whole = record(chosen, tmp_path / "whole.jsonl")
    assert record(chosen, tmp_path / "again.jsonl") == whole
    assert record(chosen, tmp_path / "other.jsonl", seed=1) != whole
    chosen.save(tmp_path / "tasks.jsonl")
    path = tmp_path / "killed.jsonl"
    command = [sys.executable, "-c", RECORD_UNTIL_STUCK, str(tmp_path / "tasks.jsonl"), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGKILL)
    assert 5 < path.read_bytes().count(b"\n") < 30
    with path.open("ab") as file:
        file.write(whole[:100])  # a line that the kill cut
    assert record(chosen, path) == whole
    assert record(chosen, path) == whole


# -- what goes wrong -------------------------------------------------------------------------


def test_a_question_nobody_understands_is_recorded_not_raised(tmp_path: Path) -> None:
    tasks = [Task("Why?"), Task("What is the capital of Peru?")]
    careful = {"error_rate": 0.0, "miss_rate": 0.0, "false_alarm_rate": 0.0}
    lost, found = record_into(tmp_path / "episodes.jsonl", tasks, options=careful)
    assert (lost.answer, lost.error) == (None, "the planner could not plan")
    assert [e.text for e in lost.events if isinstance(e, Message)][-1].startswith(
        "I do not know how"
    )
    assert found.answer == "Lima"


async def test_the_set_of_a_task_decides_which_team_works_on_it() -> None:
    parts = {
        "": {"planner", "searcher", "reader", "reflector", "verifier"},
        "atlas-web": {"planner", "searcher", "reader", "reflector", "verifier"},
        "atlas-code": {"planner", "searcher", "reader", "coder", "reflector", "verifier"},
        "gym-code": {"planner", "coder", "critic", "verifier"},
    }
    prompts = set()
    for name, agents in parts.items():
        episode = await Experts().record(Task("Why?", meta={"set": name}), Toolbox())
        assert {agent.name for agent in episode.agents} == agents
        assert (episode.answer, episode.error) == (None, "the planner could not plan")
        prompts.add(episode.agents[0].system)
        assert all(60 < words(agent.system) < 400 for agent in episode.agents)
    assert len(prompts) == len(parts)


async def test_a_tool_that_fails_or_finds_nothing_ends_in_an_error_not_in_an_answer() -> None:
    async def nothing(query: str) -> str:
        return "Nothing was found."

    async def broken(query: str) -> str:
        raise OSError("no route")

    for answer, failure in ((nothing, None), (broken, "failed")):
        box = Toolbox([Tool("wiki_search", answer)])
        episode = await Experts(0.0).record(Task("What is the capital of Peru?"), box)
        assert (episode.answer, episode.error) == (None, "a look-up brought no report")
        assert episode.meta["failed_look_up"] == "the capital of Peru"
        uses = [event for event in episode.events if isinstance(event, ToolUse)]
        assert [use.failure for use in uses] == [failure] * 3
        assert len({use.argument for use in uses}) == 3, "a query is never repeated"


OWN = '''
from coa import Episode, Task, ToolCall
from coa.tools import Toolbox
from coa.recording.episode import AgentSpec, Message, ToolUse


class Parrot:
    """Searches for the question and repeats the first words that come back."""

    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode:
        episode = Episode(task.id, task.question, "parrot", [AgentSpec("p", "searcher", "Repeat.")])
        seen = await toolbox.call(ToolCall("wiki_search", task.question))
        episode.events += [
            Message("user", "p", task.question),
            ToolUse("p", "wiki_search", task.question, seen.text, seen.failure),
            Message("p", "user", seen.text, facts={"part": "verdict"}),
        ]
        episode.answer = seen.text[:20]
        return episode


class Mute:
    pass


class Told(Parrot):
    """One that is told its words, and is not a coroutine."""

    def __init__(self, words, agent="p"):
        self.words, self.agent = words, agent

    def record(self, task, toolbox, seed=0):
        episode = Episode(task.id, task.question, "told", [AgentSpec("p", "searcher", "Repeat.")])
        episode.events.append(Message("user", "p", task.question))
        episode.events.append(Message(self.agent, "user", "Done."))
        episode.answer = self.words
        return episode


class Broken(Parrot):
    async def record(self, task, toolbox, seed=0):
        return {}["boom"]


parrot = Parrot()
'''


@pytest.fixture
def teacher_of_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of one's own in the current directory."""
    (tmp_path / "teacher_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("teacher_of_mine")
def test_a_teacher_of_ones_own_plugs_in_by_module(tmp_path: Path) -> None:
    task = Task("What is the capital of Peru?", ("Lima",))
    for reference in ("teacher_of_mine:Parrot", "teacher_of_mine:parrot"):
        (episode,) = record_into(tmp_path / f"{reference}.jsonl", [task], teacher=reference)
        assert episode.teacher == "parrot" and (episode.answer or "").startswith("[1]")
    for reference, says in (
        ("expert", "'expert' is not a teacher; expected experts, llm or module:attribute"),
        ("teacher_of_mine:Mute", "has no method record"),
        ("teacher_of_mine:Parot", "Did you mean 'Parrot'"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_teacher(reference)


@pytest.mark.usefixtures("teacher_of_mine")
def test_a_class_of_ones_own_takes_settings_and_its_faults_are_one_line(
    tmp_path: Path,
) -> None:
    told, task = "teacher_of_mine:Told", Task("What is the capital of Peru?", ("Lima",))

    def said(reference: str, **options: object) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        (found,) = record_into(path, [task], teacher=reference, options=options)
        return str(found.answer)

    assert said(told, words="Lima") == "Lima"
    with pytest.raises(
        ConfigError, match=r"making the teacher '.*Told' failed: TypeError: .*words"
    ):
        load_teacher(told)
    with pytest.raises(UsageError, match=r"cannot be read back: .*answer: found '?3600"):
        said(told, words=3600)
    with pytest.raises(UsageError, match=r"cannot be read back: .*'stranger'"):
        said(told, words="Lima", agent="stranger")
    with pytest.raises(UsageError, match=r"KeyError: 'boom' \(teacher_of_mine\.py:\d+\)$"):
        said("teacher_of_mine:Broken")


def test_words_around_a_question_do_not_make_it_another() -> None:
    task = Task("What is the capital of Peru?")
    assert task.is_asked_by(" what is  the capital of Peru? ")
    assert task.is_asked_by("Use the tools. What is the capital of Peru? Answer in one word.")
    assert task.is_asked_by("the capital of Peru")
    assert not task.is_asked_by("What is the capital of Chile?") and not task.is_asked_by("")


def test_what_a_teacher_raises_is_raised_as_it_is(tmp_path: Path) -> None:
    class Broken:
        async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode:
            raise UsageError("I am on strike.")

    with pytest.raises(UsageError, match="I am on strike"):
        record_into(tmp_path / "e.jsonl", [Task("a?"), Task("b?")], teacher=Broken())
