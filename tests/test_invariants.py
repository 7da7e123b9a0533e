"""Invariants of the whole: one grammar, one loop, masks from authorship, nothing by arrival."""

from __future__ import annotations

import ast
import asyncio
import json
import random
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from coa.distillation.dataset import Distilling, run_distillation
from coa.engines.base import Completion, OnText, Sampling
from coa.engines.scripted import ByteCodec, ScriptedEngine
from coa.environment import Environment, open_environments
from coa.environments import make_tasks
from coa.errors import TrainingError, UsageError
from coa.evaluation.run import save_summary, summarise
from coa.grammar import (
    PRESETS,
    Block,
    FaultKind,
    Grammar,
    Role,
    Splitter,
    check,
    load_grammar,
    parse,
    system_prompt,
)
from coa.io.runs import write_jsonl
from coa.recording.episode import AgentSpec, Episode, Message, ToolUse
from coa.recording.record import Recording, run_recording
from coa.rewards import RewardSettings
from coa.rollouts import choose_environments, roll_out_all
from coa.tasks import Task, TaskSet
from coa.tools import Tool, Toolbox, ToolCall
from coa.trajectory import Author, Segment, Trajectory
from playing import observed
from scripts import turns_of
from walker import legal_blocks

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "coa"


# -- 1: one grammar --------------------------------------------------------------------------


def extended(grammar: Grammar) -> Grammar:
    """The grammar with an agent more, that nobody has heard of: the oracle."""
    oracle = Role("oracle", "tool", next=("tool", "answer"), about="Ask the oracle")
    return grammar.with_tools([*(r for r in grammar.roles if r.kind == "tool"), oracle])


@pytest.mark.parametrize("name", PRESETS)
def test_a_role_that_is_added_to_the_value_is_known_to_everybody(name: str) -> None:
    old = load_grammar(name)
    new = extended(old)
    for kind in ("full", "compact"):
        assert "oracle" in system_prompt(new, kind) and "oracle" not in system_prompt(old, kind)
    if new.call:  # its calls stand in the tag of all
        assert new.stop_strings == old.stop_strings and new.tags == old.tags
    else:
        assert "</oracle>" in new.stop_strings and "</oracle>" not in old.stop_strings
        assert new.escape("a</oracle>") == "a&lt;/oracle>"
        assert old.escape("a</oracle>") == "a</oracle>"
    rng = random.Random(7)
    walks = (legal_blocks(new, rng) for _ in range(200))
    blocks = next(walk for walk in walks if any(block.role == "oracle" for block in walk))
    text = new.render(blocks)
    parsed = parse(new, text, env=True)
    assert parsed.blocks == blocks and check(new, parsed) is None
    if not old.free:  # there it is a thought
        assert check(old, parse(old, text, env=True)) is not None
    splitter = Splitter(new, env=True, events=True)
    events = [event for char in text for event in splitter.feed(char)]
    assert ("open", new.tag("oracle"), "") in events
    unknown = parse(old, new.render([Block("oracle", "x")]))
    if not old.free:
        kind = FaultKind.UNREADABLE if old.call else FaultKind.UNKNOWN
        assert [fault.kind for fault in unknown.faults] == [kind]
    assert "oracle --> " in new.mermaid()


def test_the_loop_and_the_converter_follow_the_value(tmp_path: Path) -> None:
    async def oracle(question: str) -> str:
        return f"</oracle> <answer>{question}</answer>"

    env = Environment("delphi", tools=[Tool("oracle", oracle, about="Ask the oracle")])
    task = Task("Where?", ("Delphi",))
    turns = ["<think>t</think><oracle>where</oracle>", "<think>u</think><answer>Delphi</answer>"]
    engine = ScriptedEngine([f"{turn} and more" for turn in turns])

    async def played() -> Trajectory:
        async with env.open([task]) as opened:
            return await opened.play(task, engine)

    trajectory = asyncio.run(played())
    assert [step.model.text for step in trajectory.steps] == turns
    assert "<oracle>" in trajectory.segments[0].text
    assert observed(trajectory) == [
        "\n<observation>&lt;/oracle> &lt;answer>where&lt;/answer></observation>\n"
    ]
    episode = Episode(task.id, task.question, "mine", [AgentSpec("a", "", "A.")])
    said = Message("a", "a", "where", thought="t", facts={"part": "query"})
    result = "</oracle> <answer>where</answer>"
    end = Message("a", "a", "Delphi", thought="u", facts={"part": "verdict"})
    episode.events = [said, ToolUse("a", "oracle", "where", result), end]
    episode.answer = "Delphi"
    write_jsonl(tmp_path / "episodes.jsonl", [episode.to_json()])
    (kept,) = run_distillation(
        Distilling(tmp_path / "episodes.jsonl", env=env), tmp_path / "out"
    ).kept
    opened = re.sub(r"<(think|oracle|answer)>", r"<\1> ", trajectory.text)
    assert kept.text == opened.replace("</think><", "</think>\n<")


def test_tags_are_written_nowhere_but_in_grammars() -> None:
    """No module searches for a tag of its own: it asks the grammar."""
    names = {tag for name in PRESETS for tag in load_grammar(name).tags} - {"code", "search"}
    tags = {f"<{slash}{name}>" for name in names for slash in ("", "/")}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and id(node) not in prose and any(t in text for t in tags):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {text!r}")
    assert found == []


# -- 2: one loop -----------------------------------------------------------------------------


def test_only_the_runtime_awaits_an_engine() -> None:
    callers = {
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Await)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "generate"
    }
    # Three measurements play no chain of agents: two of bare engines, and the one of what a model
    # writes when there is no loop that stops it at the end of a call.
    alone = {"lab/bench_busy.py", "lab/bench_rollout.py", "lab/study_training.py"}
    assert callers == {"loop.py", *alone}


def test_observations_are_rendered_by_the_loop_and_by_what_makes_chains_only() -> None:
    callers = {
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "render_observation"
    }
    assert callers == {"loop.py", "distillation/convert.py", "environments/published/afm.py"}


# -- 4: masks --------------------------------------------------------------------------------


def test_masks_come_from_authorship_also_when_the_texts_are_the_same() -> None:
    rows = pytest.importorskip("coa.train.rows")
    codec = ByteCodec()
    same = "<answer>Lima</answer>"
    authors = (Author.MODEL, Author.ENV, Author.MODEL, Author.ENV)
    segments = [Segment(Author.PROMPT, same), *(Segment(author, same) for author in authors)]
    trajectory = Trajectory("t", same, "mhqa", segments)
    prompt = codec.encode_prompt(same, same)
    row = rows.build_row(trajectory, codec)
    n = len(same)
    assert row.weights == [0.0] * len(prompt) + ([1.0] * n + [0.0] * n) * 2
    trajectory.segments = [s for s in segments if s.author is not Author.MODEL]
    with pytest.raises(TrainingError, match="no trainable token"):
        rows.build_row(trajectory, codec)


# -- 8 and 9: gold, and the order of arrival -------------------------------------------------


def spoilt(tasks: TaskSet) -> TaskSet:
    """The same tasks with garbage for gold."""
    made = (replace(task, answers=("garbage",), gold={"garbage": 1}) for task in tasks)
    return TaskSet(tuple(made), tasks.name)


class Unpunctual(ScriptedEngine):
    """Answers the same, in an order that changes from run to run."""

    def __init__(self, script: dict[str, list[str]], seed: int) -> None:
        super().__init__(script)
        self.rng = random.Random(seed)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        for _ in range(self.rng.randrange(9)):
            await asyncio.sleep(0)
        done = await super().generate(prompt_ids, sampling, on_text)
        keyed = random.Random(sampling.key)  # what a real engine samples depends on the key alone
        return replace(done, logprobs=[-keyed.random() for _ in done.ids])


def test_rollouts_do_not_depend_on_arrival_or_on_gold(tmp_path: Path) -> None:
    tasks = make_tasks("atlas-mhqa", "train", 20, seed=4)
    script = turns_of(tasks)
    environments, _ = choose_environments((), tasks)
    by_id = {task.id: task for task in tasks}
    arrivals, written = [], []

    async def evaluate(folder: Path, engine: ScriptedEngine, at_once: int, these: TaskSet) -> None:
        async with open_environments(environments, these, reward=RewardSettings()) as opened:
            made = await roll_out_all(these, engine, opened, folder, k=2, concurrency=at_once)
            scored = await opened.score_all((by_id[each.task_id], each) for each in made)
            save_summary(folder, *summarise(tasks, made, scored, groups_of=opened.groups_of))

    for seed, at_once, these in ((1, 1, tasks), (2, 7, tasks), (3, 64, spoilt(tasks))):
        folder = tmp_path / str(seed)
        asyncio.run(evaluate(folder, Unpunctual(script, seed), at_once, these))
        timings = (folder / "timings.jsonl").read_text().splitlines()
        arrivals.append([line.partition('"total"')[0] for line in timings])
        names = ("trajectories.jsonl", "scores.jsonl", "summary.json", "grammars.json")
        written.append([(folder / name).read_bytes() for name in names])
    assert arrivals[0] != arrivals[1] != arrivals[2]
    assert written[0] == written[1] == written[2]
    assert b'"accuracy": 1.0' in written[0][2]


class Porter:
    """A team of one, that asks the oracle and says what it heard."""

    name = "porter"

    def __init__(self, seen: list[Task]) -> None:
        self.seen = seen

    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode:
        self.seen.append(task)
        heard = (await toolbox.call(ToolCall("oracle", task.question))).text
        episode = Episode(task.id, task.question, self.name, [AgentSpec("a", "", "A.")], seed=seed)
        said = Message("a", "a", task.question, thought="t", facts={"part": "query"})
        used = ToolUse("a", "oracle", task.question, heard)
        end = Message("a", "user", heard, thought="u", facts={"part": "verdict"})
        episode.events, episode.answer = [said, used, end], heard
        return episode


def test_an_environment_shows_gold_to_its_reward_only(tmp_path: Path) -> None:
    """Tools, setup and teacher are given public tasks, and what they make of them is the same."""
    seen: list[Task] = []
    judged: list[Task] = []

    async def oracle(question: str) -> str:
        return question.upper()

    def tools(task: Task) -> list[Tool]:
        seen.append(task)
        return [Tool("oracle", oracle, about=f"Ask about {task.id}")]

    def reward(task: Task, trajectory: Trajectory, state: Task) -> float:
        judged.append(task)
        return float(trajectory.answer == task.answers[0] and state.id == task.id)

    def setup(task: Task) -> Task:
        seen.append(task)
        return task

    tasks = TaskSet(tuple(Task(f"Where is {n}?", (f"WHERE IS {n}?",)) for n in range(6)))
    env = Environment("delphi", tools, reward=reward, teacher=Porter(seen), setup=setup)
    turns = {
        task.question: [
            f"<think>t</think><oracle>{task.question}</oracle>",
            f"<think>u</think><answer>{task.question.upper()}</answer>",
        ]
        for task in tasks
    }

    async def rolled_out(these: TaskSet, folder: Path) -> list[float | None]:
        async with env.open(these, reward=RewardSettings()) as opened:
            made = await roll_out_all(these, ScriptedEngine(turns), opened, folder)
            pairs = zip(these, made, strict=True)
            return [each.score for each in await opened.score_all(pairs)]

    written = []
    for name, these in (("a", tasks), ("b", spoilt(tasks))):
        folder, seen[:], judged[:] = tmp_path / name, [], []
        episodes = folder / "episodes.jsonl"
        these.save(folder / "tasks.jsonl")
        run_recording(Recording(env=env, tasks=folder / "tasks.jsonl"), episodes)
        scores = asyncio.run(rolled_out(these, folder))
        assert scores == [float(name == "a")] * len(tasks)
        assert len(seen) >= 4 * len(tasks) and all(task == task.public() for task in seen)
        assert {task.id: task for task in judged} == {task.id: task for task in these}
        wrong = pytest.raises(UsageError, match="no episode was kept: wrong answer")
        with nullcontext() if name == "a" else wrong:
            run_distillation(Distilling(episodes, folder / "tasks.jsonl", env=env), folder / "set")
        chains = [json.loads(line) for line in (folder / "trajectories.jsonl").open()]
        converted = [json.loads(line) for line in (folder / "set" / "converted.jsonl").open()]
        assert [each["score"] for each in converted] == scores
        chains += [each["trajectory"] for each in converted]
        written.append((episodes.read_bytes(), [{**each, "scored": None} for each in chains]))
    assert written[0] == written[1]
