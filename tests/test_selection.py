"""Selection of tasks: rates by hand, the funnel, nothing asked twice, draws of its own."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coa.engines import load_engine
from coa.engines.base import Completion, Engine, OnText, Sampling, sampling_key
from coa.engines.scripted import ScriptedEngine
from coa.environment import Environment, load_environment
from coa.errors import ConfigError, EngineError, RecordError, TrainingError
from coa.io.runs import read_jsonl, write_jsonl
from coa.loop import Budget, Decoding
from coa.rewards import RewardSettings
from coa.tasks import Task
from coa.train.groups import Sampler, TaskStream
from coa.train.processes import Processes
from coa.train.selection import Selected, select
from coa.train.settings import SelectSettings
from coa.trajectory import load_trajectories
from playing import MHQA, box

RIGHT = "<think>t</think><plan>p</plan><think>u</think><answer>Paris</answer>"
WRONG = RIGHT.replace("Paris", "Rome")
DECODING = Decoding(temperature=1.0, seed=3)
EXACT = RewardSettings("exact")
ALWAYS = 10**6

Successes = Mapping[str, tuple[int, int]]
"""Question -> how many of its first attempts succeed without tools, and with them."""


class Sometimes(ScriptedEngine):
    """Answers in one turn; the first attempts of a question are right, the others wrong."""

    def __init__(self, successes: Successes, most: int = ALWAYS) -> None:
        """After `most` turns it calls `at_the_end` and does not come back."""
        super().__init__([])
        self.seen: Counter[tuple[str, bool]] = Counter()
        self.keys: dict[bool, set[int]] = {False: set(), True: set()}
        self._successes, self._left = successes, most
        self.at_the_end: Callable[[], object] = lambda: None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        await asyncio.sleep(0)
        self._left -= 1
        if self._left < 0:
            self.at_the_end()
            await asyncio.Event().wait()
        prompt = self.decode(prompt_ids)
        question = max((q for q in self._successes if q in prompt), key=len)
        tools = "wiki_search" in prompt
        self.keys[tools].add(sampling.key)
        self.seen[question, tools] += 1
        right = self.seen[question, tools] <= self._successes[question][tools]
        ids = self.encode(RIGHT if right else WRONG)
        return Completion(ids, [0.0] * len(ids), "stop")


def tasks_of(successes: Successes) -> list[Task]:
    return [Task(question, ("Paris",), id=question) for question in successes]


async def chosen(
    successes: Successes,
    directory: Path,
    engine: Engine | None = None,
    *,
    tasks: Sequence[Task] | None = None,
    budget: Budget | None = None,
    processes: Processes | None = None,
    **asked: Any,
) -> Selected:
    env = Environment("sometimes", tools=[*box("mhqa").values()], grammar=MHQA)
    async with env.open(reward=EXACT) as opened:
        sampler = Sampler(
            TaskStream(tasks or tasks_of(successes), seed=0),
            engine or Sometimes(successes),
            opened,
            budget or Budget(turns=3),
            DECODING,
            directory,
            group_size=2,
            processes=processes or Processes(),
        )
        chosen = SelectSettings(**asked)
        return await select(tasks or tasks_of(successes), chosen, sampler, directory, "silent")


async def interrupted(cases: Successes, directory: Path, most: int, **asked: Any) -> None:
    """A selection that is cancelled after so many turns."""
    engine = Sometimes(cases, most)
    work = asyncio.create_task(chosen(cases, directory, engine, **asked))
    engine.at_the_end = work.cancel
    with pytest.raises(asyncio.CancelledError):
        await work


def lines(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_jsonl(path)]


async def test_without_samples_all_tasks_are_kept_and_nothing_is_written(tmp_path: Path) -> None:
    found = await chosen({"one?": (0, 0), "two?": (9, 9)}, tmp_path)
    assert [task.id for task in found.tasks] == ["one?", "two?"] and not found.verdicts
    assert list(tmp_path.iterdir()) == []


async def test_what_needs_no_tool_is_always_solved_or_never_solved_is_left_out(
    tmp_path: Path,
) -> None:
    cases = {
        "known?": (ALWAYS, ALWAYS),
        "easy?": (0, ALWAYS),
        "worth it?": (0, 2),
        "also easy?": (1, ALWAYS),
        "hard?": (0, 0),
        "worth it, too?": (1, 3),
    }
    engine = Sometimes(cases)
    found = await chosen(cases, tmp_path, engine, no_tool_samples=4, samples=4, least=0.1)
    assert [task.id for task in found.tasks] == ["worth it?", "worth it, too?"]
    assert found.line == "6 tasks: 1 needs no tool, 2 always solved, 1 never solved, 2 kept"
    assert engine.seen["known?", True] == 0, "attempted with tools although it needs none"
    assert engine.seen["hard?", False] == engine.seen["hard?", True] == 4
    records = lines(tmp_path / "selection.jsonl")
    assert [record["task_id"] for record in records] == list(cases)
    assert records[0] == {
        "task_id": "known?",
        "no_tool_rate": 1.0,
        "no_tool_n": 4,
        "rate": None,
        "n": 0,
        "why": "needs_no_tool",
        "kept": False,
    }
    assert [record["why"] for record in records[1:]] == ["too_easy", "", "too_easy", "too_hard", ""]
    assert (records[5]["no_tool_rate"], records[5]["rate"], records[5]["kept"]) == (
        0.25,
        0.75,
        True,
    )


async def test_the_bounds_are_at_most_at_least_and_below(tmp_path: Path) -> None:
    cases = {f"{count} of ten?": (count, count) for count in range(11)}
    without = await chosen(cases, tmp_path / "a", no_tool_samples=10)
    assert len(without.tasks) == 4 and without.line == "11 tasks: 7 need no tool, 4 kept"
    between = await chosen(cases, tmp_path / "b", samples=10, least=0.2, most=0.8)
    assert [verdict.rate for verdict in between.verdicts if verdict.kept] == [
        count / 10 for count in range(2, 8)
    ]
    assert between.line == "11 tasks: 3 solved too often, 2 solved too rarely, 6 kept"


async def test_a_killed_selection_continues_and_a_finished_one_asks_nobody(tmp_path: Path) -> None:
    cases = {f"{count}?": (0, count) for count in range(1, 5)}
    asked: dict[str, Any] = {"no_tool_samples": 5, "samples": 5}
    for allowed in (7, 19):
        await interrupted(cases, tmp_path, allowed, **asked)
        assert not (tmp_path / "selection.jsonl").exists()
    done = sum(len(load_trajectories(path)) for path in tmp_path.glob("selection/*_tools.jsonl"))
    assert 0 < done < 40
    engine = Sometimes(cases)
    found = await chosen(cases, tmp_path, engine, **asked)
    assert sum(engine.seen.values()) == 40 - done
    other = Sometimes({})  # the weights have changed by now
    assert await chosen(cases, tmp_path, other, **asked) == found and not other.seen


async def test_a_judge_that_changes_its_mind_does_not_undo_what_was_decided(tmp_path: Path) -> None:
    cases = {"known?": (ALWAYS, 0), "unknown?": (0, 0)}
    await interrupted(cases, tmp_path, 5, no_tool_samples=2, samples=2)
    attempts = tmp_path / "selection" / "without_tools.jsonl"
    write_jsonl(attempts, [record | {"answer": "Rome"} for record in lines(attempts)])
    found = await chosen(cases, tmp_path, no_tool_samples=2, samples=2)
    assert [task.id for task in found.tasks] == ["unknown?"]


async def test_its_draws_are_neither_those_of_training_nor_the_same_twice(tmp_path: Path) -> None:
    cases = {"a?": (0, 1), "b?": (0, 1)}
    engine = Sometimes(cases)
    await chosen(cases, tmp_path, engine, no_tool_samples=3, samples=3)
    without, with_tools = engine.keys[False], engine.keys[True]
    assert len(without) == len(with_tools) == 6 and not without & with_tools
    files = [tmp_path / "selection" / f"{name}_tools.jsonl" for name in ("with", "without")]
    seeds = [{trajectory.seed for trajectory in load_trajectories(file)} for file in files]
    assert len({DECODING.seed, *seeds[0], *seeds[1]}) == 3
    trained = {
        sampling_key(DECODING.seed, question, sample, position)
        for question in cases
        for sample in range(3)
        for position in range(2000)
    }
    assert not trained & (without | with_tools)


class Broken(Sometimes):
    """Fails on some questions, as a server does that is being restarted."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        completion = await super().generate(prompt_ids, sampling, on_text)
        if self.seen["fails?", True] > 2 and "fails?" in self.decode(prompt_ids):
            raise EngineError("the connection was cut")
        return completion


async def test_what_the_environment_broke_is_no_failure_of_the_task(tmp_path: Path) -> None:
    cases = {"fails?": (0, 1), "works?": (0, 1)}
    found = await chosen(cases, tmp_path, Broken(cases), samples=6)
    first, second = found.verdicts
    assert (first.rate, first.n) == (0.5, 2)
    assert (second.rate, second.n) == (1 / 6, 6)


async def test_what_cannot_be_judged_is_left_out_and_counted(tmp_path: Path) -> None:
    cases = {"no gold?": (0, 0), "gold?": (0, 1)}
    tasks = [Task("no gold?", id="no gold?"), *tasks_of(cases)[1:]]
    found = await chosen(cases, tmp_path, tasks=tasks, samples=2)
    assert found.line == "2 tasks: 1 could not be judged, 1 kept"
    assert (found.verdicts[0].why, found.verdicts[0].n) == ("unjudged", 0)


@pytest.mark.parametrize(
    ("cases", "asked", "message"),
    [
        (
            {"a?": (ALWAYS, 0), "b?": (ALWAYS, 0)},
            {"no_tool_samples": 2},
            "select: none of 2 tasks is left to train on: 2 need no tool. "
            "Take tasks that need a tool, or raise select.no_tool_most.",
        ),
        (
            {"a?": (0, ALWAYS), "b?": (0, ALWAYS), "c?": (0, 0)},
            {"samples": 2, "least": 0.5},
            "select: none of 3 tasks is left to train on: 2 always solved, 1 never solved. "
            "Take harder tasks, or set select.samples to 0.",
        ),
        (
            {"a?": (0, 0)},
            {"samples": 4, "least": 0.5},
            "select: none of 1 tasks is left to train on: 1 solved too rarely. "
            "Take easier tasks, lower select.least, or train longer with coa sft first.",
        ),
    ],
)
async def test_nothing_left_is_one_line_with_advice(
    cases: Successes, asked: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for _ in range(2):  # the second time by what is known
        with pytest.raises(TrainingError) as failed:
            await chosen(cases, tmp_path, **asked)
        assert str(failed.value) == message


class Down(Sometimes):
    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        raise EngineError("nobody answers")


async def test_a_selection_in_which_everything_failed_can_be_repeated(tmp_path: Path) -> None:
    cases = {"a?": (0, 1)}
    with pytest.raises(TrainingError, match=r"1 could not be judged\. The attempts in .* say why"):
        await chosen(cases, tmp_path, Down(cases), samples=2)
    assert "nobody answers" in (tmp_path / "selection" / "with_tools.jsonl").read_text()
    found = await chosen(cases, tmp_path, samples=2)  # the same command, when it is up again
    assert len(found.tasks) == 1 and found.verdicts[0].n == 2


async def test_a_record_about_other_tasks_is_refused(tmp_path: Path) -> None:
    await chosen({"a?": (0, 1)}, tmp_path, samples=2)
    with pytest.raises(RecordError, match="is about other tasks than the 1 of this run"):
        await chosen({"b?": (0, 1)}, tmp_path, samples=2)


async def test_a_broken_record_is_one_line_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "selection.jsonl").write_text('{"task_id": "a?", "why": ""}\n')
    with pytest.raises(RecordError, match=r"selection\.jsonl:1: no field 'no_tool_rate'"):
        await chosen({"a?": (0, 1)}, tmp_path, samples=2)


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5),
    bounds=st.tuples(*[st.sampled_from([0.0, 0.25, 0.3, 0.5, 0.75, 1.0])] * 3),
)
def test_kept_is_what_the_rates_say_whatever_they_are(
    counts: list[tuple[int, int]], bounds: tuple[float, float, float]
) -> None:
    cases = {f"question {i}?": pair for i, pair in enumerate(counts)}
    no_tool_most, least, most = bounds
    assume(least < most)
    kept = [
        question
        for question, (without, with_tools) in cases.items()
        if without / 4 <= no_tool_most and least <= with_tools / 4 < most
    ]
    asked: dict[str, Any] = {"no_tool_samples": 4, "samples": 4, "no_tool_most": no_tool_most}
    with tempfile.TemporaryDirectory() as folder:
        work = chosen(cases, Path(folder), **asked, least=least, most=most)
        if kept:
            found = asyncio.run(work)
            assert [task.id for task in found.tasks] == kept
            numbers = [int(number) for number in re.findall(r"\d+", found.line)]
            assert numbers[0] == sum(numbers[1:]) == len(cases)
        else:
            with pytest.raises(TrainingError, match="is left to train on"):
                asyncio.run(work)


async def test_another_model_may_say_what_needs_no_tool(tmp_path: Path) -> None:
    script = tmp_path / "strong.jsonl"
    turns = [{"question": "known?", "turns": [RIGHT]}, {"question": "unknown?", "turns": [WRONG]}]
    script.write_text("".join(json.dumps(line) + "\n" for line in turns))
    cases = {"known?": (0, 0), "unknown?": (0, 0)}
    engine = Sometimes(cases)
    found = await chosen(
        cases, tmp_path / "run", engine, no_tool_samples=2, no_tool_engine=f"scripted:{script}"
    )
    assert [task.id for task in found.tasks] == ["unknown?"] and not engine.seen


async def test_without_tools_there_are_no_programs_either(tmp_path: Path) -> None:
    task = Task("2 + 2?", ("4",), meta={"set": "gym-code"})
    turn = "<plan>add</plan><think>it is 4</think><answer>4</answer>"
    engine = ScriptedEngine([turn])
    async with load_environment("gym-code").open([task], reward=EXACT) as opened:
        assert "code" in await opened.toolbox(task)
        with pytest.raises(TrainingError, match="1 needs no tool"):
            stream = TaskStream([task], seed=0)
            sampler = Sampler(stream, engine, opened, Budget(), DECODING, tmp_path, 2)
            chosen = SelectSettings(no_tool_samples=1)
            await select([task], chosen, sampler, tmp_path, "silent")
    assert "<code>" not in engine.calls[0].prompt


@dataclass(frozen=True)
class Together(Processes):
    """A process of several, all in this one: threads that meet."""

    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    table: dict[int, Any] = field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        self.table[self.index] = value
        self.meeting.wait(timeout=30)
        found = [self.table[i] for i in range(self.count)]
        self.meeting.wait(timeout=30)
        return found


def in_threads(count: int, work: Callable[[Together], Any]) -> list[Any]:
    meeting = threading.Barrier(count)
    table: dict[int, Any] = {}
    found: dict[int, Any] = {}

    def one(index: int) -> None:
        try:
            found[index] = work(Together(index, count, meeting, table))
        except BaseException as error:
            found[index] = error
            meeting.abort()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return [found[i] for i in range(count)]


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_attempt_their_shares_and_agree(count: int, tmp_path: Path) -> None:
    cases = {"a?": (ALWAYS, 0), "b?": (0, 1), "c?": (0, ALWAYS), "d?": (0, 2), "e?": (0, 1)}
    asked: dict[str, Any] = {"no_tool_samples": 3, "samples": 3}
    engines = [Sometimes(cases) for _ in range(count)]

    def work(process: Together) -> Selected:
        engine = engines[process.index]
        return asyncio.run(chosen(cases, tmp_path / "several", engine, processes=process, **asked))

    found = in_threads(count, work)
    alone = asyncio.run(chosen(cases, tmp_path / "one", **asked))
    assert all(each == alone for each in found), found
    together = sum((engine.seen for engine in engines), Counter())
    assert set(together.values()) == {3}, "somebody attempted what belongs to another"
    assert all(engine.seen for engine in engines)
    several, one = (tmp_path / name / "selection.jsonl" for name in ("several", "one"))
    assert several.read_bytes() == one.read_bytes()
    assert in_threads(count, work) == found, "the second time by what is known"


def test_settings_that_select_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"select\.samples: found -1, expected 0 or more"):
        SelectSettings(samples=-1)
    with pytest.raises(ConfigError, match=r"select\.no_tool_most: found 1\.5, expected between 0"):
        SelectSettings(no_tool_most=1.5)
    with pytest.raises(ConfigError, match=r"select\.least: found 0\.5 with select\.most 0\.5"):
        SelectSettings(least=0.5, most=0.5)
    with pytest.raises(ConfigError, match=r"select\.no_tool_engine: found .* nothing to do"):
        SelectSettings(no_tool_engine="openai:m@http://localhost:8000/v1")


def test_a_real_model_is_asked_and_the_same_again_gives_the_same_files(
    tiny_model: Path, tmp_path: Path
) -> None:
    tasks = [Task("Where is it?", ("Paris",)), Task("Who was it?", ("Ada",))]
    budget = Budget(turns=2, turn_tokens=8, context=256)

    async def once(directory: Path) -> Selected:
        engine = load_engine(
            f"hf:{tiny_model}", deterministic=True, slots=4, context=256, threads=1
        )
        asked: dict[str, Any] = {"no_tool_samples": 2, "samples": 2}
        try:
            return await chosen({}, directory, engine, tasks=tasks, budget=budget, **asked)
        finally:
            await engine.close()

    first, second = (asyncio.run(once(tmp_path / name)) for name in ("a", "b"))
    assert first == second and first.line == "2 tasks: 2 kept"
    assert [verdict.rate for verdict in first.verdicts] == [0.0, 0.0]
    for name in ("selection.jsonl", "selection/with_tools.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    trajectories = load_trajectories(tmp_path / "a" / "selection/with_tools.jsonl")
    assert len(trajectories) == 4 and trajectories[0].ids != trajectories[1].ids
