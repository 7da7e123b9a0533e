"""The coding team: it knows its problems, is right, errs when told to, and sees no gold."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.environments.experts import Experts
from coa.environments.gym.programs import LONGEST_QUESTION, plan_for, problems
from coa.environments.gym.tasks import GENERATORS, generators_of, make_tasks, score
from coa.environments.gym.team import careless, difference
from coa.errors import ConfigError
from coa.io.runs import dumps
from coa.recording.agents import agents_of
from coa.recording.episode import Episode, Message, ToolUse
from coa.sandbox import Sandbox, SandboxError
from coa.statistics import wilson
from coa.tasks import Task, TaskSet
from coa.tools.base import Tool, Toolbox
from coa.tools.code import code_tool
from scripts import distil, texts_of

pytest.importorskip("reasoning_gym")

TEAM = {agent.name for agent in agents_of("coding")}
COUNTS = ("wrong_programs", "alarms", "missed_mistakes", "false_alarms")
KINDS = {each.plan.kind for each in problems()}
TRAINED = [name for name in generators_of("train") if name in KINDS]
HELD_OUT = [name for name in generators_of("heldout_generator") if name in KINDS]


def tasks_of(each: int, seed: int = 1) -> TaskSet:
    """So many tasks of every kind of problem that the team knows."""
    trained = make_tasks("heldout_seed", each * len(TRAINED), seed, TRAINED)
    held_out = make_tasks("heldout_generator", each * len(HELD_OUT), seed, HELD_OUT)
    return TaskSet((*trained, *held_out))


@pytest.fixture(scope="module")
def tasks() -> TaskSet:
    return tasks_of(2)


class Workshop(NamedTuple):
    """An open sandbox, and the event loop in which it lives."""

    runner: asyncio.Runner
    box: Sandbox
    toolbox: Toolbox

    def record(self, tasks: Iterable[Task], teacher: Experts, seed: int = 0) -> list[Episode]:
        async def work() -> list[Episode]:
            return [await teacher.record(task, self.toolbox, seed) for task in tasks]

        return self.runner.run(work())


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    with asyncio.Runner() as runner:
        try:
            box = runner.run(Sandbox().__aenter__())
        except SandboxError as refusal:
            pytest.skip(f"no sandbox here: {refusal}")
        yield Workshop(runner, box, Toolbox([code_tool(box)]))
        runner.run(box.close())


def solved(tasks: Sequence[Task], episodes: Sequence[Episode]) -> list[bool]:
    pairs = zip(tasks, episodes, strict=True)
    return [score(task, episode.answer) == 1.0 for task, episode in pairs]


def test_the_team_knows_every_generator() -> None:
    assert {*KINDS} == {*GENERATORS}


def test_the_planner_names_the_generator_of_every_question_it_knows(tasks: TaskSet) -> None:
    for task in tasks:
        plan = plan_for(task.question)
        assert plan is not None, task.question
        assert plan.kind == task.meta["family"], task.question
        assert 2 <= len(plan.steps) <= 4 and len(plan.program) < 1000


def test_no_kind_takes_the_problems_of_another_for_its_own() -> None:
    """But sums of decimals, which whole numbers are, too; the kind before them takes those."""
    for task in tasks_of(5, seed=2):
        text, own = task.question.strip(), task.meta["family"]
        kinds = {each.plan.kind for each in problems() if each.pattern.fullmatch(text)}
        assert kinds - {"decimal_chain_sum"} == {own} - {"decimal_chain_sum"}, task.question


def test_careful_experts_solve_what_they_know(tasks: TaskSet, workshop: Workshop) -> None:
    episodes = workshop.record(tasks, Experts(0, 0, 0))
    right = solved(tasks, episodes)
    wrong = [task.meta["family"] for task, well in zip(tasks, right, strict=True) if not well]
    assert len(wrong) <= 0.02 * len(tasks), wrong
    assert all(sum(isinstance(event, ToolUse) for event in e.events) == 1 for e in episodes)


def test_episodes_do_not_depend_on_gold(tasks: TaskSet, workshop: Workshop) -> None:
    """Even when the team is handed the whole task by mistake."""
    erring = Experts(0.4, 0.3, 0.1)
    chosen = list(tasks)[::3]
    garbage = [replace(t, answers=("garbage",), gold={"answer": "garbage"}) for t in chosen]

    first, second = (workshop.record(given, erring, 3) for given in (chosen, garbage))
    assert [dumps(e.to_json()) for e in first] == [dumps(e.to_json()) for e in second]


def test_another_seed_gives_other_mistakes_and_the_same_seed_the_same(
    tasks: TaskSet, workshop: Workshop
) -> None:
    chosen = list(tasks)[:30]
    erring = Experts(0.5, 0.3, 0.1)
    first, again, other = (workshop.record(chosen, erring, seed) for seed in (0, 0, 1))
    assert [e.to_json() for e in first] == [e.to_json() for e in again]
    assert [e.events for e in first] != [e.events for e in other]


def test_an_attentive_critic_has_every_mistake_corrected(
    tasks: TaskSet, workshop: Workshop
) -> None:
    episodes = workshop.record(tasks, Experts(1, 0, 0))
    assert sum(solved(tasks, episodes)) >= 0.98 * len(tasks)
    for episode in episodes:
        runs = [event for event in episode.events if isinstance(event, ToolUse)]
        assert [run.erred for run in runs] == [True, False], episode.question
        assert runs[0].argument != runs[1].argument
        assert episode.meta["wrong_programs"] == episode.meta["alarms"] == 1
        assert "missed_mistakes" not in episode.meta and "false_alarms" not in episode.meta


def test_an_inattentive_critic_sees_only_programs_that_fail(
    tasks: TaskSet, workshop: Workshop
) -> None:
    episodes = workshop.record(tasks, Experts(1, 1, 0))
    count = Counter[str]()
    for episode in episodes:
        count.update({key: episode.meta.get(key, 0) for key in COUNTS})
    assert count["wrong_programs"] == len(tasks)
    assert count["missed_mistakes"] + count["alarms"] == len(tasks)
    assert count["missed_mistakes"] > 0.3 * len(tasks) and count["alarms"] > 0.1 * len(tasks)
    approvals = [e for each in episodes for e in each.events if part_of(e) == "approval"]
    assert sum(approval.erred for approval in approvals) == count["missed_mistakes"]
    assert sum(solved(tasks, episodes)) < 0.8 * len(tasks)


def test_a_false_alarm_costs_a_second_run_and_no_more(tasks: TaskSet, workshop: Workshop) -> None:
    chosen = list(tasks)[:20]
    episodes = workshop.record(chosen, Experts(0, 0, 1))
    for episode in episodes:
        marked = [event for event in episode.events if event.erred]
        assert [e.facts["part"] for e in marked if isinstance(e, Message)] == ["alarm"] and len(
            marked
        ) == 1
        assert episode.meta["false_alarms"] == episode.meta["alarms"] == 1
        assert sum(isinstance(event, ToolUse) for event in episode.events) == 2
    assert all(solved(chosen, episodes))


def test_agents_are_told_neither_of_mistakes_nor_of_gold(
    tasks: TaskSet, workshop: Workshop
) -> None:
    (episode,) = workshop.record(list(tasks)[:1], Experts(1, 0, 0))
    said = [event for event in episode.events if isinstance(event, Message)]
    assert {event.agent for event in said} == {"user", "system", *TEAM}
    assert not any("erred" in event.text or "mistake" in event.text for event in said)
    for index, event in enumerate(episode.events):
        if isinstance(event, Message) and event.agent in TEAM:
            assert len(texts_of(episode, index)[0].split()) > 150


def part_of(event: Message | ToolUse) -> str:
    return str(event.facts.get("part", "")) if isinstance(event, Message) else ""


PROGRAM = re.compile(r"```py\n(?:# checked\n)*(.*?)\n```", re.DOTALL)
RAN = re.compile(
    r"Task: (.*)\nProgram:\n```py\n(?:# checked\n)*(.*)\n```\nOutput:\n(.*)", re.DOTALL
)


def test_every_agent_says_what_follows_from_its_own_context(
    tasks: TaskSet, workshop: Workshop
) -> None:
    seen = Counter[str]()
    for episode in workshop.record(tasks, Experts(0.6, 0.3, 0.2), 5):
        for index, event in enumerate(episode.events):
            if not isinstance(event, Message) or event.agent not in TEAM:
                continue
            _, *context = texts_of(episode, index)
            seen[part_of(event)] += 1
            if event.agent == "planner":
                assert context == [episode.question]
                plan = plan_for(context[0])
                assert plan is not None and event.text == plan.text
            elif event.agent == "coder":
                told = {text.removeprefix("Task: ") for text in context if "Task: " in text[:6]}
                plan = plan_for(*told)
                program = PROGRAM.fullmatch(event.text)
                assert plan is not None and plan.text in context and program is not None
                assert event.erred == (program[1] != plan.program)
            elif event.agent == "critic":
                ran = RAN.fullmatch(context[-1])
                assert ran is not None, context
                own = plan_for(ran[1])
                assert own is not None
                form = f"The output is {own.form.name}, as asked."
                possible = [
                    difference(ran[2], own.program),
                    f"The output is not {own.form.name}. Check the program.",
                    "The program printed nothing. Print the result.",
                    "I am not sure that the program does what the task says. Check it.",
                    *(f"The program did not run: {line}" for line in ran[3].split("\n")),
                ]
                if part_of(event) == "approval":
                    possible = [f"The program ran. {form}"]
                assert event.text in possible
            else:
                assert context[-2].startswith("The program ran."), "the critic's consent"
                assert context[-1].startswith(f"{episode.question}\n")
                assert context[-1].endswith(f"\n{event.text}")
                assert episode.answer == event.text
    assert set(seen) == {"plan", "query", "alarm", "approval", "verdict"}


def test_a_tool_that_breaks_is_not_the_end_of_the_team(tasks: TaskSet) -> None:
    async def broken(argument: str) -> str:
        raise OSError("no sandbox")

    toolbox = Toolbox([Tool("code", broken)])
    episode = asyncio.run(Experts(0, 0, 0).record(tasks[0].public(), toolbox))
    assert episode.answer is None and episode.error == "no program was approved"
    assert episode.meta["alarms"] == 3


def test_a_problem_that_the_team_does_not_know_is_refused(workshop: Workshop) -> None:
    task = Task("Which is the tallest mountain of Peru?", meta={"set": "gym-code"})
    (episode,) = workshop.record([task], Experts())
    assert episode.answer is None and episode.error == "the planner could not plan"
    assert not any(isinstance(event, ToolUse) for event in episode.events)


@pytest.mark.parametrize("rates", [(-0.1, 0, 0), (0, 1.5, 0), (0, 0, float("nan"))])
def test_a_rate_is_a_share(rates: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match=r"a rate of the experts is .* expected 0 to 1"):
        Experts(*rates)


SCRAPS = st.sampled_from(
    [
        "Calculate ", "Solve for x: ", "Find the prime factorization of ", "Is 2024 a leap year? ",
        "Rotate the matrix below by 90 degrees clockwise:\n", "1 2\n3 4", " = ?", "\n", ".", " 10",
        "If today is Monday, March 3, 2025, ", "in 10 days? ", "Answer with -1 if the ordinal ",
        "State the final answer to the following arithmetic problem: ",
        "Reverse this list of words: ", "- Crop the matrix to rows ", "\u00d7", "9" * 5000, "(",
        "'", '"', "```", "\\", "{", "}",
    ]
)  # fmt: skip


@given(st.text() | st.lists(SCRAPS | st.text(max_size=5), max_size=12).map("".join))
@settings(max_examples=400, deadline=None)
def test_no_text_upsets_the_planner(question: str) -> None:
    plan = plan_for(question)
    assert plan is None or (plan.program and plan.text)


@cache
def questions() -> list[str]:
    return [task.question for task in tasks_of(1)]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_damaged_question_upsets_the_team(drawn: st.DataObject) -> None:
    question = drawn.draw(st.sampled_from(questions()))
    start = drawn.draw(st.integers(0, len(question)))
    end = drawn.draw(st.integers(start, len(question)))
    damaged = question[:start] + drawn.draw(st.text(max_size=4)) + question[end:]
    plan = plan_for(damaged)
    if plan is not None:
        wrong = careless(plan.program, damaged, random.Random(0))
        assert bool(difference(wrong, plan.program)) == (wrong != plan.program)


def test_a_question_that_is_too_long_is_not_tried() -> None:
    digits = "1" * LONGEST_QUESTION
    assert plan_for("Calculate 1.") is not None
    assert plan_for(f"Calculate {digits}.") is None


def test_every_program_can_go_wrong_in_several_ways(tasks: TaskSet) -> None:
    for task in tasks:
        plan = plan_for(task.question)
        assert plan is not None
        wrong = {careless(plan.program, task.question, random.Random(i)) for i in range(40)}
        assert plan.program not in wrong and len(wrong) >= 2, plan.program


def test_the_critic_names_the_token_or_the_line_that_is_wrong() -> None:
    right = "n = 12\nprint(n + 1)"
    assert difference(right, right) == ""
    assert difference("n = 21\nprint(n + 1)", right) == "Line 1 has 21 where the task needs 12."
    assert difference("n = 12\nprint(n - 1)", right) == "Line 2 has - where the task needs +."
    assert difference("n = 12\nprint(n)", right) == "Line 2 should be: print(n + 1)"
    assert difference("n = 12", right) == "Line 2 should be: print(n + 1)"


def test_episodes_become_chains_of_the_code_grammar(
    tasks: TaskSet, workshop: Workshop, tmp_path: Path
) -> None:
    episodes = workshop.record(tasks, Experts(0.5, 0, 0.1))
    made = distil(tmp_path / "d", episodes, tasks)
    assert {trajectory.grammar for trajectory in made.kept} == {"code"}
    assert len(made.kept) >= 0.98 * len(tasks), made.funnel
    assert made.funnel["kept_with_corrected_error"] > 0.3 * len(tasks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "names"), [("heldout_seed", TRAINED), ("heldout_generator", HELD_OUT)]
)
def test_erring_experts_solve_nine_tenths_of_every_generator(
    split: str, names: list[str], workshop: Workshop
) -> None:
    """With -s it prints the table of docs/gym.md."""
    tasks = make_tasks(split, 50 * len(names), 0, names)
    asked = Counter(task.meta["family"] for task in tasks)  # jugs has not so many problems
    episodes = workshop.record(tasks, Experts())
    right = Counter[str]()
    for task, well in zip(tasks, solved(tasks, episodes), strict=True):
        right[task.meta["family"]] += well
    counted = Counter[str]()
    for episode in episodes:
        counted.update({key: episode.meta.get(key, 0) for key in COUNTS})
    print(f"\n{split}: {right.total()} of {len(tasks)}", wilson(right.total(), len(tasks)), counted)
    for name in names:
        print(f"| `{name}` | {right[name]} / {asked[name]} |")
    assert len(tasks) >= 500 and right.total() >= 0.9 * len(tasks)
    assert min(right[name] / asked[name] for name in names) >= 0.9


@pytest.mark.slow
def test_no_mistake_makes_a_program_run_for_ever(workshop: Workshop) -> None:
    async def run_all() -> None:
        for task in tasks_of(2):
            plan = plan_for(task.question)
            assert plan is not None
            dice = map(random.Random, range(20))
            for program in sorted({careless(plan.program, task.question, d) for d in dice}):
                assert (await workshop.box.run(program)).ended in ("ok", "error"), program

    workshop.runner.run(run_all())
