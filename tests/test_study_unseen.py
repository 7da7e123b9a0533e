"""The unseen tools: their tasks, how far a rollout came, and the whole study with written turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coa.grammar.constrain import TextLimits
from coa.lab.studies import run_study, study_lines
from coa.lab.study_unseen import (
    arms,
    judged,
    make_tasks,
    same_arguments,
    tool_of,
)
from coa.tasks import Task
from coa.tools.base import Toolbox, ToolCall
from coa.tools.sources import READING
from coa.trajectory import Author, Segment, StopReason, Trajectory, Usage

TASKS = make_tasks(40, 0)
NAMES = ("convert", "calculate", "days_between", "ship_register")


def call_of(task: Task, arguments: object = None) -> str:
    name = str(task.meta["tool"])
    body = json.dumps(task.gold["arguments"] if arguments is None else arguments)
    return f"<think>t</think><plan>p</plan><think>t</think><{name}>{body}</{name}>"


async def observed(task: Task) -> str:
    offered = tool_of(task)
    call = ToolCall(offered.name, json.dumps(task.gold["arguments"]))
    found = await Toolbox([offered]).call(call)
    assert found.failure is None, found
    return found.text


def test_the_right_call_gives_the_gold_answer_for_every_task() -> None:
    import asyncio

    for task in make_tasks(200, 7):
        assert asyncio.run(observed(task)) in task.answers, task


def test_tasks_are_the_same_again_and_others_under_another_seed() -> None:
    assert make_tasks(40, 0) == TASKS and len({task.question for task in TASKS}) == 40
    questions = {task.question for task in make_tasks(40, 1)}
    assert len(questions & {task.question for task in TASKS}) < 3
    assert {str(task.meta["tool"]) for task in TASKS} == set(NAMES)


def test_no_training_set_has_these_tools_and_no_public_task_has_gold() -> None:
    assert not {*READING, "code"} & set(NAMES)
    for task in TASKS:
        public = task.public()
        assert not public.answers and not public.gold
        assert tool_of(public) == tool_of(task)


def test_the_tools_explain_what_cannot_be() -> None:
    import asyncio

    def say(name: str, arguments: object) -> str:
        task = next(task for task in TASKS if task.meta["tool"] == name)
        box = Toolbox([tool_of(task)])
        found = asyncio.run(box.call(ToolCall(name, json.dumps(arguments))))
        assert found.failure == "mistake"
        return found.text

    assert "units of one kind" in say(
        "convert", {"amount": 1, "source": "miles", "target": "pounds"}
    )
    assert "right is 0" in say("calculate", {"left": 1, "operation": "divide", "right": 0})
    assert "dates as 2024" in say("days_between", {"start": "soon", "end": "2020-01-01"})
    assert "no ship 'Nix'" in say("ship_register", {"ship": "Nix", "column": "fee"})


def test_arguments_are_the_same_whatever_their_case_and_number_type() -> None:
    assert same_arguments({"ship": " taro", "n": 3}, {"ship": "Taro", "n": 3.0})
    assert not same_arguments({"ship": "Taro"}, {"ship": "Taro", "n": 3})
    assert not same_arguments({"n": "3"}, {"n": 3})


def rollout(task: Task, *turns: str, answer: str | None = None) -> Trajectory:
    segments = [Segment(Author.PROMPT, "s")]
    for turn in turns:
        segments += [
            Segment(Author.MODEL, turn),
            Segment(Author.ENV, "<observation>x</observation>"),
        ]
    stop = StopReason.ANSWERED if answer else StopReason.TURNS
    usage = Usage(tool_calls=len(turns))
    return Trajectory(
        task.id,
        task.question,
        "mhqa",
        segments,
        tools=[tool_of(task).name],
        stop=stop,
        answer=answer,
        usage=usage,
    )


def test_the_stages_of_success_are_told_apart() -> None:
    task = next(task for task in TASKS if task.meta["tool"] == "days_between")

    def stages(*turns: str, answer: str | None = None) -> list[bool]:
        found = judged(task, rollout(task, *turns, answer=answer))
        return [found[stage] for stage in ("called", "valid", "right", "solved")]

    other = dict(task.gold["arguments"], end="1999-01-01")
    assert stages("<think>no call</think>") == [False, False, False, False]
    assert stages(call_of(task, {"from": 3})) == [True, False, False, False]
    assert stages(call_of(task, other)) == [True, True, False, False]
    then = call_of(task).partition("</plan>")[2]
    assert stages(call_of(task, other), then) == [True, True, True, False]
    assert stages(call_of(task), answer=task.answers[0]) == [True, True, True, True]
    assert stages(answer=task.answers[0]) == [False, False, False, True]
    loose = call_of(task).replace('"', "'")  # what the tool repairs is valid
    assert stages(loose) == [True, True, True, False]


def test_what_the_grammar_refused_never_reached_the_tool_and_is_no_call() -> None:
    task = TASKS[0]
    bare = call_of(task).rpartition("</think>")[2]
    forged = "<observation>x</observation>" + call_of(task)
    for turn in (bare, forged):
        found = judged(task, rollout(task, turn))
        assert not (found["called"] or found["valid"] or found["right"]), turn


def test_each_model_is_measured_with_and_without_the_constraint() -> None:
    from coa.lab.studies import STUDIES

    chosen = arms(STUDIES["unseen-tool"].read([]))
    assert len(chosen) == 6
    assert sum(arm.constrain for arm in chosen.values()) == 3
    assert [name for name, arm in chosen.items() if arm.prompt == "compact"] == [
        "trained, own prompt",
        "trained, own prompt, constrained",
    ]


def test_a_turn_has_room_for_all_that_the_constraint_lets_a_model_say_before_its_call() -> None:
    """Two thoughts and a plan of full length, the call and all tags, at 3.5 characters a token."""
    from coa.lab.studies import STUDIES

    room = STUDIES["unseen-tool"].read([]).eval.turn_tokens
    said = 3 * TextLimits.within(room).text + max(len(call_of(task)) for task in TASKS)
    assert said / 3.5 <= room


def script(path: Path, seeds: tuple[int, ...], n: int, *, right: bool) -> Path:
    """Turns for every task: the right call and its answer, or a call that no tool accepts."""
    lines = []
    for seed in seeds:
        for task in make_tasks(n, seed):
            done = [call_of(task), f"<think>t</think><answer>{task.answers[0]}</answer>"]
            turns = (
                done if right else [call_of(task, {"no": 1}), "<think>t</think><answer>?</answer>"]
            )
            lines.append(json.dumps({"question": task.question, "turns": turns}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_study_counts_every_stage_and_says_the_same_again(tmp_path: Path) -> None:
    able = script(tmp_path / "able.jsonl", (0, 1), 8, right=True)
    unable = script(tmp_path / "unable.jsonl", (0, 1), 8, right=False)
    chosen = [f"model=scripted:{able}", f"base=scripted:{unable}", "seeds=[0, 1]", "eval.n=8"]
    chosen += ["eval.context=60000", "eval.turn_tokens=400"]
    result = run_study("unseen-tool", tmp_path / "study", chosen, lambda line: None)
    found = {stage: measured["arms"] for stage, measured in result["measures"].items()}
    assert found["called"]["base"]["value"] == found["called"]["trained"]["value"] == 1
    for stage in ("valid", "right", "solved"):
        assert found[stage]["base"]["value"] == 0, stage
        assert found[stage]["trained, own prompt"]["value"] == 1, stage
    assert result["measures"]["solved"]["differences"]["trained"]["ci95"] == [1.0, 1.0]
    assert found["solved"]["base"]["n"] == 16
    assert result["by_tool"]["trained"]["convert"]["n"] == 4
    shown = "\n".join(study_lines(result))
    assert "bootstrap over tasks, differences" in shown and "called the tool, n = 16\n" in shown
    assert "what the constraint changes, trained, own prompt" in shown and "by tool" in shown
    before = (tmp_path / "study" / "unseen-tool.json").read_bytes()
    assert run_study("unseen-tool", tmp_path / "study", chosen, lambda line: None) == result
    assert (tmp_path / "study" / "unseen-tool.json").read_bytes() == before


def test_other_settings_in_the_same_directory_are_refused(tmp_path: Path) -> None:
    from coa.errors import ConfigError

    able = script(tmp_path / "able.jsonl", (0,), 4, right=True)
    chosen = [f"model=scripted:{able}", f"base=scripted:{able}", "seeds=[0]", "eval.n=4"]
    chosen += ["eval.context=60000", "eval.turn_tokens=400"]
    run_study("unseen-tool", tmp_path / "study", chosen, lambda line: None)
    with pytest.raises(ConfigError, match=r"started with eval.turns 4, and it is 3 here"):
        run_study("unseen-tool", tmp_path / "study", [*chosen, "eval.turns=3"], lambda line: None)
