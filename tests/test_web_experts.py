"""The teams for atlas-web and atlas-code: right, erring as told, blind to gold, convertible."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.distillation.dataset import Distilled
from coa.environment import Environment
from coa.environments import make_tasks
from coa.environments.atlas.catalogues import CATALOGUES
from coa.environments.atlas.pages import atlas_corpus
from coa.environments.atlas.tasks import families_of
from coa.environments.experts import Experts
from coa.grammar import Grammar, check, load_grammar, parse
from coa.grammar.grammar import parse_ratings, parse_score
from coa.grammar.parse import parse_code
from coa.recording.episode import Episode, Message, ToolUse
from coa.rewards import exact, exact_match
from coa.tasks import Task
from coa.tools import Tool, Toolbox
from coa.tools.web import CorpusSource, crawl_page, web_search, wiki_search
from scripts import distil, record_into, texts_of

SETS = {"atlas-web": "web", "atlas-code": "afm"}
CRITICS = ("alarm", "approval", "check")
TAGS = {
    "suggestion": "suggested_answer",
    "check": "double_check",
    "alarm": "reflection",
    "approval": "reflection",
}
"""What becomes a block of its own -> the name of the block."""
CRITERIA = ("Information Conflict", "Tool Effectiveness", "Trajectory Monitoring")
CAREFUL = Experts(error_rate=0.0, false_alarm_rate=0.0)
ERRING = Experts(error_rate=0.4, miss_rate=0.3, false_alarm_rate=0.05)
MISTAKES = {
    "atlas-web": ("careless_queries", "wrong_pages", "misreadings", "wrong_combinations"),
    "atlas-code": ("careless_queries", "misreadings", "wrong_programs"),
}


async def calculate(argument: str) -> str:
    """Stands for the code tool: it runs programs that our own experts wrote, and only those."""
    source = parse_code(argument).source
    assert re.fullmatch(
        r"n = [\[(]?[\d, ]+[\])]?\n(print|pint)\([\w\s.()/*<>,\[\]+-]+\)", source
    ), source
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(source, {})
        except NameError as error:
            return f"NameError: {error}"
    return out.getvalue()


@cache
def toolbox(name: str, world: int) -> Toolbox:
    if name == "atlas-code":
        return Toolbox([wiki_search(atlas_corpus(world)), Tool("code", calculate, body="code")])
    source = CorpusSource(atlas_corpus(world))
    return Toolbox([web_search(source), crawl_page(source)])


def toolbox_of(task: Task) -> Toolbox:
    return toolbox(task.meta["set"], task.meta["world"])


def place(grammar: str) -> Environment:
    return Environment("of tests", tools=lambda task: [*toolbox_of(task).values()], grammar=grammar)


def episodes_of(tasks: Sequence[Task], teacher: Experts) -> list[Episode]:
    async def record() -> list[Episode]:
        return [await teacher.record(task.public(), toolbox_of(task)) for task in tasks]

    return asyncio.run(record())


def right(episode: Episode, task: Task) -> bool:
    return episode.answer is not None and exact_match(episode.answer, task.answers) == 1.0


class Recorded(NamedTuple):
    name: str
    grammar: Grammar
    tasks: list[Task]
    episodes: list[Episode]


@pytest.fixture(scope="module", params=SETS)
def erring(request: pytest.FixtureRequest) -> Recorded:
    name = request.param
    tasks = [
        task for world in (0, 7) for task in make_tasks(name, "train", 110, 3, world_seed=world)
    ]
    return Recorded(name, load_grammar(SETS[name]), tasks, episodes_of(tasks, ERRING))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("world", (0, 7))
@pytest.mark.parametrize("split", ["train", "heldout_entity", "heldout_family"])
def test_careful_experts_solve_every_family(name: str, split: str, world: int) -> None:
    families = families_of(split, CATALOGUES[name])
    tasks = make_tasks(name, split, 4 * len(families), seed=6, world_seed=world)
    missing = set(families) - {task.meta["family"] for task in tasks}
    assert not missing or (missing == {"language_kin"} and world)
    for task, episode in zip(tasks, episodes_of(tasks, CAREFUL), strict=True):
        assert right(episode, task), (task.question, task.answers, episode.answer, episode.error)
        assert episode.error is None and not any(event.erred for event in episode.events)


def test_experts_err_in_every_way_and_it_is_counted_and_marked(erring: Recorded) -> None:
    counts: Counter[str] = Counter()
    for episode in erring.episodes:
        counts.update({k: v for k, v in episode.meta.items() if k in MISTAKES[erring.name]})
        counts.update({k: episode.meta.get(k, 0) for k in ("alarms", "false_alarms")})
        counts["missed_mistakes"] += episode.meta.get("missed_mistakes", 0)
        marked = [e for e in episode.events if e.erred and not _is_decision(e)]
        critics = [e for e in marked if _part(e) in CRITICS]
        assert len(marked) - len(critics) == sum(
            episode.meta.get(k, 0) for k in MISTAKES[erring.name]
        )
        assert len(critics) == sum(
            episode.meta.get(k, 0) for k in ("missed_mistakes", "false_alarms")
        )
    assert all(counts[k] for k in (*MISTAKES[erring.name], "alarms", "false_alarms")), counts
    assert 0 < counts["missed_mistakes"] < counts["alarms"]
    for episode, task in zip(erring.episodes, erring.tasks, strict=True):
        wrong = not right(episode, task)
        assert not wrong or episode.meta.get("missed_mistakes") or episode.error, task.question


def _part(event: Message | ToolUse) -> str:
    return str(event.facts.get("part", "")) if isinstance(event, Message) else ""


def _is_decision(event: Message | ToolUse) -> bool:
    """A call is decided on and made: two events, one mistake."""
    return _part(event) == "query"


def test_experts_speak_of_nothing_that_was_not_said_to_them(erring: Recorded) -> None:
    names = {agent.name for agent in erring.episodes[0].agents}
    seen: Counter[str] = Counter()
    for episode in erring.episodes:
        for index, event in enumerate(episode.events):
            if not isinstance(event, Message) or event.agent not in names:
                continue
            given_text = "\n".join(texts_of(episode, index))
            part = event.facts["part"]
            seen[part] += 1
            if part == "plan" and "steps" in event.facts:
                assert texts_of(episode, index)[1:] == [episode.question]
            elif part == "plan":
                before = episode.events[index - 1]
                assert isinstance(before, Message) and before.to == "planner", before
                seen["new plan"] += 1
            elif part == "query" and event.agent == "searcher":
                assert all(
                    word.strip(",") in given_text
                    for word in event.text.split()
                    if word[0].isupper()
                )
            elif part == "query" and event.agent == "reader":
                assert all(f"{url}\n" in given_text for url in event.text.split("|"))
            elif part == "query" and event.agent == "coder":
                plain = given_text.replace(",", "")
                listed = re.findall(r"\d+", event.text.splitlines()[1])
                assert event.erred or all(n in plain for n in listed)
            elif part == "finding" and erring.name == "atlas-web":
                for _, _, *values in event.facts["values"]:
                    assert all(value in given_text for value in values)
            elif part == "verdict":
                assert event.text in given_text
    parts = {"query", "finding", "alarm", "approval", "suggestion", "check"}
    assert set(seen) >= parts | {"plan", "new plan"}


def test_whoever_is_told_of_an_objection_acts_on_it(erring: Recorded) -> None:
    names = {agent.name for agent in erring.episodes[0].agents}
    told: Counter[str] = Counter()
    for episode in erring.episodes:
        said = [e for e in episode.events if isinstance(e, Message) and e.agent in names]
        for event, then in pairwise(said):
            if event.facts["part"] == "alarm" or event.facts.get("score") == 2:
                assert then.agent == event.to, (event, then)
                told[event.to] += 1
    every = {"atlas-web": {"planner", "reader"}, "atlas-code": {"planner", "reader", "coder"}}
    assert set(told) >= every[erring.name], told


def test_a_verifier_sends_back_a_number_that_is_not_rounded() -> None:
    """The critic sleeps, the verifier does not: what is seen of the output alone is corrected."""
    tasks = make_tasks("atlas-code", "train", 120, 9, families=["density", "area_times"])
    episodes = episodes_of(tasks, Experts(error_rate=0.5, miss_rate=0.6, false_alarm_rate=0.0))
    sent_back = 0
    for episode in episodes:
        checks = [e for e in episode.events if _part(e) == "check" and isinstance(e, Message)]
        if len(checks) == 2 and checks[0].facts["score"] == 2:
            assert checks[0].text.startswith("The number is not rounded to")
            last = [e for e in episode.events if isinstance(e, ToolUse)][-1]
            assert last.tool == "code" and last.result.strip() == episode.answer
            sent_back += 1
        assert not any("reports" in check.text for check in checks)
    assert sent_back > 3


def test_no_call_is_made_twice_in_an_episode(erring: Recorded) -> None:
    for episode in erring.episodes:
        calls = [(e.tool, e.argument) for e in episode.events if isinstance(e, ToolUse)]
        assert len(calls) == len(set(calls))


def test_reflections_and_checks_are_scored_as_the_grammar_reads_them(erring: Recorded) -> None:
    scores: Counter[int | None] = Counter()
    poor = 0
    for episode in erring.episodes:
        for place, event in enumerate(episode.events):
            part = event.facts.get("part") if isinstance(event, Message) else None
            if not isinstance(event, Message) or part not in ("alarm", "approval", "check"):
                continue
            then = [
                e.facts.get("part") for e in episode.events[place + 1 :] if isinstance(e, Message)
            ]
            if part == "check":
                score = parse_score(event.text)
                scores[score] += 1
                assert score == event.facts["score"]
                assert then[0] == ("verdict" if score == 4 else "plan")
            elif part == "alarm" or event.facts.get("rated"):
                found = parse_ratings(event.text, CRITERIA)
                assert found is not None, event.text
                assert ("poor" in found.values()) == ("plan" in then[:1]), event.text
                assert part == "alarm" or set(found.values()) == {"good"}
                poor += "poor" in found.values()
    assert set(scores) == {2, 4} and poor > 0


@pytest.mark.parametrize("name", SETS)
def test_replacing_gold_by_garbage_leaves_episodes_byte_identical(
    name: str, tmp_path: Path
) -> None:
    chosen = list(make_tasks(name, "heldout_entity", 40, 8))
    spoilt = [replace(t, answers=("garbage",), gold={"hops": [{"garbage": 1}]}) for t in chosen]
    shown: list[Task] = []

    def spy(task: Task) -> list[Tool]:
        shown.append(task)
        return [*toolbox_of(task).values()]

    env = Environment("spied", tools=spy, grammar=SETS[name], teacher=ERRING)
    for stem, these in (("true", chosen), ("spoilt", spoilt)):
        assert len(record_into(tmp_path / stem, these, env=env)) == 40
    assert (tmp_path / "true").read_bytes() == (tmp_path / "spoilt").read_bytes()
    assert len(shown) >= 80 and not any(task.answers or task.gold for task in shown)


# -- the chains they become ------------------------------------------------------------------


@pytest.fixture(scope="module")
def distilled(erring: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Distilled:
    folder = tmp_path_factory.mktemp("distilled") / "own"
    return distil(folder, erring.episodes, erring.tasks, env=place(erring.grammar.name))


def test_right_episodes_become_legal_chains_that_replay(
    erring: Recorded, distilled: Distilled
) -> None:
    solved = {t.id for t, e in zip(erring.tasks, erring.episodes, strict=True) if right(e, t)}
    assert {t.task_id for t in distilled.kept} == solved, distilled.funnel
    gold = {task.id: task for task in erring.tasks}
    bound = toolbox_of(erring.tasks[0]).bind(erring.grammar)
    for trajectory in distilled.kept:
        parsed = parse(bound, trajectory.text, env=True)
        assert check(bound, parsed) is None, trajectory.text
        assert exact(gold[trajectory.task_id], trajectory) == 1.0
        roles = [block.role for block in parsed.blocks]
        assert roles[-3:] == ["double_check", "think", "answer"]
    assert {"reflection", "plan", "suggested_answer"} <= {
        block.role for t in distilled.kept for block in parse(bound, t.text, env=True).blocks
    }


def test_the_marks_cover_the_mistakes(erring: Recorded, distilled: Distilled) -> None:
    by_id = {episode.task_id: episode for episode in erring.episodes}
    kinds: Counter[str] = Counter()
    for trajectory in distilled.kept:
        marked = [s.text[a:b] for s in trajectory.segments for a, b in sorted(s.errs)]
        wrong: list[str] = []
        for event in by_id[trajectory.task_id].events:
            if isinstance(event, ToolUse) and event.erred:
                wrong.append(f"<{event.tool}> {event.argument}</{event.tool}>")
                kinds[event.tool] += 1
            elif (
                isinstance(event, Message) and event.erred and (part := event.facts["part"]) in TAGS
            ):
                if part == "approval" and not event.facts.get("rated"):
                    continue  # no block of the chain
                wrong += [event.thought] if event.thought else []
                wrong.append(f"<{TAGS[part]}> {event.text}</{TAGS[part]}>")
                kinds[part] += 1
            elif isinstance(event, Message) and event.erred and event.facts["part"] == "finding":
                wrong.append(" ".join(event.text.split()))
                kinds["finding"] += 1
        bare = [m.removeprefix("<think> ").removesuffix("</think>") for m in marked]
        assert bare == wrong
    tools = {"atlas-web": {"web_search", "crawl_page", "suggestion"}, "atlas-code": {"code"}}
    assert set(kinds) >= tools[erring.name] | {"finding", "alarm", "check"}


@pytest.mark.parametrize("name", ["react", "mhqa"])
def test_the_same_episodes_convert_under_grammars_without_a_check(
    name: str, erring: Recorded, tmp_path: Path
) -> None:
    gold = {task.id: task for task in erring.tasks}
    done = distil(tmp_path / "d", erring.episodes[:60], erring.tasks, env=place(name))
    solved = [e for e in erring.episodes[:60] if right(e, gold[e.task_id])]
    # Two objections with no call between them are two reflections in a row, which is not legal.
    refused = [r for r in done.rejected if r["reason"].startswith("illegal")]
    assert len(done.kept) + len(refused) == len(solved) and len(refused) < 6, done.funnel


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_erring_experts_solve_nine_tenths_of_what_they_have_never_seen(name: str) -> None:
    """At the default rates; docs/atlas.md has the figures."""
    tasks = make_tasks(name, "heldout_entity", 500, 1)
    episodes = episodes_of(tasks, Experts())
    solved = sum(right(episode, task) for episode, task in zip(episodes, tasks, strict=True))
    assert solved >= 0.9 * len(tasks), solved


# -- what goes wrong -------------------------------------------------------------------------


def web_of(search: Callable[[str], str], page: Callable[[str], str]) -> Toolbox:
    async def searched(query: str) -> str:
        return search(query)

    async def crawled(addresses: str) -> str:
        return page(addresses)

    return Toolbox([Tool("web_search", searched), Tool("crawl_page", crawled)])


PERU = Task(
    "What is the capital of Peru or Chile, whichever is more populous?", meta={"set": "atlas-web"}
)


async def test_a_web_that_finds_nothing_ends_in_an_error_not_in_an_answer() -> None:
    box = web_of(lambda _: "Nothing was found.", lambda _: "Error: no such page.")
    episode = await CAREFUL.record(PERU, box)
    assert (episode.answer, episode.error) == (None, "a step brought no report")
    assert episode.meta["failed_step"] == "the population and the capital of Peru and Chile"
    assert len({e.argument for e in episode.events if isinstance(e, ToolUse)}) >= 3


async def test_a_question_of_another_kind_is_recorded_not_raised() -> None:
    for name in SETS:
        episode = await CAREFUL.record(Task("Why?", meta={"set": name}), Toolbox())
        assert (episode.answer, episode.error) == (None, "the planner could not plan")


async def test_a_program_that_never_prints_a_number_ends_in_an_error() -> None:
    async def silent(_: str) -> str:
        return "(no output)"

    box = Toolbox([wiki_search(atlas_corpus(0)), Tool("code", silent, body="code")])
    (task,) = make_tasks("atlas-code", "train", 1, 0, families=["density"])
    episode = await CAREFUL.record(task.public(), box)
    assert (episode.answer, episode.error) == (None, "no program gave a result")


HITS = "[1] Peru - https://a.example/1\n{}\n[2] Chile - https://a.example/2\n{}"


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=200))
def test_whatever_pages_say_the_team_answers_or_gives_up(one: str, two: str, page: str) -> None:
    box = web_of(lambda _: HITS.format(one, two), lambda _: page)
    episode = asyncio.run(ERRING.record(PERU, box))
    assert episode.answer is None and episode.error
    assert Episode.from_json(episode.to_json()) == episode
